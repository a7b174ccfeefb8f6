"""Starts the ranks of a run, each in a process of its own, and ends them all when one fails.

    launch(function, 4, *args)      -> [what function(communicator, *args) returned on rank 0, on rank 1, ...]
    launch_groups(function, 2, [args, args, ...])   -> [what it returned on rank 0 of each group of two, ...]

The processes are spawned: `function` and `args` are pickled, and found again by import. Rank 0 prints to the console
unchanged, so that it may draw a progress line; lines of other ranks get a prefix, "[1] ".

The first failure ends the run: the other processes are killed, and `launch` raises RankError with one line for what a
user can cause, the traceback added as a note otherwise. A rank that fails because another one has ended is not the
first failure; that one's is waited for. If a process has ended without a report, as by SIGKILL, the line says in which
operation another rank missed it. A signal is sent on to all ranks, which raise KeyboardInterrupt, or note it where they
hold signals (runtime/signals.py); a second signal ends all processes.

Ranks end with the process that started them, however that ends: each has a connection to it that then closes.
"""

import contextlib
import os
import pickle
import selectors
import signal
import sys
import threading
import time
import traceback
from multiprocessing import Pipe, connection, get_context
from typing import NamedTuple

from rlnumba.errors import CommunicationError, RankError, SharedError, UserError
from rlnumba.parallel.communicator import TIMEOUT_S, Operation, SingleRank
from rlnumba.parallel.transports import shared_memory, tcp
from rlnumba.reporting.stderr import os_problem
from rlnumba.runtime import device, signals
from rlnumba.runtime.compile import ahead_of_time

TRANSPORTS = ("shm", "tcp", "peer", "nccl")
# Seconds between looks at signals, which do not end the wait for ranks.
POLL_S = 0.1
# Seconds in which the rank that has ended can report why, after another one has reported that it has ended.
REPORT_S = 4.0
# Seconds in which all ranks can end by themselves after a signal has ended one of them.
ENDING_S = 10.0
# Seconds for which the others' reports wait until a process that has closed its connection is gone.
EXIT_S = 4.0


class Failure(NamedTuple):
    """The failure that ended a rank. message: one line; trace: its traceback, if this is a bug.

    because_of: another rank that ended before, if that is the reason. is_reported: by the rank itself. is_shared:
    whether all ranks have raised it.
    """

    message: str
    exit_code: int
    trace: str | None = None
    because_of: int | None = None
    is_reported: bool = True
    is_shared: bool = False


class SharedRankError(RankError):
    """The RankError for an error that all ranks have raised: the message is as on one rank, without a number."""

    def __init__(self, rank, message, exit_code=1):
        super().__init__(rank, message, exit_code)
        self.args = (message,)


def launch(
    function,
    world_size,
    *args,
    transport="shm",
    timeout_s=TIMEOUT_S,
    piece_bytes=shared_memory.PIECE_BYTES,
    gpus=None,
    ends_by_signal=False,
    group_size=1,
):
    """Run function(communicator, *args) on ranks 0 .. world_size - 1 and return what it returned, by rank: a list.

    function, args, results: what can be pickled. One rank runs in this process, several in processes of their own.
    transport: "shm" or "tcp", on the cpu device, or in the simulator if this process has it; "peer" or "nccl", on GPUs
    of this host. gpus: the number of each rank's GPU (placement.py), by default its rank; all processes see all GPUs.
    Kernels given to ahead_of_time are compiled before, once for all ranks, which share the cache. timeout_s: see
    Communicator. piece_bytes: bytes of a piece of shm and tcp. ends_by_signal: whether ranks that return after a signal
    have done what they were to do. group_size: so many neighbouring ranks have a Communicator.group of their own, if
    that is more than one and not all; with shm and peer. Raises RankError for the first rank that fails;
    KeyboardInterrupt after a signal.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"launch: transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
    if world_size == 1:
        return [function(SingleRank(timeout_s), *args)]
    call = pickle.dumps((function, args))
    place = transport, list(gpus or range(world_size))
    ahead_of_time.finish()
    with signals.handled(), signals.held():
        with contextlib.ExitStack() as stack:
            if transport == "tcp":
                meeting = stack.enter_context(tcp.Meeting("localhost", world_size))
                links = meeting.links(["localhost"] * world_size, timeout_s, piece_bytes)
            else:
                links = shared_memory.make_links(world_size, timeout_s, piece_bytes)
            ranks = Ranks(links, place, call, _links_of_groups(world_size, group_size, timeout_s))
            stack.callback(ranks.end)
            results = ranks.results()
            if ends_by_signal:
                signals.forget()
            return [pickle.loads(results[rank]) for rank in range(world_size)]


def launch_groups(function, world_size, calls, transport="shm", gpus=None):
    """Run function(communicator, *args) on `world_size` ranks for each args of `calls`, all at the same time.

    Returns what it returned on rank 0 of each group, a list. A group has a Communicator of its own, as of `launch`.
    transport: "shm", or on GPUs "peer". gpus: the number of each rank's GPU, of all groups after one another. Raises
    RankError for the first rank of any group that fails, KeyboardInterrupt after a signal.
    """
    gpus, groups = list(gpus or range(world_size * len(calls))), []
    ahead_of_time.finish()
    with signals.handled(), signals.held(), contextlib.ExitStack() as stack:
        for index, args in enumerate(calls):
            # A group's own GPUs come first; the others say how many ranks share one.
            own = index * world_size
            links = shared_memory.make_links(world_size, TIMEOUT_S)
            groups.append(Ranks(links, (transport, gpus[own:] + gpus[:own]), pickle.dumps((function, args))))
            stack.callback(groups[-1].end)

        def check():
            for group in groups:
                group.check()

        return [pickle.loads(group.results(check)[0]) for group in groups]


def _links_of_groups(world_size, size, timeout_s):
    """The Link of each rank to its group of `size` neighbours, None where these are all ranks or this one: list."""
    if size in (1, world_size):
        return [None] * world_size
    return [link for _ in range(world_size // size) for link in shared_memory.make_links(size, timeout_s)]


class Ranks:
    """The processes of a run on this host, and what they have reported.

    links: those of their ranks. place: (transport, the number of each rank's GPU, None for ranks elsewhere). call:
    pickled. groups: the Link of each to its group, or None.
    """

    def __init__(self, links, place, call, groups=None):
        self._results, self._failures, self._ended_at = {}, {}, {}
        # Connections that reports come by, and processes, by rank.
        self._reports, self._processes, outputs = {}, {}, {}
        context = get_context("spawn")
        for link, group in zip(links, groups or [None] * len(links), strict=True):
            own, other = Pipe()
            pipes = [Pipe(duplex=False) for _ in range(2)] if link.rank else []
            arguments = link, other, [write for _, write in pipes], place, call, group
            process = context.Process(target=_run_rank, args=arguments, name=f"rank {link.rank}")
            process.start()
            self._processes[link.rank], self._reports[link.rank] = process, own
            for given in [link, other, *(write for _, write in pipes), *([] if group is None else [group])]:
                given.close()
            for (read, _), stream in zip(pipes, ("stdout", "stderr"), strict=False):
                outputs[read] = link.rank, stream
        self._output = threading.Thread(target=_copy_output, args=(outputs,), daemon=True)
        self._output.start()

    def results(self, check=lambda: None):
        """Wait for all ranks: {rank: pickled result}. Raises RankError for the first failure.

        check(): called again and again; raises for a failure elsewhere.
        """
        signalled = None
        while len(self._ended_at) < len(self._processes):
            self._wait()
            if signalled is None:
                check()
            if signalled is None and signals.received() is not None:
                signalled = signals.received()
                self._send(signalled)
            failure = self._first_failure()
            if signalled is None and failure is not None:
                raise self._rank_error(*failure)
            if signalled is not None and self._failures and time.monotonic() - self._first_end() > ENDING_S:
                break
        if self._failures:
            if signalled is None:
                raise self._rank_error(*self._first_failure(now=True))
            raise KeyboardInterrupt
        return self._results

    def check(self):
        """Take the reports that are there, without a wait. Raises RankError for the first failure."""
        self._wait(0.0)
        failure = self._first_failure()
        if failure is not None:
            raise self._rank_error(*failure)

    def end(self):
        """Kill what still runs, and print what is left of the output."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        self._output.join(REPORT_S)

    def _send(self, number):
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _wait(self, wait_s=POLL_S):
        """Wait until a rank reports or ends, at most wait_s seconds."""
        reports = {report: rank for rank, report in self._reports.items() if rank not in self._ended_at}
        for report in connection.wait(reports, wait_s):
            rank = reports[report]
            try:
                result, failure = report.recv()
                if failure is None:
                    self._results[rank] = result
                else:
                    self._failures[rank] = failure
            except (EOFError, OSError):
                process = self._processes[rank]
                # Not without a limit: what it had of a GPU is given back first.
                process.join(EXIT_S)
                if rank not in self._results and rank not in self._failures:
                    self._failures[rank] = Failure(how_ended(process.exitcode), 1, is_reported=False)
                self._ended_at[rank] = time.monotonic()

    def _first_end(self):
        return min(self._ended_at.values(), default=float("inf"))

    def _first_failure(self, now=False):
        """(rank, Failure) to report, or None: the one that others are due to, for which those wait REPORT_S.

        One that is not reported waits as long for what another rank has missed.
        """
        first = next(((rank, each) for rank, each in self._failures.items() if each.because_of is None), None)
        is_late = now or time.monotonic() - self._first_end() > REPORT_S
        if first is None and self._failures and is_late:
            return next(iter(self._failures.items()))
        if first is not None and not first[1].is_reported and not is_late and self._missed(first[0]) is None:
            return None
        return first

    def _missed(self, rank):
        """(rank, message) of the first that has failed because `rank` has ended, or None."""
        return next(((r, each.message) for r, each in self._failures.items() if each.because_of == rank), None)

    def _rank_error(self, rank, failure):
        missed = None if failure.is_reported else self._missed(rank)
        where = "" if missed is None else " (rank {}: {})".format(*missed)
        kind = SharedRankError if failure.is_shared else RankError
        error = kind(rank, failure.message + where, failure.exit_code)
        error.because_of, error.is_lost = failure.because_of, not failure.is_reported
        if failure.trace is not None:
            error.add_note(f"on rank {rank}:\n{failure.trace}")
        return error


def how_ended(code):
    """The meaning of a process's exit code, None while it is not known, as the end of a sentence: str."""
    if code is None:
        return "ended without a report"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _copy_output(pipes):
    """Copy lines of {connection: (rank, "stdout" or "stderr")} to this process's streams, until all are closed."""
    selector, texts = selectors.DefaultSelector(), dict.fromkeys(pipes, b"")
    for pipe in pipes:
        selector.register(pipe, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            rank, stream = pipes[key.fileobj]
            read = os.read(key.fileobj.fileno(), 1 << 16)
            *lines, rest = (texts[key.fileobj] + read).split(b"\n")
            texts[key.fileobj] = rest
            if not read:
                selector.unregister(key.fileobj)
                lines = [rest] if rest else []
            for line in lines:
                print(f"[{rank}] {line.decode(errors='replace')}", file=vars(sys)[stream], flush=True)


def stop_requested(communicator):
    """Whether a rank has received a signal: the same answer on all ranks, which call this between two steps.

    For ranks that hold signals (runtime/signals.py), so that all of them stop after the same step.
    """
    return any(communicator.objects(signals.received() is not None))


def _run_rank(link, report, outputs, place, call, group=None):
    """The main function of a rank's process."""
    # A terminal sends its signals to this process's group; ranks get them from the process that started them.
    os.setsid()
    signals.install()
    for descriptor, pipe in zip((1, 2), outputs, strict=False):
        os.dup2(pipe.fileno(), descriptor)
        pipe.close()
    threading.Thread(target=_end_with_parent, args=(report,), daemon=True).start()

    def failed(message):
        with contextlib.suppress(OSError):
            report.send((None, Failure(message, 1)))
        os._exit(1)

    result, failure = _call(link, place, failed, call, group)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    with contextlib.suppress(OSError):
        report.send((result, failure))
    if failure is not None:
        # Threads and exit handlers may wait for ranks that are gone.
        os._exit(failure.exit_code)


def _connect(link, transport, gpus, failed, group):
    """The Communicator of this rank, whose process gets its device here."""
    control = link.connect()
    if transport in ("shm", "tcp"):
        device.select("sim" if device.simulated() else "cpu")
        control.group = group and group.connect()
        return control
    # NCCL's sums in the switch are not used, and its start without them takes less memory.
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    device.use_gpu(gpus[link.rank], gpus.count(gpus[link.rank]))
    # The process that started this one compiles what all ranks launch.
    ahead_of_time.leave_to_another()
    if transport == "peer":
        from rlnumba.parallel.transports import peer

        found = peer.PeerCommunicator(control, peer.PeerArena(control), failed)
        if group is not None:
            control = group.connect()
            found.group = peer.PeerCommunicator(control, peer.PeerArena(control), failed)
        return found
    from rlnumba.parallel.transports import nccl

    identifier = nccl.unique_id() if link.rank == 0 else None
    identifier = control.exchange(Operation("connect", 0, ""), identifier)[0]
    control.close()
    return nccl.NcclCommunicator(link.rank, link.world_size, identifier, failed, link.timeout_s)


def _call(link, place, failed, call, group):
    """(pickled result, None) of the rank's function, or (None, Failure). failed(message): see peer.PeerCommunicator."""
    try:
        transport, gpus = place
        communicator = _connect(link, transport, gpus, failed, group)
        function, args = pickle.loads(call)
        result = pickle.dumps(function(communicator, *args))
        if communicator.group is not None:
            communicator.group.close()
        communicator.close()
        return result, None
    except CommunicationError as error:
        return None, Failure(str(error), error.exit_code, because_of=error.rank)
    except UserError as error:
        return None, Failure(str(error), error.exit_code, is_shared=isinstance(error, SharedError))
    except KeyboardInterrupt:
        return None, Failure("interrupted", 128 + (signals.received() or signal.SIGINT))
    except OSError as error:  # a full disk, a file that has gone; the trace, for --debug, says where
        return None, Failure(os_problem(error), 1, traceback.format_exc())
    except BaseException as error:  # SystemExit too: the rank has not returned
        return None, Failure(f"internal error: {type(error).__name__}: {error}", 1, traceback.format_exc())


def _end_with_parent(report):
    """End this process when the process that started it has closed its end of the connection, or ended."""
    with contextlib.suppress(OSError):
        report.poll(None)
    os._exit(1)
