"""Write the keys and values of new tokens into a block cache.

    k_cache[slot // block_size, slot % block_size] = k[n]      slot = slot_mapping[n]; -1: the token is skipped

k, v (N, HK, E); k_cache, v_cache (blocks, block_size, HK, E) of the same floating dtype: a copy of bits. A rollout
does not make k and v first: qkv.qkv_split_to_cache writes them where this would copy them.
"""

import numpy as np

from rlnumba.kernels.checks import FLOATS, I32, check
from rlnumba.kernels.ptx.warp import access_length, sync_warp, vector_access
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

# Tokens of a block, one a warp, and vectors of k and of v that a lane loads before it stores the first.
WARPS = 4
UNROLL = 4


@specialize
def write_kv_kernel(element, access, bounded):
    """The kernel for rows of integers of type `element`; bounded: the last warp of a row has columns beyond the end."""
    vector = 16 // np.dtype(element).itemsize
    part = 32 * UNROLL * vector
    count = UNROLL * vector
    load, store = vector_access(vector, access, bounded)

    @cuda.jit
    def write_kv_kernel(k, v, slot_mapping, k_cache, v_cache):
        """A warp owns 32 * UNROLL vectors of a token's keys and values, a lane every 32nd; arrays (rows, HK * E)."""
        token = cuda.blockIdx.x * WARPS + cuda.threadIdx.y
        if token >= slot_mapping.shape[0]:
            return
        first = cuda.blockIdx.y * part + cuda.threadIdx.x * vector
        keys = cuda.local.array(count, element)
        values = cuda.local.array(count, element)
        for i in range(UNROLL):
            load(k[token], first + i * 32 * vector, keys, i * vector)
            load(v[token], first + i * 32 * vector, values, i * vector)
        # Only now, or keys and values would wait for the slot.
        sync_warp()
        slot = slot_mapping[token]
        if slot < 0:
            return
        for i in range(UNROLL):
            store(k_cache[slot], first + i * 32 * vector, keys, i * vector)
            store(v_cache[slot], first + i * 32 * vector, values, i * vector)

    return write_kv_kernel


def write_kv(k, v, slot_mapping, k_cache, v_cache):
    """Copy row n of k and v to slot slot_mapping[n] of the caches; skip the row where that is -1.

    k, v (N, HK, E) and k_cache, v_cache (blocks, block_size, HK, E) of one floating dtype; slot_mapping (N,)
    int32, block * block_size + offset, no slot twice. k_cache and v_cache are written. Raises ValueError
    for other shapes, dtypes or layouts.
    """
    tokens, kv_heads, head_dim = check("write_kv", "k", k, (None, None, None), FLOATS)
    check("write_kv", "v", v, k.shape, (k.dtype,))
    check("write_kv", "slot_mapping", slot_mapping, (tokens,), I32)
    shape = check("write_kv", "k_cache", k_cache, (None, None, kv_heads, head_dim), (k.dtype,))
    check("write_kv", "v_cache", v_cache, shape, (k.dtype,))
    if device.name() == "cpu":
        write_kv_ref(k, v, slot_mapping, k_cache, v_cache)
        return
    width, of_warp = kv_heads * head_dim, 32 * UNROLL * 16 // k.itemsize
    element = np.uint32 if k.itemsize == 4 else np.uint16
    kernel = write_kv_kernel(element, access_length(width, k, v, k_cache, v_cache), width % of_warp != 0)
    k, v, k_cache, v_cache = (
        array.view(element).reshape(array.size // width, width) for array in (k, v, k_cache, v_cache)
    )
    grid = -(-tokens // WARPS), -(-width // of_warp)
    launch(kernel, grid, (32, WARPS), k, v, slot_mapping, k_cache, v_cache)


def write_kv_ref(k, v, slot_mapping, k_cache, v_cache):
    """As write_kv, by one assignment."""
    written = slot_mapping >= 0
    for rows, cache in ((k, k_cache), (v, v_cache)):
        cache.reshape(-1, *rows.shape[1:])[slot_mapping[written]] = rows[written]
