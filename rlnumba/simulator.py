"""What Numba's CUDA simulator lacks and our kernels need: warps, and one `cuda` for all modules.

In the simulator (NUMBA_ENABLE_CUDASIM=1) a block runs as one Python thread per CUDA thread. A warp-wide
instruction becomes a rendezvous of 32 such threads: each leaves its operands, one of them computes the
results of all 32 lanes from the instruction's documented meaning, each takes its own. A lane that never
comes breaks the rendezvous with an error that names the instruction, where hardware would hang or
answer nonsense.
"""

import functools
import sys
import threading

import numpy as np
from numba import cuda as numba_cuda
from numba.cuda.simulator.kernel import _get_kernel_context

WARP = 32
# Seconds a lane waits for the others: time to look around at a pdb prompt in one lane,
# and an end to a test suite whose kernel diverges.
TIMEOUT_S = 600.0

_lock = threading.Lock()


class SharedArrays:
    """`cuda.shared`: arrays of one block, told apart by the source line that declares them."""

    @staticmethod
    def array(shape, dtype, alignment=None):
        if shape == 0:
            return _get_kernel_context().shared.array(0, np.dtype(dtype))
        caller = sys._getframe(1)
        block = threading.current_thread()._manager
        key = (caller.f_code, caller.f_lineno)
        with _lock:
            arrays = block.__dict__.setdefault("shared_arrays", {})
            if key not in arrays:
                # A throw-away context, so that Numba's own rules for shapes and types apply.
                arrays[key] = type(_get_kernel_context().shared)(0).array(shape, dtype)
            return arrays[key]


class SimulatedCuda:
    """The module numba.cuda, or inside a running kernel the simulator's picture of it.

    Numba puts its picture into the globals of the kernel's own module only; a device function of another
    module would see the bare module, which has no threadIdx. Looking the attribute up at each use works
    everywhere.
    """

    def __getattr__(self, name):
        context = _get_kernel_context()
        if context is None:
            return getattr(numba_cuda, name)
        if name == "shared":
            return SharedArrays
        return getattr(context, name)


class Warp:
    """Meeting place of the 32 lanes of a warp."""

    def __init__(self):
        self.barrier = threading.Barrier(WARP)
        self.operands = [None] * WARP
        self.results = None

    def together(self, lane, operands, compute):
        self.operands[lane] = operands
        try:
            if self.barrier.wait(TIMEOUT_S) == 0:
                self.results = compute(self.operands)
            self.barrier.wait(TIMEOUT_S)
            mine = self.results[lane]
            # Nobody may overwrite operands or results before all have taken theirs.
            self.barrier.wait(TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise RuntimeError(f"{compute.__name__}: not all 32 lanes of the warp arrived") from None
        return mine


def warp_wide(compute):
    """Turn compute(operands of the 32 lanes) -> results of the 32 lanes into a function for each lane."""

    @functools.wraps(compute)
    def lane_call(*operands):
        thread = threading.current_thread()
        index, lane = divmod(thread.thread_id, WARP)
        with _lock:
            warps = thread._manager.__dict__.setdefault("warps", {})
            warp = warps.setdefault(index, Warp())
        return warp.together(lane, operands, compute)

    return lane_call
