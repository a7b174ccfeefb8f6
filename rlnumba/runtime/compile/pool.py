"""The process that compiles kernels ahead of their first launch, for runtime/compile/ahead_of_time.py, and its workers.

python -m rlnumba.runtime.compile.pool MODULE        MODULE.list_signatures(request, properties) lists the kernels
"""

import gc
import importlib
import json
import os
import pickle
import signal
import sys
import threading
import warnings
from multiprocessing import Pipe
from multiprocessing.connection import wait

from rlnumba.runtime.compile import cache, machine_code
from rlnumba.runtime.launch import find_kernel

# Seconds of one core that a kernel takes to compile, of those that take long: they begin first.
SECONDS = {
    "decoder_kernel": 8.0, "paged_attention_sm90_kernel": 6.0,
    "draw_kernel": 4.6, "attention_sm90_kernel": 4.0, "logprob_kernel": 3.6, "attention_backward_kernel": 2.4,
    "gemm_sm90_kernel": 1.8, "list_tokens_kernel": 1.4, "scan_kernel": 1.2,
}  # fmt: skip
OTHER_SECONDS = 0.5


def main(module):
    """Compile what the process that started this one requests, through stdin, and report to it through stdout.

    Ends, with all processes that it has started, when stdin is closed.
    """
    list_signatures = importlib.import_module(module).list_signatures
    out = os.fdopen(os.dup(1), "w")
    # All else that is printed goes to stderr, so that stdout has reports alone.
    os.dup2(2, 1)

    def report(**what):
        print(json.dumps(what), file=out, flush=True)

    # Numbers of arrays without memory mean nothing; and of the threads of this process none can hold a lock at a fork.
    warnings.simplefilter("ignore")
    warm_up()
    try:
        request, properties, list_path = pickle.load(sys.stdin.buffer)
    except EOFError:
        return
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        stages = list_signatures(request, properties)
    except Exception as error:
        # The process that asked goes on without this one, and reports what is wrong with its own input.
        print(f"rlnumba: kernels are compiled one by one: {one_line(error)}", file=sys.stderr, flush=True)
        return
    missing = missing_of(stages, properties.capability)
    report(missing=[path.name for path in missing])
    for path in compile_all(missing, properties.capability):
        report(done=path.name)
    cache.note_list_compiled(list_path)
    cache.prune()


def one_line(error):
    """An exception as a short line: str."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _end_with_stdin():
    # Not through sys.stdin, whose lock this thread would still have when Python exits.
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def warm_up():
    """Compile a small kernel, so that processes forked from this one have all that Numba loads at its first use."""
    from rlnumba.runtime.device import cuda

    @cuda.jit
    def add_kernel(x):
        for i in range(x.shape[0]):
            if i > 0:
                x[i] += x[i - 1]

    machine_code.machine_code(add_kernel, ["float32[::1]"], (9, 0))


def missing_of(stages, capability):
    """{file of the cache: signature} of the kernels that the cache lacks, in the order in which they should begin.

    stages: lists of signatures, the kernels of a list being needed before those of the next.
    """
    found = {}
    for stage in stages:
        for signature in sorted(stage, key=lambda s: -SECONDS.get(s[1], OTHER_SECONDS)):
            path = cache.cache_path(find_kernel(*signature[:3]), signature[3], capability)
            if path not in found and not path.exists():
                found[path] = signature
    return found


def compile_all(missing, capability, processes=None):
    """Compile {file: signature} into the cache on all cores; yields each file when it is done with, failed or not.

    Processes are forked from this one, which has imported and set up the compiler: each would take a second for that.
    """
    processes, todo = processes or len(os.sched_getaffinity(0)), list(missing.items())[::-1]
    # Neither this process's objects nor theirs become garbage while they compile: a sixth of the time.
    gc.collect()
    gc.freeze()
    busy, idle = {}, []
    try:
        while todo or busy:
            while todo and (idle or len(busy) < processes):
                path, signature = todo.pop()
                worker = idle.pop() if idle else Worker(capability, [*busy])
                worker.connection.send(signature)
                busy[worker.connection] = worker, path, signature
            for connection in wait([*busy]):
                worker, path, signature = busy.pop(connection)
                try:
                    problem = connection.recv()
                    idle.append(worker)
                except EOFError:
                    worker.end()
                    problem = "its process has ended"
                if problem is not None:
                    # The launch compiles it again, and reports the error where it belongs.
                    print(f"rlnumba: {signature[1]} is compiled when it is launched: {problem}", file=sys.stderr)
                    sys.stderr.flush()
                yield path
    finally:
        for worker in [*idle, *(worker for worker, _, _ in busy.values())]:
            worker.end()


class Worker:
    """A process that compiles one kernel after another."""

    def __init__(self, capability, others):
        self.connection, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                # Otherwise the other processes would not see the end of this one's parent.
                for connection in [self.connection, *others]:
                    connection.close()
                work(theirs, capability)
            finally:
                os._exit(0)
        theirs.close()

    def end(self):
        self.connection.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def work(connection, capability):
    """Compile the kernels whose signatures arrive; answers None, or what went wrong, for each."""
    gc.disable()
    while True:
        try:
            signature = connection.recv()
        except EOFError:
            return
        try:
            machine_code.compile_to_cache(find_kernel(*signature[:3]), signature[3], capability)
            connection.send(None)
        except Exception as error:
            connection.send(one_line(error))


if __name__ == "__main__":
    main(sys.argv[1])
