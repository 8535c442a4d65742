# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import shutil
from collections.abc import Sequence
from typing import Any, get_args

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from tests import naive
from trl_stabledrl.core.attention import (
    CLEAN,
    PADDING,
    TILE,
    ContextAttention,
    Layout,
    check_context_attention,
    clean_layout,
    dense_mask,
    may_attend,
    sparse_mask,
)

CONTEXTS = get_args(ContextAttention)
Place = tuple[int, int]
"""Copy and position."""


def staircase_row(
    num_prompt: int, num_completion: int, *, num_copies: int, block: int, prompt_width: int, completion_width: int
) -> list[Place]:
    """Left-padded clean text, and copies that begin with the tail of the prompt; what a row lacks is padding."""
    padding: Place = (PADDING, 0)
    tail = num_prompt % block
    text = num_prompt + num_completion
    places = [padding] * (prompt_width - num_prompt)
    places += [(CLEAN, i) for i in range(text)]
    places += [padding] * (completion_width - num_completion)
    for m in range(1, num_copies + 1):
        places += [padding] * (block - 1 - tail) + [(m, i) for i in range(num_prompt - tail, text)]
        places += [padding] * (completion_width - num_completion)
    return places


def layout_of(rows: Sequence[Sequence[Place]]) -> Layout:
    table = torch.tensor(rows)  # (B, L, 2)
    return Layout(table[..., 0], table[..., 1])


def staircase_layout(
    lengths: Sequence[tuple[int, int]], *, num_copies: int, block: int, extra: int = 0
) -> tuple[Layout, list[list[Place]]]:
    """Layout of rows of given prompt and completion lengths, and the same as lists."""
    prompt_width, completion_width = (max(values) for values in zip(*lengths, strict=True))
    rows = [
        staircase_row(
            p, c, num_copies=num_copies, block=block,
            prompt_width=prompt_width + extra, completion_width=completion_width,
        )
        for p, c in lengths
    ]  # fmt: skip
    return layout_of(rows), rows


def numbered(row: Sequence[Place]) -> list[Place]:
    """Padding is at no position of the text: told apart by its index."""
    return [(copy, i if copy == PADDING else position) for i, (copy, position) in enumerate(row)]


def loops(rows: Sequence[Sequence[Place]], num_queries: int, block: int, context: str) -> Tensor:
    return torch.tensor(
        [
            [[naive.may_see(query, key, block, context) for key in row] for query in row[len(row) - num_queries :]]
            for row in map(numbered, rows)
        ]
    )[:, None]


def random_rows(generator: torch.Generator, num_rows: int, length: int) -> list[list[Place]]:
    """No text at all: any copy and any position anywhere."""
    copies = torch.randint(-1, 4, (num_rows, length), generator=generator)
    positions = torch.randint(0, 3 * length // 4 + 1, (num_rows, length), generator=generator)
    return [list(zip(*row, strict=True)) for row in zip(copies.tolist(), positions.tolist(), strict=True)]


RAGGED = [(5, 7), (9, 3), (2, 8), (0, 4), (8, 1), (3, 0)]  # the last two scored tokens at a border, none
SMALL = [(1, 1), (3, 2), (4, 4), (32, 1)]  # block, copies


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("block", "num_copies"), SMALL)
def test_the_dense_mask_is_the_predicate_in_loops(block, num_copies, context):
    layout, rows = staircase_layout(RAGGED, num_copies=num_copies, block=block, extra=2)
    length = layout.copy_index.shape[1]

    for num_queries in (length, length // 2, 1):
        found = dense_mask(layout, num_queries=num_queries, block_length=block, context_attention=context)
        assert torch.equal(found, loops(rows, num_queries, block, context))
    assert dense_mask(layout, num_queries=length, block_length=block).any(-1).all()  # no query without a key


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_predicate_is_the_one_in_loops_for_any_layout(context, generator):
    rows = random_rows(generator, 3, 40)
    layout = layout_of(rows)

    for block in (1, 3, 4, 32):
        found = dense_mask(layout, num_queries=40, block_length=block, context_attention=context)
        assert torch.equal(found, loops(rows, 40, block, context))
        for query, key in zip(rows[0], reversed(rows[0]), strict=True):
            seen = may_attend(
                *(torch.tensor(x) for x in (*query, *key)), block_length=block, context_attention=context
            )
            assert seen.item() == naive.may_see(query, key, block, context)


def test_who_sees_whom_by_hand():
    """Prompt a b c d e, completion f g, block 4, so that e shares a block with f and g; two copies of e f g."""
    layout, _ = staircase_layout([(5, 2)], num_copies=2, block=4)
    # clean text, then per copy two places of padding and three of text
    seen = dense_mask(layout, num_queries=7 + 2 * (3 + 2), block_length=4)[0, 0]

    clean, first, second = range(7), range(9, 12), range(14, 17)
    for query in range(17):
        found = set(seen[query].nonzero()[:, 0].tolist())
        if query < 4:
            assert found == set(range(4))
        elif query in clean:
            assert found == set(clean)
        elif query in first:
            assert found == set(range(4)) | set(first)  # not the clean e, which has seen f and g
        elif query in second:
            assert found == set(range(4)) | set(second)
        else:
            assert found == {query}


@pytest.mark.parametrize("is_right_padded", [False, True])
def test_a_clean_layout_counts_from_the_first_real_token(is_right_padded):
    is_real = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    is_real = is_real.flip(1) if is_right_padded else is_real

    layout = clean_layout(is_real)

    assert torch.equal(layout.copy_index, torch.where(is_real, CLEAN, PADDING))
    for row, positions in zip(is_real, layout.position, strict=True):
        assert positions[row].tolist() == list(range(int(row.sum())))
    assert layout.last(2).position.tolist() == [row[-2:] for row in layout.position.tolist()]


def tiles_of(mask: BlockMask, *, is_whole: bool) -> Tensor:
    """Which tiles are listed, (B, Tq, Tk), with the lists well formed."""
    count, indices = mask.kv_num_blocks, mask.kv_indices
    if is_whole:
        assert mask.full_kv_num_blocks is not None
        assert mask.full_kv_indices is not None
        count, indices = mask.full_kv_num_blocks, mask.full_kv_indices
    assert count.dtype == indices.dtype == torch.int32
    assert indices.is_contiguous()
    is_listed = torch.zeros_like(indices, dtype=torch.bool)
    for b, h, q in torch.cartesian_prod(*(torch.arange(size) for size in count.shape)).tolist():
        chosen = indices[b, h, q, : count[b, h, q]].long()
        assert len(chosen.unique()) == len(chosen)
        is_listed[b, h, q, chosen] = True
    assert is_listed.shape[1] == 1
    return is_listed[:, 0]


def seen_by_predicate(mask: BlockMask, num_rows: int, shape: tuple[int, int]) -> Tensor:
    """The mask's own function, everywhere."""
    row, query, key = torch.meshgrid(*(torch.arange(size) for size in (num_rows, *shape)), indexing="ij")
    return mask.mask_mod(row, torch.zeros_like(row), query, key)


def materialised(mask: BlockMask, num_rows: int) -> Tensor:
    """What a kernel computes: all of the whole tiles, the function inside the partial ones, nothing elsewhere."""
    num_queries, num_keys = mask.seq_lengths
    partial, whole = tiles_of(mask, is_whole=False), tiles_of(mask, is_whole=True)
    assert not (partial & whole).any()

    def by_position(is_listed: Tensor) -> Tensor:
        expanded = is_listed.repeat_interleave(TILE, dim=1).repeat_interleave(TILE, dim=2)
        return expanded[:, :num_queries, :num_keys]

    seen = seen_by_predicate(mask, num_rows, (num_queries, num_keys))
    return ((by_position(partial) & seen) | by_position(whole))[:, None]


def tile_holds(seen: Tensor, *, is_whole: bool) -> Tensor:
    """Of a dense (B, 1, Q, L): whether any pair of a tile is allowed, or all of them, (B, Tq, Tk)."""
    num_extra = [-size % TILE for size in seen.shape[-2:]]
    padded = torch.nn.functional.pad(seen[:, 0], (0, num_extra[1], 0, num_extra[0]))  # a cut tile is no whole one
    tiles = padded.unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE))  # (B, Tq, TILE, Tk, TILE)
    return tiles.all(4).all(2) if is_whole else tiles.any(4).any(2)


LONG = [(300, 150), (37, 280), (5, 3), (0, 0)]  # up to four tiles of clean text


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("block", "num_copies"), [(1, 1), (3, 2), (4, 2), (128, 1), (200, 1)])
def test_the_sparse_mask_is_the_dense_mask(block, num_copies, context):
    layout, _ = staircase_layout(LONG, num_copies=num_copies, block=block)
    length = layout.copy_index.shape[1]

    for num_queries in (length, length - 100, 4):
        options: dict[str, Any] = {"num_queries": num_queries, "block_length": block, "context_attention": context}
        dense, mask = dense_mask(layout, **options), sparse_mask(layout, **options)
        assert mask.seq_lengths == (num_queries, length)
        assert torch.equal(materialised(mask, len(LONG)), dense)
        partial, whole = tiles_of(mask, is_whole=False), tiles_of(mask, is_whole=True)
        assert not (tile_holds(dense, is_whole=False) & ~(partial | whole)).any()
        assert not (whole & ~tile_holds(dense, is_whole=True)).any()
        # the backward pass walks the same tiles the other way
        assert mask.q_num_blocks is not None
        assert mask.full_q_num_blocks is not None
        assert torch.equal(mask.q_num_blocks[:, 0], partial.sum(1))
        assert torch.equal(mask.full_q_num_blocks[:, 0], whole.sum(1))


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("length", [1, 127, 128, 129, 400])
def test_the_sparse_mask_is_the_dense_mask_of_any_layout(length, context, generator):
    layout = layout_of(random_rows(generator, 2, length))

    for block in (1, 4, 100):
        options: dict[str, Any] = {"block_length": block, "context_attention": context}
        for num_queries in {length, length // 2, 1} - {0}:
            dense = dense_mask(layout, num_queries=num_queries, **options)
            assert torch.equal(materialised(sparse_mask(layout, num_queries=num_queries, **options), 2), dense)


@pytest.mark.parametrize("context", CONTEXTS)
def test_plain_text_with_padding_needs_no_more_tiles_than_a_causal_mask(context):
    is_real = torch.arange(1000) >= torch.tensor([0, 130, 700])[:, None]
    layout = clean_layout(is_real)
    options: dict[str, Any] = {"num_queries": 1000, "block_length": 4, "context_attention": context}

    mask = sparse_mask(layout, **options)

    assert torch.equal(materialised(mask, 3), dense_mask(layout, **options))
    listed = tiles_of(mask, is_whole=False) | tiles_of(mask, is_whole=True)
    assert torch.equal(listed, tile_holds(dense_mask(layout, **options), is_whole=False))
    assert (listed.sum(dim=(1, 2)) <= 8 * 9 // 2 + 1).all()


@pytest.mark.parametrize(("context", "num_listed"), [("block_causal", [464, 309, 74]), ("causal", [464, 300, 74])])
def test_a_typical_staircase_lists_few_tiles_and_none_for_nothing(context, num_listed):
    # P = 512, C = 1024, M = 4, block 4: 5,644 positions, so that 45 tiles a side
    layout, _ = staircase_layout([(512, 1024), (509, 700), (100, 200)], num_copies=4, block=4)
    length = layout.copy_index.shape[1]
    options: dict[str, Any] = {"num_queries": length, "block_length": 4, "context_attention": context}
    dense, mask = dense_mask(layout, **options), sparse_mask(layout, **options)

    partial, whole = tiles_of(mask, is_whole=False), tiles_of(mask, is_whole=True)
    assert partial.shape == (3, 45, 45)
    assert torch.equal(partial | whole, tile_holds(dense, is_whole=False))
    assert torch.equal(whole, tile_holds(dense, is_whole=True))
    assert (partial | whole).sum(dim=(1, 2)).tolist() == num_listed  # of 2,025
    assert whole.sum(dim=(1, 2)).tolist() == [262, 100, 0]


class LargestTensor(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


@pytest.mark.parametrize("context", CONTEXTS)
def test_no_mask_of_all_pairs_is_made_for_the_sparse_one(context):
    layout, _ = staircase_layout([(512, 1024), (509, 1000)], num_copies=4, block=4)
    num_rows, length = layout.copy_index.shape

    with LargestTensor() as sparse:
        sparse_mask(layout, num_queries=length, block_length=4, context_attention=context)
    with LargestTensor() as dense:
        dense_mask(layout, num_queries=length, block_length=4, context_attention=context)

    assert dense.numel == num_rows * length * length
    assert sparse.numel <= num_rows * (length + 2 * TILE)  # 0.02 % of it


def attention_inputs(layout: Layout, generator: torch.Generator, num_queries: int) -> list[Tensor]:
    num_rows, length = layout.copy_index.shape
    query, key, value = (torch.randn(num_rows, 2, length, 16, generator=generator) for _ in range(3))
    return [query[:, :, length - num_queries :], key, value]


@pytest.fixture
def without_shape_checks():
    """The checks keep a stack, which tracing refuses; outside the tests there are none."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# uncompiled, torch computes the scores of all pairs and says so: that is what this test wants
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("context", CONTEXTS)
def test_flex_attention_is_scaled_dot_product_attention_under_the_dense_mask(context, generator):
    layout, _ = staircase_layout([(70, 60), (9, 33), (4, 0)], num_copies=2, block=4)
    for num_queries in (layout.copy_index.shape[1], 50):
        options: dict[str, Any] = {"num_queries": num_queries, "block_length": 4, "context_attention": context}
        query, key, value = attention_inputs(layout, generator, num_queries)

        with torch.no_grad():
            found = flex_attention(query, key, value, block_mask=sparse_mask(layout, **options))
        dense = dense_mask(layout, **options)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=dense)

        torch.testing.assert_close(found, expected, rtol=0, atol=1.2e-6)  # 6.0e-7 seen


# importing torch's own compiler warns of torch's own deprecated decorator
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with a C++ compiler")
@pytest.mark.usefixtures("without_shape_checks")
def test_compiled_flex_attention_walks_the_tiles(generator):
    layout, _ = staircase_layout([(170, 160), (9, 133), (4, 0)], num_copies=2, block=4)
    options: dict[str, Any] = {"num_queries": layout.copy_index.shape[1], "block_length": 4}
    query, key, value = attention_inputs(layout, generator, options["num_queries"])

    with torch.no_grad():  # forward only: torch has no backward of it on the CPU
        found = torch.compile(flex_attention)(query, key, value, block_mask=sparse_mask(layout, **options))
    dense = dense_mask(layout, **options)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=dense)

    torch.testing.assert_close(found, expected, rtol=0, atol=1.2e-6)  # 3.0e-7 seen


def test_an_unknown_context_attention_is_refused():
    with pytest.raises(ValueError, match="context_attention='full' is not known. Use one of block_causal, causal"):
        check_context_attention("full")
