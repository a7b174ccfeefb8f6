"""Run a step: its arrays, the model over the paged KV cache, sampling; on the GPU as CUDA graphs.

The arrays of a step (steps/arrays.py) reach the device in one copy (steps/upload.py); the sampled ids and their
log-probs come back in one (`run`).

A step in which every sequence lacks one token, decode, ends with a kernel that makes of these arrays those of the next
step (kernels/decode_state.py) and writes the results to memory of the host. So `begin` launches the first of several
decode steps, `repeat` each of the others, without an upload and before the results of the one before are read, and
`wait` returns the results of one.

On the GPU steps are replayed as graphs, all but those that compute so many tokens that the host is the faster one.
Their arrays are padded to a StepShape (steps/shapes.py). The first step of a shape, a largest size of prefix groups
(blocks/prefix_groups.py) and the arrays that penalties and thresholds add runs as it is, which compiles kernels and
allocates what they need; the second is captured, and replayed from then on.
"""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from rlnumba.engine.blocks.routed_experts import RoutedExperts
from rlnumba.engine.blocks.state_pages import num_pages_for
from rlnumba.engine.blocks.window_blocks import AHEAD
from rlnumba.engine.cache import BlockSizes, KVCache, state_bytes_of
from rlnumba.engine.few_rows import FewRowsDecoder
from rlnumba.engine.requests.logprobs import Listed
from rlnumba.engine.sampler import SamplingInputs, sample_tokens, score_tokens
from rlnumba.engine.speculation import MAX_NUM_SEQS
from rlnumba.engine.steps.arrays import decode_arrays, decode_state, max_group_size_of, step_arrays, window_state
from rlnumba.engine.steps.attention import NullAttention, PagedAttention
from rlnumba.engine.steps.shapes import (
    MAX_PREFILL_CONTEXT,
    StepShape,
    context_bucket_of,
    most_prefill_tokens,
    pad_step,
    prefill_bucket,
    prefill_rows_of,
    row_bucket_of,
)
from rlnumba.engine.steps.upload import Upload
from rlnumba.errors import ConfigError
from rlnumba.kernels.attention.paged import reserve_workspace, workspace_sizes
from rlnumba.kernels.checks import unused
from rlnumba.kernels.decode_state import DecodeState, advance_decode_state, advance_window_slots, edit_decode_state
from rlnumba.kernels.tile.tensor_map import keep_tensor_maps, release_tensor_maps, reserve_tensor_maps
from rlnumba.model.adapter_stack import AdapterStack
from rlnumba.model.weights import RolloutWeights
from rlnumba.runtime import device, memory
from rlnumba.runtime.arena import Arena
from rlnumba.runtime.capture import GraphMemory, captured
from rlnumba.runtime.context import current
from rlnumba.runtime.launch import pdl_scope

# Bytes that an H200 moves in the 1.6 us from one kernel to the next, where each is a launch.
LAUNCH_BYTES = 7 << 20
# Graphs that are kept, some MiB each; those of the longest disuse go first.
MAX_GRAPHS = 128
# Freed of what others have lent after a capture that lacked memory: more than one of them.
GRAPH_BYTES = 64 << 20
# More tensor maps than one step asks for.
TENSOR_MAPS = 1 << 12
# Decode steps whose results the host has not read; the number of slots that they are written to in turn.
MAX_IN_FLIGHT = 3
# Tokens of prompts whose logits are made at a time, if no more are sampled.
SCORED_ROWS = 64
# Tokens to come that a decoding sequence gets blocks for at a time, so that these reach the device in few steps.
RESERVED_TOKENS = 64
# Where its next token has no block, which that of steps in flight has.
assert RESERVED_TOKENS + MAX_IN_FLIGHT + 2 <= AHEAD


# The part of a step that is launched at once: all of it; or its forward pass, and later, with masks, its tokens.
WHOLE, HIDDEN, TOKENS = "whole", "hidden", "tokens"


class GraphKey(NamedTuple):
    """The key of a captured graph: the step's shape, the names and widths of its arrays, and which part of it it is."""

    shape: StepShape
    arrays: tuple
    part: str


def graph_key(shape, arrays, part=WHOLE):
    """The GraphKey of a step with these padded arrays."""
    return GraphKey(shape, tuple((name, *array.shape[1:]) for name, array in arrays.items()), part)


class StepGraph:
    """The graph of the steps of one GraphKey, captured once one of them has run without it.

    tensor_maps: those that it reads, as release_tensor_maps takes them. lacked_bytes: GraphMemory.make_room's after a
    capture that lacked memory.
    """

    def __init__(self):
        self.has_run, self.graph, self.tensor_maps, self.lacked_bytes = False, None, (), None


class Decode(NamedTuple):
    """The decode steps that `begin` began: the number of sequences, the arrays on the device, and how these are run.

    shape: that of the arrays; graphs: {part of a step: StepGraph}, empty without graphs. awaits_masks: whether `repeat`
    launches a step's forward pass alone, and `draw`, which has the masks, its tokens.
    """

    sequences: int
    arrays: dict
    state: DecodeState
    shape: StepShape
    graphs: dict
    awaits_masks: bool


class Runner:
    """The model with its KV cache; computes the steps of the scheduler.

    context: the Context that all its device work runs in; max_num_batched_tokens, max_num_seqs, max_model_len: the
    largest step; eager: never capture graphs. longest_verified: most tokens of a sequence in a step with drafts, of
    which there are none if it is 0.
    """

    def __init__(
        self, model, context, block_size, max_num_batched_tokens, max_num_seqs, max_model_len, eager, longest_verified=0
    ):
        self.model, self.context, self.block_size = model, context, block_size
        self.max_num_batched_tokens, self.max_num_seqs = max_num_batched_tokens, max_num_seqs
        self.max_model_len = max_model_len
        self.eager = eager or device.name() != "cuda"
        self.arena = Arena("engine activations")
        self.few_rows = FewRowsDecoder(model, block_size)
        # What steps read in place of the weights, if they do.
        self.copies = model.weights if isinstance(model.weights, RolloutWeights) else None
        self.cache = None
        self.upload = Upload()
        # Row 0: sampled ids; row 1: their log-probs, row 2: the smallest logits that filters kept, both float32.
        self.longest_verified = longest_verified
        rows = prefill_rows_of(max_num_seqs)
        self.max_verified = row_bucket_of(min(max_num_seqs, MAX_NUM_SEQS)) * longest_verified
        self.results = device.xp().empty((3, max(rows, self.max_verified)), np.int32)
        # The same three rows of decode steps, a slot a step in turn; and edits of the host before a step
        # (edit_decode_state).
        self.published = memory.shared_with_host((MAX_IN_FLIGHT, 3, rows), np.int32)
        # With windows, those of their tables behind the others.
        most_edits = rows * (RESERVED_TOKENS // block_size + 3) * (2 if self.has_windows else 1)
        self.edits = memory.shared_with_host((MAX_IN_FLIGHT, most_edits, 3), np.int32)
        # Listings of sampled tokens, as those of `published`, once there are any; those of the last step's prompts.
        self.top, self.top_rows, self.scored = None, max(rows, self.max_verified), None
        self.raw_logprobs = False
        # RoutedExperts, where an engine returns them.
        self.routed_experts = None
        self.events = []
        if device.name() == "cuda":
            self.events = [device.xp().cuda.Event(disable_timing=True) for _ in range(MAX_IN_FLIGHT)]
        # The current decode steps, and how many of them have been launched.
        self.decode, self.num_launched = None, 0
        # Hidden states between the parts of a step that awaits masks, and pinned memory for masks, once there is one.
        self.handed = self.masks = None
        # StepGraphs by GraphKey, the latest used last, and the addresses of the buffers that they were captured with.
        self.graphs, self.graph_addresses = OrderedDict(), None
        self.graph_memory = GraphMemory("some steps of the engine", GRAPH_BYTES)
        # Numbers of steps that were replayed, captured, and run as they are.
        self.counts = {"replayed": 0, "captured": 0, "eager": 0}
        self.max_prefill_tokens = most_prefill_tokens(model.config, max_num_batched_tokens)
        # Bytes of the blocks of the cache, and of one.
        largest = max_num_seqs, max_num_batched_tokens
        self.sizes = BlockSizes.of(model.config, block_size, model.dtype, *largest)
        self.block_bytes = self.sizes.block_bytes
        # Bytes of all states of linear attention.
        verified = max(longest_verified, 1)
        self.state_bytes = state_bytes_of(model.config, max_num_seqs, model.dtype, verified)
        blocks = [block for blocks in model.blocks for block in blocks]
        # Bytes that are moved in the time in which the kernels of all layers, each a launch, follow each other.
        self.launch_bytes = sum(block.LAUNCHES for block in blocks) * LAUNCH_BYTES
        # Bytes of a row: logits and activations, each of them written and read.
        elements = sum(block.row_elements(model.config) for block in blocks)
        self.row_bytes = 8 * model.config.vocab_size + 2 * elements * model.dtype.itemsize

    @property
    def heads(self):
        """The sizes by which operators over the cache are chosen: (dtype's name, H, HK, E, block_size)."""
        config, element = self.model.config, self.model.dtype.name
        return element, config.num_attention_heads, config.num_key_value_heads, config.head_dim, self.block_size

    @property
    def has_windows(self):
        """Whether layers have a sliding window."""
        return any(map(self.model.config.window_of, range(self.model.config.num_hidden_layers)))

    def record_experts(self):
        """Keep the experts of every token that is computed from now on; before `allocate`.

        Raises ConfigError for a model without mixtures of experts.
        """
        config = self.model.config
        if not config.mixture_layers:
            raise ConfigError(f"engine.enable_return_routed_experts: a {config.model_type} model has no experts")
        self.routed_experts = RoutedExperts(config, self.block_size)

    def _lead(self, method, *arguments):
        """Let the runners of other ranks do the same, if there are any (parallel/tensor_parallel.py)."""
        if self.model.ranks is not None:
            self.model.ranks.lead(method, *arguments)

    def allocate(self, num_blocks):
        """Take the memory of a cache of num_blocks. On the GPU their number, and so the addresses, never change."""
        self._lead("allocate", num_blocks)
        self.arena.take()
        if self.cache is None:
            slots = self.max_num_seqs, num_pages_for(self.max_num_seqs), max(self.longest_verified, 1)
            sizes = num_blocks, self.block_size, self.model.dtype, *slots, self.sizes.places_of(num_blocks)
            self.cache = KVCache(self.model.config, *sizes)
        elif self.cache.num_blocks < num_blocks:
            self.cache.grow(num_blocks, self.sizes.places_of(num_blocks))
        self.cache.take()
        if self.routed_experts is not None:
            self.routed_experts.grow(num_blocks)

    def release(self, give_back):
        """Let others use the memory of cache, activations and copies of the weights: at once (True), never (False), or
        as they need it.

        give_back: None for the last. `refresh` makes the copies again.
        """
        self._lead("release", give_back)
        if self.cache is None or give_back is False:
            return
        for owner in filter(None, (self.cache, self.arena, self.copies)):
            if give_back:
                owner.give_back()
            else:
                owner.lend()

    def refresh(self):
        """Make the copies of the weights, which have been written, anew; they end before it returns."""
        self._lead("refresh")
        with self.context.use():
            self.copies.refresh()
            device.synchronize()

    def reserve_activations(self):
        """Run the largest step once without attention, which sizes the arena before the cache takes the rest."""
        self._lead("reserve_activations")
        zeros = device.asarray(np.zeros(self.max_num_batched_tokens, np.int32))
        with self.context.use(), self.arena.scope():
            hidden = self.model.forward(zeros, zeros, NullAttention(), arena=self.arena)
            rows = np.arange(self.results.shape[1], dtype=np.int32)
            ones, none = np.ones(len(rows), np.float32), np.zeros(len(rows), np.int32)
            inputs = {
                "temperature": ones, "top_k": none, "top_p": ones, "min_p": 0 * ones, "position": none,
                "philox_key": np.zeros((len(rows), 2), np.uint32), "sample_index": none, "rows": rows,
            }  # fmt: skip
            self._sample(hidden, self.upload.send(inputs), len(rows))
            device.synchronize()

    def reserve_workspace(self, cached_tokens):
        """Allocate attention's workspace, as large as any step needs; returns its bytes.

        cached_tokens: how many the cache is going to hold, which limits a sequence as max_model_len does.
        """
        self._lead("reserve_workspace", cached_tokens)
        with self.context.use():
            return reserve_workspace(*self.heads, self._largest_calls(cached_tokens, self.eager), self.has_windows)

    def workspace_bytes(self, cached_tokens, eager):
        """The bytes that reserve_workspace would return on a GPU, but for what fills the driver's pages."""
        return 4 * sum(workspace_sizes(*self.heads, self._largest_calls(cached_tokens, eager), self.has_windows))

    def _largest_calls(self, cached_tokens, eager):
        """Bounds of the largest calls of attention, as workspace_sizes takes them."""
        tokens, longest = self.max_num_batched_tokens, min(self.max_model_len, cached_tokens)
        rows, context = self.max_num_seqs if eager else row_bucket_of(self.max_num_seqs), context_bucket_of(longest)
        calls = [(self.max_num_seqs, tokens, tokens, longest), (rows, rows, 1, context)]
        if not eager:
            tokens = self.max_prefill_tokens
            padded = prefill_rows_of(self.max_num_seqs)
            calls.append((padded, tokens, tokens, min(context, MAX_PREFILL_CONTEXT)))
        if self.longest_verified:
            rows = row_bucket_of(min(self.max_num_seqs, MAX_NUM_SEQS))
            calls.append((rows, self.max_verified, self.longest_verified, context))
        return calls

    def run(self, step, table):
        """Compute a step; returns the sampled token_ids (D,) int32 and logprobs (D,) float32 on the host.

        The third is the smallest logit that filters kept, (D,) float32, or None where no sequence wants it; the fourth
        the step's Listed. The device has then done all work that it was given.
        """
        arrays = self._step_arrays(step, table)
        shape = self._shape_of(step, arrays)
        self.launch_step(arrays, shape, None if self.eager else self._bucket(step, shape, "scored_rows" in arrays))
        with self.context.use():
            results = device.to_host(self.results)
            scored = device.to_host(self.scored)[0] if "scored_rows" in arrays else None
        found = self._results(results, shape.sampled, "replay" in arrays)
        return *found, Listed(self._listed(arrays, 0, shape.sampled), scored)

    def launch_step(self, arrays, shape, bucket):
        """Launch a step of these arrays (step_arrays), of a StepShape, padded to that of a bucket or None."""
        self._lead("launch_step", arrays, shape, bucket)
        self._reserve_listings(arrays)
        if bucket is None:
            with self.context.use():
                sent = self.upload.send(arrays)
            self._compute_eagerly(sent, shape)
        else:
            graphs, sent = self._send_padded(arrays, bucket)
            self._replay(graphs[WHOLE], sent, bucket)

    def _shape_of(self, step, arrays):
        """The StepShape of a step, without padding."""
        sizes = len(step.rows), len(arrays["input_ids"]), len(step.sampled_rows)
        return StepShape(*sizes, int(step.counts.max()), int(arrays["context_lens"].max()), max_group_size_of(step))

    def _bucket(self, step, shape, scores):
        """The StepShape that a step of this shape is padded to; None if it is to be no graph, as one that `scores`
        prompts."""
        if step.has_drafts:
            return shape.of_drafts(self.longest_verified)
        if scores:
            return None
        if step.is_decode or step.prefix_groups is not None:
            return None
        return prefill_bucket(shape, self.max_prefill_tokens)

    def begin(self, step, table):
        """Launch a decode step, the first of several with the same rows; returns its number, for `wait`.

        No earlier step may be in flight. Its arrays have room for contexts up to context_bucket_of the longest one.
        """
        arrays = self._step_arrays(step, table)
        shape = self._shape_of(step, arrays)
        bucket = shape.of_decode()
        if self.eager:
            bucket = bucket._replace(rows=shape.rows, tokens=shape.rows, sampled=shape.rows)
        blocks = bucket.max_context_len // self.block_size
        arrays |= decode_arrays(step, table, blocks, self.model.config.has_linear_attention)
        self.begin_decode(arrays, bucket, shape.rows, step.allowed is not None)
        number = self.repeat()
        if self.decode.awaits_masks:
            self.draw(None)
        return number

    def begin_decode(self, arrays, bucket, sequences, awaits_masks=False):
        """Send the arrays of the first of several decode steps, padded to a StepShape."""
        self._lead("begin_decode", arrays, bucket, sequences, awaits_masks)
        self._reserve_listings(arrays)
        graphs, sent = self._send_padded(arrays, bucket, (HIDDEN, TOKENS) if awaits_masks else (WHOLE,))
        self.decode = Decode(sequences, sent, decode_state(sent), bucket, graphs, awaits_masks)
        self.num_launched = 0
        if awaits_masks and self.handed is None:
            rows = self.published[1].shape[2]
            self.handed = device.xp().empty((rows, self.model.config.hidden_size), self.model.dtype)
        if awaits_masks and (self.masks is None or self.masks.shape != sent["allowed"].shape):
            self.masks = memory.shared_with_host(sent["allowed"].shape, np.int32)[0]
            # Rows of padding may have all tokens.
            self.masks[...] = -1

    def repeat(self, edits=None):
        """Launch the step after the one launched last; returns its number, for `wait`.

        A step that awaits masks has its forward pass launched, and no step before it may be without its tokens then.
        edits (E, 3) int32: changes of the step's rows before it, as edit_decode_state takes them; with windows (E, 4),
        the block's place behind it. At most MAX_IN_FLIGHT steps may be in flight, launched and not waited for, and all
        rows must have blocks for what the step writes and for one token more.
        """
        self._lead("repeat", edits)
        number, self.num_launched = self.num_launched, self.num_launched + 1
        if self.model.ranks is not None:
            with self.context.use():
                self.model.ranks.compare_steps(self.decode.state)
        if edits is not None:
            # The step that read this slot's edits last has ended: on the first rank it has been waited for.
            if self.events:
                self.events[number % MAX_IN_FLIGHT].synchronize()
            host, on_device = (array[number % MAX_IN_FLIGHT] for array in self.edits)
            count, grouped = len(edits), self.decode.shape.max_group_size > 1
            host[:count] = edits[:, :3]
            with self.context.use():
                edit_decode_state(on_device, count, self.decode.state, grouped)
                if "window_tables" in self.decode.arrays:
                    host[count : 2 * count] = edits[:, [0, 1, 3]]
                    edit_decode_state(on_device[count:], count, window_state(self.decode.arrays), grouped)
        self.launch(HIDDEN if self.decode.awaits_masks else WHOLE)
        return number

    def draw(self, allowed):
        """Launch the tokens of the step launched last, which awaits masks.

        allowed (B, W) int32: the words of the tokens that its sequences may have, which may be the first of
        self.masks; None for those that were sent.
        """
        self._lead("draw", allowed)
        if allowed is not None:
            # The step that read them last has ended: its tokens are what these masks were made from.
            if not np.may_share_memory(allowed, self.masks):
                self.masks[: len(allowed)] = allowed
            on_device = self.decode.arrays["allowed"]
            with self.context.use():
                if device.name() == "cuda":
                    on_device.set(self.masks, self.context.stream)
                else:
                    on_device[...] = self.masks
        self.launch(TOKENS)

    @property
    def max_context_len(self):
        """The longest context that the current decode steps have room for."""
        return self.decode.shape.max_context_len

    def step_bytes(self, tokens):
        """The cost of a decode step of sequences with so many tokens together, in bytes moved."""
        return self.model.nbytes + tokens * self.block_bytes // self.block_size + self.launch_bytes

    def wasted_bytes(self, left, kept_tokens):
        """Bytes that a current decode step moves beyond those of a step with the `left` sequences that still run.

        kept_tokens: tokens of ended sequences' contexts that attention still reads.
        """
        shape = self.decode.shape
        rows, smaller = shape.rows, row_bucket_of(left)
        wasted = (rows - smaller) * self.row_bytes + kept_tokens * self.block_bytes // self.block_size
        context = shape.max_context_len
        if self.few_rows.decodes(smaller, context) and not self.few_rows.decodes(rows, context):
            wasted += self.launch_bytes
        return wasted

    def wait(self, number):
        """The results of a launched decode step, as of `run`, once the device has computed them."""
        if self.events:
            self.events[number % MAX_IN_FLIGHT].synchronize()
        slot, arrays = number % MAX_IN_FLIGHT, self.decode.arrays
        found = self._results(self.published[0][slot], self.decode.sequences, "replay" in arrays)
        return *found, Listed(self._listed(arrays, slot, self.decode.sequences))

    def synchronize(self):
        """Return once the device has done all work that it was given."""
        with self.context.use():
            device.synchronize()

    def _step_arrays(self, step, table):
        with_adapters = isinstance(self.model.adapter, AdapterStack)
        return step_arrays(step, table, self.block_size, with_adapters, self.model.config.has_linear_attention)

    def _reserve_listings(self, arrays):
        """Have room for what the arrays of a step list."""
        if names := {"num_logprobs", "scored_counts"} & {*arrays}:
            self.reserve_top(max(int(arrays[name].max()) for name in names))

    def reserve_top(self, count):
        """Have room for listings of up to `count` tokens."""
        count = min(count, self.model.config.vocab_size)
        if self.top is None or 2 + 2 * count > self.top[0].shape[2]:
            self.top = memory.shared_with_host((MAX_IN_FLIGHT, self.top_rows, 2 + 2 * count), np.int32)

    def _listed(self, arrays, slot, count):
        """The listings of a step's sampled tokens, a copy, or None."""
        return self.top[0][slot, :count].copy() if "num_logprobs" in arrays else None

    def _results(self, results, sampled, with_thresholds):
        if self.model.ranks is not None:
            # Before they are used: a gather may have waited in vain.
            self.model.ranks.communicator.check()
        logprobs, thresholds = (results[i, :sampled].view(np.float32) for i in (1, 2))
        return results[0, :sampled].copy(), logprobs.copy(), thresholds.copy() if with_thresholds else None

    def launch(self, part=WHOLE):
        """Launch the current decode step, or a part of it; the step's number, for `wait`, is that of its tokens."""
        arrays, shape = self.decode.arrays, self.decode.shape
        if self.eager:
            self._compute_eagerly(arrays, shape, part)
        else:
            self._replay(self.decode.graphs[part], arrays, shape, part)
        if self.events and part != HIDDEN:
            self.events[(self.num_launched - 1) % MAX_IN_FLIGHT].record(self.context.stream)

    def _compute_eagerly(self, arrays, shape, part=WHOLE):
        with self.context.use():
            self.compute(arrays, shape, part)
        self.counts["eager"] += 1

    def _send_padded(self, arrays, shape, parts=(WHOLE,)):
        """({part: StepGraph} of a step's arrays padded to a StepShape, empty without graphs, these on the device)."""
        padded = pad_step(arrays, shape, self.block_size)
        with self.context.use():
            sent = self.upload.send(padded)
        return {} if self.eager else {part: self._graph(graph_key(shape, padded, part)) for part in parts}, sent

    def _graph(self, key):
        """The StepGraph for a GraphKey, new if it is not known, or if buffers are not where they were."""
        if (addresses := self._addresses()) != self.graph_addresses:
            while self.graphs:
                self._drop_oldest_graph()
            self.graph_addresses = addresses
        if key not in self.graphs:
            self.graphs[key] = StepGraph()
            if len(self.graphs) > MAX_GRAPHS:
                self._drop_oldest_graph()
        self.graphs.move_to_end(key)
        return self.graphs[key]

    def _drop_oldest_graph(self):
        _, oldest = self.graphs.popitem(last=False)
        with self.context.use():
            release_tensor_maps(oldest.tensor_maps)

    def _replay(self, step_graph, arrays, shape, part=WHOLE):
        """Do what `compute` does with these arguments as a graph, captured if it has none and one has run without."""
        if not step_graph.has_run:
            # Compiles what is missing and allocates what is kept, which is not possible during a capture.
            self._compute_eagerly(arrays, shape, part)
            step_graph.has_run = True
            return
        if step_graph.graph is None and self.graph_memory.has_room(step_graph.lacked_bytes):
            self._capture(step_graph, arrays, shape, part)
            self.counts["captured"] += step_graph.graph is not None
        elif step_graph.graph is not None:
            self.counts["replayed"] += 1
        if step_graph.graph is None:
            self._compute_eagerly(arrays, shape, part)
        else:
            step_graph.graph.launch(self.context.stream)

    def _capture(self, step_graph, arrays, shape, part):
        """Record what `compute` launches as a StepGraph's graph; without memory for it, there is none."""
        with self.context.use():
            reserve_tensor_maps(TENSOR_MAPS)
            with keep_tensor_maps() as tensor_maps, pdl_scope():
                try:
                    step_graph.graph = captured(self.context.stream, lambda: self.compute(arrays, shape, part))
                except BaseException as error:
                    release_tensor_maps(tensor_maps)
                    if not isinstance(error, MemoryError):
                        raise
                    step_graph.lacked_bytes = self.graph_memory.make_room(error)
                else:
                    step_graph.tensor_maps = tensor_maps

    def _addresses(self):
        """A value that changes with the buffers that graphs read and write; the cache's addresses never change."""
        adapter = self.model.adapter
        adapters = adapter.generation if isinstance(adapter, AdapterStack) else 0
        return self.upload.generation, self.arena.address, self.top and self.top[0].ctypes.data, adapters

    def compute(self, arrays, shape, part=WHOLE):
        """Compute a step of a StepShape from its arrays, on the device, and sample its last tokens if it samples any.

        With the arrays of a decode step they are then those of the step after it. part: HIDDEN leaves the hidden states
        for TOKENS, which is the rest.
        """
        sampled, tokens = shape.sampled, len(arrays["input_ids"])
        with self.arena.scope():
            hidden = self.handed[:tokens] if part == TOKENS else self._hidden(arrays, shape)
            if part == HIDDEN:
                self.handed[:tokens] = hidden
                # CuPy's copy is not a kernel after which the next may start early.
                current().serialize_next()
                return
            if sampled:
                self._sample(hidden, arrays, sampled)
            if "scored_rows" in arrays:
                scored = [arrays[name] for name in ("scored_rows", "scored_ids", "scored_counts")]
                self.scored = device.xp().empty((1, len(scored[0]), self.top[1].shape[2]), np.int32)
                most_rows = max(self.results.shape[1], SCORED_ROWS)
                score_tokens(hidden, self.model, *scored, self.arena, self.scored, most_rows)
        if "live" in arrays:
            token_ids, logprobs, thresholds = self.results[:, :sampled]
            drawn = token_ids, logprobs, thresholds if "replay" in arrays else unused()
            state, grouped = decode_state(arrays), shape.max_group_size > 1
            advance_decode_state(*drawn, self.block_size, state, self.published[1], grouped)
            if "window_tables" in arrays:
                advance_window_slots(state, arrays["window_tables"], self.block_size, arrays["window_slots"])

    def _hidden(self, arrays, shape):
        """The hidden states (N, D) of a step, inside the arena's scope."""
        bounds = shape.max_seqlen_q, shape.max_context_len
        if self.few_rows.supports(arrays, *bounds):
            hidden = self.arena.empty((len(arrays["input_ids"]), self.model.config.hidden_size), self.model.dtype)
            self.few_rows.forward(arrays, self.cache, hidden)
            return hidden
        attention = PagedAttention(self.cache, self.model.config, arrays, *bounds, shape.max_group_size)
        adapter_ids = {"adapter_ids": arrays["adapter_ids"]} if "adapter_ids" in arrays else {}
        tokens = arrays["input_ids"], arrays["position_ids"]
        records = self.routed_experts and self.routed_experts.of_step(arrays["slot_mapping"])
        return self.model.forward(*tokens, attention, arena=self.arena, **adapter_ids, records=records)

    def _sample(self, hidden, arrays, sampled):
        names = SamplingInputs.__dataclass_fields__
        inputs = SamplingInputs(**{name: arrays[name] for name in names if name in arrays})
        if inputs.num_logprobs is not None:
            inputs.top, inputs.raw_logprobs = self.top[1], self.raw_logprobs
        logprobs, thresholds = (self.results[i, :sampled].view(np.float32) for i in (1, 2))
        outputs = self.results[0, :sampled], logprobs, thresholds
        sample_tokens(hidden, self.model, inputs, self.arena, *outputs)
