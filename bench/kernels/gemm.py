"""Our GEMMs against cuBLAS, on the shapes of Qwen3-0.6B and Qwen3-8B.

    python bench/kernels/gemm.py            training shapes, then decode shapes, then SwiGLU in the GEMM's epilogue
    python bench/kernels/gemm.py --sweep    every config, to see what best_config should have chosen

Each GEMM is checked against cuBLAS before it is timed. ratio: cuBLAS's time over ours. The means and smallest ratios at
the end are those that TABLE in rlnumba/runtime/dispatch.py quotes.
"""

import argparse
import multiprocessing
import os
import pathlib
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import cupy
from harness import (
    alternating_times_us,
    copy_gbs,
    copy_us,
    geometric_mean,
    graph_time_us,
    random_array,
    relative_error,
    time_us,
)  # fmt: skip
from report import row

from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.gemm.scheduler import GemmProblem
from rlnumba.kernels.gemm.sm90 import gemm_with_config
from rlnumba.kernels.gemm.sm90_config import SHARED_LIMIT, Sm90GemmConfig, best_config
from rlnumba.kernels.nn.swiglu import swiglu
from rlnumba.runtime import device, dispatch
from rlnumba.runtime.launch import pdl_scope

# name: (N, K) of the weight, and whether its output is float32.
WEIGHTS = {
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate-up": (6144, 1024),
    "0.6B down": (1024, 3072),
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate-up": (24_576, 4096),
    "8B down": (4096, 12_288),
    "0.6B lm_head": (151_936, 1024),
}
DECODE_ROWS = (1, 8, 64, 256)
BF16 = "bfloat16"


def with_backend(name, function):
    """The same call on another backend."""

    def call():
        gemm.set_backend(name)
        function()

    return call


def configs(rows, steps, output, a_mn=False, b_mn=False):
    """The configs that a sweep times: with many rows wide tiles with as many stages as fit into shared memory.

    With few rows as many stages as fit with one block and with two blocks an SM.
    """
    few = rows <= 1024
    for consumers in (1, 2) if few and rows > 64 else (1,) if few else (2,):
        for columns in (16, 32, 64, 96, 128, 192, 256):
            if columns % 64 and (b_mn or output != "same") or columns < 128 and not few or columns in (96, 256) and few:
                continue
            depths = set()
            for share in (1, 2) if few else (1,):
                room = (SHARED_LIMIT + 1024) // share - 1024 * (share > 1)
                config = Sm90GemmConfig(columns, consumers, 0, BF16, a_mn, b_mn, output)
                depths.add(min((room - config.layout.nbytes) // (config.stage_bytes + 16), 16, max(3, steps // 64)))
            for stages in depths:
                if stages > 2:
                    yield Sm90GemmConfig(columns, consumers, stages, BF16, a_mn, b_mn, output)


def compile_one(config):
    """Launch a config's kernel on a small GEMM, so that the disk cache has it."""
    a, b = random_array(64, 64), random_array(128 if config.swiglu else 64, 64)
    out = cupy.empty((64, len(b)), np.float32 if config.output != "same" else a.dtype)
    gemm_with_config(config, a, b, out, residual=cupy.empty_like(a) if config.swiglu else None)


def compile_all(found):
    """Compile configs in several processes."""
    with ProcessPoolExecutor(min(12, os.cpu_count()), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, found))


def report(label, flops, nbytes, peer_us, ours_us, error, note=""):
    rate = f"{flops / ours_us / 1e6:6.0f} TFLOP/s ({flops / peer_us / 1e6:.0f})"
    bandwidth = f"{nbytes / ours_us / 1e3:6.0f} GB/s" if nbytes else ""
    print(
        f"{label:28} {ours_us:9.2f} us  ratio {peer_us / ours_us:5.2f}  {rate}  {bandwidth}  error {error:.1e}  {note}",
        flush=True,
    )


def training(sweep):
    """M = 16,384: forward, dX, dW of every weight; lm_head at 4,096 rows, as the log-prob works in chunks."""
    ratios = {}
    if sweep:
        layouts = (("same", False, False), ("same", False, True), ("add", True, True))
        compile_all({config for layout in layouts for config in configs(16_384, 1024, *layout)})
    for name, (n, k) in WEIGHTS.items():
        m = 4096 if "lm_head" in name else 16_384
        x, w, dout = random_array(m, k), random_array(n, k, scale=0.05), random_array(m, n, scale=0.1)
        y, dx, dw = cupy.empty((m, n), x.dtype), cupy.empty((m, k), x.dtype), cupy.zeros((n, k), np.float32)
        cases = {
            "forward": (lambda: gemm.linear(x, w, y), y, (m, n, k, False, False, "same"), (x, w)),
            "forward + residual": (
                lambda: gemm.linear(x, w, y, residual=dout),
                y,
                (m, n, k, False, False, "same"),
                (x, w),
            ),
            "dX": (lambda: gemm.linear_backward_input(dout, w, dx), dx, (m, k, n, False, True, "same"), (dout, w)),
            "dW": (lambda: gemm.linear_backward_weight(dout, x, dw), dw, (n, k, m, True, True, "add"), (dout, x)),
        }
        for what, (call, result, (rows, columns, steps, a_mn, b_mn, output), (a, b)) in cases.items():
            result.fill(0)
            with_backend("cublas", call)()
            expected = result.copy()
            result.fill(0)
            with_backend("native", call)()
            error = relative_error(result, expected)
            peer_us, ours_us = alternating_times_us(with_backend("cublas", call), with_backend("native", call))
            ratios.setdefault(what, []).append(peer_us / ours_us)
            report(f"{name} {what}", 2 * m * n * k, 0, peer_us, ours_us, error)
            if sweep:
                found = []
                for config in configs(rows, steps, output, a_mn, b_mn):
                    found.append((time_us(lambda c=config: gemm_with_config(c, a, b, result), 5), config))
                print_best(found, rows, columns, steps, a_mn, b_mn, output)
    for what, some in (ratios | {"all": sum(ratios.values(), [])}).items():
        summarise(f"GEMMs of 16,384 rows, {what}", some, "0.95, none below 0.85")


def summarise(what, ratios, bar):
    result = f"geometric mean {geometric_mean(ratios):.3f}, smallest {min(ratios):.3f} of cuBLAS's speed"
    print(f"{what}: {result}")
    row(what, result, bar)


def decode(sweep):
    """Few rows: weights are read from memory, so calls rotate over several copies of each, together larger than L2.

    Ours run with PDL, as in the engine's graphs: a kernel loads its weights while the one before it ends.
    """
    if sweep:
        compile_all({config for m in DECODE_ROWS for k in (1024, 2048, 4096) for config in configs(m, k, "same")})
    by_rows = {m: [] for m in DECODE_ROWS}
    for name, (n, k) in WEIGHTS.items():
        output, dtype = ("float32", np.float32) if "lm_head" in name else ("same", None)
        weights = [random_array(n, k, scale=0.05) for _ in range(max(2, min(40, int(6e8 / (2 * n * k)))))]
        for m in DECODE_ROWS:
            x = random_array(m, k)
            y = cupy.empty((m, n), dtype or x.dtype)
            gemm.set_backend("cublas")
            peer_us = graph_time_us([lambda w=w: gemm.linear(x, w, y) for w in weights])
            gemm.linear(x, weights[0], y)
            expected = y.copy()
            gemm.set_backend("native")
            gemm.linear(x, weights[0], y)
            error = relative_error(y, expected)
            calls = [lambda w=w: gemm.linear(x, w, y) for w in weights]
            apart_us = graph_time_us(calls)
            with pdl_scope():
                ours_us = graph_time_us(calls)
            by_rows[m].append(peer_us / ours_us)
            peer = f"{apart_us:.2f} us apart; a copy of as many bytes {copy_us(2 * n * k, len(weights)):.2f} us"
            report(f"{name} M={m}", 2 * m * n * k, 2 * n * k, peer_us, ours_us, error, peer)
            if sweep and n * k < 1 << 25:
                found = []
                for config in configs(m, k, output):
                    calls = [lambda w=w, c=config: gemm_with_config(c, x, w, y) for w in weights]
                    with pdl_scope():
                        found.append((graph_time_us(calls, 3), config))
                print_best(found, m, n, k, False, False, output)
    for m, ratios in by_rows.items():
        summarise(f"GEMMs of {m} rows, forward", ratios, "1.0")


def swiglu_times():
    """gate-up with SwiGLU in one kernel, against our GEMM and swiglu after it: the same bits, in a graph."""
    for name in ("0.6B gate-up", "8B gate-up"):
        n, k = WEIGHTS[name]
        weights = [random_array(n, k, scale=0.05) for _ in range(max(2, min(20, int(3e8 / (2 * n * k)))))]
        for m in (*DECODE_ROWS, 16_384):
            x = random_array(m, k)
            gate_up, out = cupy.empty((m, n), x.dtype), cupy.empty((m, n // 2), x.dtype)

            def apart(w):
                gemm.linear(x, w, gate_up)
                swiglu(gate_up, out)

            def fused(w):
                gemm.linear_swiglu(x, w, gate_up, out)

            with dispatch.forced("gemm=sm90"):
                apart(weights[0])
                expected = out.copy()
                out.fill(0)
                fused(weights[0])
                same = bool((out.view(np.uint16) == expected.view(np.uint16)).all())
                apart_us, fused_us = (
                    graph_time_us([lambda w=w: function(w) for w in weights]) for function in (apart, fused)
                )
            note = "" if same else ", OTHER BITS"
            result = f"{fused_us:.2f} us, {apart_us / fused_us:.2f} x GEMM and swiglu apart{note}"
            row(f"{name} with SwiGLU, {m} rows", result)


def print_best(found, m, n, k, a_mn, b_mn, output):
    chosen = best_config(GemmProblem(m, n, k, BF16, a_mn, b_mn, output), device.sm_count())
    for us, config in sorted(found, key=lambda pair: pair[0])[:5]:
        mark = " <- chosen" if config == chosen else ""
        print(
            f"      {us:9.2f} us  {config.columns} columns, {config.consumers} consumers, {config.stages} stages{mark}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only", choices=["training", "decode", "swiglu"])
    options = parser.parse_args()
    print(f"copy {copy_gbs():.0f} GB/s")
    if options.only in (None, "training"):
        training(options.sweep)
    if options.only in (None, "decode"):
        decode(options.sweep)
    if options.only in (None, "swiglu") and dispatch.architecture() == (9, 0):
        gemm.set_backend("auto")
        swiglu_times()
