"""An engine on several GPUs, a process each: the inference process of inference_worker.py and its followers.

    trainer  <->  leader, the inference process       rank 0: scheduler, messages, its shard of the model
                      followers, started by it        ranks 1, 2, ...: their shards; they replay the leader's steps

The trainer knows the leader alone. The leader checks new weights, which are sent whole, and each process copies its
shard of them (weight_shards.py). All end together: a follower with its leader, whose connection then closes, and the
leader with the first follower, whose end its next step meets. A follower keeps the leader's connection to the trainer
open, which so closes when all processes of the engine have ended, and have given back their memory.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from multiprocessing import Pipe, get_context, reduction
from multiprocessing.connection import wait
from typing import NamedTuple

from rlnumba.errors import CommunicationError, UserError
from rlnumba.kernels.gemm import ops as gemm
from rlnumba.model.config import ModelConfig
from rlnumba.model.hub import find_model
from rlnumba.model.lora import adapter_of_run
from rlnumba.model.quantized.weights import weights_in
from rlnumba.model.shard import Shard
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import Transformer, check_shard, load_model
from rlnumba.model.weights import Weights
from rlnumba.parallel.launch import how_ended
from rlnumba.parallel.tensor_parallel import TensorParallel, follow
from rlnumba.parallel.transports.shared_memory import SharedMemoryCommunicator, make_links
from rlnumba.runtime import device, garbage
from rlnumba.runtime.compile import ahead_of_time
from rlnumba.sampling.weights.push import Mapping
from rlnumba.sampling.weights.sync import Staging, WeightReceiver

# Seconds in which a follower that has ended can have reported why, and then be waited for.
REPORT_S, END_S = 2.0, 0.2
# Seconds in which the leader finds out by itself that a follower has ended.
NOTICE_S = 5.0
# Seconds in which the last messages of a process that ends are written.
FINISH_S = 2.0


class HeldModel(NamedTuple):
    """The trainer's model but for the weights that it trains, which it sends; the model's folder may be gone.

    config, generation_config: the whole Transformer's. base: the folder or hub id of the weights of a model whose
    adapter alone is trained, else None; files: the result of identity_of that folder when the run began, or None.
    """

    config: ModelConfig
    generation_config: dict
    tokenizer: Tokenizer | None
    base: str | None = None
    files: dict | None = None

    @classmethod
    def of(cls, model, tokenizer, source, is_one_host=True):
        """The HeldModel of a Transformer that is trained, and was read from `source`.

        is_one_host: whether the inference processes are of this host, and see the same files.
        """
        held = cls(model.config, model.generation_config, tokenizer)
        if model.adapter is None:
            return held
        return held._replace(base=source, files=identity_of(source) if is_one_host else None)


def identity_of(source):
    """{name: what changes with the content} of the files with the weights of a folder or hub id."""
    found = {path.name: path.stat() for path in sorted(find_model(source).glob("*.safetensors"))}
    return {name: (each.st_ino, each.st_size, each.st_mtime_ns) for name, each in found.items()}


class Failed(NamedTuple):
    """The last message of an inference process: a failure that would come again. trace: that of a bug, else None."""

    message: str
    trace: str | None

    @classmethod
    def of(cls, error):
        """The report of an exception that is being handled."""
        if isinstance(error, UserError):
            return cls(str(error), None)
        return cls(f"internal error: {type(error).__name__}: {error}", traceback.format_exc())


class Followers:
    """The followers of an inference process, as that has them; there are none where its model is not cut.

    setup: its Setup; connection: to the trainer.
    """

    def __init__(self, setup, connection):
        self.count, self._processes, self._reports = len(setup.followers), [], []
        if not self.count:
            return
        self._link, *links = make_links(self.count + 1, setup.timeout_s)
        context, staging = get_context("spawn"), setup.staging and Descriptor(setup.staging[2])
        for link in links:
            own, other = Pipe()
            process = context.Process(target=_follow, args=(link, other, connection, staging, setup))
            process.start()
            self._processes.append(process)
            self._reports.append(own)
            link.close()
            other.close()
        threading.Thread(target=self._end_with_follower, args=(connection,), daemon=True).start()

    def load_model(self, setup):
        """This process's model, or its shard of it, which computes with the followers."""
        return _load_shard(setup, Shard(0, self.count + 1), self._link if self.count else None)

    def failure(self):
        """The report of a follower that has ended: Failed, or None if it was killed."""
        wait([process.sentinel for process in self._processes], REPORT_S)
        for report in self._reports:
            with contextlib.suppress(EOFError, OSError):
                if report.poll():
                    return report.recv()
        return None

    def _end_with_follower(self, connection):
        """End this process after a follower: if it waits for that one's part on its GPU, nothing else would."""
        wait([process.sentinel for process in self._processes])
        time.sleep(NOTICE_S)
        failure = self.failure()
        if failure is not None:
            connection.send(failure)
            connection.finish(FINISH_S)
        _end(f"a process of this engine has ended ({self.ended()})")

    def ended(self):
        """The ends of the followers that have ended, for the line of an error: str."""
        found = []
        for rank, process in enumerate(self._processes, start=1):
            # Its files are closed a moment before it can be waited for.
            process.join(END_S)
            if process.exitcode is not None:
                found.append(f"rank {rank} {how_ended(process.exitcode)}")
        return ", ".join(found)


class Descriptor:
    """A file's descriptor that goes to a process which is being started."""

    def __init__(self, number):
        self.number = number

    def __getstate__(self):
        return reduction.DupFd(self.number)

    def __setstate__(self, state):
        self.number = state.detach()


def choose_device(setup, rank=0):
    """Let this process use its device, and the GEMM backend of the run. rank: among the processes of the engine."""
    gpu, num_sharing = [(setup.gpu, setup.num_sharing), *setup.followers][rank]
    if gpu is None:
        device.select(setup.device)
    else:
        device.use_gpu(gpu, num_sharing)
        if setup.kernels is None or rank:
            # The trainer, or the leader, compiles what both launch.
            ahead_of_time.leave_to_another()
    gemm.set_backend(setup.gemm)
    if gpu is not None and setup.kernels is not None and rank == 0:
        ahead_of_time.start(*setup.kernels)


def _load_shard(setup, shard, link):
    """A process's part of the model, and of the adapter that is trained."""
    held = setup.held
    check_shard(shard, held.config)
    if setup.lora is None:
        weights = Weights(held.config, setup.dtype, shard=shard)
    else:
        if held.files is not None and identity_of(held.base) != held.files:
            raise UserError(
                f"{held.base}: its weights are not those any more with which the run began; with [lora] a process that "
                "is started reads them"
            )
        kind = weights_in(setup.quantization)
        weights = load_model(held.base, setup.dtype, held.config.heads, shard=shard, make_weights=kind).weights
    model = Transformer(shard.config_of(held.config), weights, held.generation_config)
    if setup.lora is not None:
        model.adapter = adapter_of_run(setup.lora, weights, model.dtype.name, held.base, setup.seed)
    if link is not None:
        model.ranks = TensorParallel(_connect(link, setup), model.config.vocab_size)
    return model


def _connect(link, setup):
    """The Communicator of the processes of an engine."""
    control = SharedMemoryCommunicator(link)
    if setup.gpu is None:
        return control
    from rlnumba.parallel.transports import peer

    return peer.PeerCommunicator(control, peer.PeerArena(control), _end)


def _end(message):
    """End this process, whose operation with the others does not end."""
    print(f"rlnumba: {message}", file=sys.stderr, flush=True)
    os._exit(1)


def _follow(link, report, connection, staging, setup):
    """The main function of a follower. connection: the leader's to the trainer, which is kept open."""
    threading.Thread(target=_end_with_leader, args=(report,), daemon=True).start()
    try:
        choose_device(setup, link.rank)
        model = _load_shard(setup, Shard(link.rank, len(setup.followers) + 1), link)
        shared = staging and Staging(*setup.staging[:2], staging.number)
        receiver = WeightReceiver(model.trained, shared, setup.bucket_bytes)

        def open_staging(offer):
            receiver.staging = Mapping(offer)

        led = {"open_staging": open_staging, "copy_weights": receiver.copy}
        follow(model, setup.engine, led | {"freeze": garbage.freeze})
    except CommunicationError:
        pass  # another process of the engine has ended
    except Exception as error:  # reported by the trainer
        with contextlib.suppress(OSError):
            report.send(Failed.of(error))
    # Not through exit handlers, which may wait for threads.
    os._exit(1)


def _end_with_leader(report):
    """End this process when the leader has ended."""
    with contextlib.suppress(OSError):
        report.poll(None)
    os._exit(1)
