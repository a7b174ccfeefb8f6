"""Tensor-parallel inference: each rank has a shard of the model (model/shard.py); the bits are those of one rank.

    every layer     GATHER and norm -> qkv of own heads -> attention -> GATHER -> own columns of o + residual
                    or, the same of linear attention: in_proj of own heads -> delta rule -> GATHER -> out_proj
                    GATHER and norm -> gate and up of own columns -> SwiGLU -> GATHER -> own columns of down + residual
    head            logits of own tiles -> GATHER -> whole rows, of many each rank's own ones -> tokens -> GATHER

Gathers copy, and no rank adds what another one has computed: there are no sums over ranks, whose order would have to
be that of one rank's GEMM. Each rank has its columns of the residual stream; norms are computed of whole rows, by all
ranks, of few rows in the kernel that gathers them (kernels/peer/rmsnorm.py).

Three ways to run ranks:

    generation      rank 0 has the engine; the others call the same methods of their runners (lead, follow)
    rollout         the same for as long as rank 0 draws, of ranks that then train (together; cut_weights.py)
    scoring         all ranks do the same calls

Whole rows of logits reach the rank that samples them, of few rows every rank, and all have all tokens. So each makes
the next decode step's arrays itself, and on GPUs each replays CUDA graphs of its own, which contain the gathers:
between two decode steps ranks exchange nothing but which step it is, and now and then a hash of these arrays, which
must be equal.

A rank is a process, on the cpu device or with a GPU (placement.py).
"""

import contextlib
import time

import numpy as np
import xxhash

from rlnumba.engine.core import Engine
from rlnumba.engine.llm import compile_list
from rlnumba.errors import CommunicationError, DeviceError, UserError
from rlnumba.kernels.gemm.ops import linear
from rlnumba.kernels.logprob import slices
from rlnumba.kernels.logprob.chunked import forward_rows, logp_of_logits
from rlnumba.kernels.nn.rmsnorm import rmsnorm
from rlnumba.model.shard import Columns, Shard, vocabulary
from rlnumba.parallel.communicator import as_bytes
from rlnumba.parallel.launch import launch, launch_groups
from rlnumba.parallel.placement import placement
from rlnumba.runtime import device
from rlnumba.runtime.arena import HeapAllocator
from rlnumba.runtime.context import current

# The module that lists the kernels of ranks.
KERNEL_LIST = "rlnumba.parallel.kernel_list"
# Seconds between two signs of life of a rank 0 that has nothing to do: less than any time limit of an operation.
MEET_S = 1.0
# Decode steps between two comparisons, each of which waits for the device once.
COMPARED_STEPS = 256
# Rows from which on each rank samples some of them. It then receives an R-th of the logits, 2 us a row less of a
# vocabulary of 152k at R = 2 and 150 GB/s, and one exchange more, of 6 us. Not tuned.
SHARED_ROWS = 8


class TensorParallel:
    """Operations of the ranks of a Communicator in the forward of one model: Transformer.ranks.

    vocab_size: the model's. first: the number of the first of them in a run of which they are a group; None: they are
    all. All ranks call each method at the same time, but for `end`. memory: an Arena, inside its scope, or
    HeapAllocator.
    """

    def __init__(self, communicator, vocab_size, first=None):
        self.communicator, self.vocab_size, self.first = communicator, vocab_size, first
        self.rank, self.count = communicator.rank, communicator.world_size
        self.num_steps, self.met_at = 0, 0.0

    def gather_columns(self, part, out):
        """Write and return out (N, C), whose columns are those of the ranks' parts (N, C / count), in their order."""
        self.communicator.gather_columns(part, out, Columns.equal(out.shape[1], self.count))
        return out

    def rmsnorm(self, part, weight, eps, out, memory, unit_offset=False):
        """out (N, D) = rmsnorm (kernels/nn/rmsnorm.py) of rows; part (N, D / count): this rank's columns of them."""
        if self.communicator.gather_rmsnorm(part, weight, eps, out, unit_offset):
            return
        with memory.scope():
            rows = self.gather_columns(part, memory.empty(out.shape, out.dtype))
            rmsnorm(rows, weight, eps, out, memory.empty((len(out),), np.float32), unit_offset)

    def own_columns(self, x, memory):
        """A copy (N, C / count) of this rank's columns of x (N, C)."""
        columns = Columns.equal(x.shape[1], self.count).of(self.rank)
        part = memory.empty((x.shape[0], columns.stop - columns.start), x.dtype)
        if x.itemsize < 4:  # CuPy copies word by word
            part.view(np.int32)[...] = x.view(np.int32)[:, columns.start // 2 : columns.stop // 2]
        else:
            part[...] = x[:, columns]
        # CuPy's kernel is not one after which the next may start early.
        current().serialize_next()
        return part

    def logits(self, hidden, lm_head, out, memory):
        """Write the logits (N, V) float32 of hidden states (N, D). lm_head: this rank's rows of the head."""
        part = memory.empty((len(hidden), len(lm_head)), np.float32)
        linear(hidden, lm_head, part)
        self.communicator.gather_columns(part, out, vocabulary(self.vocab_size, self.count))

    def own_rows(self, count):
        """The rows, of `count`, that this rank samples: a slice; None if all ranks sample all, because they are few."""
        return None if count < SHARED_ROWS else _shares(count, self.count).of(self.rank)

    def logits_of_own_rows(self, hidden, lm_head, out, memory):
        """The same as `logits`, but only of this rank's own_rows of the hidden states."""
        part = memory.empty((len(hidden), len(lm_head)), np.float32)
        linear(hidden, lm_head, part)
        row_width = _shares(len(hidden), self.count).width
        self.communicator.exchange_rows(part, out, vocabulary(self.vocab_size, self.count), row_width)

    def gather_rows(self, own, outputs, memory):
        """Write a list of arrays (N,) of 32-bit elements from what each rank has of its own_rows: own (A, n) int32."""
        count = len(outputs[0])
        whole = memory.empty((len(outputs), count), np.int32)
        self.communicator.gather_columns(own, whole, _shares(count, self.count))
        for array, row in zip(outputs, whole, strict=True):
            array.view(np.int32)[...] = row
        # CuPy's kernel is not one after which the next may start early.
        current().serialize_next()

    def linear_logp(self, hidden, lm_head, ids, temperature, logp, lse, entropy, top1):
        """kernels.logprob.ops.linear_logp, with its bits. lm_head: this rank's rows of the head."""
        step = forward_rows(self.vocab_size)
        z = device.xp().empty((min(step, len(hidden)), self.vocab_size), np.float32)
        for rows, count in slices(len(hidden), step):
            self.logits(hidden[rows], lm_head, z[:count], HeapAllocator())
            of_rows = (array[rows] for array in (logp, lse, entropy, top1))
            logp_of_logits(z[:count], ids[rows], temperature, *of_rows)

    def compare_steps(self, state):
        """Count a decode step, whose DecodeState this is; every COMPARED_STEPS-th one is compared between the ranks.

        Each rank makes a step's arrays from those of the step before. Raises UserError, on all ranks, where they
        differ: in the blocks of keys and values that they read, or in the tokens that they have sampled.
        """
        self.num_steps += 1
        if self.num_steps % COMPARED_STEPS:
            return
        hashes = {
            name: xxhash.xxh64_intdigest(as_bytes(np.ascontiguousarray(device.to_host(array))))
            for name, array in (("block tables", state.block_tables), ("tokens", state.input_ids))
        }
        for rank, found in enumerate(self.communicator.objects(hashes)):
            for name, expected in hashes.items() if rank != self.rank else ():
                if found[name] != expected:
                    ranks = "rank {} and rank {}".format(*sorted((rank, self.rank)))
                    raise UserError(f"decode step {self.num_steps}: {ranks} of the model have different {name}")

    def lead(self, method, *arguments):
        """On rank 0, let the other ranks call a method of their runners, too, by its name; they `follow`."""
        if self.rank == 0:
            self.communicator.objects((method, arguments))

    def meet_if_due(self):
        """On rank 0, let the other ranks know now and then that there is nothing to do: they do not wait for ever."""
        if time.monotonic() - self.met_at > MEET_S:
            self.met_at = time.monotonic()
            self.lead("meet")

    def end(self):
        """Let the other ranks return from `follow`. Rank 0 alone."""
        self.communicator.objects(None)

    @contextlib.contextmanager
    def failing(self):
        """Let an error of the block, by which one rank of a group ends, end the others' operations in the group, too.

        Where all ranks of a run are one group they meet by themselves. Errors have the numbers of the run's ranks.
        """
        try:
            yield
        except BaseException as error:
            if self.first is None:
                raise
            self.communicator.fail()
            if not isinstance(error, CommunicationError):
                raise
            rank = None if error.rank is None else self.first + error.rank
            group = f"ranks {self.first} to {self.first + self.count - 1}, here 0 to {self.count - 1}"
            raise CommunicationError(f"{group}: {error}", rank) from error


def _shares(count, ranks):
    """The Columns of `count` things that each of the ranks has, in one row: nearly the same number."""
    return Columns(-(-count // ranks), 0, 0, count)


def follow(model, config, others=None):
    """Do the steps of rank 0's engine until it calls `end`. config: its EngineConfig.

    others: {name: function} of what it leads beside the methods of its runner, and to meet.
    """
    replay(Engine(model, None, config), others)


def replay(engine, others=None):
    """Do the steps of rank 0's engine with this rank's until rank 0 calls `end`. others: those of `follow`."""
    others = {"meet": lambda: None} | (others or {})
    while (call := engine.model.ranks.communicator.objects(None)[0]) is not None:
        method, arguments = call
        if method != "repeat":
            # Rank 0 has read the results of its last step, so the memory that the host's arrays go through is free.
            engine.runner.synchronize()
        (others.get(method) or getattr(engine.runner, method))(*arguments)
    engine.runner.synchronize()


def together(engine, function, otherwise=None):
    """The value of function(), which may use the Engine of rank 0; the other ranks replay its steps: `otherwise`.

    All ranks of the engine's model call this at the same time. An engine without others calls the function alone.
    """
    ranks = engine.model.ranks
    if ranks is None:
        return function()
    failure = None
    with ranks.failing():
        if ranks.rank:
            # Where the weights may have been written.
            engine.context.wait_for(current())
            replay(engine)
            return otherwise
        try:
            value = function()
        except (CommunicationError, DeviceError):
            raise
        except UserError as error:
            # Between two steps; the other ranks may be in the middle of one after any other error.
            failure = error
        ranks.end()
    if failure is not None:
        raise failure
    return value


def on_ranks(function, count, load, *arguments):
    """function(model, *arguments) on `count` ranks, each with its shard of a model: the result of rank 0.

    load: called with shard=Shard, returns that part of the Transformer, as Checkpoint.load does. function, load,
    arguments: what can be pickled; progress, the last of the arguments, is None on other ranks. Raises RankError for
    the first rank that fails, ConfigError where there are no devices for all.
    """
    place = placement(count, "tensor_parallel_size")
    return launch(_with_shard, count, function, load, arguments, **place)[0]


def on_groups(function, count, load, calls, key):
    """function(model, *arguments) for each arguments of `calls`, at the same time, each as on_ranks has it: a list.

    key: the option that asks for the GPUs of all. Raises as on_ranks.
    """
    place = placement(count * len(calls), key)
    return launch_groups(_with_shard, count, [(function, load, arguments) for arguments in calls], **place)


def load_shard(communicator, load):
    """This rank's shard of a model, which computes with those of the other ranks. load: of on_ranks."""
    model = load(shard=Shard(communicator.rank, communicator.world_size))
    model.ranks = TensorParallel(communicator, model.config.vocab_size)
    return model


def _with_shard(communicator, function, load, arguments):
    """The work of each rank of on_ranks: load its shard of the model and call function(model, *arguments)."""
    model = load_shard(communicator, load)
    if communicator.rank:
        *arguments, _ = arguments
        function(model, *arguments, None)
        return None
    return function(model, *arguments)


def compile_parts_ahead(count, request, scores_whole=False):
    """The same as engine.llm.compile_ahead, but for `count` ranks with a part of the model each.

    request: of kernel_request, the whole model's; scores_whole: whether this process scores the same sequences with all
    of it.
    """
    compile_list(KERNEL_LIST, (count, request, scores_whole))
