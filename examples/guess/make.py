"""How the model of the guessing game was made. From the repository's root, two minutes on two cores:

    python examples/guess/make.py data             -> runs/guess-sft.jsonl, untrained model
    rlnumba sft --config examples/guess/sft.toml   -> runs/guess-sft/final
    python examples/guess/make.py model            -> examples/guess/model, in float16

The supervised rows are games with seven numbers whose guesses are drawn at random, whatever the answers were: the model
that they train knows how the game is played, and nothing of how it is won.
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

from game import Guess  # noqa: E402

UNTRAINED, SFT_DATA = pathlib.Path("runs/guess-untrained"), pathlib.Path("runs/guess-sft.jsonl")
SFT_ROWS, HIGHEST, MOST_GUESSES = 8_000, 7, 3

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
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
# The parts of a call, and the words of the game, have a token each, so that a turn has six.
WORDS = ['\n{"name": "guess", "arguments": {"number": ', "}}\n", "guess", "higher", "lower", "right"]
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
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*SPECIAL, *characters])}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in WORDS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end>", "pad_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer.get_vocab_size()


def random_game(rng):
    """The messages of a game whose guesses are random."""
    game = Guess(HIGHEST, MOST_GUESSES)
    messages = [{"role": "user", "content": game.reset(seed=int(rng.integers(2**32)))}]
    for _ in range(MOST_GUESSES):
        number = int(rng.integers(1, HIGHEST + 1))
        function = {"name": "guess", "arguments": {"number": number}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        messages += [call, {"role": "tool", "name": "guess", "content": game.guess(number)}]
        if number == game.secret:
            break
    return [*messages, {"role": "assistant", "content": "."}]


def make_data():
    rng = np.random.default_rng(0)
    UNTRAINED.mkdir(parents=True, exist_ok=True)
    with open(SFT_DATA, "w") as file:
        for _ in range(SFT_ROWS):
            file.write(json.dumps({"messages": random_game(rng), "tools": [tool_schema(Guess.guess)]}) + "\n")
    config = ModelConfig.from_dict({**CONFIG, "vocab_size": write_tokenizer(UNTRAINED)}, "make.py")
    weights = Weights.random(config, "float32", seed=0)
    save_model(Transformer(config, weights), UNTRAINED)
    print(f"{SFT_ROWS} supervised rows, {weights.flat.size:,} parameters")


def make_model():
    source = pathlib.Path("runs/guess-sft/final")
    save_model(load_model(source, "float32"), HERE / "model", ModelTokenizer.from_folder(source), "float16")


if __name__ == "__main__":
    {"data": make_data, "model": make_model}[sys.argv[1]]()
