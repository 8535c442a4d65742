# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
# vLLM has an environment of its own (make test-vllm):
# pyright: reportMissingImports=false
"""
SDAR for vLLM: block diffusion on its scheduler, paged cache and CUDA graphs, without a fork and without a kernel.

A block that is denoised is, to vLLM, a set of draft tokens that is rejected as a whole after each denoising step, so
that its keys and values are overwritten, and accepted as a whole by one last pass over the finished block. vLLM calls
[`register`] in each of its processes, through the entry point `vllm.general_plugins`.
"""

ARCHITECTURE = "SDARForCausalLM"


def register() -> None:
    """Make SDAR checkpoints known to vLLM. Calling it again changes nothing."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .. import models as models  # the model's configuration becomes known to transformers' AutoConfig
    from .engine_config import BlockDiffusionModelConfig

    # by name: the model's module needs a device, which not every process of vLLM may touch
    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.model:SDARForCausalLM")
    MODELS_CONFIG_MAP[ARCHITECTURE] = BlockDiffusionModelConfig
