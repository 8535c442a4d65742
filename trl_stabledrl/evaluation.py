# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
Scores of a model on a task that can be repeated: [`evaluate`] on any number of processes, and [`TaskEvaluation`]
within training. A completion depends on its item, sample, length and the seed alone.
"""

import inspect
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback

from . import _compat
from .batching import gathered, left_padded
from .core.noise import Stream, random_bits
from .data import TASKS, Task
from .decoding import encode_prompts, sampling_settings
from .evaluation_config import EvaluationConfig
from .evaluation_records import (
    COMPLETIONS_FILE,
    INTERVAL_LEVEL,
    ITEMS_FILE,
    PART_FILES,
    RESULTS_FILE,
    SETTINGS_FILE,
    SPEED_FILE,
    CompletionRecord,
    Key,
    RecordWriter,
    as_line,
    read_records,
    scores_of,
    speed_of,
)
from .models.bidirectional import dense_attention
from .models.facts import ModelFacts, model_facts
from .provenance import environment_of, hash_of
from .rewards import GRADERS
from .samplers import Rollout, SamplingSettings, sample

_DECODING = (
    *("block_length", "num_denoising_steps", "temperature", "top_k", "top_p", "remasking", "confidence_threshold"),
    *("suppress_eos", "guidance_scale"),
)


@dataclass(frozen=True)
class EvaluationPlan:
    """
    An evaluation that is known to fit its model, of which no weight is needed.

    Attributes:
        config ([`EvaluationConfig`]):
            What was asked for.
        facts ([`~models.facts.ModelFacts`]):
            Tokenizer and special tokens.
        rows (`datasets.Dataset`):
            Items, in order.
        prompt_ids (`list[list[int]]`):
            Their prompts.
        item_hashes (`list[str]`):
            Of their prompts and answer columns.
        decoding (`dict[int, SamplingSettings]`):
            How each length is decoded.
        settings (`dict`):
            Everything that decides the scores beside model and machine.
    """

    config: EvaluationConfig
    facts: ModelFacts
    rows: Dataset
    prompt_ids: list[list[int]]
    item_hashes: list[str]
    decoding: dict[int, SamplingSettings]
    settings: dict[str, Any]

    @property
    def task(self) -> Task:
        assert self.config.task is not None  # checked by EvaluationConfig
        return TASKS[self.config.task]

    def keys(self, length: int) -> list[Key]:
        """Completions of a length: their lengths, items and samples."""
        num_items, num_samples = len(self.rows), self.config.num_samples
        return [(length, item, index) for item in range(num_items) for index in range(num_samples)]

    @property
    def num_completions(self) -> int:
        return len(self.decoding) * len(self.rows) * self.config.num_samples


@dataclass(frozen=True)
class Evaluation:
    """
    What an evaluation found.

    Attributes:
        results (`dict`):
            Contents of `results.json`: `scores` by length, how intervals were made, `settings` and `environment`.
        speed (`dict`):
            Contents of `speed.json`.
        records (`list[CompletionRecord]`):
            Every completion, by length, item and sample.
    """

    results: dict[str, Any]
    speed: dict[str, Any]
    records: list[CompletionRecord]


def plan_evaluation(
    facts: ModelFacts,
    config: EvaluationConfig,
    *,
    names: dict[str, Any] | None = None,
    template_options: dict[str, Any] | None = None,
) -> EvaluationPlan:
    """
    Load the items and raise where they, the options and the model do not fit together.

    Args:
        facts ([`~models.facts.ModelFacts`]):
            From [`~models.facts.model_facts`]; a path is enough.
        config ([`EvaluationConfig`]):
            What to do.
        names (`dict`, *optional*):
            What the model and its adapter are called, for the record.
        template_options (`dict`, *optional*):
            What the chat template is given beside the conversation.

    Returns:
        [`EvaluationPlan`]
    """
    assert config.task is not None  # checked by EvaluationConfig
    assert config.max_completion_length is not None
    task = TASKS[config.task]
    options = {name: vars(config)[name] for name in _DECODING}
    decoding = {
        length: sampling_settings(facts.family, max_completion_length=length, **options)
        for length in config.max_completion_length
    }
    rows, origin = _load_items(task, config)
    if not isinstance(rows[0]["prompt"], str) and not facts.tokenizer.chat_template:
        raise ValueError(
            f"The prompts of task {task.name} are conversations, but the tokenizer of {facts.config.name_or_path} has "
            "no chat template. Set tokenizer.chat_template and save it beside the model."
        )
    prompt_ids = encode_prompts(facts.tokenizer, rows["prompt"], template_options=template_options)
    # with the prompt, since items may have their answers in common; in one style, so that styles can be compared
    style = task.prompt_styles[0] if task.prompt_styles else None
    alike = rows if config.prompt_style == style else _load_items(task, replace(config, prompt_style=style))[0]
    item_hashes = [hash_of(row)[:16] for row in alike.to_list()]
    by_length = {
        name: {str(length): vars(settings)[name] for length, settings in decoding.items()}
        for name in ("block_length", "num_denoising_steps")
    }
    settings = {
        **(names or {"model": str(facts.config.name_or_path)}),
        "family": facts.family.name,
        "mask_token_id": facts.mask_token_id,
        "end_token_ids": list(facts.end_token_ids),
        "task": task.name,
        "split": config.split,
        "num_items": len(rows),
        "grader": task.reward_names[0],
        **origin,
        "template_options": template_options,
        "prompt_hash": hash_of(prompt_ids),
        "items_hash": hash_of(item_hashes),
        "num_samples": config.num_samples,
        "max_completion_length": config.max_completion_length,
        **options,
        **by_length,
        "seed": config.seed,
        "num_resamples": config.num_resamples,
    }
    return EvaluationPlan(config, facts, rows, prompt_ids, item_hashes, decoding, settings)


def _load_items(task: Task, config: EvaluationConfig) -> tuple[Dataset, dict[str, Any]]:
    """The items, and where they are from."""
    given = {
        "num_prompts": config.limit,
        "prompt_style": config.prompt_style,
        "source": config.source,
        "seed": config.data_seed,
    }
    given = {name: value for name, value in given.items() if value is not None}
    rows = task.prompts(config.split, **given)
    parameters = inspect.signature(task.prompts).parameters
    found = {name: given.get(name, parameters[name].default) for name in ("source", "seed") if name in parameters}
    return rows, {
        "prompt_style": config.prompt_style,
        "source": found.get("source"),
        "data_seed": found.get("seed") if found.get("source") is None else None,
    }


def evaluate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: EvaluationConfig) -> Evaluation:
    """
    Evaluate a model on a task.

    In a process that `accelerate launch` or `torchrun` started, the completions are shared out: each is made once, by
    one process that holds the whole model.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model of a known family, on its device.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        config ([`EvaluationConfig`]):
            Task and options.

    Returns:
        [`Evaluation`]:
            The same on every process.

    Example:

    ```python
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl_stabledrl import EvaluationConfig, evaluate

    model = AutoModelForCausalLM.from_pretrained("GSAI-ML/LLaDA-8B-Instruct", dtype="bfloat16", device_map="auto")
    tokenizer = AutoTokenizer.from_pretrained("GSAI-ML/LLaDA-8B-Instruct")
    config = EvaluationConfig(task="gsm8k", max_completion_length=[128, 256, 512], output_dir="outputs/gsm8k")
    evaluate(model, tokenizer, config).results["scores"]["256"]["pass@1"]
    ```
    """
    return run_plan(model, plan_evaluation(model_facts(model, tokenizer), config))


def run_plan(model: Any, plan: EvaluationPlan) -> Evaluation:
    """
    [`evaluate`] of a plan.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The model that was planned for.
        plan ([`EvaluationPlan`]):
            From [`plan_evaluation`].

    Returns:
        [`Evaluation`]
    """
    state, folder = process_state(), plan.config.output_dir
    environment = _from_main(lambda: environment_of(model))
    records: list[CompletionRecord] = []
    if folder is not None:
        check_output_dir(folder, plan.settings | environment)
        state.wait_for_everyone()  # with looking, before anyone writes
        # read by one: processes that do not share the folder must still agree on what is left
        records = _from_main(lambda: _begin(Path(folder), plan, environment))
    done = {record.key: record for record in records}
    with _evaluation_mode(model), torch.no_grad(), dense_attention(model), _writer(folder) as write:
        found = complete(model, plan, done=done, write=write)
    done |= {record.key: record for record in gather_object(found)}
    expected = [key for length in plan.decoding for key in plan.keys(length)]
    ordered = [done[key] for key in expected]
    results = {
        "scores": scores_by_length(plan, ordered),
        "intervals": {
            "method": "percentile bootstrap over items",
            "level": INTERVAL_LEVEL,
            "num_resamples": plan.config.num_resamples,
            "seed": plan.config.seed,
        },
        "settings": plan.settings,
        "environment": environment,
    }
    results = json.loads(json.dumps(results))  # what is returned is what is read
    speed = {
        "by_length": {str(length): speed_of(_of_length(ordered, length)) for length in plan.decoding},
        "batch_size": plan.config.batch_size,
        "num_processes": state.num_processes,
    }
    if folder is not None and state.is_main_process:
        _finish(Path(folder), ordered, results, speed)
    state.wait_for_everyone()
    return Evaluation(results, speed, ordered)


def process_state(*, use_cpu: bool = False) -> PartialState:
    """
    This process among those that a launcher started; the first call forms their group, on CPUs too.

    Args:
        use_cpu (`bool`, *optional*, defaults to `False`):
            Stay on the CPU.

    Returns:
        [`~accelerate.PartialState`]
    """
    is_on_cpu = use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    # a process may be done long before the others
    return PartialState(cpu=is_on_cpu, timeout=timedelta(days=7))


def scores_by_length(plan: EvaluationPlan, records: Sequence[CompletionRecord]) -> dict[str, Any]:
    """[`~evaluation_records.scores_of`] each length."""
    config = plan.config
    options = {"num_samples": config.num_samples, "num_resamples": config.num_resamples, "seed": config.seed}
    return {str(length): scores_of(_of_length(records, length), **options) for length in plan.decoding}


def _of_length(records: Iterable[CompletionRecord], length: int) -> list[CompletionRecord]:
    return [record for record in records if record.max_completion_length == length]


# Completions


def complete(
    model: Any,
    plan: EvaluationPlan,
    *,
    done: dict[Key, CompletionRecord],
    write: Callable[[list[CompletionRecord]], None],
    any_rank_active: Callable[[bool], bool] | None = None,
) -> list[CompletionRecord]:
    """
    Make and grade this process's share of the completions that are not there yet.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            In the mode the caller wants.
        plan ([`EvaluationPlan`]):
            What to make.
        done (`dict`):
            Completions that are there already, the same on every process.
        write (`Callable[[list[CompletionRecord]], None]`):
            Called with the records of each batch.
        any_rank_active (`Callable[[bool], bool]`, *optional*):
            For parameters that are sharded over processes: says whether any process has rows left. Every process then
            runs as many forward passes.

    Returns:
        `list[CompletionRecord]`
    """
    state, config = process_state(), plan.config
    found: list[CompletionRecord] = []
    for length in plan.decoding:
        left = [key for key in plan.keys(length) if key not in done]
        mine = left[state.process_index :: state.num_processes]
        most = -(-len(left) // state.num_processes)  # of any process
        seen = _of_length(done.values(), length)
        with _bar(plan, length, total=len(mine), seen=seen) as update:
            for start in range(0, most, config.batch_size):
                keys = mine[start : start + config.batch_size]
                if not keys and any_rank_active is None:
                    break
                records = _complete_batch(model, plan, length, keys, any_rank_active=any_rank_active)
                write(records)
                update(records)
                found += records
    return found


def _complete_batch(
    model: Any,
    plan: EvaluationPlan,
    length: int,
    keys: Sequence[Key],
    *,
    any_rank_active: Callable[[bool], bool] | None,
) -> list[CompletionRecord]:
    facts, settings = plan.facts, plan.decoding[length]
    prompts = [plan.prompt_ids[item] for _, item, _ in keys]
    # a process without rows takes part in the others' passes
    ids, is_prompt = left_padded(prompts or [[facts.mask_token_id]], pad_token_id=facts.mask_token_id)
    ids, is_prompt = ids[: len(keys)], is_prompt[: len(keys)]
    start = time.perf_counter()
    rollout = sample(
        model,
        ids.to(model.device),
        is_prompt.to(model.device),
        mask_token_id=facts.mask_token_id,
        end_token_ids=facts.end_token_ids,
        settings=settings,
        row_seeds=row_seeds(plan.config.seed, keys),
        attention=facts.family.attention,
        any_rank_active=any_rank_active,
    )
    if not keys:
        return []
    seconds = (time.perf_counter() - start) / len(keys)
    texts = facts.tokenizer.batch_decode(rollout.completion_ids, skip_special_tokens=True)
    rows = plan.rows[[item for _, item, _ in keys]]
    columns = {name: values for name, values in rows.items() if name != "prompt"}
    # the reward of training is this grader's score
    grades = GRADERS[plan.task.reward_names[0]](completions=texts, **columns)
    num_steps = _steps_by_row(rollout, block_length=settings.block_length)
    return [
        CompletionRecord(
            max_completion_length=length,
            item=item,
            sample=index,
            item_hash=plan.item_hashes[item],
            completion=text,
            num_tokens=len(completion_ids),
            num_steps=steps,
            is_truncated=completion_ids[-1] not in facts.end_token_ids,
            score=float(grade.score),
            reason=grade.reason,
            answer=grade.answer,
            seconds=seconds,
        )
        for (_, item, index), text, completion_ids, steps, grade in zip(
            keys, texts, rollout.completion_ids, num_steps, grades, strict=True
        )
    ]


def row_seeds(seed: int, keys: Sequence[Key]) -> list[int]:
    """Seed of each completion: a hash of seed, item, sample and length, whatever the batch or process."""
    if not keys:
        return []
    lengths, items, samples = torch.tensor(keys).T
    return random_bits(seed, Stream.ROLLOUT, items, samples, lengths).tolist()


def _steps_by_row(rollout: Rollout, *, block_length: int) -> list[int]:
    """Denoising steps of each row, over its blocks."""
    column = torch.arange(rollout.commit_step.shape[1], device=rollout.commit_step.device)
    block = (column + rollout.block_offset[:, None]) // block_length  # (B, W)
    steps = torch.zeros_like(rollout.commit_step).scatter_reduce(1, block, rollout.commit_step + 1, "amax")
    return steps.sum(dim=1).tolist()


@contextmanager
def _bar(
    plan: EvaluationPlan, length: int, *, total: int, seen: Sequence[CompletionRecord]
) -> Iterator[Callable[[Sequence[CompletionRecord]], None]]:
    """A bar over this process's share of a length, with the accuracy so far; on the main process alone."""
    state = process_state()
    num_right, num_graded = sum(record.is_right for record in seen), len(seen)
    title = f"{plan.task.name}, {length} tokens"
    if state.num_processes > 1:
        title += f", process 1 of {state.num_processes}"
    is_shown = plan.config.show_progress and state.is_main_process and total > 0
    with tqdm(total=total, desc=title, unit="row", disable=not is_shown, dynamic_ncols=True) as bar:

        def update(records: Sequence[CompletionRecord]) -> None:
            nonlocal num_right, num_graded
            num_right += sum(record.is_right for record in records)
            num_graded += len(records)
            if num_graded:
                bar.set_postfix_str(f"accuracy {num_right / num_graded:.3f}", refresh=False)
            bar.update(len(records))

        yield update


@contextmanager
def _evaluation_mode(model: Any) -> Iterator[None]:
    """Every module in evaluation mode, and afterwards in the one it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


# Files


def check_output_dir(folder: str, settings: dict[str, Any]) -> None:
    """
    Raise where a folder holds something else than this evaluation; reads the disk only.

    Args:
        folder (`str`):
            Where results will be written. May be absent or empty.
        settings (`dict`):
            What is known of the evaluation: these are compared with what the folder was begun with.
    """
    path = Path(folder)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    remedy = "Nothing was touched. Choose another output_dir"
    if not path.is_dir():
        raise ValueError(f"output_dir={folder!r} is a file. {remedy}.")
    if not (path / SETTINGS_FILE).is_file():
        first = sorted(entry.name for entry in path.iterdir())[0]
        raise ValueError(f"output_dir={folder!r} holds {first} and no evaluation. {remedy}.")
    try:
        begun = json.loads((path / SETTINGS_FILE).read_text())
    except ValueError as error:
        raise ValueError(f"output_dir={folder!r} holds a damaged {SETTINGS_FILE} ({error}). {remedy}.") from error
    wanted = json.loads(json.dumps(settings))
    differing = [
        f"{name} was {_short(begun.get(name))} and is {_short(value)}"
        for name, value in wanted.items()
        if begun.get(name) != value
    ]
    if differing:
        raise ValueError(
            f"output_dir={folder!r} holds an evaluation with other settings: {'; '.join(differing)}. {remedy}, or "
            "give the settings of that evaluation to go on with it."
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:13]}..."  # of a hash


def _begin(folder: Path, plan: EvaluationPlan, environment: dict[str, Any]) -> list[CompletionRecord]:
    """Write down what is evaluated, unless that is there, and read the completions that are."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / SETTINGS_FILE).is_file():
        _write_whole(folder / SETTINGS_FILE, _as_json(plan.settings | environment))
    if not (folder / ITEMS_FILE).is_file():
        items = [
            {"item": item, "item_hash": plan.item_hashes[item], **row} for item, row in enumerate(plan.rows.to_list())
        ]
        _write_whole(folder / ITEMS_FILE, b"".join(map(as_line, items)).decode())
    paths = [*folder.glob(COMPLETIONS_FILE), *sorted(folder.glob(PART_FILES))]
    found = {record.key: record for path in paths for record in read_records(path)}
    return list(found.values())


@contextmanager
def _writer(folder: str | None) -> Iterator[Callable[[list[CompletionRecord]], None]]:
    if folder is None:
        yield lambda records: None
        return
    path = Path(folder, PART_FILES.replace("*", f"{process_state().process_index:03d}"))
    path.parent.mkdir(parents=True, exist_ok=True)  # where processes do not share a disk
    with closing(RecordWriter(path)) as writer:
        yield writer.write


def _finish(folder: Path, records: Sequence[CompletionRecord], results: dict[str, Any], speed: dict[str, Any]) -> None:
    _write_whole(folder / COMPLETIONS_FILE, b"".join(as_line(asdict(record)) for record in records).decode())
    for path in folder.glob(PART_FILES):
        path.unlink()
    _write_whole(folder / SPEED_FILE, _as_json(speed))
    _write_whole(folder / RESULTS_FILE, _as_json(results))


def _write_whole(path: Path, text: str) -> None:
    """A reader finds the whole file or none."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _as_json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"


def _from_main(make: Callable[[], Any]) -> Any:
    """What the main process makes, on every process."""
    state = process_state()
    box = [make() if state.is_main_process else None]
    if state.num_processes > 1:
        broadcast_object_list(box)
    return box[0]


# Within training


def training_evaluation_config(training_args: Any, *, limit: int = 128, **options: Any) -> EvaluationConfig:
    """
    Configuration of an evaluation within training: decoding as in rollouts, but greedy unless told otherwise.

    Args:
        training_args ([`StableDRLConfig`] or [`DiffusionSFTConfig`]):
            Of the trainer, resolved for the family.
        limit (`int`, *optional*, defaults to `128`):
            Items from the start of the split.
        options:
            Other options of [`EvaluationConfig`].

    Returns:
        [`EvaluationConfig`]
    """
    args = vars(training_args)
    if not args["eval_steps"]:
        raise ValueError(
            f"eval_steps={args['eval_steps']} leaves open when to evaluate on task {options['task']}. Set eval_steps, "
            "the optimizer steps between two evaluations."
        )
    decoding: dict[str, Any] = {name: args[name] for name in _DECODING if name in args}
    decoding["temperature"] = 0.0
    return EvaluationConfig(
        **(decoding | options),
        limit=limit,
        max_completion_length=[args["max_completion_length"]],
        batch_size=args["per_device_eval_batch_size"],
        seed=args["seed"],
        show_progress=not args["disable_tqdm"],
    )


class TaskEvaluation(TrainerCallback):
    """
    Evaluates the model on held-out items of a task while it is trained: at step 0, every `eval_steps` and at the end.

    The accuracies are those of [`evaluate`] with the same options. They are logged by the trainer as
    `eval_<task>/accuracy`, which trackers show as `eval/<task>/accuracy`. Training is not touched: its weights are bit
    for bit those of a run without.

    Example:

    ```python
    trainer.add_callback(TaskEvaluation(trainer, "gsm8k", limit=256))
    trainer.train()
    ```

    Args:
        trainer ([`StableDRLTrainer`] or [`DiffusionSFTTrainer`]):
            The trainer, for its model, its options of decoding and its log.
        task (`str`):
            Key of [`data.TASKS`].
        limit (`int`, *optional*, defaults to `128`):
            Items from the start of the split.
        split (`str`, *optional*, defaults to `"test"`):
            Split of the task; never the one that is trained on.
        temperature (`float`, *optional*, defaults to `0.0`):
            0 is greedy. Rollouts have the trainer's own.
        num_samples (`int`, *optional*, defaults to `1`):
            Completions per item.
        prompt_style (`str`, *optional*):
            How prompts are worded. Defaults to the task's.
        source (`str`, *optional*):
            Where the items are. Defaults to the task's.
    """

    def __init__(
        self,
        trainer: Any,
        task: str,
        *,
        limit: int = 128,
        split: str = "test",
        temperature: float = 0.0,
        num_samples: int = 1,
        prompt_style: str | None = None,
        source: str | None = None,
    ):
        config = training_evaluation_config(
            trainer.args,
            task=task,
            limit=limit,
            split=split,
            temperature=temperature,
            num_samples=num_samples,
            prompt_style=prompt_style,
            source=source,
        )
        self.trainer = trainer
        self.plan = plan_evaluation(
            model_facts(trainer.model, trainer.processing_class),
            config,
            template_options=vars(trainer.args).get("chat_template_kwargs"),
        )

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:  # a resumed run has been evaluated where it was saved
            self.run()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % state.eval_steps == 0 or state.global_step >= state.max_steps:
            self.run()

    def run(self) -> dict[str, float]:
        """
        Evaluate now, and log.

        Returns:
            `dict[str, float]`:
                What was logged.
        """
        trainer = self.trainer
        accelerator, args = trainer.accelerator, vars(trainer.args)
        gathering = SimpleNamespace(
            ds3_gather_for_generation=args.get("ds3_gather_for_generation", True),
            gradient_checkpointing_kwargs=args["gradient_checkpointing_kwargs"],
        )

        def any_rank_active(is_active: bool) -> bool:
            return bool(gathered(accelerator, torch.tensor([is_active], device=accelerator.device)).any())

        start = time.perf_counter()
        with (
            _evaluation_mode(trainer.model),
            _compat.unwrapped_for_generation(trainer.model_wrapped, accelerator, gathering) as model,
            dense_attention(model),
        ):
            found = complete(
                model,
                self.plan,
                done={},
                write=lambda records: None,
                any_rank_active=any_rank_active if accelerator.num_processes > 1 else None,
            )
        records = gather_object(found)
        (scores,) = scores_by_length(self.plan, records).values()
        prefix = f"eval_{self.plan.task.name}"
        logs = {
            f"{prefix}/accuracy": scores["pass@1"]["mean"],
            f"{prefix}/mean_score": scores["mean_score"]["mean"],
            f"{prefix}/tokens_per_completion": scores["tokens_per_completion"],
            f"{prefix}/truncated": scores["truncated"],
            f"{prefix}/seconds": time.perf_counter() - start,
        }
        is_log_due = trainer.control.should_log
        # not the trainers' own: theirs add and clear the metrics of the training steps since their last log
        Trainer.log(trainer, dict(logs))
        trainer.control.should_log = is_log_due  # which every log takes for done
        return logs
