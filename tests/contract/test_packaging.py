# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import json
import os
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_stabledrl

ROOT = Path(__file__).resolve().parents[2]
PUBLIC_NAMES = {
    "DiffusionSFTConfig",
    "DiffusionSFTTrainer",
    "StableDRLConfig",
    "StableDRLTrainer",
    "EvaluationConfig",
    "TaskEvaluation",
    "__version__",
    "evaluate",
    "generate",
    "recipes_folder",
    "score",
    "write_trace",
}


def run(*command: str | Path, cwd: Path) -> str:
    # without PYTHONPATH: the checkout must not be found by accident
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def smallest_quickstart() -> dict[str, Any]:
    """The shipped quickstart with everything that costs time cut down."""
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    recipe |= {"num_train_prompts": 16, "num_eval_prompts": 4}
    recipe["model"] |= {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    recipe["sft"] |= {"max_steps": 1, "per_device_train_batch_size": 8}
    # 8 rows, 2 completions of each prompt: whatever else the recipe says divides them
    recipe["rl"] |= {"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 2}
    return recipe


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    # a copy: setuptools leaves `build/` behind, and would ship what an earlier build left there
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("trl_stabledrl", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", built, source, cwd=source)
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed_python(wheel, tmp_path_factory) -> Path:
    """Python of a fresh environment that holds the wheel, and borrows only its dependencies from this one."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    python = environment / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel),
        cwd=environment,
    )
    (site_packages,) = environment.glob("lib/python*/site-packages")
    # Python does not read the .pth files of a folder added this way: our own editable install stays out of sight
    (site_packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


def test_wheel_holds_every_module_recipe_and_the_type_marker(wheel):
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}

    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "trl_stabledrl").rglob("*.py")}
    recipes = {f"trl_stabledrl/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "recipes").rglob("*.yaml")}
    assert "trl_stabledrl/recipes/quickstart.yaml" in recipes
    assert shipped == modules | recipes | {"trl_stabledrl/py.typed", "trl_stabledrl/trace.html"}


def test_installed_package_is_lazy_and_finds_its_recipes_from_another_folder(installed_python, tmp_path):
    program = (
        "import sys, trl_stabledrl\n"
        "print(trl_stabledrl.__file__)\n"
        "print('trl' in sys.modules)\n"
        "print(*sorted(path.name for path in trl_stabledrl.recipes_folder().rglob('*.yaml')))"
    )

    location, is_trl_loaded, recipes = run(installed_python, "-c", program, cwd=tmp_path).splitlines()

    assert Path(location).is_relative_to(installed_python.parents[1])
    assert is_trl_loaded == "False"  # half of the time to import everything; the trainers load it when asked for
    assert recipes.split() == sorted(path.name for path in (ROOT / "recipes").rglob("*.yaml"))


def test_installed_command_trains_and_completes_from_another_folder(installed_python, tmp_path):
    command = installed_python.parent / "trl-stabledrl"
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(smallest_quickstart()))

    run(command, "quickstart", "--config", "small.yaml", "--output_dir", "out", "--seed", "5", cwd=tmp_path)
    options = ("--max_completion_length", "8", "--num_denoising_steps", "8")
    model = ("--model_name_or_path", "out/model", "--prompt", "83517264")
    completion = run(command, "generate", *model, *options, cwd=tmp_path)

    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["seed"], summary["num_eval_prompts"]) == (5, 4)
    for phase in ("before_sft", "after_sft", "after_rl"):
        assert summary[f"accuracy_{phase}"].keys() == {"sampled", "greedy"}
    assert {"sft", "rl", "evaluation"} <= summary["seconds"].keys()
    assert (tmp_path / "out" / "quickstart.png").read_bytes().startswith(b"\x89PNG")
    assert len(completion.strip()) == 8
    # the same weights in this process, where the package is the checkout
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert loaded.num_parameters() == summary["num_parameters"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    texts = trl_stabledrl.generate(loaded, tokenizer, ["83517264"], max_completion_length=8, num_denoising_steps=8)
    assert texts == [completion.strip()]


def test_checkout_finds_its_own_recipes():
    assert trl_stabledrl.recipes_folder() == ROOT / "recipes"


def test_public_names_stay():
    assert set(trl_stabledrl.__all__) == PUBLIC_NAMES
    assert set(dir(trl_stabledrl)) >= PUBLIC_NAMES


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_public_name_can_be_imported(name):
    assert getattr(trl_stabledrl, name) is vars(trl_stabledrl)[name]


def test_unknown_name_is_refused_as_python_does():
    with pytest.raises(AttributeError, match="module 'trl_stabledrl' has no attribute 'GRPOTrainer'"):
        _ = trl_stabledrl.GRPOTrainer
