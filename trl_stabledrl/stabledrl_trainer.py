# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
[`StableDRLTrainer`]: TRL's `GRPOTrainer` with Monte Carlo ELBO proxies for next-token log-probabilities and the
StableDRL objective for its loss. Formulas are in `core/`; this file reads the configuration, moves tensors and logs.
"""

import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, is_peft_model
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOTrainer

from . import _compat
from .batching import EVALUATION_ROWS, Batch, EpochSampler, gathered, in_row_order
from .checkpoints import (
    ROLLOUTS_FILE,
    CheckpointedTrainer,
    CheckpointWriter,
    check_same_checkpoint,
    check_settings,
    load_rollouts,
    load_run_state,
    save_rollouts,
)
from .checks import (
    check_args,
    check_datasets,
    check_num_prompts,
    check_reference_path,
    check_vllm_rollouts,
    revision_of,
    with_flex_attention,
)
from .core import objective
from .core.elbo import sandwich
from .core.noise import Stream, random_bits
from .core.peers import OBJECTIVES, token_weights
from .core.peers import Rows as WeighedRows
from .engines import RolloutEngine, TransformersEngine
from .guard import StabilityGuard
from .likelihood import Rows, RowScores, plan_masks, score_elbo, score_rows, score_tokens
from .models.adapters import check_adapter, checked_peft_config, load_trainable, match_reference
from .models.bidirectional import dense_attention, disable_attention_dropout
from .models.facts import model_facts
from .progress import token_bar
from .run_metrics import (
    OptimizerTimer,
    PhaseClock,
    count_groups_without_signal,
    rollout_metrics,
    score_metrics,
)
from .stabledrl_config import StableDRLConfig

logger = get_logger(__name__)

PREPARATION = ("rollout", "reward", "old_likelihood", "reference_likelihood", "weights")
"""Phases that run inside a training step before its forward and backward passes."""

WEIGHED = (
    *("iteration", "is_on_policy", "is_excluded", "weight", "elbo", "log_ratio", "token_log_ratio"),
    *("summed_elbo", "entropy", "num_scored"),
)
"""What is written into the micro-batches of an optimizer step, and made anew for the next."""

PENDING_SETTINGS = (
    "generation_batch_size",
    "num_generations",
    "num_iterations",
    "seed",
    "objective",
    "mask_law",
    "mc_sampling",
    "num_mc_samples",
    "block_length",
    "max_completion_length",
    "tail",
    "context_attention",
    "score_temperature",
    "mask_coupling",
    "mask_sharing",
    "beta",
    "scale_rewards",
)
"""Options that rollouts and their scores were made under: a checkpoint with some pending needs them unchanged."""


class StableDRLTrainer(CheckpointedTrainer, GRPOTrainer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """
    Trainer for StableDRL, reinforcement learning for masked diffusion language models. The method is described in
    [Stabilizing Reinforcement Learning for Diffusion Language Models](https://huggingface.co/papers/2603.06743).

    Example:

    ```python
    from datasets import load_dataset
    from trl_stabledrl import StableDRLConfig, StableDRLTrainer
    from trl_stabledrl.rewards import gsm8k_reward

    trainer = StableDRLTrainer(
        model="GSAI-ML/LLaDA-8B-Instruct",
        reward_funcs=gsm8k_reward,
        args=StableDRLConfig(output_dir="llada-gsm8k"),
        train_dataset=load_dataset("json", data_files="prompts.jsonl", split="train"),  # columns `prompt`, `answer`
    )
    trainer.train()
    ```

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            As in [`~trl.GRPOTrainer`]. A masked diffusion model of a known family, or the path of an adapter of one,
            which is then trained further.
        reward_funcs (`RewardFunc | list[RewardFunc]`, *optional*):
            As in [`~trl.GRPOTrainer`].
        args ([`StableDRLConfig`], *optional*):
            Configuration. Defaults to one with `output_dir` named after the model.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Must have a column `prompt`, plain or conversational; other columns go to the reward functions.
        eval_dataset ([`~datasets.Dataset`] or `dict`, *optional*):
            As `train_dataset`.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer; loaded from the model's path when absent.
        reward_processing_classes (*optional*):
            As in [`~trl.GRPOTrainer`].
        callbacks (`list[TrainerCallback]`, *optional*):
            As in [`~trl.GRPOTrainer`].
        optimizers (`tuple`, *optional*):
            As in [`~trl.GRPOTrainer`].
        quantization_config (*optional*):
            As in [`~trl.GRPOTrainer`].
        peft_config ([`~peft.PeftConfig`], *optional*):
            As in [`~trl.GRPOTrainer`]. A LoRA adapter that names no modules gets those of the family.
    """

    _tag_names = ["trl", "stabledrl"]
    _name = "StableDRL"
    _paper = {
        "title": "Stabilizing Reinforcement Learning for Diffusion Language Models",
        "id": "2603.06743",
        "citation": textwrap.dedent("""\
            @article{stabledrl2026,
                title        = {{Stabilizing Reinforcement Learning for Diffusion Language Models}},
                year         = 2026,
                eprint       = {arXiv:2603.06743},
            }"""),
    }

    args: StableDRLConfig
    model: Any
    _buffered_inputs: Any

    def __init__(
        self,
        model: "str | PreTrainedModel | Any",
        reward_funcs: Any = None,
        args: StableDRLConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | DatasetDict | IterableDatasetDict | dict[str, Any] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ):
        if args is None:
            name = model if isinstance(model, str) else str(model.config.name_or_path)
            args = StableDRLConfig(f"{name.split('/')[-1]}-StableDRL")
        # everything that can be wrong is looked at before any weight is loaded
        check_args(args, StableDRLConfig, trainer=type(self).__name__)
        check_datasets(train_dataset, eval_dataset, columns=("prompt",))
        check_num_prompts(train_dataset, args)
        if not reward_funcs:
            raise ValueError("reward_funcs is empty: pass at least one reward function, as a callable or a model id.")
        if args.beta != 0.0 and not isinstance(model, str) and peft_config is None and not is_peft_model(model):
            check_reference_path(model)
        check_adapter(model, needs_reference=args.beta != 0.0)
        facts = model_facts(model, processing_class, revision=revision_of(args.model_init_kwargs))
        peft_config = checked_peft_config(peft_config, adapter=facts.adapter, family=facts.family, config=facts.config)
        args.resolve(facts.family)
        self.family = facts.family
        if args.rollout_backend == "vllm":
            check_vllm_rollouts(
                model,
                facts.config,
                has_adapter=peft_config is not None or facts.adapter is not None,
                args=args,
                is_quantized=quantization_config is not None,
            )
        if self.family.attention == "block" and isinstance(model, str) and not args.use_cpu:
            args.model_init_kwargs = with_flex_attention(args.model_init_kwargs)
        self.end_token_ids = facts.end_token_ids
        self.likelihood_settings = args.likelihood_settings(
            mask_token_id=facts.mask_token_id, end_token_id=facts.end_token_ids[0]
        )
        self.sampling_settings = args.sampling_settings()
        self.policy_objective = OBJECTIVES[args.objective]
        self.log_clip_low, self.log_clip_high = args.log_clip_bounds()
        # counters that name the rows of the run; saved in every checkpoint
        self.num_rollouts = 0
        self.num_eval_rows = 0
        # at the start of the optimizer step: its number, micro-steps and rollouts until then
        self.begun = (-1, 0, 0)
        self.checkpoints = CheckpointWriter()
        self.clock = PhaseClock()
        if facts.adapter is not None:
            model = load_trainable(
                facts.adapter, model_init_kwargs=args.model_init_kwargs, quantization_config=quantization_config
            )
            args.model_init_kwargs = quantization_config = None  # done: TRL would warn that it ignores them
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=facts.tokenizer,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        disable_attention_dropout(self.model)
        match_reference(self.model)
        self.num_trainings = 0  # calls of `train`, each of which may begin with other weights
        self.rollout_engine: RolloutEngine = TransformersEngine(
            self._sampling_model,
            attention=self.family.attention,
            mask_token_id=facts.mask_token_id,
            end_token_ids=self.end_token_ids,
            settings=self.sampling_settings,
            device=self.accelerator.device,
            any_rank=self._any_rank if self.accelerator.num_processes > 1 else None,
        )
        if args.rollout_backend == "vllm":
            # imported here: it imports vLLM, where that is installed, which takes ten seconds
            from .engines.vllm import vllm_engine

            self.rollout_engine = vllm_engine(
                self.model, self.accelerator, facts.tokenizer, reference=self.rollout_engine, args=args
            )
        self.eos_token_ids = list(self.end_token_ids)  # TRL's metrics of truncation read them
        self.add_callback(OptimizerTimer(self.clock))
        if args.stability_guard != "off":
            self.add_callback(StabilityGuard(stop=args.stability_guard == "stop"))

    # Rows: which they are, and what belongs to them

    def _get_train_sampler(self, dataset=None):
        return EpochSampler(super()._get_train_sampler(dataset), epoch=lambda: self.epoch_number)

    @property
    def _group_size(self) -> int:
        size = self.num_generations if self.model.training else self.num_generations_eval
        assert size is not None  # GRPOTrainer.__init__ sets both
        return size

    @property
    def _micro_steps(self) -> tuple[int, int]:
        """Micro-steps per generation and per optimizer step: `s` and `a`."""
        assert self.args.steps_per_generation is not None  # GRPOConfig.__post_init__ sets it
        return self.args.steps_per_generation, self.args.gradient_accumulation_steps

    def _row_index(self, num_rows: int) -> Tensor:
        """Run-wide index of this process's unshuffled rows, a pure function of the trainer's counters."""
        if self.model.training:
            assert self.args.generation_batch_size is not None  # GRPOConfig.__post_init__ sets it
            start = self.num_rollouts * self.args.generation_batch_size
        else:
            # groups are counted in rows, so the first row has to begin one
            start = EVALUATION_ROWS * self._group_size + self.num_eval_rows
        start += self.accelerator.process_index * num_rows
        return torch.arange(start, start + num_rows, device=self.accelerator.device)

    def _rows(self, batch: Batch) -> Rows:
        group_index = batch["row_index"] // self._group_size
        window = self.likelihood_settings.window_length  # pad_to_multiple_of may have padded beyond it
        return Rows(
            prompt_ids=batch["prompt_ids"],
            prompt_mask=batch["prompt_mask"].bool(),
            completion_ids=batch["completion_ids"][:, :window],
            completion_mask=batch["completion_mask"][:, :window].bool(),
            noise_key=group_index if self.args.mask_sharing == "group" else batch["row_index"],
        )

    # Rollouts, and the scores that must be taken before the first update

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        start = time.perf_counter()
        row_seeds = random_bits(self.args.seed, Stream.ROLLOUT, self._row_index(len(prompt_ids))).tolist()
        shows_bar = self.accelerator.is_main_process and not self.args.disable_tqdm
        with self._measured("rollout"), token_bar("rollout", is_shown=shows_bar) as progress:
            rollout = self.rollout_engine.generate(
                prompt_ids,
                row_seeds=row_seeds,
                # outside of training anyone may change the weights
                policy_version=(self.num_trainings, self.state.global_step) if self.is_in_train else None,
                progress=progress,
            )
        self._log_values(
            rollout_metrics(
                self.accelerator,
                rollout,
                prompt_ids,
                end_token_ids=self.end_token_ids,
                seconds=time.perf_counter() - start,
            )
        )
        return rollout.completion_ids, None

    @contextmanager
    def _sampling_model(self) -> Iterator[Any]:
        with (
            _compat.unwrapped_for_generation(self.model_wrapped, self.accelerator, self.args) as model,
            dense_attention(model),
        ):
            yield model

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        """Score the unshuffled rows of a fresh generation under the masks of every inner iteration: `(B, mu)`."""
        is_reference = self._is_reference(model)
        # evaluation is on policy; independent old scores have their own masks
        needs_old = self.policy_objective.uses_ratio and self.model.training and self.args.mask_coupling == "shared"
        if not is_reference and not needs_old:
            return None, None, None
        batch = {
            "prompt_ids": input_ids[:, :-logits_to_keep],
            "prompt_mask": attention_mask[:, :-logits_to_keep],
            "completion_ids": input_ids[:, -logits_to_keep:],
            "completion_mask": attention_mask[:, -logits_to_keep:],
            "row_index": self._row_index(len(input_ids)),
        }
        iterations: list[int | None] = [*range(self.num_iterations if self.model.training else 1)]
        s, a = self._micro_steps
        if not is_reference and s <= a:
            # under shared masks the first optimizer step after a rollout has ratio 1: no one reads its old scores
            iterations[0] = None
        with self._measured("reference_likelihood" if is_reference else "old_likelihood"):
            return self._score_iterations(model, batch, iterations, batch_size), None, None

    def _is_reference(self, model) -> bool:
        return model is self.ref_model or _compat.is_reference_active(model)

    @property
    def _by_token(self) -> bool:
        return self.policy_objective.level == "token"

    def _values(self, model, rows: Rows, **options: Any) -> tuple[Tensor, Tensor | None]:
        """`elbo_per_token` of each row, and the log-probabilities of its tokens where those have ratios."""
        if self._by_token:
            by_draw, tokens = score_tokens(model, rows, self.likelihood_settings, **options)
            return by_draw.mean(1), tokens
        return score_elbo(model, rows, self.likelihood_settings, **options).mean(1), None

    def _score_iterations(self, model, batch: Batch, iterations: list[Any], batch_size: int | None) -> Tensor:
        """
        `elbo_per_token` of each row under the masks of each iteration, NaN where that is None: `(B, mu)`; or the
        log-probability of each of its tokens: `(B, mu, W)`.
        """
        rows = self._rows(batch)
        by_token = self._by_token and not self._is_reference(model)
        window = (self.likelihood_settings.window_length,) if by_token else ()
        scores = torch.full((len(rows), len(iterations), *window), torch.nan, device=rows.prompt_ids.device)
        for column, iteration in enumerate(iterations):
            if iteration is not None:
                elbo, tokens = self._values(model, rows, iteration=iteration, batch_size=batch_size or 0)
                values = tokens if by_token else elbo
                assert values is not None
                scores[:, column] = values
        return scores

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        batch["row_index"] = self._row_index(len(inputs))
        everyone = gathered(self.accelerator, batch["advantages"])
        groups = gathered(self.accelerator, batch["row_index"]) // self._group_size
        local = slice(self.accelerator.process_index * len(inputs), (self.accelerator.process_index + 1) * len(inputs))
        everyone = objective.without_rounding(everyone, groups)
        if self.policy_objective.advantage is not None:
            everyone = self.policy_objective.advantage(everyone, groups)
        batch["advantages"] = everyone[local]
        if not self.model.training:
            self.num_eval_rows += len(inputs) * self.accelerator.num_processes
            return batch
        if self.args.mask_coupling == "independent":
            # negative iterations: masks that no update uses
            iterations = [-1 - iteration for iteration in range(self.num_iterations)]
            with self._measured("old_likelihood"):
                batch["old_per_token_logps"] = self._score_iterations(
                    self.model, batch, iterations, self.args.per_device_train_batch_size
                )
        self.num_rollouts += 1
        return batch

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        with self._measured("reward"):
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    # Weights: over whole groups, before the micro-steps of an optimizer step

    def _prepare_inputs(self, generation_batch):
        is_training = self.model.training
        s, a = self._micro_steps
        is_fresh = is_training and (self._step % (s * self.num_iterations) == 0 or self._buffered_inputs is None)
        batch = super()._prepare_inputs(generation_batch)
        if not is_training:
            no_row = torch.zeros_like(batch["row_index"], dtype=torch.bool)
            return {**batch, "iteration": 0, "is_on_policy": True, "is_excluded": no_row}
        if is_fresh:
            assert self._buffered_inputs is not None  # filled by super()._prepare_inputs
            self._buffered_inputs = in_row_order(self.accelerator, self._buffered_inputs)
            advantages, row_index = self._concatenated(self._buffered_inputs, "advantages", "row_index")
            num_silent = count_groups_without_signal(self.accelerator, advantages, row_index // self._group_size)
            self._log_values({"zero_std_groups": num_silent})
        position, iteration = self._step % s, self._step // s % self.num_iterations
        if position % min(a, s) == 0:
            is_on_policy = self.args.mask_coupling == "shared" and iteration == 0 and position < a
            is_on_policy = is_on_policy or not self.policy_objective.uses_ratio
            with self._measured("weights"):
                self._weigh(self._window(position), is_on_policy=is_on_policy, iteration=iteration)
        return self._window(position)[position % min(a, s)]

    def _window(self, position: int) -> list[Batch]:
        """Micro-batches of the optimizer step around `position` that belong to the current generation."""
        assert self._buffered_inputs is not None  # filled by super()._prepare_inputs
        size = min(self._micro_steps)  # with a > s the later ones do not exist yet
        return self._buffered_inputs[position - position % size :][:size]

    @staticmethod
    def _concatenated(window: list[Batch], *names: str) -> list[Tensor]:
        return [torch.cat([batch[name] for batch in window]) for name in names]

    def _weigh(self, window: list[Batch], *, is_on_policy: bool, iteration: int, is_forced: bool = False) -> None:
        """
        Write each row's weight into the micro-batches of an optimizer step.

        No pass is paid where none is needed: on policy every ratio is 1, and where each micro-step holds whole groups
        over all processes its gradient pass supplies the ratios, and `_compute_loss` the weights. Both are decided
        from the configuration, hence alike on every process. `is_forced` pays for the pass all the same.
        """
        num_rows = len(window[0]["row_index"]) * self.accelerator.num_processes
        holds_whole_groups = num_rows % self._group_size == 0
        needs_pass = not is_on_policy or self.beta != 0.0  # the KL is linearised around the row's score
        for batch in window:
            batch["iteration"], batch["is_on_policy"] = iteration, is_on_policy
            batch["is_excluded"] = torch.zeros_like(batch["row_index"], dtype=torch.bool)
            for name in ("weight", "elbo", "log_ratio", "token_log_ratio"):
                batch.pop(name, None)
        if needs_pass and holds_whole_groups and not is_forced:
            return
        for batch in window:
            elbo, tokens = torch.zeros_like(batch["advantages"]), None
            if needs_pass or is_forced:
                elbo, tokens = self._values(self.model, self._rows(batch), iteration=iteration)
                batch["is_excluded"] = ~elbo.isfinite()
            self._set_log_ratio(batch, elbo, tokens)
        self._set_weights(window)

    def _set_log_ratio(self, batch: Batch, elbo: Tensor, tokens: Tensor | None) -> None:
        """Write each row's score and log-ratio; the latter is NaN where it has none, and a mean where tokens have."""
        length = batch["completion_mask"].sum(-1)
        log_ratio = torch.zeros_like(elbo)  # on policy the ratio is one, and not one up to rounding
        if self._by_token:
            by_token = elbo.new_zeros(len(elbo), self.likelihood_settings.window_length)
            if not batch["is_on_policy"]:
                assert tokens is not None  # scored, since not on policy
                by_token = tokens - batch["old_per_token_logps"][:, batch["iteration"]]
            batch["token_log_ratio"] = by_token
            log_ratio = by_token.sum(-1) / length.clamp(min=1)
        elif not batch["is_on_policy"]:
            old = batch["old_per_token_logps"][:, batch["iteration"]]
            log_ratio = objective.log_ratio(elbo, old, length, normalization=self.args.ratio_normalization)
        is_scorable = elbo.isfinite() & (length > 0) & ~batch["is_excluded"]
        batch["elbo"] = elbo
        batch["log_ratio"] = log_ratio.masked_fill(~is_scorable, torch.nan)

    def _set_weights(self, window: list[Batch]) -> None:
        """Write the weights of the micro-batches' rows, over whole groups from every process."""
        clip = (self.log_clip_low, self.log_clip_high)
        if self._by_token:  # no row's weights depend on another's
            position = torch.arange(self.likelihood_settings.window_length, device=self.accelerator.device)
            for batch in window:
                is_scored = (position < batch["completion_mask"].sum(-1, keepdim=True)) & (
                    batch["log_ratio"].isfinite()[:, None]
                )
                batch["weight"] = token_weights(
                    batch["token_log_ratio"], batch["advantages"], is_scored, clip=clip, group_size=self._group_size
                )
            return
        length = torch.cat([batch["completion_mask"].sum(-1) for batch in window])
        local = [*self._concatenated(window, "log_ratio", "advantages", "row_index"), length]
        log_ratio, advantage, row_index, length = (gathered(self.accelerator, rows) for rows in local)
        weights = self.policy_objective.weights(
            WeighedRows(log_ratio, advantage, row_index // self._group_size, length, self._group_size), clip
        )
        num_rows = len(local[0])
        start = self.accelerator.process_index * num_rows
        parts = weights[start : start + num_rows].split([len(batch["row_index"]) for batch in window])
        for batch, weight in zip(window, parts, strict=True):
            batch["weight"] = weight

    def _check_and_log_step(self, batch: Batch) -> None:
        """
        Log ratios, weights and scores with the last micro-step of an optimizer step, over all its rows from every
        process, so that neither the metrics nor what stops a run depends on the micro-batching.
        """
        window = [batch]
        if self.model.training:
            position = self._step % self._micro_steps[0]
            window = self._window(position)
            if (position + 1) % len(window):
                return
        local_ratio, weight, advantage, row_index = self._concatenated(
            window, "log_ratio", "weight", "advantages", "row_index"
        )
        if self._by_token:
            weight = weight.sum(-1)
        log_ratio, weight, advantage, row_index = (
            gathered(self.accelerator, rows) for rows in (local_ratio, weight, advantage, row_index)
        )
        has_tokens = torch.cat([part["completion_mask"].sum(-1) > 0 for part in window])
        scored = row_index[gathered(self.accelerator, has_tokens)].tolist()
        if scored and not log_ratio.isfinite().any():
            raise RuntimeError(
                f"Step {self.state.global_step}: all {len(scored)} scored rows of the optimizer step have a "
                f"non-finite likelihood (rows {sorted(scored)}). The model has diverged: resume from an earlier "
                "checkpoint with a smaller learning_rate."
            )
        group_index = row_index // self._group_size
        metrics = objective.weight_metrics(
            log_ratio,
            objective.as_shares(weight, group_index),
            group_index,
            log_clip_low=self.log_clip_low,
            log_clip_high=self.log_clip_high,
        )
        metrics |= objective.update_shares(weight, advantage)
        self._log_values({name: value.item() for name, value in metrics.items()})
        (elbo,) = self._concatenated(window, "summed_elbo")
        entropy, num_scored = (
            torch.stack([part[name] for part in window]).sum() for name in ("entropy", "num_scored")
        )
        self._log_values(score_metrics(self.accelerator, elbo, local_ratio.isfinite(), entropy, num_scored))

    # The loss: linear in the scores, so that one row's activations of one draw are all that need be alive

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.begun[0] != self.state.global_step:
            self.begun = (self.state.global_step, self._step, self.num_rollouts)
        with self.clock.measure("forward_backward", inner=PREPARATION):
            return super().training_step(model, inputs, num_items_in_batch)

    def _compute_loss(self, model, inputs):
        batch = inputs
        rows = self._rows(batch).without(batch["is_excluded"], filler=self.likelihood_settings.mask_token_id)
        units = self._units(has_weights="weight" in batch)
        losses: list[Tensor] = []
        scores: list[RowScores] = []
        for index, draws in enumerate(units):
            is_last = index == len(units) - 1
            with nullcontext() if is_last else self._without_gradient_sync(model):
                score = self._score(model, batch, rows, draws)
                is_lost = ~score.elbo.isfinite() & (rows.completion_length > 0)
                is_any_lost = self._any_rank(bool(is_lost.any()))
                if not is_any_lost:
                    if "weight" not in batch:
                        tokens = None if score.tokens is None else score.tokens.detach()
                        self._set_log_ratio(batch, score.elbo.detach(), tokens)
                        self._set_weights([batch])
                    loss = self._loss(batch, score, batch["weight"])
                    if not is_last:
                        self._backward(loss)
                        loss = loss.detach()
                    losses.append(loss)
                    scores.append(score)
            if is_any_lost:  # outside the context: the passes that follow synchronise their gradients again
                self._exclude(model, batch, is_lost, done=units[:index])
                return self._compute_loss(model, batch)
        elbo = torch.stack([score.elbo.detach() for score in scores]).sum(0)
        batch["summed_elbo"] = elbo * rows.completion_length  # nats
        batch["entropy"] = torch.stack([score.entropy for score in scores]).sum()
        batch["num_scored"] = torch.stack([score.num_scored for score in scores]).sum()
        self._check_and_log_step(batch)
        return torch.stack(losses).sum() + self._kl_offset(batch)

    def _units(self, *, has_weights: bool) -> list[list[int]]:
        """Draws that share one graph: each alone, unless weights, surrogate or law need all of them at once."""
        draws = list(range(self.likelihood_settings.num_mc_samples))
        is_separable = (
            has_weights
            and self.args.surrogate == "elbo"
            and self.model.training
            and not self.likelihood_settings.is_staircase  # its draws share the pass over the clean text
        )
        return [[draw] for draw in draws] if is_separable else [draws]

    def _score(self, model, batch: Batch, rows: Rows, draws: list[int]) -> RowScores:
        plan = plan_masks(rows, self.likelihood_settings, iteration=batch["iteration"])
        eubo_beta = self.args.eubo_beta if self.args.surrogate == "sandwich" else None
        return score_rows(
            model, rows, plan, draws, self.likelihood_settings, eubo_beta=eubo_beta, by_token=self._by_token
        )

    def _loss(self, batch: Batch, score: RowScores, weight: Tensor) -> Tensor:
        advantage = batch["advantages"].to(score.elbo.dtype)
        surrogate = score.elbo if score.eubo is None else sandwich(score.elbo, score.eubo, advantage)
        if score.tokens is not None:  # the row's weight is in its sum
            surrogate = (weight.to(score.tokens.dtype) * score.tokens).sum(-1)
            weight = torch.ones_like(surrogate)
        num_rows = self._num_rows_in_update(batch)
        loss = objective.policy_loss(
            surrogate, weight.to(score.elbo.dtype), advantage, num_prompts=num_rows / self._group_size
        )
        if self.beta != 0.0:
            _, slope = self._kl(batch)
            loss = loss + self.beta * (slope * score.elbo).sum() / num_rows
        return loss

    def _kl(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """KL of each row and its derivative by the row's score; zero where the row has no score."""
        difference = batch["ref_per_token_logps"][:, batch["iteration"]] - batch["elbo"]
        difference = torch.where(batch["log_ratio"].isfinite(), difference, 0.0)
        assert self.args.kl_estimator is not None  # the objective's default
        return objective.kl_estimate(difference, estimator=self.args.kl_estimator)

    def _kl_offset(self, batch: Batch) -> Tensor | float:
        """What the linearised KL lacks for the loss to show its value; a constant."""
        if self.beta == 0.0:
            return 0.0
        kl, slope = self._kl(batch)
        self._log_values({"kl": gathered(self.accelerator, kl).mean().item()})
        score = torch.where(batch["log_ratio"].isfinite(), batch["elbo"], 0.0)
        return self.beta * (kl - slope * score).sum() / self._num_rows_in_update(batch)

    def _num_rows_in_update(self, batch: Batch) -> int:
        """Rows of this process in the whole optimizer step; the mean over processes makes it the global number."""
        num_micro_batches = self.current_gradient_accumulation_steps if self.model.training else 1
        return len(batch["row_index"]) * num_micro_batches

    def _exclude(self, model, batch: Batch, is_lost: Tensor, *, done: list[list[int]]) -> None:
        """
        Leave out rows whose score turned out not to be finite, and weigh the others anew.

        Where weights were taken for granted (on policy, no pass of their own), part of the optimizer step has been
        propagated with them. The loss being linear in the scores, passing the same rows again with the difference of
        the weights puts that right.
        """
        if "weight" not in batch or not self.model.training:
            batch["is_excluded"] = batch["is_excluded"] | is_lost
            return
        position = self._step % self._micro_steps[0]
        window = self._window(position)
        num_earlier = position % len(window)
        weights = [part["weight"] for part in window]
        self._weigh(window, is_on_policy=batch["is_on_policy"], iteration=batch["iteration"], is_forced=True)
        batch["is_excluded"] = batch["is_excluded"] | is_lost
        every_unit = self._units(has_weights=True)
        corrections = [
            (part, part["weight"] - weight, every_unit) for part, weight in zip(window, weights, strict=True)
        ]
        for part, weight, units in [*corrections[:num_earlier], (batch, -weights[num_earlier], done)]:
            for draws in units:
                with self._without_gradient_sync(model):
                    # these passes were finite, whoever is excluded now
                    self._backward(self._loss(part, self._score(model, part, self._rows(part), draws), weight))

    @contextmanager
    def _without_gradient_sync(self, model) -> Iterator[None]:
        """
        Forward and backward that only accumulate. Under ZeRO-3 a plain second backward in one micro-step is silently
        wrong: accelerate steps the engine in every backward while gradients are to be synchronised.
        """
        state, is_synced = self.accelerator.gradient_state, self.accelerator.sync_gradients
        state._set_sync_gradients(False)
        try:
            with self.accelerator.no_sync(model):
                yield
        finally:
            state._set_sync_gradients(is_synced)

    def _backward(self, loss: Tensor) -> None:
        kwargs = {"scale_wrt_gas": False} if self.accelerator.distributed_type == DistributedType.DEEPSPEED else {}
        self.accelerator.backward(loss, **kwargs)

    def _any_rank(self, flag: bool) -> bool:
        if self.accelerator.num_processes == 1:
            return flag
        return bool(gathered(self.accelerator, torch.tensor([flag], device=self.accelerator.device)).any())

    # Logs and checkpoints

    def _measured(self, phase: str, *, inner: tuple[str, ...] = ()) -> Any:
        return self.clock.measure(phase, inner=inner) if self.model.training else nullcontext()

    def _log_values(self, values: dict[str, float]) -> None:
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in values.items():
            metrics[name].append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training:
            self._log_values(self.clock.flush(self.state.global_step))
        super().log(logs, start_time)

    def evaluation_loop(self, *args, **kwargs):
        num_rows = self.args.per_device_eval_batch_size * self.accelerator.num_processes
        if num_rows % (self.num_generations_eval or 1):
            raise ValueError(
                f"per_device_eval_batch_size * processes = {self.args.per_device_eval_batch_size} * "
                f"{self.accelerator.num_processes} = {num_rows} rows per evaluation step, not a multiple of "
                f"num_generations_eval={self.num_generations_eval}: a group would be split. Set "
                f"per_device_eval_batch_size={self.num_generations_eval} or a multiple of it."
            )
        self.num_eval_rows = 0  # the same noise in every evaluation, so that two of them can be compared
        return super().evaluation_loop(*args, **kwargs)

    @property
    def _rows_per_micro_step(self) -> int:
        return self.args.per_device_train_batch_size * self.accelerator.num_processes

    def _settings(self) -> dict[str, Any]:
        num_rows = self._rows_per_micro_step * self.args.gradient_accumulation_steps
        rows = {"per_device_train_batch_size * gradient_accumulation_steps * processes": num_rows}
        return {name: vars(self.args)[name] for name in PENDING_SETTINGS} | rows

    def _save_checkpoint(self, model, trial):
        step, micro_steps, num_rollouts = self.begun
        if step != self.state.global_step:  # else a callback saves inside a step, which is then begun anew
            micro_steps, num_rollouts = self._step, self.num_rollouts
        num_pending = micro_steps % (self._micro_steps[0] * self.num_iterations)
        with self.checkpoints.staged(self, Path(self._get_output_dir(trial))) as staged:
            super()._save_checkpoint(model, trial)
            if num_pending:
                path = staged / ROLLOUTS_FILE if self.args.should_save else None
                save_rollouts(self.accelerator, self._buffered_inputs, without=WEIGHED, path=path)
        state = {
            "num_rollouts": num_rollouts,
            "num_rows_done": num_pending * self._rows_per_micro_step,  # of the last rollout, over inner iterations
            "settings": self._settings(),
            "metrics": self._metrics["train"],
        }
        self.checkpoints.finish(self, staged, state)

    def _load_optimizer_and_scheduler(self, checkpoint):
        self.num_trainings += 1
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        check_same_checkpoint(self.accelerator, self.state.global_step)
        folder = Path(checkpoint)
        state = load_run_state(folder)
        saved, current = state["settings"], self._settings()
        num_rows_done, size = state["num_rows_done"], current["generation_batch_size"]
        s, a = self._micro_steps
        self.num_rollouts, self._buffered_inputs = state["num_rollouts"], None
        if num_rows_done:
            check_settings(folder, saved, current, save_steps=self.num_iterations * s // a)
            self._buffered_inputs = load_rollouts(folder / ROLLOUTS_FILE, num_slices=s, accelerator=self.accelerator)
        elif size != saved["generation_batch_size"]:
            # row numbers, and with them noise, must not come again
            self.num_rollouts = -(-self.num_rollouts * saved["generation_batch_size"] // size)
        num_whole = self.num_rollouts - bool(num_rows_done)
        num_rows = num_whole * self.num_iterations * size + num_rows_done
        self._step = num_rows // self._rows_per_micro_step
        self.begun = (-1, 0, 0)
        self._metrics["train"].clear()
        self._metrics["train"].update(state["metrics"])
        self.clock.last_step = self.state.global_step
