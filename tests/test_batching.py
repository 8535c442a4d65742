# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from trl.trainer.utils import RepeatSampler

from trl_stabledrl import batching
from trl_stabledrl.batching import EpochSampler, in_row_order, left_padded, right_padded

PAD = 9


def test_rows_are_padded_on_the_side_asked_for():
    ids, is_real = left_padded([[1, 2, 3], [4]], pad_token_id=PAD)
    assert ids.tolist() == [[1, 2, 3], [PAD, PAD, 4]]
    assert is_real.tolist() == [[True] * 3, [False, False, True]]
    ids, is_real = right_padded([[1, 2, 3], [4], []], pad_token_id=PAD)
    assert ids.tolist() == [[1, 2, 3], [4, PAD, PAD], [PAD] * 3]
    assert is_real.tolist() == [[True] * 3, [True, False, False], [False] * 3]


def test_padding_may_be_a_token_that_occurs():
    ids, is_real = left_padded([[PAD, 1], [PAD]], pad_token_id=PAD)
    assert ids.tolist() == [[PAD, 1], [PAD, PAD]]
    assert is_real.tolist() == [[True, True], [False, True]]


class Rank:
    """What one of several processes sees, all played by one."""

    def __init__(self, index: int, slices_of_all: Sequence[list[dict[str, Any]]]) -> None:
        self.process_index = index
        self.num_processes = len(slices_of_all)
        self.slices_of_all = slices_of_all
        self.name = ""

    def pad_across_processes(self, value: Tensor, *, dim: int, pad_first: bool) -> Tensor:
        assert dim == 1
        return self._padded(value, pad_first)

    def _padded(self, value: Tensor, pad_first: bool) -> Tensor:
        longest = max(part[self.name].shape[1] for slices in self.slices_of_all for part in slices)
        missing = longest - value.shape[1]
        return torch.nn.functional.pad(value, (missing, 0) if pad_first else (0, missing))

    def gather(self, value: Tensor) -> Tensor:
        parts = [torch.cat([part[self.name] for part in slices]) for slices in self.slices_of_all]
        if value.dim() > 1:
            parts = [self._padded(part, self.name.startswith("prompt")) for part in parts]
        assert torch.equal(value, parts[self.process_index])
        return torch.cat(parts)


def slices_of(rows: Sequence[int], size: int, *, length: int, prompt_length: int) -> list[dict[str, Any]]:
    """Micro-batches whose tensors say which row they belong to."""
    return [
        {
            "row_index": torch.tensor(part),
            "prompt_ids": torch.tensor([[0] * (prompt_length - 1) + [row + 100] for row in part]),
            "completion_ids": torch.tensor([[row + 200] + [0] * (length - 1) for row in part]),
            "advantages": torch.tensor([float(row) for row in part]),
            "num_items_in_batch": torch.tensor(7),
            "name": "kept",
        }
        for part in (rows[start : start + size] for start in range(0, len(rows), size))
    ]


@pytest.mark.parametrize(("num_processes", "num_slices", "size"), [(1, 4, 2), (2, 2, 2), (2, 4, 1), (4, 1, 2)])
def test_every_micro_step_gets_the_rows_that_one_process_would_give_it(num_processes, num_slices, size, monkeypatch):
    per_process = num_slices * size
    generator = torch.Generator().manual_seed(0)
    # as TRL hands them out: each process has its own consecutive rows, shuffled
    shuffled = [
        (torch.randperm(per_process, generator=generator) + 40 + rank * per_process).tolist()
        for rank in range(num_processes)
    ]
    slices_of_all = [
        slices_of(rows, size, length=2 + rank, prompt_length=4 - rank) for rank, rows in enumerate(shuffled)
    ]
    gather_rows = batching._gather_rows

    def gather(accelerator: Any, name: str, value: Tensor) -> Tensor:
        accelerator.name = name
        return gather_rows(accelerator, name, value)

    monkeypatch.setattr(batching, "_gather_rows", gather)
    for index in range(num_processes):
        rank: Any = Rank(index, slices_of_all) if num_processes > 1 else Accelerator(cpu=True)
        ordered = in_row_order(rank, slices_of_all[index])

        assert len(ordered) == num_slices
        for step, part in enumerate(ordered):
            start = 40 + (step * num_processes + index) * size
            rows = list(range(start, start + size))
            assert part["row_index"].tolist() == rows
            assert part["advantages"].tolist() == rows
            assert part["prompt_ids"][:, -1].tolist() == [row + 100 for row in rows]  # padded on the left
            assert part["completion_ids"][:, 0].tolist() == [row + 200 for row in rows]  # and on the right
            assert part["num_items_in_batch"] == 7
            assert part["name"] == "kept"


def test_tensors_are_exchanged_in_an_order_that_all_processes_agree_on(monkeypatch):
    slices = slices_of(range(4), 2, length=2, prompt_length=2)
    named: list[str] = []

    def gather(accelerator: Any, name: str, value: Tensor) -> Tensor:
        named.append(name)
        return torch.cat([value, value + 4]) if name == "row_index" else torch.cat([value, value])

    monkeypatch.setattr(batching, "_gather_rows", gather)
    in_row_order(Rank(0, [slices, slices]), slices)  # pyright: ignore[reportArgumentType]
    assert named == sorted(named) == ["advantages", "completion_ids", "prompt_ids", "row_index"]


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_of_an_epoch_does_not_depend_on_the_epochs_before(shuffle):
    options: dict[str, Any] = {
        "mini_repeat_count": 2,
        "batch_size": 3,
        "repeat_count": 2,
        "shuffle": shuffle,
        "seed": 5,
    }
    uninterrupted = RepeatSampler(range(10), **options)
    orders = [list(uninterrupted) for _ in range(3)]
    epoch = 0
    sampler = EpochSampler(RepeatSampler(range(10), **options), epoch=lambda: epoch)

    assert len(sampler) == len(uninterrupted) == len(orders[0])
    assert (orders[0] != orders[2]) == shuffle
    for epoch in (2, 0, 1, 1):
        assert list(sampler) == orders[epoch]
