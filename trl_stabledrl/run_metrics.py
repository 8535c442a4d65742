# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What a run logs besides TRL's metrics and those of the weights: seconds per phase, rollouts, scores, groups."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerCallback

from .batching import gathered, summed
from .samplers import Rollout


class PhaseClock:
    """Adds up seconds per phase, between two logs."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.last_step = 0

    @contextmanager
    def measure(self, phase: str, *, inner: Sequence[str] = ()) -> Iterator[None]:
        """Add the time spent inside the context to `phase`, less what went to the `inner` phases meanwhile."""
        start, spent = time.perf_counter(), self._total(inner)
        yield
        self.seconds[phase] += time.perf_counter() - start - (self._total(inner) - spent)

    def _total(self, phases: Sequence[str]) -> float:
        return sum(self.seconds[phase] for phase in phases)

    def flush(self, step: int) -> dict[str, float]:
        """Mean seconds per optimizer step since the last flush; nothing before a step is done."""
        num_steps = step - self.last_step
        if num_steps <= 0:
            return {}
        means = {f"seconds/{phase}": seconds / num_steps for phase, seconds in self.seconds.items()}
        self.seconds.clear()
        self.last_step = step
        return means


class OptimizerTimer(TrainerCallback):
    """Measures the optimizer step, which the trainer's own methods do not see."""

    def __init__(self, clock: PhaseClock) -> None:
        self.clock = clock
        self.start = 0.0

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.clock.seconds["optimizer"] += time.perf_counter() - self.start


def rollout_metrics(
    accelerator: Accelerator,
    rollout: Rollout,
    prompt_ids: Sequence[Sequence[int]],
    *,
    end_token_ids: Sequence[int],
    seconds: float,
) -> dict[str, float]:
    """
    Describe a rollout over every process: completion tokens up to the end token per second, tokens committed per
    denoising step of a row, share of distinct completions, share without an end token.
    """
    pairs = zip(prompt_ids, rollout.completion_ids, strict=True)
    # 64 bits stand for a row: the rows of a prompt may be on several processes, and equal numbers hash alike there
    hashes = torch.tensor([hash((tuple(p), tuple(c))) for p, c in pairs], device=accelerator.device)
    num_distinct = len(gathered(accelerator, hashes).unique())
    num_truncated = sum(ids[-1] not in end_token_ids for ids in rollout.completion_ids)
    tokens, decoded, row_steps, truncated, count = summed(
        accelerator,
        [
            rollout.num_tokens,
            rollout.num_decoded,
            rollout.num_row_steps,
            num_truncated,
            len(prompt_ids),
        ],
    )
    return {
        "rollout/tokens_per_second": tokens / seconds,
        "rollout/tokens_per_forward": decoded / max(row_steps, 1),
        "rollout/unique_fraction": num_distinct / count,
        "rollout/truncated": truncated / count,
    }


def score_metrics(
    accelerator: Accelerator, elbo: Tensor, is_scorable: Tensor, entropy: Tensor, num_scored: Tensor
) -> dict[str, float]:
    """
    Describe the scores of an optimizer step over every process.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Sums over processes.
        elbo (`torch.Tensor` of shape `(B,)`):
            ELBO in nats, summed over the completion.
        is_scorable (`torch.BoolTensor` of shape `(B,)`):
            Rows that have one.
        entropy (`torch.Tensor`):
            Sum of the entropies at the scored positions, in nats.
        num_scored (`torch.Tensor`):
            Number of those positions.

    Returns:
        `dict[str, float]`:
            `elbo/mean`, `elbo/std`, `entropy` (per scored position).
    """
    elbo = torch.where(is_scorable, elbo, 0.0)
    count, total, squares, entropy_sum, positions = summed(
        accelerator, [is_scorable.sum(), elbo.sum(), elbo.double().square().sum(), entropy, num_scored]
    )
    metrics: dict[str, float] = {}
    if count:
        mean = total / count
        metrics["elbo/mean"], metrics["elbo/std"] = mean, max(squares / count - mean**2, 0.0) ** 0.5
    if positions:
        metrics["entropy"] = entropy_sum / positions
    return metrics


def count_groups_without_signal(accelerator: Accelerator, advantages: Tensor, group_index: Tensor) -> int:
    """Groups, over every process, all of whose advantages are zero."""
    groups = gathered(accelerator, group_index).tolist()
    values = gathered(accelerator, advantages).tolist()
    has_signal = {group for group, value in zip(groups, values, strict=True) if value != 0.0}
    return len(set(groups) - has_signal)
