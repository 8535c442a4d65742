# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What scores are worth is what is known of where they come from: hashes of the weights, versions, device."""

import hashlib
import json
import platform
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor

_VERSIONS = ("trl-stabledrl", "torch", "transformers", "accelerate", "datasets", "numpy", "peft", "math-verify")


def environment_of(model: Any) -> dict[str, Any]:
    """
    Hashes of the weights, and what they run on.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The model.

    Returns:
        `dict`
    """
    model_hash, adapter_hash = weight_hashes(model)
    device = model.device
    versions = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "model_hash": model_hash,
        "adapter_hash": adapter_hash,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attn_implementation": model.config._attn_implementation,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": versions,
    }


def weight_hashes(model: Any) -> tuple[str, str | None]:
    """
    SHA-256 of the names, types, shapes and bytes of the parameters: of the model, and of the adapter on it.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The model. With an adapter its hash is that of the base model alone.

    Returns:
        `tuple[str, str or None]`
    """
    if not is_peft_model(model):
        return _tensor_hash(model.named_parameters()), None
    from peft import get_peft_model_state_dict

    adapter = get_peft_model_state_dict(model, save_embedding_layers=False)
    of_adapter = {tensor.data_ptr() for tensor in adapter.values()}
    base = [
        (_name_in_base(name), tensor)
        for name, tensor in model.named_parameters()
        if tensor.data_ptr() not in of_adapter
    ]
    return _tensor_hash(base), _tensor_hash(adapter.items())


def _name_in_base(name: str) -> str:
    for wrapped, plain in (("base_model.model.", ""), (".base_layer", ""), (".original_module", "")):
        name = name.replace(wrapped, plain)
    return name


def _tensor_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def hash_of(value: Any) -> str:
    """SHA-256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
