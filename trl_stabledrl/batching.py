# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Rows as tensors: padding them, and putting those of a generation back into their run-wide order."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import Sampler

Batch = dict[str, Any]

EVALUATION_ROWS = 1 << 40
"""First row index of evaluations, far above any training row, so that the two never share noise."""


class EpochSampler(Sampler[int]):
    """
    TRL's sampler of prompts, with an order that is a function of the epoch.

    `RepeatSampler` draws the order of each epoch from one generator, which no checkpoint holds: a run resumed after
    its first epoch would be given the first epoch's order again.

    Args:
        sampler (`trl.trainer.utils.RepeatSampler`):
            The sampler, which keeps its orders: the n-th epoch has the n-th order of an uninterrupted run.
        epoch (`Callable[[], int]`):
            Says which epoch begins.
    """

    def __init__(self, sampler: Any, *, epoch: Callable[[], int]) -> None:
        self.sampler = sampler
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.sampler.seed)
            for _ in range(self.epoch()):
                torch.randperm(self.sampler.num_samples, generator=self.sampler.generator)
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def left_padded(rows: Sequence[Sequence[int]], *, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """
    Pad token lists on the left.

    Returns:
        `tuple[torch.Tensor, torch.BoolTensor]`:
            Ids and the mask of real tokens, both `(B, longest)`.
    """
    longest = max((len(row) for row in rows), default=0)
    ids = torch.full((len(rows), longest), pad_token_id)
    is_real = torch.zeros(len(rows), longest, dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :] = torch.tensor(row, dtype=torch.long)
        is_real[index, longest - len(row) :] = True
    return ids, is_real


def right_padded(rows: Sequence[Sequence[int]], *, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """As [`left_padded`], on the right."""
    ids, is_real = left_padded([row[::-1] for row in rows], pad_token_id=pad_token_id)
    return ids.flip(1), is_real.flip(1)


def gathered(accelerator: Accelerator, rows: Tensor) -> Tensor:
    """Rows of every process, in the order of the processes."""
    everyone = accelerator.gather(rows)
    assert isinstance(everyone, Tensor)
    return everyone


def summed(accelerator: Accelerator, values: Sequence[Tensor | float]) -> list[float]:
    """Sum numbers over processes, in one exchange."""
    stacked = torch.stack([torch.as_tensor(value, device=accelerator.device).double() for value in values])
    total = accelerator.reduce(stacked, reduction="sum")
    assert isinstance(total, Tensor)
    return total.tolist()


def _gather_rows(accelerator: Accelerator, name: str, value: Tensor) -> Tensor:
    if value.dim() > 1:
        # prompts are padded on the left, everything else on the right; masks and ids alike are padded with zeros,
        # which is safe for ids because lengths come from the masks
        padded = accelerator.pad_across_processes(value, dim=1, pad_first=name.startswith("prompt"))
        assert isinstance(padded, Tensor)
        value = padded
    return gathered(accelerator, value)


def in_row_order(accelerator: Accelerator, slices: list[Batch]) -> list[Batch]:
    """
    Undo TRL's shuffle: hand out the rows of a generation in the order of `row_index`, over all processes.

    Micro-step `j` of process `r` of `R` gets rows `[(j * R + r) * b, (j * R + r + 1) * b)`, so that every optimizer
    step holds the rows that one process would hold, and a group is spread over as few micro-steps as possible. Token
    ids and scores are exchanged, no activations.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Gathers over processes.
        slices (`list[dict]`):
            The buffered micro-batches of this process; each holds an int64 `row_index` of shape `(b,)`.

    Returns:
        `list[dict]`:
            As many micro-batches, of the same size. Values that are no tensors with rows are passed on as they are.
    """
    num_slices, rank, num_processes = len(slices), accelerator.process_index, accelerator.num_processes
    row_names = [name for name, value in slices[0].items() if isinstance(value, Tensor) and value.dim() > 0]
    rows = {name: torch.cat([part[name] for part in slices]) for name in row_names}
    if num_processes > 1:
        rows = {name: _gather_rows(accelerator, name, rows[name]) for name in sorted(rows)}
    order = rows["row_index"].argsort()
    size = len(order) // (num_slices * num_processes)
    ordered = []
    for index, part in enumerate(slices):
        start = (index * num_processes + rank) * size
        chosen = order[start : start + size]
        ordered.append({**part, **{name: value[chosen] for name, value in rows.items()}})
    return ordered
