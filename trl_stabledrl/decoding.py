# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What decoding needs before a model is called: prompts as token ids, and settings completed by the family."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from .models.families import Family
from .samplers import SamplingSettings, check_decoding

Prompt = str | list[dict[str, Any]]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    template_options: dict[str, Any] | None = None,
) -> list[list[int]]:
    """
    Tokenize prompts as the trainer does: conversations through the chat template, with the generation prompt.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the model.
        prompts (`Sequence[str]` or `Sequence[list[dict]]`):
            Plain or conversational prompts, not mixed.
        template_options (`dict`, *optional*):
            What the chat template is given beside the conversation; TRL's `chat_template_kwargs`.

    Returns:
        `list[list[int]]`
    """
    if isinstance(prompts, str) or len(prompts) == 0:
        raise ValueError(f"prompts={prompts!r} must be a list with at least one prompt. Put a single one in a list.")
    rows: Any = list(prompts)  # the tokenizers' own annotations are narrower than what they take
    if isinstance(rows[0], str):
        encoded: Any = tokenizer(text=rows)
    else:
        encoded = tokenizer.apply_chat_template(
            rows, add_generation_prompt=True, tokenize=True, return_dict=True, **(template_options or {})
        )
    return encoded["input_ids"]


def sampling_settings(
    family: Family,
    *,
    max_completion_length: int,
    block_length: int | None,
    num_denoising_steps: int | None,
    **rest: Any,
) -> SamplingSettings:
    """Fill in what is left to the family, and raise where the options do not fit together; no model is needed."""
    block_length = family.resolved_block_length(block_length, max_completion_length=max_completion_length)
    if num_denoising_steps is None:
        num_denoising_steps = -(-block_length // family.tokens_per_step)
    settings = SamplingSettings(
        max_completion_length=max_completion_length,
        block_length=block_length,
        num_denoising_steps=num_denoising_steps,
        **rest,
    )
    check_decoding(settings, attention=family.attention)
    return settings
