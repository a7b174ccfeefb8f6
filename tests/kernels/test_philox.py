import numpy as np
import pytest

from rlnumba.kernels.philox import noise_key, philox, philox_cpu, philox_ref, uniform, uniform_cpu
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

# Known answers of philox4x32 with 10 rounds: counter, key, words (Random123, kat_vectors).
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return np.array([int(word, 16) for word in text.split()], np.uint32)


@cuda.jit
def philox_kernel(counters, keys, out, uniforms):
    row = cuda.grid(1)
    if row < out.shape[0]:
        x, y, z, w = philox(
            counters[row, 0], counters[row, 1], counters[row, 2], counters[row, 3], keys[row, 0], keys[row, 1]
        )
        out[row, 0] = x
        out[row, 1] = y
        out[row, 2] = z
        out[row, 3] = w
        for i in range(4):
            uniforms[row, i] = uniform(out[row, i])


def by_kernel(counters, keys):
    xp = device.xp()
    out, uniforms = xp.zeros(counters.shape, np.uint32), xp.zeros(counters.shape, np.float32)
    launch(philox_kernel, -(-len(counters) // 32), 32, device.asarray(counters), device.asarray(keys), out, uniforms)
    return device.to_host(out), device.to_host(uniforms)


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_known_answers(counter, key, expected):
    assert list(philox_ref(words(counter), words(key))) == list(words(expected))
    if device.name() == "cpu":
        assert list(philox_cpu(*words(counter), *words(key))) == list(words(expected))
    else:
        assert list(by_kernel(words(counter)[None], words(key)[None])[0][0]) == list(words(expected))


@pytest.mark.sim
def test_kernel_and_reference_agree(rng):
    counters = rng.integers(0, 2**32, (33, 4), dtype=np.uint32)
    keys = rng.integers(0, 2**32, (33, 2), dtype=np.uint32)
    random_words, uniforms = by_kernel(counters, keys)
    assert np.array_equal(random_words, philox_ref(counters, keys))
    exact = (random_words.astype(np.float64) + 0.5) / 2**32
    assert np.max(np.abs(uniforms / exact - 1)) <= 2**-23


def test_uniform_is_never_zero_or_one():
    as_uniform = uniform_cpu if device.name() == "cpu" else uniform
    if device.name() == "cuda":
        pytest.skip("called on the host")
    assert as_uniform(np.uint32(0)) == np.float32(2.0**-33)
    assert as_uniform(np.uint32(1)) == np.float32(1.5 * 2.0**-32)
    assert as_uniform(np.uint32(2**31)) == np.float32(0.5)
    assert as_uniform(np.uint32(2**32 - 1)) == np.float32(1 - 2.0**-24)
    assert as_uniform(np.uint32(2**32 - 1)) < 1


def test_noise_key_depends_on_seed_and_prompt_only():
    key = noise_key(7, [1, 2, 3])
    assert key.dtype == np.uint32 and key.shape == (2,)
    assert np.array_equal(key, noise_key(7, (1, 2, 3)))
    assert np.array_equal(key, noise_key(7, np.array([1, 2, 3], np.int32)))
    others = [noise_key(seed, ids) for seed, ids in ((8, [1, 2, 3]), (7, [1, 2]), (7, [3, 2, 1]), (7, []), (-1, [1]))]
    assert len({tuple(k.tolist()) for k in [key, *others]}) == 6
    # A change of the hash would change every seeded run.
    assert noise_key(42, [0, 1, 2]).tolist() == [3195980212, 1171922273]
