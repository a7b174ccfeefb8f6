"""Each trainer reads every key that it accepts: code that its run reaches names the key.

What is reached follows from the names in the source: from `run_sft` and the others to the functions and classes that
they refer to, and so on. Methods count with their class, those of configurations once their name occurs.
"""

import ast
import functools
from pathlib import Path

import pytest

from rlnumba.config.keys import keys_of, sections_of
from rlnumba.config.runs import RUNS

ROOT = Path(__file__).parent.parent
# Accepted for TRL's files: what it asks for is so in every run. The others decide what other keys of [deploy] may be.
READ_ELSEWHERE = {"padding_free", "gpus_per_node", "launcher"}
# Where all keys are read, and what plans a run of any trainer.
OF_ALL_KEYS = ("rlnumba.config.keys", "rlnumba.config.reading", "rlnumba.config.writing")
OF_PLANS = "plan", "savings", "text", "fit", "kernel_list"
OF_ALL_TRAINERS = tuple(f"rlnumba.runs.planning.{name}" for name in OF_PLANS)


@functools.cache
def modules():
    """{name: (tree, {name there: its definition}, {name there: (module, name) it is imported from})} of the package."""
    found = {}
    for path in (ROOT / "rlnumba").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tree, defined, imported = ast.parse(path.read_text()), {}, {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined[node.name] = node
            elif isinstance(node, ast.Assign):
                defined |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
        found[name] = tree, defined, imported
    return found


def resolved(module, name):
    """(module, name) of what a name in a module stands for in the package, through imports; None of other things."""
    while module in modules():
        _, defined, imported = modules()[module]
        if name in defined:
            return module, name
        if name not in imported:
            return None
        module, name = imported[name]
        if f"{module}.{name}" in modules():
            return f"{module}.{name}", None
    return None


@functools.cache
def contents(module, name):
    """(names of attributes and strings in a definition, what it refers to in the package: a set of (module, name))."""
    node, read, refers = modules()[module][1].get(name), set(), set()
    if node is None or module in OF_ALL_KEYS + OF_ALL_TRAINERS:
        return read, refers
    if isinstance(node, ast.ClassDef) and module.startswith("rlnumba.config"):
        # Declares keys; what its methods read counts where they are called (read_by_config).
        return read, refers
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute):
            read.add(each.attr)
            if isinstance(each.value, ast.Name) and (found := resolved(module, each.value.id)) and not found[1]:
                refers.add(resolved(found[0], each.attr) or found)
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            read.add(each.value)
        elif isinstance(each, ast.Name) and (found := resolved(module, each.id)) and found[1]:
            refers.add(found)
    return read, refers


@functools.cache
def names_read(*starts):
    """The names of attributes and the strings in the code that is reached from definitions, (module, name): set."""
    seen, left, read = set(), list(starts), set()
    while left:
        at = left.pop()
        if at not in seen:
            seen.add(at)
            named, refers = contents(*at)
            read |= named
            left += refers
    return read_by_config(read)


def read_by_config(read):
    """What the methods of configurations read of themselves, of those whose names are read already: set."""
    found, methods = set(read), {}
    for name, (_, defined, _) in modules().items():
        if name.startswith("rlnumba.config") and name not in OF_ALL_KEYS:
            for node in defined.values():
                for method in node.body if isinstance(node, ast.ClassDef) else ():
                    if isinstance(method, ast.FunctionDef) and not method.name.startswith("__"):
                        methods.setdefault(method.name, []).append(method)
    added = True
    while added:
        inner = {node for name in found & methods.keys() for method in methods[name] for node in ast.walk(method)}
        more = {node.attr for node in inner if isinstance(node, ast.Attribute)}
        more |= {node.value for node in inner if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        added = more - found
        found |= more
    return found


def starts_of(kind):
    """Where a run of a trainer begins: in its module, and in what starts its ranks."""
    return (f"rlnumba.trainers.{kind}", f"run_{kind}"), ("rlnumba.runs.ranks", "train_on_ranks")


def unread_keys(kind):
    """The keys that a trainer accepts and no code that its run reaches reads: list."""
    read = names_read(*starts_of(kind))
    return [
        f"{section}.{name}".removeprefix(".")
        for section, of in sections_of(RUNS[kind]).items()
        for name in keys_of(of, RUNS[kind])
        if name not in read | READ_ELSEWHERE
    ]


@pytest.mark.parametrize("kind", RUNS)
def test_a_trainer_reads_the_keys_that_it_accepts(kind):
    assert unread_keys(kind) == []


def test_a_key_of_another_trainer_is_found():
    """Keys that sft and dpo once accepted and did not use."""
    assert not {"answer_column", "curriculum_column", "max_prompt_length"} & names_read(*starts_of("sft"))
    assert not {"answer_column", "prompt_template", "max_prompt_length"} & names_read(*starts_of("dpo"))
