# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""`accelerate launch scripts/train.py --config recipes/llada_8b_gsm8k.yaml`: what `trl-stabledrl train` runs."""

from trl_stabledrl.cli.train import main

if __name__ == "__main__":
    raise SystemExit(main())
