# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with the plugin installed and nothing else of ours: a real server, which is asked over HTTP."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.processes import ROOT, free_port
from tests.tiny import tiny_tokenizer
from tests.vllm_engine.engines import END, expected, folder_of, model_of, prompts_of

START_LIMIT, REQUEST_LIMIT = 240, 60
"""Seconds. The server takes 40 to 60, most of them to import vLLM three times."""
WINDOW = 10
GREEDY = {"temperature": 0.0, "num_denoising_steps": 2}
PROMPT = [5, 6, 7, 8, 9]
CHAT = [{"role": "user", "content": "abc"}]


class Server:
    """A server that runs, and the log that it writes."""

    def __init__(self, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log

    def ask(self, path: str, **body: Any) -> tuple[int, str]:
        """Status and text of an answer."""
        data = json.dumps({"model": "sdar", "max_tokens": WINDOW} | body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_LIMIT) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def choices(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        status, text = self.ask(path, return_token_ids=True, **body)
        assert status == 200, text
        return json.loads(text)["choices"]

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Choices that a streamed answer sends, one after the other."""
        status, text = self.ask(path, stream=True, **body)
        assert status == 200, text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line)["choices"][0] for line in lines[:-1]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: Any) -> Iterator[Server]:
    log, port = tmp_path_factory.mktemp("server") / "log.txt", free_port()
    # vLLM's kernels run in an interpreter here: the only thing that is not as a user would have it
    paths = [str(Path(__file__).with_name("interpreter")), str(ROOT)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("vllm")), "serve", folder_of(4)),
                *("--served-model-name", "sdar", "--host", "127.0.0.1", "--port", str(port)),
                *("--max-model-len", "64", "--enforce-eager", "--dtype", "float32"),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        server, deadline = Server(port, log), time.monotonic() + START_LIMIT
        while not is_up(server):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield server
    finally:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        process.wait()


def is_up(server: Server) -> bool:
    try:
        with urllib.request.urlopen(server.url + "/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def greedy(prompt: list[int], **options: Any) -> list[int]:
    return expected(model_of(4), prompt, WINDOW, **{"num_denoising_steps": 2} | options)[0]


def text_of(tokens: list[int]) -> str:
    text = tiny_tokenizer().decode(tokens, skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def test_greedy_completions_are_those_of_the_definition(server):
    prompts = [ids[:40] for ids in prompts_of(4, num=12)]
    choices = server.choices(prompt=prompts, vllm_xargs=GREEDY)
    assert [choice["token_ids"] for choice in choices] == [greedy(prompt) for prompt in prompts]
    assert [choice["text"] for choice in choices] == [text_of(choice["token_ids"]) for choice in choices]
    ended = [choice["token_ids"][-1] == END for choice in choices]
    assert [choice["finish_reason"] for choice in choices] == ["stop" if end else "length" for end in ended]


def test_a_prompt_can_be_text(server):
    (choice,) = server.choices(prompt="abcdefg", vllm_xargs=GREEDY)
    assert choice["prompt_token_ids"] == tiny_tokenizer()("abcdefg")["input_ids"]
    assert choice["token_ids"] == greedy(choice["prompt_token_ids"])


@pytest.mark.parametrize(
    "options",
    [
        {"num_denoising_steps": 1},
        {"num_denoising_steps": 4},
        {"confidence_threshold": 0.05, "num_denoising_steps": 4},
        {"remasking": "entropy", "num_denoising_steps": 2},
    ],
    ids=str,
)
def test_each_option_arrives_as_it_was_sent(options, server):
    prompts = [[7, 8, 9, 10, 11, 12], [30] * 9, [41, 3, 5, 60]]
    choices = server.choices(prompt=prompts, vllm_xargs={"temperature": 0} | options)
    assert [choice["token_ids"] for choice in choices] == [greedy(prompt, **options) for prompt in prompts]


def test_chats_are_completed(server):
    (choice,) = server.choices("/v1/chat/completions", messages=CHAT, vllm_xargs=GREEDY)
    prompt = tiny_tokenizer(chat_template=True).apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert isinstance(prompt, str)
    ids = tiny_tokenizer()(prompt)["input_ids"]
    assert choice["token_ids"] == greedy(ids)
    assert choice["message"]["content"] == text_of(choice["token_ids"])


def test_a_streamed_answer_comes_block_by_block(server):
    (whole,) = server.choices(prompt=PROMPT, vllm_xargs=GREEDY, ignore_eos=True)
    parts = server.events("/v1/completions", prompt=PROMPT, vllm_xargs=GREEDY, ignore_eos=True, return_token_ids=True)
    assert [len(part["token_ids"]) for part in parts] == [3, 4, 3]  # the prompt's last token is in the first block
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert parts[-1]["finish_reason"] == "length"

    (chat,) = server.choices("/v1/chat/completions", messages=CHAT, vllm_xargs=GREEDY)
    parts = server.events("/v1/chat/completions", messages=CHAT, vllm_xargs=GREEDY)
    assert "".join(part["delta"].get("content") or "" for part in parts) == chat["message"]["content"]


def test_completions_of_a_prompt_differ_unless_they_share_a_seed(server):
    one, other = (choice["token_ids"] for choice in server.choices(prompt=PROMPT, n=2))
    assert one != other
    seeded = [choice["token_ids"] for choice in server.choices(prompt=PROMPT, n=2, vllm_xargs={"seed": 5})]
    assert seeded[0] == seeded[1]
    assert [choice["token_ids"] for choice in server.choices(prompt=PROMPT, vllm_xargs={"seed": 5})] == seeded[:1]


def test_requests_at_the_same_time_are_answered_each_for_itself(server):
    prompts = [ids[:40] for ids in prompts_of(4, num=8)]
    steps = [1, 2, 4, 2, 1, 4, 4, 2]

    def answer(prompt: list[int], num: int) -> list[int]:
        (choice,) = server.choices(prompt=prompt, vllm_xargs={"temperature": 0.0, "num_denoising_steps": num})
        return choice["token_ids"]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(answer, prompts, steps))
    assert found == [greedy(prompt, num_denoising_steps=num) for prompt, num in zip(prompts, steps, strict=True)]


# What cannot be served


@pytest.mark.parametrize(
    ("body", "status", "message", "logged"),
    [
        # refused by vLLM, which says why
        ({"temperature": 0.0}, 400, "The temperature, .* not yet supported with diffusion models", None),
        ({"seed": 1}, 400, "seed, .* not yet supported with diffusion models", None),
        ({"prompt": [5] * 60}, 400, "maximum context length is 64 tokens", None),
        # refused by the plugin in the engine's process, where vLLM has no room for a reason: it is in the log
        ({"prompt": [5, 6]}, 500, "", "refused: The prompt has 2 tokens, less than a block of 4"),
        ({"vllm_xargs": {"steps": 2}}, 500, "", "refused: extra_args has 'steps', which is not known"),
        ({"vllm_xargs": {"temperature": "warm"}}, 500, "", "refused: temperature='warm' must be a number"),
        ({"vllm_xargs": {"seed": [1, 2]}}, 500, "", r"refused: seed=\[1, 2\] must be an integer"),
        ({"presence_penalty": 1.0}, 500, "", "refused: presence_penalty=1.0 is not honoured"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_served_is_an_error_and_the_next_request_is_answered(body, status, message, logged, server):
    found, text = server.ask("/v1/completions", **{"prompt": PROMPT, "vllm_xargs": GREEDY} | body)
    assert found == status, text
    assert re.search(message, json.loads(text)["error"]["message"])
    assert logged is None or re.search(logged, server.log.read_text())
    (choice,) = server.choices(prompt=PROMPT, vllm_xargs=GREEDY)
    assert choice["token_ids"] == greedy(PROMPT)
