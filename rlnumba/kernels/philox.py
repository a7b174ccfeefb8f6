"""Random numbers as a function: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

A counter of four 32-bit words and a key of two go in, four random words come out; there is no state. Ten
rounds, each with the keys k0, k1 bumped by the Weyl constants before the next:

    (hi0, lo0) = M0 * c0        (hi1, lo1) = M1 * c2        [64-bit products]
    (c0, c1, c2, c3) <- (hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0)

So the noise of a token is a function of seed, prompt, position and sample alone: the key stands for seed and prompt,
the counter for the others (kernels/sampling/draw.py). Batch, order and resume do not matter.
"""

import hashlib

import numba
import numpy as np

from rlnumba.kernels.ptx.warp import device_function, multiply_wide

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

_W0, _W1, _LOW = np.uint64(WEYL[0]), np.uint64(WEYL[1]), np.uint64(0xFFFFFFFF)
_M0, _M1 = np.uint32(MULTIPLIERS[0]), np.uint32(MULTIPLIERS[1])


def _multiply_wide(a, b):
    """(low, high) uint32 of the product of two uint32."""
    product = np.uint64(a) * np.uint64(b)
    return np.uint32(product & _LOW), np.uint32(product >> np.uint64(32))


def _make_philox(multiply):
    def philox(c0, c1, c2, c3, k0, k1):
        """Four random words of counter (c0, c1, c2, c3) and key (k0, k1); every word uint32."""
        for _ in range(ROUNDS):
            low0, high0 = multiply(c0, _M0)
            low1, high1 = multiply(c2, _M1)
            c0, c1, c2, c3 = np.uint32(high1 ^ c1 ^ k0), low1, np.uint32(high0 ^ c3 ^ k1), low0
            # Sums in 64 bits, cut: NumPy's scalars, which the simulator runs on, warn where 32 bits wrap.
            k0 = np.uint32((np.uint64(k0) + _W0) & _LOW)
            k1 = np.uint32((np.uint64(k1) + _W1) & _LOW)
        return c0, c1, c2, c3

    return philox


def _uniform(word):
    """A uint32 as a float32 in (0, 1): (word + 1/2) / 2^32, at least 2^-33, at most 1 - 2^-24.

    Near 0 the steps are 2^-32, near 1 float32's own 2^-24: use it where the small values matter.
    """
    return min((np.float32(word) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1.0 - 2.0**-24))


# For kernels, and for loops that Numba compiles for the CPU.
philox, uniform = device_function(_make_philox(multiply_wide)), device_function(_uniform)
philox_cpu, uniform_cpu = numba.njit(_make_philox(numba.njit(_multiply_wide))), numba.njit(_uniform)


def noise_key(seed, prompt_token_ids):
    """The Philox key, (2,) uint32 on the host, of a seed (int, taken modulo 2^64) and a prompt (ints).

    BLAKE2b of the seed as eight little-endian bytes and the ids as int64: only seed and prompt matter.
    """
    digest = hashlib.blake2b((int(seed) % 2**64).to_bytes(8, "little"), digest_size=8)
    digest.update(np.asarray(prompt_token_ids, "<i8").tobytes())
    return np.frombuffer(digest.digest(), "<u4").astype(np.uint32)


def philox_ref(counter, key):
    """Random words (..., 4) uint32 of counters (..., 4) and keys (..., 2), whole arrays at a time."""
    c0, c1, c2, c3 = np.moveaxis(np.asarray(counter, np.uint64), -1, 0)
    k0, k1 = np.moveaxis(np.asarray(key, np.uint64), -1, 0)
    for r in range(ROUNDS):
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        round0, round1 = (k0 + r * WEYL[0]) % 2**32, (k1 + r * WEYL[1]) % 2**32
        c0, c1, c2, c3 = right // 2**32 ^ c1 ^ round0, right % 2**32, left // 2**32 ^ c3 ^ round1, left % 2**32
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)
