"""`rlnumba serve --tp`: a server whose model is cut over ranks (parallel/tensor_parallel.py).

    serve_parts(2, checkpoint, server)     returns once a signal has ended the server

Rank 0 has the server of one process, with the engine; the others follow it. The process that starts them sends signals
on to all: rank 0 lets what has begun end, and then the others.
"""

from typing import NamedTuple

from rlnumba.config import EngineConfig
from rlnumba.engine.core import Engine
from rlnumba.errors import UserError
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.parallel.launch import launch
from rlnumba.parallel.placement import placement
from rlnumba.parallel.tensor_parallel import follow, load_shard
from rlnumba.runtime import signals
from rlnumba.serve.process import ServerProcess, announce
from rlnumba.serve.service import Parsers
from rlnumba.serve.settings import ServerSettings
from rlnumba.serve.watch.listen import bind


class PartedServer(NamedTuple):
    """The server of rank 0. parsers: the arguments of Parsers after the tokenizer."""

    settings: ServerSettings
    engine: EngineConfig
    tokenizer: Tokenizer | None
    parsers: tuple


def serve_parts(count, checkpoint, server):
    """Serve a Checkpoint's model, a part of it on each of `count` ranks, until a signal: rank 0 prints the URL.

    server: PartedServer. Raises RankError for the first rank that fails, ConfigError without devices for all.
    """
    launch(_serve, count, checkpoint, server, ends_by_signal=True, **placement(count, "tensor_parallel_size"))


def _serve(communicator, checkpoint, server):
    """The work of a rank."""
    settings = server.settings
    if communicator.rank == 0:
        try:
            bound = bind(settings.host, settings.port)
        except OSError as error:
            raise UserError(f"--host {settings.host} --port {settings.port}: {error.strerror}") from error
    model = load_shard(communicator, checkpoint.load)
    if communicator.rank:
        # Rank 0 ends it.
        signals.hold()
        follow(model, server.engine)
        return
    parsers = Parsers(server.tokenizer, *server.parsers)
    process = ServerProcess(settings, Engine(model, server.tokenizer, server.engine), parsers, bound)
    process.run(lambda: announce(process.url))
    model.ranks.end()
