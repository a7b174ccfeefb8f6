"""The losses of DPO and its relatives over pairs of completions, and their derivative by the log-probs.

With lp and ref the sums of a completion's log-probs under the policy and under the reference, c = lp - ref of the
chosen completion, r = lp - ref of the rejected one, n_c and n_r their tokens, b = beta, e = label_smoothing,
S = sigmoid, and F the f_divergence_type's score of a log-ratio (Wang et al. 2023),

    reverse_kl F(x) = x        forward_kl F(x) = 1 - exp(-x)        js_divergence F(x) = log 2 + log S(x)
    alpha_divergence F(x) = (exp((a - 1) x) - 1) / (a - 1), the exponent at most 80

    D = F(c) - F(r), z = b D, and M = F(c) / n_c - F(r) / n_r

    sigmoid        -log S(z)                                              Rafailov et al. 2023 (DPO)
    sigmoid_norm   -log S(b M)                                            Lambert et al. 2024 (Tulu 3)
    hinge          max(1 - z, 0)                                          Zhao et al. 2023 (SLiC)
    ipo            (M - 1 / (2 b))^2                                      Azar et al. 2023
    robust         ((1 - e) (-log S(z)) + e log S(-z)) / (1 - 2 e)        Chowdhury et al. 2024
    exo_pair       S(z) (log S(z) - log(1 - e)) + S(-z) (log S(-z) - log e)                     Ji et al. 2024
    discopop       (1 - m) (-log S(z)) + m exp(-z), m = S(z / discopop_tau)                     Lu et al. 2024
    nca_pair       -log S(b c) - log S(-b c) / 2 - log S(-b r) / 2        Chen et al. 2024
    bco_pair       -log S(b c) - log S(-b r)                              Jung et al. 2024
    sppo_hard      (c - 1 / (2 b))^2 + (r + 1 / (2 b))^2                  Wu et al. 2024
    apo_zero       1 - S(b c) + S(b r)                                    D'Oosterlinck et al. 2024
    apo_down       S(b c) + 1 - S(b (c - r))                              the same
    aot            (1 - e) (-log S(b d)) - e log S(-b d)                  Melnyk et al. 2024
                   d: the k-th smallest lp_c - lp_r of the batch less the k-th smallest ref_c - ref_r
    aot_unpaired   the same with d: the k-th smallest c less the k-th smallest r
    sft            the mean of -log p over the tokens of the chosen completions

    loss = sum over the loss types of weight * mean over pairs
    use_weighting: a pair's loss times w_c w_r, no gradient taken of them                       Zhou et al. 2024 (WPO)
                   w = exp(mean over tokens of log p - log sum q^2), q the probabilities of the vocabulary
    ld_alpha: tokens beyond the shorter completion of a pair count ld_alpha times in lp and ref    Liu et al. 2024

All arrays are packed: T tokens, completion i at cu_seqlens[i]:cu_seqlens[i + 1]. The chosen completions of B pairs come
first; B + i is the rejected one of pair i. Arithmetic is float32, sums run in a fixed order. Source of the semantics:
TRL 1.16, DPOTrainer._compute_loss.
"""

import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import F32, check, check_bounds, unused
from rlnumba.kernels.ptx.warp import block_sum, device_function
from rlnumba.kernels.rl.preference_loss_config import SORTING, preference_terms
from rlnumba.kernels.rl.scalars import ONE, ZERO, log_sigmoid, sigmoid
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

# Threads that share a pair, or a sequence. It fixes the order of the sums.
THREADS = 128
# Columns of `pair_stats`: the pair's share of the loss, log-probs, and rewards beta (lp - ref).
LOSS, CHOSEN_LOGPS, REJECTED_LOGPS, CHOSEN_REWARD, REJECTED_REWARD = range(5)
PAIR_STATS = 5
# Largest exponent of alpha_divergence, as in TRL: e^80 is a float32.
EXPONENT_LIMIT, LARGEST_POWER = np.float32(80.0), np.float32(math.exp(80.0))
HALF, LOG_2 = np.float32(0.5), np.float32(math.log(2.0))
NAN = np.float32(math.nan)


class PackedPairs(NamedTuple):
    """The packed pairs of a micro-batch.

    ref_logps (2 B,) float32 from sequence_logps; cu_seqlens (2 B + 1,) int32. log_sum_sq_probs (T,) float32, log
    sum q^2 over the vocabulary, for use_weighting.
    """

    ref_logps: object
    cu_seqlens: object
    log_sum_sq_probs: object = None


@device_function
def discounted_sum(logprobs, begin, end, shared, alpha, scratch):
    """The sum of tokens [begin, end), those after the first `shared` of them times alpha; the same in every thread."""
    total = ZERO
    for n in range(begin + cuda.threadIdx.x, end, THREADS):
        total += logprobs[n] if n - begin < shared else alpha * logprobs[n]
    return block_sum(total, scratch)


@cuda.jit
def sequence_logps_kernel(logprobs, cu_seqlens, pairs, alpha, logps):
    """A block owns a completion; pairs: how many there are, 0 if the completions are not paired."""
    scratch = cuda.shared.array(32, np.float32)
    sequence = cuda.blockIdx.x
    begin, end = cu_seqlens[sequence], cu_seqlens[sequence + 1]
    shared = end - begin
    if pairs > 0:
        other = sequence + pairs if sequence < pairs else sequence - pairs
        shared = min(shared, cu_seqlens[other + 1] - cu_seqlens[other])
    total = discounted_sum(logprobs, begin, end, shared, alpha, scratch)
    if cuda.threadIdx.x == 0:
        logps[sequence] = total


def score_function(terms):
    """The device function that computes (F(x), F'(x))."""
    coef = np.float32(terms.divergence_coef - 1.0)

    @device_function
    def reverse_kl(x):
        return x, ONE

    @device_function
    def forward_kl(x):
        slope = np.float32(math.exp(-x))
        return ONE - slope, slope

    @device_function
    def js_divergence(x):
        return LOG_2 + log_sigmoid(x), sigmoid(-x)

    @device_function
    def alpha_divergence(x):
        exponent = coef * x
        if exponent > EXPONENT_LIMIT:
            return (LARGEST_POWER - ONE) / coef, ZERO
        slope = np.float32(math.exp(exponent))
        return (slope - ONE) / coef, slope

    return {
        "reverse_kl": reverse_kl,
        "forward_kl": forward_kl,
        "js_divergence": js_divergence,
        "alpha_divergence": alpha_divergence,
    }[terms.divergence]


def margin_function(name, terms):
    """The device function that computes (loss, derivative) from D, from M, or from the d of aot; None for others."""
    beta, epsilon = np.float32(terms.beta), np.float32(terms.label_smoothing)
    target = np.float32(0.5 / terms.beta)
    tau = np.float32(terms.discopop_tau)
    # The two sides' log-probabilities under the smoothed label, and the weights of robust, in float64.
    is_exo, is_robust = name == "exo_pair", name == "robust"
    log_right = np.float32(math.log1p(-terms.label_smoothing)) if is_exo else ZERO
    log_wrong = np.float32(math.log(terms.label_smoothing)) if is_exo else ZERO
    divisor = 1.0 - 2.0 * terms.label_smoothing if is_robust else 1.0
    kept, flipped = np.float32((1.0 - terms.label_smoothing) / divisor), np.float32(terms.label_smoothing / divisor)

    @device_function
    def logistic(margin):
        z = beta * margin
        return -log_sigmoid(z), -beta * sigmoid(-z)

    @device_function
    def hinge(margin):
        rest = ONE - beta * margin
        # A NaN is neither.
        if rest <= ZERO:
            return ZERO, ZERO
        return rest, -beta if rest > ZERO else rest

    @device_function
    def square(margin):
        distance = margin - target
        return distance * distance, (ONE + ONE) * distance

    @device_function
    def robust(margin):
        z = beta * margin
        return flipped * log_sigmoid(-z) - kept * log_sigmoid(z), -beta * (kept * sigmoid(-z) + flipped * sigmoid(z))

    @device_function
    def smoothed(margin):
        z = beta * margin
        right, wrong = ONE - epsilon, epsilon
        loss = -right * log_sigmoid(z) - wrong * log_sigmoid(-z)
        return loss, beta * (wrong * sigmoid(z) - right * sigmoid(-z))

    @device_function
    def exo_pair(margin):
        z = beta * margin
        chosen, rejected = sigmoid(z), sigmoid(-z)
        loss = chosen * (log_sigmoid(z) - log_right) + rejected * (log_sigmoid(-z) - log_wrong)
        return loss, beta * chosen * rejected * (z - log_right + log_wrong)

    @device_function
    def discopop(margin):
        z = beta * margin
        mix, rest = sigmoid(z / tau), sigmoid(-z / tau)
        # exp(-z) and the mix in one exponent: their product is finite where exp(-z) is not.
        exponential = np.float32(math.exp(log_sigmoid(z / tau) - z))
        logistic = -log_sigmoid(z)
        slope = -rest * sigmoid(-z) - exponential + rest * (exponential - mix * logistic) / tau
        return rest * logistic + exponential, beta * slope

    functions = {"hinge": hinge, "ipo": square, "exo_pair": exo_pair, "robust": robust, "discopop": discopop}
    functions |= {"sigmoid": logistic, "sigmoid_norm": logistic, **dict.fromkeys(SORTING, smoothed)}
    return functions.get(name)


def separate_function(name, terms):
    """The device function that computes (loss, d loss / dc, d loss / dr) from c and r; None for other losses."""
    beta, target = np.float32(terms.beta), np.float32(0.5 / terms.beta)

    @device_function
    def nca_pair(c, r):
        chosen, rejected = beta * c, beta * r
        loss = -log_sigmoid(chosen) - HALF * log_sigmoid(-chosen) - HALF * log_sigmoid(-rejected)
        return loss, beta * (HALF * sigmoid(chosen) - sigmoid(-chosen)), beta * HALF * sigmoid(rejected)

    @device_function
    def bco_pair(c, r):
        chosen, rejected = beta * c, beta * r
        return -log_sigmoid(chosen) - log_sigmoid(-rejected), -beta * sigmoid(-chosen), beta * sigmoid(rejected)

    @device_function
    def sppo_hard(c, r):
        chosen, rejected = c - target, r + target
        return chosen * chosen + rejected * rejected, (ONE + ONE) * chosen, (ONE + ONE) * rejected

    @device_function
    def apo_zero(c, r):
        chosen, rejected = beta * c, beta * r
        slope_c, slope_r = sigmoid(chosen) * sigmoid(-chosen), sigmoid(rejected) * sigmoid(-rejected)
        return sigmoid(-chosen) + sigmoid(rejected), -beta * slope_c, beta * slope_r

    @device_function
    def apo_down(c, r):
        chosen, margin = beta * c, beta * (c - r)
        slope, margin_slope = sigmoid(chosen) * sigmoid(-chosen), sigmoid(margin) * sigmoid(-margin)
        return sigmoid(chosen) + sigmoid(-margin), beta * (slope - margin_slope), beta * margin_slope

    functions = {"nca_pair": nca_pair, "bco_pair": bco_pair, "sppo_hard": sppo_hard}
    return (functions | {"apo_zero": apo_zero, "apo_down": apo_down}).get(name)


@device_function
def paired_log_ratio(logps, ref_logps, pair, pairs):
    """lp_c - lp_r."""
    return logps[pair] - logps[pairs + pair]


@device_function
def paired_ref_log_ratio(logps, ref_logps, pair, pairs):
    """ref_c - ref_r."""
    return ref_logps[pair] - ref_logps[pairs + pair]


@device_function
def chosen_log_ratio(logps, ref_logps, pair, pairs):
    """c."""
    return logps[pair] - ref_logps[pair]


@device_function
def rejected_log_ratio(logps, ref_logps, pair, pairs):
    """r."""
    return logps[pairs + pair] - ref_logps[pairs + pair]


def counterpart_function(own, other):
    """The device function that finds the value that has, among those of `other`, the rank of a pair's among `own`'s."""

    @device_function
    def counterpart(logps, ref_logps, pair, pairs, found, scratch):
        """Equal values are ranked in the order of their pairs. NaN if there is none, as among NaNs."""
        value, below = own(logps, ref_logps, pair, pairs), ZERO
        for j in range(cuda.threadIdx.x, pairs, THREADS):
            another = own(logps, ref_logps, j, pairs)
            if another < value or (another == value and j < pair):
                below += ONE
        rank = np.int32(block_sum(below, scratch))
        if cuda.threadIdx.x == 0:
            found[0] = NAN
        cuda.syncthreads()
        for j in range(cuda.threadIdx.x, pairs, THREADS):
            value, position = other(logps, ref_logps, j, pairs), np.int32(0)
            for k in range(pairs):
                another = other(logps, ref_logps, k, pairs)
                if another < value or (another == value and k < j):
                    position += np.int32(1)
            if position == rank and value == value:
                found[0] = value
        cuda.syncthreads()
        value = found[0]
        cuda.syncthreads()
        return value

    return counterpart


def pair_function(name, terms):
    """The device function that computes a pair's (loss, d loss / dc, d loss / dr) for one loss type."""
    margin_terms, separate_terms = margin_function(name, terms), separate_function(name, terms)
    score_of, averages = score_function(terms), name in ("ipo", "sigmoid_norm")
    paired = counterpart_function(paired_log_ratio, paired_ref_log_ratio)
    rejected_like = counterpart_function(chosen_log_ratio, rejected_log_ratio)
    chosen_like = counterpart_function(rejected_log_ratio, chosen_log_ratio)

    @device_function
    def by_margin(c, r, tokens_c, tokens_r, logps, ref_logps, pair, pairs, found, scratch):
        score_c, slope_c = score_of(c)
        score_r, slope_r = score_of(r)
        if averages:
            score_c, slope_c, score_r, slope_r = (
                score_c / tokens_c,
                slope_c / tokens_c,
                score_r / tokens_r,
                slope_r / tokens_r,
            )
        loss, slope = margin_terms(score_c - score_r)
        return loss, slope * slope_c, -slope * slope_r

    @device_function
    def separate(c, r, tokens_c, tokens_r, logps, ref_logps, pair, pairs, found, scratch):
        return separate_terms(c, r)

    @device_function
    def aot(c, r, tokens_c, tokens_r, logps, ref_logps, pair, pairs, found, scratch):
        difference = paired_log_ratio(logps, ref_logps, pair, pairs)
        loss, slope = margin_terms(difference - paired(logps, ref_logps, pair, pairs, found, scratch))
        return loss, slope, -slope

    @device_function
    def aot_unpaired(c, r, tokens_c, tokens_r, logps, ref_logps, pair, pairs, found, scratch):
        loss, slope_c = margin_terms(c - rejected_like(logps, ref_logps, pair, pairs, found, scratch))
        _, slope_r = margin_terms(chosen_like(logps, ref_logps, pair, pairs, found, scratch) - r)
        return loss, slope_c, -slope_r

    return {"aot": aot, "aot_unpaired": aot_unpaired}.get(name, separate if separate_terms else by_margin)


def sum_function(losses, terms):
    """The device function that adds up the pair_functions of ((loss type, weight), ...), of which there is one."""
    (name, weight), *others = losses
    first, factor = pair_function(name, terms), np.float32(weight)
    if not others:

        @device_function
        def weighted(c, r, tokens_c, tokens_r, logps, ref_logps, pair, pairs, found, scratch):
            loss, slope_c, slope_r = first(c, r, tokens_c, tokens_r, logps, ref_logps, pair, pairs, found, scratch)
            return factor * loss, factor * slope_c, factor * slope_r

        return weighted
    rest = sum_function(others, terms)

    @device_function
    def added(c, r, tokens_c, tokens_r, logps, ref_logps, pair, pairs, found, scratch):
        loss, slope_c, slope_r = first(c, r, tokens_c, tokens_r, logps, ref_logps, pair, pairs, found, scratch)
        other = rest(c, r, tokens_c, tokens_r, logps, ref_logps, pair, pairs, found, scratch)
        return factor * loss + other[0], factor * slope_c + other[1], factor * slope_r + other[2]

    return added


@specialize
def preference_loss_kernel(terms):
    """The kernel for PreferenceTerms, whose branches and constants are compiled in."""
    pair_losses = [(name, weight) for name, weight in terms.losses if name != "sft"]
    pair_terms = sum_function(pair_losses, terms) if pair_losses else None
    sft_weight = np.float32(sum(weight for name, weight in terms.losses if name == "sft"))
    has_pair_terms, has_sft = bool(pair_losses), any(name == "sft" for name, _ in terms.losses)
    sorts = any(name in SORTING for name, _ in terms.losses)
    beta, alpha, weighs = np.float32(terms.beta), np.float32(terms.ld_alpha), terms.use_weighting

    @cuda.jit
    def preference_loss_kernel(
        logprobs, logps, ref_logps, log_sum_sq_probs, cu_seqlens, scale, token_scale, dlogprobs, pair_stats
    ):
        """A block owns a pair: sums over its tokens, then its loss in every thread, then the tokens' derivatives.

        logps is read only by losses that sort. Sums: a thread's tokens in order, then block_sum.
        """
        scratch, found = cuda.shared.array(32, np.float32), cuda.shared.array(1, np.float32)
        pair, pairs, thread = cuda.blockIdx.x, pair_stats.shape[0], cuda.threadIdx.x
        begin_c, end_c = cu_seqlens[pair], cu_seqlens[pair + 1]
        begin_r, end_r = cu_seqlens[pairs + pair], cu_seqlens[pairs + pair + 1]
        shared = min(end_c - begin_c, end_r - begin_r)
        tokens_c, tokens_r = np.float32(max(end_c - begin_c, 1)), np.float32(max(end_r - begin_r, 1))
        if sorts:
            chosen, rejected = logps[pair], logps[pairs + pair]
        else:
            chosen = discounted_sum(logprobs, begin_c, end_c, shared, alpha, scratch)
            rejected = discounted_sum(logprobs, begin_r, end_r, shared, alpha, scratch)
        c, r = chosen - ref_logps[pair], rejected - ref_logps[pairs + pair]
        loss = slope_c = slope_r = ZERO
        if has_pair_terms:
            factor = scale
            loss, slope_c, slope_r = pair_terms(c, r, tokens_c, tokens_r, logps, ref_logps, pair, pairs, found, scratch)
            if weighs:
                excess_c = excess_r = ZERO
                for n in range(begin_c + thread, end_c, THREADS):
                    excess_c += logprobs[n] - log_sum_sq_probs[n]
                for n in range(begin_r + thread, end_r, THREADS):
                    excess_r += logprobs[n] - log_sum_sq_probs[n]
                excess_c, excess_r = block_sum(excess_c, scratch), block_sum(excess_r, scratch)
                factor *= np.float32(math.exp(excess_c / tokens_c)) * np.float32(math.exp(excess_r / tokens_r))
            loss, slope_c, slope_r = loss * factor, slope_c * factor, slope_r * factor
        each = ZERO
        if has_sft:
            each = -token_scale * sft_weight
            loss += each * discounted_sum(logprobs, begin_c, end_c, end_c - begin_c, ONE, scratch)
        for n in range(begin_c + thread, end_c, THREADS):
            dlogprobs[n] = each + (slope_c if n - begin_c < shared else alpha * slope_c)
        for n in range(begin_r + thread, end_r, THREADS):
            dlogprobs[n] = slope_r if n - begin_r < shared else alpha * slope_r
        if thread == 0:
            stats = pair_stats[pair]
            stats[LOSS], stats[CHOSEN_LOGPS], stats[REJECTED_LOGPS] = loss, chosen, rejected
            stats[CHOSEN_REWARD], stats[REJECTED_REWARD] = beta * c, beta * r

    return preference_loss_kernel


def sequence_logps(logprobs, cu_seqlens, logps, ld_alpha=None):
    """logps (S,) = the sums of the completions' log-probs, in the order of the sums of preference_loss and kto_loss.

    logprobs (T,), logps float32; cu_seqlens (S + 1,) int32. ld_alpha: None, or the factor of tokens beyond the shorter
    completion of a pair; then S is 2 B, the chosen ones first. Raises ValueError for other arrays.
    """
    check("sequence_logps", "logprobs", logprobs, (None,), F32)
    sequences = check_bounds("sequence_logps", "cu_seqlens", cu_seqlens)
    check("sequence_logps", "logps", logps, (sequences,), F32)
    if device.name() == "cpu":
        logps[...] = sequence_logps_ref(logprobs, cu_seqlens, ld_alpha)
        return
    pairs, alpha = (0, 1.0) if ld_alpha is None else (sequences // 2, float(ld_alpha))
    launch(sequence_logps_kernel, sequences, THREADS, logprobs, cu_seqlens, pairs, alpha, logps)


def preference_loss(logprobs, pairs, config, scale, token_scale, dlogprobs, pair_stats):
    """The loss of one micro-batch of packed pairs and its gradient with respect to logprobs.

    logprobs (T,) float32; pairs: PackedPairs; config a PreferenceLossConfig. So that micro-batches add up, scale is
    1 / pairs and token_scale (of sft) 1 / chosen tokens of the whole optimizer batch; aot sorts the pairs of one call.
    Written: dlogprobs (T,) and pair_stats (B, PAIR_STATS) float32, whose column LOSS adds up to the loss. Raises
    ValueError for other arrays.
    """
    ref_logps, cu_seqlens, log_sum_sq_probs = pairs
    (tokens,) = check("preference_loss", "logprobs", logprobs, (None,), F32)
    count, _ = check("preference_loss", "pair_stats", pair_stats, (None, PAIR_STATS), F32)
    check("preference_loss", "ref_logps", ref_logps, (2 * count,), F32)
    if check_bounds("preference_loss", "cu_seqlens", cu_seqlens) != 2 * count:
        raise ValueError(f"preference_loss: cu_seqlens must have {2 * count + 1} elements, got {cu_seqlens.shape[0]}")
    check("preference_loss", "dlogprobs", dlogprobs, (tokens,), F32)
    if config.use_weighting:
        if log_sum_sq_probs is None:
            raise ValueError("preference_loss: use_weighting needs log_sum_sq_probs, got None")
        check("preference_loss", "log_sum_sq_probs", log_sum_sq_probs, (tokens,), F32)
    else:
        log_sum_sq_probs = unused(1, np.float32)
    if device.name() == "cpu":
        dlogprobs[...], pair_stats[...] = preference_loss_ref(logprobs, pairs, config, scale, token_scale)
        return
    terms, logps = preference_terms(config), unused(1, np.float32)
    if any(name in SORTING for name in config.loss_type):
        logps = device.xp().empty(2 * count, np.float32)
        sequence_logps(logprobs, cu_seqlens, logps, config.ld_alpha)
    arrays = logprobs, logps, ref_logps, log_sum_sq_probs, cu_seqlens
    kernel = preference_loss_kernel(terms)
    launch(kernel, count, THREADS, *arrays, float(scale), float(token_scale), dlogprobs, pair_stats)


def preference_metrics(stats):
    """TRL's metrics, a dict of floats, of pairs from their pair_stats (n, PAIR_STATS), n > 0, on the host."""
    _, chosen_logps, rejected_logps, chosen, rejected = np.asarray(stats, np.float64).T
    return {
        "rewards/chosen": float(chosen.mean()),
        "rewards/rejected": float(rejected.mean()),
        "rewards/accuracies": float((chosen > rejected).mean()),
        "rewards/margins": float((chosen - rejected).mean()),
        "logps/chosen": float(chosen_logps.mean()),
        "logps/rejected": float(rejected_logps.mean()),
    }


def log_sigmoid_ref(x):
    """log(sigmoid(x)), float64."""
    return -np.logaddexp(0.0, -x)


def sigmoid_ref(x):
    """sigmoid(x), float64."""
    return np.exp(log_sigmoid_ref(x))


def _token_weights(cu_seqlens, ld_alpha):
    """(owner (T,), weight of a token in its completion's sum (T,) float64)."""
    lengths = np.diff(cu_seqlens)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    if ld_alpha is None:
        return owner, np.ones(len(owner))
    shared = np.tile(np.minimum(*np.split(lengths, 2)), 2)
    position = np.arange(len(owner)) - np.asarray(cu_seqlens)[owner]
    return owner, np.where(position < shared[owner], 1.0, ld_alpha)


def sequence_logps_ref(logprobs, cu_seqlens, ld_alpha=None):
    """(S,) float64: logps of sequence_logps."""
    owner, weight = _token_weights(cu_seqlens, ld_alpha)
    return np.bincount(owner, weights=weight * np.asarray(logprobs, np.float64), minlength=len(cu_seqlens) - 1)


def _scores_ref(x, config):
    """(F(x), F'(x)) of config.f_divergence_type."""
    coef = config.f_alpha_divergence_coef - 1.0
    if config.f_divergence_type == "forward_kl":
        return 1.0 - np.exp(-x), np.exp(-x)
    if config.f_divergence_type == "js_divergence":
        return np.log(2.0) + log_sigmoid_ref(x), sigmoid_ref(-x)
    if config.f_divergence_type == "alpha_divergence" and abs(coef) >= 1e-6:
        power = np.exp(np.minimum(coef * x, 80.0))
        return (power - 1.0) / coef, np.where(coef * x <= 80.0, power, 0.0)
    return x, np.ones_like(x)


def _pair_losses_ref(name, c, r, lp, ref, lengths, config):
    """(loss, d loss / dc, d loss / dr), each (B,), of one loss type but sft; lp, ref, lengths (2, B)."""
    beta, epsilon, target = config.beta, config.label_smoothing, 0.5 / config.beta
    (score_c, slope_c), (score_r, slope_r) = (_scores_ref(x, config) for x in (c, r))
    if name in ("ipo", "sigmoid_norm"):
        score_c, slope_c, score_r, slope_r = (
            array / count for count, arrays in zip(lengths, ((score_c, slope_c), (score_r, slope_r)), strict=True)
            for array in arrays
        )  # fmt: skip
    margin = score_c - score_r
    if name in SORTING:
        first, second = (lp[0] - lp[1], ref[0] - ref[1]) if name == "aot" else (c, r)
        ranks = [np.argsort(np.argsort(each, kind="stable"), kind="stable") for each in (first, second)]
        # The margin at a pair's rank among the first, and among the second.
        at_rank = np.sort(first) - np.sort(second)
        margin, other = at_rank[ranks[0]], at_rank[ranks[0] if name == "aot" else ranks[1]]
    z, b_c, b_r = beta * margin, beta * c, beta * r
    up, down = sigmoid_ref(z), sigmoid_ref(-z)
    if name in ("sigmoid", "sigmoid_norm"):
        loss, slope = -log_sigmoid_ref(z), -beta * down
    elif name == "hinge":
        loss, slope = np.maximum(1.0 - z, 0.0), np.where(z < 1.0, -beta, 0.0)
    elif name == "ipo":
        loss, slope = (margin - target) ** 2, 2.0 * (margin - target)
    elif name == "robust":
        loss = (epsilon * log_sigmoid_ref(-z) - (1.0 - epsilon) * log_sigmoid_ref(z)) / (1.0 - 2.0 * epsilon)
        slope = -beta * ((1.0 - epsilon) * down + epsilon * up) / (1.0 - 2.0 * epsilon)
    elif name == "exo_pair":
        chosen, rejected = log_sigmoid_ref(z) - np.log1p(-epsilon), log_sigmoid_ref(-z) - np.log(epsilon)
        loss, slope = up * chosen + down * rejected, beta * up * down * (chosen - rejected)
    elif name == "discopop":
        tau = config.discopop_tau
        mix, rest, power = sigmoid_ref(z / tau), sigmoid_ref(-z / tau), np.exp(log_sigmoid_ref(z / tau) - z)
        loss = rest * -log_sigmoid_ref(z) + power
        slope = beta * (-rest * down - power + (rest * power + mix * rest * log_sigmoid_ref(z)) / tau)
    elif name in SORTING:
        loss = -(1.0 - epsilon) * log_sigmoid_ref(z) - epsilon * log_sigmoid_ref(-z)
        slopes = [beta * (epsilon * sigmoid_ref(beta * each) - (1.0 - epsilon) * sigmoid_ref(-beta * each))
                  for each in (margin, other)]  # fmt: skip
        return loss, slopes[0], -slopes[1]
    elif name == "nca_pair":
        loss = -log_sigmoid_ref(b_c) - 0.5 * log_sigmoid_ref(-b_c) - 0.5 * log_sigmoid_ref(-b_r)
        return loss, beta * (0.5 * sigmoid_ref(b_c) - sigmoid_ref(-b_c)), 0.5 * beta * sigmoid_ref(b_r)
    elif name == "bco_pair":
        return -log_sigmoid_ref(b_c) - log_sigmoid_ref(-b_r), -beta * sigmoid_ref(-b_c), beta * sigmoid_ref(b_r)
    elif name == "sppo_hard":
        return (c - target) ** 2 + (r + target) ** 2, 2.0 * (c - target), 2.0 * (r + target)
    else:
        bell_c, bell_r = (sigmoid_ref(x) * sigmoid_ref(-x) for x in (b_c, b_r))
        if name == "apo_zero":
            return sigmoid_ref(-b_c) + sigmoid_ref(b_r), -beta * bell_c, beta * bell_r
        bell = sigmoid_ref(b_c - b_r) * sigmoid_ref(b_r - b_c)
        return sigmoid_ref(b_c) + sigmoid_ref(b_r - b_c), beta * (bell_c - bell), beta * bell
    return loss, slope * slope_c, -slope * slope_r


def preference_loss_ref(logprobs, pairs, config, scale, token_scale):
    """(dlogprobs, pair_stats) of preference_loss, in float64.

    The sums of log-probs are rounded to their dtype, as ref_logps were: equal log-probs then have equal sums.
    """
    ref_logps, cu_seqlens, log_sum_sq_probs = pairs
    lp = sequence_logps_ref(logprobs, cu_seqlens, config.ld_alpha).astype(logprobs.dtype).astype(np.float64)
    lp, ref = lp.reshape(2, -1), np.asarray(ref_logps, np.float64).reshape(2, -1)
    logprobs = np.asarray(logprobs, np.float64)
    owner, token_weight = _token_weights(cu_seqlens, config.ld_alpha)
    lengths = np.maximum(np.diff(cu_seqlens), 1).reshape(2, -1)
    c, r = lp - ref
    pairs = len(c)
    weight = np.ones(pairs)
    if config.use_weighting:
        excess = np.bincount(owner, weights=logprobs - log_sum_sq_probs, minlength=2 * pairs).reshape(2, -1)
        weight = np.exp(excess / lengths).prod(axis=0)
    loss, slopes, is_chosen = np.zeros(pairs), np.zeros((2, pairs)), owner < pairs
    dlogprobs = np.zeros(len(logprobs))
    for name, factor in zip(config.loss_type, config.loss_weights or [1.0] * len(config.loss_type), strict=True):
        if name == "sft":
            total = np.bincount(owner[is_chosen], weights=logprobs[is_chosen], minlength=pairs)
            loss -= factor * token_scale * total
            dlogprobs -= factor * token_scale * is_chosen
            continue
        found = _pair_losses_ref(name, c, r, lp, ref, lengths, config)
        loss += factor * scale * weight * found[0]
        slopes += factor * scale * weight * np.stack(found[1:])
    dlogprobs += token_weight * slopes.reshape(-1)[owner]
    return dlogprobs, np.stack([loss, *lp, config.beta * c, config.beta * r], axis=1)
