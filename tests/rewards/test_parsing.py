# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

from fractions import Fraction

import pytest

from trl_stabledrl.rewards.parsing import completion_text, extract_answer, extract_number, find_numbers, last_boxed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no box", None),
        (r"\boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}} and", r"\frac{1}{2}"),
        (r"\boxed{1} then \fbox{2}", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{5} wait \boxed{7", ""),
        (r"\boxed{5\}", ""),
        (r"put it in \boxed", None),
        (r"\boxed72", "72"),
        (r"$\boxed 1,234.5$.", "1,234.5"),
        (r"\boxed72^2", None),
    ],
)
def test_the_last_box_is_read_with_balanced_braces(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>1</answer><answer> 2 </answer>", "2"),
        (r"\boxed{7} <answer>2</answer>", "2"),
        (r"<answer>\boxed{x+1}</answer>", "x+1"),
        (r"<answer>$x+1$</answer>", "x+1"),
        ("<answer>1</answer> or <answer>2", ""),
        ("<answer></answer> 5", ""),
        ("#### 1,200\nDone in 3 steps.", "1,200"),
        ("The answer is $\\frac{1}{2}$. Checked 3 times.", "\\frac{1}{2}"),
        ("**Answer:** 5", "5"),
        ("3 apples and 4 pears, 7 in all", "7"),
        ("nothing", None),
        ("", None),
    ],
)
def test_markers_are_tried_in_order(text, expected):
    assert extract_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-12", [Fraction(-12)]),
        ("\N{MINUS SIGN}12", [Fraction(-12)]),
        ("-$1,234.50", [Fraction(-2469, 2)]),
        ("$-5", [Fraction(-5)]),
        ("10-12", [Fraction(10), Fraction(12)]),
        (r"9{,}500", [Fraction(9500)]),
        (r"\dfrac12 and -\frac{3}{4}", [Fraction(1, 2), Fraction(-3, 4)]),
        ("2 1/2", [Fraction(5, 2)]),
        (r"2\frac{1}{2}", [Fraction(5, 2)]),
        ("7.5e2", [Fraction(750)]),
        (".5", [Fraction(1, 2)]),
        ("80,000.", [Fraction(80000)]),
        ("10^2", [None, Fraction(2)]),
        ("7:30", [None, Fraction(30)]),
        ("1/0", [None]),
        ("x72 y", []),
        ("\uff17\uff12", []),
        ("7\uff12", [None]),
        ("7²", [None]),
        ("72**", [Fraction(72)]),
    ],
)
def test_numbers_are_read_exactly(text, expected):
    assert find_numbers(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>6 * 12 = 72</answer>", 72),
        ("<answer>72 clips, that is 72.0</answer>", 72),
        ("<answer>71 or 72</answer>", None),
        ("The answer is 71 or 72.", None),
        ("The answer is 8 * 9 = 72. Done in 2 steps", 72),
        ("The answer is 2 1/2", Fraction(5, 2)),
        ("The answer is right: 72", 72),
        ("<answer>72", None),
        ("<answer></answer> so 72", None),
        ("the answer is seventy-two, as in 72", 72),
        ("first 3, then 4", 4),
        ("10^2", 2),
    ],
)
def test_one_number_is_the_answer_or_none_is(text, expected):
    assert extract_number(text) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("plain", "plain"),
        ([{"role": "assistant", "content": "chat"}], "chat"),
        ([{"role": "assistant", "content": "first"}, {"role": "assistant", "content": "last"}], "last"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "ab"),
        ([{"role": "assistant", "content": None}], ""),
        ([{"role": "assistant", "tool_calls": []}], ""),
        ([{"role": "assistant", "content": [{"type": "text", "text": None}, {"type": "text"}, {}]}], ""),
        ([], ""),
    ],
)
def test_text_comes_out_of_both_forms(completion, expected):
    assert completion_text(completion) == expected
