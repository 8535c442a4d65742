# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""These tests need vLLM, which has environments of its own: `make test-vllm`. Elsewhere they are not collected."""

from importlib.util import find_spec

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.vllm_engine import harness as harness  # before anything imports vLLM
