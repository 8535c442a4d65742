# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""`trl-stabledrl env`: what a bug report needs to say about the machine, and what a recipe would take of it."""

import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch
from accelerate.commands.config.config_args import default_config_file

from .. import __version__
from .console import OneLineParser, UserError

PACKAGES = (
    "torch",
    "trl",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "peft",
    "deepspeed",
    "vllm",
    "math-verify",
    "bitsandbytes",
)


def installed_version(package: str) -> str:
    """Version of an installed distribution, or that it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def devices() -> str:
    """The accelerators that torch sees, or the CPU."""
    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    if torch.backends.mps.is_available():
        return "Apple GPU (MPS)"
    return f"CPU, {torch.get_num_threads()} thread(s)"


def run(argv: Sequence[str]) -> int:
    """
    Print versions and devices as a list that can be pasted into an issue, or the memory plan of a recipe.

    Args:
        argv (`Sequence[str]`):
            Arguments of the command.

    Returns:
        `int`:
            Exit status: 1 where a recipe does not fit.
    """
    parser = OneLineParser(
        prog="trl-stabledrl env",
        allow_abbrev=False,
        description="Print versions and devices, to paste into a bug report. With --recipe: check a recipe without "
        "loading weights or data, and print the memory that each process needs.",
        epilog="With --recipe every option of `trl-stabledrl train` may follow, such as --num_processes 8, "
        "--accelerate_config zero3 or --per_device_train_batch_size 1.",
    )
    parser.add_argument("--recipe", help="path of a recipe, or the name of one that ships with the package")
    parser.add_argument(
        "--prompt_length",
        type=int,
        default=512,
        help="tokens of the longest prompt, which only the data know (default 512)",
    )
    parser.add_argument(
        "--gpu_memory_gb",
        type=float,
        help="memory of a GPU in 10^9 bytes (default: this machine's, or 80)",
    )
    arguments, rest = parser.parse_known_args(argv)
    if arguments.recipe is not None:
        from .plan import show_plan  # which imports all that training needs

        return show_plan(
            arguments.recipe, rest, prompt_length=arguments.prompt_length, gpu_memory_gb=arguments.gpu_memory_gb
        )
    if rest:
        raise UserError(f"unexpected argument {rest[0]!r}. Options of `train` need --recipe NAME_OR_PATH.")
    facts = {
        "trl-stabledrl": __version__,
        "Python": platform.python_version(),
        "platform": platform.platform(),
        **{package: installed_version(package) for package in PACKAGES},
        "device": devices(),
        "CUDA": torch.version.cuda or "none",
        "accelerate config": str(default_config_file) if Path(default_config_file).is_file() else "none",
    }
    print("\n".join(f"- {name}: {value}" for name, value in facts.items()))
    return 0
