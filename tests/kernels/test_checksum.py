"""The checksum of memory: its value on each device, and what changes it."""

import numpy as np
import pytest

from rlnumba.kernels.peer.checksum import BLOCKS, CHUNK, THREADS, checksum, checksum_kernel, checksum_of, checksum_ref
from rlnumba.runtime import device
from rlnumba.runtime.arguments import type_name


def found_of(x):
    partials = device.xp().full(BLOCKS, -1, np.int64)
    checksum(device.asarray(x), partials)
    return checksum_of(device.to_host(partials))


def by_definition(x):
    return sum(int(word) * (2 * i + 1) for i, word in enumerate(x.view(np.uint32))) % 2**64


def random_of(rng, size):
    return rng.integers(-(2**63), 2**63 - 1, size, np.int64)


@pytest.mark.parametrize("size", [0, 1, 255, 257, CHUNK // 2 + 3])
def test_the_reference_is_the_definition(rng, size):
    x = random_of(rng, size)
    assert checksum_ref(x) == by_definition(x)


@pytest.mark.sim
@pytest.mark.parametrize("size", [0, 1, 3, 2 * THREADS * 4 + 700])
def test_values(rng, monkeypatch, size):
    if device.name() == "sim":
        monkeypatch.setattr("rlnumba.kernels.peer.checksum.BLOCKS", 2)
        monkeypatch.setattr("tests.kernels.test_checksum.BLOCKS", 2)
    for x in (random_of(rng, size), np.full(size, -1, np.int64)):
        assert found_of(x) == checksum_ref(x)


@pytest.mark.gpu
def test_large_arrays(rng):
    for size in (4 * BLOCKS * THREADS - 1, 9 * BLOCKS * THREADS + 5, 50_000_001):
        x = random_of(rng, size)
        assert found_of(x) == checksum_ref(x)


def test_a_changed_word_and_two_exchanged_ones_change_it(rng):
    x = random_of(rng, 500)
    expected, words = checksum_ref(x), x.view(np.uint32)
    for index, bit in rng.integers(0, (1000, 32), (200, 2)):
        words[index] ^= np.uint32(1) << np.uint32(bit)
        assert found_of(x) != expected
        words[index] ^= np.uint32(1) << np.uint32(bit)
    for first, second in rng.integers(0, 1000, (200, 2)):
        if words[first] != words[second]:
            words[[first, second]] = words[[second, first]]
            assert found_of(x) != expected
            words[[first, second]] = words[[second, first]]
    assert found_of(x) == expected


def test_other_arrays_are_refused():
    partials = device.xp().zeros(BLOCKS, np.int64)
    with pytest.raises(ValueError, match="checksum: x must be .any. int64, got .3,. int32"):
        checksum(device.xp().zeros(3, np.int32), partials)
    with pytest.raises(ValueError, match=r"checksum: partials must be \(1056\) int64"):
        checksum(device.xp().zeros(3, np.int64), partials[:-1])


def test_machine_code(compile_offline):
    types = tuple(map(type_name, (np.zeros(1, np.int64), np.zeros(BLOCKS, np.int64))))
    for architecture in [(8, 0), (9, 0), (10, 0)]:
        assert not compile_offline(checksum_kernel, types, architecture)
