# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import naive
from tests.naive import Draw, Outcome
from tests.tiny import tiny_llada
from trl_stabledrl.core.elbo import elbo_per_token_by_draw
from trl_stabledrl.core.masking import MaskPlan, check_draws, draw_mask_plan, gauss_legendre

MASK = 6
NUM_KEYS = 20_000
LAWS = ("uniform", "block_suffix", "semi_ar", "full")  # the staircase: test_staircase_masks.py
SAMPLINGS = ("independent", "stratified", "complementary")
RANDOM_LAWS = ("uniform", "block_suffix", "semi_ar")
UNBIASED_LAWS = ("uniform", "semi_ar")

Scope = tuple[frozenset[int], frozenset[int]]
"""What a draw masks and what it scores."""


def plan_of(
    length: int | Sequence[int],
    *,
    law: Any,
    sampling: Any = "independent",
    num_draws: int = 1,
    block_length: int = 4,
    window_length: int | None = None,
    prompt_length: int = 0,
    keys: int | Tensor = NUM_KEYS,
    seed: int = 0,
    iteration: int = 0,
) -> MaskPlan:
    """Plan of rows with consecutive or given keys; one length for all, or one each."""
    noise_key = torch.arange(keys) if isinstance(keys, int) else keys
    lengths = torch.full_like(noise_key, length) if isinstance(length, int) else torch.tensor(length)
    return draw_mask_plan(
        noise_key,
        lengths,
        torch.ones(len(noise_key), prompt_length, dtype=torch.bool),
        window_length=window_length or int(lengths.max()),
        law=law,
        sampling=sampling,
        num_draws=num_draws,
        block_length=block_length,
        seed=seed,
        iteration=iteration,
    )


def codes(is_noised: Tensor) -> Tensor:
    """Number the sets of positions: bit j is set where position j is in."""
    return (is_noised.long() << torch.arange(is_noised.shape[-1])).sum(-1)


def code_of(positions: frozenset[int], *, shift: int = 0) -> int:
    return sum(1 << (j + shift) for j in positions if j + shift >= 0)


@lru_cache
def log_probs_of(length: int, window_length: int, prompt_length: int = 3) -> naive.RowLogProbs:
    """A random LLaDA over 6 tokens and a mask, in float64, on one fixed completion."""
    model = tiny_llada(
        vocab_size=7, mask_token_id=MASK, hidden_size=16, intermediate_size=24, num_attention_heads=2,
        initializer_range=0.4, dtype=torch.float64, seed=5,
    )  # fmt: skip
    completion = [3, 5, 2, 4, 3, 5, 3, 2][:length]
    return naive.RowLogProbs(
        model, [4, 3, 2][:prompt_length], completion, mask_token_id=MASK, window_length=window_length
    )


@lru_cache
def log_prob_table(length: int, window_length: int, prompt_length: int) -> Tensor:
    """Log-probabilities by (code of the noised prompt, code of the noised completion, position)."""
    log_probs = log_probs_of(length, window_length, prompt_length)
    table = torch.zeros(2**prompt_length, 2**length, window_length, dtype=torch.float64)
    for in_prompt in naive.subsets(range(-prompt_length, 0)):
        for in_completion in naive.subsets(range(length)):
            row = table[code_of(in_prompt, shift=prompt_length), code_of(in_completion)]
            row[:length] = torch.tensor(log_probs(in_prompt | in_completion))
    return table


def log_probs_under(plan: MaskPlan, length: int) -> Tensor:
    """What the model would give under the plan, looked up: (B, M, W)."""
    prompt_length, window_length = plan.is_noised_prompt.shape[-1], plan.is_noised.shape[-1]
    table = log_prob_table(length, window_length, prompt_length)
    return table[codes(plan.is_noised_prompt), codes(plan.is_noised)]


def estimates(plan: MaskPlan, length: int) -> Tensor:
    """The row's estimate from all its draws, (B,)."""
    return elbo_per_token_by_draw(log_probs_under(plan, length), plan.weight.double()).mean(dim=1)


def planned_draws(plan: MaskPlan, draw: int) -> dict[Scope, list[tuple[Draw, int]]]:
    """The distinct draws of a plan with the number of rows that have each, by (noised, scored)."""
    prompt_length = plan.is_noised_prompt.shape[-1]
    columns = [
        plan.is_noised_prompt[:, draw], plan.is_noised[:, draw], plan.is_scored[:, draw],
        plan.weight[:, draw], plan.inverse_probability[:, draw],
    ]  # fmt: skip
    rows, counts = torch.cat([column.double() for column in columns], dim=1).unique(dim=0, return_counts=True)
    found: dict[Scope, list[tuple[Draw, int]]] = {}
    for row, count in zip(rows, counts.tolist(), strict=True):
        in_prompt, noised, scored, weight, odds = row.split([column.shape[1] for column in columns])
        noised_at = frozenset((in_prompt.nonzero()[:, 0] - prompt_length).tolist() + noised.nonzero()[:, 0].tolist())
        scored_at = frozenset(scored.nonzero()[:, 0].tolist())
        assert set(weight.nonzero()[:, 0].tolist()) == set(odds.nonzero()[:, 0].tolist()) == scored_at
        values = {weight[j].item() for j in scored_at}
        assert len(values) == 1
        draw_found = Draw(noised_at, scored_at, values.pop(), tuple((j, odds[j].item()) for j in sorted(scored_at)))
        found.setdefault((noised_at, scored_at), []).append((draw_found, count))
    return found


def is_same(planned: Draw, defined: Draw) -> bool:
    return (
        (planned.noised, planned.scored) == (defined.noised, defined.scored)
        and math.isclose(planned.weight, defined.weight, rel_tol=1e-6)
        and all(
            i == j and math.isclose(u, v, rel_tol=1e-6)
            for (i, u), (j, v) in zip(planned.odds, defined.odds, strict=True)
        )
    )


def chi_square_of(counts: Mapping[Any, int], probabilities: Mapping[Any, float]) -> tuple[float, float]:
    """Statistic with its bound, mean and four standard deviations; rare outcomes are pooled."""
    total = sum(counts.values())
    assert math.isclose(math.fsum(probabilities.values()), 1.0, rel_tol=1e-9)
    assert set(counts) <= set(probabilities)
    bins, rare = [], [0.0, 0.0]
    for outcome, probability in probabilities.items():
        entry = (counts.get(outcome, 0), probability * total)
        if entry[1] >= 5:
            bins.append(entry)
        else:
            rare = [rare[0] + entry[0], rare[1] + entry[1]]
    if rare[1] > 0:
        bins.append((rare[0], max(rare[1], 1.0)))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in bins)
    degrees = max(len(bins) - 1, 0)
    return statistic, degrees + 4 * math.sqrt(2 * degrees)


def assert_is_the_law(plan: MaskPlan, outcomes: list[Outcome], draws: Sequence[int]) -> None:
    """Every draw is one of the law's, with its weights; all together they come at the law's rates."""
    defined: dict[Scope, list[Draw]] = {}
    probabilities: dict[Scope, float] = {}
    for outcome in outcomes:
        key = (outcome.draw.noised, outcome.draw.scored)
        defined.setdefault(key, []).append(outcome.draw)
        probabilities[key] = probabilities.get(key, 0.0) + outcome.probability
    counts: dict[Scope, int] = {}
    for m in draws:
        for key, rows in planned_draws(plan, m).items():
            for draw, count in rows:
                assert any(is_same(draw, candidate) for candidate in defined[key]), draw
                counts[key] = counts.get(key, 0) + count
    statistic, bound = chi_square_of(counts, probabilities)
    assert statistic <= bound, (statistic, bound)


CASES = [(1, 4, 8), (3, 4, 8), (4, 4, 4), (4, 2, 4), (4, 1, 4), (5, 2, 8), (5, 4, 5)]  # length, block, window


@pytest.mark.parametrize(("length", "block_length", "window_length"), CASES)
@pytest.mark.parametrize("law", LAWS)
def test_independent_draws_follow_the_law(law, length, block_length, window_length):
    plan = plan_of(length, law=law, block_length=block_length, window_length=window_length, prompt_length=2, keys=8000)
    outcomes = naive.outcomes_of(law, length, block_length, prompt_length=2)

    assert_is_the_law(plan, outcomes, [0])


@pytest.mark.parametrize(("length", "block_length"), [(1, 4), (4, 4), (5, 2)])
@pytest.mark.parametrize("law", RANDOM_LAWS)
def test_each_member_of_a_complementary_pair_follows_the_law_alone(law, length, block_length):
    plan = plan_of(
        length, law=law, sampling="complementary", num_draws=4, block_length=block_length, prompt_length=1, keys=8000
    )
    outcomes = naive.outcomes_of(law, length, block_length, prompt_length=1)

    for m in range(4):
        assert_is_the_law(plan, outcomes, [m])


@pytest.mark.parametrize(("length", "block_length", "num_draws"), [(4, 4, 2), (5, 2, 3), (3, 4, 4)])
@pytest.mark.parametrize("law", RANDOM_LAWS)
def test_stratified_draws_follow_the_law_together(law, length, block_length, num_draws):
    plan = plan_of(length, law=law, sampling="stratified", num_draws=num_draws, block_length=block_length, keys=8000)

    assert_is_the_law(plan, naive.outcomes_of(law, length, block_length), range(num_draws))


@pytest.mark.parametrize(("size", "num_draws"), [(4, 4), (8, 2), (8, 4), (7, 3), (3, 5)])
def test_stratified_counts_lie_in_their_own_part(size, num_draws):
    plan = plan_of(size, law="uniform", sampling="stratified", num_draws=num_draws, block_length=8, keys=2000)

    counts = plan.is_noised.sum(-1)  # (B, M)
    for m in range(num_draws):
        lowest, highest = math.floor(size * m / num_draws) + 1, math.ceil(size * (m + 1) / num_draws)
        assert (counts[:, m].min().item(), counts[:, m].max().item()) == (lowest, highest)


@pytest.mark.parametrize("num_blocks", [2, 3, 5])
@pytest.mark.parametrize("law", ["block_suffix", "semi_ar"])
def test_blocks_are_drawn_uniformly(law, num_blocks: int):
    # one token per block: it and all later ones are masked for certain, and coins have odds of their own
    plan = plan_of(num_blocks, law=law, block_length=1)
    is_coin = plan.inverse_probability[:, 0].isclose(torch.tensor(1 / 0.15))
    block = num_blocks - (plan.is_noised[:, 0] & ~is_coin).sum(-1)

    counts = dict(enumerate(block.bincount(minlength=num_blocks).tolist()))
    statistic, bound = chi_square_of(counts, dict.fromkeys(range(num_blocks), 1 / num_blocks))
    assert statistic <= bound


@pytest.mark.parametrize("sampling", ["independent", "complementary"])
def test_counts_are_uniform_over_a_long_completion(sampling):
    length = 128
    plan = plan_of(length, law="uniform", sampling=sampling, num_draws=2, keys=8000)

    for m in range(2):
        counts = dict(enumerate(plan.is_noised[:, m].sum(-1).bincount(minlength=length + 1).tolist()))
        assert counts.pop(0) == 0
        statistic, bound = chi_square_of(counts, dict.fromkeys(range(1, length + 1), 1 / length))
        assert statistic <= bound


@pytest.mark.parametrize("law", RANDOM_LAWS)
def test_complementary_pairs_cover_the_active_set_once_or_are_both_full(law):
    length, block_length = 10, 4
    plan = plan_of(
        length, law=law, sampling="complementary", num_draws=4, block_length=block_length, prompt_length=3, keys=4000
    )
    num_full = 0
    for first, second in ((0, 1), (2, 3)):
        one, two = plan.is_noised[:, first], plan.is_noised[:, second]
        assert torch.equal(plan.is_noised_prompt[:, first], plan.is_noised_prompt[:, second])
        for a, b in zip(one.tolist(), two.tolist(), strict=True):
            in_one, in_two = ({j for j in range(length) if row[j]} for row in (a, b))
            if law == "uniform":
                actives = [set(range(length))]
            else:
                actives = [set(block) for block in naive.blocks_of(length, block_length)]
            fits = [
                (not in_one & in_two & active or in_one & active == in_two & active == active)
                and active <= in_one | in_two
                and in_one - active == in_two - active  # one set of coins, all later blocks
                and (law == "uniform" or {j for j in range(length) if j > max(active)} <= in_one)
                and in_one & active
                and in_two & active
                for active in actives
            ]
            assert any(fits)
            num_full += in_one == in_two
    assert num_full > 0
    assert not torch.equal(plan.is_noised[:, 0], plan.is_noised[:, 2])


def test_pairs_of_a_row_are_independent():
    plan = plan_of(4, law="uniform", sampling="complementary", num_draws=4)

    joint = plan.is_noised.sum(-1)[:, [0, 2]]  # sizes of the first member of each pair
    counts = dict(enumerate(((joint[:, 0] - 1) * 4 + joint[:, 1] - 1).bincount(minlength=16).tolist()))
    statistic, bound = chi_square_of(counts, dict.fromkeys(range(16), 1 / 16))
    assert statistic <= bound


@pytest.mark.parametrize(
    ("length", "block_length"), [(1, 4), (3, 4), (4, 4), (4, 2), (5, 2), (5, 4)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("law", UNBIASED_LAWS)
def test_planned_weights_average_exactly_to_the_random_order_bound(law, length, block_length):
    if law == "uniform":
        block_length = 8
    plan = plan_of(length, law=law, block_length=block_length, window_length=8, keys=4000)
    log_probs = log_probs_of(length, 8)
    probabilities = {
        (o.draw.noised, o.draw.scored): o.probability for o in naive.outcomes_of(law, length, block_length)
    }

    planned = planned_draws(plan, 0)
    assert set(planned) == set(probabilities)  # 4000 keys show every outcome
    total = sum(
        probabilities[key] * naive.draw_elbo_per_token(draw, log_probs) for key, ((draw, _),) in planned.items()
    )

    expected = naive.random_order_elbo(length, block_length, log_probs) / length
    assert total == pytest.approx(expected, rel=2e-7)  # weights are float32


def test_the_definitions_agree_with_each_other():
    log_probs = log_probs_of(5, 8)
    for law, block_length in (("uniform", 8), ("semi_ar", 2), ("semi_ar", 4)):
        outcomes = naive.outcomes_of(law, 5, block_length)
        bound = naive.random_order_elbo(5, block_length, log_probs) / 5
        assert naive.expected_elbo_per_token(outcomes, log_probs)[0] == pytest.approx(bound, rel=1e-12)
        assert naive.expected_pair_elbo_per_token(outcomes, log_probs)[0] == pytest.approx(bound, rel=1e-12)
    everything = log_probs(frozenset(range(5)))
    full = naive.expected_elbo_per_token(naive.outcomes_of("full", 5, 8), log_probs)
    assert full == pytest.approx((sum(everything) / 5, 0.0))


@pytest.mark.parametrize(("length", "block_length", "window_length"), [(4, 4, 4), (3, 4, 8), (5, 2, 8), (1, 4, 8)])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("law", RANDOM_LAWS)
def test_estimates_average_to_the_enumerated_value(law, sampling, length, block_length, window_length):
    prompt_length = 2
    log_probs = log_probs_of(length, window_length, prompt_length)
    outcomes = naive.outcomes_of(law, length, block_length, prompt_length=prompt_length)
    expected, _ = naive.expected_elbo_per_token(outcomes, log_probs)

    plan = plan_of(
        length, law=law, sampling=sampling, num_draws=2, block_length=block_length, window_length=window_length,
        prompt_length=prompt_length,
    )  # fmt: skip
    values = estimates(plan, length)

    standard_error = values.std().item() / math.sqrt(NUM_KEYS)
    assert abs(values.mean().item() - expected) <= 3 * standard_error + 1e-6


def test_the_full_law_is_the_sum_of_the_log_softmax_at_all_positions():
    plan = plan_of(4, law="full", keys=3)

    values = estimates(plan, 4) * 4

    everything = sum(log_probs_of(4, 4, 0)(frozenset(range(4))))
    torch.testing.assert_close(values, torch.full((3,), everything, dtype=torch.float64))


# at equal passes, complementary over independent; the pairs are below on this model where one block is drawn from
@pytest.mark.parametrize(
    ("law", "block_length", "ratio"),
    [
        ("uniform", 4, 0.2742),  # 0.0440 instead of 0.1606
        ("semi_ar", 4, 0.2742),
        ("block_suffix", 4, 0.2742),
        ("semi_ar", 2, 0.8594),  # 0.1259 instead of 0.1465
        # a pair shares its block, so that it does not average over blocks as two independent draws do: 0.0922
        # instead of 0.0563
        ("block_suffix", 2, 1.6376),
    ],
)
def test_variances_at_equal_passes_are_the_enumerated_ones(law, block_length, ratio):
    log_probs = log_probs_of(4, 4, 0)
    outcomes = naive.outcomes_of(law, 4, block_length)
    plain = naive.expected_elbo_per_token(outcomes, log_probs)[1] / 2  # two independent draws
    paired = naive.expected_pair_elbo_per_token(outcomes, log_probs)[1]

    assert paired / plain == pytest.approx(ratio, abs=1e-3)
    for sampling, variance in (("independent", plain), ("complementary", paired)):
        values = estimates(plan_of(4, law=law, sampling=sampling, num_draws=2, block_length=block_length), 4)
        fourth = ((values - values.mean()) ** 4).mean().item()
        standard_error = math.sqrt((fourth - values.var().item() ** 2) / NUM_KEYS)
        assert abs(values.var().item() - variance) <= 3 * standard_error


def test_coins_fall_on_prompt_and_earlier_blocks_at_their_rate_and_never_on_padding():
    num, length, block_length = 8000, 8, 2
    prompt_mask = torch.ones(num, 5, dtype=torch.bool)
    prompt_mask[::2, :3] = False
    plan = draw_mask_plan(
        torch.arange(num), torch.full((num,), length), prompt_mask, window_length=length, law="block_suffix",
        sampling="independent", num_draws=2, block_length=block_length, seed=0, iteration=0,
    )  # fmt: skip

    assert not plan.is_noised_prompt[::2, :, :3].any()
    on_prompt = plan.is_noised_prompt[prompt_mask[:, None].expand(-1, 2, -1)].double()
    is_earlier = plan.inverse_probability.isclose(torch.tensor(1 / 0.15))  # masked ones of earlier blocks
    # block b of K = 4 is active with probability 1/4, so b * 2 tokens are earlier: 3 on average
    rate = is_earlier.sum().item() / (num * 2 * 3)
    assert abs(on_prompt.mean().item() - 0.15) <= 3 * math.sqrt(0.15 * 0.85 / len(on_prompt))
    # the number of earlier tokens is random: its variance (5) adds 0.15^2 * 5 to 0.15 * 0.85 * 3 per draw
    assert abs(rate - 0.15) <= 3 * math.sqrt((0.15**2 * 5 + 0.15 * 0.85 * 3) / (num * 2)) / 3
    by_position = plan.is_noised_prompt[1::2].double().mean(dim=(0, 1))
    assert ((by_position - 0.15).abs() <= 4 * math.sqrt(0.15 * 0.85 / num)).all()


@pytest.mark.parametrize("law", ["uniform", "semi_ar", "full"])
def test_only_block_suffix_touches_the_prompt(law):
    assert not plan_of(4, law=law, prompt_length=5, keys=200).is_noised_prompt.any()


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("law", RANDOM_LAWS)
def test_masks_depend_on_key_seed_iteration_and_draw_alone(law, sampling):
    num, keys = 24, torch.arange(100, 124)
    lengths = torch.tensor([8, 3, 5, 1] * 6)
    prompt_mask = torch.arange(4) >= torch.tensor([0, 2, 3, 1] * 6)[:, None]

    def plan(rows: Tensor, *, window_length: int = 8, padding: int = 0, **changes: Any) -> MaskPlan:
        padded = torch.cat([torch.zeros(len(rows), padding, dtype=torch.bool), prompt_mask[rows]], dim=1)
        options: dict[str, Any] = {"num_draws": 4, "block_length": 3, "seed": 0, "iteration": 0} | changes
        return draw_mask_plan(
            keys[rows], lengths[rows], padded, window_length=window_length, law=law, sampling=sampling, **options
        )

    def assert_equal(found: MaskPlan, expected: MaskPlan, rows: Tensor) -> None:
        window, padding = expected.is_noised.shape[-1], found.is_noised_prompt.shape[-1] - 4
        for name in ("is_noised", "is_scored", "weight", "inverse_probability"):
            assert torch.equal(getattr(found, name)[..., :window], getattr(expected, name)[rows])
            assert not getattr(found, name)[..., window:].any()
        assert torch.equal(found.is_noised_prompt[..., padding:], expected.is_noised_prompt[rows])
        assert not found.is_noised_prompt[..., :padding].any()

    everything = torch.arange(num)
    reference = plan(everything)
    for size in (1, 2, 8):
        for rows in everything.split(size):
            assert_equal(plan(rows), reference, rows)
    order = torch.randperm(num, generator=torch.Generator().manual_seed(0))
    assert_equal(plan(order), reference, order)
    assert_equal(plan(everything, padding=5), reference, everything)
    assert_equal(plan(everything, window_length=13), reference, everything)
    for change in ({"seed": 1}, {"iteration": 1}):
        changed = plan(everything, **change).is_noised
        is_long = lengths > 1  # a single token is always masked
        assert (changed != reference.is_noised).any(-1)[is_long].double().mean() > 0.3
    assert (reference.is_noised[:, 0] != reference.is_noised[:, 2]).any(-1)[lengths > 1].any()
    if sampling == "independent":  # more draws continue the same sequence
        assert torch.equal(plan(everything, num_draws=2).is_noised, reference.is_noised[:, :2])


@pytest.mark.parametrize("law", RANDOM_LAWS)
def test_iterations_draw_independent_masks(law):
    first, second = (
        plan_of(4, law=law, block_length=2, iteration=iteration, prompt_length=2).is_noised[:, 0]
        for iteration in (0, 1)
    )

    together = torch.stack([first.double().flatten(), second.double().flatten()])
    centred = together.view(2, -1, 4) - together.view(2, -1, 4).mean(dim=1, keepdim=True)
    covariance = (centred[0] * centred[1]).mean(dim=0)  # by position; at most 1/4 in size
    assert (covariance.abs() <= 4 * 0.25 / math.sqrt(NUM_KEYS)).all()


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("law", RANDOM_LAWS)
def test_rows_of_a_group_share_masks_where_lengths_agree(law, sampling):
    keys = torch.arange(50).repeat_interleave(4)
    plan = plan_of(
        [8, 8, 5, 8] * 50, law=law, sampling=sampling, num_draws=2, block_length=3, prompt_length=3, keys=keys
    )

    for name in ("is_noised", "is_noised_prompt", "weight"):
        by_group = getattr(plan, name).unflatten(0, (50, 4))
        assert torch.equal(by_group[:, 0], by_group[:, 1])
        assert torch.equal(by_group[:, 0], by_group[:, 3])
    assert len(codes(plan.is_noised[::4, 0]).unique()) > 5  # groups differ


@pytest.mark.parametrize("sampling", ["independent", "stratified"])
def test_rows_of_a_group_share_one_level_and_one_order(sampling):
    longest, num = 9, 500
    keys = torch.arange(num).repeat_interleave(longest)
    lengths = torch.arange(1, longest + 1).repeat(num)
    plan = plan_of(lengths.tolist(), law="uniform", sampling=sampling, num_draws=2, block_length=16, keys=keys)

    counts = plan.is_noised.sum(-1).unflatten(0, (num, longest)).double()  # (N, C, 2)
    # k_i = ceil(u C_i) for one u: u lies in every interval ((k_i - 1) / C_i, k_i / C_i]
    scale = torch.arange(1.0, longest + 1, dtype=torch.float64)[None, :, None]
    assert ((counts - 1) / scale).amax(1).lt((counts / scale).amin(1) + 1e-12).all()
    # one order: of the positions two rows have in common, one row's masked ones contain the other's
    is_noised = plan.is_noised.unflatten(0, (num, longest))
    for length in range(1, longest):
        mine, other = is_noised[:, length - 1, :, :length], is_noised[:, -1, :, :length]
        within, around = (mine & ~other).any(-1), (other & ~mine).any(-1)
        assert not (within & around).any()


@pytest.mark.parametrize("sampling", ["independent", "complementary"])
@pytest.mark.parametrize("law", RANDOM_LAWS)
def test_sharing_leaves_the_law_of_each_row_unchanged(law, sampling):
    lengths = [8, 3, 5]
    keys = torch.arange(6000).repeat_interleave(3)
    plan = plan_of(lengths * 6000, law=law, sampling=sampling, num_draws=2, block_length=3, keys=keys)

    for i, length in enumerate(lengths[1:], start=1):
        own = MaskPlan(
            plan.is_noised_prompt[i::3], plan.is_noised[i::3], plan.is_scored[i::3], plan.weight[i::3],
            plan.inverse_probability[i::3],
        )  # fmt: skip
        for m in range(2):
            assert_is_the_law(own, naive.outcomes_of(law, length, 3), [m])


@pytest.mark.parametrize("law", LAWS)
def test_tokens_after_the_end_are_neither_masked_nor_scored(law):
    lengths = [0, 1, 3, 6] * 50
    plan = plan_of(lengths, law=law, window_length=10, prompt_length=2, keys=200)

    is_after = torch.arange(10) >= torch.tensor(lengths)[:, None, None]
    for name in ("is_noised", "is_scored", "weight", "inverse_probability"):
        assert not getattr(plan, name)[is_after].any()
    assert plan.is_scored[torch.tensor(lengths) > 0].any(-1).all()
    for values in (plan.weight, plan.inverse_probability):
        assert values.isfinite().all()


def test_weight_scale_of_four_masked_tokens_of_eight():
    """Hand-computed: with all log-probabilities -1, `elbo_per_token` is -4 times the weight."""

    def weights_with(num_masked: int, *, law: str, block_length: int) -> tuple[set[float], set[float]]:
        plan = plan_of(8, law=law, block_length=block_length, keys=2000)
        rows = plan.is_scored[:, 0].sum(-1) == num_masked
        scored = plan.is_scored[rows]
        return set(plan.weight[rows][scored].tolist()), set(plan.inverse_probability[rows][scored].tolist())

    assert weights_with(4, law="uniform", block_length=8) == ({0.25}, {2.0})  # 8/4 of the sum, over 8 tokens
    assert weights_with(4, law="semi_ar", block_length=8) == ({0.25}, {2.0})  # one block: the same law
    assert weights_with(4, law="semi_ar", block_length=4) == ({0.25}, {2.0})  # 2 blocks x 4/4, over 8 tokens
    assert weights_with(2, law="semi_ar", block_length=4) == ({0.5}, {4.0})  # 2 blocks x 4/2
    assert weights_with(4, law="block_suffix", block_length=8) == ({0.25}, {2.0})  # a mean over 4
    # 4 scored: the last block whole, the last with coins, or one per block of ... all are means over the 4
    assert weights_with(4, law="block_suffix", block_length=4)[0] == {0.25}
    assert weights_with(8, law="full", block_length=8) == ({0.125}, {1.0})


@pytest.mark.parametrize(
    ("law", "sampling", "num_draws", "message"),
    [
        ("random", "independent", 1, "mask_law='random' is not known. Use one of uniform, block_suffix, semi_ar"),
        ("uniform", "independent", 0, "num_mc_samples=0 must be at least 1"),
        ("full", "independent", 2, "num_mc_samples=2 with mask_law='full' would repeat one and the same mask"),
        ("uniform", "complementary", 3, "num_mc_samples=3 is odd, but mc_sampling='complementary' draws masks in"),
    ],
)
def test_combinations_without_meaning_are_refused(law, sampling, num_draws, message):
    with pytest.raises(ValueError, match=message):
        check_draws(law, sampling, num_draws)


@pytest.mark.parametrize("law", LAWS)
def test_every_meaningful_combination_is_allowed(law):
    for sampling in SAMPLINGS:
        num_draws = 1 if law == "full" else 2
        check_draws(law, sampling, num_draws)
        plan_of(4, law=law, sampling=sampling, num_draws=num_draws, keys=2)


@pytest.mark.parametrize("num_draws", [1, 2, 3, 5])
def test_quadrature_integrates_over_the_share_of_masked_tokens(num_draws):
    nodes, weights = gauss_legendre(num_draws)

    for degree in range(2 * num_draws):
        integral = sum(weight * node**degree for node, weight in zip(nodes, weights, strict=True))
        assert integral == pytest.approx(1 / (degree + 1), abs=1e-12)

    length = 1000
    plan = draw_mask_plan(
        torch.tensor([3]),
        torch.tensor([length]),
        torch.ones(1, 2, dtype=torch.bool),
        window_length=length,
        law="uniform",
        sampling="quadrature",
        num_draws=num_draws,
        block_length=8,
        seed=0,
        iteration=0,
    )
    counts = plan.is_noised.sum(-1)[0].tolist()
    assert counts == [math.ceil(length * node) for node in nodes]
    # a log-probability of minus the share of masked tokens: the integral of t is a half
    share = plan.is_noised.float().mean(-1, keepdim=True)
    estimate = (plan.weight * share).sum() / num_draws
    assert estimate.item() == pytest.approx(0.5, abs=1e-3)


def test_a_mask_rate_replaces_the_random_share_of_the_rows_that_have_one():
    plan = draw_mask_plan(
        torch.tensor([0, 1, 2]),
        torch.tensor([8, 8, 8]),
        torch.ones(3, 2, dtype=torch.bool),
        window_length=8,
        law="uniform",
        sampling="independent",
        num_draws=4,
        block_length=8,
        seed=0,
        iteration=0,
        mask_rate=torch.tensor([0.25, math.nan, 1.0]),
    )

    counts = plan.is_noised.sum(-1)
    assert counts[0].tolist() == [2] * 4
    assert counts[2].tolist() == [8] * 4
    assert len(set(counts[1].tolist())) > 1
