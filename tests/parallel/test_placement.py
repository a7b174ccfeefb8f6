"""Which GPU each rank uses, without a GPU."""

import dataclasses
import types

import pytest

from rlnumba import cli
from rlnumba.config import DeployConfig, to_toml
from rlnumba.errors import ConfigError
from rlnumba.parallel import placement
from rlnumba.parallel.placement import RANKS_PER_GPU, gpus_of_ranks, num_sharing
from rlnumba.runtime import device
from tests.trainers.runs import sft_run


@pytest.fixture
def machine(monkeypatch):
    """A function that gives this machine so many GPUs, `apart`: pairs that cannot access each other."""

    def gpus(count, apart=()):
        monkeypatch.setattr(device, "gpu_count", lambda: count)
        monkeypatch.setattr(device, "can_access", lambda gpu, other: {gpu, other} not in map(set, apart))

    return gpus


@pytest.mark.parametrize(
    "gpus, most, found",
    [
        (4, None, [0, 1, 2, 3]),
        (8, "2", [0, 1, 2, 3]),
        (1, "4", [0, 0, 0, 0]),
        (2, "2", [0, 1, 0, 1]),
        (3, "2", [0, 1, 2, 0]),
    ],
)
def test_ranks_share_where_there_are_too_few(machine, monkeypatch, gpus, most, found):
    machine(gpus)
    if most is not None:
        monkeypatch.setenv(RANKS_PER_GPU, most)
    assert gpus_of_ranks(4, "key") == found


def test_how_many_processes_share_a_gpu(machine, monkeypatch):
    machine(2)
    assert num_sharing(8) == 1
    monkeypatch.setattr(device, "name", lambda: "cuda")
    assert num_sharing(8) == 1, "of another machine's GPUs, which are planned for here"
    monkeypatch.setenv(RANKS_PER_GPU, "3")
    assert [num_sharing(count) for count in (1, 2, 3, 4, 5, 6, 8)] == [1, 1, 2, 2, 3, 3, 3]


@pytest.mark.parametrize(
    "gpus, apart, most, message",
    [
        (1, (), "", r"key is 4, and this machine has 1 GPU \(to try out: RLNUMBA_RANKS_PER_GPU\)"),
        (1, (), "2", "has 1 GPU, of which RLNUMBA_RANKS_PER_GPU allows 2 ranks each"),
        (2, (), "", "key is 4, and this machine has 2 GPUs"),
        (4, [(1, 3)], "", "key is 4: GPUs 1 and 3 cannot access each other's memory"),
        (4, (), "0", "RLNUMBA_RANKS_PER_GPU must be an integer of at least 1, got '0'"),
        (4, (), "two", "RLNUMBA_RANKS_PER_GPU must be an integer of at least 1, got 'two'"),
    ],
)
def test_what_is_not_there_is_refused(machine, monkeypatch, gpus, apart, most, message):
    machine(gpus, apart)
    monkeypatch.setenv(RANKS_PER_GPU, most)
    with pytest.raises(ConfigError, match=message):
        gpus_of_ranks(4, "key")


def test_a_run_on_too_many_gpus_is_one_line(machine, monkeypatch, tmp_path, capsys):
    """Before any process is started."""
    machine(1)
    run = dataclasses.replace(sft_run(tmp_path / "run"), deploy=DeployConfig(num_train_gpus=2))
    (tmp_path / "run.toml").write_text(to_toml(run))
    on_cuda = types.SimpleNamespace(name=lambda: "cuda", gpu_count=device.gpu_count, can_access=device.can_access)
    monkeypatch.setattr(placement, "device", on_cuda)
    assert cli.run(["sft", "--config", str(tmp_path / "run.toml")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("rlnumba: deploy.num_train_gpus is 2, and this machine has 1 GPU")


def test_how_ranks_are_started(machine, monkeypatch):
    """Several on the GPUs of this host; on the cpu device anywhere, as one alone."""
    machine(2)
    assert placement.placement(2, "key") == {}
    monkeypatch.setattr(device, "name", lambda: "cuda")
    assert placement.placement(2, "key") == {"transport": "peer", "gpus": [0, 1]}
    assert placement.placement(1, "key") == {}
    with pytest.raises(ConfigError, match="^the option is 3, and this machine has 2 GPUs"):
        placement.placement(3, "the option")
