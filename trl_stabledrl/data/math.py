# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""MATH: competition problems whose answer is an expression."""

from typing import Any

from datasets import Dataset

from .._text import last_boxed
from ._load import check_columns, load_rows
from ._prompts import reasoning_prompt

_INSTRUCTION = "Solve the following mathematics problem step by step and simplify the result."


def math_prompts(
    split: str, *, num_prompts: int | None = None, source: str = "DigitalLearningGmbH/MATH-lighteval"
) -> Dataset:
    r"""
    MATH as chat prompts.

    Args:
        split (`str`):
            `"train"` or `"test"`.
        num_prompts (`int`, *optional*):
            Keep this many rows from the start; all by default.
        source (`str`, *optional*, defaults to `"DigitalLearningGmbH/MATH-lighteval"`):
            Dataset on the Hub, local file or local folder, with columns `problem` and `solution`.

    Returns:
        `datasets.Dataset`:
            Columns `prompt` (one user message) and `answer` (content of the solution's last `\boxed{}`).
    """
    rows = load_rows(source, config_name=None, split=split, num_prompts=num_prompts)
    check_columns(rows, source, ("problem", "solution"))

    def as_prompt(index: int, row: dict[str, Any]) -> dict[str, Any]:
        answer = last_boxed(row["solution"])
        if not answer:
            raise ValueError(
                f"Row {index} of the {split} split of {source!r} has no \\boxed{{}} in its `solution`: "
                f"{row['solution'][-200:]!r}. Box the answer or drop the row."
            )
        return {"prompt": reasoning_prompt(_INSTRUCTION, row["problem"], form=r"\boxed{answer}"), "answer": answer}

    return Dataset.from_list([as_prompt(index, row) for index, row in enumerate(rows)])  # type: ignore[arg-type]
