# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""Rewards for the form of a completion, whatever its answer."""

from typing import Any

from .parsing import completion_text, last_boxed

_SHORT_CHARS = 200
_MAX_BOX_SHARE = 0.15


def answer_tag_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """
    Reward function that checks that a completion ends in one `<answer>` block with something in it.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, as plain text or chat messages.
        **kwargs:
            Columns, ignored.

    Returns:
        `list[float]`:
            1.0 where there is exactly one opening and one closing tag, in order, with text between and none behind.
    """
    return [float(_has_answer_block(completion_text(completion))) for completion in completions]


def _has_answer_block(text: str) -> bool:
    _, opening, rest = text.partition("<answer>")
    block, closing, tail = rest.partition("</answer>")
    is_single = text.count("<answer>") == 1 and text.count("</answer>") == 1
    return bool(opening and closing and is_single and block.strip() and not tail.strip())


def anti_short_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    r"""
    Reward function that withholds a bonus from completions that are little more than their box.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, as plain text or chat messages.
        **kwargs:
            Columns, ignored.

    Returns:
        `list[float]`:
            0.0 where the text has fewer than 200 characters other than white space and the content of its last
            `\boxed{}` makes up more than 15 % of them, else 1.0.
    """
    rewards = []
    for completion in completions:
        text = completion_text(completion)
        num_chars = _num_visible(text)
        box_share = _num_visible(last_boxed(text) or "") / max(num_chars, 1)
        rewards.append(float(num_chars >= _SHORT_CHARS or box_share <= _MAX_BOX_SHARE))
    return rewards


def _num_visible(text: str) -> int:
    return sum(map(len, text.split()))
