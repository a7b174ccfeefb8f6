from typing import NamedTuple

import numpy as np
import pytest

from rlnumba.kernels.nn import qkv
from rlnumba.kernels.nn.qkv import (
    HeadNorm,
    Rotation,
    qkv_split,
    qkv_split_backward,
    qkv_split_backward_kernel,
    qkv_split_backward_ref,
    qkv_split_kernel,
    qkv_split_norm_backward_kernel,
    qkv_split_ref,
    qkv_split_to_cache,
)
from rlnumba.kernels.nn.rope import HeadShape, rope_table
from rlnumba.runtime import device
from rlnumba.runtime.arguments import tuple_type
from tests.close import assert_close, assert_gradient, assert_same_bits
from tests.kernels.kv_cache import write_kv

EPS = 1e-6
# (N, H, HK, E): halves of a fraction of a vector, of vectors for 3 of 4 lanes, of a fraction more; a token of several
# warps whose last has groups without a head. Each compiles kernels of its own.
TINY = [(1, 1, 1, 2), (5, 3, 1, 48), (0, 2, 1, 8), (2, 7, 2, 128)]
SMALL = [*TINY, (2, 2, 2, 66)]
REAL = [
    *((4096, 16, 8, 128), (4097, 9, 3, 64), (0, 16, 8, 128), (1, 16, 8, 128), (333, 4, 2, 256), (50, 6, 6, 80)),
    *((17, 6, 6, 48), (70, 32, 8, 64)),
]


class Form(NamedTuple):
    """Options of a model: gates behind query heads, elements of half a head that rotate (0: all), norms of 1 + w."""

    gated: bool = False
    turned: int = 0
    unit_offset: bool = False


PLAIN = Form()
# Vectors that rotate, and single elements.
FORMS = [Form(gated=True), Form(turned=8), Form(turned=3, unit_offset=True), Form(True, 8, True)]


def arrays(rng, shape, dtype, form=PLAIN):
    rows, heads, kv_heads, width = shape
    shapes = {
        "dq": (rows, heads, width),
        "dk": (rows, kv_heads, width),
        "dv": (rows, kv_heads, width),
        "qkv": (rows, (heads * (1 + form.gated) + 2 * kv_heads) * width),
    }
    made = {name: rng.standard_normal(size, np.float32) for name, size in shapes.items()}
    made |= {name: rng.uniform(0.5, 1.5, width) for name in ("q_weight", "k_weight")}
    made = {name: array.astype(device.dtype(dtype)) for name, array in made.items()}
    cos, sin = rope_table(40, 2 * form.turned or width, 10000.0)
    return made | {"cos": cos, "sin": sin, "position_ids": rng.integers(0, 40, rows).astype(np.int32)}


def norm_and_rotation(arrays, normed=True, form=PLAIN):
    """(HeadNorm or None, Rotation) of the arrays of a dict."""
    norm = HeadNorm(arrays["q_weight"], arrays["k_weight"], EPS, form.unit_offset) if normed else None
    return norm, Rotation(arrays["cos"], arrays["sin"], arrays["position_ids"])


def run_all(rng, shape, dtype, normed=True, form=PLAIN):
    rows, heads, kv_heads, width = shape
    host = arrays(rng, shape, dtype, form)
    wide = {name: a if name == "position_ids" else a.astype(np.float64) for name, a in host.items()}
    on_device = {name: device.asarray(a) for name, a in host.items()}
    xp, kind = device.xp(), host["qkv"].dtype
    q, k, v = (xp.full(host[name].shape, np.nan, kind) for name in ("dq", "dk", "dv"))
    rstd = xp.full((rows, heads + kv_heads), np.nan, np.float32) if normed else None
    norm, rotation = norm_and_rotation(on_device, normed, form)
    qkv_split(on_device["qkv"], norm, rotation, q, k, v, rstd)
    wide_norm, wide_rotation = norm_and_rotation(wide, normed, form)
    expected = qkv_split_ref(wide["qkv"], wide_norm, wide_rotation, heads, kv_heads, form.gated)
    for name, actual, value in zip(("q", "k", "v", "rstd"), (q, k, v, rstd), expected, strict=True):
        if value is not None:
            assert_close(actual, value, terms=width, what=name)

    dqkv = xp.full(host["qkv"].shape, np.nan, kind)
    dweights = [xp.ones(width, np.float32) if normed else None for _ in range(2)]
    gradients = [on_device[name] for name in ("dq", "dk", "dv")]
    qkv_split_backward(gradients, on_device["qkv"], norm, rotation, rstd, dqkv, *dweights)
    gradients = [wide[name] for name in ("dq", "dk", "dv")]
    expected = qkv_split_backward_ref(gradients, wide["qkv"], wide_norm, wide_rotation, expected[3], form.gated)
    gates = np.isnan(expected[0])
    assert gates.sum() == form.gated * rows * heads * width and (np.isnan(device.to_host(dqkv)) == gates).all()
    dqkv = np.nan_to_num(device.to_host(dqkv).astype(np.float32)).astype(kind)
    expected = np.nan_to_num(expected[0]), *expected[1:]
    scale = 5.0 if not normed else 8.0 * np.max(device.to_host(rstd), initial=1.0)
    assert_close(dqkv, expected[0], terms=width, scale=scale, what="dqkv")
    if normed:
        for name, actual, value, terms in zip("qk", dweights, expected[1:], (heads, kv_heads), strict=True):
            terms = rows * terms + 1
            assert_close(actual, value + 1, terms=terms, scale=np.sqrt(terms) + 3, what=f"d{name}_weight")


@pytest.mark.parametrize("normed, form", [(True, PLAIN), (False, PLAIN), (True, Form(True, 2, True))])
def test_gradient_of_reference(rng, normed, form):
    rows, heads, kv_heads, width = shape = (3, 2, 1, 6)
    made = arrays(rng, shape, "float32", form)
    host = {name: a if name == "position_ids" else a.astype(np.float64) for name, a in made.items()}
    norm, rotation = norm_and_rotation(host, normed, form)
    douts = [host[name] for name in ("dq", "dk", "dv")]

    def loss():
        outs = qkv_split_ref(host["qkv"], norm, rotation, heads, kv_heads, form.gated)[:3]
        return float(sum(np.sum(out * dout) for out, dout in zip(outs, douts, strict=True)))

    rstd = qkv_split_ref(host["qkv"], norm, rotation, heads, kv_heads, form.gated)[3]
    gradients = qkv_split_backward_ref(douts, host["qkv"], norm, rotation, rstd, form.gated)
    assert_gradient(loss, np.nan_to_num(gradients[0]), host["qkv"], "dqkv")
    if normed:
        assert_gradient(loss, gradients[1], host["q_weight"], "dq_weight")
        assert_gradient(loss, gradients[2], host["k_weight"], "dk_weight")


@pytest.mark.sim
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_simulator(rng, dtype, normed):
    for shape in TINY if dtype == "float32" and normed else TINY[1:2]:
        run_all(rng, shape, dtype, normed)


@pytest.mark.sim
@pytest.mark.parametrize("form", FORMS)
def test_forms_in_the_simulator(rng, form):
    run_all(rng, (2, 3, 1, 48), "bfloat16", True, form)


@pytest.mark.parametrize("form", FORMS)
def test_forms_on_the_numpy_device(rng, form):
    if device.name() == "cpu":
        run_all(rng, (5, 3, 1, 48), "float32", True, form)
        run_all(rng, (5, 3, 1, 48), "float32", False, form)
        run_to_cache(rng, (5, 3, 1, 48), "float32", True, 30, form=form)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", [*FORMS, Form(True, 32, True)])
def test_forms_on_a_gpu(rng, dtype, form):
    for shape in ((2, 3, 1, 48), (333, 16, 4, 256)):
        if 2 * form.turned > shape[-1]:
            continue
        run_all(rng, shape, dtype, True, form)
        run_all(rng, shape, dtype, False, form)
        run_to_cache(rng, shape, dtype, True, 300, 16, form)


def run_to_cache(rng, shape, dtype, normed, blocks, block_size=4, form=PLAIN):
    """qkv_split_to_cache against qkv_split and write_kv, bit for bit."""
    rows, heads, kv_heads, width = shape
    host = arrays(rng, shape, dtype, form)
    xp, kind = device.xp(), host["qkv"].dtype
    on_device = {name: device.asarray(a) for name, a in host.items()}
    norm, rotation = norm_and_rotation(on_device, normed, form)
    slots = rng.permutation(blocks * block_size)[:rows].astype(np.int32)
    slots[::3] = -1
    slots = device.asarray(slots)
    before = rng.standard_normal((2, blocks, block_size, kv_heads, width)).astype(kind)
    expected, actual = ([device.asarray(cache.copy()) for cache in before] for _ in range(2))
    q, k, v = (xp.full((rows, h, width), np.nan, kind) for h in (heads, kv_heads, kv_heads))
    rstd = xp.empty((rows, heads + kv_heads), np.float32)
    qkv_split(on_device["qkv"], norm, rotation, q, k, v, rstd)
    write_kv(k, v, slots, *expected)
    at_once = xp.full(q.shape, np.nan, kind)
    qkv_split_to_cache(on_device["qkv"], norm, rotation, slots, at_once, actual)
    for name, a, b in zip(("q", "k_cache", "v_cache"), (at_once, *actual), (q, *expected), strict=True):
        assert_same_bits(a, b, f"{name} of {shape} {dtype} {normed}")


@pytest.mark.sim
@pytest.mark.parametrize("dtype,normed", [("float32", False), ("float32", True), ("bfloat16", True)])
def test_to_cache_in_the_simulator(rng, dtype, normed):
    run_to_cache(rng, (4, 3, 1, 48), dtype, normed, blocks=2)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("shape", [*SMALL, (100, 4, 2, 48)])
def test_to_cache_on_the_numpy_device(rng, shape, normed):
    if device.name() != "cpu":
        pytest.skip("the form for CPUs")
    run_to_cache(rng, shape, "float32", normed, blocks=30)


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SMALL + REAL)
def test_to_cache_on_a_gpu(rng, shape, dtype, normed):
    run_to_cache(rng, shape, dtype, normed, blocks=300, block_size=16)


@pytest.mark.sim
def test_simulator_with_several_tokens_a_warp(rng, monkeypatch):
    monkeypatch.setattr(qkv, "BACKWARD_BLOCKS", 1)
    run_all(rng, (5, 3, 1, 48), "float32")


@pytest.mark.sim
@pytest.mark.parametrize("normed", [True, False])
def test_simulator_with_several_warps_a_block(rng, monkeypatch, normed):
    monkeypatch.setattr(qkv, "FEW_WARPS", 0)
    monkeypatch.setattr(qkv, "FEW_SPLIT_WARPS", 0)
    run_all(rng, (3, 3, 1, 48), "float32", normed)


@pytest.mark.sim
@pytest.mark.parametrize("normed", [True, False])
def test_where_arrays_lie_changes_no_bits(rng, normed):
    rows, heads, kv_heads, width = shape = (2, 3, 1, 48)
    host = arrays(rng, shape, "bfloat16")
    xp, kind, results = device.xp(), host["qkv"].dtype, []
    for offset in (0, 1):

        def place(array, offset=offset):
            """A copy; the second time nothing is aligned to more than an element."""
            skipped = offset * array.itemsize
            there = xp.zeros(skipped + array.nbytes, np.uint8)[skipped:]
            there[...] = device.asarray(array.reshape(-1).view(np.uint8))
            return there.view(array.dtype).reshape(array.shape)

        there = {name: place(array) for name, array in host.items()}
        norm, rotation = norm_and_rotation(there, normed)
        q, k, v, dqkv = (place(np.zeros(host[name].shape, kind)) for name in ("dq", "dk", "dv", "qkv"))
        rstd = place(np.zeros((rows, heads + kv_heads), np.float32)) if normed else None
        dweights = [place(np.zeros(width, np.float32)) if normed else None for _ in range(2)]
        qkv_split(there["qkv"], norm, rotation, q, k, v, rstd)
        gradients = [there[name] for name in ("dq", "dk", "dv")]
        qkv_split_backward(gradients, there["qkv"], norm, rotation, rstd, dqkv, *dweights)
        results.append([q, k, v, dqkv, *([rstd, *dweights] if normed else [])])
    for aligned, shifted in zip(*results, strict=True):
        assert_same_bits(aligned, shifted)


GENERATIONS = [(8, 0), (9, 0), (10, 0), (12, 0)]


@pytest.mark.parametrize(
    "element,heads,kv_heads,width,architectures",
    [
        ("uint16", 16, 8, 128, GENERATIONS),
        ("float16", 16, 8, 128, [(9, 0)]),
        ("float32", 16, 8, 128, [(9, 0)]),
        ("uint16", 9, 3, 64, [(9, 0)]),
        ("uint16", 4, 4, 80, [(9, 0)]),
    ],
)
def test_kernels_compile_for_gpus(compile_offline, element, heads, kv_heads, width, architectures):
    """Of Qwen3, of other types, of a group with two heads, of heads that leave lanes idle."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU")
    vector = 16 // np.dtype(element).itemsize
    shape = HeadShape(width, vector, vector, 4)
    halves, table, ids = f"{element}[:,::1]", "float32[:,::1]", "int32[::1]"
    troubles = []
    for architecture in architectures:
        for normed, cached in ((False, False), (True, False), (True, True)):
            weight = halves if normed else table
            norm = tuple_type(qkv.NormWeights, weight, weight, "float32")
            types = [halves, norm, table, table, ids, ids, halves, halves, halves, table]
            for most_heads in (1, qkv.SPLIT_HEADS):
                kernel = qkv_split_kernel(shape, heads, kv_heads, False, normed, cached, most_heads)
                troubles += compile_offline(kernel, types, architecture)
        kernel = qkv_split_backward_kernel(shape, heads, kv_heads, False)
        troubles += compile_offline(kernel, [halves] * 3 + [table, table, ids, halves], architecture)
        kernel = qkv_split_norm_backward_kernel(shape, heads, kv_heads, False)
        types = [tuple_type(qkv.QKVGradients, *[halves] * 3)] + [halves] * 3 + [table, table, ids, table, halves, table]
        troubles += compile_offline(kernel, types, architecture)
    assert not troubles, "\n".join(troubles)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("shape", SMALL + [(100, 4, 2, 48)])
def test_numpy_device(rng, shape, normed):
    if device.name() != "cpu":
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
    if device.name() == "sim" and (rows > 2 or width < 48):
        pytest.skip("too slow in the simulator, or one kernel more to compile")
    host = arrays(rng, (rows, heads, kv_heads, width), "float32")
    xp = device.xp()
    on_device = {name: device.asarray(array) for name, array in host.items()}
    (norm, rotation), fused = norm_and_rotation(on_device, normed), on_device["qkv"]

    def split(first, last):
        count = last - first
        outs = [xp.empty((count, h, width), np.float32) for h in (heads, kv_heads, kv_heads)]
        rstd = xp.zeros((count, heads + kv_heads), np.float32)
        some = rotation._replace(position_ids=rotation.position_ids[first:last])
        qkv_split(fused[first:last], norm, some, *outs, rstd)
        return [*outs, rstd]

    together = split(0, rows)
    for row in range(rows):
        for whole, alone, name in zip(together, split(row, row + 1), ("q", "k", "v", "rstd"), strict=True):
            assert_same_bits(alone[0], whole[row], f"{name} of row {row}")


def test_backward_repeats_its_bits(rng):
    shape = rows, heads, kv_heads, width = (6, 2, 1, 8)
    host = arrays(rng, shape, "float32")
    on_device = {name: device.asarray(a) for name, a in host.items()}
    gradients = [on_device[name] for name in ("dq", "dk", "dv")]
    rstd = device.asarray(np.ones((rows, heads + kv_heads), np.float32))
    runs = []
    for _ in range(2):
        dqkv = device.xp().empty_like(on_device["qkv"])
        dweights = [device.xp().zeros(width, np.float32) for _ in range(2)]
        qkv_split_backward(gradients, on_device["qkv"], *norm_and_rotation(on_device), rstd, dqkv, *dweights)
        runs.append((dqkv, *dweights))
    for first, second in zip(*runs, strict=True):
        assert_same_bits(first, second)


def test_wrong_arguments_are_named():
    xp = device.xp()

    def call(width=8, columns=None, norm=None):
        fused = xp.zeros((2, columns or 4 * width), np.float32)
        q, k, v = (xp.zeros((2, heads, width), np.float32) for heads in (2, 1, 1))
        table, positions = xp.zeros((4, width // 2), np.float32), xp.zeros(2, np.int32)
        qkv_split(fused, norm, Rotation(table, table, positions), q, k, v, None)

    with pytest.raises(ValueError, match="qkv_split: head_dim must be even, got 7"):
        call(width=7)
    with pytest.raises(ValueError, match="qkv_split: head_dim must be at most 256, got 258"):
        call(width=258)
    with pytest.raises(ValueError, match=r"qkv_split: qkv must be \(2, 32\) float32, got \(2, 31\) float32"):
        call(columns=31)
    with pytest.raises(ValueError, match="qkv_split: k_weight must be an array of device"):
        call(norm=HeadNorm(xp.zeros(8, np.float32), None, EPS))


def test_slots_beyond_the_cache_are_refused():
    if device.name() != "cpu":
        pytest.skip("not looked at elsewhere")
    fused, q = np.zeros((1, 16), np.float32), np.zeros((1, 2, 4), np.float32)
    table, cache = np.zeros((4, 2), np.float32), np.zeros((2, 3, 1, 4), np.float32)
    for slot in (6, -2):
        slots = np.array([slot], np.int32)
        with pytest.raises(ValueError, match="qkv_split_to_cache: slot_mapping must lie within the caches"):
            rotation = Rotation(table, table, np.zeros(1, np.int32))
            qkv_split_to_cache(fused, None, rotation, slots, q, (cache, cache))
