# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Start processes that talk to each other, and end them where they hang."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
UNCOMPILED = Path(__file__).with_name("uncompiled")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment() -> dict[str, str]:
    """Of a machine without an accelerator, where nothing is compiled."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(UNCOMPILED)]),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
    }


def finished(command: Sequence[str], *, folder: Path, seconds: float) -> str:
    """What a command printed. It fails where the command does, or takes longer; then its processes are killed."""
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=output, stderr=subprocess.STDOUT)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = f"nothing for {seconds} s"
        finally:
            if process.poll() is None:
                for one in [*psutil.Process(process.pid).children(recursive=True), process]:  # each in its own session
                    one.kill()
                process.wait()
        output.seek(0)
        text = output.read()
    assert status == 0, f"{' '.join(command)} ended with {status}:\n{text}"
    return text


def finished_by_two(module: str, *arguments: str, folder: Path, seconds: float) -> str:
    """As [`finished`], of a module that is run by two processes."""
    launcher = ["torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    return finished([sys.executable, "-m", *launcher, "--module", module, *arguments], folder=folder, seconds=seconds)
