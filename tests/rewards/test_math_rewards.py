# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

import importlib.util
import time

import pytest

from trl_stabledrl.rewards import gsm8k_reward, math_reward


@pytest.mark.parametrize("answer", ["72", 72, 72.0, "72.00", "6*12 = 144/2 ... \n#### 72"])
def test_gsm8k_takes_the_answer_as_number_text_or_solution(answer):
    assert gsm8k_reward(["<answer>72</answer>", "<answer>71</answer>"], answer=[answer] * 2) == [1.0, 0.0]


def test_gsm8k_compares_exactly():
    nearly = ["0.1", "0.10000000000000001", "1/10", "0.3333333333333333", "1/3"]
    assert gsm8k_reward(nearly, answer=["1/10"] * 3 + ["1/3"] * 2) == [1.0, 0.0, 1.0, 0.0, 1.0]


def test_gsm8k_needs_a_number_as_the_right_answer():
    with pytest.raises(ValueError, match=r"Column `answer` .* got 'x\+1'.*math_reward"):
        gsm8k_reward(["1"], answer=["x+1"])


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        (r"\frac{1}{2}", "0.5", 1.0),
        (r"\frac{1}{2}", r"\dfrac{2}{4}", 1.0),
        (r"\boxed{\frac{1}{2}}", r"\frac12", 1.0),
        ("$2\\sqrt{2}$", r"\sqrt{8}", 1.0),
        (r"(x+1)^2", "x^2+2x+1", 1.0),
        (r"(x+1)^2", "x^2+2x+2", 0.0),
        (r"\{1,2\}", r"\{2,1\}", 1.0),
        ("[0,1)", "[0,1)", 1.0),
        ("[0,1)", "[0,1]", 0.0),
        ("1,2", "2,1", 1.0),
        (r"\text{Evelyn}", r"\text{Evelyn}", 1.0),
        (r"\text{Evelyn}", r"\text{Evelina}", 0.0),
        ("10,000", "10000", 1.0),
        ("1.2345", "1.2346", 0.0),
        ("-1", "1", 0.0),
        ("p - q", "q - p", 0.0),
    ],
)
def test_math_compares_expressions(gold, answer, expected):
    assert math_reward([rf"So it is \boxed{{{answer}}}."], answer=[gold]) == [expected]


def test_a_comparison_that_hangs_leaves_the_others_alone():
    math_reward([r"\boxed{1+x}"], answer=["x+1"])  # starts the process
    completions = [r"\boxed{x+1+1}", r"\boxed{9^{9^{9^{9}}}}"] * 3
    start = time.monotonic()
    assert math_reward(completions, answer=["x+2", "5"] * 3) == [1.0, 0.0] * 3
    assert time.monotonic() - start < 15.0  # 3 x 0.8 s of processor time


def test_a_missing_math_verify_is_named_in_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install trl_stabledrl\[math\]") as error:
        math_reward(["1"], answer=["1"])
    assert "\n" not in str(error.value)
    assert gsm8k_reward(["1"], answer=["1"]) == [1.0]
