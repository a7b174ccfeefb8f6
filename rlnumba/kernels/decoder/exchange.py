"""The exchange of activations between the blocks of the persistent decoder kernel while it runs.

Every layer's outputs have words of their own in global memory, two 16-bit elements a word. A word that is not written
yet has all bits set, which no rounded pair of elements has: cvt makes another NaN. A reader loads words until they are
written. So a value is its own flag: no fence, no counter, no barrier, one round trip to L2.
H200, 132 blocks that each read 2 KB from all the others and write 16 bytes: 0.96 us a phase; with a counter 1.58.

Words that are not in L2 take as long as memory that is busy with weights: hence they are fetched at the start, and
weights are loaded as the first to leave L2.

There are two sets of words. A step writes one, and clears the other, which the step before has written; the end of the
kernel makes that visible. `state` says which one is next: (2,) int32, the set and how many blocks are done.
"""

import functools

import numpy as np

from rlnumba.kernels.ptx.instruction import SIMULATED, instruction

i32 = np.int32

# A word that is not written yet.
UNWRITTEN = i32(-1)
# Words of the smallest part of a line that L2 fetches.
SECTOR_WORDS = 8

if SIMULATED:
    from rlnumba.runtime.simulator import Condition, grid_state

    def _written(exchange):
        """The condition on which the simulator's threads wait for words to be written."""
        return grid_state(("exchange", exchange.ctypes.data), Condition)


@instruction("st.relaxed.gpu.global.b32 [$0], $1;", "er")
def exchange_store(exchange, index, word):
    """exchange[index] = word, for a block in one of exchange_load_function's."""
    exchange[index] = word
    _written(exchange).notify_all()


def _load_text(vectors):
    """PTX that loads vectors of four words each until all words are written."""
    words = 4 * vectors
    loads = [
        f"ld.relaxed.gpu.global.v4.b32 {{{', '.join(f'${4 * v + i}' for i in range(4))}}}, [${words + v}];"
        for v in range(vectors)
    ]
    largest = ["max.u32 largest, $0, $1;", *(f"max.u32 largest, largest, ${i};" for i in range(2, words))]
    # All lanes of the warp go on together: ptxas then knows that it has reconverged, and keeps descriptors of wgmma in
    # uniform registers.
    test = "setp.eq.u32 unwritten, largest, 0xffffffff; vote.sync.any.pred unwritten, unwritten, -1;"
    begin, end = "{ .reg .pred unwritten; .reg .b32 largest; AGAIN:", "@unwritten bra AGAIN; }"
    return " ".join([begin, *loads, *largest, test, end])


@functools.cache
def exchange_load_function(vectors):
    """load(exchange, index, exchange, index, ...): the four words from each index on, once they are all written.

    vectors: how many, up to eight: their loads are under way at the same time. Indices are multiples of four. All lanes
    of a warp call it.
    """

    @instruction(_load_text(vectors), "e" * vectors, "r" * (4 * vectors))
    def load(*pairs):
        words = []
        for exchange, index in zip(pairs[::2], pairs[1::2], strict=True):
            while (exchange[index : index + 4] == UNWRITTEN).any():
                _written(exchange).wait("exchange_load")
            words += exchange[index : index + 4].tolist()
        return tuple(map(i32, words))

    return load


@instruction("prefetch.global.L2::evict_last [$0];", "e")
def prefetch_l2(array, index):
    """Load the 32 bytes of array[index] to L2, as the last to leave it."""


load_1, load_2, load_4, load_8 = (exchange_load_function(vectors) for vectors in (1, 2, 4, 8))
