"""AdamW over a model's flat buffers, gradient clipping, and learning rate schedules.

An optimizer step is one reduction (the gradient's norm), one thread that derives the clipping from it, and one AdamW
kernel over all parameters, for none of which the host waits. A 16-bit model has float32 master weights here; its own
weights are these, rounded. A step whose gradient is not finite is skipped and counted: the next step begins by waiting
for that count, which its bias corrections need, at a time when the device has long been busy with its backward.

Bytes of state for each parameter of a bfloat16 model:

| [train]                | m, v         | master | together                       |
| ---------------------- | ------------ | ------ | ------------------------------ |
| optim = "adamw_torch"  | 8            | 4      | 12                             |
| optim = "adamw_bf16"   | 4            | 4      | 8                              |
| optim = "adamw_8bit"   | 2 + 8 / 256  | 4      | 6                              |
| master_weights = false | as above     | 0      | 4 less: weights are rounded stochastically |
| offload_optimizer      | in pinned host memory | | 0, and two chunks for staging  |

With optimizer_in_backward the step is taken part by part, as the backward completes gradients
(model/layer_gradients.py): `begin`, `update` for each part, `finish`, instead of `step`. The gradient's norm is known
at the end only, so there is no clipping. The sum of squares grows with the parts; where it is no longer finite, a part
and those after it are left as they were.

With offload_optimizer a step walks over the flat buffers in chunks, on two streams in turn: copy the chunk's state to
the device, update, copy it back. While one stream copies in one direction the other one can copy in the other, and with
optimizer_in_backward the backward of the next layer runs meanwhile. The arithmetic of an element does not depend on its
chunk, so the bits are those of a step on the device.
"""

import math
import weakref
from dataclasses import dataclass

import numpy as np

from rlnumba.errors import ConfigError, UserError
from rlnumba.kernels.nn.elementwise import cast
from rlnumba.kernels.nn.reduce import sum_of_squares
from rlnumba.kernels.optim.adamw import adamw, adamw_scalars, clip
from rlnumba.kernels.optim.adamw_8bit import BLOCK, ZERO_CODES, Moments, adamw_8bit
from rlnumba.kernels.optim.stochastic_rounding import rounding_noise
from rlnumba.runtime import device, memory
from rlnumba.runtime.context import Context, current
from rlnumba.runtime.staging import Staged
from rlnumba.runtime.transfer import copy_to_device

F32, BF16, U8 = np.dtype(np.float32), device.DTYPES["bfloat16"], np.dtype(np.uint8)
# [train] optim: {array of the state: (dtype, parameters for each of its elements)}.
MOMENTS = {
    "adamw_torch": {"m": (F32, 1), "v": (F32, 1)},
    "adamw_bf16": {"m": (BF16, 1), "v": (BF16, 1)},
    "adamw_8bit": {"m": (U8, 1), "v": (U8, 1), "m_absmax": (F32, BLOCK), "v_absmax": (F32, BLOCK)},
}
# Parameters whose state is on the device at one time for each of the two streams of offload_optimizer: with float32
# moments and a master 192 MiB each, copied in 4 ms at 50 GB/s, beside which 10 us to start a copy are nothing.
CHUNK = 1 << 24
STREAMS = 2


@dataclass(frozen=True)
class AdamWConfig:
    """The settings of an Optimizer. Defaults are torch.optim.AdamW's, but for max_grad_norm, TRL's; None or 0 turns
    clipping off.

    optim, master_weights, offload: see the table above; without a master bfloat16 weights are rounded stochastically,
    which a float32 model does not need. seed: of that rounding, and of bfloat16 moments'.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    optim: str = "adamw_torch"
    master_weights: bool = True
    offload: bool = False
    seed: int = 0

    @staticmethod
    def of(train, seed):
        """The settings of a [train] section."""
        return AdamWConfig(
            train.adam_beta1, train.adam_beta2, train.adam_epsilon, train.weight_decay, train.max_grad_norm,
            train.optim, train.master_weights, train.offload_optimizer, seed,
        )  # fmt: skip


DEFAULTS = AdamWConfig()


class Optimizer:
    """AdamW for one model.

    weights: has flat (n,) of the model's dtype and decay_end, the number of leading elements that decay.
    grads: has flat (n,) float32 in the same layout; `update` does not read it. config: AdamWConfig; ConfigError for
    float16 without master weights. first_element: the number of weights.flat[0] among a model's parameters, for random
    bits of rounding; a multiple of BLOCK.

    steps counts the steps taken, skipped_steps those left out because the gradient was not finite; reading them waits
    for the device. state: {name: array} of m, v and what else there is, on the device or, with offload, on the host.
    """

    def __init__(self, weights, grads, config=DEFAULTS, first_element=0):
        self.weights, self.grads, self.config, self.first_element = weights, grads, config, first_element
        self._steps = self._skipped_steps = 0
        # The NormReading of the last step, until it is counted.
        self._last = None
        dtype, self.layout = weights.flat.dtype, dict(MOMENTS[config.optim])
        if dtype != F32 and config.master_weights:
            self.layout["master"] = (F32, 1)
        elif dtype not in (F32, BF16):
            raise ConfigError(f"train.master_weights = false needs bfloat16 or float32 weights, got {dtype}")
        self.is_rounded_at_random = config.optim == "adamw_bf16" or (dtype == BF16 and not config.master_weights)
        size, empty = weights.flat.shape[0], empty_pinned if config.offload else device.xp().empty
        region = "host" if config.offload else "moments"
        self.state = {}
        for name, (kind, each) in self.layout.items():
            count = -(-size // each)
            with memory.allocating(region, count * kind.itemsize):
                self.state[name] = empty(count, kind)
        self._step = Staged({"scalars": ((9,), F32), "noise": ((3,), np.dtype(np.uint32))})
        self._scalars, self._noise = self._step.arrays["scalars"], None
        self._norm = Staged({"sum": ((1,), F32)})
        _track(self, region, self.state)
        self._lanes = []
        if config.offload and device.name() == "cuda":
            self._lanes = [_Lane(self.layout, min(CHUNK, size)) for _ in range(STREAMS)]
            _track(self, "moments", *(lane.state for lane in self._lanes))
        self._for_each_part(self._clear, reads=False)
        self._join()

    def _clear(self, part, state):
        for name, array in state.items():
            array.fill(ZERO_CODES.get(name, 0) if array.dtype == U8 else 0)
        if "master" in state:
            cast(self.weights.flat[part], state["master"])

    @property
    def steps(self):
        self._count_last()
        return self._steps

    @property
    def skipped_steps(self):
        self._count_last()
        return self._skipped_steps

    def _count_last(self):
        """Count the last step as taken or skipped."""
        if self._last is not None:
            self._steps += self._last.is_finite
            self._skipped_steps = self._last.skipped_steps
            self._last = None

    def step(self, learning_rate):
        """Update the weights from the gradients, which are left as they are; return the NormReading of these.

        The gradient is multiplied by min(1, max_grad_norm / (norm + 1e-6)), as torch's clip_grad_norm_.
        If the norm is not finite, the step is skipped: weights, moments and `steps` stay as they were.
        """
        total = self._norm.arrays["sum"]
        self._sum_squares(total)
        self._prepare(learning_rate)
        clip(total, self.config.max_grad_norm or 0.0, self._scalars)
        self._for_each_part(lambda part, state: self._adamw(part, state, self.grads.flat[part]))
        self._join()
        return self._end_step()

    def _sum_squares(self, total):
        """total (1,) f32 = the sum of squares of the gradient that `step` reads."""
        sum_of_squares(self.grads.flat, total)

    def _end_step(self):
        """The NormReading of a step all of whose kernels are launched."""
        self._last = NormReading(self._norm.read(), self._skipped_steps)
        return self._last

    def begin(self, learning_rate):
        """Begin a step that is taken part by part, without clipping."""
        self._prepare(learning_rate)

    def update(self, start, grads):
        """Update elements start, start + 1, ... from their gradients (n,), float32 or of the weights' dtype.

        start is a multiple of BLOCK. grads may be overwritten after the next call, or `finish`.
        """
        self._join()
        sum_of_squares(grads, self._scalars[8:9], accumulate=True)

        def update(part, state):
            self._adamw(part, state, grads[part.start - start : part.stop - start])

        self._for_each_part(update, start, start + grads.shape[0])

    def finish(self):
        """End the step that `begin` began; return the NormReading of all parts' gradients.

        If it is not finite, the step counts as skipped.
        """
        self._join()
        self._norm.arrays["sum"][...] = self._scalars[8:9]
        return self._end_step()

    def _prepare(self, learning_rate):
        """Copy to the device what the kernels of the next step read."""
        step = self.steps + 1
        config = self.config
        settings = config.beta1, config.beta2, config.epsilon, config.weight_decay
        arrays = {"scalars": adamw_scalars(learning_rate, *settings, step)}
        if self.is_rounded_at_random:
            arrays["noise"] = rounding_noise(config.seed, step)
            self._noise = self._step.arrays["noise"]
        self._step.send(arrays)

    def _adamw(self, part, state, grads):
        """One step of a slice of the parameters from its gradients."""
        decay_end = min(max(self.weights.decay_end - part.start, 0), part.stop - part.start)
        operator, moments = adamw, tuple(state[name] for name in MOMENTS[self.config.optim])
        if self.config.optim == "adamw_8bit":
            operator, moments = adamw_8bit, Moments(*moments)
        weights, master, first = self.weights.flat[part], state.get("master"), self.first_element + part.start
        operator(weights, master, grads, moments, self._scalars, decay_end, self._noise, first)

    def _join(self):
        """Let the current stream, but not the host, wait for what was launched on those of offload."""
        for lane in self._lanes:
            current().wait_for(lane.context)

    def _for_each_part(self, function, begin=0, end=None, reads=True):
        """Call function(part, state) with slices of the parameters, and the state of each in place.

        The slices make up elements [begin, end), by default all. reads: whether the function reads the state or only
        writes it. With offload the caller has to _join.
        """
        end = self.weights.flat.shape[0] if end is None else end
        length = CHUNK if self.config.offload else max(end - begin, 1)
        for lane in self._lanes:
            lane.context.wait_for(current())
        for index, start in enumerate(range(begin, end, length)):
            part = slice(start, min(start + length, end))
            host = {
                name: self.state[name][start // each : -(-part.stop // each)] for name, (_, each) in self.layout.items()
            }
            if not self._lanes:
                function(part, host)
                continue
            lane = self._lanes[index % STREAMS]
            with lane.context.use():
                staged = {name: lane.state[name][: len(array)] for name, array in host.items()}
                if reads:
                    for name, array in host.items():
                        _copy(array.ctypes.data, staged[name].data.ptr, array.nbytes, lane.context.stream)
                function(part, staged)
                for name, array in host.items():
                    _copy(staged[name].data.ptr, array.ctypes.data, array.nbytes, lane.context.stream)

    def state_dict(self):
        """The state for a resumed run: optim, NumPy arrays of the state (m, v, ..., master), and the counters."""
        arrays = {key: device.host_copy(array) for key, array in self.state.items()}
        return {"optim": self.config.optim, **arrays, "steps": self.steps, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state):
        """Restore what state_dict returned; of a 16-bit model also set the weights to the rounded master.

        Raises UserError if it is of another optim, or if an array is missing, not expected, or not of this model's
        size.
        """
        saved = state.get("optim", "adamw_torch")
        if saved != self.config.optim:
            own = self.config.optim
            raise UserError(f"optimizer state: saved with train.optim = {saved!r}, and this run has {own!r}")
        arrays = self.state
        got_names, expected_names = {*state} - {"optim"}, {*arrays, "steps", "skipped_steps"}
        expected, got = (", ".join(sorted(names)) for names in (expected_names, got_names))
        if got != expected:
            keys = "train.dtype or train.master_weights"
            raise UserError(f"optimizer state: expected {expected}, got {got}; was it saved with another {keys}?")
        for key, array in arrays.items():
            if state[key].shape != array.shape:
                raise UserError(f"optimizer state: {key} must be {array.shape}, got {state[key].shape}")
        device.synchronize()
        for key, array in arrays.items():
            if self.config.offload:
                array[...] = state[key]
        if not self.config.offload:
            copy_to_device([(array, state[key]) for key, array in arrays.items()])
        if "master" in arrays:
            self._for_each_part(lambda part, state: cast(state["master"], self.weights.flat[part]))
            self._join()
        self._last = None
        self._steps, self._skipped_steps = int(state["steps"]), int(state["skipped_steps"])


class NormReading:
    """The Euclidean norm of a step's gradient, on its way to the host: reading it waits for the device.

    read: of Staged, with the sum of squares; skipped_before: how many steps had been skipped before this one.
    """

    def __init__(self, read, skipped_before):
        self._read, self._skipped_before = read, skipped_before

    def __float__(self):
        return math.sqrt(self._read()["sum"][0])

    @property
    def is_finite(self):
        return math.isfinite(float(self))

    @property
    def skipped_steps(self):
        """The number of steps that have been skipped up to this one."""
        return self._skipped_before + (not self.is_finite)


class _Lane:
    """One stream of offload_optimizer, and the device memory for the state of one chunk of `length` parameters."""

    def __init__(self, layout, length):
        xp = device.xp()
        self.context = Context(xp.cuda.Stream(non_blocking=True))
        self.state = {name: xp.empty(-(-length // each), kind) for name, (kind, each) in layout.items()}


def _track(owner, region, *states):
    nbytes = sum(array.nbytes for state in states for array in state.values())
    memory.track(region, nbytes)
    weakref.finalize(owner, memory.track, region, -nbytes)


def _copy(source, target, nbytes, stream):
    """Copy between addresses of pinned host memory and of the device, in the order of a stream."""
    from cupy.cuda import runtime

    runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, stream.ptr)


def empty_pinned(size, dtype):
    """A NumPy array (size,) of page-locked memory on the GPU's machine, which copies reach at full speed; else any."""
    if device.name() != "cuda":
        return device.xp().empty(size, dtype)
    from cupy.cuda import PinnedMemory, PinnedMemoryPointer

    nbytes = size * dtype.itemsize
    # Not from CuPy's pool, which rounds up to a power of two.
    return np.frombuffer(PinnedMemoryPointer(PinnedMemory(max(nbytes, 1)), 0), np.uint8, nbytes).view(dtype)


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
