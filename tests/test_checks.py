# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
from typing import Any, Literal

import pytest
from datasets import Dataset, IterableDataset

from tests.tiny import tiny_llada
from trl_stabledrl.checks import (
    check_choice,
    check_dataset,
    check_datasets,
    check_output_dir,
    check_reference_path,
    default_bf16,
    resume_request,
    revision_of,
    unknown_key,
    with_flex_attention,
)

PROMPTS = Dataset.from_dict({"prompt": ["a"], "answer": ["b"]})


@pytest.mark.parametrize("value", [None, "a", "b"])
def test_a_known_choice_passes(value):
    check_choice("letter", value, Literal["a", "b"])


def test_an_unknown_choice_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"^letter='c' is not known\. Use one of 'a', 'b'\.$"):
        check_choice("letter", "c", Literal["a", "b"])


@pytest.mark.parametrize(
    ("key", "known", "message"),
    [
        ("num_mc_sample", ["num_mc_samples", "seed"], "'num_mc_sample'. The nearest known one is 'num_mc_samples'."),
        ("zzz", ["seed"], "'zzz'. The nearest known one is 'seed'."),
        ("seed", [], "'seed'."),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(key, known, message):
    assert unknown_key(key, known) == f"Unknown key {message}"


def stream(*rows: dict[str, Any]) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


@pytest.mark.parametrize("data", [PROMPTS, stream({"prompt": "a"}), PROMPTS.to_iterable_dataset()])
def test_a_dataset_with_its_columns_passes(data):
    check_dataset("train_dataset", data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, r"train_dataset is missing\. Pass a datasets\.Dataset with the columns prompt\."),
        (["a"], r"train_dataset is a list\. Pass a datasets\.Dataset"),
        (PROMPTS.select([]), "train_dataset is empty: it has 0 rows"),
        (
            PROMPTS.remove_columns("prompt"),
            r"no column 'prompt', only answer\. Rename .*rename_column\(old, 'prompt'\)",
        ),
        (PROMPTS.remove_columns("prompt").to_iterable_dataset(), "no column 'prompt', only answer"),
    ],
    ids=str,
)
def test_a_dataset_that_cannot_be_trained_on_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        check_dataset("train_dataset", data)


@pytest.mark.parametrize("held_out", [PROMPTS.select([]), {"a": PROMPTS, "b": PROMPTS.select([])}])
def test_every_evaluation_set_is_looked_at(held_out):
    check_datasets(PROMPTS, None, columns=("prompt",))
    check_datasets(PROMPTS, {"a": PROMPTS}, columns=("prompt", "answer"))
    with pytest.raises(ValueError, match="eval_dataset is empty"):
        check_datasets(PROMPTS, held_out, columns=("prompt",))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("true", True),
        ("True", True),
        ("false", False),
        ("run/checkpoint-1", "run/checkpoint-1"),
        (None, None),
        (True, True),
    ],
)
def test_a_request_to_resume_may_be_a_word(given, meant):
    assert resume_request(given) == meant


def test_a_folder_without_checkpoints_is_free(tmp_path):
    (tmp_path / "completions").mkdir()
    check_output_dir(None, None)
    check_output_dir(str(tmp_path / "new"), None)
    check_output_dir(str(tmp_path), None)


def test_a_folder_with_checkpoints_needs_a_word(tmp_path):
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    check_output_dir(str(tmp_path), True)
    check_output_dir(str(tmp_path), str(tmp_path / "checkpoint-9"))
    with pytest.raises(ValueError, match=r"already holds a checkpoint, checkpoint-10, .*Nothing was touched"):
        check_output_dir(str(tmp_path), False)


def test_bf16_is_the_default_only_where_there_is_an_accelerator(monkeypatch):
    assert default_bf16(None, use_cpu=True) is False
    assert default_bf16(True, use_cpu=True) is True
    for has_accelerator, expected in ((False, False), (True, None)):
        monkeypatch.setattr("torch.accelerator.is_available", lambda found=has_accelerator: found)
        assert default_bf16(None, use_cpu=False) is expected


def test_reference_of_a_model_built_in_memory_is_refused_with_the_remedies():
    with pytest.raises(ValueError, match="beta is above 0.*pass the folder as model="):
        check_reference_path(tiny_llada())


def test_flex_attention_is_asked_for_where_there_is_a_gpu_and_no_other_wish(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert with_flex_attention(None) == {"attn_implementation": "flex_attention"}
    assert with_flex_attention('{"revision": "r", "attn_implementation": null}') == {
        "revision": "r",
        "attn_implementation": "flex_attention",
    }
    given = {"attn_implementation": "eager"}
    assert with_flex_attention(given) == given

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert with_flex_attention({"dtype": "bfloat16"}) == {"dtype": "bfloat16"}


@pytest.mark.parametrize(("given", "revision"), [(None, None), ({"revision": "r"}, "r"), ('{"revision": "s"}', "s")])
def test_the_revision_is_found_in_a_dict_and_in_json(given, revision):
    assert revision_of(given) == revision
