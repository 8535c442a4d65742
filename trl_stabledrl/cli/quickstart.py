# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""`trl-stabledrl quickstart`: the whole method on a laptop."""

import argparse
from collections.abc import Sequence

from ..quickstart import MODEL_TYPES, QuickstartConfig
from ..quickstart import run as run_quickstart
from .console import OneLineParser
from .parser import find_recipe

_TASKS = {"sorting": "sorting", "addition": "addition", "sudoku": "sudoku_digits"}


def make_parser() -> argparse.ArgumentParser:
    """
    Parser of the command.

    Returns:
        `argparse.ArgumentParser`
    """
    parser = OneLineParser(
        prog="trl-stabledrl quickstart",
        description="Train a tiny model by supervision, then by StableDRL, and show the curve: minutes on a CPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--family", choices=MODEL_TYPES, help="kind of model (default llada)")
    parser.add_argument("--seed", type=int, help="seed of weights, data, masks and rollouts (default 0)")
    parser.add_argument(
        "--output_dir", "--output-dir", help="where to write (default quickstart, or quickstart_FAMILY)"
    )
    parser.add_argument("--task", choices=_TASKS, help="what to learn (default sorting)")
    parser.add_argument("--control", choices=["permuted"], help="repeat the RL with rewards permuted in each group")
    parser.add_argument("--config", default="quickstart", help="recipe (default recipes/quickstart.yaml)")
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
    options = vars(make_parser().parse_args(argv))
    path = find_recipe(options.pop("config"))
    task = options.pop("task")
    run_quickstart(QuickstartConfig.load(path, task=_TASKS.get(task, task), **options))
    return 0
