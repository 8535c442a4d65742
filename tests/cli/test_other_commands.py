# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import inspect
import json
from dataclasses import fields
from importlib import metadata

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_stabledrl
from trl_stabledrl.cli import sft, train
from trl_stabledrl.cli.generate import GenerateArguments
from trl_stabledrl.cli.main import COMMANDS, main

pytestmark = pytest.mark.usefixtures("in_its_own_folder")


def test_no_command_shows_them_all(capsys):
    assert main([]) == 0

    shown = capsys.readouterr().out
    assert all(f"  {command} " in shown for command in COMMANDS)


def test_version(capsys):
    assert main(["--version"]) == 0

    assert capsys.readouterr().out.strip() == trl_stabledrl.__version__


def test_unknown_command_names_the_nearest(capsys):
    assert main(["tain"]) == 2

    assert "unknown command 'tain'. Did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("train", ["--mask_law", "block_suffix | semi_ar", "my_rewards.fn", "--num_processes"]),
        ("sft", ["--max_completion_length", "`completion`", "block_suffix | semi_ar"]),
        ("generate", ["--prompt", "--confidence_threshold"]),
    ],
)
def test_help_fits_the_terminal_and_shows_what_matters(command, shown, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    assert main([command, "--help"]) == 0

    text = capsys.readouterr().out
    assert all(part in " ".join(text.split()) for part in shown)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    assert len(text.splitlines()) <= 110


@pytest.mark.parametrize("command", ["train", "sft"])
def test_help_all_shows_every_field(command, capsys):
    assert main([command, "--help_all"]) == 0

    text = capsys.readouterr().out
    parser = {"train": train, "sft": sft}[command].make_parser()
    assert all(f"--{name}" in text for name in parser.hints)


@pytest.mark.parametrize("module", [train, sft])
def test_every_field_of_the_help_screen_exists_once(module):
    shown = [name for _, kind, names in module.help_groups() for name in names]

    assert len(shown) == len(set(shown))
    assert set(shown) <= set(module.make_parser().hints)


def test_generate_takes_the_options_of_the_function_with_the_same_defaults():
    options = {
        name: parameter.default
        for name, parameter in inspect.signature(trl_stabledrl.generate).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in ("return_rollouts", "row_index")
    }
    own = {field.name: field.default for field in fields(GenerateArguments)}

    assert options.items() <= own.items()
    rest = {"model_name_or_path", "prompt", "use_chat_template", "trace", "device", "dtype"}
    assert own.keys() - options.keys() == rest


def test_generate_prints_what_the_function_returns(model_folder, capsys):

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    expected = trl_stabledrl.generate(model, tokenizer, ["1+1=", "2+"], max_completion_length=8, show_progress=False)

    prompts = ["--prompt", "1+1=", "2+", "--max_completion_length", "8"]
    assert main(["generate", "--model_name_or_path", str(model_folder), *prompts]) == 0

    assert capsys.readouterr().out == f"> 1+1=\n{expected[0]}\n> 2+\n{expected[1]}\n"


def test_generate_sends_a_message_where_there_is_a_chat_template(model_folder, monkeypatch, tmp_path):
    import shutil

    from tests.tiny import tiny_tokenizer
    from trl_stabledrl.cli import generate

    shutil.copytree(model_folder, tmp_path / "chat")
    tiny_tokenizer(chat_template=True).save_pretrained(tmp_path / "chat")
    seen = []
    monkeypatch.setattr(
        generate, "generate", lambda model, tokenizer, prompts, **options: seen.append(prompts) or ["x"]
    )

    command = ["generate", "--model_name_or_path", str(tmp_path / "chat"), "--prompt", "1+1="]
    assert main(command) == 0
    assert main([*command, "--no_use_chat_template"]) == 0

    assert seen == [[[{"role": "user", "content": "1+1="}]], ["1+1="]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "model_name_or_path is missing"),
        (["--model_name_or_path", "x"], "prompt is missing"),
        (["--model_name_or_path", "nowhere/at_all", "--prompt", "a"], "model_name_or_path='nowhere/at_all'"),
        (["--promt", "a"], "Did you mean '--prompt'"),
        (["--temperature", "hot"], "invalid float value: 'hot'"),
    ],
)
def test_generate_refuses_in_one_line(flags, message, capsys):
    assert main(["generate", *flags]) == 2

    assert message in capsys.readouterr().err


def test_generate_passes_on_the_samplers_own_checks_before_weights_are_loaded(model_folder, capsys, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("weights loaded"))

    assert main(["generate", "--model_name_or_path", str(model_folder), "--prompt", "a", "--block_length", "0"]) == 2

    assert "block_length" in capsys.readouterr().err


def test_env_lists_versions_that_a_bug_report_needs(capsys):
    assert main(["env"]) == 0

    lines = capsys.readouterr().out.splitlines()
    for package in ("torch", "trl", "transformers", "accelerate"):
        assert f"- {package}: {metadata.version(package)}" in lines
    assert f"- trl-stabledrl: {trl_stabledrl.__version__}" in lines
    assert any(line.startswith("- device: ") for line in lines)
    assert any(line.startswith("- deepspeed: ") for line in lines)


def test_sft_trains_on_a_task_and_resumes(recipe, tmp_path):
    changes = dict.fromkeys(["num_denoising_steps", "num_generations"])

    assert main(["sft", "--config", recipe(**changes)]) == 0
    assert main(["sft", "--config", recipe(**changes, max_steps=2, resume_from_checkpoint=True)]) == 0

    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    resolved = yaml.safe_load((tmp_path / "out" / "checkpoint-2" / "resolved_config.yaml").read_text())
    assert resolved["mask_law"] == "uniform"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "gsm8k", "dataset_name": "rows.jsonl"}, "task gsm8k has no completions"),
        ({"task": None, "dataset_name": "rows.jsonl"}, "no column 'completion'"),
        ({"packing": True}, "packing=True is not honoured"),
        ({"reward_funcs": "exact_match_reward"}, "unknown key 'reward_funcs'"),
        ({"output_dir": "."}, "already holds a checkpoint"),
    ],
)
def test_sft_refuses_in_one_line(changes, message, recipe, tmp_path, capsys, no_weights):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "checkpoint-1").mkdir()
    absent = dict.fromkeys(["num_denoising_steps", "num_generations"])

    assert main(["sft", "--config", recipe(**absent, **changes)]) == 2

    assert message in capsys.readouterr().err


def test_sft_dry_run(recipe, capsys, no_weights):
    absent = dict.fromkeys(["num_denoising_steps", "num_generations"])

    assert main(["sft", "--config", recipe(**absent), "--dry_run"]) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert "data 512 rows update 8 rows (1 process x 8 x 1 micro-step)" in shown
    assert "likelihood uniform, 1 independent draw, window of 8 tokens" in shown
