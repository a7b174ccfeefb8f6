"""Compile kernels for real GPUs without one: NVVM writes PTX, ptxas makes machine code of it and reports."""

import os
import pathlib
import re
import shutil
import subprocess
import sysconfig

import pytest


def find_ptxas():
    """ptxas of the nvidia-cuda-nvcc package, which is as new as the NVVM beside it; else the system's, or None."""
    packages = pathlib.Path(sysconfig.get_paths()["purelib"], "nvidia")
    return next((str(path) for path in packages.glob("**/bin/ptxas")), None) or shutil.which("ptxas")


@pytest.fixture
def compile_offline(monkeypatch, tmp_path):
    """compile_offline(kernel, types, architecture) -> what is wrong with the machine code, as a list of lines.

    types: names as launch.type_name writes them; architecture: (9, 0), or (9, 0, "a") for what only that
    architecture has. Wrong are float64 arithmetic, which an untyped literal
    causes, registers spilled to memory, tensor core instructions that ptxas could not pipeline, and whatever
    NVVM or ptxas refuses.
    """
    ptxas = find_ptxas()
    if ptxas is None:
        pytest.skip("ptxas is not installed (pip install 'rlnumba[test]')")
    import numba.cuda.dispatcher
    from numba import cuda

    from rlnumba.kernels.launch import parse_type

    def compile_offline(kernel, types, architecture):
        # What Numba asks of the current device when one device function calls another.
        fake = type("Device", (), {"compute_capability": architecture})
        monkeypatch.setattr(numba.cuda.dispatcher, "get_current_device", fake)
        target = "sm_" + "".join(str(part) for part in architecture)
        what = f"{target} {kernel.py_func.__name__} {types}"
        options = kernel.targetoptions
        ptx, _ = cuda.compile_ptx(
            kernel.py_func,
            tuple(parse_type(t) for t in types),
            cc=architecture,
            fastmath=options.get("fastmath", False),
            launch_bounds=options.get("launch_bounds"),
        )
        troubles = []
        doubles = sorted(set(re.findall(r"\s((?:add|sub|mul|fma|div|sqrt|cvt|setp)\.\S*f64\S*)", ptx)))
        if doubles:
            troubles.append(f"{what}: float64 arithmetic {doubles}")
        source = tmp_path / "kernel.ptx"
        source.write_text(ptx)
        command = [ptxas, "-v", f"-arch={target}", "-o", os.devnull, str(source)]
        if "max_registers" in options:
            command.append(f"--maxrregcount={options['max_registers']}")
        report = subprocess.run(command, capture_output=True, text=True)
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", report.stderr)]
        # ptxas says so where it serialises wgmma instructions or ignores setmaxnreg.
        if report.returncode or any(spills) or "Potential Performance Loss" in report.stderr:
            troubles.append(f"{what}: {report.stderr.strip()[-300:]}")
        return troubles

    return compile_offline
