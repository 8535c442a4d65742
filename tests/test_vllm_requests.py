# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What a request to vLLM may say. No vLLM is needed."""

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from trl_stabledrl.samplers import SamplingSettings
from trl_stabledrl.vllm_plugin.requests import BlockRequest, parse_request, request_options


def parsed(extra_args: dict[str, Any] | None, **changes: Any) -> BlockRequest:
    options: dict[str, Any] = {
        "max_tokens": 10, "top_k": -1, "top_p": 1.0, "stop_token_ids": [7], "ignore_eos": False, "eos_token_id": 1,
    }  # fmt: skip
    params = SimpleNamespace(extra_args=extra_args, **options | changes)
    return parse_request(params, block_length=4, request_id="a")


def test_options_arrive_as_they_were_sent():
    settings = SamplingSettings(
        max_completion_length=10,
        block_length=4,
        num_denoising_steps=2,
        temperature=0.5,
        remasking="margin",
        confidence_threshold=0.75,
        suppress_eos="sampling",
    )
    request = parsed(request_options(settings, -5))
    assert request == BlockRequest(settings, -5, (1, 7))


def test_a_request_that_says_nothing_is_sampled_one_token_a_step_with_a_seed_of_its_own():
    request = parsed(None)
    assert request.settings == SamplingSettings(
        max_completion_length=10, block_length=4, num_denoising_steps=4, temperature=1.0
    )
    assert request == parsed({"confidence_threshold": None, "suppress_eos": None, "session_id": "x"})
    assert parsed({"seed": 3}).seed == 3
    assert parsed({"num_denoising_steps": 1 << 70, "temperature": 1}) == request
    assert parsed({}, ignore_eos=True, stop_token_ids=None).end_token_ids == ()


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"steps": 2}, "extra_args has 'steps', which is not known. Known: num_denoising_steps, temperature, "),
        ({"temperature": "warm"}, "temperature='warm' must be a number."),
        ({"temperature": True}, "temperature=True must be a number."),
        ({"temperature": math.nan}, "Expected temperature to be 0, or a number >= 0.001, got nan"),
        ({"temperature": -1}, "Expected temperature to be 0, or a number >= 0.001, got -1"),
        ({"num_denoising_steps": "2"}, "num_denoising_steps='2' must be an integer."),
        ({"num_denoising_steps": 2.0}, "num_denoising_steps=2.0 must be an integer."),
        ({"num_denoising_steps": 0}, "Expected num_denoising_steps to be an integer >= 1, got 0"),
        ({"remasking": ["entropy"]}, "remasking=['entropy'] must be a string."),
        ({"remasking": "best"}, "Expected remasking to be one of "),
        ({"confidence_threshold": [0.5]}, "confidence_threshold=[0.5] must be a number."),
        ({"suppress_eos": 1}, "suppress_eos=1 must be a string."),
        ({"seed": 1.5}, "seed=1.5 must be an integer of 64 bits."),
        ({"seed": 1 << 70}, "seed=1180591620717411303424 must be an integer of 64 bits."),
        ({"seed": [1, 2]}, "seed=[1, 2] must be an integer of 64 bits."),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(extra_args, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parsed(extra_args)


@pytest.mark.parametrize(
    "option",
    [
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"prompt_logprobs": 1},
        {"prompt_logprob_token_ids": [5]},
        {"logprob_token_ids": [5]},
    ],
    ids=str,
)
def test_what_vllm_would_do_to_each_token_is_refused(option):
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value} is not honoured when blocks are denoised")):
        parsed({}, **option)
