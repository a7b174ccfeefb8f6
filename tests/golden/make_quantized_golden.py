"""Record what bitsandbytes and compressed-tensors make of a matrix: tests/golden/quantized.npz.

Needs torch, bitsandbytes 0.50 and compressed-tensors 0.20; run it from the root of the repository.
"""

from pathlib import Path

import bitsandbytes.functional as bnb
import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams

ROWS, COLUMNS = 6, 256


def main():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((ROWS, COLUMNS), generator=generator) * 0.02
    x[1, 64:192] = 0
    x[2, 5] = 3.0
    x = x.to(torch.bfloat16)
    found = {"x": x.float().numpy()}
    for nested in (False, True):
        packed, state = bnb.quantize_4bit(x, blocksize=64, compress_statistics=nested, quant_type="nf4")
        name = "nf4_nested" if nested else "nf4"
        found[f"{name}/packed"] = packed.numpy()
        found[f"{name}/absmax"] = state.absmax.numpy()
        found[f"{name}/values"] = bnb.dequantize_4bit(packed, state).float().numpy()
        if nested:
            found[f"{name}/nested_absmax"] = state.state2.absmax.numpy()
            found[f"{name}/nested_code"] = state.state2.code.numpy()
            found[f"{name}/offset"] = np.float32(state.offset.item())
    for name, bits, kind in (("int8", 8, "int"), ("int4", 4, "int"), ("fp8", 8, "float")):
        arguments = QuantizationArgs(num_bits=bits, type=kind, strategy="group", group_size=128, symmetric=True)
        # In bfloat16 quantize rounds the quotient twice; what is read are codes and scales.
        for element, matrix in (("float32", x.float()), ("bfloat16", x)):
            groups = matrix.reshape(ROWS, COLUMNS // 128, 128)
            scale, zero = calculate_qparams(groups.amin(dim=2), groups.amax(dim=2), arguments)
            dtype = torch.float8_e4m3fn if kind == "float" else torch.int8
            codes = quantize(matrix, scale, zero, arguments, dtype=dtype)
            found[f"{name}/{element}/codes"] = codes.view(torch.int8).numpy()
            if kind == "int":
                found[f"{name}/{element}/packed"] = pack_to_int32(codes, bits).numpy()
            found[f"{name}/{element}/scale"] = scale.float().numpy()
            found[f"{name}/{element}/values"] = dequantize(codes, scale, zero, arguments).float().numpy()
    np.savez_compressed(Path(__file__).parent / "quantized.npz", **found)


if __name__ == "__main__":
    main()
