"""Rewards by name: built in, file.py:function, package.module:function, or the folder of a model."""

import ast
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
import weakref
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from rlnumba.errors import ConfigError, UserError
from rlnumba.rewards import functions as built_in
from rlnumba.rewards.calling import EnvironmentReward, RewardError, Rewards, importable_name, takes_environments
from rlnumba.rewards.functions import FACTORIES, reference_answers, texts_of
from rlnumba.rewards.gym import gym
from rlnumba.rewards.judges import PREFIX as JUDGE
from rlnumba.rewards.judges import find_judge

# Names without arguments.
BUILT_IN = built_in.BUILT_IN | {"gym": gym}
# The name by which each function was found.
_resolved = weakref.WeakKeyDictionary()


def _per_sample(compute_score):
    """verl's `compute_score(data_source, solution_str, ground_truth, extra_info=None)` as a reward function."""

    def reward(completions, **columns):
        gold = reference_answers(columns)
        sources = columns.get("data_source", [None] * len(gold))
        extras = columns.get("extra_info", [None] * len(gold))
        results = [
            compute_score(data_source=source, solution_str=text, ground_truth=answer, extra_info=extra)
            for source, text, answer, extra in zip(sources, texts_of(completions), gold, extras, strict=True)
        ]
        return [result["score"] if isinstance(result, dict) else result for result in results]

    reward.__name__ = compute_score.__name__
    return reward


@dataclass(frozen=True)
class ModelFolder:
    """The folder of a sequence-classification model that rewards.funcs names; a trainer opens it (load_rewards)."""

    path: Path


class RewardsSetup(NamedTuple):
    """The reward functions that take `environments`, for another process, which has these.

    places: the index of each among the run's functions; specs: by which `resolve` finds it; names: for messages;
    timeout_s, errors: as Rewards has them.
    """

    places: list
    specs: list
    names: list
    timeout_s: float
    errors: str

    @classmethod
    def of(cls, rewards):
        """The RewardsSetup of a run's Rewards, None where no function takes environments. Raises ConfigError for a
        function without a name that other processes find it by."""
        places = [k for k, function in enumerate(rewards.functions) if takes_environments(function)]
        if not places:
            return None
        names = [rewards.names[k] for k in places]
        specs = [_spec_elsewhere(rewards.functions[k], rewards.names[k]) for k in places]
        return cls(places, specs, names, rewards.timeout_s, rewards.errors)

    def rewards(self):
        """The Rewards of these functions in this process, which calls them itself. Raises as `resolve`."""
        functions = [resolve(spec) for spec in self.specs]
        return Rewards(functions, None, self.timeout_s, self.errors, self.names, [None] * len(functions))


def _spec_elsewhere(function, name):
    """The name by which a process with another working folder finds a function."""
    spec = _spec_of(function) or importable_name(function)
    if spec is None:
        raise ConfigError(
            f"deploy.num_infer_gpus: the reward {name} takes `environments`, and cannot be imported by the processes "
            "that draw; define it at the top of a module, or name it file.py:name"
        )
    source, _, rest = spec.partition(".py:")
    return f"{Path(source.strip() + '.py').expanduser().resolve()}:{rest}" if rest else spec


def load_rewards(config, functions=(), open_model=None, environment_classes=()):
    """The functions that a RewardsConfig names, or those given instead: Rewards.

    open_model(path): the ModelReward of a sequence-classification folder, given by the layer that has models.
    environment_classes: names of those whose get_reward is a further function each, of weight 1. Raises ConfigError for
    an unknown name, UserError for a missing file or package, RewardError where importing fails.
    """
    functions = list(functions) or [resolve(spec, config.judges) for spec in config.funcs]
    for k, function in enumerate(functions):
        if isinstance(function, ModelFolder):
            if open_model is None:
                raise ConfigError(f"rewards.funcs: {function.path} is a folder, and models are no rewards here")
            functions[k] = open_model(function.path)
    specs = [
        None if takes_environments(function) else _spec_of(function) or importable_name(function)
        for function in functions
    ]
    names = [getattr(function, "__name__", spec) for spec, function in zip(config.funcs, functions, strict=True)]
    names = [spec if names.count(name) > 1 else name for spec, name in zip(config.funcs, names, strict=True)]
    weights = config.weights
    if environment_classes:
        weights = [*(weights or [1.0] * len(functions)), *[1.0] * len(environment_classes)]
        functions += [EnvironmentReward(name) for name in environment_classes]
        names, specs = [*names, *environment_classes], [*specs, *[None] * len(environment_classes)]
    return Rewards(functions, weights, config.timeout, config.reward_errors, numbered(names), specs)


def numbered(names):
    """The names, each once: f, f becomes f, f_2. Two lambdas of a function have one name, and so have two partials."""
    taken, found = set(names), []
    for k, name in enumerate(names):
        number = names[: k + 1].count(name)
        while number > 1 and f"{name}_{number}" in taken:
            number += 1
        found.append(name if number == 1 else f"{name}_{number}")
        taken.add(found[-1])
    return found


def _spec_of(function):
    """The name by which `resolve` found a function, or None."""
    try:
        return _resolved.get(function)
    except TypeError:  # an object without a hash, or without weak references
        return None


def resolve(spec, judges=MappingProxyType({})):
    """The function named by "name", "file.py:name" or "package.module:name", each optionally with (key=value, ...).

    The path of a folder is a ModelFolder. judges: tables of rewards.judges, for "judge:name".
    """
    if spec.strip().startswith(JUDGE):
        judge = find_judge(spec, judges)
        _resolved[judge] = judge.spec
        return judge
    if _is_folder(spec):
        return ModelFolder(Path(spec).expanduser())
    path, call = _path_and_call(spec)
    factory = FACTORIES.get(path.removeprefix("get_"))
    function = factory or _find(path)
    if factory or call:
        function = _call_factory(spec, function, call or "()")
    if not callable(function):
        raise ConfigError(f"rewards.funcs: {spec} is a {type(function).__name__}, not a function")
    if function is built_in.accuracy_reward:
        built_in.import_math_verify()
    if "solution_str" in inspect.signature(function).parameters:
        function = _per_sample(function)
    with contextlib.suppress(TypeError):  # an object without a hash
        _resolved[function] = spec
    return function


def check_reward(spec, judges=MappingProxyType({})):
    """Raise what `resolve` raises for a name, a judge, a file or a module that is not there, or for a function that is
    not in it. The user's module is not imported, because that could take a GPU's memory."""
    if spec.strip().startswith(JUDGE):
        find_judge(spec, judges)
    elif is_users(spec):
        path, _ = _path_and_call(spec)
        _check_source(path)
        check_object(path, "rewards.funcs")
    elif not _is_folder(spec):
        resolve(spec)


def is_users(spec):
    """Whether a reward's name is that of a function of the user's, in a module that has to be imported."""
    if spec.strip().startswith(JUDGE) or _is_folder(spec):
        return False
    path, _ = _path_and_call(spec)
    return path not in BUILT_IN and path.removeprefix("get_") not in FACTORIES


def _is_folder(spec):
    return bool(spec.strip()) and spec not in BUILT_IN and Path(spec).expanduser().is_dir()


def _path_and_call(spec):
    """The parts "file.py:name" and "(key=value, ...)" of a spec, the second None where it has none."""
    # A file's name may have brackets and dots of its own; its function begins after the first .py: of a name.
    match = re.fullmatch(r"\s*(.+?\.py:\s*\w+)\s*(\(.*\))?\s*", spec, re.DOTALL)
    match = match or re.fullmatch(r"\s*([^()]+?)\s*(\(.*\))?\s*", spec, re.DOTALL)
    if match is None:
        raise ConfigError(f"rewards.funcs: {spec!r} is not a name, file.py:function or package.module:function")
    return match.groups()


def _call_factory(spec, factory, call):
    """factory(key=value, ...), the arguments being Python literals."""
    try:
        tree = ast.parse(f"f{call}", mode="eval").body
        keywords = {k.arg: ast.literal_eval(k.value) for k in tree.keywords}
        positional = [ast.literal_eval(value) for value in tree.args]
    except (SyntaxError, ValueError, AttributeError) as error:
        raise ConfigError(f"rewards.funcs: the arguments of {spec} must be key=value with plain values") from error
    try:
        return factory(*positional, **keywords)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"rewards.funcs: {spec}: {error}") from error


def _find(path):
    if path in BUILT_IN:
        return BUILT_IN[path]
    _check_source(path)
    return load_object(path, "rewards.funcs")


def _check_source(path):
    """Raise the error of the name of a reward that is not built in and names no file or module."""
    source, _, _ = path.rpartition(":" if ":" in path else ".")
    if not source and "/" in path:
        raise UserError(f"rewards.funcs: no such folder: {path}")
    if not source:
        near = difflib.get_close_matches(path, [*BUILT_IN, *FACTORIES], n=1, cutoff=0)[0]
        raise ConfigError(
            f"rewards.funcs: no built-in reward is called {path!r}; did you mean {near}? Your own are written "
            "file.py:function or package.module:function"
        )


def load_object(path, key):
    """The object file.py:name or package.module:name. `key` begins an error's message: ConfigError or UserError."""
    source, name = _source_and_name(path, key)
    module = _module_of_file(source, key) if source.endswith(".py") else _module_of_name(source, key)
    if name not in vars(module):
        raise _no_such_object(source, name, [n for n, value in vars(module).items() if callable(value)], key)
    return vars(module)[name]


def check_object(path, key):
    """Raise what `load_object` raises for a file or module that is not there, does not parse or does not define the
    name, without importing it. What a module makes by other means than a definition, `import` or `=` is taken as there.
    """
    source, name = _source_and_name(path, key)
    file = _file_of(source, key) if source.endswith(".py") else _file_of_module(source, key)
    if file is None:
        return
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        raise _import_failed(source, error, key) from error
    except (OSError, ValueError):
        return
    defined, found = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.append(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name | ast.Attribute):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    if name not in found and name not in defined and not found & WAYS_TO_NAME:
        raise _no_such_object(source, name, defined, key)


# Names in a module that may define others which it does not spell.
WAYS_TO_NAME = {"*", "exec", "eval", "globals", "locals", "vars", "setattr", "__dict__", "modules"}


def _source_and_name(path, key):
    source, _, name = (part.strip() for part in path.rpartition(":" if ":" in path else "."))
    if not source:
        raise ConfigError(f"{key}: {path!r} must be file.py:name or package.module:name")
    return source, name


def _no_such_object(source, name, functions, key):
    near = difflib.get_close_matches(name, [each for each in functions if not each.startswith("_")], n=1, cutoff=0)
    return ConfigError(f"{key}: {source} has no {name!r}" + (f"; did you mean {near[0]}?" if near else ""))


def _file_of(source, key):
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{key}: no such file: {source}")
    return path


def _file_of_module(source, key):
    """The source file of a module that is not imported, None where it cannot be known."""
    _see_working_folder()
    first, *others = source.split(".")
    try:
        found = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    if found is None:
        raise ConfigError(f"{key}: there is no module {source}")
    name = first
    for each in others:
        name, places = f"{name}.{each}", found.submodule_search_locations
        found = PathFinder.find_spec(name, places) if places else None
        if found is None:
            return None
    return Path(found.origin) if found.origin and found.origin.endswith(".py") else None


def _module_of_file(source, key):
    path = _file_of(source, key)
    # Without what a module's name cannot have: a dot would be one of a package.
    stem = re.sub(r"\W", "_", path.stem)
    module_name = f"rlnumba_reward_{stem}_{abs(hash(str(path)))}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    # Files of the same folder can be imported, as in a script.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's code
        del sys.modules[module_name]
        raise _import_failed(source, error, key) from error
    return module


def _see_working_folder():
    """Let modules of the working folder be found."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def _module_of_name(source, key):
    _see_working_folder()
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is not None and source.startswith(error.name):
            raise ConfigError(f"{key}: there is no module {source}") from error
        raise _import_failed(source, error, key) from error
    except (Exception, SystemExit) as error:  # a user's code
        raise _import_failed(source, error, key) from error


def _import_failed(source, error, key):
    line = getattr(error, "lineno", None) or traceback.extract_tb(error.__traceback__)[-1].lineno
    text = " ".join(str(error).split())
    return RewardError(f"{key}: {source} cannot be imported: {type(error).__name__}: {text} (line {line})")
