# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""The pictures of the stability lab; they need matplotlib."""

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .lab_report import EPSILONS, LABELS, REGIMES, Results, ratio_and_gradient, variance_means

COLORS = {
    "grpo": "#b3261e",
    "clip_only": "#d98200",
    "self_norm_only": "#7b4fb5",
    "stabledrl": "#0b6e4f",
    "stabledrl_eps1": "#4cb58c",
    "espo": "#2a6fb0",
    "spg": "#57606a",
}
"""Methods that every picture shows."""

TITLES = {"normal": "normal noise", "stress": "stress: easy new, hard old masks"}


def draw_all(results: Results) -> list[tuple[str, str]]:
    """
    Draw every picture that the runs allow into `figures/`.

    Args:
        results ([`~lab_report.Results`]):
            The runs.

    Returns:
        `list[tuple[str, str]]`:
            File and caption of each picture; empty without matplotlib.
    """
    if find_spec("matplotlib") is None:
        return []
    folder = results.folder / "figures"
    folder.mkdir(exist_ok=True)
    pictures: list[tuple[str, str, Callable[[Results, Path], bool]]] = [
        ("reward.png", "Reward of the rollouts: mean of seeds, smoothed over 9 steps, and their range.", _reward),
        (
            "grad_norm.png",
            "Gradient norm before clipping: median and range of the seeds that have a gradient.",
            _grad_norm,
        ),
        ("ratio_gradient.png", "Each step's largest ratio and its gradient norm.", _ratio_gradient),
        (
            "weights.png",
            "Weights at the clip's upper bound, and effective sample size, means of seeds. A line ends where no "
            "group has a signal left.",
            _weights,
        ),
        ("drift.png", "Mean absolute log-ratio, and its spread within groups, means of seeds.", _drift),
        (
            "update.png",
            "Who makes an update: share of its weight on completions with negative advantage, and on the largest one.",
            _update,
        ),
        ("epsilon.png", "StableDRL by the width of its clip: each seed, and the mean.", _epsilon),
        (
            "variance.png",
            "Variance of the log-ratio within groups, by coupling of old and new masks, sharing within a group, and "
            "how draws relate; the paler part is not the masks'.",
            _variance,
        ),
    ]
    return [(name, caption) for name, caption, picture in pictures if picture(results, folder / name)]


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display needed

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path, title: str) -> bool:
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.2)
        axis.title.set_size(10)
    figure.suptitle(title, size=12, weight="bold")
    figure.savefig(path, dpi=130)
    return True


def _handles(axes: Iterable[Any]) -> tuple[list[Any], list[str]]:
    """Handles and labels of the legend, each method once, whichever panels it is in."""
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    return list(found.values()), list(found)


def _legend(axis: Any, *, title: str | None = None) -> None:
    if axis.get_legend_handles_labels()[0]:  # a run that broke off at once has no line
        axis.legend(frameon=False, fontsize=8, title=title, title_fontsize=8)


def _methods(results: Results, *, wanted: Iterable[str] = COLORS) -> list[str]:
    return [method for method in wanted if method in results.methods]


def _curves(
    results: Results, method: str, regime: str, metric: str, *, window: int = 1
) -> tuple[list[int], list[list[float]]]:
    """Per step the values of the seeds, each smoothed on its own; steps without a value are left out."""
    by_step: dict[int, list[float]] = {}
    for log in results.logs(method, regime):
        rows = [(row["step"], row[metric]) for row in log if row.get(metric) is not None]
        values = [value for _, value in rows]
        half = window // 2
        for index, (step, _) in enumerate(rows):
            part = values[max(0, index - half) : index + half + 1]
            by_step.setdefault(step, []).append(sum(part) / len(part))
    steps = sorted(by_step)
    return steps, [by_step[step] for step in steps]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _panels(
    results: Results,
    path: Path,
    title: str,
    rows: Sequence[tuple[str, str]],
    *,
    window: int = 1,
    middle: Callable[[Sequence[float]], float] = _mean,
    has_band: bool = True,
    log: bool = False,
    methods: Iterable[str] = COLORS,
) -> bool:
    """A panel per metric and regime, a line per method."""
    found = _methods(results, wanted=methods)
    regimes = [regime for regime in REGIMES if any(results.of(method, regime) for method in found)]
    if not found or not regimes:
        return False
    figure = _figure(5.6 * len(regimes), 3.1 * len(rows) + 0.5)
    axes = figure.subplots(len(rows), len(regimes), squeeze=False, sharey="row")
    for row, (metric, label) in enumerate(rows):
        for column, regime in enumerate(regimes):
            axis = axes[row][column]
            for method in found:
                steps, values = _curves(results, method, regime, metric, window=window)
                if log:
                    pairs = [(s, [v for v in part if v > 0.0]) for s, part in zip(steps, values, strict=True)]
                    pairs = [(s, part) for s, part in pairs if part]
                    steps, values = [s for s, _ in pairs], [part for _, part in pairs]
                if not steps or not any(map(any, values)):  # a share of what it does not have
                    continue
                color = COLORS[method]
                axis.plot(steps, [middle(part) for part in values], color=color, linewidth=1.7, label=LABELS[method])
                if has_band:
                    low, high = [min(part) for part in values], [max(part) for part in values]
                    axis.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
            axis.set(xlabel="optimizer step", title=f"{label}, {TITLES[regime]}")
            if log:
                axis.set_yscale("log")
        if not log:
            axes[row][0].set_ylim(bottom=0)  # once both panels are drawn: it fixes the top that they share
    figure.legend(*_handles(axes.flat), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return _save(figure, path, title)


def _reward(results: Results, path: Path) -> bool:
    return _panels(results, path, "Reward", [("reward", "share right")], window=9)


def _grad_norm(results: Results, path: Path) -> bool:
    return _panels(results, path, "Gradient norm", [("grad_norm", "before clipping")], middle=_median, log=True)


def _weights(results: Results, path: Path) -> bool:
    rows = [("weights/saturated", "share at the upper bound"), ("weights/ess", "effective sample size / G")]
    methods = ("clip_only", "self_norm_only", "stabledrl", "stabledrl_eps1", "grpo")
    return _panels(results, path, "Weights", rows, window=9, has_band=False, methods=methods)


def _drift(results: Results, path: Path) -> bool:
    rows = [("drift", "mean |log-ratio|, nats"), ("log_ratio/std_centred", "spread within groups, nats")]
    methods = ("grpo", "clip_only", "self_norm_only", "stabledrl", "stabledrl_eps1", "espo")
    return _panels(results, path, "Drift and spread of the log-ratio", rows, window=9, has_band=False, methods=methods)


def _update(results: Results, path: Path) -> bool:
    rows = [("update/negative_share", "on negative advantages"), ("update/max_share", "on one completion")]
    methods = ("grpo", "clip_only", "self_norm_only", "stabledrl", "stabledrl_eps1")
    return _panels(results, path, "Shares of an update", rows, window=9, has_band=False, methods=methods)


def _ratio_gradient(results: Results, path: Path) -> bool:
    found = _methods(results, wanted=("grpo", "clip_only", "self_norm_only", "stabledrl"))
    regimes = [regime for regime in REGIMES if any(results.of(method, regime) for method in found)]
    if not found:
        return False
    figure = _figure(5.6 * len(regimes), 4.2)
    axes = figure.subplots(1, len(regimes), squeeze=False, sharey="row")[0]
    for axis, regime in zip(axes, regimes, strict=True):
        for method in found:
            pairs = ratio_and_gradient(results, method, [regime])
            axis.scatter(
                [x for x, _ in pairs], [y for _, y in pairs], s=9, alpha=0.5, color=COLORS[method], linewidths=0,
                label=LABELS[method],
            )  # fmt: skip
        axis.set(xlabel="log10 of the largest ratio", ylabel="log10 of the gradient norm", title=TITLES[regime])
    _legend(axes[0])
    return _save(figure, path, "Ratio spikes and gradient spikes")


def _epsilon(results: Results, path: Path) -> bool:
    found = [method for method in EPSILONS if method in results.methods]
    if len(found) < 2:
        return False
    figure = _figure(11.2, 3.8)
    axes = figure.subplots(1, 2)
    panels = [("accuracy_after", "final held-out accuracy"), ("peak_grad_norm", "largest gradient norm")]
    for axis, (name, label) in zip(axes, panels, strict=True):
        for regime, color in zip(REGIMES, ("#0b6e4f", "#d98200"), strict=True):
            present = [method for method in found if results.of(method, regime)]
            epsilons = [EPSILONS[method] for method in present]
            for method, epsilon in zip(present, epsilons, strict=True):
                values = [run[name] for run in results.of(method, regime)]
                axis.scatter([epsilon] * len(values), values, s=18, color=color, alpha=0.5, linewidths=0)
            means = [results.mean(method, regime, name) for method in present]
            axis.plot(epsilons, means, "o-", color=color, linewidth=1.8, markersize=4, label=TITLES[regime])
        axis.set_xscale("log")
        axis.set_xticks([EPSILONS[method] for method in found], [str(EPSILONS[method]) for method in found])
        axis.minorticks_off()
        axis.set(xlabel="ε", title=label)
        axis.set_ylim(bottom=0)
    starts = [run["accuracy_before"] for method in found for run in results.of(method, "normal")]
    if starts:
        axes[0].axhline(_mean(starts), color="black", linestyle=":", linewidth=1, label="after supervised training")
    _legend(axes[0])
    return _save(figure, path, "Width of the clip")


def _variance(results: Results, path: Path) -> bool:
    numbers = variance_means(results)
    if not numbers:
        return False
    updates = sorted({key[0] for key in numbers})
    figure = _figure(5.6 * len(updates), 5.2)
    axes = figure.subplots(1, len(updates), squeeze=False, sharey="row")[0]
    colors = {"independent": "#b3261e", "shared": "#0b6e4f"}
    for axis, num_updates in zip(axes, updates, strict=True):
        keys = [key for key in numbers if key[0] == num_updates][::-1]
        labels = [f"{sampling}, {'shared in group' if sharing == 'group' else 'per row'}"
                  for _, _, sharing, sampling in keys]  # fmt: skip
        for coupling, color in colors.items():
            at = [index for index, key in enumerate(keys) if key[1] == coupling]
            axis.barh(at, [numbers[keys[index]][0] for index in at], color=color, alpha=0.35)
            axis.barh(at, [numbers[keys[index]][1] for index in at], color=color, height=0.5, label=coupling)
        axis.set_yticks(range(len(keys)), labels, fontsize=8)
        axis.set_xscale("log")
        axis.set(xlabel="nats²", title=f"after {num_updates} updates")
    _legend(axes[0], title="old and new masks")
    return _save(figure, path, "Variance of the log-ratio within groups")
