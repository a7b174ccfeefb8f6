"""Sampling a token from each row of logits, against torch's softmax and multinomial.

    python bench/kernels/sampling.py              256 rows of 151,936 logits, every kind of filter; then fewer rows
    python bench/kernels/sampling.py check        against float64 on some rows

Each kind is checked before it is timed: tokens and log-probs of some rows against float64 with the same noise. Times
are of a graph over several copies of the logits, together larger than L2. share: of a copy's bandwidth, for one reading
of the logits. The floor is a kernel that reads the logits and computes their maximum only. Bars: 0.06 ms with
temperature alone, 0.12 ms with top-k and top-p.
"""

import argparse
import pathlib
import sys
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import cupy
from harness import copy_gbs, graph_time_us, random_array, torch_time_us
from report import add_parts, row

from rlnumba.kernels.ptx.warp import block_max, vector_access
from rlnumba.kernels.sampling.draw import Counters
from rlnumba.kernels.sampling.ops import sample, sample_ref
from rlnumba.kernels.sampling.scan import SamplingLimits
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, pdl_scope

CHECKED_ROWS = 8
CACHE_BYTES = 60 << 20
MOST_COPIES = 128
FEWER_ROWS = (1, 8, 64)


# Logits that a warp of read_kernel has in flight: sixteen a lane, four loads of 16 bytes.
READ_COLUMNS = 512
load_four, _ = vector_access(4, 4)


class Kind(NamedTuple):
    """Sampling parameters of all rows; scale: standard deviation of the logits; bar_ms: target."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    scale: float = 3.0
    bar_ms: float | None = None


KINDS = {
    "temperature 0.8": Kind(0.8, bar_ms=0.06),
    "temperature 1": Kind(bar_ms=0.06),
    "greedy": Kind(0.0, bar_ms=0.06),
    "top-k 50, top-p 0.9": Kind(0.8, 50, 0.9, bar_ms=0.12),
    "top-k 50": Kind(0.8, 50, bar_ms=0.12),
    "top-p 0.9": Kind(0.8, top_p=0.9, bar_ms=0.12),
    "min-p 0.05": Kind(0.8, min_p=0.05, bar_ms=0.12),
    # More candidates than the list of a row holds.
    "top-p 0.9 of flat logits": Kind(1.0, top_p=0.9, scale=0.3),
}


class Problem:
    """Logits of one kind, several copies, and the other arguments of `sample`."""

    def __init__(self, rows, vocabulary, kind, copies=None):
        copies = copies or min(2 + CACHE_BYTES // (4 * rows * vocabulary), MOST_COPIES)
        self.kind = kind
        self.logits = [random_array(rows, vocabulary, dtype="float32", scale=kind.scale) for _ in range(copies)]

        def full(value, dtype):
            return cupy.full(rows, value, dtype)

        self.limits = SamplingLimits(
            full(kind.temperature, np.float32), full(kind.top_k, np.int32), full(kind.top_p, np.float32),
            full(kind.min_p, np.float32),
        )  # fmt: skip
        keys = np.random.default_rng(0).integers(0, 2**32, (rows, 2), dtype=np.uint32)
        self.counters = Counters(cupy.asarray(keys), cupy.arange(rows, dtype=np.int32), full(7, np.int32))
        self.token_ids, self.logprobs = full(-1, np.int32), full(np.nan, np.float32)

    def draw(self, copy=0):
        sample(self.logits[copy], self.limits, self.counters, self.token_ids, self.logprobs)

    def errors(self):
        """(rows whose token differs, largest difference of their log-probs) among the first rows, against float64."""
        self.draw()
        rows = slice(0, CHECKED_ROWS)
        arguments = [device.to_host(x[rows]) for x in (self.logits[0], *self.limits, *self.counters)]
        token_ids, logprobs = sample_ref(*arguments)
        same = device.to_host(self.token_ids[rows]) == token_ids
        differences = np.abs(device.to_host(self.logprobs[rows]) - logprobs)[same]
        return int((~same).sum()), float(differences.max(initial=0.0))

    def time_us(self):
        return graph_time_us([lambda copy=copy: self.draw(copy) for copy in range(len(self.logits))])


@cuda.jit
def read_kernel(logits, blocks, out):
    """out[block] = the maximum of a block's part of a row, which `blocks` blocks share; the row's remainder is not
    read.

    A row's length is a multiple of four.
    """
    scratch = cuda.shared.array(32, np.float32)
    row = cuda.blockIdx.x // blocks
    line = logits[row]
    lane, warp, warps = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32, cuda.blockDim.x // 32
    values = cuda.local.array(16, np.float32)
    largest = np.float32(-1e30)
    first = ((cuda.blockIdx.x - row * blocks) * warps + warp) * READ_COLUMNS
    for column in range(first, line.shape[0] - READ_COLUMNS + 1, blocks * warps * READ_COLUMNS):
        for i in range(4):
            load_four(line, column + 128 * i + 4 * lane, values, 4 * i)
        for i in range(16):
            largest = max(largest, values[i])
    largest = block_max(largest, scratch)
    if cuda.threadIdx.x == 0:
        out[cuda.blockIdx.x] = largest


def read_us(problem, blocks=4, threads=128):
    """Microseconds to read the logits."""
    out = cupy.empty(len(problem.token_ids) * blocks, np.float32)

    def read(logits):
        launch(read_kernel, len(out), threads, logits, blocks, out)

    return graph_time_us([lambda logits=logits: read(logits) for logits in problem.logits])


def torch_us(rows, vocabulary, kind):
    """Microseconds of torch for such a draw, not as a graph; None for min-p and if torch is not installed."""
    try:
        import torch
    except ImportError:
        return None
    if kind.min_p:
        return None
    logits = torch.randn(rows, vocabulary, device="cuda") * kind.scale

    def draw():
        if not kind.temperature:
            return logits.argmax(dim=-1)
        scaled = logits / kind.temperature
        if not kind.top_k and kind.top_p == 1:
            return torch.multinomial(torch.softmax(scaled, dim=-1), 1)
        kept = scaled.topk(kind.top_k, dim=-1) if kind.top_k else scaled.sort(dim=-1, descending=True)
        p = torch.softmax(kept.values, dim=-1)
        p = p.masked_fill(p.cumsum(dim=-1) - p >= kind.top_p, 0)
        return kept.indices.gather(1, torch.multinomial(p, 1))

    return torch_time_us(draw)


def check(rows, vocabulary):
    for name, kind in KINDS.items():
        wrong, difference = Problem(min(rows, CHECKED_ROWS), vocabulary, kind, 1).errors()
        # The argmax is computed in float32: of nearly equal scores, another token may be the largest, rarely.
        note = "" if wrong <= 1 and difference < 1e-4 else "  WRONG"
        print(f"{name:26} {wrong} tokens differ, log-probs by {difference:.1e}{note}", flush=True)


def times(rows, vocabulary):
    ceiling = copy_gbs()
    floor = read_us(Problem(rows, vocabulary, KINDS["greedy"])) / 1e3
    print(f"{rows} x {vocabulary}; a copy: {ceiling:.0f} GB/s; the logits are read in {floor:.4f} ms")
    row(f"sampling {rows} x {vocabulary}, the logits read and nothing else", f"{floor:.4f} ms")
    for name, kind in KINDS.items():
        problem = Problem(rows, vocabulary, kind)
        wrong, difference = problem.errors()
        us = problem.time_us()
        peer = torch_us(rows, vocabulary, kind)
        now = "-" if peer is None else f"{peer / 1e3:.3f} ms"
        share = 4 * rows * vocabulary / us / 1e3 / ceiling
        bad = "" if wrong <= 1 and difference < 1e-4 else "  WRONG"
        print(
            f"{name:26} {us / 1e3:8.4f} ms  share {share:5.2f}  bar {kind.bar_ms or '-'}  torch {now}  "
            f"{wrong} tokens differ, log-probs by {difference:.1e}{bad}",
            flush=True,
        )
        bar = f"{kind.bar_ms} ms" if kind.bar_ms else ""
        row(f"sampling {rows} x {vocabulary}, {name}", f"{us / 1e3:.4f} ms; torch {now}{bad}", bar)
    for few in FEWER_ROWS:
        if few < rows:
            each = []
            for name in ("temperature 0.8", "greedy", "top-k 50, top-p 0.9"):
                problem = Problem(few, vocabulary, KINDS[name])
                alone = problem.time_us() / 1e3
                # As in the graph of a decode step, whose kernels are launched with PDL.
                with pdl_scope():
                    each.append(f"{name} {alone:.4f}, pdl_scope {problem.time_us() / 1e3:.4f} ms")
            print(f"{few:4} rows: {'; '.join(each)}", flush=True)
            row(f"sampling {few} x {vocabulary}", "; ".join(each))


def main():
    parts = {"check": check, "times": times}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_parts(parser, parts, ["times"])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    options = parser.parse_args()
    for name in options.parts:
        parts[name](options.rows, options.vocabulary)


if __name__ == "__main__":
    main()
