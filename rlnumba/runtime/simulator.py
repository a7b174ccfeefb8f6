"""Runs kernels on the CPU, thread by thread, and makes race conditions visible that a GPU would hide.

Numba's simulator (NUMBA_ENABLE_CUDASIM=1) gives a kernel Python's meaning; this module runs it. Each CUDA thread is
a coroutine of one OS thread: it runs until it waits for other threads, then the next one runs. So a run is
reproducible, a debugger sees one thread of execution, and a deadlock raises an error that names the barrier at which
each thread waits.

A warp-wide instruction is a collective of 32 threads: each contributes its operands, the last one computes the results
of all lanes from the instruction's documented meaning, and each lane gets its own.

Asynchronous operations, above all TMA copies and wgmma, complete as late as possible: when no thread can run any more,
and then in any order. Until then their destination holds NaN. A kernel that omits a wait therefore computes NaN, or the
simulated instruction finds that its operands have changed and raises an error. Inside launch.pdl_scope a kernel with
programmatic dependent launch begins before all kernels ahead of it, which run when it reaches griddepcontrol_wait: what
it reads of theirs before is old. RLNUMBA_SIMULATOR_SEED=N draws at random which warp has precedence, so that one may be
far ahead of the others, and when an operation completes; equal bits for several N are evidence that no barrier is
absent. Source of precedence: Burckhardt et al. 2010, A Randomized Scheduler with Probabilistic Guarantees of Finding
Bugs.
"""

import functools
import itertools
import os
import random
import sys
from collections import deque

import greenlet
import numpy as np
from numba import cuda as numba_cuda
from numba.cuda.np import numpy_support
from numba.cuda.simulator.kernelapi import Dim3, FakeCUDAModule, swapped_cuda_module

from rlnumba.runtime.arguments import leaves

WARP = 32
SEED = os.environ.get("RLNUMBA_SIMULATOR_SEED")
# With a seed, the probability that a pending operation completes before the next thread runs.
COMPLETION_PROBABILITY = 0.25
# And the probability that a warp that is ready has another precedence when the next warp is chosen.
CHANGE_PROBABILITY = 0.02
# Blocks that are resident at the same time.
RESIDENT_BLOCKS = 2
# The NaN that a GPU's arithmetic returns, whatever its operands are. NumPy's has other bits, and keeps those of an
# operand. Bits are seen where a float32 becomes an integer or a shorter float, or is stored by its address: the
# instructions that do so write this one, as do the products of tensor cores.
NAN = np.int32(0x7FFFFFFF).view(np.float32)
# The same of both 16-bit types.
NAN_16_BITS = np.uint16(0x7FFF)

# The thread that runs now, and numba.cuda as the kernel sees it; both None outside of kernels.
_thread = None
_kernel = None


class Thread:
    """A CUDA thread and the coroutine that runs it. index: its linear index in the block; thread_idx: a Dim3."""

    __slots__ = ("block", "index", "thread_idx", "coroutine", "awaited", "state", "exit_checks")

    def __init__(self, block, index, thread_idx, function):
        self.block, self.index, self.thread_idx = block, index, thread_idx
        self.coroutine = greenlet.greenlet(function)
        # The barrier or instruction at which it waits, for the message of a deadlock.
        self.awaited = None
        # State that simulated instructions keep from one call of this thread to the next, by name.
        self.state = {}
        # Called when the thread returns; each raises if an operation of the thread is unfinished.
        self.exit_checks = []

    def go_on(self):
        """Leave the coroutine that runs for this thread's."""
        global _thread
        _thread = self
        self.coroutine.switch()


class Condition:
    """A condition variable: threads wait until another one opens it."""

    def __init__(self):
        self.waiting = []

    def wait(self, what):
        """Suspend this thread until notify_all; what: its name in the message of a deadlock."""
        thread = _thread
        self.waiting.append(thread)
        thread.awaited = what
        grid = thread.block.grid
        # Do as the scheduler would, without a detour over it. A coroutine that begins here would count its calls as
        # if this one had made them, up to Python's limit.
        if grid.ready and grid.ready[0].coroutine and not SEED:
            grid.ready.popleft().go_on()
        else:
            grid.scheduler.switch()
        thread.awaited = None

    def notify_all(self):
        """Make all waiting threads ready to run."""
        if self.waiting:
            self.waiting[0].block.grid.ready.extend(self.waiting)
            self.waiting = []


class Grid:
    """Schedules the threads of a kernel's blocks, RESIDENT_BLOCKS at a time."""

    def __init__(self, shared_bytes, arguments, earlier):
        self.shared_bytes, self.earlier, self.dependency = shared_bytes, earlier, Condition()
        # Addresses of the arguments that are arrays, by identity: NumPy takes a microsecond to give an address.
        self.addresses = {id(array): array.ctypes.data for array in leaves(arguments) if isinstance(array, np.ndarray)}
        self.random = random.Random(SEED or 0)
        self.scheduler = greenlet.getcurrent()
        self.blocks = []
        self.objects = {}
        self.ready = deque()
        # Asynchronous operations that are not complete: functions without arguments that complete them.
        self.pending = []
        # With a seed: the precedence of (block, warp), the least first, and the one that runs.
        self.precedence, self.warp = {}, None

    def run(self, function, block_dim, block_indices):
        """Run all blocks to their ends; block_dim: threads of a block in x, y, z."""
        block_indices = iter(block_indices)
        while True:
            for block_idx in itertools.islice(block_indices, RESIDENT_BLOCKS - len(self.blocks)):
                self.blocks.append(BlockState(self, block_idx, block_dim, function))
            if self.pending and (not self.ready or SEED and self.random.random() < COMPLETION_PROBABILITY):
                self.pending.pop(self.random.randrange(len(self.pending)))()
            elif self.ready:
                self._run_threads()
            elif self.blocks:
                self._raise_deadlock()
            else:
                return

    def complete_earlier(self):
        """Run the kernels before this one, if they have not run."""
        earlier, self.earlier = self.earlier, None
        if earlier:
            earlier()
            self.dependency.notify_all()

    def _run_threads(self):
        """Run ready threads, the first one first, until one returns or none is ready; with a seed one that it draws."""
        global _thread
        ready = self.ready
        if SEED:
            self._draw_thread()
        try:
            while ready:
                ready.popleft().go_on()
                # A coroutine that ends comes back to where it was made, here.
                if _thread.coroutine.dead:
                    for check in _thread.exit_checks:
                        check()
                    _thread.block.thread_returned()
                    return
                if SEED:
                    return
        except Exception as error:
            error.add_note(f"in thread {_thread.thread_idx} of block {_thread.block.block_idx}")
            raise
        finally:
            _thread = None

    def _draw_thread(self):
        """Let a thread of the warp that runs be the first one, or, where all of its threads wait, of the next warp.

        Threads of a warp go on together, as those of a GPU do behind a loop or a branch.
        """
        ready, precedence = self.ready, self.precedence
        warps = [(thread.block, thread.index // WARP) for thread in ready]
        if self.warp not in warps:
            for warp in dict.fromkeys(warps):
                if warp not in precedence or self.random.random() < CHANGE_PROBABILITY:
                    precedence[warp] = self.random.random()
            self.warp = min(warps, key=precedence.get)
        ready.rotate(-warps.index(self.warp))

    def _raise_deadlock(self):
        block, groups, returned = self.blocks[0], {}, "have returned"
        waiting = [thread for thread in block.threads if not thread.coroutine.dead]
        for thread in block.threads:
            what = returned if thread.coroutine.dead else f"wait in {thread.awaited}"
            groups.setdefault(what, []).append(thread)
        parts = [f"{ranges(groups[what])} {what}" for what in sorted(groups, key=lambda what: what == returned)]
        # Raised where the first of them waits, so that the traceback shows the kernel's line.
        waiting[0].coroutine.throw(RuntimeError(f"block {block.block_idx} is stuck: {'; '.join(parts)}"))


class BlockState:
    """The threads of one block, and the state that they share."""

    def __init__(self, grid, block_idx, block_dim, function):
        self.grid = grid
        self.block_idx = Dim3(*block_idx)
        self.objects = {}
        self.dynamic_shared = poisoned(grid.shared_bytes, np.uint8)
        self.condition = Condition()
        self.threads = [Thread(self, i, index, function) for i, index in enumerate(thread_indices(tuple(block_dim)))]
        self.running = len(self.threads)
        grid.ready.extend(self.threads)

    def thread_returned(self):
        """Syncthreads no longer waits for a thread that has returned."""
        self.running -= 1
        if len(self.condition.waiting) == self.running:
            self.condition.notify_all()
        if not self.running:
            self.grid.blocks.remove(self)

    def syncthreads(self):
        """Wait for all threads of the block that have not returned."""
        if len(self.condition.waiting) + 1 < self.running:
            self.condition.wait("syncthreads")
        else:
            self.condition.notify_all()


def ranges(threads):
    """The indices of threads as text: "threads 0-19, 24"."""
    parts = []
    for _, run in itertools.groupby(enumerate(thread.index for thread in threads), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        parts.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]))
    return "threads " + ", ".join(parts)


@functools.cache
def thread_indices(block_dim):
    """threadIdx of a block's threads, in the order of their linear indices: list of Dim3."""
    return [Dim3(*index[::-1]) for index in np.ndindex(*block_dim[::-1])]


@functools.cache
def poison(shape, dtype):
    """An array of NAN, or of other types with all bits set, to be copied."""
    dtype = element_type(dtype)
    if dtype == np.float32:
        return np.full(shape, NAN)
    return np.full(int(np.prod(shape)) * dtype.itemsize, 0xFF, np.uint8).view(dtype).reshape(shape)


def poisoned(shape, dtype):
    """Uninitialized memory of a NumPy or Numba type: NaN or -1."""
    return poison(shape, dtype).copy()


def with_gpu_nans(values):
    """An array of float32 as a GPU computes them: each NaN is NAN."""
    is_nan = np.isnan(values)
    return np.where(is_nan, NAN, values) if is_nan.any() else values


class SharedArrays:
    """`cuda.shared`: arrays of one block, identified by the call that declares them."""

    @staticmethod
    def array(shape, dtype):
        block = _thread.block
        if shape == 0:
            dtype, memory = element_type(dtype), block.dynamic_shared
            return memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)
        caller = sys._getframe(1)
        place = id(caller.f_code), caller.f_lasti
        if place not in block.objects:
            block.objects[place] = poisoned(shape, dtype)
        return block.objects[place]


class LocalArrays:
    """`cuda.local`: arrays of one thread."""

    @staticmethod
    def array(shape, dtype):
        return poisoned(shape, dtype)


@functools.cache
def element_type(dtype):
    """The NumPy dtype of an array that a kernel declares with a NumPy or Numba type."""
    return np.dtype(dtype) if isinstance(dtype, (type, np.dtype)) else np.dtype(numpy_support.as_dtype(dtype))


class ThreadsCuda:
    """The attributes of numba.cuda that depend on the running thread."""

    shared = SharedArrays
    local = LocalArrays
    threadIdx = property(lambda self: _thread.thread_idx)
    blockIdx = property(lambda self: _thread.block.block_idx)
    laneid = property(lambda self: _thread.index % WARP)

    @staticmethod
    def syncthreads():
        _thread.block.syncthreads()

    @staticmethod
    def fma(a, b, c):
        return a * b + c


class KernelCuda(ThreadsCuda, FakeCUDAModule):
    """numba.cuda as a running kernel sees it: Numba's simulation, with the threads of this module."""

    # Numba's simulation of these uses Python's integers, in which a negative one has no highest bit.
    def popc(self, value):
        return bits(value).count("1")

    def ffs(self, value):
        return bits(value)[::-1].find("1") + 1

    def clz(self, value):
        return (bits(value) + "1").index("1")


def bits(value):
    """The bits of an integer of a NumPy type as text, the highest first."""
    width = 8 * np.asarray(value).itemsize
    return f"{int(value) % (1 << width):0{width}b}"


class SimulatedCuda(ThreadsCuda):
    """The module numba.cuda, or inside a running kernel KernelCuda; looked up at each use of an attribute.

    Attributes that kernels use all the time are found at once, without __getattr__.
    """

    blockDim = property(lambda self: _kernel.blockDim)
    gridDim = property(lambda self: _kernel.gridDim)

    @staticmethod
    def jit(function=None, *, max_registers=None, launch_bounds=None, lineinfo=False, **options):
        """Numba's jit, without the options that only affect machine code."""
        return numba_cuda.jit(function, **options)

    def __getattr__(self, name):
        return getattr(numba_cuda if _kernel is None else _kernel, name)


def run(function, grid, block, shared_bytes, arguments, earlier=None):
    """Run a kernel's Python function for each thread of each block; blocks start in the order of their indices.

    grid, block: three lengths; shared_bytes: of dynamic shared memory; arguments: NumPy arrays, scalars and NamedTuples
    of them. earlier: a function that runs the kernels before this one; it is called as late as programmatic dependent
    launch allows: when threads are in griddepcontrol_wait and no other one can run, or all have returned. An exception
    of a thread ends the run, with a note that names the thread.
    """
    global _kernel
    before, _kernel = _kernel, KernelCuda(grid, block, 0)
    try:
        # For kernels of modules that import numba.cuda itself.
        with swapped_cuda_module(function, _kernel):
            block_indices = (index[::-1] for index in np.ndindex(*grid[::-1]))
            simulated = Grid(shared_bytes, arguments, earlier)
            simulated.run(lambda: function(*arguments), block, block_indices)
            simulated.complete_earlier()
    finally:
        _kernel = before


def wait_for_earlier_kernels():
    """The simulated griddepcontrol.wait."""
    grid = _thread.block.grid
    if grid.earlier:
        if not grid.dependency.waiting:
            complete_async(grid.complete_earlier)
        grid.dependency.wait("griddepcontrol_wait")


def current_thread():
    """The Thread that runs now."""
    return _thread


def address_in_kernel(array):
    """The address of an array that a kernel has."""
    return _thread.block.grid.addresses.get(id(array)) or array.ctypes.data


def complete_async(action):
    """Start an asynchronous operation: action() completes it, at the latest when no thread can run any more."""
    _thread.block.grid.pending.append(action)


def block_state(key, make, owner=None):
    """State of the block under a key, made by make() at its first use."""
    objects = (owner or _thread.block).objects
    if key not in objects:
        objects[key] = make()
    return objects[key]


def grid_state(key, make):
    """State of the grid, as block_state."""
    return block_state(key, make, _thread.block.grid)


class Collective:
    """An instruction that the threads of a warp or a warpgroup execute together: its operands and results by lane."""

    __slots__ = ("compute", "condition", "operands", "missing", "results")

    def __init__(self, compute, size):
        self.compute, self.condition, self.operands, self.missing = compute, Condition(), [None] * size, size


def collective(size):
    """Decorator for an instruction that `size` consecutive threads execute together.

    The decorated compute(operands of all) -> results of all becomes a function that each thread calls.
    """

    def decorate(compute):
        """compute as a function of one thread's operands."""
        name = compute.__name__

        @functools.wraps(compute)
        def call(*operands):
            """Leave the operands; the last of the threads computes all results, for which the others wait."""
            thread = _thread
            index, lane = divmod(thread.index, size)
            objects, key = thread.block.objects, (size, index)
            operation = objects.get(key)
            if operation is None:
                operation = objects[key] = Collective(compute, size)
            elif operation.compute is not compute:
                raise RuntimeError(f"{name}: other threads of the {size} are in {operation.compute.__name__}")
            operation.operands[lane] = operands
            operation.missing -= 1
            if operation.missing:
                operation.condition.wait(name)
            else:
                # Before the next instruction of these threads begins.
                del objects[key]
                operation.results = compute(operation.operands)
                operation.condition.notify_all()
            return operation.results[lane]

        return call

    return decorate


warp_wide = collective(WARP)
warpgroup_wide = collective(4 * WARP)
