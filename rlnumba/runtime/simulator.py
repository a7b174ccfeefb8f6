"""Runs kernels on the CPU, thread by thread, and shows the mistakes that a GPU would hide.

Numba's simulator (NUMBA_ENABLE_CUDASIM=1) gives a kernel Python's meaning; this module runs it. Each CUDA thread is
a coroutine of one OS thread: it runs until it has to wait for others, then the next one runs. So a run is repeatable,
a debugger sees one thread of execution, and a block whose threads wait for what never comes is told at once, with
what they wait for.

A warp-wide instruction is a meeting of 32 threads: each leaves its operands, the last to come computes the results of
all lanes from the instruction's documented meaning, each takes its own.

What hardware does on its own time, bulk copies above all, happens here as late as it may: when no thread can go on,
and then in any order. Until then its destination holds NaN. A kernel that forgets a wait
therefore computes NaN, or an instruction's twin finds its operands changed and says so. RLNUMBA_SIMULATOR_SEED=N
draws instead which thread runs next and when copies arrive; equal bits for several N are good evidence that no barrier
is missing.
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

WARP = 32
SEED = os.environ.get("RLNUMBA_SIMULATOR_SEED")
# With a seed, how likely a pending copy is to arrive before a thread goes on.
EARLY = 0.25
# Blocks that run at a time.
RESIDENT = 2

# The thread that runs now, and the kernel's picture of numba.cuda; both None outside of kernels.
_thread = None
_kernel = None


class Thread:
    """A CUDA thread: its place, and the coroutine that runs it."""

    def __init__(self, block, index, place, function):
        self.block = block
        self.index = index
        self.place = Dim3(*place)
        self.coroutine = greenlet.greenlet(function)
        # What it waits for, for the message if that never comes.
        self.awaited = None
        # What instructions remember from one call of this thread to the next, by their names.
        self.notes = {}
        # Called when the thread returns; raises if something is unfinished.
        self.last_checks = []

    def run(self):
        """Let it run until it waits or returns; True if it returned."""
        global _thread
        _thread = self
        try:
            self.coroutine.switch()
            if self.coroutine.dead:
                for check in self.last_checks:
                    check()
        except Exception as error:
            error.add_note(f"in thread {self.place} of block {self.block.place}")
            raise
        finally:
            _thread = None
        return self.coroutine.dead


class Gate:
    """Where threads wait until another one opens it."""

    def __init__(self):
        self.waiting = []

    def wait(self, what):
        """Let other threads run until the gate opens; what: for the message if it never does."""
        thread = _thread
        self.waiting.append(thread)
        thread.awaited = what
        thread.block.grid.scheduler.switch()
        thread.awaited = None

    def open(self):
        """All who wait may go on."""
        if self.waiting:
            self.waiting[0].block.grid.ready.extend(self.waiting)
            self.waiting = []


class Grid:
    """Runs a kernel's blocks, a few at a time as an SM does."""

    def __init__(self, shared_bytes):
        self.shared_bytes = shared_bytes
        self.random = random.Random(SEED or 0)
        self.scheduler = greenlet.getcurrent()
        self.blocks = []
        self.objects = {}
        self.ready = deque()
        # What hardware will do on its own time: functions without arguments.
        self.pending = []

    def run(self, function, shape, places):
        """Run all blocks to their ends; shape: of a block, places: of the blocks."""
        places = iter(places)
        while True:
            for place in itertools.islice(places, RESIDENT - len(self.blocks)):
                self.blocks.append(Block(self, place, shape, function))
            if self.pending and (not self.ready or SEED and self.random.random() < EARLY):
                self.pending.pop(self.random.randrange(len(self.pending)))()
            elif self.ready:
                if SEED:
                    self.ready.rotate(self.random.randrange(len(self.ready)))
                thread = self.ready.popleft()
                if thread.run():
                    thread.block.leave()
            elif self.blocks:
                self._stuck()
            else:
                return

    def _stuck(self):
        block = self.blocks[0]
        waiting = [thread for thread in block.threads if not thread.coroutine.dead]
        parts = [f"{ranges(group)} wait in {what}" for what, group in grouped(waiting, lambda thread: thread.awaited)]
        gone = [thread for thread in block.threads if thread.coroutine.dead]
        if gone:
            parts.append(f"{ranges(gone)} have returned")
        # Raised where the first of them waits, so that the traceback shows the kernel's line.
        waiting[0].coroutine.throw(RuntimeError(f"block {block.place} is stuck: {'; '.join(parts)}"))


class Block:
    """The threads of one block, and what they share."""

    def __init__(self, grid, place, shape, function):
        self.grid = grid
        self.place = Dim3(*place)
        self.objects = {}
        self.dynamic_shared = poisoned(grid.shared_bytes, np.uint8)
        self.gate = Gate()
        self.votes = []
        x, y, z = shape
        places = ((x_, y_, z_) for z_ in range(z) for y_ in range(y) for x_ in range(x))
        self.threads = [Thread(self, i, place, function) for i, place in enumerate(places)]
        self.arrived, self.alive = 0, len(self.threads)
        grid.ready.extend(self.threads)

    def leave(self):
        """A thread has returned; the others do not wait for it."""
        self.alive -= 1
        self._open_if_all_came()
        if not self.alive:
            self.grid.blocks.remove(self)

    def come(self, vote):
        """cuda.syncthreads with a value from each thread; returns those of all that came."""
        self.votes.append(vote)
        self.arrived += 1
        votes = self.votes
        if not self._open_if_all_came():
            self.gate.wait("syncthreads")
        return votes

    def _open_if_all_came(self):
        if self.arrived < self.alive or not self.arrived:
            return False
        self.arrived, self.votes = 0, []
        self.gate.open()
        return True


def grouped(things, key):
    """(key, things with it) in the order in which each key is first met."""
    groups = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups.items()


def ranges(threads):
    """The numbers of threads for people: "threads 0-19, 24"."""
    parts = []
    for _, run in itertools.groupby(enumerate(thread.index for thread in threads), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        parts.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]))
    return "threads " + ", ".join(parts)


def poisoned(shape, dtype):
    """Memory that nothing was written to: NaN, or -1."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = 0xFF
    return array


class SharedArrays:
    """`cuda.shared`: arrays of one block, told apart by the source line that declares them."""

    @staticmethod
    def array(shape, dtype):
        dtype = element_type(dtype)
        if shape == 0:
            memory = _thread.block.dynamic_shared
            return memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)
        caller = sys._getframe(1)
        return of_block((caller.f_code, caller.f_lineno), lambda: poisoned(shape, dtype))


class LocalArrays:
    """`cuda.local`: arrays of one thread."""

    @staticmethod
    def array(shape, dtype):
        return poisoned(shape, element_type(dtype))


def element_type(dtype):
    """NumPy's type for what a kernel gives as an array's dtype: NumPy's or Numba's."""
    return np.dtype(dtype) if isinstance(dtype, (type, np.dtype)) else np.dtype(numpy_support.as_dtype(dtype))


class KernelCuda(FakeCUDAModule):
    """numba.cuda as a running kernel sees it: Numba's picture, with our threads."""

    shared = SharedArrays
    local = LocalArrays
    threadIdx = property(lambda self: _thread.place)
    blockIdx = property(lambda self: _thread.block.place)
    laneid = property(lambda self: _thread.index % WARP)

    def syncthreads(self):
        _thread.block.come(None)

    def syncthreads_count(self, value):
        return sum(bool(vote) for vote in _thread.block.come(value))

    def syncthreads_and(self, value):
        return int(all(_thread.block.come(value)))

    def syncthreads_or(self, value):
        return int(any(_thread.block.come(value)))

    # Numba's pictures of these take Python's integers, in which a negative one has no bits above its highest.
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


class SimulatedCuda:
    """The module numba.cuda, or inside a running kernel its picture there.

    Looked up at each use, it serves kernels and device functions of all modules alike.
    """

    @staticmethod
    def jit(function=None, *, max_registers=None, launch_bounds=None, lineinfo=False, **options):
        """Numba's jit; registers and line tables are the hardware's concern."""
        return numba_cuda.jit(function, **options)

    def __getattr__(self, name):
        return getattr(numba_cuda if _kernel is None else _kernel, name)


def run(function, grid, block, shared_bytes, arguments):
    """Run a kernel's Python function for each thread of each block; blocks begin in the order of their numbers.

    grid, block: three lengths; shared_bytes: of dynamic shared memory; arguments: NumPy arrays and scalars. An
    exception of a thread ends the run, with a note that names the thread.
    """
    global _kernel
    _kernel = KernelCuda(grid, block, 0)
    try:
        # For kernels of modules that import numba.cuda itself.
        with swapped_cuda_module(function, _kernel):
            places = (place[::-1] for place in np.ndindex(*grid[::-1]))
            Grid(shared_bytes).run(lambda: function(*arguments), block, places)
    finally:
        _kernel = None


def this_thread():
    """The thread that runs."""
    return _thread


def later(action):
    """Let hardware do something on its own time: action() runs at the latest when no thread can go on."""
    _thread.block.grid.pending.append(action)


def of_block(key, make):
    """The block's object of a key, made by make() at its first use."""
    return _once(_thread.block.objects, key, make)


def of_grid(key, make):
    """As of_block, of all blocks."""
    return _once(_thread.block.grid.objects, key, make)


def _once(objects, key, make):
    if key not in objects:
        objects[key] = make()
    return objects[key]


class Meeting:
    """Where the threads of a warp or a warpgroup come together."""

    def __init__(self, size):
        self.gate = Gate()
        self.begin(size)

    def begin(self, size):
        self.operands = [None] * size
        self.missing = size
        self.compute = None


def gathered(size):
    """Decorator for an instruction that `size` neighbouring threads execute as one.

    The decorated compute(operands of all) -> results of all becomes a function that each thread calls.
    """

    def decorate(compute):
        name = compute.__name__

        @functools.wraps(compute)
        def call(*operands):
            thread = _thread
            index, position = divmod(thread.index, size)
            meeting = of_block((size, index), lambda: Meeting(size))
            if meeting.compute not in (None, compute):
                raise RuntimeError(f"{name}: other threads of the {size} are in {meeting.compute.__name__}")
            meeting.compute = compute
            meeting.operands[position] = operands
            meeting.missing -= 1
            if meeting.missing:
                meeting.gate.wait(name)
                return thread.notes.pop(call)
            first = index * size
            operands = meeting.operands
            meeting.begin(size)
            results = compute(operands)
            for other in range(size):
                if other != position:
                    thread.block.threads[first + other].notes[call] = results[other]
            meeting.gate.open()
            return results[position]

        return call

    return decorate


warp_wide = gathered(WARP)
warpgroup_wide = gathered(4 * WARP)
