# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""Exact match, for tasks whose completion is the answer and nothing else."""

from typing import Any

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
    texts = [completion_text(completion).strip() for completion in completions]
    return [float(text == str(gold).strip()) for text, gold in zip(texts, answer, strict=True)]
