"""Rows from reasoning-gym (https://github.com/open-thought/reasoning-gym): problems made from a seed, with a scorer.

`data.train = "gym:chain_sum"` names a dataset, `[data.gym]` its arguments; of several datasets, `[data.gym.NAME]` those
of one. Nearly all datasets make problem i from seed + i alone, so neighbouring seeds give the same problems but for
one; held-out ones begin where training's end.
"""

import difflib
import functools
import json
from dataclasses import fields

from rlnumba.config.data import GYM, paths_of_rows
from rlnumba.errors import ConfigError, UserError

# reasoning-gym's own default, and where the problems of training begin.
DEFAULT_SIZE, DEFAULT_SEED = 500, 0


def is_gym(path):
    """Whether a path of data.train or data.eval names a dataset of reasoning-gym."""
    return str(path).startswith(GYM)


def arguments_of(path, data, for_eval):
    """The arguments of the dataset that a path "gym:NAME" names, size and seed included: dict.

    Those in [data.gym] are all datasets', those in [data.gym.NAME] one's. Those of held-out problems are
    [data.eval_gym]'s; where the same dataset is trained on, [data.gym]'s as far as that has no others, and the first
    seed after training's. Raises ConfigError for a wrong size or seed, and for problems that are both trained on and
    held out.
    """
    defaults = {"size": DEFAULT_SIZE, "seed": DEFAULT_SEED}
    train = _checked("gym", path, data, defaults)
    if not for_eval:
        return train
    if path not in paths_of_rows(data.train or ""):
        return _checked("eval_gym", path, data, defaults)
    behind = train["seed"] + train["size"]
    chosen = _checked("eval_gym", path, data, train | {"seed": behind})
    begin, end = chosen["seed"], chosen["seed"] + chosen["size"]
    if {**chosen, **defaults} == {**train, **defaults} and begin < behind and train["seed"] < end:
        raise ConfigError(
            f"data.eval_gym.seed: problems {begin} to {end - 1} (seed to seed + size - 1) are held out, but "
            f"{train['seed']} to {behind - 1} are trained on; let it be {behind} or more"
        )
    return chosen


def _datasets(data):
    """The names of all datasets of reasoning-gym in data.train and data.eval: set."""
    paths = [path for value in (data.train, data.eval) if value for path in paths_of_rows(value)]
    return {path.removeprefix(GYM) for path in paths if is_gym(path)}


def _checked(section, path, data, defaults):
    """The arguments of a path in [data.gym] or [data.eval_gym]: dict. Raises ConfigError for a wrong size or seed."""
    table, name = getattr(data, section), path.removeprefix(GYM)
    names = _datasets(data)
    own = table.get(name, {}) if name in names else {}
    if not isinstance(own, dict):
        raise ConfigError(f"data.{section}.{name} must be a table of the arguments of {path}, got {own!r}")
    arguments = defaults | {key: value for key, value in table.items() if key not in names} | own
    for key, least in (("size", 1), ("seed", 0)):
        value = arguments[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            where = f"data.{section}.{name}" if key in own else f"data.{section}"
            raise ConfigError(f"{where}.{key} must be an integer of at least {least}, got {value!r}")
    return arguments


def gym_rows(path, data, for_eval=False):
    """The problems of a dataset of reasoning-gym: list of (row, where), as read_rows.

    A row has `question`, `answer` (the reference's, None where many are right), `metadata`, and `gym_dataset`, from
    which `scorer` finds its dataset. data: DataConfig. Raises ConfigError, naming the key, for an unknown dataset or
    argument, UserError without the package.
    """
    name, arguments = path.removeprefix(GYM), arguments_of(path, data, for_eval)
    section = "data.eval_gym" if for_eval else "data.gym"
    own = f"; arguments of one dataset are in [{section}.NAME]" if len(_datasets(data)) > 1 else ""
    dataset = create(name, arguments, section, own)
    source = {"name": name, "arguments": arguments}
    try:
        return [({**dataset[i], "gym_dataset": source}, f"{path}: problem {i}") for i in range(len(dataset))]
    except Exception as error:  # reasoning-gym's code
        raise UserError(f"{path}: {type(error).__name__}: {_line(error)}") from error


def create(name, arguments, key="data.gym", hint=""):
    """reasoning-gym's dataset of a name, with these arguments; the errors are gym_rows'.

    key: that of the arguments; hint: added to the error of an unknown one.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(f"{GYM}{name} needs reasoning-gym; pip install 'rlnumba[gym]'") from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0)[0]
        raise ConfigError(f"{GYM}{name}: reasoning-gym has no dataset {name!r}; did you mean {GYM}{near}?")
    valid = [f.name for f in fields(DATASETS[name][1])]
    for argument in arguments:
        if argument not in valid:
            near = difflib.get_close_matches(argument, valid, n=1, cutoff=0)[0]
            raise ConfigError(f"{key}: {GYM}{name} has no argument {argument!r}; did you mean {near}?{hint}")
    try:
        return reasoning_gym.create_dataset(name, **arguments)
    except Exception as error:  # reasoning-gym's code, which asserts that its arguments are valid
        raise ConfigError(f"{key}: {GYM}{name}: {_line(error) or type(error).__name__}") from error


def scorer(source):
    """score(text, item): a completion's value by the dataset that a row's `gym_dataset` names, as float.

    The answer is what stands between the completion's last <answer> and </answer>, or None. The dataset has the
    arguments that the item was made with: some scorers read them.
    """
    return _scorer(source["name"], json.dumps(source["arguments"], sort_keys=True))


@functools.lru_cache(maxsize=64)
def _scorer(name, arguments):
    dataset = create(name, json.loads(arguments))
    from reasoning_gym.utils import extract_answer

    def score(text, item):
        return float(dataset.score_answer(extract_answer(text), item))

    return score


def _line(error):
    return " ".join(str(error).split())
