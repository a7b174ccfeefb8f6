"""Fixtures of the tests that start ranks."""

from tests.parallel.conftest import patience  # noqa: F401
