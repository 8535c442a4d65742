# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What one denoising step samples, and which of it it commits. Axis letters: see `core/__init__.py`; `N` positions."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .noise import Stream, random_bits

Remasking = Literal["low_confidence", "random", "entropy", "margin"]


def race_grid(vocab_size: int) -> tuple[int, int]:
    """
    Near-square grid the vocabulary is laid out on for the two-stage race of [`sample_tokens`].

    Args:
        vocab_size (`int`):
            Number of tokens `V`.

    Returns:
        `tuple[int, int]`:
            Number of groups and tokens per group; the last group may be short of tokens.
    """
    group_length = math.isqrt(vocab_size - 1) + 1
    return -(-vocab_size // group_length), group_length


def race_noise(num_positions: int, vocab_size: int, *, generator: torch.Generator) -> Float[Tensor, "N E"]:
    """
    Draw the exponential noise that [`sample_tokens`] consumes: a few hundred numbers per position, not `V`.

    Args:
        num_positions (`int`):
            Number of positions `N` to draw for, all of one row, so that the draw knows nothing of the row's batch.
        vocab_size (`int`):
            Number of tokens `V`.
        generator (`torch.Generator`):
            The row's own generator; the noise is on its device.

    Returns:
        `Float[Tensor, "N E"]`:
            Positive float64 unit exponentials, `E` one (random remasking) plus the groups plus the group's length.
    """
    # uniform float64, not `exponential_`: that one is a 31-bit generator with MKL, and can return 0 in float32
    width = _noise_width(vocab_size)
    uniform = torch.rand(num_positions, width, generator=generator, device=generator.device, dtype=torch.float64)
    return _exponential(uniform)


def keyed_race_noise(vocab_size: int, *keys: Int[Tensor, " N"]) -> Float[Tensor, "N E"]:
    """
    Noise with the law of [`race_noise`]'s that is a hash of its keys: no generator is advanced, so that a position's
    draw does not depend on what shares its batch, on an interruption, or on the rank that makes it.

    Args:
        vocab_size (`int`):
            Number of tokens `V`.
        keys (`Int[Tensor, "N"]`):
            What names the draw of a position: the row's seed, the place in its text, the denoising step.

    Returns:
        `Float[Tensor, "N E"]`:
            As [`race_noise`].
    """
    lane = torch.arange(_noise_width(vocab_size), device=keys[0].device)
    bits = random_bits(0, Stream.TOKEN, *(key[:, None] for key in keys), lane)
    return _exponential(((bits >> 11) & ((1 << 53) - 1)).double().mul_(2.0**-53))


def _noise_width(vocab_size: int) -> int:
    return 1 + sum(race_grid(vocab_size))


def _exponential(uniform: Tensor) -> Tensor:
    return uniform.neg_().log1p_().neg_().clamp_min_(1e-30)


def sample_tokens(
    logits: Float[Tensor, "N V"],
    *,
    mask_token_id: int,
    banned_token_ids: Sequence[int] = (),
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    remasking: Remasking = "low_confidence",
    noise: Float[Tensor, "N E"] | None = None,
    scratch: Float[Tensor, "N W"] | None = None,
) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    r"""
    Sample a token at every masked position, and say how confident the model is in it.

    Sampling is an exponential race: `argmax_v p_v / E_v` with unit exponentials `E` has law `p`. It runs in two
    stages, since the first arrival among a group of tokens is an exponential whose rate is the group's total
    probability: groups race, then the tokens of the winner. The law is the same, and the noise drops from `V` to
    about `2 sqrt(V)` numbers per position, which at `V` = 126,464 is the costliest pass of the head. Probabilities are
    float32 whatever the logits are: bfloat16 noise or probabilities would bias the frequencies.

    The confidence is the model's own: at temperature 1 and over every token but the mask, whatever `temperature`,
    `top_k`, `top_p` and `banned_token_ids` make of the sampling.

    Args:
        logits (`Float[Tensor, "N V"]`):
            Logits of the positions to fill.
        mask_token_id (`int`):
            Token never sampled, and left out of the confidence's distribution.
        banned_token_ids (`Sequence[int]`, *optional*, defaults to `()`):
            Further tokens never sampled.
        temperature (`float`):
            Temperature of the sampling; 0 takes the most probable token.
        top_k (`int`, *optional*, defaults to `0`):
            Sample among exactly this many tokens; 0 among all.
        top_p (`float`, *optional*, defaults to `1.0`):
            Sample among the smallest set of most probable tokens that holds this share of the (tempered, `top_k`)
            probability.
        remasking (`str`, *optional*, defaults to `"low_confidence"`):
            What the confidence is: `"low_confidence"` the probability of the sampled token, `"margin"` the gap between
            the two highest probabilities, `"entropy"` the negative entropy in nats, `"random"` uniform noise.
        noise (`Float[Tensor, "N E"]`, *optional*):
            From [`race_noise`]; needed when `temperature` > 0 or `remasking="random"`.
        scratch (`Float[Tensor, "N W"]`, *optional*):
            Float32 work space, `W` the grid's area. When given, it and `logits` (float32 then) are OVERWRITTEN: at a
            vocabulary of 126,464 the page faults of fresh tensors cost three times the arithmetic.

    Returns:
        `tuple[Int[Tensor, "N"], Float[Tensor, "N"]]`:
            Sampled tokens, and float32 confidences, higher is surer.
    """
    if noise is None and (temperature > 0 or remasking == "random"):
        raise ValueError(
            f"Expected noise for temperature={temperature} and remasking={remasking!r}, got None. "
            "Pass race_noise(...), or temperature=0 with another remasking."
        )
    num_positions, vocab_size = logits.shape
    num_groups, group_length = race_grid(vocab_size)
    if scratch is None:
        logits = logits.float().clone()
        scratch = logits.new_empty(num_positions, num_groups * group_length)
    scratch[:, vocab_size:] = 0.0  # the short last group
    probs = scratch[:, :vocab_size]
    grid = scratch.view(num_positions, num_groups, group_length)

    logits[:, mask_token_id] = -torch.inf
    logits.sub_(logits.amax(dim=-1, keepdim=True))
    torch.exp(logits, out=probs)  # of the model's own distribution, unnormalised: the largest is 1
    total = probs.sum(dim=-1)  # (N,)
    confidence = total
    if remasking == "margin":
        highest = probs.topk(2, dim=-1).values
        confidence = (highest[:, 0] - highest[:, 1]) / total
    elif remasking == "entropy":
        confidence = torch.xlogy(probs, probs).sum(dim=-1) / total - total.log()
    elif remasking == "random":
        assert noise is not None
        confidence = (-noise[:, 0]).exp().float() * (total / total)  # NaN where the logits are, as the others

    highest: Tensor | None = None
    if banned_token_ids:
        logits.index_fill_(-1, torch.tensor(banned_token_ids, device=logits.device), -torch.inf)
        highest = logits.amax(dim=-1, keepdim=True)  # anew: all others may lie far below a banned token

    if temperature == 0:
        tokens = logits.argmax(dim=-1)
    else:
        assert noise is not None
        if temperature != 1 or highest is not None:
            torch.sub(logits, 0.0 if highest is None else highest, out=probs)
            probs.div_(temperature).exp_()
        if top_k > 0 or top_p < 1:
            # by rank, not by a threshold: ties must not let more tokens through
            kept, order = probs.topk(min(top_k, vocab_size) if top_k > 0 else vocab_size, dim=-1)
            mass = kept.double().cumsum(dim=-1)
            kept = kept.masked_fill(mass - kept >= top_p * mass[:, -1:], 0.0)
            probs.zero_().scatter_(-1, order, kept)
        group_totals = grid.sum(dim=-1)
        group = (group_totals / noise[:, 1 : 1 + num_groups]).argmax(dim=-1)
        finalists = grid[torch.arange(num_positions, device=logits.device), group]  # (N, group_length)
        tokens = group * group_length + (finalists / noise[:, 1 + num_groups :]).argmax(dim=-1)
    if remasking == "low_confidence":
        confidence = logits.gather(-1, tokens[:, None])[:, 0].exp() / total
    return tokens, confidence


def num_to_commit(num_masked: Int[Tensor, " B"], *, num_steps_left: int | Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """
    Even share of the masked positions that one of the remaining steps commits, rounded up.

    Args:
        num_masked (`Int[Tensor, "B"]`):
            Masked positions of each row's active block.
        num_steps_left (`int` or `Int[Tensor, "B"]`):
            Denoising steps left for the block, this one included; a tensor, whose values are not looked at, where
            rows are at different steps.

    Returns:
        `Int[Tensor, "B"]`:
            At least one where a position is masked; all at the last step.
    """
    if isinstance(num_steps_left, int) and num_steps_left < 1:
        raise ValueError(
            f"Expected num_steps_left >= 1, got {num_steps_left}. A block must be complete after its last step."
        )
    return (num_masked + num_steps_left - 1) // num_steps_left


def select_commits(
    confidence: Float[Tensor, "B L"],
    is_masked: Bool[Tensor, "B L"],
    num: Int[Tensor, " B"],
    *,
    threshold: float | None = None,
) -> Bool[Tensor, "B L"]:
    """
    Choose the masked positions to commit: the `num` most confident, and all above the threshold.

    Args:
        confidence (`Float[Tensor, "B L"]`):
            Confidence in the token sampled at each position; ignored where the position is not masked.
        is_masked (`Bool[Tensor, "B L"]`):
            Positions still to be decided. No other is ever chosen, even if `num` asks for more.
        num (`Int[Tensor, "B"]`):
            Number of positions to commit per row. Of equal confidences the leftmost goes first.
        threshold (`float`, *optional*):
            Positions with a confidence above it are committed too, beyond `num`.

    Returns:
        `Bool[Tensor, "B L"]`:
            Positions to commit.
    """
    # a position that is not masked ranks behind every masked one, also behind a masked one at -inf
    by_confidence = confidence.sort(dim=-1, descending=True, stable=True).indices
    is_first = is_masked.gather(-1, by_confidence).sort(dim=-1, descending=True, stable=True).indices
    order = by_confidence.gather(-1, is_first)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    is_chosen = rank < num[:, None]
    if threshold is not None:
        is_chosen = is_chosen | (confidence > threshold)
    return is_chosen & is_masked


def choose_commits(
    confidence: Float[Tensor, "B L"],
    is_masked: Bool[Tensor, "B L"],
    *,
    num_steps_left: int | Int[Tensor, " B"],
    threshold: float | None = None,
    is_late: Bool[Tensor, "B L"] | None = None,
) -> Bool[Tensor, "B L"]:
    """
    Choose what one denoising step commits. Every engine decodes by this function, one block per row.

    Args:
        confidence (`Float[Tensor, "B L"]`):
            Confidence in the token sampled at each position; ignored where the position is not masked.
        is_masked (`Bool[Tensor, "B L"]`):
            Positions still to be decided.
        num_steps_left (`int` or `Int[Tensor, "B"]`):
            Denoising steps left for the block, this one included. Ignored with a threshold.
        threshold (`float`, *optional*):
            Without one each step commits an even share of what is masked ("static"); with one, all above it and at
            least one ("dynamic").
        is_late (`Bool[Tensor, "B L"]`, *optional*):
            Positions that are committed after all others.

    Returns:
        `Bool[Tensor, "B L"]`:
            Positions to commit: at least one in every row that has a masked position.
    """
    if is_late is not None:
        confidence = confidence.masked_fill(is_late, -torch.inf)
    num_masked = is_masked.sum(dim=-1)
    if threshold is None:
        num = num_to_commit(num_masked, num_steps_left=num_steps_left)
    else:
        num = torch.ones_like(num_masked)
    return select_commits(confidence, is_masked, num, threshold=threshold)
