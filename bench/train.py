"""Time and memory of one optimizer step, by phase: forward, head, backward, AdamW.

    python bench/train.py                                  Qwen3-0.6B's shape on a GPU, a 15M model elsewhere
    python bench/train.py --model FOLDER --batch 8 --length 2048 --activations selective

Random tokens, all of which are trained on. The phases are timed separately, with a synchronisation after each and
without CUDA graphs; `step` is `trainers.sft.train_step` as it runs in training, with them where a micro-batch has at
most 8,192 tokens, and `host` is how long its call takes, before which the next one cannot begin. Medians of --repeat
after three warm-ups, of which the first one's time (with compilation) is `first s`. `floor`: 6 FLOP a parameter a token
and causal attention (its backward 2.5 times its forward) at the GEMM rate of engine.py, without recomputation; printed
for a GPU only.
"""

import argparse
import statistics
import time

import numpy as np
from engine import FLOP_PER_S
from report import row
from shapes import SHAPES, add_adapter, random_model

from rlnumba.config import SFTConfig
from rlnumba.data import TokenSequence
from rlnumba.kernels.nn.elementwise import fill
from rlnumba.model.heads import HeadGradients, LogprobHead
from rlnumba.model.layer_gradients import backward_and_update
from rlnumba.model.transformer import load_model, packed_attention
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device, memory
from rlnumba.trainers import sft


def timed(seconds, name, work):
    """The result of work(); its time, the device's included, becomes seconds[name]."""
    device.synchronize()
    started = time.perf_counter()
    result = work()
    device.synchronize()
    seconds[name] = time.perf_counter() - started
    return result


def timed_on_host(seconds, work):
    """work(); the time of the call alone becomes seconds["host"]."""
    started = time.perf_counter()
    work()
    seconds["host"] = time.perf_counter() - started


def phases(policy, sequences):
    """{phase: seconds} of one training step, written out so that each phase can be timed."""
    seconds, model, grads, arena, lm_head = {}, policy.model, policy.grads, policy.arena, LogprobHead()
    with policy.scope():
        batch = timed(seconds, "batch", lambda: sft.target_batch(sequences))
        xp, count = device.xp(), batch.rows.shape[0]
        outputs = xp.empty(count, np.float32), xp.empty(count, np.float32), xp.empty(count, np.int32)
        tape, attention = policy.new_tape(batch), packed_attention(model, batch, arena)
        hidden = timed(
            seconds,
            "forward",
            lambda: model.forward(batch.input_ids, batch.position_ids, attention, tape, arena),
        )
        head = timed(
            seconds,
            "head",
            lambda: lm_head.forward(model, hidden, batch, arena, *outputs),
        )
        dlogprobs = arena.empty(outputs[0].shape, np.float32)
        fill(-1.0 / count, dlogprobs)
        dhidden = timed(
            seconds,
            "head backward",
            lambda: lm_head.backward(model, head, HeadGradients(grads.lm_head), arena, dlogprobs),
        )
        if policy.train.optimizer_in_backward:
            policy.optimizer.begin(policy.train.learning_rate)
            update = policy.optimizer.update
            timed(seconds, "backward", lambda: backward_and_update(model, dhidden, tape, grads, update))
        else:
            timed(seconds, "backward", lambda: model.backward(dhidden, tape, grads))
    timed(seconds, "adamw", lambda: policy.step(policy.train.learning_rate))
    timed(seconds, "zero grads", lambda: policy.zero_grad(policy.train.learning_rate))
    return seconds


def floor_s(config, num_parameters, batch, length):
    """A lower bound of a step's seconds on a GPU with the FLOP rate of engine.py."""
    attention = 2 * batch * length**2 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return (6 * num_parameters * batch * length + 3.5 * attention) / FLOP_PER_S


def print_memory():
    for region, nbytes in memory.report().items():
        print(f"{region:20} {nbytes / 2**30:8.3f} GiB")
    if device.name() == "cuda":
        free, total = device.memory_info()
        print(f"{'taken on the device':20} {(total - free) / 2**30:8.3f} GiB")
        print(f"{'of it CuPy':20} {device.xp().get_default_memory_pool().total_bytes() / 2**30:8.3f} GiB")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", help="a Hugging Face folder; default: random weights")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="of the random weights")
    parser.add_argument("--dtype", choices=tuple(device.DTYPES))
    parser.add_argument("--batch", type=int, help="sequences; default 8 on a GPU, else 4")
    parser.add_argument("--length", type=int, help="tokens of each; default 2048 on a GPU, else 128")
    parser.add_argument("--activations", choices=("full", "selective", "minimal"), default="full", help="that are kept")
    parser.add_argument("--recompute", default="norm,rope,swiglu", help="of selective: recompute_modules")
    parser.add_argument("--no-graphs", dest="cuda_graphs", action="store_false", help="launch kernels one by one")
    parser.add_argument("--in-backward", action="store_true", help="take the optimizer step inside the backward")
    parser.add_argument("--lora", type=int, help="rank of an adapter on all linear layers, which alone is trained")
    parser.add_argument("--optim", default="adamw_torch")
    parser.add_argument("--offload", action="store_true", help="keep the optimizer's state in host memory")
    parser.add_argument("--no-master-weights", dest="master_weights", action="store_false")
    parser.add_argument("--pool-gib", type=float, help="limit of CuPy's memory pool, on a GPU")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    on_gpu = device.select(arguments.device) == "cuda"
    batch, length = arguments.batch or (8 if on_gpu else 4), arguments.length or (2048 if on_gpu else 128)
    if arguments.pool_gib is not None:
        device.xp().get_default_memory_pool().set_limit(size=int(arguments.pool_gib * 2**30))
    if arguments.model:
        model = load_model(arguments.model, arguments.dtype)
    else:
        model = random_model(arguments.shape, arguments.dtype)
    generator = np.random.default_rng(0)
    ids = generator.integers(0, model.config.vocab_size, (batch, length), dtype=np.int32)
    sequences = [TokenSequence(row, np.ones(length, bool)) for row in ids]
    train = SFTConfig(
        per_device_train_batch_size=batch, learning_rate=1e-6, activation_memory=arguments.activations,
        optim=arguments.optim, offload_optimizer=arguments.offload, master_weights=arguments.master_weights,
        recompute_modules=arguments.recompute.split(","), optimizer_in_backward=arguments.in_backward,
        max_grad_norm=0.0 if arguments.in_backward else 1.0, cuda_graphs=arguments.cuda_graphs,
    )  # fmt: skip
    if arguments.lora:
        add_adapter(model, arguments.lora)
    policy = Policy(model, train)

    def step():
        sft.train_step(policy, [[sequence] for sequence in sequences], train.learning_rate)

    first = {}
    timed(first, "first", lambda: phases(policy, sequences))
    # The second of a shape is captured.
    for _ in range(3):
        timed(first, "step", step)
    measured = [phases(policy, sequences) for _ in range(arguments.repeat)]
    for seconds in measured:
        timed(seconds, "step", lambda seconds=seconds: timed_on_host(seconds, step))
    tokens = batch * length
    num_parameters = sum(p.size for p in model.weights.parameters)
    recomputed = {"selective": arguments.recompute, "minimal": "layers"}.get(arguments.activations)
    options = f", {recomputed} recomputed" if recomputed else ""
    options += f", LoRA {arguments.lora}" if arguments.lora else ""
    options += f", {arguments.optim}" if arguments.optim != "adamw_torch" else ""
    options += ", offloaded" if arguments.offload else ""
    options += ", in the backward" if arguments.in_backward else ""
    options += "" if arguments.master_weights else ", no master"
    shape = f"{num_parameters / 1e6:.0f}M parameters, {model.dtype.name}; {batch} x {length} tokens{options}"
    print(f"{device.describe()}; {shape}")
    print(f"first s {first['first']:.1f}; micro-batches of steps: {policy.graphs.counts}")
    for name in measured[0]:
        median = statistics.median(seconds[name] for seconds in measured)
        print(f"{name:20} {median * 1e3:10.2f} ms {tokens / median:12.0f} tok/s")
    parts = {name: statistics.median(seconds[name] for seconds in measured) * 1e3 for name in measured[0]}
    result = f"{tokens / parts['step'] * 1e3:.0f} tok/s; ms: {', '.join(f'{n} {ms:.1f}' for n, ms in parts.items())}"
    row(f"training step, {shape}", result, "100,000 tok/s" if on_gpu else "")
    if on_gpu:
        floor = floor_s(model.config, num_parameters, batch, length)
        print(f"{'floor':20} {floor * 1e3:10.2f} ms {tokens / floor:12.0f} tok/s")
    print_memory()


if __name__ == "__main__":
    main()
