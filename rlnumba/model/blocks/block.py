"""The interface of a kind of block, and the arguments that all blocks of one forward share.

    out = x + block(norm(x)),  or x + output_norm(block(norm(x)))

A block is one step of the residual stream, which stays in the compute dtype and is added in the epilogue of the
block's last GEMM, or after the norm of its output. Each of several ranks has its columns of it, and norms gather the
rows.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rlnumba.config.schema import RECOMPUTE_MODULES
from rlnumba.kernels.nn.rmsnorm import rmsnorm, rmsnorm_backward
from rlnumba.model.blocks.low_rank import LoraContext
from rlnumba.model.parameter import Parameter

F32 = np.dtype(np.float32)
# Parts of a layer that the backward may compute again: its norms, the norms and rotations of q and k, SwiGLU.
MODULES = frozenset(RECOMPUTE_MODULES)


@dataclass(frozen=True)
class ForwardContext:
    """Arguments that all layers of one forward share: `ctx` below.

    rotations: for each layer the Rotation of all rows, None without attention; attention: the attention backend;
    memory: an Arena or HeapAllocator; lora: the LoraContext of the model's adapter, or None. adds_gradients: whether
    the gradients of layers' matrices are added to what is there, or written. ranks: see Transformer; config is then
    that of this rank's shard. router_load: a RouterLoad that mixtures of experts add to, or None; router_gradient: of
    the backward, the RouterTerm whose loss has one, or None. replayed_experts: {layer: (N, k) int32} of its mixtures,
    experts to take as route's `recorded`, or None; expert_records: ExpertRecords that they are written to, or None.
    """

    config: object
    rotations: tuple
    attention: object
    memory: object
    lora: LoraContext | None = None
    adds_gradients: bool = True
    ranks: object = None
    router_load: object = None
    router_gradient: object = None
    replayed_experts: dict | None = None
    expert_records: object = None


class ExpertRecords(NamedTuple):
    """The place of a forward's choices of experts. slots (N,) int32: of each token, -1 for none; of_layers: {layer:
    (S, k) int16} of its mixtures."""

    slots: object
    of_layers: dict


class CacheArray(NamedTuple):
    """One array of a block's cache: its name, the shape of what tokens, a state or a sequence have, and the dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


class Block:
    """One block of one layer; a kind is a subclass, in a module of its own, and overrides what it needs.

    `config` is a ModelConfig, of the whole model or of a rank's shard. The constants:

    NORM: (view's name, name in a checkpoint) of the norm of the block's input
    Weights: a NamedTuple of the views, None in place of a parameter that the model does not have
    Saved: a NamedTuple of what forward returns for backward; its first field, x, is the block's input
    PROJECTIONS: names of the matrices that an adapter may change
    STACKS: {name of the matrices of all experts that an adapter may change, each expert's: name of PEFT's parameter}
    QUANTIZED: names of those that [quantization] keeps in few bits, None: PROJECTIONS
    RECOMPUTED: those of MODULES that are parts of it
    OPERATORS: {field of Saved: name of the operator that wrote it}, in the order of the forward; OUTPUT: the operator
        that writes out. `rlnumba check` compares them.
    CACHED: fields of Saved that are the layer's cache where the attention backend has one
    CUT: sizes of config.json that the number of ranks divides; a shard's config has the quotients
    LAUNCHES: kernels of a decode step, each a launch
    """

    NORM: tuple[str, str]
    Weights: type
    Saved: type
    OUTPUT: str
    LAUNCHES: int
    PROJECTIONS = RECOMPUTED = CACHED = CUT = ()
    QUANTIZED = None
    OPERATORS, STACKS = {}, {}  # noqa: RUF012

    def __init__(self, layer):
        self.layer = layer

    def matrices(self, config):
        """The Parameters that read the block's input, an activation or the cache, and their biases: list."""
        raise NotImplementedError

    def norm(self, config):
        """The Parameter of the input's norm."""
        return self.vector(*self.NORM, config.hidden_size)

    def vectors(self, config):
        """Further Parameters without weight decay, such as norms of heads: list."""
        return []

    def forward(self, x, w, ctx, out, recomputed=()):
        """out = x + block(norm(x)); returns a Saved.

        x, out: (N, D), or this rank's columns if there are several; w: the block's Weights; recomputed: some of
        MODULES, whose outputs are None in Saved and computed again by the backward: no GEMM but an adapter's. The last
        block of a layer gets None for out where the backward runs it again, and then need not compute it.
        """
        raise NotImplementedError

    def backward(self, dx, w, grads, ctx, saved):
        """dx: (N, D), the gradient of out on entry and of x on return.

        grads: the block's Weights, None where a parameter is not trained; they, and the adapter's gradients, are
        written.
        """
        raise NotImplementedError

    def prefix_multiple(self, config, dtype):
        """Sequences may have prefixes in the rows of others (PackedPrefixes), at multiples of so many tokens, with the
        same outputs; None: they may not."""
        return None

    def products(self, config):
        """Multiplications of the GEMMs of one token's forward."""
        raise NotImplementedError

    def cost(self, lengths, config):
        """Multiplications of the forward of sequences of these lengths (B,) int64, about."""
        return lengths.sum() * self.products(config)

    def row_elements(self, config):
        """Elements of activations that one token's forward writes, and reads."""
        raise NotImplementedError

    def operator_bytes(self, config, dtype, tokens, sequences, has_prefixes=False):
        """Bytes of the arrays that its operators make for themselves in the backward of packed sequences.

        has_prefixes: whether some are prefixes of others.
        """
        return 0

    def gpu_columns(self, config):
        """{what: columns} that a GPU cuts at whole tiles of GEMMs."""
        return {name: getattr(config, name) for name in self.CUT}

    def cache_entry(self, config, block_size, dtype):
        """The CacheArrays of block_size tokens: tuple, empty for a block that reads one token at a time."""
        return ()

    def page_entry(self, config, dtype):
        """The CacheArrays of a state at a block's end: tuple, empty for a block whose cache has all of its tokens."""
        return ()

    def slot_entry(self, config, dtype, verified):
        """The CacheArrays of a running sequence's last tokens, beside a page: tuple, empty where there are no pages.

        verified: the most tokens of a sequence in a step that may take some of them back, at least 1.
        """
        return ()

    def matrix(self, name, columns, sources, cut, bias=False):
        """[Parameter] of a matrix and, with `bias`, of its bias; sources: ((name in the layer, rows), ...), fused."""
        found = [self.parameter(name, (columns,), True, ".weight", sources, cut)]
        return found + ([self.parameter(f"{name}_bias", (), False, ".bias", sources, cut)] if bias else [])

    def vector(self, name, source, size):
        """The Parameter of a vector that every rank has whole."""
        return self.parameter(name, (), False, ".weight", ((source, size),))

    def parameter(self, name, columns, decays, suffix, sources, *cut):
        """A Parameter; sources: ((name in the layer, rows, or a tuple of those of each section), ...)."""
        at = f"model.layers.{self.layer}"
        sections = tuple(count if isinstance(count, tuple) else (count,) for _, count in sources)
        sizes = [sum(each) for each in sections]
        rows = tuple((f"{at}.{source}{suffix}", size) for (source, _), size in zip(sources, sizes, strict=True))
        of_matrix = f"{at}.{name}", (sum(sizes), *columns), decays, rows, self.layer
        return Parameter(*of_matrix, *cut, sections=sections)

    def views(self, of_name):
        """The block's Weights, from {name of a Parameter: view}."""
        return self.Weights(*(of_name.get(f"model.layers.{self.layer}.{field}") for field in self.Weights._fields))


def norm_rows(x, weight, ctx, out, rstd):
    """out (N, D) = rmsnorm(x), whole rows on every rank; rstd (N,) is written, but not of several ranks."""
    if ctx.ranks is None:
        rmsnorm(x, weight, ctx.config.rms_norm_eps, out, rstd, ctx.config.norm_offset)
    else:
        ctx.ranks.rmsnorm(x, weight, ctx.config.rms_norm_eps, out, ctx.memory, ctx.config.norm_offset)


def normed_rows(x, weight, rstd, ctx):
    """The result of norm_rows."""
    normed = ctx.memory.empty((x.shape[0], len(weight)), x.dtype)
    norm_rows(x, weight, ctx, normed, rstd)
    return normed


def norm_backward(dnormed, x, weight, rstd, dx, dweight, ctx):
    """dx (N, D) += the gradient of x of norm_rows, from that of its result; dweight += that of the weight."""
    rmsnorm_backward(dnormed, x, weight, rstd, dx, dweight, accumulate=True, unit_offset=ctx.config.norm_offset)


def scope_of(ctx, name, recomputed):
    """A scope of memory where what the module makes is computed again, else none."""
    return ctx.memory.scope() if name in recomputed else nullcontext()
