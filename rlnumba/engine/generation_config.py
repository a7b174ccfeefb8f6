"""Sampling as a model's card recommends it: the keys of generation_config.json, as SamplingParams.

Temperature and filters count where `do_sample` is true, as in transformers; the ids that end a completion are in
ModelConfig.
"""

from dataclasses import replace
from pathlib import Path

from rlnumba.errors import ConfigError
from rlnumba.model.config_values import read_json

# Key there -> SamplingParams' name.
WHERE_SAMPLED = {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
ALWAYS = {
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
# Keys that change a completion in transformers and are not computed here, with the values that ask for nothing.
NOT_COMPUTED = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "typical_p", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("penalty_alpha", "guidance_scale", "diversity_penalty"), (0, 1)),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), ([], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
}


def sampling_of(folder):
    """(SamplingParams' values that a folder's generation_config.json asks for, its keys that are not computed here)."""
    path = Path(folder) / "generation_config.json"
    raw = read_json(path) if path.exists() else {}
    names = {**ALWAYS, **(WHERE_SAMPLED if raw.get("do_sample") else {})}
    values = {name: raw[key] for key, name in names.items() if raw.get(key) is not None}
    unused = [key for key, neutral in NOT_COMPUTED.items() if raw.get(key) is not None and raw[key] not in neutral]
    return values, unused


def with_generation_config(params, folder, given):
    """(SamplingParams with what a folder's generation_config.json has for the names that are not `given`, lines that
    say so). Raises ConfigError naming the file for values that are none of SamplingParams'."""
    values, unused = sampling_of(folder)
    path = Path(folder) / "generation_config.json"
    values = {name: value for name, value in values.items() if name not in given and value != getattr(params, name)}
    try:
        params = replace(params, **values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {str(error).removeprefix('sampling: ')}") from None
    shown = ", ".join(f"{name} {value}" for name, value in values.items())
    lines = [f"{path}: {shown}; options of the command go first"] if values else []
    return params, lines + ([f"{path}: {', '.join(unused)} is not computed here"] if unused else [])
