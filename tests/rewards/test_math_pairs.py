# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""Pairs of answers that were decided by people, among them those that math-verify decides otherwise."""

import json
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from trl_stabledrl.rewards import GRADERS, math_reward
from trl_stabledrl.rewards import _math_pool as pool_module
from trl_stabledrl.rewards._math_pool import MathPool

PAIRS = [json.loads(line) for line in Path(__file__).with_name("math_pairs.jsonl").read_text("utf-8").splitlines()]

# math-verify as it comes
ALONE = f"""
import logging, runpy
from math_verify import parse, verify

logging.disable(logging.CRITICAL)

def check(gold, answer):
    right, given = (parse(rf"\\boxed{{{{{{text}}}}}}", parsing_timeout=0) for text in (gold, answer))
    return b"=" if right and given and verify(right, given, timeout_seconds=0) else b"#"

worker = runpy.run_path({str(pool_module._WORKER)!r})
for pair in worker["WARM_UP"]:
    check(*pair)
worker["serve"](check)
"""


def test_the_table_is_large_enough_and_says_nothing_twice():
    counts = Counter((pair["kind"], pair["equal"]) for pair in PAIRS)
    kinds = ["fractions", "units", "percent", "intervals", "sets", "text", "separators", "signs", "algebra"]
    assert all(counts[kind, is_equal] >= 15 for kind in kinds for is_equal in (True, False)), counts
    assert sum(pair["equal"] for pair in PAIRS) >= 150
    assert sum(not pair["equal"] for pair in PAIRS) >= 150
    assert len({(pair["gold"], pair["answer"]) for pair in PAIRS}) == len(PAIRS)


def test_the_grader_decides_every_pair_as_written():
    completions = [rf"\boxed{{{pair['answer']}}}" for pair in PAIRS]
    grades = GRADERS["math_reward"](completions, answer=[pair["gold"] for pair in PAIRS])
    wrong = [(pair, grade) for pair, grade in zip(PAIRS, grades, strict=True) if grade.is_right != pair["equal"]]
    assert not wrong
    assert {grade.reason for grade in grades} == {"right", "wrong"}


def test_math_verify_alone_decides_the_listed_pairs_otherwise(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    pool = MathPool(seconds=2.0, script=script)
    listed = [pair for pair in PAIRS if pair["equal"] != pair["math_verify"]]
    assert len(listed) > 60
    outcomes = pool.outcomes([(pair["gold"], pair["answer"]) for pair in listed])
    pool.close()
    agreed = [pair for pair, outcome in zip(listed, outcomes, strict=True) if (outcome == "equal") == pair["equal"]]
    assert not agreed, "math-verify has changed: correct the column `math_verify`"


def written(rng, value):
    """A number in one of the ways people write it."""
    sign, value = ("-" if value < 0 else ""), abs(value)
    top, bottom, factor = value.numerator, value.denominator, rng.randint(1, 5)
    whole, rest = divmod(top, bottom)
    forms = [f"{sign}\\frac{{{top * factor}}}{{{bottom * factor}}}", f"{sign}{top * factor}/{bottom * factor}"]
    forms += [f"\\dfrac{{{sign}{top}}}{{{bottom}}}", f"{sign}\\left(\\frac{{{top}}}{{{bottom}}}\\right)"]
    forms += [f"{sign}{top * factor} / {bottom * factor}", f"\\frac{{{top}}}{{{sign}{bottom}}}"]
    if bottom == 1:
        forms += [f"{sign}{top}", f"{sign}{top}.0", f"{sign}{top:,}", f"{sign}{top:,}".replace(",", "{,}")]
        forms += [
            f"{sign}{top:,}".replace(",", "\\,"),
            f"x={sign}{top}",
            f"{sign}{top}\\text{{ cm}}",
            f"${sign}{top}$",
        ]
    elif whole and rest:
        forms += [f"{sign}{whole}\\frac{{{rest}}}{{{bottom}}}", f"{sign}{whole} {rest}/{bottom}"]
    if 10000 % bottom == 0:
        forms += [f"{sign}{10000 * top // bottom // 10000}.{10000 * top // bottom % 10000:04d}"]
        forms += [f"{sign}{100 * top // bottom}\\%"] if 100 % bottom == 0 else []
    return rng.choice(forms)


def test_numbers_are_compared_by_value_however_written():
    rng = random.Random(0)
    pairs = []
    for _ in range(1500):
        value = Fraction(rng.randint(-3000, 3000), rng.choice([1, 1, 1, 2, 3, 4, 5, 7, 8, 25]))
        other = value + Fraction(rng.choice([-1, 1]), rng.choice([1, 2, 9, 100, 1000]))
        near_misses = [candidate for candidate in (other, -value, 2 * value) if candidate != value]
        pairs.append((written(rng, value), written(rng, value), 1.0))
        if near_misses:
            pairs.append((written(rng, value), written(rng, rng.choice(near_misses)), 0.0))
    # 50% equals 50 as well as 0.5
    pairs = [pair for pair in pairs if pair[2] == 1.0 or "%" not in pair[0] + pair[1]]
    assert len(pairs) > 2500
    rewards = math_reward([rf"\boxed{{{answer}}}" for _, answer, _ in pairs], answer=[gold for gold, _, _ in pairs])
    wrong = [(pair, reward) for pair, reward in zip(pairs, rewards, strict=True) if reward != pair[2]]
    assert not wrong


@pytest.mark.parametrize(
    ("completion", "gold", "reason"),
    [
        (r"\boxed{1+x}", "x+1", "right"),
        (r"\boxed{5}", "5", "right"),
        (r"\boxed{2+x}", "x+1", "wrong"),
        (r"\boxed{6}", "5", "wrong"),
        ("", "5", "no_answer"),
        (r"\boxed{5} wait \boxed{7", "5", "no_answer"),
        (r"\boxed{9^{9^{9^{9}}}}", "5", "timeout"),
        (r"\boxed{" + "(" * 40 + "x" + ")" * 40 + "}", "x", "invalid"),
        (r"\boxed{" + "1+" * 300 + "1}", "301", "invalid"),
        (r"\boxed{\frac{1}{}", "5", "no_answer"),
        (r"\boxed{\frac{x}{}}", "5", "wrong"),
    ],
)
def test_every_grade_has_its_reason(completion, gold, reason):
    (grade,) = GRADERS["math_reward"]([completion], answer=[gold])
    assert grade.reason == reason
    assert grade.is_right == (grade.score == 1.0) == (reason == "right")
    assert (grade.answer is None) == (reason == "no_answer")
