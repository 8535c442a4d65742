# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

import json

import datasets
import pytest
from datasets import config as datasets_config

from trl_stabledrl.data import _load, gsm8k_prompts, math_prompts
from trl_stabledrl.rewards import gsm8k_reward, math_reward

GSM8K = [
    {"question": "How many legs have 3 cats?", "answer": "A cat has 4 legs.\n3*4=<<3*4=12>>12\n#### 12"},
    {"question": "What do 600 pens at $2 cost?", "answer": "600*2=1200\n#### 1,200"},
]
MATH = [
    {"problem": "Halve one.", "solution": r"First \boxed{1}, so it is $\boxed{\frac{1}{2}}$.", "level": "Level 1"},
    {"problem": "Root of eight?", "solution": r"It is $\boxed{2\sqrt{2}}$.", "level": "Level 2"},
]


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets_config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_gsm8k_rows_become_chat_prompts_with_the_number(tmp_path):
    rows = gsm8k_prompts("test", source=write_lines(tmp_path / "rows.jsonl", GSM8K))
    assert rows.column_names == ["prompt", "answer"]
    assert rows["answer"] == ["12", "1,200"]
    (message,) = rows[0]["prompt"]
    assert message["role"] == "user"
    assert message["content"].endswith("How many legs have 3 cats?")
    assert all(mark in message["content"] for mark in ("<reasoning>", "</reasoning>", "<answer>", "\\boxed{number}"))
    assert gsm8k_reward(["#### 12", "#### 1200"], answer=list(rows["answer"])) == [1.0, 1.0]


def test_math_rows_become_chat_prompts_with_the_last_box(tmp_path):
    rows = math_prompts("train", source=write_lines(tmp_path / "rows.jsonl", MATH))
    assert rows["answer"] == [r"\frac{1}{2}", r"2\sqrt{2}"]
    assert rows[1]["prompt"][0]["content"].endswith("Root of eight?")
    assert math_reward([r"\boxed{0.5}", r"\boxed{\sqrt{8}}"], answer=list(rows["answer"])) == [1.0, 1.0]


def test_a_folder_holds_a_file_per_split(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    write_lines(folder / "train.jsonl", GSM8K)
    write_lines(folder / "test.jsonl", GSM8K[1:])
    assert gsm8k_prompts("train", source=str(folder))["answer"] == ["12", "1,200"]
    assert gsm8k_prompts("test", source=str(folder))["answer"] == ["1,200"]


def test_num_prompts_keeps_the_first_rows(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", GSM8K)
    assert gsm8k_prompts("train", source=source, num_prompts=1)["answer"] == ["12"]
    with pytest.raises(ValueError, match="between 1 and the 2 rows of the train split.*got 3"):
        gsm8k_prompts("train", source=source, num_prompts=3)


def test_the_hub_is_asked_for_the_published_name_and_split(monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.Dataset.from_list(GSM8K if args[0] == "openai/gsm8k" else MATH)

    monkeypatch.setattr(_load, "load_dataset", load_dataset)
    gsm8k_prompts("test")
    math_prompts("train")
    assert calls == [
        (("openai/gsm8k", "main"), {"split": "test"}),
        (("DigitalLearningGmbH/MATH-lighteval", None), {"split": "train"}),
    ]


def test_unusable_sources_are_named(tmp_path):
    text = tmp_path / "rows.txt"
    text.write_text("rows")
    with pytest.raises(ValueError, match=r"Cannot read .*rows\.txt.*\.csv, \.json, \.jsonl, \.parquet"):
        gsm8k_prompts("train", source=str(text))
    source = write_lines(tmp_path / "rows.jsonl", MATH)
    with pytest.raises(ValueError, match="has no column `question`, `answer`: it has `problem`, `solution`, `level`"):
        gsm8k_prompts("train", source=source)
    with pytest.raises(ValueError, match="Unknown split 'dev'"):
        gsm8k_prompts("dev", source=source)
    source = write_lines(tmp_path / "unboxed.jsonl", [{"problem": "p", "solution": "It is 5."}])
    with pytest.raises(ValueError, match=r"Row 0 of the train split .* has no \\boxed\{\}.*It is 5\."):
        math_prompts("train", source=source)
