import numpy as np
import pytest

from rlnumba.kernels.ptx.instruction import address_of
from rlnumba.kernels.ptx.shared_memory import shared_address, store_word
from rlnumba.kernels.ptx.sm80 import (
    copy_to_global,
    cp_async_4,
    cp_async_16,
    cp_async_commit_group,
    cp_async_wait_group,
    ldmatrix_fragment,
    ldmatrix_fragment_trans,
    mma,
    smid,
)
from rlnumba.kernels.ptx.warp import device_function
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize
from tests.close import assert_close, assert_same_bits

i32 = np.int32


@device_function
def copy_lines(target, source, lane):
    """Copy a 16 x 16 matrix of 16-bit values to lines of 32 bytes of shared memory."""
    cp_async_16(target + lane * 16, source + lane * 16, 16)


@device_function
def half_lines(l, lines_first, of_a):
    """(line, first of eight) whose address lane l gives, by the table of kernels/ptx/sm80.py."""
    if lines_first:
        if of_a:
            return l % 16, 8 * (l // 16)
        return l % 8 + 8 * (l // 16), 8 * (l // 8 % 2)
    if of_a:
        return l % 8 + 8 * (l // 16), 8 * (l // 8 % 2)
    return l % 16, 8 * (l // 16)


@specialize
def product_kernel(element, a_across, b_across):
    """One warp, one product of 16 x 16 x 16; an operand lies K-major, or MN-major if `across`."""
    multiply_fragments, wait = mma(element), cp_async_wait_group(0)

    @cuda.jit
    def product_kernel(a, b, c):
        lane = cuda.threadIdx.x
        base = shared_address(cuda.shared.array(0, np.uint8))
        words = cuda.local.array(8, np.int32)
        acc = cuda.local.array(8, np.float32)
        copy_lines(base, address_of(a), lane)
        copy_lines(base + 512, address_of(b), lane)
        cp_async_commit_group()
        wait()
        cuda.syncthreads()
        line, first = half_lines(lane, not a_across, True)
        if a_across:
            ldmatrix_fragment_trans(words, 0, base + line * 32 + first * 2)
        else:
            ldmatrix_fragment(words, 0, base + line * 32 + first * 2)
        line, first = half_lines(lane, not b_across, False)
        if b_across:
            ldmatrix_fragment_trans(words, 4, base + 512 + line * 32 + first * 2)
        else:
            ldmatrix_fragment(words, 4, base + 512 + line * 32 + first * 2)
        g, t = lane // 4, lane % 4
        for i in range(8):
            acc[i] = c[g + 8 * (i % 4 // 2), 2 * t + 8 * (i // 4) + i % 2]
        multiply_fragments(acc, 0, words, 0, words, 4)
        for i in range(8):
            c[g + 8 * (i % 4 // 2), 2 * t + 8 * (i // 4) + i % 2] = acc[i]

    return product_kernel


@pytest.mark.sim
@pytest.mark.parametrize("element", ["float16", "bfloat16"])
@pytest.mark.parametrize("a_across", [False, True])
@pytest.mark.parametrize("b_across", [False, True])
def test_product(rng, element, a_across, b_across):
    """Copies, both loads of both sides and the product, against A B + C; on a GPU the same of the hardware."""
    a, b = (rng.standard_normal((16, 16)).astype(device.dtype(element)) for _ in range(2))
    c = rng.standard_normal((16, 16)).astype(np.float32)
    out = device.asarray(c.copy())
    launch(product_kernel(element, a_across, b_across), 1, 32, device.asarray(a), device.asarray(b), out, shared=1024)
    a, b = a.astype(np.float64), b.astype(np.float64)
    expected = (a.T if a_across else a) @ (b if b_across else b.T) + c
    assert_close(out, expected, terms=17, scale=float(np.abs(expected).max()) + 4)


@specialize
def fragment_kernel(across):
    """The four words of every lane after one load."""

    @cuda.jit
    def fragment_kernel(matrix, words):
        lane = cuda.threadIdx.x
        base = shared_address(cuda.shared.array(0, np.uint8))
        loaded = cuda.local.array(6, np.int32)
        copy_lines(base, address_of(matrix), lane)
        cp_async_commit_group()
        cp_async_wait_group_all()
        cuda.syncthreads()
        if across:
            ldmatrix_fragment_trans(loaded, 2, base + lane * 16)
        else:
            ldmatrix_fragment(loaded, 2, base + lane * 16)
        for i in range(4):
            words[lane, i] = loaded[2 + i]

    return fragment_kernel


cp_async_wait_group_all = cp_async_wait_group(0)


@pytest.mark.sim
@pytest.mark.parametrize("across", [False, True])
def test_words_of_a_load(rng, across):
    """Matrix i is the chunks 8 i .. 8 i + 7 of memory, one a line."""
    matrix = rng.integers(0, 1 << 16, (4, 8, 8)).astype(np.uint16)
    words = device.asarray(np.zeros((32, 4), np.int32))
    launch(fragment_kernel(across), 1, 32, device.asarray(matrix), words, shared=512)
    found = device.to_host(words).view(np.uint16).reshape(32, 4, 2)
    for lane in range(32):
        for i in range(4):
            g, t = lane // 4, lane % 4
            taken = matrix[i, 2 * t : 2 * t + 2, g] if across else matrix[i, g, 2 * t : 2 * t + 2]
            assert (found[lane, i] == taken).all()


@cuda.jit
def copies_kernel(source, out, words):
    """Chunk by chunk: lanes of an even number copy, the others only clear; then out through shared memory."""
    lane = cuda.threadIdx.x
    base = shared_address(cuda.shared.array(0, np.uint8))
    cp_async_16(base + lane * 16, address_of(source) + lane * 16, 16 - 16 * (lane % 2))
    cp_async_commit_group()
    cp_async_16(base + 512 + lane * 16, address_of(source) + lane * 16, 16)
    cp_async_commit_group()
    cp_async_wait_group_latest()
    cuda.syncthreads()
    store_word(base + lane * 16, lane)
    cp_async_4(base + lane * 16 + 4, address_of(source) + (31 - lane) * 16, 4 - 4 * (lane // 2 % 2))
    cp_async_commit_group()
    cp_async_wait_group_all()
    cuda.syncthreads()
    copy_to_global(address_of(out) + lane * 16, base + (lane ^ 1) * 16)
    words[lane] = smid()


cp_async_wait_group_latest = cp_async_wait_group(1)


@pytest.mark.sim
def test_copies(rng):
    source = rng.integers(-(1 << 31), 1 << 31, (32, 4)).astype(np.int32)
    out, words = device.asarray(np.zeros((32, 4), np.int32)), device.asarray(np.full(32, -1, np.int32))
    launch(copies_kernel, 1, 32, device.asarray(source), out, words, shared=1024)
    expected = source * (np.arange(32)[:, None] % 2 == 0)
    expected[:, 0] = np.arange(32)
    expected[:, 1] = source[::-1, 0] * (np.arange(32) // 2 % 2 == 0)
    assert_same_bits(out, expected[np.arange(32) ^ 1].astype(np.int32))
    assert (device.to_host(words) >= 0).all()


@cuda.jit
def hasty_kernel(source, out):
    """Reads what it has not waited for."""
    base = shared_address(cuda.shared.array(0, np.uint8))
    cp_async_16(base, address_of(source), 16)
    cp_async_commit_group()
    cp_async_wait_group_latest()
    copy_to_global(address_of(out), base)


@pytest.mark.sim
def test_the_simulator_shows_a_missing_wait():
    if device.name() == "cuda":
        pytest.skip("a GPU may or may not show it")
    out = np.zeros(4, np.float32)
    launch(hasty_kernel, 1, 1, np.ones(4, np.float32), out, shared=16)
    assert np.isnan(out).all()
