# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Requests that come, go and are interrupted while others run, and what is said of each of their tokens."""

import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests import naive
from tests.vllm_engine.engines import END, MASK, answers, engine_of, expected, model_of, params_of, prompts_of


def scheduler_of(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core.scheduler


@contextmanager
def counted_preemptions(engine: Any) -> Iterator[Counter[str]]:
    """How often each request is preempted."""
    scheduler, found = scheduler_of(engine), Counter()
    preempt = scheduler._preempt_request

    def note(request: Any, *args: Any, **kwargs: Any) -> Any:
        found[request.request_id] += 1
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = note
    try:
        yield found
    finally:
        scheduler._preempt_request = preempt


def small_engine_of(block_length: int, *, is_async: bool) -> Any:
    """Nine pages in use for eight requests, which need up to five each, and prompts that take several passes."""
    return engine_of(
        block_length,
        is_async=is_async,
        block_size=32,
        num_gpu_blocks_override=10,
        max_num_batched_tokens=8 * block_length,
    )


def random_requests(num: int, block_length: int) -> list[tuple[list[int], int, dict[str, Any]]]:
    """Prompts, lengths of the window and options, all of them different."""
    rng = random.Random(block_length)
    shared = [rng.randrange(3, 64) for _ in range(64)]
    found = []
    for _ in range(num):
        prompt = shared[: rng.choice((0, 32, 64))] + rng.choices([*range(3, 64), END, MASK], k=rng.randrange(1, 30))
        prompt += shared[: max(0, block_length - len(prompt))]
        options = {
            "num_denoising_steps": rng.randrange(1, block_length + 1),
            "confidence_threshold": rng.choice((None, None, 0.04, 0.08)),
            "remasking": rng.choice(("low_confidence", "margin", "entropy")),
            "suppress_eos": rng.choice((None, "sampling", "early_commit")),
            "stop_token_ids": rng.choice(([END], [END, 19, 34], [])),
        }
        if options["remasking"] == "entropy":
            options["confidence_threshold"] = None
        found.append((prompt, rng.randrange(1, 45), options))
    return found


def given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("block_length", [4, 16])
def test_a_crowd_of_different_requests_on_few_pages(block_length, is_async):
    """Chunks, cached prefixes, preemptions and every option at once."""
    engine, model = small_engine_of(block_length, is_async=is_async), model_of(block_length)
    requests = random_requests(24, block_length)
    params = [params_of(length, **given(options)) for _, length, options in requests]
    with counted_preemptions(engine) as preempted:
        found = answers(engine, [prompt for prompt, _, _ in requests], params)
    assert preempted
    assert any(answer.num_cached for answer in found)
    for (prompt, length, options), answer in zip(requests, found, strict=True):
        assert (answer.tokens, answer.steps) == expected(model, prompt, length, **given(options)), options


@pytest.mark.parametrize("is_async", [False, True])
def test_sampled_completions_survive_preemption(is_async):
    prompts = [prompt[: 20 + row] for row, prompt in enumerate(prompts_of(4, 12)[3:]) if len(prompt) > 40]
    options = {"temperature": 0.8, "top_p": 0.9, "num_denoising_steps": 2, "stop_token_ids": []}
    params = [params_of(60, seed=row, **options) for row in range(len(prompts))]
    calm = answers(engine_of(4, max_num_seqs=2), prompts, params)
    engine = small_engine_of(4, is_async=is_async)
    with counted_preemptions(engine) as preempted:
        pressed = answers(engine, prompts, params)
    assert preempted
    for one, other in zip(calm, pressed, strict=True):
        assert (one.tokens, one.steps) == (other.tokens, other.steps)
        assert one.log_confidence == pytest.approx(other.log_confidence, abs=1e-4)


def test_requests_come_and_go_while_others_run():
    engine = engine_of(4, is_async=True).llm_engine
    prompts, found = prompts_of(4, 16), {}

    def add(row: int) -> None:
        engine.add_request(str(row), {"prompt_token_ids": prompts[row]}, params_of(20, num_denoising_steps=2))

    waiting = [*range(16)]
    num_steps = 0
    while waiting or engine.has_unfinished_requests():
        if waiting and num_steps % 3 == 0:
            add(waiting.pop())
        if num_steps == 10:
            engine.abort_request(["15", "13"])
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason != "abort":
                found[int(output.request_id)] = list(output.outputs[0].token_ids)
        num_steps += 1
    assert not {13, 15} & set(found)
    assert found == {
        row: expected(model_of(4), prompts[row], 20, num_denoising_steps=2)[0]
        for row in range(16)
        if row not in (13, 15)
    }


# What is said of a token


def log_confidences(model: Any, prompt: list[int], num_tokens: int, **options: Any) -> list[float]:
    """Of each token of the window: by the definition's pass over what was decided before the token's step."""
    block_length, first = model.config.block_size, len(prompt)
    remasking = options.get("remasking", "low_confidence")
    decoding = naive.BlockDecoding(
        block_length=block_length,
        max_completion_length=num_tokens,
        num_denoising_steps=options.get("num_denoising_steps", block_length),
        mask_token_id=MASK,
        end_token_ids=(),
        remasking=remasking,
        threshold=options.get("confidence_threshold"),
    )
    window, steps = naive.block_rollout(model, prompt, decoding)
    found = []
    for i, step in enumerate(steps):
        start = (first + i) // block_length * block_length
        stop = min(start + block_length, first + num_tokens)
        known = [first + j < start or steps[j] < step for j in range(stop - first)]
        text = prompt + [token if is_known else MASK for token, is_known in zip(window, known, strict=False)]
        with torch.no_grad():
            output = model(input_ids=torch.tensor([text]), attention_mask=naive.block_causal(len(text), block_length))
        ((token, _, confidence),) = naive.sampling_choices(output.logits[0, first + i].double().tolist(), decoding)
        assert token == window[i]
        found.append(confidence if remasking == "entropy" else math.log(confidence))
    return found


@pytest.mark.parametrize(
    ("block_length", "options"),
    [
        (4, {"num_denoising_steps": 2}),
        (4, {"remasking": "margin"}),
        (8, {"remasking": "entropy", "num_denoising_steps": 4}),
        (16, {"confidence_threshold": 0.06}),
        (32, {"num_denoising_steps": 16}),
    ],
    ids=str,
)
def test_log_probabilities_are_the_confidences_of_the_step_that_decided(block_length, options):
    prompts, num_tokens = prompts_of(block_length)[:6], block_length + 3
    found = answers(engine_of(block_length), prompts, params_of(num_tokens, stop_token_ids=[], **options))
    for prompt, answer in zip(prompts, found, strict=True):
        exact = log_confidences(model_of(block_length), prompt, num_tokens, **options)
        # margins come close to 0, where a logarithm magnifies the rounding
        assert [math.exp(value) for value in answer.log_confidence] == pytest.approx(
            [math.exp(value) for value in exact], abs=1e-6
        ), len(prompt)


# Where a completion ends


@pytest.mark.parametrize("block_length", [4, 32])
def test_the_context_can_be_filled_to_its_last_token(block_length):
    engine, model = engine_of(block_length), model_of(block_length)
    prompt = prompts_of(block_length)[3] * 4
    for room in (1, block_length - 1, block_length + 5):
        ids = prompt[: 256 - room]
        for num_tokens in (room, room + 3):  # the second asks for more than there is room for
            (found,) = answers(engine, [ids], params_of(num_tokens, stop_token_ids=[]))
            assert (found.tokens, found.finish_reason) == (expected(model, ids, room, stop_token_ids=[])[0], "length")


def test_the_models_own_end_token_ends_a_completion():
    params = params_of(30, stop_token_ids=[], num_denoising_steps=2)
    params.ignore_eos = False
    prompts = prompts_of(4, 24)[:8]
    found = answers(engine_of(4), prompts, params)
    for prompt, answer in zip(prompts, found, strict=True):
        assert answer.tokens == expected(model_of(4), prompt, 30, num_denoising_steps=2)[0]
    assert {answer.finish_reason for answer in found} == {"stop", "length"}


def test_completions_of_one_prompt_with_one_seed_are_one():
    prompt = prompts_of(4)[1]
    found = [answer.tokens for answer in answers(engine_of(4), [prompt], params_of(16, temperature=1.0, seed=3, n=4))]
    assert found == [found[0]] * 4
    assert found[:1] == [a.tokens for a in answers(engine_of(4), [prompt], params_of(16, temperature=1.0, seed=3))]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.5),
        ("prompt_logprobs", 0),
        ("prompt_logprobs", 2),
        ("prompt_logprob_token_ids", [5]),
        ("logprob_token_ids", [5]),
    ],
)
def test_what_is_not_honoured_is_refused_beside_a_request_that_is_answered(option, value):
    bad, good = params_of(9), params_of(9)
    if not hasattr(SamplingParams, option):
        pytest.skip("this vLLM has no such option")
    setattr(bad, option, value)
    if option == "logprob_token_ids":
        bad.logprobs = 1  # vLLM wants as many
    prompts = prompts_of(8)[2:4]
    refused, answered = answers(engine_of(8), prompts, [bad, good])
    assert (refused.finish_reason, refused.tokens) == ("error", [])
    assert f"{option}={value} is not honoured" in str(refused.stop_reason)
    assert answered.tokens == expected(model_of(8), prompts[1], 9)[0]


@pytest.mark.parametrize(
    ("option", "value"),
    [("temperature", 0.5), ("seed", 1), ("min_p", 0.1), ("min_tokens", 2), ("logit_bias", {5: 1.0})],
)
def test_vllm_refuses_what_it_does_not_offer_diffusion_models(option, value):
    params = params_of(9)
    setattr(params, option, value)
    with pytest.raises(Exception, match="not yet supported with diffusion models"):
        answers(engine_of(8), prompts_of(8)[:1], params)
