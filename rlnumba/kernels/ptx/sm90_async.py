"""Further instructions of Hopper: several products in flight, flat copies, blocks that take turns or count.

Continues kernels/ptx/sm90.py, whose docstring explains tiles, accumulators and a left operand in registers. Runs of
consecutive float32 in global memory need no tensor map. Blocks take turns by counters in global memory.
Source: PTX ISA, sections on wgmma, cp.async.bulk, cp.reduce.async.bulk, ld.acquire.
"""

import functools

import numpy as np

from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.sm90 import BOX_BYTES, ELEMENTS, LINE
from rlnumba.kernels.ptx.warp import device_function
from rlnumba.runtime import device

if device.simulated():
    from rlnumba.runtime.simulator import Gate, of_grid

    def bulk_copy_load(destination, array, offset, count, barrier):
        """Copy `count` float32 from place `offset` of a flat array to shared memory; both at multiples of 16 bytes."""
        memory = sm90._memory(destination, 4 * count)

        def bring():
            memory[:] = array[offset : offset + count].view(np.uint8)

        sm90.start_load(memory, barrier, bring)

    def bulk_copy_store(array, offset, count, source):
        """Copy `count` float32 from shared memory to place `offset` of a flat array, as tma_store_2d does."""

        def write(content):
            array[offset : offset + count] = content.view(np.float32)

        sm90.Store(source, 4 * count, write)

    def bulk_reduce_add(array, offset, count, source):
        """As bulk_copy_store, adding to what is there."""

        def write(content):
            array[offset : offset + count] += content.view(np.float32)

        sm90.Store(source, 4 * count, write)

    def _gate(counters, index):
        """Where threads wait for a counter to change."""
        return of_grid(("turn", counters.ctypes.data + counters.itemsize * int(index)), Gate)

    def semaphore_wait(counters, index, turn):
        """Wait until counters[index] is `turn`; what its writer did before is then visible, bulk copies included."""
        while counters[index] != turn:
            _gate(counters, index).wait(f"semaphore_wait {turn} of counter {index}")

    def semaphore_release(counters, index, turn):
        """Set counters[index] for another block that waits in semaphore_wait."""
        counters[index] = turn
        _gate(counters, index).open()

    def atomic_add_acq_rel(counters, index):
        """Add 1 to counters[index] and return what it was. What this thread, and threads it met, wrote before is
        visible to whoever counts later; what was written before earlier counts, to this thread and to all it meets."""
        before = counters[index]
        counters[index] = before + 1
        return before

    def load_acquire(counters, index):
        """counters[index]. What was written before those counts is visible to this thread and to all it meets."""
        return counters[index]

    def prefetch_tensor_map(tensor_map):
        """Have a tensor map at hand before the first copy asks for it."""

    @functools.cache
    def setmaxnreg(count, more):
        """setmaxnreg(): a warpgroup gives registers up, or takes some, until each of its threads has `count`."""
        return lambda: None

    @functools.cache
    def wgmma_async(columns, element, steps, a, b, keep, a_box=BOX_BYTES, b_box=BOX_BYTES):
        """start(acc, a, b): a warpgroup begins acc = A B, or acc += A B if `keep`; A (64, 16 steps), B (.., columns).

        a: "registers" (start takes a local array of 4 steps int32), "k" (K-major) or "mn" (MN-major), as b (start
        takes what smem_descriptor() gave). Each further 64 k of an operand lie a_box, b_box bytes further on. acc: a
        local
        array of columns / 2 float32. One group of products, for which wgmma_wait_group waits; until then neither acc
        nor
        the operands may be touched.
        """
        dtype = device.DTYPES[element]
        row, column = sm90.places(columns)
        word_row, word_column = sm90.places(16 * steps)

        def in_memory(address, rows, kind, box_bytes, reads):
            """(rows, 16 steps): boxes of 64 k side by side. An MN-major operand may start within a line."""
            boxes, first = [], int(address) % LINE // 2
            for box in range(-(-steps // 4)):
                at = int(address) - 2 * first + box * box_bytes
                if kind == "k":
                    boxes.append(sm90._lines(at, rows, dtype, reads))
                else:
                    blocks = [sm90._lines(at + i * BOX_BYTES, 64, dtype, reads).T for i in range(-(-rows // 64))]
                    boxes.append(np.concatenate(blocks)[first : first + rows])
            return np.concatenate(boxes, axis=1)[:, : 16 * steps]

        def in_registers(words, reads):
            reads += map(sm90.Registers, words)
            matrix = np.zeros((64, 16 * steps), dtype)
            matrix[word_row, word_column] = np.stack(words).view(dtype)
            return matrix

        def read(acc, left, right):
            reads = []
            left = None if a == "registers" else in_memory(left, 64, a, a_box, reads)
            return left, in_memory(right, columns, b, b_box, reads), reads

        def compute(operands, threads):
            left, right, reads = operands
            accumulators, words, _ = zip(*threads, strict=True)
            if a == "registers":
                left = in_registers(words, reads)
            c = np.zeros((64, columns), np.float32)
            if keep:
                c[row, column] = list(map(sm90.accumulated, sm90.warpgroup_threads(), accumulators))
            c = sm90.multiply_add(c, left, right)
            sm90.note_products(accumulators, c[row, column], reads)

        return sm90.warpgroup_start(read, compute)

    @functools.cache
    def wgmma_wait_group(count, running):
        """wait(acc): until all groups of products but the latest `running` are done; acc: `count` accumulators."""

        def wait(acc):
            sm90.wait_products(running)

        return wait

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    _F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)

    _bulk_copy_load = sm90._instruction(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        "rlrr",
        "Copy bytes from global to shared memory.",
    )
    _bulk_copy_store = sm90._instruction(
        "cp.async.bulk.global.shared::cta.bulk_group [$0], [$2], $1;",
        "lrr",
        "Copy bytes from shared to global memory.",
    )
    _bulk_reduce_add = sm90._instruction(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$2], $1;",
        "lrr",
        "Add float32 from shared to global memory.",
    )
    # Counters are read and written by ordinary accesses, what they guard by the copy engine: hence the proxy fences.
    _semaphore_wait = sm90._instruction(
        "{ .reg .pred p; .reg .b32 now; AGAIN: ld.acquire.gpu.global.b32 now, [$0]; setp.ne.b32 p, now, $1;"
        " @p bra AGAIN; fence.proxy.async.global; }",
        "lr",
        "Wait until a counter has a value.",
    )
    _semaphore_release = sm90._instruction(
        "fence.proxy.async.global; st.release.gpu.global.b32 [$0], $1;", "lr", "Set a counter."
    )

    @device_function
    def bulk_copy_load(destination, array, offset, count, barrier):
        """Copy `count` float32 from place `offset` of a flat array to shared memory; both at multiples of 16 bytes."""
        _bulk_copy_load(destination, sm90.tensor_map_address(array) + offset * 4, count * 4, barrier)

    @device_function
    def bulk_copy_store(array, offset, count, source):
        """Copy `count` float32 from shared memory to place `offset` of a flat array, as tma_store_2d does."""
        _bulk_copy_store(sm90.tensor_map_address(array) + offset * 4, count * 4, source)

    @device_function
    def bulk_reduce_add(array, offset, count, source):
        """As bulk_copy_store, adding to what is there."""
        _bulk_reduce_add(sm90.tensor_map_address(array) + offset * 4, count * 4, source)

    @device_function
    def semaphore_wait(counters, index, turn):
        """Wait until counters[index] is `turn`; what its writer did before is then visible, bulk copies included."""
        _semaphore_wait(sm90.tensor_map_address(counters) + index * 4, turn)

    @device_function
    def semaphore_release(counters, index, turn):
        """Set counters[index] for another block that waits in semaphore_wait."""
        _semaphore_release(sm90.tensor_map_address(counters) + index * 4, turn)

    def _on_counter(text):
        """An intrinsic: PTX text that gives an int32, $0, for the address of one, $1."""

        @intrinsic
        def instruction(typingctx, address):
            def codegen(context, builder, signature, args):
                return sm90._assembly(builder, _I32, [_I64], text, "=r,l,~{memory}", args)

            return types.int32(types.int64), codegen

        return instruction

    _atomic_add_acq_rel = _on_counter("atom.add.acq_rel.gpu.global.s32 $0, [$1], 1;")
    _load_acquire = _on_counter("ld.acquire.gpu.global.s32 $0, [$1];")

    @device_function
    def atomic_add_acq_rel(counters, index):
        """Add 1 to counters[index] and return what it was. What this thread, and threads it met, wrote before is
        visible to whoever counts later; what was written before earlier counts, to this thread and to all it meets."""
        return _atomic_add_acq_rel(sm90.tensor_map_address(counters) + index * 4)

    @device_function
    def load_acquire(counters, index):
        """counters[index]. What was written before those counts is visible to this thread and to all it meets."""
        return _load_acquire(sm90.tensor_map_address(counters) + index * 4)

    prefetch_tensor_map = sm90._instruction(
        "prefetch.tensormap [$0];", "l", "Have a tensor map at hand before the first copy asks for it."
    )

    @functools.cache
    def setmaxnreg(count, more):
        """setmaxnreg(): a warpgroup gives registers up, or takes some, until each of its threads has `count`."""
        direction = "inc" if more else "dec"
        return sm90._instruction(f"setmaxnreg.{direction}.sync.aligned.u32 {count};", "", "Change registers.")

    def _elements(context, builder, array_type, array, count):
        data = context.make_array(array_type)(context, builder, array).data
        return [builder.gep(data, [ir.Constant(_I32, i)]) for i in range(count)]

    def _replace(builder, pointers, text, constraints, operand_types, operands):
        """Assembly whose results, float32, replace what the pointers point to."""
        constraints = ["=f"] * len(pointers) + [*constraints, "~{memory}"]
        struct = ir.LiteralStructType([_F32] * len(pointers))
        result = sm90._assembly(builder, struct, operand_types, text, ",".join(constraints), operands)
        for i, pointer in enumerate(pointers):
            builder.store(builder.extract_value(result, i), pointer)

    @functools.cache
    def wgmma_async(columns, element, steps, a, b, keep, a_box=BOX_BYTES, b_box=BOX_BYTES):
        """start(acc, a, b): a warpgroup begins acc = A B, or acc += A B if `keep`; A (64, 16 steps), B (.., columns).

        a: "registers" (start takes a local array of 4 steps int32), "k" (K-major) or "mn" (MN-major), as b (start
        takes what smem_descriptor() gave). Each further 64 k of an operand lie a_box, b_box bytes further on. acc: a
        local
        array of columns / 2 float32. One group of products, for which wgmma_wait_group waits; until then neither acc
        nor
        the operands may be touched.
        """
        count = columns // 2
        kept = count if keep else 0
        words = 4 * steps if a == "registers" else 1
        # Operands of the assembly: results, the same registers going in if they are kept, words of A or its
        # descriptor, B's descriptor.
        left, right = count + kept, count + kept + words
        accumulators = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
        kind = ELEMENTS[element]
        shape = f"m64n{columns}k16.f32.{kind}.{kind}"

        def offset(step, operand_kind, box_bytes):
            within = 16 * LINE if operand_kind == "mn" else 32
            return (step // 4 * box_bytes + step % 4 * within) // 16

        lines = ["wgmma.fence.sync.aligned;"]
        for step in range(steps):
            lines += [f"{{ .reg .b64 a, b; add.s64 b, ${right}, {offset(step, b, b_box)};"]
            if a == "registers":
                operands = "{" + ", ".join(f"${left + 4 * step + i}" for i in range(4)) + "}, b"
                transposed = f"{int(b == 'mn')}"
            else:
                lines += [f"add.s64 a, ${left}, {offset(step, a, a_box)};"]
                operands, transposed = "a, b", f"{int(a == 'mn')}, {int(b == 'mn')}"
            add = int(keep or step > 0)
            lines += [f"wgmma.mma_async.sync.aligned.{shape} {accumulators}, {operands}, {add}, 1, 1, {transposed}; }}"]
        text = "\n".join([*lines, "wgmma.commit_group.sync.aligned;"])

        @intrinsic
        def start(typingctx, acc, a, b):
            def codegen(context, builder, signature, args):
                pointers = _elements(context, builder, signature.args[0], args[0], count)
                operands = [builder.load(pointer) for pointer in pointers[:kept]]
                constraints, operand_types = [str(i) for i in range(kept)], [_F32] * kept
                if words > 1:
                    taken = _elements(context, builder, signature.args[1], args[1], words)
                    operands += [builder.load(word) for word in taken]
                    constraints, operand_types = constraints + ["r"] * words, operand_types + [_I32] * words
                else:
                    operands += [args[1]]
                    constraints, operand_types = [*constraints, "l"], [*operand_types, _I64]
                operands += [args[2]]
                _replace(builder, pointers, text, [*constraints, "l"], [*operand_types, _I64], operands)
                return context.get_dummy_value()

            return types.void(acc, a if words > 1 else types.int64, types.int64), codegen

        return start

    @functools.cache
    def wgmma_wait_group(count, running):
        """wait(acc): until all groups of products but the latest `running` are done; acc: `count` accumulators."""
        text = f"wgmma.wait_group.sync.aligned {running};"

        # The accumulators pass through, so that no use of them moves above the wait.
        @intrinsic
        def wait(typingctx, acc):
            def codegen(context, builder, signature, args):
                pointers = _elements(context, builder, signature.args[0], args[0], count)
                values = [builder.load(pointer) for pointer in pointers]
                _replace(builder, pointers, text, [str(i) for i in range(count)], [_F32] * count, values)
                return context.get_dummy_value()

            return types.void(acc), codegen

        return wait
