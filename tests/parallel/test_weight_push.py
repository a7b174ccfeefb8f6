"""Weights pushed into memory of inference processes: by several ranks at once, damaged, and to processes that end."""

import os
import signal

import numpy as np
import pytest

from rlnumba.config import LoraConfig
from rlnumba.kernels.nn import reduce
from rlnumba.kernels.peer.checksum import checksum_ref
from rlnumba.model.lora import Adapter
from rlnumba.parallel.layer_shards import LayerShards
from rlnumba.runtime import device
from rlnumba.sampling import inference
from rlnumba.sampling.inference import InferenceError
from rlnumba.sampling.weights import push
from rlnumba.sampling.weights.push import (
    Checksums,
    Mapping,
    OwnStaging,
    WeightPusher,
    bucket_size,
    part_bucket_size,
)
from rlnumba.sampling.weights.sync import Again, PartSender, WeightReceiver, WeightSender, WeightsRefused
from tests.close import assert_same_bits
from tests.engine.test_core import TINY
from tests.engine.test_llm import make_model
from tests.parallel import in_threads
from tests.parallel.test_inference import LIMITS, Fixture

BUCKET_BYTES = 4096


def trained_of(kind):
    """A Weights or an Adapter of a small model, the same each time."""
    model = make_model(**TINY)
    return model.weights if kind == "weights" else Adapter.new(model.config, LoraConfig(r=2), "float32", "base", 0)


class Receiving:
    """What an inference process has of a push: weights of its own, staging and receiver."""

    def __init__(self, pusher, kind):
        self.trained = trained_of(kind)
        self.trained.flat[...] = 0
        self.staging = OwnStaging(self.trained, pusher.bucket_bytes)
        self.receiver = WeightReceiver(self.trained, self.staging, pusher.bucket_bytes)

    def take(self, messages):
        for message in messages:
            self.receiver.take(message)


def weights_of(version, trained):
    return np.random.default_rng(version).standard_normal(trained.flat.shape, np.float32)


@pytest.mark.parametrize("kind", ["weights", "adapter"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_push_their_buckets_to_two_processes(kind, world_size):
    def rank(communicator, offers):
        trained = trained_of(kind)
        pusher = WeightPusher(trained, communicator, BUCKET_BYTES)
        receiving = [Receiving(pusher, kind) for _ in range(2)] if communicator.rank == 0 else []
        for version in range(1, 4):
            trained.flat[...] = weights_of(version, trained)
            if communicator.rank:
                pusher.take_part()
                continue
            # The second process offers its memory later.
            offers = {index: each.staging.offer for index, each in enumerate(receiving[:version])}
            assert pusher.may_write(version, set()) and not pusher.may_write(version, {version - 1})
            assert pusher.write(version, offers) == {} and pusher.versions == [version]
            assert pusher.messages(version)[0].buckets % world_size == 0
            for each in receiving[:version]:
                each.take(pusher.messages(version))
                assert not version == 1 or not each.trained.flat.any()
                assert each.receiver.ready == [version] and each.receiver.apply() == version
                assert_same_bits(each.trained.flat, trained.flat)
        pusher.close()
        return pusher.bucket_bytes

    sizes = in_threads.run(rank, world_size, {})
    assert len(set(sizes)) == 1 and sizes[0] <= BUCKET_BYTES


@pytest.mark.parametrize("transport", ["peer", "shm"])
@pytest.mark.parametrize(
    "segment, parts", [(2048, [2048, 1664]), (256, [1280, 1280, 1152]), (1024, [2048, 1664, 0]), (4096, [3712, 0])]
)
def test_ranks_send_what_each_has_of_the_weights(monkeypatch, segment, parts, transport):
    """And send it again when rank 0 says so."""
    monkeypatch.setattr(reduce, "SEGMENT", segment)

    def rank(communicator):
        whole = trained_of("weights")
        trained = LayerShards(whole.config, communicator=communicator)
        is_first = communicator.rank == 0
        if transport == "peer":
            sender = WeightPusher(trained, communicator, BUCKET_BYTES)
        else:
            sender = WeightSender(trained, 2, BUCKET_BYTES) if is_first else PartSender(trained, BUCKET_BYTES)
        receiving = Receiving(sender, "weights") if is_first else None
        offers = {0: receiving.staging.offer} if is_first else {}
        if is_first and transport == "shm":
            receiving.receiver.staging = sender.staging
        for version in range(1, 4):
            values = weights_of(version, whole)
            trained.flat[...] = values[trained.first : trained.first + len(trained.flat)]
            is_again = version == 3
            if not is_first:
                assert not is_again or isinstance(communicator.objects(None)[0], Again)
                sender.take_part()
                continue
            found = sender.write_again(version, offers, [0]) if is_again else sender.write(version, offers)
            assert found == {} and sender.versions[-1] == version
            receiving.take(sender.messages(version))
            assert receiving.receiver.apply() == version
            assert_same_bits(receiving.trained.flat, values)
        return sender.bucket_bytes, len(trained.flat)

    sizes, found = zip(*in_threads.run(rank, len(parts)), strict=True)
    assert list(found) == parts
    # Those of a part of 1280 elements are half of it.
    assert set(sizes) == {2560 if transport == "peer" and segment == 256 else BUCKET_BYTES}


@pytest.mark.parametrize("segments", [1, 7, 3821])
def test_buckets_of_a_part_fill_it(segments):
    nbytes = segments * 2 * reduce.SEGMENT
    for most in (1 << 20, 3 << 20, 1 << 30, 1 << 40):
        size = part_bucket_size(nbytes, most)
        assert nbytes % size == 0 and size % 256 == 0 and size <= most
        assert size == nbytes or 2 * size > min(most, 8 << 30)


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_damaged_bucket_leaves_the_old_weights(which):
    pusher = WeightPusher(trained_of("weights"), None, BUCKET_BYTES)
    process = Receiving(pusher, "weights")
    offers = {5: process.staging.offer}
    pusher.write(0, offers)
    process.take(pusher.messages(0))
    process.receiver.apply()
    before = process.trained.flat.copy()
    pusher.trained.flat *= 2
    pusher.write(1, offers)
    index = range(pusher.messages(1)[0].buckets)[which]
    process.staging.of_version(1)[index * pusher.bucket_bytes] ^= 1
    with pytest.raises(WeightsRefused, match=f"bucket {index} of version 1 is damaged") as refused:
        process.take(pusher.messages(1))
    assert refused.value.version == 1 and not process.receiver.ready and not process.receiver.is_checking
    assert_same_bits(process.trained.flat, before)
    with pytest.raises(WeightsRefused, match="version 0 is not newer than 0"):
        process.take(pusher.messages(1)[0]._replace(version=0) for _ in range(1))
    pusher.write_again(1, offers, [5])
    process.take(pusher.messages(1))
    assert process.receiver.apply() == 1
    assert_same_bits(process.trained.flat, pusher.trained.flat)


def test_what_cannot_be_written_is_left_out():
    """Memory of another layout, before a byte is written, and that of a process that has ended."""
    pusher = WeightPusher(trained_of("weights"), None, BUCKET_BYTES)
    good, other = Receiving(pusher, "weights"), Receiving(pusher, "adapter")
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    ended = good.staging.offer._replace(process=pid)
    closed = good.staging.offer._replace(handle=10**6)
    left_out = pusher.write(1, {0: other.staging.offer, 1: ended, 2: closed, 3: good.staging.offer})
    assert left_out.keys() == {0, 1, 2} and left_out[0].startswith("its layout is Adapter ")
    assert "No such file" in left_out[1] and "No such file" in left_out[2]
    assert not other.staging.of_version(1).any()
    good.take(pusher.messages(1))
    assert good.receiver.ready == [1]
    with pytest.raises(OSError, match="No such file"):
        Mapping(ended)


def test_memory_is_mapped_once_and_until_it_is_not_offered(monkeypatch):
    opened, closed = [], []

    class Noted(Mapping):
        def __init__(self, offer):
            opened.append(offer)
            super().__init__(offer)

        def close(self):
            closed.append(len(opened))
            super().close()

    monkeypatch.setattr(push, "Mapping", Noted)
    pusher = WeightPusher(trained_of("weights"), None, BUCKET_BYTES)
    first, second, third = (Receiving(pusher, "weights") for _ in range(3))
    pusher.write(0, {0: first.staging.offer, 1: second.staging.offer})
    pusher.write(1, {0: first.staging.offer, 1: second.staging.offer})
    assert opened == [first.staging.offer, second.staging.offer] and not closed
    pusher.write(2, {0: first.staging.offer, 2: third.staging.offer})
    assert opened[2:] == [third.staging.offer]
    assert closed == [2], "that of the second process, before the third's is mapped"
    pusher.close()
    assert len(closed) == 3


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("nbytes", [1, 255, 4096, 100_001, 16 << 30])
def test_every_rank_has_as_many_buckets(nbytes, num_ranks):
    for most in (256, 4000, 1 << 30, 1 << 40):
        size = bucket_size(nbytes, most, num_ranks)
        assert size % 256 == 0 and size <= max(most, 256)
        # Bytes of the rank that has the most.
        rounds = -(-nbytes // (size * num_ranks))
        assert rounds * size <= nbytes / num_ranks + 256 * rounds


def test_the_last_bytes_count():
    """Of arrays that are no whole pairs of words."""
    for size in range(1, 20):
        part = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
        padded = np.zeros(24, np.uint8)
        padded[:size] = part
        assert Checksums([part]).read() == [checksum_ref(padded)]


@pytest.fixture(scope="module")
def running():
    fixture = Fixture(make_sender=lambda trained: WeightPusher(trained, None, 1 << 15))
    with fixture.engines:
        yield fixture
    fixture.sender.close()


def test_groups_have_the_text_of_one_engine_and_the_newest_weights(running):
    for _ in range(3):
        running.push()
        requests = running.submit(4)
        assert running.wait(4) == running.expected(requests)
    assert len(running.engines.take_pauses()) >= 6 and not running.engines.take_pauses()


def test_a_process_that_is_started_anew_gets_the_newest_weights(running, capfd):
    """While the trainer waits, and also where a push comes between."""
    running.push()
    requests = running.submit(4)
    os.kill(running.engines.processes[0].process.pid, signal.SIGKILL)
    assert running.wait(4) == running.expected(requests)
    victim = running.engines.processes[1]
    os.kill(victim.process.pid, signal.SIGKILL)
    running.push()
    requests = running.submit(4)
    assert running.wait(4) == running.expected(requests)
    assert running.engines.processes[1] is not victim and capfd.readouterr().err.count("was ended by SIGKILL") == 2


def test_damaged_weights_are_refused_and_sent_again(running):
    # Once both processes have staging to damage, also where this test is the first one.
    running.push()
    running.submit(2)
    running.wait(2)
    write, damaged = running.sender._copy, []

    def copy_damaged(offers, *share):
        found = write(offers, *share)
        if len(damaged) < 2:
            damaged.append(len(offers))
            for offer in offers.values():
                running.sender._mappings[offer]._memory[len(damaged) * 4000] ^= 1
            # Before the processes compute their checksums.
            device.synchronize()
        return found

    running.sender._copy = copy_damaged
    refusals = running.engines.refusals
    running.push()
    requests = running.submit(2)
    assert running.wait(2) == running.expected(requests)
    assert damaged[0] == 2 and running.engines.refusals > refusals
    running.sender._copy = write


def test_a_process_that_takes_no_weights_ends_the_push(running):
    """What it has not taken is not overwritten."""
    running.push()
    running.submit(2)
    running.wait(2)
    victim = running.engines.processes[0]
    os.kill(victim.process.pid, signal.SIGSTOP)
    try:
        running.push()
        running.engines.limits = LIMITS._replace(sync_timeout_s=0.3)
        message = f"process 0 did not take the weights of version {running.version} within 0.3 s .*weight_sync_timeout"
        before = running.sender._mappings[victim.offer]._memory.copy()
        with pytest.raises(InferenceError, match=message):
            running.push()
        assert_same_bits(running.sender._mappings[victim.offer]._memory, before)
    finally:
        running.engines.limits = LIMITS
        os.kill(victim.process.pid, signal.SIGCONT)
    running.push()
    requests = running.submit(2)
    assert running.wait(2) == running.expected(requests)


def test_memory_that_cannot_be_written_ends_the_run_with_one_line(running, monkeypatch):
    # Once both processes have offered their memory, also where this test is the first one.
    running.push()
    running.submit(2)
    running.wait(2)
    monkeypatch.setattr(inference, "END_S", 0.1)
    process = running.engines.processes[0]
    with monkeypatch.context() as patch:
        patch.setattr(process, "offer", process.offer._replace(layout="another"))
        with pytest.raises(
            InferenceError, match="process 0: weights cannot be written .*its layout is another, not .*shm"
        ):
            running.push()
    running.push()
    requests = running.submit(2)
    assert running.wait(2) == running.expected(requests)
