# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
The whole method on a laptop: a tiny model, LLaDA or SDAR, learns a verifiable task by supervised masked-diffusion
training, improves by StableDRL, and is measured before, between and after.
"""

import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import datasets
import torch
import yaml
from datasets import Dataset
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    set_seed,
)
from transformers.utils import logging as transformers_logging

from .checks import check_output_dir, unknown_key
from .data import TASKS, Task
from .inference import generate
from .models import FAMILIES
from .quickstart_report import draw, show
from .rewards import RewardFunc, load_reward
from .samplers import Rollout
from .sft_config import DiffusionSFTConfig
from .sft_trainer import DiffusionSFTTrainer
from .stabledrl_config import StableDRLConfig
from .stabledrl_trainer import StableDRLTrainer

MODEL_TYPES = [model_type for family in FAMILIES for model_type in family.model_types]
RUNNABLE_TASKS = [name for name, task in TASKS.items() if task.target_column is not None]
PARTS = ("model", "sft", "rl", "tasks")
CHARACTERS = "0123456789+="
TOKEN_ID_FIELDS = ("mask_token_id", "eos_token_id", "pad_token_id")
SPECIAL_TOKENS = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "mask_token": "<|mask|>"}


@dataclass
class QuickstartConfig:
    """
    What `recipes/quickstart.yaml` holds.

    Args:
        family (`str`, *optional*, defaults to `"llada"`):
            Kind of model, as its `model_type`: `"llada"` or `"sdar"`.
        task (`str`, *optional*, defaults to `"sorting"`):
            One of the generated tasks: `"sorting"`, `"addition"` or `"sudoku_digits"`.
        seed (`int`, *optional*, defaults to `0`):
            Seed of weights, data, masks and rollouts.
        output_dir (`str`, *optional*):
            Folder of everything that is written. Defaults to `"quickstart"`, or `"quickstart_sdar"` for SDAR.
        control (`str`, *optional*):
            `"permuted"`: repeat the reinforcement learning with rewards permuted inside each group.
        num_train_prompts (`int`, *optional*, defaults to `4096`):
            Prompts of both training phases.
        num_eval_prompts (`int`, *optional*, defaults to `512`):
            Held-out prompts.
        model (`dict`):
            Fields of the model's configuration, such as [`LLaDAConfig`].
        sft (`dict`):
            Fields of [`DiffusionSFTConfig`].
        rl (`dict`):
            Fields of [`StableDRLConfig`].
        tasks (`dict`):
            Per task, what differs: `{"addition": {"rl": {...}}}`.
        families (`dict`):
            Per family, what differs: `{"sdar": {"model": {...}, "tasks": {"addition": {...}}}}`.
    """

    family: str = "llada"
    task: str = "sorting"
    seed: int = 0
    output_dir: str | None = None
    control: str | None = None
    num_train_prompts: int = 4096
    num_eval_prompts: int = 512
    model: dict[str, Any] = field(default_factory=dict)
    sft: dict[str, Any] = field(default_factory=dict)
    rl: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    families: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self):
        for name, known in {"family": MODEL_TYPES, "task": RUNNABLE_TASKS}.items():
            if self.__dict__[name] not in known:
                raise ValueError(f"{name}={self.__dict__[name]!r} is not one of {', '.join(map(repr, known))}.")
        if self.output_dir is None:
            self.output_dir = "quickstart" if self.family == "llada" else f"quickstart_{self.family}"
        if self.control not in (None, "permuted"):
            raise ValueError(f"control={self.control!r} is not known. Use 'permuted', or leave it out.")
        for name in ("num_train_prompts", "num_eval_prompts"):
            if self.__dict__[name] < 1:
                raise ValueError(f"{name}={self.__dict__[name]} must be at least 1.")
        _check_keys({name: self.__dict__[name] for name in PARTS}, "", family=self.family)
        _check_names(self.families, "families.", known=MODEL_TYPES)
        for family, values in self.families.items():
            _check_keys(values, f"families.{family}.", family=family)

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> "QuickstartConfig":
        """Read a YAML file; `overrides` that are not None win."""
        values = yaml.safe_load(Path(path).read_text())
        _check_names(values, "", known=[f.name for f in fields(cls)])
        return cls(**{**values, **{key: value for key, value in overrides.items() if value is not None}})

    def section(self, name: str) -> dict[str, Any]:
        """A section with the family's own values on top, then the task's."""
        layers = [self.__dict__, self.families.get(self.family, {})]
        layers += [layer.get("tasks", {}).get(self.task, {}) for layer in layers]
        return {key: value for layer in layers for key, value in layer.get(name, {}).items()}


def _check_names(values: Iterable[str], path: str, *, known: Sequence[str]) -> None:
    for name in values:
        if name not in known:
            raise ValueError(unknown_key(f"{path}{name}", [f"{path}{known_name}" for known_name in known]))


def _check_keys(part: dict[str, Any], path: str, *, family: str) -> None:
    """Raise where a part of the recipe, its sections or its tasks have a key that nobody reads."""
    _check_names(part, path, known=PARTS)
    model_config = type(AutoConfig.for_model(family))
    for section, known in {
        "model": [*(f.name for f in fields(model_config)), *model_config.attribute_map],
        "sft": [f.name for f in fields(DiffusionSFTConfig)],
        "rl": [f.name for f in fields(StableDRLConfig)],
        "tasks": RUNNABLE_TASKS,
    }.items():
        _check_names(part.get(section, {}), f"{path}{section}.", known=known)
    for task, values in part.get("tasks", {}).items():
        _check_keys(values, f"{path}tasks.{task}.", family=family)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of one token per character."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS.values(), *CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["pad_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS)


def build_model(tokenizer: PreTrainedTokenizerFast, *, family: str, seed: int, **sizes: Any) -> PreTrainedModel:
    """A model of the given family and sizes with random weights."""
    set_seed(seed)
    token_ids = {
        name: tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS[name.removesuffix("_id")]) for name in TOKEN_ID_FIELDS
    }
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **token_ids, **sizes)
    return AutoModelForCausalLM.from_config(config)


def permuted_reward(reward: RewardFunc, *, num_generations: int, seed: int) -> RewardFunc:
    """The honest control: the same rewards, handed to other completions of the same prompt."""
    rng = random.Random(f"permuted:{seed}")

    def permuted(completions: list[Any], **columns: Any) -> list[float]:
        rewards = reward(completions, **columns)
        for start in range(0, len(rewards), num_generations):
            group = rewards[start : start + num_generations]
            rng.shuffle(group)
            rewards[start : start + num_generations] = group
        return rewards

    return permuted


class Reporter(TrainerCallback):
    """Drives the bar of a training phase and keeps its log."""

    def __init__(self, progress: Progress, title: str, metric: str):
        self.progress, self.metric = progress, metric
        self.bar = progress.add_task(title, total=None, note="")
        self.log: list[dict[str, float]] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.progress.update(self.bar, total=state.max_steps)

    def on_step_end(self, args, state, control, **kwargs):
        self.progress.update(self.bar, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.log.append({"step": state.global_step, **(logs or {})})
        if logs and logs.get(self.metric) is not None:
            self.progress.update(self.bar, note=f"{self.metric} {logs[self.metric]:.3f}")


class QuickstartJob:
    """
    One quickstart: what is shared by its phases.

    Args:
        config ([`QuickstartConfig`]):
            What to run.
        console ([`rich.console.Console`]):
            Where bars are shown.
    """

    def __init__(self, config: QuickstartConfig, console: Console):
        self.config, self.console = config, console
        assert config.output_dir is not None  # filled in and checked by QuickstartConfig
        self.task: Task = TASKS[config.task]
        self.output_dir = Path(config.output_dir)
        self.tokenizer = build_tokenizer()
        self.rl = config.section("rl")
        self.train_prompts = self.task.prompts("train", num_prompts=config.num_train_prompts, seed=config.seed)
        self.eval_prompts = self.task.prompts("test", num_prompts=config.num_eval_prompts, seed=config.seed)
        self.reward = load_reward(self.task.reward_names[0])
        assert self.task.target_column is not None
        self.target_column = self.task.target_column
        self.seconds: dict[str, float] = {}
        self.logs: dict[str, list[dict[str, float]]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def complete(self, model: PreTrainedModel, *, temperature: float) -> list[str]:
        """Complete the held-out prompts, as rollouts would at that temperature."""
        return self._generate(model, self.eval_prompts["prompt"], temperature)[0]

    def rollouts(self, model: PreTrainedModel, prompts: Sequence[str], *, temperature: float) -> list[Rollout]:
        """Complete any prompts and keep the token ids."""
        return self._generate(model, prompts, temperature)[1]

    def _generate(
        self, model: PreTrainedModel, prompts: Sequence[str], temperature: float
    ) -> tuple[list[str], list[Rollout]]:
        names = ("max_completion_length", "block_length", "num_denoising_steps")  # the last two may be the family's
        found = generate(
            model,
            self.tokenizer,
            prompts,
            **{name: self.rl[name] for name in names if name in self.rl},
            temperature=temperature,
            batch_size=256,
            seed=self.config.seed,
            show_progress=False,
            return_rollouts=True,
        )
        assert isinstance(found, tuple)
        return found

    def accuracy(self, model: PreTrainedModel) -> dict[str, float]:
        """Share of held-out prompts answered right, sampled at temperature 1 and greedily."""
        columns = {name: self.eval_prompts[name] for name in self.eval_prompts.column_names if name != "prompt"}
        with self.phase("evaluation"), self.console.status("evaluating on held-out prompts"):
            model.eval()
            found = {}
            for name, temperature in {"sampled": 1.0, "greedy": 0.0}.items():
                rewards = self.reward(self.complete(model, temperature=temperature), **columns)
                found[name] = sum(reward >= 1.0 for reward in rewards) / len(rewards)
        return found

    def train_supervised(self, model: PreTrainedModel, *, callbacks: Sequence[TrainerCallback] = ()) -> None:
        """Train on the right answers."""

        def tokenize(row: dict[str, Any]) -> dict[str, Any]:
            prompt = self.tokenizer(row["prompt"])["input_ids"]
            completion = self.tokenizer(row[self.target_column])["input_ids"]
            if not self.task.has_fixed_length:
                completion = [*completion, self.tokenizer.eos_token_id]
            return {
                "input_ids": prompt + completion,
                "completion_mask": [0] * len(prompt) + [1] * len(completion),
            }

        rows = [tokenize(row) for row in self.train_prompts.to_list()]
        args = DiffusionSFTConfig(
            output_dir=str(self.output_dir),
            seed=self.config.seed,
            max_completion_length=self.rl["max_completion_length"],
            block_length=self.rl.get("block_length"),
            **self.config.section("sft"),
        )
        with self.bar("supervised training", "loss") as reporter, self.phase("sft"):
            trainer = DiffusionSFTTrainer(
                model,
                args,
                train_dataset=Dataset.from_list(rows),
                processing_class=self.tokenizer,
                callbacks=[reporter, *callbacks],
            )
            quieten(trainer)
            trainer.train()
        self.logs["sft"] = reporter.log

    def train_stabledrl(self, model: PreTrainedModel, name: str, reward: RewardFunc) -> None:
        args = StableDRLConfig(output_dir=str(self.output_dir), seed=self.config.seed, **self.rl)
        with self.bar("StableDRL" if name == "rl" else "control", "reward") as reporter, self.phase(name):
            trainer = StableDRLTrainer(
                model,
                reward,
                args,
                self.train_prompts,
                processing_class=self.tokenizer,
                callbacks=[reporter],
            )
            quieten(trainer)
            trainer.train()
        self.logs[name] = reporter.log

    @contextmanager
    def bar(self, title: str, metric: str) -> Iterator[Reporter]:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<20}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self.console) as progress:
            yield Reporter(progress, title, metric)


def quieten(trainer: Any) -> None:
    """Keep the trainer's own printing out of the way of our bars."""
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)


@contextmanager
def without_library_bars() -> Iterator[None]:
    """Switch off the bars of datasets and transformers, each of which flashes by in a moment here."""
    was_disabled = datasets.are_progress_bars_disabled()
    was_enabled = transformers_logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if not was_disabled:
            datasets.enable_progress_bars()
        if was_enabled:
            transformers_logging.enable_progress_bar()


def check_no_other_run(config: QuickstartConfig) -> None:
    """Raise where the folder holds the results of another quickstart, or a checkpoint; the same one is run anew."""
    assert config.output_dir is not None  # QuickstartConfig fills it in
    check_output_dir(config.output_dir, None)
    path = Path(config.output_dir, "summary.json")
    if not path.is_file():
        return
    summary = json.loads(path.read_text())
    found = {"family": summary.get("family", "llada"), "task": summary["task"], "seed": summary["seed"]}
    asked = {name: config.__dict__[name] for name in found}
    if found != asked:
        held, this = (", ".join(f"{name} {value!r}" for name, value in run.items()) for run in (found, asked))
        raise ValueError(
            f"output_dir={config.output_dir!r} holds the results of {held}, and this run is {this}. Nothing was "
            "touched. Choose another folder with --output_dir."
        )


def run(config: QuickstartConfig, *, console: Console | None = None) -> dict[str, Any]:
    """
    Run the quickstart and write its results to `config.output_dir`.

    Args:
        config ([`QuickstartConfig`]):
            What to run.
        console ([`rich.console.Console`], *optional*):
            Where to show it.

    Returns:
        `dict`:
            The contents of `summary.json`: `accuracy_before_sft`, `accuracy_after_sft`, `accuracy_after_rl` and, with
            a control, `accuracy_after_control` (each with `sampled` and `greedy`), `num_eval_prompts`, `seconds`.
    """
    console = console or Console()
    check_no_other_run(config)
    with without_library_bars():
        return _run(QuickstartJob(config, console), config, console)


def _run(run: QuickstartJob, config: QuickstartConfig, console: Console) -> dict[str, Any]:
    run.output_dir.mkdir(parents=True, exist_ok=True)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is too small to share; sums keep one order on every machine
    try:
        model = build_model(run.tokenizer, family=config.family, seed=config.seed, **config.section("model"))
        summary: dict[str, Any] = {
            "family": config.family,
            "task": config.task,
            "seed": config.seed,
            "output_dir": str(run.output_dir),
            "num_parameters": model.num_parameters(),
            "num_eval_prompts": config.num_eval_prompts,
            "accuracy_before_sft": run.accuracy(model),
        }
        run.train_supervised(model)
        start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        summary["accuracy_after_sft"] = run.accuracy(model)
        before = run.complete(model, temperature=0.0)
        run.train_stabledrl(model, "rl", run.reward)
        summary["accuracy_after_rl"] = run.accuracy(model)
        after = run.complete(model, temperature=0.0)
        model.save_pretrained(run.output_dir / "model")
        run.tokenizer.save_pretrained(run.output_dir / "model")
        if config.control == "permuted":
            model.load_state_dict(start)
            reward = permuted_reward(run.reward, num_generations=run.rl["num_generations"], seed=config.seed)
            run.train_stabledrl(model, "control", reward)
            summary["accuracy_after_control"] = run.accuracy(model)
    finally:
        torch.set_num_threads(num_threads)
    summary["seconds"] = {name: round(value, 2) for name, value in run.seconds.items()}
    (run.output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for name, log in run.logs.items():
        (run.output_dir / f"log_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    (run.output_dir / "completions.md").write_text(_completions_table(run, before, after))
    picture = draw(run.output_dir / "quickstart.png", run.logs, summary)
    show(console, summary, sorted(path.name for path in run.output_dir.iterdir()), has_picture=picture)
    return summary


def _completions_table(run: QuickstartJob, before: list[str], after: list[str], *, num_rows: int = 12) -> str:
    """The same held-out prompts, decoded greedily before and after reinforcement learning."""
    lines = [
        "Greedy completions of held-out prompts, before and after StableDRL.",
        "",
        "| prompt | right answer | after SFT | after StableDRL |",
        "|---|---|---|---|",
    ]
    answers = run.eval_prompts[run.target_column]
    rows = zip(run.eval_prompts["prompt"], answers, before, after, strict=True)
    lines += [f"| {prompt} | {answer} | {old} | {new} |" for prompt, answer, old, new in list(rows)[:num_rows]]
    return "\n".join(lines) + "\n"
