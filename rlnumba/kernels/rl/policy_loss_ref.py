"""The policy losses in NumPy and float64: the equations of policy_loss.py, written independently of its kernel."""

import math

import numpy as np

from rlnumba.kernels.rl.policy_loss_config import (
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
    RATIOS,
    SAPO,
    SUMS,
    TOKENS,
    UNCORRECTED,
    VESPO,
    loss_terms,
)


def _correction_ref(terms, difference, owner, by_sequence):
    """Importance weights of rollouts: of tokens, their logarithms' sums of sequences, and, at that level, of sequences.

    difference (T,): old log-probs less the rollout's; owner (T,): its sequences; by_sequence: sums over sequences.
    """
    level, sums = terms.correction_level, by_sequence(difference)
    if not level:
        return np.ones(len(difference)), np.zeros(len(sums)), None
    weights = np.exp(sums if level == "sequence" else difference)
    bounded = np.clip(weights, *terms.correction_range)
    weights = bounded if terms.correction_truncates else np.where(bounded == weights, weights, 0.0)
    logs = np.clip(np.log(np.maximum(weights, 1e-8)), None, 20.0)
    return (weights[owner], logs, weights) if level == "sequence" else (weights, by_sequence(logs), None)


def _bounded_ref(token_range, log_ratio, advantage):
    """(log-ratios of tokens (T,) as gmpo bounds them, whether each is within: 1 or True), by the sign of advantage."""
    if not token_range:
        return log_ratio, 1.0
    low, high = token_range
    is_open = np.where(advantage > 0, ~(log_ratio > high), ~(log_ratio < low))
    return np.where(advantage > 0, np.minimum(log_ratio, high), np.maximum(log_ratio, low)), is_open


def _phi_ref(config, log_weight, is_positive):
    """vespo's weight of tokens (T,), by the logarithms of their sequences' weights and the sign of the advantage."""
    k = np.where(is_positive, config.vespo_k_pos, config.vespo_k_neg)
    lam = np.where(is_positive, config.vespo_lambda_pos, config.vespo_lambda_neg)
    return np.exp(lam + k * log_weight - lam * np.exp(log_weight))


def policy_loss_ref(logprobs, batch, config, scale):
    """(loss, dlogprobs, sequence_stats) of policy_loss, in float64; scale: a float."""
    logprobs, old_logprobs, ref_logprobs, rollout_logprobs = logprobs
    advantages, loss_mask, cu_seqlens, entropy_mask = batch
    terms = loss_terms(config)
    form, (low, high) = terms.form, terms.token_range or terms.ratio_range
    sequences = len(cu_seqlens) - 1
    owner = np.repeat(np.arange(sequences), np.diff(cu_seqlens))
    mask, active = np.asarray(loss_mask, np.float64), loss_mask != 0
    behaviour = old_logprobs if rollout_logprobs is None else rollout_logprobs

    def minus(a, b):
        return np.where(active, a.astype(np.float64) - b, 0.0)

    def by_sequence(values):
        return np.bincount(owner, weights=mask * values, minlength=sequences)

    tokens, log_ratio = by_sequence(1.0), minus(logprobs, old_logprobs)
    divisor, advantage = np.maximum(tokens, 1.0), advantages.astype(np.float64)
    if form in (DPPO, DRO):
        log_ratio = minus(logprobs, behaviour)
    log_ratios_divisor = 1.0 if terms.sums_log_ratios else divisor
    bounded, is_open = _bounded_ref(terms.token_range, log_ratio, advantage)
    ratio = np.exp((by_sequence(bounded) / log_ratios_divisor)[owner] if terms.sequence_level else log_ratio)

    level, difference = terms.correction_level, minus(old_logprobs, behaviour)
    correction, log_correction, sequence_correction = _correction_ref(terms, difference, owner, by_sequence)

    slope = gradient = kl = np.zeros(len(mask))
    if form == CLIP:
        within = np.clip(ratio, *terms.ratio_range)
        capped, clipped = np.minimum(ratio, terms.delta) * advantage, within * advantage
        token_loss = -np.minimum(capped, clipped)
        slope = -advantage * np.where(capped <= clipped, ratio <= terms.delta, within == ratio)
        slope = np.where(np.isnan(ratio), ratio, slope)
    elif form == SAPO:
        tau = np.where(advantage > 0, config.sapo_temperature_pos, config.sapo_temperature_neg)
        gate = 1.0 / (1.0 + np.exp(-tau * (ratio - 1.0)))
        token_loss, slope = -gate * 4.0 / tau * advantage, -4.0 * gate * (1.0 - gate) * advantage
    elif form == DPPO:
        change = np.exp(np.where(active, logprobs, 0.0)) - np.exp(np.where(active, behaviour, 0.0))
        too_far = np.where(advantage > 0, change > config.dppo_mask_high, change < -config.dppo_mask_low)
        slope = np.where(too_far, 0.0, -advantage)
        token_loss = slope * ratio + config.dppo_kl_coef * log_ratio**2
        gradient = 2.0 * config.dppo_kl_coef * log_ratio
    elif form == DRO:
        token_loss = -advantage * np.where(active, logprobs, 0.0) + config.dro_beta / 2.0 * log_ratio**2
        gradient = -advantage + config.dro_beta * log_ratio
    else:
        pull = np.minimum(ratio, high)
        if form == VESPO:
            log_w = np.clip(by_sequence(np.clip(log_ratio, -20.0, 20.0)) + log_correction, math.log(1e-8), 20.0)
            pull = _phi_ref(config, log_w[owner], advantage >= 0)
        gradient = -pull * advantage
        token_loss = gradient * np.where(active, logprobs, 0.0)

    factor = np.ones(len(mask)) if form in UNCORRECTED else correction
    if config.off_policy_mask_threshold is not None:
        far = by_sequence(minus(behaviour, logprobs)) / divisor > config.off_policy_mask_threshold
        factor = np.where(far[owner] & (advantage < 0), 0.0, factor)
    if entropy_mask is not None:
        factor = factor * np.asarray(entropy_mask, np.float64)
    token_loss, gradient, slope = token_loss * factor, gradient * factor, slope * factor
    if config.beta:
        change = minus(ref_logprobs, logprobs)
        kl, kl_slope = np.expm1(change) - change, -np.expm1(change)
        if config.use_bias_correction_kl:
            slope = slope + config.beta * kl
            kl, kl_slope = kl * ratio, kl_slope * ratio
        token_loss, gradient = token_loss + config.beta * kl, gradient + config.beta * kl_slope

    weight = np.where(active, scale / divisor[owner] if terms.per_sequence_mean else scale, 0.0)
    through = np.where(slope == 0, 0.0, weight * slope * np.where(slope == 0, 0.0, ratio))
    if terms.sequence_level:
        through = (by_sequence(through) / log_ratios_divisor)[owner] * is_open
    dlogprobs = mask * (weight * gradient + through)

    value, counts_sequences = (log_ratio, False) if terms.token_range else (ratio, terms.sequence_level)
    ratios, tokens_per_ratio = (np.ones(sequences), divisor) if counts_sequences else (tokens, 1.0)
    clipped_low = by_sequence((value < low) & (advantage < 0)) / tokens_per_ratio
    clipped_high = by_sequence((value > high) & (advantage > 0)) / tokens_per_ratio
    stats = np.zeros((sequences, METRICS))
    stats[:, LOSS], stats[:, KL] = by_sequence(weight * token_loss), by_sequence(kl)
    stats[:, TOKENS], stats[:, RATIOS] = tokens, ratios
    stats[:, CLIPPED_LOW], stats[:, CLIPPED_HIGH] = clipped_low, clipped_high
    stats[:, CLIPPED_LOW_MIN] = np.where(ratios > 0, clipped_low / np.maximum(ratios, 1.0), NOTHING)
    stats[:, CLIPPED_HIGH_MAX] = np.where(ratios > 0, clipped_high / np.maximum(ratios, 1.0), -NOTHING)
    stats[:, DIFFERENCE], stats[:, DIFFERENCE_MAX] = by_sequence(np.abs(difference)), -NOTHING
    np.maximum.at(stats[:, DIFFERENCE_MAX], owner[active], np.abs(difference[active]))
    if level == "sequence":
        stats[:, CORRECTED] = 1.0
        stats[:, [CORRECTION, CORRECTION_MAX, CORRECTION_MIN]] = sequence_correction[:, None]
    else:
        stats[:, CORRECTED], stats[:, CORRECTION] = tokens, by_sequence(correction)
        stats[:, CORRECTION_MAX], stats[:, CORRECTION_MIN] = -NOTHING, NOTHING
        np.maximum.at(stats[:, CORRECTION_MAX], owner[active], correction[active])
        np.minimum.at(stats[:, CORRECTION_MIN], owner[active], correction[active])
    empty = np.diff(cu_seqlens) == 0
    stats[empty], stats[empty, SUMS:EXTREMES], stats[empty, EXTREMES:] = 0, -NOTHING, NOTHING
    return stats[:, LOSS].sum(), dlogprobs, stats
