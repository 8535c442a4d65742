# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

import json

import datasets
import pytest
from datasets import config as datasets_config

from trl_stabledrl.data import (
    _load,
    aime24_prompts,
    countdown_prompts,
    gsm8k_prompts,
    math500_prompts,
    math_prompts,
    sudoku_prompts,
)
from trl_stabledrl.rewards import countdown_reward, gsm8k_reward, math_reward

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
    with pytest.raises(ValueError, match="The train split of .* has 2 rows for this task, too few for num_prompts=3"):
        gsm8k_prompts("train", source=source, num_prompts=3)


class Hub:
    """Stands in for the Hub: rows by name, and what was asked for."""

    def __init__(self, **rows):
        self.rows = rows
        self.calls = []

    def load_dataset(self, name, config=None, *, split):
        self.calls.append((name, config, split))
        return datasets.Dataset.from_list(self.rows[name.rsplit("/", 1)[-1]])


AIME = [{"id": 60, "problem": "Add.", "solution": "...", "answer": "073", "url": "", "year": "2024"}]
MATH_500 = [{"problem": "Halve one.", "solution": "...", "answer": r"\frac{1}{2}", "unique_id": "test/1.json"}]
COUNTDOWN = [{"target": 10 + 3 * a, "nums": [3, a, 10]} for a in range(1, 21)]
COUNTDOWN += [{"target": 10 + 3 * a, "nums": [10, 3, a]} for a in range(1, 21)]  # the same problems, in another order
COUNTDOWN += [{"target": 11 + 3 * a, "nums": [1, 3, a, 10]} for a in range(1, 21)]


@pytest.fixture
def hub(monkeypatch):
    hub = Hub(
        gsm8k=GSM8K,
        aime_2024=AIME,
        **{"MATH-lighteval": MATH, "MATH-500": MATH_500, "Countdown-Tasks-3to4": COUNTDOWN},
    )
    monkeypatch.setattr(_load, "load_dataset", hub.load_dataset)
    return hub


def test_the_hub_is_asked_for_the_published_name_and_split(hub):
    gsm8k_prompts("test")
    math_prompts("train")
    math500_prompts("test")
    aime24_prompts()
    assert hub.calls == [
        ("openai/gsm8k", "main", "test"),
        ("DigitalLearningGmbH/MATH-lighteval", None, "train"),
        ("HuggingFaceH4/MATH-500", None, "test"),
        ("HuggingFaceH4/aime_2024", None, "train"),  # the only split there
    ]


def test_benchmarks_have_a_test_split_only(hub):
    assert math500_prompts("test")["answer"] == [r"\frac{1}{2}"]
    assert aime24_prompts("test")["answer"] == ["73"]
    for prompts in (math500_prompts, aime24_prompts):
        with pytest.raises(ValueError, match="Unknown split 'train': this task has 'test'"):
            prompts("train")


def test_math_and_its_benchmark_word_a_problem_alike(hub):
    assert math500_prompts("test")[0]["prompt"] == math_prompts("test")[0]["prompt"]


@pytest.mark.parametrize("prompts", [gsm8k_prompts, math_prompts, math500_prompts, aime24_prompts])
def test_styles_differ_in_the_form_of_the_answer_only(hub, prompts):
    tagged, plain = (prompts("test", prompt_style=style)[0]["prompt"][0]["content"] for style in ("d1", "boxed"))
    assert prompts("test")[0]["prompt"][0]["content"] == tagged
    assert tagged.splitlines()[0] == plain.splitlines()[0]
    assert tagged.splitlines()[-1] == plain.splitlines()[-1]
    assert ("<answer>" in tagged, "<answer>" in plain) == (True, False)
    assert "\\boxed{" in plain
    with pytest.raises(ValueError, match="Unknown `prompt_style` 'plain': expected 'd1' or 'boxed'"):
        prompts("test", prompt_style="plain")


def problems_of(rows):
    return {(*sorted(row["numbers"]), row["target"]) for row in rows}


def test_countdown_of_the_hub_is_divided_by_the_hash_of_generated_problems(hub):
    source = "Jiayi-Pan/Countdown-Tasks-3to4"
    for num_numbers in (3, 4):
        splits = [
            countdown_prompts(split, source=source, num_numbers=num_numbers).to_list() for split in ("train", "test")
        ]
        train, test = map(problems_of, splits)
        assert train
        assert test
        assert not train & test
        assert train | test == problems_of(
            {"numbers": row["nums"], "target": row["target"]} for row in COUNTDOWN if len(row["nums"]) == num_numbers
        )
    assert {call[2] for call in hub.calls} == {"train"}  # the only split there
    generated = problems_of(countdown_prompts("train", num_prompts=3000))
    first = next(iter(generated))
    hub.rows["Countdown-Tasks-3to4"] = [{"nums": first[:3], "target": first[3]}]
    assert problems_of(countdown_prompts("train", source=source)) == {first}
    with pytest.raises(ValueError, match="The test split of .* has 0 rows"):
        countdown_prompts("test", source=source)


def test_local_countdown_is_taken_as_it_is(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", COUNTDOWN)
    rows = countdown_prompts("test", source=source, num_prompts=5)
    assert rows.column_names == ["prompt", "numbers", "target"]
    assert rows["target"] == [13, 16, 19, 22, 25]
    assert len(countdown_prompts("test", source=source)) == 40
    assert countdown_reward(["<answer>3*1+10</answer>"], **rows[:1]) == [1.0]


def test_sudoku_of_a_csv_keeps_its_zeros(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("Puzzle,Solution\n0030041200400321,1234341221434321\n")
    rows = sudoku_prompts("test", source=str(path))
    assert (rows["puzzle"], rows["solution"]) == (["0030041200400321"], ["1234341221434321"])
    assert rows[0]["prompt"][0]["content"].endswith("0030041200400321")
    assert sudoku_prompts("test", source=str(path), prompt_style="digits")["prompt"] == ["0030041200400321"]


@pytest.mark.parametrize(
    ("puzzle", "solution"),
    [
        ("1030041200400321", "1234341221434322"),
        ("2030041200400321", "1234341221434321"),
        ("1.3..412..4..321", "1234341221434321"),
        ("103004120040032", "1234341221434321"),
    ],
)
def test_a_sudoku_that_contradicts_itself_is_an_error_in_the_data(tmp_path, puzzle, solution):
    source = write_lines(tmp_path / "rows.jsonl", [{"puzzle": puzzle, "solution": solution}])
    with pytest.raises(ValueError, match=f"Row 0 of the train split of .*got '{puzzle}' and '{solution}'"):
        sudoku_prompts("train", source=source)


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
