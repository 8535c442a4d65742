# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
Stands in for DeepSpeed's own list of C++ extensions where this folder is on the path.

On a machine without an accelerator DeepSpeed compiles one when a process group begins, for a minute or two, which only
its inference uses. It asks for a package of this name first, and takes an empty one for a machine where nothing can be
compiled.
"""

__deepspeed__ = True
