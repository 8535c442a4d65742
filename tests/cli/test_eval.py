# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import json
import signal
import subprocess
import sys
import time
from dataclasses import fields

import pytest
from transformers import AutoModelForCausalLM

from tests.distributed.processes import environment
from tests.model_tools import with_adapter
from tests.tiny import tiny_tokenizer
from trl_stabledrl.cli import eval as eval_command
from trl_stabledrl.cli import launch
from trl_stabledrl.cli.eval import EvalArguments, help_groups, make_parser
from trl_stabledrl.cli.main import main
from trl_stabledrl.evaluation_config import EvaluationConfig

pytestmark = pytest.mark.usefixtures("in_its_own_folder")


@pytest.fixture
def command(model_folder):
    return [
        *("eval", "--model_name_or_path", str(model_folder), "--task", "addition", "--limit", "3", "--use_cpu"),
        *("--max_completion_length", "4", "8", "--num_resamples", "20", "--no_show_progress"),
    ]


@pytest.fixture
def adapter_folder(model_folder, tmp_path):
    model = with_adapter(AutoModelForCausalLM.from_pretrained(model_folder))
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def test_scores_are_shown_and_written(command, tmp_path, capsys):
    assert main([*command, "--output_dir", "out"]) == 0

    shown = capsys.readouterr().out
    assert "addition, test: 3 items" in shown
    assert "6: 1 sample of each item in windows of 4, 8 tokens" in " ".join(shown.split())
    assert "Written to out: results.json, completions.jsonl" in shown
    assert results_of(tmp_path / "out")["scores"].keys() == {"4", "8"}
    assert len((tmp_path / "out" / "completions.jsonl").read_text().splitlines()) == 6


def test_adapters_are_evaluated_under_either_option(command, model_folder, adapter_folder, tmp_path):
    assert main([*command, "--adapter", str(adapter_folder), "--output_dir", "named"]) == 0
    command[2] = str(adapter_folder)
    assert main([*command, "--output_dir", "found"]) == 0
    del command[1:3]
    assert main([*command, "--adapter", str(adapter_folder), "--output_dir", "alone"]) == 0
    assert main([*command, "--model_name_or_path", str(model_folder), "--output_dir", "base"]) == 0

    results = {name: results_of(tmp_path / name) for name in ("named", "found", "alone", "base")}
    environments = [results[name]["environment"] for name in ("named", "found", "alone")]
    assert environments[0] == environments[1] == environments[2]
    assert results["named"]["scores"] == results["found"]["scores"] == results["alone"]["scores"]
    assert results["named"]["settings"]["adapter"] == str(adapter_folder)
    assert results["named"]["settings"]["model"] == str(model_folder)
    assert environments[0]["adapter_hash"] is not None
    assert results["base"]["environment"]["adapter_hash"] is None
    assert results["base"]["environment"]["model_hash"] == environments[0]["model_hash"]
    texts = [(tmp_path / name / "completions.jsonl").read_text() for name in ("named", "base")]
    completions = [[json.loads(line)["completion"] for line in text.splitlines()] for text in texts]
    assert completions[0] != completions[1]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task", "additon"], "'additon'"),
        (["--max_completion_length", "8", "0"], "max_completion_length=8 0 must be one or more"),
        (["--max_completion_length", "long"], "invalid int value: 'long'"),
        (["--output_dir", "/dev/null/x"], "output_dir='/dev/null/x'"),
        (["--batch_size", "0"], "batch_size=0 must be a whole number of at least 1"),
        (["--block_length", "8"], "Expected block_length to be 1 to max_completion_length=4, got 8"),
        (["--confidence_threshold", "2"], "confidence_threshold"),
        (["--num_sample", "3"], "Did you mean '--num_samples'"),
        (["--output_dir", ""], "output_dir is missing"),
        (["--adapter", "nowhere"], "adapter='nowhere' is no adapter"),
        (["--model_name_or_path", "nowhere"], "model_name_or_path='nowhere'"),
        (["--model_name_or_path", ""], "model_name_or_path is missing"),
        (["--task", "countdown"], "has no chat template"),
        (["--task", "gsm8k", "--source", "nowhere.jsonl"], "task gsm8k: "),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line_before_weights_are_loaded(flags, message, command, capsys):
    assert main([*command, "--output_dir", "out", *flags]) == 2

    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line


def test_other_settings_are_refused_before_weights_are_loaded(command, capsys, request):
    assert main([*command, "--output_dir", "out"]) == 0
    request.getfixturevalue("no_weights")

    assert main([*command, "--output_dir", "out", "--top_k", "3"]) == 2

    assert "top_k was 0 and is 3. Nothing was touched" in capsys.readouterr().err


def test_dry_run_loads_no_weights_and_writes_nothing(command, tmp_path, capsys, no_weights):
    assert main([*command, "--output_dir", "out", "--dry_run"]) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert "addition, test: 3 items of at most 6 prompt tokens" in shown
    assert "2 steps per block of 4, 4 steps per block of 8" in shown
    assert not (tmp_path / "out").exists()


def test_a_recipe_sets_defaults_and_local_items_are_read(model_folder, tmp_path):
    rows = [{"question": "What is 6 times 7?", "answer": "6*7=42 #### 42"}, {"question": "1+1?", "answer": "#### 2"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = tmp_path / "chat"
    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(chat)
    tiny_tokenizer(chat_template=True).save_pretrained(chat)
    recipe = tmp_path / "eval.yaml"
    recipe.write_text(f"model_name_or_path: {chat}\ntask: gsm8k\nsource: rows.jsonl\nmax_completion_length: [8, 4]\n")

    flags = ["--config", str(recipe), "--prompt_style", "boxed", "--use_cpu", "--output_dir", "out"]
    assert main(["eval", *flags]) == 0

    settings = results_of(tmp_path / "out")["settings"]
    assert settings["max_completion_length"] == [8, 4]
    assert (settings["source"], settings["prompt_style"], settings["num_items"]) == ("rows.jsonl", "boxed", 2)
    assert settings["grader"] == "gsm8k_reward"
    assert main(["eval", *flags, "--prompt_style", "d1", "--output_dir", "other"]) == 0
    assert results_of(tmp_path / "other")["settings"]["prompt_hash"] != settings["prompt_hash"]
    assert results_of(tmp_path / "other")["settings"]["items_hash"] == settings["items_hash"]


def test_comparison_is_printed_and_drawn(command, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name, flags in (("a", []), ("b", ["--confidence_threshold", "0.3"])):
        assert main([*command, "--output_dir", name, *flags]) == 0
    capsys.readouterr()

    assert main(["eval", "compare", "a", "b", "--output", "pictures/x.png"]) == 0

    shown = capsys.readouterr().out
    assert "pass@1 less that of a, item by item" in shown
    assert "confidence_threshold: null | 0.3" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert (tmp_path / "pictures" / "x.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a"], "needs two or more folders, got 1"),
        (["a", "b"], "a is no folder"),
        (["a", "b", "--output", "x.txt"], "output='x.txt' must end in .png, .svg or .pdf"),
        (["a", "b", "--ouput", "x.png"], "Did you mean '--output'"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(arguments, message, capsys):
    assert main(["eval", "compare", *arguments]) == 2

    assert message in capsys.readouterr().err


def test_help_shows_every_option_once(capsys):
    shown = [name for _, _, names in help_groups() for name in names]
    assert sorted(shown) == sorted(f.name for f in fields(EvalArguments)) == sorted(make_parser().hints)

    assert main(["eval", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"--{f.name} " in text for f in fields(EvaluationConfig))
    assert main(["eval", "compare", "--help"]) == 0
    assert "--output" in capsys.readouterr().out


def test_launch_options_start_several_processes(command, monkeypatch):
    calls = []
    monkeypatch.setattr(launch, "launch_command", calls.append)

    assert main([*command, "--output_dir", "out", "--accelerate_config", "ddp", "--num_processes", "2"]) == 0

    (args,) = calls
    assert (args.num_processes, args.training_script) == (2, "trl_stabledrl.cli.eval")


def test_interrupting_says_how_to_go_on(command, monkeypatch, capsys):
    def interrupted(model, plan):
        raise KeyboardInterrupt

    monkeypatch.setattr(eval_command, "run_plan", interrupted)

    assert main([*command, "--output_dir", "out"]) == 130

    assert "Interrupted. What is done is in out: the same command goes on from there" in capsys.readouterr().err


def test_a_process_that_is_killed_is_followed_by_one_that_ends_with_the_same_results(command, tmp_path):
    flags = ["--limit", "120", "--temperature", "0.7", "--batch_size", "1"]
    program = [sys.executable, "-m", "trl_stabledrl.cli.main", *command, *flags, "--output_dir", "killed"]
    part = tmp_path / "killed" / "completions-000.jsonl"

    def num_lines() -> int:
        return part.read_bytes().count(b"\n") if part.exists() else 0

    with (tmp_path / "log.txt").open("w") as log:
        process = subprocess.Popen(program, cwd=tmp_path, env=environment(), stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while num_lines() < 20 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL, (tmp_path / "log.txt").read_text()
    num_kept = num_lines()
    assert 20 <= num_kept < 240
    kept = part.read_bytes().splitlines()[:num_kept]

    for name in ("killed", "whole"):
        assert main([*command, *flags, "--batch_size", "16", "--output_dir", name]) == 0

    results = [(tmp_path / name / "results.json").read_bytes() for name in ("killed", "whole")]
    assert results[0] == results[1]
    lines = [(tmp_path / name / "completions.jsonl").read_bytes().splitlines() for name in ("killed", "whole")]
    assert {*kept} <= {*lines[0]}  # with the time each took: nothing was done again
    rows = [[json.loads(line) | {"seconds": None} for line in part] for part in lines]
    assert rows[0] == rows[1]


# Within training


def test_a_recipe_evaluates_at_step_0_and_every_eval_steps(recipe, tmp_path, capsys):
    config = recipe(eval_task="addition", num_eval_task_prompts=3, eval_steps=1, max_steps=2, save_steps=2)

    assert main(["train", "--config", config]) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert "evaluation addition, 3 test prompts, greedy, at step 0, every 1 and at the end" in shown
    log = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert [one["step"] for one in log if "eval_addition/accuracy" in one] == [0, 1, 2]


def test_supervised_training_takes_the_same_keys(recipe, tmp_path):
    absent = dict.fromkeys(["num_denoising_steps", "num_generations"])
    config = recipe(**absent, eval_task="addition", num_eval_task_prompts=3, eval_steps=1)

    assert main(["sft", "--config", config]) == 0

    log = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())["log_history"]
    assert [one["step"] for one in log if "eval_addition/accuracy" in one] == [0, 1]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_task": "additon", "eval_steps": 1}, "Did you mean 'addition'"),
        ({"eval_task": "addition"}, "eval_steps=None leaves open when to evaluate on task addition"),
        ({"eval_task": "addition", "eval_steps": 1, "num_eval_task_prompts": 0}, "limit=0 must be a whole number of"),
        ({"eval_task": "countdown", "eval_steps": 1}, "has no chat template"),
        ({"num_eval_task_prompts": 3}, "num_eval_task_prompts belongs to eval_task, but none is set"),
        ({"eval_task_temperature": 1.0}, "eval_task_temperature belongs to eval_task, but none is set"),
        ({"eval_task": "addition", "eval_steps": 1, "eval_task_temperature": -1}, "temperature"),
    ],
)
def test_an_evaluation_that_cannot_be_made_is_refused_before_training(changes, message, recipe, capsys):
    assert main(["train", "--config", recipe(**changes)]) == 2

    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line
