"""Output files: folders that can be written to, files replaced as a whole, JSON lines."""

import contextlib
import errno
import json
import os
import shutil
import tempfile
from pathlib import Path

from rlnumba.config import to_toml
from rlnumba.data.values import as_json
from rlnumba.errors import ConfigError, UserError

# A file that a run writes in its folder when it begins or is resumed, and removes at its end, after final/.
UNFINISHED = "unfinished"
# Files and folders that a run writes in its own folder.
RUN_FILES = (
    *(UNFINISHED, "config.toml", "metrics.jsonl", "completions.jsonl", "tokens.jsonl", "completions"),
    *("checkpoints", "final", "curves.png", "tensorboard", "wandb", "wandb_id", "trackio_number"),
)

# The files of a model's folder, by the ends of their names.
MODEL_FILES = (".json", ".safetensors", ".jinja", ".model", ".txt")


def make_folder(path):
    """Creates a folder that can be written to. Raises UserError naming it if that cannot be."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f"{path}: cannot be written to: {error.strerror}") from error


@contextlib.contextmanager
def new_folder(path):
    """A block that writes a folder, which can be written to. If the block fails, the folder goes with all that is in
    it, unless it was there before. Raises UserError naming it if it cannot be written to."""
    path = Path(path)
    made = [each for each in (path, *path.parents) if not each.exists()]
    make_folder(path)
    try:
        yield
    except BaseException:
        if path in made:
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # another program has written there
            for each in made[1:]:
                each.rmdir()
        raise


def check_output(output, inputs, folders=()):
    """Raise ConfigError, before anything is read, if a command's --output is an input of it or belongs to a run.

    inputs: {option: path, or None where it is not given}. folders: those of models, whose files are inputs. A run has
    its RUN_FILES, and all that lies in its folders; other files in its folder are anyone's.
    """
    output = Path(output)
    for option, path in inputs.items():
        if path is not None and Path(path).exists() and output.exists() and os.path.samefile(output, path):
            raise ConfigError(f"--output: {output} is what {option} reads, and would be overwritten")
    for folder in folders:
        if output.is_file() and output.suffix in MODEL_FILES and output.parent.samefile(folder):
            raise ConfigError(f"--output: {output} is a file of the model, and would be overwritten")
    real = Path(os.path.realpath(output))
    for path in (real, *real.parents):
        if is_run_folder(path):
            name = real.relative_to(path).parts[:1]
            if not name:
                raise ConfigError(f"--output: {output} is the folder of a run; choose one in it, as {output / 'eval'}")
            if name[0] in RUN_FILES and real.exists():
                raise ConfigError(f"--output: {output} belongs to the run in {path}, and would be overwritten")


def is_run_folder(path):
    """Whether a folder is a run's output_dir."""
    return (path / "config.toml").is_file() and ((path / "metrics.jsonl").is_file() or (path / "checkpoints").is_dir())


@contextlib.contextmanager
def replacing(path):
    """A text file that replaces `path` when the block ends without an error, and is removed otherwise.

    The target of a symbolic link is replaced. Raises UserError naming the path if it cannot be written.
    """
    path, temporary = Path(path), None
    # A device or a pipe, such as /dev/null, is written to instead.
    is_special = path.exists() and not path.is_file() and not path.is_dir()
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not is_special:
            target = Path(os.path.realpath(path))
            handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with open(path if is_special else handle, "w", encoding="utf-8") as file:
            yield file
        if not is_special:
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
            os.replace(temporary, target)
            temporary = None
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        if temporary is not None:
            os.unlink(temporary)


def copy_over(source, target):
    """Copy a file to the path `target`, which is replaced as a whole, and a symbolic link itself. Raises OSError."""
    target = Path(target)
    partial = target.with_name(f"{target.name}.partial")
    shutil.copy(source, partial)
    os.replace(partial, target)


def remove_temporaries(folder):
    """Remove the files with which a process that was killed was replacing RUN_FILES of a run's folder, which may be as
    large as these."""
    for name in RUN_FILES:
        for path in Path(folder).glob(f".{name}.*"):
            if path.is_file():
                path.unlink()


def write_config(run, environment):
    """Writes the resolved run to output_dir/config.toml, under comments made of `environment`: dict of str or None."""
    make_folder(run.output_dir)
    header = [f"# {name} {' '.join(value.split())}\n" for name, value in environment.items() if value]
    with replacing(Path(run.output_dir) / "config.toml") as file:
        file.writelines([*header, "\n", to_toml(run)])


def note_unfinished(folder):
    """Writes the file by which a run that has not ended is known, also where an earlier final/ is there."""
    with replacing(Path(folder) / UNFINISHED) as file:
        file.write("The run has not ended: a final/ beside this file is not complete, or is of an earlier end.\n")


ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
# Writes NaN and Infinity, which Python's json reads.
NAN_ENCODER = json.JSONEncoder(ensure_ascii=False)
LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


def to_line(row, keeps_nan=False):
    """A dict as one line of JSON, with its newline: str. Other characters that end a line for some readers
    (str.splitlines, JavaScript) are escaped.

    keeps_nan: write numbers that are not finite as NaN and Infinity, instead of null. Raises ValueError for an integer
    of more digits than Python converts, and ValueError or RecursionError for a value inside of itself.
    """
    encoder = NAN_ENCODER if keeps_nan else ENCODER
    try:
        line = encoder.encode(row)
    except (TypeError, ValueError):  # what JSON does not have, or NaN: as_json takes ten times as long
        line = encoder.encode(as_json(row, keeps_nan))
    return line.translate(LINE_ENDS) + "\n"


def append_lines(file, rows):
    """Write dicts to an open text file as lines of JSON, and flush it. Raises OSError naming the file."""
    try:
        file.writelines(to_line(row) for row in rows)
        file.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from error


def reaches_beyond(path, step):
    """Whether a JSONL file has lines after `step`; a missing file has none."""
    if not Path(path).exists():
        return False
    with open(path, encoding="utf-8", errors="replace") as file:
        return any(row.get("step", 0) > step for row in map(_row_of, file) if row is not None)


def cut_back(path, step):
    """Removes from a JSONL file the lines after `step` and an incomplete last one; a missing file is no error."""
    path = Path(path)
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as old, replacing(path) as new:
        for line in old:
            row = _row_of(line)
            if row is not None and row.get("step", 0) <= step:
                new.write(line if line.endswith("\n") else line + "\n")


def _row_of(line):
    """The object of a line of a JSONL file, or None."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def names_of(paths):
    """Names of folders: the ends of their absolute paths, as short as they differ from each other: list of str."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def read_metrics(run_dir):
    """The lines of run_dir/metrics.jsonl: list of dicts. An incomplete last line is skipped.

    Raises UserError if there is no such file, or a line of it is not a JSON object with a step.
    """
    path = Path(run_dir) / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    rows = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}:{number}: not JSON: {error.msg}") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UserError(f"{path}:{number}: must be an object with a step")
        rows.append(row)
    return rows
