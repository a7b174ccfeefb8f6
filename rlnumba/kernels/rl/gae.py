"""Generalized advantage estimation (Schulman et al. 2015, "High-dimensional continuous control using GAE").

    delta_t = reward_t + gamma value_{t+1} - value_t          A_t = delta_t + gamma lambda A_{t+1}
    return_t = A_t + value_t

with value and A 0 after the last token of a sequence. The recurrence runs backwards; a warp computes 32 tokens at a
time. With f = gamma lambda, adding f^d times the value of the lane d further on, for d = 1, 2, 4, 8, 16, leaves in
lane l the sum of f^(j - l) delta_j over the lanes j >= l; the later tokens add f^(32 - l) A of the first of them.

All arrays (N,) float32, packed; sequence i is cu_seqlens[i]:cu_seqlens[i + 1].
"""

import numpy as np

from rlnumba.kernels.checks import F32, check, check_all, check_bounds
from rlnumba.kernels.ptx.warp import shuffle, shuffle_down
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch


@cuda.jit
def gae_kernel(rewards, values, cu_seqlens, gamma, lam, advantages, returns):
    """A warp owns a sequence, in chunks of 32 tokens from its end; a lane owns a token of a chunk."""
    lane = cuda.threadIdx.x
    begin, end = cu_seqlens[cuda.blockIdx.x], cu_seqlens[cuda.blockIdx.x + 1]
    factor = gamma * lam
    # f^(32 - lane), as a product of 32 - lane factors.
    reach, carry = np.float32(1.0), np.float32(0.0)
    for _ in range(32 - lane):
        reach *= factor
    for chunk in range((end - begin + 31) // 32):
        n = end - 32 * (chunk + 1) + lane
        # Lanes before the sequence's begin, in its first chunk, add nothing to the lanes after them.
        total = np.float32(0.0)
        if n >= begin:
            total = rewards[n] - values[n]
            if n + 1 < end:
                total += gamma * values[n + 1]
        power = factor
        for distance in (1, 2, 4, 8, 16):
            later = shuffle_down(total, distance)
            if lane + distance < 32:
                total += power * later
            power *= power
        total += reach * carry
        carry = shuffle(total, 0)
        if n >= begin:
            advantages[n] = total
            returns[n] = total + values[n]


def gae(rewards, values, cu_seqlens, gamma, lam, advantages, returns):
    """Advantages and returns of packed sequences of rewards and values.

    rewards, values, advantages, returns (N,) float32, of the completions' tokens alone; cu_seqlens (B + 1,)
    int32. advantages and returns are written; returns are of the advantages before any whitening. Raises
    ValueError for other shapes or dtypes. Source: Schulman et al. 2015, eq. 16; TRL's PPOTrainer.
    """
    (tokens,) = check("gae", "rewards", rewards, (None,), F32)
    check_all("gae", (tokens,), F32, values=values, advantages=advantages, returns=returns)
    sequences = check_bounds("gae", "cu_seqlens", cu_seqlens)
    if device.name() == "cpu":
        advantages[...], returns[...] = gae_ref(rewards, values, cu_seqlens, gamma, lam)
        return
    launch(gae_kernel, sequences, 32, rewards, values, cu_seqlens, float(gamma), float(lam), advantages, returns)


def gae_ref(rewards, values, cu_seqlens, gamma, lam):
    """(advantages, returns) of gae, in float64; all sequences at once, position by position from the end."""
    advantages = np.zeros(len(rewards))
    begins, ends = cu_seqlens[:-1], cu_seqlens[1:]
    carry, next_value = np.zeros(len(begins)), np.zeros(len(begins))
    for back in range(1, np.max(ends - begins, initial=0) + 1):
        valid = ends - back >= begins
        n = ends[valid] - back
        delta = rewards[n] + gamma * next_value[valid] - values[n]
        carry[valid] = delta + gamma * lam * carry[valid]
        next_value[valid] = values[n]
        advantages[n] = carry[valid]
    return advantages, advantages + values
