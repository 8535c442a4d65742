# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""4x4 Sudoku, graded by its rules: a puzzle may have several solutions, and each of them is right."""

import re
from functools import cache
from itertools import permutations
from typing import Any

from .grading import Grade
from .parsing import completion_text, marked_answer

# Digits with only the furniture of a drawn grid between them; the digits of a word such as "4x4" start no run
_DIGIT_RUN = re.compile(r"(?<![^\W_])[0-9](?:[\s|,;\[\]+_/-]*[0-9])*(?![^\W_])")
# What a drawn grid has besides: box-drawing characters, rulers, LaTeX arrays and their spaces, "Row 1:"
_BORDER = re.compile(
    "[\u2500-\u257f&]"
    r"|={3,}|:?-:|:-|\\\\|\\[,;:! ]|\\hline|\\(?:begin|end)\{[a-z]{1,9}\}(?:\{[|clr ]{1,20}\})?"
    r"|\b(?:row|r)\s{0,3}[1-4]\s{0,3}[:=]",
    re.IGNORECASE,
)


def sudoku_reward(completions: list[Any], puzzle: list[str], **kwargs: Any) -> list[float]:
    r"""
    Reward function that checks a 4x4 Sudoku grid by the rules.

    The grid is the last run of 16 digits in the last `<answer>` block or `\boxed{}` or, without either, in the whole
    completion; spaces, line breaks, drawn borders and row labels between digits do not count.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, as plain text or chat messages.
        puzzle (`list[str]`):
            Puzzles, row by row: 16 digits, 0 for an empty cell.
        **kwargs:
            Other columns, ignored: a stored solution is not needed.

    Returns:
        `list[float]`:
            1.0 for a valid grid that keeps every clue; 0.0 where a clue is changed or there are not 16 digits; else
            the largest share, over all solutions of the puzzle, of originally empty cells that agree.

    Example:
    ```python
    >>> from trl_stabledrl.rewards import sudoku_reward

    >>> sudoku_reward(["<answer>1234341221434321</answer>"], puzzle=["1030041200400321"])
    [1.0]
    ```
    """
    return [grade.score for grade in grade_sudoku(completions, puzzle)]


def grade_sudoku(completions: list[Any], puzzle: list[str], **kwargs: Any) -> list[Grade]:
    """Grades of `sudoku_reward`. A changed clue and an answer without 16 digits are `"invalid"`."""
    return [_grade(completion_text(text), clues) for text, clues in zip(completions, puzzle, strict=True)]


def _runs_of_16(text: str) -> list[str]:
    return [digits for run in _DIGIT_RUN.findall(text) if len(digits := re.sub("[^0-9]", "", run)) == 16]


def _grade(text: str, puzzle: Any) -> Grade:
    solutions = _solutions(puzzle) if isinstance(puzzle, str) else ()
    if not solutions:
        raise ValueError(
            f"Column `puzzle` must hold solvable 4x4 puzzles, got {puzzle!r}. Write 16 digits from 0 to 4, row by "
            "row, with 0 for an empty cell, as one text."
        )
    marked = marked_answer(text)
    answer = text if marked is None else marked
    grids = _runs_of_16(_BORDER.sub(" ", answer)) or _runs_of_16(answer)
    if not grids:
        return Grade(0.0, marked or None, "invalid" if marked else "no_answer")
    grid = grids[-1]
    if any(clue not in ("0", digit) for clue, digit in zip(puzzle, grid, strict=True)):
        return Grade(0.0, grid, "invalid")
    empty = [cell for cell, clue in enumerate(puzzle) if clue == "0"]
    num_right = max(sum(grid[cell] == solution[cell] for cell in empty) for solution in solutions)
    if num_right == len(empty):
        return Grade(1.0, grid, "right")
    return Grade(num_right / len(empty), grid, "partial" if num_right else "wrong")


@cache
def _grids() -> tuple[str, ...]:
    """The 288 valid grids."""
    rows = ["".join(row) for row in permutations("1234")]
    pairs = [(upper, lower) for upper in rows for lower in rows if not set(upper[:2]) & set(lower[:2])]
    pairs = [(upper, lower) for upper, lower in pairs if not set(upper[2:]) & set(lower[2:])]
    grids = ["".join(top + bottom) for top in pairs for bottom in pairs]
    return tuple(grid for grid in grids if all(len(set(grid[column::4])) == 4 for column in range(4)))


@cache
def _solutions(puzzle: str) -> tuple[str, ...]:
    if not re.fullmatch("[0-4]{16}", puzzle):
        return ()
    return tuple(
        grid for grid in _grids() if all(clue in ("0", digit) for clue, digit in zip(puzzle, grid, strict=True))
    )
