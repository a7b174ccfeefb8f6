"""Embedding lookup and its gradient.

    out[n] = weight[input_ids[n]]           dweight[v] += sum over n with input_ids[n] == v of dout[n]

input_ids (N,) int32; weight (V, D), out and dout (N, D) in float32, float16 or bfloat16; dweight (V, D) float32. The
sum runs in float32 over the tokens in their order; with atomic additions its last bits would change from run to run.
Two kernels: the first lists the tokens so that those of one id, its run, are neighbours, in their order. In the second
a block adds up a part of a run, PART tokens, and the block that finishes the last part of a longer run adds the parts
in order, so that an id that fills half of the batch does not serialise the rest. The list needs nothing but the ids:
`list_tokens` makes it during the forward's GEMMs, on a stream of its own: it is 9 us of latency and hardly any work.
"""

import contextlib
import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, I32, check
from rlnumba.kernels.ptx.warp import (
    access_length,
    add_gradient,
    ballot,
    compiler_barrier,
    device_function,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    match,
    shuffle_up,
    shuffle_xor,
    sync_warp,
    vector_access,
)
from rlnumba.runtime import device
from rlnumba.runtime.context import current
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import ALWAYS, launch, specialize, supports_pdl

i32, u32 = np.int32, np.uint32

# Threads of a block that copies rows, and rows of a thread where there are so many that all SMs are busy. H200, 16,384
# rows of 2 KiB: 20.0, 19.1, 19.2 and 19.5 us with 1, 2, 4 and 8.
COPY_THREADS = 256
MANY_ROWS, THREAD_ROWS = 4096, 2
# Threads of a block that lists tokens, and ids that each reads at a time, at most a bit of an int32 each.
LIST_THREADS, THREAD_IDS = 1024, 16
TILE = LIST_THREADS * THREAD_IDS
# Blocks that list tokens, at most, unless the vocabulary needs more: a block has a counter for each of its ids.
MOST_BUCKETS, BUCKET_TOKENS, MOST_COUNTERS = 128, 128, 4096
# Tokens of a part of a run. Fixes the order of the sum.
PART = 32
# Threads of a block that adds up, columns of each (16 bytes of float32), and resident blocks of an SM, which is full
# with 32 registers a thread. H200, 16,384 different ids: 45 us for this kernel, 48 with six blocks, 56 with four.
THREADS, VECTOR, RESIDENT = 256, 4, 8
# Rows of dout, and parts of a run, that are loaded before the first is added.
ROWS_AT_ONCE, PARTS_AT_ONCE = 2, 4


@specialize
def copy_rows_kernel(element, access, bounded, scatter, parts, many):
    """The kernel that copies rows of integers of type `element`: out[n] = x[rows[n]], or out[rows[n]] = x[n].

    bounded: the last block of a row has columns beyond the end. parts: blocks of a row. many: rows of a thread.
    """
    vector = 16 // np.dtype(element).itemsize
    ones, values_count = element(np.iinfo(element).max), vector * many
    load, store = vector_access(vector, access, bounded)

    @supports_pdl
    @cuda.jit(launch_bounds=(COPY_THREADS, 1))
    def copy_rows_kernel(x, rows, out):
        """A thread owns a vector of `many` rows, a block blockDim.x neighbouring ones of many * blockDim.y rows.

        A row number outside is skipped when scattering, and gathers a row of ones in every bit: NaN of any dtype.
        """
        top = cuda.blockIdx.x // parts * (many * cuda.blockDim.y) + cuda.threadIdx.y
        first = (cuda.blockIdx.x % parts * cuda.blockDim.x + cuda.threadIdx.x) * vector
        kept, row_of = cuda.local.array(values_count, element), cuda.local.array(many, np.int32)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        # Beyond the last row, and for a row number outside, another row is read instead, and not used.
        for j in range(many):
            row_of[j] = rows[min(top + j * cuda.blockDim.y, rows.shape[0] - 1)]
        for j in range(many):
            if scatter:
                load(x[min(top + j * cuda.blockDim.y, rows.shape[0] - 1)], first, kept, j * vector)
            else:
                inside = row_of[j] >= 0 and row_of[j] < x.shape[0]
                load(x[row_of[j] if inside else 0], first, kept, j * vector)
        compiler_barrier()
        for j in range(many):
            n = top + j * cuda.blockDim.y
            if n < rows.shape[0]:
                if not scatter:
                    if row_of[j] < 0 or row_of[j] >= x.shape[0]:
                        for i in range(vector):
                            kept[j * vector + i] = ones
                    store(out[n], first, kept, j * vector)
                elif row_of[j] >= 0 and row_of[j] < out.shape[0]:
                    store(out[row_of[j]], first, kept, j * vector)

    return copy_rows_kernel


@device_function
def warp_prefix_sum(value, sums):
    """(sum of the threads' int32 over the warps before this one, sum over all), the same in a warp's lanes.

    sums: shared int32 (32,), which may be reused after the next barrier.
    """
    for step in range(5):
        value = i32(value + shuffle_xor(value, 1 << step))
    lane, warp = i32(cuda.threadIdx.x) % i32(32), i32(cuda.threadIdx.x) // i32(32)
    if lane == 0:
        sums[warp] = value
    cuda.syncthreads()
    total = i32(sums[lane] if lane < LIST_THREADS // 32 else 0)
    before = i32(total if lane < warp else 0)
    for step in range(5):
        before = i32(before + shuffle_xor(before, 1 << step))
        total = i32(total + shuffle_xor(total, 1 << step))
    return before, total


# Steps of list_tokens_kernel. memory is its dynamic shared memory: `counters` counters, `counters` + 1 first positions
# of runs, and the members, which are the tokens of the bucket in a tile.


@functools.cache
def bucket_functions(buckets, access):
    """(find_members, count_members, counter_of) of list_tokens_kernel."""
    load, _ = vector_access(4, access, True)
    shift, bucket_mask = i32(buckets.bit_length() - 1), i32(buckets - 1)

    @device_function
    def find_members(input_ids, first, bucket):
        """(bits of this lane's ids in the bucket, how many are in lower ones); a lane has four ids every 128."""
        ids = cuda.local.array(THREAD_IDS, np.int32)
        left = i32(input_ids.shape[0] - first)
        bits, lower = u32(0), i32(0)
        for i in range(THREAD_IDS // 4):
            load(input_ids, first + 128 * i, ids, 4 * i)
        for i in range(THREAD_IDS):
            other = i32(ids[i] & bucket_mask if 128 * (i // 4) + i % 4 < left else buckets)
            if other == bucket:
                bits = u32(bits | u32(u32(1) << u32(i)))
            elif other < bucket:
                lower = i32(lower + i32(1))
        return bits, lower

    @device_function
    def counter_of(token_id, vocabulary, counters):
        """The counter of an id, within its bucket; the last one is that of all ids outside the vocabulary."""
        return i32(token_id >> shift if 0 <= token_id and token_id < vocabulary else counters - i32(1))

    @device_function
    def count_members(input_ids, lane_first, bucket, vocabulary, counters, memory):
        """Count the bucket's ids. Returns (bits of the last tile's, how many ids of this lane are in lower buckets)."""
        bits, lower, tile = u32(0), i32(0), i32(0)
        while tile < i32(input_ids.shape[0]):
            bits, found = find_members(input_ids, tile + lane_first, bucket)
            lower = i32(lower + found)
            left = bits
            while left != 0:
                i = i32(cuda.ffs(left)) - i32(1)
                left = u32(left & u32(left - u32(1)))
                token_id = input_ids[tile + lane_first + i32(128) * (i >> i32(2)) + (i & i32(3))]
                cuda.atomic.add(memory, counter_of(token_id, vocabulary, counters), i32(1))
            tile = i32(tile + i32(TILE))
        return bits, lower

    return find_members, count_members, counter_of


@device_function
def counts_to_positions(memory, counters, lower, sums):
    """Counters become the next position of their id, in a copy the first; lower: how many ids lower buckets have."""
    thread, starts = i32(cuda.threadIdx.x), counters
    share = i32((counters + i32(LIST_THREADS - 1)) // i32(LIST_THREADS))
    first, last = thread * share, min((thread + i32(1)) * share, counters)
    count = i32(0)
    for i in range(first, last):
        count = i32(count + memory[i])
    up_to = count
    for step in range(5):
        below = shuffle_up(up_to, 1 << step)
        if thread % i32(32) >= 1 << step:
            up_to = i32(up_to + below)
    before, _ = warp_prefix_sum(count, sums)
    position = i32(lower + before + up_to - count)
    for i in range(first, last):
        count = memory[i]
        memory[i], memory[starts + i32(i)] = position, position
        position = i32(position + count)
        if i == counters - 1:
            memory[starts + counters] = position


@device_function
def collect_members(memory, members_at, bits, lane_first, lane, sums):
    """Write the bucket's tokens of a tile, as offsets in it, to memory[members_at:] in their order; return how many."""
    # The barrier in it also ends the work on the counters.
    member, count = warp_prefix_sum(i32(cuda.popc(bits)), sums)
    for i in range(THREAD_IDS // 4):
        at = member
        for j in range(4):
            votes = ballot(u32(bits >> u32(4 * i + j)) & u32(1) != u32(0))
            at = i32(at + i32(cuda.popc(votes & ~(i32(-1) << lane))))
            member = i32(member + i32(cuda.popc(votes)))
        for j in range(4):
            if u32(bits >> u32(4 * i + j)) & u32(1) != u32(0):
                memory[members_at + at] = lane_first + i32(128 * i + j)
                at = i32(at + i32(1))
    cuda.syncthreads()
    return count


@specialize
def list_tokens_kernel(buckets, access):
    """The kernel for a power of two of buckets, `access` ids a load."""
    _, store_entry = vector_access(4, 4)
    find_members, count_members, counter_of = bucket_functions(buckets, access)

    @supports_pdl
    @cuda.jit(launch_bounds=(LIST_THREADS, 1))
    def list_tokens_kernel(input_ids, vocabulary, padding_idx, counters, entries, order, arrived):
        """order: the tokens by (id modulo buckets, id, token), so that those of an id, its run, are neighbours.

        entries[token] = position in this list, id (-1 for what adds to no row), position in its run, length of its run;
        arrived = 0. A block owns the ids of a bucket. It counts them, and the ids of lower buckets, which gives each id
        its first position; then it collects its tokens in shared memory, a tile of all tokens at a time, and writes
        them to their positions, 32 in a warp, the warps in order.
        """
        memory, sums = cuda.shared.array(0, np.int32), cuda.shared.array((3, 32), np.int32)
        entry = cuda.local.array(4, np.int32)
        thread, bucket = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)
        lane, warp = thread % i32(32), thread // i32(32)
        vocabulary, padding_idx, counters = i32(vocabulary), i32(padding_idx), i32(counters)
        tokens = i32(input_ids.shape[0])
        starts, members_at = counters, i32(counters + counters + i32(1))
        lane_first = warp * i32(32 * THREAD_IDS) + lane * i32(4)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        for i in range(thread, counters, LIST_THREADS):
            memory[i] = i32(0)
        for i in range(bucket * i32(LIST_THREADS) + thread, arrived.shape[0], cuda.gridDim.x * LIST_THREADS):
            arrived[i] = i32(0)
        cuda.syncthreads()
        bits, lower = count_members(input_ids, lane_first, bucket, vocabulary, counters, memory)
        # The barrier in it also ends the counting.
        _, lower = warp_prefix_sum(lower, sums[0])
        counts_to_positions(memory, counters, lower, sums[1])
        tile = i32(0)
        while tile < tokens:
            if tokens > TILE:
                bits, _ = find_members(input_ids, tile + lane_first, bucket)
            count = collect_members(memory, members_at, bits, lane_first, lane, sums[2])
            base = i32(0)
            while base < count:
                exists = base + thread < count
                token = tile + memory[members_at + min(base + thread, count - i32(1))]
                token_id = input_ids[token]
                counter = counter_of(token_id, vocabulary, counters)
                # Equal ids of 32 tokens follow each other.
                alike = match(i32(counter if exists else -1))
                rank, position = i32(cuda.popc(alike & ~(i32(-1) << lane))), i32(0)
                for writing in range(min(i32(LIST_THREADS // 32), (count - base + i32(31)) // i32(32))):
                    if warp == writing:
                        position = i32(memory[counter] + rank)
                        sync_warp()
                        if exists and rank == 0:
                            memory[counter] = i32(position + i32(cuda.popc(alike)))
                    cuda.syncthreads()
                if exists:
                    adds = counter < counters - i32(1) and token_id != padding_idx
                    start = memory[starts + counter]
                    entry[0], entry[1], entry[2] = position, i32(token_id if adds else -1), i32(position - start)
                    entry[3] = i32(memory[starts + counter + i32(1)] - start)
                    order[position] = token
                    store_entry(entries[token], 0, entry, 0)
                base = i32(base + i32(LIST_THREADS))
            cuda.syncthreads()
            tile = i32(tile + i32(TILE))

    return list_tokens_kernel


@specialize
def embedding_backward_kernel(access, bounded):
    """The kernel that moves `access` columns at a time; bounded: the last block has columns beyond the end."""
    load, store = vector_access(VECTOR, access, bounded)
    load_entry, _ = vector_access(4, 4)
    rows_count, parts_count = ROWS_AT_ONCE * VECTOR, PARTS_AT_ONCE * VECTOR

    # Narrow accesses need more registers for addresses, and are slow anyway.
    @supports_pdl
    @cuda.jit(launch_bounds=(THREADS, RESIDENT if access == VECTOR else 1))
    def embedding_backward_kernel(entries, order, dout, dweight, parts, arrived):
        """A block owns THREADS * VECTOR columns of the part of a run that begins with a token.

        A part is PART tokens of a run, the last one fewer. If it is all of the run, its sum is added to dweight. Else
        it goes to parts (positions / PART, 2, D): [position / PART, 1] if it is the run's first part, else [.., 0]. The
        last block to finish a part of a run (arrived counts them) adds them up in order.
        """
        number = cuda.shared.array(1, np.int32)
        entry = cuda.local.array(4, np.int32)
        total, before = cuda.local.array(VECTOR, np.float32), cuda.local.array(VECTOR, np.float32)
        rows, following = cuda.local.array(rows_count, np.float32), cuda.local.array(parts_count, np.float32)
        griddepcontrol_wait()
        token = cuda.blockIdx.x
        first = (cuda.blockIdx.y * THREADS + cuda.threadIdx.x) * VECTOR
        load_entry(entries[token], 0, entry, 0)
        position, token_id, index, run = entry[0], entry[1], entry[2], entry[3]
        if token_id < 0 or index % PART > 0:
            return
        load(dout[token], first, total, 0)
        if run == 1:
            # A path of its own: the general one below needs more registers.
            load(dweight[token_id], first, before, 0)
            for i in range(VECTOR):
                total[i] = add_gradient(before[i], total[i])
            store(dweight[token_id], first, total, 0)
            return
        length = min(PART, run - index)
        for top in range(1, length, ROWS_AT_ONCE):
            for j in range(ROWS_AT_ONCE):
                load(dout[order[position + min(top + j, length - 1)]], first, rows, j * VECTOR)
            compiler_barrier()
            for j in range(ROWS_AT_ONCE):
                if top + j < length:
                    for i in range(VECTOR):
                        total[i] += rows[j * VECTOR + i]
        if run > PART:
            part, start, many = position // PART, (position - index) // PART, (run + PART - 1) // PART
            store(parts[part, 1 if index == 0 else 0], first, total, 0)
            cuda.threadfence()
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                number[0] = cuda.atomic.add(arrived, start * cuda.gridDim.y + cuda.blockIdx.y, i32(1))
            cuda.syncthreads()
            if number[0] < many - 1:
                return
            cuda.threadfence()
            load(parts[start, 1], first, total, 0)
            for top in range(1, many, PARTS_AT_ONCE):
                for j in range(PARTS_AT_ONCE):
                    load(parts[start + min(top + j, many - 1), 0], first, following, j * VECTOR)
                compiler_barrier()
                for j in range(PARTS_AT_ONCE):
                    if top + j < many:
                        for i in range(VECTOR):
                            total[i] += following[j * VECTOR + i]
        load(dweight[token_id], first, before, 0)
        for i in range(VECTOR):
            total[i] = add_gradient(before[i], total[i])
        store(dweight[token_id], first, total, 0)

    return embedding_backward_kernel


def copy_rows(x, rows, out, scatter):
    """out[n] = x[rows[n]], or with scatter out[rows[n]] = x[n], bit for bit; the arrays are checked."""
    element, columns = np.uint32 if x.itemsize == 4 else np.uint16, x.shape[1]
    if not columns:
        return
    vectors = -(-columns * x.itemsize // 16)
    threads = min(-(-vectors // 32) * 32, COPY_THREADS)
    lines, parts = COPY_THREADS // threads, -(-vectors // threads)
    bounded = columns * x.itemsize % (16 * threads) != 0
    many = THREAD_ROWS if rows.size >= MANY_ROWS else 1
    kernel = copy_rows_kernel(element, access_length(columns, x, out), bounded, scatter, parts, many)
    blocks = -(-rows.size // (many * lines)) * parts
    launch(kernel, blocks, (threads, lines), x.view(element), rows, out.view(element), pdl=ALWAYS)


def gather(op, x_name, x, rows_name, rows, out):
    """out[n] = x[rows[n]], bit for bit: embedding and gather_rows, each with its own names in errors."""
    limit, columns = check(op, x_name, x, (None, None), FLOATS)
    (count,) = check(op, rows_name, rows, (None,), I32)
    check(op, "out", out, (count, columns), (x.dtype,))
    if device.name() == "cpu":
        check_rows(op, rows_name, rows, limit)
        np.take(x, rows, axis=0, out=out, mode="clip")
    else:
        copy_rows(x, rows, out, scatter=False)


def embedding(input_ids, weight, out):
    """out[n] = weight[input_ids[n]].

    input_ids (N,) int32 in [0, V); weight (V, D) of a floating dtype; out (N, D) of the same is written. An id outside
    [0, V) raises ValueError on the cpu device; kernels write a row of NaN. Raises ValueError for other arrays.
    """
    gather("embedding", "weight", weight, "input_ids", input_ids, out)


def check_rows(op, name, rows, limit):
    """Raise ValueError if an index of a NumPy array is outside [0, limit)."""
    wrong = (rows < 0) | (rows >= limit)
    if wrong.any():
        raise ValueError(f"{op}: {name} must be in [0, {limit}), got {rows[wrong][0]}")


class TokenList(NamedTuple):
    """The tokens of a batch as list_tokens_kernel lists them, for one gradient.

    shape: of the gradient, (V, D); ignored: the id that adds to no row, or -1; ready: the event after it, or None.
    """

    entries: object
    order: object
    arrived: object
    shape: tuple
    ignored: int
    ready: object = None


def _list_stream():
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def list_tokens(input_ids, shape, padding_idx=None):
    """The TokenList for embedding_backward with these ids, a dweight of `shape` (V, D) and padding_idx.

    input_ids (N,) int32. On a GPU it is made on a stream of its own, after what is queued on the current one. None
    on the cpu device, which needs none, and without tokens.
    """
    (tokens,) = check("list_tokens", "input_ids", input_ids, (None,), I32)
    if device.name() == "cpu" or tokens == 0:
        return None
    if device.name() != "cuda":
        return _list(input_ids, shape, padding_idx)
    import cupy

    stream = current().own(_list_stream)
    current().wait_event(stream, cupy.cuda.get_current_stream().record())
    return _list(input_ids, shape, padding_idx, stream)._replace(ready=stream.record())


def _list(input_ids, shape, padding_idx, stream=None):
    """A TokenList with arrays of the current stream, which a kernel on `stream` fills."""
    tokens, (vocabulary, columns), xp = input_ids.size, shape, device.xp()
    arrived = xp.empty(-(-tokens // PART) * -(-columns // (THREADS * VECTOR)), np.int32)
    entries, order = xp.empty((tokens, 4), np.int32), xp.empty(tokens, np.int32)
    ignored = -1 if padding_idx is None else padding_idx
    buckets = 1
    while (buckets < MOST_BUCKETS and buckets * BUCKET_TOKENS < tokens) or buckets * MOST_COUNTERS < vocabulary:
        buckets *= 2
    counters = -(-vocabulary // buckets) + 1
    kernel, shared = list_tokens_kernel(buckets, access_length(tokens, input_ids)), 4 * (2 * counters + 1 + TILE)
    arguments = input_ids, vocabulary, ignored, counters, entries, order, arrived
    with stream or contextlib.nullcontext():
        launch(kernel, buckets, LIST_THREADS, *arguments, shared=shared, pdl=ALWAYS)
    return TokenList(entries, order, arrived, tuple(shape), ignored)


def embedding_backward(input_ids, dout, dweight, padding_idx=None, listed=None):
    """dweight[input_ids[n]] += dout[n], the tokens of one id added up in their order.

    input_ids (N,) int32; dout (N, D) of a floating dtype; dweight (V, D) float32 is added to, but for row padding_idx.
    listed: the TokenList of the same, to be used once. Ids outside [0, V) raise ValueError on the cpu device and
    contribute nothing elsewhere. Raises ValueError for other arrays.
    """
    tokens, columns = check("embedding_backward", "dout", dout, (None, None), FLOATS)
    check("embedding_backward", "input_ids", input_ids, (tokens,), I32)
    vocabulary, _ = check("embedding_backward", "dweight", dweight, (None, columns), F32)
    if tokens == 0:
        return
    if device.name() == "cpu":
        check_rows("embedding_backward", "input_ids", input_ids, vocabulary)
        order = np.argsort(input_ids, kind="stable")
        if padding_idx is not None:
            order = order[input_ids[order] != padding_idx]
        sorted_ids = input_ids[order]
        starts = np.flatnonzero(np.diff(sorted_ids, prepend=-1))
        dweight[sorted_ids[starts]] += np.add.reduceat(dout[order], starts, axis=0)
        return
    if listed is None:
        listed = _list(input_ids, dweight.shape, padding_idx)
    found = len(listed.entries), listed.shape, listed.ignored
    wanted = tokens, dweight.shape, -1 if padding_idx is None else padding_idx
    if found != wanted:
        raise ValueError(f"embedding_backward: listed must be for (tokens, shape, padding) {wanted}, got {found}")
    if listed.ready is not None:
        import cupy

        current().wait_event(cupy.cuda.get_current_stream(), listed.ready)
    parts = device.xp().empty((-(-tokens // PART), 2, columns), np.float32)
    kernel = embedding_backward_kernel(access_length(columns, dout, dweight), columns % (THREADS * VECTOR) != 0)
    grid = tokens, -(-columns // (THREADS * VECTOR))
    launch(kernel, grid, THREADS, listed.entries, listed.order, dout, dweight, parts, listed.arrived, pdl=ALWAYS)


def embedding_ref(input_ids, weight):
    """out of embedding."""
    return weight[input_ids]


def embedding_backward_ref(input_ids, dout, vocabulary):
    """The gradient of the weight, (vocabulary, D), in dout's precision."""
    dweight = np.zeros((vocabulary, dout.shape[1]), dout.dtype)
    np.add.at(dweight, input_ids, dout)
    return dweight
