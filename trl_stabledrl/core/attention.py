# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
Who sees whom in block diffusion: one predicate, as a dense mask and as FlexAttention's sparse one.

Axis letters: see `core/__init__.py`; `L` positions of a sequence, `Q` of them queries: the last ones, where a cache
holds the others.
"""

from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

ContextAttention = Literal["block_causal", "causal"]

PADDING = -1
CLEAN = 0
_OUTSIDE = -2  # beyond the sequence, where its last tile reaches: unlike padding, never to be computed
TILE = 128
"""Positions along a side of FlexAttention's tiles; its kernels' own default."""


class Layout(NamedTuple):
    """
    What each position of a sequence is. A named tuple, so that DDP and FSDP move its tensors as they move others.

    Attributes:
        copy_index (`Int[Tensor, "B L"]`):
            0 for a clean token, `m` from 1 for one of the m-th noised copy, -1 for padding.
        position (`Int[Tensor, "B L"]`):
            Position in the text, counted from the first real token of the row, so that padding moves no block border.
            Blocks are `position // block_length`.
    """

    copy_index: Tensor
    position: Tensor

    def last(self, num: int) -> "Layout":
        """The last `num` positions."""
        start = self.copy_index.shape[1] - num
        return Layout(self.copy_index[:, start:], self.position[:, start:])


def clean_layout(is_real: Bool[Tensor, "B L"]) -> Layout:
    """Layout of plain text with padding at any place."""
    return Layout(
        is_real.long() - 1,  # CLEAN or PADDING
        (is_real.long().cumsum(dim=-1) - 1).clamp_min(0),
    )


def check_context_attention(context_attention: str) -> None:
    """Raise unless the way clean tokens see each other is known."""
    if context_attention not in get_args(ContextAttention):
        known = ", ".join(get_args(ContextAttention))
        raise ValueError(f"context_attention={context_attention!r} is not known. Use one of {known}.")


def may_attend(
    query_copy: Int[Tensor, "..."],
    query_position: Int[Tensor, "..."],
    key_copy: Int[Tensor, "..."],
    key_position: Int[Tensor, "..."],
    *,
    block_length: int,
    context_attention: ContextAttention = "block_causal",
) -> Bool[Tensor, "..."]:
    """
    The staircase: a clean block sees itself and the clean blocks before it; a noised block sees itself, in its own
    copy, and the clean blocks before it. Padding sees padding of its own position, only so that no query is without a
    key; the masks below give every padding a position of its own.

    Args:
        query_copy (`Int[Tensor, "..."]`):
            [`Layout`] `copy_index` of the queries, of a shape that broadcasts with the others.
        query_position (`Int[Tensor, "..."]`):
            Their positions.
        key_copy (`Int[Tensor, "..."]`):
            `copy_index` of the keys.
        key_position (`Int[Tensor, "..."]`):
            Their positions.
        block_length (`int`):
            Tokens per block.
        context_attention (`str`, *optional*, defaults to `"block_causal"`):
            How clean tokens see each other: `"block_causal"` both ways inside a block, as SDAR was trained and as it
            caches; `"causal"` tokens before and themselves only.

    Returns:
        `Bool[Tensor, "..."]`
    """
    query_block = query_position // block_length
    key_block = key_position // block_length
    is_earlier = (key_copy == CLEAN) & (query_copy >= CLEAN) & (key_block < query_block)
    is_same = (key_copy == query_copy) & (key_block == query_block) & (query_copy >= CLEAN)
    if context_attention == "causal":
        is_same = is_same & ((query_copy > CLEAN) | (key_position <= query_position))
    is_padding = (query_copy == PADDING) & (key_copy == PADDING) & (query_position == key_position)
    return is_earlier | is_same | is_padding


def _with_lone_padding(layout: Layout) -> Layout:
    """Padding at its index, so that it sees itself alone: the rows of a ragged batch would else fill with tiles."""
    copy_index, position = layout
    index = torch.arange(copy_index.shape[1], device=copy_index.device)
    return Layout(copy_index, torch.where(copy_index == PADDING, index, position))


def dense_mask(
    layout: Layout, *, num_queries: int, block_length: int, context_attention: ContextAttention = "block_causal"
) -> Bool[Tensor, "B 1 Q L"]:
    """
    The staircase as a boolean mask, for attention implementations that take one.

    Args:
        layout ([`Layout`]):
            Layout of all keys; the last `num_queries` of them are the queries.
        num_queries (`int`):
            `Q`.
        block_length (`int`):
            Tokens per block.
        context_attention (`str`, *optional*, defaults to `"block_causal"`):
            See [`may_attend`].

    Returns:
        `Bool[Tensor, "B 1 Q L"]`:
            True where a query may attend.
    """
    layout = _with_lone_padding(layout)
    queries = layout.last(num_queries)
    return may_attend(
        queries.copy_index[:, None, :, None],
        queries.position[:, None, :, None],
        layout.copy_index[:, None, None, :],
        layout.position[:, None, None, :],
        block_length=block_length,
        context_attention=context_attention,
    )


class _Tiles(NamedTuple):
    """Ranges over tiles of `TILE` positions, each `(B, T)`; an empty range has its low end above its high end."""

    is_cut: Tensor
    has_padding: Tensor
    has_clean: Tensor
    has_noised: Tensor
    clean_low: Tensor  # of the clean tokens' block or position
    clean_high: Tensor
    noised_low: Tensor  # of the noised tokens' block
    noised_high: Tensor
    padding_low: Tensor  # of the padding's index
    padding_high: Tensor
    code_low: Tensor  # of copy and block in one number, which grows along the sequence
    code_high: Tensor


def _tiles(layout: Layout, *, num_codes: Tensor, block_length: int, by_position: bool) -> _Tiles:
    num_tiles = -(-layout.copy_index.shape[1] // TILE)
    num_extra = num_tiles * TILE - layout.copy_index.shape[1]
    copy = torch.nn.functional.pad(layout.copy_index, (0, num_extra), value=_OUTSIDE).view(-1, num_tiles, TILE)
    position = torch.nn.functional.pad(layout.position, (0, num_extra)).view(-1, num_tiles, TILE)
    block = position // block_length
    is_clean, is_noised = copy == CLEAN, copy > CLEAN

    def extent(values: Tensor, is_member: Tensor) -> tuple[Tensor, Tensor]:
        big = torch.iinfo(values.dtype).max
        return values.masked_fill(~is_member, big).amin(-1), values.masked_fill(~is_member, -1).amax(-1)

    return _Tiles(
        (copy == _OUTSIDE).any(-1),
        (copy == PADDING).any(-1),
        is_clean.any(-1),
        is_noised.any(-1),
        *extent(position if by_position else block, is_clean),
        *extent(block, is_noised),
        *extent(position, copy == PADDING),
        *extent(copy * num_codes + block, is_noised),
    )


def sparse_mask(
    layout: Layout, *, num_queries: int, block_length: int, context_attention: ContextAttention = "block_causal"
) -> BlockMask:
    """
    The staircase as FlexAttention's block mask, built from the range of blocks in each tile: memory and time are those
    of `(L / 128)^2` tiles, and no `L x L` mask ever exists.

    Args:
        layout ([`Layout`]):
            Layout of all keys; the last `num_queries` of them are the queries.
        num_queries (`int`):
            `Q`.
        block_length (`int`):
            Tokens per block.
        context_attention (`str`, *optional*, defaults to `"block_causal"`):
            See [`may_attend`].

    Returns:
        `BlockMask`:
            With the predicate for the tiles it holds for in part, and without it for those it holds for as a whole.
    """
    layout = _with_lone_padding(layout)
    num_codes = layout.position.amax() // block_length + 1
    is_causal = context_attention == "causal"
    queries, keys = (
        _tiles(part, num_codes=num_codes, block_length=block_length, by_position=is_causal)
        for part in (layout.last(num_queries), layout)
    )
    q = _Tiles(*(values[:, :, None] for values in queries))  # (B, Tq, 1)
    k = _Tiles(*(values[:, None, :] for values in keys))  # (B, 1, Tk)
    # clean keys' ranges by block, whatever they are compared by among themselves
    by_block = k
    if is_causal:
        coarse = _tiles(layout, num_codes=num_codes, block_length=block_length, by_position=False)
        by_block = _Tiles(*(values[:, None, :] for values in coarse))

    clean_by_clean = q.has_clean & k.has_clean & (k.clean_low <= q.clean_high)
    noised_by_clean = q.has_noised & k.has_clean & (by_block.clean_low < q.noised_high)
    noised_by_noised = q.has_noised & k.has_noised & (k.code_low <= q.code_high) & (q.code_low <= k.code_high)
    padding_by_itself = (
        (q.has_padding & k.has_padding) & (k.padding_low <= q.padding_high) & (q.padding_low <= k.padding_high)
    )
    is_needed = clean_by_clean | noised_by_clean | noised_by_noised | padding_by_itself
    is_whole = (
        (k.has_clean & ~k.has_noised & ~k.has_padding & ~q.has_padding & ~k.is_cut & ~q.is_cut)
        & (~q.has_clean | (k.clean_high <= q.clean_low))
        & (~q.has_noised | (by_block.clean_high < q.noised_low))
    )

    num_keys = layout.copy_index.shape[1]
    offset = num_keys - num_queries
    copy_index, position = (torch.nn.functional.pad(part, (0, TILE)) for part in layout)  # a tile may reach beyond

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return may_attend(
            copy_index[row, offset + query],
            position[row, offset + query],
            copy_index[row, key],
            position[row, key],
            block_length=block_length,
            context_attention=context_attention,
        )

    def listed(is_listed: Tensor) -> tuple[Tensor, Tensor]:
        """Number of listed key tiles of each query tile, and their indices first."""
        order = (~is_listed).int().argsort(dim=-1, stable=True)
        return is_listed.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None].contiguous()

    partial, whole = listed(is_needed & ~is_whole), listed(is_whole)
    return BlockMask.from_kv_blocks(
        *partial, *whole, BLOCK_SIZE=TILE, mask_mod=mask_mod, seq_lengths=(num_queries, num_keys)
    )
