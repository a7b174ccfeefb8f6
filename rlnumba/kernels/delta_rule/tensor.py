"""The gated delta rule by tensor-core kernels, for heads of 128 columns of 16-bit models: the host's part."""

import numpy as np

from rlnumba.kernels.checks import unused
from rlnumba.kernels.delta_rule import simt
from rlnumba.kernels.delta_rule.arithmetic import BLOCK, StateCache, StateSequences
from rlnumba.kernels.delta_rule.sm80_forward import delta_rule_sm80_kernel
from rlnumba.kernels.delta_rule.sm90_forward import delta_rule_sm90_kernel
from rlnumba.kernels.delta_rule.tensor_prepare import COLUMNS, WARPGROUP, TensorConfig
from rlnumba.runtime import device
from rlnumba.runtime.launch import launch

KERNELS = {"sm90": delta_rule_sm90_kernel, "sm80": delta_rule_sm80_kernel}

# Hopper's packed sequences of so many tokens each take the order of instructions of tensor_deferred.py, in a mean: its
# blocks are shorter, and the beginning of a sequence is longer. On an H100, 16 heads, 8 x 2,048 tokens took 267 us for
# 288, and 64 x 256 tokens 296 for 288.
FEWEST_DEFERRED = 1024


def is_supported(element, key_dim, value_dim):
    """Whether tensor cores compute heads of these dimensions, of a model of this dtype."""
    return element in ("float16", "bfloat16") and key_dim == value_dim == 128


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


def delta_rule(family, tokens, cu_seqlens, out):
    """The operator delta_rule; the operator has checked the arguments."""
    operand, sequences = tokens.q.dtype, StateSequences(cu_seqlens, unused(), unused(2), unused(), unused())
    cache = StateCache(unused(5, operand), unused(4, operand), unused(3, operand), unused(3, np.float32))
    for is_deferred in _forms(family, tokens, cu_seqlens):
        config = TensorConfig(family, tokens.k.shape[2], tokens.v.dtype.name, False, is_deferred)
        _launch(config, tokens, sequences, cache, out)


def paged_delta_rule(family, tokens, sequences, cache, out):
    """The operator paged_delta_rule; the operator has checked the arguments."""
    slots, _, heads, value_dim = cache.value_rows.shape
    flat = cache._replace(value_rows=cache.value_rows.reshape(slots * BLOCK, heads, value_dim))
    _launch(TensorConfig(family, tokens.k.shape[2], tokens.v.dtype.name, True), tokens, sequences, flat, out)
    simt.store_open_block(tokens, sequences, cache)
