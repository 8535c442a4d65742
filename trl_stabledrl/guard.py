# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""[`StabilityGuard`]: reads what a run logs and says when it starts to fail, why it may, and which option helps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback

from .core.peers import OBJECTIVES

logger = get_logger(__name__)

Logs = dict[str, float]

WINDOW = 8
"""Logs whose mean is compared with the mean of the first ones: single steps are noise."""


@dataclass(frozen=True)
class StabilityWarning:
    """
    What the guard has to say.

    Attributes:
        step (`int`):
            Optimizer step of the log that it follows.
        cause (`str`):
            Key in [`CAUSES`].
        message (`str`):
            Metrics, likely cause and remedy.
        is_fatal (`bool`):
            Whether `stop=True` ends the run for it.
    """

    step: int
    cause: str
    message: str
    is_fatal: bool


class _Trend:
    """Means of a metric over the first and the last logs that have it."""

    def __init__(self, logs: Sequence[Logs], window: int):
        self.logs, self.window = logs, window

    def values(self, name: str) -> list[float]:
        return [row[name] for row in self.logs if row.get(name) is not None and math.isfinite(row[name])]

    def now(self, name: str) -> float:
        """NaN, with which no comparison is true, until there are enough."""
        values = self.values(name)
        return sum(values[-self.window :]) / self.window if len(values) >= self.window else math.nan

    def then(self, name: str) -> float:
        values = self.values(name)
        return sum(values[: self.window]) / self.window if len(values) >= 2 * self.window else math.nan

    def best(self, name: str) -> float:
        """The largest mean over as many logs in a row."""
        values = self.values(name)
        starts = range(len(values) - self.window + 1)
        return max((sum(values[i : i + self.window]) / self.window for i in starts), default=math.nan)

    def grew(self, name: str, factor: float) -> bool:
        return self.now(name) > factor * self.then(name)

    def fell(self, name: str, factor: float) -> bool:
        return self.now(name) < factor * self.then(name)


@dataclass(frozen=True)
class Cause:
    """
    A way for a run to fail.

    Attributes:
        is_seen (`Callable`):
            Whether the logs show it, given the number of completions per prompt and of prompts per rollout.
        metrics (`tuple[str, ...]`):
            What the message quotes.
        explanation (`str`):
            What is likely going on.
        remedies (`tuple[str, ...]`):
            Names of [`REMEDIES`], best first.
        is_fatal (`bool`, defaults to `True`):
            Whether `stop=True` ends the run: some runs go on well while a metric looks bad.
    """

    is_seen: Callable[[_Trend, int, int], bool]
    metrics: tuple[str, ...]
    explanation: str
    remedies: tuple[str, ...]
    is_fatal: bool = True


def _ratios_loop(trend: _Trend, group_size: int, num_prompts: int) -> bool:
    is_growing = trend.grew("drift", 2.0) and trend.grew("log_ratio/std_centred", 2.0)
    return is_growing and trend.now("drift") > 0.1 and trend.fell("weights/ess", 0.9)


def _unlearning(trend: _Trend, group_size: int, num_prompts: int) -> bool:
    # a balanced update has half of its weight on each sign, and its largest part is shared by all of its rows
    return trend.now("update/negative_share") > 0.85 and trend.now("update/max_share") > 0.4


def _one_completion(trend: _Trend, group_size: int, num_prompts: int) -> bool:
    return trend.now("weights/ess") < max(1.5 / group_size, 0.1) and trend.now("log_ratio/std_centred") > 0.1


def _saturated(trend: _Trend, group_size: int, num_prompts: int) -> bool:
    return trend.now("weights/saturated") > 0.3


def _misled(trend: _Trend, group_size: int, num_prompts: int) -> bool:
    return _saturated(trend, group_size, num_prompts) and trend.now("reward") < 0.5 * trend.best("reward")


def _decoding(trend: _Trend, group_size: int, num_prompts: int) -> bool:
    is_failing = trend.now("reward") < 0.5 * trend.best("reward")
    is_surer = trend.fell("entropy", 0.5) or trend.grew("rollout/tokens_per_forward", 1.5)
    return is_failing and is_surer and not trend.grew("log_ratio/std_centred", 2.0)


def _no_signal(trend: _Trend, group_size: int, num_prompts: int) -> bool:
    return trend.now("reward") <= 0.0 and trend.now("zero_std_groups") >= num_prompts


CAUSES = {
    "ratio_loop": Cause(
        _ratios_loop,
        ("drift", "log_ratio/std_centred", "weights/ess"),
        "the loop of noisy ratios: they push the policy away from the one that sampled, which makes them noisier",
        ("shared_masks", "stabledrl", "per_token", "tighter_clip", "smaller_steps"),
    ),
    "unlearning": Cause(
        _unlearning,
        ("update/negative_share", "update/max_share"),
        "chance ratios that no clip holds let a few completions with negative advantage make up the updates",
        ("stabledrl", "shared_masks", "per_token", "tighter_clip", "smaller_steps"),
    ),
    "one_completion": Cause(
        _one_completion,
        ("weights/ess", "weights/max", "log_ratio/std_centred"),
        "ratios are so far apart that one completion decides for its group",
        ("tighter_clip", "stabledrl", "shared_masks", "per_token", "more_draws", "smaller_steps"),
    ),
    "saturated": Cause(
        _saturated,
        ("weights/saturated", "log_ratio/std_centred"),
        "so many ratios lie at the upper bound that the weights say which draws were lucky, and little else",
        ("shared_masks", "per_token", "more_draws", "smaller_steps"),
        is_fatal=False,
    ),
    "misled": Cause(
        _misled,
        ("reward", "weights/saturated", "log_ratio/std_centred"),
        "weights that sit at the clip's bound follow the draws and not the policy, and the reward falls with them",
        ("shared_masks", "per_token", "tighter_clip", "more_draws", "smaller_steps"),
    ),
    "decoding": Cause(
        _decoding,
        ("reward", "entropy", "rollout/tokens_per_forward"),
        "the reward falls while the ratios are as calm as before and the model grows sure of itself: "
        "confidence-ordered decoding that feeds on its own choices, not ratio noise",
        ("random_order", "kl", "smaller_steps"),
    ),
    "no_signal": Cause(
        _no_signal,
        ("reward", "zero_std_groups"),
        "no completion is right any more, so every advantage is zero and nothing can bring the run back",
        ("earlier_checkpoint", "stabledrl", "shared_masks", "smaller_steps"),
    ),
}

REMEDIES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "shared_masks": (
        lambda args: args.mask_coupling == "independent",
        "mask_coupling='shared' (old and new scores under the same masks)",
    ),
    "stabledrl": (
        lambda args: args.objective not in ("stabledrl", "spg", "wd1"),
        "objective='stabledrl' (ratios clipped on both signs and normalised)",
    ),
    "per_token": (
        lambda args: OBJECTIVES[args.objective].uses_ratio and args.ratio_normalization == "sequence",
        "ratio_normalization='token'",
    ),
    "tighter_clip": (
        lambda args: args.objective in ("stabledrl", "clip_only") and (args.epsilon or 0.0) > 1.0,
        "epsilon=1",
    ),
    "more_draws": (lambda args: args.mask_law != "full", "more num_mc_samples"),
    "random_order": (lambda args: args.remasking != "random", "remasking='random' in rollouts"),
    "kl": (lambda args: args.beta == 0.0, "beta above 0 (a KL to the start)"),
    "earlier_checkpoint": (lambda args: True, "an earlier checkpoint, or a longer supervised start"),
    "smaller_steps": (lambda args: True, "a smaller learning_rate"),
}


class StabilityGuard(TrainerCallback):
    """
    Warn, once for each cause, when the metrics of a run show it starting to fail. [`StableDRLTrainer`] adds one by
    default, which only warns (`stability_guard`); it works with every objective and costs nothing.

    Args:
        stop (`bool`, *optional*, defaults to `False`):
            Whether to save a checkpoint and end the run at the first warning of a fatal cause.
        window (`int`, *optional*, defaults to `8`):
            Logs that a mean is taken over. Nothing is said before there are as many, and of a change before there are
            twice as many.

    Attributes:
        warnings (`list[StabilityWarning]`):
            What has been said so far.
    """

    def __init__(self, *, stop: bool = False, window: int = WINDOW):
        if window < 1:
            raise ValueError(f"window={window} must be at least 1: it counts the logs that a mean is taken over.")
        self.stop, self.window = stop, window
        self.logs: list[Logs] = []
        self.warnings: list[StabilityWarning] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "drift" not in logs:  # of an evaluation, or of the end of the run
            return
        self.logs.append(logs)
        trend = _Trend(self.logs, self.window)
        num_prompts = (args.generation_batch_size or args.num_generations) // args.num_generations
        told = {warning.cause for warning in self.warnings}
        for name, cause in CAUSES.items():
            if name in told or not cause.is_seen(trend, args.num_generations, num_prompts):
                continue
            message = _message(cause, trend, state.global_step, args)
            warning = StabilityWarning(state.global_step, name, message, cause.is_fatal)
            self.warnings.append(warning)
            logger.warning(warning.message)
            if self.stop and cause.is_fatal:
                logger.warning(f"Step {state.global_step}: StabilityGuard(stop=True) saves and ends the run.")
                control.should_save = control.should_training_stop = True


def _message(cause: Cause, trend: _Trend, step: int, args: Any) -> str:
    quoted = ", ".join(f"{name}={trend.now(name):.3g}" for name in cause.metrics if math.isfinite(trend.now(name)))
    helping = [text for is_open, text in (REMEDIES[name] for name in cause.remedies) if is_open(args)]
    return (
        f"Step {step}: {quoted} (means over the last {trend.window} logs). Likely cause: {cause.explanation}. "
        f"What helps: {'; '.join(helping[:3])}."
    )
