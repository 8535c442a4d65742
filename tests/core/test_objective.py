# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import naive
from trl_stabledrl.core.objective import (
    as_shares,
    kl_estimate,
    log_clip_bounds,
    log_ratio,
    policy_loss,
    self_normalized_weights,
    update_shares,
    weight_metrics,
    without_rounding,
)

EPSILON = 5.0
LOW, HIGH = -math.inf, math.log1p(EPSILON)
CLIPS = {
    "eps 5": ({"epsilon": 5.0, "clip_mode": "both", "ratio_cap": 5.0}, (-math.inf, math.log(6))),
    "eps 1": ({"epsilon": 1.0, "clip_mode": "both", "ratio_cap": 5.0}, (-math.inf, math.log(2))),
    "eps 0.2": ({"epsilon": 0.2, "clip_mode": "both", "ratio_cap": 5.0}, (math.log(0.8), math.log(1.2))),
    "released": ({"epsilon": 5.0, "clip_mode": "upper", "ratio_cap": 5.0}, (-math.inf, math.log(5))),
    "cap 2": ({"epsilon": 0.2, "clip_mode": "upper", "ratio_cap": 2.0}, (-math.inf, math.log(2))),
}


def weights_of(log_ratios: list[float] | Tensor, groups: list[int] | Tensor, low=LOW, high=HIGH) -> Tensor:
    return self_normalized_weights(
        torch.as_tensor(log_ratios), torch.as_tensor(groups), log_clip_low=low, log_clip_high=high
    )


@pytest.mark.parametrize("noise", [0.0, 0.1, 30.0, 1e4])
def test_neither_noise_nor_shuffling_breaks_the_weights(noise, generator):
    group_index = torch.arange(6).repeat_interleave(8)
    log_ratio = (noise * torch.randn(48, generator=generator)).requires_grad_()
    order = torch.randperm(48, generator=generator)  # TRL shuffles the generation batch

    weights = self_normalized_weights(log_ratio, group_index, log_clip_low=LOW, log_clip_high=HIGH)
    shuffled = self_normalized_weights(log_ratio[order], group_index[order], log_clip_low=LOW, log_clip_high=HIGH)

    torch.testing.assert_close(shuffled, weights[order])
    assert not weights.requires_grad
    for group, estimates in zip(weights.split(8), log_ratio.detach().double().split(8), strict=True):
        kept = [min(x.item(), HIGH) for x in estimates]  # the definition, one completion at a time
        shares = [math.exp(x - max(kept)) for x in kept]
        torch.testing.assert_close(group, torch.tensor([share / sum(shares) for share in shares]))


@pytest.mark.parametrize("name", CLIPS)
def test_clip_options_are_bounds_of_the_log_ratio(name):
    options, expected = CLIPS[name]

    assert log_clip_bounds(**options) == pytest.approx(expected)


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_weights_are_the_definition_under_every_clip_option(name, scale, generator):
    low, high = log_clip_bounds(**CLIPS[name][0])
    log_ratios = scale * torch.randn(24, generator=generator)
    groups = torch.randint(0, 5, (24,), generator=generator)  # groups of any size, in any order

    weights = weights_of(log_ratios, groups, low, high)

    expected = naive.weights(log_ratios.tolist(), groups.tolist(), low=low, high=high)
    assert weights.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-30)
    for group in groups.unique():
        own = weights[groups == group]
        assert own.sum().item() == pytest.approx(1.0, abs=1e-6)
        if math.isfinite(low):
            assert own.max() <= own.min() * math.exp(high - low) * (1 + 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("level", [-107.0, -1e4, -1e6])
def test_weights_of_a_group_far_below_the_clip_still_sum_to_one(level, dtype):
    # the log of the sum is rounded to the spacing of float32 at the level: 1e-3 at 1e4
    weights = weights_of(torch.tensor([level, level, level, level - 1e6], dtype=dtype), [0] * 4)

    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0], rel=1e-6)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(-math.inf, math.log(5), [0.7311, 0.2689]), (math.log(0.8), math.log(1.2), [0.5, 0.5])],
    ids=["upper cap", "eps 0.2"],
)
def test_ratios_that_underflow_keep_their_proportion(low, high, expected):
    first = 300 * math.log(0.7)  # exp(-107) is 0 in float32

    weights = weights_of([first, first - 1], [0, 0], low, high)

    assert weights.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", CLIPS)
def test_extreme_ratios_and_a_nan_row(name):
    low, high = log_clip_bounds(**CLIPS[name][0])
    log_ratios = [-1e4, -1.0, 0.0, 1.0, 1e4, math.nan]
    advantages = [1.0, -1.0, 1.0, -1.0, 1.0, 1.0]
    surrogate = torch.tensor([-0.5, -1.0, -1.5, -2.0, -2.5, 0.0], requires_grad=True)

    weights = weights_of(log_ratios, [0] * 6, low, high)
    loss = policy_loss(surrogate, weights, torch.tensor(advantages), num_prompts=1.0)
    loss.backward()
    metrics = weight_metrics(
        torch.tensor(log_ratios), weights, torch.zeros(6, dtype=torch.long), log_clip_low=low, log_clip_high=high
    )

    expected = naive.weights(log_ratios, [0] * 6, low=low, high=high)
    assert weights.tolist() == pytest.approx(expected, abs=1e-6)
    assert weights[5] == 0
    assert loss.item() == pytest.approx(
        naive.loss(log_ratios, [0] * 6, advantages, surrogate.tolist(), low=low, high=high), rel=1e-6
    )
    assert surrogate.grad is not None
    gradient = [-w * a for w, a in zip(expected, advantages, strict=True)]
    assert surrogate.grad.tolist() == pytest.approx(gradient, abs=1e-6)
    assert metrics["unscorable"] == 1
    assert metrics["ratio/max"] == math.exp(700)  # as far as float64 goes
    assert metrics["clip_ratio/high"] == sum(x > high for x in log_ratios[:5]) / 5
    assert metrics["clip_ratio/low"] == sum(x < low for x in log_ratios[:5]) / 5


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_leaves_its_group_to_the_others(lost):
    weights = weights_of([0.0, lost, 0.0, lost, lost, 0.3], [0, 0, 0, 1, 1, 2])

    assert weights.tolist() == [0.5, 0.0, 0.5, 0.0, 0.0, 1.0]


def test_equal_policies_weigh_all_rows_alike():
    # powers of two: exactly
    assert weights_of([0.0] * 12, [0] * 8 + [1] * 4).tolist() == [1 / 8] * 8 + [1 / 4] * 4


def test_a_constant_added_to_all_unclipped_ratios_of_a_group_changes_nothing(generator):
    log_ratios = torch.randn(16, generator=generator).clamp(-3, 1)
    groups = torch.arange(2).repeat(8)

    shifted = log_ratios + torch.where(groups == 0, -2.0, 0.5)
    far = log_ratios - 4096.0  # a power of two: the shift itself rounds the ratios to 2^-11

    torch.testing.assert_close(weights_of(shifted, groups), weights_of(log_ratios, groups))
    torch.testing.assert_close(weights_of(far, groups), weights_of(far + 4096.0, groups))


def test_a_group_split_over_calls_is_not_what_the_weights_mean():
    """The released code normalises over the micro-batch: with one row per call every weight is 1."""
    log_ratios, groups = torch.tensor([0.0, 1.0, -1.0, 0.5]), torch.zeros(4, dtype=torch.long)

    whole = weights_of(log_ratios, groups)
    alone = torch.cat([weights_of(log_ratios[i : i + 1], groups[i : i + 1]) for i in range(4)])

    assert alone.tolist() == [1.0] * 4
    assert whole.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("scale", [0.1, 10.0, 1e4])
def test_the_update_of_a_prompt_is_bounded_by_its_largest_advantage_and_gradient(scale, generator):
    gradients = torch.randn(8, 30, generator=generator)  # of each row's surrogate
    advantages = torch.randn(8, generator=generator)
    parameters = torch.zeros(30, requires_grad=True)

    weights = weights_of(scale * torch.randn(8, generator=generator), [0] * 8)
    policy_loss(gradients @ parameters, weights, advantages, num_prompts=1.0).backward()

    assert parameters.grad is not None
    assert parameters.grad.norm() <= advantages.abs().max() * gradients.norm(dim=1).max() * (1 + 1e-6)


def test_the_gradient_reaches_the_surrogate_and_nothing_else(generator):
    ratios = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    surrogate = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    weights = weights_of(ratios, [0, 0, 0, 1, 1, 1]).double()

    policy_loss(surrogate, weights, advantages, num_prompts=2.0).backward()

    assert ratios.grad is None
    assert surrogate.grad is not None
    torch.testing.assert_close(surrogate.grad, -weights * advantages / 2)
    assert torch.autograd.gradcheck(lambda s: policy_loss(s, weights, advantages, num_prompts=2.0), surrogate)


def test_the_loss_is_the_mean_over_prompts_for_every_order_and_split(generator):
    log_ratios, advantages, surrogates = torch.randn(3, 12, generator=generator)
    groups = torch.arange(3).repeat_interleave(4)[torch.randperm(12, generator=generator)]
    weights = weights_of(log_ratios, groups)

    whole = policy_loss(surrogates, weights, advantages, num_prompts=3.0).item()
    parts = sum(
        policy_loss(surrogates[i : i + 3], weights[i : i + 3], advantages[i : i + 3], num_prompts=3.0).item()
        for i in range(0, 12, 3)
    )

    expected = naive.loss(
        log_ratios.tolist(), groups.tolist(), advantages.tolist(), surrogates.tolist(), low=LOW, high=HIGH
    )
    assert whole == pytest.approx(expected, rel=1e-5)
    assert parts == pytest.approx(expected, rel=1e-5)


def test_rows_without_advantage_contribute_exactly_zero():
    surrogate = torch.tensor([-3.0, -2.0], requires_grad=True)

    loss = policy_loss(surrogate, weights_of([0.1, -0.3], [0, 0]), torch.zeros(2), num_prompts=1.0)
    loss.backward()

    assert loss.item() == 0.0
    assert surrogate.grad is not None
    assert surrogate.grad.tolist() == [0.0, 0.0]


def test_log_ratios_are_differences_of_scores():
    new, old, length = torch.tensor([-1.0, -2.0, math.nan]), torch.tensor([-1.5, -1.0, 0.0]), torch.tensor([4, 6, 0])

    assert log_ratio(new, old, length, normalization="token").tolist()[:2] == [0.5, -1.0]
    assert log_ratio(new, old, length, normalization="sequence").tolist()[:2] == [2.0, -6.0]
    assert log_ratio(new, old, length, normalization="sequence")[2].isnan()
    same = torch.tensor([-math.pi * 100])
    assert log_ratio(same, same.clone(), torch.tensor([7]), normalization="sequence").item() == 0.0


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("difference", [-30.0, -1.0, -1e-3, 0.0, 1e-3, 0.5, 3.0])
def test_kl_value_and_derivative(estimator, difference):
    policy = torch.tensor([-2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-2.0 + difference], dtype=torch.float64)

    value, derivative = kl_estimate(reference - policy, estimator=estimator)
    d = reference - policy
    (expected,) = torch.autograd.grad(d.square() / 2 if estimator == "k2" else d.exp() - 1 - d, policy)

    assert value.item() == pytest.approx(naive.kl(-2.0, -2.0 + difference, estimator=estimator), rel=1e-9, abs=1e-15)
    assert derivative.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-15)
    assert not value.requires_grad
    assert not derivative.requires_grad
    assert value.item() >= 0.0


LOW_02, HIGH_02 = math.log(0.8), math.log(1.2)


def metrics_of(log_ratios: list[float], groups: list[int], low=LOW_02, high=HIGH_02) -> dict[str, float]:
    weights = weights_of(log_ratios, groups, low, high)
    metrics = weight_metrics(
        torch.tensor(log_ratios), weights, torch.tensor(groups), log_clip_low=low, log_clip_high=high
    )
    return {name: value.item() for name, value in metrics.items()}


def test_metrics_are_hand_computed_numbers():
    # group 0: ratios 1/2, 1, 2 and a lost row; group 1: 1, 1
    two = math.log(2)
    metrics = metrics_of([-two, 0.0, two, math.nan, 0.0, 0.0], [0, 0, 0, 0, 1, 1])

    w = [0.8 / 3, 1 / 3, 1.2 / 3]  # clipped at 0.8 and 1.2, sum 3
    assert metrics == pytest.approx(
        {
            "ratio/mean": 5.5 / 5,
            "ratio/median": 1.0,
            "ratio/p99": 1.0 + 0.96 * 1.0,  # position 0.99 * 4 = 3.96 of 0.5, 1, 1, 1, 2
            "ratio/max": 2.0,
            "log_ratio/std": math.sqrt(2 * two * two / 5),
            "log_ratio/std_centred": math.sqrt(2 * two * two / 5),
            "drift": 2 * two / 5,
            "clip_ratio/low": 1 / 5,
            "clip_ratio/high": 1 / 5,
            "weights/ess": (1 / sum(x * x for x in w) / 3 + 1.0) / 2,
            "weights/max": 0.5,
            "weights/saturated": 1 / 5,
            "unscorable": 1.0,
        },
        rel=1e-6,
    )


def test_the_centred_spread_ignores_what_a_group_has_in_common():
    metrics = metrics_of([5.0, 5.2, -3.0, -3.2], [0, 0, 1, 1])

    assert metrics["log_ratio/std"] == pytest.approx(math.sqrt((2 * 4.0**2 + 2 * 4.2**2) / 4), rel=1e-6)
    assert metrics["log_ratio/std_centred"] == pytest.approx(0.1, rel=1e-5)


def test_the_effective_sample_size_is_a_share_of_the_group():
    assert metrics_of([0.0] * 6, [0, 0, 0, 0, 1, 1])["weights/ess"] == pytest.approx(1.0)
    one_of_four = metrics_of([1e4, -1e4, -1e4, -1e4], [0] * 4, low=-math.inf, high=math.log(6))
    assert one_of_four["weights/ess"] == pytest.approx(0.25)
    assert one_of_four["weights/max"] == pytest.approx(1.0)


def test_metrics_of_rows_that_are_all_lost_are_nan_and_counted():
    metrics = metrics_of([math.nan, math.inf, -math.inf], [0, 0, 1])

    assert metrics.pop("unscorable") == 3.0
    assert all(math.isnan(value) for value in metrics.values()), metrics


def test_metrics_are_float64_scalars_whatever_the_ratios_are():
    metrics = weight_metrics(
        torch.zeros(2), torch.full((2,), 0.5), torch.zeros(2, dtype=torch.long), log_clip_low=LOW, log_clip_high=HIGH
    )

    assert {value.dtype for value in metrics.values()} == {torch.float64}
    assert {value.shape for value in metrics.values()} == {()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, r"epsilon=0.0 must be above 0: ratios are kept in \[1 - epsilon, 1 \+ epsilon\]"),
        ({"epsilon": -0.2}, "epsilon=-0.2 must be above 0"),
        ({"epsilon": math.nan}, "epsilon=nan must be above 0"),
        ({"clip_mode": "upper", "ratio_cap": 1.0}, "ratio_cap=1.0 must be above 1: on policy every ratio is 1"),
        ({"clip_mode": "lower"}, "clip_mode='lower' is not known. Use 'both' or 'upper'"),
    ],
)
def test_clip_options_without_meaning_are_refused(options, message):
    merged: dict[str, Any] = {"epsilon": 5.0, "clip_mode": "both", "ratio_cap": 5.0} | options
    with pytest.raises(ValueError, match=message):
        untyped(log_clip_bounds)(**merged)


def untyped(function: Any) -> Any:
    """The function without its runtime type checks, which refuse unknown names before our own message can."""
    return function.__wrapped__ if hasattr(function, "__wrapped__") else function


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 0.0), (0.8, 1.2), (-math.inf, math.nan)])
def test_bounds_that_are_no_logs_of_ratios_are_refused(low, high):
    with pytest.raises(ValueError, match="Expected log_clip_low < 0 < log_clip_high, got .* Both are logs of ratios"):
        weights_of([0.0], [0], low, high)


def test_an_unknown_kl_estimator_is_refused():
    with pytest.raises(ValueError, match="kl_estimator='k1' is not known. Use 'k2' or 'k3'"):
        untyped(kl_estimate)(torch.zeros(1), estimator="k1")


def test_equal_rewards_leave_no_advantage_but_others_are_kept_to_the_bit():
    seven = torch.full((7,), 0.7)
    residue = seven - seven.mean()
    assert residue.ne(0).all()  # what the function is for
    mixed = torch.tensor([0.5, -0.5, 0.0])  # a row without a reward has none
    unscored = torch.cat([residue[:2], torch.zeros(1)])
    advantage = torch.cat([residue, mixed, unscored, torch.zeros(2)])
    groups = torch.tensor([0] * 7 + [1] * 3 + [2] * 3 + [3] * 2)
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))

    found = without_rounding(advantage[order], groups[order])

    assert torch.equal(found, torch.where(groups == 1, advantage, 0.0)[order])


def test_the_shares_of_an_update_are_those_of_weight_times_advantage():
    weight, advantage = torch.tensor([0.5, 0.25, 0.25, 0.0]), torch.tensor([1.0, -3.0, 1.0, -9.0])

    shares = update_shares(weight, advantage)

    assert shares["update/negative_share"].item() == pytest.approx(0.75 / 1.5)
    assert shares["update/max_share"].item() == pytest.approx(0.75 / 1.5)
    assert all(value.isnan() for value in update_shares(weight, torch.zeros(4)).values())


def test_shares_sum_to_one_in_every_group_that_has_weight():
    group_index = torch.tensor([0, 1, 0, 1, 2])

    shares = as_shares(torch.tensor([1.0, 0.0, 3.0, 0.0, 2.0]), group_index)

    assert shares.tolist() == [0.25, 0.0, 0.75, 0.0, 1.0]
