"""The benches that run without a GPU can be started, whatever has been renamed in the package since they last ran."""

import importlib
import pathlib
import sys

import pytest

BENCH = pathlib.Path(__file__).parent.parent / "bench"
NAMES = sorted(path.stem for path in BENCH.glob("*.py") if "import cupy" not in path.read_text())
# The timers need CuPy.
NAMES.remove("decode_step")


@pytest.mark.parametrize("name", NAMES)
def test_a_bench_can_be_imported(monkeypatch, name):
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    try:
        assert importlib.import_module(name).__file__ == str(BENCH / f"{name}.py")
    finally:
        for added in set(sys.modules) - before:
            if pathlib.Path(getattr(sys.modules[added], "__file__", None) or "").parent == BENCH:
                del sys.modules[added]
