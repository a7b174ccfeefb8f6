"""Fixtures of the tests that start ranks."""

import importlib

import pytest


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """The process that starts ranks waits for what other ranks report as long as they take on a busy machine."""
    # The module: the package has a function of this name.
    monkeypatch.setattr(importlib.import_module("rlnumba.parallel.launch"), "REPORT_S", 120.0)
