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


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        ("<answer>- 72</answer>", "-72", 1.0),
        ("<answer>- 72</answer>", "72", 0.0),
        (r"\boxed{- 72}", "-72", 1.0),
        ("The answer is - 72", "-72", 1.0),
        ("The answer is - 72", "72", 0.0),
        (r"<answer>\sqrt{144}</answer>", "144", 0.0),
        (r"\boxed{72!}", "72", 0.0),
        ("<answer>72x</answer>", "72", 0.0),
        ("<answer>72k</answer>", "72", 0.0),
        ("<answer>72 thousand</answer>", "72", 0.0),
        (r"\boxed{72\text{ thousand}}", "72", 0.0),
        ("The answer is 72 or maybe 3.", "72", 0.0),
        (r"\boxed{72\text{ cm}^2}", "72", 1.0),
        (r"\boxed{24\,\text{ft}^2}", "24", 1.0),
        ("<answer>24 ft^2</answer>", "24", 1.0),
        (r"<answer>72^\circ</answer>", "72", 1.0),
        (r"<answer>\frac{-144}{2}</answer>", "-72", 1.0),
        (r"<answer>7.2 \times 10^1</answer>", "72", 1.0),
        ("<answer>1 234</answer>", "1234", 1.0),
        ("<answer>72 = 3 * 24</answer>", "72", 1.0),
        (r"so \boxed72", "72", 1.0),
        (r"so $\boxed72$.", "72", 1.0),
        ("The answer is 72 = 3 * 24.", "72", 1.0),
        ("<answer>72 clips, that is 72.0</answer>", "72", 1.0),
        (r"<answer>2\frac{1}{2}</answer>", "5/2", 1.0),
        (r"<answer>72\pi</answer>", "72", 0.0),
        ("<answer>72 miles</answer>", "72", 1.0),
        ("<answer>72 m</answer>", "72", 1.0),
        ("<answer>72m</answer>", "72", 1.0),
        ("<answer>72%</answer>", "72", 1.0),
        ("<answer>x = 72</answer>", "72", 1.0),
        ("<answer>x + 72</answer>", "72", 0.0),
        ("<answer>x - 72</answer>", "72", 0.0),
        ("<answer>72 - y</answer>", "72", 0.0),
        ("<answer>sqrt(144)</answer>", "144", 0.0),
        ("<answer>\N{SQUARE ROOT}144</answer>", "144", 0.0),
        ("<answer>**72**</answer>", "72", 1.0),
        ("He has 72!", "72", 1.0),
        ("The answer is 72!", "72", 1.0),
        (r"<answer>\textbf{72}</answer>", "72", 1.0),
        (r"<answer>\$72</answer>", "72", 1.0),
        (r"<answer>-\frac{144}{-2}</answer>", "72", 1.0),
        ("<answer>2^{10}</answer>", "10", 0.0),
        ("<answer>$1,234$</answer>", "1234", 1.0),
        ("- 6 per box\n- 12 boxes", "12", 1.0),
        ("6 - 12", "12", 1.0),
        ("<answer>72 square feet</answer>", "72", 1.0),
        ("<answer>72 apples</answer>", "72", 1.0),
        ("<answer>She has 72 I think</answer>", "72", 1.0),
        ("x = - 72", "-72", 1.0),
        ("<answer>1 234 567</answer>", "1234567", 1.0),
        ("<answer>72 a day</answer>", "72", 1.0),
        (r"<answer>72\text{ x}</answer>", "72", 0.0),
        ("The answer is 72 minutes or 1.2 hours", "72", 1.0),
        ("<answer>$72/hour</answer>", "72", 1.0),
        (r"<answer>\log 100</answer>", "100", 0.0),
        ("<answer>$- 72$</answer>", "-72", 1.0),
        ("<answer>-72</answer>", "-72", 1.0),
        ("<answer>\N{MINUS SIGN} 72</answer>", "-72", 1.0),
        (r"<answer>\mathbf{72}</answer>", "72", 1.0),
        ("<answer>72k</answer>", "72000", 0.0),
        (r"\boxed72^2", "72", 0.0),
        ("<answer>20 dollars</answer>", "20", 1.0),
        (r"<answer>72 \text{ miles per hour}</answer>", "72", 1.0),
        ("<answer>12:30</answer>", "30", 0.0),
        ("<answer>60 + 12 = 72 km</answer>", "72", 1.0),
        ("#### - 72", "-72", 1.0),
        ("<answer>15 cubic meters</answer>", "15", 1.0),
        ("<answer>I think it's $72 - that's it</answer>", "72", 1.0),
    ],
)
def test_gsm8k_reads_a_number_as_it_is_meant(completion, gold, expected):
    assert gsm8k_reward([completion], answer=[gold]) == [expected]


@pytest.mark.parametrize("answer", [None, "", " ", "$$", r"\boxed{}"])
def test_math_needs_an_expression_as_the_right_answer(answer):
    with pytest.raises(ValueError, match=r"Column `answer` .* got .*LaTeX"):
        math_reward(["5"], answer=[answer])


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
