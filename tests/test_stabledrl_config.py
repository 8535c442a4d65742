# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import TrainingArguments
from trl import GRPOConfig

from trl_stabledrl import StableDRLConfig
from trl_stabledrl.models.families import FAMILIES
from trl_stabledrl.stabledrl_config import FORCED_OPTIONS, REFUSED_OPTIONS

LLADA = FAMILIES[0]


def config_of(folder: Path | str = "unused", **changes: Any) -> StableDRLConfig:
    options: dict[str, Any] = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none"}
    return StableDRLConfig(**options | changes)


# Inherited options

HONOURED = {
    # loading
    "model_init_kwargs", "trust_remote_code", "ds3_gather_for_generation",
    # rollouts
    "num_generations", "num_generations_eval", "max_completion_length", "temperature", "top_p", "top_k",
    "chat_template_kwargs", "pad_to_multiple_of", "shuffle_dataset", "generation_batch_size", "steps_per_generation",
    # objective
    "beta", "num_iterations", "epsilon", "reward_weights", "multi_objective_aggregation", "scale_rewards",
    "mask_truncated_completions", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps",
    # vLLM
    "use_vllm", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length",
    "vllm_tensor_parallel_size",
    # logs
    "log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo",
}  # fmt: skip


def test_every_option_of_grpo_is_honoured_refused_or_fixed():
    inherited = {f.name for f in fields(GRPOConfig)} - {f.name for f in fields(TrainingArguments)}
    refused = set(REFUSED_OPTIONS) & inherited

    assert inherited == HONOURED | refused | set(FORCED_OPTIONS)
    assert not HONOURED & refused
    assert not HONOURED & set(FORCED_OPTIONS)
    assert set(REFUSED_OPTIONS) - inherited == {
        "label_smoothing_factor", "neftune_noise_alpha", "data_seed", "train_sampling_strategy",
    }  # fmt: skip


def another_value(name: str) -> Any:
    """A value that differs from the default of GRPOConfig."""
    default = next(f.default for f in fields(GRPOConfig) if f.name == name)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    return "something else"


@pytest.mark.parametrize("name", REFUSED_OPTIONS)
def test_an_option_that_is_not_honoured_is_refused_with_the_reason(name):
    value = another_value(name)
    with pytest.raises(ValueError, match=rf"^{name}={re.escape(repr(value))} is not honoured .*Allowed: ") as error:
        config_of(**{name: value})
    assert REFUSED_OPTIONS[name] in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("loss_type", "dapo"), ("disable_dropout", False), ("vllm_importance_sampling_correction", True)],
)
def test_an_option_with_one_legal_value_is_refused_otherwise(name, value):
    allowed = FORCED_OPTIONS[name][0]
    with pytest.raises(ValueError, match=rf"^{name}={value!r} is not supported: .* Allowed: {allowed!r}\."):
        config_of(**{name: value})


def test_inherited_defaults_are_grpos_but_for_the_documented_ones():
    ours = {f.name: f for f in fields(StableDRLConfig)}
    changed = {f.name: ours[f.name].default for f in fields(GRPOConfig) if ours[f.name].default != f.default}
    assert changed == {
        "epsilon": None,
        "loss_type": "stabledrl",
        "scale_rewards": "none",
        "disable_dropout": True,
        "vllm_importance_sampling_correction": False,
    }


# Own options


def test_every_field_has_a_line_of_documentation_and_of_help():
    own = [f for f in fields(StableDRLConfig) if f.name not in {g.name for g in fields(GRPOConfig)}]
    documentation = inspect.cleandoc(StableDRLConfig.__doc__ or "")
    documented = re.findall(r"^    (\w+) \(`(\w+)`, \*optional\*(?:, defaults to `(.*)`)?\):$", documentation, re.M)

    assert [name for name, _, _ in documented] == [
        *(f.name for f in own[: own.index(next(f for f in own if f.name == "ratio_cap")) + 1]),
        "epsilon",
        *(f.name for f in own[own.index(next(f for f in own if f.name == "ratio_cap")) + 1 :]),
    ]
    by_name = {f.name: f for f in fields(StableDRLConfig)}
    for name, _, default in documented:
        given = by_name[name].default
        assert given is not MISSING
        assert default == ("" if given is None else f'"{given}"' if isinstance(given, str) else str(given)), name
    for f in own:
        assert f.metadata["help"].endswith("."), f.name


def test_what_is_left_open_comes_from_the_family():
    config = config_of(max_completion_length=20)
    config.resolve(LLADA)

    assert (config.mask_law, config.mc_sampling, config.num_mc_samples) == ("block_suffix", "complementary", 2)
    assert config.block_length == 20  # the family's 32, in a window of 20
    assert config.num_denoising_steps == 10  # one per two tokens
    longer = config_of(max_completion_length=100)
    longer.resolve(LLADA)
    assert (longer.block_length, longer.num_denoising_steps) == (32, 16)


def test_what_is_set_wins_over_the_family():
    config = config_of(mask_law="uniform", mc_sampling="stratified", num_mc_samples=3, block_length=7,
                       num_denoising_steps=2)  # fmt: skip
    config.resolve(LLADA)

    likelihood = config.likelihood_settings(mask_token_id=5, end_token_id=1)
    assert (likelihood.mask_law, likelihood.mc_sampling, likelihood.num_mc_samples) == ("uniform", "stratified", 3)
    assert (likelihood.mask_token_id, likelihood.end_token_id, likelihood.block_length) == (5, 1, 7)
    assert (likelihood.window_length, likelihood.seed, likelihood.temperature) == (512, 42, 1.0)
    sampling = config.sampling_settings()
    assert (sampling.block_length, sampling.num_denoising_steps, sampling.temperature) == (7, 2, 1.0)


def test_the_full_law_has_one_draw():
    config = config_of(mask_law="full")
    config.resolve(LLADA)
    assert (config.mc_sampling, config.num_mc_samples) == ("independent", 1)


@pytest.mark.parametrize(
    "options",
    [{"num_mc_samples": 3}, {"mask_law": "full", "num_mc_samples": 2}, {"mask_law": "uniform", "num_mc_samples": 1}],
)
def test_draws_that_do_not_suit_the_familys_sampling_are_refused_when_it_is_known(options):
    config = config_of(**options)
    with pytest.raises(ValueError, match="num_mc_samples"):
        config.resolve(LLADA)


def test_a_block_longer_than_the_completion_is_refused_with_full_attention():
    config = config_of(block_length=33, max_completion_length=32)
    with pytest.raises(ValueError, match="block_length to be 1 to max_completion_length=32, got 33"):
        config.resolve(LLADA)


CHOICES = {
    "objective": "'stabledrl', 'clip_only', 'self_norm_only', 'grpo', 'espo', 'spg', 'diffu_grpo', 'coupled_grpo', "
    "'wd1', 'gdpo'",
    "mask_law": "'uniform', 'block_suffix', 'semi_ar', 'full', 'staircase'",
    "mc_sampling": "'independent', 'stratified', 'complementary', 'cyclic', 'quadrature'",
    "mask_coupling": "'shared', 'independent'",
    "mask_sharing": "'none', 'group'",
    "surrogate": "'elbo', 'sandwich'",
    "clip_mode": "'both', 'upper'",
    "ratio_normalization": "'token', 'sequence'",
    "kl_estimator": "'k2', 'k3'",
    "tail": "'mask', 'eos', 'hidden'",
    "context_attention": "'block_causal', 'causal'",
    "remasking": "'low_confidence', 'random', 'entropy', 'margin'",
    "suppress_eos": "'sampling', 'early_commit'",
}


@pytest.mark.parametrize("name", CHOICES)
def test_an_unknown_choice_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match=rf"{name}='nonsense' is not known\. Use one of ") as error:
        config_of(**{name: "nonsense"})
    known = set(re.findall(r"'(\w+)'", str(error.value).split("Use one of ")[1]))
    assert known == set(re.findall(r"'(\w+)'", CHOICES[name]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, r"epsilon=0\.0 must be above 0"),
        ({"epsilon": -1.0}, r"epsilon=-1\.0 must be above 0"),
        ({"clip_mode": "upper", "ratio_cap": 1.0}, r"ratio_cap=1\.0 must be above 1"),
        ({"ratio_cap": 4.0}, r"ratio_cap=4\.0 has no effect with clip_mode='both'"),
        ({"eubo_beta": 0.9}, r"eubo_beta=0\.9 must be at least 1"),
        ({"score_temperature": 0.0}, r"score_temperature=0\.0 must be above 0"),
        ({"beta": -0.1}, r"beta=-0\.1 must be 0"),
        ({"num_iterations": 0}, "num_iterations=0 must be at least 1"),
        ({"num_mc_samples": 0}, "num_mc_samples=0 must be at least 1"),
        ({"mc_sampling": "complementary", "mask_law": "uniform", "num_mc_samples": 3}, "num_mc_samples=3 is odd"),
        ({"mask_law": "full", "mc_sampling": "independent", "num_mc_samples": 2}, "repeat one and the same mask"),
        ({"max_completion_length": 0}, "max_completion_length=0 must be at least 1"),
        ({"max_completion_length": None}, "max_completion_length=None must be at least 1"),
        ({"block_length": 0}, "block_length"),
        ({"num_denoising_steps": 0}, "num_denoising_steps=0 must be at least 1 per block"),
        ({"num_denoising_steps": 0, "block_length": 4}, "num_denoising_steps"),
        ({"scale_rewards": "sometimes"}, "scale_rewards='sometimes' is not known. Use 'none'"),
        ({"num_generations": 1}, "num_generations=1: a group needs at least 2 completions"),
        ({"num_generations": None}, "num_generations=None: a group needs at least 2 completions"),
        ({"block_length": 4, "confidence_threshold": 1.0}, "confidence_threshold"),
        ({"block_length": 4, "temperature": -1.0}, "temperature"),
        ({"block_length": 4, "top_p": 0.0}, "top_p"),
        ({"block_length": 4, "guidance_scale": -1.0}, "guidance_scale"),
    ],
    ids=str,
)
def test_a_value_without_meaning_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        config_of(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_generations": 3},
            r"num_generations=3 must divide the generation batch: per_device_train_batch_size \* processes \* "
            r"steps_per_generation = 8 \* 1 \* 1 = 8\. Nearest valid num_generations: 2 or 4\.",
        ),
        (
            {"num_generations": 5, "generation_batch_size": 16, "per_device_train_batch_size": 16},
            r"num_generations=5 must divide the generation batch: generation_batch_size=16\. Nearest valid "
            r"num_generations: 4 or 8\.",
        ),
        (
            {"num_generations": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 6},
            r"steps_per_generation=6 with gradient_accumulation_steps=4 and num_iterations=1: an optimizer step would "
            r"straddle two generations.*Nearest valid steps_per_generation: 4 or 8\.",
        ),
        (
            {"num_generations": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 3},
            r"steps_per_generation=3 .*Nearest valid steps_per_generation: 2 or 4\.",
        ),
        (
            {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 2},
            r"num_iterations=2: several inner iterations would fall into one optimizer step.*"
            r"Nearest valid steps_per_generation: 4\.",
        ),
        (
            {"num_generations": 8, "per_device_train_batch_size": 2, "steps_per_generation": 8},
            r"= 2 \* 1 \* 1 = 2 rows per optimizer step, not a multiple of num_generations=8: a group would be split "
            r"over optimizer steps\. Nearest valid gradient_accumulation_steps: 4\.",
        ),
    ],
    ids=str,
)
def test_batch_sizes_that_cannot_be_exact_are_refused_with_the_nearest_valid_ones(options, message):
    with pytest.raises(ValueError, match=message):
        config_of(**options)


def is_valid(**options: Any) -> bool:
    try:
        config_of(**options)
    except ValueError:
        return False
    return True


def test_exactly_the_settings_of_the_method_are_allowed():
    for b in (1, 2, 4):
        for a in (1, 2, 3, 4):
            for s in (1, 2, 3, 4, 6, 8):
                for mu in (1, 2):
                    is_aligned = s % a == 0 or (a % s == 0 and mu == 1)
                    is_whole = b * s % 4 == 0 and (s <= a or b * a % 4 == 0)
                    found = is_valid(
                        num_generations=4,
                        per_device_train_batch_size=b,
                        gradient_accumulation_steps=a,
                        steps_per_generation=s,
                        num_iterations=mu,
                    )
                    assert found == (is_aligned and is_whole), (b, a, s, mu)


def test_the_number_of_processes_counts(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"= 4 \* 2 \* 1 = 8\. Nearest valid num_generations: 2 or 4"):
        config_of(num_generations=3, per_device_train_batch_size=4)


def test_the_nearest_values_that_a_message_names_are_valid():
    with pytest.raises(ValueError, match="Nearest valid") as error:
        config_of(num_generations=7, per_device_train_batch_size=12)
    for value in re.findall(r"\d+", str(error.value).split("num_generations: ")[1]):
        assert is_valid(num_generations=int(value), per_device_train_batch_size=12)


def test_steps_per_generation_may_come_from_the_generation_batch():
    config = config_of(num_generations=4, per_device_train_batch_size=2, generation_batch_size=16,
                       gradient_accumulation_steps=2)  # fmt: skip
    assert config.steps_per_generation == 8


def test_choices_are_literals_of_the_field_types():
    hints = inspect.get_annotations(StableDRLConfig)
    for name, known in CHOICES.items():
        types = [t for t in get_args(hints[name]) if t is not type(None)]
        literal = types[0] if type(None) in get_args(hints[name]) else hints[name]
        assert set(get_args(literal)) == set(re.findall(r"'(\w+)'", known)), name
