# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""
Reward functions, called as TRL calls them: completions and dataset columns in, one float per completion out.

They work in any TRL trainer, score plain text and chat messages alike, and ignore columns they do not need.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from .countdown import countdown_format_reward, countdown_reward, grade_countdown
from .exact import exact_match_reward, grade_exact_match
from .format import answer_tag_reward, anti_short_reward
from .grading import Grade
from .math import grade_gsm8k, grade_math, gsm8k_reward, math_reward
from .sudoku import grade_sudoku, sudoku_reward

RewardFunc = Callable[..., list[float]]

BUILTIN_REWARDS: dict[str, RewardFunc] = {
    "answer_tag_reward": answer_tag_reward,
    "anti_short_reward": anti_short_reward,
    "countdown_format_reward": countdown_format_reward,
    "countdown_reward": countdown_reward,
    "exact_match_reward": exact_match_reward,
    "gsm8k_reward": gsm8k_reward,
    "math_reward": math_reward,
    "sudoku_reward": sudoku_reward,
}

GRADERS: dict[str, Callable[..., list[Grade]]] = {
    "countdown_reward": grade_countdown,
    "exact_match_reward": grade_exact_match,
    "gsm8k_reward": grade_gsm8k,
    "math_reward": grade_math,
    "sudoku_reward": grade_sudoku,
}
"""By the name of the correctness reward, which is the score of the grade and nothing else; called like a reward."""

__all__ = ["BUILTIN_REWARDS", "GRADERS", "Grade", "RewardFunc", "load_reward", *BUILTIN_REWARDS]  # pyright: ignore[reportUnsupportedDunderAll]


def load_reward(name_or_dotted_path: str) -> RewardFunc:
    """
    Reward function of a built-in name or a dotted import path.

    Args:
        name_or_dotted_path (`str`):
            A key of `BUILTIN_REWARDS`, or `package.module.function`. Modules are looked for where Python looks, then
            in the current folder, which stays on the search path so that the function may import its neighbours.

    Returns:
        `Callable`:
            The function.

    Example:
    ```python
    >>> from trl_stabledrl.rewards import load_reward

    >>> load_reward("exact_match_reward")(["4"], answer=["4"])
    [1.0]
    ```
    """
    if name_or_dotted_path in BUILTIN_REWARDS:
        return BUILTIN_REWARDS[name_or_dotted_path]
    module_path, _, name = name_or_dotted_path.rpartition(".")
    if not module_path:
        raise _unloadable(name_or_dotted_path, "it is not a built-in name and has no dot")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()  # the module may have been written a moment ago
    try:
        module = importlib.import_module(module_path)
    except Exception as error:  # the module is the user's: whatever it raises is the reason to report
        reason = f"importing `{module_path}` raised {type(error).__name__}: {error}"
        raise _unloadable(name_or_dotted_path, reason) from error
    if name not in vars(module):
        raise _unloadable(name_or_dotted_path, f"module `{module_path}` ({module.__file__}) has no `{name}`")
    function: Any = vars(module)[name]
    if not callable(function):
        raise _unloadable(name_or_dotted_path, f"it is a {type(function).__name__}, not a function")
    return vars(module)[name]


def _unloadable(path: str, reason: str) -> ValueError:
    return ValueError(
        f"Could not load reward `{path}`: {reason}. Give a built-in name ({', '.join(BUILTIN_REWARDS)}) or a dotted "
        f"path such as `my_rewards.fn`, importable from the current folder ({os.getcwd()})."
    )
