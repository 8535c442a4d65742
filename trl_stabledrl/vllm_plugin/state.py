# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
# vLLM has an environment of its own (make test-vllm):
# pyright: reportMissingImports=false
"""
The blocks that the running requests denoise, and the attention they see. Axis letters: `R` slots for requests, `L`
tokens of a block.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.model_states.interface import ModelState

from ..models.families import mask_token_id_of
from .requests import TAIL, BlockRequest, parse_request

NEVER = 1 << 40  # a place behind every text


class BlockState(ModelState):
    """
    Per-request state on the device. All of a slot is set anew when a request takes it: sleeping discards memory.

    A token sees its own block and those before it, in every pass: prefill, denoising step and the pass that keeps a
    finished block.
    """

    num_new_sampled_tokens_per_step = 0  # vLLM's name: tokens of a step beside the accepted drafts

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.block_length: int = vllm_config.diffusion_config.canvas_length
        self.mask_token_id = mask_token_id_of(self.model_config.hf_config)
        slots, block = self.max_num_reqs, (self.max_num_reqs, self.block_length)
        self.canvas = torch.full(block, self.mask_token_id, device=device)  # (R, L) tokens, int64 as all below
        self.is_masked = torch.zeros(block, dtype=torch.bool, device=device)  # (R, L) still to be decided
        self.confidence = torch.zeros(block, dtype=torch.float32, device=device)  # (R, L) of the decided ones
        self.commit_step = torch.zeros_like(self.canvas)  # (R, L) when they were decided, from 0
        self.step = torch.zeros(slots, dtype=torch.int64, device=device)  # (R,) steps done on the block
        self.start = torch.zeros_like(self.step)  # (R,) place in the text where the block starts
        self.stop = torch.full_like(self.step, NEVER)  # (R,) where the text ends at the latest
        self.num_pinned = torch.zeros_like(self.step)  # (R,) prompt tokens at the start of the block
        self.seed = torch.zeros_like(self.step)  # (R,) names the noise
        self.requests: dict[int, BlockRequest] = {}  # by slot
        self.counts: dict[str, int | Tensor] = {}
        self.reset_counts()

    def reset_counts(self) -> None:
        """Count from zero again: forward passes, positions, denoising steps of rows, tokens decided."""
        self.counts = dict.fromkeys(
            ("num_forwards", "num_backbone_positions", "num_vocab_positions", "num_row_steps", "num_decoded"), 0
        )

    # Requests

    def get_supported_generation_tasks(self) -> tuple[Any, ...]:
        """vLLM's hook: what the model can be asked for."""
        return ("generate",)

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """vLLM's hook: a request takes a slot, for the first time or again after it was preempted."""
        params = new_req_data.sampling_params
        request = parse_request(params, block_length=self.block_length, request_id=new_req_data.req_id)
        start = len(new_req_data.prefill_token_ids)
        tail: list[int] = (params.extra_args or {}).get(TAIL, [])
        num_prompt_tokens = len(new_req_data.prompt_token_ids)
        if start > num_prompt_tokens:  # preempted: what it has generated, the tail included, is prefilled
            pinned: list[int] = []
        else:
            pinned = tail
        # the scheduler has added the tail to its own limit, not to the request's parameters
        stop = num_prompt_tokens + len(tail) + params.max_tokens
        canvas = pinned + [self.mask_token_id] * (self.block_length - len(pinned))
        self.requests[req_index] = request
        self.canvas[req_index] = async_tensor_h2d(canvas, device=self.device, dtype=torch.int64)
        column = torch.arange(self.block_length, device=self.device)
        self.is_masked[req_index] = (column >= len(pinned)) & (column < stop - start)
        self.confidence[req_index] = 0.0
        self.commit_step[req_index] = 0
        numbers = {"step": 0, "start": start, "stop": stop, "num_pinned": len(pinned), "seed": request.seed}
        for name, value in numbers.items():
            getattr(self, name)[req_index] = value

    # Inputs

    def prepare_inputs_embeds(self, scheduled_encoder_inputs: Any, input_batch: Any, req_states: Any) -> None:
        """vLLM's hook: the inputs are token ids."""

    get_mm_embeddings = prepare_inputs_embeds  # its name before vLLM 0.29

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """vLLM's hook: nothing is added to the model's inputs."""
        return {}

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """vLLM's hook: as [`BlockState.prepare_inputs`] where graphs are captured."""
        return {}

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[Tensor, ...],
        slot_mappings: Tensor,
        attn_groups: Any,
        kv_cache_config: Any,
        for_capture: bool = False,
        ubatch_idx: int = 0,
    ) -> dict[str, Any]:
        """
        vLLM's hook: block-causal attention from a kernel that only knows "no mask".

        Each block of a prompt is presented as a sequence of its own with the same pages, which ends where the block
        does. Keys are written before attention reads them, so that this is the block-causal mask.
        """
        is_full_graph = cudagraph_mode == CUDAGraphMode.FULL
        num_rows = input_batch.num_reqs_after_padding if is_full_graph else input_batch.num_reqs
        num_tokens = input_batch.num_tokens_after_padding if is_full_graph else input_batch.num_tokens
        starts = input_batch.query_start_loc_np[: num_rows + 1]
        query_start = input_batch.query_start_loc[: num_rows + 1]
        seq_lens = input_batch.seq_lens[:num_rows]
        # The last block is computed whole, but nobody sees what lies behind the text's end. In place: a captured
        # graph reads this buffer, which is filled anew for every pass and not read by anyone after this.
        live = seq_lens[: input_batch.num_reqs]
        slots = input_batch.idx_mapping[: input_batch.num_reqs]
        torch.minimum(live, self.stop[slots].clamp_max(torch.iinfo(live.dtype).max).to(live.dtype), out=live)

        widths = np.diff(starts)
        longest = int(widths.max())
        if longest > self.block_length:
            parts = -(-widths // self.block_length)
            row = np.repeat(np.arange(num_rows), parts)
            first = (np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)) * self.block_length
            behind = np.maximum(widths[row] - first - self.block_length, 0).astype(np.int32)
            starts = np.append(starts[:-1][row] + first, num_tokens).astype(np.int32)
            rows = async_tensor_h2d(row, device=self.device)
            seq_lens = seq_lens[rows] - async_tensor_h2d(behind, device=self.device)
            query_start = async_tensor_h2d(starts, device=self.device)
            block_tables = tuple(table[rows].contiguous() for table in block_tables)
            num_rows, longest = len(row), self.block_length
        return build_attn_metadata(
            attn_groups=attn_groups,
            num_reqs=num_rows,
            num_tokens=num_tokens,
            query_start_loc_gpu=query_start,
            query_start_loc_cpu=torch.from_numpy(starts),
            max_query_len=longest,
            seq_lens=seq_lens,
            max_seq_len=self.max_model_len,
            block_tables=block_tables,
            slot_mappings=slot_mappings,
            kv_cache_config=kv_cache_config,
            for_cudagraph_capture=for_capture,
            causal=False,
        )

    def custom_sampler(self, sampler: Any) -> tuple[Any, None]:
        """vLLM's hook: denoising steps in the place of next-token sampling."""
        from .sampler import BlockSampler

        return BlockSampler(self, sampler), None
