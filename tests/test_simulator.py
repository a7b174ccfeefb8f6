"""Runs the kernel tests in the simulator, in processes of their own, and compiles what they launched.

The simulator has no type checks, so passing there is half the proof. Every (kernel, argument types) pair
that was launched is therefore compiled for real GPUs as well, without one: NVVM and ptxas come from PyPI.
"""

import ast
import importlib
import multiprocessing
import os
import pathlib
import pickle
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

from rlnumba.runtime import device
from tests.offline import troubles_of_launched

ROOT = pathlib.Path(__file__).parent.parent
# The oldest GPUs with bfloat16 tensor cores, then one of each generation since.
ARCHITECTURES = [(8, 0), (9, 0), (10, 0), (12, 0)]

if device.name() != "cpu":
    pytest.skip("starts the simulator itself, from the numpy device", allow_module_level=True)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """The finished simulator run and the signatures that it launched."""
    record = tmp_path_factory.mktemp("signatures")
    environment = os.environ | {
        "NUMBA_ENABLE_CUDASIM": "1",
        "RLNUMBA_RECORD_SIGNATURES": str(record),
        "RLNUMBA_DEVICE": "sim",
    }
    command = [sys.executable, "-m", "pytest", "-m", "sim", "--durations=5", "-p", "no:cacheprovider", "tests"]
    command += ["-n", str(min(os.cpu_count(), 4))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    # Which process ran what differs from run to run; what is compiled for which GPU should not.
    launched = {signature for file in record.iterdir() for signature in pickle.loads(file.read_bytes())}
    return done, sorted(launched, key=repr)


def test_kernels_in_the_simulator(simulated):
    done, _ = simulated
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 50


def kernels_of(path):
    """The functions of a source file that @cuda.jit makes kernels of, those inside of factories too."""
    for node in ast.walk(ast.parse(path.read_text())):
        for decorator in getattr(node, "decorator_list", ()):
            options = decorator.keywords if isinstance(decorator, ast.Call) else []
            what = decorator.func if isinstance(decorator, ast.Call) else decorator
            if ast.unparse(what) == "cuda.jit" and "device" not in [option.arg for option in options]:
                yield node.name


def test_every_kernel_was_launched(simulated):
    launched = {(module, name) for module, name, _, _ in simulated[1]}
    written = {
        (".".join(path.relative_to(ROOT).with_suffix("").parts), name)
        for path in (ROOT / "rlnumba/kernels").rglob("*.py")
        for name in kernels_of(path)
    }
    assert len(written) > 40
    assert not written - launched


def test_every_launched_kernel_compiles_for_gpus(simulated, compile_offline):
    signatures = simulated[1]
    assert len(signatures) > 40
    once = {(module, name): (constants, types) for module, name, constants, types in signatures}
    jobs = []
    for module, name, constants, types in signatures:
        # One architecture compiles everything; for the others one signature a kernel is enough here, beside those that
        # the kernels' own tests compile.
        targets = ARCHITECTURES if once[module, name] == (constants, types) else [(9, 0)]
        for architecture in vars(importlib.import_module(module)).get("ARCHITECTURES", targets):
            jobs.append((module, name, constants, types, architecture))
    # Numba's compiler holds a lock of its process.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        troubles = [line for lines in pool.map(troubles_of_launched, *zip(*jobs, strict=True)) for line in lines]
    assert not troubles, "\n".join(troubles)
