# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
The update of two processes is that of one. All jobs run in the two processes of one launch, since starting them takes
longer than training: plain data parallelism (DDP over gloo), then ZeRO-3 and FSDP2, every parameter sharded. Where
there is no accelerator, accelerate would make FSDP2 data parallelism: the jobs tell it that there is one (`runs.py`).
"""

import dataclasses
import functools
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.processes import finished_by_two
from tests.distributed.runs import EARLY, ENDLESS, Job, Record, job, recorded
from tests.tiny import published_llada_folder, published_sdar_folder, tiny_llada, tiny_sdar
from tests.trainer_tools import naive_gradients, relative_difference, run_of


def layout(b: int, a: int, s: int, **options: Any) -> dict[str, Any]:
    """Rows per micro-step and process, micro-steps per optimizer step and per generation."""
    return {
        "per_device_train_batch_size": b,
        "gradient_accumulation_steps": a,
        "steps_per_generation": s,
        "max_steps": 3,
        "learning_rate": 0.1,
    } | options


FLOAT32 = {"dtype": "float32"}
TWICE = {"num_iterations": 2}
RELEASED = {"mask_coupling": "independent", "surrogate": "sandwich", "clip_mode": "upper", "ratio_cap": 1.05}
TRIPLE = {"prompts": ("ab", "defga", "gg")}
"""12 rows, so that a group straddles two processes."""

# jobs, and the layout of the same run on one process
DATA_PARALLEL = [
    (job("llada: groups inside a process", **layout(8, 1, 1, **TWICE)), (16, 1, 1)),
    (job("llada: straddling processes", **layout(6, 1, 1, **TWICE, **TRIPLE)), (12, 1, 1)),
    (job("llada: one group a micro-step", **layout(2, 3, 3, **TWICE, **TRIPLE)), (12, 1, 1)),
    (job("llada: straddling micro-steps", **layout(1, 6, 6, **TWICE, **TRIPLE)), (12, 1, 1)),
    (job("llada: two updates a rollout", **layout(2, 2, 4)), (8, 1, 2)),
    (job("llada: exchanged groups", **layout(1, 2, 8, **TWICE)), (4, 1, 4)),
    (job("llada: two rollouts an update", **layout(2, 4, 2)), (8, 2, 1)),
    (job("llada: a short last window", **layout(1, 4, 2, max_steps=4, **TRIPLE)), (4, 2, 1)),
    (job("llada: released", **layout(1, 6, 6, **TWICE, **TRIPLE, **RELEASED)), (12, 1, 1)),
    (job("llada: a lost row", **layout(1, 8, 8, **TWICE), lost_row=5), (16, 1, 1)),
    (job("llada: no signal", **layout(1, 8, 8, max_steps=1), is_silent=True), (16, 1, 1)),
    (job("llada: float32", **FLOAT32, **layout(1, 6, 6, **TWICE, **TRIPLE)), (12, 1, 1)),
    (job("sdar: one group a micro-step", family="sdar", **layout(2, 3, 3, **TWICE, **TRIPLE)), (12, 1, 1)),
    (job("sdar: straddling micro-steps", family="sdar", **layout(1, 6, 6, **TWICE, **TRIPLE)), (12, 1, 1)),
    (job("sdar: exchanged groups", family="sdar", **layout(1, 2, 8, **TWICE)), (4, 1, 4)),
    (job("sdar: float32", family="sdar", **FLOAT32, **layout(1, 6, 6, **TWICE, **TRIPLE)), (12, 1, 1)),
]
SHARDED_SAMPLING = {"ds3_gather_for_generation": False}
TWO_ENDING_EARLY = {"prompts": ("ab", "c", EARLY + "a", EARLY + "b")}
TWO_EMPTY = {"prompts": ("ab", "c", ENDLESS + "a", ENDLESS + "b"), "mask_truncated_completions": True}
"""The second process's rows all lack an end token, and are not scored."""
ADAM = {
    "optim": "adamw_torch",
    "adam_epsilon": 1e-3,  # far above the rounding of the gradients
    "learning_rate": 1e-3,
    "max_grad_norm": 0.2,
    "gradient_checkpointing": True,
}
SHARDED = [
    (job(f"{family}, {sharding}: {name}", family=family, sharding=sharding, **FLOAT32, **options), one)
    for family in ("llada", "sdar")
    for sharding in ("zero3", "fsdp2")
    for name, options, one in [
        ("sharded to sample", layout(2, 4, 4, **TWICE, **SHARDED_SAMPLING), (16, 1, 1)),
        ("straddling micro-steps", layout(1, 6, 6, **SHARDED_SAMPLING, **TRIPLE), (12, 1, 1)),
        ("Adam, clipped", layout(2, 2, 4, **ADAM), (8, 1, 2)),
        ("one process ends early", layout(8, 1, 1, **SHARDED_SAMPLING, **TWO_ENDING_EARLY), (16, 1, 1)),
        ("one process is empty", layout(8, 2, 1, **SHARDED_SAMPLING, **TWO_EMPTY), (16, 2, 1)),
        ("a lost row", layout(2, 4, 4, lost_row=5, max_steps=1), (16, 1, 1)),
        ("with a reference", layout(2, 2, 4, beta=0.5, is_loaded=True), (8, 1, 2)),
        ("LoRA", layout(2, 2, 4, beta=0.5, is_loaded=True, has_adapter=True, **SHARDED_SAMPLING), (8, 1, 2)),
        ("tied", layout(4, 2, 2, is_tied=True, **SHARDED_SAMPLING), (16, 1, 1)),
    ]
]
# scored positions of the two processes
UNEQUAL = {
    **FLOAT32,
    "token_chunk": 256,
    "prompts": ("ab",),
    "num_generations": 2,
    "block_length": 32,
    "max_completion_length": 320,
    "mask_law": "full",
    "mc_sampling": "independent",
    "num_mc_samples": 1,
}
SHARDED += [
    (job(f"llada, {sharding}: {name}", sharding=sharding, **layout(1, 1, 1, **UNEQUAL, **options)), (2, 1, 1))
    for sharding in ("zero3", "fsdp2")
    for name, options in [
        ("64 and 320 scored", {"lengths": (64, 320)}),
        ("0 and 320 scored", {"lengths": (-64, 320), "mask_truncated_completions": True}),
    ]
]
SHARDED += [
    (job("llada, zero3: gathered to sample", sharding="zero3", **FLOAT32, **layout(2, 4, 4, **TWICE)), (16, 1, 1)),
    (job("sdar, zero3: gathered to sample", family="sdar", sharding="zero3", **FLOAT32, **layout(2, 2, 4)), (8, 1, 2)),
    (job("llada, zero2", sharding="zero2", **FLOAT32, **layout(1, 6, 6, **TWICE, **TRIPLE)), (12, 1, 1)),
]
JOBS = [*DATA_PARALLEL, *SHARDED]
LAYOUT = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
# measured on one row or step: 2.4e-7 in float64, whose weights and old scores are float32, and 1.3e-6 in float32
TOLERANCE = {"float64": 5e-7, "float32": 3e-6}
UPDATE_TOLERANCE = {"float64": 5e-7, "float32": 2e-5}
"""Relative, of the change of all parameters since the start: measured 1.3e-7 and, with Adam, 1.0e-5."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    published_llada_folder(folder / "llada")
    published_sdar_folder(folder / "sdar")
    return folder


@pytest.fixture(scope="module")
def on_two_processes(folder):
    """What each process recorded of each job."""
    (folder / "jobs.pickle").write_bytes(pickle.dumps([job for job, _ in JOBS]))
    finished_by_two("tests.distributed.worker", str(folder), folder=folder)
    found = [torch.load(folder / f"records-{rank}.pt", weights_only=False) for rank in range(2)]
    return {job.name: [records[job.name] for records in found] for job, _ in JOBS}


@pytest.fixture(scope="module")
def on_one_process(folder):
    """The same run on one process; those that are alike there are made once."""

    @functools.cache
    def run(job: Job) -> Record:
        return recorded(job, folder)

    def alike(job: Job, sizes: tuple[int, int, int]) -> Record:
        options = dict(job.options) | dict(zip(LAYOUT, sizes, strict=True))
        options.pop("ds3_gather_for_generation", None)
        return run(dataclasses.replace(job, name="", sharding="none", options=tuple(sorted(options.items()))))

    return alike


def assert_near(found: float, expected: float, tolerance: float, where: Any) -> None:
    is_near = abs(found - expected) <= tolerance or (math.isnan(found) and math.isnan(expected))
    assert is_near, f"{where}: {found} is not {expected}"


@pytest.mark.parametrize(("job", "sizes"), JOBS, ids=[job.name.replace(" ", "-") for job, _ in JOBS])
def test_two_processes_make_the_update_of_one(job, sizes, on_two_processes, on_one_process):
    records, alone = on_two_processes[job.name], on_one_process(job, sizes)
    tolerance = TOLERANCE[job.dtype]

    assert {len(record.steps) for record in records} == {len(alone.steps)} == {dict(job.options)["max_steps"]}
    for number, one in enumerate(alone.steps):
        steps = [record.steps[number] for record in records]
        rows = {index: row for step in steps for index, row in step.rows.items()}
        assert rows.keys() == one.rows.keys()
        assert len(rows) == sum(len(step.rows) for step in steps)
        for index, row in rows.items():
            expected = one.rows[index]
            for name in ("completion", "is_noised", "num_scored", "advantage"):
                assert row[name] == expected[name], (number, index, name)
            for name in ("weight", "log_ratio"):
                assert_near(row[name], expected[name], tolerance, (number, index, name))
            for old, expected_old in zip(row["old_elbo"], expected["old_elbo"], strict=True):
                assert_near(old, expected_old, tolerance, (number, index, "old_elbo"))
        assert_near(sum(step.loss for step in steps) / 2, one.loss, tolerance, (number, "loss"))
        if steps[0].gradient is not None:
            assert torch.equal(steps[0].gradient, steps[1].gradient)
            assert_same_direction(steps[0].gradient, one.gradient, UPDATE_TOLERANCE[job.dtype], is_zero=job.is_silent)
        assert torch.equal(steps[0].parameters, steps[1].parameters)
        found, expected = (step.parameters - alone.start for step in (steps[0], one))
        assert_same_direction(found, expected, UPDATE_TOLERANCE[job.dtype], is_zero=job.is_silent)


def assert_same_direction(found: Tensor, expected: Tensor, tolerance: float, *, is_zero: bool) -> None:
    if is_zero:
        assert not found.any()
        assert not expected.any()
        return
    assert expected.norm() > 1e-4
    assert relative_difference(found, expected) < tolerance


@pytest.mark.parametrize(("job", "sizes"), JOBS, ids=[job.name.replace(" ", "-") for job, _ in JOBS])
def test_what_is_logged_is_that_of_all_processes(job, sizes, on_two_processes, on_one_process):
    """By the first one, of its rows and of the others'."""
    logs, expected = on_two_processes[job.name][0].logs, on_one_process(job, sizes).logs

    assert len(logs) == len(expected)
    for found, one in zip(logs, expected, strict=True):
        assert found.keys() == one.keys()
        for name, value in one.items():
            # None is what is logged in place of NaN
            wanted = None if value is None else pytest.approx(value, rel=1e-4, abs=1e-5)
            assert found[name] == wanted, name


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_gradients_of_two_processes_are_the_definition(family, tmp_path, on_two_processes):
    tiny = {"llada": tiny_llada, "sdar": tiny_sdar}[family]
    decoding = {"block_length": None, "num_denoising_steps": None} if family == "sdar" else {}
    model = tiny(vocab_size=12, dtype=torch.float64, initializer_range=0.2)
    options: dict[str, Any] = layout(12, 1, 1, **TWICE, **TRIPLE, **decoding, shuffle_dataset=False)
    run = run_of(tmp_path, model=model, **options)

    (record, _) = on_two_processes[f"{family}: straddling micro-steps"]
    for step, definition in zip(record.steps, naive_gradients(run), strict=True):
        assert definition.norm() > 1e-3
        assert relative_difference(step.gradient, definition) < 1e-6


@pytest.mark.parametrize("sharding", ["zero3", "fsdp2"])
def test_the_cases_are_what_they_are_said_to_be(sharding, on_two_processes):
    def rows(name: str) -> list[list[dict[str, Any]]]:
        return [[*record.steps[0].rows.values()] for record in on_two_processes[name]]

    def num_scored(name: str) -> list[int]:
        return [sum(row["num_scored"] for row in process) for process in rows(name)]

    assert num_scored(f"llada, {sharding}: 64 and 320 scored") == [64, 320]
    assert num_scored(f"llada, {sharding}: 0 and 320 scored") == [0, 320]
    for family in ("llada", "sdar"):
        some, none = num_scored(f"{family}, {sharding}: one process is empty")
        assert some > 0
        assert none == 0
        late, early = rows(f"{family}, {sharding}: one process ends early")
        assert {len(row["completion"]) for row in early} == {1}
        assert max(len(row["completion"]) for row in late) > 4
        steps = [record.steps[0] for record in on_two_processes[f"{family}, {sharding}: a lost row"]]
        assert [step.rows[5]["weight"] for step in steps if 5 in step.rows] == [0.0]
