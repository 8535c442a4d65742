# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
The objectives that StableDRL is compared with, in the one form that the trainer needs.

Every objective here has a gradient of the form

    grad loss = - (1 / prompts) sum_i w_i A_i grad s_i                   one score per completion
    grad loss = - (1 / prompts) sum_i sum_k w_ik A_i grad s_ik           one score per token ("token" objectives)

with `s` the row's differentiable score per token (or the token's log-probability) and with weights `w` that are
constants of the backward pass: the derivative of the objective with respect to the score, over `A_i`, at the values of
a pass without gradient. So all of them replay one Monte Carlo draw at a time, as StableDRL does, and need its memory.
Axis letters: see `core/__init__.py`; `G` is the nominal size of a group, its unscorable rows included.

A new objective is a function of weights here and a row of [`OBJECTIVES`].
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .masking import MaskLaw, McSampling
from .objective import self_normalized_weights

ObjectiveName = Literal[
    "stabledrl",
    "clip_only",
    "self_norm_only",
    "grpo",
    "espo",
    "spg",
    "diffu_grpo",
    "coupled_grpo",
    "wd1",
    "gdpo",
]


@dataclass(frozen=True)
class Rows:
    """
    What weights are computed from, over whole groups.

    Attributes:
        log_ratio (`Float[Tensor, "B"]`):
            Log-ratio of each completion in nats; NaN where a row cannot be scored, which then weighs nothing.
        advantage (`Float[Tensor, "B"]`):
            Advantage of each completion.
        group_index (`Int[Tensor, "B"]`):
            Prompt of each completion.
        completion_length (`Int[Tensor, "B"]`):
            Scored tokens of each completion.
        group_size (`int`):
            `G`.
    """

    log_ratio: Float[Tensor, " B"]
    advantage: Float[Tensor, " B"]
    group_index: Int[Tensor, " B"]
    completion_length: Int[Tensor, " B"]
    group_size: int


Clip = tuple[float, float]
"""Bounds of the log-ratio."""


def _scorable(rows: Rows, weight: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    return torch.where(rows.log_ratio.isfinite(), weight, 0.0)


def stabledrl_weights(rows: Rows, clip: Clip) -> Float[Tensor, " B"]:
    """`w_i = clip(rho_i) / sum_j clip(rho_j)` (https://huggingface.co/papers/2603.06743)."""
    return self_normalized_weights(rows.log_ratio, rows.group_index, log_clip_low=clip[0], log_clip_high=clip[1])


def self_norm_only_weights(rows: Rows, clip: Clip) -> Float[Tensor, " B"]:
    """`w_i = rho_i / sum_j rho_j`: StableDRL without its clip, an ablation of its paper."""
    return self_normalized_weights(rows.log_ratio, rows.group_index, log_clip_low=-math.inf, log_clip_high=math.inf)


def clip_only_weights(rows: Rows, clip: Clip) -> Float[Tensor, " B"]:
    """`w_i = clip(rho_i) / G`: StableDRL without its normalisation, an ablation of its paper."""
    return _scorable(rows, rows.log_ratio.float().clamp(*clip).exp() / rows.group_size)


def conditional_clip(
    log_ratio: Float[Tensor, "*B"], advantage: Float[Tensor, "*B"], clip: Clip
) -> Float[Tensor, "*B"]:
    """
    Derivative of `min(rho A, clip(rho) A)` by `log rho`, over `A` (PPO, https://huggingface.co/papers/1707.06347).

    It is `rho`, or zero where the clip holds: above it for positive advantages, below it for negative ones. On the
    other side nothing bounds `rho`. float32 ends at exp(88).
    """
    is_held = ((advantage > 0.0) & (log_ratio > clip[1])) | ((advantage < 0.0) & (log_ratio < clip[0]))
    return log_ratio.float().clamp(max=88.0).exp().masked_fill(is_held, 0.0)


def grpo_weights(rows: Rows, clip: Clip) -> Float[Tensor, " B"]:
    """
    `w_i = rho_i / G` under the conditional clip (GRPO, https://huggingface.co/papers/2402.03300, with the ratio of
    whole completions). Its score is per token, which is GRPO's division by the length.
    """
    return _scorable(rows, conditional_clip(rows.log_ratio, rows.advantage, clip) / rows.group_size)


def length_weights(rows: Rows, clip: Clip) -> Float[Tensor, " B"]:
    """
    `w_i = C_i / sum_j C_j` over the group, and no ratio: every token counts alike (SPG,
    https://huggingface.co/papers/2510.09541).
    """
    length = _scorable(rows, rows.completion_length.float())
    is_same_group = rows.group_index[:, None] == rows.group_index[None, :]
    return length / (is_same_group * length).sum(-1).clamp(min=1.0)


def unit_weights(rows: Rows, clip: Clip) -> Float[Tensor, " B"]:
    """`w_i = 1`, and no ratio: what weighs the rows is their advantage (wd1)."""
    return _scorable(rows, torch.ones_like(rows.log_ratio))


def token_weights(
    log_ratio: Float[Tensor, "B W"],
    advantage: Float[Tensor, " B"],
    is_scored: Bool[Tensor, "B W"],
    *,
    clip: Clip,
    group_size: int,
) -> Float[Tensor, "B W"]:
    """
    `w_ik = rho_ik / (G C_i)` under the conditional clip, with a ratio of each token (d1's diffu-GRPO,
    https://huggingface.co/papers/2504.12216, and coupled-GRPO, https://huggingface.co/papers/2506.20639).

    Args:
        log_ratio (`Float[Tensor, "B W"]`):
            Log-ratio of each token in nats.
        advantage (`Float[Tensor, "B"]`):
            Advantage of each completion.
        is_scored (`Bool[Tensor, "B W"]`):
            Tokens with a ratio.
        clip (`tuple[float, float]`):
            Bounds of the log-ratio.
        group_size (`int`):
            `G`.

    Returns:
        `Float[Tensor, "B W"]`:
            Zero where a token is not scored.
    """
    weight = conditional_clip(log_ratio, advantage[:, None].expand_as(log_ratio), clip)
    num_scored = is_scored.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(is_scored, weight, 0.0) / (group_size * num_scored)


def leave_one_out(advantage: Float[Tensor, " B"], group_index: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """
    Make the baseline the mean of the others (RLOO): `r_i - mean_{j != i} r_j = (r_i - mean r) G / (G - 1)`.

    Args:
        advantage (`Float[Tensor, "B"]`):
            Rewards less their group's mean, over whole groups.
        group_index (`Int[Tensor, "B"]`):
            Prompt of each row.

    Returns:
        `Float[Tensor, "B"]`
    """
    size = (group_index[:, None] == group_index[None, :]).sum(-1)
    return advantage * size / (size - 1).clamp(min=1)


def wd1_advantage(advantage: Float[Tensor, " B"], group_index: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """
    `softmax_i(A) - softmax_i(-A)` over the group: good completions are imitated, bad ones unlearnt (wd1,
    https://huggingface.co/papers/2507.08838, at temperature 1 and without its reference policy).

    Args:
        advantage (`Float[Tensor, "B"]`):
            Rewards less their group's mean, over whole groups.
        group_index (`Int[Tensor, "B"]`):
            Prompt of each row.

    Returns:
        `Float[Tensor, "B"]`
    """
    is_same_group = group_index[:, None] == group_index[None, :]

    def share(value: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        by_group = value.expand(len(value), -1).masked_fill(~is_same_group, -torch.inf)
        return (value - by_group.logsumexp(-1)).exp()

    return share(advantage) - share(-advantage)


@dataclass(frozen=True)
class Objective:
    """
    What the trainer has to know of an objective.

    Attributes:
        weights (`Callable`):
            Weights of whole groups; of the rows alone with `level="token"`, where it is not used.
        level (`str`, defaults to `"sequence"`):
            Whether there is one ratio per completion or one per token.
        uses_ratio (`bool`, defaults to `True`):
            Whether scores of the old policy are needed.
        epsilon (`float`, *optional*):
            Default half-width of the clip; None where nothing is clipped.
        advantage (`Callable`, *optional*):
            Replaces the advantage, over whole groups.
        mask_laws (`tuple[str, ...]`, *optional*):
            The only laws under which it is what its name says.
        mc_sampling (`str`, *optional*):
            Likewise.
        kl_estimator (`str`, defaults to `"k3"`):
            Default under `beta > 0`.
    """

    weights: Callable[[Rows, Clip], Tensor]
    level: Literal["sequence", "token"] = "sequence"
    uses_ratio: bool = True
    epsilon: float | None = 0.2
    advantage: Callable[[Tensor, Tensor], Tensor] | None = None
    mask_laws: tuple[MaskLaw, ...] | None = None
    mc_sampling: McSampling | None = None
    kl_estimator: Literal["k2", "k3"] = "k3"


OBJECTIVES: dict[str, Objective] = {
    "stabledrl": Objective(stabledrl_weights, epsilon=5.0),
    "clip_only": Objective(clip_only_weights, epsilon=5.0),
    "self_norm_only": Objective(self_norm_only_weights, epsilon=None),
    "grpo": Objective(grpo_weights),
    "espo": Objective(grpo_weights, advantage=leave_one_out, kl_estimator="k2"),
    "spg": Objective(length_weights, uses_ratio=False, epsilon=None),
    "diffu_grpo": Objective(grpo_weights, level="token", mask_laws=("full",)),
    "coupled_grpo": Objective(grpo_weights, level="token", mask_laws=("uniform",), mc_sampling="complementary"),
    "wd1": Objective(unit_weights, uses_ratio=False, epsilon=None, advantage=wd1_advantage),
    "gdpo": Objective(grpo_weights, mask_laws=("uniform",), mc_sampling="quadrature"),
}
