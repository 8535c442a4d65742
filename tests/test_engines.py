# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Rollout engines, with a stand-in for vLLM. vLLM itself: `tests/vllm_engine`."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from tests.tiny import tiny_llada, tiny_sdar, tiny_tokenizer
from tests.vllm_double import LLMDouble, vllm_double
from trl_stabledrl import StableDRLConfig, StableDRLTrainer, checks
from trl_stabledrl.checks import check_vllm, check_vllm_rollouts
from trl_stabledrl.engines.agreement import first_disagreement
from trl_stabledrl.models.families import family_of
from trl_stabledrl.samplers import Rollout, SamplingSettings

PROMPTS = ["ab", "abcdefg", "1234567890123", "aaaaaaaaa", "x", "qwertyuiop"]
"""Two of them shorter than a block."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("sdar")
    tiny_sdar().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def engines() -> Iterator[list[LLMDouble]]:
    with vllm_double() as made:
        yield made


def config_of(folder: Path, **changes: Any) -> StableDRLConfig:
    options: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "max_steps": 3,
        "per_device_train_batch_size": 12,
        "num_generations": 4,
        "gradient_accumulation_steps": 1,
        "max_completion_length": 10,
        "temperature": 0.7,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return StableDRLConfig(**options | changes)


def trainer_of(model: Any, folder: Path, seen: list[Any] | None = None, **changes: Any) -> StableDRLTrainer:
    peft_config = changes.pop("peft_config", None)

    def reward(completion_ids, **kwargs):
        if seen is not None:
            seen.append([list(ids) for ids in completion_ids])
        # equal completions have different rewards, so that a greedy run trains too
        return [float((7 * row + sum(ids)) % 5) for row, ids in enumerate(completion_ids)]

    return StableDRLTrainer(
        model=model,
        reward_funcs=reward,
        args=config_of(folder, **changes),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[2:4]}),
        processing_class=tiny_tokenizer(),
        peft_config=peft_config,
    )


# In training


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_run_with_either_engine_is_the_same(temperature, has_adapter, folder, tmp_path, engines):
    runs = []
    for backend in ("transformers", "vllm"):
        torch.manual_seed(0)
        seen: list[Any] = []
        peft_config = LoraConfig(r=4, lora_alpha=32, init_lora_weights=False) if has_adapter else None
        trainer = trainer_of(
            folder, tmp_path, seen, rollout_backend=backend, temperature=temperature, peft_config=peft_config
        )
        trainer.train()
        runs.append((seen, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}))

    (expected, weights), (found, same_weights) = runs
    assert found == expected
    assert len({str(rollout) for rollout in found}) == 3  # the policy moved, and the engine's with it
    for name, weight in weights.items():
        assert torch.equal(weight, same_weights[name]), name
    assert "generate 8" in " ".join(engines[0].calls) or engines[0].calls.count("sync") >= 3


@pytest.mark.parametrize(
    "changes",
    [
        {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "num_generations_eval": 2},
        {"beta": 0.1, "peft_config": LoraConfig(r=4, init_lora_weights=False)},
        {"gradient_accumulation_steps": 3, "steps_per_generation": 1, "per_device_train_batch_size": 4},
        {"num_iterations": 2, "remasking": "entropy", "suppress_eos": "early_commit", "top_k": 9, "top_p": 0.8},
        {"confidence_threshold": 0.06, "scale_rewards": "group"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_kind_of_run_is_the_same(changes, folder, tmp_path, engines):
    runs = []
    for backend in ("transformers", "vllm"):
        torch.manual_seed(0)
        seen: list[Any] = []
        trainer = trainer_of(folder, tmp_path, seen, rollout_backend=backend, **changes)
        trainer.train()
        runs.append((seen, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}))
    (expected, weights), (found, same_weights) = runs
    assert found == expected
    for name, weight in weights.items():
        assert torch.equal(weight, same_weights[name]), name


def test_a_run_that_is_resumed_hands_over_the_checkpoints_weights(folder, tmp_path, engines):
    options = {"rollout_backend": "vllm", "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole: list[Any] = []
    trainer_of(folder, tmp_path / "whole", whole, **options).train()
    rest: list[Any] = []
    trainer_of(folder, tmp_path / "whole", rest, **options).train(
        resume_from_checkpoint=str(tmp_path / "whole" / "out" / "checkpoint-2")
    )
    assert rest == whole[2:]


def test_weights_are_handed_over_once_for_each_version_of_the_policy(folder, tmp_path, engines):
    trainer = trainer_of(
        folder, tmp_path, rollout_backend="vllm", per_device_train_batch_size=4, gradient_accumulation_steps=3,
        steps_per_generation=1, max_steps=2, rollout_self_check=False,
    )  # fmt: skip
    trainer.train()
    calls = [call.split()[0] for call in engines[0].calls]
    assert calls == ["sync", *["generate"] * 2, "sync", *["generate"] * 2]  # two of the six prompts are short

    trainer.rollout_engine.generate([[5] * 6], row_seeds=[0])  # outside of training nobody knows
    trainer.rollout_engine.generate([[5] * 6], row_seeds=[0])
    assert [call.split()[0] for call in engines[0].calls[len(calls) :]] == ["sync", "generate", "sync", "generate"]


def test_an_adapter_is_merged_into_what_the_engine_gets_and_leaves_the_base_as_it_was(folder, tmp_path, engines):
    peft_config = LoraConfig(r=4, lora_alpha=32, init_lora_weights=False, modules_to_save=["norm"])
    trainer = trainer_of(folder, tmp_path, rollout_backend="vllm", peft_config=peft_config)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.rollout_engine.generate([[5] * 6], row_seeds=[0])

    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(before[name], parameter), name
    merged = trainer.model.merge_and_unload()
    expected = dict(merged.named_parameters())
    assert set(engines[0].loaded) == set(expected)
    for name, value in expected.items():
        assert torch.equal(value, engines[0].loaded[name]), name


def test_an_adapter_is_taken_out_again_where_the_engine_fails_on_a_weight(folder, tmp_path, engines):
    peft_config = LoraConfig(r=4, lora_alpha=32, init_lora_weights=False)
    trainer = trainer_of(folder, tmp_path, rollout_backend="vllm", peft_config=peft_config)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    load = engines[0].load_weights

    def load_some(pairs: Any) -> None:
        if "layers.1.self_attn.k_proj" in pairs[0][0]:
            raise MemoryError("no room")
        load(pairs)

    engines[0].load_weights = load_some  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="no room"):
        trainer.rollout_engine.generate([[5] * 6], row_seeds=[0])
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(before[name], parameter), name


def test_sleeping_gives_memory_back_and_weights_are_there_again(folder, tmp_path, engines):
    trainer = trainer_of(folder, tmp_path, rollout_backend="vllm", vllm_enable_sleep_mode=True, max_steps=2)
    trainer.train()
    assert engines[0].calls[0] == "sleep 2"
    rollouts = " | ".join(engines[0].calls[1:]).split("sleep 2")
    assert len(rollouts) == 4  # the check, two rollouts, and nothing behind the last
    assert all("wake weights | sync | " in part and "wake kv_cache | generate" in part for part in rollouts[:3])
    assert not any(engines[0].is_awake.values())


def test_order_and_short_prompts_are_kept(folder, tmp_path, engines):
    trainer = trainer_of(folder, tmp_path, rollout_backend="vllm", rollout_self_check=False)
    plain = trainer_of(folder, tmp_path)
    prompts = [[3 + row] * length for row, length in enumerate([9, 2, 4, 1, 13, 3, 8])]
    seeds = [*range(20, 27)]
    steps: list[tuple[int, int]] = []
    found = trainer.rollout_engine.generate(prompts, row_seeds=seeds, progress=lambda *pair: steps.append(pair))
    expected = plain.rollout_engine.generate(prompts, row_seeds=seeds)

    assert found.completion_ids == expected.completion_ids
    assert found.block_offset.tolist() == expected.block_offset.tolist() == [1, 2, 0, 1, 1, 3, 0]
    assert found.num_tokens == expected.num_tokens
    assert found.num_row_steps == expected.num_row_steps
    assert engines[0].calls[-1] == "generate 4"
    assert steps == [(40, 40)]
    for row, length in enumerate(map(len, found.completion_ids)):
        assert found.commit_step[row, :length].tolist() == expected.commit_step[row, :length].tolist()


def test_all_prompts_may_be_short(folder, tmp_path, engines):
    trainer = trainer_of(folder, tmp_path, rollout_backend="vllm")
    rollout = trainer.rollout_engine.generate([[5], [6, 7]], row_seeds=[1, 2])
    assert len(rollout.completion_ids) == 2
    assert not any("generate" in call for call in engines[0].calls)


# Faults


def test_a_prompt_that_does_not_fit_is_named_before_anything_is_decoded(folder, tmp_path, engines):
    trainer = trainer_of(folder, tmp_path, rollout_backend="vllm", vllm_max_model_length=24)
    message = re.escape("Prompt 1 has 15 tokens; with max_completion_length=10 that is 25, more than the 24")
    with pytest.raises(ValueError, match=message):
        trainer.rollout_engine.generate([[5] * 14, [5] * 15], row_seeds=[0, 1])
    assert not engines[0].calls


def test_a_failing_engine_is_reported_and_not_used_again(folder, tmp_path, engines):
    trainer = trainer_of(folder, tmp_path, rollout_backend="vllm", rollout_self_check=False)
    engines[0].fault = MemoryError("no page left")
    with pytest.raises(RuntimeError, match=r"failed during a rollout \(MemoryError: no page left\).*resume"):
        trainer.rollout_engine.generate([[5] * 6], row_seeds=[0])
    engines[0].fault = None
    with pytest.raises(RuntimeError, match=r"failed in an earlier rollout: MemoryError: no page left"):
        trainer.rollout_engine.generate([[5] * 6], row_seeds=[0])


def test_logits_that_are_not_finite_name_their_rows(folder, tmp_path, engines):
    trainer = trainer_of(folder, tmp_path, rollout_backend="vllm", rollout_self_check=False)
    generate = engines[0].generate

    def broken(*args: Any, **kwargs: Any) -> Any:
        outputs = generate(*args, **kwargs)
        for entry in outputs[1].outputs[0].logprobs[2].values():
            entry.logprob = torch.nan
        return outputs

    engines[0].generate = broken  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"Expected finite logits, got NaN or infinity in rows \[1\]"):
        trainer.rollout_engine.generate([[5] * 6, [6] * 7], row_seeds=[0, 1])


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_request_that_was_not_completed_is_an_error(reason, folder, tmp_path, engines):
    trainer = trainer_of(folder, tmp_path, rollout_backend="vllm", rollout_self_check=False)
    generate = engines[0].generate

    def cut(*args: Any, **kwargs: Any) -> Any:
        outputs = generate(*args, **kwargs)
        outputs[0].outputs[0].finish_reason = reason
        return outputs

    engines[0].generate = cut  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=f"did not complete prompt 0.*{reason}"):
        trainer.rollout_engine.generate([[5] * 6], row_seeds=[0])


def test_an_engine_that_decodes_otherwise_stops_the_run_before_it_trains(folder, tmp_path, engines):
    trainer = trainer_of(folder, tmp_path, rollout_backend="vllm")
    load = engines[0].load_weights

    def load_wrongly(pairs: Any) -> None:
        load([(name, value * 1.05 if "v_proj" in name else value) for name, value in pairs])

    engines[0].load_weights = load_wrongly  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"does not decode as transformers does: prompt \d+, token \d+, step \d+"):
        trainer.train()
    assert trainer.state.global_step == 0


# What two engines did


def rollout_of(tokens: list[int], steps: list[int], confidence: list[float], **changes: Any) -> Rollout:
    completion = changes.pop("completion", tokens)
    return Rollout(
        completion_ids=[completion],
        window_ids=torch.tensor([tokens]),
        commit_step=torch.tensor([steps]),
        block_offset=torch.tensor([1]),
        num_forwards=0, num_backbone_positions=0, num_vocab_positions=0, num_tokens=0, num_decoded=0, num_row_steps=0,
        settings=SamplingSettings(block_length=3, max_completion_length=4, num_denoising_steps=2),
        confidence=torch.tensor([confidence]),
    )  # fmt: skip


EXPECTED = rollout_of([7, 8, 9, 5], [0, 1, 0, 1], [0.9, 0.8, 0.7, 0.6])


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (EXPECTED, None),
        (rollout_of([7, 8, 9, 5], [0, 1, 0, 1], [0.9, 0.8004, 0.7, 0.6]), None),  # rounding
        (rollout_of([7, 8, 9, 4], [0, 1, 0, 1], [0.9, 0.8, 0.7, 0.6]), None),  # a tie
        (rollout_of([7, 3, 4, 6], [1, 0, 1, 0], [0.2, 0.9, 0.1, 0.1]), None),  # another place first, a tie
        (rollout_of([7, 8, 9, 5], [0, 1, 0, 1], [0.9, 0.75, 0.7, 0.6]), "prompt 0, token 1, step 2: "),
        (rollout_of([7, 8, 9, 4], [0, 1, 0, 1], [0.9, 0.8, 0.7, 0.5]), "prompt 0, token 3, step 2: "),
        (rollout_of([7, 8, 9, 5], [1, 0, 0, 1], [0.9, 0.8, 0.7, 0.6]), "prompt 0, token 0, step 1: "),
        (rollout_of([7, 8, 9, 2], [0, 1, 0, -1], [0.9, 0.8, 0.7, torch.nan], completion=[7, 8, 9]), "prompt 0: 4 "),
    ],
)  # fmt: skip
def test_engines_are_compared_up_to_the_first_near_tie(found, verdict):
    difference = first_disagreement(EXPECTED, found, tolerance=1e-3)
    assert difference is None if verdict is None else (difference or "").startswith(verdict), difference


def test_what_lies_behind_an_end_token_need_not_be_there():
    expected = rollout_of([7, 1, 9, 5], [0, 1, 0, 1], [0.9, 0.8, 0.7, 0.6], completion=[7, 1])
    found = rollout_of([7, 1, 2, 2], [0, 1, -1, -1], [0.9, 0.8, torch.nan, torch.nan], completion=[7, 1])
    assert first_disagreement(expected, found, tolerance=1e-3) is None


# Before anything is loaded


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, r"not installed: pip install 'trl-stabledrl\[vllm\]'"),
        ("0.27.3", r"0\.28 to 0\.31, found 0\.27\.3"),
        ("0.32.0", r"0\.28 to 0\.31, found 0\.32\.0"),
        ("1.0", r"found 1\.0"),
    ],
)
def test_a_vllm_that_cannot_be_used_is_named(version, message, monkeypatch, folder, tmp_path):
    monkeypatch.setattr(checks, "installed_vllm", lambda: version)
    with pytest.raises(ImportError, match=message):
        trainer_of(folder, tmp_path, rollout_backend="vllm")


@pytest.mark.parametrize("version", ["0.28.0", "0.29.1", "0.31.0", "0.31.0+cpu"])
def test_supported_versions(version, monkeypatch):
    monkeypatch.setattr(checks, "installed_vllm", lambda: version)
    check_vllm()


def test_use_vllm_means_the_backend(tmp_path):
    config = config_of(tmp_path, use_vllm=True, vllm_gpu_memory_utilization=0.5)
    assert (config.rollout_backend, config.use_vllm) == ("vllm", False)
    with pytest.raises(ValueError, match=r"rollout_backend='vllm' \(or use_vllm\) does not serve LLaDA, only SDAR\."):
        config.resolve(family_of(tiny_llada().config))
    config.resolve(family_of(tiny_sdar().config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_backend": "sglang"}, "rollout_backend='sglang' is not known. Use one of 'transformers', 'vllm'"),
        ({"vllm_gpu_memory_utilization": 0.5}, "vllm_gpu_memory_utilization=0.5 has no effect with rollout_backend="),
        ({"rollout_self_check": False}, "rollout_self_check=False has no effect with rollout_backend='transformers'"),
        ({"vllm_engine_kwargs": {"dtype": "half"}}, "vllm_engine_kwargs={'dtype': 'half'} has no effect"),
        ({"use_vllm": True, "vllm_gpu_memory_utilization": 1.5}, "vllm_gpu_memory_utilization=1.5 must be above 0"),
        ({"use_vllm": True, "vllm_tensor_parallel_size": 2}, "must divide the number of processes, 1"),
        ({"use_vllm": True, "vllm_mode": "server"}, "vllm_mode='server' is not honoured"),
        ({"use_vllm": True, "vllm_engine_kwargs": "{no"}, "is no JSON"),
        ({"use_vllm": True, "vllm_engine_kwargs": "[1]"}, "must be a mapping"),
        ({"use_vllm": True, "vllm_engine_kwargs": {"max_model_len": 9}}, "is set by vllm_max_model_length"),
        ({"use_vllm": True, "vllm_engine_kwargs": '{"seed": 9}'}, "'seed', which the trainer decides"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        config_of(tmp_path, **changes)


def test_runs_that_vllm_cannot_decode_for_are_refused(tmp_path, engines, monkeypatch):
    args = config_of(tmp_path, use_vllm=True)
    config = tiny_sdar().config
    plain = {"has_adapter": False, "is_quantized": False}
    check_vllm_rollouts("folder", config, args, **plain)
    with pytest.raises(ValueError, match="was built in memory and has none"):
        check_vllm_rollouts(SimpleNamespace(), config, args, **plain)
    with pytest.raises(ValueError, match=r"quantized model \(QLoRA\)"):
        check_vllm_rollouts("folder", config, args, has_adapter=True, is_quantized=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    check_vllm_rollouts("folder", config, args, **plain)
    with pytest.raises(ValueError, match="LoRA under FSDP"):
        check_vllm_rollouts("folder", config, args, has_adapter=True, is_quantized=False)
    for length, message in ((10, "max_completion_length is 10 already"), (513, "the model's 512 positions")):
        short = config_of(tmp_path, use_vllm=True, vllm_max_model_length=length)
        with pytest.raises(ValueError, match=message):
            check_vllm_rollouts("folder", config, short, **plain)


def test_further_arguments_reach_the_engine(folder, tmp_path, engines):
    trainer_of(folder, tmp_path, use_vllm=True, vllm_engine_kwargs={"enforce_eager": True, "dtype": "float16"})
    assert engines[0].arguments["enforce_eager"] is True
    assert engines[0].arguments["dtype"] == "float16"
    assert engines[0].arguments["max_num_batched_tokens"] == 4096
    assert engines[0].arguments["max_num_seqs"] == 12
