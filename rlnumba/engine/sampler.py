"""From hidden states to sampled tokens and their log-probs: lm_head, penalties, filters, Gumbel noise.

Logits are float32 and exist for a chunk of rows at a time. The token of a row depends on that row's hidden state, its
sampling parameters and its Philox counter (philox_key, sample index, position) alone.
"""

from dataclasses import dataclass

import numpy as np

from rlnumba.kernels.nn.elementwise import gather_rows
from rlnumba.kernels.sampling.ops import apply_repetition_penalty, sample
from rlnumba.kernels.sampling.penalties import apply_output_penalties, ban_tokens

# Most bytes of float32 logits at one time: 441 rows of Qwen3's vocabulary, so that a decode step of 256 is one chunk.
LOGITS_BYTES = 256 << 20


@dataclass
class SamplingInputs:
    """What `sample` takes for the B rows of a step that sample a token: arrays of the device.

    rows (B,) int32: the row of each in the hidden states; None where it is row b. penalty (B,) float32 and history
    (B, T) int32, padded with -1: None where no sequence has a repetition penalty. presence, frequency (B,) float32
    and starts (B,) int32, of the completions in history: None where no sequence has these penalties. banned (B, S)
    int32, padded with -1: ids that may not be drawn, None where there are none. replay (B,) int32: rows whose
    thresholds are wanted, None where those of none are.
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
    replay: object = None


def logits_of_rows(hidden, model, rows, total, arena):
    """Yields (slice of the rows, their logits (n, V) float32), some of the `total` rows of `hidden` at a time.

    rows: as SamplingInputs.rows. arena: as sample_tokens', in a scope that is open until all have been yielded.
    """
    vocab_size = model.config.vocab_size
    chunk = max(1, LOGITS_BYTES // (4 * vocab_size))
    with arena.scope():
        if rows is not None:
            gathered = arena.empty((total, hidden.shape[1]), hidden.dtype)
            gather_rows(hidden, rows, gathered)
            hidden = gathered
        logits = arena.empty((min(chunk, total), vocab_size), np.float32)
        for first in range(0, total, chunk):
            part = slice(first, min(first + chunk, total))
            z = logits[: part.stop - part.start]
            model.logits(hidden[part], z, arena)
            yield part, z


def sample_tokens(hidden, model, inputs, arena, token_ids, logprobs, thresholds=None):
    """Sample a token for each of the B rows: token_ids (B,) int32 and logprobs (B,) float32 are written.

    With inputs.replay thresholds (B,) float32 are, too: the smallest logit that the filters kept. hidden (N, D), of the
    Transformer `model`; inputs: SamplingInputs. arena: where logits and gathered rows are allocated, in a scope of its
    own.
    """
    for part, z in logits_of_rows(hidden, model, inputs.rows, len(inputs.temperature), arena):
        if inputs.penalty is not None:
            apply_repetition_penalty(z, inputs.penalty[part], inputs.history[part])
        if inputs.presence is not None:
            penalties = inputs.presence[part], inputs.frequency[part]
            apply_output_penalties(z, *penalties, inputs.history[part], inputs.starts[part])
        if inputs.banned is not None:
            ban_tokens(z, inputs.banned[part])
        filters = inputs.temperature[part], inputs.top_k[part], inputs.top_p[part], inputs.min_p[part]
        counter = inputs.philox_key[part], inputs.sample_index[part], inputs.position[part]
        of_replay = (None, None) if inputs.replay is None else (thresholds[part], inputs.replay[part])
        sample(z, *filters, *counter, token_ids[part], logprobs[part], *of_replay)
