"""The heads: log-probs of chosen next tokens, or one number for chosen tokens, from hidden states; and the gradients.

Only the rows that predict a target reach the (V, D) matrix: T of the N hidden states, gathered before and scattered
after. If the derivative of the loss by each log-prob is known beforehand, forward and backward are one call that
takes fewer GEMMs (kernels/logprob/ops.py).

The head of one output, a reward model's or a critic's, reads its rows of the hidden states where they are. A policy
with both heads adds the second's gradient to that of the first: value_head_backward(..., dhidden).
"""

from dataclasses import dataclass

import numpy as np

from rlnumba.kernels.logprob.ops import linear_logp, linear_logp_backward, linear_logp_with_gradient
from rlnumba.kernels.nn.elementwise import fill, gather_rows, scatter_rows
from rlnumba.kernels.nn.scalar_head import scalar_head, scalar_head_backward


@dataclass
class SavedHead:
    """Inputs of lm_head_backward: rows, target_ids (T,) i32, hidden (T, D) gathered, lse, entropy (T,) f32, and N."""

    rows: object
    target_ids: object
    temperature: float
    hidden: object
    lse: object
    num_tokens: int
    entropy: object = None
    thresholds: object = None
    every_row: bool = False


def lm_head_forward(
    model, hidden, rows, target_ids, temperature, arena, logprobs, entropy=None, top1=None, thresholds=None,
    every_row=False,
):  # fmt: skip
    """Log-probs of target_ids (T,) i32 from rows (T,) i32 of hidden (N, D): the SavedHead for lm_head_backward.

    logprobs, entropy (T,) f32 and top1 (T,) i32, the likeliest id, are written. thresholds (T,) f32: the smallest logit
    that each prediction has, or None for all. every_row: compute rows without a gradient, too, as a captured graph has
    to, which cannot look for them.
    """
    gathered = arena.empty((rows.shape[0], hidden.shape[1]), hidden.dtype)
    lse = arena.empty((rows.shape[0],), np.float32)
    gather_rows(hidden, rows, gathered)
    linear_logp(gathered, model.lm_head, target_ids, temperature, logprobs, lse, entropy, top1, thresholds, every_row)
    return SavedHead(rows, target_ids, temperature, gathered, lse, hidden.shape[0], entropy, thresholds, every_row)


def lm_head_backward(model, saved, dlogprobs, dweight, arena, dentropy=None):
    """dhidden (N, D) from dlogprobs (T,) f32; dweight (V, D) f32, the head's own gradient, is written if not None.

    dentropy (T,) f32: the derivative of the loss by each entropy, which the forward must have been asked for.
    """
    dgathered = arena.empty(saved.hidden.shape, saved.hidden.dtype)
    linear_logp_backward(
        saved.hidden, model.lm_head, saved.target_ids, saved.temperature, saved.lse, dlogprobs, dgathered,
        dweight, None if dentropy is None else saved.entropy, dentropy, saved.thresholds, saved.every_row,
    )  # fmt: skip
    return _scattered(dgathered, saved.rows, saved.num_tokens, arena)


def lm_head_forward_backward(
    model, hidden, rows, target_ids, temperature, dlogprobs, dweight, arena, logprobs,
    entropy=None, top1=None, thresholds=None, every_row=False,
):  # fmt: skip
    """lm_head_forward and lm_head_backward at once, for dlogprobs (T,) f32 known beforehand: dhidden (N, D)."""
    gathered, dgathered = (arena.empty((rows.shape[0], hidden.shape[1]), hidden.dtype) for _ in range(2))
    lse = arena.empty((rows.shape[0],), np.float32)
    gather_rows(hidden, rows, gathered)
    linear_logp_with_gradient(
        gathered, model.lm_head, target_ids, temperature, dlogprobs, logprobs, lse, dgathered, dweight,
        entropy, top1, thresholds, every_row,
    )  # fmt: skip
    return _scattered(dgathered, rows, hidden.shape[0], arena)


def _scattered(values, rows, count, arena):
    """(count, D): row rows[i] is values[i], the others are 0."""
    out = arena.empty((count, values.shape[1]), values.dtype)
    fill(0.0, out)
    scatter_rows(values, rows, out)
    return out


@dataclass
class SavedValueHead:
    """Inputs of value_head_backward: rows (T,) i32 and hidden (N, D), all of it."""

    rows: object
    hidden: object


def value_head_forward(model, hidden, rows, values):
    """Write values (T,) f32, the score head's output for rows (T,) i32 of hidden (N, D): a SavedValueHead."""
    scalar_head(hidden, rows, model.score, values)
    return SavedValueHead(rows, hidden)


def value_head_backward(model, saved, dvalues, grads, arena, dhidden=None):
    """dhidden (N, D) from dvalues (T,) f32; the head's own gradient is added to grads.score.

    dhidden: the gradient that follows from another head, to which this one's is added in place; None: zeros.
    """
    if dhidden is None:
        dhidden = arena.empty(saved.hidden.shape, saved.hidden.dtype)
        fill(0.0, dhidden)
    scalar_head_backward(saved.hidden, saved.rows, model.score, dvalues, dhidden, grads.score)
    return dhidden
