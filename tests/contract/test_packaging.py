# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import os
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import trl_stabledrl

ROOT = Path(__file__).resolve().parents[2]
PUBLIC_NAMES = {
    "DiffusionSFTConfig",
    "DiffusionSFTTrainer",
    "StableDRLConfig",
    "StableDRLTrainer",
    "__version__",
    "generate",
    "recipes_folder",
    "score",
}


def run(*command: str | Path, cwd: Path) -> str:
    # without PYTHONPATH: the checkout must not be found by accident
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


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
    assert shipped == modules | recipes | {"trl_stabledrl/py.typed"}


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


def test_installed_command_starts_from_another_folder(installed_python, tmp_path):
    assert "quickstart" in run(installed_python.parent / "trl-stabledrl", "--help", cwd=tmp_path)


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
