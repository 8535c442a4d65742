# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""Sorting digits: the smallest task of a fixed length on which reinforcement learning shows."""

import random

from datasets import Dataset

from ._generate import Row, generate


def sorting_prompts(split: str, *, num_prompts: int | None = None, seed: int = 0, length: int = 8) -> Dataset:
    """
    Random digits to sort in ascending order.

    Args:
        split (`str`):
            `"train"` or `"test"`; no prompt is in both, whatever the seeds.
        num_prompts (`int`, *optional*):
            Number of distinct prompts, 512 by default.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draw.
        length (`int`, *optional*, defaults to `8`):
            Digits per prompt, and so tokens per answer with a tokenizer of characters.

    Returns:
        `datasets.Dataset`:
            Columns `prompt` (`"83517264"`) and `answer` (`"12345678"`).
    """
    if length < 1:
        raise ValueError(f"`length` must be at least 1, got {length}.")

    def draw(rng: random.Random) -> tuple[str, Row]:
        digits = "".join(rng.choices("0123456789", k=length))
        return digits, {"prompt": digits, "answer": "".join(sorted(digits))}

    return generate("sorting", draw, split=split, num_prompts=num_prompts, seed=seed)
