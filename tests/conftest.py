"""Fixtures and skips. A test runs on the device of the process; kernels need `sim` or `cuda`.

    pytest                               cpu device: references, models, engine, trainers; starts the next line, too
    NUMBA_ENABLE_CUDASIM=1 pytest -m sim the kernels, thread by thread
    pytest on a machine with a GPU       the kernels at real shapes as well

Tests run in one process more than there are cores (pytest-xdist); -n 0 keeps them in one, as a debugger wants it.

RLNUMBA_SAMPLES names an optional folder of sample models and data; tests that need one skip without it.
"""

import fcntl
import functools
import gc
import importlib
import os
import pathlib
import pickle
import sys

import numba.core.dispatcher
import numpy as np
import pytest
from numba.core.caching import NullCache
from numba.core.compiler_lock import global_compiler_lock

from rlnumba.reporting import metrics, plots
from rlnumba.runtime import device, dispatch
from rlnumba.sampling import inference
from tests import left_replaced, pictures, processes
from tests.gpu_turns import ON_CPU, GpuTurns, fills_gpu
from tests.offline import compile_offline, write_list  # noqa: F401 (a fixture)

RECORD = os.environ.get("RLNUMBA_RECORD_SIGNATURES")
# "3/8": of the simulator's tests, skipped ones aside, those with the numbers 3, 11, 19, ...
PART = os.environ.get("RLNUMBA_PART")
_signatures = {}
# The tests start hundreds of processes, each of which would otherwise compile the sources that it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_sessionstart():
    """With RLNUMBA_RECORD_SIGNATURES=FOLDER, note every kernel and its argument types launched in the simulator."""
    if RECORD:
        from rlnumba.runtime import launch

        def note(kernel, types):
            function = kernel.py_func
            constants = function.made_with if "made_with" in function.__dict__ else None
            # A kernel that a test defines within itself cannot be found again.
            if constants is not None or "<locals>" not in function.__qualname__:
                _signatures.setdefault((function.__module__, function.__name__, constants, types))

        launch.observers.append(note)


def pytest_sessionfinish(session):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        write_list(session.config._tmp_path_factory.getbasetemp())
    if RECORD:
        pathlib.Path(RECORD, f"{os.getpid()}.pickle").write_bytes(pickle.dumps(list(_signatures)))


def pytest_xdist_auto_num_workers(config):
    """One process more than there are cores, because tests also wait for others; on a GPU, which they share, eight."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores, 8) if device.name() == "cuda" else cores + 1


def compile_once(folder):
    """Let one process compile a CPU function that others need, too; they wait, and read it from Numba's cache.

    In a fresh checkout every process would compile all of them, half a minute each. folder: of the locks, a file for a
    function. Numba's own lock is taken first, so two threads of a process do not wait for each other.
    """
    compile_now = numba.core.dispatcher.Dispatcher.compile

    @functools.wraps(compile_now)
    def compile_locked(dispatcher, signature):
        if isinstance(dispatcher._cache, NullCache):
            return compile_now(dispatcher, signature)
        function = dispatcher.py_func
        with global_compiler_lock, open(folder / f"{function.__module__}.{function.__qualname__}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return compile_now(dispatcher, signature)

    numba.core.dispatcher.Dispatcher.compile = compile_locked
    return compile_now


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory):
    """compile_once among the processes of a test session."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    folder = tmp_path_factory.getbasetemp().parent / "compiled"
    folder.mkdir(exist_ok=True)
    compile_now = compile_once(folder)
    yield
    numba.core.dispatcher.Dispatcher.compile = compile_now


@pytest.fixture(scope="session")
def pictures_folder(tmp_path_factory):
    """For the pictures that the processes of a test session draw once."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return tmp_path_factory.mktemp("pictures")
    folder = tmp_path_factory.getbasetemp().parent / "pictures"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def drawn_once(pictures_folder):
    """Runs of tests copy the curves that an earlier one with the same metrics has drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "pictures_folder", pictures_folder)
        patch.setattr(metrics, "plot", pictures.drawn_once(pictures_folder))
        yield


@pytest.fixture
def every_picture(monkeypatch):
    """Curves are drawn for every run of the test."""
    monkeypatch.setattr(metrics, "plot", plots.plot)


@pytest.fixture(scope="session", autouse=True)
def engines_forked():
    """Inference processes are forked from a process that has imported all they need, but for those of command lines."""
    with pytest.MonkeyPatch.context() as patch:
        if device.name() == "cpu":
            patch.setattr(inference, "spawn", processes.fork_engine)
        yield


@pytest.fixture
def quick_starts(monkeypatch):
    """Ranks are forked from a process that has imported all they need: a second of the CPU less for each.

    What rank 0 prints goes where that process prints, not where a test captures it.
    """
    context = processes.Forking()
    # The module: the package has a function of this name.
    monkeypatch.setattr(importlib.import_module("rlnumba.parallel.launch"), "get_context", lambda kind: context)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_replaced(request):
    """After a module, the functions and classes of the package are those before it: what a test replaces, it puts back.

    A process has the modules of others between tests of one; each time it leaves one, it compares. What a fixture of
    the session replaces is replaced before and after.
    """
    before = left_replaced.attributes()
    yield
    names = left_replaced.names(before)
    if names:
        pytest.fail(f"{request.node.nodeid} left replaced: {', '.join(names)}", pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def kept_out_of_collections():
    """After a module, what is left of its tests stays: no later search for garbage looks at it.

    Above all Numba's objects of all that was compiled: a process has millions, and plans of memory search twice each.
    """
    yield
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    """Tests of several processes share a GPU, and those that fill its memory have it alone, one after the other."""
    if "workerinput" in config.__dict__ and device.name() == "cuda":
        # pytest-xdist gives each process a folder within that of the session.
        folder = pathlib.Path(config.option.basetemp).parent
        folder.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(TakeTurns(GpuTurns(folder)))


class TakeTurns:
    """A plugin of pytest that lets tests wait for their GpuTurns."""

    def __init__(self, turns):
        self.turns = turns

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if item.originalname in ON_CPU:
            self.turns.end()
            return (yield)
        self.turns.begin(fills_gpu(item))
        try:
            return (yield)
        finally:
            if fills_gpu(item):
                # Engines refer to themselves, and a lent cache stays mapped.
                gc.collect()
            # A test of another process may fill the GPU next: with what is free then, it must have enough.
            device.xp().get_default_memory_pool().free_all_blocks()
            if not (fills_gpu(item) and nextitem is not None and fills_gpu(nextitem)):
                self.turns.end()


def in_order(items, processes):
    """The tests so that no process waits for the simulator: its parts are begun first, what compiles them is last.

    Tests that fill the GPU, for which the others wait, are together. pytest-xdist gives each process its share of the
    list (worksteal), and moves tests from the end of one to others.
    """
    parts = [item for item in items if item.originalname == "test_kernels_in_the_simulator"]
    last = [item for item in items if item.originalname == "test_every_launched_kernel_compiles_for_gpus"]
    others = [item for item in items if item not in parts and item not in last]
    others.sort(key=fills_gpu, reverse=True)
    ordered = []
    for process in range(processes):
        ordered += parts[process::processes]
        room = max(len(items) * (process + 1) // processes - len(ordered), 0)
        ordered += others[:room]
        others = others[room:]
    return ordered + others + last


def pytest_collection_modifyitems(config, items):
    name = device.name()
    for item in items:
        # Not item.keywords, which have the names of folders, too.
        marks = {mark.name for mark in item.iter_markers()}
        if "slow" in marks and "sim" in marks and not os.environ.get("RLNUMBA_SLOW"):
            item.add_marker(pytest.mark.skip(reason="minutes in the simulator; RLNUMBA_SLOW=1 runs it"))
        if "gpu" in marks and name != "cuda":
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        elif "sim" in marks and "gpu" not in marks and name == "cpu":
            item.add_marker(pytest.mark.skip(reason="runs with NUMBA_ENABLE_CUDASIM=1 (tests/test_simulator.py does)"))
        elif "sm90" in marks and name == "cuda" and dispatch.architecture() != (9, 0):
            item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))
    if PART:
        part, parts = map(int, PART.split("/"))
        # Of those that run alone: which ones are skipped repeats with parameters, and would leave a part the most work.
        run = [item for item in items if "sim" in item.keywords and item.get_closest_marker("skip") is None]
        items[:] = run[part::parts]
    items[:] = in_order(items, getattr(config, "workerinput", {}).get("workercount", 1))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def samples():
    """The folder of sample models and data that RLNUMBA_SAMPLES names."""
    folder = os.environ.get("RLNUMBA_SAMPLES")
    if not folder or not pathlib.Path(folder).is_dir():
        pytest.skip("RLNUMBA_SAMPLES does not name a folder of sample models")
    return pathlib.Path(folder)
