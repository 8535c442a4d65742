# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""Countdown: reach a target with each of a few numbers. Generated offline from a random expression, so solvable."""

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from datasets import Dataset

from ._generate import Row, generate
from ._prompts import reasoning_prompt

_INSTRUCTION = (
    "Write an arithmetic expression that equals the target. Use every given number exactly once, the operations "
    "+ - * / and parentheses, and nothing else."
)
_LARGEST_NUMBER = 99
_TARGETS = range(10, 101)
_OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": lambda left, right: left / right,
}


def countdown_prompts(split: str, *, num_prompts: int = 512, seed: int = 0, num_numbers: int = 3) -> Dataset:
    """
    Countdown problems with numbers from 1 to 99 and targets from 10 to 100.

    Args:
        split (`str`):
            `"train"` or `"test"`; no set of numbers with its target is in both, in any order, whatever the seeds.
        num_prompts (`int`, *optional*, defaults to `512`):
            Number of distinct prompts.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draw.
        num_numbers (`int`, *optional*, defaults to `3`):
            Numbers per problem, 3 or 4.

    Returns:
        `datasets.Dataset`:
            Columns `prompt` (one user message), `numbers`, `target` and `solution` (one expression that works).
    """
    if num_numbers not in (3, 4):
        raise ValueError(f"`num_numbers` must be 3 or 4, got {num_numbers}.")

    def draw(rng: random.Random) -> tuple[str, Row]:
        numbers, target, solution = _problem(rng, num_numbers)
        row: dict[str, Any] = {
            "prompt": reasoning_prompt(
                _INSTRUCTION,
                f"Numbers: {', '.join(map(str, numbers))}\nTarget: {target}",
                form="expression",
            ),
            "numbers": numbers,
            "target": target,
            "solution": solution,
        }
        return f"{sorted(numbers)}={target}", row

    return generate(f"countdown{num_numbers}", draw, split=split, num_prompts=num_prompts, seed=seed)


def _problem(rng: random.Random, num_numbers: int) -> tuple[list[int], int, str]:
    """Join random numbers by random operations until the value is an acceptable target."""
    while True:
        numbers = [rng.randint(1, _LARGEST_NUMBER) for _ in range(num_numbers)]
        terms = [(Fraction(number), str(number)) for number in numbers]
        while len(terms) > 1:
            left, left_text = terms.pop(rng.randrange(len(terms)))
            right, right_text = terms.pop(rng.randrange(len(terms)))
            operation = rng.choice("+-*/" if right else "+-*")
            terms.append((_OPERATIONS[operation](left, right), f"({left_text}{operation}{right_text})"))
        value, text = terms[0]
        if value.denominator == 1 and int(value) in _TARGETS:
            return numbers, int(value), text[1:-1]
