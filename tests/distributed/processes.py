# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Start processes that talk to each other, and end them where they hang."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
SILENCE = 180
"""Seconds without a line after which processes are taken to wait for each other. A few are usual between two lines."""
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


def finished(command: Sequence[str], *, folder: Path) -> str:
    """What a command printed. It fails where the command does, or is silent for too long; then it is killed."""
    path = folder / "output.txt"
    with path.open("w") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=output, stderr=subprocess.STDOUT)
    size, since = 0, time.monotonic()
    try:
        while process.poll() is None and time.monotonic() - since < SILENCE:
            time.sleep(0.1)
            if path.stat().st_size > size:
                size, since = path.stat().st_size, time.monotonic()
    finally:
        status = process.poll()
        if status is None:  # its processes do not end with it: each begins a session of its own
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.kill()
            process.wait()
    outcome = f"was silent for {SILENCE} s" if status is None else f"ended with {status}"
    assert status == 0, f"{' '.join(command)} {outcome}:\n{path.read_text()}"
    return path.read_text()


def finished_by_two(module: str, *arguments: str, folder: Path) -> str:
    """As [`finished`], of a module that is run by two processes."""
    launcher = ["torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    return finished([sys.executable, "-m", *launcher, "--module", module, *arguments], folder=folder)
