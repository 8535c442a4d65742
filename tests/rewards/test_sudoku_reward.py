# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

import itertools
import random

import pytest

from trl_stabledrl.rewards import sudoku_reward

PUZZLE = "1030041200400321"
SOLVED = "1234341221434321"


def is_valid(grid):
    """The rules, cell by cell."""
    units = [[(row, column) for column in range(4)] for row in range(4)]
    units += [[(row, column) for row in range(4)] for column in range(4)]
    units += [[(top + i, left + j) for i in (0, 1) for j in (0, 1)] for top in (0, 2) for left in (0, 2)]
    return all(sorted(grid[4 * row + column] for row, column in unit) == list("1234") for unit in units)


def all_solutions(puzzle):
    """Cell by cell, pruned only by rows and columns; the rules decide."""
    grids = [""]
    for cell, clue in enumerate(puzzle):
        extended = []
        for grid, digit in itertools.product(grids, "1234" if clue == "0" else clue):
            row, column = grid[cell - cell % 4 :], grid[cell % 4 :: 4]
            if digit not in row and digit not in column:
                extended.append(grid + digit)
        grids = extended
    return [grid for grid in grids if is_valid(grid)]


ALL_GRIDS = all_solutions("0" * 16)


def grade(answer, puzzle=PUZZLE):
    (reward,) = sudoku_reward([f"<answer>{answer}</answer>"], puzzle=[puzzle])
    return reward


def test_there_are_288_grids_and_every_one_solves_the_empty_puzzle():
    assert len(ALL_GRIDS) == 288
    assert sudoku_reward(ALL_GRIDS, puzzle=["0" * 16] * 288) == [1.0] * 288


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (SOLVED, 1.0),
        ("|1|2|3|4|\n|3|4|1|2|\n+--+--+\n|2|1|4|3|\n|4|3|2|1|", 1.0),
        ("[[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]", 1.0),
        ("┌─┬─┐\n│1 2│3 4│\n│3 4║1 2│\n├─┼─┤\n│2 1│4 3│\n│4 3│2 1│\n└─┴─┘", 1.0),
        ("1 2 3 4\n3 4 1 2\n=======\n2 1 4 3\n4 3 2 1", 1.0),
        (r"1\,2\,3\,4 3\,4\,1\,2 2\,1\,4\,3 4\,3\,2\,1", 1.0),
        (r"1 & 2 & 3 & 4 \\ 3 & 4 & 1 & 2 \\ 2 & 1 & 4 & 3 \\ 4 & 3 & 2 & 1", 1.0),
        (r"\begin{array}{|cc|cc|} \hline 1&2&3&4 \\ 3&4&1&2 \\ 2&1&4&3 \\ 4&3&2&1 \end{array}", 1.0),
        ("1234/3412/2143/4321", 1.0),
        ("|1|2|3|4|\n|:-:|:-:|---|--:|\n|3|4|1|2|\n|2|1|4|3|\n|4|3|2|1|", 1.0),
        ("Row 1: 1 2 3 4\nRow 2: 3 4 1 2\nRow 3: 2 1 4 3\nRow 4: 4 3 2 1", 1.0),
        ("Row 1: 1 2 3 4\nRow 2: 3 4 1 2\nRow 3: 2 1 4 3\nRow 4: 4 3 2", 0.0),
        (f"Solution 1: {SOLVED}", 1.0),
        (f"4x4\n{SOLVED}", 1.0),
        (f"Puzzle: {PUZZLE}\nSolved: {SOLVED}", 1.0),
        (f"Solved: {SOLVED} from {PUZZLE}", 0.0),
        (PUZZLE, 0.0),
        (SOLVED[:-1], 0.0),
        (SOLVED + "1", 0.0),
        ("1111111111111111", 0.0),
        ("１２３４３４１２２１４３４３２１", 0.0),
        ("", 0.0),
    ],
)
def test_a_grid_is_found_in_its_surroundings(answer, expected):
    assert grade(answer) == expected


def test_without_tags_the_whole_completion_counts():
    assert sudoku_reward([SOLVED, f"Here: {SOLVED}."], puzzle=[PUZZLE] * 2) == [1.0, 1.0]


def test_partial_credit_is_the_largest_share_over_all_solutions():
    rng = random.Random(0)
    for _ in range(150):
        solution = rng.choice(ALL_GRIDS)
        empty = sorted(rng.sample(range(16), rng.randint(1, 12)))
        puzzle = "".join("0" if cell in empty else digit for cell, digit in enumerate(solution))
        guess = list(solution)
        for cell in rng.sample(empty, rng.randint(0, min(3, len(empty)))):
            guess[cell] = rng.choice("1234")
        expected = max(
            sum(guess[cell] == other[cell] for cell in empty) / len(empty) for other in all_solutions(puzzle)
        )
        assert grade("".join(guess), puzzle) == expected
        clues = [cell for cell in range(16) if cell not in empty]
        guess = list(solution)
        changed = rng.choice(clues)
        guess[changed] = rng.choice([digit for digit in "1234" if digit != solution[changed]])
        assert grade("".join(guess), puzzle) == 0.0


def test_a_full_puzzle_is_its_own_solution():
    assert grade(SOLVED, SOLVED) == 1.0


@pytest.mark.parametrize("puzzle", [None, 1234, [1, 2], "12", "1" * 16, "x" * 16, "5" + "0" * 15])
def test_an_unsolvable_puzzle_is_an_error_in_the_data(puzzle):
    with pytest.raises(ValueError, match=r"Column `puzzle` .* got .* 16 digits"):
        grade(SOLVED, puzzle)
