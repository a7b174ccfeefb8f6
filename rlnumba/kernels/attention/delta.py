"""delta[h, n] = dout[n, h] . out[n, h], which attention's gradient subtracts from dP (Dao et al. 2022, algorithm 4)."""

import numpy as np

from rlnumba.kernels.ptx.warp import warp_sum, widen
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

# Threads of a block: one warp a row.
DELTA_THREADS = 128


@cuda.jit
def attention_delta_kernel(dout, out, delta):
    """A warp owns a row (a head of a token), a lane every 32nd column."""
    tokens, heads, head_dim = out.shape
    row = cuda.blockIdx.x * (DELTA_THREADS // 32) + cuda.threadIdx.x // 32
    if row >= tokens * heads:
        return
    total = np.float32(0.0)
    for column in range(cuda.threadIdx.x % 32, head_dim, 32):
        total += widen(dout[row // heads, row % heads, column]) * widen(out[row // heads, row % heads, column])
    total = warp_sum(total)
    if cuda.threadIdx.x % 32 == 0:
        delta[row % heads, row // heads] = total


def attention_delta(dout, out):
    """delta (H, N) float32 of dout and out (N, H, E), which the operator has checked."""
    tokens, heads, _ = out.shape
    delta = device.xp().empty((heads, tokens), np.float32)
    launch(attention_delta_kernel, -(-tokens * heads * 32 // DELTA_THREADS), DELTA_THREADS, dout, out, delta)
    return delta
