"""The inputs of a run: the files and folders that its keys name, also those that lie in its own output_dir.

A run that starts afresh sets what an earlier run has left in output_dir aside, in earlier-N. An input may be among it,
as where `model` is output_dir/final of a first stage. It is then read there, output_dir/earlier-N/final, also by a run
that goes on, and nothing that is read is overwritten.
"""

import os
from dataclasses import replace
from pathlib import Path

from rlnumba.config.keys import section_fields

# (section, key) -> how its value names files: one path, several with commas between them, a list of functions,
# file.py:name, and folders, one function, or a table of functions.
ONE, SEVERAL, FUNCTIONS, FUNCTION, TABLE = "one", "several", "functions", "function", "table"
PATH_KEYS = {
    ("", "model"): ONE,
    ("critic", "model"): ONE,
    ("lora", "init"): ONE,
    ("teacher", "model"): ONE,
    ("teacher", "models"): TABLE,
    ("data", "train"): SEVERAL,
    ("data", "eval"): SEVERAL,
    ("rewards", "funcs"): FUNCTIONS,
    ("train", "callbacks"): FUNCTIONS,
    ("tools", "funcs"): FUNCTIONS,
    ("environment", "factory"): FUNCTION,
    ("environment", "factories"): TABLE,
    ("rollout", "func"): FUNCTION,
}


def value_of(run, section, name):
    """The value of a key of a run, None where the run has no such key or section."""
    attribute = section_fields(type(run)).get(section)
    owner = run if not section else attribute and getattr(run, attribute)
    return vars(owner).get(name) if owner is not None else None


def with_paths(run, change):
    """A run whose keys name change(path) instead of each path that they name."""
    for (section, name), kind in PATH_KEYS.items():
        value = value_of(run, section, name)
        if not value:
            continue
        if kind == FUNCTIONS:
            changed = [_with_path(each, change) for each in value]
        elif kind == FUNCTION:
            changed = _with_path(value, change)
        elif kind == TABLE:
            changed = {name: _with_path(each, change) for name, each in value.items()}
        elif kind == SEVERAL and not Path(value).exists():
            parts = [part.strip() for part in value.split(",")]
            found = [part and change(part) for part in parts]
            changed = value if found == parts else ",".join(found)
        else:
            changed = change(value)
        if changed == (list(value) if kind == FUNCTIONS else value):
            continue
        if section:
            attribute = section_fields(type(run))[section]
            run = replace(run, **{attribute: replace(getattr(run, attribute), **{name: changed})})
        else:
            run = replace(run, **{name: changed})
    return run


def paths_of(run):
    """The paths that a run's keys name, whether they exist or not: list of str."""
    found = []

    def noted(path):
        found.append(path)
        return path

    with_paths(run, noted)
    return found


def _with_path(spec, change):
    """The name of a function in which its file is changed, or the folder of a model; other names stay."""
    source, is_file, name = spec.partition(".py:")
    if is_file:
        return f"{change(source + '.py')}:{name}"
    return change(spec)


def earlier_folders(output_dir):
    """The folders earlier-N in a run's folder, in the order of their numbers."""
    found = [path for path in Path(output_dir).glob("earlier-*") if path.name[8:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[8:]))


class SetAside:
    """The places of a run's inputs that an earlier run has left in output_dir.

    moved: {path in output_dir: where it is now, in output_dir}, of what was moved to earlier-N; as JSON has it.
    """

    def __init__(self, output_dir, moved=()):
        self.output_dir, self.moved = Path(output_dir), dict(moved)

    def within(self, path):
        """A path relative to output_dir, or None for one that does not lie there."""
        root, found = Path(os.path.realpath(self.output_dir)), Path(os.path.realpath(Path(path).expanduser()))
        return found.relative_to(root) if found.is_relative_to(root) and found != root else None

    def __call__(self, path):
        """The present place of a path: str."""
        inside = self.within(path)
        if inside is None:
            return path
        for old in (inside, *inside.parents):
            if str(old) in self.moved:
                return str(self.output_dir / self.moved[str(old)] / inside.relative_to(old))
        if not (self.output_dir / inside).exists():
            # A start that was killed before its first checkpoint has moved it.
            for folder in reversed(earlier_folders(self.output_dir)):
                if (folder / inside).exists():
                    return str(folder / inside)
        return path


def located(run):
    """A run whose inputs have the paths that they have, also where an earlier start has moved them."""
    return with_paths(run, SetAside(run.output_dir))
