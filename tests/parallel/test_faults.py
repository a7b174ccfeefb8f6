"""Ranks that are killed or that stall in an operation of a run: all end, and the run goes on with the bits of one."""

import re

import pytest

from rlnumba import checkpoint
from rlnumba.errors import DeviceError, RankError
from rlnumba.parallel import launch
from rlnumba.runs import policy as policy_module
from tests.parallel.ranks import set_fault
from tests.parallel.test_trainers import run_of, train_all, train_each

pytestmark = pytest.mark.usefixtures("quick_starts")

STALLED_S = 2.0


def train_with_fault(communicator, fault, stalled_s, *arguments):
    """train_each with a fault.

    stalled_s: seconds that a rank waits for another one from the operation on in which that one stalls. Until then it
    waits as long as the machine is busy.
    """
    set_fault(communicator, fault)
    inject, (operation, call, _, rank) = communicator._inject_fault, communicator._fault

    def inject_and_limit(found, array):
        if (found.name, communicator._calls[found.name]) == (operation, call) and communicator.rank != rank:
            communicator.timeout_s = stalled_s
        return inject(found, array)

    communicator._inject_fault = inject_and_limit
    train_each(communicator, *arguments)


def fault_of(runs, num_ranks, fault, resume=False, stalled_s=120.0):
    """The line with which runs end that have a fault."""
    with pytest.raises(RankError) as error:
        launch(train_with_fault, num_ranks, fault, stalled_s, runs, resume, timeout_s=120.0)
    return str(error.value)


# (ranks, fault): in the second or third step of each start, of all operations that a run has, and while a rank writes
# its part of a checkpoint. The first is in a third step, before which a checkpoint is complete.
KILLED = {
    "sft": [(2, "fold:6:kill"), (3, "save:2:kill"), (2, "gather:3:kill"), (3, "save:1:kill:0"), (2, "objects:11:kill")],
    "grpo": [
        (3, "objects:26:kill"), (2, "fold:3:kill"), (3, "save:1:kill:0"), (2, "save:2:kill"), (2, "gather:3:kill")
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KILLED)
def test_killed_runs_go_on_with_another_number_of_ranks(tmp_path, kind):
    """The other ranks are killed, too, and the last start, on one, ends with the weights of a run of one."""
    options = {"max_steps": 12, "save_steps": 1, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    ((expected, *_),) = train_all([(kind, run_of(kind, tmp_path / "whole", **options))], 1)
    steps = []
    for num_ranks, fault in KILLED[kind]:
        operation, *_, rank = f"{fault}:{num_ranks - 1}".split(":")[:4]
        line = fault_of([(kind, run_of(kind, tmp_path / "run", num_ranks, **options))], num_ranks, fault, bool(steps))
        # A checkpoint is written while training goes on. Where rank 0 has begun the next one, it waits for the killed
        # rank's part of this one, and the others for rank 0: none misses the killed rank in an operation.
        missing = "objects|fold|gather|barrier" if operation == "save" else f"objects|{operation}"
        missed = rf" \(rank \d: ({missing}) \d+.*: rank {rank} has ended\)"
        missed = f"({missed})?" if operation == "save" else missed
        assert re.fullmatch(rf"rank {rank}: was ended by SIGKILL{missed}", line), line
        steps.append(len(list((tmp_path / "run" / "checkpoints").glob("step-*"))))
    # Each start but for the first has gone on from a checkpoint, and some have written one.
    assert 1 <= steps[0] and 3 <= steps[-1] < 12
    ((found, *_),) = train_all([(kind, run_of(kind, tmp_path / "run", **options))], 1, resume=True)
    assert found["final/model.safetensors"] == expected["final/model.safetensors"]


@pytest.mark.parametrize("kind, fault", [("sft", "fold:4:stall"), ("grpo", "gather:2:stall")])
def test_a_rank_that_stalls_ends_the_run(tmp_path, kind, fault):
    line = fault_of([(kind, run_of(kind, tmp_path, 2, save_steps=1))], 2, fault, stalled_s=STALLED_S)
    operation = fault.partition(":")[0]
    assert re.fullmatch(rf"rank 0: {operation} \d+ of .*: rank 1 did not join rank 0 within {STALLED_S:g} s", line)


def test_a_rank_that_stalls_in_writing_ends_the_run(tmp_path):
    """While the checkpoint before is whole."""
    run = run_of("sft", tmp_path, 2, save_steps=1)
    line = fault_of([("sft", run)], 2, "save:1:stall", stalled_s=STALLED_S)
    folder = tmp_path / "checkpoints"
    why = f"rank 1 did not write its part within {STALLED_S:g} s"
    assert line == f"rank 0: {folder / 'step-2'}: the checkpoint cannot be written: {why}"
    assert [path.name for path in folder.iterdir()] == ["step-1"]
    checkpoint.verify(folder / "step-1")


class Trouble(Exception):
    """What a bug raises."""


def train_with_error(communicator, step, error, *arguments, **options):
    """train_each, with an error of the last rank in the backward of a step, the first of which is 0."""
    backward = policy_module.Policy._backward

    def fail_at_step(policy, *args, **kwargs):
        if policy.optimizer.steps == step and communicator.rank == communicator.world_size - 1:
            raise error
        return backward(policy, *args, **kwargs)

    policy_module.Policy._backward = fail_at_step
    train_each(communicator, *arguments, **options)


@pytest.mark.parametrize(
    "kind, num_ranks, transport, error, options",
    [
        ("sft", 3, "shm", MemoryError("32 GiB"), {}),
        ("sft", 2, "tcp", Trouble("of the last rank"), {"zero_stage": 3}),
        ("grpo", 2, "shm", DeviceError("the GPU fails"), {}),
    ],
)
def test_an_error_of_one_rank_leaves_a_checkpoint_of_the_last_step(
    tmp_path, kind, num_ranks, transport, error, options
):
    """From which one rank goes on, and ends with the weights of a run without it."""
    kept = {"max_steps": 4, "save_steps": 100, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    ((expected, *_),) = train_all([(kind, run_of(kind, tmp_path / "whole", **kept))], 1)
    run = run_of(kind, tmp_path / "run", num_ranks, **kept, **options)
    with pytest.raises(RankError) as raised:
        launch(train_with_error, num_ranks, 2, error, [(kind, run)], transport=transport, timeout_s=120.0)
    internal = "" if isinstance(error, DeviceError) else f"internal error: {type(error).__name__}: "
    assert str(raised.value) == f"rank {num_ranks - 1}: {internal}{error}"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]
    ((found, *_),) = train_all([(kind, run_of(kind, tmp_path / "run", **kept))], 1, resume=True)
    assert found["final/model.safetensors"] == expected["final/model.safetensors"]
