"""Matrix products on every GPU since Ampere: C = A B^T, C = A B and C += A^T B by mma.sync, one order over K.

    linear                  Y (M, N)  = X (M, K) W (N, K)^T     reduction over K: A and B K-major
    linear_backward_input   dX (M, K) = dY (M, N) W (N, K)      reduction over N: B MN-major
    linear_backward_weight  dW (N, K) += dY (M, N)^T X (M, K)   reduction over M: A and B MN-major

Inputs float16 or bfloat16, accumulators float32, output in the inputs' type or float32.

A block owns a tile of C, each of its warps a part of it, in registers. Asynchronous copies bring the next `step`
values of the reduction for all rows and columns of the tile, `stages` - 1 ahead; what lies outside the matrices
becomes zero. A warp loads the fragments of the next 16 values while it multiplies those of the last 16. At the end
each warp sends its part through shared memory, so that C is written, and what is added to it read, 16 bytes a lane.

    shared memory, one stage:   [ A: rows x step | B: columns x step ]     K-major, lines of `step` values
                                [ A: step x rows | B: step x columns ]     MN-major, lines of rows or columns

A chunk of 16 bytes of a line lies at a place permuted by the line's number (place_in_line), so that the eight half
lines that ldmatrix reads at once lie in different banks, whichever way the operand lies.

Every element of C adds its products in the order of the reduction index, 16 at a time, in one accumulator,
whatever the tile's shape: a row's bits do not depend on M or on which tile was chosen.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.gemm.sm90 import place, processors
from rlnumba.kernels.ptx.sm80 import (
    CHUNK,
    address_of,
    copies_end,
    copies_wait,
    copy_chunk,
    load_fragment,
    load_fragment_across,
    multiply,
    store_word,
    write_chunk,
)
from rlnumba.kernels.ptx.sm90 import cvt_pack, cvt_unpack, load_pair, load_word, shared_address, store_pair
from rlnumba.kernels.ptx.warp import device_function, sync_warp
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

i32 = np.int32

# Bytes that all banks of shared memory hold side by side.
BANKS = 128
# Shared memory of a GPU that a block cannot have: what the system keeps of it for each block.
SYSTEM_BYTES = 1024


class Tile(NamedTuple):
    """One kernel. rows, columns: of C that a block owns, cut among warps_down x warps_across warps.

    step: values of the reduction that one stage brings; stages: in flight. a_mn, b_mn: the operand lies MN-major in
    memory. element: "float16" or "bfloat16". output: "same" as the inputs, "float32", or "add" to float32. bias,
    residual: added to C before it is rounded. prefetch: the residual comes while the products run, to a place of its
    own; a warp's part of C must then go at once (warp_columns == part_columns).
    """

    rows: int
    columns: int
    warps_down: int
    warps_across: int
    step: int
    stages: int
    element: str
    a_mn: bool = False
    b_mn: bool = False
    output: str = "same"
    bias: bool = False
    residual: bool = False
    prefetch: bool = False

    @property
    def threads(self):
        return 32 * self.warps_down * self.warps_across

    @property
    def warp_rows(self):
        return self.rows // self.warps_down

    @property
    def warp_columns(self):
        return self.columns // self.warps_across

    @property
    def accumulators(self):
        """Of a thread."""
        return self.warp_rows * self.warp_columns // 32

    @property
    def item_bytes(self):
        """Of C."""
        return 2 if self.output == "same" else 4

    @property
    def part_columns(self):
        """Columns of C that a warp sends at once: a line of its part is at most BANKS bytes."""
        return min(self.warp_columns, BANKS // self.item_bytes)

    @property
    def part_bytes(self):
        """Of shared memory through which a warp sends."""
        return self.warp_rows * self.part_columns * self.item_bytes

    @property
    def stage_bytes(self):
        return (self.rows + self.columns) * self.step * 2

    @property
    def all_parts_bytes(self):
        return self.threads // 32 * self.part_bytes

    @property
    def shared_bytes(self):
        stages = self.stages * self.stage_bytes
        return stages + self.all_parts_bytes if self.prefetch else max(stages, self.all_parts_bytes)

    @property
    def blocks_per_sm(self):
        """How many blocks the registers allow, at 255 a thread for the largest parts."""
        registers = 255 if self.accumulators > 64 else 168 if self.accumulators > 32 else 128
        return max(1, 65536 // (registers * self.threads))


@device_function
def place_in_line(chunk, line, line_bytes):
    """Byte offset of a chunk in its line, permuted so that equal chunks of neighbouring lines meet no bank twice."""
    if line_bytes >= BANKS:
        return (chunk ^ (line & i32(7))) << i32(4)
    return (chunk ^ ((line // i32(BANKS // line_bytes)) & i32(line_bytes // CHUNK - 1))) << i32(4)


@functools.cache
def copy_function(lines, line_bytes, threads):
    """The device function that starts the copy of a box of `lines` lines to shared memory."""
    chunks = line_bytes // CHUNK
    together = threads // chunks
    passes = -(-lines // together)

    @device_function
    def copy(target, source, pitch, alive_lines, alive_chunks, thread):
        """Copy to the box at `target`, zeros beyond the first alive_lines lines and alive_chunks chunks of them.

        source: address of the box's start; pitch: bytes from one line to the next. A thread owns one chunk of
        every together-th line.
        """
        line, chunk = thread // i32(chunks), thread % i32(chunks)
        source += np.int64(line) * pitch + np.int64(chunk * i32(CHUNK))
        target += line * i32(line_bytes)
        if chunk >= alive_chunks:
            alive_lines = i32(0)
        for i in range(passes):
            here = i32(line + i32(i * together))
            if lines % together == 0 or here < lines:
                nbytes = i32(CHUNK) if here < alive_lines else i32(0)
                copy_chunk(
                    target + i * together * line_bytes + place_in_line(chunk, here, line_bytes),
                    source + i * together * pitch,
                    nbytes,
                )

    return copy


@functools.cache
def load_function(count, line_bytes, mn_major, of_a):
    """The device function that loads `count` fragments, 16 rows of A or columns of B each, side by side."""

    @device_function
    def load(fragments, operand, first, k, lane):
        """fragments: of 16 values of the reduction from k on. first: row or column; operand: address of its box."""
        # Which address a lane gives: kernels/ptx/sm80.py.
        if mn_major == of_a:
            line, half = (lane & i32(7)) | ((lane >> i32(4)) << i32(3)), (lane >> i32(3)) & i32(1)
        else:
            line, half = lane & i32(15), lane >> i32(4)
        if mn_major:
            operand += i32((line + k) * i32(line_bytes))
            for i in range(count):
                chunk = i32((first >> i32(3)) + i32(2 * i) + half)
                load_fragment_across(fragments, 4 * i, operand + place_in_line(chunk, line, line_bytes))
        else:
            operand += i32((first + line) * i32(line_bytes))
            operand += place_in_line(i32((k >> i32(3)) + half), line, line_bytes)
            for i in range(count):
                load_fragment(fragments, 4 * i, operand + i * 16 * line_bytes)

    return load


@specialize
def sm80_product_kernel(tile):
    """The kernel of a Tile."""
    rows, columns, warps_down, warps_across, step, stages, element, a_mn, b_mn, output, has_bias, has_residual = tile[
        :12
    ]
    threads, warp_rows, warp_columns = tile.threads, tile.warp_rows, tile.warp_columns
    fragments_down, fragments_across = warp_rows // 16, warp_columns // 16
    accumulators, a_words, b_words = tile.accumulators, 4 * fragments_down, 4 * fragments_across
    a_line = 2 * (rows if a_mn else step)
    b_line = 2 * (columns if b_mn else step)
    a_bytes, stage_bytes = rows * step * 2, tile.stage_bytes
    copy_a = copy_function(step if a_mn else rows, a_line, threads)
    copy_b = copy_function(step if b_mn else columns, b_line, threads)

    @device_function
    def bring(target, a_source, b_source, a_pitch, b_pitch, alive_rows, alive_columns, alive_steps, thread):
        """Start the copies of one stage."""
        if a_mn:
            copy_a(target, a_source, a_pitch, alive_steps, i32(alive_rows >> i32(3)), thread)
        else:
            copy_a(target, a_source, a_pitch, alive_rows, i32(alive_steps >> i32(3)), thread)
        if b_mn:
            copy_b(target + a_bytes, b_source, b_pitch, alive_steps, i32(alive_columns >> i32(3)), thread)
        else:
            copy_b(target + a_bytes, b_source, b_pitch, alive_columns, i32(alive_steps >> i32(3)), thread)

    load_a = load_function(fragments_down, a_line, a_mn, True)
    load_b = load_function(fragments_across, b_line, b_mn, False)
    add_product = multiply(element)
    pack_two, unpack_two = cvt_pack(element), cvt_unpack(element)
    wait_for_stage, wait_for_all = copies_wait(stages - 2), copies_wait(0)
    pairs_of_steps = step // 32
    wide, prefetches = output != "same", tile.prefetch
    has_addend = has_residual or output == "add"
    item_bytes, part_columns, part_bytes = tile.item_bytes, tile.part_columns, tile.part_bytes
    part_line = part_columns * item_bytes
    parts = warp_columns // part_columns
    part_blocks = part_columns // 8
    parts_at = stages * stage_bytes if prefetches else 0
    copy_part = copy_function(warp_rows, part_line, 32)
    part_chunks = part_line // CHUNK
    lines_together = 32 // part_chunks

    @device_function
    def send(acc, p, part, out, addend, bias, row, column, n, alive_rows, lane):
        """Write the p-th part of a warp's rows and columns, at (row, column) of C, through shared memory at `part`."""
        offset = (row * n + column) * item_bytes
        alive_bytes = (n - column) * item_bytes
        if has_addend and not prefetches:
            copy_part(part, addend + offset, n * item_bytes, alive_rows, i32(alive_bytes // CHUNK), lane)
            copies_end()
            wait_for_all()
            sync_warp()
        # This lane's accumulators: rows `line` and line + 8 of each 16, columns 8 b + 2 (lane % 4) and the next.
        for block in range(part_blocks):
            low, high = np.float32(0.0), np.float32(0.0)
            if has_bias and column + block * 8 < n:
                low, high = unpack_two(bias[((column + block * 8) >> 1) + (lane & i32(3))])
            for i in range(fragments_down):
                for half in range(2):
                    e = (i * fragments_across + (p * part_blocks + block) // 2) * 8 + block % 2 * 4 + half * 2
                    line = i32(i32(i * 16 + half * 8) + (lane >> i32(2)))
                    first, second = acc[e], acc[e + 1]
                    if has_bias:
                        first += low
                        second += high
                    spot = part + line * i32(part_line)
                    if wide:
                        spot += place_in_line(i32(i32(2 * block) + ((lane & i32(3)) >> i32(1))), line, part_line)
                        spot += (lane & i32(1)) << i32(3)
                        if has_addend:
                            add_first, add_second = load_pair(spot)
                            first += add_first
                            second += add_second
                        store_pair(spot, first, second)
                    else:
                        spot += place_in_line(i32(block), line, part_line) + ((lane & i32(3)) << i32(2))
                        if has_addend:
                            add_first, add_second = unpack_two(load_word(spot))
                            first += add_first
                            second += add_second
                        store_word(spot, pack_two(first, second))
        sync_warp()
        chunk = lane % i32(part_chunks)
        if chunk * CHUNK < alive_bytes:
            for i in range(warp_rows // lines_together):
                line = i32(i32(i * lines_together) + lane // i32(part_chunks))
                if line < alive_rows:
                    write_chunk(
                        out + offset + line * (n * item_bytes) + chunk * CHUNK,
                        part + line * i32(part_line) + place_in_line(chunk, line, part_line),
                    )
        sync_warp()

    @cuda.jit(launch_bounds=(threads, tile.blocks_per_sm))
    def sm80_product_kernel(a, b, c, bias, residual, m, n, k):
        """C (m, n) from A and B with k steps of reduction; a block owns a tile.

        bias (n / 2) is seen as pairs of 16 bits. What the Tile does not use is one element long. Shared memory: the
        stages, then (or in their place, when all products are done) the warps' parts of C.
        """
        thread = i32(cuda.threadIdx.x) & i32(threads - 1)
        lane, warp = thread & i32(31), thread >> i32(5)
        row, column = place(i32(cuda.blockIdx.x), i32((m + rows - 1) // rows), i32((n + columns - 1) // columns))
        row, column = row * i32(rows), column * i32(columns)
        warp_row, warp_column = warp // i32(warps_across) * i32(warp_rows), warp % i32(warps_across) * i32(warp_columns)
        base = shared_address(cuda.shared.array(0, np.uint8))
        rounds = i32((k + step - 1) // step)

        # Where this tile's rows of A and columns of B begin, how far the next line and the next stage are.
        a_pitch, b_pitch = (m if a_mn else k) * 2, (n if b_mn else k) * 2
        a_next = step * a_pitch if a_mn else np.int64(2 * step)
        b_next = step * b_pitch if b_mn else np.int64(2 * step)
        a_source = address_of(a) + (np.int64(row) * 2 if a_mn else row * a_pitch)
        b_source = address_of(b) + (np.int64(column) * 2 if b_mn else column * b_pitch)
        alive_rows, alive_columns, alive_steps = i32(m - row), i32(n - column), i32(k)
        part = base + parts_at + warp * part_bytes

        acc = cuda.local.array(accumulators, np.float32)
        a_even = cuda.local.array(a_words, np.int32)
        a_odd = cuda.local.array(a_words, np.int32)
        b_even = cuda.local.array(b_words, np.int32)
        b_odd = cuda.local.array(b_words, np.int32)
        for i in range(accumulators):
            acc[i] = np.float32(0.0)

        copied = i32(0)
        target = base
        for _ in range(stages - 1):
            if copied < rounds:
                bring(target, a_source, b_source, a_pitch, b_pitch, alive_rows, alive_columns, alive_steps, thread)
            copies_end()
            copied = i32(copied + i32(1))
            alive_steps = i32(alive_steps - i32(step))
            a_source += a_next
            b_source += b_next
            target += stage_bytes
        if prefetches:
            offset = ((row + warp_row) * n + (column + warp_column)) * item_bytes
            alive_chunks = i32(i32(alive_columns - warp_column) >> i32(3))
            copy_part(
                part, address_of(residual) + offset, n * item_bytes, i32(alive_rows - warp_row), alive_chunks, lane
            )
        wait_for_stage()
        cuda.syncthreads()
        here, end = base, base + stages * stage_bytes
        load_a(a_even, here, warp_row, i32(0), lane)
        load_b(b_even, here + a_bytes, warp_column, i32(0), lane)
        for _ in range(rounds):
            for pair in range(pairs_of_steps):
                load_a(a_odd, here, warp_row, i32(32 * pair + 16), lane)
                load_b(b_odd, here + a_bytes, warp_column, i32(32 * pair + 16), lane)
                if pair == 0:
                    # All warps have left the stage before this one: its place takes the copies.
                    if copied < rounds:
                        bring(
                            target, a_source, b_source, a_pitch, b_pitch, alive_rows, alive_columns, alive_steps, thread
                        )
                    copies_end()
                    copied = i32(copied + i32(1))
                    alive_steps = i32(alive_steps - i32(step))
                    a_source += a_next
                    b_source += b_next
                    target += stage_bytes
                    if target == end:
                        target = base
                for i in range(fragments_down):
                    for j in range(fragments_across):
                        add_product(acc, (i * fragments_across + j) * 8, a_even, 4 * i, b_even, 4 * j)
                if pair == pairs_of_steps - 1:
                    wait_for_stage()
                    cuda.syncthreads()
                    here += stage_bytes
                    if here == end:
                        here = base
                    load_a(a_even, here, warp_row, i32(0), lane)
                    load_b(b_even, here + a_bytes, warp_column, i32(0), lane)
                else:
                    load_a(a_even, here, warp_row, i32(32 * pair + 32), lane)
                    load_b(b_even, here + a_bytes, warp_column, i32(32 * pair + 32), lane)
                for i in range(fragments_down):
                    for j in range(fragments_across):
                        add_product(acc, (i * fragments_across + j) * 8, a_odd, 4 * i, b_odd, 4 * j)

        wait_for_all()
        if prefetches:
            sync_warp()
        else:
            cuda.syncthreads()
        alive_rows = i32(alive_rows - warp_row)
        addend = address_of(residual) if has_residual else address_of(c)
        row, column = row + warp_row, column + warp_column
        send(acc, 0, part, address_of(c), addend, bias, row, column, n, alive_rows, lane)
        if parts == 2:
            send(acc, 1, part, address_of(c), addend, bias, row, column + part_columns, n, alive_rows, lane)

    return sm80_product_kernel


@functools.cache
def shared_limit():
    """Bytes of shared memory that a block may have on this GPU."""
    if device.name() != "cuda":
        return 227 * 1024
    return device.xp().cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]


# Shapes worth a kernel: rows, columns, warps down and across, reduction of a stage; then how many blocks an SM and how
# many stages to aim for. Two blocks of 128 x 128 wait at different times: on an H200 1.03 to 1.2x over one of
# 128 x 256, and 1.02 to 1.24x over 64 values of the reduction a stage, of which three stages fit (docs/log.md).
SHAPES = [
    (128, 128, 2, 2, 32, 2, 5),
    (64, 128, 2, 2, 32, 3, 5),
    (64, 64, 2, 2, 64, 4, 4),
    (32, 64, 1, 4, 64, 4, 6),
    (16, 64, 1, 4, 128, 4, 5),
    (16, 32, 1, 2, 128, 6, 8),
]
FEWEST_STAGES = 3
# The model of best_tile, in clocks of an SM: products that its tensor cores add in one, bytes that the second-level
# cache brings, from a copy's start to its arrival, and what a tile costs before and after its rounds. Fitted to 15
# shapes on an H200, where the tiles that it chooses take 1.003 times as long as the best ones, at worst 1.03.
PRODUCTS, BYTES, LATENCY, TILE_CLOCKS = 1024, 64, 800, 2000


@functools.cache
def tiles_for(element, a_mn, b_mn, output, bias, residual, limit):
    """(Tile, blocks an SM) for each of SHAPES that fits GPUs whose blocks may have `limit` bytes of shared memory."""
    found = []
    for rows, columns, down, across, step, most_blocks, most_stages in SHAPES:
        if (a_mn and rows < 64) or (b_mn and columns < 64):
            continue
        tile = Tile(rows, columns, down, across, step, most_stages, element, a_mn, b_mn, output, bias, residual)
        for blocks in range(min(most_blocks, tile.blocks_per_sm), 0, -1):
            here = min((limit + SYSTEM_BYTES) // blocks - SYSTEM_BYTES, limit)
            fitting = [
                t
                for prefetch in [False] + [True] * residual
                for t in (tile._replace(stages=n, prefetch=prefetch) for n in range(FEWEST_STAGES, most_stages + 1))
                if t.shared_bytes <= here
            ]
            if fitting:
                found.append((fitting[-1], blocks))
                break
    return found


@functools.cache
def best_tile(m, n, k, element, a_mn, b_mn, output, bias, residual, processors, limit):
    """The Tile that a simple model of time finds the fastest for C (m, n) with k steps.

    A round of a stage takes as long as the tensor cores need for the tiles that share an SM, or the second-level
    cache to bring them, or the stages under way to arrive; tiles are worked through in waves. Fewer than eight warps
    leave the tensor cores idle at times.
    """
    best = None
    for tile, blocks in tiles_for(element, a_mn, b_mn, output, bias, residual, limit):
        tiles = -(-m // tile.rows) * -(-n // tile.columns)
        together = min(blocks, -(-tiles // processors))
        clocks = max(
            together * tile.rows * tile.columns * tile.step / (PRODUCTS * min(1, 0.5 + together * tile.threads / 512)),
            together * (tile.rows + tile.columns) * tile.step * 2 / BYTES,
            LATENCY / (tile.stages - 1),
        )
        time = -(-tiles // (processors * together)) * (-(-k // tile.step) * clocks + TILE_CLOCKS)
        if best is None or time < best[0]:
            best = time, tile
    return best[1]


def product(a, b, out, a_mn=False, b_mn=False, add=False, bias=None, residual=None):
    """out = A B (+ bias + residual), or out += A B if `add`, with the tile that best_tile chooses.

    Matrices as in sm80_product.
    """
    m, n = out.shape
    k = a.shape[0] if a_mn else a.shape[1]
    output = "add" if add else "same" if out.dtype == a.dtype else "float32"
    kinds = (a.dtype.name, a_mn, b_mn, output, bias is not None, residual is not None)
    sm80_product(best_tile(m, n, k, *kinds, processors(), shared_limit()), a, b, out, bias, residual)


@functools.cache
def _nothing(dimensions):
    """An array of one element that stands for an argument left out."""
    return device.xp().zeros((1,) * dimensions, np.int32)


def sm80_product(tile, a, b, out, bias=None, residual=None):
    """out = A B (+ bias + residual), or += where the Tile says "add", by the kernel of `tile`.

    a: (M, K), or (K, M) if tile.a_mn; b: (N, K), or (K, N) if tile.b_mn; out (M, N); bias (N,), residual
    (M, N) of a's dtype; may be out itself. Rows of all matrices are multiples of 16 bytes long. M, N and K > 0.
    """
    m, n = out.shape
    k = a.shape[0] if tile.a_mn else a.shape[1]
    launch(
        sm80_product_kernel(tile),
        -(-m // tile.rows) * -(-n // tile.columns),
        tile.threads,
        a,
        b,
        out,
        _nothing(1) if bias is None else bias.view(np.int32),
        _nothing(2) if residual is None else residual,
        m,
        n,
        k,
        shared=tile.shared_bytes,
    )
