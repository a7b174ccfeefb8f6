"""Log-probs of chosen tokens and their gradient, from hidden states, against torch's chunked cross-entropy.

    python bench/kernels/logprob.py                 check, then times
    python bench/kernels/logprob.py compile         the kernels of the sweep, in several processes
    python bench/kernels/logprob.py check           against float32 on sampled rows
    python bench/kernels/logprob.py times           forward, forward + backward, one pass; memory beside the arguments
    python bench/kernels/logprob.py stages          the time of each kernel
    python bench/kernels/logprob.py sweep           configs and shapes of the sm_90 kernels, the ten best of each kind

16,384 tokens, hidden 1024, vocabulary 151,936, bfloat16, as Qwen3-0.6B in training. Forward and backward are four GEMMs
(20 TFLOP), since the backward recomputes the logits; three where dlogp is known beforehand (one pass). Bars: 40 and 30
ms, 256 MiB. torch computes float32 logits of 2,048 rows at a time. Compilation is not timed.
"""

import argparse
import contextlib
import functools
import multiprocessing
import os
import pathlib
import statistics
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import cupy
from harness import random_array, relative_error, rows_of, time_us, torch_time_us
from report import add_parts, row

from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.gemm import simt
from rlnumba.kernels.gemm import sm90 as gemm_sm90
from rlnumba.kernels.gemm.sm90_config import Sm90GemmConfig
from rlnumba.kernels.logprob import chunked
from rlnumba.kernels.logprob import sm90 as logprob_sm90
from rlnumba.kernels.logprob.ops import linear_logp, linear_logp_backward, linear_logp_with_gradient
from rlnumba.kernels.logprob.sm90 import HeadTuning, chunk_columns, one_pass_shape
from rlnumba.kernels.logprob.sm90_kernel import LogprobConfig, TileResults, TileRows, TileShape, logprob_kernel
from rlnumba.kernels.logprob.terms import LogprobOutputs, LossGradients
from rlnumba.kernels.nn import elementwise
from rlnumba.runtime import dispatch, launch
from rlnumba.runtime.arguments import tuple_type

BF16 = "bfloat16"
TEMPERATURE = 0.8
BARS_MS = {"forward + backward": 40, "one pass": 30}
EXTRA_MIB = 256
CHECKED_ROWS = 64
TORCH_ROWS = 2048
# GEMM backend, and forced kernel families: the operator's two implementations, the chunked one with either backend.
IMPLEMENTATIONS = {
    "chunks, cuBLAS": ("cublas", "logprob=simt"),
    "chunks, native": ("native", "logprob=simt"),
    "in registers": ("native", "gemm=sm90,logprob=sm90"),
}


@contextlib.contextmanager
def use(name):
    """Run the operators with this entry of IMPLEMENTATIONS."""
    backend, kernels = IMPLEMENTATIONS[name]
    gemm.set_backend(backend)
    with dispatch.forced(kernels):
        yield
    gemm.set_backend("auto")


def implementations():
    """The names of IMPLEMENTATIONS that this GPU runs."""
    return [name for name in IMPLEMENTATIONS if name != "in registers" or dispatch.architecture() == (9, 0)]


class Problem:
    """Random inputs on the GPU, whose logits are a few units, and arrays for the results."""

    def __init__(self, rows, vocabulary, width, with_torch=True):
        self.with_torch = with_torch
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

    @property
    def gradients(self):
        return LossGradients(self.dlogp, self.dhidden, self.dweight)

    def forward(self):
        linear_logp(*self.inputs, LogprobOutputs(self.logp, self.lse, self.entropy, self.top1))

    def backward(self):
        linear_logp_backward(*self.inputs, self.lse, self.gradients)

    def both(self):
        self.forward()
        self.backward()

    def one_pass(self, top1=True):
        outputs = LogprobOutputs(self.logp, self.lse, self.entropy, self.top1 if top1 else None)
        linear_logp_with_gradient(*self.inputs, outputs, self.gradients)

    def one_pass_without_argmax(self):
        self.one_pass(top1=False)

    @contextlib.contextmanager
    def half_without_gradient(self):
        """Inside, every other row has dlogp 0, as when a group's rewards are all equal."""
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
    for name in implementations():
        with use(name):
            for what, run in (("forward + backward", problem.both), ("one pass", problem.one_pass)):
                found = problem.errors(run)
                wrong = [key for key, error in found.items() if not error < ALLOWED[key]]
                text = "  ".join(f"{key} {error:.1e}" for key, error in found.items())
                print(f"    {name:16} {what:20} {text}{'  WRONG' if wrong else ''}", flush=True)
                bits[name, what] = problem.logp.view(np.uint32).copy()
    native = [bits[key] for key in bits if "cuBLAS" not in key[0]]
    # Where native GEMMs of one family compute the logits.
    same = all(bool((some == native[0]).all()) for some in native)
    print(f"    log-probs of native GEMMs: {'same bits' if same else 'OTHER BITS'}")


def extra_mib(run):
    """MiB that a call needs beside its arguments: what its own memory pool allocates from the driver."""
    run()
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        run()
    cupy.cuda.get_current_stream().synchronize()
    return pool.total_bytes() / 2**20


def torch_us(rows, vocabulary, width):
    """Microseconds of torch's forward and backward, by chunks of rows; None if torch is not installed."""
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
    gemm_flop = 2 * rows * vocabulary * width
    peer = torch_us(rows, vocabulary, width) if problem.with_torch else None
    now = "-" if peer is None else f"{peer / 1e3:.1f} ms"
    print(f"{rows} x {width} x {vocabulary}: torch, chunks of {TORCH_ROWS}, forward + backward {now}")
    for name in implementations():
        with use(name):
            kinds = {"forward": (problem.forward, 1), "forward + backward": (problem.both, 4)}
            if name == "in registers":
                kinds["one pass"] = problem.one_pass_without_argmax, 3
                kinds["one pass, with argmax"] = problem.one_pass, 3
                kinds["both, half the rows with gradient"] = problem.both, 2.5
                kinds["one pass, half the rows with gradient"] = problem.one_pass, 2
            for what, (run, gemms) in kinds.items():
                with problem.half_without_gradient() if "half" in what else contextlib.nullcontext():
                    extra = extra_mib(run)
                    us = time_us(run, 5)
                bar = f"{BARS_MS[what]} ms, {EXTRA_MIB} MiB" if what in BARS_MS else ""
                print(
                    f"    {name:16} {what:29} {us / 1e3:8.2f} ms  {gemms * gemm_flop / us / 1e6:5.0f} TFLOP/s  "
                    f"{extra:6.0f} MiB beside the arguments  {bar and f'(bar {bar})'}",
                    flush=True,
                )
                result = f"{us / 1e3:.2f} ms, {extra:.0f} MiB; torch {now}"
                row(f"log-prob {rows} x {width} x {vocabulary}, {what}, {name}", result, bar)


class Stages:
    """Context manager that times each launch by events, in stream order."""

    MODULES = (chunked, logprob_sm90, gemm_sm90, simt, elementwise)
    # By (a_mn, b_mn).
    CUBLAS = {(False, False): "cuBLAS, logits", (False, True): "cuBLAS, dhidden", (True, True): "cuBLAS, dweight"}

    def __init__(self):
        self.found = {}

    def timed(self, function, name):
        def run(*arguments, **options):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            function(*arguments, **options)
            end.record()
            self.found.setdefault(name(*arguments), []).append((begin, end))

        return run

    @staticmethod
    def name_of(kernel, *_):
        made = getattr(kernel.py_func, "made_with", (None,))[0]
        if isinstance(made, LogprobConfig):
            return made.mode
        if isinstance(made, Sm90GemmConfig):
            return "GEMM, dweight" if made.a_mn else "GEMM, dhidden" if made.b_mn else "GEMM, logits"
        return kernel.py_func.__name__

    def __enter__(self):
        self.kept = [module.launch for module in self.MODULES], gemm.BACKENDS["cublas"]
        for module in self.MODULES:
            module.launch = self.timed(module.launch, self.name_of)
        gemm.BACKENDS["cublas"] = self.timed(
            gemm.BACKENDS["cublas"], lambda a, b, out, a_mn=False, b_mn=False, *_: self.CUBLAS[a_mn, b_mn]
        )
        return self

    def __exit__(self, *_):
        launches, gemm.BACKENDS["cublas"] = self.kept
        for module, function in zip(self.MODULES, launches, strict=True):
            module.launch = function
        cupy.cuda.Device().synchronize()

    def lines(self, flop):
        """Yield (name, launches, ms, TFLOP/s); the rate, of GEMMs only, is of `flop` for all launches of a name."""
        for name, pairs in self.found.items():
            ms = sum(cupy.cuda.get_elapsed_time(*pair) for pair in pairs)
            rate = 0 if name.endswith("_kernel") else flop / ms / 1e9
            yield name, len(pairs), ms, rate


def print_stages(what, run, flop):
    run()
    with Stages() as stages:
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        run()
        end.record()
    whole = cupy.cuda.get_elapsed_time(begin, end)
    print(f"stages, {what}: {whole:.2f} ms")
    for name, count, ms, rate in sorted(stages.lines(flop), key=lambda line: -line[2]):
        print(f"    {name:24} {count:4} launches {ms:8.2f} ms {f'{rate:5.0f} TFLOP/s' if rate else ''}", flush=True)


def stages(problem):
    rows, vocabulary, width = problem.shape
    flop = 2 * rows * vocabulary * width
    for name in implementations():
        with use(name):
            print_stages(f"forward, {name}", problem.forward, flop)
            print_stages(f"backward, {name}", problem.backward, flop)
            if name == "in registers":
                print_stages(f"one pass, {name}", problem.one_pass, flop)


def print_candidates(what, candidates, rounds=5, most=10):
    """Time (name, function) pairs, the first of which is what operators use, and print the fastest.

    All are timed once a round, so that all meet the clocks of the GPU's power limit.
    """
    candidates = dict(candidates)
    laps = {name: [] for name in candidates}
    for lap in range(rounds + 2):
        for name, run in candidates.items():
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            run()
            end.record()
            end.synchronize()
            if lap > 1:
                laps[name].append(cupy.cuda.get_elapsed_time(begin, end))
    found = sorted((statistics.median(times), name) for name, times in laps.items())
    chosen = next(iter(candidates))
    print(f"sweep, {what}: {statistics.median(laps[chosen]):.2f} ms, {chosen}")
    for ms, name in found[:most]:
        print(f"    {ms:8.2f} ms  {name}", flush=True)


# (stages, stagger, boxes) of logprob_kernel; the first is what operators use.
GEOMETRIES = [(4, 2, 2), (4, 0, 2), (4, 1, 2), (4, 3, 2), (3, 2, 2), (3, 2, 4), (3, 0, 4)]
FORWARD_GEOMETRIES = [(4, 2, 2), (4, 0, 2), (4, 1, 2), (4, 3, 2), (3, 2, 2)]
KERNEL_TYPES = (
    *["uint8[::1]"] * 3, tuple_type(TileRows, "int32[::1]", *["float32[::1]"] * 6), "float32",
    tuple_type(TileResults, "float32[::1]", "float32[::1]"), tuple_type(TileShape, *["int64"] * 6),
)  # fmt: skip


def configs(mode, geometries=GEOMETRIES, **wanted):
    return {
        f"{stages} stages, stagger {stagger}, {boxes} boxes": LogprobConfig(
            BF16, mode, stages=stages, stagger=stagger, boxes=boxes, **wanted
        )
        for stages, stagger, boxes in geometries
    }


def compile_config(config):
    launch.Compiled(logprob_kernel(config), KERNEL_TYPES)


@functools.cache
def compile_configs():
    """Compile the kernels of the sweep, several at a time."""
    both = {"entropy": True, "top1": True}
    wanted = [
        *configs("forward", FORWARD_GEOMETRIES).values(),
        *configs("forward", FORWARD_GEOMETRIES, **both).values(),
    ]
    wanted += configs("exponentials", **both).values()
    for mode in ("dlogits", "split_k"):
        wanted += configs(mode).values()
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count())) as pool:
        pool.map(compile_config, wanted, chunksize=1)
    print(f"compiled {len(wanted)} kernels in {time.perf_counter() - begin:.0f} s", flush=True)


def sweep(problem):
    if dispatch.architecture() != (9, 0):
        print("sweep: the sm_90 kernels need compute capability 9.0")
        return
    compile_configs()
    rows, vocabulary, width = problem.shape
    outputs = problem.logp, problem.lse, problem.entropy, problem.top1

    def forward(wanted, config):
        logprob_sm90.linear_logp(*problem.inputs, wanted, config=config)

    for what, wanted in (("logp and lse", outputs[:2]), ("with entropy and top1", outputs)):
        both = {"entropy": len(wanted) > 2, "top1": len(wanted) > 2}
        print_candidates(
            f"forward, {what}",
            (
                (name, lambda config=config, wanted=wanted: forward(LogprobOutputs(*wanted), config))
                for name, config in configs("forward", FORWARD_GEOMETRIES, **both).items()
            ),
        )

    def backward(**options):
        arguments = *problem.inputs, problem.lse, problem.gradients
        return lambda: logprob_sm90.linear_logp_backward(*arguments, tuning=HeadTuning(**options))

    print_candidates("backward", ((name, backward(config=config)) for name, config in configs("dlogits").items()))
    best = chunk_columns(min(rows, logprob_sm90.backward_rows(width)), width, vocabulary)
    columns = [best, *(n for n in (best // 4, best // 2, best * 3 // 4, best - 256, best - 512) if n > 0)]
    print_candidates("backward", ((f"{n} columns a chunk", backward(columns=n)) for n in columns))

    def one_pass(**options):
        arguments = *problem.inputs, LogprobOutputs(*outputs), problem.gradients
        return lambda: logprob_sm90.linear_logp_with_gradient(*arguments, HeadTuning(**options))

    both = {"entropy": True, "top1": True}
    named = configs("exponentials", **both)
    print_candidates("one pass, exponentials", ((name, one_pass(config=config)) for name, config in named.items()))
    named = configs("split_k")
    print_candidates("one pass, split-K", ((name, one_pass(split_config=config)) for name, config in named.items()))
    best = one_pass_shape(width, vocabulary)
    shapes = [best, (768, 2), (768, 3), (768, 5), (768, 8), (640, 5), (640, 6), (640, 10), (512, 8), (512, 16)]
    candidates = {f"{n} rows, {splits} splits": one_pass(shape=(n, splits)) for n, splits in shapes}
    print_candidates("one pass", candidates.items())


def main():
    parts = {"compile": lambda _: compile_configs(), "check": check, "times": times, "stages": stages, "sweep": sweep}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_parts(parser, parts, ["check", "times"])
    parser.add_argument("--shape", type=int, nargs=3, default=[16_384, 151_936, 1024], metavar=("N", "V", "D"))
    parser.add_argument("--no-torch", action="store_true", help="do not time torch, whose import is slow")
    options = parser.parse_args()
    problem = Problem(*options.shape, with_torch=not options.no_torch)
    for name in options.parts:
        parts[name](problem)


if __name__ == "__main__":
    main()
