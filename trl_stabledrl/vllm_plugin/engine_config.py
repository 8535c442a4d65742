# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
# vLLM has an environment of its own (make test-vllm):
# pyright: reportMissingImports=false
"""What an engine's configuration must be for block diffusion to be exact, filled in or refused at its start."""

import math
from typing import Any

from vllm.config.diffusion import DiffusionConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

SCHEDULER = "trl_stabledrl.vllm_plugin.scheduler.BlockScheduler"
SINGLE = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "enable_batch_sharded_sampling": False}
"""Options that split a request's work in ways the state of a block is not split."""

PAGE_UNIT = 32  # FlashAttention's pages are multiples of 16, those of CPUs of 32


class BlockDiffusionModelConfig(VerifyAndUpdateConfig):
    """vLLM's hook for an architecture, run once when an engine is configured."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """
        Set the canvas, scheduler, page size and context length that whole blocks need.

        Args:
            vllm_config (`vllm.config.VllmConfig`):
                Configuration of the engine. Changed in place.

        Raises:
            `ValueError`: Naming the setting, its value, what is allowed and what to do.
        """
        block_length = vllm_config.model_config.hf_config.block_size
        _set_canvas(vllm_config, block_length)
        _set_scheduler(vllm_config.scheduler_config, block_length)
        _set_pages(vllm_config.cache_config, block_length)
        _set_context(vllm_config.model_config, block_length)
        if vllm_config.model_config.generation_config == "auto":
            # the checkpoint's temperature would be the default of a server, which refuses every temperature but 1
            vllm_config.model_config.generation_config = "vllm"
        attention = getattr(vllm_config, "attention_config", None)
        if attention is not None and attention.backend is None and hasattr(attention, "use_non_causal"):
            attention.use_non_causal = True  # else Blackwell's first choice is a backend without it
        for name, allowed in SINGLE.items():
            value = getattr(vllm_config.parallel_config, name, allowed)
            if value not in (None, allowed):
                raise ValueError(
                    f"{name}={value}: blocks are not decoded that way. Use {allowed}, and tensor_parallel_size for "
                    "models that one GPU cannot hold."
                )


def _set_canvas(vllm_config: Any, block_length: int) -> None:
    found = vllm_config.diffusion_config
    if found is None:
        vllm_config.diffusion_config = DiffusionConfig(canvas_length=block_length)
    elif found.canvas_length not in (None, block_length):
        raise ValueError(
            f"diffusion_config has canvas_length={found.canvas_length}, but the model's blocks have {block_length} "
            "tokens: it only knows those it was trained with. Leave diffusion_config out."
        )
    else:
        found.canvas_length = block_length


def _set_scheduler(scheduler_config: Any, block_length: int) -> None:
    found = scheduler_config.scheduler_cls
    if found is None:
        scheduler_config.scheduler_cls = SCHEDULER
    elif found != SCHEDULER:
        raise ValueError(
            f"scheduler_cls={found!r} does not know blocks: a prompt that ends within one would be answered as if it "
            f"ended at its border. Leave it out, or use {SCHEDULER!r}."
        )
    # every chunk of a prompt is then a number of whole blocks
    for name in ("max_num_batched_tokens", "long_prefill_token_threshold"):
        value = getattr(scheduler_config, name, None) or 0
        if value % block_length:
            raise ValueError(
                f"{name}={value} is not a multiple of the block length, {block_length}: a prompt would be cut within "
                f"a block. Use {value // block_length * block_length or block_length}."
            )


def _set_pages(cache_config: Any, block_length: int) -> None:
    page = cache_config.block_size
    if page is not None and page % block_length == 0:
        return
    if page is not None and getattr(cache_config, "user_specified_block_size", False):
        raise ValueError(
            f"block_size={page}, the tokens of a page of the cache, is not a multiple of the model's block length, "
            f"{block_length}: a cached prefix would end within a block. Leave it out, or use a multiple of "
            f"{math.lcm(PAGE_UNIT, block_length)}."
        )
    cache_config.block_size = math.lcm(PAGE_UNIT, block_length)
    if hasattr(cache_config, "user_specified_block_size"):
        cache_config.user_specified_block_size = True  # else the platform puts its own in its place


def _set_context(model_config: Any, block_length: int) -> None:
    """The last block of the longest text is computed whole: room for it, where the model has the positions."""
    wanted = -(-model_config.max_model_len // block_length) * block_length
    if wanted > model_config.hf_config.max_position_embeddings:
        wanted -= block_length
    model_config.max_model_len = wanted
