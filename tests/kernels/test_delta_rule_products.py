"""Products of float16 on tensor cores: what lets several kernels of the gated delta rule compute equal bits.

An element of a product must depend on its row of A, its column of B and its accumulator alone: not on the instruction's
width, on where an operand lies, on which operand is A, on how the reduction is cut into instructions, or on factors
that meet an exact zero.
"""

import numpy as np
import pytest

from rlnumba.kernels.ptx.shared_memory import BOX_BYTES, LINE, Address, fence_proxy_async, store_words
from rlnumba.kernels.ptx.sm80 import mma
from rlnumba.kernels.ptx.warp import device_function
from rlnumba.kernels.ptx.wgmma import smem_descriptor, wgmma_async, wgmma_wait_group
from rlnumba.kernels.tile.pipeline import shared_base, swizzled_chunk
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize
from tests.close import assert_close, assert_same_bits

pytestmark = pytest.mark.sm90
i32, f32 = np.int32, np.float32

# K of all products: that of a head of Qwen3.5. An instruction has 16 of it.
K = 128
STEPS = K // 16
# Words of A that a thread has in registers.
A_WORDS = 4 * STEPS
# Architectures that the kernels compile for.
ARCHITECTURES = [(9, 0, "a")]


@device_function
def fill_boxes(boxes, source, first_row, first_word, rows, is_k_major, thread):
    """Two boxes, each of `rows` lines of 32 words, of a matrix of words."""
    for index in range(thread, 16 * rows, 128):
        box, line, chunk = i32(index // 8 // rows), i32(index // 8 % rows), i32(index % 8)
        row, word = first_row + line, first_word + box * 32 + chunk * 4
        if not is_k_major:
            # Lines of k: the second box has the next 64 of them.
            row, word = first_row + box * rows + line, first_word + chunk * 4
        target = Address(boxes + box * rows * LINE)
        place = swizzled_chunk(Address(target + line * LINE), line, chunk)
        store_words(place, source[row, word], source[row, word + 1], source[row, word + 2], source[row, word + 3])


@specialize
def wgmma_kernel(columns, a, b, is_split):
    """c (M, N) += A B by wgmma with tiles of 64 rows and `columns` columns; a, b: where an operand lies.

    A is (M, K); B (N, K), or (K, N) where b is "mn"; words of two elements. is_split: an instruction at a time.
    """
    count, from_memory, is_k_major = columns // 2, a == "k", b == "k"
    multiply, wait = wgmma_async(columns, "float16", STEPS, a, b), wgmma_wait_group(count)
    multiply_step = wgmma_async(columns, "float16", 1, a, b)

    @cuda.jit
    def wgmma_kernel(a_words, b_words, c, add):
        thread, base = i32(cuda.threadIdx.x), shared_base()
        b_boxes = Address(base + 2 * BOX_BYTES)
        acc, words, four = (
            cuda.local.array(count, np.float32),
            cuda.local.array(A_WORDS, np.int32),
            cuda.local.array(4, np.int32),
        )
        first_row, first_column = i32(cuda.blockIdx.x * 64), i32(cuda.blockIdx.y * columns)
        row = i32(first_row + (thread >> 5) * 16 + ((thread & 31) >> 2))
        if from_memory:
            fill_boxes(base, a_words, first_row, i32(0), i32(64), True, thread)
        else:
            for step in range(STEPS):
                for i in range(4):
                    words[4 * step + i] = a_words[row + i % 2 * 8, step * 8 + i // 2 * 4 + (thread & 3)]
        if is_k_major:
            fill_boxes(b_boxes, b_words, first_column, i32(0), i32(columns), True, thread)
        else:
            fill_boxes(b_boxes, b_words, i32(0), first_column // 2, i32(64), False, thread)
        fence_proxy_async()
        cuda.syncthreads()
        for i in range(count):
            acc[i] = c[row + i % 4 // 2 * 8, first_column + i // 4 * 8 + (thread & 3) * 2 + i % 2]
        if is_split:
            for step in range(STEPS):
                for i in range(4):
                    four[i] = words[4 * step + i]
                multiply_step(acc, four, smem_descriptor(Address(b_boxes + step * 16 * LINE)), add)
                wait(acc)
        elif from_memory:
            multiply(acc, smem_descriptor(base), smem_descriptor(b_boxes), add)
            wait(acc)
        else:
            multiply(acc, words, smem_descriptor(b_boxes), add)
            wait(acc)
        for i in range(count):
            c[row + i % 4 // 2 * 8, first_column + i // 4 * 8 + (thread & 3) * 2 + i % 2] = acc[i]

    return wgmma_kernel


multiply_fragments = mma("float16")


@cuda.jit
def mma_kernel(a_words, b_words, c):
    """c (M, N) += A B by mma.sync, a warp for 16 rows and columns; A (M, K), B (N, K), words of two elements."""
    g, t = i32(cuda.threadIdx.x >> 2), i32(cuda.threadIdx.x & 3)
    row, column = i32(cuda.blockIdx.x * 16 + g), i32(cuda.blockIdx.y * 16)
    acc, words = cuda.local.array(8, np.float32), cuda.local.array(8, np.int32)
    for i in range(8):
        acc[i] = c[row + i % 4 // 2 * 8, column + i // 4 * 8 + t * 2 + i % 2]
    for step in range(STEPS):
        for i in range(4):
            words[i] = a_words[row + i % 2 * 8, step * 8 + i // 2 * 4 + t]
            words[4 + i] = b_words[column + g + i // 2 * 8, step * 8 + i % 2 * 4 + t]
        multiply_fragments(acc, 0, words, 0, words, 4)
    for i in range(8):
        c[row + i % 4 // 2 * 8, column + i // 4 * 8 + t * 2 + i % 2] = acc[i]


# (columns, where A lies, where B lies, an instruction at a time)
WGMMA = [(n, "registers", "k", False) for n in (64, 8, 16, 128)]
WGMMA += [(8, "k", "k", False), (64, "k", "k", False), (64, "registers", "mn", False), (64, "registers", "mn", True)]
ALL = [*WGMMA, "mma.sync"]
# One of each kind, of which a decode kernel and a kernel of blocks would consist.
SOME = [WGMMA[0], WGMMA[1], "mma.sync"]


def product(variant, a, b, c, add=True):
    """c + a b^T, or a b^T, for a (M, K), b (N, K) float16 and c (M, N) float32 on the host; on the host."""
    out = device.asarray(np.ascontiguousarray(c))
    if variant == "mma.sync":
        words = [device.asarray(np.ascontiguousarray(x).view(np.int32)) for x in (a, b)]
        launch(mma_kernel, (len(a) // 16, len(b) // 16), 32, *words, out)
        return device.to_host(out)
    columns, _, b_lies, _ = variant
    b = b if b_lies == "k" else b.T
    words = [device.asarray(np.ascontiguousarray(x).view(np.int32)) for x in (a, b)]
    shared = 2 * BOX_BYTES + max(2 * columns * LINE, 2 * BOX_BYTES) + 1024
    grid = len(a) // 64, c.shape[1] // columns
    launch(wgmma_kernel(*variant), grid, 128, *words, out, np.int32(add), shared=shared)
    return device.to_host(out)


def random_operands(rng, rows, columns):
    """a (rows, K), b (columns, K) and c, whose magnitudes are spread over many powers of two."""

    def numbers(*shape):
        return rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 4, shape)

    return numbers(rows, K).astype(np.float16), numbers(columns, K).astype(np.float16), f32(numbers(rows, columns))


def check_value(variant, a, b, c):
    expected = c.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64).T
    scale = np.max(np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64).T)
    assert_close(product(variant, a, b, c), expected, terms=K, scale=scale, what=f"{variant}")


@pytest.mark.sim
@pytest.mark.parametrize("variant", [WGMMA[1], (8, "k", "k", False), WGMMA[-1], "mma.sync"])
def test_value(rng, variant):
    if device.name() == "cpu":
        pytest.skip("needs the simulator or a Hopper GPU")
    columns = 16 if variant == "mma.sync" else variant[0]
    check_value(variant, *random_operands(rng, 64, columns))


@pytest.fixture(scope="module")
def operands():
    return random_operands(np.random.default_rng(0), 512, 512)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ALL)
def test_instructions_agree(operands, variant):
    """Widths, places of operands, one instruction at a time, and the instruction of a warp."""
    check_value(variant, *operands)
    assert_same_bits(product(variant, *operands), product(ALL[0], *operands), f"{variant}")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", SOME)
def test_operands_may_be_exchanged(operands, variant):
    a, b, c = operands
    assert_same_bits(product(variant, b, a, c.T).T.copy(), product(ALL[0], a, b, c), f"{variant}")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", SOME)
def test_rows_and_columns_may_lie_anywhere(operands, variant):
    a, b, c = operands
    rng = np.random.default_rng(1)
    rows, columns = rng.permutation(len(a)), rng.permutation(len(b))
    expected = product(variant, *operands)[rows][:, columns]
    assert_same_bits(product(variant, a[rows], b[columns], c[rows][:, columns]), expected, f"{variant}")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", SOME)
def test_sixteen_products_have_no_order(operands, variant):
    """Tokens of a sub-block may lie in any order, if it is the same in both operands."""
    a, b, c = operands
    rng = np.random.default_rng(4)
    order = np.concatenate([16 * step + rng.permutation(16) for step in range(STEPS)])
    assert_same_bits(product(variant, a[:, order], b[:, order], c), product(variant, a, b, c), f"{variant}")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("of_a", [True, False])
def test_what_meets_a_zero_does_not_matter(operands, variant, of_a):
    """Rows behind a token are multiplied by zeros: finite numbers of any size there change no bit."""
    a, b, c = (x[:256, ...] for x in operands)
    c = c[:, :256] * f32(2.0**-10)
    rng = np.random.default_rng(2)
    for first in (1, 5, 8, 15, 16, 60, 112, 113, 120, 127):
        zeros, others = (a.copy(), b.copy()) if of_a else (b.copy(), a.copy())
        zeros[:, first:] = rng.choice([0.0, -0.0], zeros[:, first:].shape)
        changed, gone = others.copy(), others.copy()
        changed[:, first:] = rng.choice([65504, -65504, 2.0**-24, 1, -3], changed[:, first:].shape)
        gone[:, first:] = 0
        pairs = ((zeros, x) if of_a else (x, zeros) for x in (others, changed, gone))
        found, other, without = (product(variant, *pair, c) for pair in pairs)
        assert_same_bits(found, without, f"{variant}, from {first} on")
        assert_same_bits(other, without, f"{variant}, large numbers from {first} on")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", SOME)
def test_an_accumulator_alone(operands, variant):
    """Products that are all zero leave an accumulator as it is; an instruction that begins at zero begins at +0."""
    a, b, c = operands
    nothing = np.zeros_like(a)
    assert_same_bits(product(variant, nothing, b, c), c, f"{variant}")
    assert_same_bits(product(variant, nothing, b, np.zeros_like(c)), np.zeros_like(c), f"{variant}")
    assert_same_bits(product(variant, -nothing, b, np.zeros_like(c)), np.zeros_like(c), f"{variant}, -0")
    if variant != "mma.sync":
        started = product(variant, a, b, np.full_like(c, np.nan), add=False)
        assert_same_bits(started, product(variant, a, b, np.zeros_like(c)), f"{variant}")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", SOME)
def test_small_numbers(variant):
    """Subnormal float16 and small accumulators, in all instructions alike."""
    rng = np.random.default_rng(3)
    a, b = (np.float16(rng.standard_normal((256, K)) * 2.0 ** rng.integers(-26, -10, (256, K))) for _ in range(2))
    c = f32(rng.standard_normal((256, 256)) * 2.0 ** rng.integers(-140, -20, (256, 256)))
    assert_same_bits(product(variant, a, b, c), product(ALL[0], a, b, c), f"{variant}")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", SOME)
def test_a_nan_stays_in_its_row(operands, variant):
    a, b, c = operands
    bad = a.copy()
    bad[::3] = np.nan
    found, expected = product(variant, bad, b, c), product(variant, a, b, c)
    assert np.isnan(found[::3]).all()
    others = np.arange(len(a)) % 3 > 0
    assert_same_bits(found[others], expected[others], f"{variant}")
