"""How the model of moe.toml was made. From the repository's root, about five minutes on two cores:

    python examples/moe/make.py untrained          -> runs/moe-untrained
    rlnumba sft --config examples/moe/sft.toml     -> runs/moe-sft/final
    python examples/moe/make.py model              -> examples/moe/model, in float16

Task, rows and tokenizer are the quickstart's: a word is answered by its characters reversed, or sorted, or unchanged.
The structure is that of Qwen3's mixtures: in each of three layers a router chooses two of six experts for a token.
"""

import json
import pathlib
import shutil
import sys

from rlnumba.model.config import ModelConfig
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import Transformer, load_model, save_model
from rlnumba.model.weights import Weights

HERE = pathlib.Path(__file__).parent
QUICKSTART = HERE.parent / "quickstart" / "model"
UNTRAINED, TRAINED = pathlib.Path("runs/moe-untrained"), pathlib.Path("runs/moe-sft/final")

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "dtype": "float32",
}


def make_untrained():
    size = json.loads((QUICKSTART / "config.json").read_text())["vocab_size"]
    config = ModelConfig.from_dict({**CONFIG, "vocab_size": size}, "make.py")
    weights = Weights.random(config, "float32", seed=0)
    save_model(Transformer(config, weights), UNTRAINED, Tokenizer.from_folder(QUICKSTART))
    print(f"{weights.flat.size:,} parameters")


def make_model():
    shutil.rmtree(HERE / "model", ignore_errors=True)
    save_model(load_model(TRAINED, "float32"), HERE / "model", Tokenizer.from_folder(TRAINED), "float16")


if __name__ == "__main__":
    {"untrained": make_untrained, "model": make_model}[sys.argv[1]]()
