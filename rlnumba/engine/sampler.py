"""From hidden states to sampled tokens and their log-probs: lm_head, penalties, filters, Gumbel noise.

Logits are float32 and exist for a chunk of rows at a time. The token of a row depends on that row's hidden state, its
sampling parameters and its Philox counter (philox_key, sample index, position) alone.
"""

from dataclasses import dataclass

import numpy as np

from rlnumba.kernels.nn.elementwise import gather_rows
from rlnumba.kernels.sampling.draw import Counters
from rlnumba.kernels.sampling.ops import apply_repetition_penalty, sample
from rlnumba.kernels.sampling.penalties import apply_output_penalties, ban_tokens
from rlnumba.kernels.sampling.scan import SamplingLimits
from rlnumba.kernels.sampling.token_rules import add_bias, ban_words, keep_allowed
from rlnumba.kernels.sampling.top_logprobs import top_logprobs
from rlnumba.runtime.context import current

# Most bytes of float32 logits at one time: 441 rows of Qwen3's vocabulary, so that a decode step of 256 is one chunk.
LOGITS_BYTES = 256 << 20


@dataclass
class SamplingInputs:
    """Arrays of the device that `sample_tokens` takes for the B rows of a step that sample a token.

    rows (B,) int32: the row of each in the hidden states; None where it is row b. penalty (B,) float32 and history
    (B, T) int32, padded with -1: None where no sequence has a repetition penalty. presence, frequency (B,) float32
    and starts (B,) int32, of the completions in history: None where no sequence has these penalties. banned (B, S)
    int32, padded with -1: ids that may not be drawn, None where there are none. bias_ids, bias, allowed, bad_words:
    those of TokenRules, a row each, None where no sequence has any. replay (B,) int32: rows whose thresholds are
    wanted, None where those of none are. num_logprobs (B,) int32: the likeliest tokens to list of each, -1 for none,
    None where none are listed; top (R, rows, 2 + 2 K) and num_steps (1,) int32: as top_logprobs has them, top written.
    raw_logprobs: whether the logits before biases, penalties, temperature and filters are listed.
    """

    temperature: object
    top_k: object
    top_p: object
    min_p: object
    philox_key: object
    sample_index: object
    position: object
    rows: object = None
    penalty: object = None
    history: object = None
    presence: object = None
    frequency: object = None
    starts: object = None
    banned: object = None
    bias_ids: object = None
    bias: object = None
    allowed: object = None
    bad_words: object = None
    replay: object = None
    num_logprobs: object = None
    top: object = None
    num_steps: object = None
    raw_logprobs: bool = False


def sample_tokens(hidden, model, inputs, arena, token_ids, logprobs, thresholds=None):
    """Sample a token for each of the B rows: token_ids (B,) int32 and logprobs (B,) float32 are written.

    With inputs.replay thresholds (B,) float32 are, too: the smallest logit that the filters kept. hidden (N, D), of the
    Transformer `model`; inputs: SamplingInputs. arena: where logits and gathered rows are allocated, in a scope of its
    own. Each rank of a model that is cut over several may sample some of the rows.
    """
    total, vocab_size = len(inputs.temperature), model.config.vocab_size
    outputs = (token_ids, logprobs) if inputs.replay is None else (token_ids, logprobs, thresholds)
    chunk = max(1, LOGITS_BYTES // (4 * vocab_size))
    with arena.scope():
        if inputs.rows is not None:
            gathered = arena.empty((total, hidden.shape[1]), hidden.dtype)
            gather_rows(hidden, inputs.rows, gathered)
            hidden = gathered
        for first in range(0, total, chunk):
            part = slice(first, min(first + chunk, total))
            of_part = [array[part] for array in outputs]
            # What is listed of a row takes all of its logits, which each rank then has of all rows.
            shares_rows = model.ranks is not None and inputs.num_logprobs is None
            own = model.ranks.own_rows(part.stop - first) if shares_rows else None
            with arena.scope():
                if own is None:
                    z = arena.empty((part.stop - first, vocab_size), np.float32)
                    model.logits(hidden[part], z, arena)
                    listed = z
                    if inputs.num_logprobs is not None and inputs.raw_logprobs:
                        listed = arena.empty(z.shape, z.dtype)
                        listed[...] = z
                        # The copy is not a kernel after which the next may start early.
                        current().serialize_next()
                    sample_rows(z, inputs, part, *of_part)
                    if inputs.num_logprobs is not None:
                        list_logprobs(listed, inputs, part, *of_part)
                else:
                    _sample_own_rows(hidden[part], model, inputs, part, own, arena, of_part)


def list_logprobs(z, inputs, rows, token_ids, logprobs, thresholds=None):
    """Write what inputs.num_logprobs asks for of the SamplingInputs' rows in a slice; the others as sample_rows."""
    distribution = {"temperature": inputs.temperature[rows], "thresholds": thresholds}
    if inputs.raw_logprobs:
        distribution = {}
    counts = inputs.num_logprobs[rows]
    top_logprobs(z, token_ids, counts, inputs.top, rows.start, num_steps=inputs.num_steps, **distribution)


def score_tokens(hidden, model, rows, token_ids, counts, arena, out, most_rows):
    """List M tokens, which follow rows of hidden, with the likeliest: out (1, M, 2 + 2 K) int32 of top_logprobs.

    rows, token_ids, counts (M,) int32; of logits without temperature, which exist for most_rows tokens at a time.
    """
    vocab_size = model.config.vocab_size
    chunk = max(1, min(LOGITS_BYTES // (4 * vocab_size), most_rows))
    for first in range(0, len(rows), chunk):
        part = slice(first, min(first + chunk, len(rows)))
        with arena.scope():
            gathered = arena.empty((part.stop - first, hidden.shape[1]), hidden.dtype)
            gather_rows(hidden, rows[part], gathered)
            z = arena.empty((part.stop - first, vocab_size), np.float32)
            model.logits(gathered, z, arena)
            top_logprobs(z, token_ids[part], counts[part], out, first)


def _sample_own_rows(hidden, model, inputs, part, own, arena, outputs):
    """Sample the rows `own` of a part of all rows, and write what all ranks have sampled of it."""
    z = arena.empty((own.stop - own.start, model.config.vocab_size), np.float32)
    model.ranks.logits_of_own_rows(hidden, model.lm_head, z, arena)
    found = arena.empty((len(outputs), len(z)), np.int32)
    if len(z):
        of_rows = [row.view(array.dtype) for row, array in zip(found, outputs, strict=True)]
        sample_rows(z, inputs, slice(part.start + own.start, part.start + own.stop), *of_rows)
    model.ranks.gather_rows(found, outputs, arena)


def sample_rows(z, inputs, rows, token_ids, logprobs, thresholds=None):
    """Sample from the logits z (n, V) of the SamplingInputs' rows in a slice; the outputs have n elements."""
    if inputs.bias is not None:
        add_bias(z, inputs.bias_ids[rows], inputs.bias[rows])
    if inputs.penalty is not None:
        apply_repetition_penalty(z, inputs.penalty[rows], inputs.history[rows])
    if inputs.presence is not None:
        penalties = inputs.presence[rows], inputs.frequency[rows]
        apply_output_penalties(z, *penalties, inputs.history[rows], inputs.starts[rows])
    if inputs.banned is not None:
        ban_tokens(z, inputs.banned[rows])
    if inputs.bad_words is not None:
        words = inputs.history[rows], inputs.starts[rows], inputs.position[rows], inputs.bad_words[rows]
        ban_words(z, *words)
    if inputs.allowed is not None:
        keep_allowed(z, inputs.allowed[rows])
    limits = SamplingLimits(inputs.temperature[rows], inputs.top_k[rows], inputs.top_p[rows], inputs.min_p[rows])
    counters = Counters(inputs.philox_key[rows], inputs.sample_index[rows], inputs.position[rows])
    of_replay = (None, None) if inputs.replay is None else (thresholds, inputs.replay[rows])
    sample(z, limits, counters, token_ids, logprobs, *of_replay)
