"""The matrix multiply-accumulate of a warpgroup on sm_90a: wgmma.mma_async, and the wait for it.

One warpgroup (four warps, 128 threads) adds A (64, k) B (k, n) to 64 x n float32 accumulators. B comes from shared
memory, A from shared memory or registers. In shared memory an operand lies in swizzled boxes (shared_memory.py).
"K-major": a line holds 64 consecutive k of one row of A (one column of B); a further 64 k are a further box.
"MN-major": a line holds 64 consecutive rows of A (columns of B) for one k; further 64-blocks of rows or columns follow
BOX_BYTES apart.

Thread t = 32 w + 4 g + i of the warpgroup holds, for each block of eight columns b:
acc[4 b], acc[4 b + 1] = C[16 w + g, 8 b + 2 i :], acc[4 b + 2], acc[4 b + 3] = C[16 w + g + 8, ...]. A in registers
are int32 words of two elements: for each 16 k, words 0 .. 3 are A[16 w + g, 2 i :], A[16 w + g + 8, 2 i :],
A[16 w + g, 2 i + 8 :], A[16 w + g + 8, 2 i + 8 :]. So the accumulators of 16 columns, in pairs, are what a next product
takes as A.
Source: PTX ISA, section on wgmma.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.ptx.instruction import SIMULATED
from rlnumba.kernels.ptx.shared_memory import BOX_BYTES, LINE, AsyncRead, read_shared, swizzled_units
from rlnumba.kernels.ptx.warp import PTX_TYPES
from rlnumba.runtime import device

# k of one line of a 16-bit box: four instructions.
STEPS = 64
# Threads of a warpgroup, and rows of C that its instruction computes.
WARPGROUP, ROWS = 128, 64


def _box_bytes(major, rows):
    """Bytes from an operand's box of 64 k to that of the next 64, if they lie one after the other."""
    return rows * LINE if major == "k" else BOX_BYTES


if SIMULATED:
    from rlnumba.runtime.simulator import NAN, block_state, current_thread, warpgroup_wide, with_gpu_nans

    class Product:
        """A thread's part of a product under way: accumulators that hold NaN until it is waited for."""

        def __init__(self, acc, result, reads):
            self.acc, self.result, self.reads = acc, result, reads
            acc[:] = NAN

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

    class PartlyStarted:
        """A product that not all warps of a warpgroup have started: each of them reads operands when it starts."""

        def __init__(self):
            self.arrived, self.operands = [0] * 4, None

    def _products(thread):
        """The products of a thread that are under way, the latest last."""
        return thread.state.setdefault("products", [])

    def _accumulated(thread, acc):
        """The values that acc will hold after the products that are under way."""
        for product in reversed(_products(thread)):
            if product.acc.ctypes.data == acc.ctypes.data:
                return product.result
        return acc

    def _threads():
        """The 128 threads of the warpgroup that runs."""
        first = current_thread().index // WARPGROUP * WARPGROUP
        return current_thread().block.threads[first : first + WARPGROUP]

    def _operand(address, rows, k, major, box_bytes, dtype, reads):
        """(rows, k) of an operand in shared memory; rows are A's rows or B's columns. Its AsyncReads join `reads`."""

        def lines(start, count):
            reads.append(read_shared(start, count * LINE))
            chunks = reads[-1].content.reshape(-1, 16)[swizzled_units(count)]
            return np.ascontiguousarray(chunks).view(dtype).reshape(count, 64)

        # An MN-major operand may start within a line.
        first = int(address) % LINE // 2
        boxes = []
        for step in range(0, k, STEPS):
            start = int(address) - 2 * first + step // STEPS * box_bytes
            if major == "k":
                boxes.append(lines(start, rows))
            else:
                count = min(STEPS, k - step)
                blocks = [lines(start + i * BOX_BYTES, count).T for i in range(-(-rows // 64))]
                boxes.append(np.concatenate(blocks)[first : first + rows])
        return np.concatenate(boxes, axis=1)[:, :k]

    def _multiply_add(c, a, b):
        """c (rows, columns) float32 + a (rows, k) b (columns, k) transposed, as the tensor cores add it up.

        One rounding every 16 products, whose order does not depend on where the operands lie.
        """
        with np.errstate(invalid="ignore"):
            for step in range(0, a.shape[1], 16):
                total = c.astype(np.float64)
                for k in range(step, step + 16):
                    total += np.multiply.outer(a[:, k].astype(np.float64), b[:, k].astype(np.float64))
                c = total.astype(np.float32)
        return with_gpu_nans(c)

    def _fragment(columns):
        """(rows, columns), each (128, columns / 2): of the accumulators that a warpgroup's threads hold."""
        thread, i = np.ogrid[:WARPGROUP, : columns // 2]
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i % 4 // 2)
        return row, 2 * (thread % 4) + 8 * (i // 4) + i % 2

    def smem_descriptor(address):
        """A descriptor of the operand whose box or boxes start at `address`."""
        return address

    def _start_function(form):
        columns, element, steps, a, b, accumulate, (a_box, b_box, blocks, broadcast, b_first) = form
        dtype, k, count = device.DTYPES[element], 16 * steps, columns // 2 * blocks
        row, column = _fragment(columns)
        word_row, word_column = _fragment(k)
        a_rows = 8 if broadcast else ROWS * blocks

        def read(acc, left, right, *_):
            reads = []
            if a != "registers":
                left = _operand(left, a_rows, k, a, a_box, dtype, reads)
            right = _operand(right, columns, 16 * b_first + k, b, b_box, dtype, reads)
            return left, right[:, 16 * b_first :], reads

        def compute(operands, threads):
            left, right, reads = operands
            accumulators = [acc[:count] for acc, *_ in threads]
            if a == "registers":
                words = [words[: 4 * steps] for _, words, *_ in threads]
                reads += map(AsyncRead, words)
                left = np.zeros((ROWS, k), dtype)
                left[word_row, word_column] = np.stack(words).view(dtype)
            left = np.tile(left, (8, 1)) if broadcast else left
            results = np.zeros((WARPGROUP, blocks, columns // 2), np.float32)
            if accumulate if accumulate is not None else threads[0][3]:
                results[:] = np.stack(list(map(_accumulated, _threads(), accumulators))).reshape(results.shape)
            for block in range(blocks):
                c = np.empty((ROWS, columns), np.float32)
                c[row, column] = results[:, block]
                c = _multiply_add(c, left[ROWS * block : ROWS * (block + 1)], right)
                results[:, block] = c[row, column]
            for thread, acc, result in zip(_threads(), accumulators, results.reshape(WARPGROUP, count), strict=True):
                _products(thread).append(Product(acc, result, reads))

        @warpgroup_wide
        def start_product(threads):
            started = block_state(("started", current_thread().index // WARPGROUP), PartlyStarted)
            for part in started.operands[-1]:
                part.check()
            compute(started.operands, threads)
            started.__init__()
            return [None] * WARPGROUP

        def start(*operands):
            index = current_thread().index
            started = block_state(("started", index // WARPGROUP), PartlyStarted)
            warp = index % WARPGROUP // 32
            started.arrived[warp] += 1
            if started.arrived[warp] == 32 and started.operands is None:
                started.operands = read(*operands)
            start_product(*operands)

        return start

    @functools.cache
    def wgmma_wait_group(accumulators, pending=0, words=0):
        """wait(acc): until all wgmma groups of this warpgroup but the latest `pending` are done.

        acc: the local array of so many accumulators, whose use must not move above the wait. words: so many words of A
        in registers may be touched afterwards, too: wait(acc, a).
        """

        def wait(acc, a=None):
            products = _products(current_thread())
            while len(products) > pending:
                first = products.pop(0)
                first.finish(any(other.acc.ctypes.data == first.acc.ctypes.data for other in products))

        return wait

else:
    from rlnumba.kernels.ptx.instruction import F32, I32, I64, as_intrinsic, inline_asm, local_elements
    from rlnumba.kernels.ptx.lowering import intrinsic, ir, types

    # The distance of groups of eight lines in a descriptor.
    LINES_APART = 8 * LINE >> 4 << 32

    @intrinsic
    def smem_descriptor(typingctx, address):
        """A descriptor of the operand whose box or boxes start at `address`.

        Bits 0-13 address / 16; 16-29 distance of 64-blocks of columns (8192 bytes, MN-major only) / 16; 32-45
        distance of groups of eight lines (1024) / 16; 62-63 the 128-byte swizzle.
        """

        def codegen(context, builder, signature, args):
            fields = ir.Constant(I64, (1 << 62) | LINES_APART | (BOX_BYTES >> 4 << 16))
            return builder.or_(builder.zext(builder.lshr(args[0], ir.Constant(I32, 4)), I64), fields)

        return types.int64(types.int32), codegen

    def _update(builder, pointers, types_, tied, text, constraints, operands):
        """PTX whose results replace what the pointers point to; `tied` of them come in as operands, too."""
        values = [builder.load(pointer) for pointer in pointers[:tied]]
        outputs = ["=f" if type_ == F32 else "=r" for type_ in types_]
        constraints = ",".join([*outputs, *map(str, range(tied)), *constraints, "~{memory}"])
        results = inline_asm(builder, types_, text, constraints, [*values, *operands])
        for pointer, result in zip(pointers, results, strict=True):
            builder.store(result, pointer)

    def _start_text(form):
        """The PTX of a WgmmaForm. Operands: results, accumulators that come in, A (words or a descriptor), B, ..."""
        columns, element, steps, a, b, accumulate, (a_box, b_box, blocks, broadcast, b_first) = form
        count = columns // 2
        left = count * blocks * (1 if accumulate is False else 2)
        right = left + (4 * steps if a == "registers" else 1)
        kind = PTX_TYPES[element]

        def offset(step, major, box_bytes):
            # 16 k further on: 32 bytes along a line, or 16 lines of 128 bytes; in units of 16 bytes.
            return (step // 4 * box_bytes + step % 4 * (16 * LINE if major == "mn" else 32)) // 16

        def registers(first, count):
            return "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"

        first = {None: "first", False: "0", True: "1"}[accumulate]
        lines = ["{", f".reg .pred first; setp.ne.b32 first, ${right + 1}, 0;" if accumulate is None else ""]
        lines += ["wgmma.fence.sync.aligned;"]
        for step in range(steps):
            for block in range(blocks):
                lines += [f"{{ .reg .b64 a, b; add.s64 b, ${right}, {offset(b_first + step, b, b_box)};"]
                if a == "registers":
                    operands, transposed = f"{registers(left + 4 * step, 4)}, b", f"{int(b == 'mn')}"
                else:
                    # To broadcast eight rows, the distance of groups of eight lines becomes 0.
                    at = offset(step, a, a_box) + block * BOX_BYTES // 16 - broadcast * LINES_APART
                    lines += [f"add.s64 a, ${left}, {at};"]
                    operands, transposed = "a, b", f"{int(a == 'mn')}, {int(b == 'mn')}"
                lines += [
                    f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}"
                    f" {registers(block * count, count)}, {operands}, {'1' if step else first}, 1, 1, {transposed}; }}"
                ]
        return "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])

    def _start_function(form):
        text, accumulate = _start_text(form), form.accumulate
        count = form.columns // 2 * form.layout.blocks
        words = 4 * form.steps if form.a == "registers" else 0
        flag = accumulate is None

        def emit(context, builder, signature, args):
            pointers = local_elements(context, builder, signature.args[0], args[0], count)
            left = args[1:2]
            if words:
                elements = local_elements(context, builder, signature.args[1], args[1], words)
                left = [builder.load(word) for word in elements]
            constraints = [*("r" * words or "l"), "l", *"r" * flag]
            tied = 0 if accumulate is False else count
            _update(builder, pointers, [F32] * count, tied, text, constraints, [*left, *args[2:]])
            return context.get_dummy_value()

        def define(typingctx, acc, a, *_):
            return types.void(acc, a if words else types.int64, types.int64, *[types.int32] * flag), emit

        return as_intrinsic(define, 3 + flag, _start_function)

    @functools.cache
    def wgmma_wait_group(accumulators, pending=0, words=0):
        """The GPU's form of the simulator's, above."""
        text = f"wgmma.wait_group.sync.aligned {pending};"

        # The registers pass through, so that no use of them moves above the wait.
        def emit(context, builder, signature, args):
            pointers = local_elements(context, builder, signature.args[0], args[0], accumulators)
            if words:
                pointers += local_elements(context, builder, signature.args[1], args[1], words)
            types_ = [F32] * accumulators + [I32] * words
            _update(builder, pointers, types_, len(pointers), text, [], [])
            return context.get_dummy_value()

        def define(typingctx, *arrays):
            return types.void(*arrays), emit

        return as_intrinsic(define, 2 if words else 1, wgmma_wait_group)


class WgmmaLayout(NamedTuple):
    """The layout of the operands of wgmma_async in shared memory.

    a_box, b_box: bytes from the box of 64 k to that of the next 64; None: boxes of as many lines as the operand has
    rows lie one after the other. blocks: of 64 rows of A. broadcast: A, K-major, has eight rows only, each of which is
    also every eighth row after it. b_first: of the 16 steps of the box at B's descriptor, those before the first.
    """

    a_box: int | None = None
    b_box: int | None = None
    blocks: int = 1
    broadcast: bool = False
    b_first: int = 0


CONTIGUOUS = WgmmaLayout()


class WgmmaForm(NamedTuple):
    """The arguments of wgmma_async, with the bytes of boxes in their layout."""

    columns: int
    element: str
    steps: int
    a: str
    b: str
    accumulate: bool | None
    layout: WgmmaLayout


@functools.cache
def wgmma_async(columns, element, steps, a="k", b="k", accumulate=None, layout=CONTIGUOUS):
    """start(acc, a, b): a warpgroup begins acc = A B, or acc += A B; A (64 blocks, 16 steps), B (.., columns).

    element: "bfloat16" or "float16". a, b: where an operand lies: "k" (K-major) or "mn" (MN-major) in shared
    memory, start takes its smem_descriptor; a may be "registers", a local array of 4 steps int32. acc: a local
    array of columns / 2 float32 for each block of 64 rows of the layout, a WgmmaLayout.
    accumulate: whether the product is added to acc; None: start(acc, a, b, accumulate) takes an int32 for it.
    A started product is one wgmma group. Until wgmma_wait_group has waited for it, acc, the words of A and the
    operands' memory must not be touched.
    """
    a_box = layout.a_box or _box_bytes(a, 8 if layout.broadcast else ROWS * layout.blocks)
    layout = layout._replace(a_box=a_box, b_box=layout.b_box or _box_bytes(b, columns))
    return _start_function(WgmmaForm(columns, element, steps, a, b, accumulate, layout))
