# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""The guard: what it sees in synthetic logs, what it advises, and that it ends a real run that fails."""

from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import PartialState
from transformers import TrainerControl

from tests.trainer_tools import config_of, run_of, tiny_model
from trl_stabledrl.guard import CAUSES, REMEDIES, StabilityGuard

CALM = {
    "drift": 0.1,
    "log_ratio/std_centred": 0.1,
    "weights/ess": 0.95,
    "weights/max": 0.2,
    "weights/saturated": 0.0,
    "update/negative_share": 0.5,
    "update/max_share": 0.05,
    "entropy": 1.0,
    "rollout/tokens_per_forward": 2.0,
    "reward": 0.4,
    "zero_std_groups": 1.0,
}
SIGNS: dict[str, dict[str, float | None]] = {
    "ratio_loop": {"drift": 0.5, "log_ratio/std_centred": 0.4, "weights/ess": 0.7},
    "unlearning": {"update/negative_share": 0.97, "update/max_share": 0.7},
    "one_completion": {"weights/ess": 0.3, "log_ratio/std_centred": 0.15},  # of 4 completions, little more than one
    "saturated": {"weights/saturated": 0.4},
    "misled": {"weights/saturated": 0.4, "reward": 0.1},
    "decoding": {"reward": 0.1, "entropy": 0.2},
    "no_signal": {"reward": 0.0, "zero_std_groups": 4.0},
}


@pytest.fixture
def logger_works():
    PartialState(cpu=True)  # accelerate's logger asks which process it is


def watch(guard: StabilityGuard, logs: list[dict[str, Any]], tmp_path, **options: Any) -> TrainerControl:
    args, control = config_of(tmp_path, **options), TrainerControl()
    for step, row in enumerate(logs, start=1):
        guard.on_log(args, SimpleNamespace(global_step=step), control, logs=row)
    return control


@pytest.mark.parametrize("cause", CAUSES)
def test_each_way_to_fail_is_told_once_by_its_own_name(cause, logger_works, tmp_path, caplog):
    guard = StabilityGuard(window=3)

    control = watch(guard, [CALM] * 3 + [CALM | SIGNS[cause]] * 9, tmp_path, mask_coupling="independent")

    assert [warning.cause for warning in guard.warnings] == ["saturated"] * (cause == "misled") + [cause]
    message = caplog.records[-1].getMessage()
    assert message == f"[RANK 0] {guard.warnings[-1].message}"
    assert len(caplog.records) == len(guard.warnings)
    assert f"Step {guard.warnings[-1].step}: " in message
    for name in CAUSES[cause].metrics:
        assert f"{name}=" in message
    assert "What helps: " in message
    assert not control.should_training_stop


def test_a_calm_run_and_single_spikes_are_left_alone(logger_works, tmp_path):
    guard = StabilityGuard(window=4)
    spike = {"drift": 0.3, "log_ratio/std_centred": 0.3, "weights/saturated": 0.9, "update/max_share": 0.9}

    watch(guard, ([CALM] * 5 + [CALM | spike]) * 10, tmp_path)

    assert guard.warnings == []


def test_on_policy_runs_and_logs_of_other_things_are_no_news(logger_works, tmp_path):
    guard = StabilityGuard(window=2)
    on_policy = CALM | {"drift": 0.0, "log_ratio/std_centred": 0.0, "weights/ess": 1.0}
    silent = on_policy | {"update/negative_share": None, "update/max_share": None}  # NaN, as TRL logs it
    others = [{"eval_reward": 0.0}, {"train_runtime": 3.0}, {}]

    watch(guard, [on_policy, silent, *others] * 20, tmp_path)

    assert guard.warnings == []


def test_advice_is_what_the_run_does_not_do_yet(logger_works, tmp_path):
    noisy: dict[str, Any] = {"objective": "grpo", "mask_coupling": "independent", "ratio_normalization": "sequence"}
    messages = []
    for options in (noisy, {"objective": "stabledrl"}, {"objective": "stabledrl", "epsilon": 1.0}):
        guard = StabilityGuard(window=2)
        watch(guard, [CALM | SIGNS["unlearning"]] * 2, tmp_path, **options)
        messages.append(guard.warnings[0].message.split("What helps: ")[1])

    assert messages[0].startswith("objective='stabledrl' (")
    assert "mask_coupling='shared'" in messages[0]
    assert "ratio_normalization='token'" in messages[0]
    assert messages[1] == "epsilon=1; a smaller learning_rate."
    assert messages[2] == "a smaller learning_rate."


def test_every_remedy_is_somebodys():
    assert {name for cause in CAUSES.values() for name in cause.remedies} == set(REMEDIES)


@pytest.mark.parametrize("cause", CAUSES)
def test_stop_saves_and_ends_the_run_unless_it_may_go_on_well(cause, logger_works, tmp_path):
    control = watch(StabilityGuard(stop=True, window=3), [CALM] * 3 + [CALM | SIGNS[cause]] * 6, tmp_path)

    assert control.should_training_stop == control.should_save == (cause != "saturated")


def test_window_is_checked():
    with pytest.raises(ValueError, match=r"window=0 must be at least 1"):
        StabilityGuard(window=0)


@pytest.mark.parametrize(("mode", "num_guards"), [("off", 0), ("warn", 1), ("stop", 1)])
def test_the_trainer_has_a_guard_unless_told_otherwise(mode, num_guards, tmp_path):
    trainer = run_of(tmp_path, stability_guard=mode, is_trained=False).trainer

    guards = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, StabilityGuard)]
    assert [guard.stop for guard in guards] == [mode == "stop"] * num_guards


def test_a_real_run_that_has_lost_every_reward_is_saved_and_ended(tmp_path, caplog):
    rewards = iter([1.0, 0.0] * 8)  # of the first rollout alone

    run = run_of(
        tmp_path,
        reward=lambda ids: next(rewards, 0.0),
        stability_guard="stop",
        max_steps=40,
        learning_rate=0.01,
        num_iterations=1,
    )

    step = run.trainer.state.global_step
    assert step < 12
    assert (tmp_path / f"checkpoint-{step}" / "model.safetensors").is_file()
    assert any("no completion is right any more" in record.getMessage() for record in caplog.records)


def test_noisy_ratios_of_a_real_run_are_seen_and_end_it(tmp_path):
    noisy: dict[str, Any] = {
        "mask_coupling": "independent",
        "mask_law": "uniform",
        "mc_sampling": "independent",
        "num_mc_samples": 1,
        "ratio_normalization": "sequence",
    }

    run = run_of(
        tmp_path,
        model=tiny_model(initializer_range=1.0),
        objective="grpo",
        num_iterations=2,
        learning_rate=0.3,
        max_grad_norm=1.0,
        max_steps=30,
        stability_guard="stop",
        **noisy,
    )

    (guard,) = (c for c in run.trainer.callback_handler.callbacks if isinstance(c, StabilityGuard))
    assert [warning.cause for warning in guard.warnings] == ["unlearning"]
    assert guard.warnings[0].step == run.trainer.state.global_step < 30
