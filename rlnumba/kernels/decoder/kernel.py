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

from rlnumba.kernels.decoder.activations import COMPLETE, copy_function, norm_function, vector_address
from rlnumba.kernels.decoder.attention import Rows, attend_function, produce_kv_function
from rlnumba.kernels.decoder.config import (
    CLEARING_THREADS,
    CLEARING_WARP,
    KV_STAGES,
    KV_WARP,
    STAGES,
    THREADS,
    WEIGHTS_WARP,
)
from rlnumba.kernels.decoder.exchange import UNWRITTEN
from rlnumba.kernels.decoder.phases import At, load_residual_function, produce_function, residual_phase, rounded_phase
from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.pipeline import FIRST_EMPTY, FIRST_FULL, ring, shared_base
from rlnumba.kernels.ptx.semaphore import atomic_add_acq_rel
from rlnumba.kernels.ptx.shared_memory import fence_proxy_async, load_words
from rlnumba.kernels.ptx.warp import device_function, vector_access
from rlnumba.kernels.ptx.wgmma import WARPGROUP
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import specialize

i32 = np.int32

# Where the kernel of this module compiles.
ARCHITECTURES = [(9, 0, "a")]
# Arrays that the computing warps read and write. norms: int32 words of all norm weights, those of a layer norm_words
# behind those of the layer before; input_norm and so on: where they are in a layer, and norm that of the last one.
Arrays = namedtuple(
    "Arrays",
    "embeddings norms input_norm post_norm q_norm k_norm norm norm_words input_ids cos sin k_cache v_cache exchange",
)


@functools.cache
def weights_function(config):
    """The device function of the thread that loads all weights of all layers, in the order in which they are used."""
    produce_qkv, produce_o = produce_function(config.qkv), produce_function(config.o)
    produce_gate_up, produce_down = produce_function(config.gate_up, config.ffn), produce_function(config.down)
    layers = config.layers

    @device_function
    def load_weights(qkv_map, o_map, gate_up_map, down_map, target, full, empty):
        stage, parity = FIRST_EMPTY
        for layer in range(layers):
            at = i32(layer)
            stage, parity = produce_qkv(qkv_map, at, target, full, empty, stage, parity)
            stage, parity = produce_o(o_map, at, target, full, empty, stage, parity)
            stage, parity = produce_gate_up(gate_up_map, at, target, full, empty, stage, parity)
            stage, parity = produce_down(down_map, at, target, full, empty, stage, parity)

    return load_weights


@functools.cache
def compute_function(config):
    """The device function of the computing warps: all layers, and the last norm."""
    layers, rows, hidden, element, words_of = config.layers, config.rows, config.hidden, config.element, config.exchange
    layout, qkv, o, gate_up, down = config.layout, config.qkv, config.o, config.gate_up, config.down
    qkv_count, hidden_count, gate_up_count = qkv.columns // 2, o.columns // 2, gate_up.columns // 2
    word_count, load_embeddings, load_hidden, normalise = norm_function(config.norm_layout, rows, element)
    copy_attended = copy_function(rows, config.heads * config.head_dim)
    copy_activated, load_residual = copy_function(rows, config.ffn), load_residual_function(o, rows, element)
    compute_qkv, compute_o = rounded_phase(qkv, rows, element), residual_phase(o, rows, element)
    compute_gate_up = rounded_phase(gate_up, rows, element, swiglu=True)
    compute_down = residual_phase(down, rows, element)
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
    def compute(arrays, batch, out, eps, c, first_word, base, thread):
        """first_word: where the exchange's set of this step begins."""
        a, squares, exchange, norms = base + layout.a, base + layout.squares, arrays.exchange, arrays.norms
        ring_of_weights = base + layout.ring, base + layout.full, base + layout.empty
        at = At(thread, thread >> i32(5), thread & i32(31), *ring_of_weights, base + layout.residual)
        words = cuda.local.array(word_count, np.int32)
        qkv_acc, gate_up_acc = cuda.local.array(qkv_count, np.float32), cuda.local.array(gate_up_count, np.float32)
        hidden_acc = cuda.local.array(hidden_count, np.float32)
        for i in range(qkv_count):
            qkv_acc[i] = np.float32(0.0)
        for i in range(gate_up_count):
            gate_up_acc[i] = np.float32(0.0)
        for i in range(hidden_count):
            hidden_acc[i] = np.float32(0.0)
        stage, parity = FIRST_FULL
        kv_stage, kv_parity = FIRST_FULL
        load_residual(arrays.embeddings, arrays.input_ids, at)
        load_embeddings(arrays.embeddings, arrays.input_ids, words, thread)
        for layer in range(layers):
            first, norm_at = i32(first_word + layer * words_of.words), i32(layer * arrays.norm_words)
            normalise(words, norms, i32(norm_at + arrays.input_norm), eps, a, squares, thread)
            complete()
            stage, parity = compute_qkv(qkv_acc, a, at, exchange, i32(first + words_of.qkv), stage, parity)
            kv_stage, kv_parity = attend(
                i32(layer), exchange, i32(first + words_of.qkv), i32(first + words_of.attended),
                norms, i32(norm_at + arrays.q_norm), i32(norm_at + arrays.k_norm), arrays.cos, arrays.sin,
                batch, arrays.k_cache, arrays.v_cache, eps, c, base, kv_stage, kv_parity, thread,
            )  # fmt: skip
            done_with_a()
            copy_attended(exchange, i32(first + words_of.attended), a, thread)
            complete()
            stage, parity = compute_o(hidden_acc, a, at, exchange, i32(first + words_of.h), stage, parity)
            load_hidden(exchange, i32(first + words_of.h), words, thread)
            done_with_a()
            normalise(words, norms, i32(norm_at + arrays.post_norm), eps, a, squares, thread)
            complete()
            stage, parity = compute_gate_up(
                gate_up_acc, a, at, exchange, i32(first + words_of.activated), stage, parity
            )  # fmt: skip
            done_with_a()
            copy_activated(exchange, i32(first + words_of.activated), a, thread)
            complete()
            stage, parity = compute_down(hidden_acc, a, at, exchange, i32(first + words_of.x), stage, parity)
            load_hidden(exchange, i32(first + words_of.x), words, thread)
            done_with_a()
        normalise(words, norms, arrays.norm, eps, a, squares, thread)
        done_with_a()
        write_hidden(out, a, thread)

    return compute


@device_function
def clear(exchange, first, count, thread):
    """Set the words of the other set to UNWRITTEN, by CLEARING_THREADS threads of every block."""
    index = i32(cuda.blockIdx.x * CLEARING_THREADS + thread)
    while index < count:
        exchange[first + index] = UNWRITTEN
        index = i32(index + cuda.gridDim.x * CLEARING_THREADS)


@specialize
def decoder_kernel(config):
    """The kernel of a DecoderConfig, whose blocks must all be resident at once."""
    layout, set_words = config.layout, config.set_words
    (init_ring, _), (init_kv_ring, _) = ring(STAGES), ring(KV_STAGES)
    load_weights, compute, produce_kv = weights_function(config), compute_function(config), produce_kv_function(config)
    layers = config.layers

    @cuda.jit(launch_bounds=(THREADS, 1))
    def decoder_kernel(
        qkv_map, o_map, gate_up_map, down_map, k_map, v_map, embeddings, norms, input_norm, post_norm, q_norm, k_norm,
        norm, norm_words, input_ids, position_ids, context_lens, slot_mapping, block_tables, block_size, kv_slots,
        cos, sin, k_cache, v_cache, exchange, state, out, eps, c,
    ):  # fmt: skip
        """Warps 0 to 3 compute; one loads weights, one loads K and V, two clear the exchange for the next step."""
        thread = i32(cuda.threadIdx.x)
        warp = sm90.warp_uniform(thread >> i32(5))
        base = shared_base()
        full, empty = base + layout.full, base + layout.empty
        kv_full, kv_empty = base + layout.kv_full, base + layout.kv_empty
        if thread == 0:
            init_ring(full, empty, 1, 1)
            init_kv_ring(kv_full, kv_empty, 1, 1)
            sm90.mbarrier_init_fence()
        current = i32(state[0])
        cuda.syncthreads()
        batch = Rows(position_ids, context_lens, slot_mapping, block_tables, block_size, kv_slots)
        if warp < WEIGHTS_WARP:
            arrays = Arrays(
                embeddings, norms, input_norm, post_norm, q_norm, k_norm, norm, norm_words, input_ids, cos, sin,
                k_cache, v_cache, exchange,
            )  # fmt: skip
            compute(arrays, batch, out, eps, c, i32(current * set_words), base, thread)
            # Every block has read which set is current: the last one to come here makes the other one so.
            if thread == 0 and i32(atomic_add_acq_rel(state, 1) + 1) == cuda.gridDim.x:
                state[0], state[1] = i32(1 - current), i32(0)
        elif warp == WEIGHTS_WARP:
            if thread & i32(31) == 0:
                maps = sm90.tensor_map_address(qkv_map), sm90.tensor_map_address(o_map)
                more = sm90.tensor_map_address(gate_up_map), sm90.tensor_map_address(down_map)
                load_weights(maps[0], maps[1], more[0], more[1], base + layout.ring, full, empty)
        elif warp == KV_WARP:
            k_source, v_source = sm90.tensor_map_address(k_map), sm90.tensor_map_address(v_map)
            stage, parity = FIRST_EMPTY
            for layer in range(layers):
                stage, parity = produce_kv(
                    k_source, v_source, i32(layer), batch, base + layout.kv, kv_full, kv_empty, stage, parity,
                    thread & i32(31),
                )  # fmt: skip
        else:
            clear(exchange, i32((1 - current) * set_words), set_words, i32(thread - CLEARING_WARP * 32))

    return decoder_kernel
