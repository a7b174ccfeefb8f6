"""A Run as TOML, for output_dir/config.toml and `--dry-run`."""

import json

from rlnumba.config.keys import keys_of, section_fields, sections_of


def toml_value(value):
    """A Python value as TOML text: str. Strings, numbers, bools, lists, tables with str keys; None is "None"."""
    if value is None:
        return '"None"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)} = {toml_value(v)}" for k, v in value.items()) + "}"


def to_toml(run):
    """The whole run as TOML that load_run reads back to the same run: str. Keys that are not set are comments."""
    lines, attributes = [], section_fields(type(run))
    for section, section_class in sections_of(type(run)).items():
        values = getattr(run, attributes[section]) if section else run
        if values is None:
            continue
        if section:
            lines += ["", f"[{section}]"]
        for name, f in keys_of(section_class, type(run)).items():
            value = getattr(values, name)
            unset = value is None and f.default is None
            lines.append(f"# {name} is not set" if unset else f"{name} = {toml_value(value)}")
    return "\n".join(lines) + "\n"
