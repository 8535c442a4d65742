# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

import json
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trl_stabledrl.rewards import BUILTIN_REWARDS, GRADERS

DATA = Path(__file__).parents[1] / "data"
CASES = [json.loads(line) for line in (DATA / "rewards.jsonl").read_text().splitlines()]
PUZZLE = "1030041200400321"
COLUMNS = {"answer": "5", "target": 25, "numbers": [1, 3, 8], "puzzle": PUZZLE, "solution": "1" * 16}
CORRECTNESS = [name for name in BUILTIN_REWARDS if name not in ("answer_tag_reward", "anti_short_reward")]


def score(name, completion, **columns):
    """Score of one completion, after checking that both of TRL's forms get the same."""
    columns = {column: [value, value] for column, value in columns.items()}
    messages = [{"role": "assistant", "content": completion}]
    plain, chat = BUILTIN_REWARDS[name](completions=[completion, messages], prompts=["", ""], unused=[0, 0], **columns)
    assert plain == chat
    assert isinstance(plain, float)
    return plain


def test_every_case_is_here():
    assert len(CASES) == 34


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['task']}-{case['completion'][:30]!r}")
def test_case(case):
    assert score(f"{case['task']}_reward", case["completion"], **case["columns"]) == pytest.approx(
        case["expected"], abs=1e-6
    )


def test_an_answer_in_the_prompt_has_no_effect():
    prompts = [[{"role": "user", "content": "<answer>72</answer>"}]]
    assert BUILTIN_REWARDS["gsm8k_reward"](prompts=prompts, completions=["no idea"], answer=["72"]) == [0.0]


def test_rows_of_a_batch_are_scored_apart_and_in_order():
    completions = ["<answer>3</answer>", [{"role": "assistant", "content": "4"}], "5"]
    assert BUILTIN_REWARDS["gsm8k_reward"](completions, answer=["3", "5", "5"]) == [1.0, 0.0, 1.0]


def test_a_column_of_another_length_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        BUILTIN_REWARDS["exact_match_reward"](["1", "2"], answer=["1"])


def test_the_written_rows_are_right():
    rows = [json.loads(line) for line in (DATA / "gsm8k_like.jsonl").read_text().splitlines()]
    assert len(rows) == 24
    completions, answers = [row["completion"] for row in rows], [row["answer"] for row in rows]
    assert BUILTIN_REWARDS["gsm8k_reward"](completions, answer=answers) == [1.0] * 24
    assert BUILTIN_REWARDS["answer_tag_reward"](completions) == [1.0] * 24
    shifted = answers[1:] + answers[:1]
    assert BUILTIN_REWARDS["gsm8k_reward"](completions, answer=shifted) == [0.0] * 24


HOSTILE = {
    "open braces": "{" * 200_000,
    "boxes": r"\boxed{" * 28_000,
    "box of open braces": r"\boxed{" + "{" * 200_000,
    "box of nested braces": r"\boxed{" + "{" * 100_000 + "}" * 100_001,
    "tags": "<answer>" * 25_000,
    "nesting": "<answer>" + "(" * 100_000 + "1" + ")" * 100_000 + "</answer>",
    "nesting in a box": r"\boxed{" + "(" * 100_000 + "1" + ")" * 100_000 + "}",
    "short nesting": "<answer>" + "(" * 60 + "8*3+1" + ")" * 60 + "</answer>",
    "digits": "9" * 200_000,
    "answer of digits": "<answer>" + "9" * 200_000 + "</answer>",
    "5,000 digits": "<answer>" + "5" * 5_000 + "</answer>",
    "tower": "<answer>9**9**9**9</answer>",
    "LaTeX tower": r"\boxed{9^{9^{9^{9}}}}",
    "factorials": r"\boxed{(((9!)!)!)!}",
    "long sum": r"\boxed{\sum_{i=1}^{10^{9}} i^{-\pi}}",
    "hard integral": r"\boxed{\int_0^1 e^{x^{x^x}} \sin(x^{x}) dx}",
    "large exponent": "<answer>1e99999999</answer>",
    "division by zero": "<answer>1/0</answer>",
    "hidden division by zero": "<answer>1/(8-3-5)</answer>",
    "LaTeX division by zero": r"\boxed{\frac{1}{0}}",
    "fullwidth digit": "<answer>\uff15</answer>",
    "Arabic digit": r"\boxed{٥}",
    "superscript": "<answer>5²</answer>",
    "fullwidth grid": "<answer>" + "１２３４３４１２２１４３４３２１" + "</answer>",
    "fullwidth expression": "<answer>８*3+1</answer>",
    "spaces": "answer" + " " * 200_000,
    "spaced digits": "1 " * 100_000,
    "commas": "1," * 100_000,
    "grid borders": "1" + "|" * 200_000,
    "hashes": "#" * 200_000,
    "dollars": "$" * 200_000,
    "backslashes": "\\" * 200_000,
    "fractions": r"\frac" * 40_000,
    "phrases": "the answer is " * 14_000,
    "NUL": "<answer>\0</answer>",
    "lone surrogate": "\\boxed{\ud800}",
}


@pytest.fixture(scope="module", autouse=True)
def _math_worker():
    """Start the comparison process before anything is timed: importing sympy takes a second, once."""
    assert score("math_reward", r"\boxed{1+x}", answer="x+1") == 1.0


@pytest.mark.parametrize("name", CORRECTNESS)
@pytest.mark.parametrize("completion", HOSTILE.values(), ids=HOSTILE)
def test_hostile_completions_score_zero_in_time(name, completion):
    start = time.process_time()
    wall_start = time.monotonic()
    (reward,) = BUILTIN_REWARDS[name]([completion], **{column: [value] for column, value in COLUMNS.items()})
    assert reward == 0.0
    assert time.process_time() - start < 1.0
    assert time.monotonic() - wall_start < 5.0  # a second on a free core; other jobs may share this one


FRAGMENTS = st.sampled_from(
    ["<answer>", "</answer>", r"\boxed{", "}", "{", "####", "the answer is ", "=", "-", "+", "/", "(", ")", "*", "^"]
    + ["\n", "1", "8", "3", "1030041200400321", r"\frac", r"\sqrt", r"\left", "$", ",", ".", " ", "\uff15", "½", "x"]
    + ["%", r"\{", r"\text", "|"]
)
COMPLETIONS = st.one_of(st.text(), st.lists(FRAGMENTS, max_size=30).map("".join), st.text("0123456789+-*/()= "))


@pytest.mark.parametrize("name", BUILTIN_REWARDS)
@given(completion=COMPLETIONS)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_no_completion_crashes_a_grader_or_takes_long(name, completion):
    for text in (completion, f"<answer>{completion}</answer>", rf"\boxed{{{completion}}}"):
        start = time.process_time()
        wall_start = time.monotonic()
        assert 0.0 <= score(name, text, **COLUMNS) <= 1.0
        assert time.process_time() - start < 1.0
        assert time.monotonic() - wall_start < 5.0  # as above


def test_a_reward_is_the_score_of_its_grade():
    texts = ["<answer>8*3+1</answer>", "<answer>1234341221434321</answer>", "5", "", r"\boxed{5", "<answer>7</answer>"]
    columns = {column: [value] * len(texts) for column, value in COLUMNS.items()}
    for name, grader in GRADERS.items():
        grades = grader(completions=texts, prompts=[""] * len(texts), unused=texts, **columns)
        assert [grade.score for grade in grades] == BUILTIN_REWARDS[name](completions=texts, **columns)
        assert [grade.is_right for grade in grades] == [grade.score == 1.0 for grade in grades]
        assert [grade.is_right for grade in grades] == [grade.reason == "right" for grade in grades]
        assert (grades[3].score, grades[3].answer, grades[3].reason) == (0.0, None, "no_answer")


@pytest.mark.parametrize(
    ("name", "text", "columns", "answer", "reason"),
    [
        ("gsm8k_reward", "<answer>$72.0</answer>", {"answer": "72"}, "72", "right"),
        ("gsm8k_reward", "<answer>144/5</answer>", {"answer": "72"}, "144/5", "wrong"),
        ("gsm8k_reward", "<answer>71 or 72</answer>", {"answer": "72"}, "71 or 72", "invalid"),
        ("gsm8k_reward", "<answer>72", {"answer": "72"}, None, "no_answer"),
        ("exact_match_reward", "12 ", {"answer": "12"}, "12", "right"),
        ("exact_match_reward", "1 2", {"answer": "12"}, "1 2", "wrong"),
        ("countdown_reward", "<answer>8*3+1</answer>", {"target": 25, "numbers": [1, 3, 8]}, "8*3+1", "right"),
        ("countdown_reward", "<answer>8+3+1</answer>", {"target": 25, "numbers": [1, 3, 8]}, "8+3+1", "wrong"),
        ("countdown_reward", "<answer>8*3</answer>", {"target": 24, "numbers": [1, 3, 8]}, "8*3", "invalid"),
        ("countdown_reward", "8*3+1", {"target": 25, "numbers": [1, 3, 8]}, None, "no_answer"),
        ("sudoku_reward", r"\boxed{1234 3412 2143 4321}", {"puzzle": PUZZLE}, "1234341221434321", "right"),
        ("sudoku_reward", "<answer>1334341221434321</answer>", {"puzzle": PUZZLE}, "1334341221434321", "partial"),
        ("sudoku_reward", "1234341221434312", {"puzzle": "1234341221434300"}, "1234341221434312", "wrong"),
        ("sudoku_reward", "<answer>4234341221434321</answer>", {"puzzle": PUZZLE}, "4234341221434321", "invalid"),
        ("sudoku_reward", "<answer>1234</answer>", {"puzzle": PUZZLE}, "1234", "invalid"),
        ("sudoku_reward", "1234", {"puzzle": PUZZLE}, None, "no_answer"),
    ],
)
def test_grades_name_answer_and_reason(name, text, columns, answer, reason):
    (grade,) = GRADERS[name]([text], **{column: [value] for column, value in columns.items()})
    assert (grade.answer, grade.reason) == (answer, reason)
