"""PPO's loss and its derivatives: the clipped surrogate of the policy and the clipped error of the values, in one pass.

A token has the log-prob lp, value v and entropy H; its log-prob, value, advantage and return before the update were
old, V, A and R:

    c = exp(lp - old)                           pg = max(-A c, -A clip(c, 1 - cliprange, 1 + cliprange))
    w = clip(v, V - cliprange_value, V + cliprange_value)           vf = 0.5 max((v - R)^2, (w - R)^2)

    loss = sum over tokens of scale (pg + vf_coef vf - entropy_coef H)

All arrays are float32. logprobs, entropy, values and the outputs have an entry for each of T tokens of a micro-batch;
old_logprobs, advantages, old_values and returns have one for each token of a rollout, and rows (T,) int32 are the
entries of the micro-batch's tokens there, so that a micro-batch of completions in any order is not copied together.

A clipped branch has slope 0. If both branches are equal, the slope is that of the one that is not clipped. The
derivative by an entropy is the constant -entropy_coef scale. Sums are added by each thread in the order of its tokens,
then over its warp, then over the warps in their order; a block writes its own row of `partials`, whose rows the host
adds in float64.

One pass: 40 bytes a token are read and written. A token's row has to be there before four of its numbers can be loaded,
so a thread loads all numbers of several tokens before it computes with the first.

Sources: Schulman et al. 2017 (arXiv 1707.06347); TRL 1.12's PPOTrainer, whose arithmetic and names these are.
"""

import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import F32, I32, check, check_all
from rlnumba.kernels.ptx.warp import device_function, warp_sum
from rlnumba.kernels.rl.scalars import ONE, ZERO, clamp
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

u32 = np.uint32
# Threads of a block, tokens that a thread loads at a time, and blocks at most: eight for each of an H200's 132 SMs, of
# which half are there at a time. All three fix the order of the sums.
THREADS, UNROLL, MAX_BLOCKS = 256, 4, 1056
WARPS, BLOCK_TOKENS = THREADS // 32, THREADS * UNROLL
HALF = np.float32(0.5)

# Columns of partials, each a sum over tokens: pg, vf, 0.5 (lp - old)^2, whether the clipped branch of pg and that of vf
# is the larger one, c, and the entropy.
POLICY, VALUE, APPROX_KL, CLIPPED, VALUE_CLIPPED, RATIO, ENTROPY = range(7)
SUMS = 7


class TokenPredictions(NamedTuple):
    """Arrays (T,) of a micro-batch's tokens as the models that are trained predict them now, float32.

    rows (T,) int32 in [0, N): the entries of RolloutArrays that are theirs.
    """

    logprobs: object
    entropy: object
    values: object
    rows: object


class RolloutArrays(NamedTuple):
    """Arrays (N,) of a batch's tokens, computed before it is trained on, float32."""

    old_logprobs: object
    advantages: object
    old_values: object
    returns: object


class PPOOutputs(NamedTuple):
    """Arrays that ppo_loss writes, float32: dlogprobs, dvalues (T,), and partials (ppo_loss_blocks(T), SUMS).

    ppo_metrics reads the sums of partials.
    """

    dlogprobs: object
    dvalues: object
    partials: object


class PPOTerms(NamedTuple):
    """The constants that ppo_loss_kernel is compiled for."""

    cliprange: float
    cliprange_value: float
    vf_coef: float


def ppo_terms(config):
    """The PPOTerms of a [train] section."""
    return PPOTerms(config.cliprange, config.cliprange_value, config.vf_coef)


@specialize
def ppo_loss_kernel(terms):
    """The kernel for PPOTerms, whose constants are compiled in."""
    low, high = np.float32(1.0 - terms.cliprange), np.float32(1.0 + terms.cliprange)
    value_range, vf_coef = np.float32(terms.cliprange_value), np.float32(terms.vf_coef)

    @device_function
    def policy_terms(log_ratio, advantage):
        """(pg, d pg / d lp, c, whether it is clipped) of a token."""
        ratio = np.float32(math.exp(log_ratio))
        plain, clipped = -advantage * ratio, -advantage * clamp(ratio, low, high)
        if clipped > plain:
            return clipped, ZERO, ratio, ONE
        # A NaN makes both branches and the slope NaN.
        return plain, plain, ratio, ZERO

    @device_function
    def value_terms(value, old_value, target):
        """(vf, d vf / d v, whether it is clipped) of a token."""
        error = value - target
        clipped = clamp(value, old_value - value_range, old_value + value_range) - target
        plain_loss, clipped_loss = error * error, clipped * clipped
        if clipped_loss > plain_loss:
            return HALF * clipped_loss, ZERO, ONE
        return HALF * plain_loss, error, ZERO

    @cuda.jit
    def ppo_loss_kernel(logprobs, entropy, values, rows, rollout, scale, dlogprobs, dvalues, partials):
        """A block owns BLOCK_TOKENS tokens at a time, a thread every THREADS-th of them; block b writes partials[b].

        rollout: RolloutArrays.
        """
        scratch = cuda.shared.array((SUMS, WARPS), np.float32)
        sums = cuda.local.array(SUMS, np.float32)
        now = cuda.local.array((3, UNROLL), np.float32)
        before = cuda.local.array((4, UNROLL), np.float32)
        tokens, thread = logprobs.shape[0], cuda.threadIdx.x
        for i in range(SUMS):
            sums[i] = ZERO
        first = cuda.blockIdx.x * BLOCK_TOKENS + thread
        while first < tokens:
            for i in range(UNROLL):
                # Beyond the end the last token is loaded again: a branch would make loads wait for each other.
                n = u32(min(first + i * THREADS, tokens - 1))
                now[0, i], now[1, i], now[2, i] = logprobs[n], entropy[n], values[n]
                row = u32(rows[n])
                before[0, i], before[1, i] = rollout.old_logprobs[row], rollout.advantages[row]
                before[2, i], before[3, i] = rollout.old_values[row], rollout.returns[row]
            for i in range(UNROLL):
                n = first + i * THREADS
                if n < tokens:
                    log_ratio = now[0, i] - before[0, i]
                    policy, slope, ratio, clipped = policy_terms(log_ratio, before[1, i])
                    value, error, value_clipped = value_terms(now[2, i], before[2, i], before[3, i])
                    dlogprobs[u32(n)] = scale * slope
                    dvalues[u32(n)] = scale * vf_coef * error
                    sums[POLICY] += policy
                    sums[VALUE] += value
                    sums[APPROX_KL] += HALF * log_ratio * log_ratio
                    sums[CLIPPED] += clipped
                    sums[VALUE_CLIPPED] += value_clipped
                    sums[RATIO] += ratio
                    sums[ENTROPY] += now[1, i]
            first += cuda.gridDim.x * BLOCK_TOKENS
        for i in range(SUMS):
            total = warp_sum(sums[i])
            if thread % 32 == 0:
                scratch[i, thread // 32] = total
        cuda.syncthreads()
        if thread < SUMS:
            total = scratch[thread, 0]
            for warp in range(1, WARPS):
                total += scratch[thread, warp]
            partials[cuda.blockIdx.x, thread] = total

    return ppo_loss_kernel


def ppo_loss_blocks(tokens):
    """Rows of `partials` for a micro-batch of this many tokens: int, at least 1."""
    return max(1, min(-(-tokens // BLOCK_TOKENS), MAX_BLOCKS))


def ppo_loss(predictions, rollout, config, scale, outputs):
    """The derivatives of a micro-batch's loss by its log-probs and values, and the sums that make its metrics.

    predictions: TokenPredictions, whose rows are checked on the cpu device alone; rollout: RolloutArrays; config has
    cliprange, cliprange_value and vf_coef; outputs: PPOOutputs, written. Raises ValueError for other arrays.
    """
    logprobs, entropy, values, rows = predictions
    (tokens,) = check("ppo_loss", "logprobs", logprobs, (None,), F32)
    (size,) = check("ppo_loss", "old_logprobs", rollout.old_logprobs, (None,), F32)
    check("ppo_loss", "rows", rows, (tokens,), I32)
    check_all("ppo_loss", (tokens,), F32, entropy=entropy, values=values)
    check_all("ppo_loss", (tokens,), F32, dlogprobs=outputs.dlogprobs, dvalues=outputs.dvalues)
    check_all("ppo_loss", (size,), F32, advantages=rollout.advantages, old_values=rollout.old_values)
    check("ppo_loss", "returns", rollout.returns, (size,), F32)
    check("ppo_loss", "partials", outputs.partials, (ppo_loss_blocks(tokens), SUMS), F32)
    if device.name() == "cpu":
        if tokens and not (rows.min() >= 0 and rows.max() < size):
            raise ValueError(f"ppo_loss: rows must be in [0, {size}), got {rows.min()} to {rows.max()}")
        outputs.dlogprobs[...], outputs.dvalues[...], sums = ppo_loss_ref(predictions, rollout, config, scale)
        outputs.partials[...] = 0
        outputs.partials[0] = sums
        return
    kernel = ppo_loss_kernel(ppo_terms(config))
    launch(kernel, ppo_loss_blocks(tokens), THREADS, *predictions, rollout, float(scale), *outputs)


def ppo_loss_ref(predictions, rollout, config, scale):
    """(dlogprobs, dvalues, sums (SUMS,)) of ppo_loss, in float64."""
    logprobs, entropy, values, rows = predictions
    lp, h, v = (np.asarray(array, np.float64) for array in (logprobs, entropy, values))
    old, advantage, old_v, target = (np.asarray(array, np.float64)[rows] for array in rollout)
    ratio = np.exp(lp - old)
    plain, clipped = -advantage * ratio, -advantage * np.clip(ratio, 1 - config.cliprange, 1 + config.cliprange)
    value_plain = (v - target) ** 2
    near = np.clip(v, old_v - config.cliprange_value, old_v + config.cliprange_value)
    value_clipped = (near - target) ** 2
    dlogprobs = scale * np.where(clipped > plain, 0.0, plain)
    dvalues = scale * config.vf_coef * np.where(value_clipped > value_plain, 0.0, v - target)
    sums = np.zeros(SUMS)
    sums[POLICY], sums[VALUE] = np.maximum(plain, clipped).sum(), 0.5 * np.maximum(value_plain, value_clipped).sum()
    sums[APPROX_KL], sums[RATIO], sums[ENTROPY] = 0.5 * ((lp - old) ** 2).sum(), ratio.sum(), h.sum()
    sums[CLIPPED], sums[VALUE_CLIPPED] = (clipped > plain).sum(), (value_clipped > value_plain).sum()
    return dlogprobs, dvalues, sums


def ppo_metrics(sums, tokens):
    """TRL's metrics of PPO's optimizer steps, a dict of floats: means over micro-batches of means over their tokens.

    sums (n, SUMS): those of n micro-batches, partials added up; tokens (n,): theirs. val/ratio_var divides by n - 1 and
    is NaN for one micro-batch.
    """
    means = np.asarray(sums, np.float64) / np.asarray(tokens, np.float64)[:, None]
    names = {
        "policy/approxkl_avg": APPROX_KL,
        "policy/clipfrac_avg": CLIPPED,
        "policy/entropy_avg": ENTROPY,
        "loss/policy_avg": POLICY,
        "loss/value_avg": VALUE,
        "val/clipfrac_avg": VALUE_CLIPPED,
        "val/ratio": RATIO,
    }
    found = {name: float(means[:, column].mean()) for name, column in names.items()}
    spread = means[:, RATIO].var(ddof=1) if len(means) > 1 else math.nan
    return found | {"val/ratio_var": float(spread)}
