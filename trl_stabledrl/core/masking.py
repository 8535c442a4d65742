# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
Mask laws: which tokens of a completion a Monte Carlo draw masks, which it scores, and with what weight.

`k` tokens are masked exactly, never by coin flips (the 0.15 coins of `block_suffix` excepted). Axis letters: see
`core/__init__.py`; `W` is the window of `max_completion_length` tokens the sampler saw.
"""

from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .noise import UNIT_BITS, Stream, random_bits, unit_bits

MaskLaw = Literal["uniform", "block_suffix", "semi_ar", "full", "staircase"]
McSampling = Literal["independent", "stratified", "complementary", "cyclic", "quadrature"]

CONTEXT_MASK_PROBABILITY = 0.15
"""Chance that `block_suffix` masks a token of the prompt or of an earlier block (SPG, arXiv 2510.09541)."""


@dataclass(frozen=True)
class MaskPlan:
    """
    Masks and weights of `M` draws.

    `elbo_per_token` is `(weight * logps).sum() / M`, so a weight holds both the estimator's factor and the division by
    the scored length. Positions past the row's scored length are never masked or scored here: what stands there is
    decided by `tail` in `likelihood.py`.
    """

    is_noised_prompt: Bool[Tensor, "B M P"]
    is_noised: Bool[Tensor, "B M W"]
    is_scored: Bool[Tensor, "B M W"]
    weight: Float[Tensor, "B M W"]
    inverse_probability: Float[Tensor, "B M W"]
    """One over the probability of being masked, where scored; zero elsewhere. The `v` of the EUBO."""


def check_draws(law: str, sampling: str, num_draws: int) -> None:
    """Raise unless the law, the sampling scheme and the number of draws go together."""
    if law not in get_args(MaskLaw):
        raise ValueError(f"mask_law={law!r} is not known. Use one of {', '.join(get_args(MaskLaw))}.")
    if sampling not in get_args(McSampling):
        raise ValueError(f"mc_sampling={sampling!r} is not known. Use one of {', '.join(get_args(McSampling))}.")
    if num_draws < 1:
        raise ValueError(f"num_mc_samples={num_draws} must be at least 1.")
    if sampling == "cyclic" and law != "staircase":
        raise ValueError(
            f"mc_sampling='cyclic' with mask_law={law!r}: cyclic counts go through the sizes of each block, which "
            "only mask_law='staircase' masks separately. Use 'independent', 'stratified' or 'complementary'."
        )
    if sampling == "quadrature" and law != "uniform":
        raise ValueError(
            f"mc_sampling='quadrature' with mask_law={law!r}: it fixes the share of masked tokens, over which "
            "mask_law='uniform' alone integrates. Use 'independent', 'stratified' or 'complementary'."
        )
    if law == "full" and num_draws > 1:
        raise ValueError(
            f"num_mc_samples={num_draws} with mask_law='full' would repeat one and the same mask. Use "
            "num_mc_samples=1."
        )
    if sampling == "complementary" and law != "full" and num_draws % 2:
        raise ValueError(
            f"num_mc_samples={num_draws} is odd, but mc_sampling='complementary' draws masks in pairs. Use an even "
            "number, or mc_sampling='independent'."
        )


def _masked_count(
    u: Int[Tensor, "B M *K"], size: Int[Tensor, "B M *K"], stratum: Int[Tensor, "M *_"], num_strata: int
) -> Int[Tensor, "B M *K"]:
    """`ceil(size * (stratum + u) / num_strata)` for u in (0, 1], in exact integer arithmetic; 0 where size is 0."""
    numerator = size * ((stratum << UNIT_BITS) + u + 1)
    denominator = num_strata << UNIT_BITS
    return (numerator + denominator - 1) // denominator


def gauss_legendre(num_nodes: int) -> tuple[list[float], list[float]]:
    """
    Nodes and weights on (0, 1) that integrate polynomials up to degree `2 num_nodes - 1` exactly.

    By Golub and Welsch: eigenvalues of the Jacobi matrix of the Legendre polynomials, in float64.
    """
    k = torch.arange(1, num_nodes, dtype=torch.float64)
    off_diagonal = k / (4 * k.square() - 1).sqrt()
    jacobi = torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1)
    eigen = cast(tuple[Tensor, Tensor], torch.linalg.eigh(jacobi))  # pyright: ignore[reportUnknownMemberType]
    nodes, vectors = eigen
    return [float(node) for node in (nodes + 1) / 2], [float(weight) for weight in vectors[0].square()]


def _masked_per_block(
    is_completion: Bool[Tensor, "B M W"],
    token_block: Int[Tensor, "B M W"],
    u: Int[Tensor, "B M K"],
    sort_key: Int[Tensor, "B M W"],
    *,
    cycle: Int[Tensor, " M"] | None,
    stratum: Int[Tensor, " M"],
    num_strata: int,
    is_partner: Bool[Tensor, " M"],
) -> tuple[Bool[Tensor, "B M W"], Float[Tensor, "B M W"]]:
    """Which tokens are masked where every block masks its own share, and one over the probability of each for that."""
    num_blocks = u.shape[-1]
    size = torch.zeros_like(u).scatter_add(-1, token_block, is_completion.long())  # (B, M, K)
    if cycle is None:
        count = _masked_count(u, size, stratum[:, None], num_strata)
    else:
        count = 1 + ((u * size >> UNIT_BITS) + cycle[:, None]) % size.clamp(min=1)
    by_key = sort_key.argsort(dim=-1)
    # a stable sort by block keeps the random order inside each block
    block_or_end = token_block.masked_fill(~is_completion, num_blocks)
    by_block = block_or_end.gather(-1, by_key).argsort(dim=-1, stable=True)
    place = by_key.gather(-1, by_block).argsort(dim=-1)  # of each token in its row, block after block
    rank = place - (size.cumsum(-1) - size).gather(-1, token_block)
    size, count = size.gather(-1, token_block), count.gather(-1, token_block)  # (B, M, W), of each token's block
    takes_rest = is_partner[:, None] & (count < size)
    is_chosen = is_completion & ((rank < count) ^ takes_rest)
    return is_chosen, size / torch.where(takes_rest, size - count, count).clamp(min=1).float()


def draw_mask_plan(
    noise_key: Int[Tensor, " B"],
    completion_length: Int[Tensor, " B"],
    prompt_mask: Bool[Tensor, "B P"],
    *,
    window_length: int,
    law: MaskLaw,
    sampling: McSampling,
    num_draws: int,
    block_length: int,
    seed: int,
    iteration: int,
    block_offset: Int[Tensor, " B"] | None = None,
    mask_rate: Float[Tensor, " B"] | None = None,
) -> MaskPlan:
    r"""
    Draw the masks of every row, as a function of `(seed, noise_key, iteration, draw index)` alone.

    | law | masked | scored | weight |
    |---|---|---|---|
    | `uniform` | `k ~ U{1..C}` tokens of the completion | those | `1/k` |
    | `block_suffix` | as `semi_ar`; prompt and earlier tokens with probability 0.15 | the completion's | `1/scored` |
    | `semi_ar` | `k ~ U{1..len_b}` of a random block and all later tokens | the `k` of the block | `K len_b / (k C)` |
    | `full` | the whole completion | all | `1/C` |
    | `staircase` | `k_b ~ U{1..len_b}` tokens of every block | those | `len_b / (k_b C)` |

    Rows that share a `noise_key` share one uniform number and one random order of window positions per draw, and each
    masks the first `ceil(u C)` of its own positions in that order: each row's own law is unchanged, and equal lengths
    get identical masks (`mask_sharing="group"`).

    Args:
        noise_key (`Int[Tensor, "B"]`):
            Row index over the run, or group index where a group shares its masks.
        completion_length (`Int[Tensor, "B"]`):
            Scored tokens of each row: up to and including the first end token. 0 gives a row without scored tokens.
        prompt_mask (`Bool[Tensor, "B P"]`):
            True on the real tokens of the left-padded prompt.
        window_length (`int`):
            Tokens in the window, at least the longest completion.
        law (`str`):
            One of `"uniform"`, `"block_suffix"`, `"semi_ar"`, `"full"`, `"staircase"`.
        sampling (`str`):
            How the `M` draws of a row relate: `"independent"`; `"stratified"`, the count of draw m taken from the
            m-th of M equal parts; `"complementary"`, pairs that mask every token of the active set once; `"cyclic"`,
            for the staircase, `k_m = 1 + (o + m) mod len_b` from a random start `o` per block: unbiased for any `M`,
            and every count once where `M = len_b`; `"quadrature"`, for the uniform law, shares of masked tokens at the
            nodes of a Gauss-Legendre rule, and its weights: no noise in the count, at the price of a bias that
            vanishes with the length (GDPO, https://huggingface.co/papers/2510.08554).
        num_draws (`int`):
            `M`. Even for `"complementary"`, 1 for `"full"`.
        block_length (`int`):
            Tokens per block of the decoder.
        seed (`int`):
            Seed of the run.
        iteration (`int`):
            Inner iteration (`num_iterations`), so that each pass over a rollout has fresh masks.
        block_offset (`Int[Tensor, "B"]`, *optional*):
            For the staircase, whose blocks are counted from the start of the prompt: prompt tokens in the block of the
            first completion token, below `block_length`.
        mask_rate (`Float[Tensor, "B"]`, *optional*):
            Share of the tokens to mask, in (0, 1], instead of a random one; NaN leaves a row to its law. What is
            estimated is then no bound: a stress for objectives, not an estimator.

    Returns:
        [`MaskPlan`]
    """
    check_draws(law, sampling, num_draws)
    assert (block_offset is not None) == (law == "staircase"), "blocks start at the completion in every other law"
    assert mask_rate is None or sampling == "independent", "the other schemes decide on the counts themselves"
    device = noise_key.device
    draw = torch.arange(num_draws, device=device)
    is_paired = sampling == "complementary"
    is_partner = (draw % 2 == 1) & is_paired  # (M,)
    draw_key = (draw // 2 if is_paired else draw)[None, :]  # (1, M)
    row_key = noise_key[:, None]  # (B, 1)
    pass_key = torch.full_like(row_key, iteration)

    def bits(stream: Stream, position: Tensor | None = None) -> Tensor:
        keys = (row_key, pass_key, draw_key)
        if position is None:
            return random_bits(seed, stream, *keys)  # (B, M)
        return random_bits(seed, stream, *(key[..., None] for key in keys), position)  # (B, M, positions)

    position = torch.arange(window_length, device=device)  # (W,)
    length = completion_length[:, None, None]  # (B, 1, 1)
    is_completion = (position < length).expand(-1, num_draws, -1)  # (B, M, W)

    stratum = draw if sampling == "stratified" else torch.zeros_like(draw)
    num_strata = num_draws if sampling == "stratified" else 1
    nodes, node_weights = gauss_legendre(num_draws) if sampling == "quadrature" else ([], [])

    def share(u: Tensor) -> Tensor:
        """The share of masked tokens, in units of 2**-UNIT_BITS less one."""
        if nodes:
            fixed = torch.tensor([round(node * (1 << UNIT_BITS)) - 1 for node in nodes], device=device)
            u = fixed.expand_as(u)
        if mask_rate is None:
            return u
        rate = mask_rate.reshape(-1, *[1] * (u.ndim - 1)).double()
        is_given = ~rate.isnan()
        units = (torch.where(is_given, rate, 1.0) * (1 << UNIT_BITS)).round().long()
        return torch.where(is_given, units.clamp(1, 1 << UNIT_BITS) - 1, u)

    no_prompt = torch.zeros(len(noise_key), num_draws, prompt_mask.shape[1], dtype=torch.bool, device=device)

    if block_offset is not None:
        token_block = (block_offset[:, None] + position) // block_length  # (B, W)
        num_blocks = (window_length + 2 * block_length - 2) // block_length  # that any offset can need
        every_block = torch.arange(num_blocks, device=device)
        start_key = torch.zeros_like(draw_key) if sampling == "cyclic" else draw_key  # one start for all draws
        count_keys = (row_key[..., None], pass_key[..., None], start_key[..., None], every_block)
        chosen, odds = _masked_per_block(
            is_completion,
            token_block[:, None].expand(-1, num_draws, -1),
            share(unit_bits(random_bits(seed, Stream.COUNT, *count_keys)).expand(-1, num_draws, -1)),
            bits(Stream.ORDER, position),
            cycle=draw if sampling == "cyclic" else None,
            stratum=stratum,
            num_strata=num_strata,
            is_partner=is_partner,
        )
        return MaskPlan(
            is_noised_prompt=no_prompt,
            is_noised=chosen,
            is_scored=chosen,
            weight=torch.where(chosen, odds / length.clamp(min=1), 0.0),
            inverse_probability=torch.where(chosen, odds, 0.0),
        )

    # the active set: the tokens of which k are masked at random
    if law in ("block_suffix", "semi_ar"):
        num_blocks = (completion_length + block_length - 1) // block_length  # (B,)
        block = (unit_bits(bits(Stream.BLOCK)) * num_blocks[:, None]) >> UNIT_BITS  # (B, M), uniform over the blocks
        token_block = position // block_length  # (W,)
        is_active = is_completion & (token_block == block[..., None])
        is_later = is_completion & (token_block > block[..., None])
    else:
        num_blocks = (completion_length > 0).long()
        is_active = is_completion
        is_later = torch.zeros_like(is_completion)
    size = is_active.sum(-1)  # (B, M)

    # exactly k of them, in the order of random integers keyed by the position in the window
    sort_key = bits(Stream.ORDER, position).masked_fill(~is_active, torch.iinfo(torch.int64).max)
    rank = sort_key.argsort(dim=-1).argsort(dim=-1)  # (B, M, W)
    count = size if law == "full" else _masked_count(share(unit_bits(bits(Stream.COUNT))), size, stratum, num_strata)
    is_first = rank < count[..., None]
    # the partner masks the other tokens, or the same full mask when there are none: its size stays uniform on 1..L
    takes_rest = is_partner & (count < size) if law != "full" else torch.zeros_like(count, dtype=torch.bool)
    is_chosen = is_active & (is_first ^ takes_rest[..., None])
    count = torch.where(takes_rest, size - count, count)  # (B, M)

    is_noised = is_chosen | is_later
    is_noised_prompt = no_prompt
    if law == "block_suffix":
        threshold = round(CONTEXT_MASK_PROBABILITY * (1 << UNIT_BITS))
        is_earlier = is_completion & ~is_active & ~is_later
        is_noised = is_noised | (is_earlier & (unit_bits(bits(Stream.COIN, position)) < threshold))
        # counted back from the first completion token, so that left padding does not move a coin
        prompt_position = torch.arange(-prompt_mask.shape[1], 0, device=device)
        is_noised_prompt = (unit_bits(bits(Stream.COIN, prompt_position)) < threshold) & prompt_mask[:, None]

    is_scored = is_chosen if law == "semi_ar" else is_noised
    safe_count = count.clamp(min=1)[..., None].float()
    active_odds = size[..., None] / safe_count  # (B, M, 1)
    if law == "semi_ar":
        per_block = num_blocks[:, None, None] * active_odds
        weight = (per_block / length.clamp(min=1)).expand(-1, -1, window_length)
        odds = per_block.expand(-1, -1, window_length)
    elif law == "block_suffix":
        weight = (1.0 / is_scored.sum(-1, keepdim=True).clamp(min=1)).expand(-1, -1, window_length)
        odds = torch.where(is_active, active_odds, torch.where(is_later, 1.0, 1.0 / CONTEXT_MASK_PROBABILITY))
    else:
        weight = (1.0 / safe_count).expand(-1, -1, window_length)
        if nodes:  # `elbo_per_token` divides by the number of draws again
            weight = weight * num_draws * torch.tensor(node_weights, device=device)[:, None]
        odds = active_odds.expand(-1, -1, window_length)
    return MaskPlan(
        is_noised_prompt=is_noised_prompt,
        is_noised=is_noised,
        is_scored=is_scored,
        weight=torch.where(is_scored, weight, 0.0),
        inverse_probability=torch.where(is_scored, odds, 0.0),
    )
