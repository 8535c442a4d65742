# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts by the trained model itself, with this package's samplers: every family, every way to shard."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..batching import left_padded
from ..samplers import Attention, Rollout, SamplingSettings, sample


class TransformersEngine:
    """
    Decodes with the model that is trained, so that there are no weights to move.

    Args:
        open_model (`Callable[[], AbstractContextManager]`):
            Opens the model for sampling. A collective where parameters are sharded.
        attention (`str`):
            Attention of the family: `"full"` or `"block"`.
        mask_token_id (`int`):
            Token that stands for "not yet decoded".
        end_token_ids (`Sequence[int]`):
            Tokens that end a completion.
        settings ([`SamplingSettings`]):
            How to decode.
        device (`torch.device`):
            Where the model's inputs are.
        any_rank (`Callable[[bool], bool]`, *optional*):
            Says whether a condition holds on any process, given whether it does here; None where there is only one.
    """

    def __init__(
        self,
        open_model: Callable[[], AbstractContextManager[Any]],
        *,
        attention: Attention,
        mask_token_id: int,
        end_token_ids: Sequence[int],
        settings: SamplingSettings,
        device: torch.device,
        any_rank: Callable[[bool], bool] | None,
    ) -> None:
        self.open_model = open_model
        self.attention: Attention = attention
        self.mask_token_id = mask_token_id
        self.end_token_ids = tuple(end_token_ids)
        self.settings = settings
        self.device = device
        self.any_rank = any_rank

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        *,
        row_seeds: Sequence[int],
        policy_version: object = None,
        progress: Callable[[int, int], None] | None = None,
        settings: SamplingSettings | None = None,
        record_confidence: bool = False,
    ) -> Rollout:
        """
        Decode one completion per prompt; see [`RolloutEngine`]. The weights are the model's, whatever their version.

        Args:
            prompt_ids (`Sequence[Sequence[int]]`):
                Token ids of this process's prompts; may be empty where other processes have some.
            row_seeds (`Sequence[int]`):
                Seed of each row's generator.
            policy_version (`object`, *optional*):
                Not needed: there are no weights to move.
            progress (`Callable[[int, int], None]`, *optional*):
                Called with the positions decided so far and in total.
            settings ([`SamplingSettings`], *optional*):
                How to decode this time.
            record_confidence (`bool`, *optional*, defaults to `False`):
                Whether to keep the confidence of each committed token.

        Returns:
            [`Rollout`]
        """
        padded, is_prompt = left_padded(prompt_ids, pad_token_id=self.mask_token_id)
        with self.open_model() as model:
            return sample(
                model,
                padded.to(self.device),
                is_prompt.to(self.device),
                mask_token_id=self.mask_token_id,
                end_token_ids=self.end_token_ids,
                settings=settings or self.settings,
                row_seeds=row_seeds,
                attention=self.attention,
                progress=progress,
                any_rank_active=self.any_rank,
                record_confidence=record_confidence,
            )
