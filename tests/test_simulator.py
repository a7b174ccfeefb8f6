"""Runs the kernel tests in the simulator, in processes of their own, and compiles what they launched.

The simulator has no type checks, so passing there is half the proof. Every (kernel, argument types) pair
that was launched is therefore compiled for real GPUs as well, without one: NVVM and ptxas come from PyPI.
"""

import contextlib
import fcntl
import importlib
import os
import pathlib
import pickle
import re
import subprocess
import sys

import pytest

from rlnumba.runtime import device
from rlnumba.runtime.launch import find_kernel
from tests.kernels.sources import kernels_of
from tests.offline import find_ptxas, troubles_of

ROOT = pathlib.Path(__file__).parent.parent
# The oldest GPUs with bfloat16 tensor cores, then one of each generation since.
ARCHITECTURES = [(8, 0), (9, 0), (10, 0), (12, 0)]
# Processes that the simulator's tests are spread over, those with warps in another order, and parts that the launched
# kernels are compiled in.
PARTS, ORDERED_PARTS, COMPILED_PARTS = 5, 3, 32
# Files below tests/kernels, of kernels whose warps go on apart from each other, and the order.
ORDERED = (
    "test_delta_rule_decode.py", "test_delta_rule_tensor.py", "test_attention_sm90.py",
    "test_attention_backward_sm90.py", "test_paged_attention.py", "test_dec*.py", "test_gemm_sm90.py",
    "test_grouped_gemm_sm90.py", "test_quantized_g*.py", "test_logprob_sm90.py", "test_sampling.py",
)  # fmt: skip
SEED = "3"

if device.name() != "cpu":
    pytest.skip("starts the simulator itself, from the cpu device", allow_module_level=True)


def files_with_simulator_tests():
    paths = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.sim" in path.read_text()]
    return [str(path.relative_to(ROOT)) for path in paths if path.name != "test_simulator.py"]


@contextlib.contextmanager
def locked(path):
    """Hold a file's lock, which processes of one test session share."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_tests(files, **environment):
    """The CompletedProcess of the simulator's tests of files, below the project, with environment variables."""
    command = [sys.executable, "-m", "pytest", "-m", "sim", "-n", "0", "-p", "no:cacheprovider"]
    command += ["--durations=5", *files]
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "RLNUMBA_DEVICE": "sim"} | environment
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def simulate(folder, part):
    """(exit status, output) of a part's tests in the simulator, and the set of signatures that they launched.

    A part is every PARTS-th test: all parts take about as long, as tests of one file and one kernel are spread over
    them. A part runs once a session; its result lies in `folder`, which all processes of the session share.
    """
    result = folder / f"part-{part}.pickle"
    with locked(folder / f"part-{part}.lock"):
        if not result.exists():
            record = folder / f"signatures-{part}"
            record.mkdir()
            done = run_tests(
                files_with_simulator_tests(), RLNUMBA_PART=f"{part}/{PARTS}", RLNUMBA_RECORD_SIGNATURES=str(record)
            )
            launched = {signature for file in record.iterdir() for signature in pickle.loads(file.read_bytes())}
            result.write_bytes(pickle.dumps((done.returncode, done.stdout + done.stderr, launched)))
    return pickle.loads(result.read_bytes())


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory):
    """A folder that all processes of the test session share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "simulator"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def signatures(session_folder):
    """All signatures launched in the simulator: (module, name, constants, types), in one order."""
    launched = set().union(*(simulate(session_folder, part)[2] for part in range(PARTS)))
    return sorted(launched, key=repr)


@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_in_the_simulator(session_folder, part):
    status, output, _ = simulate(session_folder, part)
    assert status == 0, output[-6000:]
    assert int(re.search(r"(\d+) passed", output)[1]) > 5


@pytest.mark.parametrize("part", range(ORDERED_PARTS))
def test_warps_far_ahead_of_others(part):
    """Each result has its bits in whatever order warps run: one that does not would differ from its reference."""
    paths = sorted(path for pattern in ORDERED for path in (ROOT / "tests" / "kernels").glob(pattern))
    files = dict.fromkeys(str(path.relative_to(ROOT)) for path in paths)
    done = run_tests(files, RLNUMBA_PART=f"{part}/{ORDERED_PARTS}", RLNUMBA_SIMULATOR_SEED=SEED)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 50


def test_every_kernel_was_launched(signatures):
    launched = {(module, name) for module, name, _, _ in signatures}
    written = {
        (".".join(path.relative_to(ROOT).with_suffix("").parts), kernel.name)
        for path in (ROOT / "rlnumba/kernels").rglob("*.py")
        for kernel in kernels_of(path)
    }
    assert len(written) > 40
    assert not written - launched


def architectures_of(module, others):
    """The architectures of a module's kernels: its ARCHITECTURES, if it has instructions of some alone, or others."""
    return vars(importlib.import_module(module)).get("ARCHITECTURES", others)


@pytest.mark.parametrize("part", range(COMPILED_PARTS))
def test_every_launched_kernel_compiles_for_gpus(signatures, compile_offline, part):
    assert len(signatures) > 40
    once = {(module, name): (constants, types) for module, name, constants, types in signatures}
    troubles = []
    # Neighbours are kernels of one module, which have functions in common.
    first, end = (len(signatures) * which // COMPILED_PARTS for which in (part, part + 1))
    for module, name, constants, types in signatures[first:end]:
        # One architecture compiles everything; for the others one signature a kernel is enough here, beside those that
        # the kernels' own tests compile.
        targets = ARCHITECTURES if once[module, name] == (constants, types) else [(9, 0)]
        for architecture in architectures_of(module, targets):
            troubles += compile_offline(find_kernel(module, name, constants), types, architecture)
    assert not troubles, "\n".join(troubles)


def test_some_of_the_listed_compilations_are_done_again(signatures):
    """Other tests compile nothing that is listed in compiled.txt."""
    if find_ptxas() is None:
        pytest.skip("ptxas is not installed (pip install 'rlnumba[test]')")
    for module, name, constants, types in signatures[:: len(signatures) // 8]:
        for architecture in architectures_of(module, [(9, 0)]):
            assert not troubles_of(find_kernel(module, name, constants), types, architecture)
