# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import json
import os
import re

import pytest
import torch
import yaml

from tests.tiny import PUBLISHED_CONFIG, PUBLISHED_SDAR_CONFIG
from trl_stabledrl.cli import plan as plan_module
from trl_stabledrl.cli.main import main
from trl_stabledrl.cli.plan import launch_from_environment, launch_from_options, launch_of, plan_recipe
from trl_stabledrl.memory import Sharding

pytestmark = pytest.mark.usefixtures("in_its_own_folder")

# by hand: embedding and head, then per layer the attention's and the feed-forward's matrices and the norms
LLADA_8B = 2 * 126_464 * 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 12_288 + 2 * 4096) + 4096
SDAR_8B = 2 * 151_936 * 4096 + 36 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 12_288 + 2 * 4096 + 2 * 128) + 4096
GB = 1e9


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Folders with the published configurations, and nothing else."""
    folders = {}
    for name, config in (("llada", PUBLISHED_CONFIG), ("sdar", PUBLISHED_SDAR_CONFIG)):
        folders[name] = tmp_path_factory.mktemp("configs") / name
        folders[name].mkdir()
        (folders[name] / "config.json").write_text(json.dumps(config))
    return folders


def row(shown, name):
    """Numbers of a row of the table."""
    line = next(line for line in shown.splitlines() if line.startswith(name))
    return [float(number) for number in re.findall(r"\d+\.\d+", line.removeprefix(name))]


def test_a_recipe_of_8_billion_parameters_on_8_processes(configs, capsys):
    flags = ["--accelerate_config", "zero3", "--model_name_or_path", str(configs["llada"])]

    assert main(["env", "--recipe", "llada_8b_gsm8k", "--gpu_memory_gb", "80", *flags]) == 0

    shown = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert "LLaDA, 8.0 B parameters, all of them trained" in shown
    assert "8 processes, DeepSpeed ZeRO-3" in shown
    share = LLADA_8B / 8 / GB
    assert row(shown, "parameters") == pytest.approx([2 * share] * 4, abs=0.006)
    assert row(shown, "float32 copy of the parameters") == pytest.approx([4 * share] * 4, abs=0.006)
    assert row(shown, "optimizer states (adamw_torch)") == pytest.approx([8 * share] * 4, abs=0.006)
    assert row(shown, "gradients") == pytest.approx([2 * share] * 4, abs=0.006)
    # gathered whole for rollouts; the head's gradient in float32 and its cast
    assert row(shown, "gathered weights")[0] == pytest.approx(2 * LLADA_8B / GB, abs=0.06)
    assert row(shown, "gradient of the head") == pytest.approx([6 * 126_464 * 4096 / GB], abs=0.006)
    assert "of 80 GB, in rollout. It fits." in shown
    assert "Remedy: ds3_gather_for_generation: false" in " ".join(shown.split())


def test_what_does_not_fit_names_the_largest_terms_and_remedies(configs, capsys):
    flags = ["--num_processes", "8", "--model_name_or_path", str(configs["llada"])]

    assert main(["env", "--recipe", "llada_8b_gsm8k", "--gpu_memory_gb", "80", *flags]) == 1

    shown = " ".join(capsys.readouterr().out.split())
    assert "8 processes, a whole copy each" in shown
    assert "It does not fit." in shown
    assert "Largest in update: optimizer states (adamw_torch), 32.1 GB. Remedy: --accelerate_config zero3" in shown


def test_the_cache_of_a_rollout_is_what_a_long_recipe_needs_most(configs, capsys):
    # 36 layers, keys and values of 8 heads of 128 in bfloat16, for 64 rows of 512 + 2048 tokens; one layer more
    # of keys and values for all 32 heads
    cache = 64 * (512 + 2048) * (36 * 2 * 8 * 128 * 2 + 2 * 32 * 128 * 2)
    flags = ["--accelerate_config", "zero3", "--model_name_or_path", str(configs["sdar"])]

    assert main(["env", "--recipe", "sdar_8b_math", "--gpu_memory_gb", "40", *flags]) == 1

    shown = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert row(shown, "key/value cache") == pytest.approx([cache / GB], abs=0.06)
    assert "2560 clean and 4 x 2051 noised" in " ".join(shown.split())
    assert "Remedy: a lower steps_per_generation" in " ".join(shown.split())


CACHE_PER_TOKEN = 36 * 2 * 8 * 128 * 2  # bytes of SDAR-8B's keys and values in bfloat16


def test_vllm_has_its_share_while_it_decodes(configs, capsys):
    flags = ["--accelerate_config", "zero3", "--model_name_or_path", str(configs["sdar"]), "--gpu_memory_gb", "80"]

    assert main(["env", "--recipe", "sdar_8b_math_vllm", *flags]) == 0

    shown = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert row(shown, "vLLM  ") == [48.0]
    assert "key/value cache" not in shown
    assert "decoding passes" not in shown
    num_sequences = int((48e9 - 2 * SDAR_8B) // ((512 + 2048) * CACHE_PER_TOKEN))
    text = " ".join(shown.split())
    assert "vLLM's share: 48.0 GB, of which 16.4 are weights. The other 31.6, less" in text
    assert f"hold {num_sequences} sequences of 2560 tokens at most; a rollout has 64." in text
    assert "Largest in rollout: vLLM, 48.0 GB. Remedy: a lower vllm_gpu_memory_utilization." in text

    assert main(["env", "--recipe", "sdar_8b_math_vllm", *flags, "--vllm_enable_sleep_mode", "false"]) == 1

    shown = capsys.readouterr().out
    assert row(shown, "vLLM  ") == [48.0] * 4
    assert "Remedy: vllm_enable_sleep_mode: true, or a lower" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("recipe", "launch"),
    [("sdar_8b_math_vllm", "zero3"), ("sdar_8b_math_dynamic_vllm", "zero3"), ("sdar_8b_math_lora_vllm", "single_gpu")],
)
def test_recipes_with_vllm_fit_on_the_gpus_they_name(recipe, launch, configs):
    planned = plan_recipe(
        recipe, ["--accelerate_config", launch, "--model_name_or_path", str(configs["sdar"])], gpu_memory_gb=80
    )

    lines, fits = plan_module.verdict(planned, 80)
    assert fits
    assert "It fits." in lines[0]


@pytest.mark.parametrize(
    ("changes", "missing", "remedy"),
    [
        (["--vllm_gpu_memory_utilization", "0.2"], "its weights", "vllm_gpu_memory_utilization of 0.22 or more, or a"),
        (
            ["--vllm_gpu_memory_utilization", "0.25", "--vllm_max_model_length", "32000"],
            "one sequence of the 32000 tokens that it may have",
            "vllm_gpu_memory_utilization of 0.27 or more, or a lower vllm_max_model_length",
        ),
    ],
)
def test_a_share_that_vllm_would_not_start_with_does_not_fit(changes, missing, remedy, configs, capsys):
    flags = ["--accelerate_config", "zero3", "--model_name_or_path", str(configs["sdar"]), "--gpu_memory_gb", "80"]

    assert main(["env", "--recipe", "sdar_8b_math_vllm", *flags, *changes]) == 1

    shown = " ".join(capsys.readouterr().out.split())
    assert "GB, in rollout. It does not fit." in shown
    assert "It fits" not in shown
    assert f"There is no room for {missing}. Remedy: {remedy}" in shown


def test_processes_that_share_a_copy_for_vllm_hold_a_part_of_it_each(configs):
    flags = ["--accelerate_config", "zero3", "--model_name_or_path", str(configs["sdar"])]

    planned = plan_recipe("sdar_8b_math_vllm", [*flags, "--vllm_tensor_parallel_size", "2"], gpu_memory_gb=80)

    assert planned.plan.engine is not None
    assert planned.plan.engine.weight_bytes == SDAR_8B * 2 // 2
    assert planned.plan.engine.token_bytes == CACHE_PER_TOKEN // 2
    assert "a rollout has 128." in planned.engine[0]


def test_a_prompt_that_vllm_would_refuse_is_noted(configs):
    flags = ["--accelerate_config", "zero3", "--model_name_or_path", str(configs["sdar"])]

    planned = plan_recipe("sdar_8b_math_vllm", flags, prompt_length=3000)

    assert any("do not fit into vllm_max_model_length=4096" in note for note in planned.notes)


def test_weights_gathered_to_compare_engines_lie_where_a_sleeping_cache_will_be(configs):
    def gathered(*changes):
        flags = ["--accelerate_config", "zero3", "--model_name_or_path", str(configs["sdar"]), *changes]
        terms = plan_recipe("sdar_8b_math_vllm", flags, gpu_memory_gb=80).plan.terms
        return next(term.num_bytes["rollout"] for term in terms if term.name == "gathered weights")

    assert gathered() == 0
    # 32 GB: weights, and as many again that are gathered whole
    assert gathered("--vllm_gpu_memory_utilization", "0.4") == 4 * SDAR_8B - 32_000_000_000
    assert gathered("--vllm_enable_sleep_mode", "false") == 2 * SDAR_8B
    # else one tensor at a time, the embedding for one
    assert gathered("--vllm_enable_sleep_mode", "false", "--rollout_self_check", "false") == 2 * 151_936 * 4096


def test_every_option_of_train_overrides_the_recipe(configs):
    flags = ["--model_name_or_path", str(configs["sdar"]), "--accelerate_config", "zero3"]

    plans = {
        name: plan_recipe("sdar_8b_math", [*flags, *changes], prompt_length=100).plan
        for name, changes in {
            "recipe": [],
            "fewer": ["--steps_per_generation", "32"],
            "16": ["--num_processes", "16"],
            "reference": ["--beta", "0.1"],
            "dense": ["--attn_implementation", "sdpa"],
            "plain": ["--gradient_checkpointing", "false"],
        }.items()
    }

    def of(name, term, phase):
        return sum(t.num_bytes.get(phase, 0) for t in plans[name].terms if t.name.startswith(term))

    assert of("fewer", "key/value", "rollout") * 2 == of("recipe", "key/value", "rollout")
    assert of("fewer", "gradients", "rollout") == of("recipe", "gradients", "backward")
    assert of("16", "parameters", "update") * 2 == of("recipe", "parameters", "update") == SDAR_8B * 2 // 8
    assert of("recipe", "reference", "update") == 0
    assert of("reference", "reference", "update") == SDAR_8B * 2 // 8
    length = 100 + 2048 + 4 * (3 + 2048)
    assert of("recipe", "attention masks", "backward") == 0
    # the boolean one, and the bfloat16 one that a layer makes of it; a backward pass is fullest at the head
    assert of("dense", "attention masks", "scoring") == length**2 * (1 + 2)
    assert of("dense", "attention masks", "backward") == length**2
    assert of("plain", "activations", "backward") > 10 * of("recipe", "activations", "backward")


@pytest.mark.parametrize(
    ("name", "changes", "weights"),
    [
        ("lora", [], 2 * SDAR_8B),
        # half a byte and a float32 scale per 64 numbers of a layer; embedding, head and last norm stay
        (
            "qlora",
            ["--load_in_4bit"],
            (SDAR_8B - 2 * 151_936 * 4096 - 4096) * (0.5 + 4 / 64) + (2 * 151_936 * 4096 + 4096) * 2,
        ),
    ],
)
def test_an_adapter_alone_has_gradients_and_states(name, changes, weights, configs):
    rank = 64
    adapter = 36 * rank * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12_288))
    number_bytes = 2 if changes else 4  # of QLoRA's adapter, and of a new one beside whole weights
    flags = ["--model_name_or_path", str(configs["sdar"]), "--beta", "0.1", *changes]

    planned = plan_recipe("sdar_8b_math_lora", flags)

    terms = {term.name: term.num_bytes for term in planned.plan.terms}
    assert terms["parameters"]["update"] == pytest.approx(weights + number_bytes * adapter, rel=1e-3)
    assert terms["gradients"]["backward"] == number_bytes * adapter
    assert terms["optimizer states (adamw_torch)"]["update"] == 2 * number_bytes * adapter
    assert "reference model" not in terms
    assert "gradient of the head" not in terms


@pytest.mark.parametrize(
    ("recipe", "flags", "message"),
    [
        ("llada", ["--num_processes", "3", "--gradient_accumulation_steps", "1"], "num_generations=16 must divide"),
        ("sdar", ["--block_length", "8"], "block_length=8 is not the model's own, 4"),
        ("sdar", ["--attn_implementation", "flash_attention_2"], "cannot attend by blocks"),
        ("sdar", ["--attn_implementation", "flex_attention", "--use_cpu"], "no backward pass on a CPU"),
        ("llada", ["--mask_law", "staircase"], "mask_law='staircase' does not apply"),
        ("llada", ["--bach_size", "8"], "unknown key '--bach_size'"),
        ("llada", ["--gpu_memory_gb", "0"], "--gpu_memory_gb 0 must be above 0"),
        ("llada", ["--prompt_length", "-1"], "--prompt_length -1"),
        ("llada", ["--num_processes", "none"], "num_processes none: a whole"),
        ("llada", ["--accelerate_config", "zero9"], "neither a file nor one of"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(recipe, flags, message, configs, capsys):
    name = {"llada": "llada_8b_gsm8k", "sdar": "sdar_8b_math"}[recipe]

    assert main(["env", "--recipe", name, "--model_name_or_path", str(configs[recipe]), *flags]) == 2

    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert "WORLD_SIZE" not in os.environ


def test_a_model_that_is_not_on_this_machine_is_one_line(capsys):
    assert main(["env", "--recipe", "llada_8b_gsm8k", "--model_name_or_path", "no-one/nothing"]) == 2

    error = capsys.readouterr().err
    assert error.startswith("error: model_name_or_path='no-one/nothing': We couldn't connect to")
    assert len(error.strip().splitlines()) == 1


def test_options_of_train_need_a_recipe(capsys):
    assert main(["env", "--num_processes", "8"]) == 2

    assert "unexpected argument '--num_processes'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "sharding"),
    [
        ({}, Sharding()),
        ({"distributed_type": "MULTI_GPU", "num_processes": 4}, Sharding("ddp", 4)),
        (
            {"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": {"zero_stage": 1}},
            Sharding("zero1", 4),
        ),
        (
            {
                "distributed_type": "DEEPSPEED",
                "num_processes": 4,
                "deepspeed_config": {
                    "zero_stage": 3,
                    "offload_optimizer_device": "cpu",
                    "offload_param_device": "cpu",
                },
            },
            Sharding("zero3", 4, offloads_optimizer=True, offloads_parameters=True),
        ),
        (
            {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {"fsdp_version": 2}},
            Sharding("fsdp2", 4),
        ),
        # accelerate makes copies of it on a CPU
        ({"distributed_type": "FSDP", "num_processes": 4, "use_cpu": True}, Sharding("ddp", 4)),
    ],
)
def test_a_configuration_of_accelerate_says_what_is_sharded(config, sharding):
    assert launch_of(config).sharding == sharding


def test_options_of_the_launcher_win_over_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_module, "default_config_file", str(tmp_path / "none.yaml"))
    file = tmp_path / "mine.yaml"
    deepspeed = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1000}}
    (tmp_path / "ds.json").write_text(json.dumps(deepspeed))
    file.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "num_processes": 8, "deepspeed_config": {}}))

    options = ["--config_file", str(file), "--num_processes=2", "--deepspeed_config_file", str(tmp_path / "ds.json")]

    expected = Sharding("zero3", 2, offloads_optimizer=True, bucket_size=1000)
    assert launch_from_options(options).sharding == expected
    assert launch_from_options([]).sharding == Sharding()
    assert launch_from_options(["--num_processes", "2", "--use_deepspeed", "--zero_stage", "2"]).sharding == Sharding(
        "zero2", 2
    )
    assert launch_from_options(["--use_fsdp", "--num_processes", "2", "--fsdp_version", "1"]).notes


def test_a_launched_process_knows_what_is_sharded(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu")

    assert launch_from_environment(4).sharding == Sharding("zero3", 4, offloads_optimizer=True)


def test_offloading_moves_states_to_the_host(configs):
    flags = ["--model_name_or_path", str(configs["llada"]), "--num_processes", "8", "--use_deepspeed"]
    flags += ["--zero_stage", "3", "--offload_optimizer_device", "cpu"]

    planned = plan_recipe("llada_8b_gsm8k", flags)

    assert not any(term.name.startswith(("optimizer states", "float32")) for term in planned.plan.terms)
    assert not any(term.name == "gradients" for term in planned.plan.terms)
    # float32 copy, Adam's two states, gradients and their float32 copy
    assert planned.plan.host_bytes == (4 + 8 + 2 + 4) * LLADA_8B // 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--load_in_4bit", "true"], "load_in_4bit=True without use_peft"),
        (["--attn_implementation", "nonsense"], "attn_implementation='nonsense' is not known. Use one of 'eager'"),
        (["--zero_stage", "7", "--use_deepspeed"], "zero_stage 7 is not known. Use 0, 1, 2 or 3"),
        (["--use_peft", "true", "--lora_target_modules", "nosuch"], "target_modules has 'nosuch', which no module"),
        (["--gpu_memory_gb", "nan"], "--gpu_memory_gb nan must be above 0"),
        (["--config_file", "list.yaml"], "list.yaml is no accelerate configuration: it holds a list"),
        (["--config_file", "none.yaml"], "num_processes 0: a whole number of at least 1"),
    ],
)
def test_what_a_run_would_refuse_the_plan_refuses(flags, message, configs, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.yaml").write_text("[1, 2]")
    (tmp_path / "none.yaml").write_text("num_processes: 0")

    assert main(["env", "--recipe", "llada_8b_gsm8k", "--model_name_or_path", str(configs["llada"]), *flags]) == 2

    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_without_a_launch_file_the_plan_is_of_every_visible_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(plan_module, "default_config_file", "nowhere.yaml")

    assert plan_module.launch_from_options([]).sharding.num_processes == 8
    assert plan_module.launch_from_options(["--num_processes", "2"]).sharding.num_processes == 2


def test_the_size_of_the_visible_gpu_is_the_limit(monkeypatch):
    class Properties:
        total_memory = 24 * 10**9

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())

    assert plan_module.capacity(launch_of({}), None) == 24.0
    assert plan_module.capacity(launch_of({}), 40.0) == 40.0
    assert plan_module.capacity(launch_of({"use_cpu": True}), None) is None


def test_a_dry_run_shows_the_peak_and_stops(recipe, capsys, no_weights, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")

    assert main(["train", "--config", recipe(), "--dry_run"]) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"memory Peak: \d+\.\d+ GB, in \w+\. Largest in \w+: .+ With prompts of 512 tokens", shown)
