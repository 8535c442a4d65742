# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
The StableDRL objective (https://huggingface.co/papers/2603.06743): ratios clipped unconditionally, weights normalised
by their own sum over the prompt's group.

    w_i  = clip(exp(L_new(y_i|x) - L_old(y_i|x)), 1 - eps, 1 + eps)      detached
    loss = - sum_i (w_i / sum_j w_j) A_i s(y_i|x)                        both sums over one prompt; mean over prompts

The weights are constants of the backward pass, so the loss is linear in the surrogates `s`: rows and Monte Carlo draws
can be replayed one at a time. Axis letters: see `core/__init__.py`.
"""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

ClipMode = Literal["both", "upper"]
RatioNormalization = Literal["token", "sequence"]
KlEstimator = Literal["k2", "k3"]


def log_clip_bounds(*, epsilon: float, clip_mode: ClipMode, ratio_cap: float) -> tuple[float, float]:
    """
    Turn the clip options into bounds on the log-ratio.

    Args:
        epsilon (`float`):
            Half-width of the clip range around 1. At 1 and above the lower bound never binds.
        clip_mode (`str`):
            `"both"`: keep ratios in `[1 - epsilon, 1 + epsilon]`. `"upper"`: cap them at `ratio_cap`, with no lower
            bound, as the released code does.
        ratio_cap (`float`):
            Largest ratio under `clip_mode="upper"`, above 1.

    Returns:
        `tuple[float, float]`:
            Lower (possibly `-inf`) and upper bound of the log-ratio.
    """
    if clip_mode == "upper":
        if not ratio_cap > 1.0:
            raise ValueError(f"ratio_cap={ratio_cap} must be above 1: on policy every ratio is 1. The default is 5.0.")
        return -math.inf, math.log(ratio_cap)
    if clip_mode != "both":
        raise ValueError(f"clip_mode={clip_mode!r} is not known. Use 'both' or 'upper'.")
    if not epsilon > 0.0:
        raise ValueError(f"epsilon={epsilon} must be above 0: ratios are kept in [1 - epsilon, 1 + epsilon].")
    return math.log1p(-epsilon) if epsilon < 1.0 else -math.inf, math.log1p(epsilon)


def log_ratio(
    new_elbo_per_token: Float[Tensor, " B"],
    old_elbo_per_token: Float[Tensor, " B"],
    completion_length: Int[Tensor, " B"],
    *,
    normalization: RatioNormalization,
) -> Float[Tensor, " B"]:
    """
    Estimate `log p_new(y|x) - log p_old(y|x)` of each completion, as a difference of log scores.

    Args:
        new_elbo_per_token (`Float[Tensor, "B"]`):
            Score under the current policy, nats per token.
        old_elbo_per_token (`Float[Tensor, "B"]`):
            Score under the policy that sampled the completion, nats per token.
        completion_length (`Int[Tensor, "B"]`):
            Scored tokens of each row.
        normalization (`str`):
            `"token"`: the difference per token, as released. `"sequence"`: of the summed scores.

    Returns:
        `Float[Tensor, "B"]`:
            Log-ratio in nats (per token under `"token"`).
    """
    difference = new_elbo_per_token - old_elbo_per_token
    return difference * completion_length if normalization == "sequence" else difference


def self_normalized_weights(
    log_ratio: Float[Tensor, " B"], group_index: Int[Tensor, " B"], *, log_clip_low: float, log_clip_high: float
) -> Float[Tensor, " B"]:
    r"""
    Weigh each completion by its clipped ratio, as a share of its group's total.

    The clip is unconditional: it ignores the sign of the advantage, so estimation noise has no branch through which to
    escape it. Within a group no weight exceeds another by more than `exp(log_clip_high - log_clip_low)`, and since the
    weights sum to one the update of a prompt is at most `max_i |A_i| ||grad s_i||`.

    Args:
        log_ratio (`Float[Tensor, "B"]`):
            Estimated `log p_new(y|x) - log p_old(y|x)` of each completion, in nats. Non-finite rows get weight zero.
        group_index (`Int[Tensor, "B"]`):
            Prompt each completion answers, in any order. Only the members present are normalised over.
        log_clip_low (`float`):
            Log of the smallest ratio kept; `-inf` where epsilon >= 1.
        log_clip_high (`float`):
            Log of the largest ratio kept.

    Returns:
        `Float[Tensor, "B"]`:
            Detached float32 weights that sum to one in each group, or to zero where no row of it is finite.
    """
    if not log_clip_low < 0.0 < log_clip_high:
        raise ValueError(
            f"Expected log_clip_low < 0 < log_clip_high, got {log_clip_low} and {log_clip_high}. "
            "Both are logs of ratios: for epsilon=5 pass -inf and log(6)."
        )
    # float32: bfloat16 has 8 bits of mantissa, coarser than the clip interval
    value = log_ratio.detach().float()
    is_finite = value.isfinite()
    clipped = value.clamp(log_clip_low, log_clip_high).masked_fill(~is_finite, -torch.inf)
    is_same_group = group_index[:, None] == group_index[None, :]  # (B, B)
    by_group = clipped.expand(len(clipped), -1).masked_fill(~is_same_group, -torch.inf)  # row i: its own group
    # less the maximum: exp(-107) alone would underflow, and a logsumexp near -1e4 is rounded to the nearest 1e-3
    top = by_group.amax(dim=-1)
    top = top.masked_fill(top.isinf(), 0.0)  # no row of the group is finite
    total = (by_group - top[:, None]).exp().sum(dim=-1).clamp(min=1.0)  # the maximum alone gives 1
    return (clipped - top).exp() / total


def as_shares(weight: Float[Tensor, " B"], group_index: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """
    Scale weights to a sum of one in each group, for the metrics of objectives that do not normalise them.

    Args:
        weight (`Float[Tensor, "B"]`):
            Weights, none negative, over whole groups.
        group_index (`Int[Tensor, "B"]`):
            Prompt of each row.

    Returns:
        `Float[Tensor, "B"]`:
            Zero in a group without weight.
    """
    is_same_group = group_index[:, None] == group_index[None, :]
    total = (is_same_group * weight).sum(-1)
    return weight / torch.where(total > 0.0, total, 1.0)


def without_rounding(advantage: Float[Tensor, " B"], group_index: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """
    Set the advantages of a group to exactly zero where its rewards are all equal.

    A mean of n equal numbers need not be that number in float32 (seven times 0.7), and `scale_rewards` divides what is
    left by 1e-4. Equal rewards leave equal advantages, which sum to zero only if they are zero; rows without a reward
    have an advantage of exactly zero already and do not count.

    Args:
        advantage (`Float[Tensor, "B"]`):
            Rewards less their group's mean, over whole groups.
        group_index (`Int[Tensor, "B"]`):
            Prompt of each row, in any order.

    Returns:
        `Float[Tensor, "B"]`
    """
    counts = (group_index[:, None] == group_index[None, :]) & (advantage != 0.0)[None, :]  # (B, B)
    by_group = advantage.expand(len(advantage), -1)
    highest = by_group.masked_fill(~counts, -torch.inf).amax(dim=-1)
    lowest = by_group.masked_fill(~counts, torch.inf).amin(dim=-1)
    return advantage.masked_fill(highest == lowest, 0.0)


def policy_loss(
    surrogate: Float[Tensor, " B"],
    weight: Float[Tensor, " B"],
    advantage: Float[Tensor, " B"],
    *,
    num_prompts: float,
) -> Float[Tensor, ""]:
    """
    Sum the weighted surrogates over the rows at hand and divide by the number of prompts of the whole update.

    Args:
        surrogate (`Float[Tensor, "B"]`):
            Differentiable proxy of `log p(y|x)`, nats per token.
        weight (`Float[Tensor, "B"]`):
            Output of [`self_normalized_weights`], computed over whole groups.
        advantage (`Float[Tensor, "B"]`):
            Advantage of each row.
        num_prompts (`float`):
            Prompts in the update as seen from this process: local rows / group size x accumulation steps. Averaging
            over processes makes it the global number.

    Returns:
        `Float[Tensor, ""]`
    """
    return -(weight * advantage * surrogate).sum() / num_prompts


def kl_estimate(
    elbo_difference: Float[Tensor, " B"], *, estimator: KlEstimator
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """
    Estimate the divergence from the reference and its derivative with respect to the policy's score.

    With `d = reference - policy` under the same masks: `k2 = d^2 / 2` and `k3 = exp(d) - 1 - d` (Schulman, 2020).
    Neither is linear in the policy's score, so its derivative at the current value is returned as a constant with
    which the draws can be replayed one at a time.

    Args:
        elbo_difference (`Float[Tensor, "B"]`):
            `d`: reference `elbo_per_token` minus the policy's, nats per token. Taken as a constant.
        estimator (`str`):
            `"k2"` or `"k3"`.

    Returns:
        `tuple[Float[Tensor, "B"], Float[Tensor, "B"]]`:
            Value and derivative with respect to the policy's `elbo_per_token`, both detached.
    """
    difference = elbo_difference.detach()
    if estimator == "k2":
        return difference.square() / 2, -difference
    if estimator == "k3":
        return difference.expm1() - difference, -difference.expm1()
    raise ValueError(f"kl_estimator={estimator!r} is not known. Use 'k2' or 'k3'.")


def weight_metrics(
    log_ratio: Float[Tensor, " B"],
    weight: Float[Tensor, " B"],
    group_index: Int[Tensor, " B"],
    *,
    log_clip_low: float,
    log_clip_high: float,
) -> dict[str, Float[Tensor, ""]]:
    """
    Describe ratios and weights, over the rows of an optimizer step from every process.

    Args:
        log_ratio (`Float[Tensor, "B"]`):
            Unclipped log-ratios; non-finite rows are counted and left out.
        weight (`Float[Tensor, "B"]`):
            Their self-normalised weights.
        group_index (`Int[Tensor, "B"]`):
            Prompt of each row.
        log_clip_low (`float`):
            Lower bound of the log-ratio.
        log_clip_high (`float`):
            Upper bound of the log-ratio.

    Returns:
        `dict[str, Float[Tensor, ""]]`:
            0-dimensional float64 tensors: `ratio/{mean,median,p99,max}`, `log_ratio/{std,std_centred}`, `drift` (mean
            absolute log-ratio), `clip_ratio/{low,high}`, `weights/{ess,max,saturated}` (`ess` as a share of the
            group), `unscorable` (rows without a finite ratio). NaN where no row is finite.
    """
    is_finite = log_ratio.isfinite()
    num_finite = is_finite.sum()
    value = log_ratio.double()
    kept = torch.where(is_finite, value, torch.nan)
    # exp(709) is the largest float64; a ratio beyond it is reported as that
    ratio = kept.clamp(max=700.0).exp()
    is_same_group = (group_index[:, None] == group_index[None, :]) & is_finite[None, :]  # (B, B)
    group_size = is_same_group.sum(-1).clamp(min=1)
    group_mean = torch.where(is_same_group, value[None, :], 0.0).sum(-1) / group_size
    sum_squares = torch.where(is_same_group, weight.double().square()[None, :], 0.0).sum(-1)
    # every row counts its group once, so each group is weighed by one over its finite rows
    per_group = torch.where(is_finite, 1.0 / group_size, 0.0)
    has_weight = sum_squares > 0.0  # an objective may hold every row of a group
    share_of_group = torch.where(has_weight, 1.0 / torch.where(has_weight, sum_squares * group_size, 1.0), 0.0)
    ess = (per_group * share_of_group).sum() / (per_group * has_weight).sum()

    def share(condition: Bool[Tensor, " B"]) -> Float[Tensor, ""]:
        return (condition & is_finite).sum().double() / num_finite

    def std(values: Float[Tensor, " B"]) -> Float[Tensor, ""]:
        return (values - values.nanmean()).square().nanmean().sqrt()

    return {
        "ratio/mean": ratio.nanmean(),
        "ratio/median": ratio.nanmedian(),
        "ratio/p99": ratio.nanquantile(0.99),
        "ratio/max": torch.where(num_finite > 0, torch.where(is_finite, ratio, -torch.inf).max(), torch.nan),
        "log_ratio/std": std(kept),
        "log_ratio/std_centred": std(kept - group_mean),
        "drift": kept.abs().nanmean(),
        "clip_ratio/low": share(value < log_clip_low),
        "clip_ratio/high": share(value > log_clip_high),
        "weights/ess": ess,
        "weights/max": torch.where(num_finite > 0, weight.double().max(), torch.nan),
        "weights/saturated": share(value >= log_clip_high),
        "unscorable": (~is_finite).sum().double(),
    }


def update_shares(weight: Float[Tensor, " B"], advantage: Float[Tensor, " B"]) -> dict[str, Float[Tensor, ""]]:
    """
    Say who an update is made of: a collapse shows as an update that unlearns few bad completions.

    Args:
        weight (`Float[Tensor, "B"]`):
            Weight of each row of an optimizer step, from every process.
        advantage (`Float[Tensor, "B"]`):
            Its advantage.

    Returns:
        `dict[str, Float[Tensor, ""]]`:
            0-dimensional float64 tensors: `update/negative_share` (of `sum |w A|`, what rows with negative advantages
            hold) and `update/max_share` (what one row holds). NaN where no row moves anything.
    """
    pull = (weight * advantage).double().abs()
    total = torch.where(pull.sum() > 0.0, pull.sum(), torch.nan)
    return {
        "update/negative_share": torch.where(advantage < 0.0, pull, 0.0).sum() / total,
        "update/max_share": pull.max() / total,
    }
