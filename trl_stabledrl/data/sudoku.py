# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""4x4 Sudoku, generated offline: a random valid grid with some cells emptied, so solvable."""

import random
from functools import cache
from itertools import permutations
from typing import Literal

from datasets import Dataset

from ._generate import Row, generate
from ._prompts import reasoning_prompt

_INSTRUCTION = (
    "Complete the 4x4 Sudoku below. Every row, every column and every 2x2 corner block must hold each of the digits 1 "
    "to 4 exactly once. The grid is given row by row as 16 digits, where 0 is an empty cell; answer in the same way, "
    "without zeros."
)


def sudoku_prompts(
    split: str,
    *,
    num_prompts: int = 512,
    seed: int = 0,
    num_empty: int = 8,
    style: Literal["reasoning", "digits"] = "reasoning",
) -> Dataset:
    """
    4x4 Sudoku puzzles. Those with many empty cells have several solutions, all of which `sudoku_reward` accepts.

    Args:
        split (`str`):
            `"train"` or `"test"`; no puzzle is in both, whatever the seeds.
        num_prompts (`int`, *optional*, defaults to `512`):
            Number of distinct puzzles.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draw.
        num_empty (`int`, *optional*, defaults to `8`):
            Empty cells per puzzle, 1 to 15.
        style (`str`, *optional*, defaults to `"reasoning"`):
            `"reasoning"` for a chat prompt that asks for reasoning and answer tags; `"digits"` for the bare 16 digits,
            to be completed by 16 digits.

    Returns:
        `datasets.Dataset`:
            Columns `prompt`, `puzzle` and `solution` (one that keeps the clues).
    """
    if not 1 <= num_empty <= 15:
        raise ValueError(f"`num_empty` must lie between 1 and 15, so that a clue is left, got {num_empty}.")
    if style not in ("reasoning", "digits"):
        raise ValueError(f"Unknown `style` {style!r}: expected 'reasoning' or 'digits'.")

    def draw(rng: random.Random) -> tuple[str, Row]:
        solution = rng.choice(_grids())
        empty = rng.sample(range(16), num_empty)
        puzzle = "".join("0" if cell in empty else digit for cell, digit in enumerate(solution))
        prompt = puzzle if style == "digits" else reasoning_prompt(_INSTRUCTION, puzzle, form="16 digits")
        return puzzle, {"prompt": prompt, "puzzle": puzzle, "solution": solution}

    return generate("sudoku", draw, split=split, num_prompts=num_prompts, seed=seed)


@cache
def _grids() -> tuple[str, ...]:
    """The 288 valid grids, row by row."""
    grids: list[tuple[tuple[str, ...], ...]] = [()]
    for _ in range(4):
        grids = [(*rows, row) for rows in grids for row in permutations("1234") if _fits(row, rows)]
    return tuple("".join("".join(row) for row in rows) for rows in grids)


def _fits(row: tuple[str, ...], above: tuple[tuple[str, ...], ...]) -> bool:
    if any(digit == other[column] for other in above for column, digit in enumerate(row)):
        return False
    # The lower row of a pair of blocks holds the digits its upper row has in the other block
    return len(above) % 2 == 0 or not set(row[:2]) & set(above[-1][:2])
