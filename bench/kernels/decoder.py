"""All layers of a decode step of few sequences: the persistent decoder kernel against the separate kernels.

    python bench/kernels/decoder.py                    the workloads that docs/persistent-decoder.md quotes
    python bench/kernels/decoder.py 8x400              8 sequences with contexts of 400 tokens

Microseconds of a CUDA graph, launched with PDL, of Qwen3-0.6B's shape with random weights, without the language-model
head. Both must give the same bits. Needs an sm_90 GPU.
"""

import argparse
import statistics
import sys
from pathlib import Path

import cupy
import numpy as np

sys.path.append(str(Path(__file__).parent.parent))

from report import row  # noqa: E402
from shapes import random_model  # noqa: E402

from rlnumba.engine.blocks.cache_size import BLOCK_SIZE  # noqa: E402
from rlnumba.engine.cache import KVCache  # noqa: E402
from rlnumba.engine.few_rows import FewRowsDecoder  # noqa: E402
from rlnumba.engine.steps.attention import PagedAttention  # noqa: E402
from rlnumba.engine.steps.shapes import context_bucket_of  # noqa: E402
from rlnumba.kernels.tile.tensor_map import keep_tensor_maps  # noqa: E402
from rlnumba.runtime import device  # noqa: E402
from rlnumba.runtime.arena import Arena  # noqa: E402
from rlnumba.runtime.launch import pdl_scope  # noqa: E402

WORKLOADS = "1x128 1x640 1x1000 2x128 4x128 8x128 8x400".split()
LAUNCHES, ROUNDS = 20, 5


def arrays_of(model, rows, context):
    """The arrays of a decode step of so many sequences, each with a context of so many tokens."""
    generator, width = np.random.default_rng(0), context_bucket_of(context) // BLOCK_SIZE
    blocks = generator.permutation(rows * width).reshape(rows, width).astype(np.int32)
    position = context - 1
    arrays = {
        "input_ids": generator.integers(0, model.config.vocab_size, rows, dtype=np.int32),
        "position_ids": np.full(rows, position, np.int32),
        "slot_mapping": blocks[:, position // BLOCK_SIZE] * np.int32(BLOCK_SIZE) + np.int32(position % BLOCK_SIZE),
        "block_tables": blocks,
        "cu_seqlens": np.arange(rows + 1, dtype=np.int32),
        "context_lens": np.full(rows, context, np.int32),
    }
    return {name: device.asarray(array) for name, array in arrays.items()}


def cache_of(model, rows, context):
    """A KVCache with random content."""
    cache = KVCache(model.config, rows * context_bucket_of(context) // BLOCK_SIZE, BLOCK_SIZE, model.dtype)
    cache.take()
    for array in cache.arrays:
        array[...] = cupy.random.standard_normal(array.shape, dtype=np.float32).astype(model.dtype)
    return cache


def graph_us(step):
    """Median microseconds of a call, replayed as a graph."""
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        with keep_tensor_maps(), pdl_scope():
            step()
        graph = stream.end_capture()
        times = []
        for _ in range(ROUNDS):
            begin = stream.record()
            for _ in range(LAUNCHES):
                graph.launch(stream)
            end = stream.record()
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / LAUNCHES)
    return statistics.median(times)


def measure(model, rows, context):
    """Print a line on a workload; AssertionError where the bits differ."""
    arrays, cache, arena = arrays_of(model, rows, context), cache_of(model, rows, context), Arena("bench")
    decoder, hidden = FewRowsDecoder(model, BLOCK_SIZE), cupy.empty((rows, model.config.hidden_size), model.dtype)

    def by_kernels():
        with arena.scope():
            attention = PagedAttention(cache, model.config, arrays, 1, context_bucket_of(context), 1)
            result = model.forward(arrays["input_ids"], arrays["position_ids"], attention, arena=arena)
            return cupy.asnumpy(result.view(np.uint16)) if not cupy.cuda.get_current_stream().is_capturing() else None

    def by_decoder():
        decoder.forward(arrays, cache, hidden)

    expected = by_kernels()
    by_decoder()
    np.testing.assert_array_equal(cupy.asnumpy(hidden.view(np.uint16)), expected)
    kernels, persistent = graph_us(by_kernels), graph_us(by_decoder)
    row(f"layers of a decode step, {rows} x {context}", f"{persistent:.0f} us; separate kernels {kernels:.0f} us")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=WORKLOADS, help="SEQUENCESxCONTEXT")
    arguments = parser.parse_args()
    if device.select("auto") != "cuda":
        parser.error("needs a GPU")
    model = random_model("qwen3-0.6b", "bfloat16")
    for workload in arguments.workloads:
        measure(model, *map(int, workload.split("x")))


if __name__ == "__main__":
    main()
