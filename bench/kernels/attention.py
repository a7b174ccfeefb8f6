"""Attention on Hopper: forward and paged decode, against torch's FlashAttention-2 and cuDNN, config by config.

    python bench/kernels/attention.py                everything below
    python bench/kernels/attention.py forward        packed sequences; TFLOP/s, causal count
    python bench/kernels/attention.py decode         one token a sequence; GB/s of keys and values
    python bench/kernels/attention.py qkv            decode from the fused projection, in one kernel and in two; us
    python bench/kernels/attention.py groups         completions of common prompts
    python bench/kernels/attention.py prefill        chunks against the cache

Each kernel is checked on sampled rows in float64 before it is timed, and decode's rows against the bits of forward; a
wrong result is marked in the output, and the exit code is then 1.
Times are medians of events; decode is replayed as a graph over caches that together exceed L2, with the plan made
beforehand, as the engine makes it once for all layers of a step. Compilation is not timed; the first run compiles about
twenty kernels.
"""

import argparse
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import cupy
from harness import copy_gbs, graph_time_us, random_array, rows_of, time_us, torch_time_us
from report import add_parts, row

from rlnumba.kernels.attention.paged import paged_attention, paged_attention_qkv
from rlnumba.kernels.attention.sequences import PackedSequences, PagedSequences, SharedPrefixes
from rlnumba.kernels.attention.sm90_config import attention_config
from rlnumba.kernels.attention.sm90_decode.config import decode_config
from rlnumba.kernels.attention.sm90_forward import attention_sm90
from rlnumba.kernels.attention.sm90_paged import paged_attention_sm90, plan_decode
from rlnumba.kernels.gemm.ops import linear
from rlnumba.kernels.nn.qkv import HeadNorm, Rotation, qkv_split_to_cache
from rlnumba.kernels.nn.rope import rope_table
from rlnumba.runtime.launch import pdl_scope

H, HK, E, BF16 = 16, 8, 128, "bfloat16"
SCALE = E**-0.5
BLOCK = 16
L2_BYTES = 60 << 20
# Name: lengths, and the targets in TFLOP/s: torch's FlashAttention-2, then 0.8 of cuDNN.
FORWARD = {
    "8 x 2048": ([2048] * 8, 272, 387),
    "4 x 4096": ([4096] * 4, 301, 447),
    "2 x 16384": ([16384] * 2, 333, 516),
}
# Sequences, context, target in GB/s (FlashAttention-3).
DECODE = [(64, 512, 2019), (256, 512, 3126), (256, 1024, 3752), (256, 2048, 4208), (1, 8192, 1500)]


# Messages of failed checks.
mistakes = []


def verdict(right, bad, good=""):
    """`good` if `right`, else `bad`, which is appended to `mistakes`."""
    if not right:
        mistakes.append(bad)
    return good if right else bad


def bounds(lengths):
    return cupy.asarray(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def check_rows(q, k, v, lengths, out, lse, count=40):
    """Worst errors of sampled rows of out, relative to the largest |out|, and of lse, against float64."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rng = np.random.default_rng(0)
    worst = worst_lse = largest = 0.0
    for _ in range(count):
        b = int(rng.integers(len(lengths)))
        token, h = int(rng.integers(starts[b], starts[b + 1])), int(rng.integers(H))
        keys, values = (x[starts[b] : token + 1, h * HK // H].astype(np.float64) for x in (k, v))
        s = SCALE * keys @ q[token, h].astype(np.float64)
        p = cupy.exp(s - s.max())
        expected = p @ values / p.sum()
        # np.maximum keeps a NaN, which max would not.
        worst = np.maximum(worst, float(cupy.abs(out[token, h].astype(np.float64) - expected).max()))
        largest = max(largest, float(cupy.abs(expected).max()))
        worst_lse = np.maximum(worst_lse, abs(float(lse[h, token]) - float(s.max() + cupy.log(p.sum()))))
    return worst / largest, worst_lse


def torch_peers(batch, length):
    """{backend: TFLOP/s} of torch's backends; empty if torch is not installed."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return {}
    q, k, v = (torch.randn(batch, length, h, E, device="cuda", dtype=torch.bfloat16) for h in (H, HK, HK))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    rates = {}
    for name, kind in (("FA2", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):

        def call(kind=kind):
            with sdpa_kernel(kind):
                torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        try:
            rates[name] = flops([length] * batch) / torch_time_us(call) / 1e6
        except RuntimeError as error:
            print(f"{name}: {error}")
    return rates


def flops(lengths):
    """FLOP of the causal forward pass: half of the square of each sequence."""
    return sum(2 * H * E * length * length for length in lengths)


def forward_configs():
    best = attention_config(E, BF16, H // HK)
    yield "best", best
    yield "3 stages", best._replace(stages=3)
    yield "2 stages", best._replace(stages=2)
    yield "neighbours", best._replace(paired=False)
    yield "one segment", best._replace(segment=1 << 20)


def forward():
    print("\nforward, TFLOP/s")
    mixed = np.random.default_rng(1).integers(128, 2049, 64).tolist()
    equal = [round(np.mean(mixed))] * 64
    cases = FORWARD | {"64 x U[128, 2048]": (mixed, None, None), f"64 x {equal[0]}": (equal, None, None)}
    rates = {}
    for name, (lengths, fa2, cudnn) in cases.items():
        tokens = sum(lengths)
        q, k, v = (random_array(tokens, h, E) for h in (H, HK, HK))
        out, lse = cupy.empty_like(q), cupy.empty((H, tokens), np.float32)
        sequences = PackedSequences(bounds(lengths), max(lengths))
        peers = torch_peers(len(lengths), lengths[0]) if fa2 else {}
        now = "  ".join(f"{peer} {rate:.0f}" for peer, rate in peers.items())
        print(f"{name:20} bars: {fa2 or '-'}, {cudnn or '-'}   now: {now or '-'}", flush=True)
        for label, config in forward_configs():
            if label == "one segment" and max(lengths) <= 1024:
                continue

            def call(config=config):
                attention_sm90(q, k, v, sequences, SCALE, out, lse, config)

            out.fill(0)
            call()
            error, lse_error = check_rows(q, k, v, lengths, out, lse)
            us = time_us(call)
            rates[name, label] = flops(lengths) / us / 1e6
            wrong = verdict(error < 0.02 and lse_error < 1e-3, "  WRONG")
            print(
                f"    {label:22} {us:9.1f} us  {rates[name, label]:6.0f} TFLOP/s  "
                f"errors {error:.1e} {lse_error:.1e}{wrong}",
                flush=True,
            )
            if label == "best":
                bar = f"{fa2}; aim {cudnn}" if fa2 else ""
                row(f"attention forward, {name}", f"{rates[name, label]:.0f} TFLOP/s{wrong}; torch {now or '-'}", bar)
    for label, _ in forward_configs():
        a, b = (rates.get((name, label)) for name in list(cases)[-2:])
        if a and b:
            print(f"mixed lengths, {label}: {a / b:.2f} of the equal-length rate (bar 0.90)")
            if label == "best":
                row("attention forward, mixed lengths", f"{a / b:.2f} of the equal-length rate", "0.9")


class Decode:
    """Caches with random content for `sequences` contexts, several copies, and calls that attend to them."""

    def __init__(self, sequences, context, copies=None, tables=None, tokens=1):
        self.nbytes = 2 * sequences * context * HK * E * 2
        copies = copies or 2 + 2 * L2_BYTES // self.nbytes
        width = -(-context // BLOCK)
        blocks = sequences * width
        rng = np.random.default_rng(0)
        self.caches = [[random_array(blocks, BLOCK, HK, E) for _ in range(2)] for _ in range(copies)]
        if tables is None:
            tables = rng.permutation(blocks).astype(np.int32).reshape(sequences, width)
        self.tables = cupy.asarray(tables)
        self.q = random_array(sequences * tokens, H, E)
        self.out = cupy.empty_like(self.q)
        contexts = cupy.full(sequences, context, np.int32)
        self.sequences = PagedSequences(bounds([tokens] * sequences), contexts, self.tables, tokens, context)
        self.context, self.tokens = context, tokens

    def planned(self, config=None, groups=None):
        """The PagedSequences with a plan that is valid until the next call of this."""
        sequences = self.sequences._replace(groups=groups)
        return sequences._replace(plan=plan_decode((BF16, H, HK, E, BLOCK), sequences, config))

    def calls(self, config=None, prefill_config=None, groups=None):
        """Calls for each of the caches, with a plan that is valid until the next call of this or of `planned`."""
        sequences = self.planned(config, groups)

        def make(caches):
            return lambda: paged_attention_sm90(
                self.q, caches, sequences, SCALE, self.out, prefill_config=prefill_config
            )

        return [make(caches) for caches in self.caches]

    def check(self, calls, sequences=(0, -1)):
        """Whether the last rows of some sequences have the bits of the packed form."""
        calls[0]()
        same = True
        for b in sequences:
            k, v = (
                rows_of(cache, self.tables[b]).reshape(-1, HK, E)[: self.context].copy() for cache in self.caches[0]
            )
            q = cupy.zeros((self.context, H, E), k.dtype)
            end = len(self.q) if b == -1 else (b + 1) * self.tokens
            q[-self.tokens :] = self.q[end - self.tokens : end]
            out, lse = cupy.empty_like(q), cupy.empty((H, self.context), np.float32)
            attention_sm90(q, k, v, PackedSequences(bounds([self.context]), self.context), SCALE, out, lse)
            mine = self.out[end - self.tokens : end]
            same &= bool((out[-self.tokens :].view(np.uint16) == mine.view(np.uint16)).all())
        return same


def decode_configs(group_sizes=1):
    best = decode_config(E, BF16, H // HK, BLOCK, group_sizes)
    yield "best", best
    yield "2 stages", best._replace(stages=2)
    yield "5 stages, 1 block", best._replace(stages=5, blocks=1)


def decode():
    print(f"\ndecode, GB/s of keys and values (a copy: {copy_gbs():.0f} read and written)")
    for sequences, context, bar in DECODE:
        work = Decode(sequences, context)
        for label, config in decode_configs():
            calls = work.calls(config)
            same = work.check(calls)
            us = graph_time_us(calls)
            print(
                f"{sequences:4} x {context:5}  {label:22} {us:8.1f} us  {work.nbytes / us / 1e3:6.0f} GB/s  "
                f"(bar {bar})  {verdict(same, 'OTHER BITS', 'bits of forward')}",
                flush=True,
            )
            if label == "best":
                result = f"{work.nbytes / us / 1e3:.0f} GB/s{'' if same else ', OTHER BITS'}"
                row(f"paged decode, {sequences} x {context}", result, f"{bar} GB/s")


class DecodeFromQkv(Decode):
    """Layers of a decode step from the GEMM that makes qkv on; caches hold the earlier tokens, others get the new one.

    norms, tables and matrices as in Qwen3-0.6B, each layer with its own matrix.
    """

    D = 1024

    def __init__(self, sequences, context):
        super().__init__(sequences, context, copies=28)
        self.x = random_array(sequences, self.D)
        self.matrices = [random_array((H + 2 * HK) * E, self.D, scale=self.D**-0.5) for _ in self.caches]
        self.qkv = cupy.empty((sequences, (H + 2 * HK) * E), self.x.dtype)
        self.norm = HeadNorm(random_array(E), random_array(E), 1e-6)
        positions = cupy.full(sequences, context - 1, np.int32)
        self.rotation = Rotation(*map(cupy.asarray, rope_table(context, E, 1e6)), positions)
        slots = self.tables[:, (context - 1) // BLOCK] * BLOCK + (context - 1) % BLOCK
        self.sequences = self.sequences._replace(slot_mapping=slots)

    def calls(self, fused, with_gemm):
        """Calls for each layer, with a plan that is valid until the next call of this."""
        sequences = self.planned()

        def make(matrix, caches):
            def call():
                if with_gemm:
                    linear(self.x, matrix, self.qkv)
                projection = self.qkv, self.norm, self.rotation
                if fused:
                    paged_attention_qkv(*projection, caches, sequences, SCALE, self.out)
                else:
                    qkv_split_to_cache(*projection, sequences.slot_mapping, self.q, caches)
                    paged_attention(self.q, caches, sequences, SCALE, self.out)

            return call

        return [make(*layer) for layer in zip(self.matrices, self.caches, strict=True)]


def qkv():
    """A layer's part of a decode step, from the GEMM that makes qkv to attention's output, in a graph with PDL."""
    print("\ndecode from qkv, us a layer, in a graph of 28 layers with PDL")
    for sequences, context in ((1, 400), (8, 128), (8, 1024), (64, 100), (64, 400), (256, 512)):
        work, times, outputs = DecodeFromQkv(sequences, context), {}, {}
        for with_gemm in (True, False):
            for fused in (False, True):
                calls = work.calls(fused, with_gemm)
                with pdl_scope():
                    times[fused, with_gemm] = graph_time_us(calls)
                outputs[fused] = work.out.view(np.uint16).copy()
        same = bool((outputs[True] == outputs[False]).all())
        wrong = verdict(same, "OTHER BITS")
        two, one = (f"{times[fused, True]:.2f}" for fused in (False, True))
        print(
            f"{sequences:4} x {context:5}  with the GEMM {two} -> {one}   "
            f"without {times[False, False]:.2f} -> {times[True, False]:.2f}  {wrong or 'same bits'}",
            flush=True,
        )
        row(f"decode from qkv, with its GEMM, {sequences} x {context}", f"{one} us in one kernel, {two} in two{wrong}")


def groups():
    """64 prompts of 2,048 tokens with 8 completions each, 256 own tokens; as in the engine's graphs, layer by layer.

    Unshared, each completion reads the prompt's blocks, after the first one mostly from L2; or each completion has
    blocks of its own.
    """
    print("\ngroups: 64 x 8, 2048 common and 256 own tokens")
    prompts, group_sizes, common, own = 64, 8, 2048, 256
    sequences, context = prompts * group_sizes, common + own
    rng = np.random.default_rng(0)
    common_blocks, own_blocks = common // BLOCK, own // BLOCK
    order = rng.permutation(prompts * common_blocks + sequences * own_blocks).astype(np.int32)
    shared = order[: prompts * common_blocks].reshape(prompts, common_blocks).repeat(group_sizes, axis=0)
    tables = np.concatenate([shared, order[prompts * common_blocks :].reshape(sequences, own_blocks)], axis=1)
    with pdl_scope():
        own = graph_time_us(Decode(sequences, context, copies=4).calls())
        work = Decode(sequences, context, copies=4, tables=tables)
        alone = graph_time_us(work.calls())
        planning = graph_time_us([work.planned] * 8)
    print(f"listing work items        {planning:8.1f} us, once for all layers of a step")
    shared_prefix_lens = cupy.full(sequences, common, np.int32)
    leaders = cupy.asarray(np.tile([group_sizes] + [0] * (group_sizes - 1), prompts).astype(np.int32))
    declared = SharedPrefixes(shared_prefix_lens, leaders, group_sizes)
    work.calls()[0]()
    expected = work.out.copy()
    print(f"blocks of their own       {own:8.1f} us\nunshared                  {alone:8.1f} us")
    for label, config in decode_configs(group_sizes):
        calls = work.calls(config, groups=declared)
        work.out.fill(0)
        calls[0]()
        same = bool((work.out.view(np.uint16) == expected.view(np.uint16)).all())
        with pdl_scope():
            us = graph_time_us(calls)
        print(
            f"shared, {label:18} {us:8.1f} us  {alone / us:5.2f} x (bar 2)  {verdict(same, 'OTHER BITS', 'same bits')}",
            flush=True,
        )
        if label == "best":
            result = f"{us:.1f} us, {alone / us:.2f} x the unshared form ({alone:.1f} us)"
            result += f", {own / us:.2f} x blocks of their own ({own:.1f} us){'' if same else ', OTHER BITS'}"
            row("paged decode, 64 prompts of 2,048 with 8 completions of 256", result, "2 x")


def prefill():
    """Chunks of new tokens at the end of a context in the KV cache."""
    print("\nprefill from the cache, TFLOP/s")
    for sequences, context, tokens in ((8, 2048, 2048), (8, 4096, 512), (64, 640, 128)):
        work = Decode(sequences, context, copies=1, tokens=tokens)
        pairs = sum(2 * context - tokens + 1 for _ in range(sequences)) * tokens / 2
        best = attention_config(E, BF16, H // HK, True, BLOCK)
        for label, config in (("best", None), ("two heads", best), ("neighbours", best._replace(paired=False))):
            calls = work.calls(prefill_config=config)
            same = work.check(calls)
            us = time_us(calls[0])
            print(
                f"{sequences:3} x {tokens:4} of {context:4}  {label:10} {us:8.1f} us  "
                f"{4 * H * E * pairs / us / 1e6:6.0f} TFLOP/s  {verdict(same, 'OTHER BITS', 'bits of forward')}",
                flush=True,
            )
            if label == "best":
                result = f"{4 * H * E * pairs / us / 1e6:.0f} TFLOP/s{'' if same else ', OTHER BITS'}"
                row(f"prefill from the cache, {sequences} x {tokens} of {context}", result)


def main():
    parts = {"forward": forward, "decode": decode, "qkv": qkv, "groups": groups, "prefill": prefill}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_parts(parser, parts)
    for name in parser.parse_args().parts:
        parts[name]()
    sys.exit(bool(mistakes))


if __name__ == "__main__":
    main()
