"""The heads: log-probs of chosen next tokens, or one number for chosen tokens, from hidden states; and the gradients.

    saved = head.forward(model, hidden, targets, arena, *outputs)                          outputs are written
    dhidden = head.backward(model, saved, gradients, arena, *derivatives)                  by each of the outputs

    LogprobHead     logprobs, entropy, top1     dlogprobs, dentropy
    ValueHead       values                      dvalues
    DivergenceHead  divergences                 known beforehand
    BothHeads       logprobs, values, entropy   dlogprobs, dvalues, dentropy

Only the rows that predict a target reach the (V, D) matrix: T of the N hidden states, gathered before and scattered
after. If the derivative of the loss by each log-prob is known beforehand, forward and backward are one call that
takes fewer GEMMs (kernels/logprob/ops.py). The value head, a reward model's or a critic's, reads its rows of the hidden
states where they are.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from rlnumba.kernels.logprob.divergence import DivergenceForm, HeadInput, linear_divergence
from rlnumba.kernels.logprob.listed import ListedLogits
from rlnumba.kernels.logprob.ops import linear_logp, linear_logp_backward, linear_logp_with_gradient
from rlnumba.kernels.logprob.terms import KeptTokens, LogprobOutputs, LossGradients
from rlnumba.kernels.nn.elementwise import fill, gather_rows, scatter_rows
from rlnumba.kernels.nn.scalar_head import scalar_head, scalar_head_backward


class Targets(NamedTuple):
    """The T tokens of a batch that a head computes something for; a TargetBatch has the same fields.

    rows (T,) i32: those of the hidden states that are read; target_ids (T,) i32: the tokens that they predict, None for
    values. thresholds (T,) f32: the smallest logit that each prediction has, or None for all. every_row: compute rows
    without a gradient, too, as a captured graph has to, which cannot look for them. allowed (T, ceil(V / 32)) i32: the
    tokens that a grammar allows for each prediction, as linear_logp takes them, or None for all.
    """

    rows: object
    target_ids: object = None
    thresholds: object = None
    every_row: bool = False
    allowed: object = None


class HeadGradients(NamedTuple):
    """The gradients that a backward of a head writes: lm_head (V, D) f32, set, None if it is not trained; score, to
    which it adds."""

    lm_head: object = None
    score: object = None


class SavedLogprobs(NamedTuple):
    """Values that a LogprobHead's backward reads: hidden (T, D) gathered, lse, entropy (T,) f32, and N."""

    targets: object
    hidden: object
    lse: object
    entropy: object
    num_tokens: int


@dataclass(frozen=True)
class LogprobHead:
    """Log-probs of target_ids, of logits divided by a temperature."""

    temperature: float = 1.0
    writes_lm_head: ClassVar[bool] = True

    def forward(self, model, hidden, targets, arena, logprobs, entropy=None, top1=None):
        """Write logprobs, entropy (T,) f32 and top1 (T,) i32, the likeliest id, from hidden (N, D): SavedLogprobs."""
        gathered = arena.empty((targets.rows.shape[0], hidden.shape[1]), hidden.dtype)
        lse = arena.empty((targets.rows.shape[0],), np.float32)
        gather_rows(hidden, targets.rows, gathered)
        outputs = LogprobOutputs(logprobs, lse, entropy, top1)
        options = KeptTokens(targets.thresholds, targets.allowed), targets.every_row
        linear_logp(gathered, model.lm_head, targets.target_ids, self.temperature, outputs, *options)
        return SavedLogprobs(targets, gathered, lse, entropy, hidden.shape[0])

    def backward(self, model, saved, gradients, arena, dlogprobs, dentropy=None):
        """dhidden (N, D) from dlogprobs (T,) f32.

        dentropy (T,) f32: the derivative of the loss by each entropy, which the forward must have been asked for.
        """
        targets, dgathered = saved.targets, arena.empty(saved.hidden.shape, saved.hidden.dtype)
        by_entropy = (None, None) if dentropy is None else (saved.entropy, dentropy)
        linear_logp_backward(
            saved.hidden, model.lm_head, targets.target_ids, self.temperature, saved.lse,
            LossGradients(dlogprobs, dgathered, gradients.lm_head, *by_entropy),
            KeptTokens(targets.thresholds, targets.allowed), targets.every_row,
        )  # fmt: skip
        return _scattered(dgathered, targets.rows, saved.num_tokens, arena)

    def forward_backward(self, model, hidden, targets, gradients, arena, dlogprobs, outputs):
        """forward and backward at once, for dlogprobs (T,) f32 known beforehand: dhidden (N, D).

        outputs: logprobs, entropy and top1, of which the last two may be None, or left out.
        """
        rows = targets.rows
        gathered, dgathered = (arena.empty((rows.shape[0], hidden.shape[1]), hidden.dtype) for _ in range(2))
        lse, (logprobs, *others) = arena.empty((rows.shape[0],), np.float32), (*outputs, None, None)[:3]
        gather_rows(hidden, rows, gathered)
        linear_logp_with_gradient(
            gathered, model.lm_head, targets.target_ids, self.temperature, LogprobOutputs(logprobs, lse, *others),
            LossGradients(dlogprobs, dgathered, gradients.lm_head), KeptTokens(targets.thresholds, targets.allowed),
            targets.every_row,
        )  # fmt: skip
        return _scattered(dgathered, rows, hidden.shape[0], arena)


def _scattered(values, rows, count, arena):
    """(count, D): row rows[i] is values[i], the others are 0."""
    out = arena.empty((count, values.shape[1]), values.dtype)
    fill(0.0, out)
    scatter_rows(values, rows, out)
    return out


@dataclass(frozen=True)
class DivergenceHead:
    """The divergence of the predictions of rows from a teacher's; see kernels/logprob/divergence.py.

    teacher: the HeadInput of the same T rows in the teacher, or its ListedLogits for them.
    """

    teacher: HeadInput | ListedLogits
    form: DivergenceForm
    writes_lm_head: ClassVar[bool] = True

    def forward_backward(self, model, hidden, targets, gradients, arena, dloss, outputs):
        """dhidden (N, D) from dloss (T,) f32, the derivatives of the loss by the divergences; outputs: these, (T,) f32,
        which are written."""
        gathered, dgathered = (arena.empty((targets.rows.shape[0], hidden.shape[1]), hidden.dtype) for _ in range(2))
        gather_rows(hidden, targets.rows, gathered)
        student = HeadInput(gathered, model.lm_head)
        linear_divergence(student, self.teacher, self.form, dloss, *outputs, dgathered, gradients.lm_head)
        return _scattered(dgathered, targets.rows, hidden.shape[0], arena)


class SavedValues(NamedTuple):
    """Values that a ValueHead's backward reads: rows (T,) i32 and hidden (N, D), all of it."""

    rows: object
    hidden: object


@dataclass(frozen=True)
class ValueHead:
    """One number for each row, the score head's output."""

    writes_lm_head: ClassVar[bool] = False

    def forward(self, model, hidden, targets, arena, values):
        """Write values (T,) f32 from hidden (N, D): SavedValues."""
        scalar_head(hidden, targets.rows, model.score, values)
        return SavedValues(targets.rows, hidden)

    def backward(self, model, saved, gradients, arena, dvalues, dhidden=None):
        """dhidden (N, D) from dvalues (T,) f32.

        dhidden: the gradient that follows from another head, to which this one's is added in place; None: zeros.
        """
        if dhidden is None:
            dhidden = arena.empty(saved.hidden.shape, saved.hidden.dtype)
            fill(0.0, dhidden)
        scalar_head_backward(saved.hidden, saved.rows, model.score, dvalues, dhidden, gradients.score)
        return dhidden


@dataclass(frozen=True)
class BothHeads:
    """Log-probs and values of a model with both heads, from one forward."""

    temperature: float = 1.0
    writes_lm_head: ClassVar[bool] = True

    def forward(self, model, hidden, targets, arena, logprobs, values, entropy=None):
        """Write logprobs, values and entropy (T,) f32 from hidden (N, D): (SavedLogprobs, SavedValues)."""
        saved = LogprobHead(self.temperature).forward(model, hidden, targets, arena, logprobs, entropy)
        return saved, ValueHead().forward(model, hidden, targets, arena, values)

    def backward(self, model, saved, gradients, arena, dlogprobs, dvalues, dentropy=None):
        """dhidden (N, D) from the derivatives (T,) f32."""
        head, logprobs = LogprobHead(self.temperature), saved[0]
        dhidden = head.backward(model, logprobs, gradients, arena, dlogprobs, dentropy)
        return ValueHead().backward(model, saved[1], gradients, arena, dvalues, dhidden)
