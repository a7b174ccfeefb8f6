"""A run on several ranks: processes that do the same steps, each with its micro-batches of them.

On the cpu device a rank is a process, on cuda a process with a GPU of its own (parallel/placement.py).
"""

import dataclasses
import pickle
from contextlib import contextmanager

from rlnumba import checkpoint
from rlnumba.config.keys import Section
from rlnumba.environments.agents import NOTHING, names_of_agents
from rlnumba.environments.agents import given as given_tools
from rlnumba.errors import ConfigError, RankError
from rlnumba.model.hub import find_model, read_config
from rlnumba.model.lora import lora_of_run
from rlnumba.parallel.communicator import check_equal
from rlnumba.parallel.launch import launch
from rlnumba.parallel.placement import placement
from rlnumba.parallel.ray_launch import launch_on_nodes
from rlnumba.reporting.stderr import log
from rlnumba.rewards import resolve as resolve_reward
from rlnumba.rewards.imports import check_imports
from rlnumba.rewards.loading import check_object, check_reward, is_users
from rlnumba.runs.callbacks import given
from rlnumba.runs.planning.fit import fit_to_device
from rlnumba.runs.resolve import resolve
from rlnumba.runs.run_folder import RESUMES, owner_of, start_compiling
from rlnumba.runs.run_inputs import located
from rlnumba.runtime import device
from rlnumba.runtime.environment import versions_of_results
from rlnumba.trainers.every import TRAINERS


def train_on_ranks(run, resume, reward_funcs=(), callbacks=(), tools=NOTHING):
    """Train a run on run.num_ranks processes, of which the first writes its folder: the TrainerState.

    reward_funcs: functions, or names of [rewards], where run.rewards.funcs is not enough to find them; callbacks: those
    that `given` takes; tools: GivenTools. Raises RankError for the first rank that fails, ConfigError where there are
    no devices for all, or for a function or an object that other processes cannot have.
    """
    # Before the ranks have their devices: the kernels of all are listed here.
    count, run = run.num_ranks, run.resolved()
    num_nodes, timeout_s = run.deploy.num_train_nodes, run.deploy.dist_timeout_seconds
    place = placement(count // num_nodes, "deploy.num_train_gpus")
    for each in (*reward_funcs, *callbacks, *tools.objects):
        check_picklable(each, count)
    arguments = run, resume, list(reward_funcs), list(callbacks), tools
    with owner_of(run), last_checkpoint_named(run.output_dir):
        # What each rank would refuse, once kernels are compiled. The memory of their GPUs is theirs to ask for.
        resolve(located(run), device.name() == "cuda", None)
        check_named(located(run), reward_funcs, tools)
        start_compiling(run)
        if num_nodes > 1:
            return launch_on_nodes(_train, count, num_nodes, *arguments, timeout_s=timeout_s)[0]
        group_size = run.deploy.ranks_of_engine
        return launch(_train, count, *arguments, timeout_s=timeout_s, group_size=group_size, **place)[0]


def check_named(run, reward_funcs, tools=NOTHING):
    """Raise, before anything is compiled, where a reward, a callback, a tool, an environment, a rollout function or the
    first adapter is not there, as each rank would, or where a module of theirs cannot be imported.

    run: with the paths that its inputs have; the others are train_on_ranks's.
    """
    rewards = getattr(run, "rewards", None)
    funcs = [each for each in reward_funcs or (rewards.funcs if rewards else ()) if isinstance(each, str)]
    named = [("train.callbacks", each) for each in run.train.callbacks]
    if run.generates:
        named += names_of_agents(run, tools)
    for each in funcs:
        check_reward(each, rewards.judges)
    for key, each in named:
        check_object(each, key)
    if run.lora is not None:
        lora_of_run(run.lora, read_config(find_model(run.model, weights=False)))
    check_imports([("rewards.funcs", each) for each in funcs if is_users(each)] + named)


@contextmanager
def last_checkpoint_named(output_dir):
    """If a rank is lost in the block, log from which checkpoint the run goes on: no later step is whole."""
    try:
        yield
    except RankError as error:
        if error.is_lost:
            found = checkpoint.existing(output_dir)
            where = f"{RESUMES[0]} goes on from {found[0]} ({RESUMES[1]})" if found else "no checkpoint is complete yet"
            log(f"rank {error.rank} has taken its part of the last step with it: {where}")
        raise


def _train(communicator, run, resume, reward_funcs, callbacks, tools):
    """Train on one rank; the first returns the TrainerState."""
    check_equal(communicator, facts_of(run))
    functions = [resolve_if_named(each) for each in reward_funcs]
    # Callbacks are called once.
    with given(callbacks if communicator.rank == 0 else ()), given_tools(tools):
        run = fit_to_device(located(run), communicator)
        state = TRAINERS[run.trainer].train(run, resume, functions, communicator)
    return state if communicator.rank == 0 else None


def resolve_if_named(reward):
    """A reward function, or the one of a name."""
    return resolve_reward(reward) if isinstance(reward, str) else reward


def check_picklable(value, count):
    """Raise ConfigError for a function or an object that cannot be sent to the processes of `count` ranks."""
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(value, "__qualname__", type(value).__qualname__)
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"deploy.num_train_gpus {count}: {name} cannot be sent to other processes ({reason}); define it at the top "
            "of a module"
        ) from None


def facts_of(run):
    """{name: value} of what a run's result depends on: versions, and all keys."""
    facts = versions_of_results()
    for field in dataclasses.fields(run):
        value = getattr(run, field.name)
        if isinstance(value, Section):
            facts |= {f"{field.name}.{name}": each for name, each in vars(value).items()}
        else:
            facts[field.name] = value
    return facts
