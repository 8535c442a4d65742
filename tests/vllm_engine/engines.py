# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Plain vLLM engines for a tiny SDAR, made once for each setting, and what the slow definition says they should do."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import torch
import vllm
from vllm import SamplingParams

from tests import naive
from tests.tiny import tiny_sdar, tiny_tokenizer

END, MASK = 1, 2


@cache
def model_of(block_length: int, seed: int = 0, vocab_size: int = 64) -> Any:
    # vLLM's attention on a CPU begins at heads of 32
    return tiny_sdar(
        block_size=block_length,
        vocab_size=vocab_size,
        hidden_size=64,
        head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        seed=seed,
    )


@cache
def folder_of(block_length: int, vocab_size: int = 64) -> str:
    folder = mkdtemp()
    model_of(block_length, vocab_size=vocab_size).save_pretrained(folder)
    tiny_tokenizer(chat_template=True).save_pretrained(folder)
    return folder


@cache
def engine_of(block_length: int, *, is_async: bool = False, vocab_size: int = 64, **options: Any) -> Any:
    """An engine with room for 8 requests and prompts in chunks of 64 tokens, unless told otherwise."""
    settings: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64 // block_length * block_length,
        "dtype": "float32",
        "enforce_eager": True,
        "num_gpu_blocks_override": 512,  # else each engine takes a GB
    }
    with patch_async(is_async):
        return vllm.LLM(folder_of(block_length, vocab_size), **settings | options)


def patch_async(is_async: bool) -> Any:
    """vLLM schedules ahead on GPUs; on a CPU its platform says no, at the end."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config.__func__

    def check_and_ask(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = is_async

    return patch.object(platform, "check_and_update_config", classmethod(check_and_ask))


@dataclass(frozen=True)
class Answer:
    """What an engine made of a prompt."""

    tokens: list[int]
    steps: list[int]
    log_confidence: list[float]
    finish_reason: str
    stop_reason: Any
    num_cached: int


def params_of(num_tokens: int, **options: Any) -> SamplingParams:
    own = {name: options.pop(name) for name in ("top_k", "top_p", "n", "stop_token_ids") if name in options}
    return SamplingParams(
        **{"stop_token_ids": [END]} | own,
        max_tokens=num_tokens,
        logprobs=0,
        detokenize=False,
        ignore_eos=True,
        extra_args={"temperature": 0.0} | options,
    )


def answers(engine: Any, prompts: Sequence[Sequence[int]], params: Any) -> list[Answer]:
    """One for each completion, prompt by prompt."""
    outputs = engine.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
    found = []
    for output, prompt in zip(outputs, prompts, strict=True):
        assert list(output.prompt_token_ids) == list(prompt)
        for result in output.outputs:
            entries = [next(iter(entry.values())) for entry in result.logprobs or []]
            found.append(
                Answer(
                    tokens=list(result.token_ids),
                    steps=[entry.rank - 1 for entry in entries],
                    log_confidence=[entry.logprob for entry in entries],
                    finish_reason=result.finish_reason,
                    stop_reason=result.stop_reason,
                    num_cached=output.num_cached_tokens or 0,
                )
            )
    return found


def expected(model: Any, prompt: Sequence[int], num_tokens: int, **options: Any) -> tuple[list[int], list[int]]:
    """Tokens up to the end token, and their steps, by the definition without a cache."""
    block_length = model.config.block_size
    ends = tuple(options.pop("stop_token_ids", [END]))
    decoding = naive.BlockDecoding(
        block_length=block_length,
        max_completion_length=num_tokens,
        num_denoising_steps=options.pop("num_denoising_steps", block_length),
        mask_token_id=MASK,
        end_token_ids=ends,
        threshold=options.pop("confidence_threshold", None),
        **options,
    )
    window, steps = naive.block_rollout(model, prompt, decoding)
    length = next((i + 1 for i, token in enumerate(window) if token in ends), num_tokens)
    return window[:length], steps[:length]


def prompts_of(block_length: int, num: int = 8, *, vocab_size: int = 64) -> list[list[int]]:
    """Of one block, of one token more, of every remainder, and longer than a chunk."""
    generator = torch.Generator().manual_seed(block_length)
    lengths = [block_length, block_length + 1, 2 * block_length - 1, 70 + block_length // 2]
    lengths += torch.randint(block_length, 100, (num - 4,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]
