# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
The method written a second time, slowly: plain Python, one row and one Monte Carlo draw at a time.

Nothing here imports the package. Read it as the definition; `core/` and `likelihood.py` are tested against it. A
position of the completion is an int from 0, the last prompt token is -1.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, combinations, permutations, product
from typing import Any

import torch
from torch import Tensor

Positions = frozenset[int]
LogProbs = Callable[[Positions], Sequence[float]]
"""From the masked positions to the log-probability of the true token at every position of the completion."""

NOTHING: Positions = frozenset()
COIN = 0.15


def mix(bits: int) -> int:
    """SplitMix64's finaliser, in unbounded integers reduced modulo 2**64."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
    return bits ^ (bits >> 31)


def random_bits(seed: int, stream: int, *keys: int) -> int:
    """Hash of seed, stream and keys in [0, 2**64)."""
    multiplier, golden = 0xD1342543DE82EF95, 0x9E3779B97F4A7C15
    state = mix((seed * multiplier + stream + golden) % 2**64)
    for key in keys:
        state = mix((state * multiplier + key + golden) % 2**64)
    return state


def subsets(items: Iterable[int], *, smallest: int = 0) -> list[Positions]:
    items = list(items)
    sizes = range(smallest, len(items) + 1)
    return [frozenset(chosen) for chosen in chain.from_iterable(combinations(items, size) for size in sizes)]


def blocks_of(length: int, block_length: int) -> list[range]:
    return [range(start, min(start + block_length, length)) for start in range(0, length, block_length)]


@dataclass(frozen=True)
class Draw:
    """One outcome of a mask law."""

    noised: Positions
    scored: Positions
    weight: float
    """Of each scored log-probability in `elbo_per_token`."""
    odds: tuple[tuple[int, float], ...]
    """`v`: one over the probability of being masked, of each scored position."""


def draw_of(
    law: str, length: int, block_length: int, *, block: int, chosen: Positions, coins: Positions = NOTHING
) -> Draw:
    """The draw that masks `chosen` at random, in `block` where the law has blocks, with `coins` fallen elsewhere."""
    blocks = blocks_of(length, block_length)
    k = len(chosen)
    if law == "full":
        everything = frozenset(range(length))
        return Draw(everything, everything, 1 / length, tuple((j, 1.0) for j in range(length)))
    if law == "uniform":
        return Draw(chosen, chosen, (length / k) / length, tuple((j, length / k) for j in sorted(chosen)))
    later = frozenset(range(blocks[block].stop, length))
    if law == "semi_ar":
        weight = len(blocks) * len(blocks[block]) / k
        return Draw(chosen | later, chosen, weight / length, tuple((j, weight) for j in sorted(chosen)))
    assert law == "block_suffix"
    earlier = frozenset(j for j in coins if j >= 0)
    assert all(j < blocks[block].start for j in earlier)
    scored = chosen | later | earlier
    odds = dict.fromkeys(earlier, 1 / COIN) | {j: len(blocks[block]) / k for j in chosen} | dict.fromkeys(later, 1.0)
    return Draw(coins | scored, scored, 1 / len(scored), tuple(sorted(odds.items())))


@dataclass(frozen=True)
class Outcome:
    """A draw with its probability, and the draw that completes it to a complementary pair."""

    probability: float
    draw: Draw
    partner: Draw


def outcomes_of(law: str, length: int, block_length: int, *, prompt_length: int = 0) -> list[Outcome]:
    """Every outcome of a law. One draw may occur in several outcomes of `block_suffix`."""
    if law == "full":
        draw = draw_of(law, length, block_length, block=0, chosen=NOTHING)
        return [Outcome(1.0, draw, draw)]
    active_sets = [range(length)] if law == "uniform" else blocks_of(length, block_length)
    outcomes = []
    for block, active in enumerate(active_sets):
        tossed = range(-prompt_length, active.start) if law == "block_suffix" else range(0)
        for coins in subsets(tossed):
            coin_probability = COIN ** len(coins) * (1 - COIN) ** (len(tossed) - len(coins))
            for chosen in subsets(active, smallest=1):
                k = len(chosen)
                rest = frozenset(active) - chosen or chosen  # nothing is left of a full mask: its partner is itself
                outcomes.append(
                    Outcome(
                        coin_probability / len(active_sets) / len(active) / math.comb(len(active), k),
                        draw_of(law, length, block_length, block=block, chosen=chosen, coins=coins),
                        draw_of(law, length, block_length, block=block, chosen=rest, coins=coins),
                    )
                )
    return outcomes


def token_log_probs(
    model: Any,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    noised: Iterable[int],
    mask_token_id: int,
    window_length: int | None = None,
    tail: str = "mask",
    end_token_id: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probability of each token of the completion, from the full logits of one unpadded row."""
    ids = [*prompt, *completion]
    for j in noised:
        assert -len(prompt) <= j < len(completion)
        ids[len(prompt) + j] = mask_token_id
    num_tail = 0 if window_length is None else window_length - len(completion)
    if tail == "mask":
        ids += [mask_token_id] * num_tail
    elif tail == "eos":
        assert end_token_id is not None
        ids += [end_token_id] * num_tail
    else:
        assert tail == "hidden"
    logits = model(input_ids=torch.tensor([ids])).logits[0] / temperature  # (S, V)
    return torch.stack(
        [logits[len(prompt) + j].log_softmax(dim=-1)[token] for j, token in enumerate(completion)]
    )  # not shifted: position j predicts token j


class RowLogProbs:
    """`token_log_probs` of one row, computed once per set of masked positions."""

    def __init__(self, model: Any, prompt: Sequence[int], completion: Sequence[int], **kwargs: Any) -> None:
        self.row = (model, prompt, completion)
        self.kwargs = kwargs
        self.known: dict[Positions, list[float]] = {}

    def __call__(self, noised: Positions) -> list[float]:
        if noised not in self.known:
            with torch.no_grad():
                self.known[noised] = token_log_probs(*self.row, noised=noised, **self.kwargs).tolist()
        return self.known[noised]


def draw_elbo_per_token(draw: Draw, log_probs: LogProbs) -> float:
    values = log_probs(draw.noised)
    return draw.weight * math.fsum(values[j] for j in draw.scored)


def mean_and_variance(values: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Of (probability, value) pairs."""
    values = list(values)
    mean = math.fsum(p * x for p, x in values)
    return mean, math.fsum(p * (x - mean) ** 2 for p, x in values)


def expected_elbo_per_token(outcomes: Iterable[Outcome], log_probs: LogProbs) -> tuple[float, float]:
    """Mean and variance of one draw."""
    return mean_and_variance((o.probability, draw_elbo_per_token(o.draw, log_probs)) for o in outcomes)


def expected_pair_elbo_per_token(outcomes: Iterable[Outcome], log_probs: LogProbs) -> tuple[float, float]:
    """Mean and variance of the average over a complementary pair."""
    return mean_and_variance(
        (o.probability, (draw_elbo_per_token(o.draw, log_probs) + draw_elbo_per_token(o.partner, log_probs)) / 2)
        for o in outcomes
    )


def random_order_elbo(length: int, block_length: int, log_probs: LogProbs) -> float:
    """
    The bound without masks to draw: decode block by block, one token at a time in a random order inside the block, and
    average `sum_i log p(token_i | tokens before it)` over the orders. With one block it is LLaDA's ELBO.
    """
    total, num_orders = 0.0, 0
    for orders in product(*(permutations(block) for block in blocks_of(length, block_length))):
        masked = set(range(length))
        for j in chain.from_iterable(orders):
            total += log_probs(frozenset(masked))[j]
            masked.remove(j)
        num_orders += 1
    return total / num_orders


def eubo_per_token(
    log_probs: Sequence[Sequence[float]], odds: Sequence[Sequence[float]], *, beta: float, num_draws: int | None = None
) -> float:
    """In probability space, in float64; `odds` is 0 where a position is not scored. Both are `[draw][position]`."""
    num_draws = num_draws or len(log_probs)
    by_position = []
    for j in range(len(log_probs[0])):
        if any(row[j] for row in odds):
            mean = math.fsum(v[j] * math.exp(beta * x[j]) for x, v in zip(log_probs, odds, strict=True)) / num_draws
            by_position.append(math.log(mean) / beta)
    return sum(by_position) / len(by_position) if by_position else 0.0


def weights(log_ratios: Sequence[float], groups: Sequence[int], *, low: float, high: float) -> list[float]:
    """Clip in log space, subtract the group's maximum, exponentiate, normalise. Rows that are not finite weigh 0."""
    clipped = [min(max(x, low), high) if math.isfinite(x) else None for x in log_ratios]
    result = []
    for value, group in zip(clipped, groups, strict=True):
        members = [x for x, g in zip(clipped, groups, strict=True) if g == group and x is not None]
        top = max(members, default=0.0)
        result.append(0.0 if value is None else math.exp(value - top) / math.fsum(math.exp(x - top) for x in members))
    return result


def loss(
    log_ratios: Sequence[float],
    groups: Sequence[int],
    advantages: Sequence[float],
    surrogates: Sequence[float],
    *,
    low: float,
    high: float,
) -> float:
    """`- sum_i (w_i / sum_j w_j) A_i s_i` of each prompt, averaged over the prompts."""
    rows = zip(weights(log_ratios, groups, low=low, high=high), advantages, surrogates, strict=True)
    return -math.fsum(w * a * s for w, a, s in rows) / len(set(groups))


def kl(policy: float, reference: float, *, estimator: str) -> float:
    """Of one row's scores, nats per token."""
    d = reference - policy
    return {"k2": d * d / 2, "k3": math.exp(d) - 1 - d}[estimator]


# The trainer's update


def draws_of(
    law: str,
    sampling: str,
    *,
    seed: int,
    key: int,
    iteration: int,
    num_draws: int,
    length: int,
    block_length: int,
    prompt_length: int,
) -> list[Draw]:
    """The draws of one row in one inner iteration, from the hash alone."""
    unit = 31  # bits of a uniform integer

    def bits(stream: int, draw: int, *position: int) -> int:
        return random_bits(seed, stream, key, iteration, draw, *position)

    draws = []
    for m in range(num_draws):
        draw = m // 2 if sampling == "complementary" else m
        blocks = blocks_of(length, block_length)
        block = (bits(3, draw) >> (64 - unit)) * len(blocks) >> unit
        active = blocks[block] if law in ("block_suffix", "semi_ar") else range(length)
        order = sorted(active, key=lambda j, draw=draw: (bits(2, draw, j) + 2**63) % 2**64)  # as signed integers
        stratum, num_strata = (m, num_draws) if sampling == "stratified" else (0, 1)
        share = Fraction((stratum << unit) + (bits(1, draw) >> (64 - unit)) + 1, num_strata << unit)
        k = math.ceil(len(active) * share)
        chosen = frozenset(order[:k])
        if sampling == "complementary" and m % 2:
            chosen = frozenset(active) - chosen or chosen
        coins = NOTHING
        if law == "block_suffix":
            tossed = range(-prompt_length, active.start)
            coins = frozenset(j for j in tossed if bits(4, draw, j) >> (64 - unit) < round(COIN * 2**unit))
        draws.append(draw_of(law, length, block_length, block=block, chosen=chosen, coins=coins))
    return draws


@dataclass(frozen=True)
class Objective:
    """Every option of the update."""

    group_size: int
    window_length: int
    block_length: int
    mask_token_id: int
    end_token_id: int
    law: str = "block_suffix"
    sampling: str = "complementary"
    num_draws: int = 2
    seed: int = 42
    tail: str = "mask"
    temperature: float = 1.0
    coupling: str = "shared"
    sharing: str = "none"
    surrogate: str = "elbo"
    eubo_beta: float = 1.5
    low: float = -math.inf
    high: float = math.log(6)
    normalization: str = "token"
    beta: float = 0.0
    kl_estimator: str = "k3"


@dataclass(frozen=True)
class Row:
    """A completion and what its update needs."""

    index: int
    prompt: Sequence[int]
    completion: Sequence[int]
    """Up to and including the first end token; empty where nothing of it may be scored."""
    advantage: float
    old: Any
    """The model that sampled it."""


def row_scores(model: Any, row: Row, objective: Objective, *, iteration: int) -> tuple[Tensor, Tensor]:
    """
    `elbo_per_token` and the surrogate of a bad completion, differentiable, from the full logits of one unpadded row.
    """
    draws = draws_of(
        objective.law,
        objective.sampling,
        seed=objective.seed,
        key=row.index // objective.group_size if objective.sharing == "group" else row.index,
        iteration=iteration,
        num_draws=objective.num_draws,
        length=len(row.completion),
        block_length=objective.block_length,
        prompt_length=len(row.prompt),
    )
    elbo = torch.zeros((), dtype=torch.float64)
    by_position: dict[int, Tensor] = {}
    for draw in draws:
        log_probs = token_log_probs(
            model,
            row.prompt,
            row.completion,
            noised=draw.noised,
            mask_token_id=objective.mask_token_id,
            window_length=objective.window_length,
            tail=objective.tail,
            end_token_id=objective.end_token_id,
            temperature=objective.temperature,
        )
        elbo = elbo + draw.weight * log_probs[sorted(draw.scored)].sum() / len(draws)
        for j, odds in draw.odds if objective.surrogate == "sandwich" else ():
            term = odds * (objective.eubo_beta * log_probs[j]).exp() / len(draws)
            by_position[j] = by_position[j] + term if j in by_position else term
    if objective.surrogate == "elbo":
        return elbo, elbo
    eubo = torch.stack([mean.log() / objective.eubo_beta for mean in by_position.values()]).mean()
    return elbo, (elbo + eubo) / 2


def update_loss(
    model: Any, rows: Sequence[Row], objective: Objective, *, iteration: int, reference: Any = None
) -> Tensor:
    """
    The loss of one optimizer step over `rows`, whole groups in any order.

    A row without a token to score, or whose score is not finite, is left out of its group's weights and of the KL.
    """
    log_ratios, surrogates, divergences = [], [], []
    for row in rows:
        if not row.completion:
            log_ratios.append(math.nan)
            continue
        elbo, lowered = row_scores(model, row, objective, iteration=iteration)
        old_iteration = iteration if objective.coupling == "shared" else -1 - iteration
        with torch.no_grad():
            old, _ = row_scores(row.old, row, objective, iteration=old_iteration)
        scale = len(row.completion) if objective.normalization == "sequence" else 1
        log_ratios.append((elbo.item() - old.item()) * scale)
        if not math.isfinite(log_ratios[-1]):
            continue
        surrogates.append(row.advantage * (elbo if row.advantage > 0 else lowered))
        if objective.beta:
            with torch.no_grad():
                target, _ = row_scores(reference, row, objective, iteration=iteration)
            d = target - elbo
            divergences.append(d * d / 2 if objective.kl_estimator == "k2" else d.exp() - 1 - d)
    groups = [row.index // objective.group_size for row in rows]
    shares = weights(log_ratios, groups, low=objective.low, high=objective.high)
    shares = [share for share, x in zip(shares, log_ratios, strict=True) if math.isfinite(x)]
    loss = torch.zeros((), dtype=torch.float64)
    for share, surrogate in zip(shares, surrogates, strict=True):
        loss = loss - share * surrogate / len(set(groups))
    for divergence in divergences:
        loss = loss + objective.beta * divergence / len(rows)
    return loss


def advantages(rewards: Sequence[float], group_size: int, *, scale: str = "none") -> list[float]:
    """Rewards minus the group's mean, over the group's or the batch's standard deviation where asked."""
    groups = [rewards[start : start + group_size] for start in range(0, len(rewards), group_size)]
    result = []
    for group in groups:
        center = math.fsum(group) / group_size
        spread = {"none": None, "group": group, "batch": rewards}[scale]
        result += [(r - center) / (1.0 if spread is None else statistics.stdev(spread) + 1e-4) for r in group]
    return result
