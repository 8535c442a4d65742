# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""`accelerate launch scripts/sft.py --config my_recipe.yaml`: what `trl-stabledrl sft` runs."""

from trl_stabledrl.cli.sft import main

if __name__ == "__main__":
    raise SystemExit(main())
