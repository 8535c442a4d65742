# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What the README and the docs say about files, names, versions and commands is true."""

import ast
import json
import re
import shlex
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import datasets
import peft
import pytest
from accelerate.commands.launch import launch_command_parser
from transformers import AutoModelForCausalLM

from tests.tiny import published_llada_folder, published_sdar_folder, tiny_tokenizer
from trl_stabledrl import recipes_folder

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PAGES}
README, METHOD = TEXTS["README.md"], TEXTS["docs/method.md"]
FOLDERS = "trl_stabledrl|recipes|tests|scripts|docs"
GSM8K_ROW = {"question": "What is 6 times 7?", "answer": "6*7=42 #### 42"}
MATH_ROW = {"problem": "What is $6*7$?", "solution": r"\boxed{42}", "level": "Level 1", "type": "Algebra"}
# what the host libraries log, by the first part of the name
HOST_METRICS = {
    *("completions", "epoch", "frac_reward_zero_std", "grad_norm", "learning_rate", "loss", "num_tokens", "reward"),
    *("reward_std", "rewards", "step", "step_time", "total_flos", "train_loss", "train_runtime"),
    *("train_samples_per_second", "train_steps_per_second"),
}


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Command lines of every page, joined where a backslash continues them, without their comments."""
    blocks = [block for text in TEXTS.values() for block in code_blocks(text, "bash")]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    return sorted({shlex.join(shlex.split(line, comments=True)) for line in lines})


def defined_names(path: Path) -> set[str]:
    """Functions, classes and their methods, parsed and not imported."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return names


def anchors(text: str) -> set[str]:
    """Links to headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = published_llada_folder(tmp_path_factory.mktemp("models") / "llada")
    tiny_tokenizer(chat_template=True).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """The folder of someone who follows the README: the files that its examples name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "trl_stabledrl.data._load.load_dataset",
        lambda *_, **__: datasets.Dataset.from_list([GSM8K_ROW | MATH_ROW] * 256),
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_rewards.py").write_text("def fn(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    return tmp_path


def test_swap_example_trains_and_logs_what_the_docs_explain(user_folder, model_folder):
    (block,) = code_blocks(README, "python")
    assert len([line for line in block.splitlines() if line]) <= 13  # ten lines, blank ones and brackets apart
    small = (
        "max_completion_length=8, block_length=4, num_denoising_steps=2, num_generations=4, "
        "per_device_train_batch_size=4, max_steps=2, logging_steps=1, use_cpu=True, bf16=False, disable_tqdm=True, "
        "report_to='none'"
    )
    for old, new in {
        '"GSAI-ML/LLaDA-8B-Instruct"': repr(model_folder),
        "max_completion_length=256": small,
    }.items():
        assert block.count(old) == 1
        block = block.replace(old, new)
    names: dict = {}

    exec(block, names)

    assert names["trainer"].state.global_step == 2
    logged = {name for entry in names["trainer"].state.log_history for name in entry}
    ours = {name for name in logged if name.split("/")[0] not in HOST_METRICS}
    assert "weights/ess" in ours
    phases = {f"seconds/{phase}" for phase in re.findall(r"`(\w+)`", METHOD.split("| `seconds/*` |")[1].split("|")[0])}
    assert ours <= phases | set(re.findall(r"`([\w/]+)`", METHOD.split("## Metrics")[1]))


@pytest.mark.parametrize("page", TEXTS)
def test_every_path_exists(page):
    named = {path.rstrip(".") for path in re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]*", TEXTS[page])}

    assert not [path for path in sorted(named) if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", TEXTS)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", TEXTS[page]):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (ROOT / page).parent / path
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text()), target


@pytest.mark.parametrize("page", TEXTS)
def test_every_function_and_test_exists(page):
    for path, name in re.findall(r"`([\w/]+\.py)::([\w.]+)`", TEXTS[page]):
        assert name in defined_names(ROOT / path), f"{path}::{name}"


def test_every_function_of_the_core_is_in_the_method():
    for module in ("elbo", "masking", "objective", "peers"):
        path = f"trl_stabledrl/core/{module}.py"
        functions = {name for name in defined_names(ROOT / path) if name[0].islower() and "." not in name}
        missing = [name for name in sorted(functions) if f"`{path}::{name}`" not in METHOD]
        assert not missing


def test_every_file_of_the_package_and_every_recipe_is_on_a_map():
    files = [path for path in (ROOT / "trl_stabledrl").glob("*.py") if path.stem != "__init__"]
    assert len(files) > 10
    assert not [path.name for path in files if f"`trl_stabledrl/{path.name}`" not in README]
    recipes = [path.relative_to(ROOT).as_posix() for path in recipes_folder().rglob("*.yaml")]
    assert not [path for path in recipes if f"`{path}`" not in TEXTS["docs/recipes.md"]]


def test_tested_versions_are_the_pinned_ones():
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    table = dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|$", README.split("## Tested versions")[1], re.MULTILINE))
    sentence = re.search(r"^Tested with (.*?) \(`constraints.txt`\)", TEXTS["CHANGELOG.md"], re.MULTILINE | re.DOTALL)
    assert sentence is not None
    in_changelog = dict(re.findall(r"([\w-]+) (\d[\d.]*\d)", sentence[1]))

    python = table.pop("Python")
    assert {"torch", "trl", "transformers"} <= table.keys()
    assert table == {name: pinned[name] for name in table}
    assert in_changelog == {**table, "Python": python}


@pytest.mark.parametrize("module", ["stabledrl_config", "sft_config"])
def test_changelog_gives_a_reason_for_every_option(module):
    config = {"stabledrl_config": "StableDRLConfig", "sft_config": "DiffusionSFTConfig"}[module]
    cls = vars(import_module(f"trl_stabledrl.{module}"))[config]
    inherited = {f.name for f in fields(cls.__base__)}

    own = [f.name for f in fields(cls) if f.name not in inherited]

    assert "mask_law" in own
    part = TEXTS["CHANGELOG.md"].split(f"### Options of {config}")[1].split("\n### ")[0]
    assert not [name for name in own if not re.search(rf"^\| [^|]*`{name}`", part, re.MULTILINE)]


@pytest.mark.parametrize("command", [line for line in commands() if line.startswith("make ")])
def test_make_targets_exist(command):
    target = command.split()[1]
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("command", [line for line in commands() if line.startswith(("trl-stabledrl", "accelerate"))])
def test_commands_run_up_to_the_weights(command, user_folder, model_folder, monkeypatch, capsys):
    words = shlex.split(command)
    if "outputs/llada_8b_gsm8k" in words:
        words[words.index("outputs/llada_8b_gsm8k")] = model_folder
    if any(word.startswith("sdar_") for word in words):
        model_folder = str(published_sdar_folder(user_folder / "sdar", max_position_embeddings=32_768))
        tiny_tokenizer(chat_template=True).save_pretrained(model_folder)
    monkeypatch.setattr("trl_stabledrl.checks.installed_vllm", lambda: "0.31.0")  # no dependency of the tests
    tiny = ["--model_name_or_path", model_folder, "--use_cpu", "--dry_run"]
    if "llada_8b_gsm8k_qlora" in words:  # bitsandbytes is no dependency of the tests
        tiny += ["--load_in_4bit", "false"]

    match words[:2]:
        case ["accelerate", "launch"]:
            launched = launch_command_parser().parse_args(words[2:])
            assert (ROOT / launched.config_file).is_file()
            assert (ROOT / launched.training_script).is_file()
            monkeypatch.chdir(ROOT)  # where the recipe's path leads somewhere; a dry run writes nothing
            module = import_module(f"trl_stabledrl.cli.{Path(launched.training_script).stem}")
            status = module.main([*launched.training_script_args, *tiny])
        case ["trl-stabledrl", ("train" | "sft") as name]:
            from trl_stabledrl.cli.launch import find_accelerate_config

            module = import_module(f"trl_stabledrl.cli.{name}")
            arguments, launch_arguments = module.make_parser().split(words[2:])
            if launch_arguments:
                assert launch_arguments[0] == "--accelerate_config"
                assert find_accelerate_config(launch_arguments[1]).is_file()
                launch_command_parser().parse_args([*launch_arguments[2:], "script.py"])
            status = module.main([*arguments, *tiny])
        case ["trl-stabledrl", "quickstart"]:
            from trl_stabledrl.cli import quickstart

            monkeypatch.setattr(quickstart, "run_quickstart", lambda config: None)
            status = quickstart.run(words[2:])
        case ["trl-stabledrl", "env"]:
            status = import_module("trl_stabledrl.cli.env").run([*words[2:], "--model_name_or_path", model_folder])
        case ["trl-stabledrl", "lab"]:
            from trl_stabledrl.cli.lab import make_parser

            make_parser().parse_args(words[2:])
            status = 0
        case ["trl-stabledrl", "eval"]:
            from trl_stabledrl.cli import eval as evaluation

            if words[2] == "compare":
                monkeypatch.setattr(evaluation, "load_runs", list)
                monkeypatch.setattr(evaluation, "show_comparison", lambda console, runs: None)
                monkeypatch.setattr(evaluation, "draw_comparison", lambda path, runs: True)
                status = evaluation.run(words[2:])
            else:
                status = evaluation.run([*words[2:], *tiny])
        case ["trl-stabledrl", "merge"]:
            adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
            model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), adapter)
            model.save_pretrained(words[words.index("--adapter") + 1])
            status = import_module("trl_stabledrl.cli.merge").run(words[2:])
            assert (user_folder / words[words.index("--output_dir") + 1] / "config.json").is_file()
        case ["trl-stabledrl", name]:
            small = ["--max_completion_length", "8"] if name == "generate" else []
            words = [word.replace("quickstart/model", model_folder) for word in words]
            status = import_module(f"trl_stabledrl.cli.{name}").run([*words[2:], *small])
        case _:
            pytest.fail(f"no test knows how to try {command!r}")

    assert status == 0, capsys.readouterr().err
