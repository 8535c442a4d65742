# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""
Process that compares LaTeX answers with math-verify, one JSON list of pairs in, one JSON list of words out.

Run by path, apart from the trainer: sympy computes `9^{9^{9^{9}}}` in C, where neither a signal handler nor a thread
can interrupt it. Comparisons therefore run in forks of this small process, a few at a time, which the kernel ends at
their time limit. A fork takes a handful of pairs; the clock starts anew with each of them.
"""

import gc
import json
import logging
import os
import resource
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

Pair = tuple[str, str]
"""The right answer and the one to grade."""

# A fork costs as much as several comparisons, and what one leaves behind must not add up
MIN_PAIRS_PER_FORK, MAX_PAIRS_PER_FORK = 4, 16
# Processor time is the limit, since waiting for a core is not work; the wall clock ends what sleeps
WALL_SECONDS_PER_SECOND = 10.0
OUTCOMES = {b"=": "equal", b"#": "unequal", b"?": "unreadable"}

# Compared once before the first fork: every fork then inherits the compiled patterns and parser tables, and takes a
# hundredth of a second instead of a third of one.
WARM_UP = (
    (r"\frac{1}{2}", "0.5"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\{1,2\} \cup [0,1)", "(1,2)"),
    (r"x \le 5", "x=5"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"90^\circ"),
    (r"\text{even}", r"50\%"),
    (r"\sin(3\pi)", r"\log_2 8"),
    (r"\frac{x}{y}+\sin 3", r"3\cos(x)+1"),
    (r"(-\infty,3]\cup[4,5)", r"[4,5)\cup(-\infty,3]"),
)


def exact(parsed: Any) -> Any:
    """A parsed expression with exact numbers: decimals as fractions, and the imaginary unit for a free `i`."""
    import sympy

    values = {number: sympy.Rational(str(number)) for number in parsed.atoms(sympy.Float)}
    values |= {symbol: sympy.I for symbol in parsed.free_symbols if symbol.name == "i"}
    return parsed.xreplace(values)


def compare(gold: str, answer: str) -> bytes:
    """Key of `OUTCOMES` for a pair."""
    from math_verify import parse, verify

    sides = []
    for text in (gold, answer):
        parsed = parse(rf"\boxed{{{text}}}", parsing_timeout=0)  # 0: no timer of its own, which would replace ours
        expressions = [exact(found) for found in parsed if not isinstance(found, str)]
        sides.append(
            expressions or parsed
        )  # the text itself, which is compared whatever its case, only for want of one
    right, given = sides
    if not given:
        return b"?"
    # Without rounding: 3.1415927 is not pi. An interval may be written as an inequality.
    is_equal = bool(right) and verify(right, given, float_rounding=15, allow_set_relation_comp=True, timeout_seconds=0)
    return b"=" if is_equal else b"#"


def run_fork(pairs: Sequence[Pair], writer: int, check: Callable[[str, str], bytes], seconds: float) -> None:
    """Check pairs in this process, a fresh fork, one byte for each that is done, and leave."""
    try:
        for pair in pairs:
            # The default action of both signals ends the process
            signal.setitimer(signal.ITIMER_PROF, seconds)
            signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS_PER_SECOND * seconds)
            is_spent = False
            try:
                outcome = check(*pair)
            except MemoryError:
                outcome, is_spent = b"?", True
            except Exception:  # text from a model that math-verify cannot read
                outcome = b"?"
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            os.write(writer, outcome)
            if is_spent:  # the next pair gets a process with room
                return
    finally:
        os._exit(0)


def check_all(
    pairs: Sequence[Pair], check: Callable[[str, str], bytes], *, num_workers: int, seconds: float, max_bytes: int
) -> list[str]:
    """
    Check pairs in forks.

    Args:
        pairs (`Sequence[tuple[str, str]]`):
            What to check.
        check (`Callable[[str, str], bytes]`):
            Gives a key of `OUTCOMES`. May hang, crash or fill the memory.
        num_workers (`int`):
            Most forks at a time.
        seconds (`float`):
            Processor time allowed for a pair, in its fork; ten times that of the wall clock.
        max_bytes (`int`):
            Address space of a fork.

    Returns:
        `list[str]`:
            `"equal"`, `"unequal"`, `"unreadable"` or `"timeout"`, in order.
    """
    outcomes = ["timeout"] * len(pairs)
    size = min(max(-(-len(pairs) // num_workers), MIN_PAIRS_PER_FORK), MAX_PAIRS_PER_FORK)
    waiting = deque(range(start, min(start + size, len(pairs))) for start in range(0, len(pairs), size))
    running: dict[int, tuple[range, int]] = {}
    while waiting or running:
        while waiting and len(running) < num_workers:
            rows = waiting.popleft()
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                if sys.platform == "linux":
                    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
                run_fork([pairs[row] for row in rows], writer, check, seconds)
            os.close(writer)
            running[child] = rows, reader
        child, status = os.waitpid(-1, 0)
        rows, reader = running.pop(child)
        done = os.read(reader, len(rows))  # never blocks: the fork, the only writer, is gone
        os.close(reader)
        for row, byte in zip(rows, done, strict=False):
            outcomes[row] = OUTCOMES[bytes([byte])]
        # A fork that a signal ended had one more pair in its hands, which stays a timeout
        rest = rows[len(done) + os.WIFSIGNALED(status) :]
        if rest:
            waiting.appendleft(rest)
    return outcomes


def serve(check: Callable[[str, str], bytes]) -> None:
    """Answer requests until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle; its end closes the pipe
    gc.freeze()  # a collection in a fork would copy every page
    num_workers, seconds, max_bytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    print("ready", flush=True)  # noqa: T201  # the pipe to the trainer
    for line in sys.stdin:
        outcomes = check_all(json.loads(line), check, num_workers=num_workers, seconds=seconds, max_bytes=max_bytes)
        print(json.dumps(outcomes), flush=True)  # noqa: T201


def main() -> None:
    logging.disable(logging.CRITICAL)  # math-verify announces that its own timers are off
    for gold, answer in WARM_UP:
        compare(gold, answer)
    serve(compare)


if __name__ == "__main__":
    main()
