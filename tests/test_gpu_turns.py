"""Turns on the GPU, alone or with others: each process that waits gets one."""

import threading

from tests.gpu_turns import GpuTurns

SECONDS = 60


class Process:
    """A thread that waits for a turn. begun: an Event."""

    def __init__(self, folder, alone):
        self.turns, self.begun = GpuTurns(folder), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(alone,), daemon=True)
        self.thread.start()

    def _run(self, alone):
        self.turns.begin(alone)
        self.begun.set()

    def end(self):
        self.thread.join(SECONDS)
        self.turns.end()


def test_a_turn_alone_waits_for_others_and_is_not_kept_waiting(tmp_path):
    first, second = Process(tmp_path, False), Process(tmp_path, False)
    assert first.begun.wait(SECONDS) and second.begun.wait(SECONDS)
    filling = Process(tmp_path, True)
    first.end()
    assert not filling.begun.wait(0.1)
    # It stands in the door.
    third = Process(tmp_path, False)
    assert not third.begun.wait(0.1)
    second.end()
    assert filling.begun.wait(SECONDS) and not third.begun.wait(0.1)
    # The next test that fills the GPU belongs to the same turn, one that does not begins another.
    filling.turns.begin(True)
    assert not third.begun.wait(0.1)
    filling.turns.begin(False)
    assert third.begun.wait(SECONDS)
    for each in (filling, third):
        each.end()
