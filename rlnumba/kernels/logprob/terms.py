"""Terms of a row of log-probs, which both implementations compute and store."""

import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.ptx.warp import device_function
from rlnumba.runtime.device import cuda

# log2 p is at least this, so that a p of 0 times its logarithm is 0; 2 to the power of it is 0 in float32.
VANISHED, LN_2 = np.float32(-1000.0), np.float32(math.log(2.0))


class LogprobOutputs(NamedTuple):
    """The outputs of linear_logp, (N,) each: logp, lse and entropy float32, top1 int32; the last two or None."""

    logp: object
    lse: object
    entropy: object = None
    top1: object = None


class LossGradients(NamedTuple):
    """A loss's derivatives by log-probs, and the gradients that a backward writes for them.

    Read: dlogp (N,) float32; entropy as linear_logp wrote it with dentropy (N,) float32, or both None. Written: dhidden
    (N, D) of the hidden states' dtype; dweight (V, D) float32, None where the weight is not trained. accumulate:
    dweight has a part of the gradient already, that of other rows, and is added to.
    """

    dlogp: object
    dhidden: object
    dweight: object
    entropy: object = None
    dentropy: object = None
    accumulate: bool = False


class KeptTokens(NamedTuple):
    """The tokens of each row that a sampler keeps.

    thresholds (N,) float32, of the logits before the temperature, or None for all logits; allowed (N, ceil(V / 32))
    int32: bit v % 32 of word v / 32 is token v's, or None for all tokens.
    """

    thresholds: object = None
    allowed: object = None


ALL_TOKENS = KeptTokens()


class RowOptions(NamedTuple):
    """Arrays (N,) float32 that a backward reads where there are any: entropy with dentropy, thresholds."""

    entropy: object = None
    dentropy: object = None
    thresholds: object = None


NO_OPTIONS = RowOptions()


class Terms(NamedTuple):
    """Outputs of linear_logp, (N,) each; entropy and top1 without elements are not written."""

    logp: object
    lse: object
    entropy: object
    top1: object

    def of_rows(self, rows):
        """The Terms of a slice of rows."""
        return Terms(*(array[rows] for array in self))


def kernel_outputs(logp, lse, entropy, top1, ids):
    """The Terms of a kernel; entropy and top1 may be None."""
    return Terms(logp, lse, logp[:0] if entropy is None else entropy, ids[:0] if top1 is None else top1)


@device_function
def store_terms(row, row_logp, row_lse, row_entropy, row_top1, terms):
    """Write a row's values to Terms."""
    terms.logp[row], terms.lse[row] = row_logp, row_lse
    if terms.entropy.shape[0] > 0:
        terms.entropy[row] = row_entropy
    if terms.top1.shape[0] > 0:
        terms.top1[row] = row_top1


@device_function
def entropy_terms(scale, entropy, slope):
    """(offset, slope) such that dz = scale onehot - p (offset + slope log2 p), from dlogp / T, H and dentropy / T."""
    return cuda.fma(slope, entropy, scale), slope * LN_2
