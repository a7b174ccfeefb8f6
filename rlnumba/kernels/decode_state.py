"""The state of decoding sequences on the device: what a decode step's tokens make of the arrays of the next step.

    token t was sampled for position p of row b
    results[num_steps % R, :, b] = t, its log-prob, the smallest logit that filters kept       the host reads these
    if t is one of stop_ids[b], or p + 1 >= length_limit[b]:
           live[b] = 0      slot_mapping[b] = -1      context_lens[b] = 0
    else:  input_ids[b] = t      position_ids[b] = p      context_lens[b] = p + 1      position[b] = p + 1
           slot_mapping[b] = slot of p in block_tables[b]      history[b, p] = t
           banned[b] = -1 if p + 1 >= banned_until[b]

So a step can be launched again without the host: its last kernel writes the arrays that its first ones read. A row that
is not live reads and writes no key or value, and what is sampled for it means nothing, until the host puts together a
step without it. In a step with prefix groups it keeps its context, which the others of its group read through its block
table. `edit_decode_state` applies what the host changes in between: blocks for tokens to come, and rows that end for a
reason which only the host sees, such as a stop string.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import I32, check, check_all
from rlnumba.kernels.ptx.warp import griddepcontrol_launch_dependents, griddepcontrol_wait
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, supports_pdl

THREADS = 256


class DecodeState(NamedTuple):
    """The arrays of a decode step of B rows that its tokens change, and what they are changed by; all int32.

    live (B,): whether a row goes on. input_ids, position_ids, slot_mapping, context_lens (B,), block_tables (B, W): as
    the model and paged_attention take them; a slot of -1 is not written. position (B,): as `sample` takes it.
    stop_ids (B, S), padded with -1, and length_limit (B,): what ends a row. history (B, T), banned (B, U): as the
    penalties take them, (0, 0) without. banned_until (B,): tokens from which nothing is banned. num_steps (1,): how
    often the state was advanced.
    """

    live: object
    input_ids: object
    position_ids: object
    slot_mapping: object
    context_lens: object
    block_tables: object
    position: object
    stop_ids: object
    length_limit: object
    history: object
    banned: object
    banned_until: object
    num_steps: object


@supports_pdl
@cuda.jit
def advance_decode_state_kernel(token_ids, logprobs, thresholds, block_size, keeps_context, state, results):
    """One block; a thread owns every THREADS-th row. All of them read num_steps before thread 0 increments it.

    state: a DecodeState.
    """
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    slot = state.num_steps[0] % results.shape[0]
    for row in range(cuda.threadIdx.x, state.live.shape[0], cuda.blockDim.x):
        # All loads before the first store, so that they are in flight together.
        token, logprob, is_live, p = token_ids[row], logprobs[row], state.live[row], state.position[row]
        ends = p + 1 >= state.length_limit[row]
        for i in range(state.stop_ids.shape[1]):
            if state.stop_ids[row, i] == token:
                ends = True
        column, next_slot = p // block_size, -1
        # Beyond the table's end no step follows.
        if column < state.block_tables.shape[1]:
            next_slot = state.block_tables[row, column] * block_size + p % block_size
        lifts_ban = state.banned.shape[1] > 0 and p + 1 >= state.banned_until[row]
        results[slot, 0, row] = token
        results[slot, 1, row] = logprob
        if thresholds.shape[0] > 0:
            results[slot, 2, row] = thresholds[row]
        if is_live != 0 and ends:
            state.live[row] = 0
            state.slot_mapping[row] = -1
            if keeps_context == 0:
                state.context_lens[row] = 0
        elif is_live != 0:
            state.input_ids[row] = token
            state.position_ids[row] = p
            state.context_lens[row] = p + 1
            state.position[row] = p + 1
            state.slot_mapping[row] = next_slot
            if p < state.history.shape[1]:
                state.history[row, p] = token
            if lifts_ban:
                for i in range(state.banned.shape[1]):
                    state.banned[row, i] = -1
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        state.num_steps[0] += 1


@cuda.jit
def edit_decode_state_kernel(edits, count, keeps_context, live, slot_mapping, context_lens, block_tables):
    """A thread owns an edit."""
    index = cuda.grid(1)
    if index < count:
        row, column = edits[index, 0], edits[index, 1]
        if column < 0:
            live[row] = 0
            slot_mapping[row] = -1
            if keeps_context == 0:
                context_lens[row] = 0
        else:
            block_tables[row, column] = edits[index, 2]


@cuda.jit
def advance_window_slots_kernel(position_ids, slot_mapping, tables, block_size, slots):
    """A thread owns a row."""
    row = cuda.grid(1)
    if row < slots.shape[0]:
        slot = -1
        if slot_mapping[row] >= 0:
            p = position_ids[row]
            slot = tables[row, p // block_size] * block_size + p % block_size
        slots[row] = slot


def check_state(op, state):
    """The rows of a DecodeState; ValueError for other shapes or dtypes."""
    (rows,) = check(op, "live", state.live, (None,), I32)
    vectors = "input_ids position_ids slot_mapping context_lens position length_limit banned_until"
    check_all(op, (rows,), I32, **{name: getattr(state, name) for name in vectors.split()})
    for name in ("block_tables", "stop_ids", "history", "banned"):
        array = getattr(state, name)
        check(op, name, array, (rows if array.size else None, None), I32)
    check(op, "num_steps", state.num_steps, (1,), I32)
    return rows


def advance_decode_state(token_ids, logprobs, thresholds, block_size, state, results, keeps_context=False):
    """Publish what a step of B rows sampled, and make of a DecodeState that of the next step, in place.

    token_ids (B,) int32; logprobs (B,) and thresholds (B,) or (0,): float32, passed as int32 of the same bits;
    block_size: tokens of a block. results (R, 3, at least B) int32, of which the slot num_steps % R is written: tokens,
    log-probs and, if there are any, thresholds; it may be pinned memory of the host. keeps_context: whether rows that
    end keep their context. Raises ValueError for other shapes or dtypes.
    """
    op = "advance_decode_state"
    rows = check_state(op, state)
    check_all(op, (rows,), I32, token_ids=token_ids, logprobs=logprobs)
    check(op, "thresholds", thresholds, (rows if thresholds.shape[0] else 0,), I32)
    _, _, width = check(op, "results", results, (None, 3, None), I32)
    if width < rows:
        raise ValueError(f"{op}: results must be for {rows} rows, got {width}")
    if device.name() == "cpu":
        advance_decode_state_ref(token_ids, logprobs, thresholds, block_size, state, results, keeps_context)
        return
    arguments = token_ids, logprobs, thresholds, np.int32(block_size), np.int32(keeps_context), state, results
    threads = min(THREADS, -(-max(rows, 1) // 32) * 32)
    # Attention reads some of the state before its griddepcontrol_wait.
    launch(advance_decode_state_kernel, 1, threads, *arguments, serialize_next=True)


def edit_decode_state(edits, count, state, keeps_context=False):
    """Apply the first `count` edits to a DecodeState, in place.

    edits (E, 3) int32: row, column and block, for block_tables[row, column] = block; with a column of -1 the row is not
    live any more, and has no context unless keeps_context. No two may be about the same place. They may be in pinned
    memory of the host, which must not change until the kernel has run. Raises ValueError for other shapes or dtypes.
    """
    op = "edit_decode_state"
    check_state(op, state)
    capacity, _ = check(op, "edits", edits, (None, 3), I32)
    if not 0 <= count <= capacity:
        raise ValueError(f"{op}: count must be at most {capacity}, got {count}")
    if device.name() == "cpu":
        edit_decode_state_ref(edits, count, state, keeps_context)
        return
    edited = state.live, state.slot_mapping, state.context_lens, state.block_tables
    numbers = np.int32(count), np.int32(keeps_context)
    launch(edit_decode_state_kernel, -(-count // THREADS), THREADS, edits, *numbers, *edited, serialize_next=True)


def advance_window_slots(state, tables, block_size, slots):
    """Write the slots (B,) int32 of the tokens of a DecodeState of B rows in other tables (B, W), as wide as its own.

    Those are of layers with a window, whose blocks are in other places. A row without a slot in the DecodeState has -1.
    Raises ValueError for other shapes or dtypes.
    """
    op = "advance_window_slots"
    rows = check_state(op, state)
    check(op, "tables", tables, state.block_tables.shape, I32)
    check(op, "slots", slots, (rows,), I32)
    if device.name() == "cpu":
        advance_window_slots_ref(state, tables, block_size, slots)
        return
    arguments = state.position_ids, state.slot_mapping, tables, np.int32(block_size), slots
    launch(advance_window_slots_kernel, -(-rows // THREADS), THREADS, *arguments, serialize_next=True)


def advance_decode_state_ref(token_ids, logprobs, thresholds, block_size, state, results, keeps_context=False):
    """advance_decode_state by the formulas, of all rows at once."""
    published = results[int(state.num_steps[0]) % len(results)]
    for row, values in zip(published, (token_ids, logprobs, thresholds), strict=True):
        row[: len(values)] = values
    state.num_steps[0] += 1
    ends = (state.stop_ids == token_ids[:, None]).any(axis=1) | (state.position + 1 >= state.length_limit)
    ended, goes_on = np.flatnonzero((state.live != 0) & ends), np.flatnonzero((state.live != 0) & ~ends)
    state.live[ended], state.slot_mapping[ended] = 0, -1
    if not keeps_context:
        state.context_lens[ended] = 0
    tokens, p = token_ids[goes_on], state.position[goes_on]
    state.input_ids[goes_on], state.position_ids[goes_on] = tokens, p
    state.context_lens[goes_on] = state.position[goes_on] = p + 1
    inside = p // block_size < state.block_tables.shape[1]
    blocks = state.block_tables[goes_on[inside], p[inside] // block_size]
    state.slot_mapping[goes_on] = -1
    state.slot_mapping[goes_on[inside]] = blocks * block_size + p[inside] % block_size
    inside = p < state.history.shape[1]
    state.history[goes_on[inside], p[inside]] = tokens[inside]
    if state.banned.size:
        state.banned[goes_on[p + 1 >= state.banned_until[goes_on]]] = -1


def edit_decode_state_ref(edits, count, state, keeps_context=False):
    """edit_decode_state, one edit after the other."""
    for row, column, block in edits[:count].tolist():
        if column < 0:
            state.live[row], state.slot_mapping[row] = 0, -1
            if not keeps_context:
                state.context_lens[row] = 0
        else:
            state.block_tables[row, column] = block


def advance_window_slots_ref(state, tables, block_size, slots):
    """advance_window_slots of all rows at once."""
    p, has_slot = state.position_ids, state.slot_mapping >= 0
    columns = np.where(has_slot, p // block_size, 0)
    of_tokens = tables[np.arange(len(p)), columns] * block_size + p % block_size
    slots[:] = np.where(has_slot, of_tokens, -1)
