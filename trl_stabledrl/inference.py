# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Completions and likelihoods of a masked diffusion model, outside a trainer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .batching import left_padded, right_padded
from .core.masking import MaskLaw, McSampling
from .core.noise import Stream, random_bits
from .core.unmasking import Remasking
from .decoding import Prompt, encode_prompts, sampling_settings
from .likelihood import LikelihoodSettings, Rows, Tail, score_elbo
from .models.bidirectional import dense_attention
from .models.facts import model_facts
from .progress import token_bar
from .samplers import Rollout, SuppressEos, sample


@dataclass(frozen=True)
class CompletionScores:
    """
    Likelihoods of completions, one entry a row.

    Attributes:
        elbo (`torch.Tensor` of shape `(B,)`):
            Estimated evidence lower bound of `log p(completion | prompt)`, in nats, summed over the scored tokens.
        standard_error (`torch.Tensor` of shape `(B,)`):
            Standard error of `elbo` over the Monte Carlo draws; NaN with fewer than two independent draws.
        num_tokens (`torch.Tensor` of shape `(B,)`):
            Scored tokens: up to and including the first end token.
    """

    elbo: Tensor
    standard_error: Tensor
    num_tokens: Tensor

    @property
    def elbo_per_token(self) -> Tensor:
        """`elbo` in nats per scored token."""
        return self.elbo / self.num_tokens


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt] | Sequence[Sequence[int]],
    *,
    max_completion_length: int = 256,
    block_length: int | None = None,
    num_denoising_steps: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    remasking: Remasking = "low_confidence",
    confidence_threshold: float | None = None,
    suppress_eos: SuppressEos | None = None,
    guidance_scale: float = 0.0,
    batch_size: int = 8,
    seed: int = 0,
    row_index: Sequence[int] | None = None,
    show_progress: bool = True,
    return_rollouts: bool = False,
) -> list[str] | tuple[list[str], list[Rollout]]:
    """
    Complete prompts by denoising, block by block.

    A row depends on its prompt, its `row_index` and the seed alone, not on `batch_size` or the other prompts.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model of a known family, on any device.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        prompts (`Sequence[str]` or `Sequence[list[dict]]` or `Sequence[list[int]]`):
            Plain or conversational prompts, or prompts as token ids.
        max_completion_length (`int`, *optional*, defaults to `256`):
            Tokens of the window; a completion is never longer.
        block_length (`int`, *optional*):
            Tokens per block. Defaults to the family's.
        num_denoising_steps (`int`, *optional*):
            Steps per block. Defaults to the family's.
        temperature (`float`, *optional*, defaults to `0.0`):
            0 is greedy.
        top_k (`int`, *optional*, defaults to `0`):
            Keep only the most likely tokens; 0 keeps all.
        top_p (`float`, *optional*, defaults to `1.0`):
            Keep the most likely tokens up to this probability.
        remasking (`str`, *optional*, defaults to `"low_confidence"`):
            Which predictions are committed first: `"low_confidence"`, `"random"`, `"entropy"` or `"margin"`.
        confidence_threshold (`float`, *optional*):
            Commit every token at least this confident instead of an even share per step.
        suppress_eos (`str`, *optional*):
            `"sampling"` or `"early_commit"`.
        guidance_scale (`float`, *optional*, defaults to `0.0`):
            Strength of classifier-free guidance; doubles the work.
        batch_size (`int`, *optional*, defaults to `8`):
            Prompts per batch.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the rows' own generators.
        row_index (`Sequence[int]`, *optional*):
            Number that keys each row's draws under the seed. Defaults to its place in `prompts`.
        show_progress (`bool`, *optional*, defaults to `True`):
            Show a bar when it takes more than a few seconds.
        return_rollouts (`bool`, *optional*, defaults to `False`):
            Also return one [`~samplers.Rollout`] per batch, with token ids and the step and confidence of each commit.

    Returns:
        `list[str]`, or `tuple[list[str], list[Rollout]]` with `return_rollouts=True`:
            Completions without special tokens, in the order of the prompts.

    Example:

    ```python
    from transformers import AutoModelForCausalLM, AutoTokenizer
    import trl_stabledrl

    model = AutoModelForCausalLM.from_pretrained("GSAI-ML/LLaDA-8B-Instruct", dtype="bfloat16", device_map="auto")
    tokenizer = AutoTokenizer.from_pretrained("GSAI-ML/LLaDA-8B-Instruct")
    trl_stabledrl.generate(model, tokenizer, [[{"role": "user", "content": "What is 6 times 7?"}]])
    ```
    """
    _check_batch_size(batch_size)
    facts = model_facts(model, tokenizer)
    settings = sampling_settings(
        facts.family,
        max_completion_length=max_completion_length,
        block_length=block_length,
        num_denoising_steps=num_denoising_steps,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        remasking=remasking,
        confidence_threshold=confidence_threshold,
        suppress_eos=suppress_eos,
        guidance_scale=guidance_scale,
    )
    encoded = _encoded(tokenizer, prompts)
    seeds = random_bits(seed, Stream.ROLLOUT, _row_index(row_index, len(encoded))).tolist()
    texts: list[str] = []
    rollouts: list[Rollout] = []
    with dense_attention(model), token_bar("generate", is_shown=show_progress) as progress:
        for start in range(0, len(encoded), batch_size):
            batch = encoded[start : start + batch_size]
            ids, is_prompt = left_padded(batch, pad_token_id=facts.mask_token_id)
            rollout = sample(
                model,
                ids.to(model.device),
                is_prompt.to(model.device),
                mask_token_id=facts.mask_token_id,
                end_token_ids=facts.end_token_ids,
                settings=settings,
                row_seeds=seeds[start : start + batch_size],
                attention=facts.family.attention,
                progress=_shifted(progress, start * max_completion_length, len(encoded) * max_completion_length),
                record_confidence=return_rollouts,
            )
            texts.extend(tokenizer.batch_decode(rollout.completion_ids, skip_special_tokens=True))
            rollouts.append(rollout)
    return (texts, rollouts) if return_rollouts else texts


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt] | Sequence[Sequence[int]],
    completions: Sequence[str] | Sequence[Sequence[int]],
    *,
    mask_law: MaskLaw | None = None,
    mc_sampling: McSampling | None = None,
    num_mc_samples: int = 32,
    block_length: int | None = None,
    max_completion_length: int | None = None,
    tail: Tail = "mask",
    score_temperature: float = 1.0,
    add_end_token: bool = True,
    batch_size: int = 8,
    seed: int = 0,
    row_index: Sequence[int] | None = None,
) -> CompletionScores:
    """
    Estimate the evidence lower bound of completions, with its standard error.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model of a known family.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        prompts (`Sequence[str]` or `Sequence[list[dict]]` or `Sequence[list[int]]`):
            Plain or conversational prompts, or prompts as token ids.
        completions (`Sequence[str]` or `Sequence[Sequence[int]]`):
            One completion per prompt, as text or as token ids. Tokens after the first end token are not scored.
        mask_law (`str`, *optional*):
            `"uniform"`, `"semi_ar"` and `"staircase"` give bounds; `"block_suffix"` and `"full"` give proxies.
            Defaults to `"uniform"` with full attention and `"staircase"` with block attention, where no other applies.
        mc_sampling (`str`, *optional*):
            How the draws of a row relate. Defaults to `"complementary"`, or `"independent"` under `"full"`.
        num_mc_samples (`int`, *optional*, defaults to `32`):
            Draws; each is one forward pass, but those of the staircase share one. The standard error falls with its
            square root; under `"stratified"` and `"cyclic"` it is an upper estimate, since the draws' differences by
            design count as noise.
        block_length (`int`, *optional*):
            Tokens per block of the block laws. Defaults to the family's.
        max_completion_length (`int`, *optional*):
            Window behind the prompt, as during a rollout. By default the model sees nothing after the completion.
        tail (`str`, *optional*, defaults to `"mask"`):
            What stands in the rest of the window: `"mask"`, `"eos"` or `"hidden"`.
        score_temperature (`float`, *optional*, defaults to `1.0`):
            Temperature of the scored distribution.
        add_end_token (`bool`, *optional*, defaults to `True`):
            Whether to score the end token after a completion given as text.
        batch_size (`int`, *optional*, defaults to `8`):
            Rows per forward pass.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the masks.
        row_index (`Sequence[int]`, *optional*):
            Number that keys each row's masks under the seed. Defaults to its place in `prompts`.

    Returns:
        [`CompletionScores`]
    """
    _check_batch_size(batch_size)
    if tail not in get_args(Tail):
        raise ValueError(f"tail={tail!r} is not known. Use one of {', '.join(get_args(Tail))}.")
    if isinstance(completions, str):
        raise ValueError(f"completions={completions!r} must be a list, one entry for each prompt.")
    if len(prompts) != len(completions):
        raise ValueError(f"There are {len(prompts)} prompts but {len(completions)} completions. Pass one for each.")
    facts = model_facts(model, tokenizer)
    encoded = _encoded(tokenizer, prompts)
    targets = [
        _encode_completion(tokenizer, completion, facts.end_token_ids, add_end_token) for completion in completions
    ]
    longest = max(len(ids) for ids in targets)
    window_length = longest if max_completion_length is None else max_completion_length
    block_length = facts.family.resolved_block_length(block_length, max_completion_length=window_length)
    if mask_law is None:
        mask_law = facts.family.sft_mask_law
    facts.family.check_mask_law(mask_law)
    if mc_sampling is None:
        mc_sampling = "independent" if mask_law == "full" else "complementary"
    if max_completion_length is None:  # without a window a row must not see its longest neighbour's length
        if facts.family.attention == "full":
            tail = "hidden"
        else:
            window_length += block_length - 1  # every row's last block is whole
    settings = LikelihoodSettings(
        mask_token_id=facts.mask_token_id,
        mask_law=mask_law,
        mc_sampling=mc_sampling,
        num_mc_samples=num_mc_samples,
        block_length=block_length,
        window_length=window_length,
        seed=seed,
        tail=tail,
        end_token_id=facts.end_token_ids[0],
        temperature=score_temperature,
    )
    prompt_ids, is_prompt = left_padded(encoded, pad_token_id=facts.mask_token_id)
    completion_ids, is_completion = right_padded(targets, pad_token_id=facts.mask_token_id)
    index = _row_index(row_index, len(encoded))
    rows = Rows(prompt_ids, is_prompt, completion_ids, is_completion, index).to(model.device)
    by_draw = score_elbo(model, rows, settings, batch_size=batch_size)  # (B, M)
    if mc_sampling == "complementary" and num_mc_samples > 1:  # the two masks of a pair are not independent
        by_draw = by_draw.unflatten(1, (-1, 2)).mean(dim=-1)
    num_tokens = rows.completion_length
    num_units = by_draw.shape[1]
    spread = by_draw.std(dim=1) if num_units > 1 else torch.full_like(by_draw[:, 0], torch.nan)
    return CompletionScores(
        elbo=by_draw.mean(dim=1) * num_tokens,
        standard_error=spread / num_units**0.5 * num_tokens,
        num_tokens=num_tokens,
    )


def _encoded(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt] | Sequence[Sequence[int]]
) -> list[list[int]]:
    """Prompts as token ids: left alone where they are ids."""
    rows: Any = prompts
    if len(rows) > 0 and not isinstance(rows[0], str) and all(isinstance(token, int) for row in rows for token in row):
        return [list(row) for row in rows]
    return encode_prompts(tokenizer, rows)


def _encode_completion(
    tokenizer: PreTrainedTokenizerBase, completion: Any, end_token_ids: tuple[int, ...], add_end_token: bool
) -> list[int]:
    if isinstance(completion, str):
        ids = tokenizer(text=completion, add_special_tokens=False)["input_ids"]
        if add_end_token:
            ids = [*ids, tokenizer.eos_token_id if tokenizer.eos_token_id is not None else end_token_ids[0]]
    else:
        ids = list(completion)
        size = len(tokenizer)
        if not all(isinstance(token, int) and 0 <= token < size for token in ids):
            raise ValueError(
                f"completion {completion!r} is neither text nor token ids below {size}. Pass the text of a chat "
                "message, not the message."
            )
    if not ids:
        raise ValueError(f"completion {completion!r} has no tokens, so there is nothing to score. Leave it out.")
    length = next((index + 1 for index, token in enumerate(ids) if token in end_token_ids), len(ids))
    return ids[:length]


def _row_index(row_index: Sequence[int] | None, num_rows: int) -> Tensor:
    if row_index is None:
        return torch.arange(num_rows)
    if len(row_index) != num_rows:
        raise ValueError(f"row_index has {len(row_index)} entries for {num_rows} prompts. Pass one for each.")
    return torch.tensor(row_index, dtype=torch.long)


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")


def _shifted(progress: Any, offset: int, total: int) -> Any:
    return None if progress is None else lambda done, _: progress(offset + done, total)
