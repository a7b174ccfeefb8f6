import numpy as np
import pytest

from rlnumba import device
from rlnumba.kernels import qkv
from rlnumba.kernels.qkv import qkv_split, qkv_split_backward, qkv_split_backward_ref, qkv_split_ref
from rlnumba.kernels.rope import rope_table
from tests.close import assert_close, assert_gradient, assert_same_bits

EPS = 1e-6
# (N, H, HK, E)
SMALL = [(1, 1, 1, 2), (5, 3, 1, 48), (2, 2, 2, 66), (0, 2, 1, 8)]
REAL = [(4096, 16, 8, 128), (4097, 9, 3, 64), (0, 16, 8, 128), (1, 16, 8, 128), (333, 4, 2, 256), (50, 6, 6, 80)]


def arrays(rng, shape, dtype):
    rows, heads, kv_heads, width = shape
    shapes = {
        "dq": (rows, heads, width),
        "dk": (rows, kv_heads, width),
        "dv": (rows, kv_heads, width),
        "qkv": (rows, (heads + 2 * kv_heads) * width),
    }
    made = {name: rng.standard_normal(size, np.float32) for name, size in shapes.items()}
    made |= {name: rng.uniform(0.5, 1.5, width) for name in ("q_weight", "k_weight")}
    made = {name: array.astype(device.dtype(dtype)) for name, array in made.items()}
    cos, sin = rope_table(40, width, 10000.0)
    return made | {"cos": cos, "sin": sin, "position_ids": rng.integers(0, 40, rows).astype(np.int32)}


def run_all(rng, shape, dtype, normed=True):
    rows, heads, kv_heads, width = shape
    host = arrays(rng, shape, dtype)
    if not normed:
        host |= {"q_weight": None, "k_weight": None}
    wide = {name: a if a is None or name == "position_ids" else a.astype(np.float64) for name, a in host.items()}
    on_device = {name: None if a is None else device.asarray(a) for name, a in host.items()}
    xp, kind = device.xp(), host["qkv"].dtype
    q, k, v = (xp.full(host[name].shape, np.nan, kind) for name in ("dq", "dk", "dv"))
    rstd = xp.full((rows, heads + kv_heads), np.nan, np.float32) if normed else None
    tables = [on_device[name] for name in ("cos", "sin", "position_ids")]
    weights = [on_device[name] for name in ("q_weight", "k_weight")]
    qkv_split(on_device["qkv"], *weights, EPS, *tables, q, k, v, rstd)
    names = ("qkv", "q_weight", "k_weight")
    wide_tables = [wide[name] for name in ("cos", "sin", "position_ids")]
    expected = qkv_split_ref(*[wide[name] for name in names], EPS, *wide_tables, heads, kv_heads)
    for name, actual, value in zip(("q", "k", "v", "rstd"), (q, k, v, rstd), expected, strict=True):
        if value is not None:
            assert_close(actual, value, terms=width, what=name)

    dqkv = xp.full(host["qkv"].shape, np.nan, kind)
    dweights = [xp.ones(width, np.float32) if normed else None for _ in range(2)]
    gradients = [on_device[name] for name in ("dq", "dk", "dv", "qkv")]
    qkv_split_backward(*gradients, *weights, *tables, rstd, dqkv, *dweights)
    gradients = [wide[name] for name in ("dq", "dk", "dv", "qkv")]
    wide_weights = [wide[name] for name in ("q_weight", "k_weight")]
    expected = qkv_split_backward_ref(*gradients, *wide_weights, *wide_tables, expected[3])
    scale = 5.0 if not normed else 8.0 * np.max(device.to_host(rstd), initial=1.0)
    assert_close(dqkv, expected[0], terms=width, scale=scale, what="dqkv")
    if normed:
        for name, actual, value, terms in zip("qk", dweights, expected[1:], (heads, kv_heads), strict=True):
            terms = rows * terms + 1
            assert_close(actual, value + 1, terms=terms, scale=np.sqrt(terms) + 3, what=f"d{name}_weight")


@pytest.mark.parametrize("normed", [True, False])
def test_gradient_of_reference(rng, normed):
    rows, heads, kv_heads, width = shape = (3, 2, 1, 6)
    host = {
        name: a if name == "position_ids" else a.astype(np.float64) for name, a in arrays(rng, shape, "float32").items()
    }
    tables = [host[name] for name in ("cos", "sin", "position_ids")]
    weights = [host["q_weight"], host["k_weight"]] if normed else [None, None]
    douts = [host[name] for name in ("dq", "dk", "dv")]

    def loss():
        outs = qkv_split_ref(host["qkv"], *weights, EPS, *tables, heads, kv_heads)[:3]
        return float(sum(np.sum(out * dout) for out, dout in zip(outs, douts, strict=True)))

    rstd = qkv_split_ref(host["qkv"], *weights, EPS, *tables, heads, kv_heads)[3]
    gradients = qkv_split_backward_ref(*douts, host["qkv"], *weights, *tables, rstd)
    assert_gradient(loss, gradients[0], host["qkv"], "dqkv")
    if normed:
        assert_gradient(loss, gradients[1], host["q_weight"], "dq_weight")
        assert_gradient(loss, gradients[2], host["k_weight"], "dk_weight")


@pytest.mark.sim
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_simulator(rng, dtype, normed):
    for shape in SMALL if dtype == "float32" else SMALL[1:2]:
        run_all(rng, shape, dtype, normed)


@pytest.mark.sim
def test_simulator_with_several_heads_a_warp(rng, monkeypatch):
    monkeypatch.setattr(qkv, "BACKWARD_BLOCKS", 1)
    run_all(rng, (3, 3, 2, 6), "float32")


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("shape", SMALL + [(100, 4, 2, 48)])
def test_numpy_device(rng, shape, normed):
    if device.name() != "numpy":
        pytest.skip("the reference as operator")
    run_all(rng, shape, "float32", normed)


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SMALL + REAL)
def test_gpu(rng, shape, dtype, normed):
    run_all(rng, shape, dtype, normed)


@pytest.mark.parametrize("rows", [33, pytest.param(2, marks=pytest.mark.sim)])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("heads,kv_heads,width", [(1, 1, 6), (3, 1, 48)])
def test_a_row_depends_on_itself_alone(rng, normed, heads, kv_heads, width, rows):
    if device.name() == "sim" and rows > 2:
        pytest.skip("too slow in the simulator")
    host = arrays(rng, (rows, heads, kv_heads, width), "float32")
    xp = device.xp()
    weights = [device.asarray(host[name]) if normed else None for name in ("q_weight", "k_weight")]
    cos, sin, positions = (device.asarray(host[name]) for name in ("cos", "sin", "position_ids"))
    fused = device.asarray(host["qkv"])

    def split(first, last):
        count = last - first
        outs = [xp.empty((count, h, width), np.float32) for h in (heads, kv_heads, kv_heads)]
        rstd = xp.zeros((count, heads + kv_heads), np.float32)
        qkv_split(fused[first:last], *weights, EPS, cos, sin, positions[first:last], *outs, rstd)
        return [*outs, rstd]

    together = split(0, rows)
    for row in range(rows):
        for whole, alone, name in zip(together, split(row, row + 1), ("q", "k", "v", "rstd"), strict=True):
            assert_same_bits(alone[0], whole[row], f"{name} of row {row}")


def test_backward_repeats_its_bits(rng):
    shape = rows, heads, kv_heads, width = (6, 2, 1, 8)
    host = arrays(rng, shape, "float32")
    on_device = {name: device.asarray(a) for name, a in host.items()}
    names = ("dq", "dk", "dv", "qkv", "q_weight", "k_weight", "cos", "sin", "position_ids")
    rstd = device.asarray(np.ones((rows, heads + kv_heads), np.float32))
    runs = []
    for _ in range(2):
        dqkv = device.xp().empty_like(on_device["qkv"])
        dweights = [device.xp().zeros(width, np.float32) for _ in range(2)]
        qkv_split_backward(*[on_device[name] for name in names], rstd, dqkv, *dweights)
        runs.append((dqkv, *dweights))
    for first, second in zip(*runs, strict=True):
        assert_same_bits(first, second)


def test_wrong_arguments_are_named():
    xp = device.xp()

    def call(width=8, columns=None, weight=None, k_weight=None):
        fused = xp.zeros((2, columns or 4 * width), np.float32)
        q, k, v = (xp.zeros((2, heads, width), np.float32) for heads in (2, 1, 1))
        table, positions = xp.zeros((4, width // 2), np.float32), xp.zeros(2, np.int32)
        qkv_split(fused, weight, k_weight, EPS, table, table, positions, q, k, v, None)

    with pytest.raises(ValueError, match="qkv_split: head_dim must be even, got 7"):
        call(width=7)
    with pytest.raises(ValueError, match="qkv_split: head_dim must be at most 256, got 258"):
        call(width=258)
    with pytest.raises(ValueError, match=r"qkv_split: qkv must be \(2, 32\) float32, got \(2, 31\) float32"):
        call(columns=31)
    with pytest.raises(ValueError, match="qkv_split: q_weight and k_weight must both be arrays or both None"):
        call(weight=xp.zeros(8, np.float32))
