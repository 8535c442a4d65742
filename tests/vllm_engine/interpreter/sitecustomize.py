# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Python imports this first where this folder is on its path: `vllm serve` and its processes get the harness."""

import os

import tests.vllm_engine.harness  # noqa: F401

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # the server's engine has a process of its own
