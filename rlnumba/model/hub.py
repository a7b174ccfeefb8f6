"""The folder of a model: a path, or the Hugging Face hub's snapshot of an id; of an adapter, its base as well."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from rlnumba.errors import MissingModel, UserError, missing
from rlnumba.model.config import ModelConfig
from rlnumba.model.lora import CONFIG, adapter_heads, is_adapter, read_adapter_config
from rlnumba.model.tokenizer import end_token_id
from rlnumba.reporting.stderr import log


def find_model(path_or_hub_id, weights=True):
    """The local folder of a model: the path itself, or the hub's snapshot of that id, downloaded if it is not cached.

    weights: whether *.safetensors are needed. Raises MissingModel if it is neither, or cannot be downloaded.
    """
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    name = str(path_or_hub_id)
    hub_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name) and not Path(name.split("/")[0]).exists()
    if not hub_id:
        raise MissingModel(missing(name, "model folder"))
    try:
        import huggingface_hub
    except ImportError:
        remedy = "to fetch it from the Hugging Face hub, pip install 'rlnumba[hub]'"
        raise MissingModel(f"{missing(name, 'folder')}; {remedy}") from None
    patterns = ["*.json", "*.jinja", "*.model", "*.txt", *(["*.safetensors"] if weights else [])]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise MissingModel(missing(name, "folder", str(error).strip().splitlines()[0])) from None


def find_base(path_or_hub_id, base=None):
    """(folder of a model, folder of an adapter on it or None), from the path or hub id of a model or an adapter.

    base: that of the adapter, by default what its adapter_config.json names. UserError if a folder is not there.
    """
    folder = find_model(path_or_hub_id)
    if not is_adapter(folder):
        if base is not None:
            raise UserError(f"{folder}: not an adapter folder, so it has no base")
        if (folder / CONFIG).exists():
            _report_adapter(folder)
        return folder, None
    if base is None:
        base = read_adapter_config(folder)[1]
        if not base:
            raise UserError(f"{folder}: adapter_config.json names no base_model_name_or_path; give the base")
        try:
            return find_model(base), folder
        except UserError as error:
            raise UserError(f"{folder}: its base cannot be found: {error}; give the base (--base)") from None
    return find_model(base), folder


@cache
def _report_adapter(folder):
    """Say once that a model is used without the adapter in its folder, which transformers would apply."""
    log(f"warning: {folder}: the model is used without the adapter that is there, too ({CONFIG})")


def read_config(folder, adapter_folder=None):
    """The ModelConfig of a folder, with its tokenizer's EOS, and with the heads and the EOS of an adapter on it."""
    config = ModelConfig.from_folder(folder).ending_at(end_token_id(folder))
    if adapter_folder is None:
        return config
    return replace(config, heads=adapter_heads(adapter_folder, config)).ending_at(end_token_id(adapter_folder))
