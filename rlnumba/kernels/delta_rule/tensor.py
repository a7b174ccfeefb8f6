"""The gated delta rule by tensor-core kernels, for heads of 128 columns of 16-bit models: the host's part.

The gradient, by mma.sync, is three kernels; its equations are those of ops.py. tensor_inverse.py has all blocks at
once, and what of the substitution needs no state. tensor_chains.py goes through the blocks of a sequence, for S
forwards and for dS from the last to the first, columns of V on their own. tensor_block_backward.py has all blocks at
once again: the gradients, with both states.

The states of the gradient are not those of the forward in their last bits. They are as precise: M, P, and what the
forward chain reads are products of float16; states, rows r and z and gradients are bfloat16 operands, whose range they
need.
"""

import numpy as np

from rlnumba.kernels.checks import unused
from rlnumba.kernels.delta_rule import simt
from rlnumba.kernels.delta_rule.arithmetic import BLOCK, PrefixSequences, StateCache, StateSequences, planes_of
from rlnumba.kernels.delta_rule.simt_backward import block_bounds
from rlnumba.kernels.delta_rule.sm80_forward import delta_rule_sm80_kernel
from rlnumba.kernels.delta_rule.sm90_forward import delta_rule_sm90_kernel
from rlnumba.kernels.delta_rule.tensor_block_backward import SHARED_BYTES, delta_rule_block_gradient
from rlnumba.kernels.delta_rule.tensor_chains import ChainValues, delta_rule_chains
from rlnumba.kernels.delta_rule.tensor_inverse import VECTORS, delta_rule_inverse
from rlnumba.kernels.delta_rule.tensor_prepare import COLUMNS, WARPGROUP, TensorConfig
from rlnumba.kernels.delta_rule.tensor_tiles import DIM
from rlnumba.runtime import device
from rlnumba.runtime.launch import launch

KERNELS = {"sm90": delta_rule_sm90_kernel, "sm80": delta_rule_sm80_kernel}

# Static arrays of a block of the gradient's last kernel, rounded up.
STATIC_BYTES = 40 << 10

# Hopper's packed sequences of so many tokens each take the order of instructions of tensor_deferred.py, in a mean: its
# blocks are shorter, and the beginning of a sequence is longer. On an H100, 16 heads, 8 x 2,048 tokens took 267 us for
# 288, and 64 x 256 tokens 296 for 288.
FEWEST_DEFERRED = 1024


def is_supported(element, key_dim, value_dim):
    """Whether tensor cores compute heads of these dimensions, of a model of this dtype."""
    return element in ("float16", "bfloat16") and key_dim == value_dim == 128


def is_gradient_supported(element):
    """Whether the gradient of a model of a dtype, by its name, has bfloat16's precision, and the GPU the shared memory.

    Gradients of a float16 model are more precise than these operands: simt_backward.py computes them.
    """
    return element == "bfloat16" and SHARED_BYTES + STATIC_BYTES <= device.max_shared_bytes()


def _launch(config, tokens, sequences, cache, out):
    """Launch the kernel of a TensorConfig."""
    grid = out.shape[1] * (out.shape[2] // COLUMNS), len(sequences.cu_seqlens) - 1
    arguments = tokens, sequences, cache, out
    launch(KERNELS[config.family](config), grid, 2 * WARPGROUP, *arguments, shared=config.layout.nbytes)


def _forms(family, tokens, cu_seqlens):
    """Whether packed sequences take the form of tensor_deferred.py: a tuple, of one bool but where kernels are listed.

    The forms have equal bits, so numbers of rows may choose. A run has both, as its micro-batches differ.
    """
    if family != "sm90":
        return (False,)
    if device.name() == "shapes":
        return False, True
    return (tokens.k.shape[0] >= FEWEST_DEFERRED * (len(cu_seqlens) - 1),)


def delta_rule(family, tokens, cu_seqlens, out, prefixes=None):
    """The operator delta_rule; the operator has checked the arguments."""
    operand, has_prefixes = tokens.q.dtype, prefixes is not None
    cache = StateCache(unused(5, operand), unused(4, operand), unused(3, operand), unused(3, np.float32))
    launches = [StateSequences(cu_seqlens, unused(), unused(2), unused(), unused())]
    if has_prefixes:
        shape = len(cu_seqlens) - 1, out.shape[1], planes_of(tokens.v.dtype), tokens.k.shape[2], out.shape[2]
        cache = cache._replace(states=device.xp().empty(shape, operand))
        launches = [PrefixSequences(cu_seqlens, prefixes.parents, np.int32(i)) for i in range(prefixes.levels)]
    for is_deferred in _forms(family, tokens, cu_seqlens):
        config = TensorConfig(family, tokens.k.shape[2], tokens.v.dtype.name, False, is_deferred, has_prefixes)
        for sequences in launches:
            _launch(config, tokens, sequences, cache, out)


def paged_delta_rule(family, tokens, sequences, cache, out):
    """The operator paged_delta_rule; the operator has checked the arguments."""
    slots, _, heads, value_dim = cache.value_rows.shape
    flat = cache._replace(value_rows=cache.value_rows.reshape(slots * BLOCK, heads, value_dim))
    _launch(TensorConfig(family, tokens.k.shape[2], tokens.v.dtype.name, True), tokens, sequences, flat, out)
    simt.store_open_block(tokens, sequences, cache)


def delta_rule_backward(dout, tokens, cu_seqlens, gradients, prefixes=None):
    """The operator delta_rule_backward; the operator has checked the arguments."""
    rows, heads, _ = dout.shape
    empty, operand = device.xp().empty, dout.dtype
    blocks = rows // BLOCK + len(cu_seqlens) - 1
    bounds = block_bounds(cu_seqlens, blocks)
    vectors = empty((blocks * heads * VECTORS, BLOCK), np.float32)
    weights = empty((blocks, heads, BLOCK, BLOCK), np.float16)
    delta_rule_inverse(tokens, bounds, vectors, weights)
    states, dstates = (empty((blocks, heads, DIM, DIM), operand) for _ in range(2))
    errors, z = (empty((blocks, heads, DIM, BLOCK), operand) for _ in range(2))
    values = ChainValues(states, errors, dstates, z)
    delta_rule_chains(dout, tokens, cu_seqlens, (vectors, weights), values, prefixes)
    delta_rule_block_gradient(dout, tokens, bounds, vectors, values, gradients)
