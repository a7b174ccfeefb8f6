"""Who may use the GPU: the tests of all processes of a session together, or one that fills its memory alone."""

import fcntl
from contextlib import ExitStack
from pathlib import Path

# What does not use the GPU, and takes minutes.
ON_CPU = ("test_kernels_in_the_simulator", "test_every_launched_kernel_compiles_for_gpus")


def fills_gpu(item):
    """Whether a test takes most of the GPU's memory."""
    return item.get_closest_marker("fills_gpu") is not None


class GpuTurns:
    """The turns of one process: `begin` before a test, `end` after it. folder: of the session, for two locks.

    Tests that fill the GPU and follow each other in a process have one turn together: it begins when all others have
    ended theirs.
    """

    def __init__(self, folder):
        self.folder, self.held, self.is_alone = Path(folder), ExitStack(), False

    def begin(self, alone):
        """Wait for a turn, alone or with others."""
        if self.is_alone and alone:
            return
        self.end()
        room = self.held.enter_context(open(self.folder / "gpu", "w"))
        # Who waits for a turn alone stands in the door, so that others, who come and go, do not keep it waiting.
        with open(self.folder / "gpu-door", "w") as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        self.is_alone = alone

    def end(self):
        """Let others have their turns."""
        self.held.close()
        self.is_alone = False
