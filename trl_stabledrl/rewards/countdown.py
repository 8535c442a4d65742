# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""Countdown: an expression that uses each given number once and equals the target."""

import re
from collections import Counter
from fractions import Fraction
from typing import Any

from .grading import Grade
from .parsing import completion_text, marked_answer

_MAX_CHARS = 200
_MAX_DEPTH = 20
_MAX_DIGITS = 9
_CLAIM = re.compile(rf"-?[0-9]{{1,{_MAX_DIGITS}}}(?:\.[0-9]{{1,{_MAX_DIGITS}}})?")
_TOKEN = re.compile(r"\s*([0-9]+|[-+*/()])")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")
_AS_ASCII = {
    "\N{MULTIPLICATION SIGN}": "*",
    "\N{DIVISION SIGN}": "/",
    "\N{MINUS SIGN}": "-",
    "\N{MIDDLE DOT}": "*",
    "\N{DOT OPERATOR}": "*",
    "\N{ASTERISK OPERATOR}": "*",
    "\\times": "*",
    "\\cdot": "*",
    "\\div": "/",
    "\\left": "",
    "\\right": "",
    "\\(": "",
    "\\)": "",
    "\\[": "",
    "\\]": "",
    "\\,": " ",
    "\\:": " ",
    "\\;": " ",
    "\\!": "",
    "\\ ": " ",
    "\\quad": " ",
    "~": " ",
    "$": "",
}


def countdown_reward(
    completions: list[Any], target: list[Any], numbers: list[list[int]], **kwargs: Any
) -> list[float]:
    r"""
    Reward function that checks a Countdown answer: every given number used exactly once, and the right value, exactly.

    The answer is the last `<answer>` block or `\boxed{}`: integers with + - * / and parentheses (also × ÷ and
    their LaTeX names), a minus in front of a sum allowed, optionally followed by `= value`; math delimiters, bold type
    and a full stop around it do not count. It is parsed, never run.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, as plain text or chat messages.
        target (`list[int]`):
            Values to reach.
        numbers (`list[list[int]]`):
            Numbers to use.
        **kwargs:
            Other columns, ignored.

    Returns:
        `list[float]`:
            1.0 for a right answer, else 0.0.

    Example:
    ```python
    >>> from trl_stabledrl.rewards import countdown_reward

    >>> countdown_reward(["<answer>8*3+1</answer>", "<answer>8*3</answer>"], target=[25, 24], numbers=[[1, 3, 8]] * 2)
    [1.0, 0.0]
    ```
    """
    return [grade.score for grade in grade_countdown(completions, target, numbers)]


def grade_countdown(completions: list[Any], target: list[Any], numbers: list[list[int]], **kwargs: Any) -> list[Grade]:
    """Grades of `countdown_reward`. An answer that is no expression of exactly the numbers is `"invalid"`."""
    rows = zip(completions, map(_goal, target), map(_given, numbers), strict=True)
    return [_grade(completion, goal, given) for completion, goal, given in rows]


def _goal(target: Any) -> Fraction:
    try:
        return Fraction(target)
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):
        raise ValueError(
            f"Column `target` must hold one number per row, got {target!r}. Give an integer, such as 25."
        ) from None


def _given(numbers: Any) -> Counter[int]:
    try:
        values = None if isinstance(numbers, str) else [Fraction(number) for number in numbers]
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):
        values = None
    if not values or any(value.denominator != 1 or value < 0 for value in values):
        raise ValueError(
            f"Column `numbers` must hold a list of non-negative integers per row, got {numbers!r}. Give the numbers "
            "to use, such as [1, 3, 8]."
        )
    return Counter(map(int, values))


def _grade(completion: Any, target: Fraction, numbers: Counter[int]) -> Grade:
    answer = marked_answer(completion_text(completion))
    if not answer:
        return Grade(0.0, None, "no_answer")
    value = _value(answer, numbers)
    if value is None:
        return Grade(0.0, answer, "invalid")
    return Grade(1.0, answer, "right") if value == target else Grade(0.0, answer, "wrong")


def countdown_format_reward(completions: list[Any], numbers: list[list[int]], **kwargs: Any) -> list[float]:
    """
    Reward function that checks the form of a Countdown answer: an expression that uses every given number once.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, as plain text or chat messages.
        numbers (`list[list[int]]`):
            Numbers to use.
        **kwargs:
            Other columns, ignored.

    Returns:
        `list[float]`:
            1.0 where the expression has a value, whatever it is, else 0.0.
    """
    answers = [marked_answer(completion_text(completion)) for completion in completions]
    return [
        float(_value(answer, given) is not None) for answer, given in zip(answers, map(_given, numbers), strict=True)
    ]


def _value(answer: str | None, numbers: Counter[int]) -> Fraction | None:
    """Value of the expression that is an answer, or `None` where it breaks a rule."""
    if not answer or len(answer) > _MAX_CHARS:
        return None
    for symbol, replacement in _AS_ASCII.items():
        answer = answer.replace(symbol, replacement)
    answer = answer.strip().removesuffix(".")
    if answer.startswith("**") and answer.endswith("**"):
        answer = answer[2:-2].strip().removesuffix(".")
    for _ in range(_MAX_DEPTH):  # from the inside out
        answer, num_replaced = _FRACTION.subn(r"((\1\2)/(\3\4))", answer)
        if not num_replaced:
            break
    expression, *claims = answer.split("=")
    tokens = _tokens(expression)
    # The numbers first: once they are the given ones, no expression of this length can grow large
    if tokens is None or Counter(int(token) for token in tokens if token.isdigit()) != numbers:
        return None
    value = _Parser(tokens).value()
    # "8*3+1 = 24" is a wrong statement, even where its left side is right
    if value is None or len(claims) > 1 or (claims and not _claims(claims[0], value)):
        return None
    return value


def _claims(claim: str, value: Fraction) -> bool:
    claim = claim.strip()
    return _CLAIM.fullmatch(claim) is not None and Fraction(claim) == value


def _tokens(expression: str) -> list[str] | None:
    tokens, position = [], 0
    expression = expression.strip()
    while position < len(expression):
        match = _TOKEN.match(expression, position)
        if match is None or len(match[1]) > _MAX_DIGITS or (match[1][0] == "0" and len(match[1]) > 1):
            return None
        tokens.append(match[1])
        position = match.end()
    return tokens


class _Invalid(Exception):
    """The tokens are no expression, or it has no value."""


class _Parser:
    """Recursive descent over `sum: product ([+-] product)*`, `product: factor ([*/] factor)*`."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0

    def value(self) -> Fraction | None:
        try:
            value = self._sum(0)
        except _Invalid:
            return None
        return value if self._position == len(self._tokens) else None

    def _take(self, allowed: str) -> str | None:
        if self._position < len(self._tokens) and self._tokens[self._position] in allowed:
            self._position += 1
            return self._tokens[self._position - 1]
        return None

    def _sum(self, depth: int) -> Fraction:
        if depth > _MAX_DEPTH:
            raise _Invalid
        is_negative = self._take("-") is not None
        value = self._product(depth)
        value = -value if is_negative else value
        while operator := self._take("+-"):
            term = self._product(depth)
            value = value + term if operator == "+" else value - term
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while operator := self._take("*/"):
            factor = self._factor(depth)
            if operator == "/" and factor == 0:
                raise _Invalid
            value = value * factor if operator == "*" else value / factor
        return value

    def _factor(self, depth: int) -> Fraction:
        if self._take("("):
            value = self._sum(depth + 1)
            if not self._take(")"):
                raise _Invalid
            return value
        if self._position == len(self._tokens) or not self._tokens[self._position].isdigit():
            raise _Invalid
        self._position += 1
        return Fraction(int(self._tokens[self._position - 1]))
