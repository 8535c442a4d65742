# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Progress bars of long rollouts, and what keeps other output out of their way."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm

SECONDS_BEFORE_BAR = 5.0
"""A rollout that takes less shows no bar."""


@contextmanager
def token_bar(title: str, *, is_shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """
    Show decided tokens while the context is open, as a bar that goes away afterwards.

    Args:
        title (`str`):
            What is being done.
        is_shown (`bool`):
            Whether to show anything at all.

    Yields:
        `Callable[[int, int], None]` or `None`:
            To be called with the tokens decided so far and in total.
    """
    if not is_shown:
        yield None
        return
    with tqdm(desc=title, unit="tok", unit_scale=True, leave=False, delay=SECONDS_BEFORE_BAR) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update


def write_into(path: str) -> None:
    """Append whatever this process prints to a file: the first thing that a worker beside a progress bar does."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):  # the descriptors, since libraries' C code prints too
        os.dup2(log, stream)
    os.close(log)
