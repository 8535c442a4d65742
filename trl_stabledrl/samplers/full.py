# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Block-by-block decoding of full-attention models (LLaDA). Axis letters: see `core/__init__.py`; `W` window, `A` rows
in a forward pass."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .common import Decoding, Rollout, SamplingSettings, check_decoding, check_inputs


@torch.no_grad()
def sample_full(
    model: Callable[..., tuple[Tensor, Tensor]],
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    *,
    mask_token_id: int,
    end_token_ids: Sequence[int],
    settings: SamplingSettings,
    row_seeds: Sequence[int],
    progress: Callable[[int, int], None] | None = None,
    any_rank_active: Callable[[bool], bool] | None = None,
    record_confidence: bool = False,
) -> Rollout:
    """
    Decode one completion per row, block by block, with the whole window in view.

    A row depends on its own prompt and seed alone: not on its neighbours, its place, the padding, or when others
    finish. Rows whose finished blocks hold an end token leave the batch, and only masked positions of the active block
    are projected onto the vocabulary.

    Args:
        model (`Callable`):
            Model with [`models.bidirectional.SelectedPositionsMixin`], wrapped or not, in the train or eval mode the
            caller wants.
        prompt_ids (`torch.Tensor`):
            `(B, P)` left-padded prompts. They may contain end tokens.
        prompt_mask (`torch.Tensor`):
            `(B, P)` true on real prompt tokens. Lengths come from here alone, whatever the padding token is.
        mask_token_id (`int`):
            Token that stands for "not yet decoded". Never in the output.
        end_token_ids (`Sequence[int]`):
            Tokens that end a completion.
        settings ([`SamplingSettings`]):
            How to decode.
        row_seeds (`Sequence[int]`):
            Seed of each row's own generator.
        progress (`Callable[[int, int], None]`, *optional*):
            Called after each step with the positions decided so far and in total.
        any_rank_active (`Callable[[bool], bool]`, *optional*):
            Says whether any rank has rows left, given whether this one has. With parameters sharded over ranks every
            forward is a collective: a rank that is done runs empty ones until all are.
        record_confidence (`bool`, *optional*, defaults to `False`):
            Whether to keep the confidence of each committed token.

    Returns:
        [`Rollout`]: Completions, trajectory and counters.
    """
    check_decoding(settings, attention="full")
    check_inputs(prompt_ids, prompt_mask, mask_token_id, end_token_ids, row_seeds)
    prompt_ids, prompt_mask = prompt_ids.long(), prompt_mask.bool()
    num_rows = len(prompt_ids)
    decoding = Decoding(
        prompt_ids.new_full((num_rows, settings.max_completion_length), mask_token_id),  # (B, W)
        prompt_ids.new_zeros(num_rows),
        mask_token_id=mask_token_id,
        end_token_ids=end_token_ids,
        settings=settings,
        row_seeds=row_seeds,
        record_confidence=record_confidence,
    )
    while True:
        is_active = decoding.advance()
        if not (is_active if any_rank_active is None else any_rank_active(is_active)):
            return decoding.rollout()
        if is_active:
            _denoise(decoding, model, prompt_ids, prompt_mask)
            if progress is not None:
                progress(decoding.num_decided, decoding.text_ids.numel())
        else:
            _keep_company(decoding, model)


def _denoise(
    decoding: Decoding, model: Callable[..., tuple[Tensor, Tensor]], prompt_ids: Tensor, prompt_mask: Tensor
) -> None:
    """Sample at the masked positions of the active block, and commit some of them."""
    rows, block = torch.tensor(decoding.busy, device=prompt_ids.device), decoding.block
    prompt_mask = prompt_mask[rows]
    # columns that are padding in every row left: a row's result does not depend on them, its cost does
    num_idle = int((~prompt_mask.any(dim=0)).sum())
    prompt_ids, prompt_mask = prompt_ids[rows, num_idle:], prompt_mask[:, num_idle:]
    window_ids = decoding.text_ids[rows]  # (A, W)

    input_ids = torch.cat([prompt_ids, window_ids], dim=1)  # (A, S)
    attention_mask = torch.cat([prompt_mask, torch.ones_like(window_ids, dtype=torch.bool)], dim=1)
    is_selected = torch.zeros_like(attention_mask)
    offset = prompt_ids.shape[1]
    is_selected[:, offset + block.start : offset + block.stop] = decoding.is_masked[rows, block]
    if decoding.settings.guidance_scale > 0:
        blind_ids = torch.cat([prompt_ids.masked_fill(prompt_mask, decoding.mask_token_id), window_ids], dim=1)
        input_ids = torch.cat([input_ids, blind_ids])  # (2A, S)
        attention_mask, is_selected = attention_mask.repeat(2, 1), is_selected.repeat(2, 1)
    decoding.commit(*decoding.run(model, _inputs(input_ids, attention_mask, is_selected)))


def _keep_company(decoding: Decoding, model: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Run one forward pass that samples nothing, for ranks that still have rows."""
    input_ids = decoding.text_ids.new_full((1, 1), decoding.mask_token_id)
    is_attended = torch.ones_like(input_ids, dtype=torch.bool)
    decoding.run(model, _inputs(input_ids, is_attended, ~is_attended))


def _inputs(input_ids: Tensor, attention_mask: Tensor, is_selected: Tensor) -> dict[str, Tensor]:
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask.long(),
        "position_ids": (attention_mask.long().cumsum(dim=-1) - 1).clamp_min(0),
        "is_selected": is_selected,
    }
