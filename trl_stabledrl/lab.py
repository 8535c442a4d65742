# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
The stability lab: a fixed protocol over methods, seeds and two regimes of noise on a tiny model, so that what the
StableDRL paper (https://huggingface.co/papers/2603.06743) says of its peers can be checked on a laptop.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import yaml
from datasets import Dataset
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from .batching import Batch, right_padded
from .checks import unknown_key
from .core.peers import OBJECTIVES
from .guard import StabilityGuard
from .likelihood import LikelihoodSettings, Rows, score_elbo
from .quickstart import QuickstartConfig, QuickstartJob, build_model, quieten, without_library_bars
from .samplers import Rollout
from .stabledrl_config import StableDRLConfig
from .stabledrl_trainer import StableDRLTrainer

Regime = Literal["normal", "stress"]
Report = Callable[[str, int, int, str], None]
"""Told the name of a job, its steps done and in all, and a note."""

COLLAPSED_BELOW = 0.25
"""A run has collapsed if its final held-out accuracy is below this share of the accuracy after supervised training."""

LARGEST = 3.4028235e38
"""What stands in files for an overflow of float32: JSON has no infinity."""


@dataclass(frozen=True)
class Stress:
    """
    The paper's stress test: for a share of each group the new score is made under easy masks, the old one under hard
    masks, so that the ratio is wrong by orders of magnitude.

    Args:
        share (`float`, *optional*, defaults to `0.7`):
            Share of each group that is stressed, rounded to whole completions.
        easy_rate (`float`, *optional*, defaults to `0.1`):
            Share of the tokens that is masked for the new score.
        hard_rate (`float`, *optional*, defaults to `0.9`):
            Share of the tokens that is masked for the old score.
    """

    share: float = 0.7
    easy_rate: float = 0.1
    hard_rate: float = 0.9

    def __post_init__(self):
        for name, value in vars(self).items():
            if not 0.0 < value <= 1.0:
                raise ValueError(f"stress.{name}={value} must be above 0 and at most 1: it is a share.")

    def mask_rate(self, row_index: Tensor, *, group_size: int, is_old: bool) -> Tensor:
        """
        Share of tokens to mask in each row, NaN where the row is left to its law.

        The members of a group are exchangeable, so it is the first ones that are stressed.
        """
        num_stressed = round(self.share * group_size)
        rate = torch.full(row_index.shape, self.hard_rate if is_old else self.easy_rate, device=row_index.device)
        return rate.masked_fill(row_index % group_size >= num_stressed, torch.nan)


class StressTrainer(StableDRLTrainer):
    """
    [`StableDRLTrainer`] under the stress test.

    Args:
        model, reward_funcs, args, train_dataset, processing_class, callbacks:
            As in [`StableDRLTrainer`].
        stress ([`Stress`]):
            Which rows, and how much.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: StableDRLConfig,
        train_dataset: Dataset,
        *,
        stress: Stress,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
    ):
        check_stress(args)
        self.stress = stress
        super().__init__(
            model, reward_funcs, args, train_dataset, processing_class=processing_class, callbacks=callbacks
        )

    def _score_iterations(self, model, batch: Batch, iterations: list[Any], batch_size: int | None) -> Tensor:
        return super()._score_iterations(model, {**batch, "is_old": True}, iterations, batch_size)

    def _rows(self, batch: Batch) -> Rows:
        rate = self.stress.mask_rate(
            batch["row_index"], group_size=self._group_size, is_old=batch.get("is_old", False)
        )
        return replace(super()._rows(batch), mask_rate=rate)


def check_stress(args: StableDRLConfig) -> None:
    """Raise where old and new scores have no masks of their own to make easy and hard."""
    wanted = {"mc_sampling": "independent", "beta": 0.0}
    if OBJECTIVES[args.objective].uses_ratio:
        wanted["mask_coupling"] = "independent"
    for name, allowed in wanted.items():
        if vars(args)[name] != allowed:
            raise ValueError(
                f"{name}={vars(args)[name]!r} leaves the stress test no masks of its own to choose. It needs "
                f"{name}={allowed!r}."
            )


@dataclass(frozen=True)
class LabRun:
    """One run of the protocol."""

    method: str
    regime: Regime
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}_{self.regime}_seed{self.seed}"


@dataclass
class LabConfig:
    """
    What `recipes/lab.yaml` holds.

    Args:
        setting (`dict`):
            Fields of [`~quickstart.QuickstartConfig`]: task, model, supervised and reinforcement learning.
        methods (`dict`):
            Per method, the fields of [`StableDRLConfig`] that it changes.
        protocol (`list`):
            Methods that are run.
        stress (`dict`):
            Fields of [`Stress`].
        variance (`dict`):
            `updates` after which the spread of the log-ratio is measured, `num_mc_samples`, `num_prompts` and
            `num_repeats` of the masks.
        num_seeds (`int`, *optional*, defaults to `3`):
            Seeds, from 0 on.
    """

    setting: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    protocol: list[str]
    stress: dict[str, float] = field(default_factory=dict)
    variance: dict[str, Any] = field(default_factory=dict)
    num_seeds: int = 3

    def __post_init__(self):
        if self.num_seeds < 1:
            raise ValueError(f"num_seeds={self.num_seeds} must be at least 1.")
        if not self.protocol:
            raise ValueError("methods is empty. Name at least one of " + ", ".join(self.methods) + ".")
        for name in self.protocol:
            if name not in self.methods:
                nearest = unknown_key(name, self.methods).split(". ", 1)[1]
                raise ValueError(f"methods: '{name}' is not one of {', '.join(self.methods)}. {nearest}")
        Stress(**self.stress)
        for name in self.protocol:
            self.training_args(LabRun(name, "normal", 0), "unused")

    @classmethod
    def load(
        cls, path: str | Path, *, methods: Sequence[str] | None = None, num_seeds: int | None = None
    ) -> "LabConfig":
        """Read a YAML file; `methods` and `num_seeds` win over it."""
        values = yaml.safe_load(Path(path).read_text())
        own = {name: values.pop(name) for name in ("methods", "protocol", "stress", "variance") if name in values}
        if methods is not None:
            own["protocol"] = list(dict.fromkeys(methods))
        if num_seeds is not None:
            own["num_seeds"] = num_seeds
        return cls(setting=values, **own)

    def quickstart(self, *, seed: int, output_dir: str) -> QuickstartConfig:
        """The setting, as the quickstart's."""
        return QuickstartConfig(**self.setting, seed=seed, output_dir=output_dir)

    def training_args(self, run: LabRun, output_dir: str) -> StableDRLConfig:
        """Settings of one run."""
        values = self.quickstart(seed=run.seed, output_dir=output_dir).section("rl") | self.methods[run.method]
        return StableDRLConfig(output_dir=output_dir, seed=run.seed, disable_tqdm=True, **values)

    def has_regime(self, method: str, regime: str) -> bool:
        """Whether a method can be run under a regime: shared masks leave the stress test nothing to choose."""
        if regime == "normal":
            return True
        args = self.training_args(LabRun(method, "normal", 0), "unused")
        is_coupled = OBJECTIVES[args.objective].uses_ratio and args.mask_coupling == "shared"
        return not is_coupled and args.mc_sampling == "independent"

    def runs(self) -> list[LabRun]:
        """Every run of the protocol, seed after seed."""
        return [
            LabRun(method, regime, seed)
            for seed in range(self.num_seeds)
            for regime in get_args(Regime)
            for method in self.protocol
            if self.has_regime(method, regime)
        ]

    def frozen(self) -> dict[str, Any]:
        """What the runs of one folder must have in common."""
        return {name: value for name, value in asdict(self).items() if name not in ("protocol", "num_seeds")}


# Jobs: each leaves a folder that is complete or not there


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON."""
    path.write_text(json.dumps(as_json(value), allow_nan=False) + "\n")


def as_json(value: Any) -> Any:
    """Replace what JSON does not have: NaN by null, an overflow by the largest float32."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else math.copysign(LARGEST, value)
    return value


def sft_folder(folder: Path, seed: int) -> Path:
    """Where the supervised model of a seed is."""
    return folder / "sft" / f"seed{seed}"


def run_folder(folder: Path, run: LabRun) -> Path:
    """Where a run is."""
    return folder / "runs" / run.name


class _Reporter(TrainerCallback):
    """Keeps the log and tells how far a run is."""

    def __init__(self, name: str, metric: str, report: Report):
        self.name, self.metric, self.report = name, metric, report
        self.note = ""
        self.log: list[dict[str, Any]] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.report(self.name, state.global_step, state.max_steps, self.note)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.log.append({"step": state.global_step, **(logs or {})})
        if logs and logs.get(self.metric) is not None:
            self.note = f"{self.metric} {logs[self.metric]:.2f}"


def _job(config: LabConfig, seed: int, folder: Path) -> QuickstartJob:
    torch.set_num_threads(1)  # the model is too small to share; sums keep one order on every machine
    return QuickstartJob(config.quickstart(seed=seed, output_dir=str(folder)), Console(quiet=True))


def _model(job: QuickstartJob, *, state_from: Path | None = None) -> PreTrainedModel:
    model = build_model(job.tokenizer, family=job.config.family, seed=job.config.seed, **job.config.section("model"))
    if state_from is not None:
        model.load_state_dict(torch.load(state_from / "model.pt", weights_only=True))
    return model


class _Folder:
    """A folder that gets its name once it is complete; what a killed run left is made anew."""

    def __init__(self, path: Path):
        self.path, self.staged = path, path.with_name(path.name + ".partial")

    def __enter__(self) -> Path:
        shutil.rmtree(self.staged, ignore_errors=True)
        self.staged.mkdir(parents=True)
        return self.staged

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.staged.rename(self.path)


def do_sft(config: LabConfig, seed: int, folder: Path, report: Report) -> dict[str, Any]:
    """
    Train the model that every run of a seed starts from.

    Args:
        config ([`LabConfig`]):
            The protocol.
        seed (`int`):
            Seed of weights, data and masks.
        folder (`pathlib.Path`):
            Folder of the lab.
        report (`Callable`):
            Told how far it is.

    Returns:
        `dict`:
            The contents of its `result.json`: `accuracy` (`sampled` and `greedy`), `num_parameters`, `seconds`.
    """
    start = time.perf_counter()
    with _Folder(sft_folder(folder, seed)) as staged, without_library_bars():
        job = _job(config, seed, staged)
        model = _model(job)
        reporter = _Reporter(f"sft_seed{seed}", "loss", report)
        job.train_supervised(model, callbacks=[reporter])
        torch.save(model.state_dict(), staged / "model.pt")
        result = {
            "accuracy": job.accuracy(model),
            "num_parameters": model.num_parameters(),
            "seconds": time.perf_counter() - start,
        }
        write_json(staged / "result.json", result)
    return result


def do_run(config: LabConfig, run: LabRun, folder: Path, report: Report) -> dict[str, Any]:
    """
    Make one run from the supervised model of its seed.

    Args:
        config ([`LabConfig`]):
            The protocol.
        run ([`LabRun`]):
            Which of its runs.
        folder (`pathlib.Path`):
            Folder of the lab.
        report (`Callable`):
            Told how far it is.

    Returns:
        `dict`:
            The contents of its `result.json`: method, regime, seed, `accuracy_before` and `accuracy_after` (sampled at
            temperature 1; `greedy_*` greedily), `peak_grad_norm`, `ratio_p99` (median over steps) and `ratio_max`,
            `collapsed`, `diverged_at` (the step at which the weights ceased to be finite), `warnings` of the guard,
            `seconds`.
    """
    start = time.perf_counter()
    source = sft_folder(folder, run.seed)
    before = json.loads((source / "result.json").read_text())["accuracy"]
    with _Folder(run_folder(folder, run)) as staged, without_library_bars():
        job = _job(config, run.seed, staged)
        model = _model(job, state_from=source)
        reporter = _Reporter(run.name, "reward", report)
        guard = StabilityGuard()
        args = config.training_args(run, str(staged))
        args.stability_guard = "off"  # our own is read afterwards
        options: dict[str, Any] = {"processing_class": job.tokenizer, "callbacks": [reporter, guard]}
        if run.regime == "stress":
            options["stress"] = Stress(**config.stress)
        trainer_class = StressTrainer if run.regime == "stress" else StableDRLTrainer
        trainer = trainer_class(model, job.reward, args, job.train_prompts, **options)
        quieten(trainer)
        diverged_at = None
        try:
            trainer.train()
        except (RuntimeError, ValueError):
            # weights that are no numbers any more stop the trainer: here that is a result, all else is a crash
            if _is_finite(model):
                raise
            diverged_at = trainer.state.global_step
        after = job.accuracy(model) if _is_finite(model) else {"sampled": 0.0, "greedy": 0.0}
        log = [row for row in reporter.log if "drift" in row]
        result = {
            **asdict(run),
            "accuracy_before": before["sampled"],
            "accuracy_after": after["sampled"],
            "greedy_before": before["greedy"],
            "greedy_after": after["greedy"],
            "peak_grad_norm": max(_values(log, "grad_norm"), default=0.0),
            "ratio_p99": _median(_values(log, "ratio/p99")),
            "ratio_max": max(_values(log, "ratio/max"), default=1.0),
            "collapsed": after["sampled"] < COLLAPSED_BELOW * before["sampled"],
            "diverged_at": diverged_at,
            "warnings": [asdict(warning) for warning in guard.warnings],
            "seconds": time.perf_counter() - start,
        }
        lines = [json.dumps(as_json(row), allow_nan=False) + "\n" for row in log]
        (staged / "metrics.jsonl").write_text("".join(lines))
        write_json(staged / "result.json", result)
    return as_json(result)


def _is_finite(model: PreTrainedModel) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def _values(log: Iterable[dict[str, Any]], name: str) -> list[float]:
    values = [row.get(name) for row in log]
    return [value for value in values if value is not None and not math.isnan(value)]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 1.0


# The spread of the log-ratio

Scheme = tuple[str, str, str]
"""`mask_coupling`, `mask_sharing`, `mc_sampling`."""


def variance_schemes(family: str) -> list[Scheme]:
    """Every way to draw and to share masks that a family's law allows, noisiest first."""
    samplings = ["independent", "stratified", "complementary", "quadrature" if family == "llada" else "cyclic"]
    return [
        (coupling, sharing, sampling)
        for coupling in ("independent", "shared")
        for sharing in ("none", "group")
        for sampling in samplings
    ]


def do_variance(config: LabConfig, seed: int, folder: Path, report: Report) -> dict[str, Any]:
    """
    Measure how far the log-ratio spreads under each way to draw and to share masks: completions of the supervised
    model, scored by it and by itself after a few updates, under many sets of masks.

    Args:
        config ([`LabConfig`]):
            The protocol.
        seed (`int`):
            Which supervised model.
        folder (`pathlib.Path`):
            Folder of the lab.
        report (`Callable`):
            Told how far it is.

    Returns:
        `dict`:
            `rows`: per number of updates and scheme the group-centred variance of the summed log-ratio in nats^2
            (`variance`), and what of it comes from the masks (`noise`).
    """
    source, name = sft_folder(folder, seed), f"variance_seed{seed}"
    updates = sorted(config.variance["updates"])
    with _Folder(folder / "variance" / f"seed{seed}") as staged, without_library_bars():
        job = _job(config, seed, staged)
        old = _model(job, state_from=source)
        group_size = job.rl["num_generations"]
        rows = _sampled_rows(job, old, num_prompts=config.variance["num_prompts"], group_size=group_size)
        models = {num_updates: _updated(config, job, source, num_updates, staged) for num_updates in updates}
        schemes = variance_schemes(job.config.family)
        found: list[dict[str, Any]] = []
        done = 0
        for sharing, sampling in dict.fromkeys(scheme[1:] for scheme in schemes):
            settings = _score_settings(config, job, sampling)
            keyed = replace(rows, noise_key=rows.noise_key // group_size) if sharing == "group" else rows
            repeats = range(config.variance["num_repeats"] + 1)
            old_scores = _scores(old, keyed, settings, repeats)
            for num_updates, model in models.items():
                new_scores = _scores(model, keyed, settings, repeats)
                # the old scores of the next set of masks are as good as any of their own
                pairs = {"shared": old_scores[:-1], "independent": old_scores[1:]}
                for coupling, reference in pairs.items():
                    spread = _spread(new_scores[:-1] - reference, group_size)
                    found.append(
                        {"updates": num_updates, "coupling": coupling, "sharing": sharing, "sampling": sampling}
                        | spread
                    )
                    done += 1
                    report(name, done, len(schemes) * len(models), sampling)
        result = {"seed": seed, "num_mc_samples": config.variance["num_mc_samples"], "rows": found}
        write_json(staged / "result.json", result)
    return result


def _updated(
    config: LabConfig, job: QuickstartJob, source: Path, num_updates: int, output_dir: Path
) -> PreTrainedModel:
    """The supervised model after some updates of StableDRL with the lab's settings."""
    model = _model(job, state_from=source)
    values = job.rl | {"max_steps": num_updates, "epsilon": 1.0, "stability_guard": "off"}
    args = StableDRLConfig(output_dir=str(output_dir), seed=job.config.seed, disable_tqdm=True, **values)
    trainer = StableDRLTrainer(model, job.reward, args, job.train_prompts, processing_class=job.tokenizer)
    quieten(trainer)
    trainer.train()
    return model.eval()


def _sampled_rows(job: QuickstartJob, model: PreTrainedModel, *, num_prompts: int, group_size: int) -> Rows:
    prompts = [text for text in job.eval_prompts["prompt"][:num_prompts] for _ in range(group_size)]
    rollouts: list[Rollout] = job.rollouts(model.eval(), prompts, temperature=1.0)
    window = job.rl["max_completion_length"]
    pad = job.tokenizer.pad_token_id
    assert isinstance(pad, int)
    ids, is_completion = right_padded([ids for part in rollouts for ids in part.completion_ids], pad_token_id=pad)
    assert ids.shape[1] <= window
    prompt_ids = torch.tensor([job.tokenizer(text)["input_ids"] for text in prompts])  # a task of one length
    return Rows(
        prompt_ids, torch.ones_like(prompt_ids, dtype=torch.bool), ids, is_completion, torch.arange(len(prompts))
    )


def _score_settings(config: LabConfig, job: QuickstartJob, sampling: str) -> LikelihoodSettings:
    is_full = job.config.family == "llada"
    mask_token_id = job.tokenizer.mask_token_id
    assert isinstance(mask_token_id, int)
    return LikelihoodSettings(
        mask_token_id=mask_token_id,
        mask_law=job.rl["mask_law"] if is_full else "staircase",
        mc_sampling=sampling,  # pyright: ignore[reportArgumentType]  # a name of `variance_schemes`
        num_mc_samples=config.variance["num_mc_samples"],
        block_length=job.rl["block_length"],
        window_length=job.rl["max_completion_length"],
        seed=job.config.seed,
    )


def _scores(model: PreTrainedModel, rows: Rows, settings: LikelihoodSettings, repeats: Iterable[int]) -> Tensor:
    """Summed ELBO of each row under the masks of each repeat: `(repeats, B)`."""
    parts = [score_elbo(model, rows, settings, iteration=repeat).mean(1) for repeat in repeats]
    return torch.stack(parts).double() * rows.completion_length


def _spread(log_ratio: Tensor, group_size: int) -> dict[str, float]:
    """Variance within groups of `(repeats, B)` log-ratios, and the part of it that changes with the masks."""
    by_group = log_ratio.unflatten(1, (-1, group_size))
    centred = by_group - by_group.mean(-1, keepdim=True)
    noise = centred.var(0, correction=0)  # over the repeats; without correction it is a part of the variance
    return {"variance": centred.square().mean().item(), "noise": noise.mean().item()}
