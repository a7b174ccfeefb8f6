"""The Arena of transport peer in the host's memory, for ranks that are threads of one process.

The current stream is the thread itself; the stream of sends, and that of what is pulled from each rank, are other
threads, which do their work in order.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from rlnumba.parallel.transports.peer import COUNTERS, SLOTS


class HostArena:
    """The interface of peer.PeerArena. arenas: those of all ranks, to be filled; delay(): called before each step."""

    def __init__(self, rank, arenas, piece_bytes, first, delay):
        self.rank, self.world_size, self.piece_bytes = rank, len(arenas), piece_bytes
        self.counters = np.full(COUNTERS * len(arenas), first, np.uint32)
        self.slots = np.zeros((len(arenas), SLOTS, piece_bytes), np.uint8)
        self.changed, self.arenas, self.delay = threading.Condition(), arenas, delay
        self.sends, self.last = ThreadPoolExecutor(1), None
        # Of what is pulled: a thread for each source, and the copies that have not been added yet.
        self.pulls, self.copies, self.shared = [ThreadPoolExecutor(1) for _ in arenas], {}, []
        # Two slots, so that copies of a fold also wait for additions.
        self.gradients, self.num_slots, self.staging = self, SLOTS, np.zeros_like(self.slots)
        self.gathers = self
        arenas[rank] = self

    def problem(self):
        return None

    def synchronize(self):
        pass

    def close(self, control):
        for thread in (self.sends, *self.pulls):
            thread.shutdown()

    def gather(self, array, out):
        return False

    def gather_columns(self, array, out, columns, row_width=None):
        return False

    def end(self):
        if self.last is not None:
            self.last.result(20)
        return Done()

    def send(self, function, *args):
        self.last = self.sends.submit(function, *args)

    def settles(self, seconds):
        return self.end().done

    def push(self, source, rank, slot):
        def copy():
            self.delay()
            self.arenas[rank].slots[self.rank, slot, : source.size] = source

        self.send(copy)

    def slot(self, rank, slot, nbytes):
        self.delay()
        return self.slots[rank, slot, :nbytes]

    def share(self, exchange, make):
        made = make()
        self.shared.append(made.flat)
        return made

    def place_of(self, gradient):
        for number, flat in enumerate(self.shared):
            if np.may_share_memory(gradient, flat):
                return number, gradient.ctypes.data - flat.ctypes.data
        return None

    def signal_complete(self, rank, value):
        self.arenas[rank].set(2 * self.world_size + self.rank, value)

    def begin(self, operation=None):
        # Of what is sent, and, without an operation, of what is pulled.
        assert operation is not None or not self.copies

    def wait_complete(self, rank, value):
        self.pulls[rank].submit(self.wait, 2 * self.world_size + rank, value)

    def copy(self, rank, slot, place, offset, nbytes):
        def copy():
            self.delay()
            source = self.arenas[rank].shared[place[0]].view(np.uint8)[place[1] + offset :]
            self.staging[rank, slot, :nbytes] = source[:nbytes]

        assert (rank, slot) not in self.copies
        self.copies[rank, slot] = self.pulls[rank].submit(copy)

    def copied(self, rank, slot, nbytes):
        self.copies[rank, slot].result(20)
        self.delay()
        return self.staging[rank, slot, :nbytes]

    def added(self, rank, slot):
        del self.copies[rank, slot]

    def signal_read(self, rank, value):
        self.pulls[rank].submit(self.arenas[rank].set, 3 * self.world_size + self.rank, value)

    def wait_read(self, rank, value):
        self.delay()
        self.wait(3 * self.world_size + rank, value)

    def wait_arrived(self, rank, value):
        self.wait(rank, value)

    def wait_free(self, rank, value):
        self.send(self.wait, self.world_size + rank, value)

    def signal_arrived(self, rank, value):
        self.send(self.arenas[rank].set, self.rank, value)

    def signal_free(self, rank, value):
        self.arenas[rank].set(self.world_size + self.rank, value)

    def wait(self, counter, value):
        def reached():
            return np.array(int(self.counters[counter]) - value, np.int64).astype(np.int32) >= 0

        with self.changed:
            assert self.changed.wait_for(reached, 20)

    def set(self, counter, value):
        with self.changed:
            self.counters[counter] = value
            self.changed.notify_all()


class Done:
    done = True


def random_delay(seed):
    rng = np.random.default_rng(seed)

    def delay():
        if rng.integers(4) == 0:
            time.sleep(rng.random() * 2e-4)

    return delay
