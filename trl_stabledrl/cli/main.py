# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""The entry point `trl-stabledrl`."""

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module

from rich.console import Console
from rich.table import Table

from .. import __version__
from .console import UserError, run_cleanly

COMMANDS = {
    "quickstart": "watch a tiny model learn a task on this machine, in minutes",
    "train": "improve a model by StableDRL, from a recipe",
    "sft": "supervised masked-diffusion training, for warm starts",
    "eval": "score a checkpoint or adapter on tasks; `eval compare A B` compares",
    "lab": "compare StableDRL with its peers under noise, on a tiny model on this machine",
    "generate": "complete prompts with a checkpoint",
    "merge": "merge a LoRA adapter into its base model, as one checkpoint",
    "env": "print versions and devices, or what memory a recipe takes",
}
_LAUNCHED = ("train", "sft", "eval")


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command of `trl-stabledrl`.

    Args:
        argv (`Sequence[str]`, *optional*):
            Command line. Defaults to the process's own.

    Returns:
        `int`:
            Exit status: 0, or 2 after an error in the input.
    """
    return run_cleanly(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        _show_help()
        return 0
    if argv[0] == "--version":
        print(__version__)
        return 0
    command, *rest = argv
    if command not in COMMANDS:
        nearest = difflib.get_close_matches(command, COMMANDS, n=1, cutoff=0.0)[0]
        raise UserError(f"unknown command '{command}'. Did you mean '{nearest}'? Commands: {', '.join(COMMANDS)}.")
    # imported when asked for: TRL and the trainers take seconds
    module = import_module(f".{command}", __package__)
    if command in _LAUNCHED and rest[:1] != ["compare"]:
        from .launch import launch, needs_launcher
        from .parser import HELP_FLAGS

        if not any(token in HELP_FLAGS for token in rest):
            command_args, launch_args = module.make_parser().split(rest)
            if needs_launcher(launch_args):
                return launch(command, command_args, launch_args)
            rest = command_args
    return module.run(rest)


def _show_help() -> None:
    console = Console(highlight=False)
    console.print(f"[bold]trl-stabledrl[/bold] {__version__}: StableDRL for masked diffusion language models, on TRL")
    console.print()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column()
    for command, description in COMMANDS.items():
        table.add_row(command, description)
    console.print(table)
    console.print()
    console.print("  trl-stabledrl quickstart")
    console.print("  trl-stabledrl train --config llada_8b_gsm8k --accelerate_config zero3")
    console.print("  trl-stabledrl COMMAND --help", style="default")


if __name__ == "__main__":
    raise SystemExit(main())
