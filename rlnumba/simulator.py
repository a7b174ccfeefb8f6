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
        # A throw-away context makes the array, so that Numba's own rules for shapes and types apply.
        return of_block(
            "shared array",
            (caller.f_code, caller.f_lineno),
            lambda: type(_get_kernel_context().shared)(0).array(shape, dtype),
        )


class SimulatedCuda:
    """The module numba.cuda, or inside a running kernel the simulator's picture of it.

    Numba puts its picture into the globals of the kernel's own module only; a device function of another
    module would see the bare module, which has no threadIdx. Looking the attribute up at each use works
    everywhere.
    """

    @staticmethod
    def jit(function=None, *, max_registers=None, launch_bounds=None, lineinfo=False, **options):
        """Numba's jit; registers and line tables are the hardware's concern."""
        return numba_cuda.jit(function, **options)

    def __getattr__(self, name):
        context = _get_kernel_context()
        if context is None:
            return getattr(numba_cuda, name)
        if name == "shared":
            return SharedArrays
        return getattr(context, name)


class Meeting:
    """Where the threads of a warp or a warpgroup come together."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size)
        self.operands = [None] * size
        self.results = None

    def together(self, position, operands, compute):
        self.operands[position] = operands
        try:
            if self.barrier.wait(TIMEOUT_S) == 0:
                self.results = compute(self.operands)
            self.barrier.wait(TIMEOUT_S)
            mine = self.results[position]
            # Nobody may overwrite operands or results before all have taken theirs.
            self.barrier.wait(TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise RuntimeError(f"{compute.__name__}: not all {self.size} threads arrived") from None
        return mine


def of_block(kind, key, make):
    """The block's object of a kind (a string) and key, made by make() at its first use."""
    block = threading.current_thread()._manager
    with _lock:
        objects = block.__dict__.setdefault("rlnumba_objects", {}).setdefault(kind, {})
        if key not in objects:
            objects[key] = make()
        return objects[key]


def gathered(size):
    """Decorator for an instruction that `size` neighbouring threads execute as one.

    The decorated compute(operands of all) -> results of all becomes a function that each thread calls.
    """

    def decorate(compute):
        @functools.wraps(compute)
        def call(*operands):
            index, position = divmod(threading.current_thread().thread_id, size)
            meeting = of_block(f"meeting of {size}", index, lambda: Meeting(size))
            return meeting.together(position, operands, compute)

        return call

    return decorate


warp_wide = gathered(WARP)
warpgroup_wide = gathered(4 * WARP)
