"""Instructions of NVIDIA's Hopper (sm_90a): bulk tensor copies, memory barriers, warpgroup matrix products.

Each instruction has a GPU lowering (inline PTX) and a simulator twin (Python whose body is its meaning).
Shared memory is addressed by int32 on the GPU and by the host's address in the simulator; code adds byte
offsets to what `shared_address` returned and never looks inside. Address(x) keeps a sum in that type.

Tiles in shared memory. A box of a tensor map is `rows` lines of 128 bytes, one after another, whose eight
16-byte chunks are permuted: chunk c of line r lies at place c ^ (r & 7) ("128-byte swizzle"), so that eight
lines' equal chunks meet no bank conflict. Boxes start at multiples of 1024 bytes.

Matrix product. One warpgroup (four warps, 128 threads) adds A (64, k) B (k, n) to 64 x n float32
accumulators, k = 64 unless said; A and B come from shared memory. "K-major": a line holds 64 consecutive k of
one row of A (one column of B), and a further 64 k follow behind all rows; "MN-major": a line holds 64
consecutive rows of A (columns of B) for one k, and further 64-blocks of rows or columns follow 8192 bytes
apart. Thread t = 32 w + 4 g + i of the warpgroup holds, for each block of eight columns b:
acc[4 b], acc[4 b + 1] = C[16 w + g, 8 b + 2 i :], acc[4 b + 2], acc[4 b + 3] = C[16 w + g + 8, ...]. A may also
come from registers, int32 words of two elements: for each 16 k, words 0 .. 3 are A[16 w + g, 2 i :],
A[16 w + g + 8, 2 i :], A[16 w + g, 2 i + 8 :], A[16 w + g + 8, 2 i + 8 :], so that what a product left in the
accumulators of 16 columns is, in pairs, what the next one takes as A.
Source: PTX ISA, sections on wgmma, mbarrier, cp.async.bulk.tensor, setmaxnreg, stmatrix.
"""

import contextlib
import ctypes
import functools
import inspect
import math

import numpy as np

from rlnumba.errors import DeviceError
from rlnumba.runtime import device

# Reduction steps of one issue: 4 instructions of 16. A line of a swizzled 16-bit box.
STEPS = 64
LINE = 128
BOX_BYTES = 64 * LINE

ELEMENTS = {"bfloat16": "bf16", "float16": "f16"}

Address = np.int64 if device.simulated() else np.int32

if device.simulated():
    from rlnumba.runtime.simulator import Gate, later, of_block, this_thread, warp_wide, warpgroup_wide

    class Barrier:
        """An mbarrier: a phase completes when all arrivals have come and all announced bytes are there."""

        def __init__(self):
            self.gate = Gate()

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
                self.gate.open()

        def wait(self, parity):
            before = self.completed
            if self.completed % 2 == parity:
                self.gate.wait(f"mbarrier_wait of parity {parity}")
            if self.completed > before + 1:
                raise RuntimeError("mbarrier_wait: the next phase was over too before this thread had seen its own end")

    def _barrier(address):
        return of_block(("mbarrier", int(address)), Barrier)

    def shared_address(array):
        """The address of a shared array."""
        return np.int64(array.ctypes.data)

    def tensor_map_address(tensor_map):
        """A tensor map as an argument for bulk copies."""
        return tensor_map

    def mbarrier_init(address, count):
        """Make the 8 bytes at `address` a barrier whose phases need `count` arrivals."""
        _barrier(address).init(int(count))

    def mbarrier_init_fence():
        """Make initialised barriers visible to the copy engine."""

    def mbarrier_expect_tx(address, nbytes):
        """Arrive, and announce that copies will bring nbytes in this phase."""
        _barrier(address).update(1, int(nbytes))

    def mbarrier_arrive(address):
        """Arrive."""
        _barrier(address).update(1, 0)

    def mbarrier_wait(address, parity):
        """Wait until the phase of this parity (0 for the first, 1 for the second, 0 ...) has completed."""
        _barrier(address).wait(int(parity))

    def _memory(address, nbytes):
        return np.frombuffer((ctypes.c_char * nbytes).from_address(int(address)), np.uint8)

    def _units(address, nbytes):
        """The numbers of the 16-byte units of memory that bytes lie in."""
        return range(int(address) // 16, (int(address) + nbytes - 1) // 16 + 1)

    def _write(address, content):
        """Write bytes to shared memory as ordinary code does: other hardware sees them after a fence only."""
        _memory(address, len(content))[:] = content
        this_thread().notes.setdefault("unfenced", set()).update(_units(address, len(content)))

    class Read:
        """Shared memory that the copy engine or the tensor cores read while the program goes on."""

        def __init__(self, address, nbytes):
            for thread in this_thread().block.threads:
                unfenced = thread.notes.get("unfenced")
                if unfenced and not unfenced.isdisjoint(_units(address, nbytes)):
                    raise RuntimeError(f"thread {thread.index} wrote what is read here, without fence_proxy_async")
            self.memory = _memory(address, nbytes)
            self.content = self.memory.copy()

        def check(self):
            """Raise if it has changed since."""
            if not np.array_equal(self.memory, self.content):
                raise RuntimeError("shared memory was written to while a copy or a product still read it")

    def _chunks(rows):
        """(rows, 8): where chunk c of line r of a swizzled box lies, in 16-byte units."""
        r, c = np.ogrid[:rows, :8]
        return 8 * r + (c ^ (r & 7))

    def start_load(memory, barrier, bring):
        """Start a copy to shared memory: bring() writes it, later, and the barrier's phase then misses less."""
        memory[:] = 0xFF
        barrier = _barrier(barrier)

        def arrive():
            bring()
            barrier.update(0, -len(memory))

        later(arrive)

    class Store:
        """A copy from shared to global memory: write(content) is done when it is waited for, or at the end."""

        def __init__(self, source, nbytes, write):
            self.source = Read(source, nbytes)
            self.write = write
            thread = this_thread()
            thread.notes.setdefault("stores", []).append(self)
            thread.last_checks.append(self.check_read)
            later(self.finish)

        def check_read(self):
            """Raise if the block's shared memory is still read when it is given to another block."""
            if self.source:
                raise RuntimeError("returned without waiting for its bulk stores")

        def finish_reading(self):
            if self.source:
                self.source.check()
                self.content, self.source = self.source.content, None

        def finish(self):
            """Write, unless that was done."""
            if self.write:
                content = self.source.content if self.source else self.content
                self.write(content)
                self.write = None

    def bulk_commit_group():
        """End a group of bulk stores of this thread."""
        notes = this_thread().notes
        notes.setdefault("committed", []).append(notes.get("stores", []))
        notes["stores"] = []

    def _committed():
        return this_thread().notes.get("committed", [])

    def bulk_wait_group_read():
        """Wait until all groups of this thread have read their shared memory."""
        for group in _committed():
            for store in group:
                store.finish_reading()

    def bulk_wait_group_read_but_latest():
        """Wait until all groups of this thread but the one that ended last have read their shared memory."""
        for group in _committed()[:-1]:
            for store in group:
                store.finish_reading()

    def bulk_wait_group():
        """Wait until all groups of this thread have written."""
        for group in _committed():
            for store in group:
                store.finish_reading()
                store.finish()
        _committed().clear()

    def _load(destination, tensor_map, start, barrier):
        lines = tensor_map.lines
        memory = _memory(destination, lines * LINE)

        def bring():
            memory.reshape(-1, 16)[_chunks(lines)] = tensor_map.read(start).view(np.uint8).reshape(lines, 8, 16)

        start_load(memory, barrier, bring)

    def _store(source, tensor_map, start, add):
        def write(content):
            lines = content.reshape(-1, 16)[_chunks(tensor_map.lines)]
            box = np.ascontiguousarray(lines).view(tensor_map.array.dtype).reshape(tensor_map.box)
            tensor_map.write(start, box, add)

        Store(source, tensor_map.lines * LINE, write)

    def tma_load_2d(destination, tensor_map, column, row, barrier):
        """Copy the box at (row, column) of a matrix to shared memory, zeros outside the matrix."""
        _load(destination, tensor_map, (int(row), int(column)), barrier)

    def tma_load_3d(destination, tensor_map, column, head, row, barrier):
        """Copy the box at (row, head, column) of an array (rows, heads, columns), zeros outside the array.

        Its lines are in the order of the array: all heads of the first row come first.
        """
        _load(destination, tensor_map, (int(row), int(head), int(column)), barrier)

    def tma_load_3d_evict_first(destination, tensor_map, column, head, row, barrier):
        """As tma_load_3d, of what nobody reads again: it is the first to leave the second-level cache."""
        _load(destination, tensor_map, (int(row), int(head), int(column)), barrier)

    def tma_store_2d(tensor_map, column, row, source):
        """Copy a box from shared memory to (row, column) of a matrix, leaving out what is outside."""
        _store(source, tensor_map, (int(row), int(column)), add=False)

    def tma_store_3d(tensor_map, column, head, row, source):
        """Copy a box from shared memory to (row, head, column) of an array, leaving out what is outside."""
        _store(source, tensor_map, (int(row), int(head), int(column)), add=False)

    def tma_reduce_add_2d(tensor_map, column, row, source):
        """As tma_store_2d, adding to a float32 matrix."""
        _store(source, tensor_map, (int(row), int(column)), add=True)

    def fence_proxy_async():
        """Make this thread's ordinary writes of shared memory visible to copy engine and tensor cores."""
        this_thread().notes.pop("unfenced", None)

    class NamedBarrier:
        """Opens when a given number of threads have come."""

        def __init__(self):
            self.gate = Gate()
            self.arrived = 0

        def come(self, name, threads):
            self.arrived += 1
            if self.arrived == threads:
                self.arrived = 0
                self.gate.open()
            else:
                self.gate.wait(name)

    def named_barrier_sync(index, threads):
        """Wait for `threads` threads of the block, whole warps, that meet at barrier `index` (1 .. 15)."""
        barrier = of_block(("named barrier", int(index)), NamedBarrier)
        barrier.come(f"named_barrier_sync {index} of {threads} threads", int(threads))

    def setmaxnreg_dec():
        """A warpgroup gives registers up, down to 40 a thread."""

    def setmaxnreg_inc():
        """A warpgroup takes registers, up to 232 a thread."""

    def warp_uniform(value):
        """A value that all lanes of a warp share, so that branches on it need no lane masks."""
        return value

    @functools.cache
    def cvt_pack(element):
        """cvt_pack(low, high) -> int32: two float32 rounded to `element`, low in the lower half."""

        def pack_two(low, high):
            pair = np.array([low, high], np.float32).astype(device.DTYPES[element])
            return pair.view(np.int32)[0]

        return pack_two

    @functools.cache
    def cvt_unpack(element):
        """cvt_unpack(word) -> (low, high) float32: what pack put into an int32."""

        def unpack_two(word):
            pair = np.array([word]).astype(np.int32).view(device.DTYPES[element])
            return np.float32(pair[0]), np.float32(pair[1])

        return unpack_two

    @warp_wide
    def stmatrix_x4(lanes):
        """Four 8 x 8 matrices of 16-bit values from a warp's registers to shared memory.

        (address, r0, r1, r2, r3): lane 8 i + r gives the address of line r of matrix i (16 bytes); lane
        4 r + c holds elements 2 c and 2 c + 1 of line r of matrix i in r_i.
        """
        for matrix in range(4):
            for line in range(8):
                words = [lanes[4 * line + c][1 + matrix] for c in range(4)]
                _write(lanes[8 * matrix + line][0], np.array(words, np.int32).view(np.uint8))
        return [None] * 32

    @warp_wide
    def stmatrix_x2_trans(lanes):
        """Two 8 x 8 matrices of 16-bit values from a warp's registers to shared memory, columns as lines.

        (address, r0, r1): lane 8 i + r, i < 2, gives the address of the line that receives column r of matrix
        i (16 bytes); lane 4 r + c holds elements 2 c and 2 c + 1 of row r of matrix i in r_i.
        """
        for matrix in range(2):
            words = np.array([lane[1 + matrix] for lane in lanes], np.int64).astype(np.int32)
            rows = words.view(np.uint16).reshape(8, 8)
            for column in range(8):
                _write(lanes[8 * matrix + column][0], rows[:, column].copy().view(np.uint8))
        return [None] * 32

    @warp_wide
    def ldmatrix_x4(lanes):
        """Four 8 x 8 matrices of 16-bit values from shared memory: (r0, r1, r2, r3), as stmatrix_x4 takes them."""
        lines = np.stack([_memory(address, 16).view(np.int32) for (address,) in lanes]).reshape(4, 8, 4)
        return [tuple(lines[:, lane // 4, lane % 4]) for lane in range(32)]

    def store_pair(address, first, second):
        """Two neighbouring float32 to shared memory."""
        _write(address, np.array([first, second], np.float32).view(np.uint8))

    def load_pair(address):
        """Two neighbouring float32 from shared memory."""
        return tuple(_memory(address, 8).view(np.float32).copy())

    def store_four(address, first, second, third, fourth):
        """Four neighbouring float32 to shared memory, 16 bytes that start at a multiple of 16."""
        _write(address, np.array([first, second, third, fourth], np.float32).view(np.uint8))

    def load_four(address):
        """Four neighbouring float32 from shared memory."""
        return tuple(_memory(address, 16).view(np.float32).copy())

    def load_word(address):
        """The int32 at an address of shared memory."""
        return _memory(address, 4).view(np.int32)[0]

    def load_words(address):
        """Four neighbouring int32 from shared memory, 16 bytes that start at a multiple of 16."""
        return tuple(_memory(address, 16).view(np.int32).copy())

    def _lines(address, count, dtype, reads):
        """(count, 64): lines of a swizzled box of 16-bit elements; a Read of them joins the list."""
        reads.append(Read(address, count * LINE))
        chunks = reads[-1].content.reshape(-1, 16)[_chunks(count)]
        return np.ascontiguousarray(chunks).view(dtype).reshape(count, 64)

    def _operand(address, rows, depth, mn_major, dtype, reads):
        """(rows, depth) of an operand; rows are A's rows or B's columns."""
        if mn_major:
            blocks = [_lines(address + i * BOX_BYTES, depth, dtype, reads).T for i in range(-(-rows // 64))]
            return np.concatenate(blocks)[:rows]
        boxes = [_lines(address + i * rows * LINE, rows, dtype, reads) for i in range(-(-depth // 64))]
        return np.concatenate(boxes, axis=1)[:, :depth]

    class Registers:
        """Registers that the tensor cores read while the program goes on."""

        def __init__(self, words):
            self.words = words
            self.content = words.copy()

        def check(self):
            """Raise if they have changed since."""
            if not np.array_equal(self.words, self.content):
                raise RuntimeError("registers were written to while a product still read them")

    class Product:
        """What a thread has of a product under way: accumulators that hold NaN until it is waited for."""

        def __init__(self, acc, result, reads):
            self.acc, self.result, self.reads = acc, result, reads
            acc[:] = np.nan

        def finish(self, replaced):
            """Give the accumulators their values, unless a later product has replaced these."""
            # The first thread to see the end may let others write to the operands, as one warp of four may on a GPU.
            for read in self.reads:
                read.check()
            self.reads.clear()
            if not np.isnan(self.acc).all():
                raise RuntimeError("accumulators were written to while a product was under way")
            if not replaced:
                self.acc[:] = self.result

    def _products(thread):
        """The products of a thread that are under way, the latest last."""
        return thread.notes.setdefault("products", [])

    def accumulated(thread, acc):
        """What acc will hold after the products that are under way."""
        for product in reversed(_products(thread)):
            if product.acc.ctypes.data == acc.ctypes.data:
                return product.result
        return acc

    def multiply_add(c, a, b):
        """c (rows, columns) float32 + a (rows, k) b (columns, k) transposed, as the tensor cores add it up.

        One rounding every 16 products, whose order does not depend on the operands' places.
        """
        with np.errstate(invalid="ignore"):
            for step in range(0, a.shape[1], 16):
                total = c.astype(np.float64)
                for k in range(step, step + 16):
                    total += np.multiply.outer(a[:, k].astype(np.float64), b[:, k].astype(np.float64))
                c = total.astype(np.float32)
        return c

    def places(columns):
        """(rows, columns), each (128, columns / 2): of the accumulators that a warpgroup's threads hold."""
        thread, i = np.ogrid[:128, : columns // 2]
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i % 4 // 2)
        return row, 2 * (thread % 4) + 8 * (i // 4) + i % 2

    def warpgroup_threads():
        """The 128 threads of the warpgroup that runs."""
        first = this_thread().index // 128 * 128
        return this_thread().block.threads[first : first + 128]

    def note_products(accumulators, results, reads):
        """A product of a warpgroup is under way: a local array and what it will hold, for each thread."""
        for thread, acc, result in zip(warpgroup_threads(), accumulators, results, strict=True):
            _products(thread).append(Product(acc, result, reads))

    class Begun:
        """A product that not all warps of a warpgroup have begun: each of them reads operands when it begins."""

        def __init__(self):
            self.arrived, self.operands = [0] * 4, None

    def warpgroup_start(read, compute):
        """start(...) of a product: read(operands of a thread) by the first warp that comes, compute by the last.

        read returns what compute(what was read, operands of all threads) takes, a list of Reads last.
        """

        @warpgroup_wide
        def start_product(threads):
            begun = of_block(("begun", this_thread().index // 128), Begun)
            for part in begun.operands[-1]:
                part.check()
            compute(begun.operands, threads)
            begun.__init__()
            return [None] * 128

        def start(*operands):
            index = this_thread().index
            begun = of_block(("begun", index // 128), Begun)
            warp = index % 128 // 32
            begun.arrived[warp] += 1
            if begun.arrived[warp] == 32 and begun.operands is None:
                begun.operands = read(*operands)
            start_product(*operands)

        return start

    def wait_products(running):
        """Wait until all products of this thread but the latest `running` are done."""
        products = _products(this_thread())
        while len(products) > running:
            first = products.pop(0)
            first.finish(any(other.acc.ctypes.data == first.acc.ctypes.data for other in products))

    def smem_descriptor(address):
        """A descriptor of the operand whose box or boxes start at `address`."""
        return address

    @functools.cache
    def wgmma(
        columns, element, a_mn_major=False, b_mn_major=False, depth=STEPS, blocks=1, registers=False, eight=False
    ):
        """(start, wait_all_but_latest, wait_all) for 64 x columns accumulators, adding `depth` products to each.

        start(acc, a, b, keep): begin acc = (keep ? acc : 0) + A B, operands as smem_descriptor() gives them;
        acc: a local array of columns / 2 float32. Between start and the wait for it, neither acc nor the
        operands' memory may be touched. wait_all_but_latest(acc) leaves the last start running.
        blocks: A has as many times 64 rows, and acc as many parts. registers: a is a local array of depth / 4
        int32, not to be touched until the wait either, which is then wait_all(acc, a). eight: A, K-major, has eight
        rows only, and each of them stands for every eighth of 64.
        """
        dtype = device.DTYPES[element]
        count = columns // 2 * blocks
        row, column = places(columns)

        def read(acc, left, right, keep):
            reads = []
            a = None if registers else _operand(left, 8 if eight else 64 * blocks, depth, a_mn_major, dtype, reads)
            if eight:
                a = np.tile(a, (8, 1))
            return a, _operand(right, columns, depth, b_mn_major, dtype, reads), reads

        def compute(operands, threads):
            a, b, reads = operands
            accumulators, lefts, _, keeps = zip(*threads, strict=True)
            accumulators = [acc[:count] for acc in accumulators]
            if registers:
                words = [left[: depth // 4] for left in lefts]
                reads += map(Registers, words)
                # warp, g, i, step of 16 k, half of the step, half of the rows, which of a pair
                pairs = np.stack(words).view(dtype).reshape(4, 8, 4, depth // 16, 2, 2, 2)
                a = pairs.transpose(0, 5, 1, 3, 4, 2, 6).reshape(64, depth)
            results = np.zeros((128, blocks, columns // 2), np.float32)
            if keeps[0]:
                before = [accumulated(*pair) for pair in zip(warpgroup_threads(), accumulators, strict=True)]
                results[:] = np.stack(before).reshape(results.shape)
            for block in range(blocks):
                c = np.empty((64, columns), np.float32)
                c[row, column] = results[:, block]
                results[:, block] = multiply_add(c, a[64 * block : 64 * block + 64], b)[row, column]
            note_products(accumulators, results.reshape(128, count), reads)

        def make_wait(running):
            def wait(acc, a=None):
                wait_products(running)

            return wait

        return warpgroup_start(read, compute), make_wait(1), make_wait(0)

else:
    from llvmlite import ir
    from numba.cuda import cgutils, types
    from numba.cuda.extending import intrinsic

    # In a descriptor of an operand, see there.
    LINES_APART = 8 * LINE >> 4 << 32

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

    mbarrier_init = _instruction(
        "mbarrier.init.shared::cta.b64 [$0], $1;",
        "rr",
        "Make the 8 bytes at `address` a barrier whose phases need `count` arrivals.",
    )
    mbarrier_init_fence = _instruction(
        "fence.mbarrier_init.release.cluster;", "", "Make initialised barriers visible to the copy engine."
    )
    mbarrier_expect_tx = _instruction(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
        "rr",
        "Arrive, and announce that copies will bring nbytes in this phase.",
    )
    mbarrier_arrive = _instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", "r", "Arrive.")
    mbarrier_wait = _instruction(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra AGAIN; }",
        "rr",
        "Wait until the phase of this parity (0 for the first, 1 for the second, 0 ...) has completed.",
    )
    tma_load_2d = _instruction(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {$2, $3}], [$4];",
        "rlrrr",
        "Copy the box at (row, column) of a matrix to shared memory, zeros outside the matrix.",
    )
    tma_load_3d = _instruction(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {$2, $3, $4}], [$5];",
        "rlrrrr",
        "Copy the box at (row, head, column) of an array (rows, heads, columns), zeros outside the array.",
    )
    tma_load_3d_evict_first = _instruction(
        "{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0; "
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[$0], [$1, {$2, $3, $4}], [$5], first; }",
        "rlrrrr",
        "As tma_load_3d, of what nobody reads again: it is the first to leave the second-level cache.",
    )
    tma_store_2d = _instruction(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [$0, {$1, $2}], [$3];",
        "lrrr",
        "Copy a box from shared memory to (row, column) of a matrix, leaving out what is outside.",
    )
    tma_store_3d = _instruction(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [$0, {$1, $2, $3}], [$4];",
        "lrrrr",
        "Copy a box from shared memory to (row, head, column) of an array, leaving out what is outside.",
    )
    tma_reduce_add_2d = _instruction(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [$0, {$1, $2}], [$3];",
        "lrrr",
        "As tma_store_2d, adding to a float32 matrix.",
    )
    bulk_commit_group = _instruction("cp.async.bulk.commit_group;", "", "End a group of bulk stores of this thread.")
    bulk_wait_group_read = _instruction(
        "cp.async.bulk.wait_group.read 0;", "", "Wait until all groups of this thread have read their shared memory."
    )
    bulk_wait_group_read_but_latest = _instruction(
        "cp.async.bulk.wait_group.read 1;",
        "",
        "Wait until all groups of this thread but the one that ended last have read their shared memory.",
    )
    bulk_wait_group = _instruction(
        "cp.async.bulk.wait_group 0;", "", "Wait until all groups of this thread have written."
    )
    fence_proxy_async = _instruction(
        "fence.proxy.async.shared::cta;",
        "",
        "Make this thread's ordinary writes of shared memory visible to copy engine and tensor cores.",
    )
    named_barrier_sync = _instruction(
        "bar.sync $0, $1;",
        "rr",
        "Wait for `threads` threads of the block, whole warps, that meet at barrier `index` (1 .. 15).",
    )
    setmaxnreg_dec = _instruction(
        "setmaxnreg.dec.sync.aligned.u32 40;", "", "A warpgroup gives registers up, down to 40 a thread."
    )
    setmaxnreg_inc = _instruction(
        "setmaxnreg.inc.sync.aligned.u32 232;", "", "A warpgroup takes registers, up to 232 a thread."
    )
    stmatrix_x4 = _instruction(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
        "rrrrr",
        "Four 8 x 8 matrices of 16-bit values from a warp's registers to shared memory.",
    )
    stmatrix_x2_trans = _instruction(
        "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [$0], {$1, $2};",
        "rrr",
        "Two 8 x 8 matrices of 16-bit values from a warp's registers to shared memory, columns as lines.",
    )
    store_pair = _instruction("st.shared.v2.f32 [$0], {$1, $2};", "rff", "Two neighbouring float32 to shared memory.")
    store_four = _instruction(
        "st.shared.v4.f32 [$0], {$1, $2, $3, $4};",
        "rffff",
        "Four neighbouring float32 to shared memory, 16 bytes that start at a multiple of 16.",
    )

    def _values(text, count, kind, doc):
        """An intrinsic from an address in shared memory to a tuple of `count` values of one kind."""

        def define(typingctx, address):
            def codegen(context, builder, signature, args):
                several = ir.LiteralStructType([_IR[kind]] * count)
                constraints = ",".join([f"={kind}"] * count + ["r", "~{memory}"])
                result = _assembly(builder, several, [_I32], text, constraints, args)
                return cgutils.pack_array(builder, [builder.extract_value(result, i) for i in range(count)])

            return types.UniTuple(_NUMBA[kind], count)(types.int32), codegen

        define.__doc__ = doc
        return intrinsic(define)

    ldmatrix_x4 = _values(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
        4,
        "r",
        "Four 8 x 8 matrices of 16-bit values from shared memory: (r0, r1, r2, r3), as stmatrix_x4 takes them.",
    )
    load_pair = _values("ld.shared.v2.f32 {$0, $1}, [$2];", 2, "f", "Two neighbouring float32 from shared memory.")
    load_four = _values(
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", 4, "f", "Four neighbouring float32 from shared memory."
    )
    load_words = _values(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
        4,
        "r",
        "Four neighbouring int32 from shared memory, 16 bytes that start at a multiple of 16.",
    )

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
    def cvt_pack(element):
        """cvt_pack(low, high) -> int32: two float32 rounded to `element`, low in the lower half."""

        @intrinsic
        def pack_two(typingctx, low, high):
            def codegen(context, builder, signature, args):
                text = f"cvt.rn.{ELEMENTS[element]}x2.f32 $0, $2, $1;"
                return _assembly(builder, _I32, [_F32] * 2, text, "=r,f,f", args, False)

            return types.int32(types.float32, types.float32), codegen

        return pack_two

    @functools.cache
    def cvt_unpack(element):
        """cvt_unpack(word) -> (low, high) float32: what pack put into an int32."""
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
    def smem_descriptor(typingctx, address):
        """A descriptor of the operand whose box or boxes start at `address`.

        Bits 0-13 address / 16; 16-29 distance of 64-blocks of columns (8192 bytes, MN-major only) / 16; 32-45
        distance of groups of eight lines (1024) / 16; 62-63 the 128-byte swizzle.
        """

        def codegen(context, builder, signature, args):
            fields = ir.Constant(_I64, (1 << 62) | LINES_APART | (BOX_BYTES >> 4 << 16))
            return builder.or_(builder.zext(builder.lshr(args[0], ir.Constant(_I32, 4)), _I64), fields)

        return types.int64(types.int32), codegen

    def _elements(context, builder, array_type, array, count):
        data = context.make_array(array_type)(context, builder, array).data
        return [builder.gep(data, [ir.Constant(_I32, i)]) for i in range(count)]

    def _on_registers(builder, pointers, kinds, text, extra_kinds, extra):
        """Assembly that reads and writes local arrays: results $0.., the same registers tied as operands."""
        count = len(pointers)
        struct = ir.LiteralStructType([_IR[kind] for kind in kinds])
        constraints = [f"={kind}" for kind in kinds] + [str(i) for i in range(count)] + [*extra_kinds, "~{memory}"]
        values = [builder.load(pointer) for pointer in pointers]
        operand_types = [_IR[kind] for kind in [*kinds, *extra_kinds]]
        result = _assembly(builder, struct, operand_types, text, ",".join(constraints), values + list(extra))
        for i, pointer in enumerate(pointers):
            builder.store(builder.extract_value(result, i), pointer)

    @functools.cache
    def wgmma(
        columns, element, a_mn_major=False, b_mn_major=False, depth=STEPS, blocks=1, registers=False, eight=False
    ):
        """(start, wait_all_but_latest, wait_all) for 64 x columns accumulators, adding `depth` products to each.

        start(acc, a, b, keep): begin acc = (keep ? acc : 0) + A B, operands as smem_descriptor() gives them;
        acc: a local array of columns / 2 float32. Between start and the wait for it, neither acc nor the
        operands' memory may be touched. wait_all_but_latest(acc) leaves the last start running.
        blocks: A has as many times 64 rows, and acc as many parts. registers: a is a local array of depth / 4
        int32, not to be touched until the wait either, which is then wait_all(acc, a). eight: A, K-major, has eight
        rows only, and each of them stands for every eighth of 64.
        """
        count = columns // 2 * blocks
        words = depth // 4 if registers else 0
        # Operands of the assembly: the accumulators twice, then A (words or a descriptor), B's descriptor, keep.
        first = 2 * count
        b, keep = (f"${first + (words or 1) + i}" for i in range(2))
        kind = ELEMENTS[element]
        shape = f"m64n{columns}k16.f32.{kind}.{kind}"

        def offset(step, mn_major, lines):
            # 16 k further on: 32 bytes along a line, or 16 lines of 128 bytes; in units of 16 bytes.
            return (16 * LINE * step if mn_major else step % 4 * 32 + step // 4 * lines * LINE) // 16

        lines = [f"{{ .reg .pred first; setp.ne.b32 first, {keep}, 0;", "wgmma.fence.sync.aligned;"]
        for step in range(depth // 16):
            for block in range(blocks):
                acc = range(block * columns // 2, (block + 1) * columns // 2)
                into = "{" + ", ".join(f"${i}" for i in acc) + "}"
                b_at = offset(step, b_mn_major, columns)
                a_at = offset(step, a_mn_major, 8 if eight else 64 * blocks) + block * BOX_BYTES // 16
                if eight:
                    # The distance of groups of eight lines becomes 0.
                    a_at -= LINES_APART
                a = "{" + ", ".join(f"${first + 4 * step + i}" for i in range(4)) + "}" if registers else "a"
                transposed = f"{int(b_mn_major)}" if registers else f"{int(a_mn_major)}, {int(b_mn_major)}"
                descriptor = "" if registers else f" .reg .b64 a; add.s64 a, ${first}, {a_at};"
                lines += [
                    f"{{{descriptor} .reg .b64 b; add.s64 b, {b}, {b_at};",
                    f"wgmma.mma_async.sync.aligned.{shape} {into}, {a}, b, {'1' if step else 'first'},"
                    f" 1, 1, {transposed}; }}",
                ]
        text = "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])

        @intrinsic
        def start(typingctx, acc, a, b, keep):
            def codegen(context, builder, signature, args):
                pointers = _elements(context, builder, signature.args[0], args[0], count)
                operands = [args[1]]
                if registers:
                    taken = _elements(context, builder, signature.args[1], args[1], words)
                    operands = [builder.load(word) for word in taken]
                kinds = "r" * words if registers else "l"
                _on_registers(builder, pointers, "f" * count, text, kinds + "lr", [*operands, *args[2:]])
                return context.get_dummy_value()

            return types.void(acc, a if registers else types.int64, types.int64, types.int32), codegen

        def make_wait(left):
            text = f"wgmma.wait_group.sync.aligned {left};"

            # The registers pass through, so that no use of them moves above the wait.
            @intrinsic
            def wait(typingctx, acc):
                def codegen(context, builder, signature, args):
                    pointers = _elements(context, builder, signature.args[0], args[0], count)
                    _on_registers(builder, pointers, "f" * count, text, "", [])
                    return context.get_dummy_value()

                return types.void(acc), codegen

            @intrinsic
            def wait_with_operand(typingctx, acc, a):
                def codegen(context, builder, signature, args):
                    pointers = _elements(context, builder, signature.args[0], args[0], count)
                    pointers += _elements(context, builder, signature.args[1], args[1], words)
                    _on_registers(builder, pointers, "f" * count + "r" * words, text, "", [])
                    return context.get_dummy_value()

                return types.void(acc, a), codegen

            return wait_with_operand if registers else wait

        return start, make_wait(1), make_wait(0)


class HostTensorMap:
    """The simulator's tensor map: an array and the box that one bulk copy moves."""

    # Of the 128 bytes that stand for it on a GPU.
    dtype, ndim = np.dtype(np.uint8), 1

    def __init__(self, array, box):
        if len(box) > array.ndim:
            array = array.reshape(len(array), -1, box[-1]).transpose(1, 0, 2)
        self.array = array
        self.box = box
        self.lines = int(np.prod(box[:-1]))

    def _inside(self, start):
        return tuple(slice(first, first + length) for first, length in zip(start, self.box, strict=True))

    def read(self, start):
        """The box at `start`, zeros outside the array."""
        box = np.zeros(self.box, self.array.dtype)
        part = self.array[self._inside(start)]
        box[tuple(slice(length) for length in part.shape)] = part
        return box

    def write(self, start, box, add):
        """Write (or add) what of a box at `start` lies in the array."""
        part = self.array[self._inside(start)]
        new = box[tuple(slice(length) for length in part.shape)]
        part[...] = part + new if add else new


class DeviceTensorMaps:
    """Tensor maps in the GPU's memory, made once for each array and box and found again by address.

    The driver's encoder fills 128 opaque bytes on the host; they go to a slot of one device array. When all slots
    are taken, the oldest map gives its slot up, unless a captured graph reads it (keep_tensor_maps).
    """

    SLOTS = 1 << 16
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
        self.free = list(range(self.SLOTS))
        # The view of each map's slot, the oldest map first, and the maps that stay.
        self.found, self.kept = {}, set()
        self.keeping = False

    def get(self, array, box):
        key = array.data.ptr, array.shape, array.dtype, box
        view = self.found.get(key)
        if view is None:
            view = self._make(key)
        if self.keeping:
            self.kept.add(key)
        return view

    def _free_slot(self):
        if not self.free:
            oldest = next((key for key in self.found if key not in self.kept), None)
            if oldest is None:
                raise DeviceError(f"captured graphs hold all of {self.SLOTS} tensor maps")
            # Kernels that read it were launched long ago, on this stream.
            self.free.append((self.found.pop(oldest).data.ptr - self.device.data.ptr) // LINE)
        return self.free.pop()

    def _make(self, key):
        pointer, shape, dtype, box = key
        if self.cupy.cuda.get_current_stream().is_capturing():
            # Its bytes would reach the device at a replay only.
            raise DeviceError(f"a tensor map of a {shape} {dtype} array was first asked for while a graph is captured")
        slot = self._free_slot()
        strides = [dtype.itemsize * math.prod(shape[i:]) for i in range(len(shape) - 1, 0, -1)]
        if len(box) > len(shape):
            rows, columns = shape
            shape, strides = (columns // box[-1], rows, box[-1]), [*strides, dtype.itemsize * box[-1]]
        # The driver wants the innermost dimension first.
        dimensions = len(shape)
        lengths, sizes = ctypes.c_uint32 * dimensions, ctypes.c_uint64 * dimensions
        status = self.encode(
            ctypes.c_void_p(self.host[slot].ctypes.data), self.TYPES[dtype.name], dimensions, ctypes.c_void_p(pointer),
            sizes(*shape[::-1]), (ctypes.c_uint64 * (dimensions - 1))(*strides), lengths(*box[::-1]),
            lengths(*[1] * dimensions), 0, self.SWIZZLE_128, self.PROMOTE_L2_256, 0,
        )  # fmt: skip
        if status:
            self.free.append(slot)
            raise DeviceError(f"tensor map of a {shape} {dtype} array, box {box}: driver error {status}")
        view = self.device[slot]
        view.data.copy_from_host_async(ctypes.c_void_p(self.host[slot].ctypes.data), LINE)
        self.found[key] = view
        return view


_maps = None


def tensor_map(array, *box):
    """What a kernel needs to copy boxes of a C-contiguous matrix or three-dimensional array in bulk.

    box: lengths in the order of the array's dimensions, at most 256 each. A line of a box is at most 128
    bytes; the array and its rows start at multiples of 16 bytes. Three lengths for a matrix: it is seen as (panels,
    rows, columns of a panel), a panel being as wide as the box. Raises DeviceError if the driver refuses.
    """
    global _maps
    if device.name() != "cuda":
        return HostTensorMap(array, box)
    _maps = _maps or DeviceTensorMaps()
    return _maps.get(array, box)


@contextlib.contextmanager
def keep_tensor_maps():
    """Tensor maps that are asked for inside stay as they are for good, as a captured graph demands."""
    if _maps is None:
        yield
        return
    _maps.keeping = True
    try:
        yield
    finally:
        _maps.keeping = False
