"""The runs of the command line in Python, in TRL's form:

    from rlnumba import GRPOConfig, GRPOTrainer

    args = GRPOConfig(output_dir="runs/a", max_steps=100)
    trainer = GRPOTrainer("Qwen/Qwen3-0.6B", reward_funcs=f, args=args, train_dataset=rows)
    trainer.train()

A class for each trainer makes the Run that the same TOML file makes, and trains it: everything is written to
output_dir, the model to final/. On several GPUs (`deploy` of its config) that happens in other processes, which
import the script: its own calls stand below `if __name__ == "__main__":`.
"""

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rlnumba import checkpoint
from rlnumba.config import (
    AsyncConfig,
    DataConfig,
    DeployConfig,
    EngineConfig,
    EnvironmentConfig,
    EvalConfig,
    LoraConfig,
    RewardsConfig,
    RolloutConfig,
    ToolsConfig,
    key,
)
from rlnumba.config.keys import and_list, refuse_unknown, sections_of
from rlnumba.config.other_keys import take_trl_keys
from rlnumba.config.reading import ALIASES, warn_without_effect
from rlnumba.config.rollout import AheadRun
from rlnumba.config.runs import RUNS
from rlnumba.data.formats import chat_value
from rlnumba.environments.agents import NOTHING, GivenTools
from rlnumba.environments.agents import given as given_tools
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.lora import lora_of_peft
from rlnumba.reporting.files import make_folder, read_metrics, replacing, to_line
from rlnumba.reporting.stderr import log
from rlnumba.runs.callbacks import TrainerState, given
from rlnumba.runs.eval import run_eval
from rlnumba.runs.planning.fit import fit_to_device
from rlnumba.runs.planning.savings import advise
from rlnumba.runs.ranks import resolve_if_named, train_on_ranks
from rlnumba.runs.run_folder import owner_of
from rlnumba.runs.run_inputs import located
from rlnumba.runtime import device
from rlnumba.trainers.every import TRAINERS

MODEL_FOLDER = "the tokenizer is read from the model's folder"
# Arguments of TRL's trainers that change nothing, and why.
WITHOUT_EFFECT = {
    "processing_class": MODEL_FOLDER,
    "tokenizer": MODEL_FOLDER,
    "reward_processing_classes": "a reward model's tokenizer is read from its folder",
}
# Those that would: how it is said here. None is no request.
ELSEWHERE = {
    "ref_model": "the reference is `model` as it is before training",
    "data_collator": "rows are packed without padding; give them in a form of docs/data.md",
    "formatting_func": "give train_dataset=[formatting_func(row) for row in rows]",
    "compute_metrics": "a callback's on_evaluate gets the metrics of an evaluation",
    "compute_loss_func": "the losses are those of args.loss_type",
    "optimizers": "args.optim, args.learning_rate and args.lr_scheduler_type choose optimizer and schedule",
    "optimizer_cls_and_kwargs": "args.optim, args.learning_rate and the other keys of args choose the optimizer",
    "preprocess_logits_for_metrics": "there are no logits of all tokens (docs/log-prob.md)",
    "model_init": "give the folder or the hub id of the model as model",
    "quantization_config": "weights are float32, bfloat16 or float16: args.dtype",
    "reward_model": "give the reward model's folder as reward_funcs",
    "value_model": 'give critic={"model": FOLDER}',
    "rollout_func": "its rows are given, and no completions are drawn",
    "environment_factory": "its rows are given, and no completions are drawn",
    "tools": "give each row a column `tools`",
    "judge": "give a function as reward_funcs",
}
# Keys of other tools' configs that have another name here, or for which a trainer has an argument.
OTHER_NAMES = {
    name: f"it is {key}" if section == "train" else f"give the trainer {section}={{{key!r}: ...}}"
    for (of, name), (section, key) in ALIASES.items()
    if of == "train"
}


@dataclass(frozen=True)
class OutputArguments:
    """The keys of the configs of TRL's trainers besides those of [train]."""

    output_dir: str = key("trainer_output", "Folder of the run.", nonempty=True)
    seed: int = key(42, "Seed of everything random in the run.", minimum=0)
    deploy: DeployConfig | dict | None = key(None, "The section [deploy]: a DeployConfig, or a dict of its keys.")


@dataclass(frozen=True)
class AheadArguments:
    """The further key of the configs of trainers that generate ahead of training."""

    asynchronous: AsyncConfig | dict | None = key(
        None, "The section [async]: an AsyncConfig, or a dict of its keys, as TRL's AsyncGRPOConfig has them."
    )


@dataclass(frozen=True)
class RewardArguments:
    """The further key of the configs of trainers with rewards."""

    reward_weights: list[float] | None = key(None, "A weight for each reward function; None: all 1.0.")


def _has_16_bits():
    return device.name() != "cpu"


def _config_of(run_class):
    """The class of a trainer's `args`: the keys of [train] of its Run, and those that TRL's config has besides."""
    train = sections_of(run_class)["train"]
    bases = (RewardArguments,) if run_class.generates else ()
    bases += (AheadArguments,) if issubclass(run_class, AheadRun) else ()
    doc = f"[train] of `rlnumba {run_class.trainer}`, and the keys that TRL's {train.__name__} has besides."
    body = {"__doc__": doc, "__module__": __name__}
    found = dataclass(frozen=True)(type(train.__name__, (*bases, OutputArguments, train), body))
    take_trl_keys(found, _has_16_bits, OTHER_NAMES)
    return found


class TrainOutput(NamedTuple):
    """The end of a run, with transformers' names.

    training_loss: mean over the steps of this call, NaN without any. metrics: train_runtime in seconds,
    train_steps_per_second, train_loss, epoch.
    """

    global_step: int
    training_loss: float
    metrics: dict


class Trainer:
    """A Run in the making, and what has become of it; subclasses have the arguments.

    args: the config, whose keys may be assigned to between calls. callbacks: a list of objects. run: the Run that
    `train` would train now.
    """

    # The record of the trainer, and the class of `args`.
    trainer, config_class = None, None

    def __init__(self, model, args, datasets, sections, peft_config, callbacks, others):
        name = type(self).__name__
        _refuse_others(name, others, model)
        if not isinstance(model, str | Path):
            raise TypeError(
                f"{name}: model must be a folder or a hub id, got {_kind(model)}; a model of transformers becomes a "
                "folder by model.save_pretrained(folder) and tokenizer.save_pretrained(folder)"
            )
        args = self.config_class() if args is None else args
        if not isinstance(args, self.config_class):
            raise TypeError(f"{name}: args must be a rlnumba.{self.config_class.__name__}, got {_kind(args)}")
        self.args, self.callbacks, self.given_funcs = args, _callbacks(callbacks), []
        self.datasets = {part: _readable(f"{part}_dataset", rows) for part, rows in datasets.items()}
        self._given_model, self._lora, self._sections = str(model), _lora(peft_config), sections
        self._state, self._has_begun, self.given_tools = None, False, NOTHING

    @property
    def run(self):
        """The Run of the command line that these arguments make. Raises ConfigError for keys that contradict."""
        args, data = replace(self.args), dict(self._sections["data"] or {})
        for part, rows in self.datasets.items():
            if rows is not None and not self._is_named_by_data(part):
                if part in data:
                    raise TypeError(f"{type(self).__name__}: {part}_dataset and data={{{part!r}: ...}} are both given")
                data[part] = str(rows if isinstance(rows, str | Path) else Path(args.output_dir) / f"{part}.jsonl")
        keys = {"model": self._given_model, "output_dir": args.output_dir, "seed": args.seed, "lora": self._lora}
        keys |= {"deploy": _section(DeployConfig, args.deploy) or DeployConfig(), "train": args}
        return self.trainer.run_class(**keys, data=DataConfig(**data), **self._own_keys(args))

    def _is_named_by_data(self, part):
        """Whether `data` names a file, and no rows are given: the default of train_dataset is ()."""
        rows = self.datasets.get(part)
        return isinstance(rows, tuple) and not rows and part in (self._sections["data"] or {})

    def _own_keys(self, args):
        """The further sections of a Run: dict."""
        return {}

    def train(self, resume_from_checkpoint=False):
        """Train, and return a TrainOutput; writes output_dir.

        resume_from_checkpoint: True to go on from the newest readable checkpoint in output_dir, or one of its folders
        checkpoints/step-N, or N. Raises RewardError for a reward that fails, after a checkpoint.
        """
        run, resume, started = self.run, self._resume_of(resume_from_checkpoint), time.monotonic()
        with owner_of(run):
            self._write_rows(run, self.datasets)
            self._state, self._has_begun = None, True
            if run.num_ranks > 1:
                state = train_on_ranks(run, resume, self.given_funcs, self.callbacks, self.given_tools)
            else:
                with given_tools(self.given_tools):
                    run = fit_to_device(located(run))
                    with advise(run), given(self.callbacks):
                        state = self.trainer.train(run, resume, self._reward_functions())
        self._state, seconds = state, time.monotonic() - started
        losses = [row["loss"] for row in state.log_history if "loss" in row]
        loss = sum(losses) / len(losses) if losses else math.nan
        metrics = {"train_runtime": seconds, "train_steps_per_second": len(losses) / seconds, "train_loss": loss}
        return TrainOutput(state.global_step, loss, metrics | {"epoch": state.epoch})

    def _reward_functions(self):
        """The reward functions themselves: list or tuple."""
        return ()

    def _resume_of(self, given):
        """A run's `resume` for resume_from_checkpoint: bool or int."""
        if given is None or isinstance(given, bool | int):
            return given or False
        folder = Path(self.args.output_dir) / "checkpoints"
        path = Path(given).resolve()
        if path in (folder.resolve(), folder.parent.resolve()):
            return True
        step = re.fullmatch(r"step-(\d+)", path.name)
        if step is None or path.parent != folder.resolve():
            raise ConfigError(
                f"resume_from_checkpoint: {given} is none of {folder}/step-N; a run goes on in its own output_dir, and "
                "another one begins with a checkpoint's weights as its model"
            )
        return int(step[1])

    @property
    def state(self):
        """The TrainerState so far, also after a run that was interrupted: global_step, epoch, log_history, ..."""
        state = self._state or TrainerState(max(self.args.max_steps, 0))
        path = Path(self.args.output_dir)
        history = read_metrics(path) if self._has_begun and (path / "metrics.jsonl").exists() else []
        if not history:
            return state
        last = history[-1]
        return replace(state, global_step=last["step"], epoch=last.get("epoch", 0.0), log_history=history)

    @property
    def model(self):
        """The folder of the trained model, which LLM and other trainers take; before training the model given: str."""
        return str(self._final) if self._state is not None else self._given_model

    @property
    def _final(self):
        return Path(self.args.output_dir) / "final"

    def evaluate(self, eval_dataset=None):
        """The metrics of the model as it is now on held-out rows, as `rlnumba eval` computes them: dict.

        eval_dataset: a file or rows, instead of those that the trainer was given.
        """
        run, datasets = self.run, {"eval": self.datasets["eval"]}
        if eval_dataset is not None:
            datasets = {"evaluated": _readable("eval_dataset", eval_dataset)}
            is_file = isinstance(eval_dataset, str | Path)
            path = eval_dataset if is_file else Path(run.output_dir) / "evaluated.jsonl"
            run = replace(run, data=replace(run.data, eval=str(path)))
        elif run.data.eval is None:
            raise UserError("evaluate: the trainer has no eval_dataset, and none is given")
        self._write_rows(run, datasets)
        trained = None if self._state is None else self.model
        return run_eval(run, trained, reward_funcs=self.given_funcs, tools=self.given_tools)

    def save_model(self, output_dir=None):
        """Copy the trained model, a Hugging Face folder, to output_dir; None: nothing, for it is in `model` already."""
        if self._state is None:
            raise UserError("save_model: there is no trained model before train() has ended")
        if output_dir is None:
            log(f"the model is in {self._final}")
            return
        if Path(output_dir).resolve() == Path(self._given_model).resolve():
            raise UserError(f"save_model: {output_dir} is the model that the run began with")
        if Path(output_dir).resolve() != self._final.resolve():
            make_folder(output_dir)
            checkpoint.copy_model(self._final, Path(output_dir))

    def add_callback(self, callback):
        """One more object with the methods of TrainerCallback, or its class."""
        self.callbacks += _callbacks([callback])

    def _write_rows(self, run, datasets):
        for part, rows in datasets.items():
            if rows is None or isinstance(rows, str | Path) or self._is_named_by_data(part):
                continue
            make_folder(run.output_dir)
            with replacing(Path(run.output_dir) / f"{part}.jsonl") as file:
                count, is_typed = 0, hasattr(rows, "features")  # a datasets.Dataset, whose columns have types
                for row in rows:
                    count += 1
                    if not isinstance(row, Mapping):
                        raise TypeError(
                            f"{part}_dataset: rows must be dicts, and the first that is none is {_kind(row)} {row!r}; "
                            'of a pandas DataFrame they are df.to_dict("records")'
                        )
                    if is_typed:
                        row = {name: chat_value(name, value) for name, value in row.items()}
                    try:
                        # NaN as NaN, so that the checks of a file's values refuse it where a column must be a number.
                        file.write(to_line(row, keeps_nan=True))
                    except (ValueError, RecursionError) as error:
                        raise UserError(f"{part}_dataset: row {count} cannot be written as JSON: {error}") from error
            if not count:
                raise UserError(f"{part}_dataset has no rows")


def _kind(value):
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _refuse_others(name, others, model):
    """Warn of arguments of TRL's trainers that change nothing. Raises TypeError for all others, but for None."""
    refuse_unknown(name, others, {*ARGUMENTS, *WITHOUT_EFFECT, *ELSEWHERE})
    for argument, value in others.items():
        if value is None:
            continue
        if argument in WITHOUT_EFFECT:
            log(f"warning: {argument} has no effect: {WITHOUT_EFFECT[argument]}")
        elif not (argument == "ref_model" and value == model):
            raise TypeError(f"{name} takes no {argument}: {ELSEWHERE[argument]}")


def _callbacks(callbacks):
    """The objects of a trainer's `callbacks`, of which a class is made: list."""
    if callbacks is not None and not isinstance(callbacks, list | tuple):
        raise TypeError(f"callbacks must be a list, got {_kind(callbacks)}")
    return [each() if isinstance(each, type) else each for each in callbacks or ()]


def _readable(name, dataset):
    """A dataset as it is kept: a path, None, or what can be iterated over again. Raises TypeError for other forms."""
    if dataset is None or isinstance(dataset, str | Path):
        return dataset
    if isinstance(dataset, Mapping):
        first = next(iter(dataset), "train")
        raise TypeError(
            f"{name} is a {_kind(dataset)} of {', '.join(map(str, dataset))}: give one dataset, such as "
            f"{name}=datasets[{first!r}], or rows: a list of dicts"
        )
    try:
        rows = iter(dataset)
    except TypeError:
        raise TypeError(f"{name} must be a file or rows, dicts in any iterable; got {_kind(dataset)}") from None
    return list(rows) if rows is dataset else dataset


def _lora(peft_config):
    """The LoraConfig of a trainer's peft_config: itself, a dict of its keys, PEFT's, or None."""
    if peft_config is None or isinstance(peft_config, LoraConfig):
        return peft_config
    return LoraConfig(**peft_config) if isinstance(peft_config, dict) else lora_of_peft(peft_config)


def _section(section_class, value):
    """A section from what a config has for it: itself, a dict of its keys, or None."""
    return section_class(**value) if isinstance(value, dict) else value


# The text of help() about the arguments that all trainers have.
ROWS = """model: a Hugging Face folder or a hub id, also of a PEFT adapter.
    args: {config}; None: its defaults. Its keys may be assigned to until `train`: args.max_steps = 100.
    train_dataset, eval_dataset: a file of rows, the id of a dataset of the hub, or rows themselves: dicts of JSON
    values in any iterable, such as a list, a generator or a datasets.Dataset, which `train` writes to output_dir.
    Their columns are in docs/data.md.
    data: further keys of that section of a run file, a dict; engine: likewise, for trainers that generate.
    peft_config: to train an adapter instead of the weights: a LoraConfig, a dict of its keys, or PEFT's LoraConfig.
    callbacks: objects, or classes, with the methods of TrainerCallback.
    others: further arguments of TRL's trainers, each with a warning or an error that says what to write here.

    train() returns a TrainOutput; then model is the folder of the trained model, state.log_history the metrics of each
    step; evaluate() and save_model(folder) take the trained model. Raises ConfigError for keys that contradict."""

REWARDS = """reward_funcs: a function with TRL's signature, any callable, or the name that [rewards] has for one, also
    the folder of a reward model, or a list of these.
    rewards: further keys of that section, a dict; eval: those of how held-out prompts are completed.
    tools: functions that the policy may call, or their names, or a dict of the keys of [tools], with them as funcs.
    environment_factory: a class or function without arguments, or {name: factory} (docs/agents.md). With a single one
    and args.max_steps, train_dataset may be left out.
    rollout_func: a function of (prompts, trainer) that draws the completions instead, or its name (docs/agents.md).
    """

ARGUMENTS = (
    *("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "data", "engine", "rewards", "eval", "critic"),
    *("peft_config", "callbacks"),
)


class RowTrainer(Trainer):
    """A trainer whose data are rows."""

    def __init__(
        self, model, args=None, train_dataset=(), eval_dataset=None, data=None, engine=None, peft_config=None,
        callbacks=(), **others,
    ):  # fmt: skip
        if engine is not None:
            raise ConfigError(
                f"engine: {self.trainer.run_class.trainer} generates nothing; the section [engine] is of "
                f"{and_list([name for name, each in RUNS.items() if each.generates])}"
            )
        datasets = {"train": train_dataset, "eval": eval_dataset}
        super().__init__(model, args, datasets, {"data": data}, peft_config, callbacks, others)
        warn_without_effect(self.run)


class GenerationArguments(NamedTuple):
    """Arguments of trainers on prompts about what is generated; the documentation of a trainer says what each is."""

    data: object = None
    engine: object = None
    rewards: object = None
    eval: object = None
    tools: object = None
    environment_factory: object = None
    rollout_func: object = None


class PromptTrainer(Trainer):
    """A trainer whose data are prompts. others: the fields of GenerationArguments, and the keys of a section of its
    own, as PPO's critic, a dict."""

    def __init__(
        self, model, reward_funcs=None, args=None, train_dataset=(), eval_dataset=None, *, peft_config=None,
        callbacks=(), **others,
    ):  # fmt: skip
        given = {name: others.pop(name) for name in GenerationArguments._fields if name in others}
        given = GenerationArguments(**given)
        tools, given_tools = _given_tools(type(self).__name__, given)
        if given.environment_factory is not None and isinstance(train_dataset, tuple) and not train_dataset:
            # The environment makes the prompts.
            train_dataset = None
        datasets = {"train": train_dataset, "eval": eval_dataset}
        sections = {"data": given.data, "engine": given.engine or {}, "rewards": given.rewards or {}}
        sections |= {"eval": given.eval or {}, "tools": tools}
        sections |= {name: others.pop(name, None) or {} for name in own_sections(self.trainer.run_class)}
        super().__init__(model, args, datasets, sections, peft_config, callbacks, others)
        self.given_funcs, self.given_tools = _reward_funcs(type(self).__name__, reward_funcs), given_tools
        self.reward_funcs = [resolve_if_named(each) for each in self.given_funcs]
        warn_without_effect(self.run)

    def _own_keys(self, args):
        # The names under which config.toml lists them.
        funcs = [each if isinstance(each, str) else _spec(each) for each in self.given_funcs]
        rewards = RewardsConfig(funcs=funcs, weights=args.reward_weights, **self._sections["rewards"])
        found = {"rewards": rewards, "eval": EvalConfig(**self._sections["eval"])}
        found |= {"engine": EngineConfig(**self._sections["engine"]), "tools": ToolsConfig(**self._sections["tools"])}
        found["environment"] = _environment_section(self.given_tools.factories or {})
        drawing = self.given_tools.rollout
        found["rollout"] = RolloutConfig(func=drawing if isinstance(drawing, str | None) else _spec(drawing))
        if isinstance(args, AheadArguments):
            found["asynchronous"] = _section(AsyncConfig, args.asynchronous)
        own = own_sections(self.trainer.run_class)
        return found | {name: section_class(**self._sections[name]) for name, section_class in own.items()}

    def _reward_functions(self):
        return self.reward_funcs


def _given_tools(name, given):
    """(keys of [tools], GivenTools) of a trainer's GenerationArguments. Raises TypeError for what cannot be called."""
    tools, environment_factory, rollout_func = given.tools, given.environment_factory, given.rollout_func
    keys = dict(tools) if isinstance(tools, Mapping) else {"funcs": [] if tools is None else tools}
    functions = keys.get("funcs", [])
    functions = list(functions) if isinstance(functions, list | tuple) else [functions]
    factories = environment_factory
    if not isinstance(factories, Mapping):
        factories = {} if factories is None else {None: factories}
    drawing = [] if rollout_func is None else [rollout_func]
    arguments = ("tools", functions), ("environment_factory", factories.values()), ("rollout_func", drawing)
    for argument, listed in arguments:
        for each in listed:
            if not isinstance(each, str) and not callable(each):
                wanted = "a function or its name" if argument == "rollout_func" else "functions or names of them"
                raise TypeError(f"{name}: {argument} must be {wanted}, got {_kind(each)}")
    keys["funcs"] = [each if isinstance(each, str) else _spec(each) for each in functions]
    return keys, GivenTools(functions, dict(factories), rollout_func)


def _environment_section(factories):
    """The EnvironmentConfig with the names of factories."""
    named = {name: each if isinstance(each, str) else _spec(each) for name, each in factories.items()}
    return EnvironmentConfig(factory=named[None]) if None in named else EnvironmentConfig(factories=named)


def own_sections(run_class):
    """{name: dataclass} of the sections of a Run that no other trainer on prompts has."""
    shared = sections_of(AheadRun)
    return {name: section_class for name, section_class in sections_of(run_class).items() if name not in shared}


def _trainer_of(trainer, config_class):
    """The class of Python's trainer for a record of TRAINERS."""
    run_class = trainer.run_class
    own = "".join(f"{name}: keys of that section, a dict.\n    " for name in own_sections(run_class))
    arguments = ROWS.format(config=f"its {config_class.__name__}")
    arguments = f"{REWARDS}{own}{arguments}" if run_class.generates else arguments
    body = {"__doc__": f"{run_class.purpose}\n\n    {arguments}\n    ", "__module__": __name__}
    body |= {"trainer": trainer, "config_class": config_class}
    base = PromptTrainer if run_class.generates else RowTrainer
    return type(f"{config_class.__name__.removesuffix('Config')}Trainer", (base,), body)


# SFTConfig and SFTTrainer, GRPOConfig and GRPOTrainer, ...
for _record in TRAINERS.values():
    _config = _config_of(_record.run_class)
    _class = _trainer_of(_record, _config)
    globals().update({_config.__name__: _config, _class.__name__: _class})


def _reward_funcs(name, given):
    """The functions and names of a trainer's reward_funcs: list. TypeError for what is neither name nor callable."""
    funcs = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    for each in funcs:
        if not isinstance(each, str | Path) and not callable(each):
            raise TypeError(
                f"{name}: reward_funcs must be functions, names or folders of reward models, got {_kind(each)}"
            )
        if _kind(each).startswith(("transformers.", "peft.")):
            raise TypeError(
                f"{name}: reward_funcs: a model of transformers is given as its folder: model.save_pretrained(folder)"
            )
    return [str(each) if isinstance(each, Path) else each for each in funcs]


def _spec(function):
    """package.module:function, or for what has no such name (a partial, an object) its class."""
    named = function if isinstance(function, type(_spec) | type) else type(function)
    return f"{named.__module__}:{named.__qualname__}"
