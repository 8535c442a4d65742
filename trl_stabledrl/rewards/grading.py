# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""What a grader says of a completion. A reward is its score, an evaluation records all of it."""

from dataclasses import dataclass
from typing import Literal

Reason = Literal["right", "partial", "wrong", "no_answer", "invalid", "timeout"]


@dataclass(frozen=True)
class Grade:
    """
    Grade of one completion.

    Args:
        score (`float`):
            0.0 to 1.0, the reward.
        answer (`str` or `None`):
            What was taken for the answer, `None` where there is none.
        reason (`str`):
            - `"right"`: full score.
            - `"partial"`: some of it is right.
            - `"wrong"`: an answer of the right form, but not the right one.
            - `"no_answer"`: no answer, or one that was not finished.
            - `"invalid"`: not of the form an answer has, breaks a rule of the problem, or too large to be looked at.
            - `"timeout"`: the comparison was stopped at its time limit.
    """

    score: float
    answer: str | None
    reason: Reason

    @property
    def is_right(self) -> bool:
        return self.score == 1.0
