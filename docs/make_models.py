"""Writes the table of docs/models.md: what models need in memory, by the plans of four runs of each.

    python docs/make_models.py

A model is its config.json, so none is downloaded. Another model is a row of MODELS.
"""

import json
import shutil
import tempfile
from pathlib import Path

from rlnumba.config import load_run
from rlnumba.engine.blocks.cache_size import BLOCK_SIZE
from rlnumba.engine.cache import BlockSizes, state_bytes_of
from rlnumba.model.config import ModelConfig
from rlnumba.model.weights import write_json
from rlnumba.runs.planning.plan import GIB, Planner
from rlnumba.runtime import device

PAGE = Path(__file__).with_name("models.md")
TOKENIZER = Path(__file__).parents[1] / "examples" / "quickstart" / "model"
BEGIN, END = "<!-- written by docs/make_models.py -->\n", "<!-- to here -->"
# No GPU is so large: the plan says what a run needs.
UNLIMITED = 1 << 42
# Sequences that generate at one time, and the tokens of each.
SEQUENCES, TOKENS = 64, 2048

OF_ALL = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "dtype": "bfloat16"}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def qwen3_5(*sizes, value_heads, tied):
    """config.json of a dense Qwen3.5 text model of these SIZES."""
    own = {"model_type": "qwen3_5_text", "linear_num_value_heads": value_heads, "tie_word_embeddings": tied}
    return OF_ALL | dict(zip(SIZES, sizes, strict=True)) | own


def mixture(model_type, *sizes, **keys):
    """config.json of a mixture of experts of these SIZES, but for the widths of its dense layers, of which it has none.

    What is absent of keys has transformers' defaults.
    """
    names = [name for name in SIZES if name != "intermediate_size"]
    return OF_ALL | dict(zip(names, sizes, strict=True)) | {"model_type": model_type} | keys


def qwen3(*sizes, tied=False):
    """config.json of a Qwen3 model of these SIZES."""
    own = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "tie_word_embeddings": tied}
    return OF_ALL | dict(zip(SIZES, sizes, strict=True)) | own


def qwen2(*sizes, tied=False, vocab_size=152064):
    """config.json of a Qwen2 or Qwen2.5 model of these SIZES."""
    own = {"model_type": "qwen2", "vocab_size": vocab_size, "tie_word_embeddings": tied}
    return OF_ALL | dict(zip(SIZES, sizes, strict=True)) | own


def llama(*sizes, tied=False, vocab_size=128256):
    """config.json of a model of Llama's architecture of these SIZES."""
    own = {"model_type": "llama", "vocab_size": vocab_size, "tie_word_embeddings": tied}
    return OF_ALL | dict(zip(SIZES, sizes, strict=True)) | own


def gemma3(*sizes, window=1024, head_dim=256, vocab_size=262208, scaling=8.0, **others):
    """config.json of a Gemma 3 text model of these SIZES; scaling: the factor of positions in full layers, or None."""
    own = {"model_type": "gemma3_text", "head_dim": head_dim, "vocab_size": vocab_size, "sliding_window": window}
    own["rope_scaling"] = scaling and {"rope_type": "linear", "factor": scaling}
    return OF_ALL | dict(zip(SIZES, sizes, strict=True)) | own | {"max_position_embeddings": 131072} | others


# Keys of the models without pictures.
OF_TEXT = {"window": 512, "vocab_size": 262144, "scaling": None, "max_position_embeddings": 32768}
MODELS = {
    "Qwen3.5-0.8B": qwen3_5(1024, 3584, 24, 8, 2, value_heads=16, tied=True),
    "Qwen3.5-4B": qwen3_5(2560, 9216, 32, 16, 4, value_heads=32, tied=True),
    "Qwen3.5-9B": qwen3_5(4096, 12288, 32, 16, 4, value_heads=32, tied=False),
    "Qwen3.5-27B": qwen3_5(5120, 17408, 64, 24, 4, value_heads=48, tied=False),
    "Qwen3.5-35B-A3B": mixture("qwen3_5_moe_text", 2048, 40, 16, 2),
    "Qwen3-30B-A3B": mixture("qwen3_moe", 2048, 48, 32, 4, head_dim=128, norm_topk_prob=True),
    "Qwen3-0.6B": qwen3(1024, 3072, 28, 16, 8, tied=True),
    "Qwen3-1.7B": qwen3(2048, 6144, 28, 16, 8, tied=True),
    "Qwen3-4B": qwen3(2560, 9728, 36, 32, 8, tied=True),
    "Qwen3-8B": qwen3(4096, 12288, 36, 32, 8),
    "Qwen3-14B": qwen3(5120, 17408, 40, 40, 8),
    "Qwen3-32B": qwen3(5120, 25600, 64, 64, 8),
    "Qwen2.5-0.5B": qwen2(896, 4864, 24, 14, 2, tied=True, vocab_size=151936),
    "Qwen2.5-1.5B": qwen2(1536, 8960, 28, 12, 2, tied=True, vocab_size=151936),
    "Qwen2.5-7B": qwen2(3584, 18944, 28, 28, 4),
    "Qwen2.5-32B": qwen2(5120, 27648, 64, 40, 8),
    "Gemma-3-270M": gemma3(640, 2048, 18, 4, 1, **OF_TEXT),
    "Gemma-3-1B": gemma3(1152, 6912, 26, 4, 1, **OF_TEXT),
    "Gemma-3-4B": gemma3(2560, 10240, 34, 8, 4),
    "Gemma-3-12B": gemma3(3840, 15360, 48, 16, 8),
    "Gemma-3-27B": gemma3(5376, 21504, 62, 32, 16, head_dim=128, query_pre_attn_scalar=168),
    "Llama-3.2-1B": llama(2048, 8192, 16, 32, 8, tied=True),
    "Llama-3.2-3B": llama(3072, 8192, 28, 24, 8, tied=True),
    "Llama-3.1-8B": llama(4096, 14336, 32, 32, 8),
    "SmolLM2-135M": llama(576, 1536, 30, 9, 3, tied=True, vocab_size=49152),
}

# Keys of the runs: 8 sequences of 2,048 tokens a step; 8 prompts of 8 completions, 128 and 512 tokens.
SFT = {
    "data.train": "sft.jsonl", "train.max_length": TOKENS, "train.per_device_train_batch_size": 8,
    "train.gradient_accumulation_steps": 1, "train.activation_memory": "minimal", "train.max_steps": 1,
}  # fmt: skip
GRPO = {
    "data.train": "prompts.jsonl", "rewards.funcs": "gsm8k_reward", "train.num_generations": 8,
    "train.per_device_train_batch_size": 8, "train.gradient_accumulation_steps": 8, "train.max_completion_length": 512,
    "train.activation_memory": "minimal", "train.max_steps": 1, "engine.max_num_seqs": SEQUENCES,
    "engine.max_num_batched_tokens": 8192,
}  # fmt: skip
LORA = {"lora.r": 16}
HEADER = ["model", "parameters", "weights", f"{SEQUENCES} sequences", "SFT", "SFT, adapter", "GRPO", "GRPO, adapter"]


def write_rows(folder):
    """The data of the runs: a token a character."""
    rows = [{"text": "a" * (TOKENS - 1)}] * 8
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"prompt": "a" * 128, "answer": "1"}] * 8
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def cells_of(name, folder):
    """The row of a model in the table: list of str. folder: that of write_rows."""
    model = folder / name
    model.mkdir()
    for file in TOKENIZER.glob("tokenizer*"):
        shutil.copy(file, model)
    config = ModelConfig.from_dict(MODELS[name])
    write_json(model / "config.json", config.to_dict())
    needed = []
    for kind, keys in (("sft", SFT), ("sft", SFT | LORA), ("grpo", GRPO), ("grpo", GRPO | LORA)):
        data = {"data.train": str(folder / keys["data.train"])}
        values = keys | data | {"model": str(model), "output_dir": str(folder / "run")}
        run = load_run(kind, [], [(key, str(value)) for key, value in values.items()])
        plan = Planner(run, True, UNLIMITED).plan()
        needed.append(plan.needed)
    weights, bf16 = plan.regions["weights"], device.dtype("bfloat16")
    sizes = BlockSizes.of(config, BLOCK_SIZE, bf16, SEQUENCES, GRPO["engine.max_num_batched_tokens"])
    cache = sizes.nbytes(SEQUENCES * TOKENS // BLOCK_SIZE) + state_bytes_of(config, SEQUENCES, bf16)
    return [name, f"{weights / 2e9:.3g} B", *(f"{nbytes / GIB:.3g}" for nbytes in (weights, cache, *needed))]


def table():
    """The table of all models: str."""
    lines = [HEADER, ["---"] * len(HEADER)]
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder))
        lines += [cells_of(name, Path(folder)) for name in MODELS]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def page():
    """The page with a new table: str."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page())
