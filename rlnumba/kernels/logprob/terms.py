"""Terms of a row of log-probs, which both implementations compute and store."""

import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.ptx.warp import device_function
from rlnumba.runtime.device import cuda

# log2 p is at least this, so that a p of 0 times its logarithm is 0; 2 to the power of it is 0 in float32.
VANISHED, LN_2 = np.float32(-1000.0), np.float32(math.log(2.0))


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
