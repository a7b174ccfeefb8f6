"""New weights pushed from GPU to GPU, by all trainer ranks at once, into memory that inference processes own.

    inference process                        trainer ranks 0 .. R - 1
    OwnStaging: memory of one version
    Offer: its layout, its address       ->  mapped once by each rank
                                             rank r copies buckets r, r + R, ... to each process, and has their
                                             checksums computed; rank 0 sends Begin, Bucket, ..., Finish
    the messages of sync.py, with
    checksums of what arrived            <-

On GPUs the memory is of cudaMalloc, which other processes can map by a handle, and DMA engines write it: neither
side's kernels wait. The written bytes are not live; only WeightReceiver.apply copies them to the weights' addresses.
There is room for one version, so a rank writes the next one after the process has taken this one. The layout is
compared before the first byte is written.

Ranks have all weights after an optimizer step, so a process that is started later gets them from rank 0 alone. If each
rank has a part of them (layer_shards.py), a bucket lies within one part, whose rank copies it, and rank 0 asks the
others (Again) for what such a process gets. Older versions are kept nowhere. The memory of a process that has ended is
given back when the ranks unmap it: rank 0 where it waits for groups, others at the next push. On the cpu device the
memory is a file without a name of the inference process, which ranks open by /proc.
"""

import mmap
import os
import time
from typing import NamedTuple

import numpy as np

from rlnumba.errors import DeviceError
from rlnumba.kernels.nn import reduce
from rlnumba.kernels.peer.checksum import BLOCKS, MAX_BYTES, checksum, checksum_of, checksum_ref
from rlnumba.parallel.communicator import as_bytes
from rlnumba.parallel.transports.shared_memory import unnamed_file
from rlnumba.runtime import device
from rlnumba.runtime.memory import BLOCK_BYTES, OutOfMemory, array_at, track
from rlnumba.sampling.weights.shards import is_in_parts, whole_bytes
from rlnumba.sampling.weights.sync import Again, buckets_of, layout_of, messages_of

# Buckets begin at multiples of this many bytes.
ALIGNMENT = 256
# cudaDevAttrIpcEventSupport, for cudaDeviceGetAttribute: whether processes can share what is on a GPU.
IPC_ATTRIBUTE = 125


class Offer(NamedTuple):
    """A message to the trainer: the staging of this inference process may be written.

    layout: that of the weights it expects. nbytes: their bytes. gpu: its number, None on the cpu device. process: its
    id. handle: that of the memory, on the cpu device a file descriptor of that process.
    """

    layout: str
    nbytes: int
    gpu: int | None
    process: int
    handle: bytes | int


def bucket_size(nbytes, bucket_bytes, num_ranks):
    """Bytes of a bucket, so that each rank has as many of them, and none is larger than asked for."""
    most = min(bucket_bytes, MAX_BYTES) // ALIGNMENT * ALIGNMENT
    rounds = -(-nbytes // (num_ranks * max(most, ALIGNMENT)))
    return -(-nbytes // (num_ranks * rounds * ALIGNMENT)) * ALIGNMENT


def part_bucket_size(nbytes, bucket_bytes):
    """Bytes of a bucket of a rank's part of so many bytes, whole segments: those of a part are as large, and as many as
    a power of two, so that none is larger than asked for, as far as that can be."""
    most = min(bucket_bytes, MAX_BYTES)
    while nbytes > most and nbytes % (2 * ALIGNMENT) == 0:
        nbytes //= 2
    return nbytes


def can_share(gpu):
    """Whether processes can map each other's memory of a GPU, by its number: bool."""
    return bool(device.xp().cuda.runtime.deviceGetAttribute(IPC_ATTRIBUTE, gpu))


class OwnStaging:
    """Memory of this process for one version of what is trained, a Weights or an Adapter; see sync.Staging.

    The leader of a tensor-parallel engine stages the whole model; each follower copies its shard (Mapping).
    """

    def __init__(self, trained, bucket_bytes):
        nbytes = whole_bytes(trained)
        make = self._on_gpu if device.name() == "cuda" else self._on_host
        gpu, handle, self._memory = make(nbytes)
        self.offer = Offer(layout_of(trained, bucket_bytes), nbytes, gpu, os.getpid(), handle)

    def _on_gpu(self, nbytes):
        runtime = device.xp().cuda.runtime
        size = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        device.xp().get_default_memory_pool().free_all_blocks()
        if size > device.memory_info()[0]:
            raise OutOfMemory("new weights", size)
        # Never freed: the process ends with its last use.
        address = runtime.malloc(size)
        track("new weights", size)
        self._stream = device.xp().cuda.Stream(non_blocking=True)
        return runtime.getDevice(), runtime.ipcGetMemHandle(address), array_at(address, nbytes, np.uint8, self)

    def _on_host(self, nbytes):
        descriptor = unnamed_file(nbytes)
        return None, descriptor, np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)

    def of_version(self, version):
        """The memory, (nbytes,) uint8, whatever the version."""
        return self._memory

    def begin_checksums(self, version, dtype, bucket_bytes):
        """The same as Staging.begin_checksums, but on a stream of their own, beside what the current stream does."""
        parts = buckets_of(self._memory, bucket_bytes)
        if device.name() != "cuda":
            checksums = Checksums(parts).read()
            return lambda: checksums
        with self._stream as stream:
            found, event = Checksums(parts), stream.record()

        def read():
            if not event.done:
                return None
            # On another stream the copy would wait for what runs there.
            with stream:
                return found.read()

        return read

    def load(self, version, flat, ranges):
        """Copy Ranges of the memory to the weights (n,), on the current stream."""
        load(self._memory, flat, ranges)


def load(memory, flat, ranges):
    """Copy Ranges of whole weights in memory, (nbytes,) uint8 of any GPU, to those in flat, on the current stream."""
    for first, source, count in ranges:
        target, part = flat[first : first + count], memory[source * flat.itemsize :][: count * flat.itemsize]
        if device.name() == "cuda":
            runtime, stream = device.xp().cuda.runtime, device.xp().cuda.get_current_stream()
            runtime.memcpyAsync(target.data.ptr, part.data.ptr, part.nbytes, runtime.memcpyDefault, stream.ptr)
        else:
            as_bytes(target)[...] = part


class Checksums:
    """The checksums of a list of arrays, at addresses that 8 divides, being computed on the current stream."""

    def __init__(self, parts):
        parts = [as_bytes(part) for part in parts]
        self._partials = device.xp().zeros((len(parts), BLOCKS), np.int64)
        for part, partials in zip(parts, self._partials, strict=True):
            checksum(part[: part.size - part.size % 8].view(np.int64), partials)
        # The last bytes of each array whose number of bytes 8 does not divide, filled up with zeros.
        self._rests = {}
        for index, part in enumerate(parts):
            if part.size % 8:
                rest = self._rests[index] = device.xp().zeros(8, np.uint8)
                rest[: part.size % 8] = part[part.size - part.size % 8 :]
        self._sizes = [part.size for part in parts]

    def read(self):
        """List of int; waits for the current stream."""
        found = [checksum_of(partials) for partials in device.to_host(self._partials)]
        for index, rest in self._rests.items():
            rest = device.to_host(rest)
            # The factors are those of the words' places: larger by 2 for each word before.
            words_before = self._sizes[index] // 8 * 2
            found[index] += checksum_ref(rest) + 2 * words_before * int(rest.view(np.uint32).astype(np.int64).sum())
        return [each % (1 << 64) for each in found]


class Mapping:
    """Another process's OwnStaging in this process. Raises OSError or DeviceError where it cannot be mapped."""

    def __init__(self, offer):
        self.nbytes, self._on_gpu = offer.nbytes, offer.gpu is not None
        if self._on_gpu:
            self._map_gpu(offer)
            return
        with open(f"/proc/{offer.process}/fd/{offer.handle}", "r+b") as file:
            if os.fstat(file.fileno()).st_size != offer.nbytes:
                raise DeviceError("it has another size")
            self._memory = np.frombuffer(mmap.mmap(file.fileno(), offer.nbytes), np.uint8)

    def _map_gpu(self, offer):
        cupy = device.xp()
        self._runtime = runtime = cupy.cuda.runtime
        if not device.can_access(runtime.getDevice(), offer.gpu):
            raise DeviceError(f"GPUs {runtime.getDevice()} and {offer.gpu} cannot access each other's memory")
        try:
            self._base = runtime.ipcOpenMemHandle(offer.handle)
        except runtime.CUDARuntimeError as error:
            raise DeviceError(str(error)) from error
        self._memory = array_at(self._base, offer.nbytes, np.uint8, None)
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def write(self, part, first):
        """Copy an array of this process to bytes [first, first + nbytes), on a stream of this mapping."""
        source = as_bytes(part)
        if self._on_gpu:
            target, kind = self._base + first, self._runtime.memcpyDefault
            self._runtime.memcpyAsync(target, source.data.ptr, source.nbytes, kind, self._stream.ptr)
        else:
            self._memory[first : first + source.nbytes] = source

    def load(self, version, flat, ranges):
        """Copy Ranges of the memory to the weights (n,), on the current stream."""
        load(self._memory, flat, ranges)

    def synchronize(self):
        """Wait until all is written."""
        if self._on_gpu:
            self._stream.synchronize()

    def close(self):
        """Unmap the memory."""
        if self._on_gpu:
            self._runtime.ipcCloseMemHandle(self._base)
        self._memory = None


class WeightPusher:
    """A trainer rank's side; on rank 0 it takes the place of a WeightSender.

    trained: a Weights or an Adapter, the same on all ranks after a step, or LayerShards. communicator: that of the
    ranks, or None. Other ranks than 0 call take_part as often as rank 0 calls `write`, and when it says Again.
    """

    needs_offers = True

    def __init__(self, trained, communicator, bucket_bytes):
        alone = communicator is None or communicator.world_size == 1
        self.trained, self.communicator = trained, None if alone else communicator
        self.rank, self.num_ranks = (0, 1) if alone else (communicator.rank, communicator.world_size)
        self.is_in_parts = is_in_parts(trained)
        if self.is_in_parts:
            segments = reduce.num_segments(trained.parts_of_ranks[0].size)
            self.bucket_bytes = part_bucket_size(segments * reduce.SEGMENT * trained.flat.itemsize, bucket_bytes)
        else:
            self.bucket_bytes = bucket_size(trained.flat.nbytes, bucket_bytes, self.num_ranks)
        # {Offer: Mapping}; messages of the newest version, by its number; seconds of the last write's copies.
        self._mappings, self._messages, self.seconds = {}, {}, 0.0

    @property
    def versions(self):
        """The version that was written last, if there is one: list."""
        return list(self._messages)

    def may_write(self, version, pending):
        """Whether nothing is overwritten that a process has not taken; pending: versions that it is to take."""
        return not pending

    def write(self, version, offers):
        """Copy the weights as they are to processes, all ranks at once: {number of a process: why it was left out}.

        offers: {number: Offer} of all processes that have sent one.
        """
        if self.communicator is None:
            return self.write_again(version, offers, offers)
        return self._written(version, self._copy_together((offers, list(offers))))

    def write_again(self, version, offers, numbers):
        """The same as `write`, but to the processes of these numbers; the weights are still those of `version`. This
        rank alone copies them, if it has them all."""
        if self.is_in_parts:
            self.communicator.objects(Again())
            return self._written(version, self._copy_together((offers, list(numbers))))
        left_out = self._map(offers)
        found = left_out, *self._copy({number: offers[number] for number in numbers}, self._buckets(0, 1))
        return self._written(version, [found])

    def take_part(self):
        """Another rank's part of rank 0's `write`, or `write_again`."""
        self._copy_together(None)

    def _copy_together(self, wanted):
        """Copy what each rank copies: what all have found, a list. wanted: on rank 0, (offers, numbers of those that
        are written to)."""
        offers, numbers = self.communicator.objects(wanted)[0]
        left_out = self._map(offers)
        written = {number: offers[number] for number in numbers}
        found = self._copy(written, self._buckets(self.rank, self.num_ranks))
        return self.communicator.objects((left_out, *found))

    def messages(self, version):
        """The messages to send for the newest version: list of Begin, Bucket, ..., Finish."""
        return self._messages[version]

    def unmap_others(self, offers):
        """Unmap the memory of processes whose offers are not among these: {number: Offer}."""
        for offer in self._mappings.keys() - set(offers.values()):
            self._mappings.pop(offer).close()

    def close(self):
        """Unmap all memory."""
        self.unmap_others({})

    def _written(self, version, found):
        """Note what the ranks' _copy has returned: {number: why a process was left out}."""
        checksums, left_out = {}, {}
        for of_rank, own_checksums, _ in found:
            left_out |= of_rank
            checksums |= own_checksums
        self.seconds = max(seconds for _, _, seconds in found)
        layout = layout_of(self.trained, self.bucket_bytes)
        self._messages = {version: messages_of(version, layout, [checksums[i] for i in sorted(checksums)])}
        return left_out

    def _buckets(self, rank, num_ranks):
        """The buckets that one of so many ranks copies: {number: array}."""
        parts = buckets_of(self.trained.flat, self.bucket_bytes)
        if self.is_in_parts:
            return dict(enumerate(parts, self.trained.first * self.trained.flat.itemsize // self.bucket_bytes))
        return dict(list(enumerate(parts))[rank::num_ranks])

    def _copy(self, offers, buckets):
        """Copy buckets to where offers are mapped: ({bucket: checksum}, seconds)."""
        mappings = [self._mappings[offer] for offer in offers.values() if offer in self._mappings]
        device.synchronize()
        began = time.perf_counter()
        # Bucket by bucket, on a stream for each process: none waits for what another one's GPU receives.
        for index, part in buckets.items():
            for mapping in mappings:
                mapping.write(part, index * self.bucket_bytes)
        checksums = Checksums(buckets.values()).read()
        for mapping in mappings:
            mapping.synchronize()
        return dict(zip(buckets, checksums, strict=True)), time.perf_counter() - began

    def _map(self, offers):
        """Map what is offered, and unmap what is not any more: {number: why it could not be mapped}."""
        layout, left_out = layout_of(self.trained, self.bucket_bytes), {}
        self.unmap_others(offers)
        for number, offer in offers.items():
            if offer.layout != layout:
                left_out[number] = f"its layout is {offer.layout}, not {layout}"
            elif offer not in self._mappings:
                try:
                    self._mappings[offer] = Mapping(offer)
                except (OSError, DeviceError) as error:
                    left_out[number] = str(error)
        return left_out
