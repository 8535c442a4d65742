# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import itertools
import math

import pytest
import torch
from torch import Tensor

from tests import naive
from trl_stabledrl.core.noise import Stream, random_bits, unit_bits


def chi_square(counts: Tensor, expected: Tensor) -> float:
    return ((counts.double() - expected) ** 2 / expected).sum().item()


def chi_square_bound(num_bins: int) -> float:
    """Mean and four standard deviations: exceeded by chance with probability below 1e-3, and the keys are fixed."""
    degrees = num_bins - 1
    return degrees + 4 * math.sqrt(2 * degrees)


def test_splitmix_reference_values():
    # the first outputs of SplitMix64 seeded with 1234567, as published with its C code
    state, golden = 1234567, 0x9E3779B97F4A7C15
    outputs = [naive.mix((state + i * golden) % 2**64) for i in (1, 2, 3)]

    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_values_never_change_between_versions():
    keys = (torch.tensor([0, 1, 12345]), torch.tensor([0, 1, 2]), torch.tensor([0, 0, 7]))

    assert random_bits(0, Stream.COUNT, *keys).tolist() == [
        3653763753142030391,
        -789239199420852298,
        4401498168067693960,
    ]
    assert [(stream.name, stream.value) for stream in Stream] == list(
        zip(("COUNT", "ORDER", "BLOCK", "COIN", "ROLLOUT", "TOKEN"), range(1, 7), strict=True)
    )


@pytest.mark.parametrize("seed", [0, 1, 113, -1, 2**31, 2**63, 2**64 - 1, 2**64 + 5, 3**100])
@pytest.mark.parametrize("key", [0, 1, -1, 2**31, 2**62, 2**63 - 1, -(2**63)])
def test_int64_arithmetic_wraps_as_unbounded_integers_modulo_two_to_the_64(seed, key):
    other = 987654321

    bits = random_bits(seed, Stream.ORDER, torch.tensor([key]), torch.tensor([other])).item()

    assert bits % 2**64 == naive.random_bits(seed, 2, key, other)
    assert unit_bits(torch.tensor([int(bits)])).item() == naive.random_bits(seed, 2, key, other) >> 33


def test_every_bit_is_fair_and_no_two_neighbouring_keys_share_bits():
    num = 40_000
    bits = random_bits(3, Stream.COUNT, torch.arange(-num // 2, num // 2))

    is_set = (bits[:, None] >> torch.arange(64)) & 1  # (keys, 64)
    assert ((is_set.double().mean(dim=0) - 0.5).abs() <= 4 * 0.5 / math.sqrt(num)).all()
    flips = (is_set[1:] ^ is_set[:-1]).double()
    assert ((flips.mean(dim=0) - 0.5).abs() <= 4 * 0.5 / math.sqrt(num)).all()
    assert bits.unique().numel() == num


@pytest.mark.parametrize("num_bins", [2, 3, 7, 256, 1000])
def test_unit_bits_are_uniform(num_bins):
    num = 200_000
    u = unit_bits(random_bits(0, Stream.COUNT, torch.arange(num)))

    assert u.min() >= 0
    assert u.max() < 2**31
    counts = (u * num_bins >> 31).bincount(minlength=num_bins)
    assert chi_square(counts, torch.full((num_bins,), num / num_bins)) <= chi_square_bound(num_bins)


@pytest.mark.parametrize("varied", ["key 0", "key 1", "key 2", "seed", "stream"])
def test_draws_that_differ_in_one_key_are_independent(varied):
    num, base = 40_000, torch.arange(40_000)
    zero = torch.zeros_like(base)
    keys = [zero, zero, zero]
    index = int(varied[-1]) if varied.startswith("key") else 0
    keys[index] = base
    following = list(keys)
    seed, stream = 0, Stream.COUNT
    if varied.startswith("key"):
        following[index] = base + 1
    elif varied == "seed":
        seed = 1
    else:
        stream = Stream.ORDER

    first = unit_bits(random_bits(0, Stream.COUNT, *keys)).double() / 2**31
    second = unit_bits(random_bits(seed, stream, *following)).double() / 2**31

    joint = ((first * 8).long() * 8 + (second * 8).long()).bincount(minlength=64)
    assert chi_square(joint, torch.full((64,), num / 64)) <= chi_square_bound(64)


def test_streams_seeds_and_the_order_of_keys_give_different_bits():
    one, two = torch.tensor(1), torch.tensor(2)
    results = {random_bits(0, stream, one, two).item() for stream in Stream}
    results |= {random_bits(seed, Stream.COUNT, one, two).item() for seed in (1, 2, -1)}
    results |= {random_bits(0, Stream.COUNT, two, one).item(), random_bits(0, Stream.COUNT, one).item()}

    assert len(results) == len(Stream) + 3 + 2


def test_a_value_depends_on_its_keys_and_not_on_the_shape_they_come_in():
    row, draw, position = torch.arange(5)[:, None, None], torch.arange(3)[None, :, None], torch.arange(-2, 4)

    together = random_bits(7, Stream.COIN, row, draw, position)

    assert together.shape == (5, 3, 6)
    for i, m, p in itertools.product(range(5), range(3), range(6)):
        alone = random_bits(7, Stream.COIN, torch.tensor(i), torch.tensor(m), torch.tensor(p - 2))
        assert together[i, m, p] == alone
    assert torch.equal(random_bits(7, Stream.COIN, row.flip(0), draw, position), together.flip(0))


def test_the_global_generator_is_neither_read_nor_advanced():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = random_bits(0, Stream.BLOCK, torch.arange(4))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)

    assert torch.equal(random_bits(0, Stream.BLOCK, torch.arange(4)), first)
