"""How model and data of the tools example were made. From the repository's root, about four minutes on two cores:

    python examples/tools/make.py data             -> train.jsonl, runs/tools-sft.jsonl, untrained model
    rlnumba sft --config examples/tools/sft.toml   -> runs/tools-sft/final
    python examples/tools/make.py model            -> examples/tools/model, in float16

The task: the product of two numbers of two digits. The supervised rows answer half of the questions at once, with a
number that is mostly wrong, and the others by a call of the tool, whose result is the answer. So the model that they
train calls the tool one time in two, and GRPO's reward teaches it to do so always.
"""

import json
import pathlib
import sys

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models

from rlnumba.environments.schema import tool_schema
from rlnumba.model.config import ModelConfig
from rlnumba.model.tokenizer import Tokenizer as ModelTokenizer
from rlnumba.model.transformer import Transformer, load_model, save_model
from rlnumba.model.weights import Weights

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE))

from calculator import multiply  # noqa: E402

UNTRAINED, SFT_DATA = pathlib.Path("runs/tools-untrained"), pathlib.Path("runs/tools-sft.jsonl")
SFT_ROWS, PROMPTS = 12_000, 512

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 96,
    "intermediate_size": 288,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "bos_token_id": None,
    "torch_dtype": "float32",
}

SPECIAL = ["<end>", "<tools>", "<user>", "<assistant>", "<tool>", "<tool_call>", "</tool_call>"]
# The frame of a call, a token for each of its parts, so that a call has ten tokens.
FRAME = ['\n{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}\n", "multiply"]
TEMPLATE = (
    "{%- if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{%- for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}{{ '<tool_call>\\n' }}{{ call.function | tojson }}"
    "{{ '\\n</tool_call>' }}{% endfor %}<end>{% endfor %}"
    "{%- if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(folder):
    """A token for each printable character, and those above; returns how many there are."""
    characters = [*map(chr, range(32, 127)), "\n"]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in FRAME])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end>", "pad_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer.get_vocab_size()


def user(a, b):
    return {"role": "user", "content": f"{a}*{b}"}


def make_data():
    rng = np.random.default_rng(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    # GRPO's prompts are products of their own, which the supervised rows never show.
    with open(HERE / "train.jsonl", "w") as file:
        for a, b in pairs[:PROMPTS]:
            file.write(json.dumps({"prompt": [user(int(a), int(b))], "answer": int(a * b)}) + "\n")
    shown = pairs[PROMPTS:]
    UNTRAINED.mkdir(parents=True, exist_ok=True)
    with open(SFT_DATA, "w") as file:
        for row in range(SFT_ROWS):
            a, b = map(int, shown[rng.integers(len(shown))])
            if row % 2:
                turns = [{"role": "assistant", "content": str(rng.integers(100, 9802))}]
            else:
                function = {"name": "multiply", "arguments": {"a": a, "b": b}}
                turns = [
                    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
                    {"role": "tool", "name": "multiply", "content": str(a * b)},
                    {"role": "assistant", "content": str(a * b)},
                ]
            row = {"messages": [user(a, b), *turns], "tools": [tool_schema(multiply)]}
            file.write(json.dumps(row) + "\n")
    size = write_tokenizer(UNTRAINED)
    config = ModelConfig.from_dict({**CONFIG, "vocab_size": size}, "make.py")
    weights = Weights.random(config, "float32", seed=0)
    save_model(Transformer(config, weights), UNTRAINED)
    print(f"{PROMPTS} prompts, {SFT_ROWS} supervised rows, {weights.flat.size:,} parameters")


def make_model():
    source = pathlib.Path("runs/tools-sft/final")
    save_model(load_model(source, "float32"), HERE / "model", ModelTokenizer.from_folder(source), "float16")


if __name__ == "__main__":
    {"data": make_data, "model": make_model}[sys.argv[1]]()
