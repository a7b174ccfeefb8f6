"""Compile kernels for real GPUs without one: NVVM writes PTX, ptxas makes machine code of it and reports."""

import contextlib
import functools
import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
import tempfile
from unittest import mock

import pytest


@functools.cache
def find_ptxas():
    """ptxas of the nvidia-cuda-nvcc package, which is as new as the NVVM beside it; else the system's, or None."""
    packages = pathlib.Path(sysconfig.get_paths()["purelib"], "nvidia")
    return next((str(path) for path in packages.glob("**/bin/ptxas")), None) or shutil.which("ptxas")


@contextlib.contextmanager
def pretend(architecture):
    """Let Numba find a GPU of this compute capability where one device function calls another."""
    import numba.cuda.dispatcher

    fake = type("Device", (), {"compute_capability": architecture})
    with mock.patch.object(numba.cuda.dispatcher, "get_current_device", fake):
        yield


@functools.lru_cache(maxsize=8)
def compile_to_llvm(kernel, types):
    """Numba's code library of a kernel: its LLVM IR, from which NVVM writes PTX for any architecture.

    Type inference and lowering take four fifths of the time of a compilation and do not depend on the architecture.
    """
    from numba.cuda.compiler import _compile_pyfunc_with_fixup
    from numba.cuda.core.compiler_lock import global_compiler_lock

    from rlnumba.runtime.compile import parse_type

    options = kernel.targetoptions
    with global_compiler_lock, pretend((9, 0)):
        library, _ = _compile_pyfunc_with_fixup(
            kernel.py_func,
            tuple(parse_type(name) for name in types),
            device=False,
            abi="numba",
            fastmath=options.get("fastmath", False),
            cc=(9, 0),
            launch_bounds=options.get("launch_bounds"),
        )
    return library


def troubles_of(kernel, types, architecture):
    """What is wrong with a kernel's machine code, as a list of lines.

    types: names as launch.type_name writes them; architecture: (9, 0), or (9, 0, "a") for what only that
    architecture has. Wrong are float64 arithmetic, which an untyped literal causes, registers spilled to memory,
    local arrays that did not become registers (up to Hopper), tensor core instructions that ptxas could not pipeline,
    and whatever NVVM or ptxas refuses.
    """
    target = "sm_" + "".join(str(part) for part in architecture)
    what = f"{target} {kernel.py_func.__name__} {types}"
    ptx = compile_to_llvm(kernel, tuple(types)).get_asm_str(cc=architecture)
    troubles = []
    doubles = sorted(set(re.findall(r"\s((?:add|sub|mul|fma|div|sqrt|cvt|setp)\.\S*f64\S*)", ptx)))
    if doubles:
        troubles.append(f"{what}: float64 arithmetic {doubles}")
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [find_ptxas(), "-v", f"-arch={target}", "-o", os.devnull, str(source)]
        if "max_registers" in kernel.targetoptions:
            command.append(f"--maxrregcount={kernel.targetoptions['max_registers']}")
        report = subprocess.run(command, capture_output=True, text=True)
    # NVVM for Blackwell unrolls less than that for older GPUs, and keeps some local arrays in memory.
    where = "spill|stack frame" if architecture < (10, 0) else "spill"
    in_memory = [int(n) for n in re.findall(rf"(\d+) bytes (?:{where})", report.stderr)]
    # ptxas says so where it serialises wgmma instructions or ignores setmaxnreg.
    if report.returncode or any(in_memory) or "Potential Performance Loss" in report.stderr:
        troubles.append(f"{what}: {report.stderr.strip()[-300:]}")
    return troubles


def find_kernel(module, name, constants):
    """A kernel of a module; constants: what its factory made it with, or None."""
    kernel = getattr(importlib.import_module(module), name)
    return kernel if constants is None else kernel(*constants)


@pytest.fixture
def compile_offline():
    """troubles_of; the test skips where ptxas is missing."""
    if find_ptxas() is None:
        pytest.skip("ptxas is not installed (pip install 'rlnumba[test]')")
    return troubles_of
