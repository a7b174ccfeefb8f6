"""The process that compiles kernels ahead of their first launch, for runtime/ahead_of_time.py, and its workers."""

import json
import os
import pickle
import signal
import sys
import threading
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from rlnumba.runtime import compile
from rlnumba.runtime.launch import find_kernel

# Kernels that take longest to compile, two to five seconds of one core: they begin first.
SLOWEST = ("paged_attention_sm90_kernel", "draw_kernel", "attention_sm90_kernel", "logprob_kernel", "gemm_sm90_kernel")


def compile_listed(list_signatures):
    """The main function of a module given to `start`: list_signatures(request, properties) -> signatures.

    Reads the request from stdin and ends, with all processes that it has started, when stdin is closed.
    """
    request, properties = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    out = os.fdopen(os.dup(1), "w")
    # What else is printed goes to stderr, so that stdout has reports alone.
    os.dup2(2, 1)

    def report(**what):
        print(json.dumps(what), file=out, flush=True)

    # Numbers of arrays without memory mean nothing.
    warnings.simplefilter("ignore")
    with Pool() as pool:
        try:
            signatures = list_signatures(request, properties)
        except Exception as error:
            # The process that asked goes on without this one, and reports what is wrong with its own input.
            print(f"rlnumba: kernels are compiled one by one: {one_line(error)}", file=sys.stderr, flush=True)
            return
        missing = missing_of(signatures, properties.capability)
        report(missing=[path.name for path in missing])
        for path in pool.compile(missing, properties.capability):
            report(done=path.name)
    compile.prune_cache()


def one_line(error):
    """An exception as a short line: str."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _end_with_stdin():
    # Not through sys.stdin, whose lock this thread would still have when Python exits.
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def missing_of(signatures, capability):
    """{file of the cache: signature} of the kernels that the cache lacks, the slowest to compile first."""
    found = {}
    for signature in signatures:
        path = compile.cache_path(find_kernel(*signature[:3]), signature[3], capability)
        if not path.exists():
            found[path] = signature
    order = {name: index for index, name in enumerate(SLOWEST)}
    return dict(sorted(found.items(), key=lambda item: order.get(item[1][1], len(SLOWEST))))


class Pool:
    """Processes that compile, as many as there are cores; they import the compiler while signatures are listed."""

    def __init__(self, processes=None):
        self.processes = processes or len(os.sched_getaffinity(0))

    def __enter__(self):
        # spawn: a fork would copy the locks that threads of this process hold.
        self.executor = ProcessPoolExecutor(self.processes, mp_context=get_context("spawn"))
        for _ in range(self.processes):
            self.executor.submit(_import_compiler)
        return self

    def __exit__(self, *_):
        self.executor.shutdown(cancel_futures=True)

    def compile(self, missing, capability):
        """Compile {file: signature} into the cache; yields each file when it is done with, failed or not."""
        futures = {self.executor.submit(_compile, sig, capability): path for path, sig in missing.items()}
        for future in as_completed(futures):
            error = future.exception()
            if error is not None:
                # The launch compiles it again, and reports the error where it belongs.
                name = missing[futures[future]][1]
                print(
                    f"rlnumba: {name} is compiled when it is launched: {one_line(error)}", file=sys.stderr, flush=True
                )
            yield futures[future]


def _import_compiler():
    import numba.cuda.compiler  # noqa: F401


def _compile(signature, capability):
    compile.compile_to_cache(find_kernel(*signature[:3]), signature[3], capability)
