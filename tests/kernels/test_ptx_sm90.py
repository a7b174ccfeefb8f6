"""The instructions of sm_90 against NumPy: the simulator's twins on any machine, the hardware on a Hopper GPU."""

import numpy as np
import pytest

from rlnumba.errors import DeviceError
from rlnumba.kernels.ptx.shared_memory import (
    BOX_BYTES,
    LINE,
    fence_proxy_async,
    ldmatrix_x4,
    load_four,
    load_pair,
    load_words,
    stmatrix_x2_trans,
    store_four,
    store_pair,
)
from rlnumba.kernels.ptx.sm90 import (
    bulk_commit_group,
    bulk_wait_group,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    named_barrier_sync,
    tensor_map_address,
    tma_load_3d,
    tma_load_3d_evict_first,
    tma_store_3d,
)
from rlnumba.kernels.ptx.warp import cvt_pack, cvt_unpack
from rlnumba.kernels.ptx.wgmma import WgmmaLayout, smem_descriptor, wgmma_async, wgmma_wait_group
from rlnumba.kernels.tile.pipeline import shared_base
from rlnumba.kernels.tile.tensor_map import (
    DeviceTensorMaps,
    acquire_tensor_maps_kernel,
    keep_tensor_maps,
    release_tensor_maps,
    reserve_tensor_maps,
    tensor_map,
)
from rlnumba.runtime import device
from rlnumba.runtime.context import Context
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize
from tests.close import assert_same_bits

pytestmark = [pytest.mark.sim, pytest.mark.sm90]
i32, f32 = np.int32, np.float32

ARCHITECTURES = [(9, 0, "a")]


@pytest.fixture(autouse=True)
def kernels_run():
    if device.name() == "cpu":
        pytest.skip("needs the simulator or a Hopper GPU")


def whole_numbers(rng, *shape, dtype="bfloat16"):
    """Small whole numbers, whose products and sums are exact: any order of a sum gives the same bits."""
    return rng.integers(-4, 5, shape).astype(device.dtype(dtype))


@specialize
def wgmma_kernel(element):
    """A warpgroup multiplies head 1 of a (64, 2, 112) by that of b (24, 2, 112), A from shared memory, then from
    registers; then v^T by w, v (64, 2, 112) and w (8, 64) K-major, with the 112 columns of v for rows."""
    from_shared, wait_shared = wgmma_async(24, element, 7), wgmma_wait_group(12)
    from_registers = wgmma_async(24, element, 7, "registers", accumulate=False)
    wait_one, wait_registers = wgmma_wait_group(12, 1, words=28), wgmma_wait_group(12, words=28)
    across = wgmma_async(8, element, 4, "mn", accumulate=True, layout=WgmmaLayout(blocks=2))
    wait_across = wgmma_wait_group(8)

    @cuda.jit
    def wgmma_kernel(a_map, b_map, v_map, w_map, out):
        thread = i32(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        base = shared_base()
        b_place, v_place = base + 2 * BOX_BYTES, base + 3 * BOX_BYTES
        w_place, barrier = base + 5 * BOX_BYTES, base + 6 * BOX_BYTES
        if thread == 0:
            mbarrier_init(barrier, 1)
            mbarrier_init_fence()
            mbarrier_expect_tx(barrier, 4 * BOX_BYTES + 2 * 24 * LINE + 8 * LINE)
            for box in range(2):
                tma_load_3d(base + box * BOX_BYTES, tensor_map_address(a_map), box * 64, 1, 0, barrier)
                tma_load_3d(b_place + box * 24 * LINE, tensor_map_address(b_map), box * 64, 1, 0, barrier)
                tma_load_3d_evict_first(v_place + box * BOX_BYTES, tensor_map_address(v_map), box * 64, 1, 0, barrier)
            tma_load_3d(w_place, tensor_map_address(w_map), 0, 0, 0, barrier)
        cuda.syncthreads()
        mbarrier_wait(barrier, 0)
        acc, other = cuda.local.array(12, np.float32), cuda.local.array(12, np.float32)
        words, wide = cuda.local.array(28, np.int32), cuda.local.array(8, np.float32)
        for i in range(12):
            acc[i] = other[i] = f32(1.0)
        for i in range(8):
            wide[i] = f32(1.0)
        row = warp * 16 + (lane & 15)
        for step in range(7):
            chunk = i32(step % 4 * 2) + (lane >> 4)
            loaded = ldmatrix_x4(base + step // 4 * BOX_BYTES + row * LINE + ((chunk ^ (row & 7)) << 4))
            for i in range(4):
                words[4 * step + i] = loaded[i]
        from_shared(acc, smem_descriptor(base), smem_descriptor(b_place), i32(1))
        from_registers(other, words, smem_descriptor(b_place))
        wait_one(other, words)
        wait_registers(other, words)
        wait_shared(acc)
        across(wide, smem_descriptor(v_place), smem_descriptor(w_place))
        wait_across(wide)
        for i in range(12):
            out[0, i, thread], out[1, i, thread] = acc[i], other[i]
        for i in range(8):
            out[2, i, thread] = wide[i]

    return wgmma_kernel


def fragments(matrix):
    """(columns / 2, 128): which elements of a (64, columns) matrix each thread's accumulators hold."""
    i, thread = np.ogrid[: matrix.shape[1] // 2, :128]
    rows = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i % 4 // 2)
    return matrix[rows, 2 * (thread % 4) + 8 * (i // 4) + i % 2].astype(np.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_wgmma(rng, dtype):
    a, b, v = (whole_numbers(rng, rows, 2, 112, dtype=dtype) for rows in (64, 24, 64))
    w = whole_numbers(rng, 8, 1, 64, dtype=dtype)
    out = device.xp().zeros((3, 12, 128), np.float32)
    arrays = [device.asarray(x) for x in (a, b, v, w)]
    maps = [tensor_map(x, rows, 1, 64) for x, rows in zip(arrays, (64, 24, 64, 8), strict=True)]
    launch(wgmma_kernel(dtype), 1, 128, *maps, out, shared=6 * BOX_BYTES + 1024 + 8)
    a, b, v, w = (x.astype(np.float64) for x in (a, b, v, w))
    product = a[:, 1] @ b[:, 1].T
    across = np.zeros((128, 8))
    across[:112] = v[:, 1].T @ w[:, 0].T
    out = device.to_host(out)
    assert_same_bits(out[0], fragments(product + 1), "A from shared memory")
    assert_same_bits(out[1], fragments(product), "A from registers")
    assert_same_bits(out[2, :4].copy(), fragments(across[:64] + 1), "the first rows of A")
    assert_same_bits(out[2, 4:8].copy(), fragments(across[64:] + 1), "the next rows of A")


@cuda.jit
def exchange_kernel(numbers, out, words, box_map):
    """Two warps. numbers (64, 4): through shared memory in pairs and fours; 16 x 8 of them, rounded, transposed."""
    thread = i32(cuda.threadIdx.x)
    lane = thread & 31
    base = shared_base()
    place = base + 2048
    store_four(place + thread * 16, numbers[thread, 0], numbers[thread, 1], numbers[thread, 2], numbers[thread, 3])
    store_pair(place + 1024 + (63 - thread) * 8, numbers[thread, 0], numbers[thread, 1])
    named_barrier_sync(1, 64)
    first, second, third, fourth = load_four(place + (63 - thread) * 16)
    out[thread, 0], out[thread, 1], out[thread, 2], out[thread, 3] = first, second, third, fourth
    out[thread, 4], out[thread, 5] = load_pair(place + 1024 + thread * 8)
    words[thread, 0], words[thread, 1], words[thread, 2], words[thread, 3] = load_words(place + (63 - thread) * 16)
    for line in range(thread, 128, 64):
        store_four(base + line * 16, f32(0.0), f32(0.0), f32(0.0), f32(0.0))
    cuda.syncthreads()
    if thread < 32:
        # Lane 4 r + c holds row r, columns 2 c and 2 c + 1 of two matrices; a line r of a box gets column r of both.
        low, high = pack_bfloat16(numbers[lane, 0], numbers[lane, 1]), pack_bfloat16(numbers[lane, 2], numbers[lane, 3])
        line, matrix = lane & 7, (lane >> 3) & 1
        stmatrix_x2_trans(base + line * LINE + ((matrix ^ line) << 4), low, high)
        out[thread, 6], out[thread, 7] = unpack_bfloat16(low)
    fence_proxy_async()
    cuda.syncthreads()
    if thread == 0:
        tma_store_3d(tensor_map_address(box_map), 0, 1, 2, base)
        bulk_commit_group()
        bulk_wait_group()


pack_bfloat16, unpack_bfloat16 = cvt_pack("bfloat16"), cvt_unpack("bfloat16")


def test_exchanges(rng):
    numbers = rng.standard_normal((64, 4)).astype(np.float32)
    out, words = device.xp().zeros((64, 8), np.float32), device.xp().zeros((64, 4), np.int32)
    # Lines of a box beyond the array's last row, and columns beyond its last, are not written.
    box = device.asarray(np.full((9, 2, 24), -1, device.dtype("bfloat16")))
    launch(exchange_kernel, 1, 64, device.asarray(numbers), out, words, tensor_map(box, 8, 1, 64), shared=4608)
    out, box = device.to_host(out), device.to_host(box).astype(np.float32)
    assert_same_bits(out[:, :4].copy(), numbers[::-1].copy(), "fours")
    assert (device.to_host(words) == numbers[::-1].view(np.int32)).all()
    assert_same_bits(out[:, 4:6].copy(), numbers[::-1, :2].copy(), "pairs")
    rounded = numbers.astype(device.dtype("bfloat16")).astype(np.float32)[:32]
    assert_same_bits(out[:32, 6:8].copy(), rounded[:, :2].copy(), "packed")
    # [matrix, row, column]
    matrices = np.stack([rounded[:, :2].reshape(8, 8), rounded[:, 2:].reshape(8, 8)])
    expected = np.full((9, 2, 24), -1, np.float32)
    expected[2:, 1] = 0
    expected[2:, 1, :16] = matrices.transpose(2, 0, 1).reshape(8, 16)[:7]
    assert_same_bits(box, expected, "transposed")


@cuda.jit
def copy_box_kernel(source, out):
    """A warp: the (8, 64) 16-bit box of a tensor map by TMA, as it lies in shared memory."""
    base, lane = shared_base(), i32(cuda.threadIdx.x)
    barrier = base + 8 * LINE
    if lane == 0:
        mbarrier_init(barrier, 1)
        mbarrier_init_fence()
        mbarrier_expect_tx(barrier, 8 * LINE)
        tma_load_3d(base, tensor_map_address(source), 0, 0, 0, barrier)
    cuda.syncthreads()
    mbarrier_wait(barrier, 0)
    out[lane, 0], out[lane, 1], out[lane, 2], out[lane, 3] = load_words(base + lane * 16)


def copy_box(source):
    out = device.xp().zeros((32, 4), np.int32)
    launch(copy_box_kernel, 1, 32, source, out, shared=8 * LINE + 1024 + 8)
    return device.to_host(out).view(np.float16)


def box_of(value):
    return device.asarray(np.full((8, 1, 64), value, np.float16))


def test_a_box_is_copied():
    assert (copy_box(tensor_map(box_of(3), 8, 1, 64)) == 3).all()


def test_maps_are_acquired():
    """In the simulator nothing but the launch, on a GPU maps stay valid."""
    array = box_of(5)
    source = tensor_map(array, 8, 1, 64)
    slots = device.asarray(np.zeros(1, np.int32))
    maps = device.xp().zeros((1, 128), np.uint8) if device.name() == "sim" else source.reshape(1, 128)
    launch(acquire_tensor_maps_kernel, 2, 32, maps, slots)
    assert (copy_box(source) == 5).all()


@pytest.mark.gpu
def test_slots_are_used_again(monkeypatch):
    """Kernels read the maps that are there now, not those that an SM has read from the same slots; kept maps stay."""
    monkeypatch.setattr(DeviceTensorMaps, "SLOTS", 4)
    arrays = [box_of(value) for value in range(40)]
    with Context().use():
        with keep_tensor_maps():
            kept = tensor_map(arrays[0], 8, 1, 64)
        addresses = set()
        for value, array in enumerate(arrays):
            source = tensor_map(array, 8, 1, 64)
            addresses.add(source.data.ptr)
            assert (copy_box(source) == value).all() and (copy_box(kept) == 0).all()
            assert tensor_map(array, 8, 1, 64).data.ptr == source.data.ptr
    # Three slots of one array and four of the other one, beside the kept one.
    assert len(addresses) == 8 and kept.data.ptr in addresses


@pytest.mark.gpu
def test_released_maps_give_their_slots_back(monkeypatch):
    monkeypatch.setattr(DeviceTensorMaps, "SLOTS", 2)
    arrays = [box_of(value) for value in range(20)]
    with Context().use():
        for first in range(0, 20, 2):
            with keep_tensor_maps() as kept:
                for value in (first, first + 1):
                    assert (copy_box(tensor_map(arrays[value], 8, 1, 64)) == value).all()
            assert len(kept) == 2
            release_tensor_maps(kept)


@pytest.mark.gpu
def test_a_map_may_be_made_while_a_graph_is_captured():
    copy_box(tensor_map(box_of(1), 8, 1, 64))
    array, out = box_of(7), device.xp().zeros((32, 4), np.int32)
    device.synchronize()
    stream = device.xp().cuda.Stream(non_blocking=True)
    with Context(stream).use(), keep_tensor_maps():
        tensor_map(box_of(2), 8, 1, 64)
        reserve_tensor_maps(8)
        stream.begin_capture()
        launch(copy_box_kernel, 1, 32, tensor_map(array, 8, 1, 64), out, shared=8 * LINE + 1024 + 8)
        graph = stream.end_capture()
        assert not device.to_host(out).any()
        graph.launch()
        assert (device.to_host(out).view(np.float16) == 7).all()


@pytest.mark.gpu
def test_graphs_may_hold_all_slots(monkeypatch):
    monkeypatch.setattr(DeviceTensorMaps, "SLOTS", 2)
    arrays = [box_of(value) for value in range(5)]
    with Context().use(), keep_tensor_maps():
        for array in arrays[:4]:
            tensor_map(array, 8, 1, 64)
        with pytest.raises(DeviceError, match="captured graphs hold all of 2 tensor maps"):
            tensor_map(arrays[4], 8, 1, 64)
