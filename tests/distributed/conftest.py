"""Fixtures of the tests that start ranks."""

import importlib

import pytest

from tests import processes


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """The process that starts ranks waits for what other ranks report as long as they take on a busy machine."""
    # The module: the package has a function of this name.
    monkeypatch.setattr(importlib.import_module("rlnumba.distributed.launch"), "REPORT_S", 120.0)


@pytest.fixture
def quick_starts(monkeypatch):
    """Ranks are forked from a process that has imported all they need: a second of the CPU less for each.

    What rank 0 prints goes where that process prints, not where a test captures it.
    """
    context = processes.Forking()
    # The module: the package has a function of this name.
    monkeypatch.setattr(importlib.import_module("rlnumba.distributed.launch"), "get_context", lambda kind: context)
