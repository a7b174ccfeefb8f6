"""The benches that run without a GPU can be started, whatever has been renamed in the package since they last ran."""

import argparse
import importlib
import importlib.util
import pathlib
import sys

import pytest

BENCH = pathlib.Path(__file__).parent.parent / "bench"
NAMES = sorted(path.stem for path in BENCH.glob("*.py") if "import cupy" not in path.read_text())
# The timers need CuPy.
NAMES.remove("decode_step")


@pytest.fixture
def imported(monkeypatch):
    """importlib.import_module for modules of bench/, which are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield importlib.import_module
    for added in set(sys.modules) - before:
        if pathlib.Path(getattr(sys.modules[added], "__file__", None) or "").parent == BENCH:
            del sys.modules[added]


@pytest.mark.parametrize("name", NAMES)
def test_a_bench_can_be_imported(imported, name):
    assert imported(name).__file__ == str(BENCH / f"{name}.py")


def test_fsdp2_without_torch_is_one_row_that_says_so(monkeypatch, capsys, imported):
    train_fsdp2 = imported("train_fsdp2")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found("json"))
    assert train_fsdp2.print_rows(argparse.Namespace()) == {}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and "not run: torch not installed" in lines[0]
