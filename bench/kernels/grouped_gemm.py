"""Grouped GEMMs at the shapes of Qwen3-30B-A3B's experts, beside torch._grouped_mm where torch is installed.

    python bench/kernels/grouped_gemm.py            decode, then training
    python bench/kernels/grouped_gemm.py decode     1 to 256 tokens: GB/s of the weights that are read
    python bench/kernels/grouped_gemm.py training   forward, dX and dW: TFLOP/s, and the layer's forward + backward
    python bench/kernels/grouped_gemm.py packed     a layer by packed weights, from words and by values

Tokens choose 8 of 128 experts at random. Decode's floor is a copy of the bytes that are read, training's the time of
one dense GEMM with as many rows (`linear` and its gradients).
"""

import argparse
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import cupy
from harness import copy_gbs, graph_time_us, random_array, time_us, torch_time_us
from report import add_parts, row

from rlnumba.kernels.gemm.grouped import grouped_gemm, grouped_gemm_dw, grouped_gemm_dx, grouped_gemm_swiglu
from rlnumba.kernels.gemm.ops import linear, linear_backward_input, linear_backward_weight
from rlnumba.kernels.quantized.formats import FORMATS
from rlnumba.kernels.quantized.grouped import packed_grouped_gemm, packed_grouped_gemm_swiglu
from rlnumba.kernels.quantized.ops import QuantizedWeight, dequantize, quantize

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
# (N, K) of an expert's weights.
WEIGHTS = {"gate-up": (2 * INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
DECODE_TOKENS = (1, 8, 64, 256)
PACKED_TOKENS = (1, 8, 64, 256, 1024)
TRAINING_TOKENS = (4096, 16_384)
ROUTES = 8


def routes(tokens, count):
    """`starts` of so many random routes, and the mean number of experts that have rows: ([(E + 1,)], float)."""
    rng, found, used = np.random.default_rng(tokens), [], []
    for _ in range(count):
        drawn = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :TOP_K]
        counts = np.bincount(drawn.reshape(-1), minlength=EXPERTS)
        found.append(cupy.asarray(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)))
        used.append(np.count_nonzero(counts))
    return found, float(np.mean(used))


def torch_or_none():
    try:
        import torch
    except ImportError:
        return None
    return torch


def as_torch(array):
    """A torch tensor of an array's memory."""
    torch = torch_or_none()
    if array.dtype.itemsize == 2:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def peer_us(calls):
    """Microseconds of each of torch's calls, made in a row; None without torch."""

    def all_calls():
        for call in calls:
            call()

    return torch_time_us(all_calls, 5) / len(calls)


def ratio(ours_us, theirs_us):
    return "" if theirs_us is None else f", {theirs_us / ours_us:.2f} of torch's speed ({theirs_us:.1f} us)"


def decode():
    torch, copy = torch_or_none(), copy_gbs()
    for name, (n, k) in WEIGHTS.items():
        weights = random_array(EXPERTS, n, k, scale=0.05)
        for tokens in DECODE_TOKENS:
            starts, used = routes(tokens, ROUTES)
            rows = tokens * TOP_K
            x = random_array(rows, k)
            out = cupy.empty((rows, n), x.dtype)
            ours = graph_time_us([lambda s=s: grouped_gemm(x, weights, s, out) for s in starts])
            theirs = None
            if torch:
                x_, w_ = as_torch(x), as_torch(weights).transpose(-2, -1)
                offsets = [as_torch(s)[1:] for s in starts]
                theirs = peer_us([lambda o=o: torch._grouped_mm(x_, w_, offs=o) for o in offsets])
            gbs = used * n * k * 2 / ours / 1e3
            result = f"{ours:.1f} us, {gbs:.0f} GB/s, {gbs / copy:.0%} of a copy{ratio(ours, theirs)}"
            row(f"experts' {name}, {tokens} tokens", result, "0.9 of torch's speed")


def random_packed(form, n, k):
    """The QuantizedWeight of all experts."""
    weight = QuantizedWeight.empty(FORMATS[form], (EXPERTS, n, k), FORMATS[form].group_size, "bfloat16")
    for expert in range(EXPERTS):
        quantize(random_array(n, k, scale=0.05), expert * n, weight)
    return weight


def packed_layer(form, up, down, copy):
    """Print a layer's two GEMMs for some numbers of tokens, by packed weights up and down."""
    values = [cupy.empty(each.shape, random_array(1).dtype) for each in (up, down)]
    for tokens in PACKED_TOKENS:
        starts, used = routes(tokens, ROUTES)
        rows = tokens * TOP_K
        x = random_array(rows, HIDDEN)
        sets = [[cupy.zeros((rows, n), x.dtype) for n in (2 * INTERMEDIATE, INTERMEDIATE, HIDDEN)] for _ in range(2)]

        def from_words(s, x=x, outs=sets[0]):
            packed_grouped_gemm_swiglu(x, up, s, *outs[:2])
            packed_grouped_gemm(outs[1], down, s, outs[2])

        def widened(s, x=x, outs=sets[1]):
            dequantize(up, values[0])
            grouped_gemm_swiglu(x, values[0], s, *outs[:2])
            dequantize(down, values[1])
            grouped_gemm(outs[1], values[1], s, outs[2])

        ours = graph_time_us([lambda s=s: from_words(s) for s in starts])
        before = graph_time_us([lambda s=s: widened(s) for s in starts])
        pairs = zip(*sets, strict=True)
        note = "" if all((a.view(np.uint16) == b.view(np.uint16)).all() for a, b in pairs) else ", OTHER BITS"
        gbs = used / EXPERTS * (up.nbytes + down.nbytes) / ours / 1e3
        result = f"{ours:.1f} us, {gbs / copy:.2f} of a copy; by values {before:.1f} us{note}"
        row(f"experts in {form}, {tokens} tokens", result)


def packed():
    copy = copy_gbs()
    for form in FORMATS:
        packed_layer(form, *(random_packed(form, *shape) for shape in WEIGHTS.values()), copy)


def training():
    torch = torch_or_none()
    for tokens in TRAINING_TOKENS:
        rows, total_us, total_flops = tokens * TOP_K, 0, 0
        (starts,), _ = routes(tokens, 1)
        for name, (n, k) in WEIGHTS.items():
            weights, x, dy = random_array(EXPERTS, n, k, scale=0.05), random_array(rows, k), random_array(rows, n)
            out, dx = cupy.empty((rows, n), x.dtype), cupy.empty((rows, k), x.dtype)
            dw, wide = cupy.empty_like(weights), cupy.zeros(weights.shape, np.float32)
            weight, dense_dw = weights[0].copy(), cupy.empty((n, k), x.dtype)
            calls = {
                "forward": (
                    lambda: grouped_gemm(x, weights, starts, out),
                    lambda: linear(x, weight, out),
                    lambda: torch._grouped_mm(x_, w_.transpose(-2, -1), offs=offsets),
                ),
                "dX": (
                    lambda: grouped_gemm_dx(dy, weights, starts, dx),
                    lambda: linear_backward_input(dy, weight, dx),
                    lambda: torch._grouped_mm(dy_, w_, offs=offsets),
                ),
                "dW": (
                    lambda: grouped_gemm_dw(dy, x, starts, dw, accumulate=False),
                    lambda: linear_backward_weight(dy, x, dense_dw, accumulate=False),
                    lambda: torch._grouped_mm(dy_.transpose(-2, -1), x_, offs=offsets),
                ),
                "dW, added to float32": (lambda: grouped_gemm_dw(dy, x, starts, wide), None, None),
            }
            if torch:
                x_, dy_, w_, offsets = as_torch(x), as_torch(dy), as_torch(weights), as_torch(starts)[1:]
            flops = 2 * rows * n * k
            for what, (grouped, dense, peer) in calls.items():
                ours = time_us(grouped, 5)
                share = f", {time_us(dense, 5) / ours:.2f} of a dense GEMM's speed" if dense else ""
                theirs = peer_us([peer]) if torch and peer else None
                result = f"{ours:.0f} us, {flops / ours / 1e6:.0f} TFLOP/s{share}{ratio(ours, theirs)}"
                row(f"experts' {name}, {tokens} tokens, {what}", result)
                if dense:
                    total_us, total_flops = total_us + ours, total_flops + flops
        result = f"{total_us:.0f} us, {total_flops / total_us / 1e6:.0f} TFLOP/s"
        row(f"GEMMs of the experts, {tokens} tokens, forward + backward", result, "300 TFLOP/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = {"decode": decode, "training": training, "packed": packed}
    add_parts(parser, parts)
    for part in parser.parse_args().parts:
        parts[part]()
