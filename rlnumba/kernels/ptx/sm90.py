"""Instructions of sm_90a: mbarriers, TMA and bulk copies, named barriers, setmaxnreg.

A kernel's loads and stores go through the tensor memory accelerator (TMA): one thread names a box of a tensor map
(kernels/tile/tensor_map.py), whose lines arrive in shared memory in the 128-byte swizzle (kernels/ptx/shared_memory.py)
and complete a phase of an mbarrier. Runs of consecutive float32 in global memory need no tensor map (bulk_copy_*).
In the simulator copies arrive as late as they may, and their destination holds NaN until then.
Source: PTX ISA, sections on mbarrier, cp.async.bulk, cp.reduce.async.bulk, bar, setmaxnreg.
"""

import functools

import numpy as np

from rlnumba.kernels.ptx.instruction import SIMULATED, address_of, instruction
from rlnumba.kernels.ptx.shared_memory import LINE, memory, read_shared, swizzled_units

if SIMULATED:
    from rlnumba.runtime.simulator import Condition, block_state, complete_async, current_thread

    def tensor_map_address(tensor_map):
        """A tensor map as an argument for TMA instructions."""
        return tensor_map

else:
    tensor_map_address = address_of


# mbarriers.


class Mbarrier:
    """The simulator's mbarrier: a phase completes when all arrivals have come and all expected bytes are there."""

    def __init__(self):
        self.condition = Condition()

    def init(self, count):
        self.count = self.pending = count
        self.bytes = 0
        self.completed = 0

    def update(self, arrivals, nbytes):
        self.pending -= arrivals
        self.bytes += nbytes
        if self.pending == 0 and self.bytes == 0:
            self.pending = self.count
            self.completed += 1
            self.condition.notify_all()

    def wait(self, parity):
        before = self.completed
        if self.completed % 2 == parity:
            self.condition.wait(f"mbarrier_wait of parity {parity}")
        if self.completed > before + 1:
            raise RuntimeError("mbarrier_wait: the next phase was over too before this thread had seen its own end")


def _mbarrier(address):
    return block_state(("mbarrier", int(address)), Mbarrier)


@instruction("mbarrier.init.shared::cta.b64 [$0], $1;", "rr")
def mbarrier_init(address, count):
    """Make the 8 bytes at `address` an mbarrier whose phases need `count` arrivals."""
    _mbarrier(address).init(int(count))


@instruction("fence.mbarrier_init.release.cluster;")
def mbarrier_init_fence():
    """Make initialised mbarriers visible to TMA."""


@instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "rr")
def mbarrier_expect_tx(address, nbytes):
    """Arrive, and add nbytes to those that copies must write before this phase completes."""
    _mbarrier(address).update(1, int(nbytes))


@instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", "r")
def mbarrier_arrive(address):
    """Arrive at the mbarrier, once."""
    _mbarrier(address).update(1, 0)


@instruction("{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra AGAIN; }", "rr")
def mbarrier_wait(address, parity):
    """Wait until the phase of this parity (0 for the first, 1 for the second, 0 ...) has completed."""
    _mbarrier(address).wait(int(parity))


# Copies from global to shared memory.


def start_load(target, mbarrier, write):
    """The simulator's asynchronous copy to shared memory: write() fills it, then its bytes complete at the mbarrier."""
    target[:] = 0xFF
    mbarrier = _mbarrier(mbarrier)

    def arrive():
        write()
        mbarrier.update(0, -len(target))

    complete_async(arrive)


def _load_box(destination, tensor_map, start, mbarrier):
    lines = tensor_map.lines
    target = memory(destination, lines * LINE)

    def write():
        box = tensor_map.read(tuple(map(int, start))).view(np.uint8)
        target.reshape(-1, 16)[swizzled_units(lines)] = box.reshape(lines, 8, 16)

    start_load(target, mbarrier, write)


@instruction(
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {$2, $3}], [$4];", "rlrrr"
)
def tma_load_2d(destination, tensor_map, column, row, mbarrier):
    """Copy the box at (row, column) of a matrix to shared memory, zeros outside the matrix."""
    _load_box(destination, tensor_map, (row, column), mbarrier)


@instruction(
    "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {$2, $3, $4}], [$5];",
    "rlrrrr",
)
def tma_load_3d(destination, tensor_map, column, head, row, mbarrier):
    """Copy the box at (row, head, column) of an array (rows, heads, columns), zeros outside the array.

    Its lines are in the order of the array: all heads of the first row come first.
    """
    _load_box(destination, tensor_map, (row, head, column), mbarrier)


@instruction(
    "{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0; "
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[$0], [$1, {$2, $3}], [$4], first; }",
    "rlrrr",
)
def tma_load_2d_evict_first(destination, tensor_map, column, row, mbarrier):
    """The same as tma_load_2d, for memory that is read once: the first to leave L2."""
    _load_box(destination, tensor_map, (row, column), mbarrier)


@instruction(
    "{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0; "
    "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[$0], [$1, {$2, $3, $4}], [$5], first; }",
    "rlrrrr",
)
def tma_load_3d_evict_first(destination, tensor_map, column, head, row, mbarrier):
    """The same as tma_load_3d, for memory that is read once: the first to leave L2."""
    _load_box(destination, tensor_map, (row, head, column), mbarrier)


@instruction(
    "{ .reg .b32 n; shl.b32 n, $2, 2;"
    " cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], n, [$3]; }",
    "rerr",
)
def bulk_copy_load(destination, array, offset, count, mbarrier):
    """Copy `count` float32 from element `offset` of a flat array to shared memory; both at multiples of 16 bytes."""
    target = memory(destination, 4 * int(count))

    def write():
        target[:] = array[offset : offset + count].view(np.uint8)

    start_load(target, mbarrier, write)


@instruction("prefetch.tensormap [$0];", "l")
def prefetch_tensor_map(tensor_map):
    """Fetch a tensor map ahead of the first copy that uses it."""


@instruction("fence.proxy.tensormap::generic.acquire.gpu [$0], 128;", "l")
def acquire_tensor_map(tensor_map):
    """Let TMA see what was written to a tensor map: an SM keeps those that it has read."""


# Copies from shared to global memory, in bulk groups of the thread that starts them.


class BulkStore:
    """The simulator's copy from shared to global memory: write(content) when it is waited for, or at the end."""

    def __init__(self, source, nbytes, write):
        self.source, self.write, self.reading = read_shared(source, nbytes), write, True
        thread = current_thread()
        thread.state.setdefault("stores", []).append(self)
        thread.exit_checks.append(self.check_read)
        complete_async(self.finish)

    def check_read(self):
        """Raise if the block's shared memory is still read when it is given to another block."""
        if self.reading:
            raise RuntimeError("returned without waiting for its bulk stores")

    def finish_reading(self):
        if self.reading:
            self.source.check()
            self.reading = False

    def finish(self):
        """Write, unless that was done."""
        if self.write:
            self.write(self.source.content)
            self.write = None


def _store_box(source, tensor_map, start, add):
    def write(content):
        lines = content.reshape(-1, 16)[swizzled_units(tensor_map.lines)]
        box = np.ascontiguousarray(lines).view(tensor_map.array.dtype).reshape(tensor_map.box)
        tensor_map.write(tuple(map(int, start)), box, add)

    BulkStore(source, tensor_map.lines * LINE, write)


@instruction("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [$0, {$1, $2}], [$3];", "lrrr")
def tma_store_2d(tensor_map, column, row, source):
    """Copy a box from shared memory to (row, column) of a matrix, leaving out what is outside."""
    _store_box(source, tensor_map, (row, column), add=False)


@instruction("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [$0, {$1, $2, $3}], [$4];", "lrrrr")
def tma_store_3d(tensor_map, column, head, row, source):
    """Copy a box from shared memory to (row, head, column) of an array, leaving out what is outside."""
    _store_box(source, tensor_map, (row, head, column), add=False)


@instruction("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [$0, {$1, $2}], [$3];", "lrrr")
def tma_reduce_add_2d(tensor_map, column, row, source):
    """The same as tma_store_2d, but adds to a float32 matrix."""
    _store_box(source, tensor_map, (row, column), add=True)


@instruction("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [$0, {$1, $2, $3}], [$4];", "lrrrr")
def tma_reduce_add_3d(tensor_map, column, head, row, source):
    """The same as tma_store_3d, but adds to a float32 array."""
    _store_box(source, tensor_map, (row, head, column), add=True)


@instruction("{ .reg .b32 n; shl.b32 n, $1, 2; cp.async.bulk.global.shared::cta.bulk_group [$0], [$2], n; }", "err")
def bulk_copy_store(array, offset, count, source):
    """Copy `count` float32 from shared memory to element `offset` of a flat array; both at multiples of 16 bytes."""

    def write(content):
        array[offset : offset + count] = content.view(np.float32)

    BulkStore(source, 4 * int(count), write)


@instruction(
    "{ .reg .b32 n; shl.b32 n, $1, 2; cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$2], n; }",
    "err",
)
def bulk_reduce_add(array, offset, count, source):
    """The same as bulk_copy_store, but adds to what is there."""

    def write(content):
        array[offset : offset + count] += content.view(np.float32)

    BulkStore(source, 4 * int(count), write)


@instruction("cp.async.bulk.commit_group;")
def bulk_commit_group():
    """End a group of bulk stores of this thread."""
    state = current_thread().state
    state.setdefault("committed", []).append(state.get("stores", []))
    state["stores"] = []


def _finish_reading(pending):
    """The committed groups of this thread, of which all but the latest `pending` have read their shared memory."""
    groups = current_thread().state.get("committed", [])
    for group in groups[: len(groups) - pending]:
        for store in group:
            store.finish_reading()
    return groups


@instruction("cp.async.bulk.wait_group.read 0;")
def bulk_wait_group_read():
    """Wait until all groups of this thread have read their shared memory."""
    _finish_reading(0)


@instruction("cp.async.bulk.wait_group.read 1;")
def bulk_wait_group_read_1():
    """Wait until all groups of this thread but the latest one have read their shared memory."""
    _finish_reading(1)


@instruction("cp.async.bulk.wait_group 0;")
def bulk_wait_group():
    """Wait until all groups of this thread have written."""
    groups = _finish_reading(0)
    for group in groups:
        for store in group:
            store.finish()
    groups.clear()


# Threads of a block.


class NamedBarrier:
    """The simulator's named barrier: opens when a given number of threads have arrived."""

    def __init__(self):
        self.condition = Condition()
        self.arrived = 0

    def arrive(self, name, threads):
        self.arrived += 1
        if self.arrived == threads:
            self.arrived = 0
            self.condition.notify_all()
        else:
            self.condition.wait(name)


@instruction("bar.sync $0, $1;", "rr")
def named_barrier_sync(index, threads):
    """Wait for `threads` threads of the block, whole warps, at barrier `index` (1 .. 15; 0 is syncthreads)."""
    barrier = block_state(("named barrier", int(index)), NamedBarrier)
    barrier.arrive(f"named_barrier_sync {index} of {threads} threads", int(threads))


@functools.cache
def setmaxnreg(count, increase):
    """setmaxnreg(): all threads of a warpgroup raise (inc) or lower (dec) their registers to `count` each."""

    @instruction(f"setmaxnreg.{'inc' if increase else 'dec'}.sync.aligned.u32 {count};")
    def change_registers():
        pass

    return change_registers


# Registers that one producer warpgroup leaves two consumer warpgroups: 128 (40 + 2 x 232) of an SM's 65,536.
setmaxnreg_dec, setmaxnreg_inc = setmaxnreg(40, False), setmaxnreg(232, True)


@instruction(
    "{ .reg .pred early; .reg .b32 begun, now; mov.u32 begun, %clock; AGAIN: mov.u32 now, %clock; "
    "sub.u32 now, now, begun; setp.lt.u32 early, now, $0; @early bra AGAIN; }",
    "r",
)
def wait_clocks(count):
    """Let `count` clocks of the SM go by."""


@instruction("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "r", "r", memory=False)
def warp_uniform(value):
    """A value that all lanes of a warp share, so that branches on it need no lane masks."""
    return value
