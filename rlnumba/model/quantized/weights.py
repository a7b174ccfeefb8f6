"""Weights whose linear layers are quantised when they are read: the frozen base of an adapter.

A quantised projection is computed as the 16-bit one with the weight's values in its place, each rounded once. So a
row's bits are those of the 16-bit model with these values, in rollout and training. Embedding, norms, biases, heads and
routers stay as they are, in the flat buffer of Weights, which has no matrices of layers then.
"""

import math
from functools import partial

import numpy as np

from rlnumba.errors import ConfigError
from rlnumba.kernels.nn.elementwise import cast
from rlnumba.kernels.quantized.formats import FORMATS, packed_shape, scales_shape
from rlnumba.kernels.quantized.ops import QuantizedWeight, dequantize, quantize, set_rows
from rlnumba.model.parameter import placed
from rlnumba.model.quantized.checkpoint import StoredCodes
from rlnumba.model.shard import WHOLE
from rlnumba.model.weights import Weights, parameters
from rlnumba.runtime import device
from rlnumba.runtime.transfer import copy_to_device

# Elements of a tensor that are on the device in 16 bits at a time while they are quantised.
PIECE = 32 << 20


def quantized_names(config):
    """The names of the Parameters of a model that are quantised: set."""
    blocks = [block for blocks in config.blocks for block in blocks]
    names = [(block.layer, block.PROJECTIONS if block.QUANTIZED is None else block.QUANTIZED) for block in blocks]
    return {f"model.layers.{layer}.{name}" for layer, of_block in names for name in of_block}


def check_group_size(p, group_size, key="quantization.group_size"):
    """Raise ConfigError, which names the key, if groups of so many columns do not divide the rows of a Parameter."""
    if p.shape[-1] % group_size:
        columns = f"the {p.shape[-1]} columns of {p.rows[0][0]}"
        raise ConfigError(f"{key} {group_size} does not divide {columns}")


def form_of(quantization):
    """(Format, group size) of a QuantizationConfig."""
    form = FORMATS[quantization.format_name]
    return form, quantization.group_size or form.group_size


def weights_in(quantization):
    """The maker of Weights in the format of a QuantizationConfig, or for None in 16 or 32 bits, as load_weights takes
    it."""
    return Weights if quantization is None else partial(QuantizedWeights, quantization=quantization)


def packed_bytes(rows, columns, form, group_size):
    """Bytes of a QuantizedWeight of so many rows."""
    return 4 * (math.prod(packed_shape(rows, columns, form)) + math.prod(scales_shape(rows, columns // group_size)))


def weights_bytes(config, dtype, shard, quantization=None):
    """Bytes of a shard's weights. config: the ModelConfig of the whole model, with the heads that are used."""
    found, nbytes = parameters(config, shard), 0
    if quantization is not None:
        names, (form, group_size) = quantized_names(config), form_of(quantization)
        sizes = [(math.prod(p.shape[:-1]), p.shape[-1]) for p in found if p.name in names]
        nbytes = sum(packed_bytes(rows, columns, form, group_size) for rows, columns in sizes)
        found = placed(p for p in found if p.name not in names)
    return nbytes + (found[-1].offset + found[-1].padded_size) * device.dtype(dtype).itemsize


class QuantizedWeights(Weights):
    """The Weights of a base in the format of a QuantizationConfig; `quantized`: {name: Parameter} of what it has.

    A shard has whole rows of a matrix, whose groups are therefore those of the whole model. Raises ConfigError for a
    group size that does not divide the rows of a matrix.
    """

    def __init__(self, config, dtype="float32", region="weights", shard=WHOLE, quantization=None):
        self.quantization, (self.form, self.group_size) = quantization, form_of(quantization)
        super().__init__(config, dtype, region, shard)

    def _allocate(self, region):
        """The flat buffer of what is not quantised, and the QuantizedWeights of the rest."""
        names = quantized_names(self.config)
        self.quantized = {p.name: p for p in self.parameters if p.name in names}
        for p in self.quantized.values():
            check_group_size(p, self.group_size)
        self.parameters = placed(p for p in self.parameters if p.name not in self.quantized)
        last = self.parameters[-1]
        self.size = last.offset + last.padded_size
        self.decay_end = next(p.offset for p in self.parameters if not p.decays)
        views, nbytes = super()._allocate(region)
        quantized, of_quantized = self._allocate_quantized(region)
        return views | quantized, nbytes + of_quantized

    def _allocate_quantized(self, region):
        """({name: QuantizedWeight}, bytes of their memory)."""
        sizes = self.group_size, self.dtype.name
        views = {name: QuantizedWeight.empty(self.form, p.shape, *sizes) for name, p in self.quantized.items()}
        return views, sum(view.nbytes for view in views.values())

    @property
    def num_parameters(self):
        return self.size + sum(p.size for p in self.quantized.values())

    @property
    def nbytes(self):
        return self.flat.nbytes + sum(self[name].nbytes for name in self.quantized)

    def fill(self, stored, contents):
        """Read a checkpoint's tensors; what is quantised is on the device in 16 bits a piece at a time."""
        super().fill(stored, contents)
        self.fill_quantized(stored, contents)

    def check_stored(self, stored):
        """Raise ConfigError for StoredWeights that are of this format by other groups."""
        for p in self.quantized.values():
            for tensor in stored.stored_of(p):
                if self._has_codes(tensor) and tensor.group_size != self.group_size:
                    of_file = f"{tensor.group_size} in {tensor.path}"
                    raise ConfigError(f"quantization.group_size is {self.group_size}, and {of_file}")

    def _has_codes(self, tensor):
        """Whether a tensor of a checkpoint has this format's codes."""
        return isinstance(tensor, StoredCodes) and tensor.form == self.form

    def fill_quantized(self, stored, contents):
        """Read what is quantised of a checkpoint's tensors. Raises as check_stored."""
        self.check_stored(stored)
        for p in self.quantized.values():
            self._fill_matrix(p, stored, contents)

    def _fill_matrix(self, p, stored, contents):
        """Read a Parameter that is quantised."""
        row, whole = 0, stored.of_model[p.name]
        for index, (tensor, (_, shape)) in enumerate(zip(stored.stored_of(p), stored.form_of(whole), strict=True)):
            parts = whole.parts_of(self.shard, index, shape)
            row = self._fill_rows(self[p.name], row, tensor, parts, contents)
        assert row == math.prod(p.shape[:-1]), p.name

    def _fill_rows(self, weight, row, tensor, parts, contents):
        """Set rows row, row + 1, ... of a QuantizedWeight to slices of a Stored's rows: the row that follows."""
        xp, columns = device.xp(), weight.shape[-1]
        if self._has_codes(tensor):
            codes, scales = tensor.codes(contents)
            if self.form.rounds_scales and tensor.block is None:
                scales = scales.astype(self.dtype).astype(np.float32)
            for part in parts:
                set_rows(weight, row, codes[part], scales[part])
                row += part.stop - part.start
            return row
        matrix, rows = tensor.values_of(contents).reshape(-1, columns), max(PIECE // columns, 1)
        for part in parts:
            for first in range(part.start, part.stop, rows):
                values = matrix[first : min(first + rows, part.stop)]
                piece = xp.empty(values.shape, self.dtype)
                copy_to_device([(piece, values)])
                quantize(piece, row, weight)
                row += len(values)
        return row


def set_values(weights, quantized):
    """Set the matrices of Weights to the values that QuantizedWeights of the same model compute with."""
    for name in quantized.quantized:
        values = device.xp().empty(quantized[name].shape, quantized.dtype)
        dequantize(quantized[name], values)
        cast(values, weights[name])
