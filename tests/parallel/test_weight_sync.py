"""New weights for inference processes: taken whole, in the order of their versions, or the old ones stay."""

import copy

import numpy as np
import pytest

from rlnumba.config import LoraConfig
from rlnumba.model.lora import Adapter
from rlnumba.runtime import device
from rlnumba.sampling.weights.sync import Begin, Bucket, Finish, Staging, WeightReceiver, WeightSender, WeightsRefused
from tests.close import assert_same_bits
from tests.engine.test_core import TINY
from tests.engine.test_llm import make_model

BUCKET_BYTES = 4096


class Pair:
    """A sender and a receiver with weights of their own."""

    def __init__(self, trained, slots=2):
        self.trained, self.other = trained, copy.copy(trained)
        self.other.flat = trained.flat.copy()
        self.sender = WeightSender(trained, slots, BUCKET_BYTES)
        staging = self.sender.staging
        self.receiver = WeightReceiver(self.other, Staging(staging.nbytes, staging.slots, staging.descriptor), 4096)

    def write(self, version):
        """Change the weights and write them: their messages."""
        self.trained.flat[...] = np.random.default_rng(version).standard_normal(self.trained.flat.shape, np.float32)
        self.sender.write(version)
        return self.sender.messages(version)

    def take(self, messages):
        for message in messages:
            self.receiver.take(message)


@pytest.fixture(params=["weights", "adapter"])
def pair(request):
    model = make_model(**TINY)
    if request.param == "weights":
        return Pair(model.weights)
    return Pair(Adapter.new(model.config, LoraConfig(r=2), "float32", "base", 0))


def test_weights_arrive_in_parts_and_are_applied_whole(pair):
    before = pair.other.flat.copy()
    messages = pair.write(0)
    sizes = -(-pair.trained.flat.nbytes // BUCKET_BYTES)
    assert len(messages) == sizes + 2 and messages[0].buckets == sizes > 1
    for message in messages:
        assert not pair.receiver.ready
        pair.receiver.take(message)
        assert_same_bits(pair.other.flat, before)
    assert pair.receiver.apply() == pair.receiver.version == 0
    assert_same_bits(pair.other.flat, device.to_host(pair.trained.flat))


def test_several_versions_wait_in_their_order(pair):
    found = {}
    for version in (3, 4):
        pair.take(pair.write(version))
        found[version] = pair.trained.flat.copy()
    assert pair.sender.versions == [3, 4] and pair.sender.replaced_by(5) == 3 and pair.sender.replaced_by(2) is None
    for version in (3, 4):
        assert pair.receiver.apply() == version
        assert_same_bits(pair.other.flat, found[version])
    pair.write(5)
    assert pair.sender.versions == [4, 5]


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_damaged_bucket_leaves_the_old_weights(pair, which):
    pair.take(pair.write(0))
    pair.receiver.apply()
    before = pair.other.flat.copy()
    messages = pair.write(1)
    index = range(messages[0].buckets)[which]
    pair.sender.staging.of_version(1)[index * BUCKET_BYTES] ^= 1
    with pytest.raises(WeightsRefused, match=f"bucket {index} of version 1 is damaged"):
        pair.take(messages)
    pair.take(messages[-1:])
    assert not pair.receiver.ready and pair.receiver.version == 0
    assert_same_bits(pair.other.flat, before)
    # The same version, sent again.
    pair.sender.write(1)
    pair.take(pair.sender.messages(1))
    assert pair.receiver.apply() == 1
    assert_same_bits(pair.other.flat, pair.trained.flat)


def test_what_is_refused(pair):
    pair.take(pair.write(2))
    begin, *buckets, finish = pair.write(3)
    with pytest.raises(WeightsRefused, match="version 2 is not newer than 2"):
        pair.receiver.take(begin._replace(version=2))
    with pytest.raises(WeightsRefused, match="the layout is another, not"):
        pair.receiver.take(begin._replace(layout="another"))
    pair.take([begin, *buckets[:-1]])
    with pytest.raises(WeightsRefused, match=f"bucket {len(buckets) - 1} of version 3 is missing"):
        pair.receiver.take(finish)
    # A version that breaks off is forgotten when the next one begins, and messages of others are ignored.
    pair.take([begin, *buckets[:1], Begin(4, begin.layout, 1), Bucket(3, 1, 0), Finish(3)])
    assert pair.receiver.ready == [2]
    assert pair.receiver.apply() == 2
    # As it is where the next one is refused.
    pair.take([begin, *buckets])
    with pytest.raises(WeightsRefused, match="version 1 is not newer than 2"):
        pair.receiver.take(begin._replace(version=1))
    pair.take([finish])
    assert not pair.receiver.ready
