"""Do rollout and training agree to the bit at every public size, whatever the engine does to a sequence?

    python bench/agreement_sizes.py                     all of SIZES, random weights of their first layers
    python bench/agreement_sizes.py qwen3.5-27b         some of them
    python bench/agreement_sizes.py tiny --device cpu

A size has as many layers as show each of its kinds, and a vocabulary of VOCABULARY. Each is run in the ways of WAYS:
short prompts; groups whose prompts come in chunks, hit the cache the second time, and are preempted; prompts longer
than a window; drafts that are verified; an adapter. A line is the number of log-probs that differ; the exit code is 1
if one does.
"""

import argparse
import sys
from typing import NamedTuple

import numpy as np
from agreement import random_adapter
from report import row
from shapes import SHAPES, random_model

from rlnumba.config import EngineConfig, GRPOConfig
from rlnumba.data import Prompt
from rlnumba.engine import LLM, SamplingParams
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device
from rlnumba.sampling.samples import Sample
from rlnumba.trainers.grpo import host_logprobs
from rlnumba.trainers.rollout import Rollouts

VOCABULARY, FORWARD_TOKENS = 32_768, 16_384
QWEN3, QWEN35, GEMMA = SHAPES["qwen3-8b"], SHAPES["qwen3.5-4b"], SHAPES["gemma3-1b"]
GEMMA_LARGE = GEMMA | {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}


def hybrid(hidden, ffn, heads, kv_heads, value_heads):
    """The keys of a Qwen3.5 of the first four layers, three of linear attention."""
    return QWEN35 | {
        "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads, "num_hidden_layers": 4,
        "num_key_value_heads": kv_heads, "linear_num_value_heads": value_heads,
    }  # fmt: skip


def gemma(base, hidden, ffn, heads, kv_heads, **keys):
    """The keys of a Gemma 3 of the first six layers, five with windows."""
    return base | {
        "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads, "num_hidden_layers": 6,
        "num_key_value_heads": kv_heads,
    } | keys  # fmt: skip


SIZES = {
    "qwen3-0.6b": SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 2},
    "qwen3-8b": QWEN3 | {"num_hidden_layers": 2},
    "qwen3-14b": QWEN3
    | {"hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 40, "num_hidden_layers": 2},
    "qwen3-30b-a3b": SHAPES["qwen3-30b-a3b"] | {"num_hidden_layers": 2},
    "qwen3.5-0.8b": hybrid(1024, 3584, 8, 2, 16),
    "qwen3.5-2b": hybrid(2048, 6144, 8, 2, 16),
    "qwen3.5-4b": hybrid(2560, 9216, 16, 4, 32),
    "qwen3.5-9b": hybrid(4096, 12288, 16, 4, 32),
    "qwen3.5-27b": hybrid(5120, 17408, 24, 4, 48),
    "qwen3.5-35b-a3b": SHAPES["qwen3.5-35b-a3b"] | {"num_hidden_layers": 4},
    "gemma3-270m": gemma(GEMMA, 640, 2048, 4, 1),
    "gemma3-1b": gemma(GEMMA, 1152, 6912, 4, 1),
    "gemma3-4b": gemma(GEMMA_LARGE, 2560, 10240, 8, 4),
    "gemma3-12b": gemma(GEMMA_LARGE, 3840, 15360, 16, 8),
    "gemma3-27b": gemma(GEMMA_LARGE, 5376, 21504, 32, 16, head_dim=128, query_pre_attn_scalar=168),
}  # fmt: skip


class Way(NamedTuple):
    """prompts of `length` tokens, each with `completions` of `tokens` tokens, `times` one after the other.

    engine: keys of EngineConfig; blocks: of the KV cache, as a share of what all sequences need, None for any number;
    lora: the rank of an adapter, or None.
    """

    prompts: int
    length: int
    completions: int
    tokens: int
    engine: dict
    blocks: float | None = None
    times: int = 1
    lora: int | None = None


DRAFTS = {"speculative_method": "ngram", "num_speculative_tokens": 7}
WAYS = {
    "short prompts": Way(128, 24, 1, 256, {}),
    "groups, chunks, hits, preemption": Way(8, 300, 8, 130, {"max_num_batched_tokens": 512}, 0.3, 2),
    "past a window": Way(4, 1200, 2, 100, {"max_num_batched_tokens": 700}),
    "drafts": Way(16, 70, 2, 200, DRAFTS),
    "an adapter": Way(64, 24, 2, 129, {}, lora=16),
}


def model_of(size):
    """Random weights of a size."""
    if size in SIZES:
        SHAPES[size] = SIZES[size] | {"vocab_size": VOCABULARY}
    return random_model(size)


def rollouts_of(model, way, arguments):
    """(the Rollouts of a Way, of the last of its times; the engine's preemptions)."""
    positions = model.config.num_positions
    tokens = min(way.tokens, positions // 2)
    length = min(way.length, positions - tokens)
    blocks = way.blocks and int(way.blocks * way.prompts * way.completions * -(-(length + tokens) // 16))
    config = EngineConfig(
        gpu_memory_utilization=arguments.gpu_memory_utilization, num_gpu_blocks_override=blocks,
        max_model_len=length + tokens, **way.engine,
    )  # fmt: skip
    llm = LLM(model, None, config)
    shape = way.prompts, length
    # Few ids, so that drafts by n-grams are made.
    ids = np.random.default_rng(0).integers(0, 50, shape).tolist()
    params = SamplingParams(n=way.completions, max_tokens=tokens, ignore_eos=True, seed=0)
    for _ in range(way.times):
        outputs = llm.generate(ids, params)
    llm.sleep()
    pairs = [(Prompt("", each.prompt_token_ids, {}, ""), one) for each in outputs for one in each.completions]
    samples = [Sample(prompt, one, np.zeros(way.completions), 0.0, {}) for prompt, one in pairs]
    return Rollouts.of(samples, False), llm.engine.num_preemptions


def differing(model, way, arguments):
    """(log-probs that differ, all, the largest difference, preemptions) of a Way."""
    model.adapter = random_adapter(model, way.lora) if way.lora else None
    rollouts, preemptions = rollouts_of(model, way, arguments)
    policy = Policy(model, GRPOConfig(), temperature=1.0)
    trained = host_logprobs(policy, model, rollouts.parts_of_tokens(FORWARD_TOKENS))
    sampled = rollouts.rollout_logprobs
    return (sampled != trained).sum(), len(sampled), np.abs(sampled.astype(np.float64) - trained).max(), preemptions


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", help=f"of {', '.join(SIZES)}, or of shapes.py; default: all of these")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.25)
    arguments = parser.parse_args()
    device.select(arguments.device)
    failed = False
    for size in arguments.sizes or SIZES:
        model = model_of(size)
        for name, way in WAYS.items():
            count, total, largest, preemptions = differing(model, way, arguments)
            failed |= bool(count)
            result = f"{count} of {total} log-probs differ, by at most {largest:.2g} nats"
            row(f"{size}, {name}", result + (f"; {preemptions} preemptions" if preemptions else ""), "0")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
