# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Configuration of [`StableDRLTrainer`]."""

import json
import math
import os
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from trl import GRPOConfig

from .checks import check_choice, check_engine_kwargs, default_bf16
from .core.attention import ContextAttention
from .core.masking import MaskLaw, McSampling, check_draws
from .core.objective import ClipMode, KlEstimator, RatioNormalization, log_clip_bounds
from .core.peers import OBJECTIVES, Objective, ObjectiveName
from .core.unmasking import Remasking
from .likelihood import LikelihoodSettings, Tail, check_context
from .models.families import Family
from .samplers import SamplingSettings, SuppressEos, check_decoding

MaskCoupling = Literal["shared", "independent"]
MaskSharing = Literal["none", "group"]
GuardMode = Literal["off", "warn", "stop"]
RolloutBackend = Literal["transformers", "vllm"]
Surrogate = Literal["elbo", "sandwich"]

# Inherited options that this trainer cannot honour, each with what to do instead. Set to anything but GRPOConfig's
# default, they raise; `tests/test_stabledrl_config.py` checks that every field of GRPOConfig is here or honoured.
_NEXT_TOKEN = "it acts on next-token log-probabilities, which a diffusion model does not have"
_AR_DECODING = "it belongs to autoregressive decoding; see remasking, confidence_threshold, top_k and top_p"
_NO_SERVER = "vLLM runs in the trainer's processes (vllm_mode='colocate'); see docs/vllm.md. Leave it unset"
_NO_IMPORTANCE = "it compares next-token log-probabilities of two engines. Leave it unset"
_ORDER = "the prompts of a run are drawn by TRL's own sampler, from seed and shuffle_dataset. Leave it unset"
_ENTROPY = "the entropy of a diffusion model is only known at masked positions. Leave it unset"
REFUSED_OPTIONS = {
    "router_aux_loss_coef": "no supported family is a mixture of experts",
    "cast_lm_head_to_fp32": "the head is projected in chunks whose statistics are float32 already",
    "min_p": _AR_DECODING,
    "generation_kwargs": _AR_DECODING,
    "repetition_penalty": _AR_DECODING,
    "cache_implementation": _AR_DECODING,
    "use_transformers_continuous_batching": _AR_DECODING,
    "transformers_continuous_batching_config": _AR_DECODING,
    "use_transformers_paged": _AR_DECODING,
    "vllm_mode": _NO_SERVER,
    "vllm_model_impl": "SDAR on vLLM is this package's plugin",
    "vllm_structured_outputs_regex": "blocks are not decoded from left to right, which a grammar needs",
    "vllm_server_base_url": _NO_SERVER,
    "vllm_server_host": _NO_SERVER,
    "vllm_server_port": _NO_SERVER,
    "vllm_server_timeout": _NO_SERVER,
    "vllm_group_port": _NO_SERVER,
    "vllm_importance_sampling_mode": _NO_IMPORTANCE,
    "vllm_importance_sampling_clip_max": _NO_IMPORTANCE,
    "vllm_importance_sampling_clip_min": _NO_IMPORTANCE,
    "vllm_importance_sampling_cap": _NO_IMPORTANCE,
    "delta": "the clip is unconditional and two-sided already; use epsilon, or clip_mode='upper' with ratio_cap",
    "epsilon_high": "the clip range is [1 - epsilon, 1 + epsilon]; for a cap alone use clip_mode='upper'",
    "sapo_temperature_neg": _NEXT_TOKEN,
    "sapo_temperature_pos": _NEXT_TOKEN,
    "vespo_k_pos": _NEXT_TOKEN,
    "vespo_lambda_pos": _NEXT_TOKEN,
    "vespo_k_neg": _NEXT_TOKEN,
    "vespo_lambda_neg": _NEXT_TOKEN,
    "importance_sampling_level": "ratios are of whole completions; use ratio_normalization='token' or 'sequence'",
    "top_entropy_quantile": _ENTROPY,
    "entropy_coef": _ENTROPY,
    "use_adaptive_entropy": _ENTROPY,
    "entropy_coef_min": _ENTROPY,
    "entropy_coef_max": _ENTROPY,
    "entropy_coef_delta": _ENTROPY,
    "entropy_target": _ENTROPY,
    "max_tool_calling_iterations": "tools are not supported: a completion is one window of tokens",
    "off_policy_mask_threshold": _NEXT_TOKEN,
    "use_bias_correction_kl": _NEXT_TOKEN,
    "label_smoothing_factor": "the loss is StableDRL's, which has no labels",
    "neftune_noise_alpha": "noise in the embeddings would come between old and new scores",
    "data_seed": _ORDER,
    "train_sampling_strategy": _ORDER,
}
# Options whose default differs from GRPOConfig's and has no other legal value here
FORCED_OPTIONS = {
    "loss_type": ("stabledrl", "the loss is StableDRL's; TRL's next-token losses do not apply"),
    "disable_dropout": (True, "old and new scores must differ by the update alone, not by dropout masks"),
    "vllm_importance_sampling_correction": (False, "it subtracts next-token log-probabilities from ELBO proxies"),
}


# Options of vLLM that are honoured with rollout_backend="vllm" alone
VLLM_OPTIONS = (
    "vllm_enable_sleep_mode",
    "vllm_gpu_memory_utilization",
    "vllm_max_model_length",
    "vllm_tensor_parallel_size",
    "vllm_engine_kwargs",
    "rollout_self_check",
)


def _nearest(value: int, is_valid: Any) -> str:
    """Name the closest valid value below and above `value`."""
    below = next((str(v) for v in range(value - 1, 0, -1) if is_valid(v)), None)
    above = next((str(v) for v in range(value + 1, 8 * value + 64) if is_valid(v)), None)
    return " or ".join(v for v in (below, above) if v is not None) or "none"


@dataclass
class StableDRLConfig(GRPOConfig):
    r"""
    Configuration class for the [`StableDRLTrainer`].

    This class includes only the parameters that are specific to StableDRL training; for the others see
    [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`]. Inherited options that a diffusion model cannot honour
    raise when they are set.

    Args:
        objective (`str`, *optional*, defaults to `"stabledrl"`):
            What weighs the completions of a prompt: `"stabledrl"`; its ablations `"clip_only"` and
            `"self_norm_only"`; or a peer's, for comparison: `"grpo"`, `"espo"`, `"spg"`, `"diffu_grpo"`,
            `"coupled_grpo"`, `"wd1"` or `"gdpo"`. Formulas: `docs/method.md`.
        mask_law (`str`, *optional*):
            Which tokens a Monte Carlo draw masks: `"uniform"`, `"block_suffix"`, `"semi_ar"` or `"full"` with full
            attention, `"staircase"` with block attention (method.md, section 2). Defaults to the family's:
            `"block_suffix"` for LLaDA, `"staircase"` for SDAR.
        mc_sampling (`str`, *optional*):
            How the draws of a row relate: `"independent"`, `"stratified"`, `"complementary"` or, for the staircase,
            `"cyclic"`. Defaults to the family's: `"complementary"` for LLaDA, which cuts the variance of the log-ratio
            by 42-44 % (measured), and `"cyclic"` for SDAR.
        num_mc_samples (`int`, *optional*):
            Number of Monte Carlo draws per row and pass. Defaults to the family's: 2 for LLaDA, 4 for SDAR.
        mask_coupling (`str`, *optional*, defaults to `"shared"`):
            `"shared"`: new, old and reference policy are scored under the same masks. `"independent"`: old scores have
            their own masks, as in the released code.
        mask_sharing (`str`, *optional*, defaults to `"none"`):
            `"group"`: the completions of a prompt mask the same positions, so that noise they have in common leaves
            the self-normalised weights.
        surrogate (`str`, *optional*, defaults to `"elbo"`):
            Differentiable score: `"elbo"`, or `"sandwich"` (mean of lower and upper bound for negative advantages).
        eubo_beta (`float`, *optional*, defaults to `1.5`):
            Order of the evidence upper bound under `surrogate="sandwich"`, at least 1.
        clip_mode (`str`, *optional*, defaults to `"both"`):
            `"both"`: ratios are kept in `[1 - epsilon, 1 + epsilon]`. `"upper"`: they are capped at `ratio_cap` only.
        ratio_cap (`float`, *optional*, defaults to `5.0`):
            Largest ratio under `clip_mode="upper"` (the released code's value).
        epsilon (`float`, *optional*):
            Half-width of the clip range around 1. Defaults to 5 where the clip is unconditional (the paper finds 1 and
            5 stable and 5 better) and to 0.2 where it depends on the advantage's sign, as in the peers' papers.
        ratio_normalization (`str`, *optional*, defaults to `"token"`):
            The log-ratio is a difference of scores per token (`"token"`) or of summed scores (`"sequence"`).
        kl_estimator (`str`, *optional*):
            `"k2"` or `"k3"`, used when `beta > 0`. Defaults to `"k3"`, under `objective="espo"` to `"k2"`.
        score_temperature (`float`, *optional*, defaults to `1.0`):
            Temperature of the scored distribution, for new, old and reference policy alike. Independent of the
            rollouts' `temperature`.
        tail (`str`, *optional*, defaults to `"mask"`):
            What the model sees in the window after the first end token when a completion is scored: `"mask"`,
            `"eos"` or `"hidden"`.
        context_attention (`str`, *optional*, defaults to `"block_causal"`):
            How the clean tokens of the staircase see each other: `"block_causal"`, as SDAR was trained and as it
            decodes, or `"causal"`, as the paper words it.
        detach_context (`bool`, *optional*, defaults to `False`):
            Stop gradients at the keys and values of the staircase's clean tokens.
        block_length (`int`, *optional*):
            Tokens per block of the decoder. Defaults to the family's: 32 for LLaDA, the model's own for SDAR, where no
            other is allowed.
        num_denoising_steps (`int`, *optional*):
            Denoising steps per block. Defaults to the family's share: one per 2 tokens for LLaDA, one per token for
            SDAR.
        remasking (`str`, *optional*, defaults to `"low_confidence"`):
            Which predictions a step commits first: `"low_confidence"`, `"random"`, `"entropy"` or `"margin"`.
        confidence_threshold (`float`, *optional*):
            Commit every token at least this confident (and at least one) instead of an even share per step.
        suppress_eos (`str`, *optional*):
            `"sampling"`: end tokens are never sampled. `"early_commit"`: they are committed last within their block.
        guidance_scale (`float`, *optional*, defaults to `0.0`):
            Strength of classifier-free guidance in rollouts. The score stays the unguided model's own.
        rollout_backend (`str`, *optional*, defaults to `"transformers"`):
            What decodes the rollouts: `"transformers"`, the trained model itself, or `"vllm"` in the same process,
            for SDAR. `use_vllm=True` says the same. See `docs/vllm.md`.
        rollout_self_check (`bool`, *optional*, defaults to `True`):
            Whether to decode a few prompts greedily with both before the first rollout by vLLM, and to stop where
            they differ by more than rounding.
        vllm_engine_kwargs (`dict`, *optional*):
            Further arguments of `vllm.LLM`, such as `{"enforce_eager": true}`; JSON on the command line.
        stability_guard (`str`, *optional*, defaults to `"warn"`):
            What is done when the logged metrics show the run starting to fail: `"warn"`, once for each likely cause;
            `"stop"`: also save and end the run where the cause is a fatal one; or `"off"`. See
            [`~guard.StabilityGuard`].
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + ["vllm_engine_kwargs"]

    objective: ObjectiveName = field(
        default="stabledrl",
        metadata={"help": "What weighs the completions of a prompt: StableDRL, an ablation of it, or a peer's way."},
    )
    mask_law: MaskLaw | None = field(
        default=None,
        metadata={"help": "Which tokens a Monte Carlo draw masks. Defaults to the family's."},
    )
    mc_sampling: McSampling | None = field(
        default=None,
        metadata={"help": "How the draws of a row relate. Defaults to the family's."},
    )
    num_mc_samples: int | None = field(
        default=None, metadata={"help": "Monte Carlo draws per row and pass. Defaults to the family's."}
    )
    mask_coupling: MaskCoupling = field(
        default="shared",
        metadata={"help": "Whether new and old policy are scored under the same masks."},
    )
    mask_sharing: MaskSharing = field(
        default="none",
        metadata={"help": "Whether the completions of a prompt mask the same positions."},
    )
    surrogate: Surrogate = field(default="elbo", metadata={"help": "Differentiable score."})
    eubo_beta: float = field(
        default=1.5, metadata={"help": "Order of the evidence upper bound under surrogate='sandwich', at least 1."}
    )
    clip_mode: ClipMode = field(
        default="both",
        metadata={"help": "Keep ratios in [1 - epsilon, 1 + epsilon], or cap them at ratio_cap only."},
    )
    ratio_cap: float = field(default=5.0, metadata={"help": "Largest ratio under clip_mode='upper'."})
    epsilon: float | None = field(
        default=None, metadata={"help": "Half-width of the clip range around 1. Defaults to the objective's."}
    )
    ratio_normalization: RatioNormalization = field(
        default="token",
        metadata={"help": "Whether the log-ratio is a difference of scores per token or of summed scores."},
    )
    kl_estimator: KlEstimator | None = field(
        default=None, metadata={"help": "Estimator of the KL when beta > 0. Defaults to the objective's."}
    )
    score_temperature: float = field(default=1.0, metadata={"help": "Temperature of the scored distribution."})
    tail: Tail = field(
        default="mask",
        metadata={"help": "What the model sees in the window after the first end token."},
    )
    context_attention: ContextAttention = field(
        default="block_causal", metadata={"help": "How the clean tokens of the staircase see each other."}
    )
    detach_context: bool = field(
        default=False, metadata={"help": "Stop gradients at the clean tokens of the staircase."}
    )
    block_length: int | None = field(
        default=None, metadata={"help": "Tokens per block of the decoder. Defaults to the family's."}
    )
    num_denoising_steps: int | None = field(
        default=None, metadata={"help": "Denoising steps per block. Defaults to the family's."}
    )
    remasking: Remasking = field(
        default="low_confidence",
        metadata={"help": "Which predictions a step commits first."},
    )
    confidence_threshold: float | None = field(
        default=None,
        metadata={"help": "Commit every token at least this confident instead of an even share per step."},
    )
    suppress_eos: SuppressEos | None = field(
        default=None,
        metadata={"help": "Never sample end tokens, or commit them last in their block."},
    )
    guidance_scale: float = field(default=0.0, metadata={"help": "Strength of classifier-free guidance in rollouts."})
    rollout_backend: RolloutBackend = field(
        default="transformers", metadata={"help": "What decodes the rollouts: the trained model itself, or vLLM."}
    )
    rollout_self_check: bool = field(
        default=True,
        metadata={"help": "Whether to compare vLLM with transformers on a few prompts before the first rollout."},
    )
    vllm_engine_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further arguments of vllm.LLM; JSON on the command line."}
    )
    stability_guard: GuardMode = field(
        default="warn",
        metadata={
            "help": "Whether to warn, or also to save and stop, when the metrics show the run starting to fail."
        },
    )

    # Inherited fields with other defaults
    loss_type: str = field(default="stabledrl", metadata={"help": "Always 'stabledrl'."})
    scale_rewards: str = field(
        default="none",
        metadata={
            "help": "'none': advantages are rewards minus the group's mean. 'group' or 'batch': also divided by the "
            "standard deviation of the group or of the batch."
        },
    )
    disable_dropout: bool = field(default=True, metadata={"help": "Always true: see the docstring of GRPOConfig."})
    vllm_importance_sampling_correction: bool = field(default=False, metadata={"help": "Always false."})

    def __post_init__(self):
        self.bf16 = default_bf16(self.bf16, use_cpu=self.use_cpu)
        if self.use_vllm:  # to TRL it would mean next-token sampling, and its importance weights
            self.rollout_backend, self.use_vllm = "vllm", False
        self._check_inherited()
        self._check_own()
        self._check_group_size()
        super().__post_init__()
        self._check_steps()

    def _check_inherited(self) -> None:
        defaults = {f.name: f.default for f in fields(GRPOConfig)}
        for name, reason in REFUSED_OPTIONS.items():
            value = self.__dict__[name]
            if value != defaults[name]:
                raise ValueError(
                    f"{name}={value!r} is not honoured by StableDRLTrainer: {reason}. Allowed: {defaults[name]!r}."
                )
        for name, (allowed, reason) in FORCED_OPTIONS.items():
            value = self.__dict__[name]
            if value != allowed:
                raise ValueError(f"{name}={value!r} is not supported: {reason}. Allowed: {allowed!r}.")
        if isinstance(self.scale_rewards, str):  # a flag or a quoted YAML value; GRPOConfig itself maps booleans only
            lowered = self.scale_rewards.lower()
            self.scale_rewards = {"true": "group", "false": "none"}.get(lowered, lowered)
            if self.scale_rewards not in ("none", "group", "batch"):
                raise ValueError(
                    f"scale_rewards={self.scale_rewards!r} is not known. Use 'none' (or false), 'group' (or true) or "
                    "'batch'."
                )

    def _check_own(self) -> None:
        check_choice("objective", self.objective, ObjectiveName)
        self._check_objective(OBJECTIVES[self.objective])
        for name, choices in {
            "mask_law": MaskLaw,
            "mc_sampling": McSampling,
            "mask_coupling": MaskCoupling,
            "mask_sharing": MaskSharing,
            "surrogate": Surrogate,
            "clip_mode": ClipMode,
            "ratio_normalization": RatioNormalization,
            "kl_estimator": KlEstimator,
            "tail": Tail,
            "context_attention": ContextAttention,
            "remasking": Remasking,
            "suppress_eos": SuppressEos,
            "rollout_backend": RolloutBackend,
            "stability_guard": GuardMode,
        }.items():
            check_choice(name, self.__dict__[name], choices)
        self._check_rollout_backend()
        self.log_clip_bounds()
        if self.clip_mode == "both" and self.ratio_cap != 5.0:
            raise ValueError(
                f"ratio_cap={self.ratio_cap} has no effect with clip_mode='both'. Set clip_mode='upper', or use "
                "epsilon."
            )
        if self.eubo_beta < 1.0:
            raise ValueError(f"eubo_beta={self.eubo_beta} must be at least 1; the released code uses 1.5.")
        if not self.score_temperature > 0.0:
            raise ValueError(f"score_temperature={self.score_temperature} must be above 0; 1.0 is the model's own.")
        if self.beta < 0.0:
            raise ValueError(f"beta={self.beta} must be 0 (no KL) or above.")
        if self.max_completion_length is None or self.max_completion_length < 1:
            raise ValueError(
                f"max_completion_length={self.max_completion_length} must be at least 1: it is the window of mask "
                "tokens that a completion is decoded in."
            )
        if self.num_iterations < 1:
            raise ValueError(f"num_iterations={self.num_iterations} must be at least 1.")
        if self.num_mc_samples is not None and self.num_mc_samples < 1:
            raise ValueError(f"num_mc_samples={self.num_mc_samples} must be at least 1.")
        # everything the family does not decide can be checked now; `resolve` checks the rest
        if self.mask_law is not None and self.mc_sampling is not None and self.num_mc_samples is not None:
            check_draws(self.mask_law, self.mc_sampling, self.num_mc_samples)
        if self.block_length is not None:
            self.sampling_settings(num_denoising_steps=self.num_denoising_steps or 1)
        if self.num_denoising_steps is not None and self.num_denoising_steps < 1:
            raise ValueError(f"num_denoising_steps={self.num_denoising_steps} must be at least 1 per block.")

    def _check_rollout_backend(self) -> None:
        if self.rollout_backend == "transformers":
            defaults = {f.name: f.default for f in fields(self)}
            for name in VLLM_OPTIONS:
                if self.__dict__[name] != defaults[name]:
                    raise ValueError(
                        f"{name}={self.__dict__[name]!r} has no effect with rollout_backend='transformers'. Set "
                        f"rollout_backend='vllm', or leave {name} at {defaults[name]!r}."
                    )
            return
        if not 0 < self.vllm_gpu_memory_utilization <= 1:
            raise ValueError(
                f"vllm_gpu_memory_utilization={self.vllm_gpu_memory_utilization} must be above 0 and at most 1: it is "
                "the share of a GPU's memory that vLLM may take."
            )
        num_processes = int(os.environ.get("WORLD_SIZE", "1"))
        if self.vllm_tensor_parallel_size < 1 or num_processes % self.vllm_tensor_parallel_size:
            raise ValueError(
                f"vllm_tensor_parallel_size={self.vllm_tensor_parallel_size} must divide the number of processes, "
                f"{num_processes}: as many of them share one copy of the model."
            )
        check_engine_kwargs(self.engine_kwargs())

    def engine_kwargs(self) -> dict[str, Any]:
        """`vllm_engine_kwargs`, read where it is JSON."""
        found = self.vllm_engine_kwargs
        if isinstance(found, str):
            try:
                found = json.loads(found)
            except json.JSONDecodeError as error:
                raise ValueError(f"vllm_engine_kwargs={found!r} is no JSON: {error}.") from None
        if not isinstance(found, dict | None):
            raise ValueError(f"vllm_engine_kwargs={found!r} must be a mapping, such as {{'enforce_eager': true}}.")
        return dict(found or {})

    def _check_objective(self, objective: Objective) -> None:
        """Fill in what was left to the objective, and raise where an option has no part in it."""
        if self.kl_estimator is None:
            self.kl_estimator = objective.kl_estimator
        unused: dict[str, Any] = {}
        if objective.epsilon is None:
            unused |= {"epsilon": None, "clip_mode": "both"}
        elif self.epsilon is None:
            self.epsilon = objective.epsilon  # pyright: ignore[reportIncompatibleVariableOverride]
        if not objective.uses_ratio:
            unused |= {"ratio_normalization": "token", "mask_coupling": "shared"}
        if objective.level == "token":
            unused |= {"ratio_normalization": "token", "surrogate": "elbo"}
        for name, allowed in unused.items():
            if self.__dict__[name] != allowed:
                raise ValueError(
                    f"{name}={self.__dict__[name]!r} has no part in objective={self.objective!r}. Leave it at "
                    f"{allowed!r}."
                )
        if self.mask_law is not None and self.mask_law not in (objective.mask_laws or (self.mask_law,)):
            raise ValueError(
                f"mask_law={self.mask_law!r} does not go with objective={self.objective!r}. Use "
                f"{' or '.join(map(repr, objective.mask_laws or ()))}, or leave it out."
            )
        if self.mc_sampling is not None and self.mc_sampling != (objective.mc_sampling or self.mc_sampling):
            raise ValueError(
                f"mc_sampling={self.mc_sampling!r} does not go with objective={self.objective!r}. Use "
                f"{objective.mc_sampling!r}, or leave it out."
            )

    def log_clip_bounds(self) -> tuple[float, float]:
        """Bounds of the log-ratio; infinite where the objective does not clip."""
        if self.epsilon is None:
            return -math.inf, math.inf
        return log_clip_bounds(epsilon=self.epsilon, clip_mode=self.clip_mode, ratio_cap=self.ratio_cap)

    def _check_group_size(self) -> None:
        if self.num_generations is None or self.num_generations < 2:
            raise ValueError(
                f"num_generations={self.num_generations}: a group needs at least 2 completions, since an advantage is "
                "a reward minus the group's mean."
            )
        # as launchers announce it; the property of TrainingArguments would set up the devices too early
        num_processes = int(os.environ.get("WORLD_SIZE", "1"))
        micro_batch = self.per_device_train_batch_size * num_processes
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        size = self.generation_batch_size or micro_batch * steps
        if size % self.num_generations:
            formula = (
                f"generation_batch_size={size}"
                if self.generation_batch_size
                else "per_device_train_batch_size * processes * steps_per_generation = "
                f"{self.per_device_train_batch_size} * {num_processes} * {steps} = {size}"
            )
            raise ValueError(
                f"num_generations={self.num_generations} must divide the generation batch: {formula}. Nearest valid "
                f"num_generations: {_nearest(self.num_generations, lambda g: g > 1 and size % g == 0)}."
            )

    def _check_steps(self) -> None:
        s, a, group = self.steps_per_generation, self.gradient_accumulation_steps, self.num_generations
        assert s is not None  # GRPOConfig.__post_init__ sets it
        assert group is not None  # checked above
        is_aligned = s % a == 0 or (a % s == 0 and self.num_iterations == 1)
        if not is_aligned:
            reason = (
                "several inner iterations would fall into one optimizer step"
                if a % s == 0
                else "an optimizer step would straddle two generations"
            )
            nearest = _nearest(s, lambda v: v % a == 0 or (a % v == 0 and self.num_iterations == 1))
            raise ValueError(
                f"steps_per_generation={s} with gradient_accumulation_steps={a} and num_iterations="
                f"{self.num_iterations}: {reason}. steps_per_generation must be a multiple of "
                "gradient_accumulation_steps, or divide it with num_iterations=1. Nearest valid "
                f"steps_per_generation: {nearest}."
            )
        num_rows = self.per_device_train_batch_size * a * self.world_size
        if s > a and num_rows % group:
            rows_per_unit = self.per_device_train_batch_size * self.world_size
            nearest = _nearest(a, lambda v: rows_per_unit * v % group == 0 and s % v == 0)
            raise ValueError(
                f"per_device_train_batch_size * gradient_accumulation_steps * processes = "
                f"{self.per_device_train_batch_size} * {a} * {self.world_size} = {num_rows} rows per optimizer step, "
                f"not a multiple of num_generations={group}: a group would be split over optimizer "
                f"steps. Nearest valid gradient_accumulation_steps: {nearest}."
            )

    @property
    def _window_length(self) -> int:
        assert self.max_completion_length is not None  # checked in __post_init__
        return self.max_completion_length

    def resolve(self, family: Family) -> None:
        """Fill in what was left to the family, and check it."""
        family.check_rollout_backend(self.rollout_backend)
        objective = OBJECTIVES[self.objective]
        if self.mask_law is None:
            laws = objective.mask_laws or (family.mask_law,)
            self.mask_law = family.mask_law if family.mask_law in laws else laws[0]
        if self.mc_sampling is None and objective.mc_sampling is not None:
            self.mc_sampling = objective.mc_sampling
        if self.mask_law == "full":  # one mask only: the family's number of draws does not apply
            self.mc_sampling = self.mc_sampling or "independent"
            self.num_mc_samples = self.num_mc_samples or 1
        self.mc_sampling = self.mc_sampling or family.mc_sampling
        self.num_mc_samples = self.num_mc_samples or family.num_mc_samples
        self.block_length = family.resolved_block_length(self.block_length, max_completion_length=self._window_length)
        if self.num_denoising_steps is None:
            self.num_denoising_steps = -(-self.block_length // family.tokens_per_step)
        family.check_mask_law(self.mask_law)
        check_draws(self.mask_law, self.mc_sampling, self.num_mc_samples)
        check_context(
            self.mask_law, tail=self.tail, context_attention=self.context_attention, detach_context=self.detach_context
        )
        check_decoding(
            self.sampling_settings(num_denoising_steps=self.num_denoising_steps), attention=family.attention
        )

    def likelihood_settings(self, *, mask_token_id: int, end_token_id: int) -> LikelihoodSettings:
        """The likelihood's part of a resolved configuration."""
        values: dict[str, Any] = {
            name: self.__dict__[name]
            for name in ("mask_law", "mc_sampling", "num_mc_samples", "block_length", "tail", "context_attention")
        }
        return LikelihoodSettings(
            **values,
            mask_token_id=mask_token_id,
            window_length=self._window_length,
            seed=self.seed,
            end_token_id=end_token_id,
            temperature=self.score_temperature,
            detach_context=self.detach_context,
        )

    def sampling_settings(self, **overrides: Any) -> SamplingSettings:
        """The sampler's part of this configuration; raises where it does not fit together."""
        names = [f.name for f in fields(SamplingSettings) if f.name in self.__dict__]
        return SamplingSettings(**{**{name: self.__dict__[name] for name in names}, **overrides})
