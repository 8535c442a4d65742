# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

import sys

import pytest

from trl_stabledrl.rewards import BUILTIN_REWARDS, load_reward


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_built_in_rewards_load_by_the_name_of_their_function():
    for name, function in BUILTIN_REWARDS.items():
        assert load_reward(name) is function
        assert name == function.__name__  # TRL logs a reward under this name


def test_a_dotted_path_is_found_in_the_current_folder(folder):
    (folder / "neighbour_of_reward.py").write_text("SCORE = 0.5\n")
    (folder / "reward_in_folder.py").write_text(
        "def fn(completions, **kwargs):\n"
        "    from neighbour_of_reward import SCORE\n"
        "    return [SCORE] * len(completions)\n"
    )
    assert load_reward("reward_in_folder.fn")(["a", "b"]) == [0.5, 0.5]


def test_a_dotted_path_is_found_in_a_package():
    assert load_reward("trl_stabledrl.rewards.exact.exact_match_reward") is BUILTIN_REWARDS["exact_match_reward"]


def test_the_current_folder_shadows_no_installed_module(folder):
    (folder / "fractions.py").write_text("raise RuntimeError\n")
    assert load_reward("fractions.Fraction").__module__ == "fractions"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("gsm8k", "not a built-in name and has no dot"),
        ("", "not a built-in name and has no dot"),
        ("absent_module.fn", "ModuleNotFoundError: No module named 'absent_module'"),
        ("broken_reward.fn", "ZeroDivisionError: division by zero"),
        ("reward_without_fn.fn", "has no `fn`"),
        ("reward_without_fn.number", "it is a int, not a function"),
        (".fn", "has no dot"),
        ("..fn", "TypeError"),
    ],
)
def test_the_error_names_path_reason_and_built_in_names(folder, path, reason):
    (folder / "broken_reward.py").write_text("1 / 0\n")
    (folder / "reward_without_fn.py").write_text("number = 3\n")
    with pytest.raises(ValueError, match="Could not load reward") as error:
        load_reward(path)
    message = str(error.value)
    assert f"`{path}`" in message
    assert reason in message
    assert all(name in message for name in BUILTIN_REWARDS)
    assert str(folder) in message
