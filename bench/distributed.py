"""What GPUs of one host do together: small gathers in a CUDA graph, large gathers, and folds both ways, beside NCCL.

    python bench/distributed.py              2 GPUs
    python bench/distributed.py --gpus 4

With RLNUMBA_RANKS_PER_GPU ranks share GPUs, and are measured at their time slices; NCCL refuses that.

Results are compared with NumPy's by tests/parallel/test_peer.py. GB/s are of the bytes that one rank receives.
"""

import argparse
import pathlib
import sys
import time
from types import SimpleNamespace

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import numpy as np
from report import row

from rlnumba.model.shard import Columns
from rlnumba.parallel import launch
from rlnumba.parallel.placement import gpus_of_ranks
from rlnumba.runtime.launch import pdl_scope

LARGE_BYTES, PARAMETERS = 256 << 20, 1 << 28
# Bytes of a rank's array; the last two are also those of 64 rows of Qwen3-8B's o and down on two GPUs, and of its MLP.
GATHERS = {"16 KiB a rank": 16 << 10, "8 KiB a rank": 8 << 10, "256 KiB a rank": 256 << 10, "768 KiB a rank": 768 << 10}
ROWS = 64
# Columns of a row whose norm is computed: Qwen3-8B's hidden size.
WIDTH = 4096
CALLS = 100
# Microseconds of a gather of 16 KiB, by the number of GPUs.
BARS = {2: 5.0, 4: 6.0}


def lap_us(cupy, stream, work, calls, repeats=5):
    """Microseconds a call, on this rank's GPU; the median of some repeats."""
    times = []
    for _ in range(repeats):
        begin = stream.record()
        for _ in range(calls):
            work()
        end = stream.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / calls)
    return float(np.median(times))


def captured_us(cupy, communicator, stream, work):
    """Microseconds of work, of CALLS times in a CUDA graph, with PDL as in the engine."""
    work()
    communicator.barrier()
    stream.begin_capture()
    with pdl_scope():
        for _ in range(CALLS):
            work()
    graph = stream.end_capture()
    graph.launch(stream)
    communicator.barrier()
    return lap_us(cupy, stream, graph.launch, 10) / CALLS


def measure(communicator, transport):
    """{what: microseconds}, on each rank."""
    import cupy

    world_size, rank = communicator.world_size, communicator.rank
    stream, found = cupy.cuda.Stream(non_blocking=True), {}
    with stream:
        for what, nbytes in GATHERS.items():
            source = cupy.ones(nbytes // 4, np.int32)
            out = cupy.empty((world_size, source.size), np.int32)
            found[f"gather of {what}, in a graph"] = captured_us(
                cupy, communicator, stream, lambda source=source, out=out: communicator.gather(source, out)
            )
            if transport == "nccl":
                continue
            # Of a model that is cut into parts, which the kernel moves in half the bytes.
            floats = source.view(np.float16).reshape(ROWS, -1)
            columns = Columns.equal(world_size * floats.shape[1], world_size)
            whole = cupy.empty((ROWS, columns.total), np.float16)
            found[f"gather of columns of {ROWS} rows, {what}, in a graph"] = captured_us(
                cupy,
                communicator,
                stream,
                lambda array=floats, out=whole, columns=columns: communicator.gather_columns(array, out, columns),
            )
        for rows in (1, ROWS):
            part, weight, whole = (
                cupy.ones(shape, np.float16) for shape in ((rows, WIDTH // world_size), WIDTH, (rows, WIDTH))
            )
            arguments = part, weight, 1e-6, whole
            if communicator.gather_rmsnorm(*arguments):
                found[f"norm of {rows} gathered rows of {WIDTH}, in a graph"] = captured_us(
                    cupy, communicator, stream, lambda arguments=arguments: communicator.gather_rmsnorm(*arguments)
                )
        source = cupy.ones(LARGE_BYTES, np.uint8)
        out = cupy.empty((world_size, source.size), np.uint8)
        communicator.gather(source, out)
        communicator.barrier()
        found["gather"] = lap_us(cupy, stream, lambda: communicator.gather(source, out), 5)
        gradient, part = cupy.ones(PARAMETERS, np.float32), PARAMETERS // world_size
        accumulated = cupy.zeros(part, np.float32)

        def fold():
            communicator.fold(gradient, accumulated, rank * part, world_size, True)

        # First of gradients anywhere, which are pushed, then of shared ones, which transport peer lets ranks pull.
        for what in ("fold", "fold of shared gradients"):
            if what != "fold":
                del gradient
                gradient = communicator.share_gradients(lambda: SimpleNamespace(flat=cupy.ones(PARAMETERS, np.float32)))
                gradient = gradient.flat
            fold()
            communicator.barrier()
            found[what] = lap_us(cupy, stream, fold, 5)
            communicator.barrier()
            begin = time.perf_counter()
            fold()
            found[f"{what}, time of the host"] = (time.perf_counter() - begin) * 1e6
            communicator.barrier()
        # What is left for a backward to wait for when gradients have moved during the forward.
        finish = communicator.begin_fold(gradient, accumulated, rank * part, world_size, True)
        communicator.barrier()
        cupy.cuda.Device().synchronize()
        found["second half of a fold of shared gradients"] = lap_us(cupy, stream, finish, 1, repeats=1)
        communicator.barrier()
    communicator.check()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    gpus = parser.parse_args().gpus
    numbers = gpus_of_ranks(gpus, "--gpus")
    received = {
        "gather": (gpus - 1) * LARGE_BYTES,
        "fold": (gpus - 1) * (PARAMETERS // gpus) * 4,
        "fold of shared gradients": (gpus - 1) * (PARAMETERS // gpus) * 4,
    }
    for transport in ("peer", "nccl") if len(set(numbers)) == gpus else ("peer",):
        found = launch(measure, gpus, transport, transport=transport, timeout_s=60, gpus=numbers)
        for what in found[0]:
            us = max(each[what] for each in found)
            if what in received:
                result = f"{received[what] / us / 1e3:.0f} GB/s, {us:.0f} us for {received[what] >> 20} MiB"
            else:
                result = f"{us:.2f} us"
            bar = f"{BARS[gpus]:g} us" if transport == "peer" and "16 KiB" in what and gpus in BARS else ""
            print(f"{transport} {what}, {gpus} GPUs: {result}", flush=True)
            row(f"{transport} {what}, {gpus} GPUs", result, bar)


if __name__ == "__main__":
    main()
