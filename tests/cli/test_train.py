# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml

from tests.tiny import published_sdar_folder, tiny_tokenizer
from trl_stabledrl import likelihood
from trl_stabledrl.cli import job, train
from trl_stabledrl.cli.main import main
from trl_stabledrl.cli.train import scoring_passes

pytestmark = pytest.mark.usefixtures("in_its_own_folder")


def error_of(capsys) -> str:
    """The one line on standard error."""
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_yaml_alone_trains_with_a_built_in_reward_and_a_function_of_the_current_folder(recipe, tmp_path):
    (tmp_path / "my_rewards.py").write_text("def fn(completions, **kwargs):\n    return [0.5] * len(completions)\n")
    config = recipe(reward_funcs=["exact_match_reward", "my_rewards.fn"], reward_weights=[1.0, 2.0])

    assert main(["train", "--config", config]) == 0

    state = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())
    assert state["global_step"] == 1
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_flag_wins_over_yaml_and_the_resolved_config_says_so(recipe, tmp_path):
    config = recipe(learning_rate=1e-3, scale_rewards=False)

    assert main(["train", "--config", config, "--learning_rate", "2e-4", "--seed=7"]) == 0

    for folder in ("out", "out/checkpoint-1"):
        resolved = yaml.safe_load((tmp_path / folder / "resolved_config.yaml").read_text())
        assert resolved["learning_rate"] == 2e-4
        assert resolved["seed"] == 7
        assert resolved["mask_law"] == "block_suffix"  # LLaDA's own, filled in
        assert resolved["num_mc_samples"] == 2
        assert resolved["weight_decay"] == 0.0  # a default of Transformers


def test_resolved_config_is_a_recipe_of_the_same_run(recipe, tmp_path):
    assert main(["train", "--config", recipe(max_steps=2, num_iterations=2)]) == 0
    again = str(tmp_path / "out" / "resolved_config.yaml")

    assert main(["train", "--config", again, "--output_dir", "again"]) == 0

    folders = [tmp_path / name for name in ("out", "again")]
    first, second = (yaml.safe_load((folder / "resolved_config.yaml").read_text()) for folder in folders)
    assert first | {"output_dir": "again"} == second
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]


def test_a_recipe_for_vllm_is_checked_before_the_weights(recipe, tmp_path, capsys, monkeypatch):
    folder = str(published_sdar_folder(tmp_path / "sdar"))
    tiny_tokenizer().save_pretrained(folder)
    sdar = {"model_name_or_path": folder, "block_length": None, "rollout_backend": "vllm"}
    monkeypatch.setattr("trl_stabledrl.checks.installed_vllm", lambda: None)
    assert main(["train", "--config", recipe(**sdar), "--dry_run"]) == 2
    assert "error: rollout_backend='vllm' needs vLLM, which is not installed: pip install" in capsys.readouterr().err

    monkeypatch.setattr("trl_stabledrl.checks.installed_vllm", lambda: "0.30.1")
    assert main(["train", "--config", recipe(**sdar), "--dry_run"]) == 0
    assert main(["train", "--config", recipe(**sdar), "--dry_run", "--vllm_max_model_length", "8"]) == 2
    assert "vllm_max_model_length=8 holds prompt and completion" in capsys.readouterr().err


def test_false_in_yaml_means_no_scaling_of_rewards(recipe, monkeypatch):
    from trl_stabledrl import StableDRLTrainer

    seen = []
    monkeypatch.setattr(StableDRLTrainer, "__init__", lambda self, **kwargs: seen.append(kwargs["args"]))
    monkeypatch.setattr("trl_stabledrl.cli.train.train_and_save", lambda *args: None)

    assert main(["train", "--config", recipe(scale_rewards=False)]) == 0
    assert main(["train", "--config", recipe(scale_rewards=True)]) == 0

    assert [args.scale_rewards for args in seen] == ["none", "group"]


def test_resume_in_yaml_continues_at_the_last_checkpoint(recipe, tmp_path):
    assert main(["train", "--config", recipe(max_steps=1)]) == 0

    assert main(["train", "--config", recipe(max_steps=2, resume_from_checkpoint=True)]) == 0

    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    # the settings of the first part are kept
    assert yaml.safe_load((tmp_path / "out" / "resolved_config.1.yaml").read_text())["max_steps"] == 1
    assert yaml.safe_load((tmp_path / "out" / "resolved_config.yaml").read_text())["max_steps"] == 2


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_generations": 3}, ["num_generations=3", "8 * 1 * 1 = 8", "2 or 4"]),
        ({"num_generations": 1}, ["num_generations=1", "a group needs at least 2"]),
        ({"block_length": 16}, ["block_length", "16", "max_completion_length=8"]),
        ({"num_denoising_steps": 0}, ["num_denoising_steps=0", "at least 1"]),
        ({"epsilon": 0.0}, ["epsilon=0.0", "above 0"]),
        ({"epsilon": -1}, ["epsilon=-1.0", "above 0"]),
        ({"num_mc_samples": 0}, ["num_mc_samples=0", "at least 1"]),
        ({"num_mc_samples": 3}, ["num_mc_samples=3", "complementary", "even"]),
        ({"num_generation": 4}, ["'num_generation'", "recipe.yaml", "'num_generations'"]),
        ({"task": "addition2"}, ["task", "'addition2'", "Did you mean 'addition'"]),
        ({"mask_law": "unifrom"}, ["mask_law", "'unifrom'", "'uniform'"]),
        ({"max_steps": 2.5}, ["max_steps", "2.5", "whole number"]),
        ({"learning_rate": "fast"}, ["learning_rate", "invalid float value: 'fast'"]),
        ({"use_cpu": "perhaps"}, ["use-cpu", "perhaps"]),
        ({"reward_funcs": "nowhere.fn"}, ["nowhere.fn", "No module named 'nowhere'"]),
        ({"reward_funcs": "gsm9k_reward"}, ["gsm9k_reward", "gsm8k_reward"]),
        ({"reward_funcs": "countdown_reward"}, ["countdown_reward", "target, numbers", "answer"]),
        ({"reward_weights": [1.0, 2.0]}, ["reward_weights has 2 entries for 1"]),
        ({"task": None}, ["no rewards", "task"]),
        ({"task": None, "reward_funcs": "exact_match_reward"}, ["no data", "dataset_name"]),
        ({"task": None, "reward_funcs": "exact_match_reward", "num_train_prompts": 3}, ["num_train_prompts", "task"]),
        ({"dataset_name": "nowhere/at_all"}, ["dataset_name='nowhere/at_all'"]),
        ({"model_name_or_path": None}, ["model_name_or_path is missing"]),
        ({"model_name_or_path": "nowhere/at_all"}, ["model_name_or_path='nowhere/at_all'"]),
        ({"eval_strategy": "steps", "num_generations_eval": 3}, ["eval", "3"]),
        ({"resume_from_checkpoint": True}, ["resume_from_checkpoint is true", "no checkpoint"]),
        ({"resume_from_checkpoint": "checkpoint-9"}, ["resume_from_checkpoint='checkpoint-9'", "no such folder"]),
        ({"use_vllm": True}, ["rollout_backend='vllm' (or use_vllm) does not serve LLaDA, only SDAR"]),
        ({"loss_type": "grpo"}, ["loss_type='grpo'", "stabledrl"]),
    ],
)
def test_bad_recipe_ends_in_one_line_before_weights_are_loaded(changes, parts, recipe, tmp_path, capsys):
    config = recipe(**changes)

    assert main(["train", "--config", config]) == 2

    message = error_of(capsys)
    assert all(part in message for part in parts), message
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--num_generatoins", "4"], ["'--num_generatoins'", "'--num_generations'"]),
        (["--num_proceses", "2"], ["'--num_proceses'", "'--num_processes'"]),
        (["4"], ["unexpected argument '4'"]),
        (["--learning_rate", "fast"], ["learning_rate", "'fast'"]),
        (["--num_processes", "two"], ["num_processes", "'two'"]),
        (["--num_processes", "2", "--cpu"], ["--accelerate_config cpu --num_processes 2"]),
        (["--accelerate_config", "zero9"], ["zero9", "zero3", "fsdp2"]),
        (["--accelerate_config"], ["--accelerate_config needs"]),
        (["--config"], ["--config needs the path"]),
        (["--config", "llada_8b_gsm"], ["llada_8b_gsm", "llada_8b_gsm8k"]),
    ],
)
def test_bad_flag_ends_in_one_line_that_names_the_nearest(flags, parts, recipe, capsys):
    assert main(["train", "--config", recipe(), *flags]) == 2

    message = error_of(capsys)
    assert all(part in message for part in parts), message


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "train_dataset is empty"),
        ([{"question": "1+1=", "answer": "2"}], "no column 'prompt', only question, answer"),
        ([{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}], "no chat template"),
    ],
)
def test_unusable_rows_are_refused(rows, message, recipe, tmp_path, capsys):
    config = recipe(dataset_name=write_rows(tmp_path / "rows.jsonl", rows))

    assert main(["train", "--config", config]) == 2

    assert message in error_of(capsys)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("config_changes", "tokenizer_changes", "message"),
    [
        ({"model_type": "gpt2"}, {}, "model_type is 'gpt2', which belongs to no known family"),
        ({"mask_token_id": None}, {"mask_token": None}, "names a mask token"),
        ({"eos_token_id": None}, {"eos_token": None}, "name an end token"),
        ({"vocab_size": 20, "embedding_size": 20}, {}, "20 rows"),
    ],
)
def test_unusable_model_is_refused(config_changes, tokenizer_changes, message, recipe, model_folder, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    for name, changes in (("config.json", config_changes), ("tokenizer_config.json", tokenizer_changes)):
        values = json.loads((broken / name).read_text()) | changes
        (broken / name).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    assert main(["train", "--config", recipe(model_name_or_path=str(broken))]) == 2

    assert message in error_of(capsys)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("held", ["checkpoint-7/trainer_state.json", "model.safetensors", "adapter_model.safetensors"])
def test_output_folder_of_another_run_is_left_alone(held, recipe, tmp_path, capsys):
    path = tmp_path / "out" / held
    path.parent.mkdir(parents=True)
    path.write_text("another run's")

    assert main(["train", "--config", recipe()]) == 2

    assert "already holds" in error_of(capsys)
    assert [file.read_text() for file in (tmp_path / "out").rglob("*") if file.is_file()] == ["another run's"]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("changes", "module", "extra"),
    [
        ({"use_peft": True}, "peft", "trl-stabledrl[peft]"),
        ({"reward_funcs": "math_reward"}, "math_verify", "trl-stabledrl[math]"),
    ],
)
def test_missing_extra_is_named(changes, module, extra, recipe, monkeypatch, capsys):
    from importlib.util import find_spec

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == module else find_spec(name))

    assert main(["train", "--config", recipe(**changes)]) == 2

    assert extra in error_of(capsys)


def test_bug_keeps_its_traceback(recipe, tmp_path):
    (tmp_path / "buggy_rewards.py").write_text("def fn(completions, **kwargs):\n    return int('no number')\n")

    with pytest.raises(ValueError, match="invalid literal"):
        main(["train", "--config", recipe(reward_funcs="buggy_rewards.fn")])


def test_value_error_of_python_inside_the_package_is_no_user_error(recipe, monkeypatch):
    monkeypatch.setattr(job, "check_output_dir", lambda *args: int("no number"))

    with pytest.raises(ValueError, match="invalid literal"):
        main(["train", "--config", recipe()])


@pytest.mark.usefixtures("no_weights")
def test_dry_run_prints_the_plan_and_writes_nothing(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    config = recipe(num_iterations=2, gradient_accumulation_steps=2, eval_strategy="steps", num_eval_prompts=16)

    assert main(["train", "--config", config, "--dry-run"]) == 0

    lines = capsys.readouterr().out.splitlines()
    facts = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.strip()}
    assert facts["model"].endswith("LLaDA, 21.7 k parameters")  # 2 * 64 * 32 + 2 * (4 * 32**2 + 3 * 32 * 48 + 64) + 32
    assert facts["data"] == "512 prompts, 16 held out"
    assert facts["rewards"] == "1 x exact_match_reward"
    assert facts["update"] == "16 rows = 4 prompts x 4 completions (1 process x 8 x 2 micro-steps)"
    assert facts["rollout"].startswith("16 rows every 2 updates; 8 tokens in 2 blocks of 4, 2 steps each: 4 forward")
    assert facts["likelihood"] == "block_suffix, 2 complementary draws, old policy under the same masks"
    assert facts["scoring"].startswith("6 forward passes per row and rollout: 2 old, 0 for weights, 4 with gradient")
    assert max(map(len, lines)) <= 100
    assert not (tmp_path / "out").exists()


def test_plan_of_block_diffusion_counts_the_pass_over_the_prompts(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    config = recipe(model_name_or_path=str(published_sdar_folder(tmp_path / "sdar")))

    assert main(["train", "--config", config, "--dry-run"]) == 0

    # a prompt may end inside a block: 8 tokens touch up to 3
    assert "8 tokens in 3 blocks of 4, 2 steps each: 7 forward passes at most" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("batch", "accumulation", "steps", "mu", "coupling", "expected"),
    [
        (8, 1, 1, 1, "shared", (0, 0)),
        (8, 1, 1, 2, "shared", (2, 0)),
        (8, 1, 1, 2, "independent", (4, 0)),
        (2, 2, 2, 2, "shared", (2, 2)),  # a group of 4 in two micro-steps: the second update needs a pre-pass
        (2, 2, 4, 1, "shared", (2, 1)),  # half of the rows are on policy
    ],
)
def test_plan_counts_the_passes_that_the_trainer_makes(
    batch, accumulation, steps, mu, coupling, expected, recipe, monkeypatch
):
    counted = []
    plans = []
    noised_inputs = likelihood.noised_inputs

    def counting(rows, *args):
        if not torch.is_grad_enabled():
            counted.append(len(rows))
        return noised_inputs(rows, *args)

    monkeypatch.setattr(likelihood, "noised_inputs", counting)
    monkeypatch.setattr(train, "scoring_passes", lambda args: plans.append(scoring_passes(args)) or plans[-1])
    config = recipe(
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps,
        num_iterations=mu,
        mask_coupling=coupling,
        max_steps=mu * max(1, steps // accumulation),
    )

    assert main(["train", "--config", config]) == 0

    assert plans == [expected]
    assert sum(counted) == sum(expected) * batch * steps


def test_a_checkpoint_that_only_lacks_its_name_can_be_resumed_from(tmp_path):
    (tmp_path / "_saving" / "checkpoint-3").mkdir(parents=True)
    args = SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint="true")

    job.check_folders(args)

    assert args.resume_from_checkpoint is True
