"""From hidden rows to drawn tokens and their log-probs: lm_head, penalties, filters, Gumbel noise.

Logits are float32 and exist for some rows at a time; what is drawn in a row depends on that row's hidden
state, its parameters and its counter (key, sample index, position) alone.
"""

from dataclasses import dataclass

import numpy as np

from rlnumba.kernels.gemm.ops import linear
from rlnumba.kernels.nn.elementwise import gather_rows
from rlnumba.kernels.sampling.ops import apply_repetition_penalty, sample

# Most bytes of float32 logits at one time: 441 rows of Qwen3's vocabulary, so that a decode step of 256 is one chunk.
LOGITS_BYTES = 256 << 20


@dataclass
class Draws:
    """What the B draws of a step need, arrays of the device, as `sample` takes them.

    rows (B,) int32: the hidden row of each; None where it is row b. penalty (B,) float32 and history (B, T)
    int32, padded with -1: None where no sequence has a repetition penalty.
    """

    temperature: object
    top_k: object
    top_p: object
    min_p: object
    keys: object
    sample_index: object
    position: object
    rows: object = None
    penalty: object = None
    history: object = None


def draw(hidden, lm_head, draws, arena, token_ids, logprobs):
    """Draw a token for each of the B rows: token_ids (B,) int32 and logprobs (B,) float32 are written.

    hidden (N, D), lm_head (V, D). arena: where logits and gathered rows live, released at the end.
    """
    total = len(draws.temperature)
    vocabulary = len(lm_head)
    chunk = max(1, LOGITS_BYTES // (4 * vocabulary))
    with arena.scope():
        if draws.rows is not None:
            gathered = arena.empty((total, hidden.shape[1]), hidden.dtype)
            gather_rows(hidden, draws.rows, gathered)
            hidden = gathered
        logits = arena.empty((min(chunk, total), vocabulary), np.float32)
        for first in range(0, total, chunk):
            part = slice(first, min(first + chunk, total))
            z = logits[: part.stop - part.start]
            linear(hidden[part], lm_head, z)
            if draws.penalty is not None:
                apply_repetition_penalty(z, draws.penalty[part], draws.history[part])
            sample(
                z,
                draws.temperature[part],
                draws.top_k[part],
                draws.top_p[part],
                draws.min_p[part],
                draws.keys[part],
                draws.sample_index[part],
                draws.position[part],
                token_ids[part],
                logprobs[part],
            )
