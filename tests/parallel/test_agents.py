"""Tools and environments where completions are drawn ahead of training: here, and by inference processes."""

import dataclasses
import json
from pathlib import Path

import pytest

from rlnumba.config import AsyncConfig, DeployConfig, EnvironmentConfig
from rlnumba.environments.agents import AgentsSetup, GivenTools, given
from rlnumba.errors import ConfigError
from rlnumba.rewards.calling import Rewards
from rlnumba.runs.callbacks import given as given_callbacks
from rlnumba.runs.prompt_loop import check_environments_are_here
from tests.parallel.test_asynchronous import KillOnce
from tests.trainers.runs import metrics_of
from tests.trainers.test_agents import TOOLS, agent_run, completions_of, train
from tests.trainers.test_resume import hash_of

# With a tool of its own; it notes in which process it is closed.
ENVIRONMENT = """
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


def takes(environments, **columns):
    return [0.0] * len(environments)


def test_rewards_that_take_environments_need_them_here(tmp_path):
    run = product_run(tmp_path / "run", 1, max_staleness=0)
    check_environments_are_here(run, Rewards([product]))
    check_environments_are_here(product_run(tmp_path / "run"), Rewards([takes]))
    error = r"deploy.num_infer_gpus \(1\) does not go with the reward takes: it takes `environments`"
    with pytest.raises(ConfigError, match=error):
        check_environments_are_here(run, Rewards([product, takes]))


def product(completions, **columns):
    return [0.0] * len(completions)
