# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import Page, chromium
from tests.tiny import CHARACTERS, tiny_llada, tiny_sdar, tiny_tokenizer
from trl_stabledrl.inference import generate
from trl_stabledrl.trace import trace_data, write_trace

pytestmark = pytest.mark.browser

HOSTILE = '</script><script>document.title = "broken"</script><img src=x onerror="document.title=\'broken\'">'
PROMPTS = ["1+1=", HOSTILE]
LABELS = "[...document.querySelectorAll('#blocks .token')].map((one) => one.getAttribute('aria-label'))"
SET = "document.querySelectorAll('#blocks .token.set').length"
MASKED = "document.querySelectorAll('#blocks .token.masked').length"
NEW = "document.querySelectorAll('#blocks .token.new').length"
STATUS = "document.querySelector('#status').textContent"
TEXT = "document.querySelector('#text').textContent"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("browser")) as found:
        yield found
        assert found.console == []
        assert all(url.startswith(("file:", "about:")) for url in found.requested)


@pytest.fixture(scope="module", params=["LLaDA", "SDAR"])
def trace(request, tmp_path_factory) -> tuple[Path, list[dict[str, Any]], list[str]]:
    """A page, the rows it holds and the completions; the second one begins with a hostile token."""
    build, options = {"LLaDA": (tiny_llada, {"block_length": 12}), "SDAR": (tiny_sdar, {})}[request.param]
    characters: Any = [*CHARACTERS, HOSTILE]
    model, tokenizer = build(seed=1), tiny_tokenizer(characters=characters)
    options = {"max_completion_length": 24, "show_progress": False, "temperature": 1.0, **options}
    found: Any = generate(model, tokenizer, PROMPTS, return_rollouts=True, **options)
    (rollout,), hostile = found[1], tokenizer.get_vocab()[HOSTILE]
    rollout.window_ids[1, 0] = rollout.completion_ids[1][0] = hostile
    texts = tokenizer.batch_decode(rollout.completion_ids, skip_special_tokens=True)
    path = tmp_path_factory.mktemp("pages") / "trace.html"
    write_trace(path, model, tokenizer, PROMPTS, found[1])
    return path, trace_data(model, tokenizer, PROMPTS, found[1])["rows"], texts


def answer_of(row: dict[str, Any]) -> str:
    texts = row["texts"][: row["num_completion_tokens"]]
    return "".join(text for place, text in enumerate(texts) if place != row["end"])


def test_the_first_frame_is_masked_and_the_last_shows_the_completion(page: Page, trace):
    path, rows, texts = trace
    for number, (row, text) in enumerate(zip(rows, texts, strict=True), start=1):
        page.open(path, fragment=f"#prompt={number}")
        assert (page.value(SET), page.value(MASKED)) == (0, len(row["steps"]))
        assert page.value(STATUS) == f"Step 0 of {row['num_steps']} · everything is masked"
        assert all(label.endswith(": masked") for label in page.value(LABELS))
        assert set(page.value(TEXT)) == {"▢"}
        assert "".join(page.value("document.querySelector('#blocks').innerText").split()).count("·") == 0

        page.open(path, fragment=f"#prompt={number}&step=last")
        assert (page.value(SET), page.value(MASKED)) == (len(row["steps"]), 0)
        assert page.value(TEXT) == answer_of(row)
        assert re.sub(r"<\|\w+\|>", "", page.value(TEXT)) == text
        assert page.value("document.querySelector('#prompt').textContent") == row["prompt"]


def test_every_frame_shows_what_was_committed_by_then(page: Page, trace):
    path, (row, _), _ = trace
    page.open(path)
    for step in range(1, row["num_steps"] + 1):
        page.press("ArrowRight")
        assert page.value("location.hash") == f"#prompt=1&step={step}"
        assert page.value(SET) == sum(when <= step for when in row["steps"])
        assert page.value(NEW) == sum(when == step for when in row["steps"])
        for when, text, confidence, label in zip(
            row["steps"], row["texts"], row["confidence"], page.value(LABELS), strict=True
        ):
            assert label.endswith(": masked") == (when > step)
            if when <= step and text.strip():
                assert f"“{text}”" in label
                assert f"confidence {confidence:.3f}" in label


def test_keys_step_and_play(page: Page, trace):
    path, (row, _), _ = trace
    last = row["num_steps"]
    page.open(path, fragment="#step=2")
    for key, shift, expected in [
        ("ArrowLeft", False, 1),
        ("ArrowLeft", False, 0),
        ("ArrowLeft", False, 0),
        ("ArrowRight", True, max(row["steps"][: [*row["block_starts"], len(row["steps"])][1]])),
        ("ArrowLeft", True, 0),
        ("End", False, last),
        ("ArrowRight", False, last),
        ("Home", False, 0),
    ]:
        page.press(key, shift=shift)
        assert page.value("Number(document.querySelector('#step').value)") == expected, (key, shift)
    page.value("document.querySelector('#speed').value = '64'")
    page.press(" ")
    assert page.value("document.querySelector('#play').textContent") == "Pause"
    deadline = time.monotonic() + 20
    while page.value("document.querySelector('#play').textContent") == "Pause":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert page.value(MASKED) == 0


def test_a_token_tells_its_confidence_under_the_pointer_and_the_focus(page: Page, trace):
    path, (row, _), _ = trace
    page.open(path, fragment="#step=last")
    expected = f"id {row['token_ids'][0]}, step {row['steps'][0]}, confidence {row['confidence'][0]:.3f}"
    page.click("#blocks .token")
    assert expected in page.value("document.querySelector('#token').textContent")

    page.press("ArrowDown")
    page.press("ArrowDown")
    assert page.value("Number(document.activeElement.dataset.place)") in (1, 2)
    assert page.value("document.querySelectorAll('#blocks .token[tabindex=\"0\"]').length") == 1


@pytest.mark.parametrize("width", [320, 1100])
@pytest.mark.parametrize("is_dark", [False, True])
def test_nothing_is_cut_off_and_the_colours_follow_the_reader(page: Page, trace, width, is_dark):
    path, _, _ = trace
    page.resize(width, 800, is_dark=is_dark)
    page.open(path, fragment="#prompt=2&step=last")

    assert page.value("document.documentElement.scrollWidth") <= width
    red, *_ = page.value("getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g).map(Number)")
    assert (red < 60) == is_dark
    assert page.value("document.title") == "Denoising trace"
