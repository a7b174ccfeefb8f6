"""A checkpoint as one in 4 or 8 bits, which vLLM and transformers open, a tensor at a time and without a device.

Experts that are one tensor of a layer become a matrix each, by the names that other families have: the layout of
llm-compressor, which vLLM opens.
"""

from pathlib import Path

import numpy as np

from rlnumba.errors import UserError
from rlnumba.kernels.quantized.formats import FORMATS
from rlnumba.model.config_values import read_json
from rlnumba.model.hub import read_config
from rlnumba.model.lora import check_other_kind
from rlnumba.model.quantized.checkpoint import KEY, config_of, tensors_of
from rlnumba.model.quantized.weights import check_group_size, quantized_names
from rlnumba.model.tensor_file import write_tensors
from rlnumba.model.tokenizer import remove_other_tokenizer, tokenizer_files
from rlnumba.model.weights import (
    METADATA,
    SHARD_BYTES,
    SINGLE,
    StoredWeights,
    remove_others,
    write_index,
    write_json,
)
from rlnumba.reporting.files import copy_over

# The formats that are written: compressed-tensors has none of fp8 with groups.
WRITTEN = ("nf4", "int4", "int8")


def quantize_checkpoint(folder, output, name, group_size=None):
    """Write the checkpoint of a folder to the folder `output`, linear layers in the format `name`, one of WRITTEN.

    Values are rounded to the dtype of the model's config.json first. Raises UserError for a checkpoint that is
    quantised, and ConfigError for a group size that does not divide a layer's columns. Returns whether some of them are
    experts.
    """
    folder, output, form = Path(folder), Path(output), FORMATS[name]
    check_other_kind(output, saves_adapter=False)
    raw, config = read_json(folder / "config.json"), read_config(folder)
    if raw.get(KEY) is not None:
        raise UserError(f"{folder}: the checkpoint is quantised already")
    stored, names, group_size = StoredWeights(folder, config), quantized_names(config), group_size or form.group_size
    for p in stored.of_model.values():
        if p.name in names:
            check_group_size(p, group_size, "--group-size")
    written = []
    try:
        # How many files there are is known at the end.
        for arrays in _files(stored, names, form, group_size, config.dtype):
            path = output / f"model-{len(written)}.partial"
            write_tensors(path, arrays, METADATA)
            written.append((path, {each: (array.shape, array.dtype) for each, array in arrays.items()}))
    except BaseException:
        for path, _ in written:
            path.unlink()
        raise
    named = {}
    for index, (path, found) in enumerate(written, start=1):
        file = SINGLE if len(written) == 1 else f"model-{index:05d}-of-{len(written):05d}.safetensors"
        path.rename(output / file)
        named[file] = found
    write_index(output, named)
    remove_others(output, named)
    _copy_others(folder, output)
    others = _left_out(stored, names)
    write_json(output / "config.json", {**raw, KEY: config_of(form, group_size, config.dtype, others)})
    return bool(config.mixture_layers)


def _copy_others(folder, output):
    """Copy the files that are not weights, such as those of a tokenizer, whose place in `output` they take."""
    files = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith("model")]
    names = {path.relative_to(folder) for path in files if path.suffix not in (".safetensors", ".bin", ".pt")}
    for name in sorted({*names, *tokenizer_files(folder)}):
        (output / name).parent.mkdir(exist_ok=True)
        copy_over(folder / name, output / name)
    remove_other_tokenizer(output, folder)


def _left_out(stored, names):
    """The linear layers that are not quantised, as modules within a layer, such as mlp.gate: list."""
    others = [p for p in stored.of_model.values() if p.layer is not None and p.decays and p.name not in names]
    weights = [(p.layer, *tensor) for p in others for tensor in stored.form_of(p)]
    modules = [source.partition(f".layers.{layer}.")[2] for layer, source, shape in weights if len(shape) == 2]
    return list(dict.fromkeys(module.removesuffix(".weight") for module in modules))


def _files(stored, names, form, group_size, dtype):
    """{tensor: array} of each file of at most SHARD_BYTES: generator."""
    arrays, nbytes = {}, 0
    for source, values, is_quantized in _matrices(stored, names):
        found = tensors_of(source, values, form, group_size, dtype) if is_quantized else {source: values}
        size = sum(array.nbytes for array in found.values())
        if arrays and nbytes + size > SHARD_BYTES:
            yield arrays
            arrays, nbytes = {}, 0
        arrays |= found
        nbytes += size
    yield arrays


def _matrices(stored, names):
    """(tensor, values, whether it is to be quantised) of all tensors that are written: generator."""
    contents = {path: np.memmap(path, np.uint8, "r") for path in stored.paths}
    for p in stored.of_model.values():
        for (source, shape), tensor in zip(stored.form_of(p), stored.stored_of(p), strict=True):
            values = tensor.values_of(contents)
            if p.name not in names or len(shape) == 2:
                yield source, values, p.name in names
                continue
            rows, first = values.reshape(-1, shape[-1]), 0
            for name, (count, _) in p.tensors if p.stacked else p.other_form:
                yield name, rows[first : first + count], True
                first += count
