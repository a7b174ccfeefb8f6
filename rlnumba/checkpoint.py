"""Checkpoints of a run: complete or absent, and checked against damage when they are read.

    output_dir/checkpoints/step-N/
        config.json, *.safetensors, tokenizer files    a Hugging Face folder, as save_model writes it
        trainer_state.safetensors                      arrays: moments, master weights, ...
        trainer_state.json                             everything else, and the sha256 of every other file

A checkpoint is written to a hidden folder, flushed to the disk, and renamed as a whole, so that a process killed at
any moment leaves the earlier checkpoints and at most one hidden folder, which the next save removes.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np

from rlnumba.errors import UserError
from rlnumba.model.config import read_json
from rlnumba.model.transformer import save_model
from rlnumba.model.weights import open_tensors, write_json, write_tensors

STATE = "trainer_state.json"
ARRAYS = "trainer_state.safetensors"
# In trainer_state.json, an object with this key alone is a reference to the array of that name.
ARRAY_KEY = "__array__"


def save(output_dir, step, model, tokenizer, trainer_state, keep_last=None):
    """Write output_dir/checkpoints/step-N, with the weights in the model's dtype, and return its path.

    trainer_state: nested dicts (keys str) and lists of JSON values and NumPy arrays; arrays come back bit for bit.
    keep_last: afterwards, remove all but this number of the newest.
    """
    root = Path(output_dir) / "checkpoints"
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".step-*"):
        shutil.rmtree(leftover)
    partial, folder = root / f".step-{step}.partial", root / f"step-{step}"
    save_model(model, partial, tokenizer)
    arrays = {}
    body = {"step": step, "state": _separate(trainer_state, "", arrays)}
    write_tensors(partial / ARRAYS, arrays)
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    body["sha256"] = {str(path.relative_to(partial)): _hash(path, flush=True) for path in files}
    write_json(partial / STATE, {"digest": _hash_json(body), **body})
    _flush(partial)
    if folder.exists():
        os.rename(folder, root / f".step-{step}.replaced")
    os.rename(partial, folder)
    _flush(root)
    shutil.rmtree(root / f".step-{step}.replaced", ignore_errors=True)
    if keep_last is not None:
        for old in existing(output_dir)[keep_last:]:
            shutil.rmtree(old)
    return folder


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
    for name, expected in body["sha256"].items():
        try:
            actual = _hash(folder / name)
        except OSError as error:
            raise UserError(f"{folder / name}: {error.strerror}") from None
        if actual != expected:
            raise UserError(f"{folder / name}: its content is not what was saved")


def load(folder):
    """(step, trainer_state) of a checkpoint folder, which is also the model's. Raises UserError for a damaged one."""
    body = _body(Path(folder))
    return body["step"], _join(body["state"], open_tensors(Path(folder) / ARRAYS))


def _body(folder):
    """trainer_state.json without its own digest, which is checked."""
    path = folder / STATE
    body = read_json(path)
    files = body.get("sha256")
    digest = body.pop("digest", None)
    if not isinstance(files, dict) or digest != _hash_json(body):
        raise UserError(f"{path}: its content is not what was saved")
    return body


def _separate(value, path, arrays):
    """`value` with every array replaced by a reference to its name, `path`; the array goes into arrays[path]."""
    if isinstance(value, np.ndarray):
        if path in arrays:
            raise ValueError(f"checkpoint: two arrays of trainer_state are called {path}")
        arrays[path] = value
        return {ARRAY_KEY: path}
    if isinstance(value, dict):
        return {key: _separate(item, f"{path}.{key}" if path else key, arrays) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_separate(item, f"{path}.{index}", arrays) for index, item in enumerate(value)]
    return value.item() if isinstance(value, np.generic) else value


def _join(value, arrays):
    """The inverse of _separate, `arrays` being {name: Stored}; lists and tuples come back as lists."""
    if isinstance(value, dict):
        if value.keys() == {ARRAY_KEY}:
            return arrays[value[ARRAY_KEY]].read()
        return {key: _join(item, arrays) for key, item in value.items()}
    return [_join(item, arrays) for item in value] if isinstance(value, list) else value


def _hash_json(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _hash(path, flush=False):
    """sha256 of a file; flush: fsync it first."""
    with open(path, "rb") as file:
        if flush:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(folder):
    """fsync a folder, so that the names in it are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
