# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

import ast
import random
from fractions import Fraction

import pytest

from trl_stabledrl.rewards import countdown_format_reward, countdown_reward


def grade(expression, target, numbers):
    (reward,) = countdown_reward([f"<answer>{expression}</answer>"], target=[target], numbers=[numbers])
    return reward


@pytest.mark.parametrize(
    ("expression", "target", "numbers", "expected"),
    [
        ("(1+3)*8", 32, [8, 3, 1], 1.0),
        ("8-3-1", 4, [1, 3, 8], 1.0),
        ("8/3/2*3", 4, [8, 3, 2, 3], 1.0),
        ("1/3*3", 1, [1, 3, 3], 1.0),
        ("-3+8*1", 5, [1, 3, 8], 1.0),
        ("8*(-3+1)", -16, [1, 3, 8], 1.0),
        (r"8 \times 3 + 1", 25, [1, 3, 8], 1.0),
        (r"\frac{8}{4}+3", 5, [8, 4, 3], 1.0),
        ("$8*3+1$", 25, [1, 3, 8], 1.0),
        ("8*3+1=25", 25, [1, 3, 8], 1.0),
        (r"\(8 \times 3 + 1\)", 25, [1, 3, 8], 1.0),
        (r"\[8 \times 3 + 1\]", 25, [1, 3, 8], 1.0),
        (r"8\,\times\,3+1", 25, [1, 3, 8], 1.0),
        ("**8*3+1**", 25, [1, 3, 8], 1.0),
        ("8*3+1.", 25, [1, 3, 8], 1.0),
        ("8\N{ASTERISK OPERATOR}3+1", 25, [1, 3, 8], 1.0),
        (r"\frac{\frac{8}{1}}{2}", 4, [8, 1, 2], 1.0),
        (r"\frac81*3", 24, [1, 3, 8], 1.0),
        ("8*3+1 = 25.0", 25, [1, 3, 8], 1.0),
        ("8*3+1 = 25.1", 25, [1, 3, 8], 0.0),
        ("8**3+1", 25, [1, 3, 8], 0.0),
        ("8.3+1", 25, [1, 3, 8], 0.0),
        ("8*3+1=24", 25, [1, 3, 8], 0.0),
        ("8*3+1=25=25", 25, [1, 3, 8], 0.0),
        ("8*3+1=24+1", 25, [1, 3, 8], 0.0),
        ("25=8*3+1", 25, [1, 3, 8], 0.0),
        ("8*3+1", 26, [1, 3, 8], 0.0),
        ("8*3+1", 25, [1, 3, 8, 8], 0.0),
        ("8*3+1+1", 26, [1, 3, 8], 0.0),
        ("83+1", 84, [1, 3, 8], 0.0),
        ("8*03+1", 25, [1, 3, 8], 0.0),
        ("8//3+1", 3, [1, 3, 8], 0.0),
        ("8(3)+1", 25, [1, 3, 8], 0.0),
        ("8*3+1)", 25, [1, 3, 8], 0.0),
        ("(8*3+1", 25, [1, 3, 8], 0.0),
        ("8*3++1", 25, [1, 3, 8], 0.0),
        ("8 3 1", 831, [1, 3, 8], 0.0),
        ("abs(8*3+1)", 25, [1, 3, 8], 0.0),
        ("8*3+1 or 8+3+1", 25, [1, 3, 8], 0.0),
        ("", 25, [1, 3, 8], 0.0),
    ],
)
def test_expressions_follow_the_rules(expression, target, numbers, expected):
    assert grade(expression, target, numbers) == expected


def test_a_box_counts_and_bare_text_does_not():
    completions = [r"\boxed{8*3+1}", r"<answer>\boxed{8*3+1}</answer>", "8*3+1"]
    assert countdown_reward(completions, target=[25] * 3, numbers=[[1, 3, 8]] * 3) == [1.0, 1.0, 0.0]


def test_the_format_reward_ignores_the_value():
    completions = ["<answer>8+3+1</answer>", "<answer>8+3</answer>", "<answer>8*3+</answer>", "8+3+1"]
    assert countdown_format_reward(completions, numbers=[[1, 3, 8]] * 4) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("numbers", [[5.9], [-5], ["x"], [None], [], "5", 5, None])
def test_numbers_that_are_no_integers_are_an_error_in_the_data(numbers):
    with pytest.raises(ValueError, match=r"Column `numbers` .* got .* \[1, 3, 8\]"):
        grade("5", 5, numbers)
    with pytest.raises(ValueError, match=r"Column `numbers` "):
        countdown_format_reward(["5"], numbers=[numbers])


@pytest.mark.parametrize("target", [None, "x", [5], float("inf"), float("nan")])
def test_a_target_that_is_no_number_is_an_error_in_the_data(target):
    with pytest.raises(ValueError, match=r"Column `target` .* got .* such as 25"):
        grade("5", target, [5])


def random_expression(rng, numbers):
    if len(numbers) == 1:
        return str(numbers[0])
    cut = rng.randint(1, len(numbers) - 1)
    left, right = random_expression(rng, numbers[:cut]), random_expression(rng, numbers[cut:])
    text = f"{left} {rng.choice('+-*/')} {right}"
    return f"({text})" if rng.random() < 0.5 else text


def exact_value(node):
    """Value by Python's own parser, in fractions."""
    if isinstance(node, ast.Constant):
        return Fraction(str(node.value))
    left, right = exact_value(node.left), exact_value(node.right)
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case _:
            return left / right


def test_random_expressions_get_the_value_python_gives_them():
    rng = random.Random(0)
    num_valid = 0
    for _ in range(2000):
        numbers = [rng.randint(1, 9) for _ in range(rng.randint(2, 5))]
        text = random_expression(rng, numbers)
        try:
            value = exact_value(ast.parse(text, mode="eval").body)
        except ZeroDivisionError:
            assert grade(text, 0, numbers) == 0.0
            continue
        num_valid += 1
        shuffled = rng.sample(numbers, len(numbers))
        assert grade(text, value, shuffled) == 1.0
        assert grade(text, value + Fraction(1, 1000), shuffled) == 0.0
        assert grade(text, value, [*numbers[1:], numbers[0] + 1]) == 0.0
        assert grade(text, value, [*numbers, 1]) == 0.0
    assert num_valid > 1500
