"""Where compiled code is kept: an installation, a home and a cache that cannot be written, and folders of others."""

import itertools
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib

import pytest
from packaging.requirements import Requirement

from rlnumba.cli import cli
from rlnumba.runtime import device, folders
from rlnumba.runtime.compile import cache

ROOT = pathlib.Path(__file__).parent.parent
OTHER = 65534

if device.name() != "cpu":
    pytest.skip("on the cpu device, without the simulator", allow_module_level=True)


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """An empty home and folder for temporary files, and no cache named; a home without the right to write."""
    for name in ("NUMBA_CACHE_DIR", "RLNUMBA_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(folders, "MEMORY", tmp_path / "memory")
    for name in ("tmp", "memory", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    # As root every folder can be written.
    unwritable = [folders.PACKAGE, tmp_path / "home"]
    can_be_written = folders.can_be_written

    def as_another_user(folder):
        return can_be_written(folder) and not any(folder.is_relative_to(parent) for parent in unwritable)

    monkeypatch.setattr(folders, "can_be_written", as_another_user)
    return unwritable


def numba_cache():
    """What set_numba_cache sets."""
    folders.set_numba_cache()
    return os.environ.get("NUMBA_CACHE_DIR")


def test_the_order_of_numbas_cache(environment, tmp_path, monkeypatch):
    import numba

    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    private = tmp_path / "tmp" / f"rlnumba-{os.getuid()}"
    assert numba_cache() == numba.config.CACHE_DIR == str(private / "numba")
    assert private.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    environment.remove(tmp_path / "home")
    assert numba_cache() == str(tmp_path / "home" / ".cache" / "rlnumba" / "numba")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    environment.remove(folders.PACKAGE)
    assert numba_cache() == ""
    monkeypatch.setenv("RLNUMBA_CACHE_DIR", str(tmp_path / "given"))
    assert numba_cache() == str(tmp_path / "given" / "numba")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/own")
    assert numba_cache() == "/own"


def test_a_temporary_folder_of_others_is_not_used(environment, tmp_path):
    private = tmp_path / "tmp" / f"rlnumba-{os.getuid()}"
    private.mkdir()
    private.chmod(0o777)
    assert folders.default_cache().parent == tmp_path / "memory"
    private.rmdir()
    (tmp_path / "other").mkdir(mode=0o700)
    private.symlink_to(tmp_path / "other")
    assert folders.default_cache().parent == tmp_path / "memory"
    private.unlink()
    assert folders.default_cache() == private
    if os.getuid() == 0:
        os.chown(private, OTHER, OTHER)
        assert folders.default_cache().parent == tmp_path / "memory"


def test_a_cache_that_cannot_be_written_says_so_once(tmp_path, monkeypatch, capsys):
    """Here its folder is a file."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLNUMBA_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(cache, "_has_said", False)
    for _ in range(2):
        cache.write(cache.folder() / "a.cubin", b"")
        assert not cache.can_be_filled()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rlnumba: warning: {tmp_path / 'file'} cannot be written (") and "RLNUMBA_CACHE_DIR" in line


IMPORTS = """
import os, sys
from rlnumba.cli import run
import rlnumba.optim, rlnumba.model.transformer, rlnumba.trainers.grpo, rlnumba.engine.llm
code = run(["env"])
print(os.environ["NUMBA_CACHE_DIR"])
sys.exit(code)
"""


# Another user's process, who may read everything, for where Python or the sources are in a home, and write nowhere.
AS_OTHER_USER = ["setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups"]
AS_OTHER_USER += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]


def can_start_as_another_user():
    if shutil.which("setpriv") is None:
        return False
    return subprocess.run([*AS_OTHER_USER, sys.executable, "-c", ""], capture_output=True).returncode == 0


def lines_of_dockerfile(word):
    """What follows an instruction in examples/container/Dockerfile: list of str."""
    text = (ROOT / "examples" / "container" / "Dockerfile").read_text()
    return [line.removeprefix(f"{word} ") for line in text.splitlines() if line.startswith(f"{word} ")]


@pytest.mark.skipif(not can_start_as_another_user(), reason="only root, with setpriv, starts another user's process")
def test_the_command_of_the_container_reads_its_run_as_another_user():
    """With the image's variables, as far as a machine without a GPU can go: its RUN lines are only parsed."""
    (command,) = map(json.loads, lines_of_dockerfile("CMD"))
    tmp = pathlib.Path(tempfile.mkdtemp())
    try:
        tmp.chmod(0o1777)
        pairs = [pair.split("=") for line in lines_of_dockerfile("ENV") for pair in line.split()]
        variables = {name: value.replace("/tmp", str(tmp)) for name, value in pairs}
        environment = {**os.environ, **variables, "HOME": "/", "TMPDIR": str(tmp), "PYTHONPATH": str(ROOT)}
        arguments = [*AS_OTHER_USER, sys.executable, "-m", "rlnumba", *command[1:], "--dry-run"]
        done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert 'output_dir = "/runs/quickstart"' in done.stdout
    finally:
        shutil.rmtree(tmp)
    (compiling,) = (shlex.split(line) for line in lines_of_dockerfile("RUN") if line.startswith("rlnumba "))
    context = cli.commands[compiling[1]].make_context("compile", compiling[2:])
    assert context.params["gpu"] == "h100" and all((ROOT / file).exists() for file in context.params["config"])


def test_constraints_are_of_all_dependencies_and_allowed():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [Requirement(text) for text in (*project["dependencies"], *itertools.chain(*extras))]
    # It needs another openai than the tests do: no set of versions has both.
    wanted = [each for each in wanted if each.name != "verifiers"]
    names = {each.name.lower().replace("_", "-") for each in wanted}
    assert names <= set(pinned)
    for each in wanted:
        version = pinned[each.name.lower().replace("_", "-")]
        assert each.specifier.contains(version), f"{each}: {version}"


@pytest.mark.skipif(not can_start_as_another_user(), reason="only root, with setpriv, starts another user's process")
def test_another_user_without_a_home_can_import_and_run():
    """Who can write neither the installation nor a home, as with `docker run --user`."""
    # Not tmp_path, which other users cannot enter.
    tmp = pathlib.Path(tempfile.mkdtemp())
    try:
        tmp.chmod(0o1777)
        kept = {name: value for name, value in os.environ.items() if "CACHE_DIR" not in name}
        environment = kept | {"HOME": "/", "TMPDIR": str(tmp), "PYTHONPATH": str(ROOT), "MPLCONFIGDIR": str(tmp)}
        command = [*AS_OTHER_USER, sys.executable, "-c", IMPORTS]
        done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == str(tmp / f"rlnumba-{OTHER}" / "numba")
    finally:
        shutil.rmtree(tmp)
