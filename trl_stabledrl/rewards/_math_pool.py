# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""The trainer's end of the process that compares mathematical expressions."""

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_WORKER = Path(__file__).with_name("_math_worker.py")
_MAX_BYTES = 4 * 2**30
_MAX_WORKERS = 16
_BOOTSTRAP = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "runpy.run_path(sys.argv.pop(), run_name='__main__')"
)


def default_num_workers() -> int:
    """Cores this process may use, shared with the other ranks of the machine."""
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(num_cores // num_ranks, 1), _MAX_WORKERS)


class MathPool:
    """
    Compares expressions in parallel, in a process of its own that is started when first needed.

    Args:
        seconds (`float`):
            Processor time per comparison. Waiting for a turn does not count.
        num_workers (`int`, *optional*):
            Comparisons at a time. Defaults to the cores that are ours.
        script (`Path`, *optional*):
            What the process runs.
    """

    def __init__(
        self,
        *,
        seconds: float,
        num_workers: int | None = None,
        script: Path = _WORKER,
    ) -> None:
        self._seconds = seconds
        self._num_workers = num_workers
        self._script = script
        self._process: subprocess.Popen[str] | None = None
        self._owner_pid = 0
        self._lock = threading.Lock()
        atexit.register(self.close)

    def outcomes(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
        """
        Compare pairs of expressions.

        Args:
            pairs (`Sequence[tuple[str, str]]`):
                The right expression and the given one of each row.

        Returns:
            `list[str]`:
                `"equal"`, `"unequal"`, `"unreadable"` or `"timeout"`, in order.
        """
        if not pairs:
            return []
        with self._lock:
            # A forked child must not share its parent's pipe: replies would go to whoever reads first
            if self._process is None or self._owner_pid != os.getpid():
                self._process = self._start()
            # An exchange that is interrupted leaves its reply in the pipe: such a process is not asked again
            process, self._process = self._process, None
            outcomes = self._ask(process, json.dumps(pairs))
            self._process = process
        assert len(outcomes) == len(pairs)
        return outcomes

    @staticmethod
    def _ask(process: "subprocess.Popen[str]", request: str) -> list[str]:
        assert process.stdin is not None
        assert process.stdout is not None
        reply = ""
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:  # it has ended already
            pass
        finally:
            if not reply:
                process.kill()
                process.wait()
        if not reply:
            raise RuntimeError(
                f"The process that runs math-verify ended with status {process.returncode}. Its own error, if any, is "
                "above; without one it was killed, most often for want of memory."
            )
        return json.loads(reply)

    def _start(self) -> "subprocess.Popen[str]":
        num_workers = self._num_workers or default_num_workers()
        options = [str(num_workers), str(self._seconds), str(_MAX_BYTES)]
        # By path and with our own search path: `python -m` would import the whole package, and torch with it
        search_path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, *options, str(self._script), search_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self._owner_pid = os.getpid()
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            process.communicate()
            raise RuntimeError(
                "The process that runs math-verify did not start; its own error is above. Check that "
                f"`{sys.executable} -c 'import math_verify'` works."
            )
        return process

    def close(self) -> None:
        """End the process, if it is ours."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None and self._owner_pid == os.getpid():
                process.kill()
                process.communicate()
