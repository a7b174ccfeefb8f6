"""Time and memory of GRPO steps, by phase: generate, advantage, logprob (with --beta), train.

    python bench/grpo.py                                   8 prompts x 8 completions, 128 + 512 tokens
    python bench/grpo.py --prompts 8 --generations 8 --prompt-length 128 --completion-length 512 --micro-batch 64
    python bench/grpo.py --shape qwen3-30b-a3b --lora 16 --checkpointing --micro-batch 8 --gpu-memory-utilization 0.6
    python bench/grpo.py --fits qwen3-8b                   an adapter on a base in 4 bits, in 14 GiB of the GPU

Qwen3-0.6B's shape with random weights on a GPU, a 15M model elsewhere. Every completion is generated to its full
length and rewards are random, so the work is fixed. The first step (compilation, graph capture) is printed apart;
medians of the others, and which share of the step its phases are. A training run adds its reward functions and its
files to this.
"""

import statistics
from contextlib import contextmanager

import numpy as np
from report import row
from shapes import copy_of, random_model, shape_parser
from train import print_memory

from rlnumba.config import EngineConfig, GRPOConfig, LoraConfig, QuantizationConfig
from rlnumba.data import Prompt
from rlnumba.engine import LLM, SamplingParams
from rlnumba.kernels.quantized.formats import FORMATS
from rlnumba.model.config import LM_HEAD
from rlnumba.model.lora import Adapter
from rlnumba.model.quantized.weights import weights_in
from rlnumba.model.transformer import load_model
from rlnumba.runs.policy import Policy
from rlnumba.runs.run_folder import Clock
from rlnumba.runtime import device
from rlnumba.sampling.samples import Sample, derived_seed
from rlnumba.trainers.grpo import add_logprobs, train_step
from rlnumba.trainers.rollout import Rollouts, set_advantages

EXPERTS = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
# Of a run that is to fit a part of a GPU, as docs/quantization.md plans it.
SMALL = {
    "lora": 16, "checkpointing": True, "micro_batch": 8, "max_num_seqs": 64, "gpu_memory_utilization": 0.9, "steps": 2,
}  # fmt: skip
FITS = {
    "qwen3-8b": {"shape": "qwen3-8b", "quantization": "nf4", "gpu_gib": 14.0} | SMALL,
    "qwen3-4b": {"shape": "qwen3-4b", "quantization": "nf4", "gpu_gib": 10.0} | SMALL,
    "qwen3-30b-a3b": {"shape": "qwen3-30b-a3b", "quantization": "int8", "gpu_gib": 70.0} | SMALL,
}


def argument_parser(description):
    """The arguments that say what a step is."""
    parser = shape_parser(description)
    parser.add_argument("--model", help="a Hugging Face folder; default: random weights")
    parser.add_argument("--lora", type=int, help="rank of an adapter of all linear layers, which is then trained")
    parser.add_argument("--lora-experts", action="store_true", help="the adapter has each expert's matrices, too")
    parser.add_argument("--quantization", choices=tuple(FORMATS), help="format of the linear layers under the adapter")
    parser.add_argument("--group-size", type=int, help="of the quantised layers; default: the format's")
    parser.add_argument("--gpu-gib", type=float, help="take the GPU's memory but for so many GiB before all else")
    parser.add_argument("--max-num-seqs", type=int, default=EngineConfig().max_num_seqs)
    parser.add_argument("--dtype", choices=tuple(device.DTYPES))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-length", type=int, help="tokens; default 128 on a GPU, else 16")
    parser.add_argument("--completion-length", type=int, help="tokens; default 512 on a GPU, else 32")
    parser.add_argument("--micro-batch", type=int, help="completions of a forward and backward; default: all")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=3, help="steps after the first")
    return parser


def complete(arguments):
    """Select the device and fill in the arguments that depend on it: whether it is a GPU."""
    on_gpu = device.select(arguments.device) == "cuda"
    if on_gpu and arguments.gpu_gib:
        arguments.gpu_memory_utilization *= leave(arguments.gpu_gib)
    arguments.prompt_length = arguments.prompt_length or (128 if on_gpu else 16)
    arguments.completion_length = arguments.completion_length or (512 if on_gpu else 32)
    arguments.total = arguments.prompts * arguments.generations
    arguments.micro_batch = arguments.micro_batch or arguments.total
    return on_gpu


def leave(gib):
    """Take all memory of the GPU but for so many GiB, CUDA's own among them: the share of the whole that they are."""
    _, total = device.memory_info()
    left = int(gib * 2**30)
    if left < total:
        # Not by the pool, which could use it.
        device.xp().cuda.runtime.malloc(total - left)
    return min(left / total, 1.0)


def model_of(arguments, heads=LM_HEAD):
    """The model of the folder that is named, or random weights."""
    quantization = None
    if arguments.quantization:
        quantization = QuantizationConfig(type=arguments.quantization, group_size=arguments.group_size)
    if arguments.model:
        model = load_model(arguments.model, arguments.dtype, heads, make_weights=weights_in(quantization))
    else:
        model = random_model(arguments.shape, arguments.dtype, heads, arguments.layers, quantization)
    if arguments.lora:
        of_experts = EXPERTS if arguments.lora_experts else ()
        lora = LoraConfig(r=arguments.lora, target_modules=("all-linear",), target_parameters=of_experts)
        model.adapter = Adapter.new(model.config, lora, model.dtype.name, "", 0)
    return model


def engine_of(model, arguments):
    """The LLM that generates."""
    config = EngineConfig(
        gpu_memory_utilization=arguments.gpu_memory_utilization, enforce_eager=arguments.enforce_eager,
        max_num_seqs=arguments.max_num_seqs,
    )  # fmt: skip
    return LLM(model, None, config)


def random_prompts(model, arguments):
    """Prompts of random tokens: list."""
    generator, vocabulary = np.random.default_rng(0), model.config.vocab_size
    ids = generator.integers(0, vocabulary, (arguments.prompts, arguments.prompt_length)).tolist()
    return [Prompt("", prompt, {}, "") for prompt in ids]


def describe(model, arguments):
    """A line on the device, the model and the work."""
    size = sum(p.size for p in [*model.weights.parameters, *getattr(model.weights, "quantized", {}).values()])
    return (
        f"{device.describe()}; {size / 1e6:.0f}M parameters"
        f"{', linear layers in ' + arguments.quantization if arguments.quantization else ''}"
        f"{', adapter of rank ' + str(arguments.lora) if arguments.lora else ''}, "
        f"{model.dtype.name}; {work_of(arguments)}, micro-batches of {arguments.micro_batch}"
    )


def work_of(arguments):
    lengths = f"{arguments.prompt_length} + {arguments.completion_length} tokens"
    return f"{arguments.prompts} x {arguments.generations}, {lengths}"


def train_config(kind, arguments, **options):
    """The [train] section of a class of them, all completions in one generation."""
    return kind(
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=arguments.total // arguments.micro_batch,
        max_completion_length=arguments.completion_length,
        gradient_checkpointing=arguments.checkpointing,
        **options,
    )


def grpo_policy(model, arguments, beta=0.0):
    """The Policy of GRPO, with a reference if beta is above 0."""
    options = {"num_generations": arguments.generations, "generation_batch_size": arguments.total, "beta": beta}
    train = train_config(GRPOConfig, arguments, **options)
    return Policy(model, train, copy_of(model) if beta else None, train.temperature)


def samples_of(prompts, completions, step):
    """Samples with random rewards."""
    rewards = np.random.default_rng(step).random(len(completions)).tolist()
    pairs = zip(prompts, completions, rewards, strict=True)
    return [Sample(prompt, done, np.array([reward]), reward, {}) for prompt, done, reward in pairs]


@contextmanager
def synchronized(clock, name):
    """A phase of a Clock that ends when the device has done what was launched in it."""
    with clock.phase(name):
        yield
        device.synchronize()


def draw(llm, prompts, arguments, step):
    """The completions of all prompts of a step."""
    params = SamplingParams(
        max_tokens=arguments.completion_length,
        n=arguments.generations,
        seed=derived_seed(0, step),
        ignore_eos=True,
    )
    outputs = llm.generate([prompt.prompt_token_ids for prompt in prompts], params)
    return [done for output in outputs for done in output.completions]


def one_step(llm, policy, prompts, arguments, step, clock):
    """Generate for every prompt and make an optimizer step: (generated tokens, metrics)."""
    with clock.phase("generate"):
        llm.wake()
        completions = draw(llm, prompts, arguments, step)
        llm.sleep()
    with clock.phase("advantage"):
        samples = samples_of([p for p in prompts for _ in range(arguments.generations)], completions, step)
        groups = [samples[i : i + arguments.generations] for i in range(0, len(samples), arguments.generations)]
        set_advantages(groups, [1.0], "group")
        order = np.random.default_rng(step).permutation(len(samples))
        rollouts = Rollouts.of([samples[i] for i in order], False)
    with clock.phase("logprob"):
        add_logprobs(policy, rollouts, on_policy=True)
    with synchronized(clock, "train"):
        metrics = train_step(policy, rollouts.parts(arguments.micro_batch, on_policy=True), 1e-6)
        llm.update_weights(step + 1)
    return int(rollouts.completion_lengths.sum()), metrics


def measure(take_step, steps):
    """Take 1 + steps steps: (medians of all but the first, {phase: seconds}, what the last take_step returned).

    take_step(step, clock) is timed as a whole and, by the clock, in phases. The median of generation is printed too,
    and which share of all these steps the phases are.
    """
    measured = []
    for step in range(1 + steps):
        clock = Clock()
        drawn, metrics = take_step(step, clock)
        seconds = clock.read()
        step_time = seconds.pop("step_time")
        measured.append({"step": step_time} | {name.removeprefix("time/"): value for name, value in seconds.items()})
    print(f"first step {measured[0]['step']:.1f} s")
    medians = {name: statistics.median(seconds[name] for seconds in measured[1:]) for name in measured[0]}
    for name, seconds in medians.items():
        print(f"{name:20} {seconds:8.3f} s")
    # A step is listed beside its phases.
    share = sum(sum(seconds.values()) for seconds in measured) / sum(seconds["step"] for seconds in measured) - 1
    print(f"{'phases':20} {100 * share:8.2f} % of the steps")
    print(f"{'generation':20} {drawn / medians['generate']:8.0f} tok/s")
    return medians, metrics


def phases(medians):
    """The seconds of all phases, as text."""
    return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in medians.items())


def main():
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--beta", type=float, default=0.0, help="above 0: with a reference model")
    parser.add_argument("--fits", choices=tuple(FITS), help="a base in 4 or 8 bits with an adapter, in a part of a GPU")
    parser.set_defaults(**FITS.get(parser.parse_args().fits, {}))
    arguments = parser.parse_args()
    on_gpu = complete(arguments)
    model = model_of(arguments)
    policy, llm = grpo_policy(model, arguments, arguments.beta), engine_of(model, arguments)
    prompts = random_prompts(model, arguments)
    print(describe(model, arguments))
    medians, metrics = measure(
        lambda step, clock: one_step(llm, policy, prompts, arguments, step, clock), arguments.steps
    )
    difference = metrics["sampling/sampling_logp_difference/max"]
    print(f"{'sampler difference':20} {difference:8.2g} nats at most")
    print(f"{'micro-batches':20} {policy.graphs.counts}")
    result = f"{phases(medians)}; sampler difference {difference:.2g} nats"
    what, bar = f"GRPO step, {work_of(arguments)}", "1.3 s" if on_gpu else ""
    if arguments.gpu_gib:
        what, bar = f"{what}, {arguments.shape}, {arguments.quantization or model.dtype.name}", ""
        result += f"; all in {arguments.gpu_gib:g} GiB"
    row(what, result, bar)
    print_memory()


if __name__ == "__main__":
    main()
