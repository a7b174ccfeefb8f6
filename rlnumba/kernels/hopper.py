"""Instructions of NVIDIA's Hopper (sm_90a): bulk tensor copies, memory barriers, warpgroup matrix products.

Each instruction has a GPU lowering (inline PTX) and a simulator twin (Python whose body is its meaning).
Shared memory is addressed by int32 on the GPU and by the host's address in the simulator; code adds byte
offsets to what `shared_address` returned and never looks inside.

Tiles in shared memory. A box of a tensor map is `rows` lines of 128 bytes, one after another, whose eight
16-byte chunks are permuted: chunk c of line r lies at place c ^ (r & 7) ("128-byte swizzle"), so that eight
lines' equal chunks meet no bank conflict. Boxes start at multiples of 1024 bytes.

Matrix product. One warpgroup (four warps, 128 threads) adds A (64, 64) B (64, n) to 64 x n float32
accumulators; A and B come from shared memory. "K-major": a line holds 64 consecutive k of one row of A (one
column of B); "MN-major": a line holds 64 consecutive rows of A (columns of B) for one k, and further 64-blocks
of columns of B follow 8192 bytes apart. Thread t = 32 w + 4 g + i of the warpgroup holds, for each block of
eight columns b: acc[4 b], acc[4 b + 1] = C[16 w + g, 8 b + 2 i :], acc[4 b + 2], acc[4 b + 3] = C[16 w + g + 8, ...].
Source: PTX ISA, sections on wgmma, mbarrier, cp.async.bulk.tensor, setmaxnreg, stmatrix.
"""

import ctypes
import functools
import inspect

import numpy as np

from rlnumba import device
from rlnumba.errors import DeviceError

# Reduction steps of one issue: 4 instructions of 16. A line of a swizzled 16-bit box.
STEPS = 64
LINE = 128
BOX_BYTES = 64 * LINE

ELEMENTS = {"bfloat16": "bf16", "float16": "f16"}

if device.name() == "sim":
    import threading

    import ml_dtypes

    from rlnumba.simulator import TIMEOUT_S, of_block, warp_wide, warpgroup_wide

    class Barrier:
        """An mbarrier: a phase completes when all arrivals have come and all announced bytes are there."""

        def __init__(self):
            self.condition = threading.Condition()

        def init(self, count):
            self.count = self.pending = count
            self.bytes = 0
            self.phase = 0

        def update(self, arrivals, nbytes):
            with self.condition:
                self.pending -= arrivals
                self.bytes += nbytes
                if self.pending == 0 and self.bytes == 0:
                    self.pending = self.count
                    self.phase ^= 1
                    self.condition.notify_all()

        def wait(self, parity):
            with self.condition:
                if not self.condition.wait_for(lambda: self.phase != parity, TIMEOUT_S):
                    raise RuntimeError("barrier_wait: the phase never completed")

    def _barrier(address):
        return of_block("mbarrier", int(address), Barrier)

    def shared_address(array):
        """The address of a shared array."""
        return np.int64(array.ctypes.data)

    def tensor_map_address(tensor_map):
        """A tensor map as an argument for bulk copies."""
        return tensor_map

    def barrier_init(address, count):
        """Make the 8 bytes at `address` a barrier whose phases need `count` arrivals."""
        _barrier(address).init(int(count))

    def barrier_init_fence():
        """Make initialised barriers visible to the copy engine."""

    def barrier_expect(address, nbytes):
        """Arrive, and announce that copies will bring nbytes in this phase."""
        _barrier(address).update(1, int(nbytes))

    def barrier_arrive(address):
        """Arrive."""
        _barrier(address).update(1, 0)

    def barrier_wait(address, parity):
        """Wait until the phase of this parity (0 for the first, 1 for the second, 0 ...) has completed."""
        _barrier(address).wait(int(parity))

    def _memory(address, nbytes):
        return np.frombuffer((ctypes.c_char * nbytes).from_address(int(address)), np.uint8)

    def _chunks(rows):
        """(rows, 8): where chunk c of line r of a swizzled box lies, in 16-byte units."""
        r, c = np.ogrid[:rows, :8]
        return 8 * r + (c ^ (r & 7))

    def bulk_load(destination, tensor_map, column, row, barrier):
        """Copy the box at (row, column) of a matrix to shared memory, zeros outside the matrix."""
        box = tensor_map.read(int(row), int(column))
        memory = _memory(destination, box.nbytes).reshape(-1, 16)
        memory[_chunks(len(box))] = box.view(np.uint8).reshape(len(box), 8, 16)
        _barrier(barrier).update(0, -box.nbytes)

    def bulk_store(tensor_map, column, row, source):
        """Copy a box from shared memory to (row, column) of a matrix, leaving out what is outside."""
        tensor_map.write(int(row), int(column), _unswizzled(source, tensor_map), add=False)

    def bulk_add(tensor_map, column, row, source):
        """As bulk_store, adding to a float32 matrix."""
        tensor_map.write(int(row), int(column), _unswizzled(source, tensor_map), add=True)

    def _unswizzled(source, tensor_map):
        rows, columns = tensor_map.box
        lines = _memory(source, rows * LINE).reshape(-1, 16)[_chunks(rows)]
        return np.ascontiguousarray(lines).view(tensor_map.array.dtype).reshape(rows, columns)

    def bulk_commit():
        """End a group of bulk stores of this thread."""

    def bulk_wait_read():
        """Wait until all groups of this thread have read their shared memory."""

    def bulk_wait():
        """Wait until all groups of this thread have written."""

    def fence_shared_to_bulk():
        """Make this thread's ordinary writes of shared memory visible to copy engine and tensor cores."""

    def sync_group(index, threads):
        """Wait for `threads` threads of the block, whole warps, that meet at barrier `index` (1 .. 15)."""
        meeting = of_block("named barrier", int(index), lambda: threading.Barrier(int(threads)))
        meeting.wait(TIMEOUT_S)

    def fewer_registers():
        """A warpgroup gives registers up, down to 40 a thread."""

    def more_registers():
        """A warpgroup takes registers, up to 232 a thread."""

    def warp_uniform(value):
        """A value that all lanes of a warp share, so that branches on it need no lane masks."""
        return value

    @functools.cache
    def pack(element):
        """pack(low, high) -> int32: two float32 rounded to `element`, low in the lower half."""

        def pack_two(low, high):
            pair = np.array([low, high], np.float32).astype(device.DTYPES[element])
            return pair.view(np.int32)[0]

        return pack_two

    @functools.cache
    def unpack(element):
        """unpack(word) -> (low, high) float32: what pack put into an int32."""

        def unpack_two(word):
            pair = np.array([word]).astype(np.int32).view(device.DTYPES[element])
            return np.float32(pair[0]), np.float32(pair[1])

        return unpack_two

    @warp_wide
    def store_matrices(lanes):
        """Four 8 x 8 matrices of 16-bit values from a warp's registers to shared memory.

        (address, r0, r1, r2, r3): lane 8 i + r gives the address of line r of matrix i (16 bytes); lane
        4 r + c holds elements 2 c and 2 c + 1 of line r of matrix i in r_i.
        """
        for matrix in range(4):
            for line in range(8):
                words = [lanes[4 * line + c][1 + matrix] for c in range(4)]
                _memory(lanes[8 * matrix + line][0], 16)[:] = np.array(words, np.int32).view(np.uint8)
        return [None] * 32

    def store_pair(address, first, second):
        """Two neighbouring float32 to shared memory."""
        _memory(address, 8)[:] = np.array([first, second], np.float32).view(np.uint8)

    def load_word(address):
        """The int32 at an address of shared memory."""
        return _memory(address, 4).view(np.int32)[0]

    def _operand(descriptor, rows, mn_major, dtype):
        """(rows, 64) float32 of an operand; rows are A's rows or B's columns."""
        address = int(descriptor)
        if not mn_major:
            lines = _memory(address, rows * LINE).reshape(-1, 16)[_chunks(rows)]
            return np.ascontiguousarray(lines).view(dtype).reshape(rows, STEPS).astype(np.float32)
        blocks = []
        for start in range(0, rows, 64):
            lines = _memory(address + start // 64 * BOX_BYTES, BOX_BYTES).reshape(-1, 16)[_chunks(64)]
            blocks.append(np.ascontiguousarray(lines).view(dtype).reshape(STEPS, 64).T)
        return np.concatenate(blocks).astype(np.float32)

    def _accumulator_places(thread, columns):
        """(rows, columns) of C that a thread of the warpgroup holds, in the order of its accumulators."""
        i = np.arange(columns // 2)
        rows = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i % 4 // 2)
        return rows, 8 * (i // 4) + 2 * (thread % 4) + i % 2

    def operand(address):
        """A descriptor of the operand whose box or boxes start at `address`."""
        return address

    @functools.cache
    def warpgroup_product(columns, element, a_mn_major=False, b_mn_major=False):
        """(start, wait_all_but_latest, wait_all) for 64 x columns accumulators.

        start(acc, a, b, keep): begin acc = (keep ? acc : 0) + A B, operands as operand() gives them;
        acc: a local array of columns / 2 float32. Between start and the wait for it, neither acc nor the
        operands' memory may be touched. wait_all_but_latest(acc) leaves the last start running.
        """
        dtype = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[element]

        @warpgroup_wide
        def start(threads):
            a = _operand(threads[0][1], 64, a_mn_major, dtype).astype(np.float64)
            b = _operand(threads[0][2], columns, b_mn_major, dtype).astype(np.float64)
            keep = threads[0][3]
            c = np.zeros((64, columns), np.float32)
            places = [_accumulator_places(t, columns) for t in range(128)]
            if keep:
                for (rows, where), (acc, *_) in zip(places, threads, strict=True):
                    c[rows, where] = acc
            # An instruction adds 16 products to the accumulator at once, wider than float32, and rounds.
            for step in range(0, STEPS, 16):
                c = (c + a[:, step : step + 16] @ b[:, step : step + 16].T).astype(np.float32)
            for (rows, where), (acc, *_) in zip(places, threads, strict=True):
                acc[:] = c[rows, where]
            return [None] * 128

        def wait(acc):
            return None

        return start, wait, wait

else:
    from llvmlite import ir
    from numba.cuda import cgutils, types
    from numba.cuda.extending import intrinsic

    _F32, _I32, _I64, _VOID = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.VoidType()
    _IR = {"r": _I32, "l": _I64, "f": _F32}
    _NUMBA = {"r": types.int32, "l": types.int64, "f": types.float32}

    def _assembly(builder, result, operand_types, text, constraints, operands, effects=True):
        function = ir.FunctionType(result, operand_types)
        return builder.call(ir.InlineAsm(function, text, constraints, side_effect=effects), operands)

    def _instruction(text, kinds, doc):
        """An intrinsic without a result: PTX text over operands of kinds r (int32), l (int64), f (float32)."""

        def define(typingctx, *operands):
            def codegen(context, builder, signature, args):
                constraints = ",".join([*kinds, "~{memory}"])
                _assembly(builder, _VOID, [_IR[k] for k in kinds], text, constraints, args)
                return context.get_dummy_value()

            return types.void(*[_NUMBA[k] for k in kinds]), codegen

        # Numba takes the number of operands from the signature.
        names = ["typingctx", *(f"operand{i}" for i in range(len(kinds)))]
        plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
        define.__signature__ = inspect.Signature([inspect.Parameter(name, plain) for name in names])
        define.__doc__ = doc
        return intrinsic(define)

    def _array_data(context, builder, array_type, array):
        return builder.ptrtoint(context.make_array(array_type)(context, builder, array).data, _I64)

    @intrinsic
    def shared_address(typingctx, array):
        """The address of a shared array."""

        def codegen(context, builder, signature, args):
            generic = _array_data(context, builder, signature.args[0], args[0])
            address = _assembly(builder, _I64, [_I64], "cvta.to.shared.u64 $0, $1;", "=l,l", [generic], False)
            return builder.trunc(address, _I32)

        return types.int32(array), codegen

    @intrinsic
    def tensor_map_address(typingctx, tensor_map):
        """A tensor map as an argument for bulk copies."""

        def codegen(context, builder, signature, args):
            return _array_data(context, builder, signature.args[0], args[0])

        return types.int64(tensor_map), codegen

    barrier_init = _instruction(
        "mbarrier.init.shared::cta.b64 [$0], $1;",
        "rr",
        "Make the 8 bytes at `address` a barrier whose phases need `count` arrivals.",
    )
    barrier_init_fence = _instruction(
        "fence.mbarrier_init.release.cluster;", "", "Make initialised barriers visible to the copy engine."
    )
    barrier_expect = _instruction(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
        "rr",
        "Arrive, and announce that copies will bring nbytes in this phase.",
    )
    barrier_arrive = _instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", "r", "Arrive.")
    barrier_wait = _instruction(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra AGAIN; }",
        "rr",
        "Wait until the phase of this parity (0 for the first, 1 for the second, 0 ...) has completed.",
    )
    bulk_load = _instruction(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {$2, $3}], [$4];",
        "rlrrr",
        "Copy the box at (row, column) of a matrix to shared memory, zeros outside the matrix.",
    )
    bulk_store = _instruction(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [$0, {$1, $2}], [$3];",
        "lrrr",
        "Copy a box from shared memory to (row, column) of a matrix, leaving out what is outside.",
    )
    bulk_add = _instruction(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [$0, {$1, $2}], [$3];",
        "lrrr",
        "As bulk_store, adding to a float32 matrix.",
    )
    bulk_commit = _instruction("cp.async.bulk.commit_group;", "", "End a group of bulk stores of this thread.")
    bulk_wait_read = _instruction(
        "cp.async.bulk.wait_group.read 0;", "", "Wait until all groups of this thread have read their shared memory."
    )
    bulk_wait = _instruction("cp.async.bulk.wait_group 0;", "", "Wait until all groups of this thread have written.")
    fence_shared_to_bulk = _instruction(
        "fence.proxy.async.shared::cta;",
        "",
        "Make this thread's ordinary writes of shared memory visible to copy engine and tensor cores.",
    )
    sync_group = _instruction(
        "bar.sync $0, $1;",
        "rr",
        "Wait for `threads` threads of the block, whole warps, that meet at barrier `index` (1 .. 15).",
    )
    fewer_registers = _instruction(
        "setmaxnreg.dec.sync.aligned.u32 40;", "", "A warpgroup gives registers up, down to 40 a thread."
    )
    more_registers = _instruction(
        "setmaxnreg.inc.sync.aligned.u32 232;", "", "A warpgroup takes registers, up to 232 a thread."
    )
    store_matrices = _instruction(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
        "rrrrr",
        "Four 8 x 8 matrices of 16-bit values from a warp's registers to shared memory.",
    )
    store_pair = _instruction("st.shared.v2.f32 [$0], {$1, $2};", "rff", "Two neighbouring float32 to shared memory.")

    @intrinsic
    def load_word(typingctx, address):
        """The int32 at an address of shared memory."""

        def codegen(context, builder, signature, args):
            return _assembly(builder, _I32, [_I32], "ld.shared.b32 $0, [$1];", "=r,r,~{memory}", args)

        return types.int32(types.int32), codegen

    @intrinsic
    def warp_uniform(typingctx, value):
        """A value that all lanes of a warp share, so that branches on it need no lane masks."""

        def codegen(context, builder, signature, args):
            return _assembly(builder, _I32, [_I32], "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", args)

        return types.int32(types.int32), codegen

    @functools.cache
    def pack(element):
        """pack(low, high) -> int32: two float32 rounded to `element`, low in the lower half."""

        @intrinsic
        def pack_two(typingctx, low, high):
            def codegen(context, builder, signature, args):
                text = f"cvt.rn.{ELEMENTS[element]}x2.f32 $0, $2, $1;"
                return _assembly(builder, _I32, [_F32] * 2, text, "=r,f,f", args, False)

            return types.int32(types.float32, types.float32), codegen

        return pack_two

    @functools.cache
    def unpack(element):
        """unpack(word) -> (low, high) float32: what pack put into an int32."""
        widen = {
            "bfloat16": "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
            "float16": "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }",
        }[element]

        @intrinsic
        def unpack_two(typingctx, word):
            def codegen(context, builder, signature, args):
                two = ir.LiteralStructType([_F32] * 2)
                pair = _assembly(builder, two, [_I32], widen, "=f,=f,r", args, False)
                return cgutils.pack_array(builder, [builder.extract_value(pair, i) for i in range(2)])

            return types.UniTuple(types.float32, 2)(types.int32), codegen

        return unpack_two

    @intrinsic
    def operand(typingctx, address):
        """A descriptor of the operand whose box or boxes start at `address`.

        Bits 0-13 address / 16; 16-29 distance of 64-blocks of columns (8192 bytes, MN-major only) / 16; 32-45
        distance of groups of eight lines (1024) / 16; 62-63 the 128-byte swizzle.
        """

        def codegen(context, builder, signature, args):
            fields = ir.Constant(_I64, (1 << 62) | (1024 >> 4 << 32) | (BOX_BYTES >> 4 << 16))
            return builder.or_(builder.zext(builder.lshr(args[0], ir.Constant(_I32, 4)), _I64), fields)

        return types.int64(types.int32), codegen

    def _accumulators(context, builder, array_type, array, count):
        data = context.make_array(array_type)(context, builder, array).data
        return [builder.gep(data, [ir.Constant(_I32, i)]) for i in range(count)]

    def _on_accumulators(builder, pointers, text, extra_kinds, extra):
        """Assembly that reads and writes all accumulators: results $0.., the same registers tied as operands."""
        count = len(pointers)
        struct = ir.LiteralStructType([_F32] * count)
        constraints = ["=f"] * count + [str(i) for i in range(count)] + list(extra_kinds) + ["~{memory}"]
        values = [builder.load(pointer) for pointer in pointers]
        operand_types = [_F32] * count + [_IR[kind] for kind in extra_kinds]
        result = _assembly(builder, struct, operand_types, text, ",".join(constraints), values + list(extra))
        for i, pointer in enumerate(pointers):
            builder.store(builder.extract_value(result, i), pointer)

    @functools.cache
    def warpgroup_product(columns, element, a_mn_major=False, b_mn_major=False):
        """(start, wait_all_but_latest, wait_all) for 64 x columns accumulators.

        start(acc, a, b, keep): begin acc = (keep ? acc : 0) + A B, operands as operand() gives them;
        acc: a local array of columns / 2 float32. Between start and the wait for it, neither acc nor the
        operands' memory may be touched. wait_all_but_latest(acc) leaves the last start running.
        """
        count = columns // 2
        registers = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
        a, b, keep = (f"${2 * count + i}" for i in range(3))
        kind = ELEMENTS[element]
        shape = f"m64n{columns}k16.f32.{kind}.{kind}"
        # 16 k further on: 32 bytes along a line, or 16 lines of 128 bytes; in units of 16 bytes.
        a_step, b_step = (16 * LINE // 16 if mn_major else 2 for mn_major in (a_mn_major, b_mn_major))
        lines = [f"{{ .reg .pred first; setp.ne.b32 first, {keep}, 0;", "wgmma.fence.sync.aligned;"]
        for step in range(STEPS // 16):
            lines += [
                f"{{ .reg .b64 a, b; add.s64 a, {a}, {step * a_step}; add.s64 b, {b}, {step * b_step};",
                f"wgmma.mma_async.sync.aligned.{shape} {registers}, a, b, {'1' if step else 'first'},"
                f" 1, 1, {int(a_mn_major)}, {int(b_mn_major)}; }}",
            ]
        text = "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])

        @intrinsic
        def start(typingctx, acc, a, b, keep):
            def codegen(context, builder, signature, args):
                pointers = _accumulators(context, builder, signature.args[0], args[0], count)
                _on_accumulators(builder, pointers, text, "llr", args[1:])
                return context.get_dummy_value()

            return types.void(acc, types.int64, types.int64, types.int32), codegen

        def make_wait(running):
            # The accumulators pass through, so that no use of them moves above the wait.
            @intrinsic
            def wait(typingctx, acc):
                def codegen(context, builder, signature, args):
                    pointers = _accumulators(context, builder, signature.args[0], args[0], count)
                    _on_accumulators(builder, pointers, f"wgmma.wait_group.sync.aligned {running};", "", [])
                    return context.get_dummy_value()

                return types.void(acc), codegen

            return wait

        return start, make_wait(1), make_wait(0)


class HostTensorMap:
    """The simulator's tensor map: a matrix and the box that one bulk copy moves."""

    # Of the 128 bytes that stand for it on a GPU.
    dtype, ndim = np.dtype(np.uint8), 1

    def __init__(self, array, rows, columns):
        self.array = array
        self.box = rows, columns

    def read(self, row, column):
        """The box at (row, column), zeros outside the matrix."""
        box = np.zeros(self.box, self.array.dtype)
        part = self.array[row : row + self.box[0], column : column + self.box[1]]
        box[: part.shape[0], : part.shape[1]] = part
        return box

    def write(self, row, column, box, add):
        """Write (or add) what of a box at (row, column) lies in the matrix."""
        part = self.array[row : row + self.box[0], column : column + self.box[1]]
        part[...] = box[: part.shape[0], : part.shape[1]] + (part if add else part.dtype.type(0))


class DeviceTensorMaps:
    """Tensor maps in the GPU's memory, made once for each matrix and box and found again by address.

    The driver's encoder fills 128 opaque bytes on the host; they go to a slot of one device array. The
    host's copy stays, page-locked, so that a copy recorded in a graph reads the same bytes at each replay.
    """

    SLOTS = 1 << 15
    TYPES = {"uint8": 0, "float16": 6, "float32": 7, "bfloat16": 9}
    SWIZZLE_128 = 3
    PROMOTE_L2_256 = 3

    def __init__(self):
        import cupy
        import cupyx

        self.cupy = cupy
        self.encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
        self.host = cupyx.empty_pinned((self.SLOTS, LINE), np.uint8)
        raw = cupy.empty((self.SLOTS + 1) * LINE, np.uint8)
        start = -raw.data.ptr % LINE
        self.device = raw[start : start + self.SLOTS * LINE].reshape(self.SLOTS, LINE)
        self.views = [self.device[i] for i in range(self.SLOTS)]
        self.found = {}
        self.next = 0

    def get(self, array, rows, columns):
        key = array.data.ptr, array.shape, array.dtype, rows, columns
        view = self.found.get(key)
        return self._make(key) if view is None else view

    def _make(self, key):
        pointer, shape, dtype, rows, columns = key
        slot = self.next
        self.next = (slot + 1) % self.SLOTS
        if len(self.found) == self.SLOTS:
            # The oldest map gives its slot up; kernels that read it were launched long ago, on this stream.
            del self.found[next(iter(self.found))]
        two, one = ctypes.c_uint32 * 2, ctypes.c_uint64 * 1
        sizes = (ctypes.c_uint64 * 2)(shape[1], shape[0])
        status = self.encode(
            ctypes.c_void_p(self.host[slot].ctypes.data), self.TYPES[dtype.name], 2, ctypes.c_void_p(pointer), sizes,
            one(shape[1] * dtype.itemsize), two(columns, rows), two(1, 1), 0, self.SWIZZLE_128, self.PROMOTE_L2_256, 0,
        )  # fmt: skip
        if status:
            raise DeviceError(f"tensor map of a {shape} {dtype} matrix, box ({rows}, {columns}): driver error {status}")
        view = self.views[slot]
        view.data.copy_from_host_async(ctypes.c_void_p(self.host[slot].ctypes.data), LINE)
        self.found[key] = view
        return view


_maps = None


def tensor_map(array, rows, columns):
    """What a kernel needs to copy boxes of (rows, columns) of a C-contiguous matrix (R, C) in bulk.

    A line of a box is at most 128 bytes, rows of the matrix start at multiples of 16 bytes.
    Raises DeviceError if the driver refuses the matrix.
    """
    global _maps
    if device.name() != "cuda":
        return HostTensorMap(array, rows, columns)
    _maps = _maps or DeviceTensorMaps()
    return _maps.get(array, rows, columns)
