# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Block-by-block decoding of block diffusion models (SDAR), with an exact cache of the finished blocks. Axis letters:
see `core/__init__.py`; `A` rows in a forward pass, `Q` positions through it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from .._compat import CACHE_ARGUMENT
from ..core.attention import CLEAN, PADDING, Layout, clean_layout
from .common import Decoding, Rollout, SamplingSettings, check_decoding, check_inputs

_NOISED = 1  # index of the only noised copy


@torch.no_grad()
def sample_block(
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
    Decode one completion per row, block by block, each block with the finished ones in a cache.

    Blocks are counted from the first token of the prompt. Its whole blocks are run once per distinct prompt; what is
    left of it, less than a block, is part of the first block that is decoded. The pass that stores a finished block's
    keys and values is the first pass of the next block too. Cached equals uncached: what is stored was computed from
    clean tokens alone.

    A row depends on its own prompt and seed alone: not on its neighbours, its place, the padding, or when others
    finish. Rows whose finished blocks hold an end token leave the batch, and only masked positions of the active block
    are projected onto the vocabulary.

    Args:
        model (`Callable`):
            Model with [`models.bidirectional.BlockDiffusionMixin`] whose `block_size` is `settings.block_length`,
            wrapped or not, in the train or eval mode the caller wants.
        prompt_ids (`torch.Tensor`):
            `(B, P)` left-padded prompts. They may contain end tokens, and may be empty.
        prompt_mask (`torch.Tensor`):
            `(B, P)` true on real prompt tokens. Lengths come from here alone, whatever the padding token is.
        mask_token_id (`int`):
            Token that stands for "not yet decoded". Never in the output.
        end_token_ids (`Sequence[int]`):
            Tokens that end a completion.
        settings ([`SamplingSettings`]):
            How to decode, without guidance.
        row_seeds (`Sequence[int]`):
            Seed of each row's own generator.
        progress (`Callable[[int, int], None]`, *optional*):
            Called after each step with the positions decided so far and in total.
        any_rank_active (`Callable[[bool], bool]`, *optional*):
            Says whether any rank has work in the coming forward pass, given whether this one has. With parameters
            sharded over ranks every forward is a collective: a rank without work runs empty ones until all are done.
        record_confidence (`bool`, *optional*, defaults to `False`):
            Whether to keep the confidence of each committed token.

    Returns:
        [`Rollout`]: Completions, trajectory and counters.
    """
    check_decoding(settings, attention="block")
    check_inputs(prompt_ids, prompt_mask, mask_token_id, end_token_ids, row_seeds)
    lengths = prompt_mask.bool().sum(dim=1)  # (B,)
    block_offset = lengths % settings.block_length
    rows = zip(prompt_ids.tolist(), lengths.tolist(), block_offset.tolist(), strict=True)
    prompts = [(ids[len(ids) - length : len(ids) - offset], ids[len(ids) - offset :]) for ids, length, offset in rows]
    width = max((len(tail) for _, tail in prompts), default=0) + settings.max_completion_length
    texts = [tail + [mask_token_id] * (width - len(tail)) for _, tail in prompts]
    decoding = Decoding(
        torch.tensor(texts, dtype=torch.long, device=prompt_ids.device).view(len(prompts), width),
        block_offset,
        mask_token_id=mask_token_id,
        end_token_ids=end_token_ids,
        settings=settings,
        row_seeds=row_seeds,
        record_confidence=record_confidence,
    )
    context = _Context(decoding, model, lengths - block_offset)
    total = len(prompts) * settings.max_completion_length
    is_any = any_rank_active or bool
    prefixes = [tuple(prefix) for prefix, _ in prompts]
    if is_any(any(prefixes)):
        context.prefill(prefixes)
    while True:
        is_active = decoding.advance()
        if not is_any(is_active):
            return decoding.rollout()
        if is_active:
            context.denoise()
            if progress is not None:
                progress(decoding.num_decided, total)
        else:
            context.keep_company()


class _Context:
    """Keys and values of the clean blocks behind the live rows, and the passes that use and extend them."""

    def __init__(self, decoding: Decoding, model: Callable[..., tuple[Tensor, Tensor]], prefix_length: Tensor) -> None:
        self.decoding = decoding
        self.model = model
        self.prefix_length = prefix_length  # (B,) prompt tokens before a row's text
        self.rows = decoding.live  # those in the cache
        self.cache = DynamicCache()
        nothing = decoding.text_ids.new_empty(len(prefix_length), 0)
        self.layout = Layout(nothing, nothing)  # of the cached positions
        self.num_columns = 0  # of the texts that are cached

    def prefill(self, prefixes: Sequence[tuple[int, ...]]) -> None:
        """Cache the whole blocks of the rows' prompts, each distinct one computed once."""
        distinct = list(dict.fromkeys(prefix for prefix in prefixes if prefix))
        if not distinct:
            self.keep_company()
            return
        width = max(len(prefix) for prefix in distinct)
        padded = [[self.decoding.mask_token_id] * (width - len(prefix)) + list(prefix) for prefix in distinct]
        input_ids = torch.tensor(padded, device=self.prefix_length.device)  # (N, width)
        lengths = self.prefix_length.new_tensor([len(prefix) for prefix in distinct])
        self._forward(input_ids, _left_padded(lengths, width), torch.zeros_like(input_ids).bool(), self.cache)
        places = {prefix: place for place, prefix in enumerate(distinct)}
        self._select([places.get(prefix, 0) for prefix in prefixes])  # a row without a prefix sees nothing of it
        self.layout = _left_padded(self.prefix_length, width)

    def denoise(self) -> None:
        """Sample at the masked positions of the active block, and commit some of them."""
        decoding = self.decoding
        if decoding.live != self.rows:
            places = {row: place for place, row in enumerate(self.rows)}
            kept = [places[row] for row in decoding.live]
            self._select(kept)
            self.layout = Layout(*(part[kept] for part in self.layout))
            self.rows = decoding.live
        rows, block = torch.tensor(self.rows, device=decoding.text_ids.device), decoding.block
        columns = slice(self.num_columns, block.stop)  # from the block before where that is not cached yet
        column = torch.arange(columns.start, columns.stop, device=rows.device)
        stop = decoding.block_offset[rows, None] + decoding.settings.max_completion_length  # (A, 1)
        copy_index = torch.where(column < stop, _NOISED, PADDING).masked_fill(column < block.start, CLEAN)  # (A, Q)
        position = self.prefix_length[rows, None] + column
        layout = Layout(
            torch.cat([self.layout.copy_index, copy_index], dim=1), torch.cat([self.layout.position, position], dim=1)
        )
        is_masked = decoding.is_masked[rows, columns]
        sampled = self._forward(decoding.text_ids[rows, columns], layout, is_masked, self.cache)
        self._crop(block.stop - block.start)  # only clean tokens' keys and values stay
        num_cached = layout.copy_index.shape[1] - (block.stop - block.start)
        self.layout = Layout(layout.copy_index[:, :num_cached], layout.position[:, :num_cached])
        self.num_columns = block.start
        decoding.commit(*sampled)

    def keep_company(self) -> None:
        """Run one forward pass that samples nothing, for ranks that have work."""
        input_ids = self.decoding.text_ids.new_full((1, 1), self.decoding.mask_token_id)
        layout = Layout(torch.full_like(input_ids, _NOISED), torch.zeros_like(input_ids))
        self._forward(input_ids, layout, torch.zeros_like(input_ids).bool(), DynamicCache())

    def _forward(
        self, input_ids: Tensor, layout: Layout, is_selected: Tensor, cache: DynamicCache
    ) -> tuple[Tensor, Tensor]:
        inputs = {"input_ids": input_ids, "layout": layout, "is_selected": is_selected, CACHE_ARGUMENT: cache}
        sampled = self.decoding.run(self.model, inputs)
        num_expected, num_found = layout.copy_index.shape[1], cache.get_seq_length()
        if num_found != num_expected:
            raise ValueError(
                f"Expected {num_expected} positions in the cache after the model's forward pass, got {num_found}. The "
                "model must add what it is given to the cache, which transformers prevents under gradient "
                "checkpointing: use a model with BlockDiffusionMixin, or switch checkpointing off."
            )
        return sampled

    def _select(self, places: Sequence[int]) -> None:
        # on the CPU: with a device_map the layers' caches are on several devices, and such indices suit them all
        self.cache.batch_select_indices(torch.tensor(places))

    def _crop(self, num: int) -> None:
        self.cache.crop(-num)
        if self.cache.get_seq_length() == 0:  # an emptied one would hold on to its number of rows
            self.cache = DynamicCache()


def _left_padded(lengths: Tensor, width: int) -> Layout:
    return clean_layout(torch.arange(width, device=lengths.device) >= width - lengths[:, None])
