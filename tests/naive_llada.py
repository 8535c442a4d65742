# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""LLaDA's forward written out in plain torch and float64, one row at a time, on tensors with the published names."""

import math
from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, position_ids: Tensor, theta: float) -> Tensor:
    """Rotate the pair (i, i + half) of each head by position * theta^(-2i / size)."""
    half = x.shape[-1] // 2
    angle = position_ids.double()[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)  # (S, half)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], dim=-1)


def naive_llada_logits(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    input_ids: Tensor,
    *,
    position_ids: Tensor | None = None,
    may_attend: Tensor | None = None,
) -> Tensor:
    """Return the (S, V) logits of one row of ids (S,); `may_attend` (S, S) is all true where absent."""
    weights = {name.removeprefix("model.transformer."): tensor.double() for name, tensor in tensors.items()}
    length, num_heads = len(input_ids), config["n_heads"]
    num_kv_heads = config["n_kv_heads"] or num_heads
    head_size = config["d_model"] // num_heads
    if position_ids is None:
        position_ids = torch.arange(length)
    if may_attend is None:
        may_attend = torch.ones(length, length, dtype=torch.bool)
    x = weights["wte.weight"][input_ids]  # (S, D)
    for i in range(config["n_layers"]):
        layer = {
            name.removeprefix(f"blocks.{i}."): w for name, w in weights.items() if name.startswith(f"blocks.{i}.")
        }
        h = rms_norm(x, layer["attn_norm.weight"], config["rms_norm_eps"])
        q = (h @ layer["q_proj.weight"].T).view(length, num_heads, head_size).transpose(0, 1)  # (heads, S, size)
        k = (h @ layer["k_proj.weight"].T).view(length, num_kv_heads, head_size).transpose(0, 1)
        v = (h @ layer["v_proj.weight"].T).view(length, num_kv_heads, head_size).transpose(0, 1)
        q = rotated(q, position_ids, config["rope_theta"])
        k = rotated(k, position_ids, config["rope_theta"])
        attended = []
        for head in range(num_heads):
            shared = head * num_kv_heads // num_heads
            scores = q[head] @ k[shared].T / math.sqrt(head_size)
            attended.append(scores.masked_fill(~may_attend, -math.inf).softmax(dim=-1) @ v[shared])
        x = x + torch.cat(attended, dim=-1) @ layer["attn_out.weight"].T
        h = rms_norm(x, layer["ff_norm.weight"], config["rms_norm_eps"])
        gate = h @ layer["ff_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ layer["up_proj.weight"].T)) @ layer["ff_out.weight"].T
    x = rms_norm(x, weights["ln_f.weight"], config["rms_norm_eps"])
    head_name = "wte.weight" if config["weight_tying"] else "ff_out.weight"
    return x @ weights[head_name].T
