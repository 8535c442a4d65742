# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""
Process that compares two LaTeX answers with math-verify, one JSON line in, one word out.

Run by path, apart from the trainer: sympy computes `9^{9^{9^{9}}}` in C, where neither a signal handler nor a thread
can interrupt it. Each comparison therefore runs in a fork of this small process, which the kernel ends in time.
"""

import gc
import json
import logging
import os
import resource
import signal
import sys

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


def is_equal(gold: str, answer: str) -> bool:
    from math_verify import parse, verify

    # 0: no timer of its own, which would replace ours
    right, given = (parse(rf"\boxed{{{text}}}", parsing_timeout=0) for text in (gold, answer))
    return bool(right and given and verify(right, given, timeout_seconds=0))


def compare(gold: str, answer: str, time_limit: float, max_bytes: int) -> None:
    """Compare in this process, a fresh fork, and leave by exit status: 0 for equal, 1 for unequal."""
    # Default dispositions end the process. Processor time: waiting is not charged; the wall clock is a backstop.
    signal.setitimer(signal.ITIMER_PROF, time_limit)
    signal.setitimer(signal.ITIMER_REAL, 30.0 * time_limit)
    status = 1
    try:
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
        status = int(not is_equal(gold, answer))
    finally:  # also after any exception: text from a model that math-verify cannot read is not equal
        os._exit(status)


def main() -> None:
    logging.disable(logging.CRITICAL)  # math-verify announces that its own timers are off
    for gold, answer in WARM_UP:
        is_equal(gold, answer)
    gc.freeze()  # a collection in a fork would copy every page
    time_limit, max_bytes = float(sys.argv[1]), int(sys.argv[2])
    print("ready", flush=True)  # noqa: T201  # the pipe to the trainer
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            compare(request["gold"], request["answer"], time_limit, max_bytes)
        status = os.waitpid(child, 0)[1]
        outcome = "timeout" if os.WIFSIGNALED(status) else ("equal", "unequal")[os.WEXITSTATUS(status)]
        print(outcome, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
