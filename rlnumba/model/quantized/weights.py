"""Weights whose linear layers are quantised when they are read: the frozen base of an adapter.

A quantised projection is computed as the 16-bit one with the weight's values in its place, each rounded once. So a
row's bits are those of the 16-bit model with these values, in rollout and training. Embedding, norms, biases, heads and
routers stay as they are, in the flat buffer of Weights, which has no matrices of layers then.
"""

import math

from rlnumba.errors import ConfigError
from rlnumba.kernels.quantized.formats import FORMATS
from rlnumba.kernels.quantized.ops import QuantizedWeight, quantize, set_rows
from rlnumba.model.parameter import placed
from rlnumba.model.quantized.checkpoint import StoredCodes
from rlnumba.model.weights import Weights
from rlnumba.runtime import device
from rlnumba.runtime.transfer import copy_to_device

# Elements of a tensor that are on the device in 16 bits at a time while they are quantised.
PIECE = 32 << 20


def quantized_names(config):
    """The names of the Parameters of a model that are quantised: set."""
    blocks = [block for blocks in config.blocks for block in blocks]
    names = [(block.layer, block.PROJECTIONS if block.QUANTIZED is None else block.QUANTIZED) for block in blocks]
    return {f"model.layers.{layer}.{name}" for layer, of_block in names for name in of_block}


def check_group_size(p, group_size):
    """Raise ConfigError if groups of so many columns do not divide the rows of a Parameter."""
    if p.shape[-1] % group_size:
        columns = f"the {p.shape[-1]} columns of {p.rows[0][0]}"
        raise ConfigError(f"quantization.group_size {group_size} does not divide {columns}")


class QuantizedWeights(Weights):
    """The Weights of a base in the format of a QuantizationConfig; `quantized`: {name: Parameter} of what it has.

    Raises ConfigError for a group size that does not divide the rows of a matrix.
    """

    def __init__(self, config, dtype="float32", region="weights", shard=None, quantization=None):
        self.form = FORMATS[quantization.format_name]
        self.group_size = quantization.group_size or self.form.group_size
        super().__init__(config, dtype, region)

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
        for name, p in self.quantized.items():
            views[name] = QuantizedWeight.empty(self.form, p.shape, self.group_size, self.dtype.name)
            nbytes += views[name].nbytes
        return views, nbytes

    @property
    def nbytes(self):
        return self.flat.nbytes + sum(self[name].nbytes for name in self.quantized)

    def fill(self, stored, contents):
        """Read a checkpoint's tensors; what is quantised is on the device in 16 bits a piece at a time."""
        super().fill(stored, contents)
        xp = device.xp()
        for name, p in self.quantized.items():
            row, columns = 0, p.shape[-1]
            for tensor in stored.stored_of(p):
                if isinstance(tensor, StoredCodes) and tensor.form == self.form:
                    if tensor.group_size != self.group_size:
                        raise ConfigError(
                            f"quantization.group_size is {self.group_size}, and {tensor.group_size} in {tensor.path}"
                        )
                    codes, scales = tensor.codes()
                    set_rows(self[name], row, codes, scales)
                    row += len(codes)
                    continue
                matrix = tensor.values_in(contents[tensor.path]).reshape(-1, columns)
                rows = max(PIECE // columns, 1)
                for first in range(0, len(matrix), rows):
                    part = matrix[first : first + rows]
                    piece = xp.empty(part.shape, self.dtype)
                    copy_to_device([(piece, part)])
                    quantize(piece, row, self[name])
                    row += len(part)
            assert row * columns == math.prod(p.shape), name
