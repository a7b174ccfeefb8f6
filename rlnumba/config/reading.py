"""TOML files and --section.key overrides become a Run.

Keys are strict: an unknown section or key, a wrong type or a value out of range is a ConfigError of one line that names
the file, the key and what would be valid (for an unknown key the nearest one).
"""

import difflib
import json
import sys
import tomllib
import typing
from pathlib import Path

from rlnumba.config.keys import (
    REQUIRED,
    and_list,
    as_type,
    keys_of,
    optional_sections_of,
    range_problem,
    section_fields,
    sections_of,
    split_optional,
    typed_value,
    without_effect,
)
from rlnumba.config.other_keys import always, translated
from rlnumba.config.runs import RUNS
from rlnumba.errors import ConfigError, MissingKey

# (section, key) of other tools -> the key here. Sources: TRL [train], prime-rl, verl, RL.cu.
ALIASES = {
    ("", "model_name_or_path"): ("", "model"),
    ("", "reward_funcs"): ("rewards", "funcs"),
    ("", "dataset_name"): ("data", "train"),
    ("", "dataset_config"): ("data", "name"),
    ("", "dataset_train_split"): ("data", "split"),
    ("", "dataset_test_split"): ("data", "eval_split"),
    ("train", "output_dir"): ("", "output_dir"),
    ("train", "seed"): ("", "seed"),
    ("train", "reward_weights"): ("rewards", "weights"),
    ("train", "chat_template_kwargs"): ("data", "chat_template_kwargs"),
    ("train", "max_prompt_length"): ("data", "max_prompt_length"),
    ("train", "vllm_gpu_memory_utilization"): ("engine", "gpu_memory_utilization"),
    ("train", "vllm_max_model_length"): ("engine", "max_model_len"),
    ("train", "vllm_importance_sampling_cap"): ("train", "vllm_importance_sampling_clip_max"),
    ("train", "group_size"): ("train", "num_generations"),
    ("train", "clip_ratio"): ("train", "epsilon"),
    ("train", "clip_ratio_low"): ("train", "epsilon"),
    ("train", "clip_ratio_high"): ("train", "epsilon_high"),
    ("train", "response_length"): ("train", "max_completion_length"),
    ("train", "num_gens"): ("train", "num_generations"),
    ("", "num_gens"): ("train", "num_generations"),
    ("train", "keep_last"): ("train", "save_total_limit"),
    ("train", "num_generations_eval"): ("eval", "num_generations"),
    ("train", "teacher_model_name_or_path"): ("teacher", "model"),
    ("train", "max_new_tokens"): ("train", "max_completion_length"),
    ("train", "optimizer_offload"): ("train", "offload_optimizer"),
}


def split_at_commas(text):
    """Splits at the commas outside of brackets: list of str."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in [*parts, text[start:]]]


def from_text(text, hint):
    """Text of the command line as the type of a key. Raises ValueError if it cannot be parsed."""
    if hint is str:
        return text
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError
        return text.lower() == "true"
    if hint in (int, float):
        return hint(text)
    if typing.get_origin(hint) is list and not text.lstrip().startswith("["):
        return [from_text(part, typing.get_args(hint)[0]) for part in split_at_commas(text) if part]
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = json.loads(text)
    return as_type(value, hint)


def _nearest(name, valid):
    return difflib.get_close_matches(name, valid, n=1, cutoff=0)[0]


def _dotted(section, name):
    return f"{section}.{name}" if section else name


def owners_of(section, name):
    """The trainers that read a key: list of str."""
    return [
        kind
        for kind, run_class in RUNS.items()
        if section in sections_of(run_class) and name in keys_of(sections_of(run_class)[section], run_class)
    ]


class _Values:
    """The values of all files and overrides so far, each checked when it is set."""

    def __init__(self, kind, has_16_bits=always):
        self.kind, self.has_16_bits = kind, has_16_bits
        self.aliases = {**ALIASES, ("train", "batch_size"): RUNS[kind].batch_size}
        self.sections = sections_of(RUNS[kind])
        self.keys = {name: keys_of(section, RUNS[kind]) for name, section in self.sections.items()}
        self.given = {name: {} for name in self.sections}
        # Optional sections that a file or an option has.
        self.present = set()

    def set(self, section, name, value, convert, where, seen):
        """Sets one key. `where` starts the message of an error; `seen` holds the keys that this source has set."""
        typed = _dotted(section, name)
        section, name = self.aliases.get((section, name), (section, name))
        if section == "train" and name not in self.keys[section]:
            try:
                pair = translated(name, value, self.keys[section], self.has_16_bits)
            except KeyError:
                pair = name, value
            if pair is None:
                return
            name, value = pair
        shown = typed if typed.endswith(name) else f"{typed} ({section}.{name})"
        if name not in self.keys.get(section, {}):
            if owners := owners_of(section, name):
                raise ConfigError(f"{where}{shown} is a key of {and_list(owners)}, not of {self.kind}")
            raise ConfigError(f"{where}unknown key {typed}; {self._advice(section, name)}")
        if (section, name) in seen:
            raise ConfigError(f"{where}{shown} is given twice, as {seen[section, name]} and {typed}")
        seen[section, name] = typed
        self.present.add(section)
        metadata = self.keys[section][name].metadata
        if split_optional(self.keys[section][name].type)[1] and value in ("None", "none", "null"):
            self.given[section][name] = None
            return
        try:
            value = typed_value(self.keys[section][name], value, convert)
        except ConfigError as error:
            raise ConfigError(f"{where}{shown} {error}") from error
        problem = range_problem(metadata, value)
        if problem:
            raise ConfigError(f"{where}{shown} {problem}")
        self.given[section][name] = value

    def _advice(self, section, name):
        everywhere = [_dotted(s, k) for s, keys in self.keys.items() for k in keys]
        elsewhere = [full for full in everywhere if full.split(".")[-1] == name]
        if elsewhere:
            return f"did you mean {elsewhere[0]}?"
        if not section:
            return f"did you mean {_nearest(name, everywhere)}?"
        section = _nearest(section, [s for s in self.keys if s])
        return f"did you mean {section}.{_nearest(name, self.keys[section])}?"

    def read_file(self, path):
        """Take the keys of a TOML file. Raises ConfigError naming the file and the section or key at fault."""
        seen = {}
        for name, value in _read_toml(path).items():
            if name in self.sections and name:
                if not isinstance(value, dict):
                    raise ConfigError(f"{path}: [{name}] must be a table, got {value!r}")
                self.present.add(name)
                for inner, inner_value in value.items():
                    self.set(name, inner, inner_value, as_type, f"{path}: ", seen)
            elif isinstance(value, dict):
                owners = [kind for kind, run_class in RUNS.items() if name in sections_of(run_class)]
                near = _nearest(name, [s for s in self.sections if s])
                advice = f"it belongs to {and_list(owners)}" if owners else f"did you mean [{near}]?"
                raise ConfigError(f"{path}: unknown section [{name}]; {advice}")
            else:
                self.set("", name, value, as_type, f"{path}: ", seen)

    def override(self, option, text, seen):
        section, _, name = option.lstrip("-").replace("-", "_").rpartition(".")
        if text is None:
            f = self.keys.get(section, {}).get(name)
            if f and split_optional(f.type)[0] is not bool:
                raise ConfigError(f"--{_dotted(section, name)} needs a value")
            text = "true"
        self.set(section, name, text, from_text, "command line: ", seen)


def _read_toml(path):
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such config file") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config file: {error.strerror}") from error
    except ValueError as error:  # also an integer of more digits than Python converts
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def likeliest_trainer(paths, overrides=()):
    """The trainer that knows most keys of run files, the first of several: str. The arguments are load_run's."""
    given = [option.lstrip("-").replace("-", "_").rpartition(".")[::2] for option, _ in overrides]
    for path in paths:
        for name, value in _read_toml(path).items():
            given += [(name, inner) for inner in value] if isinstance(value, dict) else [("", name)]
    known = {
        kind: {name: keys_of(each, run_class) for name, each in sections_of(run_class).items()}
        for kind, run_class in RUNS.items()
    }
    return max(RUNS, key=lambda kind: sum(name in known[kind].get(section, ()) for section, name in given))


def load_run(kind, path, overrides=(), has_16_bits=always):
    """The Run of a trainer, such as "sft" or "grpo".

    path: a TOML file, or a list of them, of which later ones win key by key. overrides: (key, text) pairs from the
    command line, such as ("train.learning_rate", "1e-5"); dashes stand for underscores, the text "None" for None, and a
    text of None for a bare flag. has_16_bits: returns whether the device has them, for bf16 and fp16. Prints a warning
    for keys of TRL and transformers that have no effect (other_keys.py). Raises ConfigError.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    values = _Values(kind, has_16_bits)
    for path in paths:
        values.read_file(path)
    seen = {}
    for option, text in overrides:
        values.override(option, text, seen)
    source = ", ".join(map(str, paths)) or "command line"
    remedy = "" if paths else "; give --{} VALUE, or a run file by --config"
    absent = optional_sections_of(RUNS[kind]) - values.present
    for section, keys in values.keys.items():
        for name, f in keys.items():
            if section in absent:
                continue
            if f.default is f.default_factory is REQUIRED and name not in values.given[section]:
                full = _dotted(section, name)
                raise ConfigError(f"{source}: {MissingKey(full)}{remedy.format(full)}")
    try:
        attributes = section_fields(RUNS[kind])
        named = {attributes[s]: c(**values.given[s]) for s, c in values.sections.items() if s and s not in absent}
        run = RUNS[kind](**values.given[""], **named)
    except MissingKey as error:
        raise ConfigError(f"{source}: {error}{remedy.format(error.key)}") from error
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    warn_without_effect(run)
    return run


def warn_without_effect(run):
    """Print a warning for each key of a Run that has no effect, because of the others."""
    for line in without_effect(run):
        print(f"rlnumba: warning: {line}", file=sys.stderr, flush=True)
