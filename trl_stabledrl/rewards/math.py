# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""Correctness of numbers (GSM8K) and of mathematical expressions (MATH)."""

import atexit
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

from .parsing import completion_text, extract_answer, extract_number, find_numbers, last_boxed

_MAX_EXPRESSION_CHARS = 500
_MAX_NESTING = 30
_MAX_DIGIT_RUN = 60
_WORKER_SECONDS = 0.8  # of processor time, per comparison; the usual one takes 0.02
_WORKER_BYTES = 4 * 2**30
_BOOTSTRAP = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "runpy.run_path(sys.argv.pop(), run_name='__main__')"
)


def gsm8k_reward(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float]:
    r"""
    Reward function that checks whether the completion's number equals the right one, exactly.

    Numbers are compared as fractions: `72.0`, `$72`, `144/2` and `\boxed{72}` all equal `72`.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, as plain text or chat messages.
        answer (`list`):
            Right answers: a number, its text, or a full GSM8K solution that ends in `#### number`.
        **kwargs:
            Other columns, ignored.

    Returns:
        `list[float]`:
            1.0 for a right answer, else 0.0.

    Example:
    ```python
    >>> from trl_stabledrl.rewards import gsm8k_reward

    >>> gsm8k_reward(["<answer>$1,200</answer>", "It is 12."], answer=["1200", "13"])
    [1.0, 0.0]
    ```
    """
    right = [_gold_number(gold) for gold in answer]
    texts = [completion_text(completion) for completion in completions]
    return [float(extract_number(text) == gold) for text, gold in zip(texts, right, strict=True)]


def _gold_number(answer: Any) -> Fraction:
    text = str(answer).rsplit("####", 1)[-1]
    numbers = find_numbers(text) if re.fullmatch(r"[-+$0-9.,/%eE\s]*", text) else []
    if len(numbers) != 1 or numbers[0] is None:
        raise ValueError(
            f"Column `answer` must hold one number per row, got {answer!r}. Give the number itself, or a solution "
            "that ends in '#### number'; for other answers use `math_reward`."
        )
    return numbers[0]


def math_reward(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float]:
    r"""
    Reward function that checks whether the completion's expression equals the right one, by math-verify.

    Equal texts and plain numbers are decided here, exactly. All else is compared in a process of its own, limited to
    0.8 seconds of processor time: an expression that takes longer, has more than 500 characters or nests deeper
    than 30 scores 0.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, as plain text or chat messages.
        answer (`list[str]`):
            Right answers, as LaTeX with or without `\boxed{}` and `$`.
        **kwargs:
            Other columns, ignored.

    Returns:
        `list[float]`:
            1.0 for a right answer, else 0.0.

    Example:
    ```python
    >>> from trl_stabledrl.rewards import math_reward

    >>> math_reward([r"\boxed{\frac{2}{4}}", r"\boxed{2}"], answer=[r"\frac{1}{2}", "3"])
    [1.0, 0.0]
    ```
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("`math_reward` needs math-verify. Install it with `pip install trl_stabledrl[math]`.")
    texts = [completion_text(completion) for completion in completions]
    return [float(_is_equal(str(gold), extract_answer(text))) for text, gold in zip(texts, answer, strict=True)]


def _is_equal(gold: str, answer: str | None) -> bool:
    if not answer or not _is_affordable(answer):
        return False
    boxed = last_boxed(gold)
    gold = (gold if boxed is None else boxed).strip().removeprefix("$").removesuffix("$").strip()
    if _squeezed(gold) == _squeezed(answer):
        return True
    gold_number, number = _whole_number(gold), _whole_number(answer)
    if gold_number is not None and number is not None:
        return gold_number == number
    return _WORKER.is_equal(gold, answer)


def _is_affordable(answer: str) -> bool:
    """Whether an answer is of a size worth handing to a computer algebra system."""
    if len(answer) > _MAX_EXPRESSION_CHARS or re.search(rf"[0-9]{{{_MAX_DIGIT_RUN}}}", answer):
        return False
    # sympy reads digits of any script, a grader of a model's text should not
    if any(character.isdigit() and not character.isascii() for character in answer):
        return False
    depth = deepest = 0
    for character in answer:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    return deepest <= _MAX_NESTING


def _squeezed(expression: str) -> str:
    expression = expression.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return re.sub(r"\s+|\\left|\\right|\\!|\.$", "", expression)


def _whole_number(expression: str) -> Fraction | None:
    """Value of an expression that is one plain number and nothing else."""
    is_number = re.fullmatch(r"-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?:/[0-9]+)?", expression)
    numbers = find_numbers(expression) if is_number else []
    return numbers[0] if len(numbers) == 1 else None


class _Worker:
    """The comparison process of this process, started when first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._owner_pid = 0
        self._lock = threading.Lock()

    def is_equal(self, gold: str, answer: str) -> bool:
        with self._lock:
            # A forked child must not share its parent's pipe: replies would go to whoever reads first
            if self._process is None or self._owner_pid != os.getpid():
                self._process = self._start()
            outcome = self._ask(self._process, json.dumps({"gold": gold, "answer": answer}))
            assert outcome in ("equal", "unequal", "timeout"), outcome
            return outcome == "equal"

    @staticmethod
    def _ask(process: "subprocess.Popen[str]", request: str) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request + "\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    def _start(self) -> subprocess.Popen[str]:
        # By path and with our own search path: `python -m` would import the whole package, and torch with it
        script = str(Path(__file__).with_name("_math_worker.py"))
        search_path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, str(_WORKER_SECONDS), str(_WORKER_BYTES), script, search_path],
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


_WORKER = _Worker()
atexit.register(_WORKER.close)
