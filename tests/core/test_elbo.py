# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from torch import Tensor

from tests import naive
from trl_stabledrl.core.elbo import elbo_per_token_by_draw, eubo_per_token, sandwich

BETA = 1.5


def random_scores(generator: torch.Generator, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities (with rubbish where not scored), odds and scored positions, in float64."""
    is_scored = torch.rand(shape, generator=generator) < 0.6
    odds = torch.where(is_scored, 1 + 5 * torch.rand(shape, generator=generator), 0.0).double()
    return -8 * torch.rand(shape, generator=generator).double(), odds, is_scored


def test_each_draw_is_the_weighted_sum_of_its_own_log_probabilities(generator):
    logps, weight, _ = random_scores(generator, 3, 4, 5)

    by_draw = elbo_per_token_by_draw(logps, weight)

    for i in range(3):
        for m in range(4):
            terms = zip(weight[i, m].tolist(), logps[i, m].tolist(), strict=True)
            assert by_draw[i, m].item() == pytest.approx(math.fsum(w * x for w, x in terms), rel=1e-12)


@pytest.mark.parametrize("beta", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("num_draws", [1, 2, 5])
def test_eubo_is_its_definition_in_probability_space(beta, num_draws, generator):
    logps, odds, is_scored = random_scores(generator, 6, num_draws, 7)
    is_scored[0] = False  # nothing at all
    is_scored[1, :, 2:] = False  # some positions never
    odds = odds.masked_fill(~is_scored, 0.0)

    found = eubo_per_token(logps, odds, is_scored, beta=beta)

    expected = [naive.eubo_per_token(logps[i].tolist(), odds[i].tolist(), beta=beta) for i in range(6)]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert found[0] == 0.0


@pytest.mark.parametrize("logp", [-60.0, -70.0, -300.0, -1e4])
def test_eubo_of_improbable_tokens_has_a_value_and_a_gradient(logp):
    # probability space underflows at exp(1.5 * -60) in float32: peers get NaN, then 0
    logps = torch.tensor([[[logp, -1.0], [0.0, logp]]], requires_grad=True)
    is_scored = torch.tensor([[[True, True], [False, True]]])

    eubo = eubo_per_token(logps, torch.where(is_scored, 2.0, 0.0), is_scored, beta=BETA)
    eubo.sum().backward()

    # token 0: once, log(2/2)/beta = 0 is added; token 1: exp(1.5 logp) vanishes beside exp(-1.5)
    assert eubo.item() == pytest.approx((logp - 1.0) / 2, rel=1e-6)
    assert logps.grad is not None
    torch.testing.assert_close(logps.grad, torch.tensor([[[0.5, 0.5], [0.0, 0.0]]]))


def test_eubo_gradient_is_right_and_zero_where_nothing_is_scored(generator):
    logps, odds, is_scored = random_scores(generator, 3, 2, 4)
    is_scored[0] = False
    odds = odds.masked_fill(~is_scored, 0.0)
    logps.requires_grad_()

    assert torch.autograd.gradcheck(lambda x: eubo_per_token(x, odds, is_scored, beta=BETA), logps)
    assert torch.autograd.gradcheck(lambda x: elbo_per_token_by_draw(x, odds), logps)
    (gradient,) = torch.autograd.grad(eubo_per_token(logps, odds, is_scored, beta=BETA).sum(), logps)
    assert gradient[~is_scored].eq(0).all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("law", "block_length"), [("uniform", 4), ("semi_ar", 2)])
@pytest.mark.parametrize("beta", [1.0, 1.5])
def test_over_all_draws_of_a_law_the_upper_bound_is_above_the_lower(law, block_length, beta, generator):
    """
    Each position's `v` averages to one over a law's draws, so that `v` is a distribution and Jensen gives
    EUBO >= ELBO whatever the log-probabilities. A finite sample of draws, where `v` does not average to one, has no
    such order.
    """
    draws: list[naive.Draw] = []  # each as often as its probability says: a multiple of 1/48 for 4 tokens
    for outcome in naive.outcomes_of(law, 4, block_length):
        draws += [outcome.draw] * round(outcome.probability * 48)
    assert len(draws) == 48
    is_scored = torch.tensor([[[j in draw.scored for j in range(4)] for draw in draws]])
    odds = torch.tensor([[[dict(draw.odds).get(j, 0.0) for j in range(4)] for draw in draws]], dtype=torch.float64)
    weight = torch.tensor([[[draw.weight * (j in draw.scored) for j in range(4)] for draw in draws]])
    assert odds.mean(dim=1).allclose(torch.ones(1, 4, dtype=torch.float64))

    for scale in (0.1, 1.0, 30.0):
        logps = -scale * torch.rand(1, 48, 4, generator=generator, dtype=torch.float64)
        lower = elbo_per_token_by_draw(logps, weight.double()).mean()
        assert eubo_per_token(logps, odds, is_scored, beta=beta).item() > lower.item()
    # equal log-probabilities leave Jensen no gap at beta = 1
    flat = torch.full((1, 48, 4), -2.0, dtype=torch.float64)
    assert eubo_per_token(flat, odds, is_scored, beta=1.0).item() == pytest.approx(-2.0, rel=1e-12)


def test_one_draw_alone_can_turn_the_bounds_round():
    logps = torch.tensor([[[-1.0, -4.0]]])
    is_scored = torch.tensor([[[False, True]]])

    eubo = eubo_per_token(logps, torch.tensor([[[0.0, 2.0]]]), is_scored, beta=BETA).item()

    assert eubo == pytest.approx(-4.0 + math.log(2) / BETA)
    assert eubo < -1.0


def test_the_sandwich_takes_the_mean_of_the_bounds_unless_the_advantage_is_positive():
    elbo, eubo = torch.tensor([-4.0, -4.0, -4.0], requires_grad=True), torch.tensor([-1.0] * 3, requires_grad=True)

    surrogate = sandwich(elbo, eubo, torch.tensor([0.5, 0.0, -0.5]))
    surrogate.sum().backward()

    assert surrogate.tolist() == [-4.0, -2.5, -2.5]
    assert elbo.grad is not None
    assert eubo.grad is not None
    assert elbo.grad.tolist() == [1.0, 0.5, 0.5]
    assert eubo.grad.tolist() == [0.0, 0.5, 0.5]


@pytest.mark.parametrize("beta", [0.99, 0.0, -1.0, math.nan])
def test_orders_below_one_are_refused(beta):
    scores = torch.zeros(1, 1, 1)
    with pytest.raises(ValueError, match=f"eubo_beta={beta} must be at least 1: below it the expression is no upper"):
        eubo_per_token(scores, scores, scores.bool(), beta=beta)
