# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""vLLM beside the cache-free definition of block decoding, token for token."""

import math
import shutil
from typing import Any

import pytest
import torch

from tests import naive
from tests.vllm_engine.engines import (
    END,
    MASK,
    answers,
    engine_of,
    expected,
    folder_of,
    model_of,
    params_of,
    patch_async,
    prompts_of,
)
from trl_stabledrl.core.unmasking import keyed_race_noise, race_grid
from trl_stabledrl.vllm_plugin import scheduler, state


def decoding_options(block_length: int) -> list[dict[str, Any]]:
    return [
        {},  # a token a step
        {"num_denoising_steps": block_length // 2},
        {"num_denoising_steps": 1},
        {"confidence_threshold": 0.06},
    ]


def assert_exact(engine: Any, model: Any, prompts: list[list[int]], num_tokens: int, **options: Any) -> None:
    found = answers(engine, prompts, params_of(num_tokens, **options))
    for prompt, answer in zip(prompts, found, strict=True):
        assert (answer.tokens, answer.steps) == expected(model, prompt, num_tokens, **options), len(prompt)


@pytest.mark.parametrize("block_length", [4, 6, 8, 16, 32])
def test_greedy_tokens_and_steps_are_the_definitions(block_length):
    engine, model = engine_of(block_length), model_of(block_length)
    for number, options in enumerate(decoding_options(block_length)):
        # the second of the lengths ends within a block, whatever the prompt's
        for num_tokens in (2 * block_length, block_length + 3)[number % 2 :]:
            assert_exact(engine, model, prompts_of(block_length), num_tokens, **options)


def test_dynamic_decoding_commits_several_tokens_at_once():
    found = answers(engine_of(8), prompts_of(8), params_of(24, confidence_threshold=0.06))
    sizes = {answer.steps.count(step) for answer in found for step in answer.steps}
    assert len(sizes) > 2


@pytest.mark.parametrize("block_length", [4, 32])
def test_causal_prefill_is_not_exact(block_length, monkeypatch):
    engine = engine_of(block_length, max_num_seqs=16, max_num_batched_tokens=2048, enable_prefix_caching=False)
    prompts = [prompt for prompt in prompts_of(block_length, 16) if len(prompt) > 2 * block_length]
    params = params_of(block_length, num_denoising_steps=2)
    exact = answers(engine, prompts, params)
    build, num_causal = state.build_attn_metadata, 0

    def build_causally(**options: Any) -> Any:
        nonlocal num_causal
        is_prompt = num_causal == 0  # the first pass holds all prompts
        num_causal += is_prompt
        return build(**options | {"causal": is_prompt})

    monkeypatch.setattr(state, "build_attn_metadata", build_causally)
    found = answers(engine, prompts, params)
    assert num_causal == 1
    assert sum(one.tokens != other.tokens for one, other in zip(found, exact, strict=True)) > len(prompts) // 4
    for one, other in zip(found, exact, strict=True):
        assert one.log_confidence != pytest.approx(other.log_confidence, abs=1e-3)


@pytest.mark.parametrize("block_length", [4, 16])
def test_log_confidences_are_those_of_the_definition(block_length):
    """One step decides the whole block, so that one pass of the definition has them all."""
    model, prompts = model_of(block_length), prompts_of(block_length)
    found = answers(engine_of(block_length), prompts, params_of(block_length, num_denoising_steps=1))
    for prompt, answer in zip(prompts, found, strict=True):
        stop = (len(prompt) // block_length + 1) * block_length
        ids = torch.tensor([[*prompt, *[MASK] * (stop - len(prompt))]])
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=naive.block_causal(stop, block_length)).logits[0].double()
        logits[:, MASK] = -math.inf
        log_probs = logits.log_softmax(-1)
        num = min(len(answer.tokens), stop - len(prompt))
        for j in range(num):
            assert answer.log_confidence[j] == pytest.approx(
                log_probs[len(prompt) + j, answer.tokens[j]].item(), abs=1e-4
            )


# Stop tokens, mask tokens


@pytest.mark.parametrize("is_async", [False, True])
def test_end_tokens_of_the_prompt_do_not_end_the_request(is_async):
    engine, model = engine_of(4, is_async=is_async), model_of(4)
    prompts = [[5, 6, 7, END], [5, 6, 7, END, END], [9] * 6 + [END], [END] * 7, [5, 6, 7, 8, 9, END, 3]]
    assert_exact(engine, model, prompts, 10)


def test_a_mask_token_in_the_prompt_stays_there():
    assert_exact(engine_of(4), model_of(4), [[5, 6, MASK, 8, 9], [5] * 4 + [MASK], [MASK] * 7], 10)


def test_the_mask_token_is_not_sampled_where_the_model_predicts_it():
    engine = engine_of(4)
    runner = engine.llm_engine.model_executor.driver_worker.model_runner
    head, model = runner.model.lm_head.weight, model_of(4)
    kept = head.data.clone()
    try:
        with torch.no_grad():
            model.lm_head.weight[MASK] = 40 * model.lm_head.weight[MASK]
            head.data.copy_(model.lm_head.weight)
        engine.reset_prefix_cache()
        prompts = prompts_of(4)
        assert_exact(engine, model, prompts, 9)
        assert all(MASK not in answer.tokens for answer in answers(engine, prompts, params_of(9)))
    finally:
        head.data.copy_(kept)
        model.lm_head.weight.data.copy_(kept)
        engine.reset_prefix_cache()


def test_several_end_tokens():
    options = {"stop_token_ids": [END, 19, 34]}
    prompts = prompts_of(4)
    found = answers(engine_of(4), prompts, params_of(20, **options))
    for prompt, answer in zip(prompts, found, strict=True):
        assert answer.tokens == expected(model_of(4), prompt, 20, **options)[0]
    assert {answer.finish_reason for answer in found} == {"stop", "length"}


@pytest.mark.parametrize(
    "options",
    [
        {"remasking": "margin"},
        {"remasking": "entropy", "num_denoising_steps": 2},
        {"suppress_eos": "sampling", "stop_token_ids": [END, 19, 34, 59]},
        {"suppress_eos": "early_commit", "stop_token_ids": [END, 19, 34, 59]},
        {"suppress_eos": "early_commit", "stop_token_ids": [END, 19], "confidence_threshold": 0.05},
    ],
    ids=str,
)
def test_every_way_to_rank_positions_and_to_hold_end_tokens_back(options):
    assert_exact(engine_of(8), model_of(8), prompts_of(8), 19, **options)


def test_requests_of_one_batch_may_be_decoded_differently():
    prompts = prompts_of(8)
    options: list[dict[str, Any]] = [decoding_options(8)[row % 4] for row in range(8)]
    found = answers(engine_of(8), prompts, [params_of(12 + row, **one) for row, one in enumerate(options)])
    for row, (prompt, answer) in enumerate(zip(prompts, found, strict=True)):
        assert (answer.tokens, answer.steps) == expected(model_of(8), prompt, 12 + row, **options[row])


# What the engine does with its cache


@pytest.mark.parametrize("block_length", [4, 16, 32])
def test_prefixes_from_the_cache(block_length):
    engine, model = engine_of(block_length, block_size=32), model_of(block_length)
    shared = [3 + (7 * i * i) % 60 for i in range(130)]
    prompts = [[*shared, 5 + row, *[7] * row] for row in range(6)]
    options = {"num_denoising_steps": 2}
    engine.reset_prefix_cache()
    assert_exact(engine, model, prompts[:1], block_length + 2, **options)
    found = answers(engine, prompts, params_of(block_length + 2, **options))
    assert all(answer.num_cached >= 64 for answer in found)
    for prompt, answer in zip(prompts, found, strict=True):
        assert (answer.tokens, answer.steps) == expected(model, prompt, block_length + 2, **options)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("has_cache", [False, True])
@pytest.mark.parametrize("block_length", [4, 16])
def test_preempted_requests_go_on_where_they_were(block_length, has_cache, is_async):
    engine = engine_of(
        block_length, is_async=is_async, block_size=32, num_gpu_blocks_override=11, max_model_len=128,
        enable_prefix_caching=has_cache,
    )  # fmt: skip
    core = engine.llm_engine.engine_core.engine_core.scheduler
    assert isinstance(core, scheduler.AsyncBlockScheduler if is_async else scheduler.SyncBlockScheduler)
    preempted = []
    preempt = core._preempt_request

    def note(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append((request.request_id, request.num_output_tokens))
        return preempt(request, *args, **kwargs)

    core._preempt_request = note
    try:
        prompts = [prompt[: 20 + row] for row, prompt in enumerate(prompts_of(block_length, 12)[3:] * 2) if
                   len(prompt) > 40][:8]  # fmt: skip
        assert len(prompts) == 8
        assert_exact(engine, model_of(block_length), prompts, 70, num_denoising_steps=2, stop_token_ids=[])
    finally:
        core._preempt_request = preempt
    assert any(num > 0 for _, num in preempted)


@pytest.mark.parametrize("block_length", [4, 8])
def test_scheduling_ahead(block_length):
    engine = engine_of(block_length, is_async=True)
    assert engine.llm_engine.vllm_config.scheduler_config.async_scheduling
    assert isinstance(engine.llm_engine.engine_core.engine_core.scheduler, scheduler.AsyncBlockScheduler)
    for options in decoding_options(block_length):
        assert_exact(engine, model_of(block_length), prompts_of(block_length), 2 * block_length + 1, **options)


def test_more_requests_than_slots_and_tiles_of_few_rows(monkeypatch):
    from trl_stabledrl.vllm_plugin import sampler

    monkeypatch.setattr(sampler, "TILE_LOGITS", 3 * 4 * 64)  # three requests of a block of four
    engine = engine_of(4, max_num_seqs=5)
    assert_exact(engine, model_of(4), prompts_of(4, 33), 10, num_denoising_steps=2)


# Sampling


def keyed_rollout(model: Any, prompt: list[int], num_tokens: int, seed: int, **options: Any) -> list[int]:
    """The definition with a hash for noise: the two-stage race written out, no cache, one position at a time."""
    block_length, vocab_size = model.config.block_size, model.config.vocab_size
    settings = naive.BlockDecoding(
        block_length=block_length,
        max_completion_length=num_tokens,
        num_denoising_steps=options.pop("num_denoising_steps", block_length),
        mask_token_id=MASK,
        **options,
    )
    num_groups, group_length = race_grid(vocab_size)
    total = len(prompt) + num_tokens
    text: list[int | None] = [*prompt, *[None] * num_tokens]
    for start in range(len(prompt) - len(prompt) % block_length, total, block_length):
        stop = min(start + block_length, total)
        step = 0
        while masked := [i for i in range(start, stop) if text[i] is None]:
            ids = torch.tensor([[MASK if token is None else token for token in text[:stop]]])
            with torch.no_grad():
                logits = model(input_ids=ids, attention_mask=naive.block_causal(stop, block_length)).logits[0]
            ranked = []
            for i in masked:
                choices = naive.sampling_choices(logits[i].double().tolist(), settings)
                law = {token: (probability, confidence) for token, probability, confidence in choices}
                noise = keyed_race_noise(vocab_size, *(torch.tensor([key]) for key in (seed, i, step)))[0].tolist()
                groups = [range(g * group_length, min((g + 1) * group_length, vocab_size)) for g in range(num_groups)]
                totals = [math.fsum(law.get(token, (0.0, 0.0))[0] for token in group) for group in groups]
                best = max(range(num_groups), key=lambda g: totals[g] / noise[1 + g])
                token = max(
                    groups[best],
                    key=lambda t: law.get(t, (0.0, 0.0))[0] / noise[1 + num_groups + t - groups[best].start],
                )
                ranked.append((-law[token][1], i, token))
            num = math.ceil(len(masked) / (settings.num_denoising_steps - step))
            for _, i, token in sorted(ranked)[:num]:
                text[i] = token
            step += 1
    completion = [token for token in text[len(prompt) :] if token is not None]
    return completion[: completion.index(END) + 1] if END in completion else completion


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 5}, {"top_p": 0.6}, {"num_denoising_steps": 2, "top_k": 9}], ids=str
)
def test_sampled_tokens_are_the_definitions_with_the_same_noise(options):
    prompts, seeds = prompts_of(4), [3, 113, 2**63 - 1, -5, 0, 10, 11, 12]
    params = [params_of(10, temperature=0.7, seed=seed, **options) for seed in seeds]
    found = answers(engine_of(4), prompts, params)
    for prompt, seed, answer in zip(prompts, seeds, found, strict=True):
        assert answer.tokens == keyed_rollout(model_of(4), prompt, 10, seed, temperature=0.7, **options)


def total_variation(counts: dict[Any, float], law: dict[Any, float], num: int) -> float:
    return sum(abs(counts.get(key, 0) / num - law.get(key, 0.0)) for key in counts | law) / 2


def test_sampled_completions_have_the_definitions_law(record_property):
    """Total variation of 800 samples from the exact law, beside that of as many drawn from the law itself."""
    num, prompt, num_tokens = 800, [5, 6, 7, 3, 4, 5], 2
    model = model_of(4, vocab_size=12)
    engine = engine_of(4, vocab_size=12, max_num_seqs=64, max_num_batched_tokens=1024)
    decoding = naive.BlockDecoding(
        block_length=4, max_completion_length=num_tokens, num_denoising_steps=2, mask_token_id=MASK, temperature=0.5
    )
    law: dict[tuple[int, ...], float] = {}
    for (window, _), probability in naive.block_rollout_law(model, prompt, decoding).items():
        law[window] = law.get(window, 0.0) + probability
    assert sum(law.values()) == pytest.approx(1)
    options = {"temperature": 0.5, "num_denoising_steps": 2, "stop_token_ids": []}
    found = answers(engine, [prompt] * num, [params_of(num_tokens, seed=seed, **options) for seed in range(num)])
    counts: dict[tuple[int, ...], float] = {}
    for answer in found:
        counts[tuple(answer.tokens)] = counts.get(tuple(answer.tokens), 0) + 1
    distance = total_variation(counts, law, num)

    windows = list(law)
    generator = torch.Generator().manual_seed(0)
    weights = torch.tensor([law[window] for window in windows])
    references = []
    for _ in range(20):
        drawn = torch.multinomial(weights, num, replacement=True, generator=generator).bincount(minlength=len(windows))
        references.append(total_variation(dict(zip(windows, drawn.tolist(), strict=True)), law, num))
    record_property("total_variation", distance)
    record_property("of_the_laws_own_samples", references)
    assert distance <= max(references)


def test_a_completion_depends_on_prompt_and_seed_alone():
    prompts, seeds = prompts_of(4, 12), [*range(12)]
    params = [params_of(14, temperature=0.9, seed=seed) for seed in seeds]
    whole = [answer.tokens for answer in answers(engine_of(4), prompts, params)]
    backwards = [answer.tokens for answer in answers(engine_of(4), prompts[::-1], params[::-1])][::-1]
    small = engine_of(4, max_num_seqs=2, max_num_batched_tokens=16)
    ahead = engine_of(4, is_async=True)
    assert whole == backwards
    assert whole == [answer.tokens for answer in answers(small, prompts, params)]
    assert whole == [answer.tokens for answer in answers(ahead, prompts, params)]
    other = [params_of(14, temperature=0.9, seed=seed + 100) for seed in seeds]
    assert whole != [answer.tokens for answer in answers(engine_of(4), prompts, other)]


def test_completions_of_one_prompt_differ_without_a_seed():
    found = answers(engine_of(4), [prompts_of(4)[0]], params_of(16, temperature=1.0, n=4))
    assert len({tuple(answer.tokens) for answer in found}) == 4


def test_one_token_of_one_is_greedy():
    prompts = prompts_of(4)
    greedy = [answer.tokens for answer in answers(engine_of(4), prompts, params_of(10))]
    assert greedy == [
        answer.tokens for answer in answers(engine_of(4), prompts, params_of(10, temperature=1.0, top_k=1))
    ]


# Faults


def test_requests_that_cannot_be_served_end_with_a_reason_and_the_others_go_on():
    good = prompts_of(8)[3]
    bad: list[tuple[list[int], dict[str, Any], str]] = [
        ([5] * 7, {}, "7 tokens, less than a block of 8"),
        (good, {"num_denoising_step": 3}, "'num_denoising_step', which is not known"),
        (good, {"remasking": "luck"}, "remasking"),
        (good, {"num_denoising_steps": 0}, "num_denoising_steps"),
        (good, {"confidence_threshold": 1.5}, "confidence_threshold"),
    ]
    prompts = [good, *(prompt for prompt, _, _ in bad), good]
    params = [params_of(9), *(params_of(9, **options) for _, options, _ in bad), params_of(9)]
    found = answers(engine_of(8), prompts, params)
    for answer, (_, _, reason) in zip(found[1:-1], bad, strict=True):
        assert (answer.finish_reason, answer.tokens) == ("error", [])
        assert reason in str(answer.stop_reason)
    assert found[0].tokens == found[-1].tokens == expected(model_of(8), good, 9)[0]
    alone = answers(engine_of(8), [[5] * 7], params_of(9))  # nothing else keeps the engine going
    assert alone[0].finish_reason == "error"


def test_penalties_are_refused():
    params = params_of(9)
    params.presence_penalty = 0.5
    (answer,) = answers(engine_of(8), prompts_of(8)[:1], params)
    assert answer.finish_reason == "error"
    assert "presence_penalty=0.5 is not honoured" in str(answer.stop_reason)


def test_a_prompt_that_does_not_fit_is_refused_by_vllm():
    with pytest.raises(Exception, match="maximum context length is 256"):
        answers(engine_of(8), [[5] * 300], params_of(9))


def test_logits_that_are_not_finite_end_and_show():
    engine = engine_of(4, max_num_seqs=3)
    runner = engine.llm_engine.model_executor.driver_worker.model_runner
    table = runner.model.model.embed_tokens.weight
    kept = table.data.clone()
    try:
        table.data[7] = math.nan
        found = answers(engine, [[7] * 6, [5] * 6], params_of(9))
    finally:
        table.data.copy_(kept)
        engine.reset_prefix_cache()
    assert all(math.isnan(value) for value in found[0].log_confidence[:2])
    assert not any(math.isnan(value) for value in found[1].log_confidence)


# Configuration


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"diffusion_config": {"canvas_length": 8}}, "canvas_length=8, but the model's blocks have 32"),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "does not know blocks"),
        ({"max_num_batched_tokens": 72}, "max_num_batched_tokens=72 is not a multiple of the block length, 32"),
        ({"block_size": 16}, "block_size=16, the tokens of a page"),
    ],
)
def test_settings_that_would_not_be_exact_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        engine_of.__wrapped__(32, **options)


def test_a_checkpoints_own_temperature_is_not_a_default_that_vllm_refuses(tmp_path):
    from transformers import GenerationConfig
    from vllm.engine.arg_utils import EngineArgs

    folder = shutil.copytree(folder_of(4), tmp_path / "model")
    GenerationConfig(do_sample=True, temperature=0.6, top_k=20, eos_token_id=[END, 19]).save_pretrained(folder)
    with patch_async(False):
        config = EngineArgs(model=str(folder), max_model_len=64, dtype="float32").create_engine_config().model_config
    assert config.get_diff_sampling_param() == {}
    assert config.try_get_generation_config()["eos_token_id"] == [END, 19]


@pytest.mark.parametrize(("asked", "given"), [(250, 256), (256, 256), (512, 512), (510, 512)])
def test_the_context_is_whole_blocks(asked, given):
    from vllm.engine.arg_utils import EngineArgs

    with patch_async(False):
        config = EngineArgs(model=folder_of(32), max_model_len=asked, dtype="float32").create_engine_config()
    assert config.model_config.max_model_len == given
    assert config.cache_config.block_size % 32 == 0
