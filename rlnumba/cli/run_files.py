"""Run files of commands: their keys as options, and the trainers that read them."""

from rlnumba.config.runs import RUNS
from rlnumba.errors import ConfigError, UserError


def parse_overrides(arguments):
    """["--a.b", "1", "--c=2", "--flag"] -> [("a.b", "1"), ("c", "2"), ("flag", None)]: list of pairs.

    Raises ConfigError for an argument that belongs to no option.
    """
    pairs, pending = [], None  # pending: an option whose value may be the next argument
    for argument in arguments:
        if argument.startswith("--") and len(argument) > 2:
            if pending is not None:
                pairs.append((pending, None))
            name, has_value, value = argument[2:].partition("=")
            pending = None if has_value else name
            if has_value:
                pairs.append((name, value))
        elif pending is not None:
            pairs.append((pending, argument))
            pending = None
        else:
            raise ConfigError(f"unexpected argument {argument!r}; options are written --section.key value")
    return pairs if pending is None else [*pairs, (pending, None)]


def first_readable(runs, work, unreadable=UserError):
    """(work(run), a note that names the other trainers) of the first of `runs` that can be read.

    runs: the result of runs_of_any_trainer. The rows of the first may be those of another trainer that reads the file:
    an `unreadable` error of its work is raised only if the others fail, too.
    """
    problems = []
    for index, run in enumerate(runs):
        try:
            found = work(run)
        except unreadable as error:
            problems.append(error)
            continue
        others = [each.trainer for each in runs[index + 1 :]]
        also = " or ".join(f"--trainer {name}" for name in others)
        return found, f"; read as a file of {run.trainer}, which {also} changes" if others else ""
    raise problems[0]


def runs_of_any_trainer(config, trainer, overrides):
    """[Run] of the trainer named, or of all that read the files.

    Raises the ConfigError of the one that knows most of their keys if none does.
    """
    from rlnumba.config import likeliest_trainer, load_run

    if trainer is not None and trainer not in RUNS:
        raise ConfigError(f"--trainer: must be one of {', '.join(RUNS)}, got {trainer!r}")
    found, problems = [], {}
    for kind in RUNS if trainer is None else (trainer,):
        try:
            found.append(load_run(kind, config, overrides))
        except ConfigError as error:
            problems[kind] = error
    if not found:
        raise problems[trainer or likeliest_trainer(config, overrides)]
    return found
