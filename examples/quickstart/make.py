"""How the quickstart's model and data were made. From the repository's root, about six minutes on two cores:

    python examples/quickstart/make.py data            words.txt -> train.jsonl, sft.jsonl and the untrained model
    rlnumba sft --config examples/quickstart/sft.toml  -> runs/quickstart-sft/final
    python examples/quickstart/make.py model           -> examples/quickstart/model, in float16
    python examples/quickstart/make.py pairs           -> pairs.jsonl and pairs-eval.jsonl, for reward models

The task: write a word backwards. The supervised rows answer a word, with equal probability, by its
characters reversed, by its characters sorted, or by the word itself; so the model they train can do all three
and does what the prompt asks about one time in three. GRPO's reward selects one of them.

words.txt: the lower-case words of four to six characters that occur at least five times in GSM8K's
questions (Cobbe et al., 2021; MIT license).
"""

import json
import pathlib
import sys

import numpy as np
from tokenizers import Tokenizer, decoders, models

from rlnumba import LLM, SamplingParams
from rlnumba.model.config import ModelConfig
from rlnumba.model.tokenizer import Tokenizer as ModelTokenizer
from rlnumba.model.transformer import Transformer, load_model, save_model
from rlnumba.model.weights import Weights

HERE = pathlib.Path(__file__).parent
UNTRAINED = pathlib.Path("runs/quickstart-untrained")
PROMPT = "{word} backwards: "
SFT_ROWS = 24_000
PAIRS = 2

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "bos_token_id": None,
    "torch_dtype": "float32",
}


def write_tokenizer(folder):
    """A token for each character of the prompts and answers, and <end>; returns how many there are."""
    characters = sorted(set("abcdefghijklmnopqrstuvwxyz" + PROMPT.format(word="")))
    vocabulary = {"<end>": 0, **{character: i for i, character in enumerate(characters, 1)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end>", "pad_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return len(vocabulary)


def make_data():
    rng = np.random.default_rng(0)
    words = (HERE / "words.txt").read_text().split()
    # GRPO's prompts are words of their own, which the supervised rows never show.
    rng.shuffle(words)
    for_eval, shown = words[:512], words[512:]
    with open(HERE / "train.jsonl", "w") as file:
        for word in for_eval:
            file.write(json.dumps({"prompt": PROMPT.format(word=word), "answer": word[::-1]}) + "\n")
    alphabet = list("abcdefghijklmnopqrstuvwxyz")
    with open(HERE / "sft.jsonl", "w") as file:
        for row in range(SFT_ROWS):
            # Every second row is a random string, so that spelling, not the list of words, is learned.
            word = str(rng.choice(shown)) if row % 2 else "".join(rng.choice(alphabet, rng.integers(3, 8)))
            answer = (word[::-1], "".join(sorted(word)), word)[rng.integers(3)]
            file.write(json.dumps({"prompt": PROMPT.format(word=word), "completion": answer}) + "\n")
    UNTRAINED.mkdir(parents=True, exist_ok=True)
    size = write_tokenizer(UNTRAINED)
    config = ModelConfig.from_dict({**CONFIG, "vocab_size": size}, "make.py")
    weights = Weights.random(config, "float32", seed=0)
    save_model(Transformer(config, weights), UNTRAINED)
    print(f"{len(for_eval)} prompts, {SFT_ROWS} supervised rows, {weights.flat.size:,} parameters")


def make_model():
    source = pathlib.Path("runs/quickstart-sft/final")
    save_model(load_model(source, "float32"), HERE / "model", ModelTokenizer.from_folder(source), "float16")


def make_pairs():
    """Pairs of the right answer and a wrong one of the model, at most PAIRS of a prompt; the last 64 words held out."""
    rows = [json.loads(line) for line in open(HERE / "train.jsonl")]
    outputs = LLM(HERE / "model").generate([row["prompt"] for row in rows], SamplingParams(n=8, max_tokens=10, seed=0))
    for name, chosen in (("pairs", slice(0, -64)), ("pairs-eval", slice(-64, None))):
        with open(HERE / f"{name}.jsonl", "w") as file:
            for row, output in zip(rows[chosen], outputs[chosen], strict=True):
                wrong = dict.fromkeys(c.text for c in output.completions if c.text != row["answer"])
                for text in list(wrong)[:PAIRS]:
                    pair = {"prompt": row["prompt"], "chosen": row["answer"], "rejected": text}
                    file.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    {"data": make_data, "model": make_model, "pairs": make_pairs}[sys.argv[1]]()
