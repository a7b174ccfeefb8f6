"""Tools and environments where completions are drawn ahead of training: here, and by inference processes."""

import dataclasses
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from rlnumba.config import AsyncConfig, DeployConfig, EnvironmentConfig, RewardsConfig
from rlnumba.environments.agents import AgentsSetup, GivenTools, given
from rlnumba.errors import ConfigError
from rlnumba.rewards.calling import Rewards
from rlnumba.rewards.loading import RewardsSetup, resolve
from rlnumba.runs.callbacks import given as given_callbacks
from rlnumba.runs.ranks import train_on_ranks
from tests.parallel.test_asynchronous import KillOnce
from tests.trainers.runs import metrics_of
from tests.trainers.test_agents import TOOLS, agent_run, completions_of, train
from tests.trainers.test_resume import hash_of

# With a tool of its own; it notes in which process it is closed.
ENVIRONMENT = """
import asyncio
import os
from pathlib import Path


class Product:
    def reset(self, answer, seed):
        self.answer, self.seed, self.products = answer, seed, []
        return None if seed % 2 else " "

    async def multiply(self, a: int, b: int) -> int:
        \"\"\"Multiply.

        Args:
            a: One.
            b: Another.
        \"\"\"
        self.products.append(a * b)
        if (hangs := Path(__file__).parent / "hangs").exists():
            hangs.unlink()
            await asyncio.sleep(20)
        return a * b

    def get_reward(self):
        return float(self.answer in self.products) + (self.seed % 7) / 8 * len(self.products)

    def close(self):
        with open(Path(__file__).parent / "closed.txt", "a") as file:
            file.write(f"{os.getpid()}\\n")
"""


def product_run(folder, infer_gpus=0, **options):
    """A GRPORun of three steps in an environment, with [async] if there are options."""
    file = folder.parent / "products.py"
    file.write_text(ENVIRONMENT)
    run = agent_run(folder, tools=False, per_device_train_batch_size=8, max_steps=3, report_to=[], temperature=1.5)
    return dataclasses.replace(
        run,
        environment=EnvironmentConfig(factory=f"{file}:Product"),
        deploy=DeployConfig(num_infer_gpus=infer_gpus, update_weights_bucket_megabytes=1),
        asynchronous=AsyncConfig(**options) if options else None,
    )


def drawn(run):
    """What was trained on: all of completions.jsonl, in an order of its own."""
    return sorted(json.dumps(line, sort_keys=True) for line in completions_of(run))


def of_tools(run):
    """The metrics of tools and environments that are no times."""
    names = ("tools/", "rollout/turns", "env/", "completions/")
    return [
        {name: value for name, value in row.items() if name.startswith(names) and not name.endswith("_s")}
        for row in metrics_of(run)
    ]


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    run = product_run(tmp_path_factory.mktemp("synchronous") / "run")
    train(run)
    return run


@pytest.mark.parametrize("infer_gpus", [0, 1])
def test_without_staleness_the_result_is_the_synchronous_one(tmp_path, synchronous, infer_gpus):
    """Also where an inference process is killed while it plays. All environments are closed but those of that one."""
    run = product_run(tmp_path / "run", infer_gpus, max_staleness=0)
    with given_callbacks([KillOnce()] if infer_gpus else []):
        train(run)
    assert hash_of(run) == hash_of(synchronous) and drawn(run) == drawn(synchronous)
    assert of_tools(run) == of_tools(synchronous)
    closed = Path(tmp_path / "closed.txt").read_text().split()
    assert len(set(closed)) == 1 + infer_gpus and all(row["env/reset_s"] > 0 for row in metrics_of(run))


@pytest.mark.usefixtures("quick_starts")
def test_ranks_that_draw_while_they_train_play_whole_groups(tmp_path, synchronous):
    """Each in environments of its own, which it closes."""
    run, deploy = product_run(tmp_path / "run", max_staleness=0), DeployConfig(num_train_gpus=2)
    # The completions of a step on both ranks together.
    sizes = {"global_batch_size": 8 * run.train.gradient_accumulation_steps, "gradient_accumulation_steps": 1}
    train_on_ranks(dataclasses.replace(run, train=dataclasses.replace(run.train, **sizes), deploy=deploy), False)
    assert hash_of(run) == hash_of(synchronous) and drawn(run) == drawn(synchronous)
    assert of_tools(run) == of_tools(synchronous)
    assert len(set(Path(tmp_path / "closed.txt").read_text().split())) == 2


def multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: One.
        b: Another.
    """
    return a * b


def test_other_processes_find_tools_by_their_names(tmp_path, monkeypatch):
    run = agent_run(tmp_path / "run")
    monkeypatch.chdir(TOOLS)
    relative = dataclasses.replace(run, tools=dataclasses.replace(run.tools, funcs=["calculator.py:multiply"]))
    assert AgentsSetup.of(relative).tools.functions == [f"{TOOLS.resolve()}/calculator.py:multiply"]
    with given(GivenTools([multiply])):
        assert AgentsSetup.of(run).tools.functions == [f"{__name__}:multiply"]
    with given(GivenTools([lambda a: a])), pytest.raises(ConfigError, match="lambda> cannot be imported by the proc"):
        AgentsSetup.of(run)


REWARDS = """
import os
from pathlib import Path


def share(environments, completion_ids, answer, trainer_state, log_extra, log_metric, **columns):
    with open(Path(__file__).parent / "read.txt", "a") as file:
        file.write(f"{os.getpid()}\\n")
    log_extra("products", [str(each.products) for each in environments])
    log_metric("of_step", float(trainer_state.global_step))
    return [len(each.products) / len(ids) for each, ids in zip(environments, completion_ids)]


async def odd(environments, prompts, completions):
    assert [messages[-1]["role"] for messages in completions] == ["assistant"] * len(prompts)
    if any(sum(each.products) % 5 == 1 for each in environments):
        raise ValueError("an answer")
    return [float(each.answer % 2) for each in environments]
"""


def reading_run(folder, infer_gpus=0, **options):
    """A product_run with two rewards that take environments, one of which fails for some prompts."""
    folder.parent.mkdir()
    run, file = product_run(folder, infer_gpus, **options), folder.parent / "rewards.py"
    file.write_text(REWARDS)
    funcs = [f"{file}:share", *run.rewards.funcs, f"{file}:odd"]
    return dataclasses.replace(run, rewards=RewardsConfig(funcs=funcs, reward_errors="skip"))


def test_rewards_read_environments_where_these_are(tmp_path):
    """In the process that draws, also where it is killed, or a group is taken back: values, columns and metrics are
    those of one process, and each environment is used again once the rewards have read it."""
    here = reading_run(tmp_path / "here" / "run")
    options = {"max_staleness": 0, "rollout_timeout_s": 3, "max_attempts": 20}
    there = reading_run(tmp_path / "there" / "run", 1, **options)
    (tmp_path / "there" / "hangs").touch()
    train(here)
    # Two steps before the end: on a busy machine the next one's prompts may be drawn by the time.
    with given_callbacks([KillOnce(after=1)]):
        train(there)
    assert not (tmp_path / "there" / "hangs").exists()
    assert hash_of(here) == hash_of(there) and drawn(here) == drawn(there) and of_tools(here) == of_tools(there)
    lines, rows = completions_of(there), metrics_of(there)
    assert any(line["odd"] is None for line in lines) and any(line["odd"] for line in lines)
    assert all(line["share"] == len(json.loads(line["products"])) / len(line["token_ids"]) for line in lines)
    for name in ("of_step", "reward_errors/odd", "rewards/share/mean"):
        assert [row.get(name) for row in metrics_of(here)] == [row.get(name) for row in rows]
    read, closed = (Path(tmp_path / "there" / name).read_text().split() for name in ("read.txt", "closed.txt"))
    # Two processes have drawn, the first of which was killed.
    assert len(set(read)) == 2 and str(os.getpid()) not in read
    assert max(Counter(closed).values()) <= 8


def test_other_processes_find_rewards_that_read_environments(tmp_path, monkeypatch):
    run = product_run(tmp_path / "run", 1, max_staleness=0)
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    found = resolve("rewards.py:odd")
    rewards = Rewards([product, found, reads], timeout_s=3.0, errors="skip", names=["product", "odd", "reads"])
    specs = [f"{tmp_path}/rewards.py:odd", f"{__name__}:reads"]
    expected = RewardsSetup([1, 2], specs, ["odd", "reads"], 3.0, "skip")
    assert AgentsSetup.of(run, rewards).rewards == RewardsSetup.of(rewards) == expected
    assert RewardsSetup.of(Rewards([product])) is None
    # Tools alone have none.
    assert AgentsSetup.of(agent_run(tmp_path / "run"), rewards).rewards is None
    error = r"the reward <lambda> takes `environments`, and cannot be imported by the processes that draw"
    with pytest.raises(ConfigError, match=error):
        AgentsSetup.of(run, Rewards([lambda environments: None]))


def reads(environments, **columns):
    return [0.0] * len(environments)


def product(completions, **columns):
    return [0.0] * len(completions)
