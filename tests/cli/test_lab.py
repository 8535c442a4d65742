# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from tests.lab_tools import made_up, small_recipe
from trl_stabledrl import lab_protocol
from trl_stabledrl.cli import lab
from trl_stabledrl.cli.main import main

RUNS = {"grpo": {"after": [0.0], "peak": 1e18}, "stabledrl": {"after": [0.5]}}


def test_run_plot_and_report(tmp_path, monkeypatch, capfd):
    options = ["--seeds", "1", "--out", "lab", "--config", str(small_recipe(tmp_path)), "--processes", "1"]
    with monkeypatch.context() as patched:
        patched.setattr(lab, "draw_all", lambda results: [])  # takes seconds, which the next command spends
        assert main(["lab", "run", "--methods", "grpo, stabledrl", *options]) == 0

    screen = capfd.readouterr().out
    for text in ("sft_seed0", "stabledrl_stress_seed0", "The paper's claims, at this scale", "Written: lab/report.md"):
        assert text in screen
    folder = tmp_path / "lab"
    assert sorted(path.name for path in folder.iterdir()) == ["lab.json", "report.html", "report.md", "runs", "sft"]
    assert main(["lab", "plot", "lab"]) == 0
    assert (folder / "figures" / "reward.png").is_file()
    capfd.readouterr()
    assert main(["lab", "report", "lab", "--json"]) == 0
    (line,) = capfd.readouterr().out.splitlines()
    found = json.loads(line)
    assert {method: set(regimes) for method, regimes in found.items()} == {
        name: {"normal", "stress"} for name in ("grpo", "stabledrl")
    }
    for regimes in found.values():
        for numbers in regimes.values():
            assert list(numbers) == ["accuracy_before", "accuracy_after", "peak_grad_norm", "collapsed"]


def test_json_is_one_line_and_writes_nothing(tmp_path, capsys):
    made_up(tmp_path / "lab", RUNS)
    before = sorted(tmp_path.rglob("*"))

    assert main(["lab", "report", "lab", "--json"]) == 0

    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["grpo"]["normal"] == {
        "accuracy_before": 0.4, "accuracy_after": 0.0, "peak_grad_norm": 1e18, "collapsed": True,
    }  # fmt: skip
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--methods", "grpo,stabeldrl", "--out", "lab"], "'stabeldrl' is not one of grpo"),
        (["run", "--seeds", "0", "--out", "lab"], "num_seeds=0"),
        (["run", "--methods", "grpo", "--out", "full"], "is not empty and holds no lab.json"),
        (["run", "--methods", "grpo", "--out", "lab", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["run", "--methods", "grpo"], "--out"),
        (["report", "nowhere"], "holds no lab.json"),
        (["report", "empty"], "holds no finished run yet"),
        (["paint"], "paint"),
        ([], "required"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lab_protocol, "do_sft", lambda *_: pytest.fail("something ran"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    made_up(tmp_path / "empty", {})

    assert main(["lab", *words]) == 2

    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert message in error
    assert not (tmp_path / "lab").exists()
