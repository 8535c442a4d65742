# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What the quickstart shows at the end: a table, and a picture of reward and stability."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .models import FAMILIES

Log = list[dict[str, float]]

ACCURACIES = {
    "before training": "accuracy_before_sft",
    "after SFT": "accuracy_after_sft",
    "after StableDRL": "accuracy_after_rl",
    "after the control": "accuracy_after_control",
}
PHASES = {"sft": "supervised training", "rl": "StableDRL", "control": "control", "evaluation": "evaluation"}
COLORS = {"rl": "#0b6e4f", "control": "#8a8a8a"}
LABELS = {"rl": "StableDRL", "control": "rewards permuted"}


def show(console: Console, summary: dict[str, Any], files: Sequence[str], *, has_picture: bool) -> None:
    """Print the table of accuracies and times, and where everything is."""
    table = Table(title=_title(summary))
    table.add_column(f"accuracy on {summary['num_eval_prompts']} held-out prompts")
    table.add_column("temperature 1", justify="right")
    table.add_column("greedy", justify="right")
    for title, key in ACCURACIES.items():
        if key in summary:
            style = "bold green" if key == "accuracy_after_rl" else None
            table.add_row(title, f"{summary[key]['sampled']:.3f}", f"{summary[key]['greedy']:.3f}", style=style)
    console.print(table)
    seconds = ", ".join(f"{PHASES[name]} {value:.0f} s" for name, value in summary["seconds"].items())
    console.print(f"Time: {seconds}.")
    console.print(f"Written to [bold]{summary['output_dir']}[/bold]: {', '.join(files)}.")
    if not has_picture:
        console.print("No picture: it needs matplotlib (pip install 'trl-stabledrl\\[lab]').")


def draw(path: Path, logs: dict[str, Log], summary: dict[str, Any]) -> bool:
    """
    Draw reward, gradient norm, weights and ratios over the optimizer steps.

    Args:
        path (`pathlib.Path`):
            File to write.
        logs (`dict[str, list[dict]]`):
            Logged rows of the phases `rl` and, if it was run, `control`.
        summary (`dict`):
            Accuracies, for the title and the marks beside the reward.

    Returns:
        `bool`:
            Whether matplotlib is there.
    """
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display needed

    figure = Figure(figsize=(11, 6.6), layout="constrained")
    axes = figure.subplots(2, 2)
    runs = {name: logs[name] for name in COLORS if name in logs}

    reward = axes[0][0]
    for name, log in runs.items():
        steps, values = _series(log, "reward")
        reward.plot(steps, values, color=COLORS[name], alpha=0.25, linewidth=1)
        reward.plot(steps, _smoothed(values), color=COLORS[name], linewidth=2.2, label=LABELS[name])
    for key, title, style in (("accuracy_after_sft", "after SFT", ":"), ("accuracy_after_rl", "after RL", "--")):
        value = summary[key]["sampled"]
        reward.axhline(value, color="black", linewidth=0.9, linestyle=style)
        reward.annotate(
            f"held out, {title}: {value:.2f}", (0.01, value), xycoords=("axes fraction", "data"), va="bottom", size=8
        )
    reward.set(title="Reward of the rollouts (temperature 1)", ylim=(0, 1), ylabel="share right")
    reward.legend(loc="lower right", frameon=False)

    panels = (
        (axes[0][1], "Gradient norm, before clipping", {"grad_norm": "-"}),
        (
            axes[1][0],
            "Weights: effective sample size (share of the group), largest weight",
            {"weights/ess": "-", "weights/max": ":"},
        ),
        (
            axes[1][1],
            "Log-ratio: drift (mean size) and spread within groups",
            {"drift": "-", "log_ratio/std_centred": ":"},
        ),
    )
    for axis, title, metrics in panels:
        for name, log in runs.items():
            for metric, style in metrics.items():
                steps, values = _series(log, metric)
                label = metric if len(metrics) > 1 and name == "rl" else None
                axis.plot(steps, _smoothed(values), style, color=COLORS[name], linewidth=1.6, label=label)
        axis.set(title=title)
        axis.set_ylim(bottom=0)
        if len(metrics) > 1:
            axis.legend(frameon=False, loc="best")
    for axis in axes.flat:
        axis.set_xlabel("optimizer step")
        axis.title.set_size(10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.2)
    gain = summary["accuracy_after_rl"]["sampled"] - summary["accuracy_after_sft"]["sampled"]
    figure.suptitle(f"StableDRL on {_title(summary)}: held-out accuracy {gain:+.2f}", size=12, weight="bold")
    figure.savefig(path, dpi=130)
    return True


def _title(summary: dict[str, Any]) -> str:
    (family,) = (family.name for family in FAMILIES if summary["family"] in family.model_types)
    return f"{family}, {summary['num_parameters']:,} parameters, {summary['task']}, seed {summary['seed']}"


def _series(log: Log, metric: str) -> tuple[list[float], list[float]]:
    rows = [(row["step"], row[metric]) for row in log if row.get(metric) is not None]
    return [step for step, _ in rows], [value for _, value in rows]


def _smoothed(values: list[float], *, window: int = 11) -> list[float]:
    """Centred moving average, shorter at the ends."""
    half = window // 2
    parts = [values[max(0, index - half) : index + half + 1] for index in range(len(values))]
    return [sum(part) / len(part) for part in parts]
