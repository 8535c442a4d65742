# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
Counter-based random bits: a draw is a hash of its keys and of nothing else.

No generator is advanced, so a row's masks cannot depend on its place in the batch, the rank that holds it, the size of
the micro-batch or what was drawn before. Everything is 64-bit integer arithmetic, hence identical on every device.
"""

from enum import IntEnum

import torch
from jaxtyping import Int
from torch import Tensor

_SIGN_BIT = 1 << 63
UNIT_BITS = 31
"""Width of the uniform integers made by `unit_bits`; `u = bits / 2**31` lies in [0, 1)."""


class Stream(IntEnum):
    """What a draw is used for; draws of different streams are independent."""

    COUNT = 1
    ORDER = 2
    BLOCK = 3
    COIN = 4
    ROLLOUT = 5
    TOKEN = 6


def _signed(value: int) -> int:
    """Two's complement: torch has no unsigned 64-bit arithmetic, and its int64 products wrap around."""
    return (value ^ _SIGN_BIT) - _SIGN_BIT


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER = _signed(0xD1342543DE82EF95)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(bits: Tensor, amount: int) -> Tensor:
    return (bits >> amount) & ((1 << (64 - amount)) - 1)  # torch's shift copies the sign bit


def _mix(bits: Tensor) -> Tensor:
    # finaliser of SplitMix64 (Steele, Lea and Flood, 2014)
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def random_bits(seed: int, stream: Stream, *keys: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """
    Hash a seed, a stream and any number of integer keys to 64 uniform bits.

    Args:
        seed (`int`):
            Seed of the run.
        stream (`Stream`):
            What the bits are used for.
        keys (`Int[Tensor, "..."]`):
            int64 keys, broadcast against each other. At least one.

    Returns:
        `Int[Tensor, "..."]`:
            int64 tensor of the broadcast shape, all 64 bits uniform.
    """
    state = _mix(torch.full_like(keys[0], _signed(seed % (1 << 64))) * _MULTIPLIER + int(stream) + _GOLDEN)
    for key in keys:
        state = _mix(state * _MULTIPLIER + key + _GOLDEN)
    return state


def unit_bits(bits: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Keep the upper 31 bits: a uniform integer in `[0, 2**31)`, small enough for exact int64 products."""
    return _shift_right(bits, 64 - UNIT_BITS)
