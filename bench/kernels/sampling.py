"""Drawing a token of each row of logits, against torch's softmax and multinomial.

    python bench/kernels/sampling.py              256 rows of 151,936 logits, every kind of filter; then fewer rows
    python bench/kernels/sampling.py check        against float64 on some rows

Each kind is checked before it is timed: tokens and log-probs of some rows against float64 with the same noise. Times
are of a graph over several copies of the logits, together larger than the second-level cache, as decode finds them
after the lm_head's product. share: of a copy's bandwidth, for one reading of the logits. Bars: 0.06 ms with
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

from rlnumba import device
from rlnumba.device import cuda
from rlnumba.kernels import sampling
from rlnumba.kernels.instructions import block_max, vector_access
from rlnumba.kernels.launch import kernel_factory, launch, overlapping
from rlnumba.kernels.sampling import Form, sample, sample_ref

CHECKED_ROWS = 8
CACHE_BYTES = 60 << 20
MOST_COPIES = 128
FEWER_ROWS = (1, 8, 64)


class Kind(NamedTuple):
    """What rows are drawn with, scale: of the normal logits; bar_ms."""

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
    # More tokens are kept than a block's list holds.
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

        self.filters = [
            full(kind.temperature, np.float32), full(kind.top_k, np.int32), full(kind.top_p, np.float32),
            full(kind.min_p, np.float32),
        ]  # fmt: skip
        keys = np.random.default_rng(0).integers(0, 2**32, (rows, 2), dtype=np.uint32)
        self.noise = [cupy.asarray(keys), cupy.arange(rows, dtype=np.int32), full(7, np.int32)]
        self.token_ids, self.logprobs = full(-1, np.int32), full(np.nan, np.float32)

    def arguments(self, copy=0):
        return self.logits[copy], *self.filters, *self.noise, self.token_ids, self.logprobs

    def draw(self, copy=0):
        sample(*self.arguments(copy))

    def results(self, form, blocks=None):
        self.token_ids.fill(-1)
        sampling.draw(self.arguments(), form, blocks)
        return device.to_host(self.token_ids), device.to_host(self.logprobs)

    def form_us(self, form, blocks=None):
        calls = [
            lambda copy=copy: sampling.draw(self.arguments(copy), form, blocks) for copy in range(len(self.logits))
        ]
        return graph_time_us(calls)

    def errors(self):
        """(rows whose token differs, largest difference of their log-probs) among the first rows, against float64."""
        self.draw()
        rows = slice(0, CHECKED_ROWS)
        arguments = [device.to_host(x[rows]) for x in (self.logits[0], *self.filters, *self.noise)]
        token_ids, logprobs = sample_ref(*arguments)
        same = device.to_host(self.token_ids[rows]) == token_ids
        differences = np.abs(device.to_host(self.logprobs[rows]) - logprobs)[same]
        return int((~same).sum()), float(differences.max(initial=0.0))

    def time_us(self):
        return graph_time_us([lambda copy=copy: self.draw(copy) for copy in range(len(self.logits))])


def torch_us(rows, vocabulary, kind):
    """Microseconds of torch for such a draw, not as a graph; None where torch is missing or has no such filter."""
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


@kernel_factory
def read_kernel(quads):
    """Nothing but a reading: the largest of each block's part of a row."""
    load_four, _ = vector_access(4, 4)
    load_two, _ = vector_access(2, 2)

    @cuda.jit
    def read_kernel(logits, blocks, out):
        scratch = cuda.shared.array(32, np.float32)
        row = cuda.blockIdx.x // blocks
        part = np.int32(cuda.blockIdx.x - row * blocks)
        line = logits[row]
        width = np.int32(line.shape[0])
        thread = np.int32(cuda.threadIdx.x)
        lane, warp = np.int32(thread & 31), np.int32(thread >> 5)
        warps = np.int32(cuda.blockDim.x // 32)
        values = cuda.local.array(16, np.float32)
        largest = np.float32(-1e30)
        if quads:
            # Sixteen logits a lane as sample_kernel reads them.
            for strip in range((part * warps + warp) * 512, width - 511, blocks * warps * 512):
                first = np.int32(strip + (lane >> 2) * 64 + (lane & 3) * 2)
                for b in range(8):
                    load_two(line, first + 8 * b, values, 2 * b)
                for i in range(16):
                    largest = max(largest, values[i])
        else:
            for strip in range((part * warps + warp) * 512, width - 511, blocks * warps * 512):
                first = np.int32(strip + lane * 4)
                for b in range(4):
                    load_four(line, first + 128 * b, values, 4 * b)
                for i in range(16):
                    largest = max(largest, values[i])
        largest = block_max(largest, scratch)
        if thread == 0:
            out[cuda.blockIdx.x] = largest

    return read_kernel


FORMS = [
    Form(), Form(resident=10), Form(resident=12), Form(256, 4), Form(256, 6), Form(512, 2), Form(512, 3),
    Form(128, 9, 2), Form(128, 6, 3), Form(128, 5, 4), Form(256, 3, 3),
]  # fmt: skip


def compiled(rows, vocabulary, index):
    """Compile one form, for the others' cache."""
    Problem(1, vocabulary, KINDS["greedy"], 1).results(FORMS[index])


def variants(rows, vocabulary):
    """Every form, all draws the same."""
    kinds = ("temperature 0.8", "greedy", "top-p 0.9", "top-k 50, top-p 0.9", "top-p 0.9 of flat logits")
    problems = {name: Problem(rows, vocabulary, KINDS[name]) for name in kinds}
    logits = problems["greedy"].logits
    out = cupy.zeros(1 << 16, np.float32)
    for quads in (False, True):
        for threads, blocks in ((128, 4), (128, 16), (256, 4), (256, 8), (512, 2), (512, 4), (1024, 1)):
            calls = [
                lambda z=z, blocks=blocks, threads=threads, quads=quads: launch(
                    read_kernel(quads), rows * blocks, threads, z, np.int32(blocks), out
                )
                for z in logits
            ]
            print(f"read, quads {quads}, {threads} x {blocks}: {graph_time_us(calls):.1f} us", flush=True)
    expected = {name: problem.results(FORMS[0]) for name, problem in problems.items()}
    for name, problem in problems.items():
        wrong, difference = problem.errors()
        print(f"{name}: {wrong} of {CHECKED_ROWS} tokens differ from float64, log-probs by {difference:.1e}")
    print("microseconds: " + ", ".join(kinds))
    for form in FORMS:
        times, same = [], True
        for name, problem in problems.items():
            results = problem.results(form)
            same &= all(
                np.array_equal(a.view(np.int32), b.view(np.int32)) for a, b in zip(results, expected[name], strict=True)
            )
            if form in (FORMS[0], FORMS[2], FORMS[8]) or name in kinds[:3]:
                times.append(f"{problem.form_us(form):7.1f}")
        print(" ".join(times), "" if same else "DIFFERS", tuple(form), flush=True)
    for blocks in (2, 3, 4, 5, 6, 8, 10, 15, 19, 25):
        each = [f"{problems[name].form_us(FORMS[0], blocks):7.1f}" for name in kinds[:4]]
        print(" ".join(each), f"{blocks} blocks a row", flush=True)
    with overlapping():
        each = [f"{problems[name].form_us(FORMS[0]):7.1f}" for name in kinds[:4]]
    print(" ".join(each), "overlapping", flush=True)
    original = sampling.launch

    def without_finish(kernel, *arguments, **options):
        if kernel is not sampling.finish_kernel:
            original(kernel, *arguments, **options)

    sampling.launch = without_finish
    for form in FORMS:
        each = [f"{problems[name].form_us(form):7.1f}" for name in kinds[:4]]
        print(" ".join(each), "sample_kernel alone", tuple(form), flush=True)
    sampling.launch = original
    for entries in [arrays[2] for kept in sampling._workspace.kept.values() for arrays in kept]:
        entries.fill(0)
    cached = {name: Problem(64, vocabulary, KINDS[name], 1) for name in kinds[:4]}
    for form in (FORMS[0], FORMS[2], FORMS[4], FORMS[8]):
        each = [f"{problem.form_us(form):7.1f}" for problem in cached.values()]
        print(" ".join(each), "64 rows from the cache", tuple(form), flush=True)
    z = cached["greedy"].logits[0]
    for quads in (False, True):
        us = graph_time_us([lambda: launch(read_kernel(quads), 64 * 16, 128, z, np.int32(16), out)] * 4)  # noqa: B023
        print(f"read, quads {quads}: 64 rows from the cache {us:.1f} us")
    for few in FEWER_ROWS:
        problems = {name: Problem(few, vocabulary, KINDS[name]) for name in kinds[:4]}
        for form in (FORMS[0], FORMS[2], FORMS[8]):
            each = [f"{problem.form_us(form):7.1f}" for problem in problems.values()]
            print(f"{few} rows:", " ".join(each), tuple(form), flush=True)
        with overlapping():
            each = [f"{problem.form_us(FORMS[0]):7.1f}" for problem in problems.values()]
        print(f"{few} rows:", " ".join(each), "overlapping", flush=True)
        if few == 1:
            for blocks in (19, 25, 38):
                each = [f"{problem.form_us(FORMS[0], blocks):7.1f}" for problem in problems.values()]
                print(f"{few} rows:", " ".join(each), f"{blocks} blocks a row", flush=True)


def check(rows, vocabulary):
    for name, kind in KINDS.items():
        wrong, difference = Problem(min(rows, CHECKED_ROWS), vocabulary, kind, 1).errors()
        # The race is run in float32: of tokens that finish together another may win, rarely.
        note = "" if wrong <= 1 and difference < 1e-4 else "  WRONG"
        print(f"{name:26} {wrong} tokens differ, log-probs by {difference:.1e}{note}", flush=True)


def times(rows, vocabulary):
    ceiling = copy_gbs()
    print(f"{rows} x {vocabulary}; a copy: {ceiling:.0f} GB/s")
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
                each.append(f"{name} {Problem(few, vocabulary, KINDS[name]).time_us() / 1e3:.4f} ms")
            print(f"{few:4} rows: {', '.join(each)}", flush=True)


def main():
    parts = {"check": check, "times": times, "variants": variants}
    parts |= {f"compile{i}": lambda rows, vocabulary, i=i: compiled(rows, vocabulary, i) for i in range(len(FORMS))}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_parts(parser, parts, ["times"])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    options = parser.parse_args()
    for name in options.parts:
        parts[name](options.rows, options.vocabulary)


if __name__ == "__main__":
    main()
