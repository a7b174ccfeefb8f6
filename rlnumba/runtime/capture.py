"""CUDA graphs of what launches kernels, and lack of memory for them."""

import sys
from contextlib import suppress

from rlnumba.runtime import device, memory, signals
from rlnumba.runtime.compile.pool import one_line

# cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY.
OUT_OF_MEMORY = 2


def captured(stream, compute):
    """The graph (cupy.cuda.Graph) of what compute() launches on a CuPy stream, which is the current one.

    It has the driver's memory that its first launch would take otherwise, and may be launched on any stream. Raises
    MemoryError where that is too little, and what compute raises; the stream captures no more then.
    """
    import cupy

    # Nothing can be copied from the device while a stream captures, not even a checkpoint.
    with signals.held():
        stream.begin_capture()
        try:
            compute()
            graph = stream.end_capture()
            graph.upload(stream)
            # A launch on another stream does not wait for an upload: it may never end if it begins earlier.
            stream.synchronize()
        except BaseException as error:
            with suppress(cupy.cuda.runtime.CUDARuntimeError):
                stream.end_capture()
            if getattr(error, "status", None) == OUT_OF_MEMORY:
                raise MemoryError(str(error)) from error
            raise
    return graph


def pool_bytes_of(compute):
    """Call compute(): the most bytes that arrays which it makes had at one time of CuPy's pools; 0 without a GPU."""
    if device.name() != "cuda":
        compute()
        return 0
    from cupy.cuda import MemoryHook

    sizes, most = {}, 0

    class Sizes(MemoryHook):
        name = "rlnumba.runtime.capture"

        def malloc_postprocess(self, mem_size, pmem_id, **others):
            nonlocal most
            # 0 where it has failed.
            if pmem_id:
                sizes[pmem_id] = mem_size
                most = max(most, sum(sizes.values()))

        def free_preprocess(self, pmem_id, **others):
            # It may be older.
            sizes.pop(pmem_id, None)

    with Sizes():
        compute()
    return most


class GraphMemory:
    """Memory for captures that lacked it, and the line that says so, once.

    what: what then runs without graphs; nbytes: of lent memory that is freed for another attempt.
    """

    def __init__(self, what, nbytes):
        self.what, self.nbytes, self.is_said = what, nbytes, False

    def make_room(self, error):
        """After a MemoryError of `captured`: None if lent memory was freed, which may be enough for another attempt,
        else the bytes that the device has free, for `has_room`."""
        if memory.reclaim(self.nbytes):
            return None
        if not self.is_said:
            self.is_said = True
            text = f"rlnumba: {self.what} run slower, without CUDA graphs: {one_line(error)}"
            print(text, file=sys.stderr, flush=True)
        return device.memory_info()[0]

    @staticmethod
    def has_room(lacked_bytes):
        """Whether another attempt may have the memory: none lacked any, or more is free than then."""
        return lacked_bytes is None or device.memory_info()[0] >= lacked_bytes + memory.MARGIN_BYTES
