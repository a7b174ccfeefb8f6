"""One number for a sequence: the score head's output at its last token that is not padding.

It is read where transformers' ...ForSequenceClassification reads it. Padding is known by its id, so that a sequence
that ends in the padding token itself, as where EOS serves for it, is read at the token before.
"""

import numpy as np

from rlnumba.errors import UserError
from rlnumba.kernels.nn.scalar_head import scalar_head
from rlnumba.model.transformer import pack, packed_attention, whole_sequences
from rlnumba.runtime import device
from rlnumba.runtime.arena import HeapAllocator


def score_rows(sequences, pad_token_id):
    """(B,) int32 on the host: where each of these token id lists, laid end to end, is read.

    A sequence of padding alone is read at its first token. pad_token_id: None where the model has none.
    """
    rows, start = np.zeros(len(sequences), np.int32), 0
    for index, ids in enumerate(sequences):
        text = np.flatnonzero(np.asarray(ids) != pad_token_id) if pad_token_id is not None else [len(ids) - 1]
        rows[index] = start + (text[-1] if len(text) else 0)
        start += len(ids)
    return rows


def score_sequences(model, sequences, max_tokens=8192, arena=None):
    """The score of each token id list: (B,) float32 on the host.

    Whole sequences are taken together up to max_tokens tokens a forward, which does not change a bit of a score. Raises
    UserError for an empty sequence, one longer than the model, and scores that are not finite.
    """
    limit, memory, scores = model.config.num_positions, arena or HeapAllocator(), []
    lengths = [len(ids) for ids in sequences]
    for length in lengths:
        if not 0 < length <= limit:
            raise UserError(f"a sequence of {length} tokens cannot be scored: the model has {limit} positions")
    for part in whole_sequences(lengths, max_tokens):
        batch, rows = pack(sequences[part]), score_rows(sequences[part], model.config.pad_token_id)
        with memory.scope():
            attention = packed_attention(model, batch, arena)
            hidden = model.forward(batch.input_ids, batch.position_ids, attention, arena=arena)
            values = memory.empty((len(rows),), np.float32)
            scalar_head(hidden, device.asarray(rows), model.score, values)
            scores.append(np.array(device.to_host(values)))
    scores = np.concatenate(scores) if scores else np.empty(0, np.float32)
    if not np.isfinite(scores).all():
        raise UserError("the model's scores are not finite: its weights hold NaN, or values too large for the dtype")
    return scores
