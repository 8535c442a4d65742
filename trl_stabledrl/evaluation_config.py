# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Configuration of an evaluation."""

import inspect
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from .checks import check_choice
from .core.unmasking import Remasking
from .data import TASKS, Task
from .samplers import SuppressEos


@dataclass(kw_only=True)
class EvaluationConfig:
    r"""
    What [`evaluate`] does. The options of decoding are those of [`trl_stabledrl.generate`].

    Args:
        task (`str`, *optional*):
            Key of [`data.TASKS`].
        split (`str`, *optional*, defaults to `"test"`):
            Split of the task.
        limit (`int`, *optional*):
            Items from the start of the split. Defaults to the task's: all of a dataset, 512 generated ones.
        prompt_style (`str`, *optional*):
            How prompts are worded. Defaults to the task's.
        source (`str`, *optional*):
            Local file, local folder or dataset on the Hub that holds the items. Defaults to the task's.
        data_seed (`int`, *optional*):
            Seed of generated items. Defaults to the task's.
        max_completion_length (`list[int]`, *optional*):
            Tokens of the window, one evaluation for each. Defaults to the task's.
        num_samples (`int`, *optional*, defaults to `1`):
            Completions per item.
        num_resamples (`int`, *optional*, defaults to `2000`):
            Resamples of the items for the intervals.
        block_length (`int`, *optional*):
            Tokens per block. Defaults to the family's.
        num_denoising_steps (`int`, *optional*):
            Steps per block. Defaults to the family's.
        temperature (`float`, *optional*, defaults to `0.0`):
            0 is greedy.
        top_k (`int`, *optional*, defaults to `0`):
            Keep only the most likely tokens; 0 keeps all.
        top_p (`float`, *optional*, defaults to `1.0`):
            Keep the most likely tokens up to this probability.
        remasking (`str`, *optional*, defaults to `"low_confidence"`):
            Which predictions are committed first: `"low_confidence"`, `"random"`, `"entropy"` or `"margin"`.
        confidence_threshold (`float`, *optional*):
            Dynamic decoding: commit every token at least this confident instead of an even share.
        suppress_eos (`str`, *optional*):
            `"sampling"` or `"early_commit"`.
        guidance_scale (`float`, *optional*, defaults to `0.0`):
            Strength of classifier-free guidance; doubles the work.
        batch_size (`int`, *optional*, defaults to `8`):
            Completions per batch and process. No score depends on it, up to the rounding of the model's arithmetic.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the completions' own generators and of the intervals.
        output_dir (`str`, *optional*):
            Folder of the results. An evaluation that was interrupted goes on where its folder is given again.
        show_progress (`bool`, *optional*, defaults to `True`):
            Show a bar with the running accuracy.
    """

    task: str | None = field(default=None, metadata={"help": "What is asked and graded.", "choices": [*TASKS]})
    split: str = field(default="test", metadata={"help": "Split of the task."})
    limit: int | None = field(
        default=None, metadata={"help": "Items from the start of the split. Defaults to all, or 512 generated ones."}
    )
    prompt_style: str | None = field(
        default=None, metadata={"help": "How prompts are worded: d1 or boxed. Defaults to the task's."}
    )
    source: str | None = field(
        default=None, metadata={"help": "Local file, folder or dataset on the Hub in place of the task's own."}
    )
    data_seed: int | None = field(default=None, metadata={"help": "Seed of generated items."})
    max_completion_length: list[int] | None = field(
        default=None, metadata={"help": "Tokens of the window; one or several. Defaults to the task's."}
    )
    num_samples: int = field(default=1, metadata={"help": "Completions per item."})
    num_resamples: int = field(default=2000, metadata={"help": "Resamples of the items for the intervals."})
    block_length: int | None = field(default=None, metadata={"help": "Tokens per block. Defaults to the family's."})
    num_denoising_steps: int | None = field(
        default=None, metadata={"help": "Denoising steps per block. Defaults to the family's."}
    )
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy."})
    top_k: int = field(default=0, metadata={"help": "Keep only the most likely tokens; 0 keeps all."})
    top_p: float = field(default=1.0, metadata={"help": "Keep the most likely tokens up to this probability."})
    remasking: Remasking = field(default="low_confidence", metadata={"help": "Which predictions are committed first."})
    confidence_threshold: float | None = field(
        default=None, metadata={"help": "Commit every token at least this confident instead of an even share."}
    )
    suppress_eos: SuppressEos | None = field(
        default=None, metadata={"help": "Never sample end tokens, or commit them last in their block."}
    )
    guidance_scale: float = field(default=0.0, metadata={"help": "Strength of classifier-free guidance."})
    batch_size: int = field(default=8, metadata={"help": "Completions per batch and process."})
    seed: int = field(default=0, metadata={"help": "Seed of everything random."})
    output_dir: str | None = field(
        default=None, metadata={"help": "Folder of the results; given again, an interrupted evaluation goes on."}
    )
    show_progress: bool = field(default=True, metadata={"help": "Show a bar with the running accuracy."})

    def __post_init__(self):
        if self.task is None:
            raise ValueError(f"task is missing. Use one of {', '.join(TASKS)}.")
        if self.task not in TASKS:
            nearest = get_close_matches(self.task, TASKS, n=1, cutoff=0.0)[0]
            raise ValueError(f"task={self.task!r} is not known. Did you mean {nearest!r}? Tasks: {', '.join(TASKS)}.")
        self._check_items(TASKS[self.task])
        check_choice("remasking", self.remasking, Remasking)
        check_choice("suppress_eos", self.suppress_eos, SuppressEos)
        lengths: Any = self.max_completion_length
        if lengths is None:
            lengths = TASKS[self.task].max_completion_length
        self.max_completion_length = lengths = [lengths] if isinstance(lengths, int) else [*lengths]
        is_whole = all(isinstance(length, int) and length >= 1 for length in lengths)
        if not lengths or not is_whole or len({*lengths}) < len(lengths):
            raise ValueError(
                f"max_completion_length={' '.join(map(str, lengths)) or 'nothing'} must be one or more different "
                "whole numbers of at least 1, such as 128 256 512."
            )
        lowest = {"limit": 1, "num_samples": 1, "num_resamples": 1, "batch_size": 1, "seed": 0}
        for name, least in lowest.items():
            value = vars(self)[name]
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}.")
        if self.num_samples > 1 and self.temperature == 0 and self.remasking != "random":
            raise ValueError(
                f"num_samples={self.num_samples} with temperature=0: greedy completions of an item are all the same. "
                "Set a temperature, or leave num_samples out."
            )

    def _check_items(self, task: Task) -> None:
        if self.split not in task.splits:
            raise ValueError(f"split={self.split!r} is none of task {task.name}: {', '.join(task.splits)}.")
        if self.prompt_style is None:
            self.prompt_style = task.prompt_styles[0] if task.prompt_styles else None
        elif self.prompt_style not in task.prompt_styles:
            raise ValueError(
                f"prompt_style={self.prompt_style!r} is none of task {task.name}: "
                + (f"{', '.join(task.prompt_styles)}." if task.prompt_styles else "it has one wording. Leave it out.")
            )
        if self.source is not None and not task.can_be_loaded:
            raise ValueError(
                f"source={self.source!r} does not apply to task {task.name}, whose items are generated. Leave it out."
            )
        if self.data_seed is not None and "seed" not in inspect.signature(task.prompts).parameters:
            raise ValueError(
                f"data_seed={self.data_seed} does not apply to task {task.name}, whose items are loaded. Leave it out."
            )
