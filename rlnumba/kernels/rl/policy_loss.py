"""The policy losses of GRPO and its relatives, and their derivative with respect to the log-probs.

With lp, old, ref and roll the log-probs of these names, mask m, advantage A of the token, importance ratio c,

    c = exp(lp - old)                                    importance_sampling_level "token"
    c = exp(sum(m (lp - old)) / max(sum m, 1))           "sequence": one ratio for all tokens (GSPO)
    c = exp(sum(m (lp - old)))                           "sequence_sum": the ratio of the sequences (RLOO)

    grpo, bnpo, dr_grpo, dapo, luspo   loss_t = -min(min(c, delta) A, clip(c, 1 - epsilon, 1 + epsilon_high) A)
    cispo                              loss_t = -[min(c, epsilon_high)] A lp          []: no gradient taken
    sapo                               loss_t = -sigmoid(tau (c - 1)) 4 / tau A       tau by the sign of A
    vespo                              loss_t = -[exp(lambda + k log w - lambda w)] A lp
                                       log w = clip(sum m clip(lp - old, -20, 20) + log of the correction)
    dppo                              loss_t = -kept c A + dppo_kl_coef (lp - roll)^2       c = exp(lp - roll)
                                       kept = 0 where A > 0 and exp(lp) - exp(roll) > dppo_mask_high, and where
                                       A <= 0 and it is < -dppo_mask_low, else 1: bounds on the probability
    gmpo                               loss_t = -c A      c = exp(sum(m b_t) / max(sum m, 1)), b_t = lp - old, but at
                                       most epsilon_high where A > 0, at least -epsilon where it is not
    dro                                loss_t = -A lp + dro_beta / 2 (lp - roll)^2

    loss = sum over tokens of weight m (keep e correction loss_t + beta kl)
    e = entropy_mask of the token: 0 leaves it out of the surrogate (Wang et al. 2025, high-entropy tokens), else 1
    kl = exp(ref - lp) - (ref - lp) - 1, times c with use_bias_correction_kl
    keep = 0 where A < 0 and the mean of roll - lp over the sequence passes off_policy_mask_threshold, else 1
    correction = exp(old - roll) of the token, or of the sum over the sequence: clipped ("truncate") or 0
                 outside the bounds ("mask"; of a token, with both bounds: IcePop); part of w in vespo, none in dppo
                 and dro

grpo, bnpo, dr_grpo, dapo and luspo differ in the weight of a token: the table is in policy_loss_scale. Masked
tokens are skipped before any exp, so their log-probs may be arbitrary.

All arrays are packed: N tokens, B sequences, sequence i at cu_seqlens[i]:cu_seqlens[i + 1]. Arithmetic is float32,
reductions run in a fixed order. Sources: TRL 1.16 (GRPOTrainer._compute_loss); Shao et al. 2024 (GRPO), Yu et al. 2025
(DAPO), Liu et al. 2025 (Dr. GRPO), Zheng et al. 2025 (GSPO), MiniMax 2025 (CISPO), Ling team 2025 (IcePop), prime-rl
(DPPO), Zhao et al. 2025 (GMPO, arXiv 2507.20673) and verl's geo_mean, Richemond et al. 2024 (DRO, arXiv 2405.19107) in
Tinker's form, of tokens and without a value, Schulman 2020 (KL divergence, "k3").
"""

import math

import numpy as np

from rlnumba.kernels.checks import F32, I32, check, check_all
from rlnumba.kernels.ptx.warp import block_max, block_sum, device_function, warp_max, warp_sum
from rlnumba.kernels.rl.policy_loss_config import (
    CISPO,
    CLIP,
    CLIPPED_HIGH,
    CLIPPED_HIGH_MAX,
    CLIPPED_LOW,
    CLIPPED_LOW_MIN,
    CORRECTED,
    CORRECTION,
    CORRECTION_MAX,
    CORRECTION_MIN,
    DIFFERENCE,
    DIFFERENCE_MAX,
    DPPO,
    DRO,
    EXTREMES,
    KL,
    LOSS,
    METRICS,
    NOTHING,
    OTHER_FORMS,
    RATIOS,
    SAPO,
    SUMS,
    TOKENS,
    UNCORRECTED,
    VESPO,
    Logprobs,
    LossBatch,
    loss_terms,
)
from rlnumba.kernels.rl.policy_loss_ref import policy_loss_ref
from rlnumba.kernels.rl.scalars import ONE, ZERO, clamp
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

# Threads that share a sequence.
THREADS = 128
MASKS = (np.dtype(np.float32), np.dtype(np.uint8))

LOG_RATIO_LIMIT, LOG_SMALLEST = np.float32(20.0), np.float32(math.log(1e-8))


def policy_loss_scale(config, num_sequences, num_tokens, micro_batch_tokens, num_micro_batches):
    """The `scale` of policy_loss for one micro-batch, so that adding up micro-batches gives the step's gradient.

    num_sequences, num_tokens: of the whole optimizer batch (num_tokens: those with mask 1, on all ranks,
    divided by the number of ranks). micro_batch_tokens: tokens with mask 1 of this micro-batch.

    | loss_type          | weight of a token                                                    |
    | ------------------ | -------------------------------------------------------------------- |
    | grpo, sapo, gmpo   | 1 / (num_sequences tokens of its sequence)                           |
    | bnpo               | 1 / (micro_batch_tokens num_micro_batches)                           |
    | dr_grpo            | 1 / (num_sequences max_completion_length)                            |
    | dapo, cispo, vespo | 1 / num_tokens                                                       |
    | dppo, dro          | 1 / num_tokens                                                       |
    | luspo              | 1 / num_sequences                                                    |

    All but bnpo's are independent of how the batch is cut into micro-batches. TRL divides by its micro-batch's
    number of sequences and by the number of micro-batches, which is the same where all have one size.
    """
    if config.loss_type == "bnpo":
        return 1.0 / (max(micro_batch_tokens, 1) * num_micro_batches)
    if config.loss_type == "dr_grpo":
        return 1.0 / (num_sequences * config.max_completion_length)
    if config.loss_type in ("dapo", "cispo", "vespo", "dppo", "dro"):
        return 1.0 / max(num_tokens, 1)
    return 1.0 / num_sequences


@device_function
def bounded_log(ratio):
    """log of a correction for vespo, within its limits; of 0 the lower one."""
    if ratio <= np.float32(1e-8):
        return LOG_SMALLEST
    return clamp(np.float32(math.log(ratio)), LOG_SMALLEST, LOG_RATIO_LIMIT)


def correction_function(terms):
    """The device function that bounds exp(difference), the importance-sampling correction of a log-prob difference."""
    if not terms.correction_level:
        return None
    (low, high), truncates = np.float32(terms.correction_range), terms.correction_truncates

    @device_function
    def correction_of(difference):
        ratio = np.float32(math.exp(difference))
        if truncates:
            return clamp(ratio, low, high)
        return ZERO if ratio < low or ratio > high else ratio

    return correction_of


def token_bounds(terms):
    """Device functions of a token's (log-ratio, advantage): it within gmpo's bounds, and whether it is beyond them."""
    low, high = np.float32(terms.token_range or (-math.inf, math.inf))

    @device_function
    def is_beyond(log_ratio, advantage):
        return log_ratio > high if advantage > ZERO else log_ratio < low

    @device_function
    def bounded(log_ratio, advantage):
        if is_beyond(log_ratio, advantage):
            return high if advantage > ZERO else low
        return log_ratio

    return bounded, is_beyond


def surrogate_function(terms):
    """The device function that computes a token's (loss, d loss / d ratio, d loss / d logprob at a constant ratio)."""
    (low, high), delta = np.float32(terms.ratio_range), np.float32(terms.delta)
    temperature_pos, temperature_neg = np.float32(terms.sapo_temperature)
    (mask_high, mask_low), kl_coef = np.float32(terms.dppo_mask), np.float32(terms.dppo_kl_coef)
    is_cispo, dro_beta, half = terms.form == CISPO, np.float32(terms.dro_beta), np.float32(0.5 * terms.dro_beta)

    @device_function
    def clip(ratio, logprob, advantage, phi):
        # If both branches of the minimum are equal, the slope is that of the first.
        if math.isnan(ratio):
            return ratio, ratio, ZERO
        capped, clipped = min(ratio, delta) * advantage, clamp(ratio, low, high) * advantage
        slope = ZERO
        if capped <= clipped:
            if ratio <= delta:
                slope = -advantage
        elif low <= ratio and ratio <= high:
            slope = -advantage
        return -min(capped, clipped), slope, ZERO

    @device_function
    def cispo_or_vespo(ratio, logprob, advantage, phi):
        gradient = -advantage * (clamp(ratio, low, high) if is_cispo else phi)
        return gradient * logprob, ZERO, gradient

    @device_function
    def sapo(ratio, logprob, advantage, phi):
        temperature = temperature_pos if advantage > ZERO else temperature_neg
        gate = ONE / (ONE + math.exp(-temperature * (ratio - ONE)))
        slope = -advantage * np.float32(4.0) * gate * (ONE - gate)
        return -gate * np.float32(4.0) / temperature * advantage, slope, ZERO

    @device_function
    def dppo(ratio, logprob, advantage, log_ratio):
        change = np.float32(math.exp(logprob)) - np.float32(math.exp(logprob - log_ratio))
        slope, squared = -advantage, log_ratio * log_ratio
        if (advantage > ZERO and change > mask_high) or (advantage <= ZERO and change < -mask_low):
            slope = ZERO
        loss = slope * ratio if slope != ZERO else ZERO
        return cuda.fma(kl_coef, squared, loss), slope, (kl_coef + kl_coef) * log_ratio

    @device_function
    def dro(ratio, logprob, advantage, log_ratio):
        loss = cuda.fma(half, log_ratio * log_ratio, -advantage * logprob)
        return loss, ZERO, cuda.fma(dro_beta, log_ratio, -advantage)

    return {CLIP: clip, SAPO: sapo, DPPO: dppo, DRO: dro}.get(terms.form, cispo_or_vespo)


def sequence_function(terms):
    """The device function that computes what the tokens of a sequence share, from sums over them (pass 1)."""
    correction_of = correction_function(terms)
    vespo, sequence_level, sums = terms.form == VESPO, terms.sequence_level, terms.sums_log_ratios
    correct_tokens, correct_sequence = terms.correction_level == "token", terms.correction_level == "sequence"
    threshold, masks_off_policy = np.float32(terms.off_policy_threshold), terms.off_policy_threshold < math.inf
    (k_pos, k_neg), (lambda_pos, lambda_neg) = np.float32(terms.vespo_k), np.float32(terms.vespo_lambda)
    bounds_tokens, (bounded, _) = bool(terms.token_range), token_bounds(terms)

    @device_function
    def phi_of(log_weight, k, lam):
        return np.float32(math.exp(lam + k * log_weight - lam * np.float32(math.exp(log_weight))))

    @device_function
    def sequence_terms(logprobs, advantages, loss_mask, begin, end, scratch):
        """(tokens, ratio, correction, is_far, phi of A >= 0, of A < 0) of tokens [begin, end); ratio and correction at
        sequence level."""
        tokens = log_ratio = log_ratio_limited = log_correction = log_correction_limited = drift = ZERO
        for n in range(begin + cuda.threadIdx.x, end, THREADS):
            mask = np.float32(loss_mask[n])
            if mask != ZERO:
                change = logprobs.policy[n] - logprobs.old[n]
                difference = logprobs.old[n] - logprobs.rollout[n]
                tokens += mask
                log_ratio += mask * (bounded(change, advantages[n]) if bounds_tokens else change)
                log_ratio_limited += mask * clamp(change, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
                drift += mask * (logprobs.rollout[n] - logprobs.policy[n])
                log_correction += mask * difference
                if vespo and correct_tokens:
                    log_correction_limited += mask * bounded_log(correction_of(difference))
        tokens = block_sum(tokens, scratch)
        divisor = max(tokens, ONE)
        ratio = correction = phi_positive = phi_negative = ONE
        is_far = False
        if sequence_level:
            ratio = np.float32(math.exp(block_sum(log_ratio, scratch) / (ONE if sums else divisor)))
        if masks_off_policy:
            is_far = block_sum(drift, scratch) / divisor > threshold
        if correct_sequence:
            correction = correction_of(block_sum(log_correction, scratch))
        if vespo:
            log_weight = block_sum(log_ratio_limited, scratch)
            if correct_tokens:
                log_weight += block_sum(log_correction_limited, scratch)
            if correct_sequence:
                log_weight += bounded_log(correction)
            log_weight = clamp(log_weight, LOG_SMALLEST, LOG_RATIO_LIMIT)
            phi_positive = phi_of(log_weight, k_pos, lambda_pos)
            phi_negative = phi_of(log_weight, k_neg, lambda_neg)
        return tokens, ratio, correction, is_far, phi_positive, phi_negative

    return sequence_terms


def token_function(terms):
    """The device function that computes a token's loss and the derivatives of it (pass 2)."""
    surrogate = surrogate_function(terms)
    beta, bias_correction = np.float32(terms.beta), terms.bias_correction
    has_kl, corrects = terms.beta != 0, terms.form not in UNCORRECTED
    has_slope = terms.form in (CLIP, SAPO, DPPO) or bias_correction

    @device_function
    def token_terms(ratio, logprob, ref_logprob, advantage, keep, correction, phi):
        """(loss, d loss / d logprob at a constant ratio, d loss / d log ratio, kl) of a token."""
        loss, slope, gradient = surrogate(ratio, logprob, advantage, phi)
        factor = keep * correction if corrects else keep
        loss, slope, gradient = loss * factor, slope * factor, gradient * factor
        kl = ZERO
        if has_kl:
            change = ref_logprob - logprob
            growth = np.float32(math.expm1(change))
            kl, kl_slope = growth - change, -growth
            # Explicit fma: the compiler could fuse the product with factor instead, which rounds differently.
            if bias_correction:
                slope = cuda.fma(kl, beta, slope)
                kl, kl_slope = kl * ratio, kl_slope * ratio
            loss, gradient = cuda.fma(kl, beta, loss), cuda.fma(kl_slope, beta, gradient)
        # A slope of 0 stays 0 where the ratio overflowed.
        through_ratio = slope * ratio if has_slope and slope != ZERO else ZERO
        return loss, gradient, through_ratio, kl

    return token_terms


@specialize
def policy_loss_kernel(terms):
    """The kernel for LossTerms, whose branches and constants are compiled in."""
    sequence_terms, token_terms = sequence_function(terms), token_function(terms)
    correction_of = correction_function(terms)
    correct_tokens, correct_sequence = terms.correction_level == "token", terms.correction_level == "sequence"
    sequence_level, per_sequence_mean, sums = terms.sequence_level, terms.per_sequence_mean, terms.sums_log_ratios
    selects_tokens, (low, high) = terms.selects_tokens, np.float32(terms.token_range or terms.ratio_range)
    to_sampler, bounds_tokens, (_, is_beyond) = terms.form in (DPPO, DRO), bool(terms.token_range), token_bounds(terms)
    counts_sequences = sequence_level and not bounds_tokens

    @cuda.jit
    def policy_loss_kernel(logprobs, advantages, loss_mask, cu_seqlens, entropy_mask, scale, dlogprobs, sequence_stats):
        """A block owns a sequence, a thread every THREADS-th token of it. logprobs: Logprobs.

        Pass 1 sums over the sequence (tokens, log-ratios); pass 2 computes each token's loss and the part of its
        gradient that depends on itself alone; at sequence level pass 3 adds the gradient through the common ratio to
        every token. Sums: a thread's tokens in order, then block_sum. The last block clears what follows its sequence.
        """
        scratch = cuda.shared.array(32, np.float32)
        sequence, thread = cuda.blockIdx.x, cuda.threadIdx.x
        begin, end = cu_seqlens[sequence], cu_seqlens[sequence + 1]
        tokens, sequence_ratio, sequence_correction, is_far, phi_positive, phi_negative = sequence_terms(
            logprobs, advantages, loss_mask, begin, end, scratch
        )
        divisor = max(tokens, ONE)
        weight = scale[0] / divisor if per_sequence_mean else scale[0]
        loss = shared_slope = clipped_low = clipped_high = kl_sum = difference_sum = correction_sum = ZERO
        difference_max = correction_max = -NOTHING
        correction_min = NOTHING
        for n in range(begin + thread, end, THREADS):
            mask, gradient = np.float32(loss_mask[n]), ZERO
            if mask != ZERO:
                ratio, correction, advantage = sequence_ratio, sequence_correction, advantages[n]
                phi = phi_positive if advantage >= ZERO else phi_negative
                if not sequence_level:
                    ratio = np.float32(math.exp(logprobs.policy[n] - logprobs.old[n]))
                difference = logprobs.old[n] - logprobs.rollout[n]
                if correct_tokens:
                    correction = correction_of(difference)
                if to_sampler:
                    phi = logprobs.policy[n] - logprobs.rollout[n]
                    ratio = np.float32(math.exp(phi))
                token_keep = ZERO if is_far and advantage < ZERO else ONE
                if selects_tokens:
                    token_keep *= np.float32(entropy_mask[n])
                token_loss, gradient, through_ratio, kl = token_terms(
                    ratio, logprobs.policy[n], logprobs.ref[n], advantage, token_keep, correction, phi
                )
                if sequence_level:
                    shared_slope += mask * weight * through_ratio
                else:
                    gradient += through_ratio
                gradient *= mask * weight
                loss += mask * weight * token_loss
                kl_sum += mask * kl
                difference_sum += mask * abs(difference)
                difference_max = max(difference_max, abs(difference))
                correction_sum += mask * correction
                correction_max = max(correction_max, correction)
                correction_min = min(correction_min, correction)
                bounded = logprobs.policy[n] - logprobs.old[n] if bounds_tokens else ratio
                clipped_low += mask if advantage < ZERO and bounded < low else ZERO
                clipped_high += mask if advantage > ZERO and bounded > high else ZERO
            dlogprobs[n] = gradient
        if sequence_level:
            shared_slope = block_sum(shared_slope, scratch) / (ONE if sums else divisor)
            # Each thread reads back only what it wrote itself.
            for n in range(begin + thread, end, THREADS):
                mask = np.float32(loss_mask[n])
                if bounds_tokens and is_beyond(logprobs.policy[n] - logprobs.old[n], advantages[n]):
                    mask = ZERO
                if mask != ZERO:
                    dlogprobs[n] += mask * shared_slope
        if sequence == cuda.gridDim.x - 1:
            for n in range(end + thread, dlogprobs.shape[0], THREADS):
                dlogprobs[n] = ZERO

        loss = block_sum(loss, scratch)
        clipped_low = block_sum(clipped_low, scratch)
        clipped_high = block_sum(clipped_high, scratch)
        kl_sum = block_sum(kl_sum, scratch)
        difference_sum = block_sum(difference_sum, scratch)
        difference_max = block_max(difference_max, scratch)
        correction_sum = block_sum(correction_sum, scratch)
        correction_max = block_max(correction_max, scratch)
        correction_min = -block_max(-correction_min, scratch)
        if thread == 0:
            ratios = corrected = tokens
            if counts_sequences:
                ratios = ONE
                # The share of a sequence's tokens: all or none where they have one advantage.
                clipped_low, clipped_high = clipped_low / divisor, clipped_high / divisor
            if correct_sequence:
                corrected = ONE
                correction_sum = correction_max = correction_min = sequence_correction
            if begin == end:
                ratios = corrected = correction_sum = clipped_low = clipped_high = ZERO
                correction_max, correction_min = -NOTHING, NOTHING
            stats = sequence_stats[sequence]
            stats[LOSS], stats[TOKENS], stats[RATIOS], stats[KL] = loss, tokens, ratios, kl_sum
            stats[CLIPPED_LOW], stats[CLIPPED_HIGH] = clipped_low, clipped_high
            stats[DIFFERENCE], stats[DIFFERENCE_MAX] = difference_sum, difference_max
            stats[CORRECTED], stats[CORRECTION] = corrected, correction_sum
            stats[CORRECTION_MAX], stats[CORRECTION_MIN] = correction_max, correction_min
            stats[CLIPPED_HIGH_MAX] = clipped_high / ratios if ratios > ZERO else -NOTHING
            stats[CLIPPED_LOW_MIN] = clipped_low / ratios if ratios > ZERO else NOTHING

    return policy_loss_kernel


@cuda.jit
def reduce_stats_kernel(sequence_stats, loss, metrics):
    """A warp owns a column of sequence_stats (B, METRICS); lane l takes rows l, l + 32, ... in order."""
    column, lane = cuda.blockIdx.x, cuda.threadIdx.x
    value = ZERO if column < SUMS else -NOTHING
    for row in range(lane, sequence_stats.shape[0], 32):
        term = sequence_stats[row, column] if column < EXTREMES else -sequence_stats[row, column]
        value = value + term if column < SUMS else max(value, term)
    value = warp_sum(value) if column < SUMS else warp_max(value)
    if lane == 0:
        metrics[column] = value if column < EXTREMES else -value
        if column == LOSS:
            loss[0] += value


def policy_loss(logprobs, batch, config, scale, outputs):
    """The loss of one micro-batch of packed sequences and its gradient with respect to the policy's log-probs.

    logprobs: Logprobs; batch: LossBatch; config a PolicyLossConfig; scale (1,) float32: policy_loss_scale; outputs:
    LossOutputs, written. Tokens from cu_seqlens[B] on are padding: their dlogprobs are 0; a sequence without any tokens
    is padding, which counts nowhere. Raises ValueError for other arrays, and where config needs those that are None.
    """
    logprobs, sequences = _check_loss(logprobs, batch, config, scale, outputs)
    if device.name() == "cpu":
        end = int(batch.cu_seqlens[-1])
        *of_tokens, entropy_mask = (
            None if array is None else array[:end]
            for array in (*logprobs, batch.advantages, batch.loss_mask, batch.entropy_mask)
        )
        of_batch = LossBatch(*of_tokens[4:], batch.cu_seqlens, entropy_mask)
        result = policy_loss_ref(Logprobs(*of_tokens[:4]), of_batch, config, float(scale[0]))
        total, outputs.dlogprobs[:end], outputs.sequence_stats[...] = result
        outputs.dlogprobs[end:] = 0
        outputs.loss[...] += np.float32(total)
        outputs.metrics[...] = reduce_stats(outputs.sequence_stats)
        return
    *arrays, selected = batch
    kernel = policy_loss_kernel(loss_terms(config, selected is not None))
    selected = logprobs.policy[:0] if selected is None else selected
    stats = outputs.sequence_stats
    launch(kernel, sequences, THREADS, logprobs, *arrays, selected, scale, outputs.dlogprobs, stats)
    launch(reduce_stats_kernel, METRICS, 32, stats, outputs.loss, outputs.metrics)


def _check_loss(logprobs, batch, config, scale, outputs):
    """(Logprobs without None, sequences) of right arguments of policy_loss."""
    policy, old, ref, rollout = logprobs
    (tokens,) = check("policy_loss", "logprobs", policy, (None,), F32)
    check("policy_loss", "advantages", batch.advantages, (tokens,), F32)
    if ref is None:
        if config.beta:
            raise ValueError(f"policy_loss: beta {config.beta} needs ref_logprobs, got None")
        ref = policy
    if rollout is None:
        if config.importance_sampling_correction:
            raise ValueError(f"policy_loss: {config.importance_sampling_correction} needs rollout_logprobs, got None")
        if config.loss_type in ("dppo", "dro"):
            raise ValueError(f"policy_loss: {config.loss_type} needs rollout_logprobs, got None")
        rollout = old
    check_all("policy_loss", (tokens,), F32, old_logprobs=old, ref_logprobs=ref)
    check_all("policy_loss", (tokens,), F32, rollout_logprobs=rollout, dlogprobs=outputs.dlogprobs)
    check("policy_loss", "loss_mask", batch.loss_mask, (tokens,), MASKS)
    (bounds,) = check("policy_loss", "cu_seqlens", batch.cu_seqlens, (None,), I32)
    check_all("policy_loss", (1,), F32, scale=scale, loss=outputs.loss)
    check("policy_loss", "sequence_stats", outputs.sequence_stats, (bounds - 1, METRICS), F32)
    check("policy_loss", "metrics", outputs.metrics, (METRICS,), F32)
    if batch.entropy_mask is not None:
        check("policy_loss", "entropy_mask", batch.entropy_mask, (tokens,), F32)
    return Logprobs(policy, old, ref, rollout), bounds - 1


def reduce_stats(stats):
    """Metrics (METRICS,) of sequences, or of micro-batches, from their rows (n, METRICS), n > 0; on the host."""
    sums, maxima, minima = np.split(stats, [SUMS, EXTREMES], axis=1)
    extremes = maxima.max(axis=0, initial=-NOTHING), minima.min(axis=0, initial=NOTHING)
    return np.concatenate([sums.sum(axis=0), *extremes])


def policy_metrics(stats, config, rollout=False):
    """TRL's metrics, a dict of floats, of an optimizer step from its micro-batches' metrics (n, METRICS), host.

    rollout: whether rollout_logprobs were given. Means are over all tokens of the step (at sequence level, over
    all sequences); low_min and high_max are extremes over sequences. The sum of losses is the step's loss, as
    each micro-batch's scale already divides by the whole. Source of names: TRL's GRPOTrainer.
    """
    total = reduce_stats(np.asarray(stats, np.float64))
    ratios, tokens = max(total[RATIOS], 1.0), max(total[TOKENS], 1.0)
    form, found = OTHER_FORMS.get(config.loss_type, CLIP), {}
    if form == CLIP:
        found["clip_ratio/low_mean"] = total[CLIPPED_LOW] / ratios
        found["clip_ratio/low_min"] = total[CLIPPED_LOW_MIN]
        found["clip_ratio/high_mean"] = total[CLIPPED_HIGH] / ratios
        found["clip_ratio/high_max"] = total[CLIPPED_HIGH_MAX]
        found["clip_ratio/region_mean"] = (total[CLIPPED_LOW] + total[CLIPPED_HIGH]) / ratios
    elif form == CISPO:
        found["cispo_clip_ratio"] = total[CLIPPED_HIGH] / ratios
    if config.beta:
        found["kl"] = total[KL] / tokens
    if rollout:
        found["sampling/sampling_logp_difference/mean"] = total[DIFFERENCE] / tokens
        found["sampling/sampling_logp_difference/max"] = total[DIFFERENCE_MAX]
    if config.importance_sampling_correction:
        found["sampling/importance_sampling_ratio/min"] = total[CORRECTION_MIN]
        found["sampling/importance_sampling_ratio/mean"] = total[CORRECTION] / max(total[CORRECTED], 1.0)
        found["sampling/importance_sampling_ratio/max"] = total[CORRECTION_MAX]
    return {name: float(value) for name, value in found.items() if abs(value) < NOTHING}
