"""Grouped GEMMs of few rows by the packed weights of experts: the bits of gemm/grouped.py on the weights' values.

    packed_grouped_gemm          out[i] = x[i] W_e^T           starts[e] <= i < starts[e + 1]
    packed_grouped_gemm_swiglu   gate_up[i] = x[i] W_e^T, out = silu(gate) * up

x (R, K), its rows sorted by expert; weights a QuantizedWeight (E, N, K); starts (E + 1,) int32 on the device, as those
of gemm/grouped.py. A decode step reads the packed words of the experts that have rows, and writes no values: of a layer
with 128 experts these are more bytes than all that the step reads.

A persistent block loops over the tiles of all experts (gemm/grouped_tiles.py) with the warps of few_rows.py: copies of
packed words, widening in registers, wgmma in ascending order of the reduction. A tile has the rows of one expert, up to
the config's number; TMA loads those of the next expert with them, whose products are not stored.
"""

import numpy as np

from rlnumba.kernels.checks import I32, check, is_16_byte_aligned
from rlnumba.kernels.gemm.grouped_tiles import WORD, most_row_tiles, row_tile_functions
from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.shared_memory import load_word
from rlnumba.kernels.ptx.warp import griddepcontrol_launch_dependents, griddepcontrol_wait
from rlnumba.kernels.ptx.wgmma import STEPS
from rlnumba.kernels.quantized.few_rows import (
    A_LOADER,
    FIRST_WIDENER,
    WEIGHT_LOADER,
    ExpertRows,
    Shape,
    a_loader_function,
    consumer_function,
    init_rings_function,
    packed_operand,
    weight_loader_function,
    widener_function,
)
from rlnumba.kernels.quantized.few_rows_config import LEAST_STEPS, MOST_ROWS, grouped_config
from rlnumba.kernels.quantized.formats import COLUMNS, ROWS
from rlnumba.kernels.tile.pipeline import SWIZZLE_ALIGNMENT, shared_base
from rlnumba.kernels.tile.tensor_map import tensor_map
from rlnumba.runtime import device, dispatch
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import ALWAYS, launch, specialize, supports_pdl

i32 = np.int32

# Architectures that the kernels of this module compile for.
ARCHITECTURES = [(9, 0, "a")]


@specialize
def packed_grouped_gemm_kernel(config):
    """The kernel of a grouped config. N is a multiple of 32, K of the steps of a stage."""
    panels, tile_columns, layout = config.panels, config.tile_columns, config.layout
    table_offset = layout.nbytes - SWIZZLE_ALIGNMENT
    init_rings, (fill_table, _) = init_rings_function(config), row_tile_functions(config.rows)
    load_a, load_weight = a_loader_function(config), weight_loader_function(config)
    widen_all, consume = widener_function(config), consumer_function(config)

    @supports_pdl
    @cuda.jit(launch_bounds=(config.threads, 1))
    def packed_grouped_gemm_kernel(x_map, weight, starts, c, activated, n, k):
        """C (R, n) from x of k steps and a PackedWeight (E n, k); with SwiGLU (E 2 n, k), C (R, 2 n), and `activated`
        (R, n) is written.

        c, activated: pairs of 16 bits; the latter has no elements without SwiGLU. Shared memory:
        PackedGemmConfig.layout, then the table of row tiles.
        """
        thread = i32(cuda.threadIdx.x)
        lane, warp = thread & i32(31), sm90.warp_uniform(thread >> i32(5))
        base = shared_base()
        table = base + table_offset
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        rings = init_rings(base, weight, thread)
        if warp == 0:
            fill_table(table, starts, thread)
        cuda.syncthreads()
        tiles_across = i32((n + tile_columns - 1) // tile_columns)
        row_tiles = sm90.warp_uniform(load_word(table + i32(starts.shape[0] - 1) * i32(WORD)))
        rows = ExpertRows(starts, table, tiles_across)
        shape = Shape(i32(row_tiles * tiles_across), i32(k // (panels * STEPS)), i32(0), i32(n), rows)
        if warp >= FIRST_WIDENER:
            widen_all(rings, shape, i32(warp - i32(FIRST_WIDENER)), lane)
        elif warp == WEIGHT_LOADER:
            load_weight(weight, rings, shape, lane)
        elif warp == A_LOADER:
            a_map = sm90.tensor_map_address(x_map)
            load_a(a_map, a_map, a_map, rings, shape, lane)
        else:
            consume(rings, thread, c, activated, activated, shape)

    return packed_grouped_gemm_kernel


def is_packed_grouped_gemm(x, weights, *matrices):
    """Whether the operators here take x (R, K), a QuantizedWeight (E, N, K) and further matrices of x's rows.

    On Hopper up to MOST_ROWS rows of 16 bits an expert, on average, with the bits of gemm/grouped_sm90.py.
    """
    if x.itemsize != 2 or len(weights.shape) != 3 or dispatch.family("gemm") != "sm90":
        return False
    (rows, k), (experts, n, _), tiles = x.shape, weights.shape, weights.group_size // COLUMNS
    fits = 0 < rows <= MOST_ROWS * experts and k % LEAST_STEPS == 0 and n % ROWS == 0
    in_groups = weights.group_size % COLUMNS == 0 and tiles & tiles - 1 == 0
    typed = all(each.dtype == weights.dtype for each in (x, *matrices))
    return fits and in_groups and typed and is_16_byte_aligned(x, *matrices)


def packed_grouped_gemm(x, weights, starts, out):
    """out[i] = x[i] weights[e]^T, e the expert of row i, for arrays that is_packed_grouped_gemm takes.

    out (R, N) is written, rows outside of `starts` aside. Raises ValueError for other shapes, dtypes or layouts.
    """
    check("packed_grouped_gemm", "x", x, (None, weights.shape[2]), (weights.dtype,))
    check("packed_grouped_gemm", "out", out, (len(x), weights.shape[1]), (x.dtype,))
    check("packed_grouped_gemm", "starts", starts, (len(weights) + 1,), I32)
    gemm_rows_with_config(_config_for(x, weights, False), x, weights, starts, out)


def packed_grouped_gemm_swiglu(x, weights, starts, gate_up, out):
    """gate_up[i] = x[i] weights[e]^T and out = silu(gate) * up, for arrays that is_packed_grouped_gemm takes.

    weights (E, 2F, K), the gate's rows first; gate_up (R, 2F) and out (R, F) are written, rows outside of `starts`
    aside. Raises ValueError for other shapes, dtypes or layouts.
    """
    check("packed_grouped_gemm_swiglu", "x", x, (None, weights.shape[2]), (weights.dtype,))
    check("packed_grouped_gemm_swiglu", "gate_up", gate_up, (len(x), weights.shape[1]), (x.dtype,))
    check("packed_grouped_gemm_swiglu", "out", out, (len(x), weights.shape[1] // 2), (x.dtype,))
    check("packed_grouped_gemm_swiglu", "starts", starts, (len(weights) + 1,), I32)
    gemm_rows_with_config(_config_for(x, weights, True), x, weights, starts, gate_up, out)


def _config_for(x, weights, swiglu):
    """The config for these arrays."""
    experts, n, k = weights.shape
    shape, form = (n // 2 if swiglu else n, k), weights.form.name
    return grouped_config(len(x), experts, shape, form, weights.group_size, device.sm_count(), x.dtype.name, swiglu)


def gemm_rows_with_config(config, x, weights, starts, out, activated=None):
    """packed_grouped_gemm by the kernel of `config`, or with SwiGLU, of which `activated` is the output."""
    experts, (rows, k) = len(weights), x.shape
    n = (activated if config.swiglu else out).shape[1]
    tiles = most_row_tiles(rows, experts, config.rows) * -(-n // config.tile_columns)
    activated = out if activated is None else activated
    launch(
        packed_grouped_gemm_kernel(config), min(tiles, device.sm_count()), config.threads,
        tensor_map(x, config.rows, STEPS), packed_operand(weights), starts, out.view(np.int32),
        activated.view(np.int32), n, k, shared=config.layout.nbytes + (experts + 1) * WORD, pdl=ALWAYS,
    )  # fmt: skip
