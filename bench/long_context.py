"""GRPO on prompts of 32,768 tokens on one GPU: what the plan says, what a step takes, whether log-probs are equal.

    python bench/long_context.py                         Qwen3-4B's shape and an adapter; a tiny model on the CPU
    python bench/long_context.py --plan --gpu-memory 80  the plan alone; needs no GPU

A run of `grpo` with random weights: layers are recomputed in the backward, prompt and completion together have --length
tokens, and every completion has its full length. `difference` is the largest one of a token's log-prob in rollout and
in training, 0 where their bits are equal. `needle`: the log-probs
of a greedy completion, most of which must change where the first 1,024 tokens of its prompt are others, a segment of
keys in decode, and none where nothing changes.
"""

import dataclasses
import json
import shutil
import statistics
import tempfile
from pathlib import Path

import numpy as np
from asynchronous import QUICKSTART, run_of, write_prompts
from report import row
from shapes import SHAPES, TINY, in_own_process, shape_parser, write_model

from rlnumba.config import EngineConfig, LoraConfig
from rlnumba.engine import LLM, SamplingParams
from rlnumba.model.transformer import load_model
from rlnumba.runs.planning.plan import Planner
from rlnumba.runs.planning.text import describe
from rlnumba.runtime import device
from rlnumba.trainers.grpo import run_grpo

RANK, SEGMENT = 16, 1024
SHAPES["tiny-long"] = TINY | {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 65536}


def arguments_of(arguments=None):
    parser = shape_parser(__doc__.splitlines()[0], "default: qwen3-4b on a GPU, else tiny-long")
    parser.add_argument("--length", type=int, default=32768, help="tokens of a prompt and its completion")
    parser.add_argument("--completion-length", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, help="completions of a forward and backward; default: all")
    parser.add_argument("--max-tokens", type=int, help="of a micro-batch; default: any number")
    parser.add_argument("--share-prefixes", choices=("auto", "always", "never"), default="auto")
    parser.add_argument("--all", action="store_true", help="train all parameters, and no adapter")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.5)
    parser.add_argument("--gpu-memory", type=float, help="GiB, with --plan")
    parser.add_argument("--plan", action="store_true", help="print the plan and do nothing")
    parser.add_argument("--steps", type=int, default=3, help="of which the first is not counted")
    options = parser.parse_args(arguments)
    options.micro_batch = options.micro_batch or options.prompts * options.generations
    return options


def long_run(folder, options, dtype):
    """The GRPORun of a folder's model/ and prompts.jsonl."""
    run = run_of(folder, options, dtype, max_model_len=options.length, max_num_seqs=options.generations)
    train = dataclasses.replace(
        run.train, gradient_checkpointing=True, max_tokens_per_micro_batch=options.max_tokens,
        share_prefixes=options.share_prefixes,
    )  # fmt: skip
    lora = None if options.all else LoraConfig(r=RANK, target_modules=("all-linear",))
    return dataclasses.replace(run, train=train, lora=lora)


def write_inputs(folder, options, with_weights=True):
    """Write the model, or its config alone, and the prompts of all steps: the dtype's name."""
    if options.layers is not None:
        SHAPES[options.shape] = SHAPES[options.shape] | {"num_hidden_layers": options.layers}
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(SHAPES[options.shape]))
    if with_weights:
        in_own_process(write_weights, folder / "model", options.shape, SHAPES[options.shape], options.device)
    for path in QUICKSTART.glob("tokenizer*"):
        shutil.copy(path, folder / "model")
    write_prompts(folder / "prompts.jsonl", options.prompts * options.steps, options.length - options.completion_length)


def write_weights(folder, shape, keys, device_name):
    """shapes.write_model of a shape with these keys, in a process that does not know them."""
    SHAPES[shape] = keys
    write_model(folder, shape, device_name)


def needle(folder, options):
    """(tokens of a greedy completion whose log-probs differ when it is drawn again, and with another first SEGMENT of
    the prompt, tokens in all)."""
    llm = LLM(load_model(folder / "model"), None, EngineConfig(
        gpu_memory_utilization=0.8, max_model_len=options.length, max_num_seqs=1, enable_prefix_caching=False,
    ))  # fmt: skip
    count = options.completion_length
    ids = np.random.default_rng(1).integers(0, llm.model.config.vocab_size, options.length - count).tolist()
    params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)

    def logprobs(prompt):
        return np.array(llm.generate([prompt], params)[0].completions[0].logprobs, np.float32)

    first, again, other = (logprobs(prompt) for prompt in (ids, ids, [*ids[SEGMENT : 2 * SEGMENT], *ids[SEGMENT:]]))
    llm.sleep()
    return int((first != again).sum()), int((first != other).sum()), count


def measure(run, options):
    """{metric: median of the steps after the first}, difference: the largest of all."""
    run_grpo(run)
    rows = [json.loads(line) for line in (Path(run.output_dir) / "metrics.jsonl").read_text().splitlines()]
    names = [name for name in rows[-1] if name == "step_time" or name.startswith("time/")]
    found = {name: statistics.median(each[name] for each in rows[1:] or rows) for name in names}
    found["gib"] = max(each["perf/peak_memory"] for each in rows) / 2**30
    found["difference"] = max(each["sampling/sampling_logp_difference/max"] for each in rows)
    return found


def main(arguments=None):
    options = arguments_of(arguments)
    planned_gpu = options.plan and options.gpu_memory is not None
    on_gpu = planned_gpu or device.select(options.device) == "cuda"
    if planned_gpu:
        device.select("cpu")
    options.shape = options.shape or ("qwen3-4b" if on_gpu else "tiny-long")
    folder, dtype = Path(tempfile.mkdtemp()), "bfloat16" if on_gpu else "float32"
    write_inputs(folder, options, with_weights=not options.plan)
    run = long_run(folder, options, dtype)
    total = round(options.gpu_memory * 2**30) if planned_gpu else device.memory_info()[1]
    planner = Planner(run.resolved(), on_gpu, total)
    plan = planner.plan()
    print("\n".join(describe(planner, plan)))
    what = f"{options.shape}, {options.prompts} x {options.generations} of {options.length} tokens"
    row(f"{what}: planned", f"{plan.needed / 2**30:.2f} GiB, {plan.tokens:,} tokens in a micro-batch", "80 GiB")
    if not options.plan:
        found = measure(run, options)
        phases = ", ".join(f"{name} {found[name]:.3f}" for name in found if name.startswith("time/"))
        row(f"{what}: a step", f"{found['step_time']:.3f} s ({phases}), {found['gib']:.2f} GiB", "80 GiB")
        row(f"{what}: difference of rollout and training", f"{found['difference']:g} nats", "0")
        again, other, count = needle(folder, options)
        row(f"{what}: log-probs that differ, drawn again; with another beginning", f"{again}; {other} of {count}", "0")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
