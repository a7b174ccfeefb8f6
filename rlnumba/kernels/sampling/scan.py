"""The kernel that reads rows of logits once: sums of their tiles, and candidates of the rows with filters."""

import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.nn.row_sum import LOG2_E, NONE, TILE_COLUMNS, fold_sixteen, join, join_lanes
from rlnumba.kernels.ptx.warp import (
    ballot,
    compiler_barrier,
    device_function,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    shuffle,
    shuffle_up,
    sync_warp,
    vector_access,
    warp_max,
)
from rlnumba.kernels.sampling.thresholds import load_one
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import specialize, supports_pdl

i32 = np.int32

# Below every score.
LOWEST = np.float32(np.finfo(np.float32).min)
# Threads of a block, and blocks that an SM has at a time: 32 warps with 2 KB in flight each are 64 KB, and more are no
# faster. H200, 256 x 151,936: 41.9 us; 10 blocks 43.9, 12 blocks 44.3, 4 of 256 threads 42.4, 2 of 512 42.1.
SCAN_THREADS, SCAN_BLOCKS = 128, 8
SCAN_WARPS = SCAN_THREADS // 32
# A warp reads a part of two tiles at a time, a quad of its threads 64 columns. H200: a kernel that only reads takes
# 39.3 us so; 45.2 with a quad a tile, which has a warp read at eight addresses 1 KB apart.
PART_COLUMNS = 2 * TILE_COLUMNS
QUAD_COLUMNS = 64
# Lanes' sums of a part in shared memory, padded so that the banks of four parts differ.
PADDED_LANES = 36
SUMS_OF_LANES = SCAN_WARPS * 4 * PADDED_LANES
# Candidates that a row's list holds, and how many it is meant to get, fewer with a top-k of at most FEW or a min-p.
LIST = 8192
EXPECTED, EXPECTED_IF_FEW, FEW = 4096, 1024, 128
# Maxima of sixteen logits each, from which a row's candidate bound is guessed, and bisections for it.
MAXIMA, BISECTIONS = 128, 12
LANE_MAXIMA = MAXIMA // 32


class SamplingLimits(NamedTuple):
    """Temperature and filters of each row, (rows,).

    temperature float32, 0 for greedy; top_k int32, 0 for off; top_p float32 in (0, 1], 1 for off; min_p float32 in
    [0, 1], 0 for off.
    """

    temperature: object
    top_k: object
    top_p: object
    min_p: object


class Scanned(NamedTuple):
    """Arrays that scan_kernel leaves draw_kernel.

    sums (rows, 2 tiles): of each tile the largest and the sum of 2^((z - largest) factor). Of rows with filters: bounds
    (rows,); counts (rows,), how many tokens reach the bound, zero before and after both kernels; LIST of these at most
    in candidates and candidate_ids (rows, LIST), in any order.
    """

    sums: object
    bounds: object
    counts: object
    candidates: object
    candidate_ids: object


@device_function
def is_filtered(temperature, top_k, top_p, min_p, columns):
    """Whether a row has filters."""
    on = min_p > np.float32(0.0) or 0 < top_k < columns or top_p < np.float32(1.0)
    return on and temperature != np.float32(0.0)


@device_function
def candidate_bound(line, temperature, rank, maxima):
    """A logit that about as many of the row's tokens reach as its list is meant to get, in every thread.

    It is guessed from a sample: MAXIMA threads take the largest of 16 logits each, twice eight neighbours; about `rank`
    of these reach the bound, at most 64 units of s below the largest. LOWEST if the list holds the whole row.
    """
    width, thread = i32(line.shape[0]), i32(cuda.threadIdx.x)
    if width <= LIST:
        return LOWEST
    if thread < MAXIMA:
        largest = NONE
        for half in range(2):
            start = i32(np.int64(width) * (thread + half * MAXIMA) // (2 * MAXIMA))
            for i in range(8):
                largest = max(largest, line[min(i32(start + i), i32(width - 1))])
        maxima[thread] = largest
    cuda.syncthreads()
    lane_maxima = cuda.local.array(LANE_MAXIMA, np.float32)
    low, high = np.float32(math.inf), NONE
    for i in range(LANE_MAXIMA):
        lane_maxima[i] = maxima[32 * i + (thread & 31)]
        low, high = min(low, lane_maxima[i]), max(high, lane_maxima[i])
    high = warp_max(high)
    low = max(-warp_max(-low), high - np.float32(64.0) * temperature)
    for _ in range(BISECTIONS):
        middle = np.float32(0.5) * low + np.float32(0.5) * high
        reached = i32(0)
        for i in range(LANE_MAXIMA):
            reached = i32(reached + cuda.popc(ballot(lane_maxima[i] >= middle)))
        if reached > rank:
            low = middle
        else:
            high = middle
    return low


@device_function
def list_candidates(bits, line, first, row, lane, counts, candidates, candidate_ids):
    """Append a warp's candidates to the row's list, by lanes; bits: of this lane's logits from column `first` on."""
    number = i32(cuda.popc(bits))
    below = number
    for doubling in range(5):
        lower = shuffle_up(below, 1 << doubling)
        if lane >= 1 << doubling:
            below = i32(below + lower)
    entry = i32(0)
    if lane == 31:
        entry = i32(cuda.atomic.add(counts, row, below))
    entry = i32(shuffle(entry, 31) + below - number)
    while bits != 0:
        i = i32(cuda.ffs(bits) - 1)
        bits = i32(bits & (bits - 1))
        column = i32(first + (i >> 1) * 8 + (i & 1))
        if entry < LIST:
            candidates[row, entry], candidate_ids[row, entry] = line[column], column
        entry = i32(entry + 1)


@device_function
def join_tiles(largests, totals, warp_sums, part, at, stride, row, tiles, lane, factor, sums):
    """Join the lanes' sums of parts 0 .. part to those of two tiles each, and write them.

    Part `part` begins at column `at`, the one before it `stride` columns before. Lane (t, k, i) joins four lanes' sums
    of tile t of part k. warp_sums: index of this warp's first in largests and totals.
    """
    largest, total, nothing = NONE, np.float32(0.0), np.float32(0.0)
    first = i32(warp_sums + ((lane >> 2) & 3) * PADDED_LANES + (lane & 16) + (lane & 3))
    for quad in range(4):
        other = i32(first + 4 * quad)
        largest, total, _ = join(largest, total, nothing, largests[other], totals[other], nothing, factor)
    largest, total, _ = join_lanes(largest, total, nothing, 1, factor)
    largest, total, _ = join_lanes(largest, total, nothing, 2, factor)
    later = i32(((lane >> 2) & 3) - part)
    tile = i32((at + later * stride) // TILE_COLUMNS + (lane >> 4))
    if (lane & 3) == 0 and later <= 0 and tile < tiles:
        sums[row, 2 * tile], sums[row, 2 * tile + 1] = largest, total


@specialize
def scan_kernel(access):
    """The kernel for logits that can be read `access` (1 or 2) at a time."""
    load_two, _ = vector_access(2, access)

    @device_function
    def load_part(flat, offset, line, at, lane_column, values):
        """A lane's sixteen logits, from flat[offset] on, of the part at column `at`; -inf for those outside the row."""
        if i32((at | (PART_COLUMNS - 1)) + 1) <= i32(line.shape[0]):
            for b in range(8):
                load_two(flat, offset + 8 * b, values, 2 * b)
        else:
            first = i32(at + lane_column)
            for b in range(8):
                for c in range(2):
                    values[2 * b + c] = np.float32(-math.inf)
                    if i32(first + 8 * b + c) < i32(line.shape[0]):
                        load_one(line, first + (8 * b + c), values, 2 * b + c)

    # With access 1, sixteen loads keep more registers in use than eight resident blocks leave.
    @supports_pdl
    @cuda.jit(launch_bounds=(SCAN_THREADS, SCAN_BLOCKS if access == 2 else SCAN_BLOCKS - 2))
    def scan_kernel(logits, flat, limits, row_blocks, rank, rank_if_few, scanned):
        """`row_blocks` blocks share a row and read it once, a warp a part of 512 columns at a time, a lane 16 of them.

        The next part is loaded while one is added up, in row_sum.py's order. After four parts their lanes' sums change
        lanes through shared memory: of each two tiles, which are joined and written.

        flat: the logits with one axis. limits: SamplingLimits. rank...: of candidate_bound. scanned: written.
        """
        sums, counts, candidates = scanned.sums, scanned.counts, scanned.candidates
        ids = scanned.candidate_ids
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        maxima = cuda.shared.array(MAXIMA, np.float32)
        largests = cuda.shared.array(SUMS_OF_LANES, np.float32)
        totals = cuda.shared.array(SUMS_OF_LANES, np.float32)
        row = i32(cuda.blockIdx.x // row_blocks)
        first_part = i32(cuda.blockIdx.x - row * row_blocks)
        line, width, thread = logits[row], i32(logits.shape[1]), i32(cuda.threadIdx.x)
        lane, warp = i32(thread & 31), i32(thread >> 5)
        values = cuda.local.array(16, np.float32)
        at = i32((first_part * SCAN_WARPS + warp) * PART_COLUMNS)
        stride = i32(row_blocks * (SCAN_WARPS * PART_COLUMNS))
        lane_column = i32((lane >> 2) * QUAD_COLUMNS + (lane & 3) * 2)
        offset = np.int64(row) * width + (at + lane_column)
        load_part(flat, offset, line, at, lane_column, values)
        row_temperature, row_top_k = limits.temperature[row], limits.top_k[row]
        row_top_p, row_min_p = limits.top_p[row], limits.min_p[row]
        compiler_barrier()
        filtered = is_filtered(row_temperature, row_top_k, row_top_p, row_min_p, width)
        factor = LOG2_E / (np.float32(1.0) if row_temperature == np.float32(0.0) else row_temperature)
        tiles = i32((width + (TILE_COLUMNS - 1)) // TILE_COLUMNS)
        bound = LOWEST
        if filtered:
            few = 0 < row_top_k <= FEW or row_min_p > np.float32(0.0)
            bound = candidate_bound(line, row_temperature, rank_if_few if few else rank, maxima)
            if first_part == 0 and thread == 0:
                scanned.bounds[row] = bound
        warp_sums, part = i32(warp * (4 * PADDED_LANES)), i32(0)
        while at < width:
            bits, lane_sum = i32(0), warp_sums + part * PADDED_LANES + lane
            if filtered:
                # Bits for those of a lane's sixteen logits that reach the bound.
                for i in range(16):
                    if values[i] >= bound:
                        bits = i32(bits | (1 << i))
            largests[lane_sum], totals[lane_sum], _ = fold_sixteen(values, factor, False)
            next_at = i32(at + stride)
            offset += stride
            load_part(flat, offset, line, next_at, lane_column, values)
            compiler_barrier()
            if filtered and ballot(bits) != 0:
                list_candidates(bits, line, i32(at + lane_column), row, lane, counts, candidates, ids)
            if part == 3 or next_at >= width:
                sync_warp()
                join_tiles(largests, totals, warp_sums, part, at, stride, row, tiles, lane, factor, sums)
                sync_warp()
                part = i32(-1)
            part = i32(part + 1)
            at = next_at

    return scan_kernel


class ScanWorkspace:
    """Arrays that scan_kernel leaves draw_kernel. They grow with the rows asked for; captured graphs keep theirs."""

    def __init__(self):
        self.kept = {}

    def arrays(self, rows, tiles):
        """A Scanned of at least so many rows."""
        kept = self.kept.setdefault(tiles, [])
        if not kept or len(kept[-1][0]) < rows:
            zeros, rows = device.xp().zeros, 1 << (rows - 1).bit_length()
            sums, bounds, counts = zeros((rows, 2 * tiles), np.float32), zeros(rows, np.float32), zeros(rows, np.int32)
            kept.append(Scanned(sums, bounds, counts, zeros((rows, LIST), np.float32), zeros((rows, LIST), np.int32)))
        return kept[-1]


def blocks_per_row(rows, columns):
    """Number of blocks that share a row: as many as fill the GPU once, and no more than shorten that time."""
    parts = -(-columns // PART_COLUMNS)
    most = max(SCAN_BLOCKS * device.sm_count() // rows, 1)
    warp_parts = -(-parts // (SCAN_WARPS * most))
    return -(-parts // (SCAN_WARPS * warp_parts))


def sample_rank(columns, expected):
    """Number of the MAXIMA groups of sixteen that hold one of a row's `expected` largest tokens, as an int32."""
    return np.int32(min(round(MAXIMA * (1 - (1 - min(expected / columns, 1)) ** 16)), MAXIMA - 1))
