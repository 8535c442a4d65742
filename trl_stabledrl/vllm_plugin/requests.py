# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
How a request says how it is decoded. No vLLM is needed here.

vLLM refuses `temperature` and `seed` of diffusion models, so that they travel in `SamplingParams.extra_args`
(`vllm_xargs` of its server) under the names of [`~samplers.SamplingSettings`]. `top_k`, `top_p`, `max_tokens` and
`stop_token_ids` are vLLM's own.
"""

from dataclasses import dataclass, fields
from typing import Any
from zlib import crc32

from ..samplers import SamplingSettings, check_decoding

OPTIONS: dict[str, tuple[type, ...]] = {
    "num_denoising_steps": (int,),
    "temperature": (int, float),
    "remasking": (str,),
    "confidence_threshold": (int, float),
    "suppress_eos": (str,),
}
"""Fields of [`~samplers.SamplingSettings`] that travel in `extra_args`, beside `seed`, and what they can be."""

VLLM_KEYS = ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode", "session_id")
"""Keys of `extra_args` that are vLLM's own."""

TAIL = "trl_stabledrl_tail"
"""Key under which the scheduler tells the worker what is left of a prompt behind its last whole block."""

UNUSED = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "prompt_logprobs": None,
    "prompt_logprob_token_ids": None,
    "logprob_token_ids": None,
    "repetition_detection": None,
}
"""Options of `SamplingParams` that cannot be honoured, with the value that leaves them alone."""


@dataclass(frozen=True)
class BlockRequest:
    """
    How one request is decoded.

    Args:
        settings ([`~samplers.SamplingSettings`]):
            How its blocks are.
        seed (`int`):
            Names its noise: the same seed, prompt and weights give the same completion, whatever else is running.
        end_token_ids (`tuple[int, ...]`):
            Tokens that end it.
    """

    settings: SamplingSettings
    seed: int
    end_token_ids: tuple[int, ...]


def request_options(settings: SamplingSettings, seed: int) -> dict[str, Any]:
    """
    What `SamplingParams.extra_args` must be for a request to be decoded by given settings.

    Args:
        settings ([`~samplers.SamplingSettings`]):
            How to decode. `top_k`, `top_p` and `max_completion_length` are vLLM's to be told.
        seed (`int`):
            Seed of the request's noise.

    Returns:
        `dict[str, Any]`:
            Numbers and strings only, without what is at its default.
    """
    defaults = {f.name: f.default for f in fields(SamplingSettings)}
    values = {name: getattr(settings, name) for name in OPTIONS}
    chosen = {name: value for name, value in values.items() if value is not None and value != defaults[name]}
    # always: their defaults in a request are others
    return (
        chosen
        | {"num_denoising_steps": settings.num_denoising_steps, "temperature": settings.temperature}
        | {"seed": seed}
    )


def parse_request(params: Any, *, block_length: int, request_id: str) -> BlockRequest:
    """
    Read how a request is decoded, or say what is wrong with it.

    Args:
        params (`vllm.SamplingParams`):
            Of the request. Temperature 1 and one step per token where `extra_args` says nothing.
        block_length (`int`):
            Tokens per block of the model.
        request_id (`str`):
            Takes the place of a seed where there is none.

    Raises:
        `ValueError`: Naming the option, its value and what is allowed.
    """
    extra: dict[str, Any] = dict(params.extra_args or {})
    for name in (*VLLM_KEYS, TAIL):
        extra.pop(name, None)
    unknown = sorted(set(extra) - {*OPTIONS, "seed"})
    if unknown:
        raise ValueError(f"extra_args has {unknown[0]!r}, which is not known. Known: {', '.join((*OPTIONS, 'seed'))}.")
    for name, neutral in UNUSED.items():
        value = getattr(params, name, neutral)
        if value != neutral:
            raise ValueError(
                f"{name}={value!r} is not honoured when blocks are denoised. Leave it at {neutral!r}; decoding is set "
                f"by extra_args: {', '.join(OPTIONS)}."
            )
    seed = extra.pop("seed", None)
    if seed is not None and not (_is_one_of(seed, (int,)) and -(1 << 63) <= seed < 1 << 63):
        raise ValueError(f"seed={seed!r} must be an integer of 64 bits.")
    # a client's: what is of a wrong type, or longer than 64 bits, would end the engine where it is used
    for name, value in extra.items():
        if value is not None and not _is_one_of(value, OPTIONS[name]):
            allowed = {int: "an integer", float: "a number", str: "a string"}[OPTIONS[name][-1]]
            raise ValueError(f"{name}={value!r} must be {allowed}.")
        if name == "num_denoising_steps" and value is not None:
            extra[name] = min(value, block_length)  # no block takes more
        elif value is not None and float in OPTIONS[name]:
            extra[name] = float(value)
    extra = {name: value for name, value in extra.items() if value is not None}
    settings = SamplingSettings(
        **{"num_denoising_steps": block_length, "temperature": 1.0} | extra,
        block_length=block_length,
        max_completion_length=params.max_tokens,
        top_k=max(params.top_k, 0),  # vLLM's "all" is 0 or -1
        top_p=params.top_p,
    )
    check_decoding(settings, attention="block")
    ends = set(params.stop_token_ids or ())
    if not params.ignore_eos and getattr(params, "eos_token_id", None) is not None:
        ends.add(params.eos_token_id)
    # the same on every rank, and another for each completion of a prompt
    return BlockRequest(settings, crc32(request_id.encode()) if seed is None else seed, tuple(sorted(ends)))


def _is_one_of(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)
