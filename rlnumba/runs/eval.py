"""`rlnumba eval`: a model on a run's held-out rows, as the run would evaluate it.

a trainer on prompts      their completions, sampled with [eval] and scored by the rewards
a trainer on rows         their loss, and the trainer's other metrics

With deploy.num_train_gpus as many ranks share the prompts, or the rows.
"""

from dataclasses import replace
from pathlib import Path

from rlnumba.environments.agents import NOTHING
from rlnumba.environments.agents import given as given_tools
from rlnumba.errors import ConfigError
from rlnumba.kernels.gemm import ops as gemm
from rlnumba.model.hub import find_base, find_model
from rlnumba.model.lora import is_adapter
from rlnumba.reporting.files import make_folder, replacing, to_line
from rlnumba.reporting.stderr import silence
from rlnumba.runs.ranks import check_picklable, resolve_if_named
from rlnumba.runs.run_folder import start_compiling
from rlnumba.sampling.ranks import launch_replicas
from rlnumba.trainers.every import TRAINERS


def run_eval(run, model=None, output=None, dtype=None, status=None, reward_funcs=(), tools=NOTHING):
    """Evaluate a folder of a model or adapter on a run's data.eval: metrics by name.

    model: the folder or hub id, by default the run's. output: None, or a folder, in which metrics.json and, of prompts,
    completions.jsonl are written. reward_funcs: functions or names, in place of those that the run names; tools:
    GivenTools, likewise. Raises ConfigError without data.eval, and RowError, before any weights are loaded, for rows
    that a trainer on rows cannot read.
    """
    if run.data.eval is None:
        raise ConfigError("eval: data.eval is not set; give --data.eval FILE")
    if dtype is not None:
        run = replace(run, train=replace(run.train, dtype=dtype))
    if run.num_ranks > 1:
        # Here, because an error of a rank is a RankError.
        TRAINERS[run.trainer].check_eval_data(run)
        start_compiling(run.resolved())
    limits = {"timeout_s": run.deploy.dist_timeout_seconds}
    if run.num_ranks > 1:
        for each in (*reward_funcs, *tools.objects):
            check_picklable(each, run.num_ranks)
    arguments = "deploy.num_train_gpus", run, model, status, list(reward_funcs), tools
    found, completions = launch_replicas(evaluate, run.num_ranks, *arguments, **limits)
    if output is not None:
        make_folder(output)
        if completions:
            with replacing(Path(output) / "completions.jsonl") as file:
                file.writelines(map(to_line, completions))
        with replacing(Path(output) / "metrics.json") as file:
            file.write(to_line(found))
    return found


def describe_model(run, model=None):
    """The model that run_eval has evaluated, for the same arguments: "model DIR" or "adapter DIR on base DIR"."""
    name = model or run.model
    folder = find_model(name)
    if not is_adapter(folder):
        return f"model {name}"
    return f"adapter {name} on base {find_base(folder)[0] if run.generates else run.model}"


def evaluate(communicator, run, model, status, reward_funcs, tools=NOTHING):
    """(metrics by name, lines of completions.jsonl), on each rank. The arguments are run_eval's."""
    gemm.set_backend(run.gemm)
    if communicator.rank:
        silence()
    functions = [] if communicator.rank else [resolve_if_named(each) for each in reward_funcs]
    with given_tools(tools):
        return TRAINERS[run.trainer].evaluate(
            run, model, None if communicator.rank else status, communicator, functions
        )
