# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""The quickstart, cut down to a few steps; that accuracy rises is measured by running it (see docs/log.md)."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_stabledrl
from trl_stabledrl.models import LLaDAModelLM, SDARForCausalLM
from trl_stabledrl.quickstart import QuickstartConfig, permuted_reward, run
from trl_stabledrl.rewards import exact_match_reward

RECIPE = trl_stabledrl.recipes_folder() / "quickstart.yaml"


def short_config(output_dir: Path, **overrides) -> QuickstartConfig:
    config = QuickstartConfig.load(RECIPE, output_dir=str(output_dir), num_eval_prompts=16, **overrides)
    config.num_train_prompts = 64
    for part in [*config.tasks.values(), *config.families.values()]:
        part.pop("sft", None)
        for key in ("max_steps", "per_device_train_batch_size", "warmup_steps", "logging_steps"):
            part.get("rl", {}).pop(key, None)
    config.sft.update(max_steps=2, per_device_train_batch_size=8, logging_steps=1)
    config.rl.update(max_steps=2, per_device_train_batch_size=16, warmup_steps=0, logging_steps=1)
    return config


@pytest.mark.parametrize(
    ("family", "model_class"), [("llada", LLaDAModelLM), ("sdar", SDARForCausalLM)], ids=["llada", "sdar"]
)
def test_quickstart_writes_a_summary_a_picture_and_a_loadable_checkpoint(family, model_class, tmp_path):
    screen = StringIO()

    config = short_config(tmp_path, control="permuted", family=family)
    summary = run(config, console=Console(file=screen, width=100))

    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    accuracies = ["before_sft", "after_sft", "after_rl", "after_control"]
    for name in accuracies:
        assert set(summary[f"accuracy_{name}"]) == {"sampled", "greedy"}
        assert all(0.0 <= value <= 1.0 for value in summary[f"accuracy_{name}"].values())
    assert (summary["family"], summary["num_eval_prompts"]) == (family, 16)
    assert set(summary["seconds"]) == {"sft", "rl", "control", "evaluation"}
    assert (tmp_path / "quickstart.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert len((tmp_path / "completions.md").read_text().splitlines()) == 4 + 12
    assert [json.loads(line)["step"] for line in (tmp_path / "log_rl.jsonl").read_text().splitlines()][:2] == [1, 2]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert isinstance(model, model_class)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    completions = trl_stabledrl.generate(model, tokenizer, ["83517264"], max_completion_length=8)
    assert isinstance(completions[0], str)
    assert len(completions) == 1
    assert "after the control" in screen.getvalue()
    assert {"llada": "LLaDA, ", "sdar": "SDAR, "}[family] in screen.getvalue()


def test_same_seed_gives_the_same_run_and_another_does_not_overwrite_it(tmp_path):
    first = run(short_config(tmp_path / "a", task="addition"), console=Console(quiet=True))
    again = run(short_config(tmp_path / "a", task="addition"), console=Console(quiet=True))

    untimed = [{k: v for k, v in summary.items() if k != "seconds"} for summary in (first, again)]
    assert untimed[0] == untimed[1]
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir() if path.is_file()}
    with pytest.raises(ValueError, match=r"family 'llada', task 'addition', seed 0, and .* seed 1\..*--output_dir"):
        run(short_config(tmp_path / "a", task="addition", seed=1), console=Console(quiet=True))
    with pytest.raises(ValueError, match=r"holds the results of family 'llada'.* this run is family 'sdar'"):
        run(short_config(tmp_path / "a", task="addition", family="sdar"), console=Console(quiet=True))
    assert {path: path.read_bytes() for path in (tmp_path / "a").iterdir() if path.is_file()} == before


def test_values_of_the_family_and_the_task_win_in_that_order():
    families = {
        "llada": {"rl": {"epsilon": 4.0}},
        "sdar": {
            "model": {"block_size": 8},
            "rl": {"epsilon": 2.0, "seed": 2, "top_k": 2},
            "tasks": {"addition": {"rl": {"top_k": 4}}, "sorting": {"rl": {"top_k": 5}}},
        },
    }
    tasks = {"addition": {"rl": {"seed": 3, "top_k": 3}}}

    def section(name: str, **choice: Any) -> dict[str, Any]:
        shared = {"model": {"hidden_size": 32}, "rl": {"epsilon": 1.0, "beta": 0.5}}
        return QuickstartConfig(**shared, tasks=tasks, families=families, **choice).section(name)

    assert section("rl") == {"epsilon": 4.0, "beta": 0.5}
    assert section("rl", task="addition", family="sdar") == {"epsilon": 2.0, "beta": 0.5, "seed": 3, "top_k": 4}
    assert section("model", family="sdar") == {"hidden_size": 32, "block_size": 8}
    assert section("model") == {"hidden_size": 32}


def test_each_family_has_its_own_folder_unless_one_is_named():
    assert QuickstartConfig.load(RECIPE).output_dir == "quickstart"
    assert QuickstartConfig.load(RECIPE, family="sdar").output_dir == "quickstart_sdar"
    assert QuickstartConfig.load(RECIPE, family="sdar", output_dir="here").output_dir == "here"


def test_control_hands_the_same_rewards_to_other_completions_of_the_group():
    answers = ["12", "12", "12", "12", "34", "34", "34", "34"]
    completions = ["12", "x", "y", "z", "34", "34", "x", "y"]
    control = permuted_reward(exact_match_reward, num_generations=4, seed=0)

    draws = [control(completions, answer=answers) for _ in range(200)]

    for rewards in draws:
        assert sorted(rewards[:4]) == [0.0, 0.0, 0.0, 1.0]
        assert sorted(rewards[4:]) == [0.0, 0.0, 1.0, 1.0]
    # each completion of the first group gets the one reward in a quarter of the draws: 50 of 200, 3 s.e. = 18.4
    counts = [sum(rewards[i] for rewards in draws) for i in range(4)]
    assert all(abs(count - 50) < 18.4 for count in counts)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"task": "chess"}, r"task='chess' is not one of 'sorting'"),
        ({"control": "none"}, r"control='none' is not known"),
        ({"num_eval_prompts": 0}, r"num_eval_prompts=0 must be at least 1"),
        ({"family": "gpt2"}, r"family='gpt2' is not one of 'llada', 'sdar'"),
        ({"rl": {"learning_rat": 1.0}}, r"'rl.learning_rat'.*'rl.learning_rate'"),
        ({"model": {"hiden_size": 8}}, r"'model.hiden_size'.*'model.hidden_size'"),
        ({"tasks": {"adition": {}}}, r"'tasks.adition'.*'tasks.addition'"),
        ({"tasks": {"addition": {"sftt": {}}}}, r"'tasks.addition.sftt'.*'tasks.addition.sft'"),
        ({"families": {"sda": {}}}, r"'families.sda'.*'families.sdar'"),
        ({"families": {"sdar": {"model": {"blok_size": 2}}}}, r"blok_size'.*'families.sdar.model.block_size'"),
        ({"families": {"sdar": {"tasks": {"addition": {"rl": {"lr": 1.0}}}}}}, r"families.sdar.tasks.addition.rl.lr'"),
    ],
)
def test_bad_values_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        QuickstartConfig.load(RECIPE, **overrides)


def test_unknown_key_of_the_recipe_names_the_nearest(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.read_text().replace("num_eval_prompts:", "num_eval_prompt:"))

    with pytest.raises(ValueError, match=r"'num_eval_prompt'.*'num_eval_prompts'"):
        QuickstartConfig.load(path)
