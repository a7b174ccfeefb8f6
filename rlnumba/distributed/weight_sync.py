"""New weights on their way from the trainer to inference processes: taken whole and checked, or not at all.

    trainer, WeightSender                    inference process, WeightReceiver
    write(v): weights -> staging
    Begin(v, layout, sizes)             ->   refused where v is not newer, or the layout is another one
    Bucket(v, i, checksum), for all     ->   refused where the bytes in staging are others
    Finish(v)                           ->   refused where a bucket is missing; else v is ready
                                             apply(v): staging -> the weights' fixed addresses, between two steps

Until `apply` the old weights are the live ones, and after a refusal they stay so. Of a model with an adapter the
adapter alone is sent. Staging is memory of the host that all processes share, with room for several versions: while
one is written, others can be read, also by a process that has just been started.
"""

import mmap
import os
import weakref
from typing import NamedTuple

import numpy as np
import xxhash

from rlnumba.distributed.communicator import as_bytes
from rlnumba.distributed.shared_memory import unnamed_file
from rlnumba.distributed.weight_shards import pieces_of, ranges_of, whole_of
from rlnumba.errors import UserError
from rlnumba.runtime import device


class WeightsRefused(UserError):
    """Weights that were not taken: the old ones are live."""


class Begin(NamedTuple):
    """Weights of a version follow: `layout` is layout_of what is trained, `buckets` the number of their parts."""

    version: int
    layout: str
    buckets: int


class Bucket(NamedTuple):
    """A part of a version is in staging, with this xxh64."""

    version: int
    index: int
    checksum: int


class Finish(NamedTuple):
    """All parts of a version are in staging."""

    version: int


def layout_of(trained):
    """In which two layouts of trained weights, of a Weights or an Adapter, differ: str; of a shard, the model's."""
    config, (size, decay_end) = trained.config, whole_of(trained)
    return f"{type(trained).__name__} {config.architecture} {trained.flat.dtype} {size} {decay_end}"


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


class WeightSender:
    """The trainer's side. trained: a Weights or an Adapter; bucket_bytes: of a part."""

    def __init__(self, trained, slots, bucket_bytes):
        self.trained, self.bucket_bytes = trained, bucket_bytes
        self.staging = Staging(trained.flat.nbytes, slots)
        # By version, of those that are in staging.
        self._messages = {}

    @property
    def versions(self):
        """The versions in staging, the oldest first: list."""
        return sorted(self._messages)

    def replaced_by(self, version):
        """The version that `write` of this one overwrites, or None."""
        older = version - self.staging.slots
        return older if older in self._messages else None

    def write(self, version):
        """Copy the weights as they are to staging."""
        device.synchronize()
        self._messages.pop(self.replaced_by(version), None)
        memory, flat, checksums = self.staging.of_version(version), self.trained.flat, []
        step = max(self.bucket_bytes // flat.itemsize, 1)
        for first in range(0, flat.shape[0], step):
            part = as_bytes(device.to_host(flat[first : first + step]))
            target = memory[first * flat.itemsize :][: part.size]
            target[...] = part
            checksums.append(xxhash.xxh64_intdigest(target))
        begin = Begin(version, f"{layout_of(self.trained)} {step}", len(checksums))
        self._messages[version] = [begin, *(Bucket(version, *each) for each in enumerate(checksums)), Finish(version)]

    def messages(self, version):
        """What is sent for a version in staging: list of Begin, Bucket, ..., Finish."""
        return self._messages[version]


class WeightReceiver:
    """The side of an inference process. trained: as the sender's, or a shard of it; bucket_bytes: the same; version:
    that is live."""

    def __init__(self, trained, staging, bucket_bytes, version=-1):
        self.trained, self.staging, self.version = trained, staging, version
        self._step, self._ranges = max(bucket_bytes // trained.flat.itemsize, 1), ranges_of(trained)
        # Of the version that is arriving: its Begin, and which of its parts have arrived.
        self._begin, self._arrived = None, set()
        self.ready = []

    def take(self, message):
        """Take the next message. Raises WeightsRefused; further messages of that version are then ignored."""
        if isinstance(message, Begin):
            self._take_begin(message)
        elif self._begin is not None and message.version == self._begin.version:
            try:
                (self._take_bucket if isinstance(message, Bucket) else self._take_finish)(message)
            except WeightsRefused:
                self._begin = None
                raise

    def apply(self):
        """Make the oldest version that is ready the live one, and return its number. No kernel may read weights."""
        version = self.ready.pop(0)
        self.copy(version)
        return version

    def copy(self, version):
        """Make a version in staging the live one that is known to be good, as where another process has checked it."""
        flat, memory = self.trained.flat, self.staging.of_version(version).view(self.trained.flat.dtype)
        for first, source, count in pieces_of(self._ranges, self._step):
            flat[first : first + count] = device.asarray(memory[source : source + count])
        device.synchronize()
        self.version = version

    def _take_begin(self, message):
        self._begin = None
        newest, layout = max([self.version, *self.ready]), f"{layout_of(self.trained)} {self._step}"
        if message.version <= newest:
            raise WeightsRefused(f"version {message.version} is not newer than {newest}")
        if message.layout != layout:
            raise WeightsRefused(f"the layout is {message.layout}, not {layout}")
        self._begin, self._arrived = message, set()

    def _take_bucket(self, message):
        first = message.index * self._step * self.trained.flat.itemsize
        part = self.staging.of_version(message.version)[first : first + self._step * self.trained.flat.itemsize]
        if xxhash.xxh64_intdigest(part) != message.checksum:
            raise WeightsRefused(f"bucket {message.index} of version {message.version} is damaged")
        self._arrived.add(message.index)

    def _take_finish(self, message):
        missing = set(range(self._begin.buckets)) - self._arrived
        if missing:
            raise WeightsRefused(f"bucket {min(missing)} of version {message.version} is missing")
        self._begin = None
        self.ready.append(message.version)
