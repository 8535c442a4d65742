# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
The input of a block diffusion model that scores every block of a completion in one pass: one clean text, and beside it
noised copies of the completion, each block of which sees the clean blocks before it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .core.attention import CLEAN, PADDING, Layout


@dataclass(frozen=True)
class Staircase:
    """
    A sequence of `L = P + E + M * (T + N)` positions: prompt, clean completion, noised copies.

    `E` reaches up to the block in which the row ends, which no other block needs to see; a copy has up to
    `block_length - 1` prompt tokens that share the completion's first block (`T`, clean: without them that block would
    have to see them in the clean text, where they have seen its answer), and `N` reaches to the end of the last block.

    Attributes:
        input_ids (`torch.Tensor` of shape `(B, L)`):
            Tokens.
        layout ([`~core.attention.Layout`]):
            What each position is.
        is_scored (`torch.Tensor` of shape `(B, L)`):
            Scored positions, in the order of `plan.is_scored`.
        num_clean (`int`):
            Positions of the clean text, which come first.
    """

    input_ids: Tensor
    layout: Layout
    is_scored: Tensor
    num_clean: int


def build_staircase(
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_length: Tensor,
    is_noised: Tensor,
    is_scored: Tensor,
    *,
    block_length: int,
    mask_token_id: int,
) -> Staircase:
    """
    Lay out rows and their noised copies; columns that every row would leave empty are left out.

    Args:
        prompt_ids (`torch.Tensor` of shape `(B, P)`):
            Left-padded prompts.
        prompt_mask (`torch.BoolTensor` of shape `(B, P)`):
            True on real prompt tokens.
        completion_ids (`torch.Tensor` of shape `(B, W)`):
            Completions in their window; what stands after a row's scored length is not read.
        completion_length (`torch.Tensor` of shape `(B,)`):
            Scored tokens of each row.
        is_noised (`torch.BoolTensor` of shape `(B, M, W)`):
            Masked completion tokens of each copy.
        is_scored (`torch.BoolTensor` of shape `(B, M, W)`):
            Scored ones.
        block_length (`int`):
            Tokens per block, counted from each row's first prompt token.
        mask_token_id (`int`):
            Token at noised positions, and at those after the end token in the last block.

    Returns:
        [`Staircase`]
    """
    window = completion_ids.shape[1]
    num_copies = is_noised.shape[1]
    device = prompt_ids.device
    num_prompt = prompt_mask.sum(-1)  # (B,)
    num_tail = num_prompt % block_length
    has_tokens = completion_length > 0
    num_blocks = (num_tail + completion_length + block_length - 1) // block_length
    last_start = ((num_blocks - 1) * block_length - num_tail).clamp_min(0)  # of the end block, in the completion
    end = (num_blocks * block_length - num_tail).clamp(max=window)
    last_start, end, num_tail = (part.masked_fill(~has_tokens, 0) for part in (last_start, end, num_tail))

    # without the columns of padding that all rows share, but for one: a pass over no position at all does not run
    width = max(int(num_prompt.max()), 1)
    num_extra = max(width - prompt_ids.shape[1], 0)
    prompt_ids, prompt_mask = (
        torch.nn.functional.pad(part, (num_extra, 0))[:, -width:] for part in (prompt_ids, prompt_mask)
    )
    context = torch.arange(int(last_start.max()), device=device)  # (E,)
    column = torch.arange(max(int((num_tail + end).max()), 1), device=device)  # (T + N,), of a copy

    in_completion = column - num_tail[:, None]  # (B, T + N), the completion token in that column
    in_prompt = (width + in_completion).clamp(0, width - 1)  # or the prompt token
    is_tail = in_completion < 0
    is_present = (in_completion < end[:, None]) & has_tokens[:, None]
    token = in_completion.clamp(0, window - 1)

    def of_copies(values: Tensor) -> Tensor:
        """From `(B, M, W)` to the columns of the copies, `(B, M, T + N)`, False outside the completion."""
        is_inside = is_present & ~is_tail
        return values.gather(-1, token[:, None].expand(-1, num_copies, -1)) & is_inside[:, None]

    ids = torch.where(is_tail, prompt_ids.gather(-1, in_prompt), completion_ids.gather(-1, token))
    is_hidden = of_copies(is_noised) | (in_completion >= completion_length[:, None])[:, None]
    copies = ids[:, None].expand(-1, num_copies, -1).masked_fill(is_hidden, mask_token_id)
    copy_index = torch.arange(1, num_copies + 1, device=device)[:, None].expand(-1, len(column))  # (M, T + N)
    layout = Layout(
        copy_index=torch.cat(
            [
                torch.where(prompt_mask, CLEAN, PADDING),
                torch.where(context < last_start[:, None], CLEAN, PADDING),
                torch.where(is_present[:, None], copy_index, PADDING).flatten(1),
            ],
            dim=1,
        ),
        position=torch.cat(
            [
                (prompt_mask.long().cumsum(-1) - 1).clamp_min(0),
                num_prompt[:, None] + context,
                (num_prompt[:, None] + in_completion).clamp_min(0).repeat(1, num_copies),
            ],
            dim=1,
        ),
    )
    return Staircase(
        input_ids=torch.cat([prompt_ids, completion_ids[:, : len(context)], copies.flatten(1)], dim=1),
        layout=layout,
        is_scored=torch.cat(
            [
                torch.zeros(len(prompt_ids), width + len(context), dtype=torch.bool, device=device),
                of_copies(is_scored).flatten(1),
            ],
            dim=1,
        ),
        num_clean=width + len(context),
    )
