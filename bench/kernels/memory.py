"""Memory-bound kernels, as shares of a copy's bandwidth.

    python bench/kernels/memory.py                    16,384 tokens of Qwen3-0.6B in bfloat16
    python bench/kernels/memory.py --only qkv         operators whose name contains this
    python bench/kernels/memory.py --tokens 256       fewer: a decode step of 256 sequences

Each operator is compared with its reference in float64, on some rows, before it is timed. Times are of a graph of at
least FEWEST_SETS calls, each on arrays of its own; from some thousand tokens on these are together larger than L2, so
that few of their bytes are read from it. Bytes are those that an operator has to read and write, without tables and
weights of a few KiB. Shares are of the bandwidth of a copy of 2 GiB, so long that its start and end do not matter; bar:
0.85 at 16,384 tokens. Beside each share is that of a copy of as many bytes, timed in the same way. With few tokens,
when a kernel is as short as its launch, the time inside pdl_scope is printed too.
"""

import argparse
import pathlib
import sys
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import cupy
from harness import copy_gbs, copy_us, graph_time_us, random_array, time_us
from report import row

from rlnumba.kernels.nn.elementwise import add
from rlnumba.kernels.nn.embedding import embedding, embedding_backward, list_tokens
from rlnumba.kernels.nn.qkv import (
    HeadNorm,
    Rotation,
    qkv_split,
    qkv_split_backward,
    qkv_split_backward_ref,
    qkv_split_ref,
    qkv_split_to_cache,
)
from rlnumba.kernels.nn.rmsnorm import rmsnorm, rmsnorm_backward, rmsnorm_backward_ref, rmsnorm_ref
from rlnumba.kernels.nn.rope import rope_table
from rlnumba.kernels.nn.swiglu import swiglu, swiglu_backward, swiglu_backward_ref, swiglu_ref
from rlnumba.kernels.optim.adamw import adamw, adamw_ref, adamw_scalars
from rlnumba.kernels.optim.adamw_8bit import ZERO_CODES, Moments, adamw_8bit
from rlnumba.kernels.optim.stochastic_rounding import rounding_noise
from rlnumba.optim import MOMENTS
from rlnumba.runtime import device
from rlnumba.runtime.launch import pdl_scope

D, H, HK, E, F, V = 1024, 16, 8, 128, 3072, 151_936
PARAMETERS = 1 << 28
EPS, THETA, POSITIONS, BLOCK = 1e-6, 1e6, 4096, 16
CHECKED_ROWS = 32
CACHE_BYTES = 60 << 20
FEWEST_SETS, MOST_SETS = 8, 32
BAR_SHARE, BAR_TOKENS, FEW_TOKENS = 0.85, 16_384, 1024


class Work(NamedTuple):
    """An operator on arrays of its own.

    run(); nbytes that it reads and writes; pairs() -> [(array on the host, expected array)] after one run.
    """

    run: object
    nbytes: int
    pairs: object


def head(array):
    """The first rows on the host, in float64."""
    return device.to_host(array[:CHECKED_ROWS]).astype(np.float64)


def size(*arrays):
    return sum(array.nbytes for array in arrays)


def empty(*shape, dtype="bfloat16"):
    return cupy.empty(shape, device.dtype(dtype))


class Heads:
    """A projection of N tokens and what it is split into; gradients likewise."""

    def __init__(self, tokens, normed):
        self.qkv, self.dqkv = random_array(tokens, (H + 2 * HK) * E), empty(tokens, (H + 2 * HK) * E)
        self.outs = [empty(tokens, heads, E) for heads in (H, HK, HK)]
        self.douts = [random_array(tokens, heads, E) for heads in (H, HK, HK)]
        self.norm = HeadNorm(random_array(E), random_array(E), EPS) if normed else None
        self.dweights = [cupy.zeros(E, np.float32) if normed else None for _ in range(2)]
        self.rstd = cupy.ones((tokens, H + HK), np.float32) if normed else None
        cos, sin = rope_table(POSITIONS, E, THETA)
        positions = np.arange(tokens, dtype=np.int32) % POSITIONS
        self.rotation = Rotation(*map(cupy.asarray, (cos, sin, positions)))
        self.host_rotation = Rotation(cos.astype(np.float64), sin.astype(np.float64), positions[:CHECKED_ROWS])
        self.norm_bytes = size(self.rstd) if normed else 0
        blocks = -(-tokens // BLOCK)
        self.caches = [cupy.zeros((blocks, BLOCK, HK, E), self.qkv.dtype) for _ in range(2)]
        # As in the engine: neighbouring tokens in a block, blocks in any order.
        slots = np.random.default_rng(0).permutation(blocks)[:, None] * BLOCK + np.arange(BLOCK)
        self.slots = cupy.asarray(slots.reshape(-1)[:tokens].astype(np.int32))

    @property
    def host_norm(self):
        if self.norm is None:
            return None
        return HeadNorm(*(device.to_host(weight).astype(np.float64) for weight in self.norm[:2]), EPS)

    def expected(self):
        return qkv_split_ref(head(self.qkv), self.host_norm, self.host_rotation, H, HK)

    def cached(self):
        """Keys and values in the slots of the first tokens."""
        slots = device.to_host(self.slots[:CHECKED_ROWS])
        return [device.to_host(cache).reshape(-1, HK, E)[slots].astype(np.float64) for cache in self.caches]


def split_work(tokens, normed=True):
    case = Heads(tokens, normed)

    def pairs():
        return list(zip(map(head, case.outs), case.expected(), strict=False))

    def run():
        qkv_split(case.qkv, case.norm, case.rotation, *case.outs, case.rstd)

    return Work(run, 2 * size(case.qkv) + case.norm_bytes, pairs)


def split_to_cache_work(tokens):
    case = Heads(tokens, True)

    def run():
        qkv_split_to_cache(case.qkv, case.norm, case.rotation, case.slots, case.outs[0], case.caches)

    def pairs():
        return list(zip([head(case.outs[0]), *case.cached()], case.expected(), strict=False))

    return Work(run, 2 * size(case.qkv), pairs)


def split_backward_work(tokens, normed=True):
    case = Heads(tokens, normed)

    def run():
        qkv_split_backward(
            case.douts, case.qkv, case.norm, case.rotation, case.rstd, case.dqkv, *case.dweights
        )  # fmt: skip

    def pairs():
        rstd = head(case.rstd) if normed else None
        arguments = [head(dout) for dout in case.douts], head(case.qkv), case.host_norm, case.host_rotation, rstd
        return [(head(case.dqkv), qkv_split_backward_ref(*arguments)[0])]

    # Without a norm qkv is not read; with one, its values are not.
    read = size(case.qkv) * (H + HK) // (H + 2 * HK) if normed else 0
    return Work(run, 2 * size(case.dqkv) + read + case.norm_bytes, pairs)


def rmsnorm_work(tokens):
    x, weight, out, rstd = random_array(tokens, D), random_array(D), empty(tokens, D), empty(tokens, dtype="float32")
    return Work(
        lambda: rmsnorm(x, weight, EPS, out, rstd),
        size(x, out, rstd),
        lambda: [(head(out), rmsnorm_ref(head(x), device.to_host(weight).astype(np.float64), EPS)[0])],
    )


def rmsnorm_backward_work(tokens):
    dout, x, dx = (random_array(tokens, D) for _ in range(3))
    weight, rstd, dweight = random_array(D), cupy.ones(tokens, np.float32), cupy.zeros(D, np.float32)
    before = head(dx)

    def run():
        rmsnorm_backward(dout, x, weight, rstd, dx, dweight, accumulate=True)

    def pairs():
        wide = device.to_host(weight).astype(np.float64)
        return [(head(dx), before + rmsnorm_backward_ref(head(dout), head(x), wide, head(rstd))[0])]

    return Work(run, size(dout, x, dx, dx, rstd), pairs)


def swiglu_work(tokens):
    gate_up, out = random_array(tokens, 2 * F), empty(tokens, F)
    return Work(lambda: swiglu(gate_up, out), size(gate_up, out), lambda: [(head(out), swiglu_ref(head(gate_up)))])


def swiglu_backward_work(tokens):
    dout, gate_up, dgate_up = random_array(tokens, F), random_array(tokens, 2 * F), empty(tokens, 2 * F)
    return Work(
        lambda: swiglu_backward(dout, gate_up, dgate_up),
        size(dout, gate_up, dgate_up),
        lambda: [(head(dgate_up), swiglu_backward_ref(head(dout), head(gate_up)))],
    )


def add_work(tokens):
    x, y, out = random_array(tokens, D), random_array(tokens, D), empty(tokens, D)
    return Work(lambda: add(x, y, out), size(x, y, out), lambda: [(head(out), head(x) + head(y))])


def different_ids(tokens):
    return np.random.default_rng(0).permutation(V)[:tokens].astype(np.int32)


def embedding_work(tokens):
    ids, weight, out = different_ids(tokens), random_array(V, D), empty(tokens, D)
    on_device = cupy.asarray(ids)
    return Work(
        lambda: embedding(on_device, weight, out),
        2 * size(out),
        lambda: [(head(out), device.to_host(weight)[ids[:CHECKED_ROWS]].astype(np.float64))],
    )


def frequent_ids(tokens):
    """Zipf-distributed, as in text: of 16,384 tokens, some 3,000 are different."""
    return np.minimum(np.random.default_rng(0).zipf(1.2, tokens), V - 1).astype(np.int32)


def embedding_backward_work(tokens, ids_of=different_ids, beforehand=True):
    """beforehand: list_tokens is not timed; in training it runs during the forward, on a stream of its own."""
    ids, dout, dweight = ids_of(tokens), random_array(tokens, D), cupy.zeros((V, D), np.float32)
    on_device, distinct = cupy.asarray(ids), np.unique(ids)

    def pairs():
        chosen = distinct[:CHECKED_ROWS]
        wide = dout.astype(np.float32)
        expected = [device.to_host(wide[cupy.asarray(np.flatnonzero(ids == i))]).sum(0, np.float64) for i in chosen]
        return [(device.to_host(dweight[cupy.asarray(chosen)]), np.stack(expected))]

    listed = list_tokens(on_device, dweight.shape) if beforehand else None
    if beforehand:
        listed.ready.synchronize()
        # A captured launch cannot wait for an event outside of its graph.
        listed = listed._replace(ready=None)

    def run():
        # The counters of finished parts need no reset: no id has more than one part.
        embedding_backward(on_device, dout, dweight, listed=listed)

    # float32 is read and written.
    return Work(run, size(dout) + 2 * 4 * D * len(distinct), pairs)


# Limited by latency rather than bandwidth.
FREQUENT, ALONE = "embedding_backward of frequent ids", "embedding_backward with the listing of tokens"
OPERATORS = {
    "rmsnorm": rmsnorm_work,
    "rmsnorm_backward": rmsnorm_backward_work,
    "qkv_split": split_work,
    "qkv_split_to_cache": split_to_cache_work,
    "qkv_split_backward": split_backward_work,
    "qkv_split without norm": lambda tokens: split_work(tokens, False),
    "qkv_split_backward without norm": lambda tokens: split_backward_work(tokens, False),
    "swiglu": swiglu_work,
    "swiglu_backward": swiglu_backward_work,
    "add": add_work,
    "embedding": embedding_work,
    "embedding_backward": embedding_backward_work,
    ALONE: lambda tokens: embedding_backward_work(tokens, beforehand=False),
    FREQUENT: lambda tokens: embedding_backward_work(tokens, frequent_ids, beforehand=False),
}


def relative_error(actual, expected):
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def error_of(work):
    work.run()
    return max(relative_error(actual, expected) for actual, expected in work.pairs())


def measure(name, tokens, ceiling):
    make = OPERATORS[name]
    work = make(tokens)
    error = error_of(work)
    # The relative rounding error of bfloat16 is at most 2^-9.
    bad = "" if error < 2**-8 else "  WRONG"
    sets = min(max(2 * CACHE_BYTES // work.nbytes + 1, FEWEST_SETS), MOST_SETS)
    runs = [work.run, *(make(tokens).run for _ in range(sets - 1))]
    us = graph_time_us(runs)
    if tokens > FEW_TOKENS:
        peer = f"a copy of as many bytes {share_of(work.nbytes, copy_us(work.nbytes, sets), ceiling):.2f}"
    else:
        with pdl_scope():
            peer = f"pdl_scope {graph_time_us(runs):.2f} us"
    has_bar = tokens >= BAR_TOKENS and name not in (FREQUENT, ALONE)
    report(f"{name}, {tokens} tokens", us, work.nbytes, ceiling, f"{peer}, error {error:.1e}{bad}", has_bar)


def share_of(nbytes, us, ceiling):
    return nbytes / us / 1e3 / ceiling


def report(what, us, nbytes, ceiling, remark, has_bar):
    share = share_of(nbytes, us, ceiling)
    print(f"{what:50} {us:8.2f} us  {nbytes / 1e6:8.2f} MB  share {share:5.2f}  {remark}", flush=True)
    row(what, f"{share:.2f} of a copy, {us:.1f} us, {remark}", BAR_SHARE if has_bar else "")


def measure_adamw(ceiling, optim, dtype):
    """A step of AdamW with the moments of `optim` from gradients of `dtype`, with a master copy."""
    weights, grads = random_array(PARAMETERS, scale=0.02), random_array(PARAMETERS, dtype=dtype)
    master = weights.astype(np.float32)
    state = {name: cupy.zeros(-(-PARAMETERS // each), kind) for name, (kind, each) in MOMENTS[optim].items()}
    for name, code in ZERO_CODES.items() if optim == "adamw_8bit" else ():
        state[name].fill(code)
    scalars = adamw_scalars(1e-3, 0.9, 0.999, 1e-8, 0.1, 1)
    before = [head(array) for array in (master, grads)]
    noise = cupy.asarray(rounding_noise(0, 1)) if optim == "adamw_bf16" else None
    operator, moments = adamw, tuple(state.values())
    if optim == "adamw_8bit":
        operator, moments = adamw_8bit, Moments(*moments)
    arguments = (weights, master, grads, moments, cupy.asarray(scalars), PARAMETERS, noise)
    operator(*arguments)
    zeros = np.zeros(CHECKED_ROWS)
    expected = adamw_ref(*before, zeros, zeros, scalars.astype(np.float64), True)[0]
    error = relative_error(head(master), expected)
    us = time_us(lambda: operator(*arguments))
    nbytes = size(weights) + size(grads) + 2 * size(master, *state.values())
    bad = "" if error < 1e-5 else "  WRONG"
    what = f"{optim}, {dtype} gradients, {PARAMETERS} parameters"
    report(what, us, nbytes, ceiling, f"error {error:.1e}{bad}", True)
    cupy.get_default_memory_pool().free_all_blocks()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--only", default="", help="operators whose name contains this")
    options = parser.parse_args()
    ceiling = copy_gbs()
    print(f"{options.tokens} tokens; a copy: {ceiling:.0f} GB/s")
    for name in OPERATORS:
        if options.only in name:
            measure(name, options.tokens, ceiling)
            cupy.get_default_memory_pool().free_all_blocks()
    for optim in MOMENTS:
        for dtype in ("float32", "bfloat16"):
            if options.only in optim:
                measure_adamw(ceiling, optim, dtype)


if __name__ == "__main__":
    main()
