"""The mma.sync (sm80) kernels, forced on any GPU since Ampere: GEMMs and attention against the peak of mma.sync.

    python bench/kernels/sm80.py                    everything below, under 90 s after compiling
    python bench/kernels/sm80.py peak               mma.sync from registers alone: the ceiling
    python bench/kernels/sm80.py gemm               training shapes, then few rows, against cuBLAS
    python bench/kernels/sm80.py forward            packed attention, against torch's FlashAttention-2
    python bench/kernels/sm80.py backward           its gradient, in two passes
    python bench/kernels/sm80.py decode             one token a sequence, from a paged KV cache
    python bench/kernels/sm80.py gemm --limit 99    with the configs for 99 KiB of shared memory a block

Each case is checked before it is timed: GEMMs against cuBLAS, attention against float64 on sampled rows, decode
against the bits of the packed form. Every candidate is timed; "<-" marks the one that best_config chooses.
"""

import argparse
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import cupy
from attention import (
    BF16,
    BLOCK,
    DECODE,
    FORWARD,
    HK,
    L2_BYTES,
    SCALE,
    Decode,
    E,
    H,
    bounds,
    check_rows,
    flops,
    torch_peers,
)
from gemm import WEIGHTS, with_backend
from harness import geometric_mean, graph_time_us, random_array, relative_error, rows_of, time_us
from report import add_parts, row

from rlnumba.kernels.attention.ops import attention_backward
from rlnumba.kernels.attention.sequences import PackedSequences
from rlnumba.kernels.attention.sm80_backward import (
    Sm80GradientConfig,
    attention_backward_sm80,
    dkv_config,
    dq_config,
)
from rlnumba.kernels.attention.sm80_decode import Sm80DecodeConfig, decode_config, paged_attention_sm80
from rlnumba.kernels.attention.sm80_forward import Sm80AttentionConfig, attention_config, attention_sm80
from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.gemm.scheduler import GemmProblem
from rlnumba.kernels.gemm.sm80 import gemm_with_config
from rlnumba.kernels.gemm.sm80_config import best_config, configs_for
from rlnumba.kernels.ptx.sm80 import mma
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

ROUNDS = 2000
# Fragments of A, and of B, in a warp of peak_kernel: those of a 64 x 64 tile.
FRAGMENTS = 4


@specialize
def peak_kernel(element):
    """The kernel in which each warp multiplies fragments in its registers."""
    mma_add = mma(element)

    @cuda.jit(launch_bounds=(128, 2))
    def peak_kernel(values, out, rounds):
        a = cuda.local.array(16, np.int32)
        b = cuda.local.array(16, np.int32)
        acc = cuda.local.array(128, np.float32)
        for i in range(16):
            a[i] = values[cuda.threadIdx.x, i]
            b[i] = values[cuda.threadIdx.x, 16 + i]
        for i in range(128):
            acc[i] = np.float32(0.0)
        for _ in range(rounds):
            for i in range(FRAGMENTS):
                for j in range(FRAGMENTS):
                    mma_add(acc, (i * FRAGMENTS + j) * 8, a, 4 * i, b, 4 * j)
        total = np.float32(0.0)
        for i in range(128):
            total += acc[i]
        out[cuda.blockIdx.x * 128 + cuda.threadIdx.x] = total

    return peak_kernel


def peak_tflops():
    """TFLOP/s of mma.sync with operands and accumulators in registers."""
    blocks = 2 * device.sm_count()
    values, out = random_array(128, 64).view(np.int32), cupy.empty(blocks * 128, np.float32)
    us = time_us(lambda: launch(peak_kernel(BF16), blocks, 128, values, out, ROUNDS), 5)
    return blocks * 4 * ROUNDS * FRAGMENTS * FRAGMENTS * 2 * 16 * 16 * 16 / us / 1e6


def peak(limit):
    row("mma.sync from registers", f"{peak_tflops():.0f} TFLOP/s")


def time_once(function, copies):
    """Microseconds of function(copy) for the first copy."""
    return time_us(lambda: function(copies[0]), 5)


def time_rotating(function, copies):
    """Microseconds of function(copy), in a graph of one call for each copy."""
    return graph_time_us([lambda copy=copy: function(copy) for copy in copies], 3)


def gemm_case(label, peer, a, copies, result, kinds, shape, timer, limit, ceiling):
    """Time every candidate for a GEMM of a and each of `copies`; returns the chosen one's (share of the ceiling,
    ratio to cuBLAS)."""
    m, n, k = shape
    result.fill(0)
    with_backend("cublas", lambda: peer(copies[0]))()
    expected = result.copy()
    peer_us = timer(peer, copies)
    chosen = best_config(GemmProblem(m, n, k, BF16, *kinds), device.sm_count(), limit)
    print(f"{label}: cuBLAS {peer_us:.1f} us", flush=True)
    found = None
    for config, blocks in configs_for(BF16, *kinds, False, False, limit):
        if config != chosen and (m > 1024 and config.rows < 64 or m <= 64 and config.rows > 64):
            continue
        result.fill(0)
        gemm_with_config(config, a, copies[0], result)
        error = relative_error(result, expected)
        us = timer(lambda b, config=config: gemm_with_config(config, a, b, result), copies)
        rate = 2 * m * n * k / us / 1e6
        nbytes = a.nbytes + copies[0].nbytes + result.nbytes
        if config == chosen:
            found = rate / ceiling, peer_us / us
        print(
            f"    {config.rows:3} x {config.columns:3}, {config.step:3} a stage, {config.stages} stages,"
            f" {blocks} blocks:"
            f" {us:9.1f} us {rate:5.0f} TFLOP/s  {rate / ceiling:4.2f} of the ceiling  ratio {peer_us / us:5.2f}"
            f"  {nbytes / us / 1e3:5.0f} GB/s  error {error:.1e}{'' if error < 0.01 else '  WRONG'}"
            f"{' <-' if config == chosen else ''}",
            flush=True,
        )
    return found


def gemms(limit):
    ceiling = peak_tflops()
    print(f"\nGEMMs; ceiling {ceiling:.0f} TFLOP/s; bar 0.85 of it where M = 8,192")
    shares = []
    for name in ("0.6B qkv", "0.6B down", "8B o"):
        n, k = WEIGHTS[name]
        m = 8192
        x, w, dout = random_array(m, k), random_array(n, k, scale=0.05), random_array(m, n, scale=0.1)
        y, dx, dw = cupy.empty((m, n), x.dtype), cupy.empty((m, k), x.dtype), cupy.zeros((n, k), np.float32)
        cases = {
            "forward": (lambda w: gemm.linear(x, w, y), x, [w], y, (False, False, "same"), (m, n, k)),
            "dX": (
                lambda w: gemm.linear_backward_input(dout, w, dx),
                dout,
                [w],
                dx,
                (False, True, "same"),
                (m, k, n),
            ),
            "dW": (lambda x: gemm.linear_backward_weight(dout, x, dw), dout, [x], dw, (True, True, "add"), (n, k, m)),
        }
        for what, case in cases.items():
            shares.append(gemm_case(f"{name} {what}", *case, time_once, limit, ceiling))
    share, ratio = (geometric_mean(values) for values in zip(*shares, strict=True))
    row("mma.sync GEMMs of 8,192 rows", f"{share:.3f} of mma.sync's ceiling, {ratio:.3f} of cuBLAS's speed", "0.85")
    for name in ("0.6B o", "0.6B gate-up"):
        n, k = WEIGHTS[name]
        # Together larger than L2, so that weights are read from memory.
        copies = [random_array(n, k, scale=0.05) for _ in range(2 + L2_BYTES // (2 * n * k))]
        for m in (1, 64, 256):
            x = random_array(m, k)
            y = cupy.empty((m, n), x.dtype)
            case = (lambda w: gemm.linear(x, w, y), x, copies, y, (False, False, "same"), (m, n, k))
            gemm_case(f"{name} M={m}", *case, time_rotating, limit, ceiling)


def forward_configs(limit):
    chosen = attention_config(E, BF16, 0, limit)
    others = [
        Sm80AttentionConfig(E, BF16),
        Sm80AttentionConfig(E, BF16, 4, 16, q_in_registers=True),
        Sm80AttentionConfig(E, BF16, 8, 16, 2),
        Sm80AttentionConfig(E, BF16, 8, 16),
    ]
    return [
        chosen,
        *(config for config in others if config != chosen and config.shared_bytes < device.max_shared_bytes() - 64),
    ]


def forward(limit):
    ceiling = peak_tflops()
    print(f"\nattention forward, causal; ceiling {ceiling:.0f} TFLOP/s")
    mixed = np.random.default_rng(1).integers(128, 2049, 64).tolist()
    for name, (lengths, bar, _) in (FORWARD | {"64 x U[128, 2048]": (mixed, None, None)}).items():
        tokens = sum(lengths)
        q, k, v = (random_array(tokens, h, E) for h in (H, HK, HK))
        out, lse = cupy.empty_like(q), cupy.empty((H, tokens), np.float32)
        sequences = PackedSequences(bounds(lengths), max(lengths))
        peers = torch_peers(len(lengths), lengths[0]) if bar else {}
        now = "  ".join(f"{peer} {rate:.0f}" for peer, rate in peers.items())
        print(f"{name}: bar {bar or '-'} (FlashAttention-2)   now: {now or '-'}", flush=True)
        for config in forward_configs(limit):

            def call(config=config):
                attention_sm80(q, k, v, sequences, SCALE, out, lse, config)

            out.fill(0)
            call()
            error, lse_error = check_rows(q, k, v, lengths, out, lse)
            us = time_us(call, 5)
            rate = flops(lengths) / us / 1e6
            print(
                f"    {config.warps} warps of {config.warp_rows}, {config.stages} stages: {us:9.1f} us"
                f" {rate:5.0f} TFLOP/s  {rate / ceiling:4.2f} of the ceiling  errors {error:.1e} {lse_error:.1e}"
                f"{'' if error < 0.02 and lse_error < 1e-3 else '  WRONG'}",
                flush=True,
            )
            if config == attention_config(E, BF16, 0, limit):
                result = f"{rate:.0f} TFLOP/s, {rate / ceiling:.2f} of the ceiling"
                row(f"mma.sync attention forward, {name}", result, bar or "")


def backward(limit):
    """TFLOP/s count 2.5 times the forward's FLOP, though the two passes compute 3.5 times as many."""
    ceiling = peak_tflops()
    print(f"\nattention backward, causal; ceiling {ceiling:.0f} TFLOP/s")
    chosen = dkv_config(E, BF16, limit), dq_config(E, BF16, limit)
    pairs = [chosen]
    for warps, stages, tile_rows in ((8, 2, 64), (8, 2, 32), (4, 1, 64)):
        pairs.append((Sm80GradientConfig(E, BF16, True, warps, stages, tile_rows), chosen[1]))
    for warps, stages in ((4, 1), (4, 2), (8, 2)):
        pairs.append((chosen[0], Sm80GradientConfig(E, BF16, False, warps, stages, in_registers=True)))
    limit = device.max_shared_bytes()
    pairs = [pair for pair in dict.fromkeys(pairs) if all(config.shared_bytes <= limit for config in pair)]
    for name, (lengths, *_) in ({"check, 5 x ragged": ([1, 65, 300, 511, 700],)} | FORWARD).items():
        tokens, sequences = sum(lengths), PackedSequences(bounds(lengths), max(lengths))
        q, dout = (random_array(tokens, H, E) for _ in range(2))
        k, v = (random_array(tokens, HK, E) for _ in range(2))
        out, lse = cupy.empty_like(q), cupy.empty((H, tokens), np.float32)
        attention_sm80(q, k, v, sequences, SCALE, out, lse)
        gradients = [cupy.empty_like(x) for x in (q, k, v)]
        expected = None
        if tokens < 4096:
            expected = [cupy.empty_like(x) for x in (q, k, v)]
            attention_backward(dout, (q, k, v), out, lse, sequences, SCALE, expected)
        print(f"{name}:", flush=True)
        for keys, rows in pairs:

            def call(pair=(keys, rows)):
                attention_backward_sm80(dout, (q, k, v), out, lse, sequences, SCALE, gradients, pair)

            for gradient in gradients:
                gradient.fill(np.nan)
            call()
            note = ""
            if expected is not None:
                errors = [relative_error(mine, wanted) for mine, wanted in zip(gradients, expected, strict=True)]
                note = "errors " + " ".join(f"{error:.1e}" for error in errors)
                note += "" if max(errors) < 0.02 else "  WRONG"
            us = time_us(call, 5)
            rate = 2.5 * flops(lengths) / us / 1e6
            print(
                f"    keys {keys.warps} warps, {keys.rows} rows, {keys.stages} stages;"
                f" rows {rows.warps} warps, {rows.stages} stages: {us:9.1f} us {rate:5.0f} TFLOP/s"
                f"  {1.4 * rate / ceiling:4.2f} of the ceiling  {note}",
                flush=True,
            )
            if (keys, rows) == chosen:
                row(f"mma.sync attention backward, {name}", f"{rate:.0f} TFLOP/s {note}".strip())


def decode(limit):
    print("\ndecode, GB/s of keys and values")
    for sequences, context, bar in DECODE:
        work = Decode(sequences, context)
        caches = [[cache.reshape(-1, HK, E) for cache in pair] for pair in work.caches]

        def calls(config, work=work, caches=caches):
            def make(k, v):
                return lambda: paged_attention_sm80(work.q, k, v, BLOCK, work.sequences, SCALE, work.out, config)

            return [make(*pair) for pair in caches]

        chosen = decode_config(E, BF16, BLOCK, limit)
        for config in [chosen, *(Sm80DecodeConfig(E, BF16, s, BLOCK) for s in (1, 2, 3) if s != chosen.stages)]:
            if config.shared_bytes > device.max_shared_bytes() - 6 * 1024:
                continue
            some = calls(config)
            some[0]()
            # The first sequence again, packed.
            k, v = (rows_of(cache, work.tables[0]).reshape(-1, HK, E)[:context].copy() for cache in work.caches[0])
            q = cupy.zeros((context, H, E), k.dtype)
            q[-1] = work.q[0]
            out, lse = cupy.empty_like(q), cupy.empty((H, context), np.float32)
            attention_sm80(q, k, v, PackedSequences(bounds([context]), context), SCALE, out, lse)
            same = bool((out[-1].view(np.uint16) == work.out[0].view(np.uint16)).all())
            us = graph_time_us(some)
            print(
                f"{sequences:4} x {context:5}  {config.stages} stages {us:8.1f} us"
                f"  {work.nbytes / us / 1e3:6.0f} GB/s  (bar {bar})  {'bits of forward' if same else 'OTHER BITS'}",
                flush=True,
            )
            if config == chosen:
                result = f"{work.nbytes / us / 1e3:.0f} GB/s{'' if same else ', OTHER BITS'}"
                row(f"mma.sync decode, {sequences} x {context}", result, f"{bar} GB/s")


def main():
    parts = {"peak": peak, "gemm": gemms, "forward": forward, "backward": backward, "decode": decode}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_parts(parser, parts)
    parser.add_argument("--limit", type=int, help="KiB of shared memory a block that configs are chosen for")
    options = parser.parse_args()
    limit = min(options.limit * 1024, device.max_shared_bytes()) if options.limit else device.max_shared_bytes()
    for name in options.parts:
        parts[name](limit)


if __name__ == "__main__":
    main()
