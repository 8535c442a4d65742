# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Block-by-block decoding of full-attention models (LLaDA). Axis letters: see `core/__init__.py`; `W` window, `A` rows
in a forward pass, `N` positions through the vocabulary projection."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from ..core.unmasking import Remasking, num_to_commit, race_grid, race_noise, sample_tokens, select_commits

SuppressEos = Literal["sampling", "early_commit"]

# 64 rows of LLaDA's 126,464 float32 logits: 32 MB
_CHUNK_LOGITS = 64 * 126_464


@dataclass(frozen=True)
class SamplingSettings:
    """
    How a rollout is decoded.

    Args:
        max_completion_length (`int`, *optional*, defaults to `256`):
            Length of the window the model sees behind the prompt, and the most tokens a completion can have.
        block_length (`int`, *optional*, defaults to `32`):
            Tokens decoded together, left to right by block; the last block may be shorter.
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
            of each forward pass.
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
            _check(value >= 1, name, value, "an integer >= 1", "A block needs at least one token and one step.")
        _check(
            self.block_length <= self.max_completion_length,
            "block_length",
            self.block_length,
            f"1 to max_completion_length={self.max_completion_length}",
            "Shorten the block or lengthen the completion.",
        )
        _check(
            self.temperature == 0 or 1e-3 <= self.temperature < math.inf,
            "temperature",
            self.temperature,
            "0, or a number >= 0.001",
            "Use 0 for greedy decoding.",
        )
        _check(self.top_k >= 0, "top_k", self.top_k, "an integer >= 0", "Use 0 to sample among all tokens.")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "0 < top_p <= 1", "Use 1.0 to sample among all tokens.")
        remaskings = get_args(Remasking)
        _check(
            self.remasking in remaskings, "remasking", self.remasking, f"one of {remaskings}", "Choose one of them."
        )
        if self.confidence_threshold is not None:
            _check(
                0 <= self.confidence_threshold < 1,
                "confidence_threshold",
                self.confidence_threshold,
                "None, or 0 <= confidence_threshold < 1",
                "Use None to commit a fixed number per step.",
            )
            _check(
                self.remasking in ("low_confidence", "margin"),
                "remasking",
                self.remasking,
                "'low_confidence' or 'margin' with a confidence_threshold",
                "The threshold is a probability: change remasking, or unset confidence_threshold.",
            )
        _check(
            self.suppress_eos in (None, "sampling", "early_commit"),
            "suppress_eos",
            self.suppress_eos,
            "None, 'sampling' or 'early_commit'",
            "Use None to leave end tokens alone.",
        )
        _check(
            0 <= self.guidance_scale < math.inf,
            "guidance_scale",
            self.guidance_scale,
            "a number >= 0",
            "Use 0 to decode without guidance.",
        )
        _check(
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
    """

    completion_ids: list[list[int]]
    window_ids: Tensor
    commit_step: Tensor
    num_forwards: int
    num_backbone_positions: int
    num_vocab_positions: int
    num_tokens: int
    num_decoded: int
    num_row_steps: int


@torch.no_grad()
def sample_full(
    model: Callable[..., tuple[Tensor, Tensor]],
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    *,
    mask_token_id: int,
    end_token_ids: Sequence[int],
    settings: SamplingSettings,
    row_seeds: Sequence[int],
    progress: Callable[[int, int], None] | None = None,
    any_rank_active: Callable[[bool], bool] | None = None,
) -> Rollout:
    """
    Decode one completion per row, block by block, with the whole window in view.

    A row depends on its own prompt and seed alone: not on its neighbours, its place, the padding, or when others
    finish. Rows whose finished blocks hold an end token leave the batch, and only masked positions of the active block
    are projected onto the vocabulary.

    Args:
        model (`Callable`):
            Model with [`models.bidirectional.SelectedPositionsMixin`], wrapped or not, in the train or eval mode the
            caller wants.
        prompt_ids (`torch.Tensor`):
            `(B, P)` left-padded prompts. They may contain end tokens.
        prompt_mask (`torch.Tensor`):
            `(B, P)` true on real prompt tokens. Lengths come from here alone, whatever the padding token is.
        mask_token_id (`int`):
            Token that stands for "not yet decoded". Never in the output.
        end_token_ids (`Sequence[int]`):
            Tokens that end a completion.
        settings ([`SamplingSettings`]):
            How to decode.
        row_seeds (`Sequence[int]`):
            Seed of each row's own generator.
        progress (`Callable[[int, int], None]`, *optional*):
            Called after each step with the positions decided so far and in total.
        any_rank_active (`Callable[[bool], bool]`, *optional*):
            Says whether any rank has rows left, given whether this one has. With parameters sharded over ranks every
            forward is a collective: a rank that is done runs empty ones until all are.

    Returns:
        [`Rollout`]: Completions, trajectory and counters.
    """
    _check_inputs(prompt_ids, prompt_mask, mask_token_id, end_token_ids, row_seeds)
    decoder = _Decoder(prompt_ids.long(), prompt_mask.bool(), mask_token_id, tuple(end_token_ids), settings, row_seeds)
    while True:
        is_active = decoder.advance()
        if not (is_active if any_rank_active is None else any_rank_active(is_active)):
            break
        if is_active:
            decoder.denoise(model)
            if progress is not None:
                progress(decoder.num_decided, decoder.window_ids.numel())
        else:
            decoder.keep_company(model)
    return decoder.rollout()


def validate_trajectory(
    rollout: Rollout, *, block_length: int, mask_token_id: int, end_token_ids: Sequence[int]
) -> None:
    """
    Check that a rollout keeps the contract every sampler has with the likelihoods.

    Whole blocks are decoded, left to right, until one holds an end token or the window is full; every decoded token
    was committed at exactly one step; the steps of a block are contiguous from 0; the completion is the window up to
    and including its first end token.

    Args:
        rollout ([`Rollout`]):
            The rollout to check.
        block_length (`int`):
            Tokens per block.
        mask_token_id (`int`):
            Token of positions never decoded.
        end_token_ids (`Sequence[int]`):
            Tokens that end a completion.

    Raises:
        `ValueError`: Naming the first row, and block, that breaks it.
    """
    ends = set(end_token_ids)
    num_rows, window_length = rollout.window_ids.shape
    if rollout.commit_step.shape != (num_rows, window_length) or len(rollout.completion_ids) != num_rows:
        raise ValueError(
            f"Expected one commit step per window token and one completion per row, got window_ids "
            f"{tuple(rollout.window_ids.shape)}, commit_step {tuple(rollout.commit_step.shape)} and "
            f"{len(rollout.completion_ids)} completions. Return all three for the same rows."
        )
    rows = zip(rollout.completion_ids, rollout.window_ids.tolist(), rollout.commit_step.tolist(), strict=True)
    for row, (completion, window, steps) in enumerate(rows):
        is_over = False
        for start in range(0, window_length, block_length):
            where = f"row {row}, block {start // block_length}"
            tokens, block_steps = window[start : start + block_length], steps[start : start + block_length]
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
            if set(block_steps) != set(range(max(block_steps) + 1)):
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


class _Decoder:
    """State of a rollout; one `advance` before each `denoise`."""

    def __init__(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        mask_token_id: int,
        end_token_ids: tuple[int, ...],
        settings: SamplingSettings,
        row_seeds: Sequence[int],
    ) -> None:
        device = prompt_ids.device
        num_rows = len(prompt_ids)
        self.prompt_ids = prompt_ids
        self.prompt_mask = prompt_mask
        self.mask_token_id = mask_token_id
        self.end_token_ids = torch.tensor(end_token_ids, dtype=torch.long, device=device)
        self.settings = settings
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in row_seeds]
        self.window_ids = prompt_ids.new_full((num_rows, settings.max_completion_length), mask_token_id)  # (B, W)
        self.commit_step = torch.full_like(self.window_ids, -1)
        self.is_broken = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self.head = _SamplingHead(
            settings, mask_token_id, end_token_ids if settings.suppress_eos == "sampling" else ()
        )
        self.live = list(range(num_rows))  # rows that have not met an end token in a finished block
        self.busy: list[int] = []  # live rows with masked positions in the active block
        self.num_masked: list[int] = []  # how many, of each busy row
        self.start = 0  # of the active block
        self.step = 0
        self.num_forwards = self.num_backbone_positions = self.num_vocab_positions = self.num_decided = 0
        self.num_row_steps = 0

    @property
    def block(self) -> slice:
        return slice(self.start, min(self.start + self.settings.block_length, self.settings.max_completion_length))

    def advance(self) -> bool:
        """Find the rows of the next denoising step, in the next block where one is finished; False at the end."""
        self.busy = []
        while self.live and self.start < self.settings.max_completion_length:
            num_masked = (self.commit_step[self.live, self.block] < 0).sum(dim=-1).tolist()
            pairs = [(row, num) for row, num in zip(self.live, num_masked, strict=True) if num > 0]
            if pairs:
                self.busy, self.num_masked = [row for row, _ in pairs], [num for _, num in pairs]
                return True
            has_ended = torch.isin(self.window_ids[self.live, self.block], self.end_token_ids).any(dim=-1).tolist()
            num_skipped = self.settings.max_completion_length - self.block.stop
            self.num_decided += num_skipped * sum(has_ended)
            self.live = [row for row, ended in zip(self.live, has_ended, strict=True) if not ended]
            self.start, self.step = self.block.stop, 0
        return False

    def denoise(self, model: Callable[..., tuple[Tensor, Tensor]]) -> None:
        """Sample at the masked positions of the active block, and commit some of them."""
        settings, rows, block = self.settings, torch.tensor(self.busy, device=self.window_ids.device), self.block
        prompt_mask = self.prompt_mask[rows]
        # columns that are padding in every row left: a row's result does not depend on them, its cost does
        num_idle = int((~prompt_mask.any(dim=0)).sum())
        prompt_ids, prompt_mask = self.prompt_ids[rows, num_idle:], prompt_mask[:, num_idle:]
        window_ids = self.window_ids[rows]  # (A, W)
        is_masked = self.commit_step[rows, block] < 0  # (A, L)

        input_ids = torch.cat([prompt_ids, window_ids], dim=1)  # (A, S)
        attention_mask = torch.cat([prompt_mask, torch.ones_like(window_ids, dtype=torch.bool)], dim=1)
        is_selected = torch.zeros_like(attention_mask)
        offset = prompt_ids.shape[1]
        is_selected[:, offset + block.start : offset + block.stop] = is_masked
        if settings.guidance_scale > 0:
            blind_ids = torch.cat([prompt_ids.masked_fill(prompt_mask, self.mask_token_id), window_ids], dim=1)
            input_ids = torch.cat([input_ids, blind_ids])  # (2A, S)
            attention_mask, is_selected = attention_mask.repeat(2, 1), is_selected.repeat(2, 1)
        tokens, confidence = self._forward(model, input_ids, attention_mask, is_selected)

        block_tokens = window_ids[:, block]  # a copy: `rows` is a tensor
        block_tokens[is_masked] = tokens
        block_confidence = confidence.new_zeros(is_masked.shape)
        block_confidence[is_masked] = confidence
        self.is_broken[rows] |= ~block_confidence.isfinite().all(dim=-1)
        if settings.suppress_eos == "early_commit":
            is_end = torch.isin(block_tokens, self.end_token_ids)
            block_confidence = block_confidence.masked_fill(is_end, -torch.inf)
        if settings.confidence_threshold is None:
            num_steps_left = settings.num_denoising_steps - self.step
            num = num_to_commit(is_masked.sum(dim=-1), num_steps_left=num_steps_left)
        else:
            num = torch.ones_like(rows)
        is_committed = select_commits(block_confidence, is_masked, num, threshold=settings.confidence_threshold)
        self.window_ids[rows, block] = torch.where(is_committed, block_tokens, self.window_ids[rows, block])
        self.commit_step[rows, block] = self.commit_step[rows, block].masked_fill(is_committed, self.step)
        self.num_vocab_positions += sum(self.num_masked)
        self.num_row_steps += len(self.busy)
        self.num_decided += int(is_committed.sum())
        self.step += 1

    def keep_company(self, model: Callable[..., tuple[Tensor, Tensor]]) -> None:
        """Run one forward pass that samples nothing, for ranks that still have rows."""
        input_ids = self.window_ids.new_full((1, 1), self.mask_token_id)
        is_attended = torch.ones_like(input_ids, dtype=torch.bool)
        self.busy, self.num_masked = [], []
        self._forward(model, input_ids, is_attended, ~is_attended)

    def _forward(
        self,
        model: Callable[..., tuple[Tensor, Tensor]],
        input_ids: Tensor,
        attention_mask: Tensor,
        is_selected: Tensor,
    ) -> tuple[Tensor, Tensor]:
        self.num_forwards += 1
        self.num_backbone_positions += input_ids.numel()
        tokens, confidence = model(
            input_ids=input_ids,
            attention_mask=attention_mask.long(),
            position_ids=(attention_mask.long().cumsum(dim=-1) - 1).clamp_min(0),
            is_selected=is_selected,
            head_fn=partial(
                self.head, generators=[self.generators[row] for row in self.busy], num_masked=self.num_masked
            ),
        )
        # with a device_map the head may live elsewhere
        return tokens.to(input_ids.device), confidence.to(input_ids.device)

    def rollout(self) -> Rollout:
        """Cut the completions out of the windows, and check the whole."""
        if self.is_broken.any():
            raise ValueError(
                f"Expected finite logits, got NaN or infinity in rows {self.is_broken.nonzero()[:, 0].tolist()}. "
                "Check the weights for NaN, and half precision for overflow."
            )
        ends = set(self.end_token_ids.tolist())
        completion_ids: list[list[int]] = []
        for window in self.window_ids.tolist():
            length = next((i + 1 for i, token in enumerate(window) if token in ends), len(window))
            completion_ids.append(window[:length])
        rollout = Rollout(
            completion_ids=completion_ids,
            window_ids=self.window_ids,
            commit_step=self.commit_step,
            num_forwards=self.num_forwards,
            num_backbone_positions=self.num_backbone_positions,
            num_vocab_positions=self.num_vocab_positions,
            num_tokens=sum(len(ids) for ids in completion_ids),
            num_decoded=int((self.commit_step >= 0).sum()),
            num_row_steps=self.num_row_steps,
        )
        validate_trajectory(
            rollout,
            block_length=self.settings.block_length,
            mask_token_id=self.mask_token_id,
            end_token_ids=tuple(ends),
        )
        return rollout


class _SamplingHead:
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


def _check(is_allowed: bool, name: str, value: object, allowed: str, remedy: str) -> None:
    if not is_allowed:
        raise ValueError(f"Expected {name} to be {allowed}, got {value!r}. {remedy}")


def _check_inputs(
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    mask_token_id: int,
    end_token_ids: Sequence[int],
    row_seeds: Sequence[int],
) -> None:
    num_rows = len(prompt_ids)
    _check(
        prompt_mask.shape == prompt_ids.shape,
        "prompt_mask",
        tuple(prompt_mask.shape),
        f"of the shape of prompt_ids, {tuple(prompt_ids.shape)}",
        "Pass one mask value per prompt token.",
    )
    _check(
        len(row_seeds) == num_rows,
        "row_seeds",
        f"{len(row_seeds)} seeds",
        f"one seed for each of the {num_rows} rows",
        "Rows draw from their own generators.",
    )
    _check(
        mask_token_id not in end_token_ids,
        "mask_token_id",
        mask_token_id,
        f"none of end_token_ids={tuple(end_token_ids)}",
        "Give the mask a token of its own.",
    )
    is_real = prompt_mask.bool()
    is_right_padded = (is_real[:, :-1] & ~is_real[:, 1:]).any(dim=1)
    _check(
        not bool(is_right_padded.any()),
        "prompt_mask",
        f"padding behind a real token in rows {is_right_padded.nonzero()[:, 0].tolist()}",
        "left-padded",
        "Pad prompts on the left: the completion follows the last column.",
    )
