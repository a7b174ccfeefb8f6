"""linear_logp and its gradient on sm_90: the logits stay in the registers of the GEMM that computes them.

Forward. logprob_kernel folds each tile of logits to four numbers a row, and join_tiles_kernel joins a row's tiles. A
log-prob that sampling takes from the float32 logits of the sm_90 GEMM has the same bits, because both the sums of the
GEMM and those over the row have one order.

Backward. The vocabulary goes by in chunks. One GEMM computes the logits of a chunk again and stores dz = dlogp / T
(onehot - p) in 16 bits, N x chunk; two more take it to dweight[chunk] = dz^T hidden and dhidden += dz weight[chunk].
Four GEMMs with the forward's.

One pass. A loss that knows dlogp before it knows the log-probs (supervised training, the first step on a rollout)
needs only three. Rows go by in blocks whose exponentials, 16 bits each, exist at one time for the whole vocabulary:
e = 2^((z - r) factor) with a reference logit r of the row, about that of its token. When lse is known,
finish_exponentials_kernel finds the factor of the row between e and dz, which goes to the other operand of dweight's
GEMM and to the result of dhidden's. dweight then gets its sum in several parts, one a block of rows, each of which
reads and writes all of dweight but for the first, which writes it: blocks are as tall as memory allows. The remainder
runs first, because the saved read pays most where a GEMM is short. dhidden's GEMM is split along the
vocabulary (split-K), since otherwise it has too few tiles to fill the GPU; the partial sums are added in order.

H200, 16,384 x 1024 x 151,936: each GEMM is 5.1 TFLOP, 6.8 ms at 750 TFLOP/s. Times: docs/log-prob.md.
"""

import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import CHUNK, is_16_byte_aligned, unused
from rlnumba.kernels.gemm.sm90 import gemm
from rlnumba.kernels.logprob import slices
from rlnumba.kernels.logprob.sm90_kernel import (
    MAX_EXPONENT,
    RESULTS,
    LogprobConfig,
    TileResults,
    TileRows,
    TileShape,
    can_stagger,
    logprob_kernel,
)
from rlnumba.kernels.logprob.sm90_rows import (
    REFERENCE_ROWS,
    ROW_THREADS,
    SUM_THREADS,
    ScaledRows,
    finish_exponentials_kernel,
    join_tiles_kernel,
    reference_kernel,
    sum_splits_kernel,
)
from rlnumba.kernels.logprob.terms import ALL_TOKENS, kernel_outputs
from rlnumba.kernels.nn.elementwise import cast
from rlnumba.kernels.nn.row_sum import TILE_COLUMNS
from rlnumba.kernels.ptx.shared_memory import LINE
from rlnumba.kernels.ptx.wgmma import ROWS, STEPS, WARPGROUP
from rlnumba.kernels.tile.tensor_map import tensor_map
from rlnumba.runtime import device
from rlnumba.runtime.launch import ALWAYS, launch

# Bytes that the gradient and the one-pass form may use beside their arguments. The gradient of the hidden states in
# float32 gets a quarter of them; so do the forward's tile results.
EXTRA_BYTES = 256 << 20
QUARTER = EXTRA_BYTES // 4
# Bytes an element of the hidden states: where rows are left out, the others are copied, and so is their gradient.
COPIES = 4
# Rows of a tile with the configs that the operators choose.
TILE_ROWS = 128


def is_supported(hidden, weight):
    """Whether the kernels of this module serve these arrays: where gemm/sm90.py computes the float32 logits of them."""
    return hidden.size > 0 and has_shape(*weight.shape, hidden.dtype) and is_16_byte_aligned(hidden, weight)


def has_shape(vocabulary, width, dtype):
    """Whether they serve a weight of this shape and dtype, where it is aligned.

    Tokens sampled from its logits must be scored with the same bits, so the rows of (N, V) logits count, too.
    """
    return dtype.itemsize == 2 and vocabulary * 4 % CHUNK == 0 and width * dtype.itemsize % CHUNK == 0


def operator_bytes(rows, at_once, width, vocabulary):
    """Bytes of the arrays that the operators of this module make beside their arguments, at most: int.

    rows: of a forward, and a backward; at_once: of linear_logp_with_gradient. Copies count, which the rows that have a
    gradient may be.
    """
    tiles, found = -(-vocabulary // TILE_COLUMNS), [0]
    if rows:
        step = min(forward_rows(vocabulary), rows)
        found.append(step * (4 * RESULTS * tiles + 2 * width) + 4 * rows)
        step = min(backward_rows(width), rows)
        columns = chunk_columns(step, width, vocabulary)
        found.append(step * (2 * _padded(columns) + (4 + COPIES) * width))
    if at_once:
        blocks = OnePassBlocks(at_once, width, vocabulary, TILE_ROWS, one_pass_shape(width, vocabulary))
        of_row = 4 * RESULTS * tiles + 2 * _padded(vocabulary) + (2 + COPIES) * width + 4
        found.append(4 * blocks.partial_rows * width + blocks.step * of_row + 8 * at_once)
    return max(found)


def _launch(config, a, b, out=None, temperature=1.0, results=None, first_id=0, split_rounds=0, **rows):
    """Launch logprob_kernel. out, results (TileResults): None if the mode writes none; rows: fields of TileRows."""
    m, k = a.shape
    split_k = config.mode == "split_k"
    n = b.shape[1] if split_k else b.shape[0]
    a_rows = min(config.rows, -(-m // 8) * 8)
    tiles = -(-m // config.rows) * -(-n // TILE_COLUMNS)
    shortest = rounds = -(-k // STEPS)
    if split_k:
        splits = -(-rounds // split_rounds)
        tiles *= splits
        shortest = rounds - (splits - 1) * split_rounds
    if not can_stagger(config, shortest):
        config = config._replace(stagger=0)
    out_map = unused() if out is None else tensor_map(out, ROWS, config.box_columns)
    nothing = unused(dtype=np.float32)
    arrays = TileRows(unused(), *[nothing] * 6)._replace(**rows)
    launch(
        logprob_kernel(config), min(tiles, device.sm_count()), (config.consumers + 1) * WARPGROUP,
        tensor_map(a, a_rows, 64), tensor_map(b, 64 if split_k else TILE_COLUMNS, 64), out_map, arrays,
        float(temperature), results or TileResults(nothing, nothing),
        TileShape(m, n, k, first_id, split_rounds, (a_rows + TILE_COLUMNS) * LINE),
        shared=config.layout.nbytes, pdl=ALWAYS,
    )  # fmt: skip


def forward_rows(vocabulary):
    """Rows of which the forward keeps tile results at one time."""
    tiles = -(-vocabulary // TILE_COLUMNS)
    return max(1, QUARTER // (4 * RESULTS * tiles) // TILE_ROWS) * TILE_ROWS


class HeadTuning(NamedTuple):
    """Choices that a caller makes instead of leaving the best to an operator.

    config: a LogprobConfig of the mode "dlogits" of a backward, "exponentials" of one pass. columns: of a chunk of the
    backward. shape: (rows, splits) of a block of one pass; split_config: its LogprobConfig of mode "split_k".
    """

    config: LogprobConfig | None = None
    columns: int | None = None
    shape: tuple | None = None
    split_config: LogprobConfig | None = None


BEST = HeadTuning()


def linear_logp(hidden, weight, ids, temperature, outputs, kept=ALL_TOKENS, config=None):
    """ops.linear_logp without ignored rows, for arrays that are supported; kept without allowed tokens.

    config: a LogprobConfig of mode "forward" instead of the best.
    """
    (logp, lse, entropy, top1), thresholds = outputs, kept.thresholds
    config = config or LogprobConfig(hidden.dtype.name, "forward", entropy=entropy is not None, top1=top1 is not None)
    config = config._replace(masked=thresholds is not None)
    xp, tiles = device.xp(), -(-weight.shape[0] // TILE_COLUMNS)
    step = min(forward_rows(weight.shape[0]), hidden.shape[0])
    all_results = xp.empty((step, tiles * RESULTS), np.float32)
    all_target_logits = xp.full(ids.shape, math.nan, np.float32)
    outputs = kernel_outputs(logp, lse, entropy, top1, ids)
    for rows, count in slices(hidden.shape[0], step):
        results = TileResults(all_results[:count].reshape(-1), all_target_logits[rows])
        of_rows = {"ids": ids[rows]} if thresholds is None else {"ids": ids[rows], "thresholds": thresholds[rows]}
        _launch(config, hidden[rows], weight, None, temperature, results, **of_rows)
        launch(join_tiles_kernel, count, ROW_THREADS, results, float(temperature), outputs.of_rows(rows), pdl=ALWAYS)


def backward_rows(width):
    """Rows whose gradient the backward adds up in float32 at one time."""
    return max(1, QUARTER // (4 * width) // TILE_ROWS) * TILE_ROWS


def chunk_columns(rows, width, vocabulary):
    """Columns of a chunk of dz: what fits into EXTRA_BYTES, and fills the SMs best in dweight's GEMM.

    Beside dz are the float32 gradient of the rows, and, where the caller leaves rows out, copies of both.
    """
    most = max(1, (EXTRA_BYTES - (4 + COPIES) * rows * width) // (2 * rows * TILE_COLUMNS)) * TILE_COLUMNS
    if most >= vocabulary:
        return vocabulary

    def busy(columns):
        """Tiles in proportion to those of as many full waves."""
        tiles = -(-columns // TILE_ROWS) * -(-width // TILE_COLUMNS)
        return tiles / (-(-tiles // device.sm_count()) * device.sm_count())

    return max(range(most, most // 2 - 1, -TILE_COLUMNS), key=busy)


def _padded(columns):
    """Elements of a row of 16-bit elements that begins, as all rows of its matrix, at a multiple of 16 bytes."""
    return columns + -columns % 8


def linear_logp_backward(hidden, weight, ids, temperature, lse, gradients, kept=ALL_TOKENS, tuning=BEST):
    """ops.linear_logp_backward without ignored rows, for arrays that are supported; kept without allowed tokens.

    A caller that has lse without a forward, from the rollout, gets the gradient for three GEMMs.
    """
    (dlogp, dhidden, dweight, entropy, dentropy, accumulate), thresholds = gradients, kept.thresholds
    config = tuning.config or LogprobConfig(hidden.dtype.name, "dlogits", entropy=dentropy is not None)
    config = config._replace(masked=thresholds is not None)
    xp, (vocabulary, width) = device.xp(), weight.shape
    step = min(backward_rows(width), hidden.shape[0])
    columns = tuning.columns or chunk_columns(step, width, vocabulary)
    arrays = {"ids": ids, "lse": lse, "dlogp": dlogp, "thresholds": thresholds}
    if dentropy is not None:
        arrays |= {"entropy": entropy, "dentropy": dentropy}
    memory, all_sums = xp.empty(step * _padded(columns), hidden.dtype), xp.empty((step, width), np.float32)
    for rows, count in slices(hidden.shape[0], step):
        h, sums = hidden[rows], all_sums[:count]
        for chunk, chunk_width in slices(vocabulary, columns):
            part, pitch = weight[chunk], _padded(chunk_width)
            dz = memory[: count * pitch].reshape(count, pitch)
            of_rows = {name: array[rows] for name, array in arrays.items() if array is not None}
            _launch(config, h, part, dz, temperature, first_id=chunk.start, **of_rows)
            gemm(dz, part, sums, b_mn=True, add=chunk.start > 0)
            if dweight is not None:
                gemm(dz, h, dweight[chunk], a_mn=True, b_mn=True, add=accumulate or rows.start > 0)
        cast(sums, dhidden[rows])


def one_pass_shape(width, vocabulary):
    """(rows, splits) of the one-pass form's blocks: as many rows as EXTRA_BYTES allow, splits that fill the SMs.

    A row has its exponentials, tile results, scaled hidden state, a partial gradient in each split, and the copies.
    """
    pitch, costs = _padded(vocabulary), {}
    row_bytes = 2 * pitch + 4 * RESULTS * -(-vocabulary // TILE_COLUMNS) + (2 + COPIES) * width
    for splits in range(1, 17):
        rows = max(1, EXTRA_BYTES // (row_bytes + 4 * splits * width) // TILE_ROWS) * TILE_ROWS
        rounds, tiles = -(-pitch // STEPS), rows // TILE_ROWS * -(-width // TILE_COLUMNS)
        _, longest = split_k_rounds(rounds, tiles, splits)
        # dweight's traffic grows with the number of blocks, dhidden's time with the share of idle SMs.
        costs[rows, splits] = longest * device.sm_count() / (tiles * rounds) + 0.5 * 768 / rows
    return min(costs, key=costs.get)


def split_k_rounds(rounds, tiles, splits):
    """(rounds of a split, rounds of the SM that has most) for `tiles` tiles, cut into at most so many splits.

    Either all splits have the same length, or the last one is shorter, and the SMs that have no tile of the others do
    several of its: 24 tiles on 132 SMs are 120 tiles of five splits, and for 12 SMs two tiles each of half a split.
    """
    candidates = []
    for count in range(1, splits + 1):
        length = -(-rounds // count)
        candidates.append((-(-tiles * count // device.sm_count()) * length, length))
        idle = device.sm_count() - tiles * (count - 1)
        if 0 < idle < tiles:
            last_tiles = -(-tiles // idle)
            length = -(-rounds * last_tiles // ((count - 1) * last_tiles + 1))
            candidates.append((max(length, last_tiles * (rounds - (count - 1) * length)), length))
    longest, length = min(candidates)
    return length, longest


class OnePassBlocks:
    """The blocks of the one-pass form for so many rows, of which the remainder comes first.

    tile_rows: of a tile; shape: (rows, splits) of a whole block.
    """

    def __init__(self, rows, width, vocabulary, tile_rows, shape):
        most, splits = shape
        self.rows, self.tile_rows, self.across = rows, tile_rows, -(-width // TILE_COLUMNS)
        self.rounds, self.most_partial_rows = -(-_padded(vocabulary) // STEPS), most * splits
        self.step = min(most, self.padded(rows))

    def __iter__(self):
        """The slices of rows."""
        end = 0
        while end < self.rows:
            count = (self.rows - end) % self.step or self.step
            yield slice(end, end + count)
            end += count

    def padded(self, count):
        """Rows of whole tiles for a block of so many."""
        return -(-count // self.tile_rows) * self.tile_rows

    def split_rounds(self, count):
        """Rounds of a split of a block of `count` rows: a shorter one has as many tiles, in more splits."""
        padded = self.padded(count)
        tiles, splits = padded // self.tile_rows * self.across, min(self.most_partial_rows // padded, self.rounds)
        return split_k_rounds(self.rounds, tiles, splits)[0]

    def partial_rows_of(self, count):
        """Rows of the parts that the splits of a block of `count` rows write."""
        return -(-self.rounds // self.split_rounds(count)) * self.padded(count)

    @property
    def partial_rows(self):
        """The most of any block."""
        return max(map(self.partial_rows_of, {each.stop - each.start for each in self}))


def linear_logp_with_gradient(hidden, weight, ids, temperature, outputs, gradients, tuning=BEST):
    """ops.linear_logp_with_gradient without ignored rows, in three GEMMs, for arrays that are supported."""
    logp, lse, entropy, top1 = outputs
    dlogp, dhidden, dweight, *_, accumulate = gradients
    options = {"entropy": entropy is not None, "top1": top1 is not None}
    config = tuning.config or LogprobConfig(hidden.dtype.name, "exponentials", **options)
    split_config = tuning.split_config or config._replace(mode="split_k", entropy=False, top1=False)
    xp, (vocabulary, width), outputs = device.xp(), weight.shape, kernel_outputs(logp, lse, entropy, top1, ids)
    shape = tuning.shape or one_pass_shape(width, vocabulary)
    blocks = OnePassBlocks(hidden.shape[0], width, vocabulary, config.rows, shape)
    all_partials, step = xp.empty((blocks.partial_rows, width), np.float32), blocks.step
    all_results = xp.empty((step, -(-vocabulary // TILE_COLUMNS) * RESULTS), np.float32)
    exponentials = xp.empty((step, _padded(vocabulary)), hidden.dtype)
    all_scaled_hidden, all_row_factors = xp.empty((step, width), hidden.dtype), xp.empty(step, np.float32)
    all_references, all_target_logits = xp.empty(ids.shape, np.float32), xp.full(ids.shape, math.nan, np.float32)
    launch(reference_kernel, -(-len(ids) // REFERENCE_ROWS), 32 * REFERENCE_ROWS, hidden, weight, ids, all_references)
    for rows in blocks:
        count, h, targets = rows.stop - rows.start, hidden[rows], ids[rows]
        references, dz = all_references[rows], exponentials[:count]
        results = TileResults(all_results[:count].reshape(-1), all_target_logits[rows])
        scaled = ScaledRows(all_scaled_hidden[:count], all_row_factors[:count])
        _launch(config, h, weight, dz, temperature, results, ids=targets, reference_logits=references)
        launch(
            finish_exponentials_kernel, count, ROW_THREADS, dz, results, references, targets, float(temperature),
            MAX_EXPONENT[config.element], dlogp[rows], h, outputs.of_rows(rows), scaled, pdl=ALWAYS,
        )  # fmt: skip
        partials, padded = all_partials[: blocks.partial_rows_of(count)], blocks.padded(count)
        _launch(split_config, dz, weight, partials, split_rounds=blocks.split_rounds(count))
        launch(sum_splits_kernel, count, SUM_THREADS, partials, padded, scaled.factors, dhidden[rows], pdl=ALWAYS)
        if dweight is not None:
            gemm(dz, scaled.hidden, dweight, a_mn=True, b_mn=True, add=accumulate or rows.start > 0)
