# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""The stability lab: its stress test, that runs resume, and that claims are decided by the numbers."""

import json
import math
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.lab_tools import RECIPE, made_up, small_recipe, step_of
from tests.trainer_tools import config_of, letter_tokenizer, prompts_of, tiny_model
from trl_stabledrl import lab_protocol
from trl_stabledrl.lab import (
    LARGEST,
    LabConfig,
    LabRun,
    Stress,
    StressTrainer,
    _spread,
    as_json,
    check_stress,
    do_run,
    do_sft,
    variance_schemes,
)
from trl_stabledrl.lab_figures import draw_all
from trl_stabledrl.lab_protocol import _workers, run_protocol
from trl_stabledrl.lab_report import (
    Results,
    as_html,
    blocks,
    claims,
    correlation,
    findings,
    screen_table,
    summary,
    write_report,
)
from trl_stabledrl.likelihood import plan_masks

NOISY: dict[str, Any] = {"mask_coupling": "independent", "mc_sampling": "independent", "mask_law": "uniform"}


def quiet() -> Console:
    return Console(file=StringIO(), width=100)


# The stress test


def test_the_first_share_of_each_group_is_easy_when_new_and_hard_when_old():
    stress, row_index = Stress(share=0.7, easy_rate=0.1, hard_rate=0.9), torch.arange(8, 24)

    new = stress.mask_rate(row_index, group_size=8, is_old=False)
    old = stress.mask_rate(row_index[8:12], group_size=8, is_old=True)

    nan = math.nan  # 0.7 * 8 = 5.6, so 6 of 8
    torch.testing.assert_close(new, torch.tensor([0.1] * 6 + [nan] * 2 + [0.1] * 6 + [nan] * 2), equal_nan=True)
    torch.testing.assert_close(old, torch.full((4,), 0.9))


def test_old_scores_see_nearly_nothing_and_new_ones_nearly_all(tmp_path):
    args = config_of(tmp_path, **NOISY, num_mc_samples=1, max_steps=2, num_iterations=2)
    trainer = StressTrainer(
        tiny_model(),
        lambda completion_ids, **_: [float(sum(ids) % 3) for ids in completion_ids],
        args,
        prompts_of(),
        stress=Stress(share=0.5, easy_rate=0.01, hard_rate=1.0),
        processing_class=letter_tokenizer(),
    )
    shares: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    rows_of = trainer._rows

    def watched(batch):
        rows = rows_of(batch)
        is_noised = plan_masks(rows, trainer.likelihood_settings).is_noised[:, 0]
        is_stressed = (batch["row_index"] % 4 < 2) & (rows.completion_length > 1)
        shares["iteration" not in batch].append((is_noised.sum(-1) / rows.completion_length)[is_stressed])
        return rows

    trainer._rows = watched
    trainer.train()

    old, new = torch.cat(shares[True]), torch.cat(shares[False])
    assert len(old)
    assert (old == 1.0).all()
    assert len(new)
    assert (new <= 0.5).all()  # one token, of at least two


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_coupling": "shared"}, r"mask_coupling='shared' leaves the stress test .*'independent'"),
        ({"mc_sampling": "stratified"}, r"mc_sampling='stratified' leaves the stress test"),
        ({"beta": 0.1}, r"beta=0.1 leaves the stress test"),
    ],
)
def test_stress_needs_masks_of_its_own(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        check_stress(config_of(tmp_path, **NOISY | {"num_mc_samples": 2} | options))
    check_stress(config_of(tmp_path, objective="spg", mc_sampling="independent"))  # no ratio, no old score


def test_shares_of_the_stress_test_are_checked():
    with pytest.raises(ValueError, match=r"stress\.easy_rate=0\.0 must be above 0"):
        Stress(easy_rate=0.0)


# The protocol


def test_shipped_protocol_is_what_the_issue_asks_for():
    config = LabConfig.load(RECIPE)

    runs = config.runs()
    assert {run.seed for run in runs} == {0, 1, 2}
    assert {run.method for run in runs} == set(config.protocol)
    assert {"grpo", "clip_only", "self_norm_only", "stabledrl", "espo", "spg"} <= set(config.protocol)
    epsilons = {
        config.training_args(LabRun(name, "normal", 0), "x").epsilon
        for name in config.protocol
        if name.startswith("stabledrl")
    }
    assert epsilons == {1.0, 5.0, 100.0, 1000.0}
    without_stress = {run.method for run in runs} - {run.method for run in runs if run.regime == "stress"}
    assert without_stress == {"grpo_shared"}
    for method in config.methods:  # also those that are run on demand only
        LabConfig.load(RECIPE, methods=[method])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["grpo", "stabledrll"]}, r"methods: 'stabledrll' is not one of grpo, .*nearest .*'stabledrl'"),
        ({"methods": []}, r"methods is empty. Name at least one of grpo,"),
        ({"num_seeds": 0}, r"num_seeds=0 must be at least 1"),
    ],
)
def test_bad_requests_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        LabConfig.load(RECIPE, **changes)


def test_a_stopped_protocol_goes_on_where_it_was(tmp_path, monkeypatch):
    config = LabConfig.load(small_recipe(tmp_path), methods=["grpo", "stabledrl"], num_seeds=1)
    folder, real = tmp_path / "lab", lab_protocol.do_run
    made: list[str] = []

    def crashes_at_the_third(config, run, folder, report):
        made.append(run.name)
        if len(made) == 3:
            (folder / "runs" / f"{run.name}.partial").mkdir()
            raise RuntimeError("the power went out")
        return real(config, run, folder, report)

    monkeypatch.setattr(lab_protocol, "do_run", crashes_at_the_third)
    with pytest.raises(RuntimeError, match="power"):
        run_protocol(config, folder, num_processes=1, with_variance=False, console=quiet())
    kept = {path: path.stat().st_mtime_ns for path in (folder / "runs").glob("*/result.json")}
    assert len(kept) == 2
    screen = Console(file=StringIO(), width=100)
    run_protocol(config, folder, num_processes=1, with_variance=False, console=screen)

    assert made[3:] == [run.name for run in config.runs()][2:]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert "3 of 5 jobs are done already" in screen.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    results = Results(folder)
    assert len(results.runs) == 4
    assert not list(folder.rglob("*.partial"))
    for run in config.runs():
        log = results.log(run.method, run.regime, run.seed)
        assert [row["step"] for row in log] == [1, 2]
        assert {"update/negative_share", "update/max_share", "weights/ess", "grad_norm", "reward"} <= log[0].keys()
    # all runs of a seed start from one model, and the regimes differ in their masks alone
    assert len({run["accuracy_before"] for run in results.runs}) == 1
    first = {regime: results.log("grpo", regime, 0)[0] for regime in ("normal", "stress")}
    assert first["normal"]["reward"] == first["stress"]["reward"]
    assert first["normal"]["drift"] != first["stress"]["drift"]

    other = LabConfig.load(small_recipe(tmp_path, stress={"share": 0.5}), methods=["grpo"], num_seeds=1)
    with pytest.raises(ValueError, match=r"holds runs of another setting: stress differ"):
        run_protocol(other, folder, num_processes=1, console=quiet())
    with pytest.raises(ValueError, match=r"is not empty and holds no lab.json"):
        run_protocol(config, tmp_path, num_processes=1, console=quiet())
    with pytest.raises(ValueError, match=r"--processes 0 must be at least 1"):
        run_protocol(config, folder, num_processes=0, console=quiet())


def test_processes_run_jobs_and_print_into_a_file(tmp_path):
    with _workers(2, tmp_path) as (executor, steps):
        executor.submit(print, "from a worker", flush=True).result()
        executor.submit(steps.channel.put, "a step").result()  # not `steps`: the worker would import TRL for it

        assert steps.channel.get(timeout=60) == "a step"
    assert "from a worker\n" in (tmp_path / "workers.log").read_text()


def test_weights_that_are_no_numbers_are_a_result_and_other_errors_are_not(tmp_path, monkeypatch):
    config = LabConfig.load(small_recipe(tmp_path), methods=["grpo"], num_seeds=1)
    do_sft(config, 0, tmp_path, lambda *_: None)
    run = LabRun("grpo", "normal", 0)

    def fails(self, *, breaks_weights: bool):
        if breaks_weights:
            with torch.no_grad():
                next(self.model.parameters()).fill_(torch.nan)
        raise RuntimeError("all rows non-finite")

    monkeypatch.setattr("trl_stabledrl.lab.StableDRLTrainer.train", lambda self: fails(self, breaks_weights=False))
    with pytest.raises(RuntimeError, match="all rows"):
        do_run(config, run, tmp_path, lambda *_: None)
    monkeypatch.setattr("trl_stabledrl.lab.StableDRLTrainer.train", lambda self: fails(self, breaks_weights=True))
    result = do_run(config, run, tmp_path, lambda *_: None)

    assert (result["diverged_at"], result["accuracy_after"]) == (0, 0.0)


def test_files_are_strict_json():
    value = {"a": [math.inf, -math.inf, math.nan, 1.5], "b": "text"}

    assert as_json(value) == {"a": [LARGEST, -LARGEST, None, 1.5], "b": "text"}


def test_variance_is_measured_for_every_scheme(tmp_path):
    config = LabConfig.load(small_recipe(tmp_path), num_seeds=1)

    run_protocol(config, tmp_path / "lab", num_processes=1, with_runs=False, console=quiet())

    (result,) = Results(tmp_path / "lab").variance
    found = [(row["updates"], row["coupling"], row["sharing"], row["sampling"]) for row in result["rows"]]
    assert len(found) == len(set(found)) == 2 * 16
    assert {row[1:] for row in found} == set(variance_schemes("llada"))
    assert all(row["noise"] >= 0.0 and row["variance"] < math.inf for row in result["rows"])
    mean = {
        coupling: sum(row["variance"] for row in result["rows"] if row["coupling"] == coupling)
        for coupling in ("shared", "independent")
    }
    assert mean["shared"] < mean["independent"]


def test_spread_is_that_within_groups_and_noise_what_changes_with_the_masks():
    # two groups of two rows, two sets of masks: the second group is moved as a whole, which is no spread
    log_ratio = torch.tensor([[1.0, -1.0, 5.0, 5.0], [3.0, -3.0, 9.0, 9.0]])

    found = _spread(log_ratio, 2)

    assert found["variance"] == pytest.approx((2 * 1 + 2 * 9) / 8)
    assert found["noise"] == pytest.approx((1 + 1) / 4)  # 1 and 3 are 1 off their mean


# The report

PAPER = {
    "grpo": {"after": [0.0, 0.02, 0.0], "peak": 1e9},
    "clip_only": {"after": [0.3, 0.3, 0.3]},
    "self_norm_only": {"after": [0.2, 0.2, 0.2]},
    "stabledrl": {"after": [0.6, 0.6, 0.6]},
    "stabledrl_eps1": {"after": [0.5, 0.5, 0.5]},
    "stabledrl_eps100": {"after": [0.05, 0.05, 0.3]},
    "stabledrl_eps1000": {"after": [0.0, 0.0, 0.0]},
    "spg": {"after": [0.55, 0.55, 0.55]},
    "grpo_shared": {"after": [0.6, 0.6, 0.6], "regimes": ("normal",)},
}
PAPER_STEPS = {
    "grpo": [
        step_of(n, **{"ratio/max": 10.0**n, "grad_norm": 10.0**n, "drift": n, "log_ratio/std_centred": n})
        for n in range(1, 9)
    ],
    "clip_only": [step_of(n, **{"weights/saturated": 0.5}) for n in range(1, 9)],
    "self_norm_only": [step_of(n, **{"weights/ess": 0.15}) for n in range(1, 9)],
    "stabledrl": [step_of(n, **{"ratio/max": 10.0**n}) for n in range(1, 9)],
}


def test_runs_as_the_paper_tells_them_reproduce_it(tmp_path):
    found = claims(made_up(tmp_path, PAPER, steps=PAPER_STEPS))

    assert [claim.verdict for claim in found] == ["reproduced"] * 8
    assert all(claim.rule and claim.evidence for claim in found)


def test_runs_that_are_all_alike_reproduce_nothing_but_stability(tmp_path):
    alike = {method: {"after": [0.5, 0.5, 0.5]} for method in PAPER}

    found = {claim.text: claim.verdict for claim in claims(made_up(tmp_path, alike))}

    stable = {text for text, verdict in found.items() if verdict == "reproduced"}
    assert stable == {"Both together are stable, even under stress."}
    assert found["ε = 1 and ε = 5 are stable, and ε = 5 is the better one."] == "partly"
    assert list(found.values()).count("not") == 6


def test_missing_methods_are_said_to_be_missing(tmp_path):
    found = [claim.verdict for claim in claims(made_up(tmp_path, {"spg": PAPER["spg"]}))]

    assert found == ["not run"] * 8


def test_correlation_is_that_of_the_logarithms(tmp_path):
    steps = [
        step_of(n, **{"ratio/max": 10.0**x, "grad_norm": 10.0**y}) for n, (x, y) in enumerate([(0, 0), (1, 2), (2, 1)])
    ]

    results = made_up(tmp_path, {"grpo": PAPER["grpo"]}, steps={"grpo": steps})

    assert correlation(results, "grpo") == pytest.approx(0.5)  # covariance 1/3, variances 2/3


def test_summary_is_the_mean_of_the_seeds_and_the_vote_of_most(tmp_path):
    runs = {"grpo": {"after": [0.0, 0.05, 0.5], "peak": 7.0}, "stabledrl": {"after": [0.0, 0.5, 0.7]}}

    found = summary(made_up(tmp_path, runs))

    assert list(found) == ["grpo", "stabledrl"]
    assert found["grpo"].keys() == {"normal", "stress"}
    assert found["grpo"]["stress"] == {
        "accuracy_before": pytest.approx(0.4),
        "accuracy_after": pytest.approx(0.55 / 3),
        "peak_grad_norm": 7.0,
        "collapsed": True,
    }
    assert not found["stabledrl"]["normal"]["collapsed"]


def test_report_holds_verdicts_findings_tables_and_pictures(tmp_path):
    results = made_up(tmp_path, PAPER, steps=PAPER_STEPS)
    (tmp_path / "variance" / "seed0").mkdir(parents=True)
    rows = [
        {"updates": 2, "coupling": c, "sharing": s, "sampling": m, "variance": v, "noise": v / 2}
        for (c, s, m), v in zip(variance_schemes("llada"), range(16, 0, -1), strict=True)
    ]
    (tmp_path / "variance" / "seed0" / "result.json").write_text(
        json.dumps({"seed": 0, "num_mc_samples": 4, "rows": rows, "seconds": 1.0})
    )
    results = Results(tmp_path)

    figures = draw_all(results)
    markdown, page = (path.read_text() for path in write_report(results, figures))

    assert len(figures) == 8
    for name, caption in figures:
        assert (tmp_path / "figures" / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert f"![{caption}](figures/{name})" in markdown
    assert page.count("data:image/png;base64,") == 8
    assert 'src="http' not in page
    for text in [claim.text for claim in claims(results)]:
        assert text in markdown
    assert markdown.count("| **reproduced** |") == 8
    assert page.count('<strong class="reproduced">') == 8
    assert "No ratio at all" in markdown
    assert "| 2 | shared | shared | quadrature | 1.0000 | 0.5000 | 0.0625 |" in markdown
    assert "StableDRL, ε = 1000" in markdown


def test_findings_say_who_makes_the_update(tmp_path):
    steps = [step_of(n, **{"update/negative_share": 0.95, "update/max_share": 0.7}) for n in range(1, 9)]
    text = "\n".join(findings(made_up(tmp_path, PAPER, steps={"grpo": steps})))

    assert "GRPO, sequence ratio 95% and 70%" in text
    assert "StableDRL, ε = 5 50% and 10%" in text


def test_text_of_the_report_is_escaped(tmp_path):
    page = as_html([("p", "a < b & **bold** and `code`")], tmp_path)

    assert "<p>a &lt; b &amp; <strong>bold</strong> and <code>code</code></p>" in page


def test_terminal_table_fits_eighty_columns_with_the_longest_method(tmp_path):
    screen = StringIO()

    Console(file=screen, width=80).print(screen_table(made_up(tmp_path, PAPER)))

    assert "…" not in screen.getvalue()
    assert "stabledrl_eps1000" in screen.getvalue()
    assert "overflow" not in screen.getvalue()


def test_a_folder_without_a_lab_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no lab.json"):
        Results(Path(tmp_path))


def test_report_of_nothing_but_variance_has_no_verdicts_to_give(tmp_path):
    results = made_up(tmp_path, {})

    assert [kind for kind, _ in blocks(results, [])][0] == "h1"
