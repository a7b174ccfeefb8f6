"""Runs the kernel tests in Numba's simulator, in a process of their own, and compiles what they launched.

The simulator has no type checks, so passing there is half the proof. Every (kernel, argument types) pair
that was launched is therefore compiled for real GPUs as well, without one: NVVM and ptxas come from PyPI.
"""

import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

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
    record = tmp_path_factory.mktemp("simulator") / "signatures.json"
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


def find_ptxas():
    """ptxas of the system or of the nvidia-cuda-nvcc package; None without either."""
    packages = pathlib.Path(sysconfig.get_paths()["purelib"], "nvidia")
    return shutil.which("ptxas") or next((str(path) for path in packages.glob("**/bin/ptxas")), None)


def test_every_launched_kernel_compiles_for_gpus(simulated, monkeypatch, tmp_path):
    ptxas = find_ptxas()
    if ptxas is None:
        pytest.skip("ptxas is not installed (pip install 'rlnumba[test]')")
    import numba.cuda.dispatcher
    from numba import cuda

    from rlnumba.kernels.launch import parse_type

    signatures = json.loads(simulated[1].read_text())
    assert len(signatures) > 40
    troubles = []
    for architecture in ARCHITECTURES:
        # What Numba asks of the current device when one device function calls another.
        fake = type("Device", (), {"compute_capability": architecture})
        monkeypatch.setattr(numba.cuda.dispatcher, "get_current_device", fake)
        target = f"sm_{architecture[0]}{architecture[1]}"
        # One architecture compiles everything; for the others one signature a kernel is enough.
        chosen = signatures if architecture == (9, 0) else {(m, k): (m, k, t) for m, k, t in signatures}.values()
        for module, name, types in chosen:
            kernel = getattr(importlib.import_module(module), name)
            options = kernel.targetoptions
            ptx, _ = cuda.compile_ptx(
                kernel.py_func,
                tuple(parse_type(t) for t in types),
                cc=architecture,
                fastmath=options.get("fastmath", False),
                launch_bounds=options.get("launch_bounds"),
            )
            doubles = sorted(set(re.findall(r"\s((?:add|sub|mul|fma|div|sqrt|cvt|setp)\.\S*f64\S*)", ptx)))
            if doubles:
                troubles.append(f"{target} {name} {types}: float64 arithmetic {doubles}")
            source = tmp_path / "kernel.ptx"
            source.write_text(ptx)
            command = [ptxas, "-v", f"-arch={target}", "-o", os.devnull, str(source)]
            report = subprocess.run(command, capture_output=True, text=True)
            spills = [int(n) for n in re.findall(r"(\d+) bytes spill", report.stderr)]
            if report.returncode or any(spills):
                troubles.append(f"{target} {name} {types}: {report.stderr.strip()[-300:]}")
    assert not troubles, "\n".join(troubles)
