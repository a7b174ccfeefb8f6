"""The simulator shows what a GPU would hide: missing waits, missing fences, deadlocks, data races."""

import numpy as np
import pytest

from rlnumba.kernels.ptx.shared_memory import fence_proxy_async, load_word, store_pair
from rlnumba.kernels.ptx.sm90 import (
    bulk_commit_group,
    bulk_wait_group,
    bulk_wait_group_read,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    named_barrier_sync,
    tensor_map_address,
    tma_load_2d,
    tma_store_2d,
)
from rlnumba.kernels.ptx.warp import ballot, griddepcontrol_wait, shuffle_xor, warp_sum
from rlnumba.kernels.ptx.wgmma import smem_descriptor, wgmma_async, wgmma_wait_group
from rlnumba.kernels.tile.pipeline import shared_base
from rlnumba.kernels.tile.tensor_map import tensor_map
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, pdl_scope, supports_pdl

pytestmark = pytest.mark.sim
if device.name() != "sim":
    pytest.skip("about the simulator: run with NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

ONE = np.float32(1.0)
# Mistakes of the kernels below; RIGHT is none.
RIGHT, NO_WAIT, NO_FENCE, NO_COMMIT, OVERWRITES, TOUCHES = map(np.int32, range(6))


@pytest.fixture(autouse=True)
def order_is_fixed(monkeypatch):
    """Asynchronous operations complete as late as possible, threads run in order."""
    monkeypatch.setattr("rlnumba.runtime.simulator.SEED", None)
    # Kernels that are wrong on purpose need not compile.
    monkeypatch.setattr("rlnumba.runtime.launch.observers", [])


@cuda.jit
def load_kernel(box, out, mistake):
    base = shared_base()
    barrier = base + 1024
    if cuda.threadIdx.x == 0:
        mbarrier_init(barrier, 1)
        mbarrier_expect_tx(barrier, 1024)
        tma_load_2d(base, tensor_map_address(box), 0, 0, barrier)
    cuda.syncthreads()
    if mistake != NO_WAIT:
        mbarrier_wait(barrier, 0)
    out[cuda.threadIdx.x] = load_word(base + 4 * cuda.threadIdx.x)


def test_a_tma_load_completes_late():
    box, out = np.ones((8, 64), np.float16), np.empty(4, np.int32)
    launch(load_kernel, 1, 4, tensor_map(box, 8, 64), out, RIGHT, shared=2056)
    assert (out.view(np.float16) == 1).all()
    launch(load_kernel, 1, 4, tensor_map(box, 8, 64), out, NO_WAIT, shared=2056)
    assert np.isnan(out.view(np.float16)).all()


@cuda.jit
def store_kernel(box, mistake):
    thread = cuda.threadIdx.x
    base = shared_base()
    for pair in range(thread, 128, 32):
        store_pair(base + 8 * pair, ONE, ONE)
    if mistake != NO_FENCE:
        fence_proxy_async()
    cuda.syncthreads()
    if thread == 0:
        tma_store_2d(tensor_map_address(box), 0, 0, base)
        if mistake != NO_COMMIT:
            bulk_commit_group()
        if mistake == OVERWRITES:
            store_pair(base, ONE + ONE, ONE)
        bulk_wait_group_read()
        if mistake != NO_WAIT:
            bulk_wait_group()


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (NO_FENCE, "thread 0 wrote what is read here, without fence_proxy_async"),
        (NO_COMMIT, "returned without waiting for its bulk stores"),
        (OVERWRITES, "shared memory was written to while a copy or a product still read it"),
    ],
)
def test_stores_that_go_wrong(mistake, message):
    box = np.zeros((8, 32), np.float32)
    launch(store_kernel, 1, 32, tensor_map(box, 8, 32), RIGHT, shared=2048)
    assert (box == 1).all()
    with pytest.raises(RuntimeError, match=message):
        launch(store_kernel, 1, 32, tensor_map(box, 8, 32), mistake, shared=2048)


def test_a_store_is_done_when_the_kernel_is():
    box = np.zeros((8, 32), np.float32)
    launch(store_kernel, 1, 32, tensor_map(box, 8, 32), NO_WAIT, shared=2048)
    assert (box == 1).all()


@cuda.jit
def product_kernel(a, b, out, mistake):
    thread = cuda.threadIdx.x
    base = shared_base()
    barrier = base + 16384
    if thread == 0:
        mbarrier_init(barrier, 1)
        mbarrier_expect_tx(barrier, 8192 + 1024)
        tma_load_2d(base, tensor_map_address(a), 0, 0, barrier)
        tma_load_2d(base + 8192, tensor_map_address(b), 0, 0, barrier)
    cuda.syncthreads()
    mbarrier_wait(barrier, 0)
    acc = cuda.local.array(4, np.float32)
    start(acc, smem_descriptor(base), smem_descriptor(base + 8192), np.int32(0))
    start(acc, smem_descriptor(base), smem_descriptor(base + 8192), np.int32(1))
    if mistake == TOUCHES:
        acc[0] = ONE
    if mistake == OVERWRITES:
        store_pair(base + 8192, ONE, ONE)
    if mistake == NO_WAIT:
        wait_all_but_latest(acc)
    else:
        wait_all(acc)
    for i in range(4):
        out[thread, i] = acc[i]
    if mistake == NO_WAIT:
        wait_all(acc)


start = wgmma_async(8, "float16", 4)
wait_all_but_latest, wait_all = wgmma_wait_group(4, 1), wgmma_wait_group(4)


def test_wgmma_results_are_nan_until_they_are_waited_for():
    a, b = np.ones((64, 64), np.float16), np.ones((8, 64), np.float16)
    maps, out = (tensor_map(a, 64, 64), tensor_map(b, 8, 64)), np.zeros((128, 4), np.float32)
    launch(product_kernel, 1, 128, *maps, out, RIGHT, shared=20480)
    assert (out == 128).all()
    launch(product_kernel, 1, 128, *maps, out, NO_WAIT, shared=20480)
    assert np.isnan(out).all()
    with pytest.raises(RuntimeError, match="accumulators were written to while a product was under way"):
        launch(product_kernel, 1, 128, *maps, out, TOUCHES, shared=20480)
    with pytest.raises(RuntimeError, match="shared memory was written to while a copy or a product still read it"):
        launch(product_kernel, 1, 128, *maps, out, OVERWRITES, shared=20480)


@cuda.jit
def written_operand_kernel(out, synchronised):
    """All threads write ones to A and B, of 72 lines, then multiply."""
    thread = cuda.threadIdx.x
    base = shared_base()
    for pair in range(thread, 72 * 16, 128):
        store_pair(base + 8 * pair, np.float32(0.0), np.float32(0.0))
    fence_proxy_async()
    if synchronised:
        named_barrier_sync(1, 128)
    acc = cuda.local.array(4, np.float32)
    start(acc, smem_descriptor(base), smem_descriptor(base + 8192), np.int32(0))
    wait_all(acc)
    out[thread] = acc[0]


def test_a_product_reads_when_its_first_warp_begins():
    out = np.ones(128, np.float32)
    launch(written_operand_kernel, 1, 128, out, np.int32(1), shared=20480)
    assert (out == 0).all()
    with pytest.raises(RuntimeError, match="shared memory was written to while a copy or a product still read it"):
        launch(written_operand_kernel, 1, 128, out, np.int32(0), shared=20480)


@cuda.jit
def stuck_kernel(which):
    thread = cuda.threadIdx.x
    base = shared_base()
    if thread == 0:
        mbarrier_init(base, 2)
    cuda.syncthreads()
    if which == 0 and thread < 20:
        warp_sum(ONE)
    if which == 1 and thread < 32:
        named_barrier_sync(1, 64)
    if which == 2:
        if thread == 3:
            mbarrier_arrive(base)
        mbarrier_wait(base, 0)
    if which == 3:
        if thread < 16:
            warp_sum(ONE)
        else:
            shuffle_xor(ONE, 1)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (0, "block (0, 0, 0) is stuck: threads 0-19 wait in warp_sum; threads 20-63 have returned"),
        (
            1,
            "block (0, 0, 0) is stuck: threads 0-31 wait in named_barrier_sync 1 of 64 threads; threads 32-63 have "
            "returned",
        ),
        (2, "block (0, 0, 0) is stuck: threads 0-63 wait in mbarrier_wait of parity 0"),
        (3, "other threads of the 32 are in warp_sum"),
    ],
)
def test_a_deadlock_names_the_waiting_threads(which, message):
    with pytest.raises(RuntimeError) as error:
        launch(stuck_kernel, 1, 64, np.int32(which), shared=2048)
    assert message in str(error.value)


@cuda.jit
def data_race_kernel(out, barrier):
    """Each warp writes its index; the last one to write determines the result, with a barrier always warp 0."""
    if cuda.threadIdx.x >= 32:
        out[0] = cuda.threadIdx.x // 32
    if barrier:
        cuda.syncthreads()
    if cuda.threadIdx.x < 32:
        out[0] = 0


def test_another_order_shows_a_data_race(monkeypatch):
    found = {0: set(), 1: set()}
    for seed in range(20):
        monkeypatch.setattr("rlnumba.runtime.simulator.SEED", str(seed))
        for barrier in found:
            out = np.empty(1, np.int32)
            launch(data_race_kernel, 1, 128, out, np.int32(barrier))
            found[barrier].add(int(out[0]))
    assert found[1] == {0} and len(found[0]) > 1


def test_an_error_names_its_thread():
    @cuda.jit
    def out_of_range_kernel(out):
        out[cuda.threadIdx.x + 2] = 0

    with pytest.raises(IndexError) as error:
        launch(out_of_range_kernel, (1, 2), (4, 2), np.zeros(4, np.int32))
    assert error.value.__notes__ == ["in thread (2, 0, 0) of block (0, 0, 0)"]
    # The next kernel is not affected.
    launch(data_race_kernel, 1, 32, np.empty(1, np.int32), np.int32(0))


def test_memory_holds_nan_until_it_is_written():
    @cuda.jit
    def unwritten_kernel(out):
        shared, local = cuda.shared.array(4, np.float32), cuda.local.array(4, np.float32)
        out[0], out[1] = shared[0], local[3]

    out = np.zeros(2, np.float32)
    launch(unwritten_kernel, 1, 1, out)
    assert np.isnan(out).all()


def test_bits_are_counted_as_in_32_bits():
    @cuda.jit
    def bits_kernel(words, out):
        word = words[cuda.threadIdx.x]
        out[cuda.threadIdx.x, 0] = cuda.popc(word)
        out[cuda.threadIdx.x, 1] = cuda.ffs(word)
        out[cuda.threadIdx.x, 2] = cuda.clz(word)
        out[cuda.threadIdx.x, 3] = ballot(word < 0)

    words, out = np.array([0, 1, -1, -(2**31)] * 8, np.int32), np.zeros((32, 4), np.int32)
    launch(bits_kernel, 1, 32, words, out)
    mask = int("1100" * 8, 2) - 2**32
    assert out[:4].tolist() == [[0, 0, 32, mask], [1, 1, 31, mask], [32, 1, 0, mask], [1, 32, 0, mask]]


def test_an_array_that_is_not_contiguous_is_refused():
    x = np.zeros((4, 4), np.float32)
    with pytest.raises(ValueError, match="double_kernel: arrays must be C-contiguous, got shape"):
        launch(double_kernel, 1, 4, x, x.T, RIGHT)


@supports_pdl
@cuda.jit
def double_kernel(x, out, mistake):
    """out = 2 x; the mistake reads x before the kernel that writes it has ended."""
    if mistake == NO_WAIT:
        value = x[cuda.threadIdx.x]
    griddepcontrol_wait()
    if mistake != NO_WAIT:
        value = x[cuda.threadIdx.x]
    out[cuda.threadIdx.x] = np.float32(2.0) * value


@pytest.mark.parametrize(
    ("mistake", "serialized", "expected"), [(RIGHT, (), 8.0), (NO_WAIT, (), 4.0), (NO_WAIT, (1,), 8.0)]
)
def test_a_kernel_begins_as_early_as_pdl_allows(mistake, serialized, expected):
    """Three kernels in a chain, the last one with the mistake; what it reads early is what the first kernel found."""
    x, y, z = np.ones(4, np.float32), np.full(4, 2, np.float32), np.zeros(4, np.float32)
    with pdl_scope():
        launch(double_kernel, 1, 4, x, x, RIGHT)
        launch(double_kernel, 1, 4, x, y, RIGHT, serialize_next=1 in serialized)
        launch(double_kernel, 1, 4, y, z, mistake)
        assert z[0] == 0, "nothing runs before the scope's end"
    assert x.tolist() == [2] * 4 and y.tolist() == [4] * 4 and z.tolist() == [expected] * 4
