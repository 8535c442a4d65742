# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate import PartialState
from transformers import AutoModelForCausalLM

from tests.distributed.processes import free_port
from tests.tiny import published_llada_folder, published_sdar_folder, tiny_tokenizer
from trl_stabledrl.inference import generate, score

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval takes 350 MB: pip install -e '.[eval]'")

from lm_eval.tasks import TaskManager  # noqa: E402  # pyright: ignore[reportMissingImports]

from trl_stabledrl.lm_eval_adapter import DiffusionLM, request_key  # noqa: E402

GENERATION: dict[str, Any] = {
    "task": "tiny_generation",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["7"], "max_gen_toks": 8, "do_sample": False, "temperature": 0.0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
CHOICE: dict[str, Any] = {
    "task": "tiny_choice",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_target": "label",
    "doc_to_choice": "choices",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
DOCS: list[dict[str, Any]] = [
    {"question": "1+1=", "answer": "two", "choices": ["2", "33"], "label": 0},
    {"question": "7:", "answer": "ab", "choices": ["ab", "c-d"], "label": 1},
    {"question": "abcdef", "answer": "x", "choices": ["x", "yz"], "label": 0},
]
FOLDERS = {"LLaDA": published_llada_folder, "SDAR": published_sdar_folder}


@pytest.fixture(scope="module", params=[*FOLDERS])
def folder(request, tmp_path_factory) -> Path:
    return FOLDERS[request.param](tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture
def tasks(tmp_path, monkeypatch) -> Path:
    """A folder with both tasks, and the documents they read."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "docs.json").write_text("\n".join(map(json.dumps, DOCS)))
    for task in (GENERATION, CHOICE):
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.json")}}}
        text = yaml.safe_dump({**task, **data, "test_split": "test"})
        (tmp_path / f"{task['task']}.yaml").write_text(text)
    return tmp_path


def instance(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


def evaluate(model: Any, tasks: Path, **options: Any) -> dict[str, Any]:
    found: Any = lm_eval.simple_evaluate(
        model=model,
        tasks=[GENERATION["task"], CHOICE["task"]],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )
    return found


def samples_of(found: dict[str, Any], task: dict[str, Any]) -> list[Any]:
    return [sample["resps"] for sample in sorted(found["samples"][task["task"]], key=lambda sample: sample["doc_id"])]


def test_both_kinds_of_task_give_what_generate_and_score_give(folder, tasks):
    arguments = {"pretrained": str(folder), "num_mc_samples": 4, "seed": 3}
    found = evaluate("trl_stabledrl", tasks, model_args=arguments, batch_size=2, device="cpu")

    lm = DiffusionLM(**arguments)
    model, tokenizer = lm.model, tiny_tokenizer()
    questions = [doc["question"] for doc in DOCS]
    texts: Any = generate(model, tokenizer, questions, max_completion_length=8, show_progress=False)
    assert [response for ((response,),) in samples_of(found, GENERATION)] == [text.partition("7")[0] for text in texts]
    num_right = 0
    for doc, choices in zip(DOCS, samples_of(found, CHOICE), strict=True):
        elbos: list[float] = []
        for choice, (answer,) in zip(doc["choices"], choices, strict=True):
            key = request_key(tokenizer(text=doc["question"])["input_ids"])
            options: dict[str, Any] = {"num_mc_samples": 4, "add_end_token": False, "seed": 3, "row_index": [key]}
            elbo = score(model, tokenizer, [doc["question"]], [choice], **options).elbo.item()
            decoding: dict[str, Any] = {"max_completion_length": len(choice), "show_progress": False}
            greedy = generate(model, tokenizer, [doc["question"]], **decoding)
            assert answer == (pytest.approx(elbo, rel=1e-5), greedy == [choice])
            elbos.append(elbo)
        num_right += elbos.index(max(elbos)) == doc["label"]
    assert found["results"]["tiny_choice"]["acc,none"] == num_right / len(DOCS)
    config: Any = found["config"]
    assert (config["num_mc_samples"], config["seed"], config["family"]) == (4, 3, lm.facts.family.name)


@pytest.fixture(scope="module")
def lm(folder) -> DiffusionLM:
    return DiffusionLM(str(folder), max_completion_length=8, num_mc_samples=2, batch_size=2)


def test_nothing_depends_on_batches_order_or_limit(folder, lm):
    other = DiffusionLM(str(folder), max_completion_length=8, num_mc_samples=2, batch_size=3)
    generations = [instance(doc["question"], {"temperature": 1.0, "until": []}) for doc in DOCS]
    choices = [instance(doc["question"], choice) for doc in DOCS for choice in doc["choices"]]
    rolling = [instance(doc["question"] * 30) for doc in DOCS]

    texts = lm.generate_until(generations)
    assert len(set(texts)) == 3
    assert other.generate_until(generations[::-1]) == texts[::-1]
    assert lm.generate_until(generations[1:2]) == texts[1:2]

    for method, requests in (("loglikelihood", choices), ("loglikelihood_rolling", rolling)):
        expected = torch.tensor(getattr(lm, method)(requests))
        torch.testing.assert_close(torch.tensor(getattr(other, method)(requests[::-1])).flipud(), expected)
        torch.testing.assert_close(torch.tensor(getattr(lm, method)(requests[1:2])), expected[1:2])


def test_a_sampled_request_that_is_repeated_gives_another_sample(lm):
    request = instance("1+1=", {"do_sample": True, "top_k": 40})

    texts = lm.generate_until([request] * 4)

    assert len(set(texts)) == 4
    assert lm.generate_until([request] * 4) == texts
    assert len(set(lm.generate_until([instance("1+1=", {"do_sample": False, "temperature": 1.0})] * 4))) == 1


def test_options_of_a_task_win_over_those_of_the_model(lm):
    questions = [doc["question"] for doc in DOCS]
    own = {"max_new_tokens": 12, "remasking": "margin", "seed": 5, "temperature": 0.7, "top_p": 0.9}
    expected = generate(
        lm.model,
        lm.tokenizer,
        questions,
        max_completion_length=12,
        remasking="margin",
        seed=5,
        temperature=0.7,
        top_p=0.9,
        row_index=[request_key(lm.tok_encode(question)) for question in questions],
        show_progress=False,
    )

    assert lm.generate_until([instance(question, own) for question in questions]) == expected


@pytest.mark.parametrize(
    ("until", "expected"),
    [([], "ab1c7d"), (["7", "1"], "ab"), ("c", "ab1"), (["<|eot_id|>"], "ab1"), (["zz", ""], "ab1c7d")],
)
def test_text_ends_before_the_first_stop_string(until, expected, lm, monkeypatch):
    ids = [*lm.tok_encode("ab1"), 4, *lm.tok_encode("c7d"), 1]
    monkeypatch.setattr(lm, "_generated", lambda prompts, row_index, options: [ids] * len(prompts))

    assert lm.generate_until([instance("x", {"until": until})]) == [expected]


def test_a_chat_goes_through_the_template_and_gets_no_second_beginning(lm, monkeypatch):
    history = [{"role": "user", "content": "hi"}]
    monkeypatch.setattr(lm, "tokenizer", tiny_tokenizer(chat_template=True))

    assert lm.apply_chat_template(history) == "user:hi<|eot_id|>assistant:"
    expected = lm.tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert lm.tok_encode(lm.apply_chat_template(history)) == expected
    answered = [*history, {"role": "assistant", "content": "a"}]
    assert lm.apply_chat_template(answered, add_generation_prompt=False) == "user:hi<|eot_id|>assistant:a"


def test_a_long_text_is_the_sum_of_its_windows(lm, monkeypatch):
    monkeypatch.setattr(type(lm), "max_length", 8)
    seen: list[Any] = []
    monkeypatch.setattr(
        lm, "_elbos", lambda pairs, row_index: seen.extend(pairs) or [-float(len(b)) for _, b in pairs]
    )

    totals = lm.loglikelihood_rolling([instance("abcdefghijklmnop"), instance(""), instance("xy")])

    assert totals == [-16.0, 0.0, -2.0]
    windows = {(lm.tokenizer.decode(context), lm.tokenizer.decode(rest)) for context, rest in seen}
    begin = "<|endoftext|>"
    assert windows == {(begin, "abcdefg"), ("g", "hijklmn"), ("ijklmn", "op"), (begin, "xy")}


def test_a_prompt_that_does_not_fit_loses_its_beginning(lm, monkeypatch):
    monkeypatch.setattr(type(lm), "max_length", 12)
    requests = [instance("123456", {}), instance("000003456", {})]

    first, second = lm.generate_until(requests)

    assert first == second
    with pytest.raises(ValueError, match="12 tokens leave no room for a prompt in the model's 12"):
        lm.generate_until([instance("1", {"max_gen_toks": 12})])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": "auto"}, "batch_size='auto' must be an integer >= 1"),
        ({"max_batch_size": 4}, "max_batch_size=4 is not honoured"),
        ({"remasking": "best"}, "remasking"),
        ({"mask_law": "block_suffix", "num_denoising_steps": 0}, "num_denoising_steps"),
    ],
)
def test_a_model_that_cannot_work_is_refused_before_weights_are_loaded(options, message, folder, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("weights loaded"))

    with pytest.raises(ValueError, match=message):
        DiffusionLM(str(folder), **options)


@pytest.mark.parametrize("own", [{"num_beams": 4}, {"repetition_penalty": 1.2}])
def test_generation_options_that_are_not_honoured_are_refused(own, lm):
    with pytest.raises(ValueError, match="ask for what is not honoured"):
        lm.generate_until([instance("x", own)])


def run_rank(rank: int, port: int, folder: str, tasks: Path) -> None:
    """In a forked process: what the launcher sets, and the same evaluation as alone."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    PartialState._reset_state()
    found = evaluate("trl_stabledrl", tasks, model_args={"pretrained": folder, "num_mc_samples": 2}, device="cpu")
    if rank == 0:
        (tasks / "found.json").write_text(json.dumps({name: found[name] for name in ("results", "samples")}))
    else:
        assert found is None
    torch.distributed.destroy_process_group()


def test_two_processes_give_what_one_gives(tasks, tmp_path):
    folder = str(published_sdar_folder(tmp_path / "model"))
    alone = evaluate("trl_stabledrl", tasks, model_args={"pretrained": folder, "num_mc_samples": 2}, device="cpu")

    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads; the imports of fresh processes would take half a minute
        warnings.simplefilter("ignore", DeprecationWarning)
        context = torch.multiprocessing.start_processes(
            run_rank, (free_port(), folder, tasks), nprocs=2, join=False, daemon=True, start_method="fork"
        )
    assert context is not None
    assert any(context.join(timeout=30) for _ in range(4))  # one call returns as soon as a process ends

    found = json.loads((tasks / "found.json").read_text())
    first = [[answers[:1] for answers in doc] for doc in samples_of(found, GENERATION)]
    assert first == samples_of(alone, GENERATION)
    expected = json.loads(json.dumps(samples_of(alone, CHOICE)))
    for have, want in zip(samples_of(found, CHOICE), expected, strict=True):
        for (elbo, is_greedy), (expected_elbo, is_expected_greedy) in zip(
            [answers[0] for answers in have], [answers[0] for answers in want], strict=True
        ):
            assert elbo == pytest.approx(float(expected_elbo), rel=1e-5)
            assert is_greedy == is_expected_greedy
