"""Do short runs end in the same weights, completions and metrics as at another commit?

    python bench/hashes.py > before.txt           in an environment with one commit
    python bench/hashes.py | diff before.txt -    in an environment with another
    python bench/hashes.py --device cuda          bfloat16 runs of Qwen3-0.6B's shape with four layers, on a GPU
    python bench/hashes.py --only grpo kto        these runs alone; --list names all

One line a run: its name, the sha256 of the files of weights in its `final/`, and the sha256 of its completions and of
those of its metrics that measure neither time nor memory. Every run is a command of its own in a temporary folder; the
package is the one of the environment, and only its command line is used, so that this file may be newer than it.
"""

import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"
QUICKSTART = EXAMPLES / "quickstart"
# Metrics, or their part before "/", that measure time or memory, or count what engines had under way at some time.
UNSTABLE = {"time", "step_time", "perf", "memory", "off_policy/in_flight", "off_policy/in_queue", "buffer_qsize"}
UNSTABLE |= {"infer_utilization", "infer_idle", "train_utilization"}
# A reward of which no completion of a random model has an extreme value.
REWARD = '''
def spread(completion_ids, **columns):
    """The ids' sum, modulo a prime, between 0 and 1."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]
'''
STEPS = {"train.max_steps": 3, "train.report_to": "none", "train.save_strategy": "no", "train.logging_steps": 1}
# The quickstart's keys.
PROMPTS = {
    "data.train": QUICKSTART / "train.jsonl",
    "train.temperature": 1.0,
    "train.learning_rate": 1e-4,
    "train.max_completion_length": 10,
    "train.gradient_checkpointing": "false",
}
GROUPS = PROMPTS | {"train.num_generations": 8, "train.per_device_train_batch_size": 64}
ROWS = {"train.learning_rate": 1e-4, "train.per_device_train_batch_size": 8, "train.gradient_accumulation_steps": 2}
ADAPTER = {"lora.r": 4, "lora.lora_alpha": 8, "train.learning_rate": 1e-3}
SYNCHRONOUS = {"async.max_staleness": 0}


def ranks(count, completions=64):
    """Keys of a run on `count` ranks: micro-batches of 16, as many of them as there are on one rank."""
    train = {"train.per_device_train_batch_size": 16, "train.global_batch_size": completions}
    return train | {"train.generation_batch_size": completions, "deploy.num_train_gpus": count}


def runs_on_cpu(folder):
    """{name: (trainer, keys)} of the quickstart's model in float32."""
    rewards = {"rewards.funcs": QUICKSTART / "reward.py:backwards"}
    groups, prompts = GROUPS | rewards, PROMPTS | rewards
    pairs, unpaired = {"data.train": QUICKSTART / "pairs.jsonl"}, {"data.train": unpaired_rows(folder)}
    sft = ROWS | {"data.train": pairs_as_completions(folder)}
    two_ranks = {"train.gradient_accumulation_steps": 1, "train.global_batch_size": 24, "deploy.num_train_gpus": 2}
    runs = {
        "grpo": ("grpo", groups),
        "grpo 1 rank": ("grpo", groups | ranks(1)),
        "grpo 2 ranks": ("grpo", groups | ranks(2)),
        "grpo 4 ranks": ("grpo", groups | ranks(4)),
        "grpo asynchronous": ("grpo", groups | SYNCHRONOUS),
        "grpo inference process": ("grpo", groups | SYNCHRONOUS | {"deploy.num_infer_gpus": 1}),
        "grpo dynamic sampling": ("grpo", groups | {"train.dynamic_sampling": "true"}),
        "grpo reference": ("grpo", groups | {"train.beta": 0.05, "train.num_iterations": 2}),
        "grpo lora": ("grpo", groups | ADAPTER),
        "rloo": ("rloo", groups | {"train.num_generations": 4}),
        "ppo": ("ppo", prompts | {"train.per_device_train_batch_size": 32, "train.num_mini_batches": 2}),
        "sft": ("sft", sft),
        "sft 2 ranks": ("sft", sft | two_ranks),
        "sft zero 3": ("sft", sft | two_ranks | {"deploy.zero_stage": 3, "train.save_strategy": "steps"}),
        "sft lora": ("sft", sft | ADAPTER),
        "dpo": ("dpo", ROWS | pairs),
        "kto": ("kto", ROWS | unpaired),
        "reward": ("reward", ROWS | pairs),
    }
    fixed = STEPS | {"model": QUICKSTART / "model", "seed": 0, "train.dtype": "float32"}
    return {name: (trainer, fixed | keys) for name, (trainer, keys) in runs.items()}


def runs_on_cuda(folder):
    """{name: (trainer, keys)} of a random model in bfloat16."""
    (folder / "rewards_of_hashes.py").write_text(REWARD)
    groups = GROUPS | {"rewards.funcs": folder / "rewards_of_hashes.py:spread", "train.max_completion_length": 32}
    pairs, rows = {"data.train": QUICKSTART / "pairs.jsonl"}, {"data.train": pairs_as_completions(folder)}
    runs = {
        "grpo": ("grpo", groups),
        "grpo asynchronous": ("grpo", groups | SYNCHRONOUS),
        "grpo lora": ("grpo", groups | ADAPTER),
        "sft": ("sft", ROWS | rows),
        "sft lora": ("sft", ROWS | rows | ADAPTER),
        "dpo": ("dpo", ROWS | pairs),
    }
    fixed = STEPS | {"model": random_model(folder / "model"), "seed": 0, "train.dtype": "bfloat16"}
    return {name: (trainer, fixed | keys) for name, (trainer, keys) in runs.items()}


def unpaired_rows(folder):
    """The path of a file with each completion of the quickstart's pairs and its label."""
    rows = [json.loads(line) for line in (QUICKSTART / "pairs.jsonl").read_text().splitlines()[:200]]
    labelled = [
        {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
        for row in rows
        for name in ("chosen", "rejected")
    ]
    return written(folder / "unpaired.jsonl", labelled)


def pairs_as_completions(folder):
    """The path of a file with the chosen completions of the quickstart's pairs."""
    rows = [json.loads(line) for line in (QUICKSTART / "pairs.jsonl").read_text().splitlines()[:200]]
    chosen = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    return written(folder / "completions.jsonl", chosen)


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def random_model(folder, layers=4, hidden=1024, heads=16, kv_heads=8, head_dim=128, ffn=3072, vocab=4096):
    """The path of a Qwen3 model of random bfloat16 weights with the quickstart's tokenizer."""
    folder.mkdir()
    for path in (QUICKSTART / "model").glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((QUICKSTART / "model" / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocab}
    config |= {"num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": ffn}
    config |= {"max_position_embeddings": 2048, "torch_dtype": "bfloat16", "max_window_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    layer = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    shapes = {"embed_tokens": (vocab, hidden), "norm": (hidden,)}
    shapes |= {f"layers.{index}.{name}": shape for index in range(layers) for name, shape in layer.items()}
    rng, header, parts, offset = np.random.default_rng(0), {}, [], 0
    for name, shape in shapes.items():
        values = np.ones(shape, np.float32) if len(shape) == 1 else 0.02 * rng.standard_normal(shape, np.float32)
        # The upper half of a float32 is the bfloat16 nearest to it towards zero.
        parts.append((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
        end = offset + len(parts[-1])
        header[f"model.{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))
    return folder


def sha256(parts):
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def is_stable(name):
    """Whether a metric is the same each time that a run is repeated: names that end in "_s" are seconds or rates."""
    return not (name.endswith("_s") or name in UNSTABLE or name.split("/")[0] in UNSTABLE)


def stable_metrics(path):
    """The lines of metrics.jsonl that are stable, keys in their alphabetical order."""
    for line in path.read_text().splitlines():
        row = {key: value for key, value in json.loads(line).items() if is_stable(key)}
        yield json.dumps(row, sort_keys=True).encode()


def hashes(output):
    """(sha256 of the weights, sha256 of completions and metrics) of the run in the folder `output`."""
    weights = sorted((output / "final").glob("*.safetensors"))
    completions = output / "completions.jsonl"
    texts = [completions.read_bytes()] if completions.exists() else []
    return sha256(path.read_bytes() for path in weights), sha256([*texts, *stable_metrics(output / "metrics.jsonl")])


def train(device, trainer, keys, output):
    """Run the command in the folder above `output`, where no package lies that would go before the environment's."""
    options = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "rlnumba", "--device", device, trainer, *options, "--output_dir", str(output)]
    threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"} if device == "cpu" else {}
    done = subprocess.run(command, cwd=output.parent, env=os.environ | threads, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of runs")
    parser.add_argument("--list", action="store_true", help="print the names of the runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        runs = (runs_on_cpu if arguments.device == "cpu" else runs_on_cuda)(folder)
        names = arguments.only or list(runs)
        if unknown := [name for name in names if name not in runs]:
            raise SystemExit(f"no run {unknown[0]!r}: they are {', '.join(runs)}")
        for number, name in enumerate([] if arguments.list else names):
            trainer, keys = runs[name]
            output = folder / f"run-{number}"
            train(arguments.device, trainer, keys, output)
            print(f"{name:24}{'  '.join(hashes(output))}", flush=True)
        if arguments.list:
            print("\n".join(names))


if __name__ == "__main__":
    main()
