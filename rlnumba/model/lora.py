"""Low-rank adapters (LoRA, arXiv 2106.09685): what is trained instead of a model's weights, in one flat buffer.

    y = x W^T + s dropout(x) A^T B^T        W (M, D) frozen, A (r, D), B (M, r), s = lora_alpha / r

Matrices that read the same input are fused, as in model/weights.py: A of q, k and v lie one below the other in A
(C, D), and their B are the blocks on the diagonal of B (M, C), which is zero outside of them. C is rounded up to a
multiple of COLUMNS by zero rows of A, zero columns of B. Entries that are zero stay zero: their gradients are. A shard
of a model (model/shard.py) has A whole and its rows of B, so that its columns of y have the whole model's bits.

    flat    | A of qkv, all layers | B of qkv, all layers | A of o | ... |          parameters that decay, all of them

Which matrices there are is what the blocks of the layers say (model/blocks); layers of one shape are together.
The matrices of a layer's experts (E, M, D), which target_parameters names, have A (E, C, D) and B (E, M, C) in their
place, one pair an expert. PEFT's file has A as (E r, D), expert by expert, and B as (M, r E), rank by rank.

A score head is trained whole, after them in the buffer. An adapter's folder is PEFT's: adapter_config.json and
adapter_model.safetensors, a float32 tensor for each A and B, and one for the score head. A 16-bit model computes with
their rounding; what is saved are the float32 values.
"""

import copy
import json
import math
import re
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlnumba.config.lora import LoraConfig
from rlnumba.errors import ConfigError, UserError
from rlnumba.kernels.gemm.ops import linear_backward_input
from rlnumba.kernels.nn.elementwise import add, cast, scale
from rlnumba.kernels.nn.lora import keep_blocks
from rlnumba.model.blocks.low_rank import Pair
from rlnumba.model.config import LM_HEAD, SCORE_HEAD
from rlnumba.model.config_values import read_json
from rlnumba.model.lora_targets import projections, resolve_parameters, resolve_targets, stacks
from rlnumba.model.parameter import ALIGNMENT, Parameter
from rlnumba.model.shard import WHOLE, Range
from rlnumba.model.weights import check_dtype, listed, open_tensors, write_json, write_tensors
from rlnumba.runtime import device, memory

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Rows of A are a multiple of this: one step of the reduction of every GEMM kernel, so that rows of several adapters
# in one batch add up as they do alone.
COLUMNS = 16

# The score head in PEFT's files: its tensor, and how modules_to_save may name it.
SCORE, SCORE_NAMES = f"{PREFIX}score.weight", {"score", "classifier"}
# Keys of adapter_config.json that are read, and those without effect on what is computed.
READ = (
    *("r", "lora_alpha", "lora_dropout", "target_modules", "target_parameters", "use_rslora"),
    *("base_model_name_or_path", "peft_type", "task_type", "modules_to_save"),
)
WITHOUT_EFFECT = ("peft_version", "inference_mode", "auto_mapping", "megatron_core", "qalora_group_size")
# PEFT's target_modules of the architectures here where a configuration has none.
PEFT_TARGET_MODULES = ("q_proj", "v_proj")
# Values of the other keys that mean that an option is off, besides null, false and empty ones; how the weights of an
# adapter that is on the disk began has no effect any more.
OFF = {"bias": ("none",), "init_lora_weights": (True, "gaussian"), "revision": ("main",)}
# Of an adapter that is to be made: A and B begin as Adapter.new has them.
OFF_IN_NEW = OFF | {"init_lora_weights": (True,)}


class Module(NamedTuple):
    """A module of a fused projection: its rows of B from first_row on, its columns from first_column on, or none."""

    name: str
    first_row: int
    rows: int
    first_column: int | None


@dataclass(frozen=True)
class AdapterLayout:
    """The place of a fused projection's matrices, of all layers that have it alike: rows M, inputs D and columns C.

    Those of experts are a stack, whose modules are one, named like PEFT's.

    layers: their numbers; parameter: that of the first of them; modules: those fused; a_offset, b_offset: in flat.
    """

    name: str
    layers: tuple[int, ...]
    parameter: Parameter
    columns: int
    modules: tuple[Module, ...]
    a_offset: int = 0
    b_offset: int = 0

    @property
    def rows(self):
        return self.parameter.shape[-2]

    @property
    def inputs(self):
        return self.parameter.shape[-1]

    @property
    def stack(self):
        """(experts,) of a stack, else ()."""
        return self.parameter.shape[:-2]

    @property
    def shapes(self):
        """The shapes of A and B of all layers: (L, C, D) and (L, M, C), or (L, E, C, D) and (L, E, M, C)."""
        of_all = len(self.layers), *self.stack
        return (*of_all, self.columns, self.inputs), (*of_all, self.rows, self.columns)


@dataclass(frozen=True)
class Places:
    """The places of an adapter's matrices in its flat buffer; the adapter is a model's, or that of a shard of it.

    config: the whole model's; layouts: those of the fused projections that have an adapter; score_offset: where the
    score head begins, if there is one; size: elements of flat.
    """

    config: object
    lora: LoraConfig
    shard: object
    layouts: tuple[AdapterLayout, ...]
    score_offset: int
    size: int

    @classmethod
    def of(cls, config, lora, shard=WHOLE):
        """Raises ConfigError for target modules that the model does not have."""
        targets = resolve_targets(config, lora.target_modules, "lora.target_modules")
        found, offset = [], 0
        for (name, inputs, of_projection), of_layers in projections(config, shard).items():
            modules, row, column = [], 0, 0
            for module, rows in of_projection:
                trained = module.split(".")[-1] in targets
                modules.append(Module(module, row, rows, column if trained else None))
                row, column = row + rows, column + lora.r * trained
            if column:
                columns, layers = -(-column // COLUMNS) * COLUMNS, tuple(p.layer for p in of_layers)
                a_offset, b_offset = offset, offset + _aligned(len(layers) * columns * inputs)
                found.append(AdapterLayout(name, layers, of_layers[0], columns, tuple(modules), a_offset, b_offset))
                offset = b_offset + _aligned(len(layers) * row * columns)
        chosen = resolve_parameters(config, lora.target_parameters, "lora.target_parameters")
        if chosen and shard != WHOLE:
            raise ConfigError("lora.target_parameters does not go with a model that is cut over GPUs (--tp)")
        for (name, shape, parameter), of_layers in stacks(config).items() if chosen else ():
            if parameter in chosen:
                # PEFT wraps a module once for each of its parameters, and the first one lies innermost.
                is_inner = parameter != chosen[-1]
                modules = (Module(parameter.rpartition(".")[0] + ".base_layer" * is_inner, 0, shape[-2], 0),)
                layers = tuple(p.layer for p in of_layers)
                layout = AdapterLayout(name, layers, of_layers[0], -(-lora.r // COLUMNS) * COLUMNS, modules)
                of_a, of_b = map(math.prod, layout.shapes)
                found.append(replace(layout, a_offset=offset, b_offset=offset + _aligned(of_a)))
                offset = found[-1].b_offset + _aligned(of_b)
        size = offset + ("score" in config.heads) * _aligned(config.hidden_size)
        return cls(config, lora, shard, tuple(found), offset, size)

    def tensors(self, flat):
        """(name in PEFT's file, view) of every tensor; flat: a NumPy array of a whole model's adapter.

        The view of experts' tensors has three dimensions, two of which are one in the file (shape_in_file).
        """
        r = self.lora.r
        for layout in self.layouts:
            a, b = _views(layout, flat)
            for place, layer in enumerate(layout.layers):
                for module, row, rows, column in layout.modules:
                    name = f"{PREFIX}model.layers.{layer}.{module}"
                    if layout.stack:
                        yield f"{name}.lora_A.weight", a[place, :, :r]
                        yield f"{name}.lora_B.weight", b[place, :, :, :r].transpose(1, 2, 0)
                    elif column is not None:
                        yield f"{name}.lora_A.weight", a[place, column : column + r]
                        yield f"{name}.lora_B.weight", b[place, row : row + rows, column : column + r]
        if "score" in self.config.heads:
            yield SCORE, self.score(flat)

    def score(self, flat):
        """The score head (1, D) in flat, or None where the model has none."""
        start, width = self.score_offset, self.config.hidden_size
        return flat[start : start + width].reshape(1, width) if "score" in self.config.heads else None

    def ranges(self):
        """The Ranges that make up a shard's flat buffer, without what lies between matrices: list."""
        if self.shard == WHOLE:
            return [Range(0, 0, self.size)]
        whole, found = Places.of(self.config, self.lora), []
        for own, other in zip(self.layouts, whole.layouts, strict=True):
            found.append(Range(own.a_offset, other.a_offset, len(own.layers) * own.columns * own.inputs))
            for place in range(len(own.layers)):
                for index, (module, of_whole) in enumerate(zip(own.modules, other.modules, strict=True)):
                    row, columns = place * own.rows + module.first_row, own.columns
                    for part in other.parameter.parts_of(self.shard, index):
                        count, source = part.stop - part.start, place * other.rows + of_whole.first_row + part.start
                        first, source = own.b_offset + row * columns, other.b_offset + source * columns
                        found.append(Range(first, source, count * columns))
                        row += count
        if "score" in self.config.heads:
            found.append(Range(self.score_offset, whole.score_offset, self.config.hidden_size))
        return found


def _aligned(count):
    return -(-count // ALIGNMENT) * ALIGNMENT


class Adapter:
    """A model's adapter, zeros at first: one flat array of `dtype` on the device, and its views.

    config: the base's ModelConfig, of the whole model; lora: a LoraConfig; base: path or hub id of the base, for
    adapter_config.json. shard: a part of the model, whose adapter is not trained. flat (n,), decay_end, first, size,
    spans: like those of Weights. master: (n,) float32 values that a 16-bit flat is rounded from: on the host as drawn
    or read, in training the optimizer's; None where there are none. layers[i]: {projection: Pair} of layer i. scales:
    (1,) float32. score: (1, D), or None where the model has no such head. region: one of memory.report(). Raises
    ConfigError for target modules that the model does not have.
    """

    # The embedding and the head have no gradient.
    embed_tokens = norm = lm_head = None
    first = 0

    def __init__(self, config, lora, dtype="float32", base="", region="adapter", shard=WHOLE):
        self.config, self.lora, self.base, self.shard = config, lora, base, shard
        self.dtype, self.places = device.dtype(dtype), Places.of(config, lora, shard)
        size = self.places.size
        self.flat, self.decay_end, self.master = device.xp().zeros(size, self.dtype), size, None
        memory.track(region, self.flat.nbytes)
        weakref.finalize(self, memory.track, region, -self.flat.nbytes)
        self.score = self.places.score(self.flat)
        self.scales = device.asarray(np.float32([lora.scaling]))
        self.layers = [{} for _ in config.blocks]
        # For zero_outside_blocks: all layers' B of a projection of several modules, and the first column of its rows.
        self._blocks = []
        for layout in self.places.layouts:
            a, b = _views(layout, self.flat)
            for place, layer in enumerate(layout.layers):
                self.layers[layer][layout.name] = Pair(a[place], b[place])
            if len(layout.modules) > 1:
                self._blocks.append((b.reshape(-1, layout.columns), device.asarray(_first_columns(layout))))

    @property
    def nbytes(self):
        return self.flat.nbytes

    @property
    def size(self):
        return self.places.size

    def spans(self):
        return [(0, self.flat)]

    def grads(self):
        """Gradients: zeros of float32 in the same layout."""
        return Adapter(self.config, self.lora, "float32", region="grads")

    def host_copy(self):
        """A copy on the host, for save_adapter alone."""
        copied = copy.copy(self)
        copied.flat, copied.master = device.host_copy(self.values), None
        return copied

    @property
    def values(self):
        """The most exact values that there are: master or, without one, flat."""
        return self.flat if self.master is None else self.master

    def zero_outside_blocks(self):
        """Set what is in no block of a B to zero."""
        for matrix, first_columns in self._blocks:
            keep_blocks(first_columns, self.lora.r, matrix)

    def tensors(self, flat):
        """(name in PEFT's file, view) of every tensor in flat, a NumPy array of a whole model's adapter."""
        return self.places.tensors(flat)

    def set_flat(self, host):
        """Copy a NumPy array of float32, of the whole model's adapter, to the device; if that has 16 bits, keep it as
        master, but of a shard."""
        if self.shard != WHOLE:
            whole, host = host, np.zeros(self.places.size, np.float32)
            for first, source, count in self.places.ranges():
                host[first : first + count] = whole[source : source + count]
        self.flat[...] = device.asarray(host.astype(self.dtype))
        self.master = None if self.dtype == np.float32 or self.shard != WHOLE else host

    @classmethod
    def new(cls, config, lora, dtype, base, seed, score=None, shard=WHOLE):
        """The adapter that training starts from: A uniform in [-1/sqrt(D), 1/sqrt(D)], B zero.

        So does PEFT (torch's kaiming_uniform with a = sqrt 5, He et al. 2015). The numbers follow from the seed. score:
        the base's score head, where it has one.
        """
        adapter, whole = cls(config, lora, dtype, base, shard=shard), Places.of(config, lora)
        host, generator = np.zeros(whole.size, np.float32), np.random.default_rng((seed, 1))
        for name, view in whole.tensors(host):
            if name.endswith("lora_A.weight"):
                bound = 1 / math.sqrt(view.shape[-1])
                view[...] = generator.uniform(-bound, bound, view.shape)
            elif name == SCORE and score is not None:
                view[...] = device.to_host(score)
        adapter.set_flat(host)
        return adapter


def _views(layout, flat):
    """A and B of all layers of an AdapterLayout in a flat array, in its shapes."""
    offsets = layout.a_offset, layout.b_offset
    return [flat[o : o + math.prod(shape)].reshape(shape) for o, shape in zip(offsets, layout.shapes, strict=True)]


def shape_in_file(name, view):
    """The shape (rows, columns) that PEFT's file has of a tensor of Places.tensors."""
    is_a = name.endswith("lora_A.weight")
    return (math.prod(view.shape[:-1]), view.shape[-1]) if is_a else (view.shape[0], math.prod(view.shape[1:]))


def _first_columns(layout):
    """(M,) int32: the first column of each row's block, the number of columns where it has none."""
    firsts = [layout.columns if m.first_column is None else m.first_column for m in layout.modules]
    return np.repeat(firsts, [module.rows for module in layout.modules]).astype(np.int32)


def is_adapter(folder):
    """Whether a folder is an adapter's, not a model's."""
    return (Path(folder) / CONFIG).exists() and not (Path(folder) / "config.json").exists()


def check_other_kind(folder, saves_adapter):
    """Raise UserError if a folder has an adapter and a model is to be saved there, or the other way round.

    transformers would apply the one to the other, and is_adapter find the model alone.
    """
    if saves_adapter and (Path(folder) / "config.json").exists():
        raise UserError(f"{folder}: a model is there, which would be read instead of the adapter; name another folder")
    if not saves_adapter and (Path(folder) / CONFIG).exists():
        raise UserError(f"{folder}: an adapter is there, which would be applied to the model; name another folder")


def read_adapter_config(folder):
    """(contents of adapter_config.json, path or hub id of its base or None). UserError for what is not LoRA's."""
    path = Path(folder) / CONFIG
    raw = read_json(path)
    _check_keys(raw, path)
    return raw, raw.get("base_model_name_or_path")


def lora_of_peft(peft_config):
    """The LoraConfig that a config object of PEFT stands for. Raises TypeError for what is none, UserError for a key
    that LoRA has not here."""
    try:
        raw = peft_config.to_dict()
    except AttributeError:
        kind = type(peft_config).__qualname__
        raise TypeError(
            f"peft_config must be a LoraConfig, a dict of its keys, or PEFT's LoraConfig; got {kind}"
        ) from None
    # Members of its enums are strings; sets have no order.
    raw = {key: sorted(value) if isinstance(value, set) else value for key, value in raw.items()}
    _check_keys(raw, "peft_config", OFF_IN_NEW)
    if raw.get("init_lora_weights") is False:
        raise UserError("peft_config: init_lora_weights false is not supported")
    of_experts = raw.get("target_parameters") or []
    names = raw["target_modules"] or (() if of_experts else PEFT_TARGET_MODULES)
    keys = {name: raw[name] for name in ("r", "lora_alpha", "lora_dropout", "use_rslora") if name in raw}
    keys["target_modules"] = [names] if isinstance(names, str) else list(names)
    return LoraConfig(**keys, target_parameters=list(of_experts))


def _check_keys(raw, where, off=OFF):
    """Raise UserError for what is not LoRA's, or not supported, in the keys of a configuration of PEFT."""
    if raw.get("peft_type") != "LORA":
        raise UserError(f"{where}: peft_type {raw.get('peft_type')!r} is not supported (supported: 'LORA')")
    if not all(isinstance(name, str) and name in SCORE_NAMES for name in _modules_to_save(raw)):
        raise UserError(f"{where}: modules_to_save {json.dumps(raw['modules_to_save'])} is not supported")
    for key, value in raw.items():
        # The number 0 is a value, such as the only one of layers_to_transform.
        is_empty = not value and (value is False or not isinstance(value, int | float))
        if key not in (*READ, *WITHOUT_EFFECT) and not is_empty and value not in off.get(key, ()):
            raise UserError(f"{where}: {key} {json.dumps(value, default=str)} is not supported")


def _modules_to_save(raw):
    names = raw.get("modules_to_save") or []
    return names if isinstance(names, list) else [str(names)]


def adapter_heads(folder, config):
    """The heads of a model with the adapter in a folder; config: the base's."""
    raw, _ = read_adapter_config(folder)
    if not _modules_to_save(raw):
        return config.heads
    return SCORE_HEAD if raw.get("task_type") == "SEQ_CLS" else LM_HEAD + SCORE_HEAD


def load_adapter(folder, weights, dtype, base):
    """The Adapter in a folder that PEFT or save_adapter wrote, for a base with these Weights, or a shard of them.

    Raises as read_adapter.
    """
    lora, host = read_adapter(folder, weights, base)
    adapter = Adapter(weights.config, lora, dtype, base, shard=weights.shard)
    adapter.set_flat(host)
    return adapter


def read_adapter(folder, weights, base):
    """(LoraConfig, values (n,) float32) of the adapter in a folder, the whole model's, as Adapter.set_flat takes them.

    A score head that the folder does not have is the base's. Raises UserError, one line, for a missing or damaged file,
    an option that is not supported, and an adapter of another base, with tensor and shapes.
    """
    folder, config = Path(folder), weights.config
    raw, _ = read_adapter_config(folder)
    path = folder / CONFIG
    lora = LoraConfig(**_lora_keys(raw, config, path))
    if not (folder / TENSORS).exists():
        raise UserError(f"{folder / TENSORS}: no such file (an adapter folder has one)")
    files = open_tensors(folder / TENSORS)
    # Other shapes are named below; a rank that is far too large must not take the memory first.
    most = max((files[name].shape[0] for name in files if name.endswith("lora_A.weight")), default=0)
    if lora.r > COLUMNS * max(most, COLUMNS):
        raise UserError(f"{folder / TENSORS}: the adapter has at most {most} rows of A, and {CONFIG} has r {lora.r}")
    whole = Places.of(config, lora)
    host = np.zeros(whole.size, np.float32)
    views, problems = dict(whole.tensors(host)), []
    if SCORE in views and not _modules_to_save(raw):
        views.pop(SCORE)[...] = device.to_host(weights.score)
    shapes = {name: (files[name].shape, shape_in_file(name, view)) for name, view in views.items() if name in files}
    if wrong := [f"{n} is {shape}, not {expected}" for n, (shape, expected) in shapes.items() if shape != expected]:
        problems.append(f"wrong shapes: {listed(wrong, 2)}")
    if missing := [name for name in views if name not in files]:
        problems.append(f"missing tensors: {listed(missing, 2)}")
    if extra := sorted(files.keys() - views.keys() - {SCORE}):
        problems.append(f"tensors that the base does not have, or {CONFIG} does not target: {listed(extra, 2)}")
    if problems:
        raise UserError(f"{folder / TENSORS}: the adapter does not fit its base {base}: {'; '.join(problems)}")
    # Not mapped: a mapped file that a trainer cuts short meanwhile would end the process.
    content = np.fromfile(folder / TENSORS, np.uint8)
    for name, view in views.items():
        check_dtype(name, files[name])
        if files[name].end > len(content):
            raise UserError(f"{folder / TENSORS}: it was written to while it was read")
        view[...] = files[name].values_in(content).reshape(view.shape)
    return lora, host


def check_finite(folder, values, dtype):
    """Raise UserError for values of an adapter that are no numbers in `dtype`: one NaN reaches the rows of others."""
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(values.astype(device.dtype(dtype)).astype(np.float32)).all()
    if not is_finite:
        raise UserError(f"{Path(folder) / TENSORS}: a value is NaN or beyond {dtype}")


def _lora_keys(raw, config, path):
    """The keywords of LoraConfig in an adapter_config.json, checked."""
    defaults = {"lora_dropout": 0.0, "use_rslora": False}
    kinds = {"r": int, "lora_alpha": (int, float), "lora_dropout": (int, float), "use_rslora": bool}
    found = {}
    for key, kind in kinds.items():
        value = raw.get(key, defaults.get(key))
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"{path}: {key} must be a {'boolean' if kind is bool else 'number'}, got {value!r}")
        found[key] = value
    of_experts = raw.get("target_parameters") or []
    if not (isinstance(of_experts, list) and all(isinstance(t, str) for t in of_experts)):
        raise UserError(f"{path}: target_parameters must be a list of strings, got {of_experts!r}")
    targets = raw.get("target_modules") or ([] if of_experts else None)
    if not isinstance(targets, str | list) or not all(isinstance(t, str) for t in targets):
        raise UserError(
            f"{path}: target_modules must be a string or a list of strings, got {raw.get('target_modules')!r}"
        )
    try:
        found["target_parameters"] = resolve_parameters(config, of_experts, "target_parameters")
        found["target_modules"] = resolve_targets(config, targets, "target_modules")
        LoraConfig(**found)
    except re.error as error:
        raise UserError(f"{path}: target_modules is no regular expression: {error}") from None
    except ConfigError as error:
        raise UserError(f"{path}: {error}") from None
    return found


def save_adapter(adapter, folder, heads=None):
    """Write adapter_config.json and adapter_model.safetensors, as PEFT does, in float32.

    heads: those of the model that is saved, by default all; without "score" that head is left out. Raises UserError for
    a folder with a model.
    """
    folder, lora, heads = Path(folder), adapter.lora, heads or adapter.config.heads
    check_other_kind(folder, saves_adapter=True)
    # A host_copy waits for no device work: another thread may be capturing a graph, which that would end.
    tensors = dict(adapter.tensors(device.to_host(adapter.values).astype(np.float32, copy=False)))
    tensors = {name: view.reshape(shape_in_file(name, view)) for name, view in tensors.items()}
    if "score" not in heads:
        tensors.pop(SCORE, None)
    of_experts = resolve_parameters(adapter.config, lora.target_parameters, "lora.target_parameters")
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "base_model_name_or_path": adapter.base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "modules_to_save": ["score"] if "score" in heads else None,
        "peft_type": "LORA",
        "r": lora.r,
        "target_modules": sorted(resolve_targets(adapter.config, lora.target_modules, "lora.target_modules")),
        "target_parameters": of_experts or None,
        "task_type": "SEQ_CLS" if heads == SCORE_HEAD else "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": lora.use_rslora,
    }
    write_json(folder / CONFIG, content)
    write_tensors(folder / TENSORS, tensors, {"format": "pt"})


def first_adapter(lora):
    """The folder of the adapter that lora.init names. Raises UserError if it has none."""
    folder = Path(lora.init)
    if not (folder / CONFIG).exists():
        raise UserError(f"lora.init: {folder / CONFIG}: no such file")
    return folder


def lora_of_run(lora, config):
    """The LoraConfig of a run's adapter: the section, or the keys of lora.init's adapter, but for lora_dropout not 0.

    Raises ConfigError for a key of the section that is set to another value than lora.init's.
    """
    if lora.init is None:
        return lora
    folder, default = first_adapter(lora), LoraConfig()
    found = LoraConfig(**_lora_keys(read_adapter_config(folder)[0], config, folder / CONFIG))
    given = replace(
        lora,
        target_modules=resolve_targets(config, lora.target_modules, "lora.target_modules"),
        target_parameters=resolve_parameters(config, lora.target_parameters, "lora.target_parameters"),
    )
    for key in ("r", "lora_alpha", "target_modules", "target_parameters", "use_rslora"):
        wanted, has = getattr(given, key), getattr(found, key)
        if getattr(lora, key) != getattr(default, key) and wanted != has:
            raise ConfigError(f"lora.{key} is {wanted}, but that of the adapter {lora.init} is {has}")
    return replace(found, lora_dropout=lora.lora_dropout or found.lora_dropout)


def adapter_of_run(lora, weights, dtype, base, seed):
    """The Adapter that a run with this [lora] section starts from: a new one, or that of lora.init.

    weights: the base's, or a shard's; a score head that lora.init does not have is theirs. Raises as lora_of_run and
    load_adapter.
    """
    settings = lora_of_run(lora, weights.config)
    if lora.init is not None:
        adapter = load_adapter(lora.init, weights, dtype, base)
        adapter.lora = settings
        return adapter
    return Adapter.new(weights.config, settings, dtype, base, seed, weights.score, weights.shard)


def merge(weights, adapter):
    """weights += s B A, in float32, rounded once: the model with its adapter as a model without one. In place."""
    xp = device.xp()
    for layout in adapter.places.layouts:
        update = xp.empty((layout.rows, layout.inputs), np.float32)
        merged = xp.empty(update.shape, np.float32)
        for layer in layout.layers:
            pair, weight = adapter.layers[layer][layout.name], weights[f"model.layers.{layer}.{layout.name}"]
            for a, b, matrix in zip(pair.a, pair.b, weight, strict=True) if layout.stack else [(*pair, weight)]:
                linear_backward_input(b, a, update)
                scale(update, adapter.lora.scaling, update)
                cast(matrix, merged)
                add(merged, update, merged)
                cast(merged, matrix)
    if adapter.score is not None:
        cast(adapter.score, weights.score)
