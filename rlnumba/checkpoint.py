"""Checkpoints of a run: complete or absent, and checked against damage when they are read.

    output_dir/checkpoints/step-N/
        config.json, *.safetensors, tokenizer files    a Hugging Face folder, as save_model writes it
        trainer_state.safetensors, or several          arrays: moments, master weights, ...
        trainer_state.json                             everything else, and the sha256 of every other file

A checkpoint is written to a hidden folder, flushed to the disk, and renamed as a whole, so that a process killed at
any moment leaves the earlier checkpoints and at most one hidden folder, which the next save removes. `Saver` does so in
a thread, from a copy of the weights, while training goes on. Large arrays have files of their own, so that several
threads write them and compute their hashes.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlnumba.errors import UserError
from rlnumba.model.config_values import read_json
from rlnumba.model.lora import check_other_kind, is_adapter
from rlnumba.model.tensor_file import read_arrays, write_tensors
from rlnumba.model.tokenizer import remove_other_tokenizer
from rlnumba.model.transformer import host_copy, save_model
from rlnumba.model.weights import remove_others, write_json
from rlnumba.reporting.files import copy_over

STATE = "trainer_state.json"
ARRAYS = "trainer_state*.safetensors"
# Arrays share a file of at most so many bytes; threads that write.
FILE_BYTES, WRITING_THREADS = 256 << 20, 4
# The end of the name of a checkpoint that another one of its step replaces.
REPLACED = ".replaced"
# In trainer_state.json, an object with this key alone is a reference to the array of that name.
ARRAY_KEY = "__array__"


class CheckpointError(UserError):
    """A checkpoint that could not be written; the earlier ones are whole."""


@dataclass(frozen=True)
class ArrayPart:
    """This rank's part of an array (size,) that the ranks of a run have in parts: its elements from `start` on."""

    values: np.ndarray
    start: int
    size: int

    @property
    def shape(self):
        """Shape of the whole array."""
        return (self.size,)

    @property
    def dtype(self):
        return self.values.dtype

    @property
    def nbytes(self):
        """Bytes of the whole array."""
        return self.size * self.dtype.itemsize


class Saver:
    """Writes checkpoints of one run in the background, one at a time, from copies on the host."""

    def __init__(self, output_dir):
        self.output_dir = output_dir
        self._thread = self._error = None

    def save(self, step, model, tokenizer, trainer_state, keep_last=None, keep=None):
        """Wait for the checkpoint before, copy the model, and begin to write what `save` writes.

        trainer_state: of arrays that do not change any more. Raises CheckpointError if the one before has failed.
        """
        self.wait()
        copied = host_copy(model)
        self._start(lambda: save(self.output_dir, step, copied, tokenizer, trainer_state, keep_last, keep))

    def _start(self, save):
        """Call save() in the background."""

        def write():
            try:
                save()
            except BaseException as error:  # raised again in the thread that trains
                self._error = error

        self._thread = threading.Thread(target=write, name="checkpoint")
        self._thread.start()

    def check(self):
        """Raise the error of a checkpoint that has failed so far."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self):
        """Return when the last checkpoint is on the disk. Raises CheckpointError if it could not be written."""
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error


def save(output_dir, step, model, tokenizer, trainer_state, keep_last=None, keep=None):
    """Write output_dir/checkpoints/step-N, with the weights in the model's dtype, and return its path.

    trainer_state: nested dicts (keys str) and lists of JSON values and NumPy arrays; arrays come back bit for bit.
    None: the model alone, which cannot be resumed from. keep_last: afterwards, remove all but this number of the
    newest, and but that of step `keep`. Raises CheckpointError if it cannot be written, as on a full disk; what was
    there before stays.
    """
    with new_folder(output_dir, step, keep_last, keep) as partial:
        _write(partial, step, model, tokenizer, trainer_state)
    return folder_of(output_dir, step)


def folder_of(output_dir, step):
    """The folder of the checkpoint of a step."""
    return Path(output_dir) / "checkpoints" / f"step-{step}"


def partial_of(output_dir, step):
    """The folder in which the checkpoint of a step is written."""
    return Path(output_dir) / "checkpoints" / f".step-{step}.partial"


def remove_leftovers(output_dir):
    """Remove the folders that are not complete, and those that another has replaced.

    A process that is killed between the two renames of `new_folder` leaves the checkpoint of before without its name,
    which it gets back.
    """
    for leftover in (Path(output_dir) / "checkpoints").glob(".step-*"):
        folder = leftover.with_name(leftover.stem.removeprefix("."))
        if leftover.suffix == REPLACED and not folder.exists():
            os.rename(leftover, folder)
        else:
            shutil.rmtree(leftover)


@contextmanager
def new_folder(output_dir, step, keep_last, keep):
    """A block that writes the files of a checkpoint to the folder that it is given; the rest is as `save` says."""
    partial, folder = partial_of(output_dir, step), folder_of(output_dir, step)
    root = folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_leftovers(output_dir)
        partial.mkdir()
        yield partial
        replaced = root / f".step-{step}{REPLACED}"
        if folder.exists():
            os.rename(folder, replaced)
        os.rename(partial, folder)
        _flush(root)
        shutil.rmtree(replaced, ignore_errors=True)
        if keep_last is not None:
            for old in existing(output_dir)[keep_last:]:
                if old.name != f"step-{keep}":
                    shutil.rmtree(old)
    except (OSError, UserError) as error:
        # Gives its part of a full disk back.
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):
            remove_leftovers(output_dir)
        reason = error if isinstance(error, UserError) else error.strerror
        raise CheckpointError(f"{folder}: the checkpoint cannot be written: {reason}") from error


def _write(partial, step, model, tokenizer, trainer_state):
    """Write the files of a checkpoint to the folder `partial` and flush them to the disk."""
    arrays = {}
    state = separate(trainer_state, "", arrays)
    with ThreadPoolExecutor(WRITING_THREADS) as threads:
        written = [threads.submit(save_model, model, partial, tokenizer)]
        if trainer_state is not None:
            written += [threads.submit(write_tensors, partial / name, part) for name, part in by_file(arrays).items()]
        for each in written:
            each.result()
    complete(partial, step, state)


def complete(partial, step, state):
    """Flush the files in the folder of a checkpoint, and write STATE with their hashes.

    state: what `separate` returned.
    """
    body = {"step": step, "state": state}
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    with ThreadPoolExecutor(WRITING_THREADS) as threads:
        hashes = threads.map(_flushed_hash, files)
        body["sha256"] = {str(path.relative_to(partial)): found for path, found in zip(files, hashes, strict=True)}
    write_json(partial / STATE, {"digest": _hash_json(body), **body})
    _flush(partial)


def by_file(arrays):
    """{name of a file: its part of `arrays`}: files of at most FILE_BYTES, or of one array. One file for no arrays."""
    parts, room = [{}], FILE_BYTES
    for name, array in arrays.items():
        if array.nbytes > room and parts[-1]:
            parts.append({})
            room = FILE_BYTES
        parts[-1][name] = array
        room -= array.nbytes
    if len(parts) == 1:
        return {"trainer_state.safetensors": parts[0]}
    return {f"trainer_state-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def existing(output_dir):
    """The checkpoint folders of a run, newest step first, readable or not."""
    found = {}
    for path in (Path(output_dir) / "checkpoints").glob("step-*"):
        if match := re.fullmatch(r"step-(\d+)", path.name):
            found[int(match[1])] = path
    return [found[step] for step in sorted(found, reverse=True)]


def latest_readable(output_dir):
    """The folder of the newest undamaged checkpoint, or None if the run has none at all.

    Prints a line on stderr for each damaged one that is skipped. Raises UserError if none of them is readable.
    """
    folders = existing(output_dir)
    for folder in folders:
        try:
            verify(folder)
        except UserError as error:
            print(f"rlnumba: warning: checkpoint {folder} is damaged and passed over: {error}", file=sys.stderr)
        else:
            return folder
    if folders:
        raise UserError(f"{Path(output_dir) / 'checkpoints'}: none of the {len(folders)} checkpoints is readable")
    return None


def of_step(output_dir, step):
    """The folder of the checkpoint of a step. Raises UserError if there is none, or naming the file that is damaged."""
    folder = Path(output_dir) / "checkpoints" / f"step-{step}"
    if not folder.is_dir():
        found = ", ".join(path.name for path in reversed(existing(output_dir))) or "no checkpoint"
        raise UserError(f"{folder}: no such checkpoint; {folder.parent} has {found}")
    verify(folder)
    return folder


def verify(folder):
    """Raise UserError, naming the file, unless every file of a checkpoint has the sha256 with which it was saved."""
    folder = Path(folder)
    body = _body(folder)
    with ThreadPoolExecutor(WRITING_THREADS) as threads:
        # In the order of the files, of which the first that is damaged is named.
        list(threads.map(lambda name: _check(folder / name, body["sha256"][name]), body["sha256"]))


def _check(path, expected):
    """Raise UserError unless a file has this sha256."""
    try:
        actual = _hash(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if actual != expected:
        raise UserError(f"{path}: its content is not what was saved")


def copy_model(folder, target):
    """Copy the model of a checkpoint, or its adapter, without the trainer's state, to the folder `target`.

    Files of an earlier model's weights and tokenizer that are not among its own go. Raises OSError, and UserError as
    save_model.
    """
    check_other_kind(target, is_adapter(folder))
    target.mkdir(parents=True, exist_ok=True)
    # The tokenizer's further chat templates are in a folder of their own.
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.name != STATE and not path.match(ARRAYS):
            new = target / path.relative_to(folder)
            new.parent.mkdir(exist_ok=True)
            copy_over(path, new)
    remove_other_tokenizer(target, folder)
    if not is_adapter(folder):
        remove_others(target, [path.name for path in folder.glob("model*.safetensors")])


def load(folder):
    """(step, trainer_state) of a checkpoint folder, which is also the model's.

    Arrays are mapped: what is read of them takes none of the process's own memory.
    Raises UserError for a damaged one, and for one that holds the model alone.
    """
    body = _body(Path(folder))
    if body["state"] is None:
        raise UserError(f"{folder}: holds the model alone (train.save_only_model), so no run can be resumed from it")
    arrays = {}
    for name in body["sha256"]:
        if Path(name).match(ARRAYS):
            arrays |= read_arrays(Path(folder) / name)
    return body["step"], _join(body["state"], arrays)


def _body(folder):
    """trainer_state.json without its own digest, which is checked."""
    path = folder / STATE
    body = read_json(path)
    files = body.get("sha256")
    digest = body.pop("digest", None)
    if not isinstance(files, dict) or digest != _hash_json(body):
        raise UserError(f"{path}: its content is not what was saved")
    return body


def separate(value, path, arrays):
    """`value` with every array replaced by a reference to its name, `path`; the array goes into arrays[path].

    An array is NumPy's, or an ArrayPart.
    """
    if isinstance(value, np.ndarray | ArrayPart):
        if path in arrays:
            raise ValueError(f"checkpoint: two arrays of trainer_state are called {path}")
        arrays[path] = value
        return {ARRAY_KEY: path}
    if isinstance(value, dict):
        return {key: separate(item, f"{path}.{key}" if path else key, arrays) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [separate(item, f"{path}.{index}", arrays) for index, item in enumerate(value)]
    return value.item() if isinstance(value, np.generic) else value


def _join(value, arrays):
    """The inverse of separate; lists and tuples come back as lists."""
    if isinstance(value, dict):
        if value.keys() == {ARRAY_KEY}:
            return arrays[value[ARRAY_KEY]]
        return {key: _join(item, arrays) for key, item in value.items()}
    return [_join(item, arrays) for item in value] if isinstance(value, list) else value


def _hash_json(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _hash(path):
    """sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flushed_hash(path):
    """sha256 of a file that is on the disk when this returns."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(folder):
    """fsync a folder, so that the names in it are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
