# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from scripts import gpu_rollout_bench as bench

SMALL = [
    *("--model", "tiny", "--block_length", "4", "--num_rows", "2", "3", "--tokens_per_step", "1", "2"),
    *("--prompt_length", "7", "--completion_length", "9"),
]


def test_the_cells_are_those_of_the_issue():
    cells = bench.cells_of(bench.make_parser().parse_args([]))
    assert len(cells) == len(bench.ENGINES) * 2 * 2 * 2
    assert {cell["block_length"] for cell in cells} == {4, 32}
    assert {cell["num_rows"] for cell in cells} == {64, 256}
    processes = [(cell["engine"], cell["block_length"]) for cell in cells]
    assert processes == sorted(processes, key=processes.index)  # those of one process are side by side


def test_shapes_are_the_published_ones():
    shape = bench.SHAPES["8b"] | bench.PUBLISHED
    assert (shape["hidden_size"], shape["num_hidden_layers"], shape["vocab_size"]) == (4096, 36, 151_936)
    assert (shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]) == (32, 8, 128)


def test_every_cell_decodes_the_same_number_of_tokens(tmp_path):
    options = bench.make_parser().parse_args([*SMALL, "--engines", "transformers", "--output_dir", str(tmp_path)])
    bench.work(options, "transformers", 4)
    results = bench.read_results(tmp_path / "results.jsonl")
    assert [(result["num_rows"], result["tokens_per_step"]) for result in results] == [(2, 1), (3, 1), (2, 2), (3, 2)]
    for result in results:
        tokens = result["tokens_per_second"] * result["seconds"]
        assert tokens == pytest.approx(result["num_rows"] * 9, rel=0.1)  # both are rounded


def test_a_process_that_fails_or_hangs_loses_its_own_cells_alone(tmp_path, monkeypatch, capsys):
    def run(command, **options):
        _, engine, block_length = command[-3:]
        if engine == "vllm":
            raise bench.subprocess.TimeoutExpired(command, options["timeout"])
        for cell in bench.cells_of(parsed):
            if cell["engine"] == engine and (engine == "transformers" or cell["num_rows"] == 2):
                measured = {"tokens_per_second": 12.0, "seconds": 1.0, "sync_seconds": 0.0, "peak_memory_gb": 1.5}
                bench.append(parsed, cell | measured | {"device": "none"})
        return bench.subprocess.CompletedProcess(command, returncode=int(engine == "vllm_eager"))

    monkeypatch.setattr(bench.subprocess, "run", run)
    arguments = [*SMALL, "--output_dir", str(tmp_path), "--max_seconds", "5"]
    parsed = bench.make_parser().parse_args(arguments)

    assert bench.main(arguments) == 1

    shown, errors = capsys.readouterr()
    results = bench.read_results(tmp_path / "results.jsonl")
    failed = {(result["engine"], result["num_rows"]) for result in results if "error" in result}
    assert failed == {("vllm", 2), ("vllm", 3), ("vllm_eager", 3)}
    assert shown.count("failed") == 6
    assert "vllm, block 4: not done after 5 s" in errors
    assert "vllm_eager, block 4: exit status 1" in errors
    assert (tmp_path / "results.png").stat().st_size > 10_000


def test_what_a_second_run_measured_before_it_crashed_is_kept(tmp_path, monkeypatch):
    arguments = [*SMALL, "--engines", "vllm", "--output_dir", str(tmp_path)]
    parsed = bench.make_parser().parse_args(arguments)

    def run(command, **options):
        measured = {"tokens_per_second": 12.0, "seconds": 1.0, "sync_seconds": 0.0, "peak_memory_gb": None}
        bench.append(parsed, bench.cells_of(parsed)[0] | measured | {"device": "none"})
        return bench.subprocess.CompletedProcess(command, returncode=1)

    monkeypatch.setattr(bench.subprocess, "run", run)
    for _ in range(2):
        assert bench.main(arguments) == 1
        results = bench.read_results(tmp_path / "results.jsonl")
        assert ["error" in result for result in results] == [False, True, True, True]


def test_a_cell_that_is_measured_again_replaces_the_first(tmp_path):
    options = bench.make_parser().parse_args([*SMALL, "--output_dir", str(tmp_path)])
    cell = bench.cells_of(options)[0]
    bench.append(options, cell | {"error": "no"})
    bench.append(options, cell | {"tokens_per_second": 3.0})
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2
    assert bench.read_results(tmp_path / "results.jsonl") == [{"model": "tiny"} | cell | {"tokens_per_second": 3.0}]
    assert json.loads((tmp_path / "results.jsonl").read_text().splitlines()[0])["error"] == "no"
