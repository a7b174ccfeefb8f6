"""Write the keys and values of new tokens into a block cache.

    k_cache[slot // block_size, slot % block_size] = k[n]      slot = slot_mapping[n]; -1: the token is skipped

k, v (N, HK, E); k_cache, v_cache (blocks, block_size, HK, E) of the same floating dtype: a copy of bits.
"""

from rlnumba import device
from rlnumba.device import cuda
from rlnumba.kernels.check import FLOATS, I32, check
from rlnumba.kernels.launch import launch

THREADS = 128


@cuda.jit
def write_kv_kernel(k, v, slot_mapping, k_cache, v_cache):
    """A block owns a token, a thread every THREADS-th element of its keys and values; all arrays (rows, HK * E)."""
    token = cuda.blockIdx.x
    slot = slot_mapping[token]
    if slot < 0:
        return
    for column in range(cuda.threadIdx.x, k.shape[1], cuda.blockDim.x):
        k_cache[slot, column] = k[token, column]
        v_cache[slot, column] = v[token, column]


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
    if device.name() == "numpy":
        write_kv_ref(k, v, slot_mapping, k_cache, v_cache)
        return
    width = kv_heads * head_dim
    k, v = k.reshape(tokens, width), v.reshape(tokens, width)
    k_cache, v_cache = (cache.reshape(shape[0] * shape[1], width) for cache in (k_cache, v_cache))
    launch(write_kv_kernel, tokens, THREADS, k, v, slot_mapping, k_cache, v_cache)


def write_kv_ref(k, v, slot_mapping, k_cache, v_cache):
    """As write_kv, by one assignment."""
    written = slot_mapping >= 0
    for rows, cache in ((k, k_cache), (v, v_cache)):
        cache.reshape(-1, *rows.shape[1:])[slot_mapping[written]] = rows[written]
