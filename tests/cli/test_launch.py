# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import trl_stabledrl
from trl_stabledrl.cli import launch
from trl_stabledrl.cli.main import main
from trl_stabledrl.cli.train import make_parser

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("in_its_own_folder")


@pytest.fixture
def launched(monkeypatch):
    """What would be handed to accelerate."""
    calls = []
    monkeypatch.setattr(launch, "launch_command", calls.append)
    return calls


def shell(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def test_launch_options_go_to_accelerate_and_the_others_to_the_command(recipe, launched):
    config = recipe(main_process_port=29512)

    assert main(["train", "--num_processes", "3", "--config", config, "--accelerate_config=ddp", "--seed", "3"]) == 0

    (args,) = launched
    assert args.config_file == str(trl_stabledrl.recipes_folder() / "accelerate" / "ddp.yaml")
    assert (args.num_processes, args.main_process_port) == (3, 29512)
    assert args.module
    assert args.training_script == "trl_stabledrl.cli.train"
    assert args.training_script_args == ["--seed", "3", "--config", config]


def test_processes_that_accelerate_would_not_start_are_refused(recipe, launched, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(launch, "default_config_file", "nowhere.yaml")

    assert main(["train", "--config", recipe(), "--num_processes", "2"]) == 2

    assert "but num_processes is 2. Use --accelerate_config cpu --num_processes 2." in capsys.readouterr().err
    assert launched == []


def test_flag_of_the_launcher_wins_over_yaml(recipe, launched, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert main(["train", "--config", recipe(num_processes=4), "--num_processes", "2"]) == 0

    assert launched[0].num_processes == 2


def test_accelerate_config_may_be_one_of_trl_or_a_file(recipe, launched, tmp_path):
    (tmp_path / "mine.yaml").write_text("distributed_type: 'NO'\n")

    for name in ("fsdp2", "mine.yaml"):
        assert main(["train", "--config", recipe(), "--accelerate_config", name]) == 0

    assert [Path(args.config_file).name for args in launched] == ["fsdp2.yaml", "mine.yaml"]


def test_deepspeed_that_is_not_installed_is_named_before_anything_starts(recipe, launched, monkeypatch, capsys):
    from importlib.util import find_spec

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "deepspeed" else find_spec(name))

    assert main(["train", "--config", recipe(), "--accelerate_config", "zero3"]) == 2

    assert "pip install 'trl-stabledrl[deepspeed]'" in capsys.readouterr().err
    assert not launched


def test_one_process_without_launch_options_runs_here(recipe, launched):
    assert main(["train", "--config", recipe(), "--dry_run"]) == 0

    assert not launched


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")])
def test_process_of_a_launcher_does_not_launch_again(name, value, monkeypatch, capsys, recipe, launched):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 8)

    assert not launch.needs_launcher([])
    assert main(["train", "--config", recipe(), "--num_processes", "2"]) == 2

    assert "--num_processes comes too late" in capsys.readouterr().err
    assert not launched


def test_several_gpus_are_used(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 2)

    assert launch.needs_launcher([])


def test_every_launch_option_that_is_no_field_reaches_the_launcher():
    parser = make_parser()

    own, foreign = parser.split(["--seed", "1", "--main_process_port", "1", "--mixed-precision", "bf16", "--bf16"])

    assert own == ["--seed", "1", "--bf16"]
    assert foreign == ["--main_process_port", "1", "--mixed-precision", "bf16"]


def test_two_processes_train_through_the_cpu_recipe(recipe, tmp_path):
    config = recipe(per_device_train_batch_size=4)
    command = [sys.executable, "-m", "trl_stabledrl.cli.main", "train", "--config", config]

    finished = shell(*command, "--accelerate_config", "cpu", cwd=tmp_path)

    assert finished.returncode == 0, finished.stderr
    # the plan is printed once, and knows of both processes
    assert finished.stdout.count("8 rows = 2 prompts x 4 completions (2 processes x 4 x 1 micro-step)") == 1
    header = (tmp_path / "out" / "checkpoint-1" / "resolved_config.yaml").read_text().splitlines()[0]
    assert header.endswith("Processes: 2.")


def test_error_of_two_processes_is_said_once(recipe, tmp_path):
    command = [sys.executable, "-m", "trl_stabledrl.cli.main", "train", "--accelerate_config", "cpu"]

    finished = shell(*command, "--config", recipe(num_generations=3, per_device_train_batch_size=4), cwd=tmp_path)

    assert finished.returncode == 2
    assert finished.stderr.count("error: num_generations=3 must divide") == 1
    assert "Traceback" not in finished.stderr
    assert len(finished.stderr.splitlines()) == 1, finished.stderr


@pytest.mark.parametrize("name", ["train", "sft"])
def test_script_is_the_same_command_and_refuses_launch_options_behind_it(name, recipe, monkeypatch, capsys):
    def run_script(*flags: str) -> Any:
        absent = {} if name == "train" else dict.fromkeys(["num_denoising_steps", "num_generations"])
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--config", recipe(**absent), *flags])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(ROOT / "scripts" / f"{name}.py"), run_name="__main__")
        return stopped.value.code

    assert run_script("--dry_run") == 0
    assert capsys.readouterr().out.startswith("Dry run: everything that needs no weights is in order.")
    assert run_script("--num_processes", "2") == 2
    assert "error: --num_processes is an option of accelerate launch" in capsys.readouterr().err


def test_yaml_with_launch_keys_can_be_given_to_the_script(recipe, model_folder):
    from trl_stabledrl.cli.train import main as script_main

    assert yaml.safe_load(Path(recipe(num_processes=8)).read_text())["num_processes"] == 8
    assert script_main(["--config", recipe(num_processes=8), "--dry_run"]) == 0
