# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""Correctness of numbers (GSM8K) and of mathematical expressions (MATH)."""

import importlib.util
import re
from fractions import Fraction
from typing import Any

from ._math_forms import decide, prepared
from ._math_pool import MathPool
from .grading import Grade, Reason
from .parsing import completion_text, extract_answer, extract_number, find_numbers, last_boxed

_MAX_EXPRESSION_CHARS = 500
_MAX_NESTING = 30
_MAX_DIGIT_RUN = 60
_POOL = MathPool(seconds=0.8)  # of processor time, per comparison; the usual one takes 0.02
_REASON_OF_OUTCOME: dict[str, Reason] = {
    "equal": "right",
    "unequal": "wrong",
    "unreadable": "invalid",
    "timeout": "timeout",
}


def gsm8k_reward(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float]:
    r"""
    Reward function that checks whether the completion's number equals the right one, exactly.

    Numbers are compared as fractions: `72.0`, `$72`, `144/2` and `\boxed{72}` all equal `72`.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, as plain text or chat messages.
        answer (`list`):
            Right answers: a number, its text, or a full GSM8K solution that ends in `#### number`.
        **kwargs:
            Other columns, ignored.

    Returns:
        `list[float]`:
            1.0 for a right answer, else 0.0.

    Example:
    ```python
    >>> from trl_stabledrl.rewards import gsm8k_reward

    >>> gsm8k_reward(["<answer>$1,200</answer>", "It is 12."], answer=["1200", "13"])
    [1.0, 0.0]
    ```
    """
    return [grade.score for grade in grade_gsm8k(completions, answer)]


def grade_gsm8k(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[Grade]:
    """Grades of `gsm8k_reward`. An answer that is not one number is `"invalid"`."""
    right = [_gold_number(gold) for gold in answer]
    return [_number_grade(completion_text(text), gold) for text, gold in zip(completions, right, strict=True)]


def _number_grade(text: str, gold: Fraction) -> Grade:
    number = extract_number(text)
    if number is None:
        answer = extract_answer(text)
        return Grade(0.0, answer, "invalid") if answer else Grade(0.0, None, "no_answer")
    return Grade(1.0, str(number), "right") if number == gold else Grade(0.0, str(number), "wrong")


def _gold_number(answer: Any) -> Fraction:
    text = str(answer).rsplit("####", 1)[-1]
    numbers = find_numbers(text) if re.fullmatch(r"[-+$0-9.,/%eE\s]*", text) else []
    if len(numbers) != 1 or numbers[0] is None:
        raise ValueError(
            f"Column `answer` must hold one number per row, got {answer!r}. Give the number itself, or a solution "
            "that ends in '#### number'; for other answers use `math_reward`."
        )
    return numbers[0]


def math_reward(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float]:
    r"""
    Reward function that checks whether the completion's expression equals the right one, by math-verify.

    Texts, numbers, percentages and quantities with units are decided here, exactly (0.333 is not 1/3, 5 cm is not 5 m,
    but either of them is 5). All else is compared by math-verify, as many pairs at a time as there are cores, in
    processes of their own. A comparison that takes more than 0.8 seconds of processor time, has more than 500
    characters or nests deeper than 30 scores 0; waiting for a turn does not count.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, as plain text or chat messages.
        answer (`list[str]`):
            Right answers, as LaTeX with or without `\boxed{}` and `$`.
        **kwargs:
            Other columns, ignored.

    Returns:
        `list[float]`:
            1.0 for a right answer, else 0.0.

    Example:
    ```python
    >>> from trl_stabledrl.rewards import math_reward

    >>> math_reward([r"\boxed{\frac{2}{4}}", r"\boxed{2}"], answer=[r"\frac{1}{2}", "3"])
    [1.0, 0.0]
    ```
    """
    return [grade.score for grade in grade_math(completions, answer)]


def grade_math(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[Grade]:
    """Grades of `math_reward`. All comparisons of a call that need math-verify are made at once, in parallel."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("`math_reward` needs math-verify. Install it with `pip install trl_stabledrl[math]`.")
    answers = [extract_answer(completion_text(completion)) for completion in completions]
    pairs = [(_bare(gold), given) for gold, given in zip(answer, answers, strict=True)]
    reasons: list[Reason | None] = [_reason_without_pool(gold, given) for gold, given in pairs]
    # Completions of one prompt often agree
    open_pairs = list(dict.fromkeys(pair for pair, reason in zip(pairs, reasons, strict=True) if reason is None))
    outcomes = _POOL.outcomes([prepared(gold, given or "") for gold, given in open_pairs])
    outcome_of = dict(zip(open_pairs, outcomes, strict=True))
    return [
        _grade(pair[1], _REASON_OF_OUTCOME[outcome_of[pair]] if reason is None else reason)
        for pair, reason in zip(pairs, reasons, strict=True)
    ]


def _grade(answer: str | None, reason: Reason) -> Grade:
    return Grade(float(reason == "right"), answer or None, reason)


def _bare(gold: Any) -> str:
    text = "" if gold is None else str(gold)
    boxed = last_boxed(text)
    text = (text if boxed is None else boxed).strip().removeprefix("$").removesuffix("$").strip()
    if not text:
        raise ValueError(
            f"Column `answer` must hold one expression per row, got {gold!r}. Give it as LaTeX, with or without "
            r"`\boxed{}`, and leave out rows without an answer."
        )
    return text


def _reason_without_pool(gold: str, answer: str | None) -> Reason | None:
    """How an answer is graded that needs no algebra, `None` for one that does."""
    if not answer:
        return "no_answer"
    if not _is_affordable(answer):
        return "invalid"
    is_equal = decide(gold, answer)
    return None if is_equal is None else "right" if is_equal else "wrong"


def _is_affordable(answer: str) -> bool:
    """Whether an answer is of a size worth handing to a computer algebra system."""
    if len(answer) > _MAX_EXPRESSION_CHARS or re.search(rf"[0-9]{{{_MAX_DIGIT_RUN}}}", answer):
        return False
    # sympy reads digits of any script, a grader of a model's text should not
    if any(character.isdigit() and not character.isascii() for character in answer):
        return False
    depth = deepest = 0
    for character in answer:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    return deepest <= _MAX_NESTING
