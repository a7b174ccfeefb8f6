"""The copies of transport peer without a GPU: ranks are threads, their arenas NumPy arrays, with random delays."""

import ctypes
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.model.shard import Columns
from rlnumba.parallel import watchdog as watchdog_module
from rlnumba.parallel.transports import shared_memory, small_gathers
from rlnumba.parallel.transports.peer import CONNECT, PeerCommunicator
from rlnumba.parallel.transports.small_gathers import SmallGathers
from rlnumba.parallel.watchdog import EndFlags, Watchdog
from tests.parallel import ranks
from tests.parallel.host_arena import HostArena, random_delay


def run(world_size, work, first=0):
    """What work(communicator) returned on each rank."""
    links, arenas = shared_memory.make_links(world_size, 20, ranks.PIECE_BYTES), [None] * world_size
    found, errors, ready = [None] * world_size, [], threading.Barrier(world_size)

    def rank(link):
        arena = HostArena(link.rank, arenas, ranks.PIECE_BYTES, first % 2**32, random_delay(link.rank))
        ready.wait()
        try:
            control = shared_memory.SharedMemoryCommunicator(link)
            communicator = PeerCommunicator(control, arena, errors.append, first % 2**32)
            found[link.rank] = work(communicator)
            communicator.close()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=rank, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_operations_equal_numpy(world_size):
    assert min(run(world_size, ranks.check_all_operations)) > 90


@pytest.mark.parametrize("first", [2**32 - 3, 2**31 - 3])
def test_counters_wrap(first):
    def work(communicator):
        for seed in range(10):
            ranks.check_gather(communicator, seed, (2 * ranks.PIECE_BYTES,), np.uint8)
            ranks.check_fold(communicator, seed, 1000, 2, False)
            ranks.check_pair(communicator, seed, (3 * ranks.PIECE_BYTES,), np.uint8)
        return communicator._sent

    sent = run(2, work, first)
    # Both counters have passed the point.
    assert all((number - first) % 2**32 > 20 for row in sent for number in row if number != first)


def test_shared_gradients_are_pulled_and_others_sent():
    """Both have the same bits, but a gradient that all ranks share is not copied into what they send."""

    def work(communicator):
        sent, found = communicator._add_what_arrives, []
        communicator._add_what_arrives = lambda *arguments: (found.append(True), sent(*arguments))
        counts = []
        for shares in (False, True):
            shared = communicator.share_gradients(lambda: SimpleNamespace(flat=np.zeros(1003, np.float32)))
            ranks._check_fold(communicator, 0, 1000, 2, False, np, shared.flat[3:] if shares else None)
            counts.append(len(found))
        return counts

    assert run(2, work) == [[1, 1]] * 2


def test_no_stale_piece_is_read():
    """Gathers that change each time, with random delays."""

    def work(communicator):
        for seed in range(300):
            ranks.check_gather(communicator, seed, (5,), np.uint8)
        return True

    assert run(3, work) == [True] * 3


class Event:
    def __init__(self):
        self.done = False


def test_the_watchdog_names_what_does_not_end():
    failed, problems, ended = threading.Event(), [], Event()
    ended.done = True
    watchdog = Watchdog(0.2, lambda message: (problems.append(message), failed.set()))
    watchdog.watch("fold 3", ended)
    assert not failed.wait(0.4)
    watchdog.watch("fold 4", Event())
    assert failed.wait(60) and problems == ["fold 4 did not end within 0.2 s"]
    watchdog.close()


def test_the_watchdog_counts_from_the_end_of_the_operation_before(monkeypatch):
    """An operation that waits for its turn on the stream is not late."""
    now, failed, problems = [0.0], threading.Event(), []
    monkeypatch.setattr(watchdog_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watchdog, first = Watchdog(10, lambda message: (problems.append(message), failed.set())), Event()
    watchdog.watch("fold 1", first)
    watchdog.watch("fold 2", Event())
    now[0], first.done = 9.0, True
    while watchdog._pending[0][0] == "fold 1":
        time.sleep(0.01)
    now[0] = 12.0
    assert not failed.wait(0.2)
    now[0] = 30.0
    assert failed.wait(60) and problems == ["fold 2 did not end within 10 s"]
    watchdog.close()


def test_the_watchdog_reports_a_problem():
    failed, problems = threading.Event(), []
    watchdog = Watchdog(60, lambda message: (problems.append(message), failed.set()), lambda: "rank 1 is late")
    assert failed.wait(60) and problems == ["rank 1 is late"]
    watchdog.close()


def test_flags_of_ended_operations():
    """Four flags for more operations than that; the GPU's writes come one by one, in the order of the calls."""
    written, flags = [], EndFlags(4)
    success = SimpleNamespace(CUDA_SUCCESS=0)
    flags._driver = SimpleNamespace(
        CUresult=success,
        cuStreamWriteValue32=lambda stream, address, value, mode: (written.append((address, value)), (0,))[1],
    )
    flags._number = flags._host[...] = 2**32 - 3
    found = [flags.record(SimpleNamespace(ptr=0)) for _ in range(4)]
    for count, (address, value) in enumerate(written):
        assert [each.done for each in found] == [True] * count + [False] * (4 - count)
        ctypes.c_uint32.from_address(address).value = value
    later = flags.record(SimpleNamespace(ptr=0))
    assert found[0].done and not later.done
    address, value = written[-1]
    ctypes.c_uint32.from_address(address).value = value
    assert found[0].done and later.done


@pytest.mark.parametrize("width, offset, is_whole", [(4, 0, True), (3, 0, False), (4, 1, False), (3, 1, False)])
def test_packets_have_whole_words_of_columns(monkeypatch, width, offset, is_whole):
    """Rows of 16 bits whose length, or address, is no multiple of 4 bytes take the other way."""
    launched = []
    monkeypatch.setattr(small_gathers, "peer_gather", lambda *arguments: launched.append(arguments))
    array = np.zeros(1 + 2 * width, np.float16)[offset:][: 2 * width].reshape(2, width)
    out = np.zeros((2, 2 * width), np.float16)
    assert SmallGathers(None, 4096).gather_columns(array, out, Columns.equal(2 * width, 2)) == is_whole
    assert len(launched) == is_whole


def test_the_watchdog_watches_each_operation_under_its_name():
    def work(communicator):
        names, watch = [], communicator._watchdog.watch
        communicator._watchdog.watch = lambda operation, ended: (names.append(str(operation)), watch(operation, ended))
        array, out = np.arange(4, dtype=np.float32), np.zeros((2, 4), np.float32)
        communicator.gather(array, out)
        communicator.gather(array, out)
        communicator.put(array, 1) if communicator.rank == 0 else communicator.get(out[0], 0)
        communicator.fold(array, np.zeros(2, np.float32), 2 * communicator.rank, 2, True)
        return names

    whole = ["gather 0 of float32 (4,)", "gather 1 of float32 (4,)"]
    pair = [f"{name} 0 of float32 (4,)" for name in ("put", "get")]
    found = run(2, work)
    assert [names[:3] for names in found] == [[*whole, pair[0]], [*whole, pair[1]]]
    assert [name.split(" ")[:2] for names in found for name in names[3:]] == [["fold", "2"]] * 2


def test_connecting_is_named_alone():
    assert str(CONNECT) == "connect 0"
