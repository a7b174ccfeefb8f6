import numpy as np
import pytest

from rlnumba.kernels.nn.kv_cache import write_kv, write_kv_kernel
from rlnumba.runtime import device
from tests.close import assert_same_bits


def run(rng, tokens, kv_heads, head_dim, dtype, blocks=40, block_size=16):
    shape = (tokens, kv_heads, head_dim)
    k, v = (rng.standard_normal(shape).astype(device.dtype(dtype)) for _ in range(2))
    slots = rng.permutation(blocks * block_size)[:tokens].astype(np.int32)
    slots[::3] = -1
    cache = rng.standard_normal((2, blocks, block_size, kv_heads, head_dim)).astype(device.dtype(dtype))
    k_cache, v_cache = device.asarray(cache[0].copy()), device.asarray(cache[1].copy())
    write_kv(device.asarray(k), device.asarray(v), device.asarray(slots), k_cache, v_cache)
    for rows, expected, actual in ((k, cache[0], k_cache), (v, cache[1], v_cache)):
        for token, slot in enumerate(slots):
            if slot != -1:
                expected[slot // block_size, slot % block_size] = rows[token]
        assert_same_bits(actual, expected, f"{shape} {dtype}")


@pytest.mark.sim
@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 3, 50), (0, 2, 16), (2, 3, 512)])
def test_simulator(rng, shape):
    run(rng, *shape, "float32", blocks=2)


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_simulator_16_bit(rng, dtype):
    run(rng, 3, 1, 16, dtype, blocks=2)
    run(rng, 3, 1, 15, dtype, blocks=2)


@pytest.mark.parametrize("element", [np.uint16, np.uint32])
def test_kernel_compiles_for_gpus(compile_offline, element):
    """For rows that fill their warps, as those of Qwen3 do."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU")
    kernel = write_kv_kernel(element, 16 // np.dtype(element).itemsize, False)
    rows, troubles = f"{element.__name__}[:,::1]", []
    for architecture in ((8, 0), (9, 0), (10, 0), (12, 0)):
        troubles += compile_offline(kernel, [rows, rows, "int32[::1]", rows, rows], architecture)
    assert not troubles, "\n".join(troubles)


@pytest.mark.parametrize("shape", [(1, 1, 2), (300, 3, 64), (0, 2, 16)])
def test_numpy_device(rng, shape):
    if device.name() != "cpu":
        pytest.skip("the reference as operator")
    run(rng, *shape, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1, 2), (300, 3, 48), (0, 2, 16), (4096, 8, 128)])
def test_gpu(rng, shape, dtype):
    run(rng, *shape, dtype, blocks=300)


def test_wrong_arguments_are_named():
    xp = device.xp()
    k, slots, cache = xp.zeros((3, 2, 8), np.float32), xp.zeros(3, np.int32), xp.zeros((4, 16, 2, 8), np.float32)
    with pytest.raises(ValueError, match=r"write_kv: slot_mapping must be \(3\) int32, got \(2,\) int32"):
        write_kv(k, k, slots[:2], cache, cache)
    with pytest.raises(ValueError, match=r"write_kv: v_cache must be \(4, 16, 2, 8\) float32, got \(3, 16, 2, 8\)"):
        write_kv(k, k, slots, cache, cache[:3])
