# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import hashlib
import json
import math
import pickle
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from rich.console import Console

from tests.distributed import evaluation_worker
from tests.distributed.processes import finished_by_two
from tests.model_tools import with_adapter
from tests.tiny import tiny_llada, tiny_sdar, tiny_tokenizer
from tests.trainer_tools import run_of, tiny_model
from trl_stabledrl import DiffusionSFTConfig, DiffusionSFTTrainer
from trl_stabledrl import evaluation as evaluation_module
from trl_stabledrl.data import TASKS
from trl_stabledrl.evaluation import TaskEvaluation, evaluate, plan_evaluation, row_seeds
from trl_stabledrl.evaluation_config import EvaluationConfig
from trl_stabledrl.evaluation_records import (
    CompletionRecord,
    RecordWriter,
    bootstrap_interval,
    pass_at_k,
    read_records,
    scores_of,
)
from trl_stabledrl.evaluation_report import differences, draw_comparison, load_runs, show_comparison
from trl_stabledrl.models.facts import model_facts
from trl_stabledrl.provenance import weight_hashes
from trl_stabledrl.rewards import Grade

NUM_ITEMS = 5


def config_of(folder: Path | None = None, **changes: Any) -> EvaluationConfig:
    options: dict[str, Any] = {
        "task": "addition",
        "limit": NUM_ITEMS,
        "max_completion_length": [4, 6],
        "num_samples": 2,
        "temperature": 0.7,
        "num_resamples": 50,
        "batch_size": 3,
        "show_progress": False,
        "output_dir": None if folder is None else str(folder),
    }
    return EvaluationConfig(**options | changes)


@pytest.fixture
def parity_grader(monkeypatch):
    """A grader that a random model satisfies half of the time."""

    def grade(completions, **columns):
        assert set(columns) == {"answer"}
        rights = [hashlib.sha256(text.encode()).digest()[0] % 2 for text in completions]
        pairs = zip(completions, rights, strict=True)
        return [Grade(float(is_right), text, "right" if is_right else "wrong") for text, is_right in pairs]

    monkeypatch.setitem(evaluation_module.GRADERS, "exact_match_reward", grade)


def evaluated(config: EvaluationConfig, model: Any = None) -> Any:
    model = tiny_llada(dtype=torch.float64) if model is None else model
    return evaluate(model, tiny_tokenizer(), config)


def rows_of(evaluation: Any) -> list[CompletionRecord]:
    return [dataclasses.replace(record, seconds=0.0) for record in evaluation.records]


def record_of(item: int, score: float, *, sample: int = 0, length: int = 4, reason: str = "wrong") -> CompletionRecord:
    return CompletionRecord(
        max_completion_length=length,
        item=item,
        sample=sample,
        item_hash=f"hash{item}",
        completion="",
        num_tokens=3 + item,
        num_steps=2,
        is_truncated=item == 0,
        score=score,
        reason="right" if score == 1.0 else reason,
        answer=None,
        seconds=0.5,
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("family", [tiny_llada, tiny_sdar])
def test_rows_do_not_depend_on_the_batch_size(temperature, family):
    num_samples = 2 if temperature else 1
    model = family(dtype=torch.float64)
    expected, *others = (
        evaluated(config_of(temperature=temperature, num_samples=num_samples, batch_size=size), model)
        for size in (1, 3, 64)
    )

    assert [record.key for record in expected.records] == [
        (length, item, sample) for length in (4, 6) for item in range(NUM_ITEMS) for sample in range(num_samples)
    ]
    for other in others:
        assert rows_of(other) == rows_of(expected)
        assert other.results == expected.results
    assert len({record.completion for record in expected.records}) > 2


def test_noise_is_keyed_by_item_sample_length_and_seed():
    keys = [(length, item, sample) for length in (4, 6) for item in range(5) for sample in range(3)]

    seeds = row_seeds(0, keys)

    assert len({*seeds}) == len(keys)
    assert row_seeds(0, keys[7:9]) == seeds[7:9]
    assert not {*row_seeds(1, keys)} & {*seeds}


def test_prompt_ids_are_those_of_training(tmp_path):
    run = run_of(tmp_path, is_trained=False)
    tokenizer = tiny_tokenizer(chat_template=True)
    trainer = run.trainer
    trainer.processing_class = tokenizer

    for name in ("countdown", "addition"):
        prompts = list(TASKS[name].prompts("test", num_prompts=4)["prompt"])
        config = EvaluationConfig(task=name, limit=4)
        plan = plan_evaluation(model_facts(tiny_llada(), tokenizer), config)
        trained_on, *_ = trainer._tokenize_prompts(prompts)
        assert plan.prompt_ids == trained_on


@pytest.mark.usefixtures("parity_grader")
def test_an_evaluation_that_was_killed_goes_on_to_the_same_results(tmp_path, monkeypatch):
    whole = evaluated(config_of(tmp_path / "whole"))
    calls = []
    original = evaluation_module._complete_batch

    def interrupted(model, plan, length, keys, **kwargs):
        if len(calls) == 5:
            raise KeyboardInterrupt
        calls.append(keys)
        return original(model, plan, length, keys, **kwargs)

    monkeypatch.setattr(evaluation_module, "_complete_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluated(config_of(tmp_path / "killed"))
    (part,) = (tmp_path / "killed").glob("completions-*.jsonl")
    assert len(read_records(part)) == 13  # 3 + 3 + 3 + 1 of the first length, 3 of the second
    part.write_bytes(part.read_bytes()[:-20])  # the last line is torn
    part.rename(part.with_name("completions-001.jsonl"))  # as if by another process

    def recorded(model, plan, length, keys, **kwargs):
        calls.append(keys)
        return original(model, plan, length, keys, **kwargs)

    calls.clear()
    monkeypatch.setattr(evaluation_module, "_complete_batch", recorded)
    resumed = evaluated(config_of(tmp_path / "killed", batch_size=2))

    assert sum(map(len, calls)) == 20 - 12
    assert rows_of(resumed) == rows_of(whole)
    results = [(tmp_path / name / "results.json").read_bytes() for name in ("whole", "killed")]
    assert results[0] == results[1]
    assert json.loads(results[0]) == resumed.results
    assert 0 < resumed.results["scores"]["4"]["pass@1"]["mean"] < 1
    names = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert names == ["completions.jsonl", "items.jsonl", "results.json", "settings.json", "speed.json"]
    calls.clear()
    again = evaluated(config_of(tmp_path / "killed"))
    assert not calls
    assert again.records == resumed.records


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": 0.5}, "temperature was 0.7 and is 0.5"),
        ({"num_samples": 3}, "num_samples was 2 and is 3"),
        ({"limit": 4}, "num_items was 5 and is 4"),
        ({"max_completion_length": [4]}, r"max_completion_length was \[4, 6\] and is \[4\]"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"confidence_threshold": 0.9}, "confidence_threshold was null and is 0.9"),
        ({"model": tiny_llada}, "model_hash was .*; dtype was .*float64.* and is .*float32"),
    ],
)
def test_other_settings_do_not_go_on_with_an_evaluation(changes, named, tmp_path):
    evaluated(config_of(tmp_path / "out"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    model = changes.pop("model")() if "model" in changes else None

    with pytest.raises(ValueError, match=named):
        evaluated(config_of(tmp_path / "out", **changes), model)

    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(ValueError, match="holds notes.txt and no evaluation"):
        evaluated(config_of(tmp_path))
    with pytest.raises(ValueError, match="is a file"):
        evaluated(config_of(tmp_path / "notes.txt"))


def test_a_line_that_something_else_wrote_is_named(tmp_path):
    path = tmp_path / "completions-000.jsonl"
    path.write_text('{"item": 0}\n')

    with pytest.raises(ValueError, match="line 1, is no record"):
        read_records(path)


def test_a_torn_line_is_cut_off_before_more_is_written(tmp_path):
    path = tmp_path / "completions-000.jsonl"
    for record in (record_of(0, 1.0), record_of(1, 0.0)):
        writer = RecordWriter(path)
        writer.write([record])
        writer.close()
        with path.open("ab") as file:
            file.write(b'{"max_completion_')

    assert read_records(path) == [record_of(0, 1.0), record_of(1, 0.0)]


def test_everything_that_made_a_score_is_beside_it(tmp_path):
    found = evaluated(config_of(tmp_path / "out", suppress_eos="sampling", top_k=5)).results

    settings, environment = found["settings"], found["environment"]
    assert settings["block_length"] == {"4": 4, "6": 6}
    assert settings["num_denoising_steps"] == {"4": 2, "6": 3}
    wanted = {"temperature": 0.7, "top_k": 5, "suppress_eos": "sampling", "remasking": "low_confidence", "seed": 0}
    wanted |= {"num_items": NUM_ITEMS, "data_seed": 0, "task": "addition", "split": "test", "num_samples": 2}
    assert wanted.items() <= settings.items()
    prompts = list(TASKS["addition"].prompts("test", num_prompts=NUM_ITEMS)["prompt"])
    prompt_ids = tiny_tokenizer()(text=prompts)["input_ids"]
    assert settings["prompt_hash"] == hashlib.sha256(json.dumps(prompt_ids).encode()).hexdigest()
    assert environment["versions"]["torch"] == torch.__version__
    assert (environment["dtype"], environment["device"], environment["adapter_hash"]) == ("float64", "cpu", None)
    items = [json.loads(line) for line in (tmp_path / "out" / "items.jsonl").read_text().splitlines()]
    assert [item["prompt"] for item in items] == prompts


def test_hashes_tell_weights_from_adapters():
    plain, _ = weight_hashes(tiny_llada())
    wrapped, adapter = weight_hashes(with_adapter(tiny_llada()))
    other_model = tiny_llada()
    with torch.no_grad():
        next(iter(other_model.parameters()))[0, 0] += 1e-6

    assert wrapped == plain
    assert adapter is not None
    assert weight_hashes(other_model)[0] != plain
    changed = with_adapter(tiny_llada())
    with torch.no_grad():
        next(p for name, p in changed.named_parameters() if "lora_A" in name).add_(1)
    assert weight_hashes(changed)[0] == plain
    assert weight_hashes(changed)[1] != adapter


def test_pass_at_k_is_the_share_of_draws_with_a_right_sample():
    for num_samples, num_right in ((5, 0), (5, 2), (5, 5), (6, 1)):
        for k in range(1, num_samples + 1):
            draws = list(combinations(range(num_samples), k))
            share = sum(min(draw) < num_right for draw in draws) / len(draws)
            assert pass_at_k(num_samples, num_right, k) == pytest.approx(share, rel=1e-12)
    with pytest.raises(ValueError, match="k=3"):
        pass_at_k(2, 1, 3)


def test_scores_are_the_arithmetic_of_the_records():
    scores = {0: (1.0, 0.5, 1.0), 1: (0.0, 0.0, 0.0), 2: (0.0, 1.0, 0.25)}
    records = [
        record_of(item, score, sample=sample, reason="partial" if score > 0 else "wrong")
        for item, row in scores.items()
        for sample, score in enumerate(row)
    ]

    found = scores_of(records[::-1], num_samples=3, num_resamples=20, seed=0)

    assert found["pass@1"]["mean"] == pytest.approx((2 / 3 + 0 + 1 / 3) / 3)
    assert found["pass@2"]["mean"] == pytest.approx((1 + 0 + 2 / 3) / 3)
    assert found["pass@3"]["mean"] == pytest.approx(2 / 3)
    assert found["mean_score"]["mean"] == pytest.approx((2.5 / 3 + 0 + 1.25 / 3) / 3)
    assert found["reasons"] == {"partial": 2, "right": 3, "wrong": 4}
    assert found["tokens_per_completion"] == 4
    assert found["truncated"] == pytest.approx(1 / 3)
    assert [name for name in found if name.startswith("pass@")] == ["pass@1", "pass@2", "pass@3"]


def test_intervals_are_those_of_the_normal_law_for_many_items():
    values = [float(index % 4 == 0) for index in range(400)]

    low, high = bootstrap_interval(values, num_resamples=4000, seed=0)

    error = 1.96 * math.sqrt(0.25 * 0.75 / 400)
    assert (low, high) == (pytest.approx(0.25 - error, abs=0.004), pytest.approx(0.25 + error, abs=0.004))
    assert (low, high) == bootstrap_interval(values, num_resamples=4000, seed=0)
    assert (low, high) != bootstrap_interval(values, num_resamples=4000, seed=1)
    rng = np.random.default_rng(3)
    means = sorted(np.mean([values[i] for i in rng.integers(400, size=400)]) for _ in range(20))
    assert bootstrap_interval(values, num_resamples=20, seed=3) == pytest.approx(np.quantile(means, [0.025, 0.975]))


def test_tokens_and_steps_are_counted_up_to_the_end_token():
    model = tiny_llada(dtype=torch.float64, vocab_size=12, initializer_range=0.2)  # half of the completions end
    config = config_of(max_completion_length=[8], block_length=4, num_denoising_steps=4, limit=12, num_samples=4)
    # the tokenizer has the same ids for what the model knows
    found = evaluate(model, tiny_tokenizer(characters="0123456789+="[:7]), config)

    lengths = [record.num_tokens for record in found.records]
    assert {record.is_truncated for record in found.records} == {True, False}
    assert all(record.num_tokens == 8 for record in found.records if record.is_truncated)
    # a block takes four steps, and none follows that of an end token
    assert [record.num_steps for record in found.records] == [4 if length <= 4 else 8 for length in lengths]
    assert found.speed["by_length"]["8"]["num_tokens"] == sum(lengths)
    seconds = sum(record.seconds for record in found.records)
    assert found.speed["by_length"]["8"]["tokens_per_second"] == pytest.approx(sum(lengths) / seconds)


def test_the_default_generator_is_left_alone_and_the_model_in_its_mode():
    model = tiny_llada(dtype=torch.float64)
    model.train()
    model.model.layers[0].eval()
    state = torch.get_rng_state()

    evaluated(config_of(), model)

    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not model.model.layers[0].training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": None}, "task is missing"),
        ({"task": "gsm9k"}, "task='gsm9k' is not known. Did you mean 'gsm8k'"),
        ({"split": "dev"}, "split='dev' is none of task addition: train, test"),
        ({"max_completion_length": []}, "max_completion_length=nothing must be one or more"),
        ({"max_completion_length": [128, 0]}, "max_completion_length=128 0 must be"),
        ({"max_completion_length": [8, 8]}, "max_completion_length=8 8 must be"),
        ({"max_completion_length": ["x"]}, "max_completion_length=x must be"),
        ({"seed": -1}, "seed=-1 must be a whole number of at least 0"),
        ({"num_samples": 2.5}, "num_samples=2.5 must be a whole number of at least 1"),
        ({"limit": True}, "limit=True must be a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size=0 must be a whole number of at least 1"),
        ({"limit": 0}, "limit=0 must be a whole number of at least 1"),
        ({"num_samples": 2, "temperature": 0.0}, "num_samples=2 with temperature=0"),
        ({"prompt_style": "d1"}, "prompt_style='d1' is none of task addition: it has one wording"),
        ({"task": "gsm8k", "prompt_style": "d2"}, "prompt_style='d2' is none of task gsm8k: d1, boxed"),
        ({"source": "rows.jsonl"}, "source='rows.jsonl' does not apply to task addition"),
        ({"task": "gsm8k", "data_seed": 3}, "data_seed=3 does not apply to task gsm8k"),
        ({"remasking": "hi"}, "remasking='hi' is not known"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(**changes)


def test_conversations_need_a_chat_template():
    with pytest.raises(ValueError, match="has no chat template"):
        plan_evaluation(model_facts(tiny_llada(), tiny_tokenizer()), EvaluationConfig(task="countdown", limit=2))


# Comparison


@pytest.fixture
def two_runs(tmp_path, parity_grader):
    for name, seed in (("first", 0), ("second", 1)):
        evaluated(config_of(tmp_path / name, limit=8), tiny_llada(dtype=torch.float64, seed=seed))
    return [str(tmp_path / name) for name in ("first", "second")]


def test_differences_are_taken_item_by_item(two_runs):
    runs = load_runs(two_runs)

    found = {one.length: one for one in differences(runs)}

    assert found.keys() == {4, 6}
    for length, one in found.items():
        shares = [
            [
                sum(r.is_right for r in run.records if (r.max_completion_length, r.item) == (length, item)) / 2
                for item in range(8)
            ]
            for run in runs
        ]
        by_hand = [second - first for first, second in zip(*shares, strict=True)]
        assert (one.name, one.num_items) == ("second", 8)
        assert one.mean == pytest.approx(sum(by_hand) / 8)
        assert one.low <= one.mean <= one.high
        assert (one.num_better, one.num_worse) == (sum(d > 0 for d in by_hand), sum(d < 0 for d in by_hand))
    assert any(one.num_better for one in found.values())


def test_items_that_only_look_alike_are_not_paired(two_runs, tmp_path):
    runs = load_runs(two_runs)
    other = [dataclasses.replace(record, item_hash="another") for record in runs[1].records]

    assert not differences([runs[0], dataclasses.replace(runs[1], records=other)])
    fewer = [record for record in runs[1].records if record.item < 5]
    assert {one.num_items for one in differences([runs[0], dataclasses.replace(runs[1], records=fewer)])} == {5}


def test_comparison_is_shown_and_drawn(two_runs, tmp_path):
    pytest.importorskip("matplotlib")
    runs = load_runs(two_runs)
    console = Console(width=110, record=True, file=(tmp_path / "log.txt").open("w"))

    show_comparison(console, runs)
    assert draw_comparison(tmp_path / "x.png", runs)

    text = console.export_text()
    assert "pass@1 less that of first, item by item" in text
    assert f"{runs[1].scores(6)['pass@1']['mean']:.3f} [" in text
    assert "model_hash: " in text
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    console.file.close()


def test_unfinished_evaluations_and_other_tasks_are_not_compared(two_runs, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no results.json"):
        load_runs([two_runs[0], str(tmp_path / "empty")])
    with pytest.raises(ValueError, match="is no folder"):
        load_runs([two_runs[0], str(tmp_path / "nowhere")])
    results = json.loads((tmp_path / "second" / "results.json").read_text())
    results["settings"]["task"] = "sorting"
    (tmp_path / "second" / "results.json").write_text(json.dumps(results))
    with pytest.raises(ValueError, match="different tasks: addition, sorting"):
        load_runs(two_runs)


# Within training


def trained(folder: Path, *, is_evaluated: bool, **changes: Any) -> Any:
    options: dict[str, Any] = {"max_steps": 3, "eval_steps": 2, "dtype": torch.float32} | changes
    model = tiny_model(dtype=options.pop("dtype"))
    run = run_of(folder, model=model, is_trained=False, **options)
    if is_evaluated:
        run.trainer.add_callback(TaskEvaluation(run.trainer, "addition", limit=6, temperature=0.5))
    torch.manual_seed(0)
    run.trainer.train()
    return run


def _is_time(name: str) -> bool:
    return any(word in name for word in ("second", "time"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "gradient_checkpointing": True,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "num_iterations": 2,
        },
    ],
    ids=["plain", "checkpointing"],
)
def test_training_is_bit_for_bit_that_without_an_evaluation(changes, tmp_path):
    with_it, without = (trained(tmp_path / str(on), is_evaluated=on, **changes) for on in (True, False))

    assert torch.equal(with_it.parameters, without.parameters)
    logs = [
        [{name: value for name, value in one.items() if not _is_time(name)} for one in run.recorder.logs]
        for run in (with_it, without)
    ]
    evaluations = [one for one in logs[0] if any(name.startswith("eval_addition/") for name in one)]
    steps = [one["step"] for one in with_it.trainer.state.log_history if "eval_addition/accuracy" in one]
    assert steps == [0, 2, 3]
    assert [one for one in logs[0] if one not in evaluations] == logs[1]


@pytest.mark.usefixtures("parity_grader")
def test_accuracy_within_training_is_that_of_the_evaluation_afterwards(tmp_path):
    run = trained(tmp_path, is_evaluated=True, learning_rate=0.1)

    decoding: dict[str, Any] = {"max_completion_length": [6], "block_length": 4, "num_denoising_steps": 2}
    config = EvaluationConfig(task="addition", limit=6, temperature=0.5, seed=42, **decoding)
    after = evaluate(run.trainer.model, run.trainer.processing_class, config)
    scores = after.results["scores"]["6"]
    assert run.recorder.logged("eval_addition/accuracy")[-1] == scores["pass@1"]["mean"]
    assert run.recorder.logged("eval_addition/tokens_per_completion")[-1] == scores["tokens_per_completion"]


def test_supervised_training_is_evaluated_too_and_unchanged(tmp_path):
    def trained_supervised(is_evaluated: bool) -> Any:
        model = tiny_llada()
        rows = Dataset.from_dict({"prompt": ["1+1=", "2+2="], "completion": ["2", "4"]})
        args = DiffusionSFTConfig(
            str(tmp_path),
            max_completion_length=4,
            max_steps=2,
            eval_steps=1,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=True,
        )
        trainer = DiffusionSFTTrainer(model, args, train_dataset=rows, processing_class=tiny_tokenizer())
        if is_evaluated:
            trainer.add_callback(TaskEvaluation(trainer, "addition", limit=3))
        trainer.train()
        steps = [one["step"] for one in trainer.state.log_history if "eval_addition/accuracy" in one]
        assert steps == ([0, 1, 2] if is_evaluated else [])
        return model

    one, other = trained_supervised(True), trained_supervised(False)

    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_resumed_run_is_not_evaluated_at_its_start(tmp_path):
    trained(tmp_path, is_evaluated=True, max_steps=2, save_strategy="steps", save_steps=2)
    run = run_of(tmp_path, model=tiny_model(dtype=torch.float32), is_trained=False, max_steps=4, eval_steps=2)
    run.trainer.add_callback(TaskEvaluation(run.trainer, "addition", limit=6))
    run.trainer.train(resume_from_checkpoint=True)

    steps = [one["step"] for one in run.trainer.state.log_history if "eval_addition/accuracy" in one]
    assert steps == [0, 2, 4]


def test_evaluation_within_training_needs_to_know_when(tmp_path):
    run = run_of(tmp_path, is_trained=False)

    with pytest.raises(ValueError, match="eval_steps=None leaves open when to evaluate on task addition"):
        TaskEvaluation(run.trainer, "addition")


# Several processes


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    """What each of two processes found, and their folder; starting them takes longer than what they do."""
    folder = tmp_path_factory.mktemp("two")
    finished_by_two("tests.distributed.evaluation_worker", str(folder), folder=folder)
    return folder, [pickle.loads((folder / f"found-{rank}.pickle").read_bytes()) for rank in range(2)]


@pytest.mark.parametrize(("family", "temperature"), evaluation_worker.CASES)
def test_two_processes_make_the_rows_of_one(family, temperature, by_two, tmp_path):
    folder, found = by_two
    config = evaluation_worker.case_config(temperature, tmp_path / "one")
    alone = evaluate(evaluation_worker.case_model(family), tiny_tokenizer(), config)

    for records, num_processes in (one[family, temperature] for one in found):
        assert num_processes == 2
        assert [dataclasses.replace(record, seconds=0.0) for record in records] == rows_of(alone)
    assert len({record.key for record in alone.records}) == len(alone.records) == 5 * 2 * config.num_samples
    paths = [folder / f"{family}-{temperature}", tmp_path / "one"]
    results = [(path / "results.json").read_bytes() for path in paths]
    assert results[0] == results[1]
    assert {path.name for path in paths[0].iterdir()} == {path.name for path in paths[1].iterdir()}


def test_two_processes_train_and_evaluate_as_one(by_two, tmp_path):
    (first, second) = by_two[1]
    logs, _ = evaluation_worker.trained("data parallel", tmp_path, num_processes=1)

    assert [one["step"] for one in logs] == [0, 1]
    for name in ("data parallel", "sharded", "gathered"):
        for found in (first, second):
            assert [one["step"] for one in found[name][0]] == [0, 1]
            # before the first update; afterwards gradients are summed in another order
            assert found[name][0][0] == pytest.approx(logs[0]), name
    assert torch.equal(first["data parallel"][1], first["not evaluated"][1])
