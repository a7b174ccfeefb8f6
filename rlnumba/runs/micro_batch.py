"""Micro-batches: packed sequences, the targets in them and what a loss reads, on the host and on the device.

    micro_batch = MicroBatch.of(token_ids, lengths, targets)       NumPy arrays
    micro_batch.padded()                                           of a bucket's shape, for a CUDA graph
    batch = DeviceBatch.of(micro_batch, arrays)                    the same arrays on the device
    micro_batch.sharing_prefixes(sharing)                          what sequences begin with is there once

Padding comes last: short sequences of token 0 without a target, then sequences without tokens; targets that a loss
gives no weight, predicted by the last token of the last real sequence, which predicts no other. So no position of a
real token or target changes, its log-prob has the same bits, and padding adds zeros to the gradients.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from rlnumba.data.prefix_tree import PrefixTree
from rlnumba.kernels.attention.sequences import PackedPrefixes
from rlnumba.kernels.logprob.listed import NOWHERE
from rlnumba.model.router_loss import RouterArrays
from rlnumba.model.transformer import packed_positions
from rlnumba.runtime import device
from rlnumba.runtime.buckets import bucket_of, bucket_step

# Tokens of a padding sequence at most, and the smallest step between buckets of tokens: rows of a GEMM's tile.
TILE = 128
# The smallest step between buckets of sequences.
SEQUENCES = 8
# Values of padding where they are not 0: a target's threshold keeps all logits, and all tokens are allowed; a sequence
# has no parent; no token of a teacher is listed.
PADDING = {"thresholds": -np.inf, "allowed": -1, "parents": -1, "listed_places": NOWHERE}
# Arrays that delimit sequences, (B + 1,).
BOUNDS = ("cu_seqlens", "completion_bounds", "query_bounds")


def target_bucket_of(count):
    """The bucket of targets: a multiple of an eighth of the next power of two, at least TILE.

    They are fewer than the tokens and go through the head alone: padding costs less than another bucket's graph.
    """
    step = 2 * bucket_step(count, TILE // 2)
    return -(-max(count, 1) // step) * step


def seqlen_bucket_of(length):
    """The smallest power of two, at least TILE, that holds a sequence of this length."""
    return max(TILE, 1 << (length - 1).bit_length())


@dataclass(frozen=True)
class TargetBatch:
    """Packed sequences on the device, and the T of their tokens whose log-probs are computed.

    input_ids, position_ids (N,), cu_seqlens (B + 1,) i32; rows (T,) i32: the positions that predict the targets, or
    whose values are computed; target_ids (T,) i32, None where only values are; thresholds (T,) f32: the smallest logit
    of the prediction of each, or None for all logits. every_row: compute targets without a gradient, too. allowed
    (T, ceil(V / 32)) i32: the tokens that a grammar allows for each, or None for all. routed_experts: those that
    Transformer.forward takes as `replayed`, or None. router: the RouterArrays of a training step, or None. prefixes:
    PackedPrefixes, or None.
    """

    input_ids: object
    position_ids: object
    cu_seqlens: object
    max_seqlen: int
    rows: object
    target_ids: object
    thresholds: object = None
    every_row: bool = False
    allowed: object = None
    routed_experts: object = None
    router: RouterArrays | None = None
    prefixes: PackedPrefixes | None = None

    @staticmethod
    def of(token_ids, lengths, targets, thresholds=None):
        """From the host: token_ids (N,) i32 of sequences end to end, their lengths (B,), targets (T,) positions.

        No target may be the first token of its sequence. Raises ValueError for an empty sequence.
        """
        return MicroBatch.of(token_ids, lengths, targets, thresholds).to_device().targets


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch on the host: arrays of four-byte elements by name.

    tokens: input_ids, position_ids (N,). targets: rows, target_ids and what else there is of each target, (T, ...).
    sequences: cu_seqlens (B + 1,), other bounds (B + 1,), and what there is of each sequence, (B,). others: arrays of
    any shape. max_seqlen: at least the longest sequence's length. num_targets: those that are not padding. levels:
    those of PackedPrefixes, 0 without prefixes.
    """

    tokens: dict
    targets: dict
    sequences: dict
    max_seqlen: int
    num_targets: int
    others: dict = field(default_factory=dict)
    is_padded: bool = False
    levels: int = 0

    @staticmethod
    def of(token_ids, lengths, targets, thresholds=None):
        """The arguments are TargetBatch.of's."""
        of_targets = {"rows": (targets - 1).astype(np.int32), "target_ids": token_ids[targets]}
        if thresholds is not None:
            of_targets["thresholds"] = thresholds
        return MicroBatch.of_rows(token_ids, lengths, of_targets)

    @staticmethod
    def of_rows(token_ids, lengths, targets):
        """From token_ids and lengths as in `of`, and the arrays of the targets, `rows` among them."""
        position_ids, cu_seqlens = packed_positions(lengths)
        tokens = {"input_ids": token_ids, "position_ids": position_ids}
        longest = int(np.max(lengths, initial=0))
        return MicroBatch(tokens, targets, {"cu_seqlens": cu_seqlens}, longest, len(targets["rows"]))

    def with_arrays(self, targets=None, sequences=None, others=None):
        """This one and further arrays."""
        added = {"targets": self.targets | (targets or {}), "sequences": self.sequences | (sequences or {})}
        return replace(self, **added, others=self.others | (others or {}))

    @property
    def arrays(self):
        """All arrays by name."""
        return self.tokens | self.targets | self.sequences | self.others

    def cost(self, config):
        """cost_of its sequences: int. config: the model's."""
        prefix_lens = self.sequences.get("prefix_lens", 0)
        return cost_of(np.diff(self.sequences["cu_seqlens"]) + prefix_lens, config) - cost_of(prefix_lens, config)

    @property
    def num_tokens(self):
        return len(self.tokens["input_ids"])

    def padded(self):
        """This one with padding, so that all its shapes are those of a bucket: MicroBatch."""
        if not self.num_tokens:
            raise ValueError("MicroBatch.padded: no sequence")
        num_tokens, num_targets = bucket_of(self.num_tokens, TILE), target_bucket_of(self.num_targets)
        # Padding sequences of TILE tokens each hold the most padding that the bucket can have.
        num_padding = bucket_step(num_tokens, TILE) // TILE
        num_sequences = bucket_of(len(self.sequences["cu_seqlens"]) - 1 + num_padding, SEQUENCES)
        targets = {name: _extended(array, num_targets, PADDING.get(name, 0)) for name, array in self.targets.items()}
        targets["rows"][self.num_targets :] = self.num_tokens - 1
        sequences = {}
        for name, array in self.sequences.items():
            is_bounds = name in BOUNDS
            sequences[name] = _extended(
                array, num_sequences + is_bounds, array[-1] if is_bounds else PADDING.get(name, 0)
            )
        ends = sequences["cu_seqlens"][len(self.sequences["cu_seqlens"]) :]
        ends[:] = np.minimum(self.num_tokens + TILE * np.arange(1, len(ends) + 1), num_tokens)
        if "query_bounds" in sequences:
            # A padding sequence has no descendants.
            first = len(sequences["cu_seqlens"]) - len(ends)
            sequences["query_bounds"][first:] += ends - sequences["cu_seqlens"][first - 1]
            count = len(self.sequences["order"])
            sequences["order"][count:] = np.arange(count, num_sequences)
        tokens = {name: _extended(array, num_tokens, 0) for name, array in self.tokens.items()}
        others = dict(self.others)
        if "routed_experts" in others:
            # Padding has its own.
            others["routed_experts"] = _extended(others["routed_experts"], num_tokens, -1, axis=1)
        arrays = {"tokens": tokens, "targets": targets, "sequences": sequences, "others": others}
        return replace(self, **arrays, max_seqlen=seqlen_bucket_of(self.max_seqlen), is_padded=True)

    def sharing_prefixes(self, sharing):
        """This one with what several sequences begin with once, as a sequence of its own ahead of them: MicroBatch.

        sharing: PrefixRule, or None for this one as it is, which it also is where nothing is shared. The rows are
        those of the nodes of a PrefixTree; targets keep their order. The sequences' arrays are then those of the nodes
        and of PackedPrefixes, with its lengths as prefix_lens.
        """
        if sharing is None or not self.num_tokens:
            return self
        token_ids, old_rows = self.tokens["input_ids"], self.targets["rows"]
        tree = PrefixTree(token_ids, self.sequences["cu_seqlens"], old_rows, sharing)
        if not tree.shares:
            return self
        nodes, parents = tree.packed()
        own = [node.end - node.start for node in nodes]
        prefixes = PackedPrefixes.of(own, parents)
        added = {"cu_seqlens": np.append(0, np.cumsum(own)).astype(np.int32), "query_bounds": prefixes.query_bounds}
        added |= {"parents": prefixes.parents, "prefix_lens": prefixes.lengths, "order": prefixes.order}
        kept, places = tree.places()
        return replace(
            self, tokens={name: array[kept] for name, array in self.tokens.items()},
            targets=self.targets | {"rows": places[old_rows].astype(np.int32)}, sequences=self.sequences | added,
            max_seqlen=max(own), levels=prefixes.levels,
        )  # fmt: skip

    def to_device(self):
        """A DeviceBatch of new arrays."""
        return DeviceBatch.of(self, {name: device.asarray(array) for name, array in self.arrays.items()})


def _extended(array, length, value, axis=0):
    """A copy of an array with `length` elements along an axis, what is new being `value`."""
    extended = np.full((*array.shape[:axis], length, *array.shape[axis + 1 :]), value, array.dtype)
    np.moveaxis(extended, axis, 0)[: array.shape[axis]] = np.moveaxis(array, axis, 0)
    return extended


def cost_of(lengths, config):
    """Multiplications of the layers' forward of sequences of these lengths, about: int. config: the model's."""
    lengths = np.asarray(lengths, np.int64)
    return sum(int(block.cost(lengths, config)) for blocks in config.blocks for block in blocks)


def costliest_first(batches, config, lengths_of=None, shared_of=None):
    """Micro-batches in the order in which a step adds their gradients, which does not depend on who computes them.

    So the ranks of a round have about as much to do. config: the model's. lengths_of(batch): its sequences', where
    the batches are no MicroBatches; shared_of(batch): how many tokens of each are computed for the one before it.
    """
    if lengths_of is None:
        return sorted(batches, key=lambda batch: -batch.cost(config))
    shared = {} if shared_of is None else {id(batch): cost_of(shared_of(batch), config) for batch in batches}
    return sorted(batches, key=lambda batch: shared.get(id(batch), 0) - cost_of(lengths_of(batch), config))


@dataclass(frozen=True)
class DeviceBatch:
    """A micro-batch on the device: the TargetBatch for the policy, and all arrays by name, for the loss."""

    targets: TargetBatch
    arrays: dict

    @staticmethod
    def of(micro_batch, arrays, results=None):
        """A MicroBatch whose arrays are `arrays` on the device; results: the arrays that its function writes."""
        names = ("input_ids", "position_ids", "cu_seqlens", "rows")
        of_policy = {name: arrays[name] for name in names} | {
            name: arrays.get(name) for name in ("target_ids", "thresholds", "allowed", "routed_experts")
        }
        if "router_weight" in arrays:
            written = results["aux_loss"], results["expert_rows"]
            of_policy["router"] = RouterArrays(arrays["num_tokens"], arrays["router_weight"], *written)
        if "parents" in arrays:
            names = ("parents", "prefix_lens", "query_bounds", "order")
            of_policy["prefixes"] = PackedPrefixes(*(arrays[name] for name in names), micro_batch.levels)
        targets = TargetBatch(**of_policy, max_seqlen=micro_batch.max_seqlen, every_row=micro_batch.is_padded)
        return DeviceBatch(targets, arrays)
