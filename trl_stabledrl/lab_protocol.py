# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the protocol of the stability lab: a few processes at a time, resumable, with its progress shown."""

import json
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .lab import LabConfig, LabRun, do_run, do_sft, do_variance, run_folder, sft_folder, write_json
from .lab_report import LAB_FILE, run_line
from .progress import write_into

SECONDS_BETWEEN_LOOKS = 0.2


def check_folder(config: LabConfig, folder: Path) -> None:
    """Raise where a folder holds the runs of another setting, or something else; write down ours."""
    path = folder / LAB_FILE
    if path.is_file():
        held = json.loads(path.read_text())
        wanted = json.loads(json.dumps(config.frozen()))
        different = sorted(name for name in wanted if held.get(name) != wanted[name])
        if different:
            raise ValueError(
                f"--out {folder} holds runs of another setting: {', '.join(different)} differ from those in "
                f"{LAB_FILE}. Nothing was touched. Choose another folder."
            )
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"--out {folder} is not empty and holds no {LAB_FILE}. Choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, config.frozen())


def run_protocol(
    config: LabConfig,
    folder: Path,
    *,
    num_processes: int = 2,
    with_runs: bool = True,
    with_variance: bool = True,
    console: Console,
) -> None:
    """
    Make every run that is not there yet, and say how each one went.

    Args:
        config ([`LabConfig`]):
            The protocol.
        folder (`pathlib.Path`):
            Where everything goes; finished runs in it are kept.
        num_processes (`int`, *optional*, defaults to `2`):
            Runs at a time, each with one thread. 1 runs them in this process.
        with_runs (`bool`, *optional*, defaults to `True`):
            Whether to train by the methods.
        with_variance (`bool`, *optional*, defaults to `True`):
            Whether to measure the spread of the log-ratio too.
        console ([`rich.console.Console`]):
            Where to show it.
    """
    if num_processes < 1:
        raise ValueError(f"--processes {num_processes} must be at least 1.")
    check_folder(config, folder)
    jobs = _Jobs(config, folder, with_runs=with_runs, with_variance=with_variance)
    done = jobs.num_all - jobs.num_open
    if done:
        console.print(f"{done} of {jobs.num_all} jobs are done already and kept.")
    if not jobs.num_open:
        return
    with _workers(num_processes, folder) as (executor, steps), _Screen(jobs, done, console) as screen:
        pending: dict[Future[Any], str] = {}
        try:
            while pending or jobs.num_open:
                # no more than can run: what is queued could not be called back after a failure
                for name, function, argument in islice(jobs.ready(), num_processes - len(pending)):
                    pending[executor.submit(function, config, argument, folder, steps)] = name
                finished, _ = wait(pending, timeout=SECONDS_BETWEEN_LOOKS, return_when=FIRST_COMPLETED)
                screen.show_steps(steps)
                for future in finished:
                    name = pending.pop(future)
                    screen.finish(name, future.result())
                    jobs.finish(name)
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


class _Jobs:
    """What is still to be done, the supervised models first: all else of a seed waits for its own."""

    def __init__(self, config: LabConfig, folder: Path, *, with_runs: bool, with_variance: bool):
        seeds = range(config.num_seeds)
        runs = config.runs() if with_runs else []
        self.open: dict[str, tuple[Callable[..., Any], Any, int]] = {}
        everything = [(f"sft_seed{seed}", _sft, seed, seed, sft_folder(folder, seed)) for seed in seeds]
        everything += [(run.name, _run, run, run.seed, run_folder(folder, run)) for run in runs]
        if with_variance:
            everything += [
                (f"variance_seed{seed}", _variance, seed, seed, folder / "variance" / f"seed{seed}") for seed in seeds
            ]
        self.num_all = len(everything)
        self.open = {
            name: (function, argument, seed)
            for name, function, argument, seed, path in everything
            if not path.is_dir()
        }
        self.started: set[str] = set()

    @property
    def num_open(self) -> int:
        return len(self.open)

    def ready(self) -> Iterator[tuple[str, Callable[..., Any], Any]]:
        """Jobs that can start now; each is named once."""
        for name, (function, argument, seed) in self.open.items():
            is_waiting = name != f"sft_seed{seed}" and f"sft_seed{seed}" in self.open
            if name not in self.started and not is_waiting:
                self.started.add(name)
                yield name, function, argument

    def finish(self, name: str) -> None:
        del self.open[name]


class _Steps:
    """Passes on how far a job is; travels to other processes."""

    def __init__(self, channel: Any):
        self.channel = channel

    def __call__(self, name: str, step: int, num_steps: int, note: str) -> None:
        self.channel.put((name, step, num_steps, note))


def _sft(config: LabConfig, seed: int, folder: Path, steps: _Steps) -> dict[str, Any]:
    return do_sft(config, seed, folder, steps)


def _run(config: LabConfig, run: LabRun, folder: Path, steps: _Steps) -> dict[str, Any]:
    return do_run(config, run, folder, steps)


def _variance(config: LabConfig, seed: int, folder: Path, steps: _Steps) -> dict[str, Any]:
    return do_variance(config, seed, folder, steps)


@contextmanager
def _workers(num_processes: int, folder: Path) -> Iterator[tuple[Executor, _Steps]]:
    """Processes that run jobs, or a thread of this one; what libraries print there goes to a file."""
    if num_processes == 1:
        with ThreadPoolExecutor(1) as executor:
            yield executor, _Steps(queue.SimpleQueue())
        return
    # spawned: torch's threads do not survive a fork
    context = get_context("spawn")
    with context.Manager() as manager:
        log = folder / "workers.log"
        with ProcessPoolExecutor(
            num_processes, mp_context=context, initializer=write_into, initargs=(str(log),)
        ) as executor:
            yield executor, _Steps(manager.Queue())


class _Screen:
    """A bar for all jobs, one for each that is running, and a line for each that is done."""

    def __init__(self, jobs: _Jobs, done: int, console: Console):
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description:<34}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self.all = self.progress.add_task("stability lab", total=jobs.num_all, completed=done, note="")
        self.running: dict[str, TaskID] = {}

    def __enter__(self) -> "_Screen":
        self.progress.start()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for bar in self.running.values():
            self.progress.remove_task(bar)
        self.progress.stop()

    def show_steps(self, steps: _Steps) -> None:
        while not steps.channel.empty():
            name, step, num_steps, note = steps.channel.get()
            if name not in self.running:
                self.running[name] = self.progress.add_task(name, total=num_steps, note="")
            self.progress.update(self.running[name], completed=step, total=num_steps, note=note)

    def finish(self, name: str, result: dict[str, Any]) -> None:
        bar = self.running.pop(name, None)
        if bar is not None:
            self.progress.remove_task(bar)
        self.progress.advance(self.all)
        self.console.print(run_line(name, result))
