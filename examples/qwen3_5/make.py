"""How the model of qwen3_5.toml was made. From the repository's root, about twelve minutes on two cores:

    python examples/qwen3_5/make.py untrained          -> runs/qwen3_5-untrained
    rlnumba sft --config examples/qwen3_5/sft.toml     -> runs/qwen3_5-sft/final
    python examples/qwen3_5/make.py model              -> examples/qwen3_5/model, in float16

Task, rows and tokenizer are the quickstart's: a word is answered by its characters reversed, or sorted, or unchanged.
The structure is that of Qwen3.5: three layers of linear attention, then one of gated attention. Sizes are small and
differ wherever they may.
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
UNTRAINED, TRAINED = pathlib.Path("runs/qwen3_5-untrained"), pathlib.Path("runs/qwen3_5-sft/final")

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 96,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 20,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
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
