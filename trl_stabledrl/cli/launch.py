# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Run a training command in this process, or in several through `accelerate launch`."""

import argparse
import importlib.resources
import importlib.util
import logging
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.elastic.multiprocessing.api
import yaml
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from .. import recipes_folder
from .console import USER_ERROR, UserError, blamed_on, show_error
from .parser import ACCELERATE_CONFIG


def launch_names() -> set[str]:
    """
    Options of `accelerate launch`, and TRL's `accelerate_config`.

    Returns:
        `set[str]`:
            Names without dashes in front.
    """
    options = {option for action in launch_command_parser()._actions for option in action.option_strings}
    names = {option.removeprefix("--").replace("-", "_") for option in options if option.startswith("--")}
    # ours to decide what is run
    return {*names, ACCELERATE_CONFIG} - {"help", "module", "no_python"}


def needs_launcher(launch_args: Sequence[str]) -> bool:
    """
    Whether accelerate has a say: launch options, its own configuration file, or more than one GPU.

    Args:
        launch_args (`Sequence[str]`):
            Options of the launcher.

    Returns:
        `bool`:
            `False` in a process that a launcher has started already.
    """
    is_launched = "LOCAL_RANK" in os.environ or "WORLD_SIZE" in os.environ
    if is_launched:
        if launch_args:
            raise UserError(
                f"this process was started by a launcher already, so {launch_args[0]} comes too late: pass it to that "
                "launcher, or call trl-stabledrl alone."
            )
        return False
    return bool(launch_args) or Path(default_config_file).is_file() or torch.cuda.device_count() > 1


def find_accelerate_config(name: str) -> Path:
    """
    Find an accelerate configuration: a file, one of `recipes/accelerate`, or one of TRL's.

    Args:
        name (`str`):
            Path, or name without `.yaml`.

    Returns:
        `pathlib.Path`
    """
    if Path(name).is_file():
        return Path(name)
    trl_configs = Path(str(importlib.resources.files("trl").joinpath("accelerate_configs")))
    folders = (recipes_folder() / "accelerate", trl_configs)
    for folder in folders:
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    names = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise UserError(f"--{ACCELERATE_CONFIG} {name}: neither a file nor one of {', '.join(names)}.")


def launch(command: str, command_args: Sequence[str], launch_args: Sequence[str]) -> int:
    """
    Run a command in the processes that accelerate starts.

    Args:
        command (`str`):
            Module of `trl_stabledrl.cli`.
        command_args (`Sequence[str]`):
            Its arguments.
        launch_args (`Sequence[str]`):
            Options of `accelerate launch`, and `--accelerate_config`.

    Returns:
        `int`:
            Exit status.
    """
    module = f"{__package__}.{command}"
    parser = launch_command_parser()
    parser.exit_on_error = False
    try:
        args = parser.parse_args([*_resolved(launch_args), "--module", module, *command_args])
    except argparse.ArgumentError as error:
        raise UserError(f"accelerate launch: {error}") from error
    if args.training_script != module:
        raise UserError(f"unexpected argument {args.training_script!r}. Options are written --name value.")
    has_file = args.config_file is not None or Path(default_config_file).is_file()
    shares_work = has_file or args.multi_gpu or args.use_deepspeed or args.use_fsdp or torch.cuda.device_count() > 1
    if (args.cpu or not shares_work) and (args.num_processes or 1) > 1 and args.mpirun_hostfile is None:
        # accelerate would quietly start a single one
        reason = "--cpu starts one process" if args.cpu else "without a launch file or several GPUs one process starts"
        raise UserError(
            f"{reason}, but num_processes is {args.num_processes}. Use --accelerate_config cpu "
            f"--num_processes {args.num_processes}."
        )
    _check_deepspeed(args)
    logging.getLogger(torch.distributed.elastic.multiprocessing.api.__name__).setLevel(logging.CRITICAL)
    try:
        with blamed_on("accelerate launch", ValueError, OSError, ImportError):
            launch_command(args)
    except subprocess.CalledProcessError as error:
        return error.returncode  # the process has printed its own error or traceback
    except ChildFailedError as error:
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if USER_ERROR in failures.values():
            return USER_ERROR
        show_error("; ".join(f"process {rank} ended with status {code}" for rank, code in failures.items()))
        return 1
    return 0


def _resolved(launch_args: Sequence[str]) -> list[str]:
    resolved: list[str] = []
    tokens = iter(launch_args)
    for token in tokens:
        name, equals, value = token.partition("=")
        if name.replace("-", "_") != f"__{ACCELERATE_CONFIG}":
            resolved.append(token)
            continue
        value = value if equals else next(tokens, "")
        if not value:
            raise UserError(f"--{ACCELERATE_CONFIG} needs a name, such as zero3, or a path.")
        resolved += ["--config_file", str(find_accelerate_config(value))]
    return resolved


def _check_deepspeed(args: argparse.Namespace) -> None:
    config_file = args.config_file or (default_config_file if Path(default_config_file).is_file() else None)
    uses_deepspeed = args.use_deepspeed
    if config_file is not None and Path(config_file).is_file():
        with blamed_on(str(config_file), OSError, yaml.YAMLError):
            config = yaml.safe_load(Path(config_file).read_text())
        uses_deepspeed |= isinstance(config, dict) and config.get("distributed_type") == "DEEPSPEED"
    if uses_deepspeed:
        require("deepspeed", extra="deepspeed", used_by="ZeRO")


def require(module: str, *, extra: str, used_by: str) -> None:
    """
    Raise unless an optional dependency is installed.

    Args:
        module (`str`):
            Module to look for.
        extra (`str`):
            Extra of this package that brings it.
        used_by (`str`):
            What asked for it.
    """
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{used_by} needs {module}: pip install 'trl-stabledrl[{extra}]'")
