# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
A stand-in for `vllm.LLM` where vLLM is not installed: it has weights of its own, loaded tensor by tensor, and decodes
with the package's sampler. What vLLM itself does is tested in `tests/vllm_engine`.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation

import trl_stabledrl.engines.vllm as engine
from trl_stabledrl.batching import left_padded
from trl_stabledrl.samplers import SamplingSettings, sample

COUNTS = ("num_forwards", "num_backbone_positions", "num_vocab_positions", "num_row_steps", "num_decoded")


def _whole() -> Any:
    """The stand-in's weights are its own, and not sharded where the trained ones are."""
    return patch("transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref", None)


class LLMDouble:
    """What the engine uses of `vllm.LLM`. `calls` lists what it was asked for; `fault` is raised in a rollout."""

    made: list["LLMDouble"] = []

    def __init__(self, model: str, max_model_len: int | None = None, **arguments: Any) -> None:
        self.arguments = arguments
        self.calls: list[str] = []
        self.fault: Exception | None = None
        self.loaded: dict[str, torch.Tensor] = {}
        self.is_awake = {"weights": True, "kv_cache": True}
        with _whole():
            self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        context = max_model_len or self.model.config.max_position_embeddings
        runner = SimpleNamespace(model=self, model_state=self)
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)),
            vllm_config=SimpleNamespace(model_config=SimpleNamespace(max_model_len=context, dtype=self.model.dtype)),
        )
        self.made.append(self)

    # the model's part

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        assert self.is_awake["weights"]
        for name, value in pairs:
            self.loaded[name] = value.detach().clone()
            self.model.get_parameter(name).data.copy_(value)

    def reset_counts(self) -> None:
        self.counts = dict.fromkeys(COUNTS, 0)

    # the engine's part

    def reset_prefix_cache(self) -> None:
        self.calls.append("sync")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")
        self.is_awake |= dict.fromkeys(tags, True)

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        self.is_awake = dict.fromkeys(self.is_awake, False)
        for parameter in self.model.parameters():
            parameter.data.fill_(torch.nan)

    @torch.no_grad()
    def generate(self, prompts: list[dict[str, list[int]]], params: list[Any], use_tqdm: Any) -> list[Any]:
        assert all(self.is_awake.values())
        self.calls.append(f"generate {len(prompts)}")
        if self.fault is not None:
            raise self.fault
        first = params[0]
        options = dict(first.extra_args)
        options.pop("seed")
        settings = SamplingSettings(
            **options,
            block_length=self.model.config.block_size,
            max_completion_length=first.max_tokens,
            top_k=first.top_k,
            top_p=first.top_p,
        )
        ids, is_prompt = left_padded([prompt["prompt_token_ids"] for prompt in prompts], pad_token_id=0)
        with _whole():
            rollout = sample(
                self.model,
                ids,
                is_prompt,
                mask_token_id=self.model.config.mask_token_id,
                end_token_ids=first.stop_token_ids,
                settings=settings,
                row_seeds=[one.extra_args["seed"] for one in params],
                attention="block",
                record_confidence=True,
            )
        self.counts = {name: getattr(rollout, name) for name in COUNTS}
        assert rollout.confidence is not None
        outputs = []
        for row, tokens in enumerate(rollout.completion_ids):
            entries = [
                {
                    token: SimpleNamespace(
                        logprob=(value if settings.remasking == "entropy" else value.log()).item(), rank=int(step) + 1
                    )
                }
                for token, step, value in zip(tokens, rollout.commit_step[row], rollout.confidence[row], strict=False)
            ]
            result = SimpleNamespace(token_ids=tokens, logprobs=entries, finish_reason="stop", stop_reason=None)
            outputs.append(SimpleNamespace(outputs=[result]))
        if use_tqdm:
            use_tqdm(total=len(prompts)).update(len(prompts))
        return outputs


@contextmanager
def vllm_double() -> Iterator[list[LLMDouble]]:
    """Take the stand-in for vLLM while the context is open; yields the engines that were made."""
    module: Any = ModuleType("vllm")
    module.SamplingParams = SimpleNamespace
    LLMDouble.made = []
    with (
        patch.dict(os.environ),  # where TRL names the rank, for vLLM's sake
        patch.object(vllm_generation, "LLM", LLMDouble, create=True),
        patch.object(vllm_generation, "is_vllm_available", return_value=True),
        patch.object(engine, "register"),
        patch("trl_stabledrl.checks.installed_vllm", return_value="0.31.0"),
    ):
        assert "vllm" not in sys.modules
        sys.modules["vllm"] = module
        try:
            yield LLMDouble.made
        finally:
            del sys.modules["vllm"]  # alone: patch.dict would take out whatever else was imported meanwhile
