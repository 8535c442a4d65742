# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""Competition problems whose answer is an expression: MATH to train on; its 500 problems and AIME to evaluate on."""

from datasets import Dataset

from .._text import last_boxed
from ._generate import Row
from ._load import load_prompts
from ._prompts import PromptStyle, chat_prompt

_INSTRUCTION = "Solve the following mathematics problem step by step and simplify the result."
_AIME_INSTRUCTION = "Solve the following mathematics problem step by step. Its answer is an integer from 0 to 999."


def math_prompts(
    split: str,
    *,
    num_prompts: int | None = None,
    prompt_style: PromptStyle = "d1",
    source: str = "DigitalLearningGmbH/MATH-lighteval",
) -> Dataset:
    r"""
    MATH as chat prompts.

    Args:
        split (`str`):
            `"train"` or `"test"`.
        num_prompts (`int`, *optional*):
            Keep this many rows from the start; all by default.
        prompt_style (`str`, *optional*, defaults to `"d1"`):
            `"d1"` for reasoning and answer tags, `"boxed"` for a box at the end.
        source (`str`, *optional*, defaults to `"DigitalLearningGmbH/MATH-lighteval"`):
            Dataset on the Hub, local file or local folder, with columns `problem` and `solution`.

    Returns:
        `datasets.Dataset`:
            Columns `prompt` (one user message) and `answer` (content of the solution's last `\boxed{}`).
    """

    def as_row(row: Row) -> Row:
        answer = last_boxed(row["solution"])
        if not answer:
            raise ValueError(
                f"`solution` has no \\boxed{{}}, got {row['solution'][-200:]!r}. Box the answer or drop the row."
            )
        return {"prompt": _prompt(_INSTRUCTION, row, prompt_style), "answer": answer}

    return load_prompts(source, as_row, split=split, num_prompts=num_prompts, columns=("problem", "solution"))


def math500_prompts(
    split: str = "test",
    *,
    num_prompts: int | None = None,
    prompt_style: PromptStyle = "d1",
    source: str = "HuggingFaceH4/MATH-500",
) -> Dataset:
    """
    The 500 problems of MATH's test split that are the usual benchmark, as chat prompts worded like those of MATH.

    Args:
        split (`str`, *optional*, defaults to `"test"`):
            `"test"`, the only one.
        num_prompts (`int`, *optional*):
            Keep this many rows from the start; all by default.
        prompt_style (`str`, *optional*, defaults to `"d1"`):
            `"d1"` for reasoning and answer tags, `"boxed"` for a box at the end.
        source (`str`, *optional*, defaults to `"HuggingFaceH4/MATH-500"`):
            Dataset on the Hub, local file or local folder, with columns `problem` and `answer`.

    Returns:
        `datasets.Dataset`:
            Columns `prompt` (one user message) and `answer`.
    """

    def as_row(row: Row) -> Row:
        return {"prompt": _prompt(_INSTRUCTION, row, prompt_style), "answer": str(row["answer"])}

    return load_prompts(
        source, as_row, split=split, num_prompts=num_prompts, columns=("problem", "answer"), splits=("test",)
    )


def aime24_prompts(
    split: str = "test",
    *,
    num_prompts: int | None = None,
    prompt_style: PromptStyle = "d1",
    source: str = "HuggingFaceH4/aime_2024",
) -> Dataset:
    """
    The 30 problems of AIME I and II of 2024 as chat prompts.

    Args:
        split (`str`, *optional*, defaults to `"test"`):
            `"test"`, the only one, whatever the source calls it.
        num_prompts (`int`, *optional*):
            Keep this many rows from the start; all by default.
        prompt_style (`str`, *optional*, defaults to `"d1"`):
            `"d1"` for reasoning and answer tags, `"boxed"` for a box at the end.
        source (`str`, *optional*, defaults to `"HuggingFaceH4/aime_2024"`):
            Dataset on the Hub, local file or local folder, with columns `problem` and `answer`.

    Returns:
        `datasets.Dataset`:
            Columns `prompt` (one user message) and `answer` (digits, without the leading zeros of an answer sheet).
    """

    def as_row(row: Row) -> Row:
        answer = str(row["answer"]).strip()
        if not (answer.isascii() and answer.isdigit() and int(answer) < 1000):
            raise ValueError(f"`answer` must be an integer from 0 to 999, got {answer!r}.")
        return {"prompt": _prompt(_AIME_INSTRUCTION, row, prompt_style), "answer": str(int(answer))}

    return load_prompts(
        source,
        as_row,
        split=split,
        num_prompts=num_prompts,
        columns=("problem", "answer"),
        hub_split="train",
        splits=("test",),
    )


def _prompt(instruction: str, row: Row, style: PromptStyle) -> list[dict[str, str]]:
    return chat_prompt(instruction, row["problem"], answer="answer", style=style)
