# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts: token ids in, token ids and trajectories out."""

from collections.abc import Callable, Sequence

from torch import Tensor

from .block import sample_block
from .common import Attention, Rollout, SamplingSettings, SuppressEos, check_decoding, validate_trajectory
from .full import sample_full


def sample(
    model: Callable[..., tuple[Tensor, Tensor]],
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    *,
    mask_token_id: int,
    end_token_ids: Sequence[int],
    settings: SamplingSettings,
    row_seeds: Sequence[int],
    attention: Attention,
    progress: Callable[[int, int], None] | None = None,
    any_rank_active: Callable[[bool], bool] | None = None,
    record_confidence: bool = False,
) -> Rollout:
    """
    Decode one completion per row with the sampler of a model's attention.

    Args:
        model (`Callable`):
            Model whose attention is `attention`.
        prompt_ids (`torch.Tensor`):
            `(B, P)` left-padded prompts.
        prompt_mask (`torch.Tensor`):
            `(B, P)` true on real prompt tokens.
        mask_token_id (`int`):
            Token that stands for "not yet decoded".
        end_token_ids (`Sequence[int]`):
            Tokens that end a completion.
        settings ([`SamplingSettings`]):
            How to decode.
        row_seeds (`Sequence[int]`):
            Seed of each row's own generator.
        attention (`str`):
            `"full"` for [`sample_full`] (LLaDA), `"block"` for [`sample_block`] (SDAR).
        progress (`Callable[[int, int], None]`, *optional*):
            Called after each step with the positions decided so far and in total.
        any_rank_active (`Callable[[bool], bool]`, *optional*):
            Says whether any rank has rows left, given whether this one has.
        record_confidence (`bool`, *optional*, defaults to `False`):
            Whether to keep the confidence of each committed token.

    Returns:
        [`Rollout`]: Completions, trajectory and counters.
    """
    check_decoding(settings, attention=attention)
    return (sample_block if attention == "block" else sample_full)(
        model,
        prompt_ids,
        prompt_mask,
        mask_token_id=mask_token_id,
        end_token_ids=end_token_ids,
        settings=settings,
        row_seeds=row_seeds,
        progress=progress,
        any_rank_active=any_rank_active,
        record_confidence=record_confidence,
    )


__all__ = [
    "Attention",
    "Rollout",
    "SamplingSettings",
    "SuppressEos",
    "check_decoding",
    "sample",
    "sample_block",
    "sample_full",
    "validate_trajectory",
]
