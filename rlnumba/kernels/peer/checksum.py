"""Checksum of memory: what one rank wrote and another one read is the same.

    checksum(x) = sum over 32-bit words w_i of w_i (2 i + 1), modulo 2^64

Integer additions have the same sum in any order. The checksums of two arrays that differ in one word, or in the order
of two, differ: a product of a nonzero 32-bit number with an odd one, or of two nonzero differences, is below 2^64 and
not 0, as long as an array has less than 2^31 words. It does not protect from intent.
"""

import numpy as np

from rlnumba.kernels.checks import check
from rlnumba.kernels.ptx.instruction import instruction
from rlnumba.kernels.ptx.warp import device_function
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

i32, i64 = np.int32, np.int64
# Eight blocks for each SM of an H200; a thread has four loads of 8 bytes in flight. Not tuned.
BLOCKS, THREADS = 8 * 132, 256
I64 = (np.dtype(np.int64),)
MAX_BYTES = 8 << 30
# Words that NumPy multiplies at a time.
CHUNK = 1 << 16


def _wrapped(value):
    """A Python integer as int64, modulo 2^64."""
    return i64((value + (1 << 63)) % (1 << 64) - (1 << 63))


@instruction("mad.wide.u32 $0, $1, $2, $3;", "rrl", "l", effects=False)
def multiply_add(first, second, total):
    """total + first second: unsigned 32-bit factors, modulo 2^64."""
    return _wrapped((int(first) & 0xFFFFFFFF) * (int(second) & 0xFFFFFFFF) + int(total))


@instruction("add.s64 $0, $1, $2;", "ll", "l", effects=False)
def add_modulo(first, second):
    """first + second modulo 2^64."""
    return _wrapped(int(first) + int(second))


@device_function
def add_pair(pair, index, total):
    """total + what the two words of x[index] = pair add to the checksum."""
    factor = i32(4 * index + 1)
    total = multiply_add(i32(pair), factor, total)
    return multiply_add(i32(pair >> 32), factor + i32(2), total)


@cuda.jit
def checksum_kernel(x, partials):
    """partials[block] = the block's part of the checksum of x, of which a thread owns every so many pairs of words."""
    sums = cuda.shared.array(THREADS, np.int64)
    lane, stride = i64(cuda.threadIdx.x), i64(cuda.gridDim.x) * THREADS
    total, index = i64(0), i64(cuda.blockIdx.x) * THREADS + lane
    # All loads of a round before the first multiplication.
    while index + 3 * stride < x.shape[0]:
        a, b, c, d = x[index], x[index + stride], x[index + 2 * stride], x[index + 3 * stride]
        total = add_pair(a, index, total)
        total = add_pair(b, index + stride, total)
        total = add_pair(c, index + 2 * stride, total)
        total = add_pair(d, index + 3 * stride, total)
        index += 4 * stride
    while index < x.shape[0]:
        total = add_pair(x[index], index, total)
        index += stride
    sums[lane] = total
    cuda.syncthreads()
    half = THREADS // 2
    while half > 0:
        if lane < half:
            sums[lane] = add_modulo(sums[lane], sums[lane + half])
        cuda.syncthreads()
        half //= 2
    if lane == 0:
        partials[cuda.blockIdx.x] = sums[0]


def checksum(x, partials):
    """partials = parts of the checksum of x, whose sum modulo 2^64 (checksum_of) it is.

    x (n,) int64, pairs of words, at most MAX_BYTES; partials (BLOCKS,) int64, written. Raises ValueError for other
    arrays.
    """
    (size,) = check("checksum", "x", x, (None,), I64)
    check("checksum", "partials", partials, (BLOCKS,), I64)
    if 8 * size > MAX_BYTES:
        raise ValueError(f"checksum: x must have at most {MAX_BYTES} bytes, got {8 * size}")
    if device.name() == "cpu":
        partials[...] = 0
        partials[:1] = np.array([checksum_ref(x)], np.uint64).view(np.int64)
        return
    launch(checksum_kernel, BLOCKS, THREADS, x, partials)


def checksum_of(partials):
    """The checksum that a (BLOCKS,) int64 NumPy array adds up to: int in [0, 2^64)."""
    return int(partials.view(np.uint64).sum(dtype=np.uint64))


def checksum_ref(x):
    """The checksum of a NumPy array whose bytes are whole words: int in [0, 2^64)."""
    words, total = x.reshape(-1).view(np.uint32), 0
    factors = 2 * np.arange(min(CHUNK, len(words)), dtype=np.uint64) + 1
    for first in range(0, len(words), CHUNK):
        part = words[first : first + CHUNK].astype(np.uint64)
        total += int(np.dot(part, factors[: len(part)])) + 2 * first * int(part.sum())
    return total % (1 << 64)
