# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts by vLLM on two processes, with the stand-in of `tests/vllm_double.py`; all in one launch."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.distributed.engine_worker import ADAPTER, KINDS, STEPS
from tests.distributed.processes import finished_by_two
from tests.tiny import tiny_sdar
from tests.trainer_tools import letter_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine_ranks")
    tiny_sdar(vocab_size=12, initializer_range=0.2).save_pretrained(folder / "sdar")
    letter_tokenizer().save_pretrained(folder / "sdar")
    return folder


@pytest.fixture(scope="module")
def found(folder) -> list[dict[str, Any]]:
    """What each process recorded."""
    finished_by_two("tests.distributed.engine_worker", str(folder), folder=folder)
    return [torch.load(folder / f"records-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", KINDS)
def test_a_run_on_two_processes_is_the_same_with_either_engine(name, found):
    for rank in range(2):
        expected, same = (found[rank][f"{name}, {backend}"] for backend in ("transformers", "vllm"))
        assert same["rollouts"] == expected["rollouts"]
        assert len({str(rollout) for rollout in same["rollouts"]}) == STEPS  # the policy moved, the engine's with it
        for parameter, value in expected["end"].items():
            assert torch.equal(value, same["end"][parameter]), parameter
        assert found[0][f"{name}, vllm"]["end"].keys() == expected["end"].keys()


@pytest.mark.parametrize("name", KINDS)
def test_the_engine_is_handed_the_weights_of_one_process(name, folder, found):
    for record in (found[rank][f"{name}, vllm"] for rank in range(2)):
        model: Any = AutoModelForCausalLM.from_pretrained(folder / "sdar")
        published = {key: value.clone() for key, value in model.named_parameters()}
        if "LoRA" in name:
            model = get_peft_model(model, LoraConfig(**ADAPTER))
        parameters = dict(model.named_parameters())
        assert parameters.keys() == record["parameters"].keys()
        with torch.no_grad():
            for key, parameter in parameters.items():
                parameter.copy_(record["parameters"][key])
        if "LoRA" in name:
            model = model.merge_and_unload()
        expected = dict(model.named_parameters())

        assert record["handed"].keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(value, record["handed"][key]), key
        assert any((value != expected[key]).any() for key, value in published.items())
        assert record["is_untouched"]


def test_processes_of_one_engine_see_each_others_prompts_and_keep_their_own_rows(found):
    calls = [found[rank]["ZeRO-3, tensor parallel, vllm"]["calls"] for rank in range(2)]
    assert calls[0] == calls[1]
    # the check, with one of each prompt that is long enough, and the rollouts
    assert generated(calls[0]) == ["generate 3", *["generate 12"] * STEPS]
    apart = [generated(found[rank]["ZeRO-3, vllm"]["calls"]) for rank in range(2)]
    assert apart == [["generate 1", *["generate 4"] * STEPS], ["generate 2", *["generate 8"] * STEPS]]


def generated(calls: list[str]) -> list[str]:
    return [call for call in calls if "generate" in call]


ELSEWHERE = "RuntimeError: The rollout failed on another process, whose message says why."


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too long", "ValueError: Prompt 1 has 38 tokens; with max_completion_length=6 that is 44, more than the 40"),
        ("a failing engine", "RuntimeError: The vLLM engine failed during a rollout (MemoryError: no page left)"),
        ("after it", "RuntimeError: The vLLM engine failed in an earlier rollout: MemoryError: no page left"),
        ("failing weights", "MemoryError: no page left"),
        ("not finite", "ValueError: Expected finite logits, got NaN or infinity in rows [0]"),
        ("another decoding", "RuntimeError: vLLM does not decode as transformers does: prompt 0, token "),
    ],
)
def test_a_fault_on_one_process_is_an_error_on_both(name, message, found):
    first, second = (record["faults"][name] for record in found)
    assert second.startswith(message)
    assert first == ELSEWHERE


def test_short_prompts_on_one_process_are_decoded_by_both(found):
    for record in (found[0]["faults"], found[1]["faults"]):
        assert record["right"] == record["plain"]
        assert record["short"] == record["short, plain"]
        assert record["all short"] == 2


def test_processes_go_on_together_after_a_fault(found):
    for record in (found[0]["faults"], found[1]["faults"]):
        assert record["right again"] == record["right at last"] == record["right"]
        assert len(record["nothing to check"]) == 1
