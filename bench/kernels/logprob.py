"""Log-probs of chosen tokens and their gradient, from hidden states, against torch's chunked cross-entropy.

    python bench/kernels/logprob.py                 check, then every way to do it
    python bench/kernels/logprob.py check           against float32 on sampled rows
    python bench/kernels/logprob.py times           forward, forward + backward, one pass; memory beside the arguments
    python bench/kernels/logprob.py sweep           tiles and shapes of the Hopper kernels

16,384 tokens, hidden 1024, vocabulary 151,936, bfloat16, as Qwen3-0.6B in training. The gradient takes four products
(20 TFLOP) where it makes the logits again, three where dlogp is known beforehand. Bars: 40 and 30 ms, 256 MiB. torch
makes float32 logits of 2,048 rows at a time. Compiling is not timed.
"""

import argparse
import contextlib
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import cupy
from harness import random_array, relative_error, rows_of, time_us, torch_time_us
from report import add_parts, row

from rlnumba.kernels import choice, gemm, logprob_hopper
from rlnumba.kernels.logprob import linear_logp, linear_logp_backward, linear_logp_with_gradient
from rlnumba.kernels.logprob_hopper import HeadTile

BF16 = "bfloat16"
TEMPERATURE = 0.8
BARS_MS = {"forward + backward": 40, "one pass": 30}
EXTRA_MIB = 256
CHECKED_ROWS = 64
TORCH_ROWS = 2048
# Who multiplies, and what is forced: the operator's two ways to a log-prob, on products of either kind.
WAYS = {
    "chunks, cuBLAS": ("cublas", "logprob=simple"),
    "chunks, numba": ("numba", "logprob=simple"),
    "in registers": ("numba", "product=hopper,logprob=hopper"),
}


@contextlib.contextmanager
def way(name):
    """The operators go this way."""
    backend, kernels = WAYS[name]
    gemm.set_backend(backend)
    with choice.forced(kernels):
        yield
    gemm.set_backend("auto")


def ways():
    """Names of WAYS on this GPU."""
    return [name for name in WAYS if name != "in registers" or choice.architecture() == (9, 0)]


class Problem:
    """Random inputs on the GPU, whose logits are a few units, and room for the results."""

    def __init__(self, rows, vocabulary, width):
        self.hidden = random_array(rows, width)
        self.weight = random_array(vocabulary, width, scale=3 * width**-0.5)
        self.ids = cupy.asarray(np.random.default_rng(0).integers(0, vocabulary, rows).astype(np.int32))
        self.dlogp = random_array(rows, dtype="float32")
        self.logp, self.lse, self.entropy = (cupy.empty(rows, np.float32) for _ in range(3))
        self.top1 = cupy.empty(rows, np.int32)
        self.dhidden, self.dweight = cupy.empty_like(self.hidden), cupy.zeros((vocabulary, width), np.float32)

    @property
    def shape(self):
        return len(self.hidden), *self.weight.shape

    @property
    def inputs(self):
        return self.hidden, self.weight, self.ids, TEMPERATURE

    def forward(self):
        linear_logp(*self.inputs, self.logp, self.lse, self.entropy, self.top1)

    def backward(self):
        linear_logp_backward(*self.inputs, self.lse, self.dlogp, self.dhidden, self.dweight)

    def both(self):
        self.forward()
        self.backward()

    def one_pass(self):
        outputs = self.logp, self.lse, self.dhidden, self.dweight, self.entropy, self.top1
        linear_logp_with_gradient(*self.inputs, self.dlogp, *outputs)

    @contextlib.contextmanager
    def half_without_gradient(self):
        """Every other row has dlogp 0 inside, as where a group's rewards are all equal."""
        kept = self.dlogp.copy()
        self.dlogp[::2] = 0
        try:
            yield
        finally:
            self.dlogp[...] = kept

    def reference(self, rows):
        """(logp, lse, entropy, dhidden, dweight) of some rows, in float32; the gradient of these rows alone."""
        h, w, ids = rows_of(self.hidden, rows).astype(np.float32), self.weight.astype(np.float32), self.ids[rows]
        scaled = h @ w.T / np.float32(TEMPERATURE)
        largest = scaled.max(axis=1, keepdims=True)
        lse = largest + cupy.log(cupy.exp(scaled - largest).sum(axis=1, keepdims=True))
        p = cupy.exp(scaled - lse)
        logp = cupy.take_along_axis(scaled, ids[:, None], 1) - lse
        entropy = lse[:, 0] - (p * scaled).sum(axis=1)
        chosen = cupy.arange(w.shape[0])[None] == ids[:, None]
        dz = (self.dlogp[rows] / np.float32(TEMPERATURE))[:, None] * (chosen - p)
        return logp[:, 0], lse[:, 0], entropy, dz @ w, dz.T @ h

    def errors(self, run):
        """Largest differences of logp and entropy in nats, and relative errors of dhidden and dweight, of some rows."""
        rows = cupy.asarray(np.sort(np.random.default_rng(1).permutation(len(self.hidden))[:CHECKED_ROWS]))
        kept = self.dlogp.copy()
        self.dlogp.fill(0)
        self.dlogp[rows] = kept[rows]
        self.dweight.fill(0)
        run()
        logp, lse, entropy, dhidden, dweight = self.reference(rows)
        found = {
            "logp": float(cupy.abs(self.logp[rows] - logp).max()),
            "lse": float(cupy.abs(self.lse[rows] - lse).max()),
            "entropy": float(cupy.abs(self.entropy[rows] - entropy).max()),
            "dhidden": relative_error(rows_of(self.dhidden, rows), dhidden),
            "dweight": relative_error(self.dweight, dweight),
        }
        self.dlogp[...] = kept
        return found


# A few hundred roundings of float32 logits of some 15 units; dz, or p and dz, rounded to bfloat16.
ALLOWED = {"logp": 1e-3, "lse": 1e-3, "entropy": 1e-3, "dhidden": 1e-2, "dweight": 1e-2}


def check(problem):
    print("check: largest difference in nats, relative error of gradients")
    bits = {}
    for name in ways():
        with way(name):
            for what, run in (("forward + backward", problem.both), ("one pass", problem.one_pass)):
                found = problem.errors(run)
                wrong = [key for key, error in found.items() if not error < ALLOWED[key]]
                text = "  ".join(f"{key} {error:.1e}" for key, error in found.items())
                print(f"    {name:16} {what:20} {text}{'  WRONG' if wrong else ''}", flush=True)
                bits[name, what] = problem.logp.view(np.uint32).copy()
    numba = [bits[key] for key in bits if "cuBLAS" not in key[0]]
    # Where our own products make the logits, and choice.py gives both ways the same kind.
    same = all(bool((some == numba[0]).all()) for some in numba)
    print(f"    log-probs of our own products: {'one and the same bits' if same else 'OTHER BITS'}")


def extra_mib(run):
    """MiB that the memory pool had to grow for a call: an upper bound of what it used beside its arguments."""
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    run()
    cupy.cuda.get_current_stream().synchronize()
    return (pool.total_bytes() - before) / 2**20


def torch_us(rows, vocabulary, width):
    """Microseconds of torch's forward and backward, by chunks of rows; None where torch is missing."""
    try:
        import torch
    except ImportError:
        return None
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn(rows, width, **kind)
    weight = (torch.randn(vocabulary, width, **kind) * 3 * width**-0.5).requires_grad_()
    ids = torch.randint(0, vocabulary, (rows,), device="cuda")

    def step():
        weight.grad = None
        for first in range(0, rows, TORCH_ROWS):
            chunk = slice(first, first + TORCH_ROWS)
            part = hidden[chunk].detach().requires_grad_()
            logits = (part @ weight.T).float() / TEMPERATURE
            torch.nn.functional.cross_entropy(logits, ids[chunk], reduction="sum").backward()

    return torch_time_us(step)


def times(problem):
    rows, vocabulary, width = problem.shape
    product = 2 * rows * vocabulary * width
    peer = torch_us(rows, vocabulary, width)
    now = "-" if peer is None else f"{peer / 1e3:.1f} ms"
    print(f"{rows} x {width} x {vocabulary}: torch, chunks of {TORCH_ROWS}, forward + backward {now}")
    for name in ways():
        with way(name):
            kinds = {"forward": (problem.forward, 1), "forward + backward": (problem.both, 4)}
            if name == "in registers":
                kinds["one pass"] = problem.one_pass, 3
                kinds["both, half the rows learn"] = problem.both, 2.5
                kinds["one pass, half the rows learn"] = problem.one_pass, 2
            for what, (run, products) in kinds.items():
                with problem.half_without_gradient() if "half" in what else contextlib.nullcontext():
                    extra = extra_mib(run)
                    us = time_us(run, 5)
                bar = f"{BARS_MS[what]} ms, {EXTRA_MIB} MiB" if what in BARS_MS else ""
                print(
                    f"    {name:16} {what:29} {us / 1e3:8.2f} ms  {products * product / us / 1e6:5.0f} TFLOP/s  "
                    f"{extra:6.0f} MiB beside the arguments  {bar and f'(bar {bar})'}",
                    flush=True,
                )
                result = f"{us / 1e3:.2f} ms, {extra:.0f} MiB; torch {now}"
                row(f"log-prob {rows} x {width} x {vocabulary}, {what}, {name}", result, bar)


def print_candidates(what, candidates, chosen, repeats=3):
    """Time (name, function) pairs; what is chosen is marked."""
    print(f"sweep, {what}")
    found = [(time_us(run, repeats), name) for name, run in candidates]
    for us, name in sorted(found, key=lambda pair: pair[0]):
        print(f"    {us / 1e3:8.2f} ms  {name}{'  <- chosen' if name == chosen else ''}", flush=True)


def head_tiles(mode, **wanted):
    for stages in (4, 3):
        for lead in (2, 0, 1, 3):
            tile = HeadTile(BF16, mode, stages=stages, lead=lead, **wanted)
            yield f"{stages} stages, lead {lead}", tile


def sweep(problem):
    if choice.architecture() != (9, 0):
        print("sweep: the kernels in registers need compute capability 9.0")
        return
    rows, vocabulary, width = problem.shape
    chosen = "4 stages, lead 2"
    outputs = problem.logp, problem.lse, problem.entropy, problem.top1
    for what, wanted in (("logp and lse", outputs[:2]), ("with entropy and top1", outputs)):
        tiles = head_tiles("terms", entropy=len(wanted) > 2, top1=len(wanted) > 2)
        candidates = [
            (name, lambda tile=tile: logprob_hopper.linear_logp(*problem.inputs, *wanted, tile=tile))
            for name, tile in tiles
        ]
        print_candidates(f"forward, {what}", candidates, chosen)

    gradients = problem.lse, problem.dlogp, problem.dhidden, problem.dweight

    def backward(tile=None, columns=None):
        return lambda: logprob_hopper.linear_logp_backward(*problem.inputs, *gradients, tile=tile, columns=columns)

    print_candidates("backward", [(name, backward(tile)) for name, tile in head_tiles("gradient")], chosen)
    at_once = min(rows, logprob_hopper.QUARTER // (4 * width))
    best = logprob_hopper.chunk_columns(at_once, width, vocabulary)
    columns = sorted({best, *(n * best // 4 // 256 * 256 for n in (1, 2, 3)), *(best + n * 256 for n in (-2, -1))})
    candidates = [(f"{n} columns a chunk", backward(columns=n)) for n in columns if n > 0]
    print_candidates("backward", candidates, f"{best} columns a chunk")

    def one_pass(tile=None, shape=None):
        return lambda: logprob_hopper.linear_logp_with_gradient(
            *problem.inputs, problem.dlogp, *outputs[:2], problem.dhidden, problem.dweight, *outputs[2:],
            tile=tile, shape=shape,
        )  # fmt: skip

    tiles = head_tiles("exponentials", entropy=True, top1=True)
    print_candidates("one pass", [(name, one_pass(tile)) for name, tile in tiles], chosen)
    best = logprob_hopper.block_rows(width, vocabulary)
    shapes = {best, (best[0], best[1] + 1), (best[0], max(best[1] - 1, 1)), *((best[0] - 128, n) for n in (4, 8, 16))}
    shapes |= {(256, 8), (384, 8), (512, 4), (512, 8), (512, 16)}
    candidates = [(f"{n} rows, {slabs} slabs", one_pass(shape=(n, slabs))) for n, slabs in sorted(shapes) if n > 0]
    print_candidates("one pass", candidates, f"{best[0]} rows, {best[1]} slabs")


def main():
    parts = {"check": check, "times": times, "sweep": sweep}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_parts(parser, parts, ["check", "times"])
    parser.add_argument("--shape", type=int, nargs=3, default=[16_384, 151_936, 1024], metavar=("N", "V", "D"))
    options = parser.parse_args()
    problem = Problem(*options.shape)
    for name in options.parts:
        parts[name](problem)


if __name__ == "__main__":
    main()
