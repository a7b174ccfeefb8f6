"""Checkpoints in 4 and 8 bits: those of bitsandbytes and of compressed-tensors, read and written, and fp8 by blocks.

    bitsandbytes          X.weight, X.weight.absmax, X.weight.quant_state.bitsandbytes__nf4, ...     nf4
    compressed-tensors    X.weight_packed, X.weight_scale, X.weight_shape                            int4, int8
                          X.weight, X.weight_scale                                                   int8, fp8
    fp8                   X.weight, X.weight_scale_inv                                               fp8

The last is that of DeepSeek-V3 and of Qwen3's FP8 checkpoints: a scale, by which codes are multiplied, for each block
of rows and columns, 128 x 128, the blocks at the ends smaller. It stays float32, where compressed-tensors rounds scales
to the model's dtype.

A quantised tensor has the place of a tensor of values: readers get its values in float32, not rounded, or its codes
and scales. Formats that are not read are refused by name.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlnumba.errors import UserError
from rlnumba.kernels.quantized.formats import FORMATS, NF4, VECTOR, Format, dequantize_ref, quantize_ref
from rlnumba.runtime import device

KEY = "quantization_config"
BITSANDBYTES, COMPRESSED, BLOCKS = "bitsandbytes", "compressed-tensors", "fp8"
QUANT_STATE = ".quant_state.bitsandbytes__"
# What else bitsandbytes has of a tensor.
OF_NF4 = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
FORMATS_OF_COMPRESSED = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")


@dataclass(frozen=True)
class StoredCodes:
    """A quantised tensor in a checkpoint's files, with what readers of a Stored use.

    form: its Format; parts: {what it is: Stored}; state: bitsandbytes' quant_state, or None; block: (rows, columns)
    that share a scale, or None.
    """

    path: Path
    shape: tuple
    form: Format
    parts: dict
    state: dict | None = None
    block: tuple | None = None
    dtype = "F32"

    def values_of(self, contents):
        """The values (N, K) in float32. contents: the bytes of the files with its parts, {path: (n,) uint8}."""
        codes, scales = self.codes(contents)
        # The last block of a row may be smaller.
        missing = -codes.shape[1] % self.group_size
        return dequantize_ref(np.pad(codes, ((0, 0), (0, missing))), scales, self.form, np.float32)[:, : self.shape[1]]

    def read(self):
        """The same, from the files."""
        return self.values_of({path: np.memmap(path, np.uint8, "r") for path in self.paths})

    @property
    def paths(self):
        """The files that its parts lie in: a set."""
        return {stored.path for stored in self.parts.values()}

    @property
    def group_size(self):
        """Neighbours of a row that share a scale."""
        if self.state is not None:
            return self.state["blocksize"]
        if self.block is not None:
            return self.block[1]
        scale = self.parts["scale"].shape
        return self.shape[1] // (scale[1] if len(scale) == 2 else 1)

    def codes(self, contents):
        """(codes (N, K) uint8, scales (N, groups) float32), as of quantize_ref. contents: of values_of."""
        rows, columns = self.shape
        # Copied: a view of some bytes of a file may not be aligned.
        parts = {name: stored.values_of(contents).view(np.ndarray).copy() for name, stored in self.parts.items()}
        if self.state is not None:
            # Codes may be stored as bytes of another dtype, bnb_4bit_quant_storage.
            packed, scales = parts["weight"].reshape(-1).view(np.uint8), parts["absmax"].reshape(-1)
            if "nested_absmax" in parts:
                repeated = np.repeat(parts["nested_absmax"], self.state["nested_blocksize"])[: len(scales)]
                scales = parts["nested_quant_map"][scales] * repeated + np.float32(self.state["nested_offset"])
            codes = np.stack([packed >> 4, packed & 15], axis=-1)
            return codes.reshape(rows, columns), scales.astype(np.float32).reshape(rows, -1)
        scales = parts["scale"].astype(np.float32)
        if self.block is not None:
            return parts["weight"].view(np.uint8), np.repeat(scales, self.block[0], axis=0)[:rows]
        scales = np.broadcast_to(scales, (rows, 1)) if scales.size == 1 else scales.reshape(rows, -1)
        if "packed" in parts:
            bits = np.arange(0, 32, self.form.bits, dtype=np.uint32)
            codes = parts["packed"].view(np.uint32)[..., None] >> bits & np.uint32((1 << self.form.bits) - 1)
            return codes.reshape(rows, -1)[:, :columns].astype(np.uint8), scales
        stored = parts["weight"].view(np.uint8)
        return (stored ^ np.uint8(0x80) if self.form.name == "int8" else stored), scales


def check_config(quantization, source):
    """Raise UserError, naming the file, for the quantization_config of a checkpoint that is not read."""
    if not isinstance(quantization, dict):
        raise UserError(f"{source}: quantization_config must be an object, got {quantization!r}")
    method = quantization.get("quant_method")
    if method == BITSANDBYTES and quantization.get("bnb_4bit_quant_type") == "nf4":
        return
    if method == BLOCKS:
        _check_blocks(quantization, source)
        return
    if method != COMPRESSED:
        kind = quantization.get("bnb_4bit_quant_type") or "int8" if method == BITSANDBYTES else ""
        raise UserError(
            f"{source}: quantization_config of {method!r} {kind and f'({kind}) '}is not read: only nf4 of "
            "bitsandbytes, int4, int8 and fp8 of compressed-tensors, and fp8 by blocks are"
        )
    if quantization.get("format") not in FORMATS_OF_COMPRESSED:
        raise UserError(f"{source}: compressed-tensors' format {quantization.get('format')!r} is not read")
    if quantization.get("transform_config"):
        raise UserError(f"{source}: compressed-tensors' transform_config, of rotations in the model, is not read")
    groups = quantization.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise UserError(f"{source}: config_groups must be an object of objects, got {groups!r}")
    if len(groups) != 1:
        raise UserError(f"{source}: quantization_config has {len(groups)} config_groups; those with one are read")
    for name, group in groups.items():
        weights = group.get("weights") or {}
        if _format_of(weights) is None or not weights.get("symmetric", True):
            raise UserError(f"{source}: {name} has weights that are not symmetric int4 or int8, or fp8")
        if weights.get("actorder") or weights.get("strategy") not in ("group", "channel", "tensor"):
            raise UserError(f"{source}: {name} has weights by {weights.get('strategy')!r} or an order of columns")
        size = weights.get("group_size")
        if weights["strategy"] == "group" and not (isinstance(size, int) and size > 0):
            raise UserError(f"{source}: {name} has weights by groups, and group_size is {size!r}")
        if group.get("input_activations") or group.get("output_activations"):
            raise UserError(f"{source}: {name} quantises activations, too; only those with 16-bit activations are read")


def _check_blocks(quantization, source):
    """Raise UserError, naming the key, for the quantization_config of an fp8 checkpoint that is not by blocks."""
    size = quantization.get("weight_block_size")
    is_size = isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)
    if not is_size or size[1] % VECTOR:
        raise UserError(
            f"{source}: quantization_config of 'fp8' needs weight_block_size, two numbers of rows and columns, the "
            f"last a multiple of {VECTOR}, got {size!r}"
        )
    for key, known in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        if quantization.get(key, known) != known:
            has = f"{key} {quantization[key]!r}"
            raise UserError(f"{source}: quantization_config of 'fp8' with {has} is not read; only {known!r} is")


def _in_blocks(found, name, quantization, source):
    """Make one tensor of X.weight and its X.weight_scale_inv, which is `name`, in {name: Stored or StoredCodes}."""
    weight, scale, size = name.removesuffix("_scale_inv"), found.pop(name), quantization.get("weight_block_size")
    if quantization.get("quant_method") != BLOCKS:
        raise UserError(f"{source}: {name} is there, and config.json has no quantization_config of fp8 by blocks")
    stored = found.get(weight)
    if stored is None or stored.dtype != "F8_E4M3" or scale.dtype not in ("F32", "BF16", "F16"):
        kinds = f"{'nothing' if stored is None else stored.dtype} with scales in {scale.dtype}"
        raise UserError(f"{source}: {weight} is {kinds}, not F8_E4M3 with scales in F32 or BF16")
    grid = tuple(-(-count // each) for count, each in zip(stored.shape, size, strict=True))
    if scale.shape != grid:
        raise UserError(f"{source}: {name} is {scale.shape}, not {grid} for blocks of {size[0]} x {size[1]}")
    found[weight] = StoredCodes(
        stored.path, stored.shape, FORMATS["fp8"], {"weight": stored, "scale": scale}, block=tuple(size)
    )


def _in_nf4(found, name, source):
    """Make one tensor of X.weight and what bitsandbytes has of it, of which `name` is the quant_state, in {name: Stored
    or StoredCodes}."""
    weight = name.partition(QUANT_STATE)[0]
    try:
        state = json.loads(bytes(found.pop(name).read()))
    except ValueError:
        state = None
    if not isinstance(state, dict):
        raise UserError(f"{source}: {name} is not a JSON object")
    parts = {part: found.pop(f"{weight}.{part}") for part in OF_NF4 if f"{weight}.{part}" in found}
    needed = {"quant_type", "blocksize", "shape"}
    if "nested_absmax" in parts:
        needed |= {"nested_blocksize", "nested_offset"}
    if missing := sorted(needed - state.keys()):
        raise UserError(f"{source}: {name} has no {missing[0]}")
    shape, size = tuple(state["shape"]), state["blocksize"]
    if state["quant_type"] != "nf4" or len(shape) != 2 or shape[-1] % size:
        raise UserError(f"{source}: {weight} is not nf4 with blocks that lie within a row")
    if weight not in found:
        raise UserError(f"{source}: {name} is there, and {weight} is not")
    parts["weight"] = found[weight]
    count = shape[0] * shape[1] // size
    wanted = {"absmax": count}
    if "nested_absmax" in parts:
        wanted |= {"nested_absmax": -(-count // state["nested_blocksize"]), "nested_quant_map": 256}
    for part, number in wanted.items():
        elements = math.prod(parts[part].shape) if part in parts else 0
        if elements != number:
            raise UserError(f"{source}: {weight}.{part} has {elements} elements, not {number}")
    stored = parts["weight"]
    if stored.end - stored.begin != math.prod(shape) // 2:
        raise UserError(f"{source}: {weight} has {stored.end - stored.begin} bytes, not the half of {shape}")
    found[weight] = StoredCodes(stored.path, shape, FORMATS["nf4"], parts, state)


def _in_groups(found, name, quantization, source):
    """Make one tensor of what compressed-tensors has of X.weight, of which `name` is the scale, in {name: Stored or
    StoredCodes}."""
    weight, scale, groups = name.removesuffix("_scale"), found.pop(name), quantization.get("config_groups")
    if groups is None:
        raise UserError(f"{source}: {name} is there, and config.json has no quantization_config with its format")
    group = next(iter(groups.values()))["weights"]
    form = FORMATS[_format_of(group)]
    packed, shape = found.pop(f"{weight}_packed", None), found.pop(f"{weight}_shape", None)
    stored = packed or found.get(weight)
    if stored is None:
        raise UserError(f"{source}: {name} is there, and neither {weight} nor {weight}_packed is")
    shape = stored.shape if shape is None else tuple(map(int, shape.read()))
    rows, columns = shape if len(shape) == 2 else (0, 0)
    if packed is None:
        kind, own = {"int8": "I8", "fp8": "F8_E4M3"}.get(form.name), (rows, columns)
    else:
        kind, own = {"int8": "I32", "int4": "I32"}.get(form.name), (rows, -(-columns * form.bits // 32))
    if (stored.dtype, stored.shape) != (kind, own):
        raise UserError(
            f"{source}: the codes of {weight}, {stored.dtype} {stored.shape}, are not those of {shape} in {form.name}"
        )
    size = group.get("group_size") if group.get("strategy") == "group" else columns
    scales = [(rows, columns // size)] if columns % size == 0 else []
    # One of a row, or of all.
    scales += [(rows,), (1,), (), (1, 1)] if size == columns else []
    if scale.shape not in scales:
        raise UserError(f"{source}: {name} is {scale.shape}, which is none for {shape} in groups of {size}")
    parts = {"scale": scale, "weight" if packed is None else "packed": stored}
    found[weight] = StoredCodes(stored.path, shape, form, parts)


def _format_of(weights):
    kinds = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8"}
    return kinds.get((weights.get("type"), weights.get("num_bits")))


def has_codes(names):
    """Whether some tensors of a checkpoint are codes or scales."""
    return any(QUANT_STATE in name or name.endswith((".weight_scale", ".weight_scale_inv")) for name in names)


def joined(files, quantization, source):
    """{name: Stored or StoredCodes} of {name: Stored}: what a quantised tensor consists of becomes one."""
    found = dict(files)
    for name in files:
        if QUANT_STATE in name:
            _in_nf4(found, name, source)
        elif name.endswith(".weight_scale_inv"):
            _in_blocks(found, name, quantization, source)
        elif name.endswith(".weight_scale"):
            _in_groups(found, name, quantization, source)
    return found


def config_of(form, group_size, dtype, others=()):
    """The quantization_config of a checkpoint that tensors_of makes. others: modules of layers, such as mlp.gate, that
    are linear and not quantised."""
    if form.name == "nf4":
        return {
            "quant_method": BITSANDBYTES, "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False, "bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": ["lm_head", *others],
        }  # fmt: skip
    weights = {
        "num_bits": form.bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size,
        "dynamic": False,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": COMPRESSED, "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *(f"re:.*{re.escape(module)}$" for module in others)],
    }  # fmt: skip


def tensors_of(name, values, form, group_size, dtype):
    """{name: array} that a checkpoint has of a matrix `name`, X.weight, with these values (N, K).

    dtype: name of the dtype that the values are rounded to first, and the scales of integers. Raises UserError for
    values that are not finite in it.
    """
    with np.errstate(over="ignore"):
        x = values.astype(device.dtype(dtype))
    if not np.isfinite(x).all():
        raise UserError(f"{name} holds NaN, or values too large for {dtype}: it has no codes")
    codes, scales = quantize_ref(x, form, group_size)
    if form.name == "nf4":
        state = {"quant_type": "nf4", "blocksize": group_size, "dtype": dtype, "shape": list(x.shape)}
        return {
            name: (codes[:, ::2] << 4 | codes[:, 1::2]).reshape(-1, 1),
            f"{name}.absmax": scales.reshape(-1),
            f"{name}.quant_map": NF4,
            f"{name}{QUANT_STATE}nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
        }
    bits = np.arange(0, 32, form.bits, dtype=np.uint32)
    words = codes.reshape(len(codes), -1, len(bits)).astype(np.uint32) << bits
    return {
        f"{name}_packed": np.bitwise_or.reduce(words, axis=-1).view(np.int32),
        f"{name}_scale": scales.astype(device.dtype(dtype)),
        f"{name}_shape": np.int64(x.shape),
    }
