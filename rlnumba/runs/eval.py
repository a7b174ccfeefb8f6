"""`rlnumba eval`: a model on a run's held-out rows, as the run would evaluate it.

a trainer on prompts      their completions, sampled with [eval] and scored by the rewards
a trainer on rows         their loss, and the trainer's other metrics

With deploy.num_train_gpus as many ranks share the prompts, or the rows; with --tp they have a part of the model each,
and one engine.
"""

from dataclasses import replace
from pathlib import Path

from rlnumba.engine.parallel_size import choose_ranks
from rlnumba.environments.agents import NOTHING
from rlnumba.environments.agents import given as given_tools
from rlnumba.errors import ConfigError
from rlnumba.kernels.gemm import ops as gemm
from rlnumba.model.hub import find_base, find_model, read_config
from rlnumba.model.lora import is_adapter
from rlnumba.reporting.files import make_folder, replacing, to_line
from rlnumba.reporting.stderr import silence
from rlnumba.runs.ranks import check_picklable, resolve_if_named
from rlnumba.runs.run_folder import start_compiling
from rlnumba.sampling.ranks import launch_replicas
from rlnumba.trainers.every import TRAINERS


def run_eval(
    run, model=None, output=None, dtype=None, status=None, reward_funcs=(), tools=NOTHING, tensor_parallel_size=1
):
    """Evaluate a folder of a model or adapter on a run's data.eval: metrics by name.

    model: the folder or hub id, by default the run's. output: None, or a folder, in which metrics.json and, of prompts,
    completions.jsonl are written. reward_funcs: functions or names, in place of those that the run names; tools:
    GivenTools, likewise. tensor_parallel_size: ranks that have a part of the model each, 0 for as few as it fits in; of
    a trainer on prompts. Raises ConfigError without data.eval, and RowError, before any weights are loaded, for rows
    that a trainer on rows cannot read.
    """
    if run.data.eval is None:
        raise ConfigError("eval: data.eval is not set; give --data.eval FILE")
    if dtype is not None:
        run = replace(run, train=replace(run.train, dtype=dtype))
    num_parts = 1 if tensor_parallel_size == 1 else _num_parts(run, model or run.model, tensor_parallel_size)
    key, count = ("tensor_parallel_size", num_parts) if num_parts > 1 else ("deploy.num_train_gpus", run.num_ranks)
    if count > 1:
        # Here, because an error of a rank is a RankError.
        TRAINERS[run.trainer].check_eval_data(run)
        if num_parts == 1:
            start_compiling(run.resolved())
        for each in (*reward_funcs, *tools.objects):
            check_picklable(each, count)
    limits = {"timeout_s": run.deploy.dist_timeout_seconds}
    arguments = key, run, model, status, list(reward_funcs), tools, num_parts > 1
    found, completions = launch_replicas(evaluate, count, *arguments, **limits)
    if output is not None:
        make_folder(output)
        if completions:
            with replacing(Path(output) / "completions.jsonl") as file:
                file.writelines(map(to_line, completions))
        with replacing(Path(output) / "metrics.json") as file:
            file.write(to_line(found))
    return found


def _num_parts(run, model, asked):
    """The number of ranks that have a part of the model each, for --tp: int. Raises ConfigError."""
    if not run.generates:
        raise ConfigError(
            f"eval: --tp cuts the model of an engine, which {run.trainer} evaluates without; --deploy.num_train_gpus "
            "shares its rows"
        )
    gemm.set_backend(run.gemm)
    base, adapter = find_base(model)
    config, share = read_config(base, adapter), run.engine.gpu_memory_utilization
    size = choose_ranks(asked, config, run.train.dtype, share, run.quantization)
    if run.num_ranks not in (1, size):
        raise ConfigError(
            f"eval: --tp {size} and deploy.num_train_gpus ({run.num_ranks}): one engine draws, on as many GPUs as have "
            f"a part of its model; leave one of the two out"
        )
    return size


def describe_model(run, model=None):
    """The model that run_eval has evaluated, for the same arguments: "model DIR" or "adapter DIR on base DIR"."""
    name = model or run.model
    folder = find_model(name)
    if not is_adapter(folder):
        return f"model {name}"
    return f"adapter {name} on base {find_base(folder)[0] if run.generates else run.model}"


def evaluate(communicator, run, model, status, reward_funcs, tools=NOTHING, is_cut=False):
    """(metrics by name, lines of completions.jsonl), on each rank, with is_cut on rank 0. The arguments are run_eval's.

    is_cut: whether each rank has a part of the model, and not the whole of it.
    """
    gemm.set_backend(run.gemm)
    if communicator.rank:
        silence()
    functions = [] if communicator.rank else [resolve_if_named(each) for each in reward_funcs]
    with given_tools(tools):
        arguments = run, model, None if communicator.rank else status, communicator, functions
        return TRAINERS[run.trainer].evaluate(*arguments, **({"is_cut": True} if is_cut else {}))
