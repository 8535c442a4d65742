# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""[`DiffusionSFTTrainer`]: supervised masked-diffusion training, with the likelihood that StableDRL scores with."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTTrainer

from .batching import EVALUATION_ROWS, left_padded, right_padded, summed
from .checkpoints import (
    CheckpointedTrainer,
    CheckpointWriter,
    check_same_checkpoint,
    load_run_state,
)
from .checks import check_args, check_datasets, revision_of, with_flex_attention
from .core.elbo import elbo_per_token_by_draw
from .likelihood import LikelihoodSettings, Rows, plan_masks, score_draws
from .models.adapters import check_adapter, checked_peft_config, load_trainable
from .models.facts import model_facts
from .sft_config import DiffusionSFTConfig


class DiffusionSFTTrainer(CheckpointedTrainer, SFTTrainer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """
    Trainer for supervised fine-tuning of masked diffusion models: the loss is the negative Monte Carlo ELBO of the
    completion given the prompt, in nats per completion token of the whole optimizer step.

    Example:

    ```python
    from datasets import Dataset
    from trl_stabledrl import DiffusionSFTConfig, DiffusionSFTTrainer

    dataset = Dataset.from_dict({"prompt": ["2+2="], "completion": ["4"]})
    trainer = DiffusionSFTTrainer("GSAI-ML/LLaDA-8B-Base", DiffusionSFTConfig("llada-sft"), train_dataset=dataset)
    trainer.train()
    ```

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            As in [`~trl.SFTTrainer`]. A masked diffusion model of a known family, or the path of an adapter of one,
            which is then trained further.
        args ([`DiffusionSFTConfig`], *optional*):
            Configuration.
        train_dataset ([`~datasets.Dataset`]):
            Must have the columns `prompt` and `completion`, plain or conversational, or be tokenized already:
            `input_ids` and `completion_mask`, then used as it is, without an end token added.
        eval_dataset ([`~datasets.Dataset`] or `dict`, *optional*):
            As `train_dataset`.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer; loaded from the model's path when absent.
        kwargs:
            The other arguments of [`~trl.SFTTrainer`]: `callbacks`, `optimizers`, `peft_config`, ...
    """

    # the loss is divided by the tokens of the whole optimizer step, over accumulation and processes
    loss_is_scaled_for_ga = True
    _tag_names = ["trl", "diffusion-sft"]
    _name = "DiffusionSFT"

    args: DiffusionSFTConfig
    model: Any

    def __init__(
        self,
        model: "str | PreTrainedModel | Any",
        args: DiffusionSFTConfig | None = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ):
        if args is None:
            name = model if isinstance(model, str) else str(model.config.name_or_path)
            args = DiffusionSFTConfig(f"{name.split('/')[-1]}-SFT")
        check_args(args, DiffusionSFTConfig, trainer=type(self).__name__)
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError(
                "compute_loss_func is not honoured by DiffusionSFTTrainer: the loss is the negative ELBO. Leave it "
                "out."
            )
        is_tokenized = isinstance(train_dataset, Dataset) and "input_ids" in train_dataset.column_names
        columns = ("input_ids", "completion_mask") if is_tokenized else ("prompt", "completion")
        check_datasets(train_dataset, eval_dataset, columns=columns)
        check_adapter(model, needs_reference=False)
        facts = model_facts(model, processing_class, revision=revision_of(args.model_init_kwargs))
        kwargs["peft_config"] = checked_peft_config(
            kwargs.get("peft_config"), adapter=facts.adapter, family=facts.family, config=facts.config
        )
        args.resolve(facts.family)
        if facts.family.attention == "block" and isinstance(model, str) and not args.use_cpu:
            args.model_init_kwargs = with_flex_attention(args.model_init_kwargs)
        assert args.mask_law is not None  # resolved
        assert args.block_length is not None
        self.likelihood_settings = LikelihoodSettings(
            mask_token_id=facts.mask_token_id,
            mask_law=args.mask_law,
            mc_sampling=args.mc_sampling,
            num_mc_samples=args.num_mc_samples,
            block_length=args.block_length,
            window_length=args.max_completion_length,
            seed=args.seed,
            tail=args.tail,
            end_token_id=facts.end_token_ids[0],
        )
        self.num_rows = 0
        self.begun = (-1, 0)  # at the start of the optimizer step: its number, and rows until then
        self.checkpoints = CheckpointWriter()
        if facts.adapter is not None:
            quantization_config = kwargs.pop("quantization_config", None)
            model = load_trainable(
                facts.adapter, model_init_kwargs=args.model_init_kwargs, quantization_config=quantization_config
            )
            args.model_init_kwargs = None  # done: TRL would warn that it ignores them
        super().__init__(
            model,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=facts.tokenizer,
            **kwargs,
        )
        self._check_lengths()

    def _check_lengths(self) -> None:
        if not isinstance(self.train_dataset, Dataset) or "labels" not in self.train_dataset.column_names:
            return  # a stream: too long a completion is found when it is read
        longest = max(sum(label != -100 for label in labels) for labels in self.train_dataset["labels"])
        if longest > self.args.max_completion_length:
            raise ValueError(
                f"train_dataset has a completion of {longest} tokens, but max_completion_length="
                f"{self.args.max_completion_length}. Enlarge the window to {longest}, or leave such rows out."
            )

    def _rows(self, inputs: dict[str, Tensor]) -> Rows:
        """Split TRL's right-padded examples into prompt and completion, with the run-wide index of each."""
        examples = list(
            zip(inputs["input_ids"], inputs["labels"] != -100, inputs["attention_mask"].bool(), strict=True)
        )
        prompts = [ids[is_real & ~is_label].tolist() for ids, is_label, is_real in examples]
        completions = [ids[is_real & is_label].tolist() for ids, is_label, is_real in examples]
        prompt_ids, is_prompt = left_padded(prompts, pad_token_id=self.likelihood_settings.mask_token_id)
        completion_ids, is_completion = right_padded(completions, pad_token_id=self.likelihood_settings.mask_token_id)
        start = self.num_rows + self.accelerator.process_index * len(examples)
        row_index = torch.arange(start, start + len(examples))
        return Rows(prompt_ids, is_prompt, completion_ids, is_completion, row_index).to(inputs["input_ids"].device)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if return_outputs:
            raise ValueError("DiffusionSFTTrainer has no logits to return: set compute_metrics=None.")
        rows = self._rows(inputs)
        self.num_rows += len(rows) * self.accelerator.num_processes
        plan = plan_masks(rows, self.likelihood_settings)
        logps = score_draws(model, rows, plan, self.likelihood_settings).logps
        elbo_per_token = elbo_per_token_by_draw(logps, plan.weight.to(logps.dtype)).mean(dim=1)  # (B,)
        elbo = (elbo_per_token * rows.completion_length).sum()
        num_tokens = rows.completion_length.sum()
        total, count, num_inputs = summed(
            self.accelerator, [elbo.detach(), num_tokens, inputs["attention_mask"].sum()]
        )
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["elbo_per_token"].append(total / max(count, 1.0))
        if self.model.training:
            self._total_train_tokens += int(num_inputs)
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]
        if num_items_in_batch is None:
            return -elbo / num_tokens.clamp(min=1)
        # counted over every process, while DDP averages gradients over processes
        num_copies = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        return -elbo * num_copies / torch.as_tensor(num_items_in_batch, device=elbo.device).clamp(min=1)

    def training_step(self, *args, **kwargs):
        if self.begun[0] != self.state.global_step:
            self.begun = (self.state.global_step, self.num_rows)
        return super().training_step(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        num_rows, self.num_rows = self.num_rows, EVALUATION_ROWS  # the same masks in every evaluation
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.num_rows = num_rows

    def _save_checkpoint(self, model, trial):
        step, num_rows = self.begun
        if step != self.state.global_step:  # else a callback saves inside a step, which is then begun anew
            num_rows = self.num_rows
        with self.checkpoints.staged(self, Path(self._get_output_dir(trial))) as staged:
            super()._save_checkpoint(model, trial)
        state = {
            "num_rows": num_rows,
            "num_train_tokens": self._total_train_tokens,
            "metrics": self._metrics["train"],
        }
        self.checkpoints.finish(self, staged, state)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        check_same_checkpoint(self.accelerator, self.state.global_step)
        state = load_run_state(Path(checkpoint))
        self.num_rows, self._total_train_tokens = state["num_rows"], state["num_train_tokens"]
        self.begun = (-1, 0)
        self._metrics["train"].clear()
        self._metrics["train"].update(state["metrics"])
