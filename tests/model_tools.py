# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What tests of models share, and the two families with what their tests need to know of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM

from tests.naive_llada import naive_llada_logits
from tests.naive_sdar import naive_sdar_logits
from tests.tiny import (
    PUBLISHED_CONFIG,
    PUBLISHED_SDAR_CONFIG,
    TINY_SDAR_SIZES,
    TINY_SIZES,
    published_llada_folder,
    published_sdar_folder,
    published_sdar_tensors,
    published_tensors,
    tiny_llada,
    tiny_sdar,
)
from trl_stabledrl.models import FAMILIES, LLaDAConfig, LLaDAModelLM, SDARConfig, SDARForCausalLM

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class ModelCase:
    """A family as its tests see it."""

    name: str
    tiny: Callable[..., Any]
    folder: Callable[..., Path]
    config_class: type
    model_class: type
    config: dict[str, Any]
    """Fields of the checkpoint that `folder` writes."""
    tensors: Callable[[dict[str, Any]], dict[str, Tensor]]
    """Its tensors, of such fields."""
    naive_logits: Callable[..., Tensor]
    """Its logits, of tensors, fields and ids, by a definition that shares nothing with the package."""
    variants: tuple[dict[str, Any], ...]
    """Changes of the fields that change the tensors."""
    num_layers: str
    vocab_sizes: tuple[str, ...]
    """Names of these fields."""
    saved_beside: dict[str, Any]
    """Fields that a saved config has beside those of `folder`."""


LLADA = ModelCase(
    name="llada",
    tiny=tiny_llada,
    folder=published_llada_folder,
    config_class=LLaDAConfig,
    model_class=LLaDAModelLM,
    config=PUBLISHED_CONFIG | TINY_SIZES,
    tensors=published_tensors,
    naive_logits=naive_llada_logits,
    variants=({}, {"weight_tying": True}, {"n_kv_heads": 2, "n_layers": 12}),
    num_layers="n_layers",
    vocab_sizes=("vocab_size", "embedding_size"),
    saved_beside={"dtype": "float32"},
)
SDAR = ModelCase(
    name="sdar",
    tiny=tiny_sdar,
    folder=published_sdar_folder,
    config_class=SDARConfig,
    model_class=SDARForCausalLM,
    config=PUBLISHED_SDAR_CONFIG | TINY_SDAR_SIZES | {"block_size": 4},
    tensors=published_sdar_tensors,
    naive_logits=naive_sdar_logits,
    variants=({}, {"tie_word_embeddings": True}, {"num_key_value_heads": 4, "num_hidden_layers": 12}),
    num_layers="num_hidden_layers",
    vocab_sizes=("vocab_size",),
    saved_beside={"block_size": 4},
)
CASES = {case.name: case for case in (LLADA, SDAR)}


def load(path: str | Path, **kwargs: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, **kwargs)


def project(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden @ weight.T


def weights_on_disk(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal_tensors(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def is_some_selected(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.5


def any_mask(length: int) -> Tensor:
    """A 4-D mask without structure in which every query sees something."""
    may_attend = torch.rand(1, 1, length, length, generator=torch.Generator().manual_seed(2)) > 0.5
    return may_attend | torch.eye(length, dtype=torch.bool)


def with_adapter(model: nn.Module, **changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    settings = {"r": 2, "target_modules": LORA_TARGETS, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return peft.get_peft_model(model, peft.LoraConfig(**settings | changes))


@contextmanager
def restored_families() -> Iterator[None]:
    """Forget afterwards what was registered meanwhile, here and with the Auto classes."""
    mappings: list[Any] = [CONFIG_MAPPING, AutoModel._model_mapping, AutoModelForCausalLM._model_mapping]
    families, registered = list(FAMILIES), [dict(mapping._extra_content) for mapping in mappings]
    try:
        yield
    finally:
        FAMILIES[:] = families
        for mapping, content in zip(mappings, registered, strict=True):
            mapping._extra_content.clear()
            mapping._extra_content.update(content)
