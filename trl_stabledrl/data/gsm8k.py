# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""GSM8K: word problems whose answer is one number."""

from datasets import Dataset

from ._generate import Row
from ._load import load_prompts
from ._prompts import PromptStyle, chat_prompt

_INSTRUCTION = "Solve the following word problem step by step. Its answer is a single number."


def gsm8k_prompts(
    split: str, *, num_prompts: int | None = None, prompt_style: PromptStyle = "d1", source: str = "openai/gsm8k"
) -> Dataset:
    r"""
    GSM8K as chat prompts.

    Args:
        split (`str`):
            `"train"` or `"test"`.
        num_prompts (`int`, *optional*):
            Keep this many rows from the start; all by default.
        prompt_style (`str`, *optional*, defaults to `"d1"`):
            `"d1"` for reasoning and answer tags, `"boxed"` for a box at the end.
        source (`str`, *optional*, defaults to `"openai/gsm8k"`):
            Dataset on the Hub, local file or local folder, with columns `question` and `answer`.

    Returns:
        `datasets.Dataset`:
            Columns `prompt` (one user message) and `answer` (what follows `####` in the solution, or all of it).
    """

    def as_row(row: Row) -> Row:
        return {
            "prompt": chat_prompt(_INSTRUCTION, row["question"], answer="number", style=prompt_style),
            "answer": str(row["answer"]).rsplit("####", 1)[-1].strip(),
        }

    return load_prompts(
        source,
        as_row,
        split=split,
        num_prompts=num_prompts,
        columns=("question", "answer"),
        hub_config="main",
    )
