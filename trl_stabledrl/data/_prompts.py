# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""The one place that words prompts: training and evaluation get the same object."""

from typing import Any

_FORM = (
    "Write your reasoning between <reasoning> and </reasoning>, then only your final answer between <answer> and "
    "</answer>, in this form:\n<reasoning>\n(your steps)\n</reasoning>\n<answer>\n{form}\n</answer>"
)


def reasoning_prompt(instruction: str, problem: str, *, form: str) -> list[dict[str, Any]]:
    """
    Chat prompt of the d1 protocol: reasoning in one pair of tags, the answer in another.

    The instruction stands in the user's message, since the chat template of LLaDA is trained without a system message.

    Args:
        instruction (`str`):
            What the task is.
        problem (`str`):
            The problem itself.
        form (`str`):
            How to write the answer between its tags.

    Returns:
        `list[dict]`:
            One user message.
    """
    return [{"role": "user", "content": f"{instruction}\n{_FORM.replace('{form}', form)}\n\n{problem.strip()}"}]
