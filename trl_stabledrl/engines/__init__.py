# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Rollout engines: what turns prompts into completions of the current policy, while it trains."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ..samplers import Rollout
from .transformers import TransformersEngine

Progress = Callable[[int, int], None]


class RolloutEngine(Protocol):
    """
    What [`StableDRLTrainer`] asks of an engine.

    Every process calls `generate` equally often, with its own prompts: an engine may work with the other processes.
    Completions are given in the order of the prompts. Whatever goes wrong raises, on every process.
    """

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        *,
        row_seeds: Sequence[int],
        policy_version: object = None,
        progress: Progress | None = None,
    ) -> Rollout:
        """
        Decode one completion per prompt with the current weights.

        Args:
            prompt_ids (`Sequence[Sequence[int]]`):
                Token ids of this process's prompts, at least one.
            row_seeds (`Sequence[int]`):
                Seed of each row's noise, of which alone, beside prompt and weights, its completion is a function.
            policy_version (`object`, *optional*):
                Equal to that of the call before where the weights are the same; None where that is not known.
            progress (`Callable[[int, int], None]`, *optional*):
                Called as decoding goes on with the positions decided so far and in total.

        Returns:
            [`Rollout`]
        """
        ...


__all__ = ["Progress", "RolloutEngine", "TransformersEngine"]
