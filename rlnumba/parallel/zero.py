"""The optimizer of several ranks, each of which has a part of its state (ZeRO, stage 2: Rajbhandari et al. 2020).

    rank r        elements [start, stop) of master weights, moments and the step's gradient A
    all ranks     all weights, in the model's dtype

    after each round of micro-batches k, k + 1, ... on ranks 0, 1, ...      A = ((A + g_k) + g_k+1) + ...     fold
    which may move gradients during the next round's forward                                                  begin_fold
    or during its backward, layer by layer, of those that are complete                                  begin_fold_part
    step          sums of squares by segments -> all ranks, added in order -> norm, one decision to skip
                  AdamW of the rank's part
                  weights of all parts -> all ranks

Parts are whole segments of the gradient's norm (kernels/nn/reduce.py), so that a segment's sum is computed by one rank,
and whole blocks of 8-bit moments. Nothing here depends on the number of ranks R but who computes what: an element's
step reads its own gradient, moments and position, which also numbers the random bits of rounding. So weights, and the
state that the ranks write (saving.py), have the bits of one rank's, and a state saved on R ranks continues on any other
number.
"""

import weakref
from typing import NamedTuple

import numpy as np

from rlnumba.checkpoint import ArrayPart
from rlnumba.errors import UserError
from rlnumba.kernels.nn import reduce
from rlnumba.optim import DEFAULTS, Optimizer
from rlnumba.runtime import device, memory

F32 = np.dtype(np.float32)
# Segments that are moved at a time. On 8 ranks the weights that arrive have 256 MiB in 16 bits.
PIECE_SEGMENTS = 16


class Part(NamedTuple):
    """A rank's part of the parameters, elements [start, stop); the last parts may be shorter, or empty."""

    start: int
    stop: int

    @staticmethod
    def of(size, rank, world_size):
        """The part of a rank of `size` parameters."""
        segments = -(-reduce.num_segments(size) // world_size)
        start, stop = (min(each * segments * reduce.SEGMENT, size) for each in (rank, rank + 1))
        return Part(start, stop)

    @property
    def size(self):
        return self.stop - self.start

    def of_state(self, each):
        """The slice of an array of the state with an element for each `each` parameters."""
        # The start of an empty part, the model's end, need not be a multiple of `each`.
        return slice(self.start // each, -(-self.stop // each)) if self.size else slice(0)


class _Flat(NamedTuple):
    """The part of weights or gradients that an Optimizer reads."""

    flat: object
    decay_end: int = 0


class ShardedOptimizer(Optimizer):
    """AdamW for one model on the ranks of a Communicator, all of which call each method at the same time.

    weights: as Optimizer's, the same on all ranks; config: AdamWConfig. grads.flat is this rank's part of the step's
    gradient, which `fold` writes. state: that of this rank's part.
    """

    def __init__(self, weights, communicator, config=DEFAULTS):
        self.model_weights, self.communicator = weights, communicator
        size, world_size = self._size(), communicator.world_size
        self.parts = [Part.of(size, rank, world_size) for rank in range(world_size)]
        self.part = part = self.parts[communicator.rank]
        decay_end = min(max(weights.decay_end - part.start, 0), part.size)
        with memory.allocating("grads", part.size * F32.itemsize):
            grads = _Flat(device.xp().zeros(part.size, F32))
        memory.track("grads", grads.flat.nbytes)
        weakref.finalize(self, memory.track, "grads", -grads.flat.nbytes)
        own = _Flat(self._own_weights(), decay_end)
        super().__init__(own, grads, config, part.start)
        # The sums of all ranks' parts, each as long as the first, which is the longest.
        self._own_sums = device.xp().zeros(reduce.num_segments(self.parts[0].size), np.float32)
        self._sums = device.xp().zeros((world_size, len(self._own_sums)), np.float32)

    def _size(self):
        """The number of parameters."""
        return self.model_weights.flat.shape[0]

    def _own_weights(self):
        """This rank's part of the weights, which its steps write."""
        return self.model_weights.flat[self.part.start : self.part.stop]

    def fold(self, gradient, count, is_first):
        """Add the gradients of `count` micro-batches, of ranks 0, 1, ..., to that of the step, in this order.

        gradient: (P,) f32 of this rank, complete; not read, and may be None, on ranks >= count. is_first: the step's
        first round, whose first gradient is copied.
        """
        self.begin_fold(gradient, count, is_first)()

    def begin_fold(self, gradient, count, is_first):
        """The first half of `fold`, returning the second, as Communicator.begin_fold."""
        return self.communicator.begin_fold(gradient, self.grads.flat, self.part.start, count, is_first)

    def begin_fold_part(self, start, gradient, count, is_first):
        """The same as begin_fold, but for the elements start, start + 1, ... alone: gradient (n,) f32, the same n on
        all ranks."""
        lower = min(max(start, self.part.start), start + len(gradient))
        upper = min(start + len(gradient), self.part.stop)
        own = slice(lower - self.part.start, upper - self.part.start) if lower < upper else slice(0)
        return self.communicator.begin_fold(gradient, self.grads.flat[own], lower - start, count, is_first)

    def step(self, learning_rate):
        """The same as Optimizer.step, after which all ranks have all weights."""
        norm = super().step(learning_rate)
        self.gather_weights()
        return norm

    def _sum_squares(self, total):
        own = self._own_sums[: reduce.num_segments(self.part.size)]
        reduce.segment_sums_of_squares(self.grads.flat, own)
        self.communicator.gather(self._own_sums, self._sums)
        # The padding is at the end: only the last parts are short.
        segments = reduce.num_segments(self._size())
        reduce.sum_in_order(self._sums.reshape(-1)[:segments], total)

    def gather_weights(self):
        """Give all ranks the weights of every part."""
        flat, world_size = self.weights.flat, self.communicator.world_size
        if world_size == 1:
            return
        longest = self.parts[0].size
        length = min(PIECE_SEGMENTS * reduce.SEGMENT, longest)
        sent, arrived = (device.xp().empty(shape, flat.dtype) for shape in ((length,), (world_size, length)))
        for first in range(0, longest, length):
            own = flat[first : first + length]
            sent[: len(own)] = own
            self.communicator.gather(sent, arrived)
            for rank, part in enumerate(self.parts):
                start = part.start + first
                self._arrived(rank, start, arrived[rank, : max(min(length, part.stop - start), 0)])

    def _arrived(self, rank, first, values):
        """Take the weights first, first + 1, ... of a rank's part."""
        if rank != self.communicator.rank:
            self.model_weights.flat[first : first + len(values)] = values

    def state_dict(self):
        """The same as Optimizer.state_dict, but each array is an ArrayPart: those of all ranks make up what one rank
        has, with its bits."""
        self._join()
        size = self._size()
        arrays = {
            name: ArrayPart(device.host_copy(self.state[name]), self.part.of_state(each).start or 0, -(-size // each))
            for name, (_, each) in self.layout.items()
        }
        return {"optim": self.config.optim, **arrays, "steps": self.steps, "skipped_steps": self.skipped_steps}

    def gathered(self, name):
        """An array of the state of all parts, on the host of rank 0, where it arrives a piece at a time; else None.

        For an adapter's master, which is small.
        """
        own, rank, xp, (_, each) = self.state[name], self.communicator.rank, device.xp(), self.layout[name]
        length = PIECE_SEGMENTS * reduce.SEGMENT // each
        if rank:
            for first in range(0, len(own), length):
                self.communicator.put(device.asarray(own[first : first + length]), 0)
            return None
        whole = np.empty(-(-self._size() // each), own.dtype)
        device.synchronize()
        whole[self.part.of_state(each)] = own if self.config.offload else device.to_host(own)
        for other in range(1, self.communicator.world_size):
            target = whole[self.parts[other].of_state(each)]
            for first in range(0, len(target), length):
                piece = target[first : first + length]
                arrived = xp.empty(piece.shape, piece.dtype)
                self.communicator.get(arrived, other)
                piece[...] = device.to_host(arrived)
        return whole

    def load_state_dict(self, state):
        """Restore what any number of ranks have saved; every rank is given whole arrays, and reads its part of them.

        Raises UserError as Optimizer's.
        """
        own, size = dict(state), self._size()
        for name, (_, each) in self.layout.items():
            if name not in state:
                continue
            if state[name].shape != (-(-size // each),):
                raise UserError(f"optimizer state: {name} must be {(-(-size // each),)}, got {state[name].shape}")
            own[name] = state[name][self.part.of_state(each)]
        super().load_state_dict(own)
        self.gather_weights()
