# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What an evaluation shows: a table of its scores, and tables and a picture that compare several."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .evaluation_records import (
    COMPLETIONS_FILE,
    RESULTS_FILE,
    SPEED_FILE,
    CompletionRecord,
    by_item,
    estimated,
    read_records,
)

COLORS = ("#0b6e4f", "#c8553d", "#3d5a98", "#b8860b", "#6b4c9a", "#5f6b6d")
_SAME_ITEMS = ("task", "split", "data_seed")


@dataclass(frozen=True)
class Run:
    """
    A finished evaluation, as its folder holds it.

    Attributes:
        name (`str`):
            What it is called beside others.
        results (`dict`):
            Contents of `results.json`.
        speed (`dict`):
            Contents of `speed.json`.
        records (`list[CompletionRecord]`):
            Every completion.
    """

    name: str
    results: dict[str, Any]
    speed: dict[str, Any]
    records: list[CompletionRecord]

    @property
    def lengths(self) -> list[int]:
        return sorted(map(int, self.results["scores"]))

    def scores(self, length: int) -> dict[str, Any]:
        return self.results["scores"][str(length)]


@dataclass(frozen=True)
class Difference:
    """
    How another evaluation differs from the first one on the items that both have.

    Attributes:
        name (`str`):
            The other one.
        length (`int`):
            Tokens of the window.
        num_items (`int`):
            Items that both have.
        mean (`float`):
            Of the differences in the share of right completions, item by item.
        low (`float`), high (`float`):
            Their bootstrap interval over the items.
        num_better (`int`), num_worse (`int`):
            Items on which the other one is right more often, and less often.
    """

    name: str
    length: int
    num_items: int
    mean: float
    low: float
    high: float
    num_better: int
    num_worse: int


def load_runs(folders: Sequence[str]) -> list[Run]:
    """
    Read finished evaluations of one task.

    Args:
        folders (`Sequence[str]`):
            Their folders.

    Returns:
        `list[Run]`
    """
    names = [Path(folder).name for folder in folders]
    if len({*names}) < len(names):
        names = list(folders)
    runs = []
    for folder, name in zip(folders, names, strict=True):
        path = Path(folder)
        missing = [file for file in (RESULTS_FILE, SPEED_FILE, COMPLETIONS_FILE) if not (path / file).is_file()]
        if missing:
            problem = "is no folder" if not path.is_dir() else f"holds no {missing[0]}"
            raise ValueError(
                f"{folder} {problem}. Name the output_dir of an evaluation that has finished; one that was "
                "interrupted goes on where the same command is given again."
            )
        results, speed = (json.loads((path / file).read_text()) for file in (RESULTS_FILE, SPEED_FILE))
        runs.append(Run(name, results, speed, read_records(path / COMPLETIONS_FILE)))
    tasks = {run.results["settings"]["task"] for run in runs}
    if len(tasks) > 1:
        raise ValueError(f"The evaluations are of different tasks: {', '.join(sorted(tasks))}. Compare those of one.")
    return runs


def differences(runs: Sequence[Run]) -> list[Difference]:
    """
    Compare evaluations with the first one, item by item.

    Args:
        runs (`Sequence[Run]`):
            Evaluations of one task.

    Returns:
        `list[Difference]`:
            For each length that both have, unless they have no item in common.
    """
    first = runs[0]
    found = []
    for other in runs[1:]:
        settings = first.results["settings"], other.results["settings"]
        if any(settings[0][name] != settings[1][name] for name in _SAME_ITEMS):
            continue
        for length in (length for length in first.lengths if length in other.lengths):
            rights = [_rights(run, length) for run in (first, other)]
            common = sorted(rights[0].keys() & rights[1].keys())
            if not common:
                continue
            values = [rights[1][key] - rights[0][key] for key in common]
            interval = first.results["intervals"]
            difference = estimated(values, num_resamples=interval["num_resamples"], seed=interval["seed"])
            found.append(
                Difference(
                    name=other.name,
                    length=length,
                    num_items=len(common),
                    num_better=sum(value > 0 for value in values),
                    num_worse=sum(value < 0 for value in values),
                    **difference,
                )
            )
    return found


def _rights(run: Run, length: int) -> dict[tuple[int, str], float]:
    """Share of right completions of each item, which is the same item where prompt and answer are too."""
    items = by_item(record for record in run.records if record.max_completion_length == length)
    return {
        (item, records[0].item_hash): sum(record.is_right for record in records) / len(records)
        for item, records in items.items()
    }


def show_run(console: Console, results: dict[str, Any], speed: dict[str, Any]) -> None:
    """
    Print the scores of an evaluation, by length.

    Args:
        console ([`~rich.console.Console`]):
            Where to print.
        results (`dict`):
            Contents of `results.json`.
        speed (`dict`):
            Contents of `speed.json`.
    """
    console.print(_table([Run("", results, speed, [])]))
    console.print(_footnote(results))


def show_comparison(console: Console, runs: Sequence[Run]) -> None:
    """
    Print the scores of several evaluations, their differences, and the settings in which they differ.

    Args:
        console ([`~rich.console.Console`]):
            Where to print.
        runs (`Sequence[Run]`):
            Evaluations of one task.
    """
    console.print(_table(runs))
    found = differences(runs)
    if found:
        table = _empty_table(f"pass@1 less that of {runs[0].name}, item by item")
        table.add_column("run", overflow="fold", min_width=6)
        for title in ("window", "difference", "95% interval", "items", "better", "worse"):
            table.add_column(title, justify="right", no_wrap=True)
        for one in found:
            is_clear = one.low > 0 or one.high < 0
            style = None if not is_clear else "bold green" if one.mean > 0 else "bold red"
            interval = f"{one.low:+.3f} to {one.high:+.3f}"
            counts = map(str, (one.num_items, one.num_better, one.num_worse))
            table.add_row(one.name, str(one.length), f"{one.mean:+.3f}", interval, *counts, style=style)
        console.print(table)
    else:
        console.print("No differences: the evaluations have no window and item in common.", highlight=False)
    for name, values in _differing_settings(runs):
        console.print(Text(f"{name}: {' | '.join(values)}"), soft_wrap=True)
    console.print(_footnote(runs[0].results))


def _table(runs: Sequence[Run]) -> Table:
    settings = runs[0].results["settings"]
    counts = sorted({run.scores(length)["num_items"] for run in runs for length in run.lengths})
    table = _empty_table(f"{settings['task']}, {settings['split']}: {' or '.join(map(str, counts))} items")
    is_several = len(runs) > 1
    if is_several:
        table.add_column("run", overflow="fold", min_width=6)
    best = max((_best(run) for run in runs), key=_k)
    has_parts = any(
        run.scores(length)["mean_score"]["mean"] != run.scores(length)["pass@1"]["mean"]
        for run in runs
        for length in run.lengths
    )
    others = [name for name, is_shown in ((best, best != "pass@1"), ("mean_score", has_parts)) if is_shown]
    titles = ["pass@1", *(name.replace("_", " ") for name in others), "tokens", "steps", "cut off", "tokens/s"]
    for title in ["window", *titles]:
        table.add_column(title, justify="right", no_wrap=True)
    lengths = sorted({length for run in runs for length in run.lengths})
    for length in lengths:
        for run in runs:
            if length not in run.lengths:
                continue
            scores = run.scores(length)
            table.add_row(
                *([run.name] if is_several else []),
                str(length),
                _estimate(scores["pass@1"]),
                *(f"{scores[name]['mean']:.3f}" if name in scores else "" for name in others),
                f"{scores['tokens_per_completion']:.1f}",
                f"{scores['steps_per_completion']:.1f}",
                f"{scores['truncated']:.0%}",
                f"{run.speed['by_length'][str(length)]['tokens_per_second']:,.0f}",
                end_section=is_several and run is runs[-1] and length != lengths[-1],
            )
    return table


def _empty_table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )


def _best(run: Run) -> str:
    """The pass@k of most samples."""
    return max((name for name in run.scores(run.lengths[0]) if name.startswith("pass@")), key=_k)


def _k(name: str) -> int:
    return int(name.partition("@")[2])


def _estimate(values: dict[str, float]) -> str:
    return f"{values['mean']:.3f} \\[{values['low']:.3f}, {values['high']:.3f}]"  # rich would take it for a style


def _footnote(results: dict[str, Any]) -> Text:
    interval = results["intervals"]
    return Text(
        f"In brackets: {interval['level']:.0%} intervals, {interval['method']}, {interval['num_resamples']} "
        "resamples. Tokens count up to the end token; tokens/s is of one process.",
        style="dim",
    )


def _differing_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    together = [{**run.results["settings"], **run.results["environment"]} for run in runs]
    names = list(dict.fromkeys(name for one in together for name in one))
    found = []
    for name in names:
        values = [json.dumps(one.get(name)) for one in together]
        if len({*values}) > 1 and name not in ("max_completion_length", "versions"):
            found.append((name, [value if len(value) <= 40 else f"{value[:14]}..." for value in values]))
    return found


def draw_comparison(path: Path, runs: Sequence[Run]) -> bool:
    """
    Draw scores with their intervals, the differences to the first evaluation, and the speed.

    Args:
        path (`pathlib.Path`):
            File to write.
        runs (`Sequence[Run]`):
            Evaluations of one task.

    Returns:
        `bool`:
            Whether matplotlib is there.
    """
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display needed

    figure = Figure(figsize=(13, 4.6), layout="constrained")
    score, difference, speed = figure.subplots(1, 3)
    lengths = sorted({length for run in runs for length in run.lengths})
    places = {length: place for place, length in enumerate(lengths)}
    width = 0.8 / len(runs)

    def x_of(length: int, index: int, *, num: int = len(runs)) -> float:
        return places[length] + (index - (num - 1) / 2) * width

    for index, run in enumerate(runs):
        color = COLORS[index % len(COLORS)]
        best = _best(run)
        x = [x_of(length, index) for length in run.lengths]
        for name, marker in {best: "^", "pass@1": "o"}.items():  # one and the same with one sample
            values = [run.scores(length)[name] for length in run.lengths]
            means = [value["mean"] for value in values]
            errors = [[v["mean"] - v["low"] for v in values], [v["high"] - v["mean"] for v in values]]
            is_first = name == "pass@1"
            score.errorbar(
                x,
                means,
                yerr=errors,
                fmt=marker,
                color=color,
                markerfacecolor=color if is_first else "white",
                capsize=3,
                label=f"{run.name}, {name}" if best != "pass@1" else run.name,
            )
        rates = [run.speed["by_length"][str(length)]["tokens_per_second"] for length in run.lengths]
        speed.bar(x, rates, width=width * 0.9, color=color, label=run.name)
    score.set(title="Score, with 95% intervals", ylim=(-0.02, 1.02), ylabel="share right")
    score.legend(frameon=False, fontsize=8)
    speed.set(title="Speed of one process", ylabel="tokens up to the end token, per second")

    found = differences(runs)
    for index, run in enumerate(runs[1:], start=1):
        ours = [one for one in found if one.name == run.name]
        difference.errorbar(
            [x_of(one.length, index - 1, num=len(runs) - 1) for one in ours],
            [one.mean for one in ours],
            yerr=[[one.mean - one.low for one in ours], [one.high - one.mean for one in ours]],
            fmt="o",
            color=COLORS[index % len(COLORS)],
            capsize=3,
        )
    difference.axhline(0, color="black", linewidth=0.9)
    difference.set(title=f"pass@1 less that of {runs[0].name}, paired by item", ylabel="difference")
    for axis in (score, difference, speed):
        axis.set_xticks(list(places.values()), [str(length) for length in lengths])
        axis.set_xlim(-0.6, len(lengths) - 0.4)
        axis.set_xlabel("window, tokens")
        axis.title.set_size(10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.2, axis="y")
    settings = runs[0].results["settings"]
    counts = sorted({run.scores(length)["num_items"] for run in runs for length in run.lengths})
    figure.suptitle(
        f"{settings['task']}, {settings['split']}, {' or '.join(map(str, counts))} items", size=12, weight="bold"
    )
    figure.savefig(path, dpi=130)
    return True
