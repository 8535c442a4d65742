# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""
Tasks: where prompts come from, which rewards grade them, and how long they are.

Generated tasks are a pure function of split and seed and never touch the global random state; their splits are
disjoint by a hash of the problem.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from datasets import Dataset

from ._generate import SPLITS
from ._prompts import PROMPT_STYLES
from .addition import addition_prompts
from .countdown import countdown_prompts
from .gsm8k import gsm8k_prompts
from .math import aime24_prompts, math500_prompts, math_prompts
from .sorting import sorting_prompts
from .sudoku import sudoku_prompts

__all__ = [
    "TASKS",
    "Task",
    "addition_prompts",
    "aime24_prompts",
    "countdown_prompts",
    "gsm8k_prompts",
    "math500_prompts",
    "math_prompts",
    "sorting_prompts",
    "sudoku_prompts",
]


@dataclass(frozen=True, kw_only=True)
class Task:
    """
    A task: one place that yields prompts, answer columns and rewards, in training and evaluation alike.

    Args:
        name (`str`):
            Key of `TASKS`.
        prompts (`Callable[..., datasets.Dataset]`):
            `prompts(split, *, num_prompts=None, ...)`, rows with `prompt` and the columns the rewards need. Tasks that
            can be generated also take `seed`, those that can be loaded `source` (Countdown and Sudoku take either),
            those with `prompt_styles` `prompt_style`.
        reward_names (`tuple[str, ...]`):
            Keys of `trl_stabledrl.rewards.BUILTIN_REWARDS`, the correctness reward first.
        max_prompt_length (`int`):
            Most tokens of a prompt: exact for the tasks of single characters, an upper estimate for text.
        max_completion_length (`int`):
            Tokens to leave for a completion, its end token included.
        splits (`tuple[str, ...]`, *optional*, defaults to `("train", "test")`):
            Splits it has.
        prompt_styles (`tuple[str, ...]`, *optional*, defaults to `()`):
            Wordings it has, the default first; none for the tasks of single characters.
        can_be_loaded (`bool`, *optional*, defaults to `False`):
            Whether `prompts` takes a `source`.
        target_column (`str`, *optional*):
            Column that is itself a right completion, to warm-start on; `None` where completions hold reasoning.
        has_fixed_length (`bool`, *optional*, defaults to `False`):
            Whether every right completion has exactly `max_completion_length` tokens and no end token.
    """

    name: str
    prompts: Callable[..., Dataset]
    reward_names: tuple[str, ...]
    max_prompt_length: int
    max_completion_length: int
    splits: tuple[str, ...] = SPLITS
    prompt_styles: tuple[str, ...] = ()
    can_be_loaded: bool = False
    target_column: str | None = None
    has_fixed_length: bool = False


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="sorting",
            prompts=sorting_prompts,
            reward_names=("exact_match_reward",),
            max_prompt_length=8,
            max_completion_length=8,
            target_column="answer",
            has_fixed_length=True,
        ),
        Task(
            name="addition",
            prompts=addition_prompts,
            reward_names=("exact_match_reward",),
            max_prompt_length=6,
            max_completion_length=4,
            target_column="answer",
        ),
        Task(
            name="sudoku_digits",
            prompts=partial(sudoku_prompts, prompt_style="digits"),
            reward_names=("sudoku_reward",),
            max_prompt_length=16,
            max_completion_length=16,
            target_column="solution",
            has_fixed_length=True,
        ),
        Task(
            name="sudoku",
            prompts=sudoku_prompts,
            reward_names=("sudoku_reward",),
            max_prompt_length=256,
            max_completion_length=256,
            prompt_styles=PROMPT_STYLES,
            can_be_loaded=True,
        ),
        Task(
            name="countdown",
            prompts=countdown_prompts,
            reward_names=("countdown_reward",),
            max_prompt_length=256,
            max_completion_length=256,
            prompt_styles=PROMPT_STYLES,
            can_be_loaded=True,
        ),
        Task(
            name="countdown4",
            prompts=partial(countdown_prompts, num_numbers=4),
            reward_names=("countdown_reward",),
            max_prompt_length=256,
            max_completion_length=256,
            prompt_styles=PROMPT_STYLES,
            can_be_loaded=True,
        ),
        Task(
            name="gsm8k",
            prompts=gsm8k_prompts,
            reward_names=("gsm8k_reward",),
            max_prompt_length=512,
            max_completion_length=256,
            prompt_styles=PROMPT_STYLES,
            can_be_loaded=True,
        ),
        Task(
            name="math",
            prompts=math_prompts,
            reward_names=("math_reward",),
            max_prompt_length=1024,
            max_completion_length=256,
            prompt_styles=PROMPT_STYLES,
            can_be_loaded=True,
        ),
        Task(
            name="math500",
            prompts=math500_prompts,
            reward_names=("math_reward",),
            max_prompt_length=1024,
            max_completion_length=256,
            splits=("test",),
            prompt_styles=PROMPT_STYLES,
            can_be_loaded=True,
        ),
        Task(
            name="aime24",
            prompts=aime24_prompts,
            reward_names=("math_reward",),
            max_prompt_length=1024,
            max_completion_length=512,
            splits=("test",),
            prompt_styles=PROMPT_STYLES,
            can_be_loaded=True,
        ),
    )
}
