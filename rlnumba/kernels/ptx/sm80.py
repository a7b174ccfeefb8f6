"""Instructions of every NVIDIA GPU since Ampere (sm_80): mma.sync, ldmatrix for its operands, cp.async.

Shared memory is addressed as in kernels/ptx/shared_memory.py, global memory by int64; both count bytes.

Fragment. Sixteen lines of sixteen 16-bit values of k, four int32 words in each lane of a warp. A line is a row of A
or a column of B. Lane 4 g + t holds, with the smaller k in the lower half of a word,

           of A                         of B
    word 0   line g,     k = 2 t :        line g,     k = 2 t :
    word 1   line g + 8, k = 2 t :        line g,     k = 2 t + 8 :
    word 2   line g,     k = 2 t + 8 :    line g + 8, k = 2 t :
    word 3   line g + 8, k = 2 t + 8 :    line g + 8, k = 2 t + 8 :

ldmatrix_fragment loads one from memory in which the k of a line are contiguous (K-major), ldmatrix_fragment_trans from
memory in which the lines of a k are contiguous (MN-major). Lane l gives the address of 16 bytes:

    ldmatrix_fragment         of A: line l % 16,               k = 8 (l / 16) :
                              of B: line l % 8 + 8 (l / 16),   k = 8 (l / 8 % 2) :
    ldmatrix_fragment_trans   of A: k = l % 8 + 8 (l / 16),    lines 8 (l / 8 % 2) :
                              of B: k = l % 16,                lines 8 (l / 16) :

Product. mma adds A B for two fragments to a 16 x 16 piece of C, eight float32 in each lane:

    acc 0, 1   C[g, 2 t], C[g, 2 t + 1]          acc 4, 5   C[g, 2 t + 8], ...
    acc 2, 3   C[g + 8, 2 t], ...                acc 6, 7   C[g + 8, 2 t + 8], ...

so that cvt_pack of acc 0 and 1, of 2 and 3, of 4 and 5, of 6 and 7 are the words of a fragment of A whose lines are
the rows of C and whose k are its columns.

Copies. cp_async_16 starts a copy from global to shared memory; cp_async_commit_group closes a thread's group of
copies; cp_async_wait_group(n)() waits until all but the thread's latest n groups have arrived, for this thread alone:
other threads see them after the next barrier. In the simulator the target of a copy holds NaN until it is waited for.
Source: PTX ISA, sections on mma.sync, ldmatrix, cp.async.
"""

import functools

import numpy as np

from rlnumba.kernels.ptx.instruction import SIMULATED, instruction, warp_wide
from rlnumba.kernels.ptx.shared_memory import ldmatrix_x4, ldmatrix_x4_trans, load_function, memory, store_function
from rlnumba.kernels.ptx.warp import PTX_TYPES, device_function
from rlnumba.runtime import device

# Bytes that one copy moves, and a line of a fragment's half.
CHUNK = 16
# Shared memory of an SM that the system keeps for each block.
SYSTEM_BYTES = 1024

if SIMULATED:
    from rlnumba.runtime.simulator import current_thread, with_gpu_nans


@device_function
def ldmatrix_fragment(words, first, address):
    """words[first : first + 4] = a fragment whose lines are contiguous in k."""
    words[first], words[first + 1], words[first + 2], words[first + 3] = ldmatrix_x4(address)


@device_function
def ldmatrix_fragment_trans(words, first, address):
    """words[first : first + 4] = a fragment of which the lines of a k are contiguous."""
    words[first], words[first + 1], words[first + 2], words[first + 3] = ldmatrix_x4_trans(address)


@functools.cache
def mma_half(element):
    """mma_half(element)(acc, c, a, i, b, j): mma with the first half of B, 8 columns: acc[c : c + 4], b[j : j + 2]."""
    kind, dtype = PTX_TYPES[element], device.DTYPES[element]

    @instruction(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "rrrrrrffff",
        "ffff",
        effects=False,
    )
    @warp_wide
    def mma_16_by_8(lanes):
        """(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3): the four float32 of C + A B."""
        # Axes of a lane's words: g, t, then the halves of lines and k.
        pairs = np.array([lane[:6] for lane in lanes]).astype(np.int32).view(dtype).astype(np.float64)
        a = pairs[:, :8].reshape(8, 4, 2, 2, 2).transpose(3, 0, 2, 1, 4).reshape(16, 16)
        b = pairs[:, 8:].reshape(8, 4, 2, 2).transpose(0, 2, 1, 3).reshape(8, 16)
        total = np.array([lane[6:] for lane in lanes], np.float64).reshape(8, 4, 2, 2).transpose(2, 0, 1, 3)
        total = total.reshape(16, 8)
        # One rounding, whose bits do not depend on where in the fragment a row or column stands.
        for k in range(16):
            total += np.multiply.outer(a[:, k], b[:, k])
        total = with_gpu_nans(total.astype(np.float32)).reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4)
        return [tuple(four) for four in total]

    @device_function
    def add_half(acc, c, a, i, b, j):
        acc[c], acc[c + 1], acc[c + 2], acc[c + 3] = mma_16_by_8(
            a[i], a[i + 1], a[i + 2], a[i + 3], b[j], b[j + 1], acc[c], acc[c + 1], acc[c + 2], acc[c + 3]
        )

    return add_half


@functools.cache
def mma(element):
    """mma(element)(acc, c, a, i, b, j): add the product of two fragments to 16 x 16 float32 (two mma.sync).

    acc[c : c + 8] += a[i : i + 4] b[j : j + 4], local arrays of every lane of a warp.
    """
    add_half = mma_half(element)

    @device_function
    def add_product(acc, c, a, i, b, j):
        add_half(acc, c, a, i, b, j)
        add_half(acc, c + 4, a, i, b, j + 2)

    return add_product


@instruction("mov.u32 $0, %smid;", "", "r", memory=False)
def smid():
    """The number of the SM that runs the block."""
    return np.int32(0)


# Asynchronous copies.


def _copy_groups():
    """The simulator's groups of copies of this thread, the open one last."""
    return current_thread().state.setdefault("copies", [[]])


def _start_copy(destination, source, nbytes, size):
    if destination % size or nbytes and source % size:
        raise ValueError(f"copies of {size} bytes need addresses at multiples, got {destination} and {source}")
    memory(destination, size)[:] = 0xFF
    _copy_groups()[-1].append((destination, source, int(nbytes), size))


@instruction("cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", "rlr")
def cp_async_16(destination, source, nbytes):
    """Start to copy 16 bytes from global to shared memory, of which those after the first nbytes become zero.

    nbytes: 0, in which case `source` is not read, or 16.
    """
    _start_copy(destination, source, nbytes, CHUNK)


@instruction("cp.async.ca.shared.global [$0], [$1], 4, $2;", "rlr")
def cp_async_4(destination, source, nbytes):
    """Start to copy 4 bytes from global to shared memory, or zero them: cp_async_16."""
    _start_copy(destination, source, nbytes, 4)


@instruction("cp.async.commit_group;")
def cp_async_commit_group():
    """Close this thread's group of copies."""
    _copy_groups().append([])


@functools.cache
def cp_async_wait_group(pending):
    """wait(): until all of this thread's groups of copies but the latest `pending` have arrived."""

    @instruction(f"cp.async.wait_group {pending};")
    def wait():
        groups = _copy_groups()
        while len(groups) - 1 > pending:
            for destination, source, nbytes, size in groups.pop(0):
                target = memory(destination, size)
                target[:] = 0
                if nbytes:
                    target[:nbytes] = memory(source, nbytes)

    return wait


# Global memory, 16 bytes at a time.


@instruction(
    "{ .reg .b32 a, b, c, d; ld.shared.v4.b32 {a, b, c, d}, [$1]; st.global.v4.b32 [$0], {a, b, c, d}; }", "lr"
)
def copy_to_global(destination, source):
    """Copy 16 bytes from shared to global memory."""
    memory(destination, CHUNK)[:] = memory(source, CHUNK)


@instruction("prefetch.global.L2 [$0];", "l")
def prefetch_l2(address):
    """Fetch the 128 bytes around an address of global memory into L2, without waiting."""


# Four neighbouring float32.
load_global_four, store_global_four = load_function("ffff", "global", "l"), store_function("ffff", "global", "l")


@instruction("redux.sync.max.u32 $0, $1, 0xffffffff;", "u", "u")
@warp_wide
def warp_max_unsigned(lanes):
    """The largest uint32 of a warp's lanes."""
    return [max(value for (value,) in lanes)] * 32
