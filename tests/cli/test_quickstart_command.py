# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

import trl_stabledrl
from trl_stabledrl.cli import quickstart
from trl_stabledrl.cli.main import main


@pytest.fixture
def configs(monkeypatch):
    """What would be run."""
    seen = []
    monkeypatch.setattr(quickstart, "run_quickstart", seen.append)
    return seen


def test_flags_override_the_recipe(configs):
    flags = ["--seed", "3", "--output_dir", "here", "--task", "sudoku", "--control", "permuted"]

    assert main(["quickstart", *flags]) == 0

    (config,) = configs
    assert (config.seed, config.output_dir, config.task, config.control) == (3, "here", "sudoku_digits", "permuted")
    assert config.family == "llada"


def test_family_is_chosen_by_a_flag(configs):
    assert main(["quickstart", "--family", "sdar"]) == 0

    (config,) = configs
    assert (config.family, config.output_dir) == ("sdar", "quickstart_sdar")


def test_recipe_is_found_from_any_folder(configs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert main(["quickstart"]) == 0

    assert configs[0].task == "sorting"
    assert Path(trl_stabledrl.recipes_folder(), "quickstart.yaml").is_file()


@pytest.mark.parametrize(
    "flags", [["--tusk", "sorting"], ["--task", "chess"], ["--family", "gpt2"], ["--config", "nowhere.yaml"]]
)
def test_bad_input_is_one_line(flags, configs, capsys):
    assert main(["quickstart", *flags]) == 2

    assert capsys.readouterr().err.startswith("error: ")
    assert not configs
