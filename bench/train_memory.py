"""Speed and memory of a training step for choices of what is kept, beside what `rlnumba plan` expects.

    python bench/train_memory.py                    all parts, on a GPU
    python bench/train_memory.py 4b 8b              those alone
    python bench/train_memory.py 98k --layers 1     compiles the part's kernels, on a model of one layer

Random tokens and weights of Qwen3's shapes; a part is a line of PARTS. Times are medians of --repeat steps after two.
`taken` is what the GPU lacks afterwards, the CUDA context and CuPy's pool included; `planned` is the planner's total.
"""

import argparse
import dataclasses
import gc
import statistics
import time
from types import SimpleNamespace

import numpy as np
from report import add_parts, row
from shapes import QWEN3_06B, QWEN3_4B, QWEN3_8B, SHAPES, STORIES_15M, random_model

from rlnumba.config import SFTConfig
from rlnumba.data import TokenSequence
from rlnumba.runs.planning.plan import CONTEXT_BYTES, operator_bytes
from rlnumba.runs.planning.planned import Step, take_step
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device, memory
from rlnumba.runtime.shapes import shapes_only
from rlnumba.trainers import sft

GIB = 2**30
IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": 0.0}
NORMS_AND_SWIGLU = {"activation_memory": "selective", "recompute_modules": ["norm", "swiglu"]}
SELECTIVE, FULL = {"activation_memory": "selective"}, {"activation_memory": "full"}
LAYERS_4 = {"recompute_num_layers": 4}
MINIMAL = {"activation_memory": "minimal"}
EIGHT_BITS, SIXTEEN_BITS = {"optim": "adamw_8bit"}, {"optim": "adamw_bf16"}


@dataclasses.dataclass(frozen=True)
class Part:
    """A shape, sequences x tokens, keys of [train], the limit of CuPy's pool in GiB, and the target."""

    shape: dict
    batch: int
    length: int
    keys: dict
    pool_gib: float | None = None
    bar: str = ""


FAST, SMALL = ">= 105,000 tok/s, <= 24 GiB", ">= 98,000 tok/s, <= 18 GiB"
PARTS = {
    "full": Part(QWEN3_06B, 8, 2048, FULL),
    "105k": Part(QWEN3_06B, 8, 2048, NORMS_AND_SWIGLU | SIXTEEN_BITS | IN_BACKWARD, bar=FAST),
    "105k-8bit": Part(QWEN3_06B, 8, 2048, NORMS_AND_SWIGLU | EIGHT_BITS | IN_BACKWARD, bar=FAST),
    "98k": Part(QWEN3_06B, 8, 2048, SELECTIVE | LAYERS_4 | EIGHT_BITS | IN_BACKWARD, bar=SMALL),
    "98k-all": Part(QWEN3_06B, 8, 2048, SELECTIVE | EIGHT_BITS | IN_BACKWARD),
    "minimal": Part(QWEN3_06B, 8, 2048, MINIMAL | EIGHT_BITS | IN_BACKWARD),
    "4b": Part(QWEN3_4B, 4, 2048, MINIMAL | EIGHT_BITS | IN_BACKWARD, 48, "runs"),
    "8b": Part(QWEN3_8B, 2, 4096, MINIMAL | EIGHT_BITS | IN_BACKWARD, bar=">= 6,000 tok/s"),
    "small": Part(STORIES_15M, 4, 128, SELECTIVE | EIGHT_BITS | IN_BACKWARD),
}


def sequences_of(part, vocabulary):
    """The packs of one micro-batch, lists of a TokenSequence."""
    ids = np.random.default_rng(0).integers(0, vocabulary, (part.batch, part.length), dtype=np.int32)
    return [[TokenSequence(row, np.ones(part.length, bool))] for row in ids]


def planned(config, dtype, train, rows):
    """{region: bytes} of the planner, "operators" and "CUDA context" included on a GPU."""
    tokens = sum(map(sft.num_tokens, rows))
    step = Step(lambda policy, _: [lambda: sft.train_step(policy, rows, 0.0)], tokens, len(rows))
    with shapes_only() as peaks:
        take_step(config, dtype, SimpleNamespace(train=train, lora=None), step)
    regions = dict(peaks)
    if device.name() == "cuda":
        regions |= {"operators": operator_bytes(tokens, len(rows), config, dtype), "CUDA context": CONTEXT_BYTES}
    return regions


def step_seconds(policy, rows, repeat):
    """Seconds of each of `repeat` steps after two."""
    seconds = []
    for _ in range(repeat + 2):
        device.synchronize()
        started = time.perf_counter()
        sft.train_step(policy, rows, policy.train.learning_rate)
        device.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[2:]


def measure(name, layers, repeat):
    """Print a part's line, and one for each region."""
    part, on_gpu = PARTS[name], device.name() == "cuda"
    if on_gpu:
        pool = device.xp().get_default_memory_pool()
        pool.set_limit(size=0 if part.pool_gib is None else int(part.pool_gib * GIB))
    shape = part.shape | ({} if layers is None else {"num_hidden_layers": layers})
    SHAPES[name] = shape
    model = random_model(name)
    train = SFTConfig(per_device_train_batch_size=part.batch, learning_rate=1e-6, **part.keys)
    rows = sequences_of(part, model.config.vocab_size)
    expected = planned(model.config, model.dtype.name, train, rows)
    if on_gpu:
        pool.free_all_blocks()
    with memory.separate_report() as regions:
        memory.track("weights", model.weights.flat.nbytes)
        policy = Policy(model, train)
        median = statistics.median(step_seconds(policy, rows, repeat))
        found = {region: peak for region, (_, peak) in regions.items()}
        if on_gpu:
            free, total = device.memory_info()
            found["operators"] = pool.total_bytes() - sum(found.values())
            found["CUDA context"] = total - free - pool.total_bytes()
        taken = sum(found.values())
        del policy, model
        gc.collect()
    total_planned, tokens = sum(expected.values()), part.batch * part.length
    for region in expected | found:
        print(
            f"    {region:20} taken {found.get(region, 0) / GIB:8.3f}  planned {expected.get(region, 0) / GIB:8.3f} GiB"
        )
    keys = ", ".join(f"{key} = {value}" for key, value in part.keys.items())
    what = f"{name}: {part.batch} x {part.length} tokens; {keys}"
    what += f"; pool limited to {part.pool_gib} GiB" if part.pool_gib else ""
    result = f"{tokens / median:,.0f} tok/s, {median * 1e3:.1f} ms; taken {taken / GIB:.2f}, planned "
    row(what, f"{result}{total_planned / GIB:.2f} GiB ({total_planned / taken - 1:+.1%})", part.bar)
    if on_gpu:
        pool.free_all_blocks()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_parts(parser, PARTS, [name for name in PARTS if name != "small"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--layers", type=int, help="of each model, instead of its own number")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    device.select(arguments.device)
    print(device.describe())
    for name in arguments.parts:
        measure(name, arguments.layers, arguments.repeat)


if __name__ == "__main__":
    main()
