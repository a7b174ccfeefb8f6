"""The shapes of steps that are CUDA graphs: buckets of sequences, tokens and contexts, and padding to them.

The number of sequences is rounded up to a bucket, of steps with prefill to a coarser one, and so are their tokens; the
longest context and the longest part of a sequence to powers of two. Padding changes no bit: a sequence that is added
has a context of no tokens, a token that is added has no slot in the cache, and what is sampled there is not read.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.kernels.delta_rule.arithmetic import BLOCK as STATE_BLOCK

# Padding costs at most half of a small batch and 15 rows of a large one; nano-vllm's choice.
SMALL_BUCKETS = (1, 2, 4, 8)
BUCKET_STEP = 16
# Buckets of steps with prefill, in which any number of sequences decodes beside those that begin: each pair of buckets,
# of sequences and of tokens, is a graph, whose first two steps the host launches kernel by kernel.
PREFILL_BUCKETS, PREFILL_BUCKET_STEP = (*SMALL_BUCKETS, 16, 32), 64
SMALLEST_CONTEXT = 256
# The smallest step between buckets of tokens, and the smallest bound of a sequence's tokens in a step of several.
SMALLEST_TOKENS = 16
# The longest prefill steps that are graphs: they have so many tokens, and so long contexts, which bound attention's
# workspace.
MAX_PREFILL_TOKENS, MAX_PREFILL_CONTEXT = 4096, 4096
# Tokens times weights of a layer that an H200 multiplies in 0.2 ms, in which the host launches the layer's eight
# kernels. Beyond, padding costs time, and a graph saves none.
LAYER_PRODUCTS = 6 * 10**10
# The values of padding where they are not 0: no slot, a prefix group of its own, no adapter, no token, all allowed.
OF_NOTHING = ("slot_mapping", "adapter_ids", "history", "banned", "stop_ids", "bias_ids", "allowed", "bad_words")
PADDING = dict.fromkeys((*OF_NOTHING, "num_logprobs", "window_slots"), -1) | {"group_sizes": 1}
# Arrays with an entry for each token, and for each sequence; those that padding does not lengthen so. The others have
# an entry for each sampled token; in decode all of these are as many.
OF_TOKENS = ("input_ids", "position_ids", "slot_mapping", "window_slots", "adapter_ids")
OF_SEQUENCES = ("block_tables", "window_tables", "context_lens", "state_tables", "state_slots", "resumed_at")
OF_STEP = ("cu_seqlens", "num_steps")


def row_bucket_of(rows):
    """The smallest graph size that holds this many rows."""
    return next((bucket for bucket in SMALL_BUCKETS if rows <= bucket), -(-rows // BUCKET_STEP) * BUCKET_STEP)


def prefill_rows_of(rows):
    """The smallest bucket of sequences that holds this many, for a step with prefill."""
    step = PREFILL_BUCKET_STEP
    return next((bucket for bucket in PREFILL_BUCKETS if rows <= bucket), -(-rows // step) * step)


def context_bucket_of(length):
    """The smallest power of two, at least SMALLEST_CONTEXT, that holds this context."""
    return max(SMALLEST_CONTEXT, 1 << (length - 1).bit_length())


def token_bucket_of(tokens):
    """The smallest bucket that holds so many tokens of prefill: a multiple of an eighth of the next power of two."""
    step = max(SMALLEST_TOKENS, (1 << (tokens - 1).bit_length()) // 8)
    return -(-tokens // step) * step


class StepShape(NamedTuple):
    """Sizes of a step: sequences, tokens of all, tokens that are sampled, and bounds of what its arrays hold.

    max_seqlen_q, max_context_len: tokens of a sequence in this step, and with all before it. max_group_size: sequences
    of a prefix group, 1 without any.
    """

    rows: int
    tokens: int
    sampled: int
    max_seqlen_q: int
    max_context_len: int
    max_group_size: int = 1

    def of_decode(self):
        """The bucket of decode: a token of each sequence."""
        rows = row_bucket_of(self.rows)
        return StepShape(rows, rows, rows, 1, context_bucket_of(self.max_context_len), self.max_group_size)

    def of_drafts(self, longest_verified):
        """The bucket of steps with drafts: each sequence has as many tokens as any may have, and all are sampled."""
        rows = row_bucket_of(self.rows)
        tokens = rows * longest_verified
        return StepShape(rows, tokens, tokens, longest_verified, context_bucket_of(self.max_context_len))

    def of_prefill(self):
        """The bucket of other steps, which sample a token of each sequence or none. Each added sequence has a token."""
        rows = prefill_rows_of(self.rows)
        tokens = token_bucket_of(self.tokens + rows - self.rows)
        longest = max(SMALLEST_TOKENS, 1 << (self.max_seqlen_q - 1).bit_length())
        return StepShape(rows, tokens, rows if self.sampled else 0, longest, context_bucket_of(self.max_context_len))


def most_prefill_tokens(config, max_num_batched_tokens):
    """The most tokens of a prefill step that is a graph, for a ModelConfig."""
    products = sum(block.products(config) for blocks in config.blocks for block in blocks)
    return min(MAX_PREFILL_TOKENS, LAYER_PRODUCTS * len(config.blocks) // products, max_num_batched_tokens)


def prefill_bucket(shape, max_tokens):
    """The bucket of a prefill step's StepShape; None for a step that is no graph. max_tokens: most_prefill_tokens."""
    bucket = shape.of_prefill()
    return bucket if bucket.tokens <= max_tokens and bucket.max_context_len <= MAX_PREFILL_CONTEXT else None


def pad_step(arrays, shape, block_size):
    """The arrays of a step padded to a StepShape that holds it.

    Sequences that are added have a token and no context. The tokens after them are of no sequence: for those attention
    writes nothing, and what memory holds there goes through the model, row by row, without a slot, and is not read. Nor
    is what is sampled beside: greedily, or after the first token.
    """
    added = np.arange(1, shape.rows - len(arrays["context_lens"]) + 1, dtype=np.int32)
    padded = arrays | {"cu_seqlens": np.concatenate([arrays["cu_seqlens"], arrays["cu_seqlens"][-1] + added])}
    counts = dict.fromkeys(OF_TOKENS, shape.tokens) | dict.fromkeys(OF_SEQUENCES, shape.rows)
    widths = {"block_tables": shape.max_context_len // block_size, "history": shape.max_context_len}
    widths["window_tables"] = widths["block_tables"]
    widths["state_tables"] = shape.max_context_len // STATE_BLOCK
    for name, array in arrays.items():
        size = counts.get(name, shape.sampled), *((widths[name],) if name in widths else array.shape[1:])
        if size != array.shape and name not in OF_STEP:
            padded[name] = np.full(size, PADDING.get(name, 0), array.dtype)
            padded[name][tuple(map(slice, array.shape))] = array
    return padded
