"""Micro-batches as CUDA graphs: forward, loss and backward are one launch, which takes the host microseconds.

    read = policy.run(function, micro_batch, {"loss": (1, np.float32), "entropy": (None, np.float32)})
    ...
    read()["loss"]                                        waits for this micro-batch alone

Some 900 kernels of a micro-batch take the host 30 ms to launch, and below some 4,000 tokens of Qwen3-0.6B the GPU less
to compute. So a micro-batch of at most max_tokens() tokens is padded to the shape of a bucket (micro_batch.py) and,
from the second of a bucket on, runs as a graph. The first one runs as it is, which compiles kernels and sizes the
arena; a run whose every micro-batch has another shape therefore captures nothing. Without graphs, train.cuda_graphs =
false, the same kernels run on the same padded arrays: the bits are equal. Larger micro-batches, those of
optimizer_in_backward, which update weights, and of dropout, whose masks the host numbers, are neither padded nor
captured.

Arrays that a graph reads and writes stay where they are: inputs and outputs have buffers of the bucket, activations are
at the beginning of the policy's arena, and what operators allocate for themselves comes from a memory pool of the
graphs alone. All graphs share both: they run one after the other on one stream. No memory can move during a capture, so
what the pool is going to lack is taken from what is lent before it: as much as the micro-batch that ran as it is took.
"""

from collections import OrderedDict

import numpy as np

from rlnumba.kernels.tile.tensor_map import keep_tensor_maps, release_tensor_maps, reserve_tensor_maps
from rlnumba.runs.micro_batch import DeviceBatch
from rlnumba.runtime import device, memory
from rlnumba.runtime.capture import GraphMemory, captured, pool_bytes_of
from rlnumba.runtime.context import current
from rlnumba.runtime.launch import DEBUG
from rlnumba.runtime.staging import Staged

# Tokens times parameters: above it the GPU takes longer than the host, and padding would cost time. It is 8,192 tokens
# of Qwen3-0.6B; an H200 takes 151 ms for twice as many, and the host 30 to launch the kernels.
MAX_PRODUCTS = 8192 * 600_000_000
# However small the model.
MAX_TOKENS = 32768
# Buckets that are kept, a graph of some MiB each; those of the longest disuse go first.
MAX_BUCKETS = 32
# Bytes of the operators' own arrays, all graphs together; a micro-batch that needs more runs without a graph.
POOL_BYTES = 2 << 30
# More tensor maps than one micro-batch asks for.
TENSOR_MAPS = 1 << 13


def has_graphs(train, lora):
    """Whether a run with these sections, lora being None or a LoraConfig, has graphs of its micro-batches on a GPU."""
    has_dropout = lora is not None and lora.lora_dropout > 0
    return train.cuda_graphs and not train.optimizer_in_backward and not has_dropout


def max_tokens(num_parameters):
    """The most tokens of a micro-batch that runs as a graph, for a model of which a token has so many parameters."""
    return min(MAX_PRODUCTS // num_parameters, MAX_TOKENS)


class ShapeBucket:
    """Micro-batches of one shape: their buffers on the device and, once it is captured, their graph."""

    def __init__(self, inputs, outputs):
        self.inputs, self.outputs = Staged(inputs), Staged(outputs)
        # Whether one has run without a graph, which sizes the arena, and the most bytes at one time that the operators
        # of the last such run had for themselves; the free bytes of the device when there was too little for a capture,
        # None before that.
        self.has_run, self.operator_bytes, self.lacked_bytes = False, 0, None
        # The graph and the tensor maps that it reads, the Context that has them, and whether the function leaves the
        # gradients zero.
        self.graph, self.tensor_maps, self.context, self.after = None, (), None, None

    def drop_graph(self):
        """Forget the graph."""
        if self.graph is not None:
            # Another context may be the current one where memory is reclaimed.
            with self.context.use():
                release_tensor_maps(self.tensor_maps)
        self.graph, self.tensor_maps = None, ()


class MicroBatchGraphs:
    """The graphs of one policy.

    train: its [train] section; has_dropout: whether its training forward has; num_parameters: those of its model that a
    token has.
    pads: whether micro-batches get the shape of a bucket; captures: whether these may become graphs.
    """

    def __init__(self, train, has_dropout, num_parameters, captures=True):
        self.max_tokens = max_tokens(num_parameters)
        is_gpu = device.name() == "cuda" or device.properties().capability is not None
        self.pads = is_gpu and not train.optimizer_in_backward and not has_dropout
        self.captures = captures and train.cuda_graphs and device.name() == "cuda" and not DEBUG
        self.buckets = OrderedDict()
        self.stream = self.pool = None
        self.memory = GraphMemory("some micro-batches", POOL_BYTES)
        # Counts of micro-batches so far: {"replayed": ..., "captured": ..., "eager": ...}.
        self.counts = {"replayed": 0, "captured": 0, "eager": 0}

    def run(self, policy, function, micro_batch, outputs, constants, pads=True):
        """Call function(policy, batch, results, *constants), or replay what it launched for a batch of this bucket.

        function: a module's, launches kernels and reads nothing back; batch: the DeviceBatch of the MicroBatch;
        results: {name: array} on the device, of `outputs`, {name: (length, dtype)}, length None for one of each target.
        constants: a tuple, hashable; pads: False for a function that does read from the device, which is then neither
        padded nor captured. Returns a function that waits for the results: {name: NumPy array}, without padding.
        """
        if pads and self.pads and 0 < micro_batch.num_tokens <= self.max_tokens:
            micro_batch = micro_batch.padded()
        arrays = micro_batch.arrays
        num_rows = len(micro_batch.targets["rows"])
        layouts = (
            {name: (array.shape, array.dtype) for name, array in arrays.items()},
            {name: ((num_rows if n is None else n,), np.dtype(dtype)) for name, (n, dtype) in outputs.items()},
        )
        if micro_batch.is_padded:
            # A graph cannot wait for other ranks between its forward and its backward.
            policy.begin_gradients()
            shapes = *(tuple(layout.items()) for layout in layouts), micro_batch.max_seqlen, micro_batch.levels
            bucket = self._bucket((function, constants, shapes, policy.gradients.are_zero), layouts)
        else:
            bucket = ShapeBucket(*layouts)
        bucket.inputs.send(arrays)
        batch = DeviceBatch.of(micro_batch, bucket.inputs.arrays, bucket.outputs.arrays)

        def compute():
            with policy.scope():
                function(policy, batch, bucket.outputs.arrays, *constants)

        if not (micro_batch.is_padded and self.captures):
            compute()
            self.counts["eager"] += 1
        elif not self._replay(policy, bucket, compute):
            bucket.operator_bytes = pool_bytes_of(compute)
            bucket.has_run = True
            self.counts["eager"] += 1
        read, count = bucket.outputs.read(), micro_batch.num_targets
        of_targets = [name for name, (length, _) in outputs.items() if length is None]

        def results():
            found = read()
            return found | {name: found[name][:count] for name in of_targets}

        return results

    def _bucket(self, key, layouts):
        bucket = self.buckets.get(key)
        if bucket is None:
            bucket = self.buckets[key] = ShapeBucket(*layouts)
            if len(self.buckets) > MAX_BUCKETS:
                _, oldest = self.buckets.popitem(last=False)
                oldest.drop_graph()
        self.buckets.move_to_end(key)
        return bucket

    def _replay(self, policy, bucket, compute):
        """Launch the bucket's graph, captured if it has none; False if it must run without one."""
        if bucket.graph is None and not (bucket.has_run and self._has_room(bucket)):
            return False
        # The graph reads and writes activations where they were when it was captured: their memory is there inside.
        with policy.scope():
            if bucket.graph is None:
                state = policy.gradients.are_zero
                self._capture(policy, bucket, compute)
                if bucket.graph is None:
                    policy.gradients.are_zero = state
                    return False
                bucket.after = policy.gradients.are_zero
                self.counts["captured"] += 1
            else:
                self.counts["replayed"] += 1
            bucket.graph.launch()
            policy.gradients.are_zero = bucket.after
        return True

    def _has_room(self, bucket):
        """Whether the pool, and the device, may have the memory for a graph of a bucket that has run."""
        return bucket.operator_bytes <= POOL_BYTES and self.memory.has_room(bucket.lacked_bytes)

    def _capture(self, policy, bucket, compute):
        """Record what compute() launches as the bucket's graph; without memory for it, there is none."""
        import cupy

        if self.stream is None:
            # The default stream cannot be captured. A graph is launched on whichever stream is current.
            self.stream, self.pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
            self.pool.set_limit(size=POOL_BYTES)
        before = self.pool.total_bytes()
        memory.make_room(bucket.operator_bytes - self.pool.free_bytes())
        reserve_tensor_maps(TENSOR_MAPS)
        with self.stream, cupy.cuda.using_allocator(self.pool.malloc), keep_tensor_maps() as maps:
            try:
                bucket.graph = captured(self.stream, compute)
            except BaseException as error:
                release_tensor_maps(maps)
                if not isinstance(error, MemoryError):
                    raise
                self._make_room(bucket, error)
            else:
                bucket.tensor_maps, bucket.context = maps, current()
        memory.track("graphs", self.pool.total_bytes() - before)
        # An engine that wakes may need the memory. Capturing again takes longer than what else there is to lend.
        memory.lend(self, is_costly=True)

    def _make_room(self, bucket, error):
        """After a capture that lacked memory: what others have lent may be enough when the next one comes."""
        memory.take_back(self)
        bucket.lacked_bytes = self.memory.make_room(error)

    def reclaim(self, nbytes):
        """Forget all graphs and free the memory that they alone have; later micro-batches are captured again."""
        for bucket in self.buckets.values():
            bucket.drop_graph()
        if self.pool is not None:
            before = self.pool.total_bytes()
            self.pool.free_all_blocks()
            memory.track("graphs", self.pool.total_bytes() - before)
        return []
