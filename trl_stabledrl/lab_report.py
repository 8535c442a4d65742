# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What the runs of the stability lab come to: a table, the paper's claims decided from the metrics, and a report."""

import base64
import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

LAB_FILE = "lab.json"
"""The setting that the runs of a folder have in common."""

REGIMES = ("normal", "stress")
Verdict = Literal["reproduced", "partly", "not", "not run"]

LABELS = {
    "grpo": "GRPO, sequence ratio",
    "clip_only": "clip only",
    "self_norm_only": "self-normalisation only",
    "stabledrl": "StableDRL, ε = 5",
    "stabledrl_eps1": "StableDRL, ε = 1",
    "stabledrl_eps100": "StableDRL, ε = 100",
    "stabledrl_eps1000": "StableDRL, ε = 1000",
    "espo": "ESPO, per-token mean",
    "spg": "no ratio (SPG's weights)",
    "grpo_shared": "GRPO, shared masks",
    "grpo_token": "GRPO, per-token mean",
}
EPSILONS = {"stabledrl_eps1": 1, "stabledrl": 5, "stabledrl_eps100": 100, "stabledrl_eps1000": 1000}

MARGIN = 0.05
"""Accuracies closer than this are called alike: with 512 prompts and 3 seeds a standard error is about 0.013, and
seeds differ by more."""


@dataclass(frozen=True)
class Claim:
    """
    A sentence of the paper and what the runs say to it.

    Attributes:
        text (`str`):
            The claim.
        verdict (`str`):
            `"reproduced"`, `"partly"`, `"not"`, or `"not run"` where a method it needs is missing.
        rule (`str`):
            How the verdict was decided.
        evidence (`str`):
            The numbers.
    """

    text: str
    verdict: Verdict
    rule: str
    evidence: str


class Results:
    """
    The finished runs of a folder.

    Args:
        folder (`pathlib.Path`):
            Folder of the lab.
    """

    def __init__(self, folder: Path):
        if not (folder / LAB_FILE).is_file():
            raise ValueError(f"{folder} holds no {LAB_FILE}: it is no folder of `trl-stabledrl lab run --out`.")
        self.folder = folder
        self.setting: dict[str, Any] = json.loads((folder / LAB_FILE).read_text())
        self.runs: list[dict[str, Any]] = _results(folder / "runs")
        self.sft: list[dict[str, Any]] = _results(folder / "sft")
        self.variance: list[dict[str, Any]] = _results(folder / "variance")
        order = list(self.setting["methods"])
        self.runs.sort(key=lambda run: (order.index(run["method"]), run["regime"], run["seed"]))
        self.methods = list(dict.fromkeys(run["method"] for run in self.runs))
        self.seeds = sorted({run["seed"] for run in self.runs})
        self.log = cache(self._log)

    def of(self, method: str, regime: str) -> list[dict[str, Any]]:
        """Runs of a method under a regime, by seed."""
        return [run for run in self.runs if (run["method"], run["regime"]) == (method, regime)]

    def _log(self, method: str, regime: str, seed: int) -> list[dict[str, Any]]:
        path = self.folder / "runs" / f"{method}_{regime}_seed{seed}" / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def logs(self, method: str, regime: str) -> list[list[dict[str, Any]]]:
        """Logged steps of each seed."""
        return [self.log(method, regime, run["seed"]) for run in self.of(method, regime)]

    def mean(self, method: str, regime: str, name: str) -> float:
        """Mean over seeds of a number in `result.json`."""
        return _mean(float(run[name]) for run in self.of(method, regime))

    def logged(self, method: str, regime: str, name: str, *, part: str = "all") -> float:
        """Mean over seeds of a metric over the steps with signal: all of them, or their first or last quarter."""
        means = []
        for log in self.logs(method, regime):
            steps = [row for row in log if row.get("update/negative_share") is not None]
            quarter = max(len(steps) // 4, 1)
            chosen = {"all": steps, "first": steps[:quarter], "last": steps[-quarter:]}[part]
            values = [row[name] for row in chosen if row.get(name) is not None]
            if values:
                means.append(_mean(values))
        return _mean(means)

    def collapsed(self, method: str, regime: str) -> int:
        """Seeds that collapsed."""
        return sum(run["collapsed"] for run in self.of(method, regime))

    def has(self, *methods: str, regimes: Sequence[str] = REGIMES) -> bool:
        """Whether there are runs of all these methods under all these regimes."""
        return all(self.of(method, regime) for method in methods for regime in regimes)


def _results(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.glob("*/result.json"))
    return [json.loads(path.read_text()) for path in paths if path.parent.suffix != ".partial"]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else math.nan


def summary(results: Results) -> dict[str, dict[str, dict[str, Any]]]:
    """
    What `lab report --json` prints: means over seeds, and collapsed where most of them did.

    Returns:
        `dict`:
            Per method and regime `accuracy_before`, `accuracy_after`, `peak_grad_norm` and `collapsed`.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for method in results.methods:
        for regime in REGIMES:
            runs = results.of(method, regime)
            if runs:
                names = ("accuracy_before", "accuracy_after", "peak_grad_norm")
                numbers: dict[str, Any] = {name: results.mean(method, regime, name) for name in names}
                numbers["collapsed"] = 2 * results.collapsed(method, regime) > len(runs)
                found.setdefault(method, {})[regime] = numbers
    return found


HEADER = ("method", "noise", "accuracy after SFT", "final accuracy", "by seed", "peak gradient norm", "ratio p99",
          "ratio max", "collapsed")  # fmt: skip


def table_rows(results: Results) -> list[tuple[str, ...]]:
    """Rows of the table of results, in the order of [`HEADER`]."""
    rows = []
    for method in results.methods:
        for regime in REGIMES:
            runs = results.of(method, regime)
            if not runs:
                continue
            by_seed = " / ".join(f"{run['accuracy_after']:.2f}" for run in runs)
            rows.append(
                (
                    LABELS.get(method, method),
                    regime,
                    f"{results.mean(method, regime, 'accuracy_before'):.2f}",
                    f"{results.mean(method, regime, 'accuracy_after'):.2f}",
                    by_seed,
                    short(max(run["peak_grad_norm"] for run in runs)),
                    short(_geometric_mean(run["ratio_p99"] for run in runs)),
                    short(max(run["ratio_max"] for run in runs)),
                    f"{results.collapsed(method, regime)} of {len(runs)}",
                )
            )
    return rows


def _geometric_mean(values: Iterable[float]) -> float:
    return math.exp(_mean(math.log(max(value, 1e-300)) for value in values))


def short(value: float) -> str:
    """A number of any size in few characters."""
    if math.isnan(value):
        return "-"
    if value >= 3.4e38:
        return "overflow"
    return f"{value:.2f}" if value < 100.0 else f"{value:.0e}".replace("e+", "e")


def screen_table(results: Results) -> Table:
    """The table of results for a terminal of 80 columns."""
    table = Table(title=f"Stability lab, seeds: {len(results.seeds)}", box=None, padding=(0, 2, 0, 0))
    for name in ("method", "noise", "accuracy", "gradient", "ratio p99", "ratio max", "fell"):
        table.add_column(name, justify="left" if name in ("method", "noise") else "right", no_wrap=True)
    previous = ""
    keys = [(method, regime) for method in results.methods for regime in REGIMES if results.of(method, regime)]
    for (method, _), row in zip(keys, table_rows(results), strict=True):
        _, regime, before, after, _, peak, p99, largest, collapsed = row
        ending = Text(collapsed.replace(" of ", "/"), "green" if collapsed.startswith("0 ") else "red")
        name = "" if method == previous else method
        table.add_row(name, regime, f"{before} > {after}", peak, p99, largest, ending)
        previous = method
    table.caption = (
        "accuracy after SFT > at the end, mean of seeds; largest gradient norm and ratio of any step; "
        "p99 of a median step; fell: seeds that collapsed"
    )
    return table


def run_line(name: str, result: dict[str, Any]) -> Text:
    """One line on a job that is done."""
    start = f"{name:<30}  "  # the longest name, so that lines align in 80 columns
    if "accuracy_after" in result:
        numbers = f"{result['accuracy_before']:.2f} > {result['accuracy_after']:.2f}"
        ending = Text("  collapsed", "red") if result["collapsed"] else Text("")
        peak = f"gradient {short(result['peak_grad_norm'])}"
        return Text.assemble(f"{start}{numbers}  {peak:<17}  {result['seconds']:4.0f} s", ending)
    if "accuracy" in result:
        return Text(f"{start}{result['accuracy']['sampled']:.2f}  {'':23}  {result['seconds']:4.0f} s")
    return Text(f"{start}done")


# The paper's claims


def claims(results: Results) -> list[Claim]:
    """
    Decide each claim from the metrics.

    Args:
        results ([`Results`]):
            The runs.

    Returns:
        `list[Claim]`
    """
    found = [
        _grpo_collapses(results),
        _spikes_follow(results),
        _loop(results),
        _clip_saturates(results),
        _outlier_rules(results),
        _both_stable(results),
        _epsilon_five(results),
        _epsilon_large(results),
    ]
    return found


def _missing(text: str) -> Claim:
    return Claim(text, "not run", "", "")


def _accuracies(results: Results, *methods: str) -> str:
    parts = []
    for method in methods:
        numbers = ", ".join(
            f"{regime} {results.mean(method, regime, 'accuracy_before'):.2f} to "
            f"{results.mean(method, regime, 'accuracy_after'):.2f} "
            f"({results.collapsed(method, regime)} of {len(results.of(method, regime))} collapsed)"
            for regime in REGIMES
            if results.of(method, regime)
        )
        parts.append(f"{LABELS.get(method, method)}: {numbers}")
    return "; ".join(parts)


def _most(results: Results, method: str, regime: str) -> bool:
    return 2 * results.collapsed(method, regime) > len(results.of(method, regime))


def _peaks(results: Results, method: str) -> str:
    numbers = [short(max(run["peak_grad_norm"] for run in results.of(method, regime))) for regime in REGIMES]
    return f"{LABELS[method]} {' and '.join(numbers)}"


def _grpo_collapses(results: Results) -> Claim:
    text = "Under noisy ratios GRPO's gradients spike and the run collapses."
    if not results.has("grpo", "stabledrl"):
        return _missing(text)
    num = sum(_most(results, "grpo", regime) for regime in REGIMES)
    spikes = all(
        max(run["peak_grad_norm"] for run in results.of("grpo", regime))
        > 100.0 * max(run["peak_grad_norm"] for run in results.of("stabledrl", regime))
        for regime in REGIMES
    )
    verdict: Verdict = "reproduced" if num == 2 and spikes else "partly" if num or spikes else "not"
    return Claim(
        text,
        verdict,
        "most seeds collapse under both regimes, and the largest gradient norm is over 100 times StableDRL's",
        f"{_accuracies(results, 'grpo')}. Largest gradient norm, normal and stress: {_peaks(results, 'grpo')}, "
        f"{_peaks(results, 'stabledrl')}.",
    )


def correlation(results: Results, method: str) -> float:
    """Correlation of log10 of the largest ratio and log10 of the gradient norm over the steps of all runs."""
    pairs = ratio_and_gradient(results, method, REGIMES)
    if len(pairs) < 2:
        return math.nan
    mean_x, mean_y = _mean(x for x, _ in pairs), _mean(y for _, y in pairs)
    xy = sum((x - mean_x) * (y - mean_y) for x, y in pairs)
    xx, yy = sum((x - mean_x) ** 2 for x, _ in pairs), sum((y - mean_y) ** 2 for _, y in pairs)
    return xy / math.sqrt(xx * yy) if xx and yy else 0.0


def ratio_and_gradient(results: Results, method: str, regimes: Iterable[str]) -> list[tuple[float, float]]:
    """log10 of the largest ratio and of the gradient norm, of each step with a gradient."""
    return [
        (math.log10(row["ratio/max"]), math.log10(row["grad_norm"]))
        for regime in regimes
        for log in results.logs(method, regime)
        for row in log
        if row.get("ratio/max") and row.get("grad_norm") and row["grad_norm"] < 3.4e38
    ]


def _spikes_follow(results: Results) -> Claim:
    text = "Gradient spikes come from ratio spikes; clip and normalisation cut the link."
    if not results.has("grpo", "stabledrl"):
        return _missing(text)
    linked, cut = correlation(results, "grpo"), correlation(results, "stabledrl")
    verdict: Verdict = "reproduced" if linked > 0.5 and cut < 0.3 else "partly" if linked > cut + 0.1 else "not"
    return Claim(
        text,
        verdict,
        "correlation of log10 ratio and log10 gradient norm over steps above 0.5 for GRPO, below 0.3 for StableDRL",
        f"Correlation {linked:.2f} for GRPO, {cut:.2f} for StableDRL.",
    )


def _growth(results: Results, method: str, regime: str, name: str) -> float:
    return results.logged(method, regime, name, part="last") / results.logged(method, regime, name, part="first")


def _loop(results: Results) -> Claim:
    text = "Noise and drift feed each other: in a collapse the policy's drift and the spread of its ratios grow."
    if not results.has("grpo"):
        return _missing(text)
    drift = [_growth(results, "grpo", regime, "drift") for regime in REGIMES]
    spread = [_growth(results, "grpo", regime, "log_ratio/std_centred") for regime in REGIMES]
    is_drifting, is_spreading = min(drift) > 1.5, min(spread) > 1.5
    verdict: Verdict = "reproduced" if is_drifting and is_spreading else "partly" if max(drift) > 1.5 else "not"
    return Claim(
        text,
        verdict,
        "both grow by half or more from the first to the last quarter of GRPO's steps with signal, in both regimes",
        f"Drift times {drift[0]:.2f} (normal) and {drift[1]:.2f} (stress); spread of the log-ratio within groups "
        f"times {spread[0]:.2f} and {spread[1]:.2f}.",
    )


def _worse(results: Results, method: str, than: str) -> list[bool]:
    return [
        results.mean(method, regime, "accuracy_after") < results.mean(than, regime, "accuracy_after") - MARGIN
        for regime in REGIMES
    ]


def _ablation(text: str, results: Results, method: str, is_seen: bool, rule: str, numbers: str) -> Claim:
    worse = _worse(results, method, "stabledrl")
    verdict: Verdict = "reproduced" if is_seen and all(worse) else "partly" if is_seen or any(worse) else "not"
    return Claim(
        text,
        verdict,
        f"{rule}, and the final accuracy is more than {MARGIN} below StableDRL's under both regimes",
        f"{numbers} {_accuracies(results, method, 'stabledrl')}.",
    )


def _clip_saturates(results: Results) -> Claim:
    text = "The clip alone is not enough: weights saturate at its bound."
    if not results.has("clip_only", "stabledrl"):
        return _missing(text)
    saturated = [results.logged("clip_only", regime, "weights/saturated") for regime in REGIMES]
    rule = "a quarter of the weights or more are at the bound under stress"
    numbers = f"At the bound: {saturated[0]:.0%} of the weights (normal), {saturated[1]:.0%} (stress)."
    return _ablation(text, results, "clip_only", saturated[1] >= 0.25, rule, numbers)


def _outlier_rules(results: Results) -> Claim:
    text = "Self-normalisation alone is not enough: one outlier rules its group."
    if not results.has("self_norm_only", "stabledrl"):
        return _missing(text)
    alone = [results.logged("self_norm_only", regime, "weights/ess") for regime in REGIMES]
    both = [results.logged("stabledrl", regime, "weights/ess") for regime in REGIMES]
    size = int(results.setting["setting"]["rl"]["num_generations"])
    rule = "the effective sample size is below 2 completions in both regimes"
    numbers = (
        f"Effective sample size of {size}: {alone[0] * size:.1f} and {alone[1] * size:.1f} completions (normal, "
        f"stress), StableDRL {both[0] * size:.1f} and {both[1] * size:.1f}."
    )
    return _ablation(text, results, "self_norm_only", max(alone) * size < 2.0, rule, numbers)


def _both_stable(results: Results) -> Claim:
    text = "Both together are stable, even under stress."
    if not results.has("stabledrl"):
        return _missing(text)
    names = [name for name in ("stabledrl", "stabledrl_eps1") if results.has(name)]
    num = {name: sum(results.collapsed(name, regime) for regime in REGIMES) for name in names}
    peak = max(run["peak_grad_norm"] for name in names for regime in REGIMES for run in results.of(name, regime))
    verdict: Verdict = (
        "reproduced" if not any(num.values()) and peak < 100 else "partly" if 0 in num.values() else "not"
    )
    return Claim(
        text,
        verdict,
        "no seed of ε = 1 and ε = 5 collapses under either regime, and no gradient norm exceeds 100",
        f"{_accuracies(results, *names)}. Largest gradient norm {short(peak)}.",
    )


def _epsilon_five(results: Results) -> Claim:
    text = "ε = 1 and ε = 5 are stable, and ε = 5 is the better one."
    if not results.has("stabledrl", "stabledrl_eps1"):
        return _missing(text)
    is_stable = not any(_most(results, name, regime) for name in ("stabledrl", "stabledrl_eps1") for regime in REGIMES)
    is_better = all(_worse(results, "stabledrl_eps1", "stabledrl"))
    verdict: Verdict = "reproduced" if is_stable and is_better else "partly" if is_stable or is_better else "not"
    return Claim(
        text,
        verdict,
        f"most seeds of both stay up, and ε = 5 ends more than {MARGIN} above ε = 1 under both regimes",
        f"{_accuracies(results, 'stabledrl_eps1', 'stabledrl')}.",
    )


def _epsilon_large(results: Results) -> Claim:
    text = "ε = 100 and ε = 1000 collapse."
    names = ("stabledrl_eps100", "stabledrl_eps1000")
    if not results.has(*names, "stabledrl"):
        return _missing(text)
    falls = [any(_most(results, name, regime) for regime in REGIMES) for name in names]
    worse = [any(_worse(results, name, "stabledrl")) for name in names]
    verdict: Verdict = "reproduced" if all(falls) else "partly" if any(falls) or any(worse) else "not"
    return Claim(
        text,
        verdict,
        "most seeds of each collapse under at least one regime; partly where they end lower than ε = 5",
        f"{_accuracies(results, *names)}.",
    )


def _ending(results: Results, method: str) -> str:
    regimes = [regime for regime in REGIMES if results.of(method, regime)]
    falls = [regime for regime in regimes if _most(results, method, regime)]
    return f"collapses ({' and '.join(falls)})" if falls else "does not collapse"


def findings(results: Results) -> list[str]:
    """What the runs show beside the claims, or against them."""
    found = []
    if results.has("grpo_shared", "grpo", regimes=["normal"]):
        found.append(
            f"**GRPO with masks shared between old and new scores** {_ending(results, 'grpo_shared')}: "
            f"{_accuracies(results, 'grpo_shared')}; with masks of their own it {_ending(results, 'grpo')}: "
            f"{_accuracies(results, 'grpo')}."
        )
    if results.has("grpo_token") or results.has("espo"):
        names = [name for name in ("grpo_token", "espo") if results.has(name)]
        endings = " and ".join(dict.fromkeys(_ending(results, name) for name in names))
        found.append(
            f"**GRPO with the mean per token** in place of the sum {endings}: {_accuracies(results, *names)}."
        )
    if results.has("spg", "stabledrl", regimes=["normal"]):
        gap = results.mean("spg", "normal", "accuracy_after") - results.mean("stabledrl", "normal", "accuracy_after")
        found.append(
            f"**No ratio at all** ends {gap:+.2f} from StableDRL with ε = 5 under normal noise: "
            f"{_accuracies(results, 'spg')}. (It has no old score: under stress only its own score is affected.)"
        )
    if results.has("stabledrl", "stabledrl_eps1"):
        gaps = [
            results.mean("stabledrl_eps1", regime, "accuracy_after")
            - results.mean("stabledrl", regime, "accuracy_after")
            for regime in REGIMES
        ]
        found.append(f"**ε = 1 against ε = 5**: {gaps[0]:+.2f} (normal), {gaps[1]:+.2f} (stress) final accuracy.")
    if results.has("grpo"):
        spread = [
            [results.logged("grpo", regime, "log_ratio/std_centred", part=part) for part in ("first", "last")]
            for regime in REGIMES
        ]
        found.append(
            "**Spread of GRPO's log-ratio within groups**, first and last quarter of the steps with signal: "
            f"{spread[0][0]:.2f} to {spread[0][1]:.2f} nats (normal), {spread[1][0]:.2f} to {spread[1][1]:.2f} nats "
            "(stress)."
        )
    shares = []
    for method in ("grpo", "clip_only", "self_norm_only", "stabledrl", "stabledrl_eps1"):
        if results.has(method, regimes=["normal"]):
            negative, largest = (
                results.logged(method, "normal", f"update/{name}") for name in ("negative_share", "max_share")
            )
            shares.append(f"{LABELS[method]} {negative:.0%} and {largest:.0%}")
    if shares:
        found.append(
            "**Who makes the update**: share of its weight on completions with negative advantage, and share of the "
            f"largest one, normal noise: {'; '.join(shares)}."
        )
    if results.has("grpo", regimes=["normal"]):
        silent = _mean(
            float(row.get("grad_norm") == 0.0)
            for log in results.logs("grpo", "normal")
            for row in log[-max(len(log) // 4, 1) :]
        )
        found.append(
            f"**Steps without any gradient**, since every group has equal rewards: {silent:.0%} in the last quarter "
            "of GRPO's runs, normal noise. Where no completion is right there is no way back."
        )
    return found + _guard_findings(results) + _variance_findings(results)


def _guard_findings(results: Results) -> list[str]:
    runs = [run for run in results.runs if "warnings" in run]
    if not runs:
        return []
    fell = [run for run in runs if run["collapsed"]]
    warned = [run for run in runs if any(warning["is_fatal"] for warning in run["warnings"])]
    both = [run for run in fell if run in warned]
    steps = sorted(min(w["step"] for w in run["warnings"] if w["is_fatal"]) for run in both)
    median = f", at step {steps[len(steps) // 2]} in the median" if steps else ""
    return [
        f"**The guard** warned of a fatal cause in {len(both)} of the {len(fell)} runs that collapsed{median}, and in "
        f"{len(warned) - len(both)} of the {len(runs) - len(fell)} that did not. (Its thresholds were set on this "
        "protocol, so these counts flatter it.)"
    ]


def _variance_findings(results: Results) -> list[str]:
    numbers = {key: variance for key, (variance, _) in variance_means(results).items()}
    found = []
    for updates in sorted({key[0] for key in numbers}):

        def of(coupling: str, sharing: str, sampling: str, updates: int = updates) -> float:
            return numbers[updates, coupling, sharing, sampling]

        base = of("shared", "none", "independent")
        cuts = {
            "complementary pairs": of("shared", "none", "complementary"),
            "stratified counts": of("shared", "none", "stratified"),
            "masks shared within a group": of("shared", "group", "independent"),
            "these with complementary pairs": of("shared", "group", "complementary"),
        }
        parts = ", ".join(f"{name} {1 - value / base:.0%}" for name, value in cuts.items())
        found.append(
            f"**Variance of the log-ratio after {updates} updates**: sharing masks between old and new scores divides "
            f"it by {of('independent', 'none', 'independent') / base:.0f}; of what is left, {parts} less."
        )
    return found


VARIANCE_HEADER = ("updates", "old and new masks", "within a group", "draws", "variance", "of it from masks",
                   "relative to the first")  # fmt: skip


def variance_rows(results: Results) -> list[tuple[str, ...]]:
    """Rows of the table of log-ratio variances, means over seeds, in the order of [`VARIANCE_HEADER`]."""
    numbers = variance_means(results)
    first: dict[int, float] = {}
    rows = []
    for (updates, coupling, sharing, sampling), (variance, noise) in numbers.items():
        base = first.setdefault(updates, variance)
        names = (str(updates), coupling, {"none": "each its own", "group": "shared"}[sharing], sampling)
        rows.append((*names, f"{variance:.4f}", f"{noise:.4f}", f"{variance / base:.4f}"))
    return rows


def variance_means(results: Results) -> dict[tuple[int, str, str, str], tuple[float, float]]:
    """Mean over seeds of variance and noise, per number of updates and scheme."""
    found: dict[tuple[int, str, str, str], list[tuple[float, float]]] = {}
    for result in results.variance:
        for row in result["rows"]:
            key = (row["updates"], row["coupling"], row["sharing"], row["sampling"])
            found.setdefault(key, []).append((row["variance"], row["noise"]))
    order = sorted(found, key=lambda key: (key[0], key[1] != "independent", key[2] != "none"))
    return {key: (_mean(v for v, _ in found[key]), _mean(n for _, n in found[key])) for key in order}


# The report, as Markdown and as one HTML file


def blocks(results: Results, figures: Sequence[tuple[str, str]]) -> list[tuple[str, Any]]:
    """
    The report as a list of headings, paragraphs, tables and pictures.

    Args:
        results ([`Results`]):
            The runs.
        figures (`Sequence[tuple[str, str]]`):
            File in `figures/` and caption of each picture.

    Returns:
        `list[tuple[str, Any]]`:
            Kind (`"h1"`, `"h2"`, `"p"`, `"list"`, `"table"`, `"figure"`) and content.
    """
    rl = results.setting["setting"]["rl"]
    size = results.sft[0]["num_parameters"] if results.sft else 0
    stress = results.setting["stress"]
    found: list[tuple[str, Any]] = [
        ("h1", "Stability lab"),
        (
            "p",
            f"A model of {size:,} parameters learns `{results.setting['setting']['task']}`: supervised first, once "
            f"per seed, then {rl['max_steps']} steps by each method from the same start. {len(results.seeds)} seeds. "
            f"{rl['per_device_train_batch_size'] // rl['num_generations']} prompts x {rl['num_generations']} "
            f"completions, {rl['num_iterations']} inner iterations, learning rate {rl['learning_rate']:g}, "
            f"{rl['num_mc_samples']} draw, {rl['mask_coupling']} masks, log-ratio per {rl['ratio_normalization']}, "
            "unless the method is defined otherwise. Accuracy: share of held-out prompts answered right, sampled at "
            "temperature 1. A run has *collapsed* if it ends below a quarter of the accuracy after supervised "
            f"training. *Stress*: for {stress.get('share', 0.7):.0%} of each group the new score is made with "
            f"{stress.get('easy_rate', 0.1):.0%} of the tokens masked, the old one with "
            f"{stress.get('hard_rate', 0.9):.0%}.",
        ),
        (
            "p",
            "These are the results of one small model on one task. They say what happens here, and not what happens "
            "at 8 billion parameters.",
        ),
        ("h2", "The paper's claims, at this scale"),
        (
            "table",
            (
                ("claim", "here", "numbers", "rule"),
                [(claim.text, f"**{claim.verdict}**", claim.evidence, claim.rule) for claim in claims(results)],
            ),
        ),
        ("h2", "What else the runs show"),
        ("list", findings(results)),
        ("h2", "Results"),
        (
            "p",
            "Means over seeds; gradient norm (before clipping) and largest ratio are maxima over steps and seeds, p99 "
            "is the median over steps of each step's 99th percentile, *overflow* is beyond float32.",
        ),
        ("table", (HEADER, table_rows(results))),
    ]
    if results.variance:
        num_draws = results.variance[0]["num_mc_samples"]
        found += [
            ("h2", "Spread of the log-ratio by how masks are drawn and shared"),
            (
                "p",
                f"Variance within groups of the summed log-ratio, in nats², {num_draws} draws, of completions of the "
                "supervised model after a few updates of StableDRL (ε = 1); the part from masks is what changes when "
                "the masks are drawn again. Divided by the squared length it is that of the mean per token.",
            ),
            ("table", (VARIANCE_HEADER, variance_rows(results))),
        ]
    if figures:
        found.append(("h2", "Figures"))
        found += [("figure", figure) for figure in figures]
    return found


def as_markdown(report: list[tuple[str, Any]]) -> str:
    """Render the report as Markdown; pictures are linked."""
    parts = []
    for kind, content in report:
        match kind:
            case "h1" | "h2":
                parts.append(f"{'#' * int(kind[1])} {content}")
            case "p":
                parts.append(content)
            case "list":
                parts.append("\n".join(f"- {item}" for item in content))
            case "table":
                header, rows = content
                lines = [header, ["---"] * len(header), *rows]
                parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
            case "figure":
                name, caption = content
                parts.append(f"![{caption}](figures/{name})\n\n{caption}")
    return "\n\n".join(parts) + "\n"


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #1d2329; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #d8dee4; padding-bottom: .3rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; }
th, td { border: 1px solid #d8dee4; padding: .35rem .6rem; text-align: left; vertical-align: top; }
th { background: #f3f5f7; } code { background: #f3f5f7; padding: 0 .25em; }
img { max-width: 100%; } figure { margin: 1.5rem 0; } figcaption { color: #57606a; font-size: 13.5px; }
.reproduced { color: #0b6e4f; } .partly { color: #9a6700; } .not { color: #b3261e; }
"""


def as_html(report: list[tuple[str, Any]], folder: Path) -> str:
    """Render the report as one file that needs nothing else: pictures are inside."""
    parts = []
    for kind, content in report:
        match kind:
            case "h1" | "h2":
                parts.append(f"<{kind}>{html.escape(content)}</{kind}>")
            case "p":
                parts.append(f"<p>{_inline(content)}</p>")
            case "list":
                parts.append("<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in content) + "</ul>")
            case "table":
                header, rows = content
                lines = ["<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in header) + "</tr>"]
                lines += ["<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>" for row in rows]
                parts.append(f'<div class="scroll"><table>{"".join(lines)}</table></div>')
            case "figure":
                name, caption = content
                data = base64.b64encode((folder / "figures" / name).read_bytes()).decode()
                text = html.escape(caption, quote=True)
                parts.append(
                    f'<figure><img alt="{text}" src="data:image/png;base64,{data}">'
                    f"<figcaption>{text}</figcaption></figure>"
                )
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Stability lab</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _inline(text: str) -> str:
    """The Markdown that the report uses inside a line: `**bold**`, `*emphasis*` and code."""
    escaped = html.escape(text)
    for verdict in ("reproduced", "partly", "not", "not run"):
        escaped = escaped.replace(f"**{verdict}**", f'<strong class="{verdict.split()[0]}">{verdict}</strong>')
    for mark, tag in (("**", "strong"), ("*", "em"), ("`", "code")):
        pieces = escaped.split(mark)
        for index in range(1, len(pieces) - 1, 2):
            pieces[index] = f"<{tag}>{pieces[index]}</{tag}>"
        escaped = "".join(pieces)
    return escaped


def write_report(results: Results, figures: Sequence[tuple[str, str]]) -> list[Path]:
    """
    Write `report.md` and `report.html`.

    Args:
        results ([`Results`]):
            The runs.
        figures (`Sequence[tuple[str, str]]`):
            File in `figures/` and caption of each picture.

    Returns:
        `list[pathlib.Path]`
    """
    report = blocks(results, figures)
    paths = [results.folder / "report.md", results.folder / "report.html"]
    paths[0].write_text(as_markdown(report))
    paths[1].write_text(as_html(report, results.folder))
    return paths
