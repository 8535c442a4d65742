# Everything runs in .venv, which is made once and again when one of the files that define it changes.
# `python3` may be another: make setup PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
WORKERS ?= 2
VLLM ?= 0.28 0.31

# one thread: the models of the tests are too small to share
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-browser test-lm-eval test-vllm check format clean

help:
	@echo "make quickstart  set up, then train a small model and show the curve; ARGS='--seed 1' passes options on"
	@echo "make test        set up, then run the tests in WORKERS=2 processes; ARGS='-k sampler' passes options on"
	@echo "make test-browser    the viewer's tests, which need chromium"
	@echo "make test-lm-eval    install lm-evaluation-harness (350 MB) and run the adapter's tests"
	@echo "make test-vllm       make environments with vLLM for CPUs (VLLM='0.28 0.31', 4 GB each) and run the engine's tests"
	@echo "make setup       make .venv with the tested versions (Python >= 3.11, a C compiler, about 2 GB of disk)"
	@echo "make check       lint, format, types and import directions"
	@echo "make format      fix what lint and format can fix"
	@echo "make clean       remove .venv and what builds and tools left"

setup: $(READY)

$(READY): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("TRL 1.16 needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + \
		". Name another: make setup PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	# torch alone and first: pip then finds its own requirement met, whatever build the machine offers
	$(BIN)/python -m pip install --constraint constraints.txt torch
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[test,dev]'
	@touch $@

quickstart: $(READY)
	$(BIN)/trl-stabledrl quickstart $(ARGS)

test: $(READY)
	$(ONE_THREAD) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)

test-browser: $(READY)
	$(ONE_THREAD) $(BIN)/python -m pytest -m browser tests/browser $(ARGS)

test-lm-eval: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[eval]'
	$(ONE_THREAD) $(BIN)/python -m pytest tests/test_lm_eval.py $(ARGS)

# vLLM pins other versions than ours: an environment for the lowest and one for the highest that is supported. Without
# dependencies: the lists are whole but for torchvision and torchaudio, whose CUDA builds do not go with a CPU's torch.
# A hang is killed.
.venv-vllm-%/.ready: constraints-vllm-%.txt pyproject.toml setup.py
	$(PYTHON) -m venv .venv-vllm-$*
	.venv-vllm-$*/bin/python -m pip install --quiet --constraint $< torch
	.venv-vllm-$*/bin/python -m pip install --quiet --no-deps --requirement $<
	.venv-vllm-$*/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

test-vllm: $(VLLM:%=.venv-vllm-%/.ready)
	set -e; for version in $(VLLM); do \
	  $(ONE_THREAD) .venv-vllm-$$version/bin/python -m pytest tests/vllm_engine -W default \
	    -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true $(ARGS); \
	done

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) .venv-vllm-* build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
