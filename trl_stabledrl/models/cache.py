# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""A key/value cache that is read and never written."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer


class FrozenCache(Cache):
    r"""
    The keys and values of another cache, detached, in front of those of the text that reads them.

    Nothing is stored, so that a forward can be repeated: by several texts after one context, and by gradient
    checkpointing, whose replay would append to any other cache a second time.

    Args:
        cache ([`~transformers.Cache`]):
            Cache of growing layers, such as a [`~transformers.DynamicCache`], of the context. Later changes to it do
            not show here.
    """

    def __init__(self, cache: Cache):
        super().__init__(layers=[_FrozenLayer(layer) for layer in cache.layers])


class _FrozenLayer(DynamicLayer):
    def __init__(self, source: Any):
        super().__init__()
        # other kinds drop tokens, or hold room for more than they have
        if type(source) not in (DynamicLayer, _FrozenLayer):
            raise ValueError(
                f"The cache has a {type(source).__name__}, which holds other positions than those it has seen. Freeze "
                "a DynamicCache of full-attention layers."
            )
        if not source.is_initialized:
            raise ValueError("The cache is empty. Run the context through the model before freezing its cache.")
        self.lazy_initialization(source.keys, source.values)
        self.keys, self.values = source.keys.detach(), source.values.detach()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)
