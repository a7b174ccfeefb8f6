"""Router, dispatch, rows and sums of a mixture of experts, beside the time that their bytes take.

    python bench/kernels/experts.py                              Qwen3-30B-A3B: 128 experts, 8 a token, 2048 columns
    python bench/kernels/experts.py --experts 256 --tokens 64    Qwen3.5-35B-A3B, a decode step of 64 sequences

Times are of a graph of several calls, each on arrays of its own. Bytes are those that an operator has to read and
write; share: of the bandwidth of a copy of 2 GiB. With few tokens, when a kernel is as short as its launch, the time
inside pdl_scope is printed instead of the share.
"""

import argparse
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import cupy
from harness import copy_gbs, graph_time_us, random_array
from report import row

from rlnumba.kernels.experts.ops import (
    Dispatch,
    RouterLoad,
    Routing,
    add_router_load,
    combine,
    dispatch,
    gather_rows,
    gather_rows_backward,
    route,
    route_backward,
    weigh_rows_backward,
)
from rlnumba.runtime import device
from rlnumba.runtime.launch import pdl_scope

FEW_TOKENS, SETS = 1024, 4


class Layer:
    """The arrays of one layer's tokens, and its operators: name -> (function, arrays that it reads and writes)."""

    def __init__(self, tokens, num_experts, top_k, columns, inner_columns):
        dtype, f32 = device.dtype("bfloat16"), np.float32
        scores, dscores = random_array(tokens, num_experts), random_array(tokens, num_experts)
        x, out, dx = (random_array(tokens, columns) for _ in range(3))
        rows, dweights = random_array(tokens * top_k, columns), cupy.zeros((tokens, top_k), f32)
        inner, dinner = (random_array(tokens * top_k, inner_columns) for _ in range(2))
        routing = Routing.empty(tokens, top_k, dtype, cupy.empty)
        dispatched = Dispatch.empty(tokens, top_k, num_experts, cupy.empty)
        sums = cupy.zeros(num_experts, np.int32), cupy.zeros(num_experts, f32)
        load = RouterLoad(*sums, cupy.full(1, tokens, np.int32))
        self.operators = {
            "route": (lambda: route(scores, True, routing), [scores, *routing]),
            "dispatch": (lambda: dispatch(routing.experts, dispatched), [routing.experts, *dispatched]),
            "gather_rows": (lambda: gather_rows(x, dispatched, rows), [x, rows]),
            "combine": (lambda: combine(rows, routing.weights, dispatched, out, x), [rows, x, out]),
            "weigh_rows_backward": (
                lambda: weigh_rows_backward(inner, dinner, routing.weights, dispatched, dweights),
                [inner, dinner, inner, dinner],
            ),
            "gather_rows_backward": (lambda: gather_rows_backward(rows, dispatched, dx), [rows, dx]),
            "route_backward": (
                lambda: route_backward(dweights, scores, routing.experts, True, dscores),
                [scores, dscores, routing.experts, dweights],
            ),
            "add_router_load": (lambda: add_router_load(scores, dispatched, load), [scores]),
        }
        for name in ("route", "dispatch"):
            self.operators[name][0]()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384, 1, 64, 256])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--inner-columns", type=int, default=768)
    parser.add_argument("--only", default="", help="operators whose name contains this")
    options = parser.parse_args()
    ceiling = copy_gbs()
    print(f"{options.experts} experts, {options.top_k} a token, {options.columns} columns; a copy: {ceiling:.0f} GB/s")
    for tokens in options.tokens:
        sizes = options.experts, options.top_k, options.columns, options.inner_columns
        layers = [Layer(tokens, *sizes) for _ in range(SETS)]
        for name, (_, arrays) in layers[0].operators.items():
            if options.only not in name:
                continue
            runs = [layer.operators[name][0] for layer in layers] * (1 if tokens > FEW_TOKENS else 8)
            us, nbytes = graph_time_us(runs), sum(array.nbytes for array in arrays)
            if tokens > FEW_TOKENS:
                remark = f"{nbytes / 1e6:.1f} MB, {nbytes / us / 1e3 / ceiling:.2f} of a copy"
            else:
                with pdl_scope():
                    remark = f"in pdl_scope {graph_time_us(runs):.2f} us"
            print(f"{name + f', {tokens} tokens':42} {us:8.2f} us  {remark}", flush=True)
            row(f"{name}, {tokens} tokens", f"{us:.2f} us, {remark}")
        del layers
        cupy.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main()
