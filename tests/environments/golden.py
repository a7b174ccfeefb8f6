"""What transformers and TRL make of tools (tests/golden/tools.json), and a tokenizer with one of its templates."""

import json
import pathlib

from rlnumba.model.tokenizer import Tokenizer

FOLDER = pathlib.Path(__file__).parent.parent / "golden"
GOLDEN = json.loads((FOLDER / "tools.json").read_text())


def tokenizer_with(template, folder=FOLDER / "tokenizer"):
    """The Tokenizer of a folder with a template of the golden file, or with its text."""
    tokenizer = Tokenizer(folder)
    tokenizer.templates = {"default": GOLDEN["templates"].get(template, template)}
    return tokenizer
