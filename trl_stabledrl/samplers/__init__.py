# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts: token ids in, token ids and trajectories out."""

from .full import Rollout, SamplingSettings, sample_full, validate_trajectory

__all__ = ["Rollout", "SamplingSettings", "sample_full", "validate_trajectory"]
