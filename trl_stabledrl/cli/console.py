# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What commands show: tables on standard output; errors of the user's making as one line on standard error."""

import argparse
import dis
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

USER_ERROR = 2
"""Exit status of a run that the user's input stopped; argparse's own."""

_PATIENCE = 10.0
"""Seconds for which a process that says nothing waits for the one that speaks for it."""

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


class UserError(Exception):
    """Something in the command line, the recipe or the files they name; the message is all the user needs."""


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong with a command line as any other error of the user's is said."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


@contextmanager
def blamed_on(subject: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn what a host library raises about the user's input into one line that starts with `subject`."""
    try:
        yield
    except kinds as error:
        if is_our_message(error):
            raise
        # Transformers and datasets append paragraphs of advice on the Hub, which rarely fits
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"{subject}: {reason}") from error


@contextmanager
def checking() -> Iterator[None]:
    """Before training every process of a run fails its checks alike, so the first one of a machine speaks for all."""
    try:
        yield
    except (ValueError, ImportError) as error:
        if is_our_message(error):
            raise UserError(str(error)) from error
        raise


def is_our_message(error: Exception) -> bool:
    """Whether one of this package's own checks raised it, with a message written for the user."""
    if isinstance(error, UserError):
        return True
    trace = error.__traceback__
    if not isinstance(error, ValueError | ImportError) or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    # a ValueError that Python itself raises in our code, by unpacking or int(), is a bug and keeps its traceback
    return code.co_filename.startswith(_PACKAGE) and code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def run_cleanly(command: Callable[[], int]) -> int:
    """
    Run a command; a user error becomes one line and an exit status, a bug keeps its traceback.

    Args:
        command (`Callable[[], int]`):
            Does the work and returns an exit status.

    Returns:
        `int`:
            The command's exit status, or 2 after a user error.
    """
    try:
        return command()
    except (UserError, ValueError) as error:
        if not is_our_message(error):
            raise
        # see checking(); what goes wrong in training may go wrong in one process only
        if not isinstance(error, UserError) or os.environ.get("LOCAL_RANK", "0") == "0":
            show_error(str(error))
        else:
            time.sleep(_PATIENCE)  # the launcher ends the others with the first one that fails
        return USER_ERROR


def show_error(message: str) -> None:
    """Print one `error:` line, unwrapped, so that it can be searched for."""
    text = Text.assemble(("error: ", "bold red"), " ".join(message.split()))
    Console(stderr=True, highlight=False).print(text, soft_wrap=True)


def counted(number: float, noun: str, plural: str | None = None) -> str:
    """A number with its noun: `1 update`, `2 updates`."""
    return f"{number:g} {noun if number == 1 else plural or noun + 's'}"


def show_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Print a title and two columns."""
    console = Console(highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, Text(value))
    console.print(Text(title, style="bold"))
    console.print(table)
