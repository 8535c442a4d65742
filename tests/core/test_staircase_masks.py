# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests import naive
from tests.tiny import tiny_sdar
from trl_stabledrl.core.elbo import elbo_per_token_by_draw
from trl_stabledrl.core.masking import MaskLaw, MaskPlan, McSampling, check_draws, draw_mask_plan

MASK = 6
NUM_KEYS = 20_000
SAMPLINGS = [name for name in get_args(McSampling) if name != "quadrature"]  # which is the uniform law's
BLOCKS = [1, 3, 4, 32]


def plan_of(
    length: int | Sequence[int],
    *,
    offset: int | Sequence[int] = 0,
    sampling: Any = "independent",
    num_draws: int = 1,
    block_length: int = 4,
    window_length: int | None = None,
    prompt_length: int = 0,
    keys: int | Tensor = NUM_KEYS,
    seed: int = 0,
    iteration: int = 0,
) -> MaskPlan:
    """Plan of rows with consecutive or given keys; one length and offset for all, or one each."""
    noise_key = torch.arange(keys) if isinstance(keys, int) else keys
    lengths = torch.full_like(noise_key, length) if isinstance(length, int) else torch.tensor(length)
    offsets = torch.full_like(noise_key, offset) if isinstance(offset, int) else torch.tensor(offset)
    return draw_mask_plan(
        noise_key,
        lengths,
        torch.ones(len(noise_key), prompt_length, dtype=torch.bool),
        window_length=window_length or int(lengths.max()),
        law="staircase",
        sampling=sampling,
        num_draws=num_draws,
        block_length=block_length,
        seed=seed,
        iteration=iteration,
        block_offset=offsets,
    )


def positions_of(is_noised: Tensor) -> frozenset[int]:
    return frozenset(is_noised.nonzero()[:, 0].tolist())


def codes(is_noised: Tensor) -> Tensor:
    """Number the sets of positions: bit j is set where position j is in."""
    return (is_noised.long() << torch.arange(is_noised.shape[-1])).sum(-1)


def code_of(positions: frozenset[int]) -> int:
    return sum(1 << j for j in positions)


@pytest.mark.parametrize("num_draws", [2, 4])
@pytest.mark.parametrize("block_length", BLOCKS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_draws_are_the_ones_of_the_hash(sampling, block_length, num_draws):
    rows = [(offset, length) for offset in range(block_length) for length in range(10)]
    keys = torch.arange(len(rows)) * 7 + 3
    plan = plan_of(
        [length for _, length in rows], offset=[offset for offset, _ in rows], sampling=sampling, num_draws=num_draws,
        block_length=block_length, window_length=11, prompt_length=2, keys=keys, seed=5, iteration=1,
    )  # fmt: skip

    assert not plan.is_noised_prompt.any()
    assert plan.is_noised_prompt.shape == (len(rows), num_draws, 2)
    assert torch.equal(plan.is_scored, plan.is_noised)
    for i, (offset, length) in enumerate(rows):
        draws = naive.staircase_draws_of(
            sampling, seed=5, key=int(keys[i]), iteration=1, num_draws=num_draws, length=length,
            block_length=block_length, prompt_length=offset + 3 * block_length,
        )  # fmt: skip
        for m, draw in enumerate(draws):
            assert positions_of(plan.is_noised[i, m]) == draw.noised
            weight, odds = torch.zeros(11), torch.zeros(11)
            for j, v in draw.odds:
                weight[j], odds[j] = v / length, v
            torch.testing.assert_close(plan.weight[i, m], weight, rtol=2e-7, atol=0)
            torch.testing.assert_close(plan.inverse_probability[i, m], odds, rtol=2e-7, atol=0)


@pytest.mark.parametrize(("length", "offset", "block_length"), [(5, 3, 4), (7, 0, 3), (3, 1, 32)])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_block_masks_some_of_its_own_tokens(sampling, length, offset, block_length):
    plan = plan_of(length, offset=offset, sampling=sampling, num_draws=2, block_length=block_length, keys=500)

    for block in naive.blocks_of(length, block_length, offset=offset):
        sizes = plan.is_noised[..., block.start : block.stop].sum(-1)
        assert sizes.unique().tolist() == list(range(1, len(block) + 1))


def chi_square_of(counts: Counter[int], probabilities: dict[int, float]) -> tuple[float, float]:
    """Statistic with its bound, mean and four standard deviations."""
    total = counts.total()
    assert math.isclose(math.fsum(probabilities.values()), 1.0, rel_tol=1e-9)
    assert set(counts) <= set(probabilities)
    assert min(probabilities.values()) * total >= 5
    statistic = sum((counts[x] - p * total) ** 2 / (p * total) for x, p in probabilities.items())
    degrees = len(probabilities) - 1
    return statistic, degrees + 4 * math.sqrt(2 * degrees)


CASES = [(1, 0, 4), (4, 0, 4), (4, 2, 4), (5, 3, 4), (5, 2, 3), (5, 0, 2)]  # length, offset, block


@pytest.mark.parametrize(("length", "offset", "block_length"), CASES)
@pytest.mark.parametrize("sampling", ["independent", "complementary", "cyclic"])
def test_each_draw_follows_the_law_alone(sampling, length, offset, block_length):
    plan = plan_of(length, offset=offset, sampling=sampling, num_draws=4, block_length=block_length, keys=8000)
    probabilities = {
        code_of(o.draw.noised): o.probability for o in naive.staircase_outcomes(length, block_length, offset=offset)
    }

    for found in codes(plan.is_noised).unbind(dim=1):
        statistic, bound = chi_square_of(Counter(found.tolist()), probabilities)
        assert statistic <= bound


@pytest.mark.parametrize(("length", "offset", "block_length"), CASES)
def test_stratified_draws_follow_the_law_of_each_block_together(length, offset, block_length):
    # together only, and block by block: a draw takes the same part of the counts in all its blocks
    plan = plan_of(length, offset=offset, sampling="stratified", num_draws=4, block_length=block_length, keys=8000)

    for block in naive.blocks_of(length, block_length, offset=offset):
        found = codes(plan.is_noised[..., block.start : block.stop])
        outcomes = naive.staircase_outcomes(len(block), len(block))
        probabilities = {code_of(o.draw.noised): o.probability for o in outcomes}
        statistic, bound = chi_square_of(Counter(found.flatten().tolist()), probabilities)
        assert statistic <= bound


def test_blocks_of_a_draw_are_independent():
    plan = plan_of(6, block_length=3, keys=NUM_KEYS)

    first, second = plan.is_noised[:, 0].double().split(3, dim=-1)
    covariance = (first - first.mean(0)).T @ (second - second.mean(0)) / NUM_KEYS
    assert (covariance.abs() <= 4 * 0.25 / math.sqrt(NUM_KEYS)).all()
    sizes = Counter((first.sum(-1) * 4 + second.sum(-1)).long().tolist())
    statistic, bound = chi_square_of(sizes, {4 * a + b: 1 / 9 for a in (1, 2, 3) for b in (1, 2, 3)})
    assert statistic <= bound


@pytest.mark.parametrize(("length", "offset", "block_length"), [(10, 0, 4), (10, 3, 4), (7, 1, 3), (6, 0, 1)])
def test_complementary_pairs_cover_each_block_once_or_are_both_full(length, offset, block_length):
    plan = plan_of(length, offset=offset, sampling="complementary", num_draws=4, block_length=block_length, keys=500)

    for block in naive.blocks_of(length, block_length, offset=offset):
        for first, second in ((0, 1), (2, 3)):
            one, two = (plan.is_noised[:, m, block.start : block.stop] for m in (first, second))
            is_full = one.all(-1) & two.all(-1)
            assert ((one ^ two).all(-1) | is_full).all()
            assert is_full.any()
            assert (one != plan.is_noised[:, (first + 2) % 4, block.start : block.stop]).any() or len(block) == 1


@pytest.mark.parametrize(("length", "offset", "block_length"), [(10, 0, 4), (10, 3, 4), (7, 1, 3), (40, 5, 32)])
def test_cyclic_counts_take_every_value_once_where_the_draws_are_as_many(length, offset, block_length):
    num_draws = block_length
    plan = plan_of(length, offset=offset, sampling="cyclic", num_draws=num_draws, block_length=block_length, keys=2000)

    for block in naive.blocks_of(length, block_length, offset=offset):
        counts = plan.is_noised[..., block.start : block.stop].sum(-1)  # (B, M)
        times = torch.stack([(counts == k).sum(-1) for k in range(1, len(block) + 1)], dim=-1)
        fewest = num_draws // len(block)
        assert times.min() == fewest
        assert times.max() == math.ceil(num_draws / len(block))
        steps = counts.diff(dim=-1) % len(block)
        assert (steps == 1 % len(block)).all()
        starts = Counter(counts[:, 0].tolist())
        if len(block) > 1:
            statistic, bound = chi_square_of(starts, {k: 1 / len(block) for k in range(1, len(block) + 1)})
            assert statistic <= bound


@lru_cache
def log_probs_of(length: int, offset: int, block_length: int = 4) -> naive.RowLogProbs:
    """A random SDAR over 6 tokens and a mask, in float64, on one fixed completion."""
    model = tiny_sdar(
        block_size=block_length, vocab_size=7, mask_token_id=MASK, hidden_size=16, intermediate_size=24,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.4, dtype=torch.float64, seed=5,
    )  # fmt: skip
    prompt = [4, 3, 2, 5, 4, 0, 2, 3][: block_length + offset]
    return naive.RowLogProbs(
        model, prompt, [3, 5, 2, 4, 3, 5, 3, 2][:length], function=naive.staircase_log_probs,
        block_length=block_length, mask_token_id=MASK, window_length=8,
    )  # fmt: skip


@lru_cache
def log_prob_table(length: int, offset: int, block_length: int) -> Tensor:
    """By (code of the noised completion, position)."""
    log_probs = log_probs_of(length, offset, block_length)
    table = torch.zeros(2**length, length, dtype=torch.float64)
    for noised in naive.subsets(range(length)):
        table[code_of(noised)] = torch.tensor(log_probs(noised))
    return table


def estimates(plan: MaskPlan, length: int, offset: int, block_length: int) -> Tensor:
    """The row's estimate from all its draws, (B,)."""
    log_probs = log_prob_table(length, offset, block_length)[codes(plan.is_noised)]  # (B, M, W)
    return elbo_per_token_by_draw(log_probs, plan.weight.double()).mean(dim=1)


TWO_BLOCKS = [(8, 0, 4), (6, 2, 4), (5, 1, 4), (7, 1, 4), (5, 1, 3), (4, 0, 2)]  # length, offset, block


@pytest.mark.parametrize(("length", "offset", "block_length"), TWO_BLOCKS)
def test_the_definitions_agree_with_each_other(length, offset, block_length):
    log_probs = log_probs_of(length, offset, block_length)
    outcomes = naive.staircase_outcomes(length, block_length, offset=offset)

    bound = naive.random_order_elbo(length, block_length, log_probs, offset=offset) / length
    plain = [(o.probability, o.draw.elbo_per_token(log_probs)) for o in outcomes]
    pairs = [
        (o.probability, (o.draw.elbo_per_token(log_probs) + o.partner.elbo_per_token(log_probs)) / 2) for o in outcomes
    ]

    for values, sampling, num_draws in ((plain, "independent", 1), (pairs, "complementary", 2)):
        mean, variance = naive.mean_and_variance(values)
        assert mean == pytest.approx(bound, rel=1e-12)
        expected = naive.staircase_variance(sampling, num_draws, length, block_length, log_probs, offset=offset)
        assert variance == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("length", "offset", "block_length"), TWO_BLOCKS)
def test_planned_weights_average_exactly_to_the_random_order_bound(length, offset, block_length):
    plan = plan_of(length, offset=offset, block_length=block_length)
    probabilities = {
        code_of(o.draw.noised): o.probability for o in naive.staircase_outcomes(length, block_length, offset=offset)
    }
    values = dict(
        zip(codes(plan.is_noised[:, 0]).tolist(), estimates(plan, length, offset, block_length).tolist(), strict=True)
    )

    assert set(values) == set(probabilities)  # 20,000 keys show every outcome
    total = math.fsum(probabilities[code] * value for code, value in values.items())

    log_probs = log_probs_of(length, offset, block_length)
    expected = naive.random_order_elbo(length, block_length, log_probs, offset=offset) / length
    assert total == pytest.approx(expected, rel=2e-7)  # weights are float32


@pytest.mark.parametrize("num_draws", [1, 2, 4, 6])
@pytest.mark.parametrize(("length", "offset"), [(8, 0), (6, 2), (7, 1)])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_estimates_average_to_the_bound_with_the_enumerated_variance(sampling, length, offset, num_draws):
    if sampling == "complementary" and num_draws % 2:
        num_draws = 8
    log_probs = log_probs_of(length, offset)
    expected = naive.random_order_elbo(length, 4, log_probs, offset=offset) / length
    variance = naive.staircase_variance(sampling, num_draws, length, 4, log_probs, offset=offset)

    values = estimates(plan_of(length, offset=offset, sampling=sampling, num_draws=num_draws), length, offset, 4)

    assert abs(values.mean().item() - expected) <= 3 * values.std().item() / math.sqrt(NUM_KEYS)
    fourth = ((values - values.mean()) ** 4).mean().item()
    assert abs(values.var().item() - variance) <= 3 * math.sqrt((fourth - values.var().item() ** 2) / NUM_KEYS)


# exact, by enumeration, of the average over M draws on this model, in 1e-3 nats^2, in the order of SAMPLINGS
@pytest.mark.parametrize(
    ("length", "offset", "num_draws", "variances"),
    [
        (8, 0, 4, [66.103, 55.558, 45.463, 55.558]),  # two blocks of four: every count once, 16 % less
        (8, 0, 2, [132.205, 120.374, 90.927, 130.509]),
        (8, 0, 8, [33.051, 27.779, 22.732, 27.779]),
        (6, 2, 4, [56.051, 42.255, 64.392, 42.255]),  # blocks of two and four
    ],
)
def test_cyclic_counts_have_a_lower_variance_than_independent_ones(length, offset, num_draws, variances):
    log_probs = log_probs_of(length, offset)

    found = {
        sampling: 1e3 * naive.staircase_variance(sampling, num_draws, length, 4, log_probs, offset=offset)
        for sampling in SAMPLINGS
    }

    assert list(found.values()) == pytest.approx(variances, rel=1e-4)
    assert found["cyclic"] < found["independent"]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_rows_of_a_group_share_masks_where_lengths_agree(sampling):
    keys = torch.arange(60).repeat_interleave(4)
    plan = plan_of([9, 9, 6, 9] * 60, offset=2, sampling=sampling, num_draws=4, keys=keys)

    for name in ("is_noised", "weight", "inverse_probability"):
        by_group = getattr(plan, name).unflatten(0, (60, 4))
        assert torch.equal(by_group[:, 0], by_group[:, 1])
        assert torch.equal(by_group[:, 0], by_group[:, 3])
    shared = plan.is_noised.unflatten(0, (60, 4))
    assert torch.equal(shared[:, 0, :, :6], shared[:, 2, :, :6])  # blocks that both rows fill
    assert len(codes(plan.is_noised[::4, 0]).unique()) > 20  # groups differ


@pytest.mark.parametrize("sampling", ["independent", "complementary", "cyclic"])
def test_sharing_leaves_the_law_of_each_row_unchanged(sampling):
    lengths = [6, 3, 5]
    keys = torch.arange(6000).repeat_interleave(3)
    plan = plan_of(lengths * 6000, offset=1, sampling=sampling, num_draws=2, block_length=3, keys=keys)

    for i, length in enumerate(lengths):
        probabilities = {code_of(o.draw.noised): o.probability for o in naive.staircase_outcomes(length, 3, offset=1)}
        for m in range(2):
            statistic, bound = chi_square_of(Counter(codes(plan.is_noised[i::3, m]).tolist()), probabilities)
            assert statistic <= bound


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_masks_depend_on_key_seed_iteration_and_draw_alone(sampling):
    num, keys = 24, torch.arange(100, 124)
    lengths, offsets = torch.tensor([8, 3, 5, 1] * 6), torch.tensor([0, 2, 1] * 8)

    def plan(rows: Tensor, **changes: Any) -> MaskPlan:
        options: dict[str, Any] = {"num_draws": 4, "block_length": 3, "window_length": 8, "prompt_length": 2} | changes
        return plan_of(
            lengths[rows].tolist(), offset=offsets[rows].tolist(), sampling=sampling, keys=keys[rows], **options
        )

    def assert_equal(found: MaskPlan, expected: MaskPlan, rows: Tensor) -> None:
        for name in ("is_noised", "is_scored", "weight", "inverse_probability"):
            assert torch.equal(getattr(found, name)[..., :8], getattr(expected, name)[rows])
            assert not getattr(found, name)[..., 8:].any()

    everything = torch.arange(num)
    reference = plan(everything)
    for size in (1, 2, 8):
        for rows in everything.split(size):
            assert_equal(plan(rows), reference, rows)
    order = torch.randperm(num, generator=torch.Generator().manual_seed(0))
    assert_equal(plan(order), reference, order)
    assert_equal(plan(everything, prompt_length=9), reference, everything)
    assert_equal(plan(everything, window_length=13), reference, everything)
    for change in ({"seed": 1}, {"iteration": 1}):
        changed = plan(everything, **change).is_noised
        assert (changed != reference.is_noised).any(-1)[lengths > 1].double().mean() > 0.3
    assert (reference.is_noised[:, 0] != reference.is_noised[:, 2]).any(-1)[lengths > 1].any()
    if sampling in ("independent", "cyclic", "complementary"):  # more draws continue the same sequence
        assert torch.equal(plan(everything, num_draws=2).is_noised, reference.is_noised[:, :2])


def test_tokens_after_the_end_are_neither_masked_nor_scored():
    lengths = [0, 1, 3, 6] * 50
    plan = plan_of(lengths, offset=[0, 1, 2, 3, 3] * 40, num_draws=2, window_length=10, prompt_length=2, keys=200)

    is_after = torch.arange(10) >= torch.tensor(lengths)[:, None, None]
    for name in ("is_noised", "is_scored", "weight", "inverse_probability"):
        assert not getattr(plan, name)[is_after.expand_as(plan.is_noised)].any()
    assert plan.is_scored[torch.tensor(lengths) > 0].any(-1).all()
    for values in (plan.weight, plan.inverse_probability):
        assert values.isfinite().all()


@pytest.mark.parametrize("law", [law for law in get_args(MaskLaw) if law != "staircase"])
def test_cyclic_counts_are_refused_outside_the_staircase(law):
    with pytest.raises(ValueError, match=f"mc_sampling='cyclic' with mask_law='{law}'.*Use 'independent', 'strat"):
        check_draws(law, "cyclic", 1)


@pytest.mark.parametrize(
    ("sampling", "num_draws", "message"),
    [
        ("complementary", 3, "num_mc_samples=3 is odd, but mc_sampling='complementary' draws masks in pairs"),
        ("cyclic", 0, "num_mc_samples=0 must be at least 1"),
        ("antithetic", 2, "mc_sampling='antithetic' is not known. Use one of independent, stratified, complementary"),
    ],
)
def test_draws_without_meaning_are_refused(sampling, num_draws, message):
    with pytest.raises(ValueError, match=message):
        check_draws("staircase", sampling, num_draws)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_meaningful_combination_is_allowed(sampling):
    for num_draws in (2, 4) if sampling == "complementary" else (1, 2, 3, 4, 5):
        check_draws("staircase", sampling, num_draws)
        assert plan_of(4, sampling=sampling, num_draws=num_draws, keys=2).is_noised.shape == (2, num_draws, 4)
