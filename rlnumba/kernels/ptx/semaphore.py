"""Order between blocks of one kernel: semaphores and counters in global memory, of compute capability 7.0.

A block that waits here for another must be sure that the other one runs or has run; a work index drawn from a counter
(atomic_add_acq_rel) gives an order in which that holds.
Source: PTX ISA, sections on ld.acquire, st.release, atom, fence.proxy.
"""

from rlnumba.kernels.ptx.instruction import SIMULATED, instruction

if SIMULATED:
    from rlnumba.runtime.simulator import Condition, grid_state


def _condition(semaphores, index):
    """The condition on which the simulator's threads wait for a semaphore to change."""
    return grid_state(("semaphore", semaphores.ctypes.data, int(index)), Condition)


# Semaphores are read and written by ordinary accesses, what they guard by TMA: hence the proxy fences.
@instruction(
    "{ .reg .pred p; .reg .b32 now; AGAIN: ld.acquire.gpu.global.b32 now, [$0]; setp.ne.b32 p, now, $1;"
    " @p bra AGAIN; fence.proxy.async.global; }",
    "er",
)
def semaphore_wait(semaphores, index, value):
    """Wait until semaphores[index] is `value`: what its writer did before is visible then, bulk copies included."""
    while semaphores[index] != value:
        _condition(semaphores, index).wait(f"semaphore_wait {value}")


@instruction("fence.proxy.async.global; st.release.gpu.global.b32 [$0], $1;", "er")
def semaphore_release(semaphores, index, value):
    """Set semaphores[index] to `value` for a block in semaphore_wait."""
    semaphores[index] = value
    _condition(semaphores, index).notify_all()


@instruction("fence.proxy.async.global; red.release.gpu.global.add.s32 [$0], 1;", "e")
def semaphore_add(semaphores, index):
    """Add 1 to semaphores[index] for blocks in semaphore_wait, which wait for the number of additions.

    They see what this thread, and threads that it met at a barrier, did before.
    """
    semaphores[index] += 1
    _condition(semaphores, index).notify_all()


@instruction("atom.add.acq_rel.gpu.global.s32 $0, [$1], 1;", "e", "r")
def atomic_add_acq_rel(counters, index):
    """Add 1 to counters[index] and return what it was.

    Writes of this thread, and of threads that it met at a barrier, before this are visible to all that add later;
    writes before earlier additions are visible to this thread and to all that it meets.
    """
    counters[index] += 1
    return counters[index] - 1


@instruction("ld.acquire.gpu.global.s32 $0, [$1];", "e", "r")
def load_acquire(counters, index):
    """counters[index]; what was written before its additions is visible to this thread and to all that it meets."""
    return counters[index]
