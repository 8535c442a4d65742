# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
The whole method on a laptop: a tiny LLaDA learns a verifiable task by supervised masked-diffusion training, improves
by StableDRL, and is measured before, between and after.
"""

import json
import random
import time
from collections.abc import Iterator
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
from transformers import PreTrainedTokenizerFast, PrinterCallback, ProgressCallback, TrainerCallback, set_seed
from transformers.utils import logging as transformers_logging

from .checks import check_output_dir, unknown_key
from .data import TASKS, Task
from .inference import generate
from .models import LLaDAConfig, LLaDAModelLM
from .quickstart_report import draw, show
from .rewards import RewardFunc, load_reward
from .sft_config import DiffusionSFTConfig
from .sft_trainer import DiffusionSFTTrainer
from .stabledrl_config import StableDRLConfig
from .stabledrl_trainer import StableDRLTrainer

CHARACTERS = "0123456789+="
TOKEN_ID_FIELDS = ("mask_token_id", "eos_token_id", "pad_token_id")
SPECIAL_TOKENS = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "mask_token": "<|mask|>"}


@dataclass
class QuickstartConfig:
    """
    What `recipes/quickstart.yaml` holds.

    Args:
        task (`str`, *optional*, defaults to `"sorting"`):
            One of the generated tasks: `"sorting"`, `"addition"` or `"sudoku_digits"`.
        seed (`int`, *optional*, defaults to `0`):
            Seed of weights, data, masks and rollouts.
        output_dir (`str`, *optional*, defaults to `"quickstart"`):
            Folder of everything that is written.
        control (`str`, *optional*):
            `"permuted"`: repeat the reinforcement learning with rewards permuted inside each group.
        num_train_prompts (`int`, *optional*, defaults to `4096`):
            Prompts of both training phases.
        num_eval_prompts (`int`, *optional*, defaults to `512`):
            Held-out prompts.
        model (`dict`):
            Fields of [`LLaDAConfig`].
        sft (`dict`):
            Fields of [`DiffusionSFTConfig`].
        rl (`dict`):
            Fields of [`StableDRLConfig`].
        tasks (`dict`):
            Per task, what differs: `{"addition": {"rl": {...}}}`.
    """

    task: str = "sorting"
    seed: int = 0
    output_dir: str = "quickstart"
    control: str | None = None
    num_train_prompts: int = 4096
    num_eval_prompts: int = 512
    model: dict[str, Any] = field(default_factory=dict)
    sft: dict[str, Any] = field(default_factory=dict)
    rl: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self):
        runnable = [name for name, task in TASKS.items() if task.target_column is not None]
        if self.task not in runnable:
            raise ValueError(f"task={self.task!r} is not one of {', '.join(map(repr, runnable))}.")
        if self.control not in (None, "permuted"):
            raise ValueError(f"control={self.control!r} is not known. Use 'permuted', or leave it out.")
        for name in ("num_train_prompts", "num_eval_prompts"):
            if self.__dict__[name] < 1:
                raise ValueError(f"{name}={self.__dict__[name]} must be at least 1.")
        for section, config_class in {"sft": DiffusionSFTConfig, "rl": StableDRLConfig}.items():
            known = [f.name for f in fields(config_class)]
            for values in [self.__dict__[section], *(part.get(section, {}) for part in self.tasks.values())]:
                for key in values:
                    if key not in known:
                        raise ValueError(unknown_key(f"{section}.{key}", [f"{section}.{name}" for name in known]))

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> "QuickstartConfig":
        """Read a YAML file; `overrides` that are not None win."""
        values = yaml.safe_load(Path(path).read_text())
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise ValueError(unknown_key(key, known))
        return cls(**{**values, **{key: value for key, value in overrides.items() if value is not None}})

    def section(self, name: str) -> dict[str, Any]:
        """A section with the task's own values on top."""
        return {**self.__dict__[name], **self.tasks.get(self.task, {}).get(name, {})}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of one token per character."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS.values(), *CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["pad_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS)


def build_model(tokenizer: PreTrainedTokenizerFast, *, seed: int, **sizes: Any) -> LLaDAModelLM:
    """A LLaDA of the given sizes with random weights."""
    set_seed(seed)
    return LLaDAModelLM(
        LLaDAConfig(
            vocab_size=len(tokenizer),
            **{
                name: tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS[name.removesuffix("_id")])
                for name in TOKEN_ID_FIELDS
            },
            **sizes,
        )
    )


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


class _Reporter(TrainerCallback):
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


class _Run:
    """One quickstart: what is shared by its phases."""

    def __init__(self, config: QuickstartConfig, console: Console):
        self.config, self.console = config, console
        self.task: Task = TASKS[config.task]
        self.output_dir = Path(config.output_dir)
        self.tokenizer = build_tokenizer()
        self.rl = config.section("rl")
        self.train_prompts = self.task.prompts("train", num_prompts=config.num_train_prompts, seed=config.seed)
        self.eval_prompts = self.task.prompts("test", num_prompts=config.num_eval_prompts, seed=config.seed)
        self.reward = load_reward(self.task.reward_names[0])
        assert self.task.target_column is not None  # checked by QuickstartConfig
        self.target_column = self.task.target_column
        self.seconds: dict[str, float] = {}
        self.logs: dict[str, list[dict[str, float]]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def complete(self, model: LLaDAModelLM, *, temperature: float) -> list[str]:
        names = ("max_completion_length", "block_length", "num_denoising_steps")
        completions = generate(
            model,
            self.tokenizer,
            self.eval_prompts["prompt"],
            **{name: self.rl[name] for name in names},
            temperature=temperature,
            batch_size=256,
            seed=self.config.seed,
            show_progress=False,
        )
        assert isinstance(completions, list)
        return completions

    def accuracy(self, model: LLaDAModelLM) -> dict[str, float]:
        """Share of held-out prompts answered right, sampled at temperature 1 and greedily."""
        columns = {name: self.eval_prompts[name] for name in self.eval_prompts.column_names if name != "prompt"}
        with self.phase("evaluation"), self.console.status("evaluating on held-out prompts"):
            model.eval()
            found = {}
            for name, temperature in {"sampled": 1.0, "greedy": 0.0}.items():
                rewards = self.reward(self.complete(model, temperature=temperature), **columns)
                found[name] = sum(reward >= 1.0 for reward in rewards) / len(rewards)
        return found

    def train_supervised(self, model: LLaDAModelLM) -> None:
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
            block_length=self.rl["block_length"],
            **self.config.section("sft"),
        )
        with self.bar("supervised training", "loss") as reporter, self.phase("sft"):
            trainer = DiffusionSFTTrainer(
                model,
                args,
                train_dataset=Dataset.from_list(rows),
                processing_class=self.tokenizer,
                callbacks=[reporter],
            )
            quieten(trainer)
            trainer.train()
        self.logs["sft"] = reporter.log

    def train_stabledrl(self, model: LLaDAModelLM, name: str, reward: RewardFunc) -> None:
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
    def bar(self, title: str, metric: str) -> Iterator[_Reporter]:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<20}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self.console) as progress:
            yield _Reporter(progress, title, metric)


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


def check_no_other_run(output_dir: Path, config: QuickstartConfig) -> None:
    """Raise where the folder holds the results of another quickstart, or a checkpoint; the same one is run anew."""
    check_output_dir(str(output_dir), None)
    path = output_dir / "summary.json"
    if not path.is_file():
        return
    found = json.loads(path.read_text())
    if (found["task"], found["seed"]) != (config.task, config.seed):
        raise ValueError(
            f"output_dir={str(output_dir)!r} holds the results of task {found['task']!r}, seed {found['seed']}, and "
            f"this run is task {config.task!r}, seed {config.seed}. Nothing was touched. Choose another folder with "
            "--output_dir."
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
    check_no_other_run(Path(config.output_dir), config)
    with without_library_bars():
        return _run(_Run(config, console), config, console)


def _run(run: "_Run", config: QuickstartConfig, console: Console) -> dict[str, Any]:
    run.output_dir.mkdir(parents=True, exist_ok=True)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is too small to share; sums keep one order on every machine
    try:
        model = build_model(run.tokenizer, seed=config.seed, **config.section("model"))
        summary: dict[str, Any] = {
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


def _completions_table(run: _Run, before: list[str], after: list[str], *, num_rows: int = 12) -> str:
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
