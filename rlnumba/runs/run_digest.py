"""The digest of a run: what decides its result, which checkpoints keep, and the comparison with a run that goes on.

    keys      every key of the configuration; the sizes of a step and a generation are those of all ranks together
    inputs    model, critic, teachers, adapter, tokenizer: a hash of each
    rewards   a hash of the source file of each reward function
    tools     a hash of the source files of each tool and each environment
    rows      a hash of each training row, and one of all held-out rows
    versions  of the packages that bits depend on, and the device

Keys that may change, and the effects, are in config/resuming.py. The hash of a model is quick also where it has
hundreds of gigabytes: of each file of weights it reads the size, the header and SAMPLES blocks at equal distances. So
it finds another model, or one that was trained on, but not a change of single weights between the blocks.
"""

import dataclasses
import functools
import hashlib
import inspect
import json
from pathlib import Path

import numpy as np

from rlnumba.config.keys import keys_of, section_fields, sections_of
from rlnumba.config.lora import QuantizationConfig
from rlnumba.config.resuming import CONTENT, FREE, NEXT, rule_of
from rlnumba.errors import ConfigError
from rlnumba.model.config import ModelConfig
from rlnumba.model.config_values import read_json
from rlnumba.model.hub import find_model
from rlnumba.model.lora import first_adapter, is_adapter
from rlnumba.model.quantized.weights import form_of
from rlnumba.model.tokenizer import FILES, TEMPLATE_FOLDER
from rlnumba.rewards.calling import ModelReward
from rlnumba.runtime import device
from rlnumba.runtime.environment import versions_of_results

# Blocks of a file of weights that its hash reads, and their bytes; the first has the header.
SAMPLES, BLOCK_BYTES = 64, 16 << 10
# Values of [rlnumba].gemm that count as one.
NATIVE = ("auto", "native", "numba")


def digest_of(run):
    """{"keys", "inputs", "versions"} of a run: what is known before rows and rewards are read. JSON values.

    Raises UserError for a model or adapter that is not there.
    """
    keys, folder = keys_of_run(run), find_model(run.model)
    folders = {"model": folder}
    if keys.get("critic.model") is not None:
        folders["critic.model"] = find_model(keys["critic.model"])
    if keys.get("teacher.model") is not None:
        # A server has the weights.
        folders["teacher.model"] = find_model(keys["teacher.model"], weights=not run.teacher.served)
    if keys.get("lora.init") is not None:
        folders["lora.init"] = first_adapter(run.lora)
    inputs = {name: model_hash(path) for name, path in folders.items()}
    if teachers := keys.get("teacher.models"):
        served = run.teacher.served
        found = {name: find_model(path, weights=name not in served) for name, path in sorted(teachers.items())}
        hashes = {name: model_hash(path) for name, path in found.items()}
        inputs["teacher.models"] = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
    inputs["tokenizer"] = files_hash([folder / name for name in FILES] + sorted((folder / TEMPLATE_FOLDER).glob("*")))
    if keys["train.dtype"] is None:
        keys["train.dtype"] = "float32" if device.name() == "cpu" else ModelConfig.from_folder(folder).dtype
    where = device.describe().partition(",")[0] if device.name() == "cuda" else device.name()
    return {"keys": keys, "inputs": inputs, "versions": versions_of_results() | {"device": where}}


def keys_of_run(run):
    """{"section.key": value} of a resolved run: JSON values."""
    found, sections = {}, sections_of(type(run))
    for section, attribute in {"": None, **section_fields(type(run))}.items():
        owner = run if attribute is None else getattr(run, attribute)
        if owner is None:
            continue
        # Not the fields of the owner: trainers in Python have further arguments in their configs.
        for name in keys_of(sections[section]):
            value = getattr(owner, name)
            found[f"{section}.{name}" if section else name] = json.loads(json.dumps(value))
    train = run.train
    found["train.global_batch_size"] = train.per_device_train_batch_size * train.micro_batches_per_step
    found.pop("train.gradient_accumulation_steps")
    if "train.generation_batch_size" in found:
        found["train.generation_batch_size"] = train.generation.num_completions
        found.pop("train.steps_per_generation")
    found["gemm"] = "native" if run.gemm in NATIVE else run.gemm
    return found


def in_one_spelling(keys):
    """keys_of_run in which the format of [quantization] has one spelling: its type follows from its bits, and its
    groups from its type, where they are not set."""
    if not _has_section("quantization", keys):
        return keys
    names = [f.name for f in dataclasses.fields(QuantizationConfig)]
    form, group_size = form_of(QuantizationConfig(**{name: keys.get(f"quantization.{name}") for name in names}))
    others = {name: value for name, value in keys.items() if name != "quantization.bits"}
    return others | {"quantization.type": form.name, "quantization.group_size": group_size}


def model_hash(folder):
    """A hash of a model's or an adapter's folder: of its configuration, and of parts of its weights."""
    found = hashlib.sha256()
    names = ("adapter_config.json",) if is_adapter(folder) else ("config.json",)
    for name in names:
        found.update(json.dumps(read_json(folder / name), sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            for block in range(SAMPLES):
                file.seek(block * max(size - BLOCK_BYTES, 0) // (SAMPLES - 1))
                found.update(file.read(BLOCK_BYTES))
    return found.hexdigest()


def files_hash(paths):
    """A hash of the names and contents of those files that exist."""
    found = hashlib.sha256()
    for path in paths:
        if path.is_file():
            found.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def source_hash(*objects):
    """A hash of the source files of functions, classes and callable objects, or None where there are none.

    The version of this package stands for functions of its own. The hash of a ModelReward, which comes alone, is that
    of its model.
    """
    if isinstance(objects[0], ModelReward):
        return model_hash(objects[0].folder)
    paths = dict.fromkeys(path for each in objects if (path := source_path(each)) is not None)
    return files_hash(paths) if paths else None


def source_path(found):
    """The Path of the file that a function, a class, or the class of an object is written in, or None without one."""
    while isinstance(found, functools.partial):
        found = found.func
    named = found if inspect.isroutine(found) or inspect.isclass(found) else type(found)
    module = inspect.getmodule(named)
    path = None if module is None else vars(module).get("__file__")
    if path is None or module.__name__.partition(".")[0] == "rlnumba" or not Path(path).is_file():
        return None
    return Path(path)


def row_hashes(rows):
    """(len(rows),) uint64 of rows' contents: dataclasses, lists, arrays and JSON values."""
    found = np.empty(len(rows), np.uint64)
    for i, row in enumerate(rows):
        content = hashlib.blake2b(digest_size=8)
        _update(content, row)
        found[i] = int.from_bytes(content.digest(), "little")
    return found


def _update(content, value):
    """Add a value to a hash, with its kind and length, so that no two values of other structure are alike."""
    if isinstance(value, np.ndarray):
        content.update(f"array {value.dtype} {value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif dataclasses.is_dataclass(value):
        # A field that is not compared is no content, but what is computed of it.
        for f in dataclasses.fields(value):
            if f.compare:
                _update(content, getattr(value, f.name))
    elif isinstance(value, list | tuple):
        content.update(f"list {len(value)}".encode())
        if value and all(type(each) is int for each in value):
            content.update(repr(value).encode())
        else:
            for each in value:
                _update(content, each)
    elif isinstance(value, dict):
        content.update(f"dict {len(value)}".encode())
        for key, each in value.items():
            _update(content, key)
            _update(content, each)
    else:
        content.update(f"{type(value).__name__} {value!r};".encode(errors="surrogatepass"))


def check_keys(saved, own, where, step):
    """Compare what a checkpoint has of its run with the run that goes on: lines that say what has changed.

    saved, own: results of digest_of. where: the checkpoint's folder; step: its number. Raises ConfigError, one line,
    for what must not change.
    """
    lines, problems = [], []
    saved, own = (each | {"keys": in_one_spelling(each["keys"])} for each in (saved, own))
    for name, value in own["keys"].items():
        before = saved["keys"].get(name, value)
        if before == value or rule_of(name) == CONTENT:
            continue
        if rule_of(name) in (FREE, NEXT):
            lines.append(
                f"{name} {shown(before)} -> {shown(value)}" + f" from step {step + 1}" * (rule_of(name) == NEXT)
            )
        else:
            problems.append(f"{name} = {before!r}, and this run has {value!r}")
    for name, value in own["inputs"].items():
        if saved["inputs"].get(name, value) != value:
            problems.append(_other_input(name, saved["keys"], own["keys"]))
    problems += _other_teachers(saved, own)
    # Its keys are there with the section alone; without it the base has other values.
    had, has = (_has_section("quantization", each["keys"]) for each in (saved, own))
    if had != has:
        problems.append("[quantization], and this run has none" if had else "no [quantization], and this run has one")
    if problems:
        raise ConfigError(f"{where}: saved with {'; with '.join(problems)}: this cannot change on --resume")
    # Keys of [async] are there with the section alone, teachers are inputs.
    for section, part in (("async", "keys"), ("teacher", "inputs")):
        had, has = (_has_section(section, each[part]) for each in (saved, own))
        if had != has:
            lines.append(f"[{section}] is {'new' if has else 'gone'} from step {step + 1}")
    for name, value in own["versions"].items():
        before = saved["versions"].get(name, value)
        if before != value:
            lines.append(f"{name} {before} -> {value}, with which the last bits may differ")
    return lines


def _has_section(section, names):
    return any(name.startswith(f"{section}.") for name in names)


def _other_teachers(saved, own):
    """The problem, in a list, of one teacher where there were several, or of several where there was one."""
    (before, *_), (now, *_) = (
        [k for k in each["inputs"] if k.startswith("teacher.")] or [None] for each in (saved, own)
    )
    if before == now or None in (before, now):
        return []
    return [f"{before} = {saved['keys'].get(before)!r}, and this run has {now} = {own['keys'].get(now)!r}"]


def _other_input(name, saved, own):
    key = "model" if name == "tokenizer" else name
    before, now = saved.get(key), own.get(key)
    what = "the tokenizer of " if name == "tokenizer" else ""
    if before == now:
        return f"another content of {what}{key} = {now!r} than it has now"
    return f"{what}{key} = {before!r}, and this run has {now!r}, which is another one"


def check_sources(saved, own, key, step):
    """Lines that say which functions have another source than at the checkpoint. saved, own: {name: hash}; key: begins
    a line."""
    return [
        f"{key}{name} has changed, from step {step + 1}"
        for name, value in own.items()
        if name in saved and saved[name] != value
    ]


def new_indices(before, now):
    """{index of a row before: its index now} of the rows that are there in both. before, now: row_hashes.

    The k-th of several equal rows is the k-th of them again.
    """
    places, found = {}, {}
    for index, value in enumerate(now.tolist()):
        places.setdefault(value, []).append(index)
    for index, value in enumerate(before.tolist()):
        if places.get(value):
            found[index] = places[value].pop(0)
    return found


def shown(value):
    """A value of a key as a line shows it: str."""
    return value if isinstance(value, str) else json.dumps(value)
