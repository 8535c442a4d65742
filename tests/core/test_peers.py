# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Weights of the peers' objectives against numbers worked out by hand, and their extremes."""

import math

import pytest
import torch

from trl_stabledrl.core.peers import OBJECTIVES, Rows, conditional_clip, leave_one_out, token_weights, wd1_advantage

CLIP = (math.log(0.8), math.log(1.2))
GROUP = torch.tensor([0, 0, 1, 1])


def rows(log_ratio: list[float], advantage: list[float] | None = None) -> Rows:
    values = advantage or [1.0, -1.0, 1.0, -1.0]
    return Rows(torch.tensor(log_ratio), torch.tensor(values), GROUP, torch.tensor([2, 6, 3, 1]), group_size=2)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_extreme_ratios_stay_finite_and_an_unscorable_row_weighs_nothing(name, size):
    weights = OBJECTIVES[name].weights(rows([size, -size, math.nan, 0.0]), CLIP)

    assert weights.isfinite().all()
    assert weights[2] == 0.0
    assert (weights >= 0.0).all()


@pytest.mark.parametrize("name", ["clip_only", "self_norm_only", "grpo", "stabledrl"])
def test_on_policy_every_row_of_a_group_weighs_the_same(name):
    assert OBJECTIVES[name].weights(rows([0.0] * 4), CLIP).tolist() == [0.5] * 4


def test_the_conditional_clip_bounds_one_side_of_each_sign():
    ratio = torch.tensor([2.0, 2.0, 0.5, 0.5, 1.1])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])

    found = conditional_clip(ratio.log(), advantage, CLIP)

    # nothing holds back the ratio of a bad completion that grew: what makes GRPO spike
    torch.testing.assert_close(found, torch.tensor([0.0, 2.0, 0.5, 0.0, 1.1]))


def test_weights_by_length_count_every_token_alike():
    weights = OBJECTIVES["spg"].weights(rows([0.0] * 4), CLIP)

    torch.testing.assert_close(weights, torch.tensor([0.25, 0.75, 0.75, 0.25]))


def test_token_weights_are_means_over_the_scored_tokens():
    is_scored = torch.tensor([[True, True, False], [True, False, False]])
    log_ratio = torch.tensor([[2.0, 0.5, 9.0], [0.5, 1.0, 1.0]]).log()

    weights = token_weights(log_ratio, torch.tensor([1.0, 1.0]), is_scored, clip=CLIP, group_size=2)

    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.125, 0.0], [0.25, 0.0, 0.0]]))


def test_the_baseline_without_a_row_is_the_mean_of_the_others():
    rewards = torch.tensor([1.0, 0.0, 0.5])
    group = torch.zeros(3, dtype=torch.long)

    found = leave_one_out(rewards - rewards.mean(), group)

    torch.testing.assert_close(found, torch.tensor([1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5]))


def test_wd1_imitates_the_good_and_unlearns_the_bad():
    advantage = torch.tensor([1.0, -1.0, 0.0, 0.0])

    found = wd1_advantage(advantage, GROUP)

    share = math.e / (math.e + 1 / math.e)
    torch.testing.assert_close(found, torch.tensor([2 * share - 1, 1 - 2 * share, 0.0, 0.0]))
