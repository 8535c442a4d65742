# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What the samplers share: settings, results, and the state of texts that are decoded block by block. Axis letters:
see `core/__init__.py`; `W` window, `T` positions of a text, `A` rows in a forward pass, `N` positions through the
vocabulary projection."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..core.unmasking import Remasking, choose_commits, race_grid, race_noise, sample_tokens

Attention = Literal["full", "block"]
SuppressEos = Literal["sampling", "early_commit"]

# 64 rows of LLaDA's 126,464 float32 logits: 32 MB
_CHUNK_LOGITS = 64 * 126_464


@dataclass(frozen=True)
class SamplingSettings:
    """
    How a rollout is decoded.

    Args:
        max_completion_length (`int`, *optional*, defaults to `256`):
            Most tokens a completion can have. With full attention the model always sees a window of this length behind
            the prompt.
        block_length (`int`, *optional*, defaults to `32`):
            Tokens decoded together, left to right by block; the last block may be shorter. With full attention at most
            `max_completion_length`; with block attention the model's own.
        num_denoising_steps (`int`, *optional*, defaults to `16`):
            Steps per block: each commits an even share of what is left, rounded up. A block never takes more steps
            than it has tokens. Replaced by `confidence_threshold` where that is set.
        temperature (`float`, *optional*, defaults to `0.9`):
            Sampling temperature; 0 is greedy.
        top_k (`int`, *optional*, defaults to `0`):
            Sample among this many tokens; 0 among all.
        top_p (`float`, *optional*, defaults to `1.0`):
            Sample among the most probable tokens that hold this share of the probability.
        remasking (`str`, *optional*, defaults to `"low_confidence"`):
            What ranks the positions of a step: `"low_confidence"` (probability of the sampled token), `"margin"`,
            `"entropy"` or `"random"`. See [`core.unmasking.sample_tokens`].
        confidence_threshold (`float`, *optional*):
            Commit every position whose confidence is above it, and at least one per step. A block then takes between
            one step and one per token.
        suppress_eos (`str`, *optional*):
            `"sampling"` never samples an end token; `"early_commit"` commits one only once nothing else is left in its
            block. Both hold at every temperature.
        guidance_scale (`float`, *optional*, defaults to `0.0`):
            Classifier-free guidance: logits `u + (1 + scale) * (c - u)`, `u` with the prompt masked. Doubles the rows
            of each forward pass. Full attention only.
        vocab_chunk_rows (`int`, *optional*):
            Positions whose logits are held at once. By default as many as fit 32 MB: 64 at LLaDA's vocabulary.
    """

    max_completion_length: int = 256
    block_length: int = 32
    num_denoising_steps: int = 16
    temperature: float = 0.9
    top_k: int = 0
    top_p: float = 1.0
    remasking: Remasking = "low_confidence"
    confidence_threshold: float | None = None
    suppress_eos: SuppressEos | None = None
    guidance_scale: float = 0.0
    vocab_chunk_rows: int | None = None

    def __post_init__(self) -> None:
        counts = {
            "max_completion_length": self.max_completion_length,
            "block_length": self.block_length,
            "num_denoising_steps": self.num_denoising_steps,
        }
        for name, value in counts.items():
            check(value >= 1, name, value, "an integer >= 1", "A block needs at least one token and one step.")
        check(
            self.temperature == 0 or 1e-3 <= self.temperature < math.inf,
            "temperature",
            self.temperature,
            "0, or a number >= 0.001",
            "Use 0 for greedy decoding.",
        )
        check(self.top_k >= 0, "top_k", self.top_k, "an integer >= 0", "Use 0 to sample among all tokens.")
        check(0 < self.top_p <= 1, "top_p", self.top_p, "0 < top_p <= 1", "Use 1.0 to sample among all tokens.")
        remaskings = get_args(Remasking)
        check(self.remasking in remaskings, "remasking", self.remasking, f"one of {remaskings}", "Choose one of them.")
        if self.confidence_threshold is not None:
            check(
                0 <= self.confidence_threshold < 1,
                "confidence_threshold",
                self.confidence_threshold,
                "None, or 0 <= confidence_threshold < 1",
                "Use None to commit a fixed number per step.",
            )
            check(
                self.remasking in ("low_confidence", "margin"),
                "remasking",
                self.remasking,
                "'low_confidence' or 'margin' with a confidence_threshold",
                "The threshold is a probability: change remasking, or unset confidence_threshold.",
            )
        check(
            self.suppress_eos in (None, "sampling", "early_commit"),
            "suppress_eos",
            self.suppress_eos,
            "None, 'sampling' or 'early_commit'",
            "Use None to leave end tokens alone.",
        )
        check(
            0 <= self.guidance_scale < math.inf,
            "guidance_scale",
            self.guidance_scale,
            "a number >= 0",
            "Use 0 to decode without guidance.",
        )
        check(
            self.vocab_chunk_rows is None or self.vocab_chunk_rows >= 1,
            "vocab_chunk_rows",
            self.vocab_chunk_rows,
            "None, or an integer >= 1",
            "Use None for chunks of 32 MB.",
        )


@dataclass(frozen=True)
class Rollout:
    """
    Completions of a batch with their trajectory and what they cost.

    Args:
        completion_ids (`list[list[int]]`):
            Tokens of each row up to and including its first end token: at least one, at most `W`.
        window_ids (`torch.Tensor`):
            `(B, W)` tokens of the whole window: the end block is complete, also past the end token; blocks never
            decoded hold the mask token.
        commit_step (`torch.Tensor`):
            `(B, W)` step, counted from 0 within its block, at which each token was committed; -1 where never decoded.
        block_offset (`torch.Tensor`):
            `(B,)` prompt tokens that share a block with the first completion tokens: a row's first block ends
            `block_length - block_offset` tokens into the window. 0 with full attention.
        num_forwards (`int`):
            Forward passes, those run only to keep other ranks company included.
        num_backbone_positions (`int`):
            Positions through the backbone, padding included.
        num_vocab_positions (`int`):
            Positions through the vocabulary projection.
        num_tokens (`int`):
            Completion tokens, up to and including the end tokens: the numerator of tokens per second.
        num_decoded (`int`):
            Tokens committed, those of the end blocks past the end token included.
        num_row_steps (`int`):
            Denoising steps, summed over rows: tokens per forward are `num_decoded / num_row_steps`.
        settings ([`SamplingSettings`], *optional*):
            How it was decoded.
        confidence (`torch.Tensor`, *optional*):
            `(B, W)` float32 confidence in each token when it was committed, before `suppress_eos` held any back; what
            it measures is `settings.remasking`. NaN where never decoded. Only where it was asked for.
    """

    completion_ids: list[list[int]]
    window_ids: Tensor
    commit_step: Tensor
    block_offset: Tensor
    num_forwards: int
    num_backbone_positions: int
    num_vocab_positions: int
    num_tokens: int
    num_decoded: int
    num_row_steps: int
    settings: SamplingSettings | None = None
    confidence: Tensor | None = None


def validate_trajectory(
    rollout: Rollout, *, block_length: int, mask_token_id: int, end_token_ids: Sequence[int], is_cut: bool = False
) -> None:
    """
    Check that a rollout keeps the contract every sampler has with the likelihoods.

    Whole blocks are decoded, left to right, until one holds an end token or the window is full; every decoded token
    was committed at exactly one step; the steps of a block are contiguous from 0; the completion is the window up to
    and including its first end token. The blocks of a row start where its `block_offset` says.

    Args:
        rollout ([`Rollout`]):
            The rollout to check.
        block_length (`int`):
            Tokens per block.
        mask_token_id (`int`):
            Token of positions never decoded.
        end_token_ids (`Sequence[int]`):
            Tokens that end a completion.
        is_cut (`bool`, *optional*, defaults to `False`):
            Whether what lies behind the end token in its block may be missing.

    Raises:
        `ValueError`: Naming the first row, and block, that breaks it.
    """
    ends = set(end_token_ids)
    num_rows, window_length = rollout.window_ids.shape
    shapes = rollout.commit_step.shape, rollout.block_offset.shape, len(rollout.completion_ids)
    if shapes != ((num_rows, window_length), (num_rows,), num_rows):
        raise ValueError(
            "Expected one commit step per window token, one block offset and one completion per row, got window_ids "
            f"{tuple(rollout.window_ids.shape)}, commit_step {tuple(rollout.commit_step.shape)}, block_offset "
            f"{tuple(rollout.block_offset.shape)} and {len(rollout.completion_ids)} completions. Return all four for "
            "the same rows."
        )
    offsets = rollout.block_offset.tolist()
    check(
        all(0 <= offset < block_length for offset in offsets),
        "block_offset",
        offsets,
        f"0 to {block_length - 1}, below block_length={block_length}",
        "Give the prompt's length modulo the block, or zeros where blocks start behind the prompt.",
    )
    rows = zip(rollout.completion_ids, rollout.window_ids.tolist(), rollout.commit_step.tolist(), strict=True)
    for row, (completion, window, steps) in enumerate(rows):
        is_over = False
        borders = [0, *range(block_length - offsets[row], window_length, block_length), window_length]
        for block, (start, stop) in enumerate(pairwise(borders)):
            where = f"row {row}, block {block}"
            is_part = is_cut and start < len(completion) < stop
            if is_part:
                stop = len(completion)
            tokens, block_steps = window[start:stop], steps[start:stop]
            if is_over:
                if any(step != -1 for step in block_steps) or any(token != mask_token_id for token in tokens):
                    raise ValueError(
                        f"Expected only mask tokens and steps -1 in {where}, after the end block, got tokens {tokens} "
                        f"and steps {block_steps}. Stop a row at its end block."
                    )
                continue
            if mask_token_id in tokens:
                raise ValueError(
                    f"Expected no mask token ({mask_token_id}) in {where}, got {tokens}. Decode every token of a "
                    "block, and never sample the mask token."
                )
            if min(block_steps) < 0 or (not is_part and set(block_steps) != set(range(max(block_steps) + 1))):
                raise ValueError(
                    f"Expected steps contiguous from 0 in {where}, got {block_steps}. Count steps within the "
                    "block, and commit at least one token in each."
                )
            is_over = not ends.isdisjoint(tokens)
        length = next((i + 1 for i, token in enumerate(window) if token in ends), window_length)
        if completion != window[:length]:
            raise ValueError(
                f"Expected the completion of row {row} to be its window up to the first end token, {window[:length]}, "
                f"got {completion}. Cut the completion there, end token included."
            )


def check_decoding(settings: SamplingSettings, *, attention: Attention) -> None:
    """
    Raise where settings do not fit a model's attention. No model is needed: run this before any is loaded.

    Args:
        settings ([`SamplingSettings`]):
            How to decode.
        attention (`str`):
            `"full"`, where every position sees every other, or `"block"`, where blocks see the blocks before them.

    Raises:
        `ValueError`: Naming the setting, its value, what is allowed and what to change.
    """
    attentions = get_args(Attention)
    check(attention in attentions, "attention", attention, f"one of {attentions}", "Use the family's.")
    if attention == "full":
        check(
            settings.block_length <= settings.max_completion_length,
            "block_length",
            settings.block_length,
            f"1 to max_completion_length={settings.max_completion_length}",
            "Shorten the block or lengthen the completion.",
        )
    else:
        check(
            settings.guidance_scale == 0,
            "guidance_scale",
            settings.guidance_scale,
            "0 with block attention",
            "Guidance needs a full-attention model such as LLaDA: set guidance_scale to 0.",
        )


class Decoding:
    """
    Texts that are decoded block by block, in lockstep: one `advance` before each `run` and `commit`.

    A text is what follows the last block border within the prompt: `block_offset` prompt tokens, never changed, then
    the completion. Texts shorter than the longest are padded on the right, with mask tokens.

    Args:
        text_ids (`torch.Tensor`):
            `(B, T)` texts, mask tokens where nothing is decoded yet. Changed in place.
        block_offset (`torch.Tensor`):
            `(B,)` prompt tokens at the start of each.
        mask_token_id (`int`):
            Token that stands for "not yet decoded".
        end_token_ids (`Sequence[int]`):
            Tokens that end a completion.
        settings ([`SamplingSettings`]):
            How to decode.
        row_seeds (`Sequence[int]`):
            Seed of each row's own generator.
        record_confidence (`bool`, *optional*, defaults to `False`):
            Whether to keep the confidence of each committed token.
    """

    def __init__(
        self,
        text_ids: Tensor,
        block_offset: Tensor,
        *,
        mask_token_id: int,
        end_token_ids: Sequence[int],
        settings: SamplingSettings,
        row_seeds: Sequence[int],
        record_confidence: bool = False,
    ) -> None:
        device = text_ids.device
        column = torch.arange(text_ids.shape[1], device=device)
        stop = block_offset + settings.max_completion_length
        self.text_ids = text_ids
        self.block_offset = block_offset
        self.mask_token_id = mask_token_id
        self.end_token_ids = torch.tensor(tuple(end_token_ids), dtype=torch.long, device=device)
        self.settings = settings
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in row_seeds]
        self.is_masked = (column >= block_offset[:, None]) & (column < stop[:, None])  # (B, T) still to be decided
        self.commit_step = torch.full_like(text_ids, -1)
        self.confidence: Tensor | None = None  # (B, T)
        if record_confidence:
            self.confidence = torch.full_like(text_ids, torch.nan, dtype=torch.float32)
        self.is_broken = torch.zeros(len(text_ids), dtype=torch.bool, device=device)
        self.head = SamplingHead(
            settings, mask_token_id, tuple(end_token_ids) if settings.suppress_eos == "sampling" else ()
        )
        self.stop: list[int] = stop.tolist()
        self.live = list(range(len(text_ids)))  # rows with a block to decode and no end token in a finished one
        self.busy: list[int] = []  # live rows with masked positions in the active block
        self.num_masked: list[int] = []  # how many, of each busy row
        self.start = 0  # of the active block
        self.step = 0
        self.num_forwards = self.num_backbone_positions = self.num_vocab_positions = self.num_decided = 0
        self.num_row_steps = 0

    @property
    def block(self) -> slice:
        """Columns of the active block, as far as any live row has them."""
        longest = max((self.stop[row] for row in self.live), default=self.start)
        return slice(self.start, min(self.start + self.settings.block_length, longest))

    def advance(self) -> bool:
        """Find the rows of the next denoising step, in the next block where one is finished; False at the end."""
        self.busy, self.num_masked = [], []
        while self.live:
            num_masked = self.is_masked[self.live, self.block].sum(dim=-1).tolist()
            pairs = [(row, num) for row, num in zip(self.live, num_masked, strict=True) if num > 0]
            if pairs:
                self.busy, self.num_masked = [row for row, _ in pairs], [num for _, num in pairs]
                return True
            is_end = torch.isin(self.text_ids[self.live, self.block], self.end_token_ids)
            is_end &= self.commit_step[self.live, self.block] >= 0  # not those of the prompt
            has_ended = is_end.any(dim=-1).tolist()
            self.start, self.step = self.start + self.settings.block_length, 0
            num_left = [self.stop[row] - self.start for row in self.live]  # behind the block
            self.num_decided += sum(n for n, ended in zip(num_left, has_ended, strict=True) if ended and n > 0)
            rows = zip(self.live, num_left, has_ended, strict=True)
            self.live = [row for row, n, ended in rows if n > 0 and not ended]
        return False

    def run(self, model: Callable[..., tuple[Tensor, Tensor]], inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """
        One forward pass of `inputs`, sampling at its `is_selected`: the masked positions of the busy rows, or nowhere.
        """
        input_ids: Tensor = inputs["input_ids"]
        self.num_forwards += 1
        self.num_backbone_positions += input_ids.numel()
        generators = [self.generators[row] for row in self.busy]
        tokens, confidence = model(
            **inputs, head_fn=partial(self.head, generators=generators, num_masked=self.num_masked)
        )
        # with a device_map the head may live elsewhere
        return tokens.to(input_ids.device), confidence.to(input_ids.device)

    def commit(self, tokens: Tensor, confidence: Tensor) -> None:
        """Commit some of the `(N,)` tokens sampled at the masked positions of the busy rows."""
        settings, block = self.settings, self.block
        rows = torch.tensor(self.busy, device=self.text_ids.device)
        is_masked = self.is_masked[rows, block]  # (A, L)
        block_tokens = self.text_ids[rows, block]  # a copy: `rows` is a tensor
        block_tokens[is_masked] = tokens
        block_confidence = confidence.new_zeros(is_masked.shape)
        block_confidence[is_masked] = confidence
        self.is_broken[rows] |= ~block_confidence.isfinite().all(dim=-1)
        is_late = None
        if settings.suppress_eos == "early_commit":
            is_late = torch.isin(block_tokens, self.end_token_ids)
        is_committed = choose_commits(
            block_confidence,
            is_masked,
            num_steps_left=settings.num_denoising_steps - self.step,
            threshold=settings.confidence_threshold,
            is_late=is_late,
        )
        self.text_ids[rows, block] = torch.where(is_committed, block_tokens, self.text_ids[rows, block])
        self.commit_step[rows, block] = self.commit_step[rows, block].masked_fill(is_committed, self.step)
        self.is_masked[rows, block] = is_masked & ~is_committed
        if self.confidence is not None:
            self.confidence[rows, block] = torch.where(is_committed, block_confidence, self.confidence[rows, block])
        self.num_vocab_positions += sum(self.num_masked)
        self.num_row_steps += len(self.busy)
        self.num_decided += int(is_committed.sum())
        self.step += 1

    def rollout(self) -> Rollout:
        """Cut the completions out of the texts, and check the whole."""
        if self.is_broken.any():
            raise broken_rows_error(self.is_broken.nonzero()[:, 0].tolist())
        window = torch.arange(self.settings.max_completion_length, device=self.text_ids.device)
        window = self.block_offset[:, None] + window  # (B, W) columns
        window_ids = self.text_ids.gather(1, window)
        commit_step = self.commit_step.gather(1, window)
        ends = set(self.end_token_ids.tolist())
        completion_ids: list[list[int]] = []
        for ids in window_ids.tolist():
            length = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
            completion_ids.append(ids[:length])
        rollout = Rollout(
            completion_ids=completion_ids,
            window_ids=window_ids,
            commit_step=commit_step,
            block_offset=self.block_offset,
            num_forwards=self.num_forwards,
            num_backbone_positions=self.num_backbone_positions,
            num_vocab_positions=self.num_vocab_positions,
            num_tokens=sum(len(ids) for ids in completion_ids),
            num_decoded=int((commit_step >= 0).sum()),
            num_row_steps=self.num_row_steps,
            settings=self.settings,
            confidence=None if self.confidence is None else self.confidence.gather(1, window),
        )
        validate_trajectory(
            rollout,
            block_length=self.settings.block_length,
            mask_token_id=self.mask_token_id,
            end_token_ids=tuple(ends),
        )
        return rollout


class SamplingHead:
    """Vocabulary projection and sampling, a chunk of positions at a time, in buffers kept for the whole rollout."""

    def __init__(self, settings: SamplingSettings, mask_token_id: int, banned_token_ids: tuple[int, ...]) -> None:
        self.settings = settings
        self.mask_token_id = mask_token_id
        self.banned_token_ids = banned_token_ids
        self.logits: Tensor | None = None
        self.scratch: Tensor | None = None

    def __call__(
        self, hidden: Tensor, weight: Tensor, *, generators: list[torch.Generator], num_masked: list[int]
    ) -> tuple[Tensor, Tensor]:
        """
        Turn `(N, D)` hidden states into `(N,)` tokens and confidences; under guidance `(2N, D)`, the conditional
        first. `generators` and `num_masked` are those of the rows the positions belong to, in order.
        """
        settings = self.settings
        if settings.guidance_scale > 0:
            conditional, unconditional = hidden.float().chunk(2) if len(hidden) else (hidden, hidden)
            # the projection is linear: combining what goes in saves half of it
            hidden = torch.lerp(unconditional, conditional, 1 + settings.guidance_scale)
        hidden = hidden.to(weight.dtype)
        vocab_size = len(weight)
        chunk_rows = settings.vocab_chunk_rows or max(1, _CHUNK_LOGITS // vocab_size)
        tokens = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
        confidence = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        noise = None
        if len(hidden) > 0 and (settings.temperature > 0 or settings.remasking == "random"):
            # row by row, in one call each: on a GPU the split of a draw into calls would change it
            draws = [race_noise(n, vocab_size, generator=g) for n, g in zip(num_masked, generators, strict=True)]
            noise = torch.cat(draws).to(hidden.device)
        for start in range(0, len(hidden), chunk_rows):
            chunk = slice(start, start + chunk_rows)
            logits, scratch = self._buffers(len(hidden[chunk]), vocab_size, hidden.device)
            if weight.dtype == torch.float32:
                torch.mm(hidden[chunk], weight.t(), out=logits)
            else:
                # float32 from here on: half-precision probabilities would bias the frequencies
                logits.copy_(torch.mm(hidden[chunk], weight.t()))
            tokens[chunk], confidence[chunk] = sample_tokens(
                logits,
                mask_token_id=self.mask_token_id,
                banned_token_ids=self.banned_token_ids,
                temperature=settings.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                remasking=settings.remasking,
                noise=None if noise is None else noise[chunk],
                scratch=scratch,
            )
        return tokens, confidence

    def _buffers(self, num: int, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self.logits is None or self.scratch is None or len(self.logits) < num:
            num_groups, group_length = race_grid(vocab_size)
            self.logits = torch.empty(num, vocab_size, dtype=torch.float32, device=device)
            self.scratch = torch.empty(num, num_groups * group_length, dtype=torch.float32, device=device)
        return self.logits[:num], self.scratch[:num]


def broken_rows_error(rows: list[int]) -> ValueError:
    """What is raised where a model's logits were not finite in some rows."""
    return ValueError(
        f"Expected finite logits, got NaN or infinity in rows {rows}. Check the weights for NaN, and half precision "
        "for overflow."
    )


def check(is_allowed: bool, name: str, value: object, allowed: str, remedy: str) -> None:
    if not is_allowed:
        raise ValueError(f"Expected {name} to be {allowed}, got {value!r}. {remedy}")


def check_inputs(
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    mask_token_id: int,
    end_token_ids: Sequence[int],
    row_seeds: Sequence[int],
) -> None:
    num_rows = len(prompt_ids)
    check(
        prompt_mask.shape == prompt_ids.shape,
        "prompt_mask",
        tuple(prompt_mask.shape),
        f"of the shape of prompt_ids, {tuple(prompt_ids.shape)}",
        "Pass one mask value per prompt token.",
    )
    check(
        len(row_seeds) == num_rows,
        "row_seeds",
        f"{len(row_seeds)} seeds",
        f"one seed for each of the {num_rows} rows",
        "Rows draw from their own generators.",
    )
    check(
        mask_token_id not in end_token_ids,
        "mask_token_id",
        mask_token_id,
        f"none of end_token_ids={tuple(end_token_ids)}",
        "Give the mask a token of its own.",
    )
    is_real = prompt_mask.bool()
    is_right_padded = (is_real[:, :-1] & ~is_real[:, 1:]).any(dim=1)
    check(
        not bool(is_right_padded.any()),
        "prompt_mask",
        f"padding behind a real token in rows {is_right_padded.nonzero()[:, 0].tolist()}",
        "left-padded",
        "Pad prompts on the left: the completion follows the last column.",
    )
