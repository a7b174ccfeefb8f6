"""Gradients of a model, for tests that compare them."""

import numpy as np

from rlnumba.model.heads import HeadGradients, LogprobHead, Targets
from rlnumba.model.transformer import pack, packed_attention
from rlnumba.runtime import device


def gradients_of_logprobs(model, sequences, tape, arena):
    """(loss, gradients of what is trained) of the sum of weighted log-probs of sequences, lists of token ids."""
    batch, grads = pack(sequences), model.trained.grads()
    rows = np.flatnonzero(device.to_host(batch.targets) >= 0).astype(np.int32)
    targets = device.asarray(device.to_host(batch.targets)[rows])
    weights = np.random.default_rng(1).standard_normal(len(rows)).astype(np.float32)
    logprobs = device.xp().empty(len(rows), np.float32)
    with arena.scope():
        attention = packed_attention(model, batch, arena)
        hidden = model.forward(batch.input_ids, batch.position_ids, attention, tape, arena)
        head, targets = LogprobHead(), Targets(device.asarray(rows), targets)
        saved = head.forward(model, hidden, targets, arena, logprobs)
        dhidden = head.backward(model, saved, HeadGradients(grads.lm_head), arena, device.asarray(weights))
        model.backward(dhidden, tape, grads)
    return float(np.dot(device.to_host(logprobs).astype(np.float64), weights)), grads
