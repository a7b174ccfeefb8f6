import numpy as np
import pytest

from rlnumba.kernels.checks import unused
from rlnumba.kernels.decode_state import (
    DecodeState,
    advance_decode_state,
    advance_decode_state_kernel,
    advance_decode_state_ref,
    advance_window_slots,
    advance_window_slots_kernel,
    edit_decode_state,
    edit_decode_state_kernel,
    edit_decode_state_ref,
)
from rlnumba.runtime import device
from rlnumba.runtime.arguments import tuple_type
from tests.close import assert_same_bits

BLOCK = 4


def i32(*values):
    return np.array(values, np.int32)


def state_of(**changes):
    """Rows: goes on within a block, begins a block, is drawn a stop id, reaches its limit, is not live."""
    arrays = {
        "live": i32(1, 1, 1, 1, 0),
        "input_ids": i32(10, 11, 12, 13, 14),
        "position_ids": i32(4, 6, 4, 8, 2),
        "slot_mapping": i32(4, 26, 12, 20, -1),
        "context_lens": i32(5, 7, 5, 9, 3),
        "block_tables": i32([0, 1, 9], [5, 6, 7], [2, 3, 9], [4, 4, 5], [1, 1, 1]),
        "position": i32(5, 7, 5, 9, 3),
        "stop_ids": i32([30, -1], [31, 32], [30, 40], [-1, -1], [30, 31]),
        "length_limit": i32(20, 20, 20, 10, 20),
        "history": np.full((5, 12), -1, np.int32),
        "banned": i32([30], [31], [-1], [-1], [30]),
        "banned_until": i32(6, 9, 0, 0, 0),
        "num_steps": i32(4),
    }
    return DecodeState(**(arrays | changes))


def on_device(state):
    return DecodeState(*(device.asarray(array.copy()) for array in state))


def to_host(state):
    return DecodeState(*map(device.to_host, state))


def assert_same_state(actual, expected):
    for name, a, b in zip(DecodeState._fields, to_host(actual), expected, strict=True):
        assert_same_bits(a, b, name)


TOKENS, LOGPROBS, THRESHOLDS = i32(20, 21, 40, 23, 30), i32(1, 2, 3, 4, 5), i32(6, 7, 8, 9, 10)


def test_by_hand():
    state, results = on_device(state_of()), device.asarray(np.zeros((3, 3, 6), np.int32))
    advance_decode_state(*map(device.asarray, (TOKENS, LOGPROBS, THRESHOLDS)), BLOCK, state, results)
    after, results = to_host(state), device.to_host(results)
    # Step 4 is in the slot 1 of three.
    assert results[1, :, :5].tolist() == [TOKENS.tolist(), LOGPROBS.tolist(), THRESHOLDS.tolist()]
    assert not results[[0, 2]].any() and not results[:, :, 5].any() and after.num_steps == 5
    assert after.live.tolist() == [1, 1, 0, 0, 0]
    assert after.input_ids.tolist() == [20, 21, 12, 13, 14]
    assert after.position_ids.tolist() == [5, 7, 4, 8, 2]
    assert after.context_lens.tolist() == [6, 8, 0, 0, 3] and after.position.tolist() == [6, 8, 5, 9, 3]
    assert after.slot_mapping.tolist() == [1 * BLOCK + 1, 6 * BLOCK + 3, -1, -1, -1]
    # Six tokens are enough for the first, and nine are wanted of the second.
    assert after.banned.tolist() == [[-1], [31], [-1], [-1], [30]]
    history = np.full((5, 12), -1)
    history[0, 5], history[1, 7] = 20, 21
    assert after.history.tolist() == history.tolist()


@pytest.mark.sim
def test_in_kernels(rng):
    test_by_hand()
    test_without_penalties_and_thresholds()
    test_at_the_end_of_the_tables()
    test_edits()
    test_members_of_prefix_groups_keep_their_contexts()
    test_several_steps_are_the_references(rng, rows=5, threads_past=1)


def test_without_penalties_and_thresholds():
    """Arrays of penalties that are left out, and results of fewer rows."""
    nothing = {"history": np.zeros((0, 0), np.int32), "banned": np.zeros((0, 0), np.int32)}
    state, results = on_device(state_of(**nothing)), device.asarray(np.zeros((2, 3, 5), np.int32))
    advance_decode_state(*map(device.asarray, (TOKENS, LOGPROBS)), unused(), BLOCK, state, results)
    assert device.to_host(results)[0].tolist() == [TOKENS.tolist(), LOGPROBS.tolist(), [0] * 5]
    assert device.to_host(state.live).tolist() == [1, 1, 0, 0, 0]


def test_at_the_end_of_the_tables():
    """A context that fills the tables: no step with these arrays follows, and nothing outside of them is written."""
    changes = {"position": i32(12, 12, 12, 12, 12), "length_limit": i32(*[20] * 5), "stop_ids": np.full((5, 0), 0)}
    changes["stop_ids"] = changes["stop_ids"].astype(np.int32)
    state, results = on_device(state_of(**changes)), device.asarray(np.zeros((1, 3, 5), np.int32))
    advance_decode_state(*map(device.asarray, (TOKENS, LOGPROBS)), unused(), BLOCK, state, results)
    after = to_host(state)
    assert after.position.tolist() == [13, 13, 13, 13, 12] and (after.history == -1).all()
    assert after.slot_mapping.tolist() == [-1] * 5


def test_edits():
    state, edits = on_device(state_of()), i32([0, 2, 8], [1, -1, 0], [3, 0, 6], [2, 1, 77])
    edit_decode_state(device.asarray(edits), 3, state)
    edit_decode_state(device.asarray(edits), 0, state)
    after, expected = to_host(state), state_of()
    expected.block_tables[0, 2], expected.block_tables[3, 0] = 8, 6
    expected.live[1], expected.slot_mapping[1], expected.context_lens[1] = 0, -1, 0
    assert_same_state(after, expected)


def test_members_of_prefix_groups_keep_their_contexts():
    state, results = on_device(state_of()), device.asarray(np.zeros((3, 3, 6), np.int32))
    drawn = map(device.asarray, (TOKENS, LOGPROBS, THRESHOLDS))
    advance_decode_state(*drawn, BLOCK, state, results, keeps_context=True)
    edit_decode_state(device.asarray(i32([1, -1, 0])), 1, state, keeps_context=True)
    after = to_host(state)
    assert after.live.tolist() == [1, 0, 0, 0, 0] and after.context_lens.tolist() == [6, 8, 5, 9, 3]


def random_state(rng, rows):
    limit = rng.integers(6, 16, rows).astype(np.int32)
    position = np.minimum(rng.integers(1, 10, rows), limit - 1).astype(np.int32)
    return state_of(
        live=(rng.random(rows) < 0.8).astype(np.int32),
        input_ids=rng.integers(0, 20, rows).astype(np.int32),
        position_ids=position - 1,
        slot_mapping=rng.integers(0, 99, rows).astype(np.int32),
        context_lens=position.copy(),
        block_tables=rng.integers(0, 99, (rows, 4)).astype(np.int32),
        position=position,
        stop_ids=rng.integers(-1, 20, (rows, 3)).astype(np.int32),
        length_limit=limit,
        history=rng.integers(-1, 20, (rows, 16)).astype(np.int32),
        banned=rng.integers(-1, 20, (rows, 3)).astype(np.int32),
        banned_until=rng.integers(0, 16, rows).astype(np.int32),
        num_steps=i32(int(rng.integers(5))),
    )


def test_several_steps_are_the_references(rng, rows=300, threads_past=4):
    """More rows than the block has threads, on the GPU; in the simulator the block's size is that of few rows."""
    expected = random_state(rng, rows)
    state = on_device(expected)
    expected_results = np.zeros((3, 3, rows + threads_past), np.int32)
    results = device.asarray(expected_results.copy())
    for _ in range(4):
        sampled = [rng.integers(0, 20, rows).astype(np.int32) for _ in range(3)]
        advance_decode_state(*map(device.asarray, sampled), BLOCK, state, results)
        advance_decode_state_ref(*sampled, BLOCK, expected, expected_results)
        edits = np.stack([rng.permutation(rows), rng.integers(-1, 4, rows), rng.integers(0, 99, rows)], axis=1)
        edits = edits.astype(np.int32)
        edit_decode_state(device.asarray(edits), rows // 8, state)
        edit_decode_state_ref(edits, rows // 8, expected)
        assert_same_state(state, expected)
        assert_same_bits(device.to_host(results), expected_results)
    assert 0 < expected.live.sum() < rows or rows < 8


def test_machine_code(compile_offline):
    vector, matrix, cube = "int32[::1]", "int32[:,::1]", "int32[:,:,::1]"
    fields = [matrix if name in ("block_tables", "stop_ids", "history", "banned") else vector for name in FIELDS]
    types = (vector, vector, vector, "int32", "int32", tuple_type(DecodeState, *fields), cube)
    for architecture in ((8, 0), (9, 0)):
        assert not compile_offline(advance_decode_state_kernel, types, architecture)
        assert not compile_offline(
            edit_decode_state_kernel, (matrix, "int32", "int32", *[vector] * 3, matrix), architecture
        )
        types_of_slots = vector, vector, matrix, "int32", vector
        assert not compile_offline(advance_window_slots_kernel, types_of_slots, architecture)


FIELDS = DecodeState._fields


def test_wrong_arguments_are_named():
    state, results = on_device(state_of()), device.asarray(np.zeros((3, 3, 6), np.int32))
    sampled = [device.asarray(TOKENS) for _ in range(3)]
    with pytest.raises(ValueError, match=r"advance_decode_state: results must be for 5 rows, got 4"):
        advance_decode_state(*sampled, BLOCK, state, device.asarray(np.zeros((3, 3, 4), np.int32)))
    with pytest.raises(ValueError, match=r"advance_decode_state: position must be \(5\) int32"):
        advance_decode_state(*sampled, BLOCK, state._replace(position=sampled[0][:4]), results)
    with pytest.raises(ValueError, match=r"edit_decode_state: count must be at most 2, got 3"):
        edit_decode_state(device.asarray(np.zeros((2, 3), np.int32)), 3, state)


def test_slots_in_the_tables_of_windows():
    """The row of each token is that of its place: a row that is not live has none."""
    tables, slots = i32([8, 3, 9], [5, 2, 7], [1, 1, 1], [4, 4, 4], [6, 6, 6]), i32(50, 51, 52, 53, 54)
    state, found = on_device(state_of(slot_mapping=i32(4, 26, -1, 20, -1))), device.asarray(slots)
    advance_window_slots(state, device.asarray(tables), BLOCK, found)
    # Positions 4, 6, 4, 8 and 2, in blocks of 4.
    assert device.to_host(found).tolist() == [12, 10, -1, 16, -1]


@pytest.mark.sim
def test_slots_in_the_tables_of_windows_in_the_simulator():
    test_slots_in_the_tables_of_windows()
