"""The sharded optimizer: weights, norms and state have the bits of one rank's, whatever the number of ranks."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.checkpoint import ArrayPart
from rlnumba.errors import UserError
from rlnumba.kernels.nn import reduce
from rlnumba.kernels.optim.adamw_8bit import BLOCK
from rlnumba.optim import AdamWConfig, Optimizer
from rlnumba.parallel import launch
from rlnumba.parallel.gradient_fold import rounds
from rlnumba.parallel.zero import Part, ShardedOptimizer
from rlnumba.runtime import device
from tests.close import assert_same_bits
from tests.parallel import in_threads

SEGMENT = 2 * BLOCK
OPTIMS = ["adamw_torch", "adamw_bf16", "adamw_8bit"]
STEPS = 4


@dataclasses.dataclass
class Weights:
    flat: object
    decay_end: int


def weights_of(size, dtype):
    start = np.random.default_rng(1).standard_normal(size).astype(device.dtype(dtype))
    return Weights(device.asarray(start), size * 2 // 3)


def gradient_of(step, k, size):
    """The gradient of a micro-batch; that of step 2 is not finite in one element."""
    gradient = np.random.default_rng([step, k]).standard_normal(size, np.float32)
    gradient[::13] *= 1000
    if step == 2 and k == 1:
        gradient[size // 2] = np.inf
    return gradient


def on_one(size, dtype, micro_batches, options, steps=range(STEPS), state=None):
    """(weights, state, norms) after steps of Optimizer, gradients added by NumPy."""
    weights, grads = weights_of(size, dtype), Weights(device.xp().zeros(size, np.float32), 0)
    optimizer = Optimizer(weights, grads, AdamWConfig(**options))
    if state is not None:
        weights.flat[...] = device.asarray(state[0])
        optimizer.load_state_dict(state[1])
    norms = []
    for step in steps:
        total = gradient_of(step, 0, size)
        for k in range(1, micro_batches):
            total = total + gradient_of(step, k, size)
        grads.flat[...] = device.asarray(total)
        norms.append(float(optimizer.step(0.01)))
    return device.to_host(weights.flat).copy(), optimizer.state_dict(), norms


def on_rank(communicator, size, dtype, micro_batches, options, steps=range(STEPS), state=None, segment=SEGMENT):
    """The same of ShardedOptimizer; every rank has the gradients of its micro-batches alone."""
    reduce.SEGMENT = segment
    world_size, rank = communicator.world_size, communicator.rank
    weights = weights_of(size, dtype)
    optimizer = ShardedOptimizer(weights, communicator, AdamWConfig(**options))
    if state is not None:
        weights.flat[...] = device.asarray(state[0])
        optimizer.load_state_dict(state[1])
    norms = []
    for step in steps:
        for first in range(0, micro_batches, world_size):
            count = min(world_size, micro_batches - first)
            own = device.asarray(gradient_of(step, first + rank, size)) if rank < count else None
            optimizer.fold(own, count, first == 0)
        norms.append(float(optimizer.step(0.01)))
    assert optimizer.skipped_steps == int(2 in steps and micro_batches > 1)
    return device.to_host(weights.flat).copy(), optimizer.state_dict(), norms


def whole(states):
    """What one rank would have of the state of which each rank has ArrayParts, which follow one another."""
    found = dict(states[0])
    for name, first in states[0].items():
        if isinstance(first, ArrayPart):
            parts = [state[name] for state in states]
            ends = np.cumsum([len(part.values) for part in parts])
            assert all(not len(p.values) or p.start == end - len(p.values) for p, end in zip(parts, ends, strict=True))
            assert {part.size for part in parts} == {ends[-1]}
            found[name] = np.concatenate([part.values for part in parts])
    return found


def check_same(found, expected):
    weights, state, norms = expected
    for rank, (own_weights, own_state, own_norms) in enumerate(found):
        assert_same_bits(own_weights, weights, f"weights of rank {rank}")
        np.testing.assert_array_equal(own_norms, norms)
        assert own_state.keys() == state.keys()
    own_state = whole([own_state for _, own_state, _ in found])
    assert own_state.keys() == state.keys()
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            assert_same_bits(own_state[name], value, name)
        else:
            assert own_state[name] == value, name


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(reduce, "SEGMENT", SEGMENT)


def test_parts_are_whole_segments():
    for size in (1, SEGMENT, 5 * SEGMENT + 3, 8 * SEGMENT):
        for world_size in range(1, 9):
            parts = [Part.of(size, rank, world_size) for rank in range(world_size)]
            assert [part.start for part in parts[1:]] + [size] == [part.stop for part in parts]
            assert parts[0].start == 0 and all(part.start % SEGMENT == 0 or not part.size for part in parts)
            assert parts[0].size == max(part.size for part in parts)


# Segments: fewer than ranks, as many, more, with a last one that is shorter.
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [SEGMENT // 2, 3 * SEGMENT, 6 * SEGMENT + 300])
def test_the_bits_of_one_rank(size, world_size):
    for micro_batches in (1, 5):
        case = size, "bfloat16", micro_batches, {}
        check_same(in_threads.run(on_rank, world_size, *case), on_one(*case))


@pytest.mark.parametrize("optim", OPTIMS)
@pytest.mark.parametrize("dtype, options", [("float32", {}), ("bfloat16", {"master_weights": False}), ("bfloat16", {})])
@pytest.mark.parametrize("offload", [False, True])
def test_every_optimizer(dtype, options, optim, offload):
    """Random bits of rounding follow from an element's place in the model, not in a part."""
    case = 5 * SEGMENT + 128, dtype, 3, {"optim": optim, "offload": offload, "seed": 7, **options}
    check_same(in_threads.run(on_rank, 2, *case), on_one(*case))


@pytest.mark.parametrize("optim", OPTIMS)
@pytest.mark.parametrize("before, after", [(3, 2), (2, 4), (4, 1)])
def test_a_state_continues_on_another_number_of_ranks(before, after, optim):
    case = 5 * SEGMENT + 128, "bfloat16", 3, {"optim": optim}
    ranks = in_threads.run(on_rank, before, *case, range(2))
    weights, state = ranks[0][0], whole([state for _, state, _ in ranks])
    found = in_threads.run(on_rank, after, *case, range(2, STEPS), (weights, state))
    expected = on_one(*case)
    check_same(found, (*expected[:2], expected[2][2:]))
    # And by the optimizer of one rank.
    check_same([on_one(*case, range(2, STEPS), (weights, state))], (*expected[:2], expected[2][2:]))


def test_pieces_of_what_is_moved(monkeypatch):
    monkeypatch.setattr("rlnumba.parallel.zero.PIECE_SEGMENTS", 1)
    case = 7 * SEGMENT + 128, "bfloat16", 2, {"optim": "adamw_8bit"}
    check_same(in_threads.run(on_rank, 2, *case), on_one(*case))


def test_the_first_rank_has_the_master_weights_of_all_in_pieces(monkeypatch):
    monkeypatch.setattr("rlnumba.parallel.zero.PIECE_SEGMENTS", 1)

    def gathered(communicator):
        return ShardedOptimizer(weights_of(7 * SEGMENT + 128, "bfloat16"), communicator).gathered("master")

    whole, *others = in_threads.run(gathered, 3)
    expected = device.to_host(weights_of(7 * SEGMENT + 128, "bfloat16").flat).astype(np.float32)
    assert_same_bits(whole, expected)
    assert others == [None, None]


def test_empty_parts_have_no_blocks_of_8_bit_moments():
    case = 2 * SEGMENT + 128, "bfloat16", 2, {"optim": "adamw_8bit"}
    check_same(in_threads.run(on_rank, 4, *case), on_one(*case))


def test_a_state_of_another_size_is_refused():
    _, state, _ = on_one(SEGMENT, "float32", 1, {}, range(1))

    def load(communicator):
        ShardedOptimizer(weights_of(3 * SEGMENT, "float32"), communicator).load_state_dict(state)

    with pytest.raises(UserError, match=rf"optimizer state: m must be \({3 * SEGMENT},\), got \({SEGMENT},\)"):
        in_threads.run(load, 2)


@pytest.mark.usefixtures("quick_starts")
def test_processes():
    """The same over shared memory."""
    case = 3 * SEGMENT + 128, "bfloat16", 3, {"optim": "adamw_8bit"}
    check_same(launch(on_rank, 2, *case, timeout_s=120), on_one(*case))


@pytest.mark.gpu
@pytest.mark.parametrize("optim", OPTIMS)
def test_gpu_parts(optim, monkeypatch):
    """Two ranks in turn on one GPU, at the real size of a segment; the second part is shorter."""
    monkeypatch.setattr(reduce, "SEGMENT", 1 << 20)
    for options in ({}, {"offload": True}, {"master_weights": False}):
        case = (3 << 20) + 128, "bfloat16", 3, {"optim": optim, "seed": 3} | options
        found = in_threads.run(on_rank, 2, *case, range(STEPS), None, 1 << 20)
        check_same(found, on_one(*case))


def test_rounds_of_a_step():
    """One micro-batch a rank; the last ranks of the last round have none."""
    for rank, owns in ((0, [0, 3]), (1, [1, 4]), (2, [2, None])):
        found = list(rounds(5, SimpleNamespace(rank=rank, world_size=3)))
        assert [(each.first, each.count, each.is_first) for each in found] == [(0, 3, True), (3, 2, False)]
        assert [each.own for each in found] == owns
