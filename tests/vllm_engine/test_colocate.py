# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM inside the trainer."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from tests import naive
from tests.tiny import tiny_sdar, tiny_tokenizer
from trl_stabledrl import StableDRLConfig, StableDRLTrainer

END, MASK, WINDOW = 1, 2, 10
PROMPTS = ["ab", "abcdefg", "1234567890123", "aaaaaaaaa", "xy", "qwertyuiop", "hello", "wor"]
"""Three of them shorter than a block of 4."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    path = tmp_path_factory.mktemp("sdar")
    # vLLM's attention on a CPU begins at heads of 32
    model = tiny_sdar(hidden_size=64, head_dim=32, num_attention_heads=2, num_key_value_heads=1)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def trainer_of(folder: str, tmp_path: Path) -> Callable[..., StableDRLTrainer]:
    def make(seen: list[Any] | None = None, *, peft_config: Any = None, **changes: Any) -> StableDRLTrainer:
        options: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"),
            "max_steps": 3,
            "per_device_train_batch_size": 16,
            "num_generations": 4,
            "gradient_accumulation_steps": 1,
            "max_completion_length": WINDOW,
            "num_denoising_steps": 2,
            "temperature": 0.0,
            "learning_rate": 1e-2,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }
        args = StableDRLConfig(**options | changes)

        def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
            if seen is not None:
                seen.append([list(ids) for ids in completion_ids])
            # equal completions have different rewards, so that a greedy run trains too
            return [float((7 * row + sum(ids)) % 5) for row, ids in enumerate(completion_ids)]

        return StableDRLTrainer(
            model=folder,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tiny_tokenizer(),
            peft_config=peft_config,
        )

    return make


VLLM = {
    "use_vllm": True,
    "vllm_max_model_length": 64,
    "vllm_engine_kwargs": {"enforce_eager": True, "num_gpu_blocks_override": 512},
}


@pytest.fixture
def engine_of(trainer_of: Callable[..., StableDRLTrainer]) -> Callable[..., Any]:
    def make(**changes: Any) -> Any:
        return trainer_of(**VLLM | {"rollout_self_check": False} | changes).rollout_engine

    return make


def completion_of(model: Any, prompt: list[int]) -> list[int]:
    options = naive.BlockDecoding(
        block_length=4,
        max_completion_length=WINDOW,
        num_denoising_steps=2,
        mask_token_id=MASK,
        end_token_ids=(END,),
    )
    window, _ = naive.block_rollout(model, prompt, options)
    return window[: window.index(END) + 1] if END in window else window


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("changes", [{}, {"confidence_threshold": 0.05, "num_denoising_steps": None}])
def test_three_steps_are_those_of_the_transformers_engine(kind, changes, trainer_of):
    runs = []
    for backend in ({}, VLLM):
        torch.manual_seed(0)
        seen: list[Any] = []
        peft_config = LoraConfig(r=4, lora_alpha=32, init_lora_weights=False) if kind == "lora" else None
        trainer = trainer_of(seen, peft_config=peft_config, **backend | changes)
        trainer.train()
        runs.append((seen, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}))

    (expected, weights), (found, same_weights) = runs
    assert found == expected
    assert len({str(rollout) for rollout in found}) == 3  # the policy moved, and the engine's with it
    for name, weight in weights.items():
        assert torch.equal(weight, same_weights[name]), name


def test_the_engine_decodes_with_the_weights_of_the_moment(trainer_of):
    trainer = trainer_of(**VLLM)
    prompts = [[5, 6, 7, 8, 9], [3] * 8, [4, 10]]
    for scale in (1.0, 1.5, 0.5):
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(scale)
        plain = copy.deepcopy(trainer.model).eval()
        found = trainer.rollout_engine.generate(prompts, row_seeds=[0, 1, 2]).completion_ids
        assert found == [completion_of(plain, prompt) for prompt in prompts]


def test_an_adapter_is_merged_for_the_engine_alone(trainer_of):
    trainer = trainer_of(**VLLM, peft_config=LoraConfig(r=4, lora_alpha=32, init_lora_weights=False))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    prompts = [[5, 6, 7, 8, 9], [3] * 8]
    found = trainer.rollout_engine.generate(prompts, row_seeds=[0, 1]).completion_ids
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(before[name], parameter), name

    merged = copy.deepcopy(trainer.model).merge_and_unload().eval()
    assert found == [completion_of(merged, prompt) for prompt in prompts]
    runner = trainer.rollout_engine.llm.llm_engine.model_executor.driver_worker.model_runner
    q, k, v = (merged.get_parameter(f"model.layers.0.self_attn.{name}_proj.weight") for name in "qkv")
    assert torch.equal(runner.model.get_parameter("model.layers.0.self_attn.qkv_proj.weight"), torch.cat([q, k, v]))


def test_rollouts_depend_on_the_rows_seed_alone(engine_of):
    engine = engine_of(temperature=0.8, top_p=0.9)
    prompts = [[5 + row % 7] * (4 + row % 9) for row in range(24)]
    seeds = [*range(100, 124)]
    whole = engine.generate(prompts, row_seeds=seeds).completion_ids
    turned = engine.generate(prompts[::-1], row_seeds=seeds[::-1]).completion_ids[::-1]
    alone = [engine.generate([prompt], row_seeds=[seed]).completion_ids[0] for prompt, seed in
             zip(prompts[:4], seeds[:4], strict=True)]  # fmt: skip
    assert whole == turned
    assert whole[:4] == alone
    assert engine.generate(prompts, row_seeds=[seed + 1 for seed in seeds]).completion_ids != whole


def test_more_prompts_than_the_engine_has_room_for_are_answered_in_order(engine_of):
    engine = engine_of(vllm_engine_kwargs={"enforce_eager": True, "max_num_seqs": 4})
    plain = copy.deepcopy(engine.model).eval()
    prompts = [[3 + row % 40] * (4 + row % 11) for row in range(32)]
    found = engine.generate(prompts, row_seeds=[0] * 32)
    assert found.completion_ids == [completion_of(plain, prompt) for prompt in prompts]
    assert found.num_row_steps >= 32 * 4  # two of two steps in the first blocks, at least


def test_counters_are_those_of_the_transformers_engine(engine_of):
    engine = engine_of()
    prompts = [[5, 6, 7, 8, 9], [3] * 8]
    found = engine.generate(prompts, row_seeds=[0, 1])
    expected = engine.reference.generate(prompts, row_seeds=[0, 1])
    assert (found.num_row_steps, found.num_decoded) == (expected.num_row_steps, expected.num_decoded)
    assert found.num_tokens == expected.num_tokens
    # a block is passed whole, and once more to be kept
    assert found.num_vocab_positions % 4 == 0
    assert found.num_vocab_positions > expected.num_vocab_positions


# Faults


def test_an_engine_that_raises_in_the_middle_ends_the_run(engine_of):
    engine = engine_of()
    state = engine.llm.llm_engine.model_executor.driver_worker.model_runner.model_state
    prepare, calls = state.prepare_attn, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("out of pages")
        return prepare(*args, **kwargs)

    state.prepare_attn = failing
    with pytest.raises(RuntimeError, match=r"failed during a rollout \(.*out of pages.*resume from the last one"):
        engine.generate([[5] * 6], row_seeds=[0])
    with pytest.raises(RuntimeError, match="failed in an earlier rollout"):
        engine.generate([[5] * 6], row_seeds=[0])


def test_weights_that_are_not_finite_name_the_rows(engine_of):
    engine = engine_of()
    with torch.no_grad():
        engine.model.model.embed_tokens.weight[7] = torch.nan
    with pytest.raises(ValueError, match=r"Expected finite logits, got NaN or infinity in rows \[1\]"):
        engine.generate([[5] * 6, [5, 5, 7, 5, 5]], row_seeds=[0, 1])


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_decoded(engine_of):
    engine = engine_of()
    with pytest.raises(
        ValueError, match="Prompt 1 has 55 tokens; with max_completion_length=10 that is 65, more than"
    ):
        engine.generate([[5] * 6, [5] * 55], row_seeds=[0, 1])
    assert len(engine.generate([[5] * 54], row_seeds=[0]).completion_ids[0]) <= WINDOW


def test_causal_prefill_is_found_by_the_self_check(trainer_of, monkeypatch):
    from trl_stabledrl.vllm_plugin import state

    build = state.build_attn_metadata
    monkeypatch.setattr(
        state, "build_attn_metadata", lambda **options: build(**options | {"causal": options["max_query_len"] >= 4})
    )
    trainer = trainer_of(**VLLM)
    with pytest.raises(RuntimeError, match="vLLM does not decode as transformers does: prompt"):
        trainer.train()
    assert trainer.state.global_step == 0
