# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
from deepspeed.ops.op_builder.cpu import *  # noqa: F403  # classes that are asked for by name; none is used
