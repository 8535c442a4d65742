# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""`trl-stabledrl lab`: the paper's comparisons on this machine."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..lab_figures import draw_all
from ..lab_report import Results, claims, screen_table, summary, write_report
from .console import OneLineParser, UserError


def make_parser() -> argparse.ArgumentParser:
    """
    Parser of the command.

    Returns:
        `argparse.ArgumentParser`
    """
    parser = OneLineParser(
        prog="trl-stabledrl lab",
        description="Compare StableDRL with its ablations and its peers on a tiny model, under normal and under "
        "stressed noise, and say which of the paper's claims show here.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="run|variance|plot|report")
    run = commands.add_parser(
        "run", help="make the runs, then plot and report; one that was stopped goes on", allow_abbrev=False
    )
    run.add_argument("--methods", help="names with commas between them (default: the protocol of the recipe)")
    run.add_argument("--seeds", type=int, help="how many seeds (default 3)")
    variance = commands.add_parser(
        "variance", help="only measure the spread of the log-ratio under each mask scheme", allow_abbrev=False
    )
    variance.add_argument("--seeds", type=int, help="how many seeds (default 3)")
    for command in (run, variance):
        command.add_argument("--out", required=True, type=Path, metavar="DIR", help="where everything goes")
        command.add_argument("--processes", type=int, default=2, help="runs at a time, one thread each (default 2)")
        command.add_argument("--config", default="lab", help="recipe (default recipes/lab.yaml)")
    plot = commands.add_parser("plot", help="draw DIR/figures", allow_abbrev=False)
    report = commands.add_parser("report", help="write DIR/report.md and DIR/report.html", allow_abbrev=False)
    report.add_argument("--json", action="store_true", help="print one line of JSON instead, and write nothing")
    for command in (plot, report):
        command.add_argument("folder", type=Path, metavar="DIR", help="folder of `lab run --out`")
    return parser


def run(argv: Sequence[str]) -> int:
    """
    Parse and hand over.

    Args:
        argv (`Sequence[str]`):
            Arguments of the command.

    Returns:
        `int`:
            Exit status.
    """
    options = make_parser().parse_args(argv)
    console = Console(highlight=False)
    match options.command:
        case "run":
            methods = None if options.methods is None else [name.strip() for name in options.methods.split(",")]
            _run(options, console, methods=methods, with_variance=methods is None)
            results = Results(options.out)
            _report(results, _plot(results, console), console)
        case "variance":
            _run(options, console, with_runs=False)
            results = Results(options.out)
            _report(results, draw_all(results), console)
        case "plot":
            _plot(_finished(options.folder), console)
        case "report" if options.json:
            # unwrapped, and strict JSON: numbers beyond float32 are its largest already
            print(json.dumps(summary(_finished(options.folder)), allow_nan=False))
        case "report":
            results = _finished(options.folder)
            _report(results, draw_all(results), console)
    return 0


def _run(
    options: argparse.Namespace,
    console: Console,
    *,
    methods: list[str] | None = None,
    with_runs: bool = True,
    with_variance: bool = True,
) -> None:
    # imported when needed: they bring TRL, which takes seconds, and a report needs none of it
    from ..lab import LabConfig
    from ..lab_protocol import run_protocol
    from .parser import find_recipe

    config = LabConfig.load(find_recipe(options.config), methods=methods, num_seeds=options.seeds)
    run_protocol(
        config,
        options.out,
        num_processes=options.processes,
        with_runs=with_runs,
        with_variance=with_variance,
        console=console,
    )


def _finished(folder: Path) -> Results:
    results = Results(folder)
    if not results.runs and not results.variance:
        raise UserError(f"{folder} holds no finished run yet. Start or go on: trl-stabledrl lab run --out {folder}")
    return results


def _plot(results: Results, console: Console) -> list[tuple[str, str]]:
    figures = draw_all(results)
    if not figures:
        console.print("No pictures: they need matplotlib (pip install 'trl-stabledrl\\[lab]').")
        return []
    console.print(f"Pictures in [bold]{results.folder / 'figures'}[/bold]: {', '.join(name for name, _ in figures)}.")
    return figures


def _report(results: Results, figures: list[tuple[str, str]], console: Console) -> None:
    if results.runs:
        console.print(screen_table(results))
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        styles = {"reproduced": "green", "partly": "yellow", "not": "red", "not run": "dim"}
        for claim in claims(results):
            table.add_row(f"[{styles[claim.verdict]}]{claim.verdict}[/]", claim.text)
        console.print("[bold]The paper's claims, at this scale[/bold]")
        console.print(table)
    paths = write_report(results, figures)
    console.print(f"Written: {', '.join(str(path) for path in paths)}.")
