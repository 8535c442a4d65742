# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""10,000 right and 10,000 almost right answers of each game, whose truth Python's own parser and the rules decide."""

import ast
import random
from collections import Counter
from fractions import Fraction

from trl_stabledrl.rewards import GRADERS

NUM_ANSWERS = 10_000
FORMS = [
    "<answer>{}</answer>",
    "<reasoning>{{1}} or \\boxed{{1+1}}?</reasoning>\n<answer>\n\\boxed{{{}}}\n</answer>",
    "Done: \\boxed{{{}}}.",
    "<answer>1</answer> no, <answer> {} </answer>",
]


def is_reached(text, numbers, target):
    """Whether Python reads an expression of exactly these numbers with exactly this value."""
    used = Counter()

    def value(node):
        match node:
            case ast.Constant(value=int(number)):
                used[number] += 1
                return Fraction(number)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as op, right=right):
                left, right = value(left), value(right)
                match op:
                    case ast.Add():
                        return left + right
                    case ast.Sub():
                        return left - right
                    case ast.Mult():
                        return left * right
                    case _:
                        return left / right
            case _:
                raise ValueError(node)

    try:
        found = value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return False
    return found == target and used == Counter(numbers)


def random_expression(rng, numbers):
    if len(numbers) == 1:
        return str(numbers[0])
    cut = rng.randint(1, len(numbers) - 1)
    left, right = random_expression(rng, numbers[:cut]), random_expression(rng, numbers[cut:])
    space = rng.choice(["", " "])
    return f"({left}{space}{rng.choice('+-*/')}{space}{right})"


def random_problem(rng):
    while True:
        numbers = [rng.randint(1, 99) for _ in range(rng.choice([3, 4]))]
        text = random_expression(rng, numbers)[1:-1]
        try:
            target = eval(text.replace("/", "//"))  # a guess: is_reached decides
        except ZeroDivisionError:
            continue
        if is_reached(text, numbers, target):
            return text, rng.sample(numbers, len(numbers)), target


def spoiled_expression(rng, text, numbers, target):
    """An answer one slip away from a right one, with the problem it is given to."""
    spots = [index for index, character in enumerate(text) if character in "+-*/"]
    first = str(rng.choice(numbers))
    match rng.randrange(9):
        case 0:  # the result is off
            return text, numbers, target + rng.choice([-1, 1])
        case 1:  # a number twice
            return f"{text}{rng.choice('+-*/')}{first}", numbers, target
        case 2:  # one twice that changes nothing
            return f"{text}+{first}-{first}", numbers, target
        case 3:  # one missing
            return text, [*numbers, rng.randint(1, 99)], target
        case 4:  # one that was not given
            return text, [numbers[0] + 1, *numbers[1:]], target
        case 5:  # another operation
            spot = rng.choice(spots)
            return text[:spot] + rng.choice("+-*/") + text[spot + 1 :], numbers, target
        case 6:  # an operation lost, two numbers run together
            spot = rng.choice(spots)
            return text[:spot].rstrip() + text[spot + 1 :].lstrip(), numbers, target
        case 7:  # brackets lost
            return text.replace("(", "").replace(")", ""), numbers, target
        case _:  # a bracket lost, or a claim that is untrue
            if "(" in text and rng.random() < 0.5:
                return text.replace(rng.choice("()"), "", 1), numbers, target
            return f"{text}={target + 1}", numbers, target


def test_countdown_accepts_no_wrong_answer_and_refuses_no_right_one():
    rng = random.Random(0)
    right, wrong = [], []
    while len(wrong) < NUM_ANSWERS:
        problem = random_problem(rng)
        if len(right) < NUM_ANSWERS:
            right.append(problem)
        spoiled = spoiled_expression(rng, *problem)
        if not is_reached(*spoiled):  # some slips are none: a bracket that was not needed
            wrong.append(spoiled)
    for rows, expected in ((right, 1.0), (wrong, 0.0)):
        texts, numbers, targets = zip(*rows, strict=True)
        completions = [rng.choice(FORMS).format(text) for text in texts]
        grades = GRADERS["countdown_reward"](completions, target=list(targets), numbers=list(numbers))
        mistaken = [(row, grade) for row, grade in zip(rows, grades, strict=True) if grade.score != expected]
        assert len(grades) == NUM_ANSWERS
        assert not mistaken
        if expected == 0.0:
            assert {grade.reason for grade in grades} == {"wrong", "invalid"}


UNITS = [[4 * row + column for column in range(4)] for row in range(4)]
UNITS += [[4 * row + column for row in range(4)] for column in range(4)]
UNITS += [[4 * (top + i) + left + j for i in (0, 1) for j in (0, 1)] for top in (0, 2) for left in (0, 2)]


def is_solved(grid, puzzle):
    return (
        len(grid) == 16
        and all(sorted(grid[cell] for cell in unit) == list("1234") for unit in UNITS)
        and all(clue in ("0", digit) for clue, digit in zip(puzzle, grid, strict=True))
    )


def random_grid(rng):
    """A valid grid by the moves that keep one valid."""
    grid = ["1234", "3412", "2143", "4321"] if rng.random() < 0.5 else ["1234", "3412", "2341", "4123"]
    assert is_solved("".join(grid), "0" * 16)
    for _ in range(2):
        grid = [grid[row] for band in rng.sample([(0, 1), (2, 3)], 2) for row in rng.sample(band, 2)]
        grid = ["".join(row[column] for row in grid) for column in range(4)]
    names = str.maketrans("1234", "".join(rng.sample("1234", 4)))
    return "".join(grid).translate(names)


def spoiled_grid(rng, grid, puzzle):
    cells = list(grid)
    clues = [cell for cell, clue in enumerate(puzzle) if clue != "0"]
    empty = [cell for cell, clue in enumerate(puzzle) if clue == "0"]
    match rng.randrange(8):
        case 0:  # a wrong cell
            cells[rng.choice(empty)] = rng.choice("1234")
        case 1:  # a changed clue
            cells[rng.choice(clues)] = rng.choice("1234")
        case 2:  # another valid grid, with a clue changed
            return random_grid(rng)
        case 3:  # transposed
            cells = [cells[4 * column + row] for row in range(4) for column in range(4)]
        case 4:  # two rows or two columns swapped
            one, other = rng.sample(UNITS[:4] if rng.random() < 0.5 else UNITS[4:8], 2)
            for left, right in zip(one, other, strict=True):
                cells[left], cells[right] = cells[right], cells[left]
        case 5:  # a cell lost
            del cells[rng.randrange(16)]
        case 6:  # one too many
            cells.insert(rng.randrange(17), rng.choice("1234"))
        case _:  # two digits exchanged everywhere
            one, other = rng.sample("1234", 2)
            return grid.translate(str.maketrans(one + other, other + one))
    return "".join(cells)


def drawn(rng, grid):
    match rng.randrange(4):
        case 0:
            return grid
        case 1:
            return " ".join(grid)
        case 2:
            return "\n".join(grid[start : start + 4] for start in range(0, len(grid), 4))
        case _:
            return "\n".join("|" + "|".join(grid[start : start + 4]) + "|" for start in range(0, len(grid), 4))


def test_sudoku_accepts_no_wrong_grid_and_refuses_no_right_one():
    rng = random.Random(0)
    right, wrong = [], []
    while min(len(right), len(wrong)) < NUM_ANSWERS:
        grid = random_grid(rng)
        empty = rng.sample(range(16), rng.randint(1, 12))
        puzzle = "".join("0" if cell in empty else digit for cell, digit in enumerate(grid))
        # Several answers a puzzle: to list its solutions is what takes long
        right += [(grid, puzzle)] * 10
        spoiled = [spoiled_grid(rng, grid, puzzle) for _ in range(14)]
        wrong += [(other, puzzle) for other in spoiled if not is_solved(other, puzzle)]
    for rows, is_right in ((right, True), (wrong, False)):
        rows = rng.sample(rows, NUM_ANSWERS)
        completions = [rng.choice(FORMS).format(drawn(rng, grid)) for grid, _ in rows]
        grades = GRADERS["sudoku_reward"](completions, puzzle=[puzzle for _, puzzle in rows])
        assert not [(row, grade) for row, grade in zip(rows, grades, strict=True) if grade.is_right != is_right]
        for (grid, puzzle), grade in zip(rows, grades, strict=True):
            breaks_a_rule = len(grid) != 16 or any(
                clue not in ("0", digit) for clue, digit in zip(puzzle, grid, strict=True)
            )
            assert not breaks_a_rule or (grade.score, grade.reason) == (0.0, "invalid")
