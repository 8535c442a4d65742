# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

import itertools
import random
from fractions import Fraction

import pytest

from trl_stabledrl.data import TASKS, addition_prompts, countdown_prompts, sorting_prompts, sudoku_prompts
from trl_stabledrl.rewards import BUILTIN_REWARDS, GRADERS

GENERATED = ["sorting", "addition", "sudoku_digits", "sudoku", "countdown", "countdown4"]
TEXT_TASKS = ["sudoku", "countdown", "countdown4", "gsm8k", "math", "math500", "aime24"]


def text_of(prompt):
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


@pytest.mark.parametrize("name", ["sorting", "addition", "sudoku_digits", "sudoku", "countdown"])
def test_train_and_test_are_disjoint_whatever_the_seeds(name):
    train, test = set(), set()
    for seed in range(3):
        train |= set(map(text_of, TASKS[name].prompts("train", num_prompts=400, seed=seed)["prompt"]))
        test |= set(map(text_of, TASKS[name].prompts("test", num_prompts=400, seed=seed)["prompt"]))
    assert len(train) > 400
    assert len(test) > 400
    assert not train & test


@pytest.mark.parametrize("name", GENERATED)
def test_rows_are_a_pure_function_of_split_and_seed(name):
    random.seed(1)
    state = random.getstate()
    first = TASKS[name].prompts("train", num_prompts=40, seed=5).to_list()
    assert random.getstate() == state
    random.seed(2)
    assert TASKS[name].prompts("train", num_prompts=40, seed=5).to_list() == first
    assert TASKS[name].prompts("train", num_prompts=20, seed=5).to_list() == first[:20]
    assert TASKS[name].prompts("train", num_prompts=40, seed=6).to_list() != first
    assert len({str(row["prompt"]) for row in first}) == 40


def test_rows_are_the_same_in_every_version():
    # A change here changes what published scores were measured on
    assert sorting_prompts("test", num_prompts=2)["prompt"] == ["29792667", "81042839"]
    assert addition_prompts("test", num_prompts=2)["prompt"] == ["31+57=", "62+85="]


def test_sorting_answers_are_sorted():
    for row in sorting_prompts("train", num_prompts=100, length=5).to_list():
        assert len(row["prompt"]) == len(row["answer"]) == 5
        counts = [row["prompt"].count(digit) for digit in "0123456789"]
        assert row["answer"] == "".join(digit * count for digit, count in zip("0123456789", counts, strict=True))


def test_addition_answers_are_sums_of_both_lengths():
    rows = addition_prompts("test", num_prompts=600).to_list()
    for row in rows:
        left, right = row["prompt"].removesuffix("=").split("+")
        assert 10 <= int(left) <= 99
        assert 10 <= int(right) <= 99
        assert int(row["answer"]) == int(left) + int(right)
    assert {len(row["answer"]) for row in rows} == {2, 3}


def test_a_sum_and_its_mirror_are_in_one_split():
    train = {row.removesuffix("=") for row in addition_prompts("train", num_prompts=7089)["prompt"]}
    test = {row.removesuffix("=") for row in addition_prompts("test", num_prompts=1011)["prompt"]}
    assert len(train) + len(test) == 90 * 90  # every pair, each in one split
    assert {"+".join(reversed(pair.split("+"))) for pair in test} == test


def test_asking_for_more_than_there_is_ends_in_an_error():
    with pytest.raises(ValueError, match=r"Task `addition` has about 1011 .* test prompts, got num_prompts=1012"):
        addition_prompts("test", num_prompts=1012)


@pytest.mark.parametrize("num_empty", [1, 8, 15])
def test_sudoku_solutions_keep_the_clues_and_the_rules(num_empty):
    for row in sudoku_prompts("train", num_prompts=12, num_empty=num_empty).to_list():
        puzzle, solution = row["puzzle"], row["solution"]
        assert puzzle.count("0") == num_empty
        assert all(clue in ("0", digit) for clue, digit in zip(puzzle, solution, strict=True))
        grid = [solution[4 * row : 4 * row + 4] for row in range(4)]
        boxes = [grid[top][left : left + 2] + grid[top + 1][left : left + 2] for top in (0, 2) for left in (0, 2)]
        columns = ["".join(line[column] for line in grid) for column in range(4)]
        assert all(sorted(unit) == list("1234") for unit in [*grid, *boxes, *columns])
        assert puzzle in text_of(row["prompt"])


def reachable(terms):
    """Every value of every expression, by exhaustion."""
    if len(terms) == 1:
        return {terms[0]}
    values = set()
    for i, j in itertools.permutations(range(len(terms)), 2):
        rest = [term for index, term in enumerate(terms) if index not in (i, j)]
        left, right = terms[i], terms[j]
        results = {left + right, left - right, left * right} | ({left / right} if right else set())
        for result in results:
            values |= reachable([*rest, result])
    return values


@pytest.mark.parametrize("num_numbers", [3, 4])
def test_countdown_is_solvable(num_numbers):
    for row in countdown_prompts("test", num_prompts=20, num_numbers=num_numbers).to_list():
        assert len(row["numbers"]) == num_numbers
        assert all(1 <= number <= 99 for number in row["numbers"])
        assert 10 <= row["target"] <= 100
        assert row["target"] in reachable([Fraction(number) for number in row["numbers"]])
        assert str(row["target"]) in text_of(row["prompt"])
        assert all(str(number) in text_of(row["prompt"]) for number in row["numbers"])


def test_countdown_keeps_the_orders_of_a_problem_in_one_split():
    keys = {}
    for split in ("train", "test"):
        rows = countdown_prompts(split, num_prompts=600).to_list()
        keys[split] = {(*sorted(row["numbers"]), row["target"]) for row in rows}
    assert not keys["train"] & keys["test"]


@pytest.mark.parametrize("name", GENERATED)
def test_rewards_accept_the_solution_and_refuse_an_empty_answer(name):
    task = TASKS[name]
    rows = task.prompts("test", num_prompts=30)
    columns = {column: list(rows[column]) for column in rows.column_names}
    solutions = columns[task.target_column or "solution"]
    forms = ["{}"]
    if task.prompt_styles:
        forms = ["<answer>{}</answer>", "<answer>\n\\boxed{{{}}}\n</answer>", "so \\boxed{{{}}}."]
    for reward, form in itertools.product(map(BUILTIN_REWARDS.__getitem__, task.reward_names), forms):
        assert reward(completions=[form.format(solution) for solution in solutions], **columns) == [1.0] * 30
        assert reward(completions=[""] * 30, **columns) == [0.0] * 30


@pytest.mark.parametrize("name", ["sudoku", "countdown"])
def test_the_prompt_styles_word_the_same_problems(name):
    d1, boxed = (TASKS[name].prompts("test", num_prompts=3, prompt_style=style) for style in ("d1", "boxed"))
    assert d1.remove_columns("prompt").to_list() == boxed.remove_columns("prompt").to_list()
    assert TASKS[name].prompts("test", num_prompts=3).to_list() == d1.to_list()
    for tagged, plain in zip(map(text_of, d1["prompt"]), map(text_of, boxed["prompt"]), strict=True):
        assert tagged.splitlines()[-1] == plain.splitlines()[-1]
        assert all(tag in tagged for tag in ("<reasoning>", "</reasoning>", "<answer>\n\\boxed{", "}\n</answer>"))
        assert "<" not in plain
        assert "\\boxed{" in plain


def test_the_number_of_prompts_is_512_unless_said():
    assert len(sorting_prompts("train")) == len(sorting_prompts("train", num_prompts=None)) == 512


@pytest.mark.parametrize("name", ["sorting", "addition", "sudoku_digits"])
def test_lengths_of_the_tasks_of_characters_are_exact(name):
    task = TASKS[name]
    rows = task.prompts("train", num_prompts=200).to_list()
    lengths = {len(row[task.target_column]) for row in rows}
    num_end_tokens = 0 if task.has_fixed_length else 1
    assert max(len(row["prompt"]) for row in rows) == task.max_prompt_length
    assert max(lengths) + num_end_tokens == task.max_completion_length
    assert (len(lengths) == 1) == task.has_fixed_length


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        (sorting_prompts, {"split": "validation"}, "Unknown split 'validation'.*'train' and 'test'"),
        (sorting_prompts, {"split": "train", "num_prompts": 0}, "`num_prompts` must be at least 1, got 0"),
        (sorting_prompts, {"split": "train", "length": 0}, "`length` must be at least 1, got 0"),
        (addition_prompts, {"split": "train", "num_digits": 0}, "`num_digits` must be at least 1, got 0"),
        (sudoku_prompts, {"split": "train", "num_empty": 16}, "`num_empty` must lie between 1 and 15.*got 16"),
        (sudoku_prompts, {"split": "train", "prompt_style": "grid"}, "Unknown `prompt_style` 'grid'.*'boxed'"),
        (countdown_prompts, {"split": "train", "prompt_style": "digits"}, "Unknown `prompt_style` 'digits'"),
        (countdown_prompts, {"split": "train", "source": "x", "seed": 1}, "`seed` belongs to generated.*got 1"),
        (sudoku_prompts, {"split": "train", "source": "x", "seed": 1}, "`seed` belongs to generated.*got 1"),
        (countdown_prompts, {"split": "train", "num_numbers": 5}, "`num_numbers` must be 3 or 4, got 5"),
    ],
)
def test_arguments_out_of_range_are_named(prompts, arguments, message):
    with pytest.raises(ValueError, match=message):
        prompts(**arguments)


def test_every_task_names_rewards_that_exist():
    for name, task in TASKS.items():
        assert task.name == name
        assert task.reward_names
        assert set(task.reward_names) <= set(BUILTIN_REWARDS)
        assert task.reward_names[0] in GRADERS
        assert set(task.splits) <= {"train", "test"}
    styled = [name for name, task in TASKS.items() if task.prompt_styles]
    assert sorted(styled) == sorted(TEXT_TASKS)
    assert {TASKS[name].prompt_styles for name in styled} == {("d1", "boxed")}
