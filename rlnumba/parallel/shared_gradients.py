"""Gradients that other GPUs of the host have mapped, and the staging to which a rank copies what it reads of theirs.

Shared arrays get allocations of their own from cudaMalloc, whose handles are exchanged. The staging has num_slots
slots of piece_bytes for each other rank: as many as hold a rank's part of all that is shared, so that no copy waits for
an addition, but not more than STAGING_BYTES in all.
"""

import numpy as np

from rlnumba.kernels.nn.reduce import SEGMENT
from rlnumba.runtime import device, memory
from rlnumba.runtime.context import current
from rlnumba.runtime.memory import ALIGNMENT, BLOCK_BYTES, OutOfMemory, make_room, track

# A piece takes 0.1 ms at 340 GB/s, and the driver's calls for it some 10 us of the host.
PIECE_BYTES = 32 << 20
# Qwen3-0.6B's parts of other ranks take 1.2 GB on two GPUs and 1.8 on four.
STAGING_BYTES = 2 << 30
MIN_SLOTS = 2
REGION = "peer"


class SharedGradients:
    """The shared gradients and the staging of a rank on a GPU.

    map_memory(gpu, handle): this process's address of another one's allocation.
    """

    def __init__(self, rank, world_size, map_memory, piece_bytes=PIECE_BYTES):
        cupy = device.xp()
        self._cupy, self._rank, self._world_size = cupy, rank, world_size
        self._map, self._most_piece_bytes = map_memory, piece_bytes
        # Each allocation: that of this rank, and each rank's address in this process.
        self._allocations = []
        # A stream for each source, and for each of its slots an array, events after the copy to it and the addition
        # from it.
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(world_size)]
        self._staging, self._slots, self._copied, self._added = None, [], [], []
        self.piece_bytes = self.num_slots = 0

    def share(self, exchange, make):
        """make(), whose arrays get allocations of their own that all ranks map. exchange(value): all ranks' values."""
        own = []

        def allocate(nbytes):
            pointer = _allocate_alone(nbytes)
            own.extend([pointer.mem] if nbytes else [])
            return pointer

        with self._cupy.cuda.using_allocator(allocate):
            made = make()
        runtime = self._cupy.cuda.runtime
        offers = exchange((runtime.getDevice(), [runtime.ipcGetMemHandle(each.ptr) for each in own]))
        for number, allocation in enumerate(own):
            addresses = [
                allocation.ptr if rank == self._rank else self._map(gpu, theirs[number])
                for rank, (gpu, theirs) in enumerate(offers)
            ]
            self._allocations.append((allocation, addresses))
        shared_bytes = sum(each.size for each in own)
        self._reserve(*staging_of(shared_bytes, self._world_size, self._most_piece_bytes))
        return made

    def _reserve(self, num_slots, piece_bytes):
        """Have at least so many slots of at least so many bytes."""
        num_slots, piece_bytes = max(num_slots, self.num_slots), max(piece_bytes, self.piece_bytes)
        if (num_slots, piece_bytes) == (self.num_slots, self.piece_bytes):
            return
        self._cupy.cuda.Device().synchronize()
        track(REGION, -self._staging_bytes())
        self._staging = self._slots = None
        self.num_slots, self.piece_bytes = num_slots, piece_bytes
        shape = self._world_size - 1, num_slots, piece_bytes
        with memory.allocating(REGION, self._staging_bytes()):
            self._staging = self._cupy.empty(shape, np.uint8)
        track(REGION, self._staging_bytes())
        # A view of each slot: making one takes the host as long as a launch.
        self._slots = [[slot for slot in source] for source in self._staging]
        self._copied, self._added = (
            [[self._cupy.cuda.Event(disable_timing=True) for _ in range(num_slots)] for _ in self._slots]
            for _ in range(2)
        )

    def _staging_bytes(self):
        return (self._world_size - 1) * self.num_slots * self.piece_bytes

    def addresses(self):
        """The addresses at which this process has mapped memory of the other ranks: a list."""
        return [
            address
            for _, addresses in self._allocations
            for rank, address in enumerate(addresses)
            if rank != self._rank
        ]

    def close(self):
        """Forget all memory: this process maps none of it any more, nor do others map what is shared here."""
        self._allocations.clear()
        track(REGION, -self._staging_bytes())
        self._staging, self._slots, self.num_slots = None, [], 0

    def place_of(self, gradient):
        """(number of the allocation, byte in it) of an array that the other ranks have mapped; None for others."""
        for number, (allocation, _) in enumerate(self._allocations):
            offset = gradient.data.ptr - allocation.ptr
            if 0 <= offset <= offset + gradient.nbytes <= allocation.size:
                return number, offset
        return None

    def begin(self):
        """Order copies after the current stream's work so far, which has read what was in the staging."""
        event = self._cupy.cuda.get_current_stream().record()
        for stream in self._streams:
            stream.wait_event(event)

    def stream_of(self, rank):
        """The stream of copies from a rank."""
        return self._streams[rank]

    def copy(self, rank, slot, place, offset, nbytes):
        """Copy bytes of a rank's shared array to its slot here, when what was there before has been added."""
        (number, first), stream, runtime, source = place, self._streams[rank], self._cupy.cuda.runtime, self._row(rank)
        stream.wait_event(self._added[source][slot])
        target = self._slots[source][slot].data.ptr
        theirs = self._allocations[number][1][rank] + first + offset
        runtime.memcpyAsync(target, theirs, nbytes, runtime.memcpyDefault, stream.ptr)
        self._copied[source][slot].record(stream)

    def copied(self, rank, slot, nbytes):
        """The bytes that were copied last to a slot, (nbytes,) uint8, for the current stream to use until `added`."""
        source = self._row(rank)
        current().wait_event(self._cupy.cuda.get_current_stream(), self._copied[source][slot])
        return self._slots[source][slot][:nbytes]

    def added(self, rank, slot):
        """Record that the current stream reads the slot no more, once its work so far has ended."""
        self._added[self._row(rank)][slot].record(self._cupy.cuda.get_current_stream())

    def _row(self, rank):
        """The row of the staging for what comes from a rank: there is none for this one."""
        return (rank - self._rank - 1) % self._world_size


def staging_of(shared_bytes, world_size, piece_bytes=PIECE_BYTES):
    """(slots of each source, bytes of a slot) for folds of so many bytes that a rank shares."""
    part = min(shared_bytes // world_size + 4 * SEGMENT, shared_bytes)
    piece = min(piece_bytes, -(-max(part, 1) // ALIGNMENT) * ALIGNMENT)
    most = STAGING_BYTES // (max(world_size - 1, 1) * piece)
    return max(min(-(-part // piece), most), MIN_SLOTS), piece


def staging_bytes(shared_bytes, world_size):
    """Bytes of a rank's staging."""
    num_slots, piece_bytes = staging_of(shared_bytes, world_size)
    return (world_size - 1) * num_slots * piece_bytes


def _allocate_alone(nbytes):
    """Memory for CuPy that is an allocation of cudaMalloc, of whole blocks; memory that is lent is taken for it."""
    cupy = device.xp()
    size = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
    cupy.get_default_memory_pool().free_all_blocks()
    make_room(size, costly=True)
    if size > device.memory_info()[0]:
        raise OutOfMemory("grads", size)
    return cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)
