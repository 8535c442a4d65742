# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Models: importing this package makes transformers' Auto classes load the families it knows."""

from importlib import import_module
from pkgutil import iter_modules

from .bidirectional import BlockDiffusionMixin, SelectedPositionsMixin
from .cache import FrozenCache
from .families import (
    FAMILIES,
    Family,
    check_vocabulary,
    end_token_ids_of,
    family_of,
    mask_token_id_of,
    register_family,
)
from .llada import LLaDAConfig, LLaDAModelLM
from .sdar import SDARConfig, SDARForCausalLM

# a further family is one more file of this folder, which registers itself: docs/extending.md
for _module in iter_modules(__path__):
    import_module(f".{_module.name}", __name__)

__all__ = [
    "BlockDiffusionMixin",
    "FAMILIES",
    "Family",
    "FrozenCache",
    "LLaDAConfig",
    "LLaDAModelLM",
    "SDARConfig",
    "SDARForCausalLM",
    "SelectedPositionsMixin",
    "check_vocabulary",
    "end_token_ids_of",
    "family_of",
    "mask_token_id_of",
    "register_family",
]
