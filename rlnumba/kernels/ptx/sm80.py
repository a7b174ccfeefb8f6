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

from rlnumba.kernels.ptx.instruction import SIMULATED, address_of, instruction, warp_wide  # noqa: F401
from rlnumba.kernels.ptx.shared_memory import memory, store_word  # noqa: F401
from rlnumba.kernels.ptx.warp import PTX_TYPES
from rlnumba.runtime import device

# Bytes that one copy moves, and a line of a fragment's half.
CHUNK = 16
# Shared memory of an SM that the system keeps for each block.
SYSTEM_BYTES = 1024

if SIMULATED:
    from rlnumba.runtime.simulator import this_thread

    def _load_matrices(lanes, form):
        for i in range(4):
            lines = [memory(lanes[8 * i + line][2], CHUNK) for line in range(8)]
            matrix = np.ascontiguousarray(form(np.stack(lines).view(np.uint16)))
            for lane, (words, first, _) in enumerate(lanes):
                words[int(first) + i] = matrix.view(np.int32).reshape(32)[lane]
        return [None] * 32

    @warp_wide
    def ldmatrix_fragment(lanes):
        """words[first : first + 4] = four 8 x 8 matrices of 16-bit values from shared memory (ldmatrix).

        (words, first, address): lane 8 i + r gives the address of line r of matrix i (16 bytes); lane 4 g + t
        receives elements 2 t and 2 t + 1 of line g of matrix i as word i.
        """
        return _load_matrices(lanes, lambda matrix: matrix)

    @warp_wide
    def ldmatrix_fragment_trans(lanes):
        """The same of transposed matrices (ldmatrix.trans): lane 4 g + t receives lines 2 t, 2 t + 1 of column g."""
        return _load_matrices(lanes, lambda matrix: matrix.T)

    @functools.cache
    def mma(element):
        """mma(element)(acc, c, a, i, b, j): add the product of two fragments to 16 x 16 float32 (two mma.sync).

        acc[c : c + 8] += a[i : i + 4] b[j : j + 4], local arrays of every lane of a warp.
        """
        dtype = device.DTYPES[element]
        g, t = np.arange(32)[:, None] // 4, np.arange(32)[:, None] % 4
        word, sum_ = np.arange(4), np.arange(8)
        a_line, a_k = g + 8 * (word % 2), 2 * t + 8 * (word // 2)
        b_line, b_k = g + 8 * (word // 2), 2 * t + 8 * (word % 2)
        row, column = g + 8 * (sum_ % 4 // 2), 2 * t + 8 * (sum_ // 4) + sum_ % 2

        def fragment(words, line, k):
            matrix = np.empty((16, 16), np.float64)
            pairs = np.array(words, np.int32).view(dtype).reshape(32, 4, 2)
            matrix[line, k], matrix[line, k + 1] = pairs[..., 0], pairs[..., 1]
            return matrix

        @warp_wide
        def mma_fragments(lanes):
            a = fragment([words[int(i) : int(i) + 4] for _, _, words, i, _, _ in lanes], a_line, a_k)
            b = fragment([words[int(j) : int(j) + 4] for _, _, _, _, words, j in lanes], b_line, b_k)
            total = np.empty((16, 16), np.float64)
            total[row, column] = [acc[int(c) : int(c) + 8] for acc, c, *_ in lanes]
            # One rounding, whose bits do not depend on where in the fragment a row or column stands.
            for k in range(16):
                total += np.multiply.outer(a[:, k], b[:, k])
            for lane, (acc, c, *_) in enumerate(lanes):
                acc[int(c) : int(c) + 8] = total[row[lane], column[lane]].astype(np.float32)
            return [None] * 32

        return mma_fragments

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from rlnumba.kernels.ptx.instruction import F32, I32, inline_asm, local_elements

    def _ldmatrix(suffix):
        @intrinsic
        def load(typingctx, words, first, address):
            def codegen(context, builder, signature, args):
                text = f"ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
                four = ir.LiteralStructType([I32] * 4)
                loaded = inline_asm(builder, four, [I32], text, "=r,=r,=r,=r,r,~{memory}", args[2:])
                pointers = local_elements(context, builder, signature.args[0], args[0], 4, args[1])
                for i, pointer in enumerate(pointers):
                    builder.store(builder.extract_value(loaded, i), pointer)
                return context.get_dummy_value()

            return types.void(words, types.int32, types.int32), codegen

        return load

    ldmatrix_fragment, ldmatrix_fragment_trans = _ldmatrix(""), _ldmatrix(".trans")

    @functools.cache
    def mma(element):
        """As the simulator's, above."""
        kind = PTX_TYPES[element]
        text = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
            " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
        four = ir.LiteralStructType([F32] * 4)

        @intrinsic
        def mma_fragments(typingctx, acc, c, a, i, b, j):
            def codegen(context, builder, signature, args):
                (acc, c, a, i, b, j), kinds = args, signature.args
                a = [builder.load(p) for p in local_elements(context, builder, kinds[2], a, 4, i)]
                b = [builder.load(p) for p in local_elements(context, builder, kinds[4], b, 4, j)]
                sums = local_elements(context, builder, kinds[0], acc, 8, c)
                for half in range(2):
                    pointers = sums[4 * half : 4 * half + 4]
                    operands = [*a, *b[2 * half : 2 * half + 2], *(builder.load(p) for p in pointers)]
                    added = inline_asm(builder, four, [I32] * 6 + [F32] * 4, text, constraints, operands, False)
                    for n, pointer in enumerate(pointers):
                        builder.store(builder.extract_value(added, n), pointer)
                return context.get_dummy_value()

            index = types.int32
            return types.void(acc, index, a, index, b, index), codegen

        return mma_fragments


@instruction("mov.u32 $0, %smid;", "", "r", memory=False)
def smid():
    """The number of the SM that runs the block."""
    return np.int32(0)


# Asynchronous copies.


def _copy_groups():
    """The simulator's groups of copies of this thread, the open one last."""
    return this_thread().notes.setdefault("copies", [[]])


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
    """As cp_async_16, of 4 bytes."""
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


@instruction("ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", "l", "ffff")
def load_global_four(address):
    """Four neighbouring float32 of global memory."""
    return tuple(memory(address, CHUNK).view(np.float32).copy())


@instruction("st.global.v4.f32 [$0], {$1, $2, $3, $4};", "lffff")
def store_global_four(address, first, second, third, fourth):
    """Four neighbouring float32 to global memory."""
    memory(address, CHUNK).view(np.float32)[:] = first, second, third, fourth


# Former names, for callers that have not moved.
copy_chunk, copy_word, copies_end, copies_wait = cp_async_16, cp_async_4, cp_async_commit_group, cp_async_wait_group
load_fragment, load_fragment_across, multiply = ldmatrix_fragment, ldmatrix_fragment_trans, mma
write_chunk, read_four, write_four, processor = copy_to_global, load_global_four, store_global_four, smid
