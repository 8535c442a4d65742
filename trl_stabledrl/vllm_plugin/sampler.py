# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
# vLLM has an environment of its own (make test-vllm):
# pyright: reportMissingImports=false
"""
One denoising step of every running request. Nothing waits for the device. Axis letters: `M` requests that denoise, `L`
tokens of a block, `V` tokens of the vocabulary, `N` positions of a tile.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from ..core.unmasking import choose_commits, keyed_race_noise, race_grid, sample_tokens
from ..samplers import SamplingSettings
from .requests import BlockRequest
from .state import BlockState

TILE_LOGITS = 64 << 20
"""Logits held in float32 at once: 256 MB. Sorting them, for `top_p`, takes six times as much: a sixth of them then."""


class BlockSampler:
    """
    Replaces vLLM's sampler.

    A request whose block has masked positions gets some of them decided and its pass rejected, so that its keys and
    values are written again. One whose block has none was passed to keep them: its tokens are emitted. With each
    token go the logarithm of the confidence it was decided with, as its log-probability, and the denoising step, from
    1, as its rank.
    """

    penalties_state = SimpleNamespace(output_bin_counts=None)  # the runner reads it: no penalties

    def __init__(self, state: BlockState, base: Any) -> None:
        self.state = state
        self.sampling_states = base.sampling_states
        self.logprob_token_ids_state = base.logprob_token_ids_state
        self.req_states = base.req_states
        # made now, so that the memory profiler sees them
        vocab_size = self.sampling_states.vocab_size
        num = max(state.block_length, min(TILE_LOGITS // vocab_size, state.max_num_reqs * state.block_length))
        num_groups, group_length = race_grid(vocab_size)
        self.logits = torch.empty(num, vocab_size, dtype=torch.float32, device=state.device)
        self.scratch = torch.empty(num, num_groups * group_length, dtype=torch.float32, device=state.device)

    def add_request(self, req_idx: int, *args: Any) -> None:
        """vLLM's hook; before vLLM 0.31 the prompt's length comes before the parameters."""
        self.sampling_states.add_request(req_idx, args[-1])
        self.logprob_token_ids_state.add_request(req_idx, args[-1])

    def apply_staged_writes(self) -> None:
        """vLLM's hook: send what `add_request` noted to the device."""
        self.sampling_states.apply_staged_writes()
        self.logprob_token_ids_state.apply_staged_writes()

    def __call__(self, logits: Tensor, input_batch: Any, draft_logits: Tensor | None = None) -> SamplerOutput:
        """Decide positions of every block, given the logits `(M * L, V)` of the requests that denoise."""
        state, block_length = self.state, self.state.block_length
        num_rows = input_batch.num_reqs
        num_logits = np.diff(input_batch.cu_num_logits_np[: num_rows + 1])
        if input_batch.num_draft_tokens == 0:  # prompts only, or the memory profiler
            num_logits = np.zeros_like(num_logits)
        self._start_blocks(input_batch, np.flatnonzero(num_logits == 0))
        # fresh: with async scheduling those of the last step may still be on their way to the host
        sampled = torch.zeros(num_rows, block_length, dtype=torch.int32, device=state.device)
        num_sampled = torch.zeros(num_rows, dtype=torch.int32, device=state.device)
        num_rejected = torch.zeros_like(num_sampled)
        logprobs = None
        busy = np.flatnonzero(num_logits)
        state.counts["num_forwards"] += 1
        state.counts["num_backbone_positions"] += int(input_batch.num_tokens)
        if len(busy):
            if (num_logits[busy] != block_length).any():
                raise RuntimeError(
                    f"A block was passed in part ({num_logits[busy].tolist()} of {block_length} positions). The "
                    "scheduler must be this plugin's, and max_model_len a multiple of the block length."
                )
            rows = async_tensor_h2d(busy, device=state.device)
            slots = async_tensor_h2d(input_batch.idx_mapping_np[busy].astype(np.int64), device=state.device)
            requests = [state.requests[slot] for slot in input_batch.idx_mapping_np[busy].tolist()]
            is_done = self._denoise(logits.view(len(busy), block_length, -1), slots, requests)
            sampled[rows] = (state.canvas[slots] * is_done[:, None]).to(sampled.dtype)
            num_sampled[rows] = (is_done * block_length).to(num_sampled.dtype)
            num_rejected[rows] = (~is_done * block_length).to(num_rejected.dtype)
            width = self.sampling_states.max_num_logprobs(input_batch.idx_mapping_np[:num_rows])
            if width >= 0:
                logprobs = self._logprobs(slots, requests, num_logits, width)
            self._next_blocks(slots, is_done)
            self.req_states.draft_tokens[slots, :block_length] = state.canvas[slots].to(
                self.req_states.draft_tokens.dtype
            )
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _start_blocks(self, input_batch: Any, rows: np.ndarray) -> None:
        """Hand the first block of the requests whose prompt is now done to the runner."""
        done = input_batch.num_computed_prefill_tokens_np[rows] + input_batch.num_scheduled_tokens[rows]
        rows = rows[done >= input_batch.prefill_len_np[rows]]
        if len(rows):
            slots = async_tensor_h2d(input_batch.idx_mapping_np[rows].astype(np.int64), device=self.state.device)
            drafts = self.req_states.draft_tokens
            drafts[slots, : self.state.block_length] = self.state.canvas[slots].to(drafts.dtype)

    def _denoise(self, logits: Tensor, slots: Tensor, requests: list[BlockRequest]) -> Tensor:
        """Decide positions of blocks that have masked ones; `(M,)` true where there were none."""
        is_done = ~self.state.is_masked[slots].any(dim=-1)
        groups: dict[tuple[SamplingSettings, tuple[int, ...]], list[int]] = {}
        for row, request in enumerate(requests):
            settings, ends = request.settings, request.end_token_ids
            groups.setdefault((settings, ends if settings.suppress_eos else ()), []).append(row)
        num_decided: int | Tensor = 0
        for (settings, ends), members in groups.items():
            sorts = settings.temperature > 0 and settings.top_p < 1 and settings.top_k == 0
            num = max(1, TILE_LOGITS // (6 if sorts else 1) // logits[0].numel())
            for start in range(0, len(members), num):
                tile = members[start : start + num]
                # a slice is a view: rows of one setting, as in training, are not gathered first
                is_run = tile[-1] - tile[0] + 1 == len(tile)
                index: Any = slice(tile[0], tile[-1] + 1) if is_run else async_tensor_h2d(tile, device=logits.device)
                num_decided = num_decided + self._denoise_tile(logits[index], slots[index], settings, ends)
        counts = self.state.counts
        counts["num_vocab_positions"] += len(requests) * self.state.block_length
        counts["num_row_steps"] = counts["num_row_steps"] + (~is_done).sum()
        counts["num_decoded"] = counts["num_decoded"] + num_decided
        return is_done

    def _denoise_tile(
        self, logits: Tensor, slots: Tensor, settings: SamplingSettings, end_token_ids: tuple[int, ...]
    ) -> Tensor:
        """One step for some requests with the same settings; the number of positions it decided."""
        state = self.state
        shape, vocab_size = logits.shape[:2], logits.shape[-1]
        position = state.start[slots, None] + torch.arange(shape[1], device=logits.device)  # (M, L)
        seed, step = (part[slots, None].expand(shape) for part in (state.seed, state.step))
        noise = None
        if settings.temperature > 0 or settings.remasking == "random":
            noise = keyed_race_noise(vocab_size, seed.flatten(), position.flatten(), step.flatten())
        num = shape[0] * shape[1]
        tokens, confidence = sample_tokens(
            self.logits[:num].copy_(logits.flatten(0, 1)),
            mask_token_id=state.mask_token_id,
            banned_token_ids=end_token_ids if settings.suppress_eos == "sampling" else (),
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            remasking=settings.remasking,
            noise=noise,
            scratch=self.scratch[:num],
        )
        tokens, confidence = tokens.view(shape), confidence.view(shape)
        is_masked = state.is_masked[slots]
        is_late = None
        if settings.suppress_eos == "early_commit":
            is_late = torch.isin(
                tokens, async_tensor_h2d(list(end_token_ids), device=tokens.device, dtype=torch.int64)
            )
        is_decided = choose_commits(
            confidence,
            is_masked,
            num_steps_left=(settings.num_denoising_steps - state.step[slots]).clamp_min(1),
            threshold=settings.confidence_threshold,
            is_late=is_late,
        )
        state.canvas[slots] = torch.where(is_decided, tokens, state.canvas[slots])
        if settings.remasking != "entropy":  # which is a logarithm already
            confidence = confidence.log()
        state.confidence[slots] = torch.where(is_decided, confidence, state.confidence[slots])
        state.commit_step[slots] = torch.where(is_decided, step, state.commit_step[slots])
        state.is_masked[slots] = is_masked & ~is_decided
        state.step[slots] += 1
        return is_decided.sum()

    def _logprobs(
        self, slots: Tensor, requests: list[BlockRequest], num_logits: np.ndarray, num_alternatives: int
    ) -> LogprobsTensors:
        """What is known of the tokens of every block; vLLM reads that of the emitted ones."""
        state, block_length = self.state, self.state.block_length
        # the scheduler drops the pinned prompt tokens: what comes behind them moves to the front
        column = state.num_pinned[slots, None] + torch.arange(block_length, device=slots.device)
        column = column.clamp_max(block_length - 1)
        tokens, confidence, step = (
            part[slots].gather(1, column).flatten() for part in (state.canvas, state.confidence, state.commit_step)
        )
        # alternatives are not kept: the same token fills their places
        width = num_alternatives + 1
        return LogprobsTensors(
            logprob_token_ids=tokens[:, None].expand(-1, width).to(torch.int32),
            logprobs=confidence[:, None].expand(-1, width).contiguous(),
            selected_token_ranks=step + 1,
            cu_num_generated_tokens=(np.cumsum(num_logits) - num_logits).tolist(),
        )

    def _next_blocks(self, slots: Tensor, is_done: Tensor) -> None:
        """Begin the next block of the requests whose block was emitted."""
        state = self.state
        start = state.start[slots] + is_done * state.block_length
        column = torch.arange(state.block_length, device=slots.device)
        is_open = column < (state.stop[slots] - start)[:, None]
        done = is_done[:, None]
        state.start[slots] = start
        state.canvas[slots] = torch.where(done, state.mask_token_id, state.canvas[slots])
        state.is_masked[slots] = torch.where(done, is_open, state.is_masked[slots])
        state.step[slots] = torch.where(is_done, 0, state.step[slots])
        state.num_pinned[slots] = torch.where(is_done, 0, state.num_pinned[slots])
