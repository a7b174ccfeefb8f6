"""Embedding lookup and its gradient.

    out[n] = weight[input_ids[n]]           dweight[v] += sum over n with input_ids[n] == v of dout[n]

input_ids (N,) int32; weight (V, D), out and dout (N, D) in float32, float16 or bfloat16; dweight (V, D)
float32. The sum runs in float32 over the tokens in their order: ids are sorted (stably), the sorted list is cut
into segments of SEGMENT tokens, a block adds up the runs of equal ids in a segment, and where a run crosses a
border, a second kernel adds its parts in their order: an id that fills half of the batch does not hold up the rest.
With atomic additions instead, the sum's order, and so its last bits, would change from run to run.
"""

import numpy as np

from rlnumba import device
from rlnumba.device import cuda
from rlnumba.kernels.check import F32, FLOATS, I32, check
from rlnumba.kernels.instructions import access_length, start_loads, vector_access
from rlnumba.kernels.launch import kernel_factory, launch

# Rows that a block copies at a time, one a warp, and vectors that a lane loads before it stores the first.
ROW_WARPS = 4
ROW_UNROLL = 4
# Threads that add up a run, and columns of each: 16 bytes of float32.
THREADS = 128
VECTOR = 4
# Tokens of a segment. Part of the arithmetic.
SEGMENT = 32
# Rows of dout, and parts of a run, that are loaded before the first is added.
ROWS_AT_ONCE = 4
PARTS_AT_ONCE = 16


@kernel_factory
def copy_rows_kernel(element, access, bounded, scatter):
    """The kernel that copies rows of integers of type `element`: out[n] = x[rows[n]], or out[rows[n]] = x[n].

    bounded: the last block of a row has columns beyond the end.
    """
    vector = 16 // np.dtype(element).itemsize
    part = 32 * ROW_UNROLL * vector
    count = ROW_UNROLL * vector
    ones = element(np.iinfo(element).max)
    load, store = vector_access(vector, access, bounded)

    @cuda.jit
    def copy_rows_kernel(x, rows, out):
        """A warp owns 32 * ROW_UNROLL vectors of a row, a lane every 32nd of them.

        A row number outside the array is skipped when scattering; when gathering it gives a row of ones in
        every bit: NaN, whatever the floating dtype.
        """
        n = cuda.blockIdx.x * ROW_WARPS + cuda.threadIdx.y
        if n >= rows.shape[0]:
            return
        first = cuda.blockIdx.y * part + cuda.threadIdx.x * vector
        row = rows[n]
        kept = cuda.local.array(count, element)
        if scatter:
            if row < 0 or row >= out.shape[0]:
                return
            source, target = x[n], out[row]
        else:
            # Row 0 is read, and not used, where there is no row.
            inside = row >= 0 and row < x.shape[0]
            source, target = x[row if inside else 0], out[n]
        for i in range(ROW_UNROLL):
            load(source, first + i * 32 * vector, kept, i * vector)
        if not scatter:
            if not inside:
                for i in range(count):
                    kept[i] = ones
        for i in range(ROW_UNROLL):
            store(target, first + i * 32 * vector, kept, i * vector)

    return copy_rows_kernel


@kernel_factory
def embedding_backward_kernel(access, bounded):
    """The kernel that moves `access` columns at a time; bounded: the last block has columns beyond the end."""
    load, store = vector_access(VECTOR, access, bounded)
    count = ROWS_AT_ONCE * VECTOR
    places = SEGMENT + 2

    @cuda.jit
    def embedding_backward_kernel(input_ids, order, dout, dweight, parts):
        """A block owns THREADS * VECTOR columns of a segment of the sorted tokens, a thread VECTOR columns.

        The sum of a run of equal ids that lies within the segment is added to dweight. Of one that comes from
        the segment before, the sum goes to parts[segment, 0]; of one that begins here and goes on in the next
        segment, to parts[segment, 1]. parts: (segments, 2, D); what has no such run is not written.
        """
        # The ids of the segment, from the last one before it to the first one behind it.
        ids = cuda.shared.array(places, np.int32)
        tokens = cuda.shared.array(places, np.int32)
        segment, begin = cuda.blockIdx.x, cuda.blockIdx.x * SEGMENT
        length = min(SEGMENT, order.shape[0] - begin)
        for place in range(cuda.threadIdx.x, length + 2, THREADS):
            position = begin + place - 1
            nearest = min(max(position, 0), order.shape[0] - 1)
            tokens[place] = order[nearest]
            token_id = input_ids[order[nearest]]
            # Beyond the ends of the list stands what differs from the neighbour.
            ids[place] = token_id if position == nearest else ~token_id
        cuda.syncthreads()
        first = (cuda.blockIdx.y * THREADS + cuda.threadIdx.x) * VECTOR
        comes, goes = ids[0] == ids[1], ids[length] == ids[length + 1]
        rows = cuda.local.array(count, np.float32)
        before = cuda.local.array(count, np.float32)
        total = cuda.local.array(VECTOR, np.float32)
        for i in range(VECTOR):
            total[i] = np.float32(0.0)
        for top in range(1, length + 1, ROWS_AT_ONCE):
            for j in range(ROWS_AT_ONCE):
                place = min(top + j, length)
                token_id = ids[place]
                load(dout[tokens[place]], first, rows, j * VECTOR)
                if token_id != ids[place + 1] and 0 <= token_id and token_id < dweight.shape[0]:
                    load(dweight[token_id], first, before, j * VECTOR)
            start_loads()
            for j in range(ROWS_AT_ONCE):
                place = top + j
                if place <= length:
                    token_id = ids[place]
                    for i in range(VECTOR):
                        total[i] += rows[j * VECTOR + i]
                    if token_id != ids[place + 1]:
                        if comes and token_id == ids[1]:
                            store(parts[segment, 0], first, total, 0)
                        elif 0 <= token_id and token_id < dweight.shape[0]:
                            for i in range(VECTOR):
                                total[i] += before[j * VECTOR + i]
                            store(dweight[token_id], first, total, 0)
                        for i in range(VECTOR):
                            total[i] = np.float32(0.0)
        if goes:
            store(parts[segment, 0 if comes and ids[1] == ids[length] else 1], first, total, 0)

    return embedding_backward_kernel


@kernel_factory
def add_parts_kernel(access, bounded):
    """As embedding_backward_kernel."""
    load, store = vector_access(VECTOR, access, bounded)
    count = PARTS_AT_ONCE * VECTOR

    @cuda.jit
    def add_parts_kernel(input_ids, order, parts, dweight):
        """A block owns THREADS * VECTOR columns of the run that begins in a segment and goes on beyond its end.

        A block whose segment has no such run has nothing to do. The parts are added in their order.
        """
        segment = cuda.blockIdx.x
        begin, end = segment * SEGMENT, (segment + 1) * SEGMENT
        token_id = input_ids[order[end - 1]]
        if input_ids[order[end]] != token_id or token_id < 0 or token_id >= dweight.shape[0]:
            return
        if begin > 0 and input_ids[order[begin - 1]] == token_id:
            return
        first = (cuda.blockIdx.y * THREADS + cuda.threadIdx.x) * VECTOR
        total = cuda.local.array(VECTOR, np.float32)
        before = cuda.local.array(VECTOR, np.float32)
        following = cuda.local.array(count, np.float32)
        belongs = cuda.local.array(PARTS_AT_ONCE, np.int32)
        load(parts[segment, 1], first, total, 0)
        load(dweight[token_id], first, before, 0)
        segment += 1
        goes_on = True
        while goes_on:
            for j in range(PARTS_AT_ONCE):
                # What lies beyond the run is read, and not used, so that no load waits for an id.
                part = min(segment + j, parts.shape[0] - 1)
                belongs[j] = part == segment + j and input_ids[order[part * SEGMENT]] == token_id
                load(parts[part, 0], first, following, j * VECTOR)
            start_loads()
            for j in range(PARTS_AT_ONCE):
                if belongs[j]:
                    for i in range(VECTOR):
                        total[i] += following[j * VECTOR + i]
            goes_on = belongs[PARTS_AT_ONCE - 1] != 0
            segment += PARTS_AT_ONCE
        for i in range(VECTOR):
            total[i] += before[i]
        store(dweight[token_id], first, total, 0)

    return add_parts_kernel


def copy_rows(x, rows, out, scatter):
    """out[n] = x[rows[n]], or with scatter out[rows[n]] = x[n], bit for bit; the arrays are checked."""
    element = np.uint32 if x.itemsize == 4 else np.uint16
    columns, of_warp = x.shape[1], 32 * ROW_UNROLL * 16 // x.itemsize
    if columns:
        kernel = copy_rows_kernel(element, access_length(columns, x, out), columns % of_warp != 0, scatter)
        grid = -(-rows.size // ROW_WARPS), -(-columns // of_warp)
        launch(kernel, grid, (32, ROW_WARPS), x.view(element), rows, out.view(element))


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
    copy_rows(weight, input_ids, out, scatter=False)


def check_rows(op, name, rows, limit):
    """Raise ValueError if an index of a NumPy array is outside [0, limit)."""
    wrong = (rows < 0) | (rows >= limit)
    if wrong.any():
        raise ValueError(f"{op}: {name} must be in [0, {limit}), got {rows[wrong][0]}")


def embedding_backward(input_ids, dout, dweight, padding_idx=None):
    """dweight[input_ids[n]] += dout[n], the tokens of one id added up in their order.

    input_ids (N,) int32; dout (N, D) of a floating dtype; dweight (V, D) float32 is added to, but for the row
    padding_idx (torch.nn.Embedding's). Ids outside [0, V) raise ValueError on the numpy device and contribute
    nothing elsewhere. Raises ValueError for other shapes, dtypes or layouts.
    """
    tokens, columns = check("embedding_backward", "dout", dout, (None, None), FLOATS)
    check("embedding_backward", "input_ids", input_ids, (tokens,), I32)
    vocabulary, _ = check("embedding_backward", "dweight", dweight, (None, columns), F32)
    if tokens == 0:
        return
    order = device.xp().argsort(input_ids, kind="stable")
    if device.name() == "numpy":
        check_rows("embedding_backward", "input_ids", input_ids, vocabulary)
        if padding_idx is not None:
            order = order[input_ids[order] != padding_idx]
        sorted_ids = input_ids[order]
        starts = np.flatnonzero(np.diff(sorted_ids, prepend=-1))
        dweight[sorted_ids[starts]] += np.add.reduceat(dout[order], starts, axis=0)
        return
    if padding_idx is not None:
        input_ids = device.xp().where(input_ids == padding_idx, np.int32(-1), input_ids)
    segments, of_block = -(-tokens // SEGMENT), THREADS * VECTOR
    parts = device.xp().empty((segments, 2, columns), np.float32)
    constants = access_length(columns, dout, dweight), columns % of_block != 0
    column_blocks = -(-columns // of_block)
    arguments = input_ids, order, dout, dweight, parts
    launch(embedding_backward_kernel(*constants), (segments, column_blocks), THREADS, *arguments)
    launch(add_parts_kernel(*constants), (segments - 1, column_blocks), THREADS, input_ids, order, parts, dweight)


def embedding_ref(input_ids, weight):
    """out of embedding."""
    return weight[input_ids]


def embedding_backward_ref(input_ids, dout, vocabulary):
    """The gradient of the weight, (vocabulary, D), in dout's precision."""
    dweight = np.zeros((vocabulary, dout.shape[1]), dout.dtype)
    np.add.at(dweight, input_ids, dout)
    return dweight
