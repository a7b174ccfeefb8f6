"""A model's parameters in one flat buffer, read from and written to Hugging Face folders.

    flat   | embedding, the matrices of every layer, lm_head if untied, score | biases and norm weights |
                                                                     decay_end ^
Every parameter is a view of the buffer, its first element on a 512-byte boundary or more (256 in 16 bits), so
that one AdamW launch, one norm and one copy do for all of them. Matrices that read the same input are fused: qkv
has the rows of q, k and v, gate_up those of gate and up. Gradients are the same layout in float32.
"""

import copy
import json
import math
import os
import re
import weakref
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from rlnumba.errors import UserError
from rlnumba.model.config import WITH_TEXT_CONFIG
from rlnumba.model.config_values import read_json
from rlnumba.model.parameter import Parameter, placed
from rlnumba.model.quantized.checkpoint import has_codes, joined
from rlnumba.model.shard import WHOLE, Shard
from rlnumba.model.tensor_file import create_tensors, open_tensors, write_tensors
from rlnumba.reporting.stderr import log
from rlnumba.runtime import device, memory
from rlnumba.runtime.arena import Arena
from rlnumba.runtime.transfer import copy_to_device

# Rows of two matrices that are on the host at one time.
COMPARED_ROWS = 4096

# The memory of RolloutWeights in plans and messages.
ROLLOUT_REGION = "rollout weights"

# More than this many bytes of tensors become several files, as in transformers' save_pretrained of version 4.
SHARD_BYTES = 5_000_000_000

# The one of the seed's random streams that a new score head is drawn from.
HEAD_STREAM = 0x5C02E

# What a checkpoint has beside the text model: encoders of images, and layers that predict several tokens.
OTHER_MODELS = (
    *("model.visual.", "visual.", "mtp."),
    *("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector."),
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
METADATA = {"format": "pt"}
# The dtypes of a checkpoint's matrices and norms, by safetensors' names.
DTYPES = {"F32": device.dtype("float32"), "F16": device.dtype("float16"), "BF16": device.dtype("bfloat16")}


def parameters(config, shard=WHOLE):
    """Every Parameter of a model, or of its shard, in the order of the flat buffer: what decays first.

    config: that of the whole model.
    """
    D, V = config.hidden_size, config.vocab_size
    found = [Parameter("model.embed_tokens", (V, D), True, (("model.embed_tokens.weight", V),))]
    for blocks in config.blocks:
        found += [p for block in blocks for p in block.matrices(config)]
        found += [block.norm(config) for block in blocks]
        found += [p for block in blocks for p in block.vectors(config)]
    found.append(Parameter("model.norm", (D,), False, (("model.norm.weight", D),)))
    if "lm" in config.heads and not config.tie_word_embeddings:
        found.append(Parameter("lm_head", (V, D), True, (("lm_head.weight", V),), cut=Shard.tokens))
    if "score" in config.heads:
        found.append(Parameter("score", (1, D), True, (("score.weight", 1),)))
    return placed(p.of(shard) for p in found)


class Weights:
    """One flat array of `dtype` on the device, zeros at first, and its views: weights["model.layers.0.qkv"].

    flat: (n,), n = size, its first element number `first`, 0, of the model's. decay_end: elements [0, decay_end) are
    matrices, to which weight decay applies. layers[i]: the views of layer i, a tuple of each block's Weights. lm_head:
    (V, D), the embedding if tied; score: (1, D); None for a head that the model does not have. config: the whole
    model's; these are the weights of its `shard`. region: one of memory.report().
    """

    # The QuantizationConfig of its matrices.
    quantization = None

    def __init__(self, config, dtype="float32", region="weights", shard=WHOLE):
        self.config, self.shard, self.first = config, shard, 0
        self.dtype = device.dtype(dtype)
        self.parameters = parameters(config, shard)
        last = self.parameters[-1]
        self.size = last.offset + last.padded_size
        self.decay_end = next(p.offset for p in self.parameters if not p.decays)
        self.views, nbytes = self._allocate(region)
        memory.track(region, nbytes)
        weakref.finalize(self, memory.track, region, -nbytes)
        self.embed_tokens = self["model.embed_tokens"]
        self.norm = self["model.norm"]
        tied = self.embed_tokens[shard.tokens(config.vocab_size)] if shard.count > 1 else self.embed_tokens
        self.lm_head = self.views.get("lm_head", tied if "lm" in config.heads else None)
        self.score = self.views.get("score")
        self.layers = [tuple(block.views(self.views) for block in blocks) for blocks in config.blocks]

    def _allocate(self, region):
        """({name: view of a Parameter}, bytes of their memory)."""
        nbytes = self.size * self.dtype.itemsize
        with memory.allocating(region, nbytes):
            self.flat = device.xp().zeros(self.size, dtype=self.dtype)
        return {p.name: self.flat[p.offset : p.offset + p.size].reshape(p.shape) for p in self.parameters}, nbytes

    def layer(self, index):
        """The views of a layer that is computed next, a tuple of each block's Weights."""
        return self.layers[index]

    def spans(self):
        """[(number of the first element, array)] of the parts of the flat buffer that there are."""
        return [(self.first, self.flat)]

    @property
    def num_parameters(self):
        """The number of parameters in whatever format, with what pads them to whole lines: int."""
        return self.size

    @property
    def nbytes(self):
        """Bytes of all parameters."""
        return self.flat.nbytes

    def fill(self, stored, contents):
        """Read the tensors of StoredWeights; contents: as there."""
        copy_to_device(stored.copies_to(self, contents))

    def __getitem__(self, name):
        return self.views[name]

    def tensors(self):
        """(name in a checkpoint, view) of every tensor, in the order of the flat buffer."""
        return [(source, self.flat[at : at + math.prod(shape)].reshape(shape)) for source, at, shape in self.places()]

    def places(self):
        """(name in a checkpoint, number of its first element in the flat buffer, shape) of every tensor, in order."""
        found = []
        for p in self.parameters:
            at = p.offset
            for source, shape in p.tensors:
                found.append((source, at, shape))
                at += math.prod(shape)
        return found

    def parts(self):
        """(name in a checkpoint, number of the first element, values) of what `flat` has of every tensor."""
        for source, at, shape in self.places():
            at -= self.first
            start, stop = max(at, 0), min(at + math.prod(shape), len(self.flat))
            if start < stop:
                yield source, start - at, self.flat[start:stop]

    def host_copy(self, part=slice(None)):
        """A copy on the host, for saving alone, of all elements or of a part; only its `parts` are used."""
        copied, (start, stop, _) = copy.copy(self), part.indices(self.size)
        copied.flat, copied.first = device.host_copy(self.flat[start - self.first : stop - self.first]), start
        copied.views = None
        return copied

    def init_score(self, head_init, seed):
        """Set the score head to "zeros", or "normal": N(0, 1 / (D + 1)) from the seed (Stiennon et al. 2020, C.2)."""
        if head_init == "normal":
            std = (self.config.hidden_size + 1) ** -0.5
            values = np.random.default_rng((seed, HEAD_STREAM)).standard_normal(self.score.shape, np.float32)
            _assign(self.score, np.float32(std) * values)
        else:
            self.score.fill(0)

    def grads(self):
        """Gradients: zeros of float32 in the same layout, with the same names."""
        return Weights(self.config, "float32", region="grads")

    @classmethod
    def random(cls, config, dtype="float32", seed=0):
        """Weights of a new model: matrices N(0, 0.02^2) (the initializer_range of all three model types),
        biases 0, norm weights 1."""
        weights = cls(config, dtype)
        generator = np.random.default_rng(seed)
        for p in weights.parameters:
            if p.decays:
                _assign(weights[p.name], 0.02 * generator.standard_normal(p.shape, dtype=np.float32))
            elif p.name.endswith("norm"):
                # A norm of linear attention's heads has no offset.
                weights[p.name].fill(0 if config.norm_offset and not p.name.endswith("gated_norm") else 1)
        return weights


class RolloutWeights:
    """The views of a Weights, `source`, of which some matrices are in memory that rollout alone has.

    There are none before `refresh`. layers, embed_tokens, norm, lm_head, score: as those of Weights. On a GPU the
    addresses stay while the memory is lent or given back (runtime/arena.py): captured graphs read them.
    """

    def __init__(self, source):
        self.source, self.config, self.dtype = source, source.config, source.dtype
        self.embed_tokens, self.norm = source.embed_tokens, source.norm
        self.lm_head, self.score = source.lm_head, source.score
        self.arena, self.layers = Arena(ROLLOUT_REGION), None

    def layer(self, index):
        """The views of a layer that is computed next, a tuple of each block's Weights."""
        return self.layers[index]

    def refresh(self):
        """Take memory for the matrices if they have none, and write them from the weights as they are now.

        Ranks that have the weights in parts all call this together: each gathers one layer at a time.
        """
        if self.layers is None:
            with self.arena.scope():
                views = self._allocate()
            self.layers = [tuple(block.views(views) for block in blocks) for blocks in self.config.blocks]
        else:
            self.arena.take()
        self._write()

    def _allocate(self):
        """{name of a parameter: its view}, of which those that `_write` writes are new arrays of the arena."""
        raise NotImplementedError

    def _write(self):
        """Write the arrays, whose content is any."""
        raise NotImplementedError

    def lend(self):
        """Let others take the memory until `refresh`."""
        self.arena.lend()

    def give_back(self):
        """Free the memory until `refresh`."""
        self.arena.give_back()


def _assign(view, values):
    """Copy a host array into a view of the flat buffer, converting to its dtype."""
    if device.name() == "cuda":
        view.set(np.ascontiguousarray(values, dtype=view.dtype))
    else:
        view[...] = values


def load_weights(folder, config, dtype=None, heads=None, shard=WHOLE, make_weights=Weights):
    """The Weights of a folder's *.safetensors (one file, or several with an index), in `dtype` (config.dtype).

    config: that of the folder. heads: those of the Weights, if not the folder's; a head not in the folder is zeros.
    shard: the part of the model whose rows alone are read. make_weights: Weights or a subclass; the parts that its
    `spans` names are read. Names, shapes and dtypes are checked before memory is allocated; tensors are copied from the
    mapped files. Raises UserError, one line, for a damaged or missing file and for a tensor that is missing, unknown,
    or of another shape or dtype than it should be, with the names.
    """
    stored = StoredWeights(folder, config)
    contents = {path: np.memmap(path, np.uint8, "r") for path in stored.paths}
    stored.check_tied_head(contents)
    weights = make_weights(replace(config, heads=heads or config.heads), dtype or config.dtype, shard=shard)
    weights.fill(stored, contents)
    if stored.left_out and not shard.rank:
        _report_left_out(folder, stored.left_out)
    return weights


@cache
def _report_left_out(folder, parts):
    """Say once which parts of a checkpoint are not read; parts: ((beginning of the tensors' names, how many), ...)."""
    log(f"{folder}: left out of the checkpoint: " + ", ".join(f"{part} ({count} tensors)" for part, count in parts))


def _text_model(files, config):
    """(the {tensor name: Stored} of a text model, which may be a part of one of vision and language, what else there
    is as _report_left_out takes it)."""
    if config.model_type not in WITH_TEXT_CONFIG.values():
        return files, ()
    others = Counter(next((part for part in OTHER_MODELS if name.startswith(part)), None) for name in files)
    text = {}
    for name, stored in files.items():
        if not name.startswith(OTHER_MODELS):
            own_name = re.sub(r"^model\.language_model\.", "model.", name).removeprefix("language_model.")
            if own_name in text:
                raise UserError(f"{stored.path}: tensor {name} is there under another name, too")
            text[own_name] = stored
    return text, tuple((f"{part}*", others[part]) for part in OTHER_MODELS if others[part])


class StoredWeights:
    """The tensors of a folder's *.safetensors, found to be those of a model: {name: Stored}, without their values.

    config: that of the folder. Raises UserError as load_weights does. paths: the files; tied_head: the Stored copy of a
    tied embedding as lm_head.weight, or None; left_out: what else the checkpoint has, as _report_left_out takes it.
    `contents` are the bytes of each file, {path: (n,) uint8}.
    """

    def __init__(self, folder, config):
        folder, self.config = Path(folder), config
        files, self.left_out = _text_model(_open_checkpoint(folder), config)
        if has_codes(files):
            files = joined(files, read_json(folder / "config.json").get("quantization_config") or {}, folder)
        self.tied_head = None
        if config.tie_word_embeddings and "lm_head.weight" in files:
            self.tied_head = _take_tied_head(files)
        self.of_model = {p.name: p for p in parameters(config)}
        # The layers whose tensors have the other form.
        layers = [p.layer for p in self.of_model.values() if any(source in files for source, _ in p.other_form)]
        self.others = {p.name for p in self.of_model.values() if p.other_form and p.layer in layers}
        expected = dict(tensor for p in self.of_model.values() for tensor in self.form_of(p))
        # Rotary frequencies that old checkpoints have as a buffer; they follow from the config.
        found = {name for name in files if not name.endswith(".rotary_emb.inv_freq")}
        problems = []
        if twice := [p for p in self.of_model.values() if _is_twice(p, files)]:
            both = f"{twice[0].tensors[0][0]} and {twice[0].other_form[0][0]}"
            raise UserError(f"{folder}: the checkpoint has the same weights twice, such as in {both}")
        if missing := [name for name in expected if name not in found]:
            problems.append(f"missing tensors: {listed(missing)}")
        if extra := sorted(found - expected.keys()):
            problems.append(f"tensors that {config.model_type} does not have: {listed(extra)}")
        shapes = {name: files[name].shape for name in expected if name in found}
        wrong = [
            f"{name} is {shape}, not {expected[name]}" for name, shape in shapes.items() if shape != expected[name]
        ]
        if wrong:
            problems.append(f"wrong shapes: {listed(wrong)}")
        if problems:
            raise UserError(f"{folder}: the checkpoint does not fit its config.json: {'; '.join(problems)}")
        self.tensors = {name: files[name] for name in expected}
        found = [stored.paths for stored in (*self.tensors.values(), self.tied_head) if stored is not None]
        self.paths = set().union(*found)
        for name, stored in self.tensors.items():
            check_dtype(name, stored)

    def form_of(self, p):
        """((tensor, shape), ...) of the form in which the checkpoint has a Parameter."""
        return p.other_form if p.name in self.others else p.tensors

    def check_tied_head(self, contents):
        """Raise UserError if lm_head.weight is another matrix than the embedding that the config ties it to."""
        if self.tied_head is None:
            return
        head, embedding = self.tied_head, self.tensors["model.embed_tokens.weight"]
        both = [stored.values_of(contents) for stored in (head, embedding)]
        rows = range(0, len(both[0]), COMPARED_ROWS)
        same = head.shape == embedding.shape
        if not same or not all(np.array_equal(*(each[i : i + COMPARED_ROWS] for each in both)) for i in rows):
            raise UserError(
                f"{head.path}: tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight"
            )

    def stored_of(self, p):
        """The Stored, or StoredCodes, tensors of a Parameter of the whole model, one after the other."""
        return [self.tensors[source] for source, _ in self.form_of(p)]

    def copies_to(self, weights, contents):
        """The copies that fill Weights with the tensors, as copy_to_device takes them: list of (array, values)."""
        copies = []
        for p in weights.parameters:
            at, whole = p.offset, self.of_model.get(p.name)
            for index, (source, shape) in enumerate(() if whole is None else self.form_of(whole)):
                stored = self.tensors[source]
                rows = stored.values_of(contents)
                if whole.cut_rows:
                    rows = rows.reshape(-1, shape[-1])
                for part in whole.parts_of(weights.shard, index, shape):
                    values = rows[part].reshape(-1)
                    for first, array in weights.spans():
                        lower, upper = max(at, first), min(at + len(values), first + len(array))
                        if lower < upper:
                            copies.append((array[lower - first : upper - first], values[lower - at : upper - at]))
                    at += len(values)
        return copies


def _is_twice(p, files):
    """Whether a checkpoint's files have tensors of both forms of a Parameter."""
    return all(any(source in files for source, _ in form) for form in (p.tensors, p.other_form))


def _open_checkpoint(folder):
    """{tensor name: Stored} of a folder."""
    if (folder / SINGLE).exists():
        return open_tensors(folder / SINGLE)
    index = folder / INDEX
    if not index.exists():
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        remedy = "; save the checkpoint as safetensors first" if pickled else ""
        raise UserError(f"{folder}: no {SINGLE} and no {INDEX}{remedy}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{index}: weight_map must map tensor names to file names")
    shards = {name: open_tensors(folder / name) for name in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise UserError(f"{folder / shard}: tensor {name} is not in this file, but {INDEX} says so")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def check_dtype(name, stored):
    """Raise UserError unless a Stored tensor has one of DTYPES."""
    if stored.dtype not in DTYPES:
        raise UserError(f"{stored.path}: tensor {name} has dtype {stored.dtype} (supported: {', '.join(DTYPES)})")


def _take_tied_head(files):
    """Take lm_head.weight out of a tied model's tensors: its Stored. Raises UserError without an embedding."""
    head, embedding = files.pop("lm_head.weight"), "model.embed_tokens.weight"
    if embedding not in files:
        raise UserError(f"{head.path}: tie_word_embeddings is true, but lm_head.weight is there and {embedding} is not")
    for name, stored in (("lm_head.weight", head), (embedding, files[embedding])):
        check_dtype(name, stored)
    return head


def listed(items, limit=16):
    """The first few of a list, and how many more there are."""
    shown = ", ".join(str(item) for item in items[:limit])
    return shown + (f" and {len(items) - limit} more" if len(items) > limit else "")


def save_weights(weights, folder, dtype=None, heads=None):
    """Write `weights` as *.safetensors under Hugging Face's names, in `dtype` (that of the weights).

    heads: those that are written, by default all.
    One file, or several of at most SHARD_BYTES with an index. A piece at a time is copied to the host. Weight files of
    an earlier save that are not among them go. Raises UserError if a file cannot be written.
    """
    folder, target = Path(folder), device.dtype(dtype or weights.dtype.name)
    files = files_of(weights, target.name, heads)
    views = dict(weights.tensors())
    for name, tensors in files.items():
        write_tensors(folder / name, {source: views[source] for source in tensors}, METADATA, target)
    write_index(folder, files)
    remove_others(folder, files)


def remove_others(folder, files):
    """Remove the weight files of an earlier save, which are not among `files`, and its index."""
    before = {p.name for p in folder.glob("model-*-of-*.safetensors")} | {SINGLE, INDEX}
    for name in before - {*files, *([INDEX] if len(files) > 1 else [])}:
        (folder / name).unlink(missing_ok=True)


def create_weights(weights, folder, dtype=None, heads=None):
    """Create the files of save_weights in a new folder, without values, which `parts` of weights are to fill."""
    files = files_of(weights, dtype, heads)
    for name, tensors in files.items():
        create_tensors(Path(folder) / name, tensors, METADATA)
    write_index(Path(folder), files)


def files_of(weights, dtype=None, heads=None):
    """{file name: {tensor: (shape, dtype)}} of what save_weights writes."""
    target = device.dtype(dtype or weights.dtype.name)
    parts, bytes_left = [{}], SHARD_BYTES
    chosen = {
        source for p in parameters(replace(weights.config, heads=heads or weights.config.heads)) for source, _ in p.rows
    }
    for source, _, shape in weights.places():
        if source not in chosen:
            continue
        nbytes = math.prod(shape) * target.itemsize
        if nbytes > bytes_left and parts[-1]:
            parts.append({})
            bytes_left = SHARD_BYTES
        parts[-1][source] = shape, target
        bytes_left -= nbytes
    names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    return dict(zip(names if len(parts) > 1 else [SINGLE], parts, strict=True))


def write_index(folder, files):
    """Write the index of several files."""
    if len(files) > 1:
        weight_map = {source: name for name, tensors in files.items() for source in tensors}
        total = sum(math.prod(shape) * kind.itemsize for tensors in files.values() for shape, kind in tensors.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path, value):
    """Write a JSON file under a temporary name, flush it to the disk, and rename it into place."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
