# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts by vLLM in the processes that train, on the same devices. The plugin it decodes with: `vllm_plugin/`."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from io import StringIO
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from ..checks import check_vllm, revision_of
from ..samplers import Rollout, SamplingSettings, validate_trajectory
from ..samplers.common import broken_rows_error
from ..vllm_plugin import register
from ..vllm_plugin.requests import request_options
from .agreement import first_disagreement
from .transformers import TransformersEngine

logger = get_logger(__name__)

NUM_CHECKED_PROMPTS = 4
NUM_CHECKED_BLOCKS = 3


class VLLMEngine(VLLMGeneration):
    """
    vLLM beside the trained model, given its weights before each rollout.

    Completions come from [`vllm_plugin`]: the same law as the transformers engine's, and at temperature 0 the same
    tokens. A row's noise is a hash of its seed: other rows, chunks of the prompt, preemption and tensor parallelism
    do not change it. Prompts shorter than a block, which vLLM cannot hold, are decoded by the transformers engine.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The model that is trained. Its `name_or_path` is where vLLM reads the configuration from.
        accelerator ([`~accelerate.Accelerator`]):
            Of the trainer.
        processing_class ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer.
        reference ([`TransformersEngine`]):
            Decodes what vLLM cannot, and is compared with once.
        self_check (`bool`):
            Whether to compare greedy tokens of both engines before the first rollout.
        engine_kwargs (`dict[str, Any]`, *optional*):
            Further arguments of `vllm.LLM`.
        options:
            Those of [`~trl.generation.vllm_generation.VLLMGeneration`] in colocate mode.
    """

    def __init__(
        self,
        model: Any,
        accelerator: Accelerator,
        processing_class: PreTrainedTokenizerBase,
        *,
        reference: TransformersEngine,
        self_check: bool,
        engine_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.reference = reference
        self.settings = reference.settings
        self.needs_check = self_check
        self.engine_kwargs = engine_kwargs or {}
        self.failure: str | None = None
        self._version: object = None
        super().__init__(
            model,
            accelerator,
            processing_class,
            mode="colocate",
            model_impl="vllm",
            max_completion_length=self.settings.max_completion_length,
            **options,
        )

    @property
    def block_length(self) -> int:
        """Tokens per block."""
        return self.settings.block_length

    def _init_vllm(self) -> None:
        check_vllm()
        register()
        llm_class = vllm_generation.LLM  # pyright: ignore[reportAttributeAccessIssue]

        def make(**arguments: Any) -> Any:
            # whole blocks in each chunk of a prompt
            arguments["max_num_batched_tokens"] -= arguments["max_num_batched_tokens"] % self.block_length
            # token ids go in and come out
            return llm_class(**arguments | {"dtype": self._dtype(), "skip_tokenizer_init": True} | self.engine_kwargs)

        # TRL has no argument for further options of the engine
        with patch.object(vllm_generation, "LLM", make):
            super()._init_vllm()
        self.max_model_length = self.llm.llm_engine.vllm_config.model_config.max_model_len

    def _dtype(self) -> torch.dtype:
        """What the trained model computes in. vLLM's "auto" would turn float32 into half precision."""
        dtype = next(self.model.parameters()).dtype
        if dtype == torch.float32:  # else autocast leaves it as it is
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision, dtype)
        return dtype

    # Weights

    def _iter_named_params(self) -> Iterator[tuple[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """
        Name and value of each parameter, one at a time. Where the engine fails on one of them, the rest is gathered
        all the same: the other processes wait for it.
        """
        parameters = self._whole_params()
        try:
            for pair in parameters:  # noqa: UP028  # `yield from` would close them
                yield pair
        except GeneratorExit:
            for _ in parameters:
                pass
            raise

    def _whole_params(self) -> Iterator[tuple[str, Any]]:
        """
        TRL's, but for LoRA: one layer is merged at a time, and its base weight put back as it was. Subtracting the
        adapter again, as PEFT does, would leave rounding errors in the weights that are trained.
        """
        model: Any = self.model
        if not is_peft_model(model):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # sampling leaves the last of FSDP2's groups whole: no backward pass follows
            yield from super()._iter_named_params()
            return
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers: dict[str, Any] = {
            name: part for name, part in model.named_modules() if isinstance(part, BaseTunerLayer)
        }
        merged: set[str] = set()
        for layer_name, layer in layers.items():
            with self._dist.gather_params(list(layer.parameters())):
                base = layer.get_base_layer()
                kept = {name: parameter.data.clone() for name, parameter in base.named_parameters()}
                layer.merge()
                for name in kept:
                    merged.add(f"{layer_name}.base_layer.{name}")
                    yield _published_name(f"{layer_name}.{name}"), base.get_parameter(name).data
                layer.unmerge()
                for name, value in kept.items():
                    base.get_parameter(name).data.copy_(value)
        for name, parameter in model.named_parameters():
            # of a module that is trained whole, the copy that is in use
            is_other_copy = "modules_to_save." in name and f"modules_to_save.{model.active_adapter}." not in name
            if name in merged or model.prefix in name or "original_module." in name or is_other_copy:
                continue
            with self._dist.gather_params([parameter]):
                yield _published_name(name), parameter.data

    def _sync(self, policy_version: object) -> None:
        is_asleep = self.enable_sleep_mode and self._llm_weights_sleeping
        if policy_version is None or policy_version != self._version or is_asleep:
            self._version = None  # half-written weights have no version
            self.sync_weights()
            self._version = policy_version

    # Rollouts

    def generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        prompt_ids: Sequence[Sequence[int]],
        *,
        row_seeds: Sequence[int],
        policy_version: object = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Rollout:
        """
        Decode one completion per prompt with the current weights; see [`RolloutEngine`].

        Raises:
            `ValueError`: Where a prompt and its completion do not fit into the context, before any is decoded, and
                where the model's logits are not finite.
            `RuntimeError`: Where vLLM fails, and where it does not decode as the transformers engine does.
        """
        self._together(lambda: self._check_lengths(prompt_ids))
        self._together(lambda: self._sync(policy_version))
        if self.needs_check:
            self._self_check(prompt_ids)
            self.needs_check = False
        is_short = [len(ids) < self.block_length for ids in prompt_ids]
        parts: list[tuple[list[int], Rollout]] = []
        rows = [row for row, short in enumerate(is_short) if not short]
        longs = [prompt_ids[row] for row in rows]
        seeds = [row_seeds[row] for row in rows]
        parts.append((rows, self._together(lambda: self._decode(longs, seeds, self.settings, progress))))
        if self._any_rank(any(is_short)):
            rows = [row for row, short in enumerate(is_short) if short]
            shorts, seeds = [prompt_ids[row] for row in rows], [row_seeds[row] for row in rows]
            rollout = self._together(lambda: self.reference.generate(shorts, row_seeds=seeds))
            parts.append((rows, rollout))
        return _joined(parts, len(prompt_ids), settings=self.settings)

    def _check_lengths(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        if self.failure is not None:
            raise RuntimeError(f"The vLLM engine failed in an earlier rollout: {self.failure}. Start the run anew.")
        longest = max(range(len(prompt_ids)), key=lambda row: len(prompt_ids[row]))
        length = len(prompt_ids[longest])
        needed = length + self.settings.max_completion_length
        assert self.max_model_length is not None  # the engine has one
        if needed > self.max_model_length:
            raise ValueError(
                f"Prompt {longest} has {length} tokens; with max_completion_length="
                f"{self.settings.max_completion_length} that is {needed}, more than the {self.max_model_length} that "
                f"the engine holds. Set vllm_max_model_length={needed} or more, as far as the model's positions "
                "reach, shorten max_completion_length, or drop long prompts."
            )

    def _decode(
        self,
        prompt_ids: Sequence[Sequence[int]],
        row_seeds: Sequence[int],
        settings: SamplingSettings,
        progress: Callable[[int, int], None] | None = None,
    ) -> Rollout:
        """Run vLLM. With tensor parallelism the processes of a group decode the rows of all of them."""
        rows = [(list(ids), seed) for ids, seed in zip(prompt_ids, row_seeds, strict=True)]
        first, everyones = 0, rows
        if self.tensor_parallel_size > 1:
            parts: list[Any] = [None] * self.tensor_parallel_size
            group: Any = self.tp_group
            torch.distributed.all_gather_object(parts, rows, group=group)
            first = sum(len(part) for part in parts[: torch.distributed.get_rank(group=group)])
            everyones = [row for part in parts for row in part]
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])
        state = self.llm.llm_engine.model_executor.driver_worker.model_runner.model_state
        state.reset_counts()
        outputs = self._run(everyones, settings, progress)
        counts = {name: int(value) for name, value in state.counts.items()}
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
            self._llm_weights_sleeping = True
        return self._rollout(prompt_ids, outputs[first : first + len(rows)], settings, counts)

    def _run(
        self,
        rows: Sequence[tuple[list[int], int]],
        settings: SamplingSettings,
        progress: Callable[[int, int], None] | None,
    ) -> list[Any]:
        from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]  # not installed beside us

        if not rows:
            return []
        params = [
            SamplingParams(
                max_tokens=settings.max_completion_length,
                top_k=settings.top_k,
                top_p=settings.top_p,
                stop_token_ids=list(self.reference.end_token_ids),
                ignore_eos=True,  # it is one of the stop tokens
                logprobs=0,
                detokenize=False,
                extra_args=request_options(settings, seed),
            )
            for _, seed in rows
        ]
        bar = False if progress is None else _bar_of(progress, settings.max_completion_length)
        try:
            return self.llm.generate([{"prompt_token_ids": ids} for ids, _ in rows], params, use_tqdm=bar)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise RuntimeError(
                f"The vLLM engine failed during a rollout ({self.failure}). Checkpoints are complete: resume from the "
                "last one. If it happens again, try vllm_engine_kwargs={'enforce_eager': true}, or "
                "rollout_backend='transformers'."
            ) from error

    def _rollout(
        self,
        prompt_ids: Sequence[Sequence[int]],
        outputs: Sequence[Any],
        settings: SamplingSettings,
        counts: dict[str, Any],
    ) -> Rollout:
        mask_token_id, window = self.reference.mask_token_id, settings.max_completion_length
        window_ids = torch.full((len(outputs), window), mask_token_id)
        commit_step = torch.full((len(outputs), window), -1)
        confidence = torch.full((len(outputs), window), math.nan)
        completions: list[list[int]] = []
        broken: list[int] = []
        for row, output in enumerate(outputs):
            (result,) = output.outputs
            ids = list(result.token_ids)
            if result.finish_reason not in ("stop", "length") or not ids:
                raise RuntimeError(
                    f"vLLM did not complete prompt {row} ({len(prompt_ids[row])} tokens): finish_reason="
                    f"{result.finish_reason!r}, {result.stop_reason or 'no reason given'}."
                )
            # one entry per token: its own, with the step at which it was decided for a rank
            entries = [next(iter(entry.values())) for entry in result.logprobs]
            values = torch.tensor([entry.logprob for entry in entries])
            if values.isnan().any():
                broken.append(row)
            window_ids[row, : len(ids)] = torch.tensor(ids)
            commit_step[row, : len(ids)] = torch.tensor([entry.rank - 1 for entry in entries])
            confidence[row, : len(ids)] = values if settings.remasking == "entropy" else values.exp()
            completions.append(ids)
        if broken:
            raise broken_rows_error(broken)
        rollout = Rollout(
            completion_ids=completions,
            window_ids=window_ids,
            commit_step=commit_step,
            block_offset=torch.tensor([len(ids) % self.block_length for ids in prompt_ids], dtype=torch.long),
            num_tokens=sum(map(len, completions)),
            settings=settings,
            confidence=confidence,
            **counts,
        )
        validate_trajectory(
            rollout,
            block_length=self.block_length,
            mask_token_id=mask_token_id,
            end_token_ids=self.reference.end_token_ids,
            is_cut=True,
        )
        return rollout

    # Checks

    def _self_check(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Decode a few prompts greedily with both engines, and stop at the first difference."""
        longs = dict.fromkeys(tuple(ids) for ids in prompt_ids if len(ids) >= self.block_length)
        prompts = [list(ids) for ids in longs][:NUM_CHECKED_PROMPTS]
        settings = replace(
            self.settings,
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            remasking="low_confidence" if self.settings.remasking == "random" else self.settings.remasking,
            max_completion_length=min(self.settings.max_completion_length, NUM_CHECKED_BLOCKS * self.block_length),
        )
        seeds = [0] * len(prompts)
        expected = self._together(
            lambda: self.reference.generate(prompts, row_seeds=seeds, settings=settings, record_confidence=True)
        )

        def compare() -> None:
            found = self._decode(prompts, seeds, settings)
            engine_dtype = self.llm.llm_engine.vllm_config.model_config.dtype
            is_exact = {engine_dtype, next(self.model.parameters()).dtype} == {torch.float32}
            difference = first_disagreement(expected, found, tolerance=1e-3 if is_exact else 0.15)
            if difference is not None:
                raise RuntimeError(
                    f"vLLM does not decode as transformers does: {difference}. Rollouts would not be the policy's, so "
                    "nothing was trained. Try vllm_engine_kwargs={'enforce_eager': true} or another attention_backend "
                    "there; rollout_backend='transformers' needs no vLLM; rollout_self_check=false trains all the "
                    "same."
                )

        self._together(compare)
        self._sync(None)  # sleeping has discarded the weights; and nothing of the check stays in the cache
        logger.info(f"vLLM decodes {len(prompts)} prompts as transformers does.")

    def _any_rank(self, flag: bool) -> bool:
        return flag if self.reference.any_rank is None else self.reference.any_rank(flag)

    def _together(self, work: Callable[[], Any]) -> Any:
        """Do something on every process; where it fails on one, raise on all, so that none waits for it."""
        failure: Exception | None = None
        result = None
        try:
            result = work()
        except Exception as error:
            failure = error
        has_failed = self._any_rank(failure is not None)
        if failure is not None:
            raise failure
        if has_failed:
            raise RuntimeError("The rollout failed on another process, whose message says why.")
        return result


def vllm_engine(
    model: Any,
    accelerator: Accelerator,
    processing_class: PreTrainedTokenizerBase,
    *,
    reference: TransformersEngine,
    args: Any,
) -> VLLMEngine:
    """
    Make the engine that a configuration asks for.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The model that is trained.
        accelerator ([`~accelerate.Accelerator`]):
            Of the trainer.
        processing_class ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer.
        reference ([`TransformersEngine`]):
            Decodes what vLLM cannot.
        args ([`StableDRLConfig`]):
            Resolved configuration.
    """
    revision = revision_of(args.model_init_kwargs)
    return VLLMEngine(
        model,
        accelerator,
        processing_class,
        reference=reference,
        self_check=args.rollout_self_check,
        engine_kwargs=({} if revision is None else {"revision": revision}) | args.engine_kwargs(),
        tensor_parallel_size=args.vllm_tensor_parallel_size,
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        max_model_length=args.vllm_max_model_length,
        # as in TRL: a generation at once
        max_num_seqs=args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
        enable_sleep_mode=args.vllm_enable_sleep_mode,
    )


def _published_name(name: str) -> str:
    name = re.sub(r"modules_to_save\.[^.]+\.", "", name)
    for part in ("base_model.model.", ".base_layer", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name


def _joined(parts: Sequence[tuple[list[int], Rollout]], num_rows: int, *, settings: SamplingSettings) -> Rollout:
    """One rollout of several, each of which decoded the rows it is named with."""
    if len(parts) == 1:
        return parts[0][1]
    rollouts = [rollout for _, rollout in parts]
    order = torch.tensor([row for rows, _ in parts for row in rows]).argsort()
    completions: list[list[int]] = [[] for _ in range(num_rows)]
    for rows, rollout in parts:
        for row, ids in zip(rows, rollout.completion_ids, strict=True):
            completions[row] = ids
    tensors = {
        name: torch.cat([getattr(rollout, name).cpu() for rollout in rollouts])[order]
        for name in ("window_ids", "commit_step", "block_offset")
    }
    counts: dict[str, Any] = {
        name: sum(getattr(rollout, name) for rollout in rollouts)
        for name in (
            *("num_forwards", "num_backbone_positions", "num_vocab_positions"),
            *("num_tokens", "num_decoded", "num_row_steps"),
        )
    }
    return Rollout(completion_ids=completions, settings=settings, **tensors, **counts)


def _bar_of(progress: Callable[[int, int], None], num_positions: int) -> Callable[..., Any]:
    """What vLLM takes for a class of progress bars: it counts finished requests, we count positions."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"file": StringIO()})  # not shown

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self.iterable is None:  # else it is the one over the prompts that are handed in
                progress(int(self.n) * num_positions, int(self.total or 0) * num_positions)
            return shown

    return Bar
