"""The tools and environments of a run, found by its keys, and checked before any weights are loaded.

agents = load_agents(run, tokenizer)      None for a run whose completions are single turns; a RolloutFunction for one
                                          with rollout.func
agents.prompt_tools                       what data.load_prompts needs of them
agents.episode(prompt, index, params)     the coroutine function of a prompt's rollouts
agents.draw(llm, prompts, ...)            the completions of prompts
agents.close()
"""

import weakref
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlnumba.config.rollout import PromptRun
from rlnumba.data.files import template_variables
from rlnumba.data.prompts import PromptTools
from rlnumba.environments.calls import ToolCaller
from rlnumba.environments.episode import Episode, EpisodeRow, RewardInputs, encode
from rlnumba.environments.formats import detect_format
from rlnumba.environments.openenv import PREFIX, environment_class
from rlnumba.environments.pool import GET_REWARD, GIVEN, RESET, EnvironmentPool, method_of, required_parameters
from rlnumba.environments.schema import name_of, schemas_of, tools_of
from rlnumba.environments.turns import check_turns
from rlnumba.errors import ConfigError, UserError, shown
from rlnumba.model.hub import read_config
from rlnumba.rewards.calling import importable_name
from rlnumba.rewards.loading import RewardsSetup, load_object
from rlnumba.sampling.rollout_func import RolloutFunction

# The column with the name of a row's environment.
COLUMN = "environment"
PROMPT = [{"role": "user", "content": ""}]
NO_INPUTS = RewardInputs({}, None)


class GivenTools(NamedTuple):
    """Objects of Python, or names, in the place of the keys: tools, factories {name: factory}, the name None for a
    single one, and the rollout function; None where the keys say it."""

    functions: list | None = None
    factories: dict | None = None
    rollout: object = None

    @property
    def objects(self):
        """All of them: list."""
        return [*(self.functions or ()), *(self.factories or {}).values(), *filter(None, [self.rollout])]


NOTHING = GivenTools()
_given = ContextVar("agents", default=NOTHING)


@contextmanager
def given(tools):
    """The GivenTools that the runs of the block have instead of those that their keys name."""
    token = _given.set(tools)
    try:
        yield
    finally:
        _given.reset(token)


class AgentsSetup(NamedTuple):
    """The description of a run's Agents, which another process makes of it: GivenTools of names alone. rewards: the
    RewardsSetup of the functions that read its environments, or None."""

    run: PromptRun
    tools: GivenTools
    rewards: RewardsSetup | None = None

    @classmethod
    def of(cls, run, rewards=None):
        """The AgentsSetup of a run with tools or environments and its Rewards. Raises ConfigError for objects without a
        name that other processes find them by."""
        functions, factories = _objects_of(run)
        named = GivenTools([_name_of(each) for each in functions], {name: _name_of(f) for name, f in factories.items()})
        return cls(run, named, RewardsSetup.of(rewards) if factories and rewards is not None else None)

    def agents(self, tokenizer):
        """The Agents in this process."""
        with given(self.tools):
            agents = load_agents(self.run, tokenizer)
        agents.rewards_read_environments = self.rewards is not None
        return agents


def _objects_of(run):
    """(tools, {name: factory}) of a run, each an object or a name."""
    known = _given.get()
    functions = run.tools.funcs if known.functions is None else known.functions
    return functions, run.environment.specs if known.factories is None else known.factories


def _name_of(value):
    """The name by which another process finds a tool or a factory: that of a file is its whole path."""
    if not isinstance(value, str):
        if (name := importable_name(value)) is None:
            raise ConfigError(
                f"deploy.num_infer_gpus: {getattr(value, '__qualname__', shown(value))} cannot be imported by the "
                "processes that draw; define it at the top of a module, or name it file.py:name"
            )
        return name
    source, _, name = value.rpartition(":")
    return f"{Path(source).expanduser().resolve()}:{name}" if source.endswith(".py") else value


class Toolset(NamedTuple):
    """The tools of the rows of one environment. functions: {name: function}; methods: names of the environment's;
    schemas: of all, None without any."""

    functions: dict
    methods: frozenset
    schemas: list | None


def load_agents(run, tokenizer):
    """The Agents of a run on prompts, or None. Raises UserError or ConfigError, each of one line."""
    if not run.has_episodes:
        return None
    if run.rollout.func is not None:
        function = _found(_given.get().rollout or run.rollout.func, "rollout.func")
        _check_callable(function, "rollout.func")
        return RolloutFunction(run, _needed(tokenizer, run, "rollout.func needs"), function)
    if run.data.has_tasks:
        return _taskset_agents(run, _needed(tokenizer, run, "tasks of verifiers need"))
    if run.deploy.num_infer_gpus:
        # Before anything is loaded, for objects that other processes cannot have.
        AgentsSetup.of(run)
    functions, factories = _objects_of(run)
    functions = [_found(each, "tools.funcs") for each in functions]
    factories = {name: _factory(each, _factory_key(name)) for name, each in factories.items()}
    for key, each in [("tools.funcs", f) for f in functions] + [(_factory_key(n), f) for n, f in factories.items()]:
        _check_callable(each, key)
    return Agents(run, _needed(tokenizer, run, "tools and environments need"), functions, factories)


def names_of_agents(run, tools=NOTHING):
    """[(key, name)] of the tools, factories of environments and rollout function that load_agents finds by a name in
    this process. tools: the GivenTools that the run is going to have."""
    with given(tools):
        if run.rollout.func is not None:
            named = [("rollout.func", tools.rollout or run.rollout.func)]
        else:
            functions, factories = _objects_of(run)
            named = [("tools.funcs", each) for each in functions]
            named += [(_factory_key(name), each) for name, each in factories.items()]
    return [(key, each) for key, each in named if isinstance(each, str) and not each.startswith(PREFIX)]


def _check_callable(each, key):
    if not callable(each):
        raise ConfigError(f"{key}: {shown(each)} is a {type(each).__name__}, which cannot be called")


def _needed(tokenizer, run, needs):
    if tokenizer is None:
        raise UserError(f"{run.model}: {needs} a tokenizer, and the folder has no tokenizer.json")
    return tokenizer


def _taskset_agents(run, tokenizer):
    """The TasksetAgents of a run on tasks of verifiers."""
    try:
        from rlnumba.environments.tasksets import TasksetAgents
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] == "rlnumba":
            raise
        raise UserError(f"verifiers: needs {error.name}; pip install 'rlnumba[verifiers]'") from error
    return TasksetAgents(run, tokenizer)


def _found(each, key):
    """An object, or what a name of it stands for."""
    return load_object(each, key) if isinstance(each, str) else each


def _factory(each, key):
    """A factory of environments, or what a name of it stands for, which may be a server of OpenEnv."""
    if isinstance(each, str) and each.startswith(PREFIX):
        return environment_class(each.removeprefix(PREFIX), key)
    return _found(each, key)


def _factory_key(name):
    return "environment.factory" if name is None else f"environment.factories.{name}"


class Agents:
    """functions, factories: the tools, and {name of an environment: its factory}. See the module's docstring.

    toolsets: {name of an environment: Toolset}, of None without one. sources: {key and name of each tool and
    environment: the objects that it is made of}. format: the ToolFormat of calls, None without
    tools. reward_classes: names of the classes with get_reward, in their order. rewards_read_environments: whether a
    reward function takes them, so that an environment is not used again before; the run sets it.
    """

    def __init__(self, run, tokenizer, functions, factories):
        self.run, self.tokenizer, self.rewards_read_environments = run, tokenizer, False
        self.stops_at_malformed = run.tools.malformed_calls == "stop"
        self.most_iterations, self.has_environments = run.train.max_tool_calling_iterations, bool(factories)
        tools = run.tools
        self.caller = ToolCaller(tools.tool_workers, tools.tool_timeout_s, tools.tool_result_max_chars)
        self.pool = EnvironmentPool(factories, self.caller, run.rewards.timeout)
        self._resets, self.sources = {}, {}
        try:
            self._probe(functions, factories)
            self.format = self._format()
            self.sources |= {f"tools.funcs: {name_of(each)}": [each] for each in functions}
        except BaseException:
            self.close()
            raise

    def _probe(self, functions, factories):
        """Find the tools of each environment, and check its methods, with one instance of each."""
        self.toolsets, self.reward_classes = {}, []
        if not factories:
            self.toolsets[None] = _toolset(functions, None)
        # All are made at once, and stay in the pool.
        taken = [(name, self.pool.take(name)) for name in factories]
        for name, future in taken:
            instance = future.result()
            self.pool.give_back(instance)
            owner, environment = type(instance.environment), instance.environment
            # A factory may be written elsewhere than the class, and that elsewhere than its bases.
            self.sources[f"{_factory_key(name)}: {owner.__name__}"] = [factories[name], *owner.__mro__]
            reset = method_of(environment, RESET)
            if reset is None:
                raise UserError(f"{_factory_key(name)}: {owner.__name__} has no method reset")
            self._resets[name] = owner.__name__, set(required_parameters(reset)) - set(GIVEN)
            get_reward = method_of(environment, GET_REWARD)
            if get_reward is not None:
                if missing := required_parameters(get_reward):
                    raise UserError(
                        f"{_factory_key(name)}: {owner.__name__}.get_reward() is called without arguments, and needs "
                        f"{', '.join(missing)}"
                    )
                if owner.__name__ not in self.reward_classes:
                    self.reward_classes.append(owner.__name__)
            self.toolsets[name] = _toolset(functions, owner)
        if not (self.run.rewards.funcs or self.reward_classes):
            raise ConfigError(
                "rewards.funcs must name at least one reward function, or the environment's class must have get_reward"
            )

    def _format(self):
        found, kwargs = None, self.run.data.chat_template_kwargs
        # {name of an environment with tools: the id that ends a turn with calls}.
        self._turn_ends = {}
        for name, toolset in self.toolsets.items():
            if toolset.schemas:
                found = detect_format(self.tokenizer, toolset.schemas, self.run.tools.parser, kwargs)
                ends = _end_ids(self.tokenizer.folder)
                self._turn_ends[name] = check_turns(self.tokenizer, kwargs, toolset.schemas, ends)
        return found

    @property
    def tool_names(self):
        """The names of all tools: list."""
        names = [name for toolset in self.toolsets.values() for name in (*toolset.functions, *sorted(toolset.methods))]
        return list(dict.fromkeys(names))

    @property
    def prompt_tools(self):
        """The PromptTools with which data.load_prompts makes prompts."""
        if not self.has_environments:
            return PromptTools(self._schemas_of)
        # As in TRL, without a file there are as many rows as one generation takes.
        train = self.run.train.on_ranks(self.run.num_ranks)
        return PromptTools(self._schemas_of, PROMPT, train.generation.num_prompts)

    def _schemas_of(self, row, where):
        """The schemas of a row's tools. Raises UserError for a row that names no environment, or lacks a column."""
        name = self._environment_of(row, where)
        if name in self._resets:
            class_name, required = self._resets[name]
            if missing := sorted(required - set(row) - {"prompt"}):
                raise UserError(
                    f"{where}: {class_name}.reset() needs {', '.join(missing)}, and the row has no such column; its "
                    f"columns are {', '.join(row) or 'none'}"
                )
        return self.toolsets[name].schemas

    def _environment_of(self, row, where):
        if None in self.toolsets:
            return None
        if COLUMN not in row:
            raise UserError(f"{where}: environment.factories needs a column {COLUMN!r} with the name of one of them")
        name = row[COLUMN]
        if not isinstance(name, str) or name not in self.toolsets:
            raise UserError(
                f"{where}: {COLUMN!r} is {shown(name)}, and environment.factories has {', '.join(self.toolsets)}"
            )
        return name

    def episode(self, prompt, index, params, inputs=NO_INPUTS):
        """The Episode of the rollouts of a Prompt, the data's of this index.

        params: SamplingParams of the group. inputs: RewardInputs, whose columns may lack the values of the prompt's.
        """
        name = self._environment_of(prompt.columns, prompt.where)
        values = {key: value for key, value in prompt.columns.items() if name is None or key != COLUMN}
        values = {"prompt": prompt.prompt} | values
        template = self.run.data.chat_template_kwargs | template_variables(prompt.columns, prompt.where)
        if self.toolsets[name].schemas:
            template.pop("tools", None)
        seed = int(np.random.SeedSequence((params.seed, index, params.first_index)).generate_state(1)[0])
        inputs = inputs._replace(columns=inputs.columns | prompt.columns)
        row = EpisodeRow(prompt.prompt, prompt.prompt_token_ids, values, template, name, seed, prompt.where, inputs)
        return Episode(self, row)

    def draw(self, llm, prompts, indices, params, trainer_state, progress, finished):
        """The completions of Prompts, the data's of these indices: list of RequestOutput.

        llm: the LLM that draws; params: SamplingParams of each. progress, finished: those of LLM.generate.
        """
        inputs = RewardInputs(dict.fromkeys(name for each in prompts for name in each.columns), trainer_state)
        episodes = [self.episode(*each, inputs) for each in zip(prompts, indices, params, strict=True)]
        token_ids = [prompt.prompt_token_ids for prompt in prompts]
        return llm.generate_episodes(token_ids, params, episodes, progress, finished)

    def encode(self, prompt, row):
        """The ids of messages of an EpisodeRow: list of int."""
        return encode(self.tokenizer, prompt, row.template, self.toolsets[row.environment].schemas)

    def has_ended(self, turn, environment):
        """Whether the last id of a turn's Completion is the one that ends those with calls in an environment."""
        return turn.num_tokens > 0 and turn.token_ids[-1] == self._turn_ends[environment]

    def keep(self, transcript, instance):
        """Let a Transcript have its Instance until `release`, or until it is dropped itself, as unused ones are."""
        transcript.instance = instance
        transcript.give_back = weakref.finalize(transcript, self.pool.give_back, instance)
        transcript.give_back.atexit = False

    def release(self, transcripts):
        """Give the environments of Transcripts back, which the rewards have read."""
        for transcript in transcripts:
            if transcript.instance is not None:
                give_back, transcript.instance, transcript.give_back = transcript.give_back, None, None
                give_back()

    def close(self):
        """Close the environments, and end the threads."""
        self.pool.close()
        self.caller.close()


def _end_ids(folder):
    """The ids at which the model of a tokenizer's folder stops: tuple, empty where it has no model."""
    return read_config(folder).eos_token_ids if (Path(folder) / "config.json").is_file() else ()


def _toolset(functions, environment_class):
    """The Toolset of functions and of an environment's class."""
    tools = tools_of(functions, environment_class)
    methods = frozenset(name for name, _, _ in tools[len(functions) :])
    return Toolset({name: function for name, function, _ in tools[: len(functions)]}, methods, schemas_of(tools))
