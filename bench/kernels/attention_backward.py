"""The gradient of causal attention against torch's FlashAttention-2 and cuDNN: H16 K8 E128, bfloat16.

    python bench/kernels/attention_backward.py                   check, then the training shapes
    python bench/kernels/attention_backward.py --sweep           every config of the kernel
    python bench/kernels/attention_backward.py --shapes          the training shapes alone
    python bench/kernels/attention_backward.py --unordered       what the fixed order of dq costs (dq is then wrong)

TFLOP/s count 2.5 times the forward's causal GEMMs, as is usual. bar: the rate of torch's FlashAttention-2 on an H200;
aim: 0.8 of cuDNN's. packed: 64 sequences of 128 .. 2048 tokens, compared with equal lengths. RLNUMBA_DEBUG=2 prints the
time of each of the three kernels. The exit code is 1 if an error is too large.
"""

import argparse
import os
import pathlib
import sys
import tempfile

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import cupy
from harness import random_array, relative_error, time_us, torch_time_us
from report import row

from rlnumba.kernels.attention import sm90_backward_producer
from rlnumba.kernels.attention.ops import attention
from rlnumba.kernels.attention.sequences import PackedSequences
from rlnumba.kernels.attention.sm90_backward import attention_backward_sm90
from rlnumba.kernels.attention.sm90_backward_mainloop import AttentionBackwardConfig
from rlnumba.kernels.ptx.warp import device_function
from rlnumba.runtime import device

HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
# Largest relative error: the rounding of p and ds to bfloat16 leaves about 3e-3.
TOLERANCE = 0.01
# Queries of the reference at a time: their scores of 16,384 keys are 128 MiB in float32.
REFERENCE_ROWS = 2048
# Lengths: TFLOP/s of torch's FlashAttention-2, and 0.8 of cuDNN's.
SHAPES = {
    "8 x 2048": ([2048] * 8, 184, 278),
    "4 x 4096": ([4096] * 4, 230, 334),
    "2 x 16384": ([16_384] * 2, 301, 389),
}


class Problem:
    """Random inputs on the GPU, attention's results, and arrays for the gradients."""

    def __init__(self, lengths, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="bfloat16"):
        tokens = sum(lengths)
        self.lengths, self.scale = lengths, head_dim**-0.5
        self.q, self.dout = (random_array(tokens, heads, head_dim, dtype=dtype) for _ in range(2))
        self.k, self.v = (random_array(tokens, kv_heads, head_dim, dtype=dtype) for _ in range(2))
        self.out, self.lse = cupy.empty_like(self.q), cupy.empty((heads, tokens), np.float32)
        self.cu_seqlens = cupy.asarray(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        self.sequences = PackedSequences(self.cu_seqlens, max(lengths))
        attention(self.q, self.k, self.v, self.sequences, self.scale, self.out, self.lse)
        self.gradients = [cupy.full(x.shape, np.nan, x.dtype) for x in (self.q, self.k, self.v)]

    @property
    def flops(self):
        _, heads, head_dim = self.q.shape
        return 2.5 * sum(2 * n * n * heads * head_dim for n in self.lengths)

    def run(self, config=None):
        inputs = self.q, self.k, self.v
        attention_backward_sm90(
            self.dout, inputs, self.out, self.lse, self.sequences, self.scale, self.gradients, config
        )

    def reference(self, sequence, kv_head):
        """(dq, dk, dv) of one key head of a sequence and its query heads, in float32."""
        start, end = (int(x) for x in self.cu_seqlens[sequence : sequence + 2])
        group = self.q.shape[1] // self.k.shape[1]
        heads = slice(kv_head * group, (kv_head + 1) * group)
        q, dout, out = (x[start:end, heads].astype(np.float32) for x in (self.q, self.dout, self.out))
        k, v = (x[start:end, kv_head].astype(np.float32) for x in (self.k, self.v))
        dq, dk, dv = cupy.empty_like(q), cupy.zeros_like(k), cupy.zeros_like(v)
        for h in range(group):
            for first in range(0, end - start, REFERENCE_ROWS):
                rows = slice(first, first + REFERENCE_ROWS)
                own_q, own_dout, own_out = (x[rows, h] for x in (q, dout, out))
                lse = self.lse[kv_head * group + h, start:end, None][rows]
                hidden = cupy.arange(end - start) > cupy.arange(first, first + len(own_q))[:, None]
                s = cupy.where(hidden, np.float32(-np.inf), np.float32(self.scale) * own_q @ k.T)
                p = cupy.exp(s - lse)
                delta = (own_dout * own_out).sum(axis=1, keepdims=True)
                ds = p * (own_dout @ v.T - delta) * np.float32(self.scale)
                dq[rows, h] = ds @ k
                dk += ds.T @ own_q
                dv += p.T @ own_dout
        return dq, dk, dv

    def error(self, sequence, kv_head):
        """The largest of the relative errors of dq, dk, dv against the reference; NaN if one is."""
        start, end = (int(x) for x in self.cu_seqlens[sequence : sequence + 2])
        group = self.q.shape[1] // self.k.shape[1]
        dq, dk, dv = self.gradients
        ours = dq[start:end, kv_head * group : (kv_head + 1) * group], dk[start:end, kv_head], dv[start:end, kv_head]
        # np.max keeps a NaN, which max would not.
        return float(
            np.max([relative_error(a, b) for a, b in zip(ours, self.reference(sequence, kv_head), strict=True)])
        )


def check():
    """Several head sizes and GQA ratios; whether all errors are small and the bits of 20 runs are equal."""
    right = True
    cases = [(64, 4, 4), (80, 4, 2), (96, 6, 2), (128, 16, 8), (128, 8, 1), (48, 6, 6), (256, 4, 2)]
    for head_dim, heads, kv_heads in cases:
        problem = Problem([300, 1, 64, 129, 1500], heads, kv_heads, head_dim)
        problem.run()
        first = [x.copy() for x in problem.gradients]
        # Of a single token, dq and dk are zero but for rounding.
        worst = np.max([problem.error(s, h) for s in (0, 2, 3, 4) for h in range(kv_heads)])
        again = 0
        for _ in range(20):
            problem.run()
            pairs = zip(problem.gradients, first, strict=True)
            again += all(bool((a.view(np.uint16) == b.view(np.uint16)).all()) for a, b in pairs)
        print(f"E{head_dim} H{heads} K{kv_heads}: error {worst:.1e}, same bits {again}/20", flush=True)
        right &= bool(worst < TOLERANCE) and again == 20
    return right


def peers(lengths):
    """{name: microseconds} of torch's backward; empty if torch is not installed."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return {}
    shapes = [(len(lengths), heads, lengths[0], HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(s, dtype=torch.bfloat16, device="cuda", requires_grad=True) for s in shapes)
    dout = torch.randn_like(q)
    times = {}
    for name, backend in (("FA2", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        except RuntimeError as error:
            print(f"{name}: {error}")
            continue

        def backward(out=out):
            torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        times[name] = torch_time_us(backward, 9)
    return times


def report(label, problem, us, note=""):
    print(f"{label:34} {us:9.1f} us  {problem.flops / us / 1e6:6.0f} TFLOP/s  {note}", flush=True)


def candidates():
    for prefetch_scores in (True, False):
        for chains in (8, 16, 32, 64, 1024):
            yield AttentionBackwardConfig(HEAD_DIM, "bfloat16", prefetch_scores, chains)


def shapes(sweep):
    """Whether all errors are small."""
    right = True
    for name, (lengths, bar, aim) in SHAPES.items():
        problem = Problem(lengths)
        problem.run()
        error = problem.error(len(lengths) - 1, KV_HEADS - 1)
        wrong = "" if error < TOLERANCE else ", WRONG"
        right &= not wrong
        us = time_us(problem.run)
        others = peers(lengths)
        for peer, peer_us in others.items():
            report(f"{name} torch {peer}", problem, peer_us)
        report(name, problem, us, f"bar {bar}, aim {aim}, error {error:.1e}{wrong}")
        rates = {"ours": us} | {f"torch {peer}": time for peer, time in others.items()}
        result = ", ".join(f"{what} {problem.flops / time / 1e6:.0f}" for what, time in rates.items())
        row(f"attention backward, {name}", f"TFLOP/s: {result}; error {error:.0e}{wrong}", f"{bar}; aim {aim}")
        for config in candidates() if sweep else ():
            print(f"    {config}")
            report("", problem, time_us(lambda t=config: problem.run(t), 5))
    lengths = np.random.default_rng(0).integers(128, 2049, 64).tolist()
    problem = Problem(lengths)
    us = time_us(problem.run)
    report("packed 64 x U[128, 2048]", problem, us, "0.9 of equal lengths")
    equal = Problem([int(np.mean(lengths))] * 64)
    equal_us = time_us(equal.run)
    report(f"equal 64 x {int(np.mean(lengths))}", equal, equal_us)
    share = problem.flops / us / (equal.flops / equal_us)
    row("attention backward, mixed lengths", f"{share:.2f} of the equal-length rate", "0.9")
    return right


@device_function
def no_wait(semaphores, index, value):
    """Replaces semaphore_wait."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--shapes", action="store_true")
    parser.add_argument("--unordered", action="store_true")
    options = parser.parse_args()
    print(device.describe())
    with tempfile.TemporaryDirectory() as folder:
        if options.unordered:
            # This kernel differs from its source, so it must not be stored in the usual cache of machine code.
            os.environ["RLNUMBA_CACHE_DIR"] = folder
            sm90_backward_producer.semaphore_wait = no_wait
        checked = options.unordered or options.shapes or check()
        right = shapes(options.sweep) or options.unordered
    sys.exit(not (checked and right))
