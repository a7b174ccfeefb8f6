"""Instructions of every NVIDIA GPU since Ampere (sm_80): matrix products of a warp, asynchronous copies.

Each instruction has a GPU lowering (inline PTX) and a simulator twin (Python whose body is its meaning). Shared
memory is addressed as in kernels/ptx/sm90.py, global memory by int64; both count bytes.

Fragment. Sixteen lines of sixteen 16-bit values of k, four int32 words in each lane of a warp. A line is a row of A
or a column of B. Lane 4 g + t holds, with the smaller k in the lower half of a word,

           of A                         of B
    word 0   line g,     k = 2 t :        line g,     k = 2 t :
    word 1   line g + 8, k = 2 t :        line g,     k = 2 t + 8 :
    word 2   line g,     k = 2 t + 8 :    line g + 8, k = 2 t :
    word 3   line g + 8, k = 2 t + 8 :    line g + 8, k = 2 t + 8 :

One load brings it: from memory in which the k of a line are contiguous (K-major) by load_fragment, from memory in
which the lines of a k are contiguous (MN-major) by load_fragment_across. Lane l gives the address of 16 bytes:

    load_fragment          of A: line l % 16,               k = 8 (l / 16) :
                           of B: line l % 8 + 8 (l / 16),   k = 8 (l / 8 % 2) :
    load_fragment_across   of A: k = l % 8 + 8 (l / 16),    lines 8 (l / 8 % 2) :
                           of B: k = l % 16,                lines 8 (l / 16) :

Product. multiply adds A B for two fragments to a 16 x 16 piece of C, eight float32 in each lane:

    acc 0, 1   C[g, 2 t], C[g, 2 t + 1]          acc 4, 5   C[g, 2 t + 8], ...
    acc 2, 3   C[g + 8, 2 t], ...                acc 6, 7   C[g + 8, 2 t + 8], ...

so that cvt_pack(acc 0, 1), cvt_pack(acc 2, 3), cvt_pack(acc 4, 5), cvt_pack(acc 6, 7) are the words of a fragment of
A whose lines
are the rows of C and whose k are its columns.

Copies. copy_chunk starts a copy of 16 bytes from global to shared memory; copies_end closes a thread's group of
copies; copies_wait(n)() waits until all but the thread's latest n groups have arrived, for this thread alone: other
threads see them after the next barrier. The simulator fills a copy's place with NaN when it starts and brings
the bytes when it is waited for, so that a missing wait or barrier shows.
Source: PTX ISA, sections on mma.sync, ldmatrix, cp.async.
"""

import functools

import numpy as np

from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.sm90 import ELEMENTS
from rlnumba.runtime import device

# Bytes that one copy moves, and a line of a fragment's half.
CHUNK = 16

if device.simulated():
    from rlnumba.runtime.simulator import this_thread, warp_wide

    def address_of(array):
        """The address of an array in global memory."""
        return np.int64(array.ctypes.data)

    def processor():
        """The number of the SM that runs the block."""
        return np.int32(0)

    def _load(lanes, form):
        for i in range(4):
            lines = [sm90._memory(lanes[8 * i + line][2], CHUNK) for line in range(8)]
            matrix = np.ascontiguousarray(form(np.stack(lines).view(np.uint16)))
            for lane, (words, first, _) in enumerate(lanes):
                words[int(first) + i] = matrix.view(np.int32).reshape(32)[lane]
        return [None] * 32

    @warp_wide
    def load_fragment(lanes):
        """words[first : first + 4] = four 8 x 8 matrices of 16-bit values from shared memory (ldmatrix).

        (words, first, address): lane 8 i + r gives the address of line r of matrix i (16 bytes); lane 4 g + t
        receives elements 2 t and 2 t + 1 of line g of matrix i as word i.
        """
        return _load(lanes, lambda matrix: matrix)

    @warp_wide
    def load_fragment_across(lanes):
        """The same of transposed matrices (ldmatrix.trans): lane 4 g + t receives lines 2 t, 2 t + 1 of column g."""
        return _load(lanes, lambda matrix: matrix.T)

    @functools.cache
    def multiply(element):
        """multiply(acc, c, a, i, b, j): add the product of two fragments to 16 x 16 float32 (two mma.sync).

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
        def multiply_fragments(lanes):
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

        return multiply_fragments

    def _copies():
        """This thread's groups of copies under way, the open one last."""
        return this_thread().notes.setdefault("copies", [[]])

    def copy_chunk(destination, source, nbytes):
        """Start to copy 16 bytes from global to shared memory, of which those after the first nbytes become zero.

        nbytes: 0, in which case `source` is not read, or 16.
        """
        _start_copy(destination, source, int(nbytes), CHUNK)

    def copy_word(destination, source, nbytes):
        """As copy_chunk, of 4 bytes."""
        _start_copy(destination, source, int(nbytes), 4)

    def _start_copy(destination, source, nbytes, size):
        if destination % size or nbytes and source % size:
            raise ValueError(f"copies of {size} bytes need addresses at multiples, got {destination} and {source}")
        sm90._memory(destination, size)[:] = 0xFF
        _copies()[-1].append((destination, source, nbytes, size))

    def copies_end():
        """Close this thread's group of copies."""
        _copies().append([])

    @functools.cache
    def copies_wait(running):
        """wait(): until all of this thread's groups but the latest `running` have arrived."""

        def wait():
            groups = _copies()
            while len(groups) - 1 > running:
                for destination, source, nbytes, size in groups.pop(0):
                    chunk = sm90._memory(destination, size)
                    chunk[:] = 0
                    if nbytes:
                        chunk[:nbytes] = sm90._memory(source, nbytes)

        return wait

    def store_word(address, word):
        """An int32 to shared memory."""
        sm90._memory(address, 4).view(np.int32)[0] = word

    def write_chunk(destination, source):
        """Copy 16 bytes from shared to global memory, at once."""
        sm90._memory(destination, CHUNK)[:] = sm90._memory(source, CHUNK)

    def read_four(address):
        """Four neighbouring float32 of global memory."""
        return tuple(sm90._memory(address, CHUNK).view(np.float32).copy())

    def write_four(address, first, second, third, fourth):
        """Four neighbouring float32 to global memory."""
        sm90._memory(address, CHUNK).view(np.float32)[:] = first, second, third, fourth

else:
    from llvmlite import ir
    from numba.cuda import cgutils, types
    from numba.cuda.extending import intrinsic

    _F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)

    @intrinsic
    def address_of(typingctx, array):
        """The address of an array in global memory."""

        def codegen(context, builder, signature, args):
            return builder.ptrtoint(context.make_array(signature.args[0])(context, builder, args[0]).data, _I64)

        return types.int64(array), codegen

    @intrinsic
    def processor(typingctx):
        """The number of the SM that runs the block."""

        def codegen(context, builder, signature, args):
            return sm90._assembly(builder, _I32, [], "mov.u32 $0, %smid;", "=r", [])

        return types.int32(), codegen

    def _places(context, builder, array_type, array, first, count):
        """Pointers to `count` elements of a local array."""
        data = context.make_array(array_type)(context, builder, array).data
        return [builder.gep(data, [builder.add(first, ir.Constant(_I32, i))]) for i in range(count)]

    def _loader(suffix, doc):
        def load(typingctx, words, first, address):
            def codegen(context, builder, signature, args):
                text = f"ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
                four = ir.LiteralStructType([_I32] * 4)
                loaded = sm90._assembly(builder, four, [_I32], text, "=r,=r,=r,=r,r,~{memory}", args[2:])
                for i, place in enumerate(_places(context, builder, signature.args[0], args[0], args[1], 4)):
                    builder.store(builder.extract_value(loaded, i), place)
                return context.get_dummy_value()

            return types.void(words, types.int32, types.int32), codegen

        load.__doc__ = doc
        return intrinsic(load)

    load_fragment = _loader("", "words[first : first + 4] = four 8 x 8 matrices of 16-bit values from shared memory.")
    load_fragment_across = _loader(".trans", "The same of the transposed matrices.")

    @functools.cache
    def multiply(element):
        """multiply(acc, c, a, i, b, j): add the product of two fragments to 16 x 16 float32 (two mma.sync).

        acc[c : c + 8] += a[i : i + 4] b[j : j + 4], local arrays of every lane of a warp.
        """
        kind = ELEMENTS[element]
        text = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
            " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
        four = ir.LiteralStructType([_F32] * 4)

        @intrinsic
        def multiply_fragments(typingctx, acc, c, a, i, b, j):
            def codegen(context, builder, signature, args):
                (acc, c, a, i, b, j), kinds = args, signature.args
                a = [builder.load(p) for p in _places(context, builder, kinds[2], a, i, 4)]
                b = [builder.load(p) for p in _places(context, builder, kinds[4], b, j, 4)]
                sums = _places(context, builder, kinds[0], acc, c, 8)
                for half in range(2):
                    places = sums[4 * half : 4 * half + 4]
                    operands = [*a, *b[2 * half : 2 * half + 2], *(builder.load(p) for p in places)]
                    added = sm90._assembly(builder, four, [_I32] * 6 + [_F32] * 4, text, constraints, operands, False)
                    for n, place in enumerate(places):
                        builder.store(builder.extract_value(added, n), place)
                return context.get_dummy_value()

            index = types.int32
            return types.void(acc, index, a, index, b, index), codegen

        return multiply_fragments

    copy_chunk = sm90._instruction(
        "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;",
        "rlr",
        "Start to copy 16 bytes from global to shared memory, of which those after the first nbytes become zero.",
    )
    copy_word = sm90._instruction("cp.async.ca.shared.global [$0], [$1], 4, $2;", "rlr", "As copy_chunk, of 4 bytes.")
    copies_end = sm90._instruction("cp.async.commit_group;", "", "Close this thread's group of copies.")

    @functools.cache
    def copies_wait(running):
        """wait(): until all of this thread's groups but the latest `running` have arrived."""
        return sm90._instruction(f"cp.async.wait_group {running};", "", "Wait for groups of copies.")

    store_word = sm90._instruction("st.shared.b32 [$0], $1;", "rr", "An int32 to shared memory.")
    write_chunk = sm90._instruction(
        "{ .reg .b32 a, b, c, d; ld.shared.v4.b32 {a, b, c, d}, [$1]; st.global.v4.b32 [$0], {a, b, c, d}; }",
        "lr",
        "Copy 16 bytes from shared to global memory, at once.",
    )
    write_four = sm90._instruction(
        "st.global.v4.f32 [$0], {$1, $2, $3, $4};", "lffff", "Four neighbouring float32 to global memory."
    )

    @intrinsic
    def read_four(typingctx, address):
        """Four neighbouring float32 of global memory."""

        def codegen(context, builder, signature, args):
            four = ir.LiteralStructType([_F32] * 4)
            text = "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];"
            loaded = sm90._assembly(builder, four, [_I64], text, "=f,=f,=f,=f,l,~{memory}", args)
            return cgutils.pack_array(builder, [builder.extract_value(loaded, i) for i in range(4)])

        return types.UniTuple(types.float32, 4)(types.int64), codegen
