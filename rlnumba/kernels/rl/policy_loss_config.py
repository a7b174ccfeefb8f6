"""The tuples of arrays that policy_loss takes, and the constants of its kernel, from the options of a loss."""

import math
from typing import NamedTuple

import numpy as np

from rlnumba.config import grpo

# Forms of a token's loss as a function of the ratio. All other loss types share the first form.
CLIP, CISPO, SAPO, VESPO, DPPO, DRO = range(6)
OTHER_FORMS = {"cispo": CISPO, "sapo": SAPO, "vespo": VESPO, "dppo": DPPO, "dro": DRO}
# The forms of the loss types without importance weights.
UNCORRECTED = tuple(OTHER_FORMS[name] for name in grpo.UNCORRECTED)

# Columns of `metrics` and `sequence_stats`: sums, then maxima, then minima. RATIOS counts the values that the
# clip columns add up: tokens, or sequences at sequence level; CORRECTED does so for the correction.
LOSS, TOKENS, RATIOS, CLIPPED_LOW, CLIPPED_HIGH, KL, DIFFERENCE, CORRECTED, CORRECTION = range(9)
DIFFERENCE_MAX, CORRECTION_MAX, CLIPPED_HIGH_MAX = range(9, 12)
CORRECTION_MIN, CLIPPED_LOW_MIN = range(12, 14)
SUMS, EXTREMES, METRICS = 9, 12, 14

# Identity of max and, negated, of min; policy_metrics leaves such values out.
NOTHING = np.float32(3.0e38)


class Logprobs(NamedTuple):
    """Log-probs (N,) float32 of the tokens, by whose they are; ref without beta, rollout without a sampler's are None.

    On-policy, old is policy: it counts as a constant.
    """

    policy: object
    old: object
    ref: object = None
    rollout: object = None


class LossBatch(NamedTuple):
    """The packed sequences of a micro-batch: advantages (N,) float32, loss_mask (N,), cu_seqlens (B + 1,) int32.

    loss_mask, float32 or uint8, is 1 where a token is trained on. entropy_mask (N,) float32, 0 or 1, or None for all 1.
    """

    advantages: object
    loss_mask: object
    cu_seqlens: object
    entropy_mask: object = None


class LossOutputs(NamedTuple):
    """Arrays of a micro-batch: loss (1,) is added to; dlogprobs (N,), sequence_stats (B, METRICS), metrics (METRICS,).

    All are float32. The last two have the sums, maxima and minima that policy_metrics turns into named numbers, for
    each sequence and for the micro-batch.
    """

    loss: object
    dlogprobs: object
    sequence_stats: object
    metrics: object


class BySign(NamedTuple):
    """A number for tokens of positive, and one for those of negative advantage."""

    positive: float
    negative: float


class LossTerms(NamedTuple):
    """The constants that policy_loss_kernel is compiled for: those options of a PolicyLossConfig that its loss reads.

    sums_log_ratios: whether the ratio of a sequence is that of the sum of its log-probs, not of their mean.
    ratio_range: (low, high), outside of which a ratio counts as clipped. token_range: the same of a token's log-ratio
    in the mean over its sequence, () without. delta, off_policy_threshold: infinite if not set. sapo_temperature,
    vespo_k, vespo_lambda, dppo_mask (bounds on the change of a probability), dppo_kl_coef, dro_beta: 0 in other forms.
    correction_level: "token", "sequence" or "" for none; correction_truncates: clamped to correction_range, or 0.
    """

    form: int
    sequence_level: bool
    sums_log_ratios: bool
    per_sequence_mean: bool
    ratio_range: tuple[float, float]
    token_range: tuple[float, ...]
    delta: float
    sapo_temperature: BySign
    vespo_k: BySign
    vespo_lambda: BySign
    dppo_mask: BySign
    dppo_kl_coef: float
    dro_beta: float
    beta: float
    bias_correction: bool
    correction_level: str
    correction_truncates: bool
    correction_range: tuple[float, float]
    off_policy_threshold: float
    selects_tokens: bool


def loss_terms(config, selects_tokens=False):
    """The LossTerms of a PolicyLossConfig. selects_tokens: whether there is an entropy_mask."""

    def given(value, default=math.inf):
        return default if value is None else value

    form, bounds_tokens = OTHER_FORMS.get(config.loss_type, CLIP), config.loss_type == "gmpo"
    # cispo caps the ratio itself.
    ratio_range = {CLIP: (1.0 - config.epsilon, 1.0 + config.clip_high), CISPO: (-math.inf, config.clip_high)}
    if bounds_tokens:
        ratio_range = {}
    of_form = {
        SAPO: {"sapo_temperature": BySign(config.sapo_temperature_pos, config.sapo_temperature_neg)},
        VESPO: {
            "vespo_k": BySign(config.vespo_k_pos, config.vespo_k_neg),
            "vespo_lambda": BySign(config.vespo_lambda_pos, config.vespo_lambda_neg),
        },
        DPPO: {
            "dppo_mask": BySign(config.dppo_mask_high, config.dppo_mask_low),
            "dppo_kl_coef": config.dppo_kl_coef,
        },
        DRO: {"dro_beta": config.dro_beta},
    }
    none = dict.fromkeys(("sapo_temperature", "vespo_k", "vespo_lambda", "dppo_mask"), BySign(0.0, 0.0))
    level, _, bounds = (config.importance_sampling_correction or "").partition("_")
    low, high = config.importance_sampling_bounds
    return LossTerms(
        form,
        sequence_level=config.importance_sampling_level != "token" or bounds_tokens,
        sums_log_ratios=config.importance_sampling_level == "sequence_sum",
        per_sequence_mean=config.loss_type in ("grpo", "sapo", "gmpo"),
        ratio_range=ratio_range.get(form, (-math.inf, math.inf)),
        token_range=(-config.epsilon, config.clip_high) if bounds_tokens else (),
        delta=given(config.delta) if form == CLIP else math.inf,
        **(none | {"dppo_kl_coef": 0.0, "dro_beta": 0.0} | of_form.get(form, {})),
        beta=config.beta,
        bias_correction=bool(config.beta) and config.use_bias_correction_kl,
        correction_level=level,
        correction_truncates=bounds == "truncate",
        correction_range=(given(low, -math.inf), given(high)) if level else (),
        off_policy_threshold=given(config.off_policy_mask_threshold),
        selects_tokens=selects_tokens,
    )
