# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
# vLLM has an environment of its own (make test-vllm):
# pyright: reportMissingImports=false
"""vLLM's Qwen3 with the state of block diffusion. Published SDAR checkpoints have Qwen3's tensors."""

from typing import Any

from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM


class SDARForCausalLM(Qwen3ForCausalLM):
    """SDAR on vLLM."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        # vLLM's Qwen3 takes is_causal=False for an encoder, whose layers have no cache
        is_causal, config.is_causal = config.is_causal, True
        try:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        finally:
            config.is_causal = is_causal

    @staticmethod
    def get_model_state_cls() -> type:
        """vLLM's hook: what keeps the blocks of the running requests."""
        from .state import BlockState

        return BlockState
