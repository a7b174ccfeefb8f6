"""GEMMs of few rows with an adapter, on the shapes of a model's layers: its first product in the kernel, and apart.

    python bench/kernels/adapter_gemm.py            Qwen3-8B's, in int4 and in bfloat16, an adapter of rank 16
    python bench/kernels/adapter_gemm.py --rank 64 --forms nf4
    python bench/kernels/adapter_gemm.py --shape qwen3-0.6b --forms bfloat16 --rows 64 128 256

Calls rotate over copies of a weight that are together larger than L2, in a graph, with PDL. Three times of each: the
GEMM without an adapter; with it, one kernel (kernels/gemm/reduction.py); with it, three kernels.
"""

import argparse
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import cupy
from harness import graph_time_us, random_array
from packed_gemm import ROTATED, WEIGHTS, copies_of, outputs, random_weight
from report import row

from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.gemm.ops import reduce_rank
from rlnumba.kernels.gemm.reduction import Reduction
from rlnumba.kernels.quantized.formats import FORMATS
from rlnumba.model.blocks.projection import multiply, multiply_swiglu
from rlnumba.runtime import device
from rlnumba.runtime.arena import HeapAllocator
from rlnumba.runtime.launch import pdl_scope

ROWS = (1, 16, 64)
SHAPES = {
    "qwen3-8b": WEIGHTS,
    "qwen3-4b": {
        "qkv": (6144, 2560, False),
        "o": (2560, 4096, False),
        "gate-up": (19_456, 2560, True),
        "down": (2560, 9728, False),
    },
    "qwen3-0.6b": {
        "qkv": (4096, 1024, False),
        "o": (1024, 2048, False),
        "gate-up": (6144, 1024, True),
        "down": (1024, 3072, False),
    },
}
# Matrices that read the same input, each with an A of its own, and whether there is a residual.
FUSED = {"qkv": (3, False), "o": (1, True), "gate-up": (2, False), "down": (1, True)}


def times(form, name, sizes, rank, rows):
    (n, k, swiglu), (count, has_residual) = sizes, FUSED[name]
    if form == "bfloat16":
        weights = [random_array(n, k, scale=0.05) for _ in range(max(2, int(ROTATED / (2 * n * k))))]
    else:
        weights = copies_of(random_weight(form, n, k))
    columns = -(-count * rank // 16) * 16
    b = random_array(n, columns, scale=0.05)
    reductions = [Reduction(random_array(columns, k, scale=0.05), cupy.ones(1, np.float32)) for _ in weights]
    for m in rows:
        x, xa, outs = random_array(m, k), cupy.zeros((m, columns), b.dtype), outputs(m, n, swiglu)
        residual = random_array(m, n) if has_residual else None

        def product(weight, low_rank, reduction, x=x, outs=outs, residual=residual):
            if swiglu:
                multiply_swiglu(x, weight, *outs, HeapAllocator(), low_rank, reduction=reduction)
            else:
                multiply(x, weight, outs[0], HeapAllocator(), None, residual, low_rank, reduction)

        def apart(weight, reduction, x=x, xa=xa, product=product):
            reduce_rank(x, reduction, xa)
            product(weight, (xa, b), None)

        pairs = list(zip(weights, reductions, strict=True))
        calls = (
            [lambda w=w: product(w, None, None) for w in weights],
            [lambda w=w, r=r: product(w, (xa, b), r) for w, r in pairs],
            [lambda w=w, r=r: apart(w, r) for w, r in pairs],
        )
        with pdl_scope():
            base, together, separate = (graph_time_us(each) for each in calls)
        row(
            f"{form} {name} {m} rows", f"{base:.2f} us; with an adapter {together:.2f}, in three kernels {separate:.2f}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--forms", nargs="*", choices=("bfloat16", *FORMATS), default=("int4", "bfloat16"))
    options = parser.parse_args()
    device.select("auto")
    # Measured whether or not decode steps of so many rows do it.
    gemm.MOST_REDUCED_ROWS = max(*options.rows, gemm.MOST_REDUCED_ROWS)
    for form in options.forms:
        for name, sizes in SHAPES[options.shape].items():
            times(form, name, sizes, options.rank, options.rows)


if __name__ == "__main__":
    main()
