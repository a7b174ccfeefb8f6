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
from packed_gemm import ROTATED, copies_of, outputs, random_weight
from report import row
from shapes import SHAPES

from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.gemm.reduction import Reduction
from rlnumba.kernels.quantized.formats import FORMATS
from rlnumba.model.blocks.projection import multiply, multiply_swiglu
from rlnumba.model.config import ModelConfig
from rlnumba.runtime import device
from rlnumba.runtime.arena import HeapAllocator
from rlnumba.runtime.launch import pdl_scope

ROWS = (1, 16, 64)
DENSE = "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b"
# Matrices that read the same input, each with an A of its own, and whether there is a residual.
FUSED = {"qkv": (3, False), "o": (1, True), "gate-up": (2, False), "down": (1, True)}


def products_of(shape):
    """{name: (N, K, whether SwiGLU follows)} of a layer's products, of a name of shapes.py:SHAPES."""
    config = ModelConfig.from_dict(SHAPES[shape])
    hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    return {
        "qkv": ((heads + 2 * config.num_key_value_heads) * dim, hidden, False),
        "o": (hidden, heads * dim, False),
        "gate-up": (2 * config.intermediate_size, hidden, True),
        "down": (hidden, config.intermediate_size, False),
    }


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
            gemm.reduce_rank(x, reduction, xa)
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
    parser.add_argument("--shape", choices=DENSE, default="qwen3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--forms", nargs="*", choices=("bfloat16", *FORMATS), default=("int4", "bfloat16"))
    options = parser.parse_args()
    device.select("auto")
    # Measured whether or not decode steps of so many rows do it.
    gemm.MOST_REDUCED_ROWS = max(*options.rows, gemm.MOST_REDUCED_ROWS)
    for form in options.forms:
        for name, sizes in products_of(options.shape).items():
            times(form, name, sizes, options.rank, options.rows)


if __name__ == "__main__":
    main()
