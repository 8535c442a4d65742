# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""SDAR's forward written out in plain torch and float64, one row at a time, on tensors with the published names."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.naive_llada import rms_norm, rotated


def naive_sdar_logits(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    input_ids: Tensor,
    *,
    position_ids: Tensor | None = None,
    may_attend: Tensor | None = None,
) -> Tensor:
    """
    Return the (S, V) logits of one row of ids (S,).

    A token sees its own block of `config["block_size"]` positions and those before it, unless `may_attend` (S, S) says
    otherwise.
    """
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    length, size, eps = len(input_ids), config["head_dim"], config["rms_norm_eps"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    position_ids = torch.arange(length) if position_ids is None else position_ids
    if may_attend is None:
        block = config["block_size"]
        may_attend = torch.tensor([[k // block <= q // block for k in range(length)] for q in range(length)])
    x = weights["model.embed_tokens.weight"][input_ids]  # (S, D)
    for i in range(config["num_hidden_layers"]):

        def linear(h: Tensor, name: str, layer: str = f"model.layers.{i}") -> Tensor:
            return h @ weights[f"{layer}.{name}.weight"].T

        def norm(h: Tensor, name: str, layer: str = f"model.layers.{i}") -> Tensor:
            return rms_norm(h, weights[f"{layer}.{name}.weight"], eps)

        h = norm(x, "input_layernorm")
        # one norm for all heads, over the head's own numbers; (heads, S, size)
        q = norm(linear(h, "self_attn.q_proj").view(length, num_heads, size), "self_attn.q_norm").transpose(0, 1)
        k = norm(linear(h, "self_attn.k_proj").view(length, num_kv_heads, size), "self_attn.k_norm").transpose(0, 1)
        v = linear(h, "self_attn.v_proj").view(length, num_kv_heads, size).transpose(0, 1)
        q, k = (rotated(part, position_ids, config["rope_theta"]) for part in (q, k))
        attended = []
        for head in range(num_heads):
            shared = head * num_kv_heads // num_heads
            scores = q[head] @ k[shared].T / math.sqrt(size)
            attended.append(scores.masked_fill(~may_attend, -math.inf).softmax(dim=-1) @ v[shared])
        x = x + linear(torch.cat(attended, dim=-1), "self_attn.o_proj")
        h = norm(x, "post_attention_layernorm")
        gate = linear(h, "mlp.gate_proj")
        x = x + linear(gate * torch.sigmoid(gate) * linear(h, "mlp.up_proj"), "mlp.down_proj")
    x = rms_norm(x, weights["model.norm.weight"], eps)
    return x @ weights["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T
