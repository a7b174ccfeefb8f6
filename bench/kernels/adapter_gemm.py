"""GEMMs of few rows with an adapter, on the shapes of Qwen3-8B's layers: its first product in the kernel, and apart.

    python bench/kernels/adapter_gemm.py            weights in int4 and in bfloat16, an adapter of rank 16
    python bench/kernels/adapter_gemm.py --rank 64 --forms nf4

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

from rlnumba.kernels.gemm.ops import reduce_rank
from rlnumba.kernels.gemm.reduction import Reduction
from rlnumba.kernels.quantized.formats import FORMATS
from rlnumba.model.blocks.projection import multiply, multiply_swiglu
from rlnumba.runtime import device
from rlnumba.runtime.arena import HeapAllocator
from rlnumba.runtime.launch import pdl_scope

ROWS = (1, 16, 64)
# Matrices that read the same input, each with an A of its own, and whether there is a residual.
FUSED = {"qkv": (3, False), "o": (1, True), "gate-up": (2, False), "down": (1, True)}


def times(form, name, rank):
    (n, k, swiglu), (count, has_residual) = WEIGHTS[name], FUSED[name]
    if form == "bfloat16":
        weights = [random_array(n, k, scale=0.05) for _ in range(max(2, int(ROTATED / (2 * n * k))))]
    else:
        weights = copies_of(random_weight(form, n, k))
    columns = -(-count * rank // 16) * 16
    b = random_array(n, columns, scale=0.05)
    reductions = [Reduction(random_array(columns, k, scale=0.05), cupy.ones(1, np.float32)) for _ in weights]
    for m in ROWS:
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
    parser.add_argument("--forms", nargs="*", choices=("bfloat16", *FORMATS), default=("int4", "bfloat16"))
    options = parser.parse_args()
    device.select("auto")
    for form in options.forms:
        for name in WEIGHTS:
            times(form, name, options.rank)


if __name__ == "__main__":
    main()
