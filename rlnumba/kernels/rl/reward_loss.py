"""The loss of a reward model on pairs (Bradley and Terry 1952; Ouyang et al. 2022, eq. 1), and its derivatives.

With the rewards w of the chosen and l of the rejected completion, the pair's margin m (Touvron et al. 2023, eq. 2) and
the coefficient c of centring (Eisenstein et al. 2023, eq. 2), for P pairs:

    loss_i = -log sigmoid(w_i - l_i - m_i) + c (w_i + l_i)^2
    dchosen_i = scale (-s + 2 c (w_i + l_i))        drejected_i = scale (s + 2 c (w_i + l_i))
    s = sigmoid(-(w_i - l_i - m_i)),  scale: 1 / the number of pairs of the optimizer step

All arrays (P,) float32, as is all arithmetic.
"""

import math

import numpy as np

from rlnumba.kernels.checks import F32, check, check_all
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

THREADS = 128


@cuda.jit
def reward_loss_kernel(chosen, rejected, margins, centering, scale, loss, dchosen, drejected):
    """A thread owns a pair."""
    zero, one, two = np.float32(0.0), np.float32(1.0), np.float32(2.0)
    i = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    if i < loss.shape[0]:
        z = chosen[i] - rejected[i] - margins[i]
        total = chosen[i] + rejected[i]
        # exp of a negative number: nothing overflows.
        e = np.float32(math.exp(-abs(z)))
        s = (e if z > zero else one) / (one + e)
        loss[i] = max(-z, zero) + np.float32(math.log1p(e)) + centering * total * total
        centred = two * centering * total
        dchosen[i] = scale * (centred - s)
        drejected[i] = scale * (centred + s)


def reward_loss(chosen, rejected, margins, centering, scale, loss, dchosen, drejected):
    """The loss of every pair, and the derivatives of `scale` times their sum by the rewards.

    chosen, rejected, margins, loss, dchosen, drejected (P,) float32, the last three written; centering: the coefficient
    c, 0 for none. Raises ValueError for other arrays. Source: TRL's RewardTrainer.
    """
    (pairs,) = check("reward_loss", "chosen", chosen, (None,), F32)
    others = {"rejected": rejected, "margins": margins}
    check_all("reward_loss", (pairs,), F32, **others, loss=loss, dchosen=dchosen, drejected=drejected)
    if device.name() == "cpu":
        loss[...], dchosen[...], drejected[...] = reward_loss_ref(
            chosen.astype(np.float64), rejected, margins, centering, scale
        )
        return
    arguments = chosen, rejected, margins, float(centering), float(scale), loss, dchosen, drejected
    launch(reward_loss_kernel, -(-pairs // THREADS), THREADS, *arguments)


def reward_loss_ref(chosen, rejected, margins, centering, scale):
    """(loss, dchosen, drejected) of reward_loss, in the arrays' precision."""
    z, total = chosen - rejected - margins, chosen + rejected
    s = np.exp(-np.logaddexp(0, z))
    centred = 2 * centering * total
    return np.logaddexp(0, -z) + centering * total**2, scale * (centred - s), scale * (centred + s)
