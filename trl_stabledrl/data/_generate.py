# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""Offline generation: rows are a pure function of (task, split, seed), and splits are disjoint by construction."""

import hashlib
import random
from collections.abc import Callable
from typing import Any

from datasets import Dataset

SPLITS = ("train", "test")
_DEFAULT_NUM_PROMPTS = 512
_TEST_SHARE = 8  # one key in eight
_MAX_FRUITLESS_DRAWS = 100_000  # enough to find nearly every prompt of a task as small as two-digit addition

Row = dict[str, Any]


def check_split(split: str, splits: tuple[str, ...] = SPLITS) -> None:
    if split not in splits:
        raise ValueError(f"Unknown split {split!r}: this task has {' and '.join(map(repr, splits))}.")


def check_num_prompts(num_prompts: int) -> None:
    if num_prompts < 1:
        raise ValueError(f"`num_prompts` must be at least 1, got {num_prompts}.")


def split_of(task: str, key: str) -> str:
    """
    Split a problem belongs to, whatever the seed it was drawn with.

    Args:
        task (`str`):
            Name of the task.
        key (`str`):
            What identifies the problem. Variants of one problem (its numbers in another order) share a key.

    Returns:
        `str`:
            `"test"` for one key in eight, else `"train"`.
    """
    digest = hashlib.sha256(f"{task}:{key}".encode()).digest()
    return "test" if digest[0] % _TEST_SHARE == 0 else "train"


def generate(
    task: str, draw: Callable[[random.Random], tuple[str, Row]], *, split: str, num_prompts: int | None, seed: int
) -> Dataset:
    """
    Draw distinct problems of a split.

    Args:
        task (`str`):
            Name of the task, part of the random stream and of the split's hash.
        draw (`Callable[[random.Random], tuple[str, dict]]`):
            Draws one problem: its key, which decides the split, and its row.
        split (`str`):
            `"train"` or `"test"`.
        num_prompts (`int`, *optional*):
            Number of rows, 512 by default.
        seed (`int`):
            Seed of the draw. A larger `num_prompts` with the same seed extends the rows of a smaller one.

    Returns:
        `datasets.Dataset`:
            Rows with distinct prompts.
    """
    check_split(split)
    num_prompts = _DEFAULT_NUM_PROMPTS if num_prompts is None else num_prompts
    check_num_prompts(num_prompts)
    rng = random.Random(f"{task}:{split}:{seed}")  # a string seed is hashed, the same on every platform
    rows: dict[str, Row] = {}
    num_fruitless = 0
    while len(rows) < num_prompts:
        key, row = draw(rng)
        prompt = str(row["prompt"])
        if split_of(task, key) != split or prompt in rows:
            num_fruitless += 1
            if num_fruitless == _MAX_FRUITLESS_DRAWS:
                raise ValueError(
                    f"Task `{task}` has about {len(rows)} distinct {split} prompts, got num_prompts={num_prompts}. "
                    "Ask for fewer and train for several epochs, or make the problems larger."
                )
            continue
        rows[prompt] = row
        num_fruitless = 0
    return Dataset.from_list(list(rows.values()))
