"""New weights on their way from the trainer to inference processes: taken whole and checked, or not at all.

    trainer, WeightSender                    inference process, WeightReceiver
    write(v): weights -> staging
    Begin(v, layout, sizes)             ->   refused where v is not newer, or the layout is another one
    Bucket(v, i, checksum), for all     ->   noted
    Finish(v)                           ->   refused where a bucket is missing, or has another checksum in staging;
                                             else v is ready
                                             apply(v): staging -> the weights' fixed addresses, between two steps

Until `apply` the old weights are the live ones, and after a refusal they stay so. A model with an adapter sends the
adapter alone. Staging is here memory of the host that all processes share, with room for several versions:
while one is written, others can be read, also by a process that has just been started. push.py has staging in
the memory of the inference processes' GPUs.
"""

import mmap
import os
import weakref
from typing import NamedTuple

import numpy as np
import xxhash

from rlnumba.errors import UserError
from rlnumba.parallel.communicator import as_bytes
from rlnumba.parallel.transports.shared_memory import unnamed_file
from rlnumba.runtime import device
from rlnumba.sampling.weights.shards import (
    host_part,
    is_in_parts,
    kind_of,
    pieces_of,
    ranges_of,
    whole_bytes,
    whole_of,
)

# Bytes that are copied to a GPU at a time.
LOAD_BYTES = 1 << 30


class WeightsRefused(UserError):
    """Weights of a version that were not taken: the old ones are live."""

    def __init__(self, version, reason):
        super().__init__(reason)
        self.version = version


class Begin(NamedTuple):
    """Weights of a version follow: `layout` is layout_of what is trained, `buckets` the number of their parts."""

    version: int
    layout: str
    buckets: int


class Bucket(NamedTuple):
    """A part of a version is in staging, with this checksum. reference: the object of Ray's store that has it."""

    version: int
    index: int
    checksum: int
    reference: object = None


class Finish(NamedTuple):
    """All parts of a version are in staging."""

    version: int


class Again(NamedTuple):
    """Rank 0's message to other ranks, which have parts of the weights: they are sent once more, by take_part."""


def layout_of(trained, bucket_bytes):
    """A description of trained weights, of a Weights or an Adapter, and of their buckets, equal for equal layouts: str.

    A shard has the whole model's.
    """
    config, dtype, (size, decay_end) = trained.config, trained.flat.dtype, whole_of(trained)
    name = f"{kind_of(trained)} {config.architecture} {dtype} {size} {decay_end}"
    return f"{name} {max(bucket_bytes // dtype.itemsize, 1)}"


def buckets_of(array, bucket_bytes):
    """The parts of at most so many bytes, but at least an element, of an array (n,): list of views."""
    step = max(bucket_bytes // array.itemsize, 1)
    return [array[first : first + step] for first in range(0, len(array), step)]


def host_buckets(trained, bucket_bytes):
    """Yields buckets_of all that is trained, on the host; each is None on other ranks than 0 if it is in parts."""
    device.synchronize()
    step = max(bucket_bytes // trained.flat.itemsize, 1)
    for first in range(0, whole_of(trained)[0], step):
        yield host_part(trained, first, step)


def messages_of(version, layout, checksums):
    """The messages to send for a version whose buckets, in staging, have these checksums: list."""
    begin = Begin(version, layout, len(checksums))
    return [begin, *(Bucket(version, *each) for each in enumerate(checksums)), Finish(version)]


class Staging:
    """Memory for `slots` versions of nbytes each, shared by all processes that have its descriptor open."""

    def __init__(self, nbytes, slots, descriptor=None):
        self.nbytes, self.slots = nbytes, slots
        self.descriptor = descriptor
        if descriptor is None:
            self.descriptor = unnamed_file(nbytes * slots)
            weakref.finalize(self, os.close, self.descriptor)
        self._memory = np.frombuffer(mmap.mmap(self.descriptor, nbytes * slots), np.uint8).reshape(slots, nbytes)

    def of_version(self, version):
        """The memory of a version, (nbytes,) uint8, which another one `slots` later takes."""
        return self._memory[version % self.slots]

    def begin_checksums(self, version, dtype, bucket_bytes):
        """Compute the checksums of a version's buckets of `dtype`: read() -> list of int, or None until they are."""
        checksums = checksums_of(buckets_of(self.of_version(version).view(dtype), bucket_bytes))
        return lambda: checksums

    def load(self, version, flat, ranges):
        """Copy the Ranges of a version to the weights (n,), on the current stream."""
        memory = self.of_version(version).view(flat.dtype)
        for first, source, count in pieces_of(ranges, LOAD_BYTES // flat.itemsize):
            flat[first : first + count] = device.asarray(memory[source : source + count])


def checksums_of(parts):
    """The xxh64 of each of a list of NumPy arrays: list of int."""
    return [xxhash.xxh64_intdigest(as_bytes(part)) for part in parts]


class WeightSender:
    """The trainer's side. trained: a Weights or an Adapter; bucket_bytes: bytes of a bucket.

    It is on rank 0 if ranks have the weights in parts; the others have a PartSender.
    """

    # Whether processes have staging of their own, in which this then writes (push.WeightPusher).
    needs_offers = False

    def __init__(self, trained, slots, bucket_bytes):
        self.trained, self.bucket_bytes = trained, bucket_bytes
        self.staging = Staging(whole_bytes(trained), slots)
        # The messages of each version that is in staging.
        self._messages = {}

    @property
    def versions(self):
        """The versions in staging, the oldest first: list."""
        return sorted(self._messages)

    def replaced_by(self, version):
        """The version that `write` of this one overwrites, or None."""
        older = version - self.staging.slots
        return older if older in self._messages else None

    def may_write(self, version, pending):
        """Whether `write` of a version overwrites none of `pending`, a set of those that a process is to take."""
        return self.replaced_by(version) not in pending

    def write(self, version, offers=None):
        """Copy the weights as they are to staging; returns {}. offers: not needed."""
        self._messages.pop(self.replaced_by(version), None)
        memory, checksums = self.staging.of_version(version), []
        targets = buckets_of(memory.view(self.trained.flat.dtype), self.bucket_bytes)
        for part, target in zip(host_buckets(self.trained, self.bucket_bytes), targets, strict=True):
            as_bytes(target)[...] = as_bytes(part)
            checksums += checksums_of([target])
        self._messages[version] = messages_of(version, layout_of(self.trained, self.bucket_bytes), checksums)
        return {}

    def write_again(self, version, offers=None, numbers=None):
        """The same as `write`, for a version that processes have refused."""
        if is_in_parts(self.trained):
            self.trained.communicator.objects(Again())
        return self.write(version)

    def messages(self, version):
        """The messages to send for a version in staging: list of Begin, Bucket, ..., Finish."""
        return self._messages[version]


class PartSender:
    """Another rank's side of a WeightSender, which sends it what this rank has of the weights; the same arguments."""

    needs_offers = False

    def __init__(self, trained, bucket_bytes):
        self.trained, self.bucket_bytes = trained, bucket_bytes

    def take_part(self):
        """This rank's part of rank 0's `write`."""
        for _ in host_buckets(self.trained, self.bucket_bytes):
            pass

    def close(self):
        """Do nothing: rank 0 has the memory."""


class WeightReceiver:
    """The side of an inference process. trained: weights like the sender's, or a shard of them; bucket_bytes: the same.

    version: the one that is live. staging: a Staging, or what has its methods.
    """

    def __init__(self, trained, staging, bucket_bytes, version=-1):
        self.trained, self.staging, self.version, self.bucket_bytes = trained, staging, version, bucket_bytes
        self._ranges = ranges_of(trained)
        # The version that is arriving: its Begin, the checksums of its buckets so far, and those of staging.
        self._begin, self._arrived, self._read = None, {}, None
        self.ready = []

    @property
    def is_checking(self):
        """Whether a version has arrived whose checksums are still being computed."""
        return self._read is not None

    def take(self, message):
        """Take the next message. Raises WeightsRefused; further messages of that version are then ignored."""
        if isinstance(message, Begin):
            self._take_begin(message)
        elif self._begin is not None and message.version == self._begin.version:
            if isinstance(message, Bucket):
                self._arrived[message.index] = message.checksum
            else:
                self._take_finish()

    def check(self):
        """If checksums are known by now, make their version ready, or raise WeightsRefused, with its number."""
        found = self._read() if self.is_checking else None
        if found is None:
            return
        begin, self._begin, self._read = self._begin, None, None
        for index, checksum in enumerate(found):
            if checksum != self._arrived.get(index):
                raise WeightsRefused(begin.version, f"bucket {index} of version {begin.version} is damaged")
        self.ready.append(begin.version)

    def apply(self):
        """Make the oldest version that is ready the live one, and return its number. No kernel may read weights."""
        version = self.ready.pop(0)
        self.copy(version)
        return version

    def copy(self, version):
        """Make a version in staging the live one that is known to be good, as where another process has checked it."""
        self.staging.load(version, self.trained.flat, self._ranges)
        device.synchronize()
        self.version = version

    def _take_begin(self, message):
        self._begin = self._read = None
        newest, layout = max([self.version, *self.ready]), layout_of(self.trained, self.bucket_bytes)
        if message.version <= newest:
            raise WeightsRefused(message.version, f"version {message.version} is not newer than {newest}")
        if message.layout != layout:
            raise WeightsRefused(message.version, f"the layout is {message.layout}, not {layout}")
        self._begin, self._arrived = message, {}

    def _take_finish(self):
        begin, missing = self._begin, set(range(self._begin.buckets)) - self._arrived.keys()
        if missing:
            self._begin = None
            raise WeightsRefused(begin.version, f"bucket {min(missing)} of version {begin.version} is missing")
        self._read = self.staging.begin_checksums(begin.version, self.trained.flat.dtype, self.bucket_bytes)
        self.check()
