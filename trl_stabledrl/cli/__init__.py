# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""The command `trl-stabledrl`: one file a command, on TRL's parser and accelerate's launcher."""
