# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""`trl-stabledrl env`: what a bug report needs to say about the machine."""

import argparse
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch
from accelerate.commands.config.config_args import default_config_file

from .. import __version__

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
    Print versions and devices as a list that can be pasted into an issue.

    Args:
        argv (`Sequence[str]`):
            Arguments of the command.

    Returns:
        `int`:
            Exit status.
    """
    parser = argparse.ArgumentParser(
        prog="trl-stabledrl env", description="Print versions and devices, to paste into a bug report."
    )
    parser.parse_args(argv)
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
