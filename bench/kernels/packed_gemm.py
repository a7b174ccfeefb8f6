"""GEMMs of few rows by packed weights, on the shapes of Qwen3-8B's layers, beside a copy and the 16-bit GEMM.

    python bench/kernels/packed_gemm.py            every format
    python bench/kernels/packed_gemm.py --sweep    for 1, 16, 32 and 64 rows, every config
    python bench/kernels/packed_gemm.py --many     16,384 rows, forward and dX, through the weight's values

Calls rotate over copies of a weight that are together larger than L2, in a graph, with PDL. GB/s: of packed bytes,
codes and scales; share: of what a copy reads and writes. Results are compared to the bit with the 16-bit GEMM's.
"""

import argparse
import itertools
import multiprocessing
import os
import pathlib
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import cupy
from harness import copy_gbs, graph_time_us, random_array
from report import row

from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.quantized import few_rows
from rlnumba.kernels.quantized.few_rows_config import (
    ROW_COUNTS,
    PackedGemmConfig,
    config_in_registers,
    has_turns,
    is_possible,
    packed_config,
    with_stages,
)
from rlnumba.kernels.quantized.formats import FORMATS
from rlnumba.kernels.quantized.ops import QuantizedWeight, dequantize, quantize
from rlnumba.model.blocks.projection import dense, multiply, multiply_swiglu
from rlnumba.runtime import device
from rlnumba.runtime.arena import HeapAllocator
from rlnumba.runtime.launch import pdl_scope

# name: (rows and columns of the weight, whether SwiGLU follows).
WEIGHTS = {
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate-up": (24_576, 4096, True),
    "down": (4096, 12_288, False),
}
# Those of a sweep, too: of Qwen3-0.6B, whose tiles are narrow.
SWEPT = {**WEIGHTS, "small o": (1024, 2048, False), "small down": (1024, 3072, False), "small qkv": (4096, 1024, False)}
ROWS, SWEPT_ROWS, MANY_ROWS = (1, 8, 16, 64), (1, 16, 32, 64), 16_384
# Bytes of the copies of a weight: several times an H200's L2.
ROTATED = 300e6


def random_weight(form, n, k):
    weight = QuantizedWeight.empty(FORMATS[form], (n, k), FORMATS[form].group_size, "bfloat16")
    quantize(random_array(n, k, scale=0.05), 0, weight)
    return weight


def copies_of(weight):
    """Copies of a QuantizedWeight that L2 does not hold."""
    count = int(ROTATED / weight.nbytes) + 2
    arrays = [(weight.packed.copy(), weight.scales.copy()) for _ in range(count)]
    return [QuantizedWeight(weight.form, *each, weight.shape, weight.dtype) for each in arrays]


def config_of(form, m, n, k, swiglu):
    fields = "bfloat16", False, False, swiglu, False
    return packed_config(m, n // 2 if swiglu else n, k, form, FORMATS[form].group_size, device.sm_count(), fields)


def configs(form, m, n, k, swiglu):
    """The configs of a sweep."""
    rows = next(count for count in ROW_COUNTS if m <= count)
    places = {}, {"swapped": True}, {"swapped": True, "teams": 2}
    for columns, panels, place in itertools.product((16, 32, 64), (2, 4), places):
        fields = panels, 2, rows, FORMATS[form].group_size // 64, columns == 64 or not swiglu, "bfloat16"
        config = PackedGemmConfig(form, columns, 8, *fields, swiglu=swiglu, **place)
        while config.warps > 1 and not is_possible(config):
            config = config._replace(warps=config.warps // 2)
        if is_possible(config) and has_turns(config := with_stages(config), k):
            yield config
    fields = rows, n // 2 if swiglu else n, form, FORMATS[form].group_size, ("bfloat16", False, False, swiglu, False)
    for constants in itertools.product((1, 2, 3), (64, 32), (2, 4), (1, 2, 4)):
        config = config_in_registers(constants, *fields)
        if is_possible(config) and has_turns(config, k):
            yield config


def swept(form, m, shape):
    """A shape's configs of a sweep, and the one that is chosen."""
    return {*configs(form, m, *shape), config_of(form, m, *shape)}


def compile_one(config):
    """Launch a config's kernel on a small GEMM, so that the disk cache has it."""
    n = 2 * config.tile_columns if config.swiglu else config.tile_columns
    weight = QuantizedWeight.empty(FORMATS[config.form], (n, 1024), FORMATS[config.form].group_size, "bfloat16")
    x, out = random_array(1, 1024), cupy.empty((1, n), random_array(1).dtype)
    few_rows.gemm_with_config(config, x, weight, out, residual=out[:, : n // 2].copy() if config.swiglu else None)


def compile_wide(name, m):
    """Launch the 16-bit GEMM of a weight once."""
    n, k, swiglu = WEIGHTS[name]
    x, values = random_array(m, k), cupy.zeros((n, k), random_array(1).dtype)
    (gemm.linear_swiglu if swiglu else gemm.linear)(x, values, *outputs(m, n, swiglu))


def compile_all(configs, wide=()):
    """Compile configs, and the 16-bit GEMMs of (name, rows), in several processes."""
    with ProcessPoolExecutor(min(15, os.cpu_count()), multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(compile_one, config) for config in configs]
        waiting += [pool.submit(compile_wide, *each) for each in wide]
        for each in waiting:
            each.result()


def outputs(m, n, swiglu):
    """What a GEMM of m rows writes: gate_up and its activation, or C alone."""
    return [cupy.zeros((m, size), random_array(1).dtype) for size in (n, n // 2)[: 1 + swiglu]]


def call_of(config, x, weight, outs, swiglu):
    return lambda: few_rows.gemm_with_config(config, x, weight, outs[0], residual=outs[1] if swiglu else None)


def times(form, name, bandwidth):
    n, k, swiglu = WEIGHTS[name]
    weight = random_weight(form, n, k)
    values = cupy.empty((n, k), random_array(1).dtype)
    dequantize(weight, values)
    packed, wide = copies_of(weight), [values.copy() for _ in range(max(2, int(ROTATED / values.nbytes)))]
    product = gemm.linear_swiglu if swiglu else gemm.linear
    for m in ROWS:
        x = random_array(m, k)
        outs, expected = outputs(m, n, swiglu), outputs(m, n, swiglu)
        config = config_of(form, m, n, k, swiglu)
        call_of(config, x, weight, outs, swiglu)()
        product(x, values, *expected)
        same = all((a.view(np.uint16) == b.view(np.uint16)).all() for a, b in zip(outs, expected, strict=True))
        with pdl_scope():
            ours_us = graph_time_us([call_of(config, x, w, outs, swiglu) for w in packed])
            wide_us = graph_time_us([lambda w=w: product(x, w, *expected) for w in wide])
        rate = weight.nbytes / ours_us / 1e3
        note = "" if same else ", OTHER BITS"
        result = f"{ours_us:.2f} us, {rate:.0f} GB/s, {rate / bandwidth:.2f} of a copy; bf16 {wide_us:.2f} us{note}"
        row(f"{form} {name} {m} rows", result)


def times_of_many(form, name):
    """Forward and dX of many rows, beside those by a weight of 16 bits."""
    n, k, swiglu = WEIGHTS[name]
    weight, memory = random_weight(form, n, k), HeapAllocator()
    x, dy, outs = random_array(MANY_ROWS, k), random_array(MANY_ROWS, n), outputs(MANY_ROWS, n, swiglu)
    dx = cupy.empty(x.shape, x.dtype)

    def forward(weight):
        if swiglu:
            multiply_swiglu(x, weight, *outs, memory)
        else:
            multiply(x, weight, outs[0], memory)

    def backward(weight):
        with dense(weight, memory) as values:
            gemm.linear_backward_input(dy, values, dx)

    with dense(weight, memory) as values:
        wide = values.copy()
    for what, call in (("forward", forward), ("dX", backward)):
        packed_us, wide_us = (graph_time_us([lambda w=w: call(w)] * 4) for w in (weight, wide))
        row(
            f"{form} {name}, {what} of {MANY_ROWS} rows",
            f"{packed_us:.0f} us, {wide_us / packed_us:.2f} of the speed of bf16, {wide_us:.0f} us", "0.85",
        )  # fmt: skip


def place_of(config):
    """Where the operands of wgmma are, and who widens the weight."""
    if config.warpgroups:
        return f"C^T, widened by {config.warpgroups} warpgroups, {config.wgmma_steps} steps at once"
    place = "C^T" if config.swapped else "A in registers"
    return f"{place}, widened by {config.warps} x {config.teams} warps"


def sweep(form, name):
    n, k, swiglu = SWEPT[name]
    packed = copies_of(random_weight(form, n, k))
    for m in SWEPT_ROWS:
        x, outs, chosen = random_array(m, k), outputs(m, n, swiglu), config_of(form, m, n, k, swiglu)
        found = []
        with pdl_scope():
            for config in swept(form, m, SWEPT[name]):
                found.append((graph_time_us([call_of(config, x, w, outs, swiglu) for w in packed], 3), config))
        for us, config in sorted(found, key=lambda pair: pair[0])[:6]:
            constants = f"{config.columns} columns, {config.panels} panels, {place_of(config)}"
            note = " <- chosen" if config == chosen else ""
            print(f"{form} {name} {m:2d} rows {us:8.2f} us  {constants}{note}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--many", action="store_true")
    parser.add_argument("--forms", nargs="*", choices=tuple(FORMATS), default=tuple(FORMATS))
    parser.add_argument("--weights", nargs="*", choices=tuple(SWEPT), default=tuple(WEIGHTS), help="of a sweep")
    options = parser.parse_args()
    device.select("auto")
    if options.sweep:
        cases = itertools.product(options.forms, SWEPT_ROWS, [SWEPT[name] for name in options.weights])
        compile_all(
            {each for form, m, shape in cases for each in (*configs(form, m, *shape), config_of(form, m, *shape))}
        )
        for form, name in itertools.product(options.forms, options.weights):
            sweep(form, name)
        return
    if options.many:
        for form, name in itertools.product(options.forms, WEIGHTS):
            times_of_many(form, name)
        return
    bandwidth = copy_gbs()
    print(f"copy {bandwidth:.0f} GB/s")
    chosen = {config_of(form, m, *each) for form in options.forms for m in ROWS for each in WEIGHTS.values()}
    compile_all(chosen, [(name, m) for name in WEIGHTS for m in ROWS if m != 8])
    for form in options.forms:
        for name in WEIGHTS:
            times(form, name, bandwidth)


if __name__ == "__main__":
    main()
