"""Keys and values in a block cache, for tests of what reads them."""

import numpy as np


def write_kv(k, v, slot_mapping, k_cache, v_cache):
    """Copy row n of k and v (N, HK, E) to slot slot_mapping[n] of caches (blocks, block_size, HK, E); -1: skip it."""
    for rows, cache in ((k, k_cache), (v, v_cache)):
        element = np.uint32 if rows.itemsize == 4 else np.uint16
        rows, slots = rows.view(element), cache.view(element).reshape(-1, *rows.shape[1:])
        slots[slot_mapping[slot_mapping >= 0]] = rows[slot_mapping >= 0]
