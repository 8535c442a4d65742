# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Configuration of [`DiffusionSFTTrainer`]."""

from dataclasses import dataclass, field, fields

from trl import SFTConfig

from .checks import check_choice, default_bf16
from .core.masking import MaskLaw, McSampling, check_draws
from .likelihood import Tail, check_context
from .models.families import Family

# Inherited options that masked-diffusion training cannot honour, with the reason
REFUSED_OPTIONS = {
    "router_aux_loss_coef": "no supported family is a mixture of experts",
    "packing": "with full attention, packed examples would see each other",
    "padding_free": "with full attention, flattened examples would see each other",
    "eval_packing": "with full attention, packed examples would see each other",
    "assistant_only_loss": "the loss is the ELBO of one completion; give the last turn as `completion`",
    "loss_type": "the loss is the negative ELBO",
    "label_smoothing_factor": "the loss is the negative ELBO",
}


@dataclass
class DiffusionSFTConfig(SFTConfig):
    r"""
    Configuration class for the [`DiffusionSFTTrainer`].

    This class includes only the parameters that are specific to masked-diffusion training; for the others see
    [`~trl.SFTConfig`] and [`~transformers.TrainingArguments`]. Inherited options that a diffusion model cannot honour
    raise when they are set.

    Args:
        mask_law (`str`, *optional*):
            Which tokens of the completion a draw masks. Defaults to the law the family was trained under: `"uniform"`
            for LLaDA, `"staircase"` for SDAR.
        mc_sampling (`str`, *optional*, defaults to `"independent"`):
            How the draws of a row relate.
        num_mc_samples (`int`, *optional*, defaults to `1`):
            Draws per row and step.
        block_length (`int`, *optional*):
            Tokens per block of the block laws. Defaults to the family's.
        max_completion_length (`int`, *optional*, defaults to `256`):
            Window behind the prompt, as in later rollouts. A longer completion is an error.
        tail (`str`, *optional*, defaults to `"mask"`):
            What stands in the window after the completion: `"mask"`, `"eos"` or `"hidden"`.
    """

    mask_law: MaskLaw | None = field(
        default=None,
        metadata={"help": "Which tokens of the completion a draw masks. Defaults to the family's training law."},
    )
    mc_sampling: McSampling = field(
        default="independent",
        metadata={"help": "How the draws of a row relate."},
    )
    num_mc_samples: int = field(default=1, metadata={"help": "Draws per row and step."})
    block_length: int | None = field(
        default=None, metadata={"help": "Tokens per block of the block laws. Defaults to the family's."}
    )
    max_completion_length: int = field(
        default=256, metadata={"help": "Window behind the prompt, as in later rollouts."}
    )
    tail: Tail = field(
        default="mask",
        metadata={"help": "What stands in the window after the completion."},
    )

    # Inherited with another default: tokenized datasets name no completion otherwise
    completion_only_loss: bool | None = field(default=True, metadata={"help": "Always true."})

    def __post_init__(self):
        self.bf16 = default_bf16(self.bf16, use_cpu=self.use_cpu)
        if not self.completion_only_loss:
            raise ValueError(
                f"completion_only_loss={self.completion_only_loss!r} is not supported: the loss is the ELBO of the "
                "completion given the prompt. Allowed: True."
            )
        defaults = {f.name: f.default for f in fields(SFTConfig)}
        for name, reason in REFUSED_OPTIONS.items():
            value = self.__dict__[name]
            if value != defaults[name]:
                raise ValueError(
                    f"{name}={value!r} is not honoured by DiffusionSFTTrainer: {reason}. Allowed: {defaults[name]!r}."
                )
        check_choice("mask_law", self.mask_law, MaskLaw)
        check_choice("mc_sampling", self.mc_sampling, McSampling)
        check_choice("tail", self.tail, Tail)
        if self.mask_law is not None:  # `resolve` checks the rest
            check_draws(self.mask_law, self.mc_sampling, self.num_mc_samples)
        if self.max_completion_length < 1:
            raise ValueError(f"max_completion_length={self.max_completion_length} must be at least 1.")
        super().__post_init__()

    def resolve(self, family: Family) -> None:
        """Fill in what was left to the family, and check it."""
        if self.mask_law is None:
            self.mask_law = family.sft_mask_law
        family.check_mask_law(self.mask_law)
        check_draws(self.mask_law, self.mc_sampling, self.num_mc_samples)
        check_context(self.mask_law, tail=self.tail)
        self.block_length = family.resolved_block_length(
            self.block_length, max_completion_length=self.max_completion_length
        )
        if self.block_length < 1 or (family.attention == "full" and self.block_length > self.max_completion_length):
            raise ValueError(
                f"block_length={self.block_length} must lie between 1 and max_completion_length="
                f"{self.max_completion_length}."
            )
