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
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, combinations, permutations, product
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import DynamicCache

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


def blocks_of(length: int, block_length: int, *, offset: int = 0) -> list[range]:
    """The completion's positions by block; `offset` places of the first block are the end of the prompt."""
    starts = range(-offset, length, block_length)
    return [range(max(start, 0), min(start + block_length, length)) for start in starts]


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
    """`token_log_probs`, or another such function, of one row, computed once per set of masked positions."""

    def __init__(
        self,
        model: Any,
        prompt: Sequence[int],
        completion: Sequence[int],
        *,
        function: Callable[..., Tensor] = token_log_probs,
        **kwargs: Any,
    ) -> None:
        self.row = (model, prompt, completion)
        self.function = function
        self.kwargs = kwargs
        self.known: dict[Positions, list[float]] = {}

    def __call__(self, noised: Positions) -> list[float]:
        if noised not in self.known:
            with torch.no_grad():
                self.known[noised] = self.function(*self.row, noised=noised, **self.kwargs).tolist()
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


def random_order_elbo(length: int, block_length: int, log_probs: LogProbs, *, offset: int = 0) -> float:
    """
    The bound without masks to draw: decode block by block, one token at a time in a random order inside the block, and
    average `sum_i log p(token_i | tokens before it)` over the orders. With one block it is LLaDA's ELBO.
    """
    total, num_orders = 0.0, 0
    for orders in product(*(permutations(block) for block in blocks_of(length, block_length, offset=offset))):
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
    nodes, node_weights = numpy.polynomial.legendre.leggauss(num_draws)  # on (-1, 1)
    for m in range(num_draws):
        draw = m // 2 if sampling == "complementary" else m
        blocks = blocks_of(length, block_length)
        block = (bits(3, draw) >> (64 - unit)) * len(blocks) >> unit
        active = blocks[block] if law in ("block_suffix", "semi_ar") else range(length)
        order = sorted(active, key=lambda j, draw=draw: (bits(2, draw, j) + 2**63) % 2**64)  # as signed integers
        stratum, num_strata = (m, num_draws) if sampling == "stratified" else (0, 1)
        share = Fraction((stratum << unit) + (bits(1, draw) >> (64 - unit)) + 1, num_strata << unit)
        if sampling == "quadrature":
            share = Fraction(round((nodes[m] + 1) / 2 * 2**unit), 2**unit)
        k = math.ceil(len(active) * share)
        chosen = frozenset(order[:k])
        if sampling == "complementary" and m % 2:
            chosen = frozenset(active) - chosen or chosen
        coins = NOTHING
        if law == "block_suffix":
            tossed = range(-prompt_length, active.start)
            coins = frozenset(j for j in tossed if bits(4, draw, j) >> (64 - unit) < round(COIN * 2**unit))
        made = draw_of(law, length, block_length, block=block, chosen=chosen, coins=coins)
        if sampling == "quadrature":
            made = replace(made, weight=made.weight * num_draws * float(node_weights[m]) / 2)
        draws.append(made)
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
    context_attention: str = "block_causal"
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
    name: str = "stabledrl"


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
    options: dict[str, Any] = {
        "seed": objective.seed,
        "key": row.index // objective.group_size if objective.sharing == "group" else row.index,
        "iteration": iteration,
        "num_draws": objective.num_draws,
        "length": len(row.completion),
        "block_length": objective.block_length,
        "prompt_length": len(row.prompt),
    }
    if objective.law == "staircase":
        draws = staircase_draws_of(objective.sampling, **options)
    else:
        draws = draws_of(objective.law, objective.sampling, **options)
    elbo = torch.zeros((), dtype=torch.float64)
    by_position: dict[int, Tensor] = {}
    for draw in draws:
        if isinstance(draw, StaircaseDraw):
            log_probs = staircase_log_probs(
                model,
                row.prompt,
                row.completion,
                noised=draw.noised,
                block_length=objective.block_length,
                mask_token_id=objective.mask_token_id,
                window_length=objective.window_length,
                context_attention=objective.context_attention,
                temperature=objective.temperature,
            )
            weighted = torch.stack([odds / draw.length * log_probs[j] for j, odds in draw.odds])
            elbo = elbo + weighted.sum() / len(draws)
        else:
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


def token_scores(model: Any, row: Row, objective: Objective, *, iteration: int) -> Tensor:
    """Log-probability of each token of a row, a mean over the draws that score it."""
    draws = draws_of(
        objective.law,
        objective.sampling,
        seed=objective.seed,
        key=row.index,
        iteration=iteration,
        num_draws=objective.num_draws,
        length=len(row.completion),
        block_length=objective.block_length,
        prompt_length=len(row.prompt),
    )
    scores: list[list[Tensor]] = [[] for _ in row.completion]
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
        for j in draw.scored:
            scores[j].append(log_probs[j])
    return torch.stack([torch.stack(values).mean() for values in scores])


def clipped_objective(log_ratio: Tensor, advantage: float, objective: Objective) -> Tensor:
    """PPO's `min(rho A, clip(rho) A)`, elementwise and differentiable."""
    ratio = log_ratio.exp()
    clipped = ratio.clamp(math.exp(objective.low), math.exp(objective.high))
    return torch.minimum(ratio * advantage, clipped * advantage)


def peer_loss(model: Any, rows: Sequence[Row], objective: Objective, *, iteration: int) -> Tensor:
    """What a peer's paper minimises over whole groups, with every graph alive and no weight taken out of it."""
    old_iteration = iteration if objective.coupling == "shared" else -1 - iteration
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.index // objective.group_size, []).append(row)
    total = torch.zeros((), dtype=torch.float64)
    for group in groups.values():
        size = len(group)
        deviations = [row.advantage for row in group]
        good, bad = (math.fsum(math.exp(sign * a) for a in deviations) for sign in (1, -1))
        num_tokens = sum(len(row.completion) for row in group)
        ratios = []
        for row in group:
            if not row.completion:
                continue
            length, advantage = len(row.completion), row.advantage
            if objective.name in ("diffu_grpo", "coupled_grpo"):
                new = token_scores(model, row, objective, iteration=iteration)
                with torch.no_grad():
                    old = token_scores(row.old, row, objective, iteration=old_iteration)
                total = total - clipped_objective(new - old, advantage, objective).mean() / size
                continue
            elbo, lowered = row_scores(model, row, objective, iteration=iteration)
            surrogate = elbo if advantage > 0 else lowered
            if objective.name == "spg":
                total = total - advantage * surrogate * length / num_tokens
                continue
            if objective.name == "wd1":
                total = total - (math.exp(advantage) / good - math.exp(-advantage) / bad) * surrogate
                continue
            with torch.no_grad():
                old, _ = row_scores(row.old, row, objective, iteration=old_iteration)
            scale = length if objective.normalization == "sequence" else 1
            log_ratio = (elbo - old) * scale
            if objective.name == "clip_only":
                clipped = math.exp(min(max(log_ratio.item(), objective.low), objective.high))
                total = total - clipped * advantage * surrogate / size
            elif objective.name == "self_norm_only":
                ratios.append((math.exp(log_ratio.item()), advantage * surrogate))
            else:
                if objective.name == "espo":  # the others' mean as baseline, from deviations of the whole mean
                    others = [a for other, a in zip(group, deviations, strict=True) if other is not row]
                    advantage = advantage - sum(others) / len(others)
                total = total - clipped_objective(log_ratio, advantage, objective) / scale / size
        for ratio, gain in ratios:
            total = total - ratio / math.fsum(r for r, _ in ratios) * gain
    return total / len(groups)


def update_loss(
    model: Any, rows: Sequence[Row], objective: Objective, *, iteration: int, reference: Any = None
) -> Tensor:
    """
    The loss of one optimizer step over `rows`, whole groups in any order.

    A row without a token to score, or whose score is not finite, is left out of its group's weights and of the KL.
    """
    if objective.name != "stabledrl":
        assert not objective.beta
        return peer_loss(model, rows, objective, iteration=iteration)
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


# The staircase: the likelihood of block diffusion


def may_see(
    query: tuple[int, int], key: tuple[int, int], block_length: int, context_attention: str = "block_causal"
) -> bool:
    """
    Each is (copy, place in the text): copy 0 is the clean text, 1 and on are noised copies of it, -1 is padding. A
    noised copy is seen by its own block only.
    """
    (query_copy, query_place), (key_copy, key_place) = query, key
    if -1 in (query_copy, key_copy):
        return query == key  # padding looks at itself, so that a softmax over nothing never occurs
    if key_copy == 0 and key_place // block_length < query_place // block_length:
        return True
    if key_copy != query_copy or key_place // block_length != query_place // block_length:
        return False
    return query_copy > 0 or context_attention == "block_causal" or key_place <= query_place


def text_blocks(
    prompt_length: int, completion_length: int, block_length: int, *, window_length: int | None = None
) -> list[range]:
    """
    The places of the text that the sampler filled block by block, from the block that holds the completion's first
    token, which may begin inside the prompt, to the one that holds its last, which the window may cut.
    """
    if completion_length == 0:
        return []
    length = prompt_length + completion_length
    limit = length + block_length if window_length is None else prompt_length + window_length
    starts = range(prompt_length // block_length * block_length, length, block_length)
    return [range(start, min(start + block_length, limit)) for start in starts]


def block_logits(model: Any, clean: Sequence[int], block: Sequence[int], block_length: int, context: str) -> Tensor:
    """Logits of one noised block behind the clean text before it, from a forward of its own, (block, V)."""
    places = [(0, i) for i in range(len(clean))] + [(1, len(clean) + i) for i in range(len(block))]
    is_seen = [[may_see(query, key, block_length, context) for key in places] for query in places]
    logits = model(
        input_ids=torch.tensor([[*clean, *block]]),
        attention_mask=torch.tensor([[is_seen]]),
        position_ids=torch.tensor([[place for _, place in places]]),
    ).logits[0]
    return logits[len(clean) :]


def noised_block(
    prompt: Sequence[int], completion: Sequence[int], block: range, noised: Iterable[int], mask_token_id: int
) -> list[int]:
    """What the model sees in a block: mask tokens where `noised`, and after the end."""
    text = [*prompt, *completion] + [mask_token_id] * (block.stop - len(prompt) - len(completion))
    for j in noised:
        assert 0 <= j < len(completion)
        text[len(prompt) + j] = mask_token_id
    return [text[place] for place in block]


def staircase_log_probs(
    model: Any,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    noised: Iterable[int],
    block_length: int,
    mask_token_id: int,
    window_length: int | None = None,
    context_attention: str = "block_causal",
    temperature: float = 1.0,
) -> Tensor:
    """Log-probability of each token of the completion, (C,), from one forward per block of one unpadded row."""
    noised, values = list(noised), []
    for block in text_blocks(len(prompt), len(completion), block_length, window_length=window_length):
        clean = [*prompt, *completion][: block.start]
        seen = noised_block(prompt, completion, block, noised, mask_token_id)
        logits = block_logits(model, clean, seen, block_length, context_attention) / temperature
        for place, row in zip(block, logits, strict=True):
            if 0 <= place - len(prompt) < len(completion):
                values.append(row.log_softmax(dim=-1)[completion[place - len(prompt)]])
    return torch.stack(values) if values else torch.zeros(0)


def cached_staircase_log_probs(
    model: Any,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    draws: Sequence[Iterable[int]],
    block_length: int,
    mask_token_id: int,
    window_length: int | None = None,
    context_attention: str = "block_causal",
    detach_context: bool = False,
    temperature: float = 1.0,
) -> Tensor:
    """
    As `staircase_log_probs`, (M, C), by a key/value cache that grows by one clean block at a time, as in decoding: one
    forward per block and draw, and one to store the block.
    """

    def run(tokens: Sequence[int], start: int, cache: DynamicCache, copy: int) -> Tensor:
        places = [(copy, start + i) for i in range(len(tokens))]
        keys = [(0, i) for i in range(start)] + places
        is_seen = [[may_see(query, key, block_length, context_attention) for key in keys] for query in places]
        return model(
            input_ids=torch.tensor([tokens]),
            attention_mask=torch.tensor([[is_seen]]),
            position_ids=torch.tensor([[place for _, place in places]]),
            past_key_values=cache,
            use_cache=True,
        ).logits[0]

    def copy_of(cache: DynamicCache) -> DynamicCache:
        copied = DynamicCache()
        layers: list[Any] = cache.layers if cache.get_seq_length() else []
        for i, layer in enumerate(layers):
            copied.update(layer.keys, layer.values, i)
        return copied

    context, text = DynamicCache(), [*prompt, *completion]
    chosen, values = [list(noised) for noised in draws], [[] for _ in draws]
    blocks = text_blocks(len(prompt), len(completion), block_length, window_length=window_length)
    for start in range(0, blocks[-1].start + 1 if blocks else 0, block_length):
        for block in [block for block in blocks if block.start == start]:
            for noised, row in zip(chosen, values, strict=True):
                seen = noised_block(prompt, completion, block, noised, mask_token_id)
                logits = run(seen, start, copy_of(context), 1) / temperature
                for place, logit in zip(block, logits, strict=True):
                    if 0 <= place - len(prompt) < len(completion):
                        row.append(logit.log_softmax(dim=-1)[completion[place - len(prompt)]])
        if start < blocks[-1].start:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not detach_context):
                run(text[start : start + block_length], start, context, 0)
    return torch.stack([torch.stack(row) if row else torch.zeros(0) for row in values])


@dataclass(frozen=True)
class StaircaseDraw:
    """One outcome of the staircase's law: every block is noised and scored at once."""

    length: int
    odds: tuple[tuple[int, float], ...]
    """One over the probability of being masked, of each masked position; all of these are scored."""

    @property
    def noised(self) -> Positions:
        return frozenset(j for j, _ in self.odds)

    def elbo_per_token(self, log_probs: LogProbs) -> float:
        values = log_probs(self.noised)
        return math.fsum(odds * values[j] for j, odds in self.odds) / self.length


def staircase_draw_of(length: int, blocks: Sequence[Sequence[int]], chosen: Sequence[Positions]) -> StaircaseDraw:
    """The draw that masks `chosen` of each block."""
    odds = {j: len(block) / len(part) for block, part in zip(blocks, chosen, strict=True) for j in part}
    return StaircaseDraw(length, tuple(sorted(odds.items())))


def staircase_draws_of(
    sampling: str,
    *,
    seed: int,
    key: int,
    iteration: int,
    num_draws: int,
    length: int,
    block_length: int,
    prompt_length: int,
) -> list[StaircaseDraw]:
    """The draws of one row in one inner iteration, from the hash alone."""
    unit, count_stream, order_stream = 31, 1, 2
    blocks = blocks_of(length, block_length, offset=prompt_length % block_length)
    draws = []
    for m in range(num_draws):
        draw_key = m // 2 if sampling == "complementary" else m
        chosen = []
        for b, block in enumerate(blocks):
            count_key = 0 if sampling == "cyclic" else draw_key
            u = random_bits(seed, count_stream, key, iteration, count_key, b) >> (64 - unit)
            if sampling == "cyclic":
                k = 1 + ((u * len(block) >> unit) + m) % max(len(block), 1)
            else:
                stratum, num_strata = (m, num_draws) if sampling == "stratified" else (0, 1)
                k = math.ceil(len(block) * Fraction((stratum << unit) + u + 1, num_strata << unit))
            rank = {j: random_bits(seed, order_stream, key, iteration, draw_key, j) for j in block}
            order = sorted(block, key=lambda j, rank=rank: (rank[j] + 2**63) % 2**64)  # as signed integers
            part = frozenset(order[:k])
            if sampling == "complementary" and m % 2:
                part = frozenset(block) - part or part
            chosen.append(part)
        draws.append(staircase_draw_of(length, blocks, chosen))
    return draws


@dataclass(frozen=True)
class StaircaseOutcome:
    """A draw with its probability, and the draw that completes it to a complementary pair."""

    probability: float
    draw: StaircaseDraw
    partner: StaircaseDraw


def staircase_outcomes(length: int, block_length: int, *, offset: int = 0) -> list[StaircaseOutcome]:
    """Every outcome of the law: any part of each block but none, its size uniform, and then uniform in its size."""
    blocks = blocks_of(length, block_length, offset=offset)
    outcomes = []
    for chosen in product(*(subsets(block, smallest=1) for block in blocks)):
        chances = [
            1 / len(block) / math.comb(len(block), len(part)) for block, part in zip(blocks, chosen, strict=True)
        ]
        rest = [frozenset(block) - part or part for block, part in zip(blocks, chosen, strict=True)]
        draw, partner = (staircase_draw_of(length, blocks, parts) for parts in (chosen, rest))
        outcomes.append(StaircaseOutcome(math.prod(chances), draw, partner))
    return outcomes


def staircase_variance(
    sampling: str, num_draws: int, length: int, block_length: int, log_probs: LogProbs, *, offset: int = 0
) -> float:
    """
    Variance of `elbo_per_token` averaged over `num_draws`. A block sees nothing of what is noised elsewhere, and its
    masks are drawn apart, so that the variances of the blocks add up.
    """
    total = 0.0
    for block in blocks_of(length, block_length, offset=offset):
        values = {
            part: len(block) / len(part) / length * math.fsum(log_probs(part)[j] for j in part)
            for part in subsets(block, smallest=1)
        }
        by_count = {
            k: mean_and_variance((1 / math.comb(len(block), k), x) for part, x in values.items() if len(part) == k)
            for k in range(1, len(block) + 1)
        }
        overall = [(1 / len(block) / math.comb(len(block), len(part)), part) for part in values]
        if sampling == "independent":
            total += mean_and_variance((p, values[part]) for p, part in overall)[1] / num_draws
        elif sampling == "stratified":
            for m in range(num_draws):
                chance = {
                    k: max(
                        Fraction(0),
                        min(Fraction(k, len(block)), Fraction(m + 1, num_draws))
                        - max(Fraction(k - 1, len(block)), Fraction(m, num_draws)),
                    )
                    * num_draws
                    for k in by_count
                }
                mean = sum(float(chance[k]) * by_count[k][0] for k in by_count)
                total += (
                    sum(float(chance[k]) * (by_count[k][1] + (by_count[k][0] - mean) ** 2) for k in by_count)
                    / num_draws**2
                )
        elif sampling == "complementary":
            pairs = ((p, (values[part] + values[frozenset(block) - part or part]) / 2) for p, part in overall)
            total += mean_and_variance(pairs)[1] / (num_draws / 2)
        else:
            assert sampling == "cyclic"
            starts = []
            for start in range(len(block)):
                counts = [1 + (start + m) % len(block) for m in range(num_draws)]
                # given the counts, the draws are independent
                starts.append(
                    (
                        sum(by_count[k][0] for k in counts) / num_draws,
                        sum(by_count[k][1] for k in counts) / num_draws**2,
                    )
                )
            between = mean_and_variance((1 / len(starts), mean) for mean, _ in starts)[1]
            total += between + sum(within for _, within in starts) / len(starts)
    return total


# Block rollouts


@dataclass(frozen=True)
class BlockDecoding:
    """Every option of a block rollout."""

    block_length: int
    max_completion_length: int
    num_denoising_steps: int
    mask_token_id: int
    end_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    remasking: str = "low_confidence"
    threshold: float | None = None
    suppress_eos: str | None = None


def block_causal(length: int, block_length: int) -> Tensor:
    """`(1, 1, L, L)`: a token sees its own block and those before it."""
    rows = [[key // block_length <= query // block_length for key in range(length)] for query in range(length)]
    return torch.tensor([[rows]])


def sampling_choices(logits: Sequence[float], options: BlockDecoding) -> list[tuple[int, float, float]]:
    """Token, probability of sampling it and confidence in it, for each token that can be sampled at a position."""
    tokens = [token for token in range(len(logits)) if token != options.mask_token_id]
    top = max(logits[token] for token in tokens)
    mass = {token: math.exp(logits[token] - top) for token in tokens}
    share = {token: mass[token] / math.fsum(mass.values()) for token in tokens}
    if options.suppress_eos == "sampling":
        tokens = [token for token in tokens if token not in options.end_token_ids]
    tokens = sorted(tokens, key=lambda token: (-logits[token], token))
    if options.temperature == 0:
        kept = {tokens[0]: 1.0}
    else:
        top = logits[tokens[0]]
        kept = {token: math.exp((logits[token] - top) / options.temperature) for token in tokens}
        kept = dict([*kept.items()][: options.top_k or None])
        target, held = options.top_p * math.fsum(kept.values()), 0.0
        for token in [*kept]:
            if held >= target:
                del kept[token]
            else:
                held += kept[token]
    highest = sorted(share.values())[::-1]
    confidence = {
        "low_confidence": lambda token: share[token],
        "margin": lambda token: highest[0] - highest[1],
        "entropy": lambda token: math.fsum(p * math.log(p) for p in highest),
    }[options.remasking]
    return [(token, value / math.fsum(kept.values()), confidence(token)) for token, value in kept.items()]


def block_rollout_law(
    model: Any, prompt: Sequence[int], options: BlockDecoding
) -> dict[tuple[tuple[int, ...], tuple[int, ...]], float]:
    """
    Probability of every window and its steps of commit: one at temperature 0. One row, no padding, no cache: each step
    runs the prompt and all blocks up to the active one.
    """
    law: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    first, total = len(prompt), len(prompt) + options.max_completion_length

    def decode(text: list[int], steps: list[int], start: int, step: int, probability: float) -> None:
        stop = min(start + options.block_length, total)
        block = range(max(start, first), stop)
        masked = [i for i in block if steps[i] == -1]
        if not masked and (stop == total or any(text[i] in options.end_token_ids for i in block)):
            outcome = tuple(text[first:]), tuple(steps[first:])
            law[outcome] = law.get(outcome, 0.0) + probability
            return
        if not masked:
            decode(text, steps, stop, 0, probability)
            return
        may_attend = block_causal(stop, options.block_length)
        with torch.no_grad():
            output = model(input_ids=torch.tensor([text[:stop]]), attention_mask=may_attend)
        logits = output.logits[0].double().tolist()
        for choices in product(*(sampling_choices(logits[i], options) for i in masked)):
            ranked = []
            for i, (token, _, confidence) in zip(masked, choices, strict=True):
                is_late = options.suppress_eos == "early_commit" and token in options.end_token_ids
                ranked.append((is_late, 0.0 if is_late else -confidence, i, token))
            ranked.sort()
            if options.threshold is None:
                num = math.ceil(len(masked) / (options.num_denoising_steps - step))
            else:
                num = max(1, sum(not is_late and -rank > options.threshold for is_late, rank, _, _ in ranked))
            chosen = {i: token for _, _, i, token in ranked[:num]}
            decode(
                [chosen.get(i, token) for i, token in enumerate(text)],
                [step if i in chosen else value for i, value in enumerate(steps)],
                start,
                step + 1,
                probability * math.prod(p for _, p, _ in choices),
            )

    mask_tokens = [options.mask_token_id] * options.max_completion_length
    decode([*prompt, *mask_tokens], [-1] * total, first - first % options.block_length, 0, 1.0)
    return law


def block_rollout(model: Any, prompt: Sequence[int], options: BlockDecoding) -> tuple[list[int], list[int]]:
    """Window and steps of commit at temperature 0."""
    ((window, steps),) = block_rollout_law(model, prompt, options)
    return list(window), list(steps)
