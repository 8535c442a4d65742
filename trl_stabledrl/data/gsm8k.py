# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""GSM8K: word problems whose answer is one number."""

from typing import Any

from datasets import Dataset

from ._load import check_columns, load_rows
from ._prompts import reasoning_prompt

_INSTRUCTION = "Solve the following word problem step by step. Its answer is a single number."


def gsm8k_prompts(split: str, *, num_prompts: int | None = None, source: str = "openai/gsm8k") -> Dataset:
    r"""
    GSM8K as chat prompts.

    Args:
        split (`str`):
            `"train"` or `"test"`.
        num_prompts (`int`, *optional*):
            Keep this many rows from the start; all by default.
        source (`str`, *optional*, defaults to `"openai/gsm8k"`):
            Dataset on the Hub, local file or local folder, with columns `question` and `answer`.

    Returns:
        `datasets.Dataset`:
            Columns `prompt` (one user message) and `answer` (what follows `####` in the solution, or all of it).
    """
    rows = load_rows(source, config_name="main", split=split, num_prompts=num_prompts)
    check_columns(rows, source, ("question", "answer"))

    def as_prompt(row: dict[str, Any]) -> dict[str, Any]:
        return {
            "prompt": reasoning_prompt(_INSTRUCTION, row["question"], form=r"\boxed{number}"),
            "answer": str(row["answer"]).rsplit("####", 1)[-1].strip(),
        }

    return Dataset.from_list([as_prompt(row) for row in rows])  # type: ignore[arg-type]
