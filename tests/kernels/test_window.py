"""Attention with a sliding window: every form of every family against the reference, and with the same bits."""

import numpy as np
import pytest

from rlnumba.kernels.attention.ops import attention
from rlnumba.kernels.attention.reference import attention_backward_ref, attention_ref
from rlnumba.kernels.attention.scheduler import list_work_items_kernel
from rlnumba.kernels.attention.sequences import first_kept_key
from rlnumba.kernels.attention.simt import attention_gradient_kernel, attention_kernel, decode_config, prefill_config
from rlnumba.kernels.attention.sm80_backward import dkv_config, dq_config, sm80_gradient_kernel
from rlnumba.kernels.attention.sm80_decode import decode_config as sm80_decode_config
from rlnumba.kernels.attention.sm80_decode import sm80_decode_kernel
from rlnumba.kernels.attention.sm80_forward import attention_config as sm80_config
from rlnumba.kernels.attention.sm80_forward import sm80_attention_kernel
from rlnumba.kernels.attention.sm80_tiles import PagedBatch
from rlnumba.kernels.attention.sm90_backward import (
    AttentionBackwardConfig,
    BackwardBatch,
    DqSums,
    attention_backward_kernel,
)
from rlnumba.kernels.attention.sm90_config import attention_config
from rlnumba.kernels.attention.sm90_decode.config import decode_config as sm90_decode_config
from rlnumba.kernels.attention.sm90_decode.kernel import paged_attention_sm90_kernel
from rlnumba.kernels.attention.sm90_forward import attention_sm90_kernel
from rlnumba.kernels.nn.rope import HeadShape
from rlnumba.runtime import device, dispatch, launch
from rlnumba.runtime.arguments import tuple_type
from tests.close import assert_gradient, assert_same_bits
from tests.kernels.test_attention import packed
from tests.kernels.test_attention_sm90 import DECODE, FORWARD
from tests.kernels.test_decode_qkv import argument_types
from tests.kernels.test_dispatch import Sequences, bounds, run_attention, skip_unless_runs

# One key, one more than a gradient's tile, less than a tile, one of sm80 and sm90, no multiple, longer than the texts.
WINDOWS = [1, 2, 7, 64, 100, 1000]
LENGTHS, SHAPE = [150, 70, 1, 200, 33], (6, 3, 48)


@pytest.fixture(autouse=True)
def unobserved(monkeypatch):
    """Launches are not noted: test_kernels_compile_for_gpus has these kernels compiled."""
    monkeypatch.setattr(launch, "observers", [])


def element():
    """The dtype of the fast kernels, or that of the cpu device."""
    return "float32" if device.name() == "cpu" else "bfloat16"


def test_reference_sees_the_last_keys_of_its_window(rng):
    q, k, v, _ = (x.astype(np.float64) for x in packed(rng, [9], 4, 2, 8, "float32"))
    out, lse = attention_ref(q, k, v, bounds([9]), 0.3, 3)
    # Row 6, head 3: keys 4, 5, 6 of key head 1, and not key 3.
    weights = np.exp(0.3 * k[4:7, 1] @ q[6, 3])
    np.testing.assert_allclose(out[6, 3], weights @ v[4:7, 1] / weights.sum(), rtol=1e-12)
    np.testing.assert_allclose(lse[3, 6], np.log(weights.sum()), rtol=1e-12)
    # A window of one key: its own value.
    alone = attention_ref(q, k, v, bounds([9]), 0.3, 1)[0]
    np.testing.assert_allclose(alone, np.repeat(v, 2, axis=1), rtol=1e-12)
    # The last two rows alone.
    last = attention_ref(q[7:], k, v, bounds([2]), 0.3, 3, bounds([9]))[0]
    np.testing.assert_allclose(last, out[7:], rtol=1e-12)


def test_gradient_of_reference(rng):
    lengths = [3, 1, 5]
    q, k, v, dout = (x.astype(np.float64) for x in packed(rng, lengths, 4, 2, 6, "float32"))
    gradients = attention_backward_ref(dout, q, k, v, bounds(lengths), 0.4, 2)

    def loss():
        return float(np.sum(attention_ref(q, k, v, bounds(lengths), 0.4, 2)[0] * dout))

    for name, gradient, x in zip(("dq", "dk", "dv"), gradients, (q, k, v), strict=True):
        assert_gradient(loss, gradient, x, name)


@pytest.mark.parametrize("window", WINDOWS)
def test_numpy_device(rng, window):
    if device.name() != "cpu":
        pytest.skip("compiled loops of the CPU")
    run_attention(rng, "auto", LENGTHS, *SHAPE, "float32", [1, 2, 65, 200], window)


@pytest.mark.sim
@pytest.mark.parametrize("window", [2, 40])
@pytest.mark.parametrize("family", dispatch.FAMILIES)
def test_simulator(rng, family, window):
    if device.name() == "cuda":
        pytest.skip("test_gpu has this")
    run_attention(rng, family, [70, 3], 2, 1, 16, "bfloat16", [1, 33], window)


@pytest.mark.gpu
@pytest.mark.parametrize("family", dispatch.FAMILIES)
@pytest.mark.parametrize("window", [*WINDOWS, 512])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(16, 8, 128), (9, 3, 64), (4, 1, 256)])
def test_gpu(rng, family, window, heads, kv_heads, head_dim):
    skip_unless_runs(family)
    lengths = [1100, 70, 1, 64, 129, 2300]
    run_attention(rng, family, lengths, heads, kv_heads, head_dim, "bfloat16", [1, 2, 65, 1100], window)


def chunks_agree(case, cuts, steps):
    """Two chunks cut at each of `cuts`, and decode at each of `steps`, in the bits of all queries at once.

    Of the block tables only what first_kept_key asks for is there.
    """
    expected = device.to_host(case.forward()[0])
    count, longest = len(case.lengths), max(case.lengths)
    for begin, end in [*((cut, longest) for cut in cuts), *((step, step + 1) for step in steps)]:
        begins = [min(begin, max(length - 1, 0)) for length in case.lengths]
        ends = [max(min(end, length), first + 1) for length, first in zip(case.lengths, begins, strict=True)]
        lost = int(first_kept_key(min(begins), case.window)) // 16
        out, rows = case.chunks(begins, ends, lost)
        assert_same_bits(out, expected[rows], f"{count} sequences, positions {begin} .. {end}, window {case.window}")


@pytest.mark.parametrize("window", WINDOWS)
def test_chunks_and_steps_have_the_bits_of_training(rng, window):
    if device.name() != "cpu":
        pytest.skip("compiled loops of the CPU")
    case = Sequences(rng, [170], *SHAPE, "float32", window=window)
    chunks_agree(case, [1, 31, 32, 33, 64, 100, 169], [0, 1, 31, 32, 63, 64, 65, 100, 128, 163, 169])


@pytest.mark.gpu
@pytest.mark.parametrize("family", dispatch.FAMILIES)
@pytest.mark.parametrize("window", [*WINDOWS, 512])
@pytest.mark.parametrize("shape", [(16, 8, 128), (4, 1, 256), (8, 2, 80)])
def test_chunks_and_steps_have_the_bits_of_training_on_the_gpu(rng, family, window, shape):
    skip_unless_runs(family)
    with dispatch.forced(family):
        case = Sequences(rng, [1300], *shape, window=window)
        chunks_agree(case, [1, 63, 64, 100, 700, 1027, 1299], [0, 63, 64, 99, 100, 511, 640, 1023, 1024, 1100, 1299])


@pytest.mark.sim
@pytest.mark.parametrize("family", dispatch.FAMILIES)
def test_chunks_have_the_bits_of_training_in_the_simulator(rng, family):
    if device.name() != "sim":
        pytest.skip("small for the simulator")
    # float32 hides nothing by rounding.
    kind = "float32" if family == "simt" else "bfloat16"
    with dispatch.forced(family):
        chunks_agree(Sequences(rng, [150], 2, 1, 16, kind, window=20), [140], [100, 149])


@pytest.mark.sim
@pytest.mark.parametrize("family, length", [("sm90", 200), ("sm80", 132)])
def test_gradient_of_several_blocks_of_keys_in_the_simulator(rng, family, length):
    """Rows of 128 keys and more: the last that see a block's keys, and the block that begins a query tile's dq."""
    if device.name() != "sim":
        pytest.skip("small for the simulator")
    run_attention(rng, family, [length], 2, 1, 16, "bfloat16", [], 2)


@pytest.mark.parametrize("window", [200, 5000])
def test_a_window_that_holds_the_text_has_the_bits_of_none(rng, window):
    if device.name() == "sim":
        pytest.skip("too large for the simulator")
    outputs = []
    for size in (0, window):
        case = Sequences(np.random.default_rng(1), LENGTHS, *SHAPE, element(), window=size)
        out, lse = case.forward()
        outputs.append([out, lse, *case.gradient(out, lse), case.paged(1)[0]])
    for with_none, with_window in zip(*outputs, strict=True):
        assert_same_bits(with_window, with_none)


def test_keys_ahead_of_the_window_do_not_reach_a_row(rng):
    """Also where they are huge: they are masked, not multiplied by a small weight."""
    if device.name() == "sim":
        pytest.skip("too large for the simulator")
    case = Sequences(rng, [100], *SHAPE, element(), window=10)
    before = device.to_host(case.forward()[0])
    case.k[:50], case.v[:50] = 1e4, 1e30
    after = device.to_host(case.forward()[0])
    assert_same_bits(after[59:], before[59:])
    assert (after[50:59] != before[50:59]).any(axis=(1, 2)).all()


@pytest.mark.parametrize("position, window, kept", [(0, 1, 0), (63, 1, 0), (64, 1, 64), (191, 65, 64), (190, 65, 64)])
def test_kept_keys_begin_with_a_tile(position, window, kept):
    assert first_kept_key(position, window) == kept
    assert first_kept_key(np.array([position, position]), window).tolist() == [kept, kept]


@pytest.mark.parametrize("head_dim", [48, 256])
def test_kernels_compile_for_gpus(compile_offline, head_dim):
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    x, f, i, tables = "uint16[:,:,::1]", "float32[:,::1]", "int32[::1]", "int32[:,::1]"
    configs = prefill_config(head_dim), prefill_config(head_dim, row_tiles=2)
    troubles = compile_offline(
        attention_kernel(configs[0], False, 512), [x, x, x, i, "int32", i, i, "float32", x, f], (9, 0)
    )
    for of_keys in (False, True):
        kernel = attention_gradient_kernel(configs[1], of_keys, 512)
        troubles += compile_offline(kernel, [x, x, x, x, f, f, i, "float32", x, x], (9, 0))
    kernel = attention_kernel(decode_config(head_dim), True, 512)
    troubles += compile_offline(kernel, [x, x, x, tables, "int32", i, i, "float32", x, f], (9, 0))
    assert not troubles, "\n".join(troubles)


def test_wrong_windows_are_named(rng):
    case = Sequences(rng, [5], 2, 1, 16, "float32", window=-1)
    q, k, v = (device.asarray(x) for x in (case.q, case.k, case.v))
    with pytest.raises(ValueError, match="attention: window must be 0 to 16777216, got -1"):
        attention(q, k, v, case.packed(), 1.0, q, device.xp().zeros((2, 5), np.float32))
    with pytest.raises(ValueError, match="paged_attention: window must be 0 to 16777216, got -1"):
        case.paged(1)


SM90 = (9, 0, "a")


@pytest.mark.parametrize("head_dim, group, paged, window", [(128, 2, False, 512), (256, 4, True, 1024)])
def test_sm90_kernels_compile(compile_offline, head_dim, group, paged, window):
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    config = attention_config(head_dim, "bfloat16", group, paged, 16 if paged else 64).with_window(window)
    troubles = compile_offline(attention_sm90_kernel(config), FORWARD, SM90)
    # Longer windows than a segment, too.
    for each in (window, 4096):
        decode = sm90_decode_config(head_dim, "bfloat16", group, 16)._replace(window=each)
        troubles += compile_offline(paged_attention_sm90_kernel(decode), DECODE, SM90)
    fused = paged_attention_sm90_kernel(decode._replace(fused_qkv=True), HeadShape(head_dim, 8, 8, 4), True)
    troubles += compile_offline(fused, argument_types("bfloat16", head_dim // 2, True), SM90)
    types = ["int32[::1]"] * 4 + ["int32"] * 2 + ["int32[:,::1]"]
    troubles += compile_offline(list_work_items_kernel(8, 1024, False, window), types, SM90)
    x, f, i, m = "int32[:,:,::1]", "float32[::1]", "int32[::1]", "uint8[::1]"
    batch, dq = tuple_type(BackwardBatch, i, "int64", "int64"), tuple_type(DqSums, i, i, f)
    backward = attention_backward_kernel(AttentionBackwardConfig(head_dim, "bfloat16", window=window))
    troubles += compile_offline(backward, [m, m, m, m, f, batch, "float32", dq, x, x], SM90)
    assert not troubles, "\n".join(troubles)


@pytest.mark.parametrize("architecture, limit", [((8, 0), 163 * 1024), ((12, 0), 99 * 1024)], ids=str)
def test_sm80_kernels_compile(compile_offline, architecture, limit):
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    x, f, i, troubles = "uint16[:,:,::1]", "float32[:,::1]", "int32[::1]", []
    head_dim = 256 if architecture == (8, 0) else 128
    batch = tuple_type(PagedBatch, i, i, i, "int64")
    for block_size in (0, 16):
        config = sm80_config(head_dim, "bfloat16", block_size, limit, 512).with_window(512)
        troubles += compile_offline(
            sm80_attention_kernel(config), [x, x, x, batch, "float32", f, i, x, f], architecture
        )
    decode = sm80_decode_kernel(sm80_decode_config(head_dim, "bfloat16", 16, limit).with_window(4096))
    troubles += compile_offline(decode, [x, x, x, batch, "int64", "float32", f, f, x], architecture)
    for config in (dkv_config(head_dim, "bfloat16", limit), dq_config(head_dim, "bfloat16", limit)):
        kernel = sm80_gradient_kernel(config._replace(window=512))
        troubles += compile_offline(kernel, [x, x, x, x, f, f, i, "float32", x, x], architecture)
    assert not troubles, "\n".join(troubles)
