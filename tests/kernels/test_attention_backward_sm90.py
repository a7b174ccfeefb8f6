import numpy as np
import pytest

from rlnumba.kernels.attention import sm90_backward
from rlnumba.kernels.attention.ops import IS_SUPPORTED
from rlnumba.kernels.attention.reference import attention_backward_ref, attention_ref
from rlnumba.kernels.attention.sequences import PackedSequences
from rlnumba.kernels.attention.sm90_backward import (
    BackwardBatch,
    DqSums,
    attention_backward_kernel,
    attention_backward_sm90,
    attention_round_dq_kernel,
    attention_rows_kernel,
    backward_nbytes,
    dq_sums_nbytes,
)
from rlnumba.kernels.attention.sm90_backward_mainloop import AttentionBackwardConfig
from rlnumba.runtime import device
from rlnumba.runtime.arguments import tuple_type
from tests.close import assert_close, assert_same_bits

pytestmark = pytest.mark.sm90


def bounds(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def packed(rng, lengths, heads, kv_heads, head_dim, element):
    """q, k, v, dout and attention's out and lse, of NumPy; keys that stand out, so that the softmax is not flat."""
    shapes = [(sum(lengths), h, head_dim) for h in (heads, kv_heads, kv_heads, heads)]
    dtype = device.dtype(element)
    q, k, v, dout = (s * rng.standard_normal(shape) for s, shape in zip((1, 2, 1, 1), shapes, strict=True))
    q, k, v, dout = (x.astype(dtype) for x in (q, k, v, dout))
    out, lse = attention_ref(q, k, v, bounds(lengths), head_dim**-0.5)
    return q, k, v, dout, out.astype(dtype), lse.astype(np.float32)


def backward(arrays, lengths, config):
    """(dq, dk, dv) as the kernels write them."""
    *inputs, dout, out, lse = (device.asarray(x) for x in arrays)
    gradients = [device.xp().full(x.shape, np.nan, x.dtype) for x in inputs]
    sequences = PackedSequences(device.asarray(bounds(lengths)), max(lengths, default=0))
    attention_backward_sm90(dout, inputs, out, lse, sequences, out.shape[2] ** -0.5, gradients, config)
    return gradients


def run(rng, lengths, heads, kv_heads, config):
    arrays = packed(rng, lengths, heads, kv_heads, config.head_dim, config.element)
    gradients = backward(arrays, lengths, config)
    q, k, v, dout, _, _ = arrays
    expected = attention_backward_ref(dout, q, k, v, bounds(lengths), config.head_dim**-0.5)
    terms = config.head_dim + max(lengths, default=0)
    for name, actual, wanted in zip(("dq", "dk", "dv"), gradients, expected, strict=True):
        # p and ds are rounded to the inputs' dtype, and ds is a difference of terms of the size of dout . v.
        size = 2 * np.max(np.abs(wanted), initial=1.0)
        assert_close(actual, wanted, terms=terms, scale=size, what=f"{name} {lengths} {config}")
    return arrays, gradients


SIMULATED = [
    # One box of columns and 128 queries a step; two sequences, so that rows beyond an end are the next one's.
    ([5, 0, 3], 2, 1, AttentionBackwardConfig(16, "bfloat16")),
    # Two boxes and 64 queries a step; dq summed over two blocks; more steps than stages.
    ([131], 1, 1, AttentionBackwardConfig(80, "float16")),
    ([70], 2, 2, AttentionBackwardConfig(40, "bfloat16", prefetch_scores=False)),
    # The consumers share the keys, half of the columns each.
    ([70], 1, 1, AttentionBackwardConfig(136, "bfloat16")),
    # Sums of dq whose rows are one and two times 64 bytes a consumer; the second sequence ends with a whole tile.
    ([3, 64, 1], 1, 1, AttentionBackwardConfig(32, "bfloat16")),
    ([66], 2, 1, AttentionBackwardConfig(64, "float16")),
]


@pytest.mark.sim
@pytest.mark.parametrize("lengths, heads, kv_heads, config", SIMULATED)
def test_simulator(rng, lengths, heads, kv_heads, config):
    run(rng, lengths, heads, kv_heads, config)


def test_nothing_to_do():
    xp = device.xp()
    q, lse = xp.zeros((0, 2, 64), np.float32), xp.zeros((2, 0), np.float32)
    nothing = PackedSequences(device.asarray(np.zeros(1, np.int32)), 0)
    attention_backward_sm90(q, (q, q, q), q, lse, nothing, 1.0, (q, q, q))


CANDIDATES = [AttentionBackwardConfig(head_dim, "bfloat16") for head_dim in (16, 48, 64, 72, 80, 96, 128, 192, 256)] + [
    AttentionBackwardConfig(128, "float16"),
    AttentionBackwardConfig(128, "bfloat16", prefetch_scores=False),
]


def test_candidates_fit_an_sm():
    for config in CANDIDATES:
        assert IS_SUPPORTED["sm90"](config.element, config.head_dim, 1) and config.layout.nbytes <= 227 * 1024 - 64
    assert not any(IS_SUPPORTED["sm90"]("bfloat16", head_dim, 1) for head_dim in (36, 264))


@pytest.mark.parametrize("config", CANDIDATES, ids=str)
def test_kernels_compile(compile_offline, config):
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    x, f, i, m = "int32[:,:,::1]", "float32[::1]", "int32[::1]", "uint8[::1]"
    rows = [x, x, "float32[:,::1]", i, f, i, i]
    troubles = compile_offline(attention_rows_kernel(config), rows, (9, 0, "a"))
    batch, dq = tuple_type(BackwardBatch, i, "int64", "int64"), tuple_type(DqSums, i, i, f)
    gemms = [m, m, m, m, f, batch, "float32", dq, x, x]
    troubles += compile_offline(attention_backward_kernel(config), gemms, (9, 0, "a"))
    troubles += compile_offline(attention_round_dq_kernel(config), [f, i, "float32", x], (9, 0, "a"))
    assert not troubles, "\n".join(troubles)


GPU = [
    ([1], 1, 1),
    ([1, 31, 63, 64, 65, 0, 2], 6, 2),
    ([127, 128, 129, 0, 191, 192, 193], 4, 4),
    ([700], 7, 1),
]
# A layer of Qwen3-0.6B, N = 4096.
REAL = ([1, 7, 64, 129, 500, 1000, 2395], 16, 8)


def run_again(rng, lengths, heads, kv_heads, config):
    """Against float64, and the same bits again, whatever the order in which blocks finish."""
    arrays, first = run(rng, lengths, heads, kv_heads, config)
    for _ in range(5):
        for name, actual, wanted in zip(("dq", "dk", "dv"), backward(arrays, lengths, config), first, strict=True):
            assert_same_bits(actual, wanted, name)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CANDIDATES, ids=str)
@pytest.mark.parametrize("lengths, heads, kv_heads", GPU)
def test_gpu(rng, lengths, heads, kv_heads, config):
    run_again(rng, lengths, heads, kv_heads, config)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [config for config in CANDIDATES if config.head_dim == 128], ids=str)
def test_gpu_real(rng, config):
    run_again(rng, *REAL, config)


@pytest.mark.gpu
def test_gpu_sequences_do_not_meet(rng):
    """A sequence has the bits it has alone, whatever stands beside it."""
    lengths, config = [300, 1000, 77], AttentionBackwardConfig(128, "bfloat16")
    arrays = packed(rng, lengths, 4, 2, 128, "bfloat16")
    whole = backward(arrays, lengths, config)
    for start, end in zip(bounds(lengths)[:-1], bounds(lengths)[1:], strict=True):
        q, k, v, dout, out, lse = arrays
        alone = [x[start:end].copy() for x in (q, k, v, dout, out)] + [lse[:, start:end].copy()]
        for actual, wanted in zip(backward(alone, [int(end - start)], config), whole, strict=True):
            assert_same_bits(actual, wanted[start:end].copy(), f"rows {start} .. {end}")


def check_damage(rng, config, lengths, heads, kv_heads, damaged):
    """NaN and infinity in all that one sequence gives leave every other one the bits that it has without them."""
    arrays = packed(rng, lengths, heads, kv_heads, config.head_dim, config.element)
    expected = backward(arrays, lengths, config)
    first, last = bounds(lengths)[damaged : damaged + 2]
    for value in (np.nan, np.inf):
        for which in range(4):
            changed = [x.copy() for x in arrays]
            changed[which][first:last] = value
            # The forward's out and lse of that sequence.
            changed[4][first:last] = changed[5][:, first:last] = np.nan
            for name, actual, wanted in zip(
                ("dq", "dk", "dv"), backward(changed, lengths, config), expected, strict=True
            ):
                actual, wanted = (np.delete(device.to_host(x), np.s_[first:last], axis=0) for x in (actual, wanted))
                assert_same_bits(actual, wanted, f"{name}, {value} in argument {which}")


@pytest.mark.sim
@pytest.mark.filterwarnings("ignore:invalid value")
def test_damage_stays_in_its_sequence(rng):
    """Ten tokens and ten: the second's are rows of the first's tiles, of keys and of queries."""
    check_damage(rng, AttentionBackwardConfig(16, "bfloat16"), [10, 10], 1, 1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gpu_damage_stays_in_its_sequence(rng, head_dim):
    check_damage(rng, AttentionBackwardConfig(head_dim, "bfloat16"), [10, 77, 64, 130, 300], 4, 2, 3)


@pytest.mark.sim
def test_sums_of_dq_have_no_tile_of_their_own_for_each_sequence():
    """2,048 sequences of 8 tokens take some twice what one of 16,384 takes, not nine times."""
    whole, many = (dq_sums_nbytes(16_384, sequences, 16, 128) for sequences in (1, 2048))
    assert whole == (16_384 + 9) * 16 * 128 * 4 and many < 2.13 * whole


@pytest.mark.skipif(device.name() != "cpu", reason="counts arrays of NumPy")
@pytest.mark.parametrize("lengths", [[1] * 40, [64, 1, 65, 130]])
@pytest.mark.parametrize("head_dim", [16, 136])
def test_the_arrays_of_the_operator_are_counted(rng, monkeypatch, lengths, head_dim):
    config = AttentionBackwardConfig(head_dim, "bfloat16")
    arrays = packed(rng, lengths, 2, 1, head_dim, "bfloat16")
    found, empty = [], np.empty
    for name in ("launch", "tensor_map"):
        monkeypatch.setattr(sm90_backward, name, lambda *arguments, **options: None)
    monkeypatch.setattr(np, "empty", lambda *arguments: found.append(empty(*arguments)) or found[-1])
    backward(arrays, lengths, config)
    assert sum(array.nbytes for array in found) == backward_nbytes(sum(lengths), len(lengths), 2, head_dim)
