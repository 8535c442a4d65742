# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

import os
import time

import pytest

from trl_stabledrl.rewards import GRADERS, math_reward
from trl_stabledrl.rewards import _math_pool as pool_module
from trl_stabledrl.rewards import math as math_module
from trl_stabledrl.rewards._math_pool import MathPool

WORKER = pool_module._WORKER

# A worker whose check does what its answer says
SCRIPT = f"""
import os, runpy, time

is_full = []

def check(gold, answer):
    time.sleep(0.02)
    if "spin" in answer:
        while True:
            pass
    if "sleep" in answer:
        time.sleep(60)
    if "crash" in answer:
        raise ValueError(answer)
    if "fill" in answer:
        is_full.append(True)
        raise MemoryError
    if "need" in answer and is_full:
        raise MemoryError
    if "die" in answer:
        os.kill(os.getpid(), 9)
    if "end" in answer:
        os.kill(os.getppid(), 9)
    return b"=" if gold == answer[::-1] else b"#"

runpy.run_path({str(WORKER)!r})["serve"](check)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def make_pool(script):
    pools = []

    def make(**options):
        pools.append(MathPool(**{"seconds": 1.0, "num_workers": 2, "script": script, **options}))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_a_burst_is_limited_by_its_work_and_not_by_its_queue(make_pool, monkeypatch):
    monkeypatch.setattr(math_module, "_POOL", make_pool())
    answers = [f"x+{index}" for index in range(100, 1060)]
    golds = [answer[::-1] for answer in answers]
    answers[500:500], golds[500:500] = ["spin"], ["x"]
    start = time.monotonic()
    grades = GRADERS["math_reward"]([rf"\boxed{{{answer}}}" for answer in answers], answer=golds)
    assert time.monotonic() - start < 30.0
    hanging = grades.pop(500)
    assert (hanging.score, hanging.answer, hanging.reason) == (0.0, "spin", "timeout")
    assert [grade.score for grade in grades] == [1.0] * 960  # 20 ms each, 10 s of them in all


def test_every_end_of_a_check_is_told_apart_and_leaves_the_others_alone(make_pool):
    pool = make_pool(seconds=0.3)
    pairs = [("ba", "ab"), ("x", "crash"), ("x", "fill"), ("ba", "ab"), ("x", "spin"), ("x", "y"), ("x", "sleep")]
    pairs += [("ba", "ab"), ("x", "die"), ("ba", "ab")]
    expected = ["equal", "unreadable", "unreadable", "equal", "timeout", "unequal", "timeout"]
    expected += ["equal", "timeout", "equal"]
    assert pool.outcomes(pairs) == expected
    assert pool.outcomes(pairs[-1:]) == ["equal"]
    assert pool.outcomes([]) == []


def test_a_check_that_fills_the_memory_leaves_it_to_the_next(make_pool):
    pairs = [("x", "fill"), ("deen", "need"), ("deen", "need")]
    assert make_pool(num_workers=1).outcomes(pairs) == ["unreadable", "equal", "equal"]


def test_workers_share_the_time(make_pool):
    def seconds(num_workers):
        pool = make_pool(num_workers=num_workers)
        pool.outcomes([("x", "x")])
        start = time.monotonic()
        pool.outcomes([("x", str(index)) for index in range(64)])
        return time.monotonic() - start

    assert seconds(1) > 64 * 0.02
    assert seconds(16) < 64 * 0.02  # sleeping takes no core


def test_a_process_that_ends_is_reported_and_replaced(make_pool):
    pool = make_pool()
    with pytest.raises(RuntimeError, match="math-verify ended with status -9"):
        pool.outcomes([("x", "end")])
    assert pool.outcomes([("ba", "ab")]) == ["equal"]
    pool._process.kill()
    pool._process.wait()
    with pytest.raises(RuntimeError, match="math-verify ended with status -9"):
        pool.outcomes([("ba", "ab")])
    assert pool.outcomes([("ba", "ab")]) == ["equal"]


def test_a_process_that_does_not_start_is_reported(make_pool, tmp_path, capfd):
    (tmp_path / "broken.py").write_text("raise SystemExit('no such luck')")
    with pytest.raises(RuntimeError, match="did not start; its own error is above"):
        make_pool(script=tmp_path / "broken.py").outcomes([("x", "x")])
    assert "no such luck" in capfd.readouterr().err


def test_a_forked_process_gets_a_worker_of_its_own(make_pool, monkeypatch):
    pool = make_pool()
    assert pool.outcomes([("ba", "ab")]) == ["equal"]
    first = pool._process
    assert pool.outcomes([("ba", "ab")]) == ["equal"]
    assert pool._process is first
    monkeypatch.setattr(pool, "_owner_pid", os.getpid() + 1)  # as seen from a child
    assert pool.outcomes([("ba", "ab")]) == ["equal"]
    assert pool._process is not first
    first.kill()
    first.communicate()


def test_the_cores_are_divided_among_the_ranks_of_a_machine(monkeypatch):
    num_cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert pool_module.default_num_workers() == min(num_cores, 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "10000")
    assert pool_module.default_num_workers() == 1


def test_equal_pairs_are_compared_once(monkeypatch):
    asked = []

    def outcomes(self, pairs):
        asked.extend(pairs)
        return ["equal"] * len(pairs)

    monkeypatch.setattr(MathPool, "outcomes", outcomes)
    assert math_reward([r"\boxed{1+x}", r"\boxed{1+x}", r"\boxed{2+x}", "5"], answer=["x+1"] * 3 + ["5"]) == [1.0] * 4
    assert asked == [("x+1", "1+x"), ("x+1", "2+x")]
