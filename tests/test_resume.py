# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""A run that is stopped anywhere and goes on ends as the run that was not stopped."""

import json
import logging
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.distributed.processes import finished, finished_by_two
from tests.resume_runs import KILLED, LAST_COMPLETE, ONE_PROCESS, layout, model_of, run, sft
from tests.trainer_tools import PROMPTS, flat, relative_difference
from trl_stabledrl import stabledrl_trainer

TWICE = {"num_iterations": 2}
THREE = {"prompts": PROMPTS[:3]}
"""12 rows, which do not come out even: an epoch ends with a short optimizer step."""
RELEASED = {"mask_coupling": "independent", "surrogate": "sandwich", "clip_mode": "upper", "ratio_cap": 1.5}
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    # where a run of 6 steps is resumed, and its options
    "a generation every 2 steps": ((1, 2, 3, 5), layout(4, 4, 4, **TWICE)),
    "two updates a rollout": ((3, 4), layout(4, 2, 4) | {"prompts": PROMPTS * 2}),
    "two updates, two iterations": ((1, 2, 3), layout(4, 1, 2, **TWICE) | {"prompts": PROMPTS[:2]}),
    "two rollouts an update, short windows": ((1, 2, 3), layout(2, 4, 2) | THREE),
    "one rollout an update": ((1, 2), layout(16, 1, 1) | {"prompts": PROMPTS * 2}),
    "released": ((3,), layout(4, 4, 4, **TWICE, **RELEASED)),
    "shared by the group": ((3,), layout(8, 1, 2, **TWICE, mask_sharing="group")),
    "evaluated": ((3,), layout(4, 4, 4, **TWICE, eval_strategy="steps", eval_steps=1) | {"eval_prompts": ["ab", "c"]}),
    "logged every 4 steps": ((3,), layout(4, 4, 4, **TWICE, logging_steps=4, log_completions=True)),
    "sdar": ((3,), layout(4, 4, 4, **TWICE) | {"family": "sdar"}),
    "sdar, two updates a rollout": ((2, 3), layout(2, 4, 8, **TWICE) | {"family": "sdar"}),
}


def with_masks_kept(monkeypatch: Any, masks: dict[tuple[int, ...], Any]) -> None:
    """Keeps the masks of each row and inner iteration, which have to be the same whenever the row is scored."""
    plan_masks = stabledrl_trainer.plan_masks

    def keeping(rows: Any, settings: Any, *, iteration: int = 0) -> Any:
        plan = plan_masks(rows, settings, iteration=iteration)
        lengths = rows.completion_length.tolist()  # rows of a group may share their noise
        for i, (key, length) in enumerate(zip(rows.noise_key.tolist(), lengths, strict=True)):
            found = (plan.is_noised[i].tolist(), plan.weight[i].tolist())
            assert masks.setdefault((key, iteration, length), found) == found
        return plan

    monkeypatch.setattr(stabledrl_trainer, "plan_masks", keeping)
    monkeypatch.setattr("trl_stabledrl.likelihood.plan_masks", keeping)


def logs_of(recorder: Any) -> list[dict[str, Any]]:
    """What was logged in each step, without what measures time."""
    timed = ("second", "runtime", "step_time")
    return [
        {name: value for name, value in logs.items() if not any(part in name for part in timed)}
        for logs in recorder.logs
        if "train_loss" not in logs
    ]


def assert_same_state(found: Any, expected: Any) -> None:
    assert torch.equal(flat(found.model.parameters()), flat(expected.model.parameters()))
    states = (trainer.optimizer.state_dict()["state"] for trainer in (found, expected))
    for one, other in zip(*(state.values() for state in states), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert found.lr_scheduler.state_dict() == expected.lr_scheduler.state_dict()
    assert found.state.global_step == expected.state.global_step


@pytest.mark.parametrize("case", CASES)
def test_a_run_resumed_at_any_step_is_the_uninterrupted_one(case, tmp_path, monkeypatch):
    steps, changes = CASES[case]
    options: dict[str, Any] = {"max_steps": 6} | changes
    masks: dict[tuple[int, ...], Any] = {}
    with_masks_kept(monkeypatch, masks)
    whole = run(tmp_path / "whole", **options)
    num_masks = len(masks)

    for step in steps:
        again = run(tmp_path / f"again-{step}", resume=str(tmp_path / "whole" / f"checkpoint-{step}"), **options)

        assert len(again.gradients) == 6 - step
        assert_same_state(again.trainer, whole.trainer)
        assert again.trainer.num_rollouts == whole.trainer.num_rollouts
        assert again.trainer._step == whole.trainer._step
        assert again.trainer.state.num_input_tokens_seen == whole.trainer.state.num_input_tokens_seen
        logs = logs_of(again.recorder)
        assert logs
        if options.get("logging_steps") == 4 and step % 4:  # Trainer's loss is the mean over the steps since it began
            logs[0]["loss"] = logs_of(whole.recorder)[-len(logs)]["loss"]
        assert logs == logs_of(whole.recorder)[-len(logs) :]
    assert len(masks) == num_masks


def test_rollouts_made_before_the_checkpoint_are_not_made_again(tmp_path):
    options = layout(4, 4, 4, **TWICE, max_steps=4)
    run(tmp_path, **options)
    rows = load_file(tmp_path / "checkpoint-3" / "stabledrl_rollouts.safetensors")
    assert rows["row_index"].tolist() == list(range(16, 32))
    assert not (tmp_path / "checkpoint-2" / "stabledrl_rollouts.safetensors").exists()

    again = run(tmp_path / "again", resume=str(tmp_path / "checkpoint-3"), **options)

    assert again.recorder.generations == []
    lengths = rows["completion_mask"].sum(1).tolist()
    assert len(lengths) == 16
    for index, batch in enumerate(again.trainer._buffered_inputs):
        assert torch.equal(batch["completion_ids"], rows["completion_ids"][4 * index : 4 * index + 4])


def test_seconds_are_those_of_the_steps_since_the_resume(tmp_path):
    options = layout(16, 1, 1, max_steps=4, save_steps=3)
    run(tmp_path, **options)
    again = run(tmp_path / "again", resume=str(tmp_path / "checkpoint-3"), **options)
    (logs,) = (logs for logs in again.recorder.logs if "seconds/rollout" in logs)
    (runtime,) = again.recorder.logged("train_runtime")
    # TRL's own clock, which does not count the calls around it; divided by all 4 steps it would be a quarter
    assert logs["step_time"] * 0.5 < sum(v for name, v in logs.items() if name.startswith("seconds/")) < runtime


@pytest.mark.parametrize("step", [2, 3, 4])  # an epoch has 2
def test_a_reward_that_draws_random_numbers_gets_the_same_ones(step, tmp_path):
    def reward(ids: Any) -> float:
        return random.randrange(8) / 8

    options: dict[str, Any] = layout(4, 4, 4, **TWICE, max_steps=6) | {"reward": reward}
    whole = run(tmp_path, **options)
    again = run(tmp_path / "again", resume=str(tmp_path / f"checkpoint-{step}"), **options)
    assert torch.equal(again.parameters, whole.parameters)


class SaveInside(TrainerCallback):
    """Saves after the gradient of a step and before its update, as Transformers does on SIGTERM."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.trainer: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)


# in a step that a rollout begins, in one between, and in one of several rollouts
@pytest.mark.parametrize(("sizes", "step"), [((4, 4, 4), 2), ((4, 4, 4), 3), ((4, 2, 4), 3), ((2, 4, 2), 3)])
def test_a_checkpoint_inside_a_step_begins_that_step_anew(sizes, step, tmp_path, monkeypatch):
    iterations = {} if sizes == (2, 4, 2) else TWICE
    options = layout(*sizes, **iterations, max_steps=5, save_strategy="no")
    save = SaveInside(step)
    train = stabledrl_trainer.StableDRLTrainer.train

    def train_watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        save.trainer = self
        return train(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(stabledrl_trainer.StableDRLTrainer, "train", train_watched)
        whole = run(tmp_path, callbacks=[save], **options)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{step}"]

    again = run(tmp_path / "again", resume=str(tmp_path / f"checkpoint-{step}"), **options)
    assert len(again.gradients) == 5 - step
    assert_same_state(again.trainer, whole.trainer)


def test_the_adapter_in_training_is_resumed_beside_its_frozen_start(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        get_peft_model(model_of(), config).save_pretrained(tmp_path / "adapter")

    def continued(folder: Path, resume: str | None = None) -> Any:
        model = PeftModel.from_pretrained(model_of(), str(tmp_path / "adapter"), is_trainable=True)
        return run(folder, model=model, resume=resume, **layout(4, 4, 4, **TWICE, max_steps=4, beta=0.1))

    whole = continued(tmp_path / "whole")
    again = continued(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-3"))

    assert_same_state(again.trainer, whole.trainer)
    assert again.recorder.logged("kl") == whole.recorder.logged("kl")[-1:]
    assert again.recorder.logged("kl")[0] > 0
    for name, parameter in again.trainer.model.named_parameters():
        assert parameter.requires_grad == ("lora" in name and ".ref." not in name), name


@pytest.mark.parametrize("options", [{}, {"logging_steps": 3}, {"eval_strategy": "steps", "eval_steps": 1}])
def test_supervised_training_resumed_at_any_step_is_the_uninterrupted_one(options, tmp_path):
    def logs_since(trainer: Any, step: int) -> list[Any]:
        names = ("elbo_per_token", "num_tokens", "learning_rate", "eval_loss", "epoch")
        history = [logs for logs in trainer.state.log_history if logs["step"] > step]
        return [{name: logs.get(name) for name in names} for logs in history]

    whole = sft(tmp_path / "whole", max_steps=6, **options)
    for step in (1, 2, 3, 5):  # an epoch has 2
        folder = tmp_path / "whole" / f"checkpoint-{step}"
        again = sft(tmp_path / f"again-{step}", resume=str(folder), max_steps=6, **options)

        assert_same_state(again, whole)
        assert again.num_rows == whole.num_rows
        assert logs_since(again, step) == logs_since(whole, step)
        state = json.loads((folder / "stabledrl_state.json").read_text())
        assert state["num_rows"] == {1: 4, 2: 7, 3: 11, 5: 18}[step]  # 7 rows an epoch: 4, then 3


# Killed runs


class StopInStep(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise SystemExit


class EndEpochs(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = True


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    finished([sys.executable, "-u", "-m", "tests.resume_runs", "killed", str(folder)], folder=folder)
    return folder


@pytest.fixture(scope="module")
def not_killed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"), **KILLED)


@pytest.mark.parametrize("moment", LAST_COMPLETE)
def test_a_killed_run_resumes_at_its_last_complete_checkpoint(moment, killed, not_killed):
    folder, step = killed / moment, LAST_COMPLETE[moment]

    again = run(folder, resume="true", **KILLED)

    assert len(again.gradients) == 10 - step
    assert_same_state(again.trainer, not_killed.trainer)
    # save_total_limit=1, whatever the killed run left
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["checkpoint-10"]


def test_a_run_that_had_ended_is_left_as_it_was(tmp_path):
    options = layout(4, 4, 4, max_steps=3, save_total_limit=1, lr_scheduler_type="constant")
    ended = run(tmp_path / "run", **options)
    again = run(tmp_path / "run", resume=True, **options)
    trained = sft(tmp_path / "sft", max_steps=3)
    tried = sft(tmp_path / "sft", resume=True, max_steps=3)

    assert again.gradients == []
    assert_same_state(again.trainer, ended.trainer)
    assert_same_state(tried, trained)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]


def test_going_back_sets_the_later_checkpoints_aside(tmp_path):
    run(tmp_path, **layout(4, 4, 4, max_steps=5))
    options = layout(4, 4, 4, max_steps=5, learning_rate=1e-3)

    with pytest.raises(SystemExit):
        run(tmp_path, resume=str(tmp_path / "checkpoint-2"), callbacks=[StopInStep(4)], **options)
    again = run(tmp_path, resume=True, **options)

    assert len(again.gradients) == 1  # from the new line's checkpoint-4, not the old line's 5
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == [*(f"abandoned-checkpoint-{n}-1" for n in (3, 4, 5)), *(f"checkpoint-{n}" for n in range(1, 6))]


def test_a_kill_between_the_renames_of_a_save_loses_nothing(tmp_path):
    options: dict[str, Any] = layout(4, 4, 4, max_steps=3, save_total_limit=1, lr_scheduler_type="constant")
    whole = run(tmp_path / "whole", **options)
    shorter: dict[str, Any] = options | {"max_steps": 2}
    run(tmp_path / "run", **shorter)
    staging = tmp_path / "run" / "_saving"
    staging.mkdir()
    shutil.copytree(tmp_path / "run" / "checkpoint-2", staging / "replaced")
    (tmp_path / "run" / "checkpoint-2").rename(staging / "checkpoint-2")

    again = run(tmp_path / "run", resume=True, **options)

    assert_same_state(again.trainer, whole.trainer)


def test_an_epoch_that_is_cut_short_is_not_begun_again(tmp_path):
    ended = run(tmp_path, prompts=[*"abcdefg", "ab"], callbacks=[EndEpochs()], **layout(8, 2, 2, max_steps=4))

    first, second = ({tuple(prompt) for prompt in generation.prompts} for generation in ended.recorder.generations)
    assert first != second


def test_fewer_prompts_than_a_generation_takes_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"train_dataset has 3 prompts, .* = 16 / 4 = 4\. Add prompts"):
        run(tmp_path, prompts=["a", "b", "c"], **layout(4, 4, 4, max_steps=1))


# Another number of processes


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    whole = {
        name: run(folder / name / "one", max_steps=6, **options).parameters for name, options in ONE_PROCESS.items()
    }
    whole["sft"] = flat(sft(folder / "sft" / "one", max_steps=3).model.parameters())
    finished_by_two("tests.resume_runs", "two", str(folder), folder=folder)
    return folder, whole, torch.load(folder / "parameters.pt")


@pytest.mark.parametrize("name", [*ONE_PROCESS, "sft", "sharded", "fsdp2"])
def test_two_processes_resume_bit_for_bit(name, on_two):
    _, _, found = on_two
    assert torch.equal(found[f"{name}: resumed"], found[f"{name}: whole"])


@pytest.mark.parametrize("name", ["sharded", "fsdp2"])
def test_what_two_processes_shard_is_saved_as_one_published_checkpoint(name, on_two):
    folder, _, found = on_two

    model = AutoModelForCausalLM.from_pretrained(folder / name / "two" / "checkpoint-4")

    assert torch.equal(flat(model.parameters()), found[f"{name}: whole"])


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process_goes_on_for_two_and_two_for_one(name, on_two):
    folder, whole, found = on_two
    alone = run(
        folder / name / "alone",
        resume=str(folder / name / "two" / "checkpoint-3"),
        max_steps=6,
        **ONE_PROCESS[name],
    )
    start = flat(model_of().parameters())
    for parameters in (alone.parameters, found[f"{name}: from one"]):
        # measured 4.4e-15: sums over rows are taken in another order
        assert relative_difference(parameters - start, whole[name] - start) < 1e-12


# What cannot be continued


def test_pending_rollouts_need_the_settings_they_were_scored_under(tmp_path):
    run(tmp_path, **layout(4, 4, 4, **TWICE, max_steps=3))
    folder = str(tmp_path / "checkpoint-3")

    changes: list[tuple[dict[str, Any], str]] = [
        ({"mask_law": "uniform"}, r"mask_law='block_suffix', but this run has 'uniform'.*multiple of 2 steps"),
        ({"num_mc_samples": 4}, "num_mc_samples=2, but this run has 4"),
        ({"seed": 7}, "seed=42, but this run has 7"),
        ({"gradient_accumulation_steps": 2}, r"gradient_accumulation_steps \* processes=16, but this run has 8"),
    ]
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "again", resume=folder, **layout(4, 4, 4, **TWICE, max_steps=6) | change)


def test_between_generations_a_setting_may_change_and_no_noise_comes_again(tmp_path, monkeypatch):
    masks: dict[tuple[int, ...], Any] = {}
    with_masks_kept(monkeypatch, masks)
    run(tmp_path, **layout(4, 4, 4, max_steps=3))
    assert {row for row, *_ in masks} == set(range(48))
    masks.clear()

    options: dict[str, Any] = layout(8, 4, 4, max_steps=5) | {"prompts": PROMPTS * 2}
    run(tmp_path / "again", resume=str(tmp_path / "checkpoint-3"), **options)

    # 2 rollouts of 32 rows; 48 rows were 1.5 of them
    assert {row for row, *_ in masks} == set(range(64, 128))


def test_a_checkpoint_of_another_trainer_is_not_continued(tmp_path):
    run(tmp_path, **layout(16, 1, 1, max_steps=1))
    (tmp_path / "checkpoint-1" / "stabledrl_state.json").unlink()
    for resume in (True, str(tmp_path / "checkpoint-1")):
        with pytest.raises(ValueError, match=r"stabledrl_state\.json is missing: the save was not finished, or"):
            run(tmp_path, resume=resume, **layout(16, 1, 1, max_steps=2))


def test_a_damaged_checkpoint_is_passed_over_by_name(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("trl_stabledrl"), "propagate", True)
    options = layout(16, 1, 1, max_steps=3)
    whole = run(tmp_path, **options)
    weights = tmp_path / "checkpoint-2" / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:100])
    (tmp_path / "checkpoint-3" / "optimizer.pt").unlink()

    with pytest.raises(ValueError, match=rf"model\.safetensors is cut off: 100 of {size} bytes\. .* is checkpoint-1"):
        run(tmp_path, resume=str(tmp_path / "checkpoint-2"), **options)
    with caplog.at_level("WARNING", logger="trl_stabledrl.checkpoints"):
        again = run(tmp_path, resume=True, **options)

    assert f"Resuming from {tmp_path / 'checkpoint-1'}" in caplog.text
    assert "checkpoint-3: optimizer.pt is missing; checkpoint-2: model.safetensors is cut off" in caplog.text
    assert_same_state(again.trainer, whole.trainer)


def test_nothing_to_resume_from_is_said(tmp_path):
    with pytest.raises(ValueError, match="holds no complete checkpoint. Leave resume_from_checkpoint out"):
        run(tmp_path, resume=True, **layout(16, 1, 1))


def test_a_checkpoint_without_the_optimizer_is_not_resumed(tmp_path):
    run(tmp_path, **layout(16, 1, 1, max_steps=1, save_only_model=True))
    with pytest.raises(ValueError, match="save_only_model=True"):
        run(tmp_path, resume=True, **layout(16, 1, 1, max_steps=2))


@pytest.mark.parametrize(
    ("sharding", "num_processes", "message"),
    [
        ("deepspeed", 2, "was saved with sharding 'none', but this run has 'deepspeed'"),
        ("none", 2, None),  # any number of processes reads it
    ],
)
def test_the_format_of_the_optimizer_is_looked_at_first(sharding, num_processes, message, tmp_path, monkeypatch):
    run(tmp_path, **layout(16, 1, 1, max_steps=1))
    path = tmp_path / "checkpoint-1" / "stabledrl_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_processes": num_processes}))
    monkeypatch.setattr("trl_stabledrl.checkpoints.sharding_of", lambda accelerator: sharding)
    if message is None:
        run(tmp_path, resume=True, **layout(16, 1, 1, max_steps=2))
        return
    with pytest.raises(ValueError, match=message):
        run(tmp_path, resume=True, **layout(16, 1, 1, max_steps=2))


def test_deepspeed_cannot_change_the_number_of_processes(tmp_path, monkeypatch):
    run(tmp_path, **layout(16, 1, 1, max_steps=1))
    path = tmp_path / "checkpoint-1" / "stabledrl_state.json"
    state = json.loads(path.read_text()) | {"num_processes": 8, "sharding": "deepspeed"}
    path.write_text(json.dumps(state))
    monkeypatch.setattr("trl_stabledrl.checkpoints.sharding_of", lambda accelerator: "deepspeed")
    with pytest.raises(ValueError, match="saved by 8 processes under DeepSpeed, but this run has 1.*on 8 processes"):
        run(tmp_path, resume=True, **layout(16, 1, 1, max_steps=2))


@pytest.mark.parametrize("resume", [None, False, "false"])
def test_an_output_folder_with_checkpoints_of_another_run_is_left_alone(resume, tmp_path):
    def files() -> dict[str, bytes]:
        return {str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    run(tmp_path, **layout(16, 1, 1, max_steps=1))
    before = files()
    assert before

    with pytest.raises(ValueError, match=r"already holds a checkpoint, checkpoint-1.*resume_from_checkpoint=true"):
        run(tmp_path, resume=resume, **layout(16, 1, 1, max_steps=1))
    assert files() == before
