# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from tests import naive
from trl_stabledrl.core.unmasking import (
    choose_commits,
    keyed_race_noise,
    num_to_commit,
    race_grid,
    race_noise,
    sample_tokens,
    select_commits,
)

MASK = 2


def softmax(logits: list[float], *, temperature: float = 1.0, without: tuple[int, ...] = (MASK,)) -> list[float]:
    weights = [0.0 if i in without else math.exp((x - max(logits)) / temperature) for i, x in enumerate(logits)]
    return [weight / sum(weights) for weight in weights]


PEAKED = [6.0, 0.0, 9.0, -1.0, 2.0, 3.5, 0.5]
FLAT = [0.0, 0.01, 0.5, -0.02, 0.0, 0.03, 0.0]
WIDE = [math.sin(i * i) * 2 for i in range(50)]  # 50 tokens: the race's last group is short


@pytest.mark.parametrize("logits", [PEAKED, FLAT, WIDE], ids=["peaked", "flat", "wide"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampled_frequencies_are_the_softmax_within_three_standard_errors(logits, temperature, dtype, generator):
    num = 100_000
    given = torch.tensor(logits, dtype=dtype)
    noise = race_noise(num, len(logits), generator=generator)

    tokens, _ = sample_tokens(given.expand(num, -1), mask_token_id=MASK, temperature=temperature, noise=noise)

    expected = torch.tensor(softmax(given.double().tolist(), temperature=temperature), dtype=torch.float64)
    frequency = tokens.bincount(minlength=len(logits)) / num
    standard_error = (expected * (1 - expected) / num).sqrt()
    # with 50 tokens the largest of as many deviations is expected at 2.6 standard errors, so they get 4
    assert ((frequency - expected).abs() <= (3 if len(logits) < 10 else 4) * standard_error).all()


@pytest.mark.parametrize("logits", [PEAKED, FLAT, WIDE], ids=["peaked", "flat", "wide"])
def test_keyed_noise_has_the_law_of_a_generators(logits):
    num = 100_000
    rows, places = torch.arange(num) // 100, torch.arange(num) % 100  # keys that differ in a few bits
    noise = keyed_race_noise(len(logits), rows, places, torch.zeros_like(rows))

    tokens, _ = sample_tokens(torch.tensor(logits).expand(num, -1), mask_token_id=MASK, temperature=1.0, noise=noise)

    expected = torch.tensor(softmax(logits), dtype=torch.float64)
    frequency = tokens.bincount(minlength=len(logits)) / num
    standard_error = (expected * (1 - expected) / num).sqrt()
    assert ((frequency - expected).abs() <= (3 if len(logits) < 10 else 4) * standard_error).all()


def test_keyed_noise_is_a_function_of_its_keys():
    keys = torch.tensor([3, 3, 4]), torch.tensor([7, 8, 7]), torch.tensor([0, 0, 0])
    noise = keyed_race_noise(30, *keys)
    assert noise.shape == race_noise(3, 30, generator=torch.Generator()).shape
    assert noise.dtype == torch.float64
    assert noise.min() > 0
    assert len(noise.unique()) == noise.numel()
    assert torch.equal(keyed_race_noise(30, *(key[[2, 0]] for key in keys)), noise[[2, 0]])
    assert keyed_race_noise(30, *(key[:0] for key in keys)).shape == (0, noise.shape[1])


def test_keyed_noise_is_the_written_hash():
    noise = keyed_race_noise(4, torch.tensor([113]), torch.tensor([5]), torch.tensor([1]))
    bits = [naive.random_bits(0, 6, 113, 5, 1, lane) for lane in range(5)]
    assert noise[0].tolist() == pytest.approx([-math.log1p(-(value >> 11) / 2**53) for value in bits], rel=1e-12)


def test_rare_tokens_of_a_large_vocabulary_are_sampled_at_their_rate(generator):
    vocab_size, num = 126_464, 400
    logits = torch.zeros(1, vocab_size)
    logits[0, 7] = math.log(vocab_size)  # half of the probability; the other half is spread over 126,462 tokens

    tokens, _ = sample_tokens(
        logits.expand(num, -1),
        mask_token_id=126_336,
        temperature=1.0,
        noise=race_noise(num, vocab_size, generator=generator),
    )

    share = (tokens == 7).double().mean().item()
    assert abs(share - 0.5) <= 3 * math.sqrt(0.25 / num)
    others = tokens[tokens != 7]
    assert others.unique().numel() >= others.numel() - 2  # a repeat is a 1-in-7 event per rollout
    thirds = (others * 3 // vocab_size).bincount(minlength=3)  # uniform over the vocabulary, not its first groups
    assert (thirds - len(others) / 3).abs().max() <= 3 * math.sqrt(len(others) * 2 / 9)


@pytest.mark.parametrize("vocab_size", [3, 4, 5, 50, 64, 65, 126_464, 151_936])
def test_the_race_grid_holds_the_vocabulary_and_no_empty_group(vocab_size):
    num_groups, group_length = race_grid(vocab_size)

    assert (num_groups - 1) * group_length < vocab_size <= num_groups * group_length
    assert num_groups + group_length <= 2 * math.sqrt(vocab_size) + 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_mask_token_is_never_sampled_even_when_predicted(temperature, generator):
    logits = torch.zeros(500, 9)
    logits[:, MASK] = 100.0

    tokens, confidence = sample_tokens(
        logits, mask_token_id=MASK, temperature=temperature, noise=race_noise(500, 9, generator=generator)
    )

    assert (tokens != MASK).all()
    torch.testing.assert_close(confidence, torch.full((500,), 1 / 8))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_banned_tokens_are_never_sampled_and_still_count_in_the_confidence(temperature, generator):
    # the banned token is so much likelier that every other probability underflows beside it
    logits = torch.tensor([[0.0, 1.0, 0.0, 200.0], [0.0, 1.0, 0.0, 1.0]]).repeat(300, 1)

    tokens, confidence = sample_tokens(
        logits,
        mask_token_id=MASK,
        banned_token_ids=(3,),
        temperature=temperature,
        noise=race_noise(600, 4, generator=generator),
    )

    for half in (tokens[::2], tokens[1::2]):
        assert set(half.tolist()) == ({1} if temperature == 0 else {0, 1})
    assert (confidence[::2] < 1e-30).all()
    own = softmax([0.0, 1.0, 0.0, 1.0])
    torch.testing.assert_close(confidence[1::2], torch.tensor([own[token] for token in tokens[1::2].tolist()]))


def test_temperature_zero_takes_the_most_probable_token_without_noise():
    logits = torch.tensor([PEAKED, FLAT])

    tokens, confidence = sample_tokens(logits, mask_token_id=MASK, temperature=0.0)

    assert tokens.tolist() == [0, 5]
    torch.testing.assert_close(confidence, torch.tensor([softmax(PEAKED)[0], softmax(FLAT)[5]]))


def test_top_k_keeps_exactly_k_tokens_also_among_equals(generator):
    logits = torch.zeros(1, 30).expand(2000, -1)

    tokens, _ = sample_tokens(
        logits, mask_token_id=MASK, temperature=1.0, top_k=4, noise=race_noise(2000, 30, generator=generator)
    )

    assert tokens.unique().numel() == 4


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.3, {0}), (0.5, {0}), (0.51, {0, 1}), (0.79, {0, 1}), (0.81, {0, 1, 3}), (1.0, {0, 1, 3, 4})]
)
def test_top_p_keeps_the_smallest_set_that_holds_its_share(top_p, kept, generator):
    logits = torch.tensor([0.5, 0.3, 0.9, 0.15, 0.05]).log().expand(4000, -1)  # 2 is the mask

    tokens, _ = sample_tokens(
        logits, mask_token_id=MASK, temperature=1.0, top_p=top_p, noise=race_noise(4000, 5, generator=generator)
    )

    assert set(tokens.tolist()) == kept


def test_top_p_is_taken_of_the_tempered_top_k_distribution(generator):
    # top 2 at temperature 0.5: 25 / (25 + 9) = 0.735 for the first
    logits = torch.tensor([0.5, 0.3, 0.9, 0.15, 0.05]).log().expand(4000, -1)
    noise = race_noise(4000, 5, generator=generator)

    one, _ = sample_tokens(logits, mask_token_id=MASK, temperature=0.5, top_k=2, top_p=0.73, noise=noise)
    two, _ = sample_tokens(logits, mask_token_id=MASK, temperature=0.5, top_k=2, top_p=0.74, noise=noise)

    assert set(one.tolist()) == {0}
    assert set(two.tolist()) == {0, 1}
    assert abs((two == 0).double().mean().item() - 25 / 34) <= 3 * math.sqrt(25 * 9 / 34**2 / 4000)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_confidences_are_of_the_model_not_of_the_sampling(temperature, generator):
    rows = [PEAKED, FLAT]
    noise = race_noise(2, 7, generator=generator)
    found = {}
    for remasking in ("low_confidence", "margin", "entropy"):
        tokens, found[remasking] = sample_tokens(
            torch.tensor(rows),
            mask_token_id=MASK,
            banned_token_ids=(3,),
            temperature=temperature,
            top_k=3,
            remasking=remasking,
            noise=noise,
        )

    expected = {"low_confidence": [], "margin": [], "entropy": []}
    for row, token in zip(rows, tokens.tolist(), strict=True):
        probs = softmax(row)
        first, second = sorted(probs, reverse=True)[:2]
        expected["low_confidence"].append(probs[token])
        expected["margin"].append(first - second)
        expected["entropy"].append(sum(p * math.log(p) for p in probs if p > 0))
    for remasking, values in expected.items():
        torch.testing.assert_close(found[remasking], torch.tensor(values))


def test_random_remasking_is_uniform_and_blind_to_the_token(generator):
    logits = torch.tensor(PEAKED).expand(20_000, -1)

    tokens, confidence = sample_tokens(
        logits,
        mask_token_id=MASK,
        temperature=1.0,
        remasking="random",
        noise=race_noise(20_000, 7, generator=generator),
    )

    assert abs(confidence.mean().item() - 0.5) <= 3 * math.sqrt(1 / 12 / 20_000)
    assert abs(confidence.var().item() - 1 / 12) <= 3 * math.sqrt(1 / 180 / 20_000)
    is_top = (tokens == 0).double()
    correlation = torch.corrcoef(torch.stack([is_top, confidence.double()]))[0, 1].item()
    assert abs(correlation) <= 3 / math.sqrt(20_000)


@pytest.mark.parametrize("remasking", ["low_confidence", "random", "entropy", "margin"])
def test_logits_that_are_not_numbers_give_a_confidence_that_is_none(remasking, generator):
    logits = torch.zeros(2, 7)
    logits[1, 4] = math.nan

    _, confidence = sample_tokens(
        logits, mask_token_id=MASK, temperature=1.0, remasking=remasking, noise=race_noise(2, 7, generator=generator)
    )

    assert confidence.isfinite().tolist() == [True, False]


def test_work_space_changes_the_cost_alone(generator):
    logits = torch.randn(6, 50, generator=generator)
    before, noise = logits.clone(), race_noise(6, 50, generator=generator)
    scratch = torch.full((6, 7 * 8), math.nan)  # 50 tokens in 7 groups of 8

    plain = sample_tokens(logits, mask_token_id=MASK, temperature=0.9, noise=noise)
    assert torch.equal(logits, before)
    in_place = sample_tokens(logits, mask_token_id=MASK, temperature=0.9, noise=noise, scratch=scratch)

    assert torch.equal(plain[0], in_place[0])
    assert torch.equal(plain[1], in_place[1])


@pytest.mark.parametrize(("temperature", "remasking"), [(1.0, "low_confidence"), (0.0, "random")])
def test_sampling_without_noise_is_refused(temperature, remasking):
    with pytest.raises(ValueError, match="Expected noise for temperature"):
        sample_tokens(torch.zeros(1, 5), mask_token_id=MASK, temperature=temperature, remasking=remasking)


@pytest.mark.parametrize(
    ("num_masked", "num_steps", "commits"),
    [(32, 16, [2] * 16), (4, 7, [1, 1, 1, 1, 0, 0, 0]), (10, 4, [3, 3, 2, 2]), (5, 1, [5])],
)
def test_an_even_share_is_committed_per_step_and_all_by_the_last(num_masked, num_steps, commits):
    left, done = num_masked, []
    for step in range(num_steps):
        done.append(num_to_commit(torch.tensor([left]), num_steps_left=num_steps - step).item())
        left -= done[-1]

    assert done == commits
    assert left == 0


def test_committing_without_a_step_left_is_refused():
    with pytest.raises(ValueError, match="num_steps_left >= 1, got 0"):
        num_to_commit(torch.tensor([3]), num_steps_left=0)


def test_the_most_confident_masked_positions_are_committed_and_ties_go_left():
    confidence = torch.tensor([[0.9, 0.1, 0.5, 0.7], [0.5, 0.5, 0.5, 0.5], [-math.inf, 0.9, -math.inf, 0.8]])
    is_masked = torch.tensor([[False, True, True, True], [True, True, True, True], [True, False, True, False]])

    one = select_commits(confidence, is_masked, torch.tensor([1, 2, 1]))
    many = select_commits(confidence, is_masked, torch.tensor([9, 0, 2]))

    assert one.int().tolist() == [[0, 0, 0, 1], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert many.int().tolist() == [[0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]]


def test_the_threshold_adds_every_confident_masked_position_to_the_number_asked_for():
    confidence = torch.tensor([[0.95, 0.9, 0.91, 0.2], [0.3, 0.2, 0.1, 0.99]])
    is_masked = torch.tensor([[True, True, True, True], [True, True, True, False]])

    chosen = select_commits(confidence, is_masked, torch.tensor([1, 1]), threshold=0.9)

    assert chosen.int().tolist() == [[1, 0, 1, 0], [1, 0, 0, 0]]


CONFIDENCE = torch.tensor([[0.3, 0.9, 0.5, 0.8], [0.3, 0.9, 0.5, 0.8]])


def test_rows_may_be_at_different_steps():
    is_masked = torch.ones(2, 4, dtype=torch.bool)
    chosen = choose_commits(CONFIDENCE, is_masked, num_steps_left=torch.tensor([4, 2]))
    assert chosen.tolist() == [[False, True, False, False], [False, True, False, True]]
    for row, steps in enumerate([4, 2]):
        alone = choose_commits(CONFIDENCE[row : row + 1], is_masked[row : row + 1], num_steps_left=steps)
        assert torch.equal(alone, chosen[row : row + 1])


def test_a_threshold_commits_one_at_least():
    is_masked = torch.tensor([[True] * 4, [True, False, True, False]])
    chosen = choose_commits(CONFIDENCE, is_masked, num_steps_left=1, threshold=0.7)
    assert chosen.tolist() == [[False, True, False, True], [False, False, True, False]]


@pytest.mark.parametrize("threshold", [None, 0.7])
def test_late_positions_wait_for_all_others(threshold):
    is_late = torch.tensor([[False, True, False, True], [True] * 4])
    is_masked = torch.ones(2, 4, dtype=torch.bool)
    chosen = choose_commits(CONFIDENCE, is_masked, num_steps_left=4, threshold=threshold, is_late=is_late)
    assert chosen.tolist() == [[False, False, True, False], [True, False, False, False]]
    assert torch.equal(CONFIDENCE, torch.tensor([[0.3, 0.9, 0.5, 0.8]] * 2))  # not changed in place
