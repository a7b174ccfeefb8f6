"""Attention of packed sequences that have prefixes in the rows of others, against sequences that have all of theirs."""

from functools import partial

import numpy as np
import pytest

from rlnumba.kernels.attention import ops, sm90_backward
from rlnumba.kernels.attention.ops import attention, attention_backward, attention_backward_nbytes
from rlnumba.kernels.attention.reference import attention_backward_ref
from rlnumba.kernels.attention.sequences import PackedPrefixes, PackedSequences
from rlnumba.kernels.attention.sm90_backward import (
    BackwardBatch,
    DqSums,
    Families,
    PlacedFamilies,
    attention_backward_kernel,
    attention_backward_sm90,
    attention_round_dq_kernel,
    attention_rows_kernel,
)
from rlnumba.kernels.attention.sm90_backward_mainloop import AttentionBackwardConfig
from rlnumba.kernels.attention.sm90_config import attention_config
from rlnumba.kernels.attention.sm90_forward import attention_sm90, attention_sm90_kernel
from rlnumba.kernels.tile.pipeline import MBARRIER_BYTES, SWIZZLE_ALIGNMENT
from rlnumba.runtime import device
from rlnumba.runtime.arguments import tuple_type
from rlnumba.runtime.shapes import shapes_only
from tests.close import assert_close, assert_same_bits
from tests.kernels.test_attention import bounds, packed
from tests.kernels.test_attention_sm90 import FORWARD

# (own rows, parent) of each sequence, query heads, key heads, head_dim, window. A prefix is a multiple of 16.
CASES = {
    "small": ([(32, -1), (5, 0), (40, 0), (10, -1)], 2, 1, 16, 0),
    "tiles": ([(144, -1), (30, 0), (70, 0)], 1, 1, 16, 0),
    "pair": ([(16, -1), (3, 0), (40, 0)], 4, 2, 18, 0),
    "groups": ([(48, -1), (5, 0), (1, 0), (70, 0), (33, -1), (128, -1), (9, 5), (64, 5)], 4, 1, 32, 0),
    "tree": ([(32, -1), (16, 0), (64, 1), (20, 2), (2, 1), (7, 0)], 2, 2, 16, 0),
    "tree of tiles": ([(80, -1), (48, 0), (16, 1), (40, 2), (5, 2), (30, 1), (3, 0), (10, -1)], 1, 1, 16, 0),
    "window": ([(64, -1), (50, 0), (8, 0)], 2, 1, 16, 24),
    "window of a tree": ([(80, -1), (48, 0), (16, 1), (40, 2), (5, 2), (30, 1), (3, 0), (10, -1)], 1, 1, 16, 50),
    "window of tiles": ([(272, -1), (130, 0), (9, 0)], 1, 1, 16, 24),
    "window of one": ([(128, -1), (9, 0)], 1, 1, 16, 1),
}

WINDOWS = [name for name in CASES if name.startswith("window of")]


class Case:
    """Arrays of a case, and the same sequences with all of their rows: `rows` says which, `own` where they are own.

    operators: the forward and the backward.
    """

    def __init__(self, rng, case, dtype="float32", operators=(attention, attention_backward)):
        sequences, heads, kv_heads, head_dim, self.window = case
        self.attention, self.attention_backward = operators
        self.lengths, self.parents = (list(each) for each in zip(*sequences, strict=True))
        self.scale = head_dim**-0.5
        self.q, self.k, self.v, self.dout = packed(rng, self.lengths, heads, kv_heads, head_dim, dtype)
        starts, rows = bounds(self.lengths), []
        for start, length, parent in zip(starts, self.lengths, self.parents, strict=False):
            before = rows[parent] if parent >= 0 else []
            rows.append([*before, *range(start, start + length)])
        self.prefix_lens = [len(each) - length for each, length in zip(rows, self.lengths, strict=True)]
        self.rows = np.concatenate(rows)
        self.full_lengths = list(map(len, rows))
        self.own = np.concatenate([np.arange(len(each)) >= n for each, n in zip(rows, self.prefix_lens, strict=True)])

    @property
    def sequences(self):
        prefixes = PackedPrefixes.of(self.lengths, self.parents)
        assert prefixes.lengths.tolist() == self.prefix_lens
        arrays = (device.asarray(array) for array in prefixes[:4])
        prefixes = PackedPrefixes(*arrays, *prefixes[4:])
        return PackedSequences(device.asarray(bounds(self.lengths)), max(self.lengths), self.window, prefixes)

    @property
    def full_sequences(self):
        return PackedSequences(device.asarray(bounds(self.full_lengths)), max(self.full_lengths), self.window)

    def forward(self, sequences, rows=slice(None)):
        q, k, v = (device.asarray(x[rows]) for x in (self.q, self.k, self.v))
        out, lse = device.xp().zeros(q.shape, q.dtype), device.xp().zeros((q.shape[1], len(q)), np.float32)
        self.attention(q, k, v, sequences, self.scale, out, lse)
        return out, lse

    def backward(self, out, lse):
        arrays = [device.asarray(x) for x in (self.q, self.k, self.v)]
        gradients = [device.xp().full(x.shape, np.nan, x.dtype) for x in arrays]
        self.attention_backward(device.asarray(self.dout), arrays, out, lse, self.sequences, self.scale, gradients)
        return gradients

    def check(self):
        """The bits of the forward, the gradient by the reference."""
        out, lse = self.forward(self.sequences)
        full_out, full_lse = self.forward(self.full_sequences, self.rows)
        assert_same_bits(device.to_host(out)[self.rows], device.to_host(full_out), "out")
        assert_same_bits(device.to_host(lse)[:, self.rows], device.to_host(full_lse), "lse")

        # The gradient of out is that of the sequence that owns a row; a row's gradient is the sum of those of its uses.
        dout = self.dout[self.rows] * self.own[:, None, None]
        arrays, starts = (x[self.rows] for x in (self.q, self.k, self.v)), bounds(self.full_lengths)
        expected = attention_backward_ref(dout, *arrays, starts, self.scale, self.window)
        for name, actual, of_uses in zip(("dq", "dk", "dv"), self.backward(out, lse), expected, strict=True):
            wanted = np.zeros(actual.shape)
            np.add.at(wanted, self.rows, of_uses)
            if self.window == 1 and name != "dv":
                # There is one key, and a score has no gradient: the difference of two equal float32 sums.
                assert not wanted.any()
                score_gradients = self.scale * np.max(np.sum(np.abs(self.dout * self.v), axis=2, dtype=np.float64))
                size = score_gradients * max(np.max(np.abs(x.astype(np.float64))) for x in (self.q, self.k))
                assert_close(actual, wanted, "float32", terms=self.q.shape[2], scale=size, what=name)
                continue
            size = 4 * np.max(np.abs(wanted))
            assert_close(actual, wanted, terms=sum(self.lengths), scale=size, what=name)


@pytest.mark.parametrize("name", CASES)
def test_cpu_device(rng, name):
    if device.name() != "cpu":
        pytest.skip("compiled loops of the CPU")
    Case(rng, CASES[name]).check()


def sm90_case(rng, case, config, segment=1024):
    """A Case of the sm90 kernels; config: the backward's."""
    _, heads, kv_heads, head_dim, _ = case
    of_forward = attention_config(head_dim, config.element, heads // kv_heads)._replace(segment=segment)
    operators = partial(attention_sm90, config=of_forward), partial(attention_backward_sm90, config=config)
    return Case(rng, case, config.element, operators)


@pytest.mark.sim
@pytest.mark.sm90
@pytest.mark.parametrize("name", ["small", "tiles", "tree", "tree of tiles", "window", *WINDOWS])
def test_sm90_simulator(rng, name):
    """A tile with keys of both, two segments; in the backward a tile of keys of which the prefix has a part.

    Of trees a tile of keys, and a tile of queries, has rows of three sequences and more.
    """
    sm90_case(rng, CASES[name], AttentionBackwardConfig(16, "bfloat16"), segment=64).check()


@pytest.mark.sim
@pytest.mark.sm90
def test_sm90_wide_heads_in_the_simulator(rng):
    """Blocks of 64 keys, whose columns the consumers share, and two parts of dq."""
    for window in (0, 7):
        case = [(16, -1), (3, 0), (2, 0)], 1, 1, 136, window
        sm90_case(rng, case, AttentionBackwardConfig(136, "bfloat16")).check()


@pytest.mark.skipif(device.name() != "cpu", reason="arithmetic of the host")
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("prefixes", [False, True])
def test_what_is_copied_in_bulk_is_aligned(prefixes, window):
    """Bulk copies write to and read from multiples of 16 bytes; the simulator would take any address."""
    for head_dim in range(16, 257, 8):
        config = AttentionBackwardConfig(head_dim, "bfloat16", window=window, prefixes=prefixes)
        layout = config.layout
        assert hasattr(layout, "position") == (prefixes and window > 0)
        copied = {name: getattr(layout, name) for name in ("dq", "lse", "delta", "position") if hasattr(layout, name)}
        assert not {name: at for name, at in copied.items() if at % 16}, head_dim
        swizzled = {name: getattr(layout, name) for name in ("k", "v", "q", "dout", "ds")}
        assert not {name: at for name, at in swizzled.items() if at % SWIZZLE_ALIGNMENT}, head_dim
        assert layout.k_full % MBARRIER_BYTES == 0 and layout.nbytes <= 227 * 1024


# A case of 4 query heads and a key head of 32 columns for each number of levels, and with a window.
COUNTED = [("groups", 2, 0), ("tree", 4, 0), ("groups", 2, 24), ("tree", 4, 24)]


@pytest.mark.skipif(device.name() != "cpu", reason="counts arrays of NumPy")
@pytest.mark.parametrize("name, levels, window", COUNTED)
def test_the_arrays_of_the_backward_are_counted(rng, monkeypatch, name, levels, window):
    made = CASES[name][0], 4, 1, 32, window
    case, found, empty = sm90_case(rng, made, AttentionBackwardConfig(32, "bfloat16")), [], np.empty
    tokens, heads = sum(case.lengths), 4
    out, lse = np.zeros(case.q.shape, case.q.dtype), np.zeros((heads, tokens), np.float32)
    sequences = case.sequences
    for name in ("launch", "tensor_map"):
        monkeypatch.setattr(sm90_backward, name, lambda *arguments, **options: None)
    monkeypatch.setattr(sm90_backward, "attention_backward_kernel", lambda config: None)
    monkeypatch.setattr(np, "empty", lambda *arguments: found.append(empty(*arguments)) or found[-1])
    arrays = case.q, case.k, case.v
    gradients = [np.zeros(x.shape, x.dtype) for x in arrays]
    case.attention_backward(case.dout, arrays, out, lse, sequences, case.scale, gradients)
    nbytes = sum(array.nbytes for array in found)
    assert nbytes == sm90_backward.backward_nbytes(levels * tokens, len(case.lengths), heads, 32, window > 0)
    sizes = "bfloat16", tokens, len(case.lengths), heads, 1, 32, True, window > 0
    monkeypatch.setattr(ops, "PREFIX_LEVELS", levels)
    planned = attention_backward_nbytes(*sizes)
    with shapes_only(device.GPUS["h200"]):
        of_gpu = attention_backward_nbytes(*sizes)
    assert planned < of_gpu == nbytes


@pytest.mark.sm90
@pytest.mark.parametrize("nested, window", [(False, 0), (True, 0), (True, 512)], ids=["children", "trees", "windows"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sm90_kernels_compile(compile_offline, head_dim, nested, window):
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    prefixes = PackedPrefixes.of([16, 16, 1], [-1, 0, 1 if nested else 0])
    config = AttentionBackwardConfig(head_dim, "bfloat16", window=window, prefixes=True)
    x, f, i, m = "int32[:,:,::1]", "float32[::1]", "int32[::1]", "uint8[::1]"
    families, dq = tuple_type(Families, i, i, i, i), tuple_type(DqSums, i, i, f)
    of_rows = tuple_type(PlacedFamilies, i, i, i, i, i) if window else families
    rows = [x, x, "float32[:,::1]", of_rows, f, i, i]
    troubles = compile_offline(attention_rows_kernel(config), rows, (9, 0, "a"))
    batch = tuple_type(BackwardBatch, families, "int64", "int64")
    gemms = [m, m, m, m, f, batch, "float32", dq, x, x]
    troubles += compile_offline(attention_backward_kernel(config), gemms, (9, 0, "a"))
    troubles += compile_offline(attention_round_dq_kernel(config), [f, families, "float32", x], (9, 0, "a"))
    forward = attention_sm90_kernel(
        attention_config(head_dim, "bfloat16", 2).with_window(window).with_prefixes(prefixes)
    )
    troubles += compile_offline(forward, FORWARD, (9, 0, "a"))
    assert not troubles, "\n".join(troubles)


# Two prompts with a system prompt, and completions of 1 to 65 tokens.
LENGTHS = range(1, 65)
GROUPS_OF_64 = [(272, -1), (144, 0), *[(n, 1) for n in LENGTHS], (16, 0), *[(n + 1, 66) for n in reversed(LENGTHS)]]
# A prompt and completions of it, as in a step of GRPO, and some of every length.
GPU_CASES = [
    ([(2048, -1), *[(256, 0)] * 8, (100, -1), (112, -1), *[(n, 10) for n in (1, 63, 64, 65, 300)]], 16, 8, 128, 0),
    ([(16, -1), (500, 0), (144, -1), (7, 2), (1, 2), (190, 2)], 6, 2, 64, 0),
    ([(1040, -1), (129, 0), (1000, 0)], 4, 2, 256, 0),
    ([(80, -1), (40, 0), (1, 0)], 6, 6, 80, 0),
    # A system prompt, prompts, histories, and what follows them.
    (
        [(528, -1), (1040, 0), *[(256, 1)] * 6, (304, 0), (160, 8), (65, 9), (300, 9), (64, 9), (9, 8), (100, -1)],
        *(4, 2, 128, 0),
    ),
    # Groups of 64 of a system prompt, without and with a window that reaches it from some.
    (GROUPS_OF_64, 4, 2, 128, 0),
    (GROUPS_OF_64, 4, 2, 64, 100),
    ([(16, -1), (16, 0), (16, 1), (16, 2), (16, 3), (70, 4), (1, 4), (200, 3), (63, 0)], 6, 2, 64, 0),
    ([(144, -1), (208, 0), (129, 1), (500, 1), (20, 0)], 4, 2, 256, 0),
    # Windows within the first sequence's own rows, beyond them, of less than a tile, and longer than all.
    ([(528, -1), (1040, 0), *[(256, 1)] * 6, (304, 0), (160, 8), (65, 9), (9, 8), (100, -1)], 4, 2, 128, 512),
    ([(1040, -1), (129, 0), (1000, 0), (64, 0)], 4, 2, 256, 300),
    ([(256, -1), (500, 0), (144, -1), (16, 2), (1, 3), (190, 3)], 6, 2, 64, 20),
    ([(640, -1), (40, 0), (1, 0)], 6, 6, 80, 5000),
]


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: f"{len(case[0])}-{case[3]}-{case[4]}")
def test_sm90_gpu(rng, case):
    """The forward's bits, the backward by the reference, and the same bits every time."""
    made = sm90_case(rng, case, AttentionBackwardConfig(case[3], "bfloat16"))
    made.check()
    out, lse = made.forward(made.sequences)
    first = made.backward(out, lse)
    for _ in range(3):
        for one, other in zip(first, made.backward(out, lse), strict=True):
            assert_same_bits(one, other)


def test_wrong_prefixes_are_named(rng):
    if device.name() != "cpu":
        pytest.skip("compiled loops of the CPU")
    case = Case(rng, CASES["pair"])
    prefixes = case.sequences.prefixes._replace(parents=np.zeros(2, np.int32))
    with pytest.raises(ValueError, match=r"attention: prefixes.parents must be \(3\) int32, got \(2,\)"):
        case.forward(case.sequences._replace(prefixes=prefixes))
