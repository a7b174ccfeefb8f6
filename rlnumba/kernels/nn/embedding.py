"""Embedding lookup and its gradient.

    out[n] = weight[input_ids[n]]           dweight[v] += sum over n with input_ids[n] == v of dout[n]

input_ids (N,) int32; weight (V, D), out and dout (N, D) in float32, float16 or bfloat16; dweight (V, D) float32. The
sum runs in float32 over the tokens in their order. Two kernels: the first lists the tokens so that those of one id, its
run, stand together, in their order; in the second a block adds up a part of a run, PART tokens, and the last block to
come with a part of a longer run adds these up in their order: an id that fills half of the batch does not hold up the
rest. With atomic additions instead, the sum's order, and so its last bits, would change from run to run. The list needs
nothing but the ids: `list_tokens` makes it ahead, beside the forward's products, since it takes 9 us of waiting and
hardly any memory or arithmetic.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, I32, check
from rlnumba.kernels.ptx.warp import (
    access_length,
    ballot,
    compiler_barrier,
    device_function,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    match,
    shuffle,
    shuffle_up,
    shuffle_xor,
    sync_warp,
    vector_access,
)
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import ALWAYS, launch, specialize

i32, u32 = np.int32, np.uint32

# Threads of a block that copies rows, and rows of a thread where there are so many that all SMs are busy. H200, 16,384
# rows of 2 KiB: 20.0, 19.1, 19.2 and 19.5 us with 1, 2, 4 and 8.
COPYING_THREADS = 256
MANY_ROWS, ROWS_OF_COPIER = 4096, 2
# Threads of a block that lists tokens, and ids that each reads at a time, at most a bit of an int32 each.
LISTERS = 1024
IDS_OF_LISTER = 16
TILE = LISTERS * IDS_OF_LISTER
# Blocks that list tokens, at most, unless the vocabulary needs more: a block has a counter for each of its ids, and at
# most MOST_COUNTERS.
MOST_BUCKETS = 128
TOKENS_OF_BUCKET = 128
MOST_COUNTERS = 4096
# Tokens of a part of a run. Part of the arithmetic.
PART = 32
# Threads of a block that adds up, and columns of each: 16 bytes of float32. Blocks that an SM has at a time: with 32
# registers a thread, an SM is full. H200, 16,384 different ids: 45 us for this kernel, 48 with six, 56 with four.
THREADS = 256
VECTOR = 4
RESIDENT = 8
# Rows of dout, and parts of a run, that are loaded before the first is added.
ROWS_AT_ONCE = 2
PARTS_AT_ONCE = 4


@specialize
def copy_rows_kernel(element, access, bounded, scatter, parts, many):
    """The kernel that copies rows of integers of type `element`: out[n] = x[rows[n]], or out[rows[n]] = x[n].

    bounded: the last block of a row has columns beyond the end. parts: blocks of a row. many: rows of a thread, whose
    loads are under way together.
    """
    vector = 16 // np.dtype(element).itemsize
    ones, held = element(np.iinfo(element).max), vector * many
    load, store = vector_access(vector, access, bounded)

    @cuda.jit(launch_bounds=(COPYING_THREADS, 1))
    def copy_rows_kernel(x, rows, out):
        """A thread owns a vector of `many` rows, a block blockDim.x neighbouring ones of many * blockDim.y rows.

        A row number outside the array is skipped when scattering; when gathering it gives a row of ones in
        every bit: NaN, whatever the floating dtype.
        """
        top = cuda.blockIdx.x // parts * (many * cuda.blockDim.y) + cuda.threadIdx.y
        first = (cuda.blockIdx.x % parts * cuda.blockDim.x + cuda.threadIdx.x) * vector
        kept, row_of = cuda.local.array(held, element), cuda.local.array(many, np.int32)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        # Beyond the last row, and for a row number outside, another row is read in its place, and not used.
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
def sum_of_warps(value, sums):
    """(sum of value over the warps before this one, sum over all), each warp's value being in all of its lanes.

    For blocks of LISTERS threads. value: int32; sums: shared int32 (32,), free again after the next barrier.
    """
    lane, warp = i32(cuda.threadIdx.x) % i32(32), i32(cuda.threadIdx.x) // i32(32)
    if lane == 0:
        sums[warp] = value
    cuda.syncthreads()
    total = i32(sums[lane] if lane < LISTERS // 32 else 0)
    before = i32(total if lane < warp else 0)
    for step in range(5):
        before = i32(before + shuffle_xor(before, 1 << step))
        total = i32(total + shuffle_xor(total, 1 << step))
    return before, total


@specialize
def list_tokens_kernel(buckets, access):
    """The kernel for a power of two of buckets, which loads `access` ids at a time."""
    load, _ = vector_access(4, access, True)
    _, store_entry = vector_access(4, 4)
    shift, of_bucket = i32(buckets.bit_length() - 1), i32(buckets - 1)
    of_warp, loads = 32 * IDS_OF_LISTER, IDS_OF_LISTER // 4

    @device_function
    def find(input_ids, first, bucket):
        """(bits of this lane's ids from `first` on that are in the bucket, how many are in lower ones).

        A lane has four ids, then the four 128 further on, and so on.
        """
        ids = cuda.local.array(IDS_OF_LISTER, np.int32)
        left = i32(input_ids.shape[0] - first)
        mine, lower = u32(0), i32(0)
        for i in range(loads):
            load(input_ids, first + 128 * i, ids, 4 * i)
        for i in range(IDS_OF_LISTER):
            other = i32(ids[i] & of_bucket if 128 * (i // 4) + i % 4 < left else buckets)
            if other == bucket:
                mine = u32(mine | u32(u32(1) << u32(i)))
            if other < bucket:
                lower = i32(lower + i32(1))
        return mine, lower

    @device_function
    def counter_of(token_id, vocabulary, counters):
        """The counter of an id, within its bucket; the last one is that of all ids outside the vocabulary."""
        return i32(token_id >> shift if 0 <= token_id and token_id < vocabulary else counters - i32(1))

    @cuda.jit(launch_bounds=(LISTERS, 1))
    def list_tokens_kernel(input_ids, vocabulary, padding_idx, counters, entries, order, arrived):
        """order: the tokens by (id modulo buckets, id, token), so that those of an id, its run, are neighbours.

        entries[token] = place in this list, id (-1 for what adds to no row), place in its run, length of its run.
        arrived = 0. A block owns the ids of a bucket. It counts them, and the ids of lower buckets, which gives each
        id its place; then it collects its tokens in shared memory, a tile of all tokens at a time, and puts them in
        their places, 32 in a warp, the warps in their order.
        Dynamic shared memory: twice `counters` + 1 and TILE int32.
        """
        memory = cuda.shared.array(0, np.int32)
        sums = cuda.shared.array((3, 32), np.int32)
        entry = cuda.local.array(4, np.int32)
        thread, bucket = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)
        lane, warp = thread % i32(32), thread // i32(32)
        vocabulary, padding_idx, counters = i32(vocabulary), i32(padding_idx), i32(counters)
        tokens = i32(input_ids.shape[0])
        # Where the runs begin, and the tokens of the bucket.
        starts, members_at = counters, i32(counters + counters + i32(1))
        first_of_lane = warp * i32(of_warp) + lane * i32(4)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        for i in range(thread, counters, LISTERS):
            memory[i] = i32(0)
        for i in range(bucket * i32(LISTERS) + thread, arrived.shape[0], cuda.gridDim.x * LISTERS):
            arrived[i] = i32(0)
        cuda.syncthreads()
        mine, lower, top = u32(0), i32(0), i32(0)
        while top < tokens:
            mine, found = find(input_ids, top + first_of_lane, bucket)
            lower = i32(lower + found)
            left = mine
            while left != 0:
                i = i32(cuda.ffs(left)) - i32(1)
                left = u32(left & u32(left - u32(1)))
                token_id = input_ids[top + first_of_lane + i32(128) * (i >> i32(2)) + (i & i32(3))]
                cuda.atomic.add(memory, counter_of(token_id, vocabulary, counters), i32(1))
            top = i32(top + i32(TILE))
        for step in range(5):
            lower = i32(lower + shuffle_xor(lower, 1 << step))
        # The barrier in it also ends the counting.
        _, lower = sum_of_warps(lower, sums[0])
        share = i32((counters + i32(LISTERS - 1)) // i32(LISTERS))
        first, last = thread * share, min((thread + i32(1)) * share, counters)
        count = i32(0)
        for i in range(first, last):
            count = i32(count + memory[i])
        up_to = count
        for step in range(5):
            below = shuffle_up(up_to, 1 << step)
            if lane >= 1 << step:
                up_to = i32(up_to + below)
        before, _ = sum_of_warps(shuffle(up_to, 31), sums[1])
        # A counter becomes the place of the next token with its id.
        place = i32(lower + before + up_to - count)
        for i in range(first, last):
            count = memory[i]
            memory[i], memory[starts + i32(i)] = place, place
            place = i32(place + count)
            if i == counters - 1:
                memory[starts + counters] = place
        top = i32(0)
        while top < tokens:
            if tokens > TILE:
                mine, _ = find(input_ids, top + first_of_lane, bucket)
            group_sizes = i32(cuda.popc(mine))
            for step in range(5):
                group_sizes = i32(group_sizes + shuffle_xor(group_sizes, 1 << step))
            # The barrier in it also ends the work on the counters.
            member, group_sizes = sum_of_warps(group_sizes, sums[2])
            for i in range(loads):
                place = member
                for j in range(4):
                    votes = ballot(u32(mine >> u32(4 * i + j)) & u32(1) != u32(0))
                    place = i32(place + i32(cuda.popc(votes & ~(i32(-1) << lane))))
                    member = i32(member + i32(cuda.popc(votes)))
                for j in range(4):
                    if u32(mine >> u32(4 * i + j)) & u32(1) != u32(0):
                        memory[members_at + place] = first_of_lane + i32(128 * i + j)
                        place = i32(place + i32(1))
            cuda.syncthreads()
            base = i32(0)
            while base < group_sizes:
                exists = base + thread < group_sizes
                token = top + memory[members_at + min(base + thread, group_sizes - i32(1))]
                token_id = input_ids[token]
                counter = counter_of(token_id, vocabulary, counters)
                # Equal ids of 32 tokens follow each other.
                alike = match(i32(counter if exists else -1))
                rank, place = i32(cuda.popc(alike & ~(i32(-1) << lane))), i32(0)
                for turn in range(min(i32(LISTERS // 32), (group_sizes - base + i32(31)) // i32(32))):
                    if warp == turn:
                        place = i32(memory[counter] + rank)
                        sync_warp()
                        if exists and rank == 0:
                            memory[counter] = i32(place + i32(cuda.popc(alike)))
                    cuda.syncthreads()
                if exists:
                    counts = counter < counters - i32(1) and token_id != padding_idx
                    start = memory[starts + counter]
                    entry[0], entry[1], entry[2] = place, i32(token_id if counts else -1), i32(place - start)
                    entry[3] = i32(memory[starts + counter + i32(1)] - start)
                    order[place] = token
                    store_entry(entries[token], 0, entry, 0)
                base = i32(base + i32(LISTERS))
            cuda.syncthreads()
            top = i32(top + i32(TILE))

    return list_tokens_kernel


@specialize
def embedding_backward_kernel(access, bounded):
    """The kernel that moves `access` columns at a time; bounded: the last block has columns beyond the end."""
    load, store = vector_access(VECTOR, access, bounded)
    load_entry, _ = vector_access(4, 4)
    rows_count, parts_count = ROWS_AT_ONCE * VECTOR, PARTS_AT_ONCE * VECTOR
    # Narrow accesses need more registers for addresses, and are slow anyway.
    resident = RESIDENT if access == VECTOR else 1

    @cuda.jit(launch_bounds=(THREADS, resident))
    def embedding_backward_kernel(entries, order, dout, dweight, parts, arrived):
        """A block owns THREADS * VECTOR columns of a token, with which a part of a run begins, and of this part.

        A part is PART tokens of a run, the last one fewer. If it is all of the run, its sum is added to dweight. Else
        it goes to parts (places / PART, 2, D): [place / PART, 1] if it is the run's first part, else [.., 0]. The
        last block to come with a part of a run (arrived counts them) adds them up in their order.
        """
        number = cuda.shared.array(1, np.int32)
        entry = cuda.local.array(4, np.int32)
        total = cuda.local.array(VECTOR, np.float32)
        rows = cuda.local.array(rows_count, np.float32)
        following = cuda.local.array(parts_count, np.float32)
        before = cuda.local.array(VECTOR, np.float32)
        griddepcontrol_wait()
        token = cuda.blockIdx.x
        first = (cuda.blockIdx.y * THREADS + cuda.threadIdx.x) * VECTOR
        load_entry(entries[token], 0, entry, 0)
        place, token_id, index, run = entry[0], entry[1], entry[2], entry[3]
        if token_id < 0 or index % PART > 0:
            return
        load(dout[token], first, total, 0)
        if run == 1:
            # The rest below would do, with more registers.
            load(dweight[token_id], first, before, 0)
            for i in range(VECTOR):
                total[i] += before[i]
            store(dweight[token_id], first, total, 0)
            return
        length = min(PART, run - index)
        for top in range(1, length, ROWS_AT_ONCE):
            for j in range(ROWS_AT_ONCE):
                load(dout[order[place + min(top + j, length - 1)]], first, rows, j * VECTOR)
            compiler_barrier()
            for j in range(ROWS_AT_ONCE):
                if top + j < length:
                    for i in range(VECTOR):
                        total[i] += rows[j * VECTOR + i]
        if run > PART:
            part, start, many = place // PART, (place - index) // PART, (run + PART - 1) // PART
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
            total[i] += before[i]
        store(dweight[token_id], first, total, 0)

    return embedding_backward_kernel


def copy_rows(x, rows, out, scatter):
    """out[n] = x[rows[n]], or with scatter out[rows[n]] = x[n], bit for bit; the arrays are checked."""
    element, columns = np.uint32 if x.itemsize == 4 else np.uint16, x.shape[1]
    if not columns:
        return
    vectors = -(-columns * x.itemsize // 16)
    threads = min(-(-vectors // 32) * 32, COPYING_THREADS)
    lines, parts = COPYING_THREADS // threads, -(-vectors // threads)
    bounded = columns * x.itemsize % (16 * threads) != 0
    many = ROWS_OF_COPIER if rows.size >= MANY_ROWS else 1
    kernel = copy_rows_kernel(element, access_length(columns, x, out), bounded, scatter, parts, many)
    blocks, arguments = -(-rows.size // (many * lines)) * parts, (x.view(element), rows, out.view(element))
    launch(kernel, blocks, (threads, lines), *arguments, pdl=ALWAYS)


def embedding(input_ids, weight, out):
    """out[n] = weight[input_ids[n]].

    input_ids (N,) int32 in [0, V); weight (V, D) of a floating dtype; out (N, D) of the same is written. An
    id outside [0, V) raises ValueError on the numpy device; kernels, which cannot raise, write a row of NaN.
    Raises ValueError for other shapes, dtypes or layouts.
    """
    vocabulary, columns = check("embedding", "weight", weight, (None, None), FLOATS)
    (tokens,) = check("embedding", "input_ids", input_ids, (None,), I32)
    check("embedding", "out", out, (tokens, columns), (weight.dtype,))
    if device.name() == "cpu":
        check_rows("embedding", "input_ids", input_ids, vocabulary)
        np.take(weight, input_ids, axis=0, out=out, mode="clip")
        return
    copy_rows(weight, input_ids, out, scatter=False)


def check_rows(op, name, rows, limit):
    """Raise ValueError if an index of a NumPy array is outside [0, limit)."""
    wrong = (rows < 0) | (rows >= limit)
    if wrong.any():
        raise ValueError(f"{op}: {name} must be in [0, {limit}), got {rows[wrong][0]}")


def buckets_of(tokens, vocabulary):
    """How many blocks list the tokens, a power of two."""
    buckets = 1
    while (buckets < MOST_BUCKETS and buckets * TOKENS_OF_BUCKET < tokens) or buckets * MOST_COUNTERS < vocabulary:
        buckets *= 2
    return buckets


class TokenList(NamedTuple):
    """What list_tokens_kernel found of a batch, for one gradient.

    shape: of the gradient, (V, D); ignored: the id that adds to no row, or -1; ready: the event after it, or None.
    """

    entries: object
    order: object
    arrived: object
    shape: tuple
    ignored: int
    ready: object = None


@functools.cache
def _stream_beside():
    """A stream for work that nobody waits for at once."""
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def list_tokens(input_ids, shape, padding_idx=None):
    """The TokenList for embedding_backward with these ids, a dweight of `shape` (V, D) and padding_idx.

    input_ids (N,) int32. On a GPU it is made on a stream of its own, after what the current one holds. None on the
    numpy device, which needs none, and without tokens.
    """
    (tokens,) = check("list_tokens", "input_ids", input_ids, (None,), I32)
    if device.name() == "cpu" or tokens == 0:
        return None
    listed = _new_list(tokens, shape, padding_idx)
    if device.name() == "sim":
        _list(listed, input_ids)
        return listed
    import cupy

    beside = _stream_beside()
    beside.wait_event(cupy.cuda.get_current_stream().record())
    with beside:
        _list(listed, input_ids)
        return listed._replace(ready=beside.record())


def _new_list(tokens, shape, padding_idx):
    """A TokenList that is still to be filled."""
    arrived = -(-tokens // PART) * -(-shape[1] // (THREADS * VECTOR))
    arrays = (device.xp().empty(size, np.int32) for size in ((tokens, 4), tokens, arrived))
    return TokenList(*arrays, tuple(shape), -1 if padding_idx is None else padding_idx)


def _list(listed, input_ids):
    """Fill the arrays of a TokenList."""
    vocabulary = listed.shape[0]
    buckets = buckets_of(input_ids.size, vocabulary)
    counters = -(-vocabulary // buckets) + 1
    kernel = list_tokens_kernel(buckets, access_length(input_ids.size, input_ids))
    arguments = input_ids, vocabulary, listed.ignored, counters, listed.entries, listed.order, listed.arrived
    launch(kernel, buckets, LISTERS, *arguments, shared=4 * (2 * counters + 1 + TILE), pdl=ALWAYS)


def embedding_backward(input_ids, dout, dweight, padding_idx=None, listed=None):
    """dweight[input_ids[n]] += dout[n], the tokens of one id added up in their order.

    input_ids (N,) int32; dout (N, D) of a floating dtype; dweight (V, D) float32 is added to, but for the row
    padding_idx (torch.nn.Embedding's). listed: what list_tokens gave for the same, which is used up. Ids outside [0, V)
    raise ValueError on the numpy device and contribute nothing elsewhere. Raises ValueError for other shapes, dtypes or
    layouts.
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
        listed = _new_list(tokens, dweight.shape, padding_idx)
        _list(listed, input_ids)
    found = len(listed.entries), listed.shape, listed.ignored
    wanted = tokens, dweight.shape, -1 if padding_idx is None else padding_idx
    if found != wanted:
        raise ValueError(f"embedding_backward: listed must be for (tokens, shape, padding) {wanted}, got {found}")
    if listed.ready is not None:
        import cupy

        cupy.cuda.get_current_stream().wait_event(listed.ready)
    of_block = THREADS * VECTOR
    parts = device.xp().empty((-(-tokens // PART), 2, columns), np.float32)
    kernel = embedding_backward_kernel(access_length(columns, dout, dweight), columns % of_block != 0)
    arguments = listed.entries, listed.order, dout, dweight, parts, listed.arrived
    launch(kernel, (tokens, -(-columns // of_block)), THREADS, *arguments, pdl=ALWAYS)


def embedding_ref(input_ids, weight):
    """out of embedding."""
    return weight[input_ids]


def embedding_backward_ref(input_ids, dout, vocabulary):
    """The gradient of the weight, (vocabulary, D), in dout's precision."""
    dweight = np.zeros((vocabulary, dout.shape[1]), dout.dtype)
    np.add.at(dweight, input_ids, dout)
    return dweight
