# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import datasets
import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

import trl_stabledrl
from tests.model_tools import LORA_TARGETS
from tests.tiny import published_llada_folder, published_sdar_folder, tiny_tokenizer
from trl_stabledrl.cli.main import main
from trl_stabledrl.cli.train import make_parser

RECIPES = sorted(trl_stabledrl.recipes_folder().glob("*.yaml"))
TRAINING = [path for path in RECIPES if path.stem not in ("quickstart", "lab", "lab_sdar")]
ADAPTING = [path for path in TRAINING if path.stem.endswith("lora")]
# rows per update of 8 processes, and rows per prompt
PEERS = {
    "coupled_grpo": (80, 10),
    "diffu_grpo": (96, 6),
    "espo": (96, 6),
    "gdpo": (96, 6),
    "grpo": (512, 16),
    "spg": (96, 6),
    "wd1": (48, 6),
}
PEER_PAPERS = {
    "coupled_grpo": "2506.20639",
    "diffu_grpo": "2504.12216",
    "espo": "2512.03759",
    "gdpo": "2510.08554",
    "grpo": "2402.03300",
    "spg": "2510.09541",
    "wd1": "2507.08838",
}
PEER = [path for path in TRAINING if path.stem.removeprefix("llada_8b_gsm8k_") in PEERS]
LLADA = [path for path in TRAINING if path.stem.startswith("llada") and path not in [*ADAPTING, *PEER]]
LLADA_ADAPTING = [path for path in ADAPTING if path.stem.startswith("llada")]
RELEASED = [path for path in LLADA if path.stem.endswith("_released")]
SDAR = [path for path in TRAINING if path.stem.startswith("sdar")]
VLLM = [path for path in SDAR if path.stem.endswith("_vllm")]
LAUNCHING = sorted(trl_stabledrl.recipes_folder().glob("accelerate/*.yaml"))
# one row of each public dataset's shape, where the Hub would be asked
ROWS = {
    "openai/gsm8k": {"question": "What is 6 times 7?", "answer": "6*7=42 #### 42"},
    "DigitalLearningGmbH/MATH-lighteval": {"problem": "Halve one.", "solution": r"\boxed{\frac{1}{2}}"},
}


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    folder = published_llada_folder(tmp_path_factory.mktemp("models") / "llada")
    tiny_tokenizer(chat_template=True).save_pretrained(folder)
    return folder


@pytest.fixture
def no_hub(monkeypatch):
    def load_dataset(source, config_name=None, *, split):
        return datasets.Dataset.from_list([ROWS[source]] * 256)

    monkeypatch.setattr("trl_stabledrl.data._load.load_dataset", load_dataset)


def test_recipes_are_the_ones_this_file_knows():
    tasks = ("countdown", "gsm8k", "math", "sudoku")
    names = [f"llada_8b_{task}{suffix}" for task in tasks for suffix in ("", "_released")]
    assert [path.stem for path in LLADA] == names
    assert [path.stem for path in LLADA_ADAPTING] == ["llada_8b_gsm8k_lora", "llada_8b_gsm8k_qlora"]
    names = ["1_7b_math", "1_7b_math_dynamic", "8b_math", "8b_math_dynamic", "8b_math_lora", "8b_math_qlora"]
    names += [f"8b_math{kind}_vllm" for kind in ("", "_dynamic", "_lora")]
    assert {path.stem for path in SDAR} == {f"sdar_{name}" for name in names}
    assert [path.stem for path in PEER] == [f"llada_8b_gsm8k_{name}" for name in PEERS]
    assert len(LLADA) + len(LLADA_ADAPTING) + len(PEER) + len(SDAR) == len(TRAINING)
    names = ["cpu", "ddp", "fsdp2", "multi_node", "single_gpu", "zero2", "zero3", "zero3_offload"]
    assert [path.stem for path in LAUNCHING] == names


@pytest.mark.parametrize("path", LLADA, ids=lambda path: path.stem)
def test_recipe_dry_runs_on_a_tiny_model(path, chat_folder, no_hub, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    flags = ["--model_name_or_path", str(chat_folder), "--use_cpu", "--dry_run", "--num_train_prompts", "128"]

    assert main(["train", "--config", str(path), *flags]) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert "data 128 prompts, 128 held out" in shown
    # one of the 8 processes: an eighth of 512 rows
    assert "update 64 rows = 4 prompts x 16 completions (1 process x 4 x 16 micro-steps)" in shown
    assert "64 rows every 2 updates; 256 tokens in 8 blocks of 32, 16 steps each: 128 forward passes" in shown
    assert "2 inner iterations" in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", SDAR, ids=lambda path: path.stem)
def test_block_diffusion_recipe_dry_runs_on_a_tiny_model(path, no_hub, tmp_path, monkeypatch, capsys):
    folder = published_sdar_folder(tmp_path / "sdar", max_position_embeddings=32_768)
    tiny_tokenizer(chat_template=True).save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("trl_stabledrl.checks.installed_vllm", lambda: "0.31.0")  # nor is vLLM
    flags = ["--model_name_or_path", str(folder), "--use_cpu", "--dry_run", "--num_train_prompts", "128"]
    flags += ["--load_in_4bit", "false"]  # bitsandbytes is no dependency of the tests

    assert main(["train", "--config", str(path), *flags]) == 0

    shown = " ".join(capsys.readouterr().out.split())
    kind = path.stem.removesuffix("_vllm")
    rows = 128 if kind.endswith("_lora") else 64
    assert f"update {rows} rows = {rows // 16} prompts x 16 completions" in shown
    assert "2048 tokens in 513 blocks of 4" in shown
    assert ("all tokens above 0.9 in each step" in shown) == kind.endswith("dynamic")
    assert f"decoded by {'vLLM, asleep in between' if path in VLLM else 'transformers'}" in shown
    assert "staircase, 4 cyclic draws, old policy under the same masks" in shown
    assert [entry.name for entry in tmp_path.iterdir()] == ["sdar"]


@pytest.mark.parametrize("path", SDAR, ids=lambda path: path.stem)
def test_block_diffusion_recipe_has_the_chosen_settings(path):
    recipe = yaml.safe_load(path.read_text())

    kind = path.stem.removesuffix("_vllm")
    is_lora = kind.endswith("lora")
    expected = {
        "model_name_or_path": f"JetLM/SDAR-{'1.7B' if '1_7b' in path.stem else '8B'}-Chat",
        "learning_rate": 1e-5 if is_lora else 1e-6,
        "num_generations": 16,
        "num_iterations": 1,
        "num_denoising_steps": 4,
        "temperature": 1.0,
        "mask_law": "staircase",
        "mc_sampling": "cyclic",
        "num_mc_samples": 4,
        "epsilon": 5.0,
        "max_completion_length": 2048,
        "output_dir": f"outputs/{path.stem}",
    }
    assert expected.items() <= recipe.items()
    assert ("confidence_threshold" in recipe) == kind.endswith("dynamic")
    assert ("use_peft" in recipe) == is_lora
    num_processes = 1 if is_lora else 8
    num_rows = num_processes * recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"]
    assert num_rows == (32 if not is_lora else 4 if "load_in_4bit" in recipe else 8) * 16
    header = path.read_text().split("\n\n")[0]
    launch = "single_gpu" if is_lora else "zero3"
    assert f"trl-stabledrl train --config {path.stem} --accelerate_config {launch}" in header
    assert "AIME24 16.7" in header


@pytest.mark.parametrize("path", VLLM, ids=lambda path: path.stem)
def test_recipe_with_vllm_names_the_engine_and_changes_nothing_else(path):
    recipe, plain = (
        yaml.safe_load(path.with_stem(name).read_text()) for name in (path.stem, path.stem.removesuffix("_vllm"))
    )

    differing = {name for name in recipe.keys() | plain.keys() if recipe.get(name) != plain.get(name)}
    engine = {
        "rollout_backend",
        "vllm_enable_sleep_mode",
        "vllm_gpu_memory_utilization",
        "vllm_max_model_length",
    }
    assert differing == engine | {"output_dir"}
    assert recipe["rollout_backend"] == "vllm"
    assert "extra `vllm`" in path.read_text() or "extras `peft` and `vllm`" in path.read_text()


@pytest.mark.parametrize("path", ADAPTING, ids=lambda path: path.stem)
def test_adapter_recipe_changes_what_an_adapter_needs_and_nothing_else(path):
    is_quantised = path.stem.endswith("_qlora")
    recipe, whole = (
        yaml.safe_load((path.parent / f"{name}.yaml").read_text())
        for name in (path.stem, path.stem.rpartition("_")[0])
    )

    differing = {name for name in recipe.keys() | whole.keys() if recipe.get(name) != whole.get(name)}
    schedule = {
        "output_dir",
        "learning_rate",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_steps",
    }
    adapter = {"use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"}
    quantisation = {"load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"} if is_quantised else set()
    assert adapter | quantisation <= differing <= schedule | adapter | quantisation
    assert recipe["learning_rate"] == pytest.approx(10 * whole["learning_rate"])
    assert recipe["lora_target_modules"] == LORA_TARGETS
    num_rows = recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"]
    assert num_rows == (4 if is_quantised else 8) * 16
    text = path.read_text()
    assert f"trl-stabledrl train --config {path.stem} --accelerate_config single_gpu" in text
    assert f"trl-stabledrl merge --adapter outputs/{path.stem} --output_dir" in text


@pytest.mark.parametrize("path", LLADA, ids=lambda path: path.stem)
def test_recipe_has_the_released_optimizer(path):
    recipe = yaml.safe_load(path.read_text())

    rate = 1e-6 if recipe["task"] in ("countdown", "sudoku") else 2e-6
    expected = {
        "learning_rate": rate,
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.1,
        "max_grad_norm": 0.2,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "max_steps": 2000,
        "seed": 113,
        "num_generations": 16,
        "num_iterations": 2,
        "temperature": 0.9,
        "beta": 0.0,
        "dtype": "bfloat16",
    }
    assert expected.items() <= recipe.items()
    assert 8 * recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"] == 32 * 16
    assert recipe["save_steps"] % recipe["num_iterations"] == 0
    assert recipe["output_dir"] == f"outputs/{path.stem}"


@pytest.mark.parametrize("path", PEER, ids=lambda path: path.stem)
def test_recipe_of_a_peer_dry_runs_on_a_tiny_model(path, chat_folder, no_hub, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    flags = ["--model_name_or_path", str(chat_folder), "--use_cpu", "--dry_run", "--num_train_prompts", "128"]
    flags += ["--load_in_4bit", "false"]  # bitsandbytes is no dependency of the tests

    assert main(["train", "--config", str(path), *flags]) == 0

    rows, group = PEERS[path.stem.removeprefix("llada_8b_gsm8k_")]
    shown = " ".join(capsys.readouterr().out.split())
    assert f"update {rows // 8} rows = {rows // 8 // group} prompts x {group} completions" in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", PEER, ids=lambda path: path.stem)
def test_recipe_of_a_peer_fits_together_and_names_its_source(path):
    recipe = yaml.safe_load(path.read_text())
    name = path.stem.removeprefix("llada_8b_gsm8k_")

    assert recipe["objective"] == name
    num_rows = 8 * recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"]
    assert (num_rows, recipe["num_generations"]) == PEERS[name]
    assert num_rows % recipe["num_generations"] == 0
    assert recipe["save_steps"] % recipe["num_iterations"] == 0
    assert recipe["max_steps"] % recipe["num_iterations"] == 0
    assert recipe["output_dir"] == f"outputs/{path.stem}"
    header = path.read_text().split("\n\n")[0]
    launch = "ddp" if "use_peft" in recipe else "zero3"
    assert f"trl-stabledrl train --config {path.stem} --accelerate_config {launch}" in header
    assert f"paper {PEER_PAPERS[name]}" in header
    assert "Differs" in header


def test_recipe_of_grpo_differs_from_the_released_one_in_the_objective_alone():
    recipe, released = (
        yaml.safe_load((trl_stabledrl.recipes_folder() / f"llada_8b_gsm8k_{name}.yaml").read_text())
        for name in ("grpo", "released")
    )

    differing = {name for name in recipe.keys() | released.keys() if recipe.get(name) != released.get(name)}
    assert differing == {"objective", "clip_mode", "epsilon", "ratio_cap", "output_dir"}


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: path.stem)
def test_released_recipe_has_the_released_choices(path):
    recipe = yaml.safe_load(path.read_text())

    expected = {
        "mask_law": "block_suffix",
        "mc_sampling": "independent",
        "mask_coupling": "independent",
        "num_mc_samples": 2,
        "surrogate": "sandwich",
        "eubo_beta": 1.5,
        "clip_mode": "upper",
        "ratio_cap": 5.0,
    }
    assert expected.items() <= recipe.items()
    assert recipe["reward_funcs"][-1] == "anti_short_reward"


@pytest.mark.parametrize("path", LLADA, ids=lambda path: path.stem)
def test_header_says_how_to_start_and_what_to_aim_at(path):
    header = [line for line in path.read_text().split("\n\n")[0].splitlines() if line.startswith("#")]
    text = "\n".join(header)

    assert f"trl-stabledrl train --config {path.stem} --accelerate_config zero3" in text
    assert f"scripts/train.py --config recipes/{path.name}" in text
    aim = {"countdown": "84.4", "gsm8k": "84.2", "math": "45.2", "sudoku": "91.5"}[path.stem.split("_")[2]]
    assert aim in text


def test_recipe_is_found_by_name_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    _, args, model_args, _ = make_parser().parse(["--config", "llada_8b_gsm8k", "--use_cpu"])

    assert args.max_grad_norm == 0.2
    assert model_args.model_name_or_path == "GSAI-ML/LLaDA-8B-Instruct"


@pytest.mark.parametrize("path", LAUNCHING, ids=lambda path: path.stem)
def test_accelerate_reads_its_configuration(path):
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)

    zero = {"zero2": 2, "zero3": 3, "zero3_offload": 3, "multi_node": 3}.get(path.stem)
    assert config.num_processes == {"cpu": 2, "single_gpu": 1, "multi_node": 16}.get(path.stem, 8)
    assert config.num_machines == (2 if path.stem == "multi_node" else 1)
    assert config.use_cpu == (path.stem == "cpu")
    deepspeed = config.deepspeed_config or {}
    assert deepspeed.get("zero_stage") == zero
    assert deepspeed.get("zero3_save_16bit_model", False) == (zero == 3)
    is_offloaded = {deepspeed.get(f"offload_{name}_device") == "cpu" for name in ("optimizer", "param")}
    assert is_offloaded == {path.stem == "zero3_offload"}
    assert (config.fsdp_config or {}).get("fsdp_version") == (2 if path.stem == "fsdp2" else None)
    assert f"--accelerate_config {path.stem}`" in path.read_text()


def test_countdown_weights_give_the_released_values():
    from trl_stabledrl.rewards import load_reward

    recipe = yaml.safe_load((Path(trl_stabledrl.recipes_folder()) / "llada_8b_countdown_released.yaml").read_text())
    texts = ["<answer>8*3+1</answer>", "<answer>8*3*1</answer>", "<answer>8*3</answer>"]
    columns = json.loads('{"target": [25, 25, 25], "numbers": [[1, 3, 8], [1, 3, 8], [1, 3, 8]]}')

    total = [0.0] * 3
    for name, weight in zip(recipe["reward_funcs"][:-1], recipe["reward_weights"][:-1], strict=True):
        total = [a + weight * b for a, b in zip(total, load_reward(name)(texts, **columns), strict=True)]

    assert total == pytest.approx([1.0, 0.1, 0.0])
