# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""The one place that words prompts: training and evaluation get the same object."""

from typing import Any, Literal, get_args

PromptStyle = Literal["d1", "boxed"]
PROMPT_STYLES: tuple[str, ...] = get_args(PromptStyle)

_TAGS = (
    "Write your reasoning between <reasoning> and </reasoning>, then only your final answer between <answer> and "
    "</answer>, in this form:\n<reasoning>\n(your steps)\n</reasoning>\n<answer>\n\\boxed{{{answer}}}\n</answer>"
)
_BOX = "Reason step by step, then write your final answer in this form: \\boxed{{{answer}}}"


def chat_prompt(instruction: str, problem: str, *, answer: str, style: PromptStyle) -> list[dict[str, Any]]:
    r"""
    Chat prompt of a text task.

    The instruction stands in the user's message, since the chat template of LLaDA is trained without a system message.

    Args:
        instruction (`str`):
            What the task is.
        problem (`str`):
            The problem itself.
        answer (`str`):
            What the box of the answer holds, in a word or two.
        style (`str`):
            `"d1"` for the protocol of d1 (https://huggingface.co/papers/2504.12216): reasoning in one pair of tags, a
            box with the answer in another. `"boxed"` for reasoning that ends in a box, without tags.

    Returns:
        `list[dict]`:
            One user message.
    """
    if style not in PROMPT_STYLES:
        raise ValueError(f"Unknown `prompt_style` {style!r}: expected {' or '.join(map(repr, PROMPT_STYLES))}.")
    form = (_TAGS if style == "d1" else _BOX).format(answer=answer)
    return [{"role": "user", "content": f"{instruction}\n{form}\n\n{problem.strip()}"}]
