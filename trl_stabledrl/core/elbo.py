# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Likelihood proxies from the log-probabilities of the scored tokens. Axis letters: see `core/__init__.py`."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def elbo_per_token_by_draw(logps: Float[Tensor, "B M W"], weight: Float[Tensor, "B M W"]) -> Float[Tensor, "B M"]:
    """
    Estimate the evidence lower bound from each Monte Carlo draw alone.

    Args:
        logps (`Float[Tensor, "B M W"]`):
            Log-probability of each scored token, in nats; ignored where the weight is zero.
        weight (`Float[Tensor, "B M W"]`):
            Weights of the [`MaskPlan`][trl_stabledrl.core.masking.MaskPlan].

    Returns:
        `Float[Tensor, "B M"]`:
            Nats per scored token of the completion; average over `M` for the estimate, and use the spread over `M` for
            its standard error.
    """
    return (weight * logps).sum(dim=-1)


def eubo_per_token(
    logps: Float[Tensor, "B M W"],
    inverse_probability: Float[Tensor, "B M W"],
    is_scored: Bool[Tensor, "B M W"],
    *,
    beta: float,
) -> Float[Tensor, " B"]:
    r"""
    Estimate the evidence upper bound of SPG (https://huggingface.co/papers/2510.09541), per token.

    `(1/beta) mean_j log( (1/M) sum_m v_mj p_mj^beta )` over the positions scored in at least one draw, by logsumexp
    over the draws: in probability space `p^beta` underflows at log p = -60 and its gradient is NaN.

    Args:
        logps (`Float[Tensor, "B M W"]`):
            Log-probability of each scored token, in nats.
        inverse_probability (`Float[Tensor, "B M W"]`):
            `v`: one over the probability of being masked where scored, zero elsewhere.
        is_scored (`Bool[Tensor, "B M W"]`):
            Tokens scored in each draw.
        beta (`float`):
            Order of the bound, at least 1.

    Returns:
        `Float[Tensor, "B"]`:
            Nats per token; 0 where nothing is scored.
    """
    if not beta >= 1.0:
        raise ValueError(f"eubo_beta={beta} must be at least 1: below it the expression is no upper bound.")
    num_draws = logps.shape[1]
    # -1e30, not -inf: logsumexp over draws that are all -inf has a NaN gradient
    log_odds = torch.where(is_scored, inverse_probability, 1.0).log()
    terms = torch.where(is_scored, log_odds + beta * logps, -1e30)
    by_position = terms.logsumexp(dim=1) / beta - torch.tensor(num_draws, dtype=terms.dtype).log() / beta  # (B, W)
    is_seen = is_scored.any(dim=1)
    return torch.where(is_seen, by_position, 0.0).sum(-1) / is_seen.sum(-1).clamp(min=1)


def sandwich(
    elbo_per_token: Float[Tensor, " B"], eubo_per_token: Float[Tensor, " B"], advantage: Float[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """
    Choose SPG's surrogate by the sign of the advantage: the lower bound where the likelihood is pushed up, the mean of
    lower and upper bound where it is pushed down.

    Args:
        elbo_per_token (`Float[Tensor, "B"]`):
            Evidence lower bound, nats per token.
        eubo_per_token (`Float[Tensor, "B"]`):
            Evidence upper bound, nats per token.
        advantage (`Float[Tensor, "B"]`):
            Advantage of each row.

    Returns:
        `Float[Tensor, "B"]`
    """
    return torch.where(advantage > 0, elbo_per_token, (elbo_per_token + eubo_per_token) / 2)
