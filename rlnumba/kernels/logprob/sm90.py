"""linear_logp and its gradient on sm_90: the logits stay in the registers of the GEMM that computes them.

Forward. logprob_kernel folds each tile of logits to four numbers a row, and join_tiles_kernel joins a row's tiles. What
a sampler makes of the float32 logits of the sm_90 GEMM has the same bits, because both the sums of the GEMM and those
over the row have one order.

Backward. The vocabulary goes by in chunks. One GEMM computes the logits of a chunk again and stores dz = dlogp / T
(onehot - p) in 16 bits, N x chunk; two more take it to dweight[chunk] += dz^T hidden and dhidden += dz weight[chunk].
Four GEMMs with the forward's.

One pass. A loss that knows dlogp before it knows the log-probs (supervised training, the first step on a rollout)
needs only three. Rows go by in blocks whose exponentials, 16 bits each, exist at one time for the whole vocabulary:
e = 2^((z - r) factor) with a reference logit r of the row, about that of its token. When lse is known,
finish_exponentials_kernel finds the factor of the row between e and dz, which goes to the other operand of dweight's
GEMM and to the result of dhidden's. dweight then gets its sum in several parts, one a block of rows, each of which
reads and writes all of dweight: blocks are as tall as memory allows. The remainder runs first, which saves one read of
dweight where it need not be added to, and pays most where a GEMM is short. dhidden's GEMM is split along the
vocabulary (split-K), for else it had too few tiles for the GPU; the partial sums are added in order.

H200, 16,384 x 1024 x 151,936: each GEMM is 5.1 TFLOP, 6.8 ms at 750 TFLOP/s. Times: docs/log-prob.md. Extra memory:
EXTRA_BYTES at most.
"""

import math

import numpy as np

from rlnumba.kernels.checks import CHUNK, is_16_byte_aligned, unused
from rlnumba.kernels.gemm.sm90 import gemm
from rlnumba.kernels.logprob.chunked import slices
from rlnumba.kernels.logprob.sm90_kernel import MAX_EXPONENT, RESULTS, LogprobConfig, can_stagger, logprob_kernel
from rlnumba.kernels.logprob.sm90_rows import (
    REFERENCE_ROWS,
    ROW_THREADS,
    SUM_THREADS,
    finish_exponentials_kernel,
    join_tiles_kernel,
    reference_kernel,
    sum_splits_kernel,
)
from rlnumba.kernels.nn.elementwise import cast
from rlnumba.kernels.nn.row_sum import TILE_COLUMNS
from rlnumba.kernels.ptx.shared_memory import LINE
from rlnumba.kernels.ptx.tensor_map import tensor_map
from rlnumba.kernels.ptx.wgmma import ROWS, STEPS, WARPGROUP
from rlnumba.runtime import device
from rlnumba.runtime.launch import ALWAYS, launch

# Bytes that the gradient and the one-pass form may use beside their arguments. The gradient of the hidden states in
# float32 gets a quarter of them; so do the forward's tile results.
EXTRA_BYTES = 256 << 20
QUARTER = EXTRA_BYTES // 4
# Rows of a tile of the kernels' own configs.
TILE_ROWS = 128
# Bytes an element of the hidden states: where rows are left out, the others are copied, and so is their gradient.
COPIES = 4


def is_supported(hidden, weight):
    """Whether the kernels of this module serve these arrays: where gemm/sm90.py computes the float32 logits of them.

    What is sampled from those must be scored with the same bits, so the rows of (N, V) logits count, too.
    """
    rows_aligned = weight.shape[0] * 4 % CHUNK == 0
    return hidden.dtype != np.float32 and hidden.size > 0 and rows_aligned and is_16_byte_aligned(hidden, weight)


def _launch(
    config, a, b, out=None, ids=None, lse=None, dlogp=None, temperature=1.0, results=None, target_logits=None,
    first_id=0, split_rounds=0,
):  # fmt: skip
    """Launch logprob_kernel; None for what the mode does not use."""
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
    launch(
        logprob_kernel(config),
        min(tiles, device.sm_count()),
        (config.consumers + 1) * WARPGROUP,
        tensor_map(a, a_rows, 64),
        tensor_map(b, 64 if split_k else TILE_COLUMNS, 64),
        unused() if out is None else tensor_map(out, ROWS, config.box_columns),
        unused() if ids is None else ids,
        *(unused(1, np.float32) if array is None else array for array in (lse, dlogp)),
        float(temperature),
        *(unused(1, np.float32) if array is None else array for array in (results, target_logits)),
        m,
        n,
        k,
        first_id,
        split_rounds,
        (a_rows + TILE_COLUMNS) * LINE,
        shared=config.layout.nbytes,
        pdl=ALWAYS,
    )


def _outputs(rows, logp, lse, entropy, top1, ids):
    """Rows of the outputs as kernels take them: an array without elements for what is left out."""
    entropy = logp[:0] if entropy is None else entropy[rows]
    return logp[rows], lse[rows], entropy, ids[:0] if top1 is None else top1[rows]


def forward_rows(vocabulary):
    """Rows of which the forward keeps tile results at one time."""
    return max(1, QUARTER // (4 * RESULTS * -(-vocabulary // TILE_COLUMNS)) // TILE_ROWS) * TILE_ROWS


def linear_logp(hidden, weight, ids, temperature, logp, lse, entropy=None, top1=None, config=None):
    """ops.linear_logp without ignored rows, for arrays that are supported.

    config: a LogprobConfig of mode "forward" instead of the best.
    """
    config = config or LogprobConfig(hidden.dtype.name, "forward", entropy=entropy is not None, top1=top1 is not None)
    xp = device.xp()
    tiles = -(-weight.shape[0] // TILE_COLUMNS)
    step = min(forward_rows(weight.shape[0]), len(hidden))
    memory = xp.empty(step * tiles * RESULTS, np.float32)
    target_logits = xp.full(ids.shape, math.nan, np.float32)
    for rows in slices(len(hidden), step):
        count = rows.stop - rows.start
        results, chosen = memory[: count * tiles * RESULTS], target_logits[rows]
        _launch(config, hidden[rows], weight, None, ids[rows], None, None, temperature, results, chosen)
        outputs = _outputs(rows, logp, lse, entropy, top1, ids)
        launch(join_tiles_kernel, count, ROW_THREADS, results, chosen, float(temperature), *outputs, pdl=ALWAYS)


def backward_rows(width):
    """Rows whose gradient the backward adds up in float32 at one time."""
    return max(1, QUARTER // (4 * width) // TILE_ROWS) * TILE_ROWS


def chunk_columns(rows, width, vocabulary):
    """Columns of a chunk of dz: what fits into EXTRA_BYTES, and fills the SMs best in dweight's GEMM.

    Beside dz are the float32 gradient of the rows, and copies of the rows and of their gradient where the caller leaves
    rows out.
    """
    most = max(1, (EXTRA_BYTES - (4 + COPIES) * rows * width) // (2 * rows * TILE_COLUMNS)) * TILE_COLUMNS
    if most >= vocabulary:
        return vocabulary
    best = None
    for columns in range(TILE_COLUMNS * -(-most // (2 * TILE_COLUMNS)), most + 1, TILE_COLUMNS):
        tiles = -(-columns // TILE_ROWS) * -(-width // TILE_COLUMNS)
        filled = tiles / (-(-tiles // device.sm_count()) * device.sm_count())
        if best is None or filled >= best[0]:
            best = filled, columns
    return best[1]


def linear_logp_backward(hidden, weight, ids, temperature, lse, dlogp, dhidden, dweight, config=None, columns=None):
    """ops.linear_logp_backward without ignored rows, for arrays that are supported.

    A caller that has lse without a forward, from the rollout, gets the gradient for three GEMMs.
    config: a LogprobConfig of mode "dlogits", columns: of a chunk, instead of the best.
    """
    config = config or LogprobConfig(hidden.dtype.name, "dlogits")
    xp = device.xp()
    vocabulary, width = weight.shape
    step = min(backward_rows(width), len(hidden))
    columns = columns or chunk_columns(step, width, vocabulary)
    memory = xp.empty(step * (columns + -columns % 8), hidden.dtype)
    sums_memory = xp.empty((step, width), np.float32)
    for rows in slices(len(hidden), step):
        count = rows.stop - rows.start
        h, sums = hidden[rows], sums_memory[:count]
        for chunk in slices(vocabulary, columns):
            part = weight[chunk]
            pitch = len(part) + -len(part) % 8
            dz = memory[: count * pitch].reshape(count, pitch)
            _launch(config, h, part, dz, ids[rows], lse[rows], dlogp[rows], temperature, first_id=chunk.start)
            gemm(dz, part, sums, b_mn=True, add=chunk.start > 0)
            gemm(dz, h, dweight[chunk], a_mn=True, b_mn=True, add=True)
        cast(sums, dhidden[rows])


def one_pass_shape(width, vocabulary):
    """(rows, splits) of the one-pass form's blocks: as many rows as EXTRA_BYTES allow, splits that fill the SMs.

    A row has its exponentials, its tile results, its scaled hidden state, a partial gradient in each split, and the
    copies.
    """
    pitch = vocabulary + -vocabulary % 8
    row_bytes = 2 * pitch + 4 * RESULTS * -(-vocabulary // TILE_COLUMNS) + (2 + COPIES) * width
    best = None
    for splits in range(1, 17):
        rows = max(1, EXTRA_BYTES // (row_bytes + 4 * splits * width) // TILE_ROWS) * TILE_ROWS
        rounds, tiles = -(-pitch // STEPS), rows // TILE_ROWS * -(-width // TILE_COLUMNS)
        _, longest = split_k_rounds(rounds, tiles, splits)
        # dweight's traffic grows with the number of blocks, dhidden's time with the share of idle SMs.
        cost = longest * device.sm_count() / (tiles * rounds) + 0.5 * 768 / rows
        if best is None or cost < best[0]:
            best = cost, rows, splits
    return best[1:]


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


def linear_logp_with_gradient(
    hidden, weight, ids, temperature, dlogp, logp, lse, dhidden, dweight, entropy=None, top1=None, accumulate=True,
    config=None, shape=None, split_config=None,
):  # fmt: skip
    """ops.linear_logp_with_gradient without ignored rows, in three GEMMs, for arrays that are supported.

    config of mode "exponentials", split_config of "split_k", shape: (rows, splits) of a block, instead of the best.
    """
    config = config or LogprobConfig(
        hidden.dtype.name, "exponentials", entropy=entropy is not None, top1=top1 is not None
    )
    split_config = split_config or config._replace(mode="split_k", entropy=False, top1=False)
    xp = device.xp()
    vocabulary, width = weight.shape
    step, splits = shape or one_pass_shape(width, vocabulary)
    most_partials = splits * step
    step = min(step, -(-hidden.shape[0] // config.rows) * config.rows)
    tiles_across, pitch = -(-vocabulary // TILE_COLUMNS), vocabulary + -vocabulary % 8
    rounds = -(-pitch // STEPS)
    all_results = xp.empty(step * tiles_across * RESULTS, np.float32)
    exponentials = xp.empty(step * pitch, hidden.dtype)
    all_partials = xp.empty(most_partials * width, np.float32)
    scaled_hidden, row_factors = xp.empty((step, width), hidden.dtype), xp.empty(step, np.float32)
    reference_logits, target_logits = xp.empty(ids.shape, np.float32), xp.full(ids.shape, math.nan, np.float32)
    launch(reference_kernel, -(-len(ids) // REFERENCE_ROWS), 32 * REFERENCE_ROWS, hidden, weight, ids, reference_logits)
    end = 0
    while end < hidden.shape[0]:
        # The remainder first.
        count = (hidden.shape[0] - end) % step or step
        rows, end = slice(end, end + count), end + count
        h, targets, references = hidden[rows], ids[rows], reference_logits[rows]
        results, chosen = all_results[: count * tiles_across * RESULTS], target_logits[rows]
        dz = exponentials[: count * pitch].reshape(count, pitch)
        scaled, factors = scaled_hidden[:count], row_factors[:count]
        _launch(config, h, weight, dz, targets, references, None, temperature, results, chosen)
        inputs = dz, results, chosen, references, targets, float(temperature), MAX_EXPONENT[config.element], dlogp[rows]
        outputs = *_outputs(rows, logp, lse, entropy, top1, ids), scaled, factors
        launch(finish_exponentials_kernel, count, ROW_THREADS, *inputs, h, *outputs, pdl=ALWAYS)
        padded = -(-count // config.rows) * config.rows
        # A block that is shorter than others has as many tiles, in more splits.
        tiles = padded // config.rows * -(-width // TILE_COLUMNS)
        split_rounds, _ = split_k_rounds(rounds, tiles, most_partials // padded)
        height = -(-rounds // split_rounds) * padded
        partials = all_partials[: height * width].reshape(height, width)
        _launch(split_config, dz, weight, partials, split_rounds=split_rounds)
        launch(sum_splits_kernel, count, SUM_THREADS, partials, padded, factors, dhidden[rows], pdl=ALWAYS)
        gemm(dz, scaled, dweight, a_mn=True, b_mn=True, add=accumulate or rows.start > 0)
