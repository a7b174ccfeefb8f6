"""AdamW over a model's flat buffers, gradient clipping, and learning rate schedules.

An optimizer step is one reduction (the gradient's norm), one number read back by the host, and one AdamW kernel over
all parameters. A 16-bit model has float32 master weights here; its own weights are these, rounded. A step whose
gradient is not finite is skipped and counted.
"""

import math
import weakref

import numpy as np

from rlnumba.errors import UserError
from rlnumba.kernels.adamw import adamw, adamw_scalars
from rlnumba.kernels.nn.elementwise import cast, fill
from rlnumba.kernels.nn.reduce import sum_of_squares
from rlnumba.runtime import device, memory


class Optimizer:
    """AdamW for one model.

    weights: has flat (n,) of the model's dtype and decay_end, the number of leading elements that decay.
    grads: has flat (n,) float32 in the same layout. Defaults of the arguments are torch.optim.AdamW's,
    but for max_grad_norm, TRL's; None or 0 turns clipping off.

    steps counts the steps taken, skipped_steps those left out because the gradient was not finite.
    """

    def __init__(self, weights, grads, *, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01, max_grad_norm=1.0):
        self.weights, self.grads = weights, grads
        self.betas, self.epsilon, self.weight_decay = (beta1, beta2), epsilon, weight_decay
        self.max_grad_norm = max_grad_norm
        self.steps = self.skipped_steps = 0
        xp, size = device.xp(), weights.flat.shape
        self.m, self.v = xp.zeros(size, np.float32), xp.zeros(size, np.float32)
        self.master = None
        if weights.flat.dtype != np.float32:
            self.master = xp.empty(size, np.float32)
            cast(weights.flat, self.master)
        self._sum = xp.zeros(1, np.float32)
        nbytes = sum(array.nbytes for array in self._arrays().values())
        memory.track("moments", nbytes)
        weakref.finalize(self, memory.track, "moments", -nbytes)

    def zero_grad(self):
        """Set the gradients to zero."""
        fill(0.0, self.grads.flat)

    def step(self, learning_rate):
        """Update the weights from the gradients, which are left as they are; return their Euclidean norm: float.

        The gradient is multiplied by min(1, max_grad_norm / (norm + 1e-6)), as torch's clip_grad_norm_.
        If the norm is not finite, the step is skipped: weights, moments and `steps` stay as they were.
        """
        sum_of_squares(self.grads.flat, self._sum)
        grad_norm = math.sqrt(float(device.to_host(self._sum)[0]))
        if not math.isfinite(grad_norm):
            self.skipped_steps += 1
            return grad_norm
        grad_scale = min(1.0, self.max_grad_norm / (grad_norm + 1e-6)) if self.max_grad_norm else 1.0
        self.steps += 1
        scalars = adamw_scalars(learning_rate, *self.betas, self.epsilon, self.weight_decay, self.steps, grad_scale)
        weights = self.weights
        adamw(weights.flat, self.master, self.grads.flat, self.m, self.v, device.asarray(scalars), weights.decay_end)
        return grad_norm

    def state_dict(self):
        """What a resumed run restores: NumPy float32 arrays m, v and, of a 16-bit model, master; the counters."""
        arrays = {key: device.host_copy(array) for key, array in self._arrays().items()}
        return {**arrays, "steps": self.steps, "skipped_steps": self.skipped_steps}

    def _arrays(self):
        arrays = {"m": self.m, "v": self.v}
        return arrays if self.master is None else {**arrays, "master": self.master}

    def load_state_dict(self, state):
        """Restore what state_dict returned; of a 16-bit model also set the weights to the rounded master.

        Raises UserError if an array is missing, not expected, or not of this model's size.
        """
        arrays = self._arrays()
        expected, got = (", ".join(sorted(names)) for names in ({*arrays, "steps", "skipped_steps"}, state))
        if got != expected:
            raise UserError(f"optimizer state: expected {expected}, got {got}; was it saved with another train.dtype?")
        for key, array in arrays.items():
            if state[key].shape != array.shape:
                raise UserError(f"optimizer state: {key} must be {array.shape}, got {state[key].shape}")
        for key, array in arrays.items():
            array[...] = device.asarray(np.asarray(state[key], np.float32))
        if self.master is not None:
            cast(self.master, self.weights.flat)
        self.steps = int(state["steps"])
        self.skipped_steps = int(state["skipped_steps"])


def learning_rate_at(train, step, total_steps):
    """The learning rate of the optimizer step after `step` completed ones, as transformers' schedulers.

    train: the [train] section. The rate rises linearly from 0 to learning_rate over warmup_steps (below 1: a share of
    total_steps, rounded up), so the first of several warm-up steps has rate 0. Then it stays ("constant",
    "constant_with_warmup"), or falls to 0 at total_steps on a line ("linear") or half a cosine ("cosine").
    """
    warmup, peak = train.warmup_steps, train.learning_rate
    warmup_steps = int(warmup) if warmup >= 1 else math.ceil(warmup * total_steps)
    if step < warmup_steps:
        return peak * step / warmup_steps
    decay_steps = max(1, total_steps - warmup_steps)
    if train.lr_scheduler_type == "linear":
        return peak * max(0.0, (total_steps - step) / decay_steps)
    if train.lr_scheduler_type == "cosine":
        return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / decay_steps)))
    return peak
