"""The persistent decoder kernel: all layers of one decode step of up to eight sequences, in one launch.

For few rows a layer's kernels are short, and most of their time is the hand-over from one to the next. Here as many
blocks as the GPU has SMs stay for the whole step and walk the same schedule, layer by layer:

    qkv        x of the layer before, normalised      -> columns of q | k | v          every block a tile of columns
    attention  q, k, v of a row and key head          -> attended                      a block for each of these
    o          attended                               -> h = x + o                     every block a tile of columns
    gate_up    h, normalised                          -> silu(gate) * up               every block a tile of columns
    down       silu(gate) * up                        -> x = h + down                  every block a tile of columns

Blocks hand activations over by the exchange (exchange.py), weights arrive ahead of time (phases.py), so do keys and
values (attention.py). The block that has columns of h has the same of x: the residual stream never leaves it.

The arithmetic of every operator is that of its own kernel, so hidden states have the bits of the other kernels'.
"""

import functools
from collections import namedtuple

import numpy as np

from rlnumba.kernels.decoder.activations import COMPLETE, norm_function, vector_address
from rlnumba.kernels.decoder.attention import attend_function, produce_kv_function
from rlnumba.kernels.decoder.config import PRODUCER_WARP, THREADS
from rlnumba.kernels.decoder.exchange import SECTOR_WORDS, UNWRITTEN, prefetch_l2
from rlnumba.kernels.decoder.phases import At, load_residual_function, produce_function, residual_phase, rounded_phase
from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.semaphore import atomic_add_acq_rel
from rlnumba.kernels.ptx.shared_memory import fence_proxy_async, load_words
from rlnumba.kernels.ptx.warp import device_function, vector_access
from rlnumba.kernels.ptx.wgmma import WARPGROUP
from rlnumba.kernels.tile.pipeline import FIRST_EMPTY, FIRST_FULL, ring, shared_base
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import specialize

i32 = np.int32

# Architectures that the kernel of this module compiles for.
ARCHITECTURES = [(9, 0, "a")]
TensorMaps = namedtuple("TensorMaps", "qkv o gate_up down k v")
# Arrays that the computing warps read and write. norms: int32 words of all norm weights, those of a layer norm_words
# behind those of the layer before; input_norm and so on: where they are in a layer, and norm that of the last one.
Arrays = namedtuple(
    "Arrays",
    "embeddings norms input_norm post_norm q_norm k_norm norm norm_words input_ids cos sin k_cache v_cache exchange",
)


@functools.cache
def producer_function(config):
    """The device function of the warp that loads all weights, keys and values, in the order in which they are used."""
    layers, stages = config.layers, config.stages
    produce_qkv, produce_o = produce_function(config.qkv, stages), produce_function(config.o, stages)
    produce_gate_up = produce_function(config.gate_up, stages, config.ffn)
    produce_down, produce_kv = produce_function(config.down, stages), produce_kv_function(config)

    @device_function
    def produce(maps, batch, at):
        qkv_map, o_map = sm90.tensor_map_address(maps.qkv), sm90.tensor_map_address(maps.o)
        gate_up_map, down_map = sm90.tensor_map_address(maps.gate_up), sm90.tensor_map_address(maps.down)
        k_map, v_map = sm90.tensor_map_address(maps.k), sm90.tensor_map_address(maps.v)
        stage, parity = FIRST_EMPTY
        for index in range(layers):
            layer = i32(index)
            stage, parity = produce_qkv(qkv_map, layer, at, stage, parity)
            stage, parity = produce_kv(k_map, v_map, layer, batch, at, stage, parity)
            stage, parity = produce_o(o_map, layer, at, stage, parity)
            stage, parity = produce_gate_up(gate_up_map, layer, at, stage, parity)
            stage, parity = produce_down(down_map, layer, at, stage, parity)

    return produce


@functools.cache
def compute_function(config):
    """The device function of the computing warps: all layers, and the last norm."""
    layers, rows, hidden, element, words_of = config.layers, config.rows, config.hidden, config.element, config.exchange
    layout, qkv, o, gate_up, down = config.layout, config.qkv, config.o, config.gate_up, config.down
    qkv_count, hidden_count, gate_up_count = qkv.columns // 2, o.columns // 2, gate_up.columns // 2
    stages, load_residual = config.stages, load_residual_function(o, rows, element)
    word_count, weight_words, *functions = norm_function(config.norm_layout, rows, element)
    load_embeddings, load_hidden, load_weights, normalise = functions
    compute_qkv, compute_o = rounded_phase(qkv, rows, stages, element), residual_phase(o, rows, stages, element)
    compute_gate_up = rounded_phase(gate_up, rows, stages, element, swiglu=True)
    compute_down = residual_phase(down, rows, stages, element)
    attend, (_, store_four) = attend_function(config), vector_access(4, 4)

    @device_function
    def complete():
        """All of A is in shared memory, for wgmma to read."""
        fence_proxy_async()
        sm90.named_barrier_sync(COMPLETE, WARPGROUP)

    @device_function
    def done_with_a():
        """All warps have waited for wgmma, so that A may be written again."""
        sm90.named_barrier_sync(COMPLETE, WARPGROUP)

    @device_function
    def write_hidden(out, a, thread):
        """Block r writes row r of the normalised rows."""
        row, vector = i32(cuda.blockIdx.x), thread
        kept = cuda.local.array(4, np.int32)
        while row < rows:
            while vector * 8 < hidden:
                kept[0], kept[1], kept[2], kept[3] = load_words(vector_address(a, row, i32(vector * 8)))
                store_four(out, i32(row * (hidden // 2) + vector * 4), kept, 0)
                vector = i32(vector + WARPGROUP)
            row, vector = i32(row + cuda.gridDim.x), thread

    @device_function
    def compute(arrays, batch, out, eps, c, first_word, base, at):
        """first_word: where the exchange's set of this step begins."""
        a, squares, exchange, norms = base + layout.a, base + layout.squares, arrays.exchange, arrays.norms
        words, weights = cuda.local.array(word_count, np.int32), cuda.local.array(weight_words, np.int32)
        qkv_acc, gate_up_acc = cuda.local.array(qkv_count, np.float32), cuda.local.array(gate_up_count, np.float32)
        hidden_acc = cuda.local.array(hidden_count, np.float32)
        for i in range(qkv_count):
            qkv_acc[i] = np.float32(0.0)
        for i in range(gate_up_count):
            gate_up_acc[i] = np.float32(0.0)
        for i in range(hidden_count):
            hidden_acc[i] = np.float32(0.0)
        stage, parity = FIRST_FULL
        load_residual(arrays.embeddings, arrays.input_ids, at)
        load_weights(norms, arrays.input_norm, weights, at.thread)
        load_embeddings(arrays.embeddings, arrays.input_ids, words, at.thread)
        for layer in range(layers):
            first, norm_at = i32(first_word + layer * words_of.words), i32(layer * arrays.norm_words)
            qkv_at, attended_at, h_at = first + words_of.qkv, first + words_of.attended, first + words_of.h
            activated_at, x_at = first + words_of.activated, first + words_of.x
            normalise(words, weights, eps, a, squares, at.thread)
            complete()
            stage, parity = compute_qkv(qkv_acc, a, at, exchange, i32(qkv_at), stage, parity)
            stage, parity = attend(
                i32(layer), arrays, batch, i32(qkv_at), i32(attended_at), i32(norm_at), eps, c, base, at, stage, parity
            )  # fmt: skip
            done_with_a()
            stage, parity = compute_o(hidden_acc, a, at, exchange, i32(attended_at), i32(h_at), stage, parity)
            load_weights(norms, i32(norm_at + arrays.post_norm), weights, at.thread)
            load_hidden(exchange, i32(h_at), words, at.thread)
            done_with_a()
            normalise(words, weights, eps, a, squares, at.thread)
            complete()
            stage, parity = compute_gate_up(gate_up_acc, a, at, exchange, i32(activated_at), stage, parity)
            done_with_a()
            stage, parity = compute_down(hidden_acc, a, at, exchange, i32(activated_at), i32(x_at), stage, parity)
            following = i32(norm_at + arrays.norm_words + arrays.input_norm)
            load_weights(norms, following if layer + 1 < layers else arrays.norm, weights, at.thread)
            load_hidden(exchange, i32(x_at), words, at.thread)
            done_with_a()
        normalise(words, weights, eps, a, squares, at.thread)
        done_with_a()
        write_hidden(out, a, at.thread)

    return compute


@device_function
def prepare_exchange(exchange, current, other, count, lane):
    """Fetch the words of the current set to L2, then set those of the other one to UNWRITTEN, by a warp of a block."""
    first, step = i32(cuda.blockIdx.x * 32 + lane), i32(cuda.gridDim.x * 32)
    index = i32(first * SECTOR_WORDS)
    while index < count:
        prefetch_l2(exchange, i32(current + index))
        index = i32(index + step * SECTOR_WORDS)
    index = first
    while index < count:
        exchange[other + index] = UNWRITTEN
        index = i32(index + step)


@specialize
def decoder_kernel(config):
    """The kernel of a DecoderConfig, whose blocks must all be resident at once."""
    layout, set_words, (init_ring, _) = config.layout, config.set_words, ring(config.stages)
    produce, compute = producer_function(config), compute_function(config)

    @cuda.jit(launch_bounds=(THREADS, 1))
    def decoder_kernel(maps, batch, arrays, state, out, eps, c):
        """Warps 0 to 3 compute, one loads weights, keys and values, one prepares the exchange.

        maps: TensorMaps; batch: Rows; arrays: Arrays; state: which set of the exchange is current, and how many blocks
        have begun; out: int32 words of the normalised rows.
        """
        thread = i32(cuda.threadIdx.x)
        warp = sm90.warp_uniform(thread >> i32(5))
        base = shared_base()
        full, empty = base + layout.full, base + layout.empty
        if thread == 0:
            init_ring(full, empty, 1, 1)
            sm90.mbarrier_init_fence()
        current = i32(state[0])
        cuda.syncthreads()
        at = At(thread, warp, thread & i32(31), base + layout.ring, full, empty, base + layout.residual)
        if warp < PRODUCER_WARP:
            compute(arrays, batch, out, eps, c, i32(current * set_words), base, at)
            # Every block has read which set is current: the last one to come here makes the other one so.
            if thread == 0 and i32(atomic_add_acq_rel(state, 1) + 1) == cuda.gridDim.x:
                state[0], state[1] = i32(1 - current), i32(0)
        elif warp == PRODUCER_WARP:
            produce(maps, batch, at)
        else:
            other = i32((1 - current) * set_words)
            prepare_exchange(arrays.exchange, i32(current * set_words), other, set_words, at.lane)

    return decoder_kernel
