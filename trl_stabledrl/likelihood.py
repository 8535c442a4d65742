# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""From a model, rows of tokens and a mask plan to the log-probabilities of the scored tokens, and nothing more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ._compat import fused_log_probs
from .core.attention import ContextAttention, check_context_attention
from .core.elbo import elbo_per_token_by_draw, eubo_per_token
from .core.masking import MaskLaw, MaskPlan, McSampling, check_draws, draw_mask_plan
from .staircase import build_staircase

Tail = Literal["mask", "eos", "hidden"]

PROJECTION_CHUNK = 64
"""Rows of logits that are alive at once in the plain path: 64 rows of LLaDA's vocabulary are 32 MB in float32."""


@dataclass(frozen=True)
class Rows:
    """
    Prompts and completions, as TRL's trainer holds them. Lengths come from the masks, never from the ids.

    Attributes:
        prompt_ids (`torch.Tensor` of shape `(B, P)`):
            Left-padded prompt tokens.
        prompt_mask (`torch.BoolTensor` of shape `(B, P)`):
            True on real prompt tokens.
        completion_ids (`torch.Tensor` of shape `(B, C)`):
            Right-padded completion tokens.
        completion_mask (`torch.BoolTensor` of shape `(B, C)`):
            True up to and including the first end token.
        noise_key (`torch.Tensor` of shape `(B,)`):
            int64 key of each row's masks.
        mask_rate (`torch.Tensor` of shape `(B,)`, *optional*):
            See [`~core.masking.draw_mask_plan`].
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    noise_key: Tensor
    mask_rate: Tensor | None = None

    @property
    def completion_length(self) -> Tensor:
        return self.completion_mask.sum(-1)  # (B,)

    def to(self, device: torch.device) -> "Rows":
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Rows":
        changed: dict[str, Any] = {
            name: value if value is None else change(value) for name, value in vars(self).items()
        }
        return Rows(**changed)

    def without(self, is_excluded: Tensor, *, filler: int) -> "Rows":
        """
        Empty the rows in `is_excluded`, keeping their place. Their prompts go too: a zero weight would not stop
        a non-finite activation from spoiling the gradient (0 * NaN is NaN).
        """
        return replace(
            self,
            prompt_ids=self.prompt_ids.masked_fill(is_excluded[:, None], filler),
            completion_ids=self.completion_ids.masked_fill(is_excluded[:, None], filler),
            completion_mask=self.completion_mask & ~is_excluded[:, None],
        )

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def __getitem__(self, index: slice) -> "Rows":
        return self._each(lambda tensor: tensor[index])


def check_context(
    mask_law: str, *, tail: Tail, context_attention: ContextAttention = "block_causal", detach_context: bool = False
) -> None:
    """Raise unless what the model is asked to see around the scored tokens is something the law has."""
    if mask_law == "staircase" and tail != "mask":
        raise ValueError(
            f"tail={tail!r} does not apply to mask_law='staircase': after the end token a block diffusion model saw "
            "mask tokens to the end of the block, and no later block. Use tail='mask'."
        )
    if mask_law != "staircase" and (context_attention != "block_causal" or detach_context):
        raise ValueError(
            f"context_attention={context_attention!r} and detach_context={detach_context} apply to "
            f"mask_law='staircase' only, not to {mask_law!r}: with full attention nothing is clean context. "
            "Leave them at 'block_causal' and False."
        )


@dataclass(frozen=True)
class LikelihoodSettings:
    """
    Everything a score depends on besides the model and the rows.

    Attributes:
        mask_token_id (`int`):
            Token that stands for "not yet decoded".
        mask_law (`str`):
            See [`~core.masking.draw_mask_plan`].
        mc_sampling (`str`):
            See [`~core.masking.draw_mask_plan`].
        num_mc_samples (`int`):
            `M`.
        block_length (`int`):
            Tokens per block of the decoder.
        window_length (`int`):
            Tokens of the window the sampler saw (`max_completion_length`).
        seed (`int`):
            Seed of the run.
        tail (`str`, defaults to `"mask"`):
            What stands in the window after the first end token: `"mask"`: mask tokens; `"eos"`: end tokens;
            `"hidden"`: nothing is attended to there. Never scored.
        end_token_id (`int`, *optional*):
            Token that fills the window under `tail="eos"`.
        temperature (`float`, defaults to `1.0`):
            Temperature of the scored distribution.
        context_attention (`str`, defaults to `"block_causal"`):
            How the clean tokens of the staircase see each other: `"block_causal"` or `"causal"`.
        detach_context (`bool`, defaults to `False`):
            Whether gradients stop at the keys and values of the staircase's clean tokens.
    """

    mask_token_id: int
    mask_law: MaskLaw
    mc_sampling: McSampling
    num_mc_samples: int
    block_length: int
    window_length: int
    seed: int
    tail: Tail = "mask"
    end_token_id: int | None = None
    temperature: float = 1.0
    context_attention: ContextAttention = "block_causal"
    detach_context: bool = False

    def __post_init__(self):
        check_draws(self.mask_law, self.mc_sampling, self.num_mc_samples)
        check_context_attention(self.context_attention)
        if self.tail not in get_args(Tail):
            raise ValueError(f"tail={self.tail!r} is not known. Use one of {', '.join(get_args(Tail))}.")
        if self.tail == "eos" and self.end_token_id is None:
            raise ValueError("tail='eos' fills the window with end tokens: pass end_token_id as well.")
        if self.block_length < 1:
            raise ValueError(f"block_length={self.block_length} must be at least 1: it counts the tokens of a block.")
        if not self.temperature > 0.0:
            raise ValueError(
                f"score_temperature={self.temperature} must be above 0: a greedy distribution has no logarithm. "
                "Use 1.0 for the model's own distribution."
            )
        check_context(
            self.mask_law, tail=self.tail, context_attention=self.context_attention, detach_context=self.detach_context
        )

    @property
    def is_staircase(self) -> bool:
        return self.mask_law == "staircase"


@dataclass(frozen=True)
class DrawScores:
    """
    Scores of one or several draws.

    Attributes:
        logps (`torch.Tensor` of shape `(B, M, W)`):
            float32 log-probability of each scored token in nats, zero elsewhere.
        entropy (`torch.Tensor` of shape `(B, M, W)`):
            Entropy of the predicted distribution at each scored token in nats, zero elsewhere, without gradient.
    """

    logps: Tensor
    entropy: Tensor


def plan_masks(rows: Rows, settings: LikelihoodSettings, *, iteration: int = 0) -> MaskPlan:
    """Draw the masks of `rows` for one inner iteration, as a function of their noise keys alone."""
    longest = rows.completion_ids.shape[1]
    if longest > settings.window_length:
        raise ValueError(
            f"A completion is {longest} tokens long, but the window holds max_completion_length="
            f"{settings.window_length}. Truncate the completions or enlarge the window."
        )
    return draw_mask_plan(
        rows.noise_key,
        rows.completion_length,
        rows.prompt_mask,
        window_length=settings.window_length,
        law=settings.mask_law,
        sampling=settings.mc_sampling,
        num_draws=settings.num_mc_samples,
        block_length=settings.block_length,
        seed=settings.seed,
        iteration=iteration,
        block_offset=rows.prompt_mask.sum(-1) % settings.block_length if settings.is_staircase else None,
        mask_rate=rows.mask_rate,
    )


def _plain_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    def project(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)  # (chunk, V)
        detached = log_probs.detach()
        return log_probs.gather(-1, targets[:, None])[:, 0], -(detached.exp() * detached).sum(-1)

    def project_chunk(start: int) -> tuple[Tensor, Tensor]:
        chunk = (hidden[start : start + PROJECTION_CHUNK], weight, targets[start : start + PROJECTION_CHUNK])
        if not torch.is_grad_enabled():
            return project(*chunk)
        # checkpointed: the backward pass recomputes the logits instead of holding them
        return checkpoint(project, *chunk, use_reentrant=False, preserve_rng_state=False)

    # one pass even over no rows, so that a rank without scored tokens keeps its graph
    parts = [project_chunk(start) for start in range(0, max(len(hidden), 1), PROJECTION_CHUNK)]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def scored_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """
    Project hidden states to the vocabulary and keep the log-probability of the target and the entropy, in chunks: the
    `(N, V)` logits are never held at once, in the forward or in the backward pass.

    Args:
        hidden (`torch.Tensor` of shape `(N, D)`):
            Hidden states of the scored positions.
        weight (`torch.Tensor` of shape `(V, D)`):
            Weight of the head.
        targets (`torch.Tensor` of shape `(N,)`):
            Token at each position.
        temperature (`float`):
            Temperature the logits are divided by.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`:
            Log-probabilities and (detached) entropies of shape `(N,)`, in nats.
    """
    if hidden.dtype == torch.float64:  # the kernel works in float32, too coarse for the float64 tests of exactness
        log_probs, entropy = _plain_log_probs(hidden, weight, targets, temperature)
    else:
        log_probs, entropy = fused_log_probs(hidden, weight, targets, temperature=temperature)
    return log_probs, entropy.detach()


def noised_inputs(rows: Rows, plan: MaskPlan, draw: int, settings: LikelihoodSettings) -> dict[str, Tensor]:
    """
    Build the model's input for one draw: the prompt, the noised completion and the tail of the window.

    Returns:
        `dict[str, torch.Tensor]`:
            `input_ids`, `attention_mask` and `position_ids` of shape `(B, P + W)`.
    """
    position = torch.arange(settings.window_length, device=rows.completion_ids.device)
    is_tail = position >= rows.completion_length[:, None]  # (B, W)
    filler = settings.mask_token_id
    if settings.tail == "eos":
        assert settings.end_token_id is not None  # checked by the settings
        filler = settings.end_token_id
    completion_ids = _window_ids(rows, settings).masked_fill(is_tail, filler)
    completion_ids = completion_ids.masked_fill(plan.is_noised[:, draw], settings.mask_token_id)
    prompt_ids = rows.prompt_ids.masked_fill(plan.is_noised_prompt[:, draw], settings.mask_token_id)
    is_attended = ~is_tail if settings.tail == "hidden" else torch.ones_like(is_tail)
    attention_mask = torch.cat([rows.prompt_mask, is_attended], dim=1)
    return {
        "input_ids": torch.cat([prompt_ids, completion_ids], dim=1),
        "attention_mask": attention_mask.long(),
        # from the first real token: RoPE is float32, so a shift by the padding would change the last digits
        "position_ids": (attention_mask.long().cumsum(-1) - 1).clamp(min=0),
    }


def _window_ids(rows: Rows, settings: LikelihoodSettings) -> Tensor:
    """The completions, padded to the window: `(B, W)`."""
    return torch.nn.functional.pad(rows.completion_ids, (0, settings.window_length - rows.completion_ids.shape[1]))


def _score_selected(
    model: Callable[..., Any],
    inputs: dict[str, Any],
    is_selected: Tensor,
    window_ids: Tensor,
    is_scored: Tensor,
    settings: LikelihoodSettings,
) -> DrawScores:
    """One forward pass; `is_selected` `(B, S)` has the positions of `is_scored` `(B, M, W)`, in the same order."""
    targets = window_ids[:, None].expand_as(is_scored)[is_scored]  # (N,), in the order of hidden[is_selected]

    def head_fn(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return scored_log_probs(hidden, weight, targets.to(hidden.device), temperature=settings.temperature)

    log_probs, entropy = model(**inputs, is_selected=is_selected, head_fn=head_fn)
    is_scored = is_scored.to(log_probs.device)
    return DrawScores(
        logps=log_probs.new_zeros(is_scored.shape).masked_scatter(is_scored, log_probs),
        entropy=entropy.new_zeros(is_scored.shape).masked_scatter(is_scored, entropy),
    )


def score_draws(
    model: Callable[..., Any],
    rows: Rows,
    plan: MaskPlan,
    settings: LikelihoodSettings,
    *,
    draws: Sequence[int] | None = None,
) -> DrawScores:
    """
    Score some of the draws: with a staircase in one forward pass, whose clean text they share, else in one pass each,
    with all their graphs alive together. Only the scored positions pass the vocabulary projection.

    Args:
        model (`Callable`):
            Model with the selected-positions forward, wrapped or not.
        rows ([`Rows`]):
            Rows to score.
        plan ([`~core.masking.MaskPlan`]):
            Masks of the rows.
        settings ([`LikelihoodSettings`]):
            How to score.
        draws (`Sequence[int]`, *optional*):
            Which of the `M` draws; all by default.

    Returns:
        [`DrawScores`]:
            With the chosen draws in place of `M`. A batch without scored tokens gives differentiable zeros, so that
            every rank runs backward.
    """
    chosen = list(range(plan.is_noised.shape[1]) if draws is None else draws)
    window_ids = _window_ids(rows, settings)
    if settings.is_staircase:
        is_scored = plan.is_scored[:, chosen]
        staircase = build_staircase(
            rows.prompt_ids,
            rows.prompt_mask,
            window_ids,
            rows.completion_length,
            plan.is_noised[:, chosen],
            is_scored,
            block_length=settings.block_length,
            mask_token_id=settings.mask_token_id,
        )
        inputs: dict[str, Any] = {
            "input_ids": staircase.input_ids,
            "layout": staircase.layout,
            "context_attention": settings.context_attention,
        }
        if settings.detach_context:
            inputs["num_detached"] = staircase.num_clean
        return _score_selected(model, inputs, staircase.is_scored, window_ids, is_scored, settings)
    parts = []
    for draw in chosen:
        is_scored = plan.is_scored[:, [draw]]  # (B, 1, W)
        is_selected = torch.cat([torch.zeros_like(rows.prompt_mask), is_scored[:, 0]], dim=1)  # (B, P + W)
        inputs = noised_inputs(rows, plan, draw, settings)
        parts.append(_score_selected(model, inputs, is_selected, window_ids, is_scored, settings))
    return DrawScores(
        logps=torch.cat([part.logps for part in parts], dim=1),
        entropy=torch.cat([part.entropy for part in parts], dim=1),
    )


@dataclass(frozen=True)
class RowScores:
    """
    Scores of rows from some of their `M` draws.

    Attributes:
        elbo (`torch.Tensor` of shape `(B,)`):
            Share of these draws in `elbo_per_token`, nats: the shares of all draws add up to it.
        eubo (`torch.Tensor` of shape `(B,)`, *optional*):
            `eubo_per_token` over these draws, where it was asked for.
        entropy (`torch.Tensor`):
            Sum of the entropies at the scored positions, nats, without gradient.
        num_scored (`torch.Tensor`):
            Number of those positions.
        tokens (`torch.Tensor` of shape `(B, W)`, *optional*):
            Share of these draws in each token's log-probability, nats, where it was asked for: a mean over the draws
            that score the token.
    """

    elbo: Tensor
    eubo: Tensor | None
    entropy: Tensor
    num_scored: Tensor
    tokens: Tensor | None = None


def score_rows(
    model: Callable[..., Any],
    rows: Rows,
    plan: MaskPlan,
    draws: Sequence[int],
    settings: LikelihoodSettings,
    *,
    eubo_beta: float | None = None,
    by_token: bool = False,
) -> RowScores:
    """
    Score rows under some of the draws, with one graph for all of these; see [`score_draws`].

    Args:
        model (`Callable`):
            Model with the selected-positions forward, wrapped or not.
        rows ([`Rows`]):
            Rows to score.
        plan ([`~core.masking.MaskPlan`]):
            Masks of the rows.
        draws (`Sequence[int]`):
            Which of the `M` draws.
        settings ([`LikelihoodSettings`]):
            How to score.
        eubo_beta (`float`, *optional*):
            Order of the upper bound, which then is computed too; it needs all draws at once.
        by_token (`bool`, defaults to `False`):
            Whether to give the log-probabilities of tokens too.

    Returns:
        [`RowScores`]
    """
    chosen = list(draws)
    scores = score_draws(model, rows, plan, settings, draws=chosen)
    logps = scores.logps  # (B, len(draws), W)
    is_scored = plan.is_scored[:, chosen]
    shares = elbo_per_token_by_draw(logps, plan.weight[:, chosen].to(logps.dtype)) / plan.weight.shape[1]
    eubo = None
    if eubo_beta is not None:
        odds = plan.inverse_probability[:, chosen].to(logps.dtype)
        eubo = eubo_per_token(logps, odds, is_scored, beta=eubo_beta)
    return RowScores(
        elbo=shares.sum(dim=1),
        eubo=eubo,
        entropy=scores.entropy.sum(),
        num_scored=is_scored.sum(),
        tokens=logps.sum(dim=1) / plan.is_scored.sum(dim=1).clamp(min=1) if by_token else None,
    )


@torch.no_grad()
def score_elbo(
    model: Callable[..., Any], rows: Rows, settings: LikelihoodSettings, *, iteration: int = 0, batch_size: int = 0
) -> Tensor:
    """
    Estimate the ELBO of each row without gradient.

    Args:
        model (`Callable`):
            Model with the selected-positions forward.
        rows ([`Rows`]):
            Rows to score.
        settings ([`LikelihoodSettings`]):
            How to score.
        iteration (`int`, defaults to `0`):
            Inner iteration whose masks are used.
        batch_size (`int`, defaults to `0`):
            Rows per forward pass; 0 for all. Does not change the result beyond rounding.

    Returns:
        `torch.Tensor` of shape `(B, M)`:
            float32 `elbo_per_token` of each draw, in nats; NaN for rows without a scored token.
    """
    return _score_parts(model, rows, settings, iteration, batch_size)[0]


@torch.no_grad()
def score_tokens(
    model: Callable[..., Any], rows: Rows, settings: LikelihoodSettings, *, iteration: int = 0, batch_size: int = 0
) -> tuple[Tensor, Tensor]:
    """
    As [`score_elbo`], and the log-probability of each token as a mean over the draws that score it.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`:
            `elbo_per_token` of each draw `(B, M)`, and nats of each token `(B, W)`, 0 where no draw scores it.
    """
    return _score_parts(model, rows, settings, iteration, batch_size)


def _score_parts(
    model: Callable[..., Any], rows: Rows, settings: LikelihoodSettings, iteration: int, batch_size: int
) -> tuple[Tensor, Tensor]:
    batch_size = batch_size or max(len(rows), 1)
    elbos, tokens = [], []
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        plan = plan_masks(part, settings, iteration=iteration)
        logps = score_draws(model, part, plan, settings).logps
        elbo = elbo_per_token_by_draw(logps, plan.weight.to(logps.dtype))
        elbos.append(elbo.masked_fill(part.completion_length[:, None] == 0, torch.nan))
        tokens.append(logps.sum(dim=1) / plan.is_scored.sum(dim=1).clamp(min=1))
    return torch.cat(elbos), torch.cat(tokens)
