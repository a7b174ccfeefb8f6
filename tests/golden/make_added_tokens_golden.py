"""Records which ids transformers gives the tokens that a folder's other files add to tokenizer.json: added_tokens.json.

Needs transformers, in an environment of its own: `python tests/golden/make_added_tokens_golden.py`. Each case changes
the folder tokenizer/ beside it: keys of tokenizer_config.json (null removes one), and further files.
"""

import json
import shutil
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

HERE = Path(__file__).parent
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
MAP = "special_tokens_map.json"
NAMES = ("bos_token", "image_token", "eot_token", "add_some_token", "think_token", "boi_token", "extra_special_tokens")
TEMPLATE = "|".join(f"{{{{ {name} }}}}" for name in NAMES)
CASES = {
    "added_tokens.json": ({}, {"added_tokens.json": {"<new>": 487, "<other>": 488}}),
    "added_tokens.json with gaps": ({}, {"added_tokens.json": {"<new>": 500, "<other>": 490}}),
    "added_tokens_decoder": (
        {"added_tokens_decoder": {"488": {"content": "<other>", "special": True, **FLAGS},
                                  "487": {"content": "<new>", "special": False, **FLAGS}}},
        {"added_tokens.json": {"<unused>": 487}, MAP: {"eos_token": "<|eot_id|>"}},
    ),
    "strings in a map": ({}, {MAP: {"additional_special_tokens": ["<new>", "<other>"], "eos_token": "<|eot_id|>"}}),
    "objects in a map": (
        {"eos_token": None}, {MAP: {"eos_token": {"content": "<new>", **FLAGS}, "pad_token": "<other>"}}
    ),
    "a list of extra ones": ({"extra_special_tokens": ["<other>"]}, {}),
    "extra ones with names": ({"extra_special_tokens": {"image_token": "<other>"}}, {}),
    "an eos_token that is new": ({"eos_token": "<new>", "extra_special_tokens": ["<other>"]}, {}),
    "names that the model's templates read": (
        {"image_token": "<new>", "eot_token": "c", "add_some_token": True, "think_token": {"content": "a"},
         "extra_special_tokens": {"boi_token": "<other>", "eot_token": "<|eot_id|>"}, "chat_template": TEMPLATE}, {}
    ),
}  # fmt: skip
TEXTS = ("a<new>b <other>", "<|eot_id|>c<|im_end|>", "<other><new> c")


def make_folder(folder, settings, files):
    """Write a case's folder."""
    shutil.copytree(HERE / "tokenizer", folder)
    path = folder / "tokenizer_config.json"
    kept = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def recorded(settings, files):
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder) / "m", settings, files)
        tokenizer = AutoTokenizer.from_pretrained(Path(folder) / "m")
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    decoded = [tokenizer.decode(each, skip_special_tokens=True) for each in ids]
    rendered = {}
    if "chat_template" in settings:
        message = {"role": "user", "content": "a"}
        rendered["rendered"] = tokenizer.apply_chat_template([message], tokenize=False)
    named = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return {"settings": settings, "files": files, "texts": TEXTS, "ids": ids, "decoded": decoded, **named, **rendered}


if __name__ == "__main__":
    found = {name: recorded(*case) for name, case in CASES.items()}
    (HERE / "added_tokens.json").write_text(json.dumps(found) + "\n")
