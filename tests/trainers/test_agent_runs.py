"""Tools and environments with what else a run may have: adapters, more iterations, drawing ahead, resuming."""

import shutil
from dataclasses import replace

from rlnumba.config import EnvironmentConfig
from tests.trainers.test_agents import ENVIRONMENT, TOOLS, agent_run, train
from tests.trainers.test_run_digest import del_module

SMALL = {"per_device_train_batch_size": 8, "max_steps": 1}


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
