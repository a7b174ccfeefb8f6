"""The losses of KTO over single completions that are desirable or not, and their derivative by the log-probs.

With x = lp - ref, the sums of a completion's log-probs under the policy less those under the reference, b = beta and
S = sigmoid,

    kto                 1 - S(b (x - k)) where desirable, else 1 - S(b (k - x))              Ethayarajh et al. 2024
                        k: the mean of lp - ref over completions that follow the prompts of others, at least 0; no
                        gradient taken
    apo_zero_unpaired   1 - S(b x) where desirable, else S(b x)                              D'Oosterlinck et al. 2024

    loss = mean over completions of desirable_weight or undesirable_weight times that

All arrays are packed: T tokens, S completions, completion i at cu_seqlens[i]:cu_seqlens[i + 1]. Arithmetic is float32,
sums run in a fixed order. Source of the semantics: TRL 1.16, KTOTrainer._compute_loss.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import F32, I32, check
from rlnumba.kernels.ptx.warp import block_sum
from rlnumba.kernels.rl.preference_loss import (
    THREADS,
    discounted_sum,
    sequence_logps_ref,
    sigmoid_ref,
)
from rlnumba.kernels.rl.scalars import ONE, ZERO, sigmoid
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

# Columns of `stats`: the completion's share of the loss, log-probs, reward b x, and k, which is that of the batch.
LOSS, LOGPS, REWARD, KL = range(4)
STATS = 4


class KTOCompletions(NamedTuple):
    """The packed completions of a micro-batch, and the KL divergence of the whole optimizer batch.

    ref_logps (S,) float32 from sequence_logps; labels (S,) uint8, 1 where desirable; kl_logps, ref_kl_logps (K,)
    float32 of the mismatched completions, both empty for apo_zero_unpaired; cu_seqlens (S + 1,) int32.
    """

    ref_logps: object
    labels: object
    kl_logps: object
    ref_kl_logps: object
    cu_seqlens: object


@specialize
def kto_loss_kernel(loss_type, beta, desirable_weight, undesirable_weight):
    """The kernel for the options of a KTOLossConfig."""
    beta, subtracts_kl = np.float32(beta), loss_type == "kto"
    desirable_weight, undesirable_weight = np.float32(desirable_weight), np.float32(undesirable_weight)

    @cuda.jit
    def kto_loss_kernel(logprobs, ref_logps, labels, kl_logps, ref_kl_logps, cu_seqlens, scale, dlogprobs, stats):
        """A block owns a completion, and adds up the KL divergence, which all share, in the same order as others."""
        scratch = cuda.shared.array(32, np.float32)
        row, thread = cuda.blockIdx.x, cuda.threadIdx.x
        begin, end = cu_seqlens[row], cu_seqlens[row + 1]
        kl = ZERO
        if subtracts_kl:
            for j in range(thread, kl_logps.shape[0], THREADS):
                kl += kl_logps[j] - ref_kl_logps[j]
            kl = block_sum(kl, scratch) / np.float32(kl_logps.shape[0])
            # A NaN stays one.
            if kl < ZERO:
                kl = ZERO
        logp = discounted_sum(logprobs, begin, end, end - begin, ONE, scratch)
        sign, weight = -ONE, undesirable_weight
        if labels[row] != 0:
            sign, weight = ONE, desirable_weight
        log_ratio = logp - ref_logps[row]
        z = sign * beta * (log_ratio - kl)
        miss = sigmoid(-z)
        slope = -sign * beta * weight * scale * sigmoid(z) * miss
        for n in range(begin + thread, end, THREADS):
            dlogprobs[n] = slope
        if thread == 0:
            stats[row, LOSS], stats[row, LOGPS] = scale * weight * miss, logp
            stats[row, REWARD], stats[row, KL] = beta * log_ratio, kl

    return kto_loss_kernel


def kto_loss(logprobs, completions, config, scale, dlogprobs, stats):
    """The KTO loss of one micro-batch of packed completions and its gradient with respect to logprobs.

    logprobs (T,) float32; completions: KTOCompletions; config a KTOLossConfig; scale 1 / completions of the optimizer
    batch. Written: dlogprobs (T,) and stats (S, STATS) float32, whose column LOSS adds up to the loss. Raises
    ValueError for other arrays.
    """
    ref_logps, labels, kl_logps, ref_kl_logps, cu_seqlens = completions
    (tokens,) = check("kto_loss", "logprobs", logprobs, (None,), F32)
    (sequences,) = check("kto_loss", "ref_logps", ref_logps, (None,), F32)
    (rows,) = check("kto_loss", "kl_logps", kl_logps, (None,), F32)
    check("kto_loss", "labels", labels, (sequences,), (np.dtype(np.uint8),))
    check("kto_loss", "ref_kl_logps", ref_kl_logps, (rows,), F32)
    if config.loss_type == "kto" and not rows:
        raise ValueError("kto_loss: kl_logps must have at least one element, got none")
    check("kto_loss", "cu_seqlens", cu_seqlens, (sequences + 1,), I32)
    check("kto_loss", "dlogprobs", dlogprobs, (tokens,), F32)
    check("kto_loss", "stats", stats, (sequences, STATS), F32)
    if device.name() == "cpu":
        dlogprobs[...], stats[...] = kto_loss_ref(logprobs, completions, config, scale)
        return
    kernel = kto_loss_kernel(config.loss_type, config.beta, config.desirable_weight, config.undesirable_weight)
    launch(kernel, sequences, THREADS, logprobs, *completions, float(scale), dlogprobs, stats)


def kto_metrics(stats, labels):
    """TRL's metrics, a dict of floats, of completions from their stats (n, STATS) and labels (n,), on the host.

    A batch without desirable completions, or without others, has no means of those.
    """
    stats, labels = np.asarray(stats, np.float64), np.asarray(labels, bool)
    found = {"kl": float(stats[0, KL])}
    for name, chosen in (("chosen", labels), ("rejected", ~labels)):
        if chosen.any():
            found[f"rewards/{name}"] = float(stats[chosen, REWARD].mean())
            found[f"logps/{name}"] = float(stats[chosen, LOGPS].mean())
    if labels.any() and not labels.all():
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    return found


def kto_loss_ref(logprobs, completions, config, scale):
    """(dlogprobs, stats) of kto_loss, in float64.

    The sums of log-probs are rounded to their dtype, as ref_logps were: equal log-probs then have equal sums.
    """
    ref_logps, labels, kl_logps, ref_kl_logps, cu_seqlens = completions
    owner = np.repeat(np.arange(len(labels)), np.diff(cu_seqlens))
    lp = sequence_logps_ref(logprobs, cu_seqlens).astype(logprobs.dtype).astype(np.float64)
    kl = 0.0
    if config.loss_type == "kto":
        kl = np.maximum(np.mean(np.asarray(kl_logps, np.float64) - ref_kl_logps), 0.0)
    sign = np.where(labels, 1.0, -1.0)
    weight = scale * np.where(labels, config.desirable_weight, config.undesirable_weight)
    log_ratio = lp - ref_logps
    z = sign * config.beta * (log_ratio - kl)
    slope = -sign * config.beta * weight * sigmoid_ref(z) * sigmoid_ref(-z)
    stats = np.stack([weight * sigmoid_ref(-z), lp, config.beta * log_ratio, np.full(len(lp), kl)], axis=1)
    return slope[owner], stats
