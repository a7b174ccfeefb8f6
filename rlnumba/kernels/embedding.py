"""Embedding lookup and its gradient.

    out[n] = weight[input_ids[n]]           dweight[v] += sum over n with input_ids[n] == v of dout[n]

input_ids (N,) int32; weight (V, D), out and dout (N, D) in float32, float16 or bfloat16; dweight (V, D)
float32. The sum runs in float32 over the tokens in their order: ids are sorted (stably), a block adds up a
run of equal ids. With atomic additions instead, the sum's order, and so its last bits, would change from
run to run.
"""

import numpy as np

from rlnumba import device
from rlnumba.device import cuda
from rlnumba.kernels.check import F32, FLOATS, I32, check
from rlnumba.kernels.instructions import widen
from rlnumba.kernels.launch import launch

# Threads that copy or add up a row.
ROW_THREADS = 128


@cuda.jit
def gather_rows_kernel(source, rows, out):
    """out[n] = source[rows[n]]; a block owns an output row, a thread every ROW_THREADS-th word of it.

    A row number outside the source gives a row of ones in every bit: NaN, whatever the floating dtype.
    """
    row = rows[cuda.blockIdx.x]
    inside = row >= 0 and row < source.shape[0]
    for word in range(cuda.threadIdx.x, out.shape[1], ROW_THREADS):
        if inside:
            out[cuda.blockIdx.x, word] = source[row, word]
        else:
            out[cuda.blockIdx.x, word] = np.int64(-1)


@cuda.jit
def embedding_backward_kernel(sorted_ids, order, dout, dweight):
    """A block owns blockDim.x columns of the run of equal ids that begins at sorted_ids[blockIdx.x].

    A block whose position begins no run has nothing to do. A thread adds up one column, in the order of
    the tokens.
    """
    first = cuda.blockIdx.x
    token_id = sorted_ids[first]
    if first > 0 and sorted_ids[first - 1] == token_id:
        return
    column = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    if column >= dout.shape[1] or token_id < 0 or token_id >= dweight.shape[0]:
        return
    total = np.float32(0.0)
    position = first
    while position < sorted_ids.shape[0] and sorted_ids[position] == token_id:
        total += widen(dout[order[position], column])
        position += 1
    dweight[token_id, column] += total


def as_words(array):
    """A (rows, columns) array seen as the widest unsigned integers that a row divides into, for copying."""
    row_bytes = array.shape[1] * array.itemsize
    widest = next((t for t in (np.uint64, np.uint32, np.uint16) if row_bytes % np.dtype(t).itemsize == 0), np.uint8)
    return array.view(widest)


def embedding(input_ids, weight, out):
    """out[n] = weight[input_ids[n]].

    input_ids (N,) int32 in [0, V); weight (V, D) of a floating dtype; out (N, D) of the same is written. An
    id outside [0, V) raises ValueError on the numpy device; kernels, which cannot raise, write a row of NaN.
    Raises ValueError for other shapes, dtypes or layouts.
    """
    vocabulary, columns = check("embedding", "weight", weight, (None, None), FLOATS)
    (tokens,) = check("embedding", "input_ids", input_ids, (None,), I32)
    check("embedding", "out", out, (tokens, columns), (weight.dtype,))
    if device.name() == "numpy":
        check_rows("embedding", "input_ids", input_ids, vocabulary)
        np.take(weight, input_ids, axis=0, out=out, mode="clip")
        return
    launch(gather_rows_kernel, tokens, ROW_THREADS, as_words(weight), input_ids, as_words(out))


def check_rows(op, name, rows, limit):
    """Raise ValueError if an index of a NumPy array is outside [0, limit)."""
    wrong = (rows < 0) | (rows >= limit)
    if wrong.any():
        raise ValueError(f"{op}: {name} must be in [0, {limit}), got {rows[wrong][0]}")


def embedding_backward(input_ids, dout, dweight):
    """dweight[input_ids[n]] += dout[n], the tokens of one id added up in their order.

    input_ids (N,) int32; dout (N, D) of a floating dtype; dweight (V, D) float32 is added to. Ids outside
    [0, V) raise ValueError on the numpy device and contribute nothing elsewhere. Raises ValueError for other
    shapes, dtypes or layouts.
    """
    tokens, columns = check("embedding_backward", "dout", dout, (None, None), FLOATS)
    check("embedding_backward", "input_ids", input_ids, (tokens,), I32)
    vocabulary, _ = check("embedding_backward", "dweight", dweight, (None, columns), F32)
    if tokens == 0:
        return
    order = device.xp().argsort(input_ids, kind="stable")
    sorted_ids = input_ids[order]
    if device.name() == "numpy":
        check_rows("embedding_backward", "input_ids", input_ids, vocabulary)
        starts = np.flatnonzero(np.diff(sorted_ids, prepend=-1))
        dweight[sorted_ids[starts]] += np.add.reduceat(dout[order], starts, axis=0)
        return
    grid = (tokens, -(-columns // ROW_THREADS))
    launch(embedding_backward_kernel, grid, ROW_THREADS, sorted_ids, order, dout, dweight)


def embedding_ref(input_ids, weight):
    """out of embedding."""
    return weight[input_ids]


def embedding_backward_ref(input_ids, dout, vocabulary):
    """The gradient of the weight, (vocabulary, D), in dout's precision."""
    dweight = np.zeros((vocabulary, dout.shape[1]), dout.dtype)
    np.add.at(dweight, input_ids, dout)
    return dweight
