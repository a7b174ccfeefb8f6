"""New weights from trainer ranks to inference processes that decode: time, GB/s, and how long decoding pauses.

    python bench/push.py --train-gpus 2 --infer-gpus 2 --shape qwen3-8b
    python bench/push.py --lora 32                            an adapter alone
    python bench/push.py --transport shm                      through the host's memory

Random weights of a shape, or --model FOLDER; the trainer ranks have the weights and nothing else. Every inference
process decodes --sequences completions all the time. Of --pushes pushes after the first: the time that the trainer
waits, the copies' part of it, the time until the last process has the weights live, and the longest pause. GB/s are of
the bytes that all ranks send. On the cpu device a GPU is a process.
"""

import argparse
import dataclasses
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from report import row
from shapes import SHAPES, random_model

from rlnumba.config import EngineConfig, LoraConfig
from rlnumba.engine.episodes import GroupRequest
from rlnumba.engine.sequence import SamplingParams
from rlnumba.model.lora import adapter_of_run
from rlnumba.model.transformer import load_model, save_model
from rlnumba.parallel.launch import launch
from rlnumba.parallel.placement import gpus_of_ranks
from rlnumba.runtime import device
from rlnumba.sampling.inference import Engines, Limits
from rlnumba.sampling.inference_worker import Setup
from rlnumba.sampling.weights.push import WeightPusher
from rlnumba.sampling.weights.sync import WeightSender

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart" / "model"
LIMITS = Limits(timeout_s=3600.0, stale_s=600.0, sync_timeout_s=600.0, max_restarts=0)
PROMPT = list(range(2, 34))


def arguments_of(parser):
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="default: qwen3-0.6b on a GPU, else stories-15m")
    parser.add_argument("--model", help="a folder, instead of random weights")
    parser.add_argument("--lora", type=int, help="rank of an adapter, which is sent alone")
    parser.add_argument("--train-gpus", type=int, default=1)
    parser.add_argument("--infer-gpus", type=int, default=1)
    parser.add_argument("--transport", choices=("peer", "shm"), default="peer")
    parser.add_argument("--bucket-megabytes", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=64, help="that a process decodes at the same time")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.6)
    parser.add_argument("--pushes", type=int, default=10)
    return parser.parse_args()


class Decoding:
    """Inference processes that always have a group to decode."""

    def __init__(self, setup_of, sender, arguments):
        self.params = SamplingParams(n=arguments.sequences, max_tokens=128, ignore_eos=True)
        self.number, self.count = 0, arguments.infer_gpus
        self.engines = Engines(setup_of, sender, self.count, LIMITS)
        self.engines.start(0)

    def begin(self):
        """Return once all processes have decoded a while: kernels are compiled, and graphs captured."""
        for _ in range(2 * self.count):
            self.finished(None)
        while self.engines.stats.num_tokens < 400 * self.params.n * self.count:
            self.engines.check()
            time.sleep(0.01)

    def finished(self, done):
        """Give a group out, in the place of one that is complete."""
        self.number += 1
        params = dataclasses.replace(self.params, seed=self.number)
        self.engines.submit(GroupRequest(self.number, PROMPT, params, 0), self)

    # One that has taken too long is given up.
    expired = finished

    def push(self, version):
        """Seconds of the push for the trainer, and until it is live everywhere, and the longest pause."""
        self.engines.take_pauses()
        began = time.perf_counter()
        self.engines.update_weights(version)
        pushed_s, pauses = time.perf_counter() - began, []
        while len(pauses) < self.count:
            self.engines.check()
            pauses += self.engines.take_pauses()
            time.sleep(1e-4)
        return pushed_s, time.perf_counter() - began, max(pauses)


def measure(communicator, folder, arguments, gpus):
    """What each rank does: on rank 0 a list of (wait, copies, until live, pause) in seconds, and the bytes."""
    dtype, lora = "bfloat16" if device.name() == "cuda" else "float32", None
    model = load_model(folder, dtype)
    if arguments.lora:
        lora = LoraConfig(r=arguments.lora)
        model.adapter = adapter_of_run(lora, model.weights, dtype, folder, 0)
    bucket_bytes, staging = arguments.bucket_megabytes << 20, None
    if arguments.transport == "peer":
        sender = WeightPusher(model.trained, communicator, bucket_bytes)
        if communicator.rank:
            for _ in range(arguments.pushes + 1):
                sender.take_part()
            return None
    elif communicator.rank:
        return None
    else:
        sender = WeightSender(model.trained, 2, bucket_bytes)
        staging = sender.staging.nbytes, sender.staging.slots, sender.staging.descriptor
    engine = EngineConfig(gpu_memory_utilization=arguments.gpu_memory_utilization, max_model_len=256)

    def setup_of(index):
        gpu = gpus[arguments.train_gpus + index]
        return Setup(
            model=folder, dtype=dtype, lora=lora, seed=0, gemm="auto", engine=engine, device=device.name(), gpu=gpu,
            num_sharing=gpus.count(gpu), staging=staging, bucket_bytes=sender.bucket_bytes, in_flight=True,
            keep_cache=True,
        )  # fmt: skip

    found, decoding = [], Decoding(setup_of, sender, arguments)
    with decoding.engines:
        decoding.begin()
        for version in range(1, arguments.pushes + 2):
            waited_s, live_s, pause_s = decoding.push(version)
            found.append((waited_s, getattr(sender, "seconds", waited_s), live_s, pause_s))
            time.sleep(0.2)
    return found[1:], model.trained.flat.nbytes


def main():
    arguments = arguments_of(argparse.ArgumentParser(description=__doc__.partition("\n")[0]))
    device.select(arguments.device)
    folder, made = arguments.model, None
    if folder is None:
        folder = made = tempfile.mkdtemp()
        save_model(random_model(arguments.shape), folder)
        for path in QUICKSTART.glob("tokenizer*"):
            shutil.copy(path, folder)
    count, place = arguments.train_gpus + arguments.infer_gpus, {}
    gpus = [None] * count
    if device.name() == "cuda":
        device.xp().get_default_memory_pool().free_all_blocks()
        gpus = gpus_of_ranks(count, "--train-gpus + --infer-gpus")
        place = {"transport": "peer", "gpus": gpus[: arguments.train_gpus]}
    found, nbytes = launch(measure, arguments.train_gpus, folder, arguments, gpus, **place)[0]
    waited_s, copied_s, live_s, pause_s = (statistics.median(column) for column in zip(*found, strict=True))
    what = f"{nbytes / 1e6:.0f} MB to {arguments.infer_gpus} by {arguments.train_gpus}, {arguments.transport}"
    speed = f"{arguments.infer_gpus * nbytes / copied_s / 1e9:.0f} GB/s"
    row(f"push of {what}", f"{1e3 * waited_s:.1f} ms, of which {1e3 * copied_s:.1f} are copies, {speed}")
    row(f"live after a push of {what}", f"{1e3 * live_s:.1f} ms")
    longest = max(column[3] for column in found)
    row(f"pause for a push of {what}", f"{1e3 * pause_s:.1f} ms, at most {1e3 * longest:.1f}")
    if made:
        shutil.rmtree(made)


if __name__ == "__main__":
    main()
