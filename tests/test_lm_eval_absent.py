# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import runpy
import sys

import pytest


@pytest.mark.parametrize(("name", "error"), [("trl_stabledrl.lm_eval_adapter", ImportError), ("__main__", SystemExit)])
def test_without_the_harness_one_line_says_what_to_install(name, error, monkeypatch):
    for module in [module for module in sys.modules if module.startswith("lm_eval.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "trl_stabledrl.lm_eval_adapter", raising=False)

    with pytest.raises(error, match=r"^`trl_stabledrl.lm_eval_adapter` needs lm-eval.*'trl-stabledrl\[eval\]'`\.$"):
        runpy.run_module("trl_stabledrl.lm_eval_adapter", run_name=name)
