"""The list of compilations that are not done again: what its keys follow from, and who reads and writes it."""

import pathlib

import pytest

from rlnumba.kernels.nn import swiglu
from rlnumba.runtime import device
from rlnumba.runtime.compile import cache
from tests import offline

if device.name() != "cpu":
    pytest.skip("on the cpu device, without the simulator", allow_module_level=True)
if offline.find_ptxas() is None:
    pytest.skip("ptxas is not installed (pip install 'rlnumba[test]')", allow_module_level=True)

KERNEL = swiglu.swiglu_kernel(4, 4, False)
TYPES = ("uint16[:,::1]", "uint16[:,::1]")


def test_a_key_follows_from_all_that_is_compiled(monkeypatch):
    keys = {offline.compilation_key(KERNEL, TYPES, architecture) for architecture in ((8, 0), (9, 0), (9, 0, "a"))}
    keys |= {offline.compilation_key(KERNEL, ("float32[:,::1]",) * 2, (9, 0))}
    keys |= {offline.compilation_key(swiglu.swiglu_kernel(1, 1, False), TYPES, (9, 0))}
    keys |= {offline.compilation_key(swiglu.swiglu_backward_kernel(4, 4, False, False), TYPES, (9, 0))}
    monkeypatch.setattr(offline, "compilers", lambda: ["99.0"])
    keys |= {offline.compilation_key(KERNEL, TYPES, (9, 0))}
    monkeypatch.undo()
    # As after a change of the instructions that the kernel uses.
    read, instructions = pathlib.Path.read_bytes, "rlnumba/kernels/ptx/warp.py"
    changed = lambda path: read(path) + b"#" * path.as_posix().endswith(instructions)  # noqa: E731
    monkeypatch.setattr(pathlib.Path, "read_bytes", changed)
    cache.sources_digest.cache_clear()
    keys |= {offline.compilation_key(KERNEL, TYPES, (9, 0))}
    cache.sources_digest.cache_clear()
    assert len(keys) == 8


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The architectures that troubles_of is asked for in a session of its own, whose list is `tmp_path/list`."""
    asked = []

    def troubles_of(kernel, types, architecture):
        asked.append(architecture)
        return ["spills"] if architecture == (8, 0) else []

    monkeypatch.setattr(offline, "troubles_of", troubles_of)
    monkeypatch.setattr(offline, "LISTED", tmp_path / "list")
    offline.LISTED.write_text(f"{offline.compilation_key(KERNEL, TYPES, (9, 0))}\nof a kernel that is no more\n")
    offline.listed.cache_clear()
    yield asked
    offline.listed.cache_clear()


def test_what_is_listed_is_not_compiled(compiled, tmp_path):
    found = [
        offline.troubles_once(tmp_path / "troubles", KERNEL, TYPES, at) for at in ((8, 0), (9, 0), (8, 0), (12, 0))
    ]
    assert found == [["spills"], [], ["spills"], []]
    assert compiled == [(8, 0), (12, 0)]


def test_everything_is_compiled_where_the_list_is_ignored(compiled, tmp_path, monkeypatch):
    monkeypatch.setattr(offline, "MODE", "ignore")
    assert offline.troubles_once(tmp_path, KERNEL, TYPES, (9, 0)) == []
    assert compiled == [(9, 0)]


def test_the_list_has_what_the_session_found_right(compiled, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    for architecture in ((8, 0), (9, 0), (12, 0)):
        offline.troubles_once(offline.answers_folder(tmp_path), KERNEL, TYPES, architecture)
    before = offline.LISTED.read_text()
    monkeypatch.setattr(offline, "MODE", "read")
    offline.write_list(tmp_path)
    assert offline.LISTED.read_text() == before
    monkeypatch.setattr(offline, "MODE", "write")
    offline.write_list(tmp_path)
    right = [offline.compilation_key(KERNEL, TYPES, architecture) for architecture in ((9, 0), (12, 0))]
    assert offline.LISTED.read_text().split() == sorted(right)
