"""Do the sampler's log-probs equal those of the training forward, bit for bit, with filters and adapters?

    python bench/agreement.py                     top_p 0.9, random weights of Qwen3-0.6B's shape, 131,072 tokens
    python bench/agreement.py --shape qwen3-30b-a3b --layers 4
    python bench/agreement.py --quantization nf4 --lora 16
    python bench/agreement.py --model FOLDER --top-p 0.9 --top-k 50 --dtype float32 --lora 16

Completions are sampled with top_p and top_k, and the smallest logit that these kept is recorded for each token; the
training forward then leaves out what is below it (sampling_mask_replay). Printed are how many log-probs are equal, the
largest difference, and, to show that the filters matter, how many equal those of all logits. --lora: an adapter of
random A and B on all linear layers; --quantization: weights of these in 4 or 8 bits.
"""

from dataclasses import replace

import numpy as np
from report import row
from shapes import random_model, shape_parser

from rlnumba.config import EngineConfig, GRPOConfig, LoraConfig, QuantizationConfig
from rlnumba.data import Prompt
from rlnumba.engine import LLM, SamplingParams
from rlnumba.kernels.quantized.formats import FORMATS
from rlnumba.model.lora import Adapter
from rlnumba.model.quantized.weights import weights_in
from rlnumba.model.transformer import load_model
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device
from rlnumba.sampling.samples import Sample
from rlnumba.trainers.grpo import host_logprobs
from rlnumba.trainers.rollout import Rollouts

# Tokens of a training forward, and of a prompt.
FORWARD_TOKENS, PROMPT_TOKENS = 16_384, 24


def random_adapter(model, rank):
    """An Adapter whose update is not zero."""
    adapter = Adapter.new(model.config, LoraConfig(r=rank), model.dtype.name, "", 0)
    values = np.random.default_rng(1).standard_normal(adapter.flat.shape, np.float32)
    # In float32, of which alone what is outside of the blocks can be set to zero.
    float32 = adapter.grads()
    float32.set_flat(np.float32(0.02) * values)
    float32.zero_outside_blocks()
    adapter.set_flat(device.to_host(float32.flat))
    return adapter


def generate(model, arguments):
    """Rollouts of at least arguments.tokens sampled tokens."""
    llm = LLM(model, None, EngineConfig(gpu_memory_utilization=arguments.gpu_memory_utilization))
    length = min(arguments.length, llm.max_model_len - PROMPT_TOKENS)
    count = -(-arguments.tokens // length)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (count, PROMPT_TOKENS)).tolist()
    filters = {"top_p": arguments.top_p, "top_k": arguments.top_k, "temperature": arguments.temperature}
    params = SamplingParams(**filters, max_tokens=length, ignore_eos=True, seed=0, logit_thresholds=True)
    outputs = llm.generate(ids, params)
    llm.sleep()
    done = [(Prompt("", output.prompt_token_ids, {}, ""), output.completions[0]) for output in outputs]
    return Rollouts.of([Sample(prompt, completion, np.zeros(1), 0.0, {}) for prompt, completion in done], False)


def main():
    parser = shape_parser(__doc__.splitlines()[0])
    parser.add_argument("--model", help="a Hugging Face folder; default: random weights")
    parser.add_argument("--dtype", choices=tuple(device.DTYPES))
    parser.add_argument("--tokens", type=int, help="that are sampled; default 131,072 on a GPU, else 256")
    parser.add_argument("--length", type=int, default=256, help="tokens of a completion, where the model allows it")
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lora", type=int, help="rank of an adapter")
    parser.add_argument("--quantization", choices=tuple(FORMATS), help="format of the linear layers' weights")
    parser.add_argument("--group-size", type=int, help="of --quantization")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    arguments = parser.parse_args()
    on_gpu = device.select(arguments.device) == "cuda"
    arguments.tokens = arguments.tokens or (131_072 if on_gpu else 256)
    folder, dtype = arguments.model, arguments.dtype
    quantization = None
    if arguments.quantization:
        quantization = QuantizationConfig(type=arguments.quantization, group_size=arguments.group_size)
    if folder:
        model = load_model(folder, dtype, make_weights=weights_in(quantization))
    else:
        model = random_model(arguments.shape, dtype, layers=arguments.layers, quantization=quantization)
    if arguments.lora:
        model.adapter = random_adapter(model, arguments.lora)
    rollouts = generate(model, arguments)
    policy = Policy(model, GRPOConfig(), temperature=arguments.temperature)

    def scored(rollouts):
        return host_logprobs(policy, model, rollouts.parts_of_tokens(FORWARD_TOKENS))

    sampled, replayed = rollouts.rollout_logprobs, scored(rollouts)
    unfiltered = scored(replace(rollouts, thresholds=np.empty(0, np.float32)))
    largest = float(np.abs(sampled.astype(np.float64) - replayed).max())
    weights = "real weights" if folder else f"random weights of {arguments.shape or 'the default shape'}"
    weights += f" with {arguments.layers} layers" if arguments.layers else ""
    what = f"sampling masks replayed, {weights}, {model.dtype.name}, "
    what += f"top_p {arguments.top_p:g}, top_k {arguments.top_k}, temperature {arguments.temperature:g}"
    what += f", linear layers in {arguments.quantization}" if arguments.quantization else ""
    what += f", LoRA {arguments.lora}" if arguments.lora else ""
    result = f"{(sampled == replayed).sum()} of {len(sampled)} log-probs equal, largest difference {largest:.2g} nats; "
    result += f"{(sampled == unfiltered).sum()} equal those of all logits"
    row(what, result, "all")


if __name__ == "__main__":
    main()
