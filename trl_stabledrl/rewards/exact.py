# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""Exact match, for tasks whose completion is the answer and nothing else."""

from typing import Any

from .grading import Grade
from .parsing import completion_text


def exact_match_reward(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float]:
    """
    Reward function that checks whether the completion is the answer, up to white space around it.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, as plain text or chat messages.
        answer (`list`):
            Right answers.
        **kwargs:
            Other columns, ignored.

    Returns:
        `list[float]`:
            1.0 for a match, else 0.0.

    Example:
    ```python
    >>> from trl_stabledrl.rewards import exact_match_reward

    >>> exact_match_reward(["123 ", "132"], answer=["123", "123"])
    [1.0, 0.0]
    ```
    """
    return [grade.score for grade in grade_exact_match(completions, answer)]


def grade_exact_match(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[Grade]:
    """Grades of `exact_match_reward`."""
    return [_grade(completion_text(text).strip(), gold) for text, gold in zip(completions, answer, strict=True)]


def _grade(text: str, gold: Any) -> Grade:
    if gold is None:
        raise ValueError("Column `answer` must hold one text per row, got None. Leave out rows without an answer.")
    if text == str(gold).strip():
        return Grade(1.0, text, "right")
    return Grade(0.0, text, "wrong") if text else Grade(0.0, None, "no_answer")
