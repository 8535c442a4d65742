# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from trl_stabledrl.rewards import answer_tag_reward, anti_short_reward, exact_match_reward


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<reasoning>x</reasoning>\n<answer>\n5\n</answer>\n", 1.0),
        ("<answer> </answer>", 0.0),
        ("<answer>5</answer> and more", 0.0),
        ("<answer>5</answer><answer>5</answer>", 0.0),
        ("</answer>5<answer>", 0.0),
        ("<answer>5", 0.0),
        ("5", 0.0),
    ],
)
def test_one_closed_block_at_the_end_is_well_formed(text, expected):
    assert answer_tag_reward([text, [{"role": "assistant", "content": text}]]) == [expected] * 2


# \boxed{} takes 8 characters, so a box of n in a text of m words letters makes up n / (8 + n + m) of it
@pytest.mark.parametrize(
    ("num_letters", "num_boxed", "expected"),
    [
        (0, 1, 1.0),  # 1/9 = 0.111
        (0, 2, 0.0),  # 2/10
        (77, 15, 1.0),  # 15/100, not more than 15 %
        (76, 15, 0.0),  # 15/99
        (152, 40, 1.0),  # 200 characters: long enough, though the box is 20 %
        (151, 40, 0.0),  # 199
        (50, 0, 1.0),
    ],
)
def test_short_texts_that_are_mostly_box_get_no_bonus(num_letters, num_boxed, expected):
    text = "a \n" * num_letters + rf"\boxed{{{'1' * num_boxed}}}"
    assert anti_short_reward([text, [{"role": "assistant", "content": text}]]) == [expected] * 2


def test_a_short_text_without_a_box_keeps_the_bonus():
    assert anti_short_reward(["", "no box"]) == [1.0, 1.0]


def test_exact_match_ignores_only_white_space_around_the_answer():
    completions = [" 12\n", "1 2", "012", "12", [{"role": "assistant", "content": "12"}]]
    assert exact_match_reward(completions, answer=["12", "12", "12", 12, "12 "]) == [1.0, 0.0, 0.0, 1.0, 1.0]


def test_exact_match_needs_a_right_answer():
    with pytest.raises(ValueError, match="Column `answer` .* got None"):
        exact_match_reward(["None"], answer=[None])
