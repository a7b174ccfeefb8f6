"""Runs the kernel tests in Numba's simulator, in a process of their own, and compiles what they launched.

The simulator has no type checks, so passing there is half the proof. Every (kernel, argument types) pair
that was launched is therefore compiled for real GPUs as well, without one: NVVM and ptxas come from PyPI.
"""

import importlib
import os
import pathlib
import pickle
import re
import subprocess
import sys

import pytest

from rlnumba import device

ROOT = pathlib.Path(__file__).parent.parent
# The oldest GPUs with bfloat16 tensor cores, then one of each generation since.
ARCHITECTURES = [(8, 0), (9, 0), (10, 0), (12, 0)]

if device.name() != "numpy":
    pytest.skip("starts the simulator itself, from the numpy device", allow_module_level=True)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """The finished simulator run and the file of launched signatures."""
    record = tmp_path_factory.mktemp("simulator") / "signatures.pickle"
    environment = os.environ | {
        "NUMBA_ENABLE_CUDASIM": "1",
        "RLNUMBA_RECORD_SIGNATURES": str(record),
        "RLNUMBA_DEVICE": "sim",
    }
    command = [sys.executable, "-m", "pytest", "-m", "sim", "--durations=5", "-p", "no:cacheprovider", "tests/kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done, record


def test_kernels_in_the_simulator(simulated):
    done, _ = simulated
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 50


def test_every_launched_kernel_compiles_for_gpus(simulated, compile_offline):
    signatures = pickle.loads(simulated[1].read_bytes())
    assert len(signatures) > 40
    once = {(module, name, constants): types for module, name, constants, types in signatures}
    troubles = []
    for module, name, constants, types in signatures:
        home = importlib.import_module(module)
        kernel = getattr(home, name)
        kernel = kernel if constants is None else kernel(*constants)
        # One architecture compiles everything; for the others one signature a kernel is enough.
        targets = ARCHITECTURES if once[module, name, constants] == types else [(9, 0)]
        for architecture in vars(home).get("ARCHITECTURES", targets):
            troubles += compile_offline(kernel, types, architecture)
    assert not troubles, "\n".join(troubles)
