"""Tools and environments with what else a run may have: adapters, more iterations, drawing ahead, resuming."""

import gc
import shutil
import threading
import time
import warnings
from dataclasses import replace

import pytest

from rlnumba.config import AsyncConfig, EnvironmentConfig
from rlnumba.environments.pool import EnvironmentFailure
from rlnumba.sampling.own import OwnSampler
from tests.trainers.test_agents import ENVIRONMENT, TOOLS, agent_run, train
from tests.trainers.test_run_digest import del_module

SMALL = {"per_device_train_batch_size": 8, "max_steps": 1}


class Counted:
    """An environment that counts its instances, and refuses some tasks."""

    made = closed = 0
    refuses = False

    def __init__(self):
        Counted.made += 1

    def reset(self, answer, seed):
        if self.refuses:
            time.sleep(0.02 * (seed % 3))
            if seed % 3 == 1:
                raise ValueError("no such task")

    def close(self):
        Counted.closed += 1


def counts(environments, **columns):
    """The reward that keeps its environments until it has run."""
    return [float(i % 2) for i, _ in enumerate(environments)]


def counted_run(folder, **train):
    run = agent_run(folder, tools=False, **SMALL | train)
    return replace(
        run,
        environment=EnvironmentConfig(factory=f"{__name__}:Counted"),
        rewards=replace(run.rewards, funcs=[f"{__name__}:counts"]),
    )


@pytest.mark.parametrize("ends_at", ["reset", "poll"])
@pytest.mark.parametrize("options", [None, AsyncConfig(max_staleness=1, queue_maxsize=64)])
def test_a_run_that_ends_early_ends_its_episodes(options, ends_at, tmp_path, monkeypatch):
    """No environment is left open, no thread runs on, and no coroutine is forgotten, begun or not."""

    def fails(sampler, *arguments, **keywords):
        raise EnvironmentFailure("it ends")

    for name, value in {"made": 0, "closed": 0, "refuses": ends_at == "reset"}.items():
        monkeypatch.setattr(Counted, name, value)
    if ends_at == "poll":
        monkeypatch.setattr(OwnSampler, "poll", fails)
    run = replace(counted_run(tmp_path / "run", per_device_train_batch_size=32), asynchronous=options)
    before = set(threading.enumerate())
    with warnings.catch_warnings(record=True) as noticed:
        warnings.simplefilter("always")
        with pytest.raises(EnvironmentFailure, match=r"train.jsonl:\d+: environment: Counted.reset\(\) raised|it ends"):
            train(run)
        gc.collect()
    assert Counted.made > (ends_at == "reset") and Counted.closed == Counted.made
    left = [each for each in threading.enumerate() if each not in before and each.name in ("tool", "tool calls")]
    assert not left and not [each for each in noticed if "never awaited" in str(each.message)]


def test_a_run_that_goes_on_says_which_tools_have_changed(tmp_path, capsys):
    tool, environment = tmp_path / "calculator.py", tmp_path / "surroundings.py"
    shutil.copy(TOOLS / "calculator.py", tool)
    environment.write_text(ENVIRONMENT.replace("def multiply", "def product_of"))
    run = replace(
        agent_run(tmp_path / "run", **SMALL | {"save_steps": 1, "per_device_train_batch_size": 4}),
        environment=EnvironmentConfig(factory=f"{environment}:Secret"),
    )
    run = replace(run, tools=replace(run.tools, funcs=[f"{tool}:multiply"]))
    train(run)
    capsys.readouterr()
    longer = replace(run, train=replace(run.train, max_steps=2))
    for file in (tool, environment):
        file.write_text(file.read_text() + "# another line\n")
        del_module(file)
    train(longer, resume=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "has changed" in line] == [
        "rlnumba: environment.factory: Secret has changed, from step 2",
        "rlnumba: tools.funcs: multiply has changed, from step 2",
    ]
    train(longer, resume=True)
    assert "has changed" not in capsys.readouterr().err


def test_groups_that_are_not_needed_give_their_environments_back(tmp_path, monkeypatch):
    """With dynamic sampling, where the rewards of some that are drawn are never asked for."""
    monkeypatch.setattr(Counted, "made", 0)
    run = counted_run(
        tmp_path / "run", dynamic_sampling=True, over_sampling_batch_size=4, max_steps=3, per_device_train_batch_size=4
    )
    train(run)
    assert 4 <= Counted.made <= 16
