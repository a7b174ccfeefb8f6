"""The rewards of PPO's tokens: a KL penalty at every token, and the completion's score at its last one.

    k1 = lp - ref                   k3 = exp(ref - lp) - 1 - (ref - lp)
    reward_t = -kl_coef kl_t + score [t is the last token]

k1 and k3 are two estimates of the KL divergence of the policy from the reference at the token that was drawn: the first
may be negative, the second has less variance (Schulman 2020, "Approximating KL divergence"). All arrays are packed;
completion i has tokens cu_seqlens[i]:cu_seqlens[i + 1]. Sources: Ziegler et al. 2019 (arXiv 1909.08593); TRL 1.12's
PPOTrainer, which puts the score of a completion that is shorter than the longest of its batch one position later.
"""

import math

import numpy as np

from rlnumba.kernels.checks import F32, check, check_all, check_bounds
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

THREADS = 128
ESTIMATORS = ("k1", "k3")


@specialize
def ppo_rewards_kernel(estimator):
    """The kernel for "k1" or "k3"."""
    is_k3 = estimator == "k3"

    @cuda.jit
    def ppo_rewards_kernel(logprobs, ref_logprobs, scores, cu_seqlens, kl_coef, kl, rewards):
        """A block owns a completion, a thread every THREADS-th token of it."""
        begin, end = cu_seqlens[cuda.blockIdx.x], cu_seqlens[cuda.blockIdx.x + 1]
        for n in range(begin + cuda.threadIdx.x, end, THREADS):
            change = ref_logprobs[n] - logprobs[n]
            estimate = -change
            if is_k3:
                estimate = np.float32(math.expm1(change)) - change
            kl[n] = estimate
            reward = -kl_coef * estimate
            if n + 1 == end:
                reward += scores[cuda.blockIdx.x]
            rewards[n] = reward

    return ppo_rewards_kernel


def ppo_rewards(logprobs, ref_logprobs, scores, cu_seqlens, kl_coef, estimator, kl, rewards):
    """kl and rewards of packed completions.

    logprobs, ref_logprobs, kl, rewards (N,) and scores (B,) float32; cu_seqlens (B + 1,) int32; estimator "k1" or "k3".
    kl and rewards are written; the score of an empty completion is nowhere. Raises ValueError for other arrays and
    estimators.
    """
    (tokens,) = check("ppo_rewards", "logprobs", logprobs, (None,), F32)
    check_all("ppo_rewards", (tokens,), F32, ref_logprobs=ref_logprobs, kl=kl, rewards=rewards)
    sequences = check_bounds("ppo_rewards", "cu_seqlens", cu_seqlens)
    check("ppo_rewards", "scores", scores, (sequences,), F32)
    if estimator not in ESTIMATORS:
        raise ValueError(f"ppo_rewards: estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")
    if device.name() == "cpu":
        kl[...], rewards[...] = ppo_rewards_ref(logprobs, ref_logprobs, scores, cu_seqlens, kl_coef, estimator)
        return
    kernel = ppo_rewards_kernel(estimator)
    launch(kernel, sequences, THREADS, logprobs, ref_logprobs, scores, cu_seqlens, float(kl_coef), kl, rewards)


def ppo_rewards_ref(logprobs, ref_logprobs, scores, cu_seqlens, kl_coef, estimator):
    """(kl, rewards) of ppo_rewards, in float64."""
    change = ref_logprobs.astype(np.float64) - logprobs
    kl = -change if estimator == "k1" else np.expm1(change) - change
    rewards, filled = -kl_coef * kl, np.diff(cu_seqlens) > 0
    rewards[cu_seqlens[1:][filled] - 1] += scores[filled]
    return kl, rewards
