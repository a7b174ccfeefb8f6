"""The course in kernels (examples/kernels) on a GPU: the speed of every step, and what it gained.

    python bench/kernel_course.py              both tables, to bench/results/kernel-course.md as well
    python bench/kernel_course.py gemm         one of them, printed alone

GEMM of 8192 x 8192 x 8192 in bfloat16, beside cuBLAS; causal attention of 16 heads of 128 and 8,192 tokens, beside the
package's own operator. The peer is timed alternately with each step, whose result is checked first: a wrong one ends
the script. The first steps take most of its time.
"""

import ast
import datetime
import functools
import importlib
import pathlib
import sys
from typing import NamedTuple
from unittest import mock

import numpy as np

from rlnumba.kernels.attention import ops as attention_ops
from rlnumba.kernels.attention.sequences import PackedSequences
from rlnumba.kernels.gemm import ops as gemm_ops
from rlnumba.runtime import device, dispatch
from rlnumba.runtime.arguments import type_name
from rlnumba.runtime.compile import machine_code

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The steps are no package of their own.
sys.path.insert(0, str(ROOT))

SIZE, HEADS, TOKENS, HEAD_DIM = 8192, 16, 8192, 128
# Relative error, Euclidean, that rounding results and weights to bfloat16 explains.
MOST_ERROR = 0.01
PAGE = ROOT / "bench" / "results" / "kernel-course.md"
INTRODUCTION = """# The course in kernels, measured

How fast is each step of [the course in kernels](../../docs/kernels-course.md) on a GPU, and what did it gain over the
step before? Written by `python bench/kernel_course.py` on {gpu}, {date}.

Registers are those of a thread when the kernel starts, the most of a step's kernels.
"""


class Result(NamedTuple):
    """A step, its time and the peer's in microseconds, registers of a thread, and the first sentence of its file."""

    name: str
    us: float
    peer_us: float
    registers: int
    idea: str


def steps(kind):
    """The modules of the steps that this GPU runs, in order; kind: "gemm" or "attention"."""
    names = sorted(path.stem for path in (ROOT / "examples" / "kernels").glob(f"{kind}_[0-9]_*.py"))
    modules = [importlib.import_module(f"examples.kernels.{name}") for name in names]
    # Those for Hopper alone name their architecture.
    return [m for m in modules if dispatch.architecture() == (9, 0) or "ARCHITECTURES" not in vars(m)]


def registers_of(module, call):
    """The most registers of a thread of the kernels that a step's call() launches."""
    from cuda.bindings import driver

    launched = []

    def note(kernel, grid, block, *arguments, **options):
        launched.append((kernel, tuple(map(type_name, arguments))))

    with mock.patch.object(module, "launch", note):
        call()
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
    return max(driver.cuFuncGetAttribute(attribute, machine_code.load(*what))[1] for what in launched)


def table(peer, flops, results):
    """Markdown of Results in their order, then the peer's own row, whose name is `peer`."""
    lines = [f"| step | TFLOP/s | share of {peer} | registers | times the step before | idea |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for before, result in zip([None, *results], results, strict=False):
        gain = f"{before.us / result.us:.1f}" if before else ""
        speed, share = f"{flops / result.us / 1e6:.1f}", f"{100 * result.peer_us / result.us:.1f} %"
        link = f"[{result.name}](../../examples/kernels/{result.name}.py)"
        lines.append(f"| {link} | {speed} | {share} | {result.registers} | {gain} | {result.idea} |")
    fastest = min(result.peer_us for result in results)
    lines.append(f"| {peer} | {flops / fastest / 1e6:.1f} | | | | |")
    return "\n".join(lines) + "\n"


def measure(kind, operands, out, peer, expected):
    """Results of all steps. peer() fills an array whose values `expected` returns, as the steps' `out` has them."""
    from harness import alternating_times_us, relative_error

    peer()
    results = []
    for module in steps(kind):
        name, call = module.__name__.split(".")[-1], functools.partial(vars(module)[kind], *operands, out)
        out.fill(0)
        call()
        error = relative_error(out, expected())
        if not error < MOST_ERROR:
            raise SystemExit(f"{name}: relative error {error:.3g}, more than {MOST_ERROR}")
        peer_us, us = alternating_times_us(peer, call, rounds=2)
        idea = ast.get_docstring(ast.parse(pathlib.Path(module.__file__).read_text())).split("\n\n")[0]
        results.append(Result(name, us, peer_us, registers_of(module, call), idea))
        print(f"{name}: {us:.0f} us, {100 * peer_us / us:.1f} % of the peer, error {error:.1e}", flush=True)
    return results


def gemm():
    """The steps of the GEMM beside cuBLAS, and the package's own kernel beside it in a sentence: Markdown."""
    from harness import alternating_times_us, random_array

    a, b = random_array(SIZE, SIZE), random_array(SIZE, SIZE)
    out, product = (device.xp().empty((SIZE, SIZE), a.dtype) for _ in range(2))

    def linear(backend):
        gemm_ops.set_backend(backend)
        gemm_ops.linear(a, b, product)

    cublas = functools.partial(linear, "cublas")
    results = measure("gemm", (a, b), out, cublas, lambda: product)
    peer_us, us = alternating_times_us(cublas, functools.partial(linear, "native"))
    speed = f"{2 * SIZE**3 / us / 1e6:.1f} TFLOP/s, {100 * peer_us / us:.1f} % of cuBLAS's speed"
    own = f"\nThe package's own GEMM: {speed}.\n"
    title = f"\n## GEMM, {SIZE} x {SIZE} x {SIZE}, bfloat16\n\n"
    return title + table("cuBLAS", 2 * SIZE**3, results) + own


def attention():
    """The steps of attention beside the package's operator: Markdown."""
    from harness import random_array

    q, k, v = (random_array(HEADS, TOKENS, HEAD_DIM) for _ in range(3))
    out = device.xp().empty(q.shape, q.dtype)

    def swapped(array):
        """Tokens first, as the operator has them, or heads first again; of integers, which CuPy transposes."""
        return device.xp().ascontiguousarray(array.view(np.uint16).transpose(1, 0, 2)).view(array.dtype)

    operands, tokens_first = tuple(map(swapped, (q, k, v))), swapped(out)
    sequences = PackedSequences(device.asarray(np.array([0, TOKENS], np.int32)), TOKENS)
    lse = device.xp().empty((HEADS, TOKENS), np.float32)

    def operator():
        attention_ops.attention(*operands, sequences, HEAD_DIM**-0.5, tokens_first, lse)

    results = measure("attention", (q, k, v), out, operator, lambda: swapped(tokens_first))
    # Two products, of which the causal mask leaves half.
    flops = 2 * HEADS * TOKENS**2 * HEAD_DIM
    title = f"\n## Causal attention, {HEADS} heads of {HEAD_DIM}, {TOKENS} tokens, bfloat16\n\n"
    return title + table("the package's operator", flops, results)


def main(parts):
    """Measure the parts, print their tables, and write the page if there are both."""
    if device.name() != "cuda":
        raise SystemExit("bench/kernel_course.py needs a GPU; the tests run the course in the simulator")
    tables = [{"gemm": gemm, "attention": attention}[part]() for part in parts]
    print("".join(tables), flush=True)
    if len(parts) == 2:
        today = datetime.date.today().isoformat()
        PAGE.write_text(INTRODUCTION.format(gpu=device.describe().removeprefix("cuda: "), date=today) + "".join(tables))


if __name__ == "__main__":
    main(sys.argv[1:] or ["gemm", "attention"])
