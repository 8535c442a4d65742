# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import base64
import dataclasses
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tests.tiny import published_sdar_folder, tiny_llada, tiny_sdar, tiny_tokenizer
from trl_stabledrl.cli.main import main
from trl_stabledrl.inference import generate
from trl_stabledrl.trace import token_texts, trace_data, write_trace

PROMPTS = ["1+1=", "7", "abcdef"]
HOSTILE = '</script><script>alert("1")</script><!-- & __TRACE__ \u2028 <b onclick=x>é\n'
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "LLaDA": (tiny_llada, {"block_length": 8}),
    "LLaDA, dynamic": (tiny_llada, {"block_length": 8, "confidence_threshold": 0.3}),
    "LLaDA, guided": (tiny_llada, {"block_length": 4, "guidance_scale": 1.0, "remasking": "margin"}),
    "LLaDA, entropy": (tiny_llada, {"block_length": 8, "remasking": "entropy", "suppress_eos": "early_commit"}),
    "SDAR": (tiny_sdar, {"temperature": 1.0}),
    "SDAR, dynamic": (tiny_sdar, {"confidence_threshold": 0.2, "suppress_eos": "sampling"}),
}


def traced(name: str, prompts: Any = PROMPTS, **changes: Any) -> Any:
    """A model, the texts it completes the prompts with, and the rollouts."""
    build, options = CASES[name]
    model = build(seed=1)
    options = {"max_completion_length": 18, "batch_size": 2, "show_progress": False, **options, **changes}
    texts, rollouts = generate(model, tiny_tokenizer(), prompts, return_rollouts=True, **options)
    return model, texts, rollouts


class Embedded(HTMLParser):
    """Tags of a page, and the texts of its `script` and `style` elements."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.inside: str | None = None
        self.feed(path.read_text(encoding="utf-8"))

    @property
    def data(self) -> Any:
        return json.loads(self.texts["script"][0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in self.texts:
            self.inside = tag
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = None if tag == self.inside else self.inside

    def handle_data(self, data: str) -> None:
        if self.inside is not None:
            self.texts[self.inside][-1] += data


@pytest.mark.parametrize("name", CASES)
def test_every_position_is_committed_once_in_the_order_of_the_blocks(name):
    model, texts, rollouts = traced(name)
    data = trace_data(model, tiny_tokenizer(), PROMPTS, rollouts)

    assert [row["prompt"] for row in data["rows"]] == PROMPTS
    all_rows = [(rollout, row) for rollout in rollouts for row in range(len(rollout.completion_ids))]
    for found, text, (rollout, row) in zip(data["rows"], texts, all_rows, strict=True):
        num_decoded = int((rollout.commit_step[row] >= 0).sum())
        columns = ("token_ids", "texts", "steps", "confidence")
        assert {len(found[column]) for column in columns} == {num_decoded}
        assert found["num_undecoded"] == 18 - num_decoded
        assert found["token_ids"][: found["num_completion_tokens"]] == rollout.completion_ids[row]
        assert sorted(set(found["steps"])) == [*range(1, found["num_steps"] + 1)]
        assert all(0 <= value <= 1 for value in found["confidence"])
        starts = [*found["block_starts"], num_decoded]
        size = rollout.settings.block_length
        assert starts[:2] == [0, min(size - found["num_prompt_tokens_in_block"], num_decoded)]
        for block, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            assert 0 < stop - start <= size
            later = found["steps"][stop:]
            assert not later or max(found["steps"][start:stop]) < min(later), block
        answer = "".join(found["texts"][: found["num_completion_tokens"]])
        assert re.sub(r"<\|\w+\|>", "", answer) == text
        ends = [place for place, token in enumerate(found["token_ids"]) if token == 1]
        assert found["end"] == (ends[0] if ends else None)


def test_confidence_is_that_of_the_step_that_committed_the_token():
    model, _, rollouts = traced("LLaDA", ["7"], num_denoising_steps=8)
    (rollout,) = rollouts
    ids, steps = rollout.window_ids[0], rollout.commit_step[0]
    prompt = torch.tensor(tiny_tokenizer()(text="7")["input_ids"])
    for place in range(8):  # of the first block: one token a step
        seen = ids.masked_fill((steps >= steps[place]) | (torch.arange(len(ids)) >= 8), 2)
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, seen])[None]).logits[0, len(prompt) + place]
        logits[2] = -torch.inf
        expected = logits.softmax(dim=-1)[ids[place]].item()
        assert rollout.confidence[0, place].item() == pytest.approx(expected, rel=1e-4)
    assert rollout.confidence[0][steps < 0].isnan().all()


def test_entropy_is_shown_as_a_number_from_0_to_1():
    model, _, rollouts = traced("LLaDA, entropy")
    data = trace_data(model, tiny_tokenizer(), PROMPTS, rollouts)

    assert data["confidence"]["name"] == "certainty"
    assert data["rows"][0]["confidence"][0] == round(math.exp(rollouts[0].confidence[0, 0].item()), 4)


def test_confidences_are_kept_only_where_asked_for():
    model, _, rollouts = traced("SDAR")
    bare = [dataclasses.replace(rollout, confidence=None) for rollout in rollouts]
    data = trace_data(model, tiny_tokenizer(), PROMPTS, bare)

    assert data["confidence"] is None
    assert {row["confidence"] for row in data["rows"]} == {None}


def test_a_page_needs_nothing_and_runs_only_its_own_script(tmp_path):
    prompts: Any = [[{"role": "user", "content": HOSTILE}]]
    tokenizer = tiny_tokenizer(chat_template=True)
    model = tiny_llada()
    options: dict[str, Any] = {"max_completion_length": 8, "show_progress": False, "return_rollouts": True}
    rollouts: Any = generate(model, tokenizer, prompts, **options)[1]
    write_trace(tmp_path / "page.html", model, tokenizer, prompts, rollouts)

    found = Embedded(tmp_path / "page.html")
    own = [attributes for tag, attributes in found.tags if tag == "script"]
    assert own == [{"type": "application/json", "id": "trace"}, {}]
    assert found.data["rows"][0]["prompt"] == "user: " + HOSTILE
    assert not any(name in attributes for _, attributes in found.tags for name in ("src", "href", "style", "onclick"))
    code = found.texts["script"][1] + found.texts["style"][0]
    assert not re.search(r"https?:(?!//www.w3.org/2000/svg)|url\(|@import|innerHTML|eval\(", code)
    (policy,) = (a["content"] for _, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(found.texts[kind][-1].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


@pytest.mark.parametrize("text", [HOSTILE, "</ScRiPt >", "<!--<script>", "\\u003c", "é漢🎉\x00\x7f"])
def test_no_text_breaks_out_of_the_data(text, tmp_path, monkeypatch):
    model, _, rollouts = traced("LLaDA", ["7"])
    monkeypatch.setattr("trl_stabledrl.trace.token_texts", lambda tokenizer, ids: [text] * len(ids))
    write_trace(tmp_path / "page.html", model, tiny_tokenizer(), [text], rollouts)

    found = Embedded(tmp_path / "page.html")
    (row,) = found.data["rows"]
    assert {row["prompt"], *row["texts"]} == {text}
    assert sum(tag == "script" for tag, _ in found.tags) == 2


def test_the_page_of_512_tokens_is_small(tmp_path):
    options: dict[str, Any] = {"max_completion_length": 512, "block_length": 128, "num_denoising_steps": 4}
    model, _, rollouts = traced("LLaDA", ["7"], suppress_eos="sampling", **options)
    write_trace(tmp_path / "page.html", model, tiny_tokenizer(), ["7"], rollouts)

    assert (tmp_path / "page.html").stat().st_size < 60_000  # 31,000 measured


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, as the rare characters of byte-level vocabularies are."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE({one: index for index, one in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", ["", "a  b\n\n\tc", "é", "漢字 🎉!", "a\ufffdb", "🎉" * 5])
def test_texts_of_tokens_add_up_to_the_whole(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text=text)["input_ids"]

    texts = token_texts(tokenizer, ids)

    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_a_character_belongs_to_the_token_that_completes_it():
    tokenizer = byte_tokenizer()

    assert token_texts(tokenizer, tokenizer(text="aé🎉")["input_ids"]) == ["a", "", "é", "", "", "", "🎉"]
    assert token_texts(tokenizer, tokenizer(text="é")["input_ids"][:1]) == ["\ufffd"]


def test_words_keep_their_spaces():
    backend = Tokenizer(BPE({"▁a": 0, "▁b": 1, "c": 2}, []))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)

    assert token_texts(tokenizer, [0, 1, 2, 1]) == ["a", " b", "c", " b"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda prompts, rollouts: (prompts[:2], rollouts), "There are 2 prompts for 3 rows of rollouts"),
        (lambda prompts, rollouts: ([], []), "There are 0 prompts for 0 rows"),
        (
            lambda prompts, rollouts: (prompts, [rollouts[0], dataclasses.replace(rollouts[1], settings=None)]),
            "do not all name the same settings",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(change, message):
    model, _, rollouts = traced("LLaDA")
    prompts, changed = change(PROMPTS, rollouts)

    with pytest.raises(ValueError, match=message):
        trace_data(model, tiny_tokenizer(), prompts, changed)


def test_the_template_is_beside_the_module():
    import trl_stabledrl.trace

    assert Path(trl_stabledrl.trace.__file__).with_suffix(".html").is_file()


def test_the_command_writes_a_page_beside_the_completions(tmp_path, capsys):
    folder = str(published_sdar_folder(tmp_path / "model"))
    command = ["generate", "--model_name_or_path", folder, "--prompt", *PROMPTS, "--max_completion_length", "8"]

    assert main(command) == 0
    expected = capsys.readouterr().out
    assert main([*command, "--trace", str(tmp_path / "out.html")]) == 0

    shown = capsys.readouterr()
    assert shown.out == expected
    assert f"Trace: {tmp_path / 'out.html'}" in shown.err
    data = Embedded(tmp_path / "out.html").data
    assert (data["model"], data["family"], data["settings"]["max_completion_length"]) == ("model", "SDAR", 8)
    assert [row["prompt"] for row in data["rows"]] == PROMPTS


def test_the_command_refuses_a_folder_that_is_not_there(tmp_path, capsys):
    command = ["generate", "--model_name_or_path", "nowhere", "--prompt", "7"]

    assert main([*command, "--trace", str(tmp_path / "absent" / "out.html")]) == 2

    assert "absent/out.html' is in a folder that does not exist" in capsys.readouterr().err
