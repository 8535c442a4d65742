# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""Adding two numbers: answers of different length, so that the model must also learn where to end."""

import random

from datasets import Dataset

from ._generate import Row, generate


def addition_prompts(split: str, *, num_prompts: int | None = None, seed: int = 0, num_digits: int = 2) -> Dataset:
    """
    Sums of two numbers of equally many digits.

    Args:
        split (`str`):
            `"train"` or `"test"`; no pair of numbers is in both, in either order, whatever the seeds.
        num_prompts (`int`, *optional*):
            Number of distinct prompts, 512 by default. Two digits allow 7,089 in train and 1,011 in test.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draw.
        num_digits (`int`, *optional*, defaults to `2`):
            Digits per number.

    Returns:
        `datasets.Dataset`:
            Columns `prompt` (`"47+85="`) and `answer` (`"132"`, to which whoever trains appends the end token).
    """
    if num_digits < 1:
        raise ValueError(f"`num_digits` must be at least 1, got {num_digits}.")
    smallest, largest = 10 ** (num_digits - 1), 10**num_digits - 1

    def draw(rng: random.Random) -> tuple[str, Row]:
        left, right = rng.randint(smallest, largest), rng.randint(smallest, largest)
        key = f"{min(left, right)}+{max(left, right)}"
        return key, {"prompt": f"{left}+{right}=", "answer": str(left + right)}

    return generate("addition", draw, split=split, num_prompts=num_prompts, seed=seed)
