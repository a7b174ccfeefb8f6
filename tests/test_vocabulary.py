"""One word for one thing, and it is the field's: words that no file uses, each with what to say instead."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FILES = [
    path
    for pattern in (
        "*.md",
        "docs/*",
        "examples/**/*",
        "rlnumba/**/*.py",
        "rlnumba/**/*.md",
        "tests/**/*.py",
        "bench/**/*.py",
        "bench/*.md",
    )
    for path in ROOT.glob(pattern)
    if path.suffix in {".md", ".py", ".toml"} and path.name not in {"test_vocabulary.py", "LICENSE"}
]
# Regular expressions of whole words, in identifiers and in prose.
WORDS = {
    "copy engines?": "TMA, or copy",
    "(second|first)-level cache": "L2, L1",
    "(matrix|numba|own) products?|products? of matrices|products are (ours|our own)": "GEMMs",
    "bulk_load[a-z_]*": "tma_load_2d, tma_load_3d, tma_load_3d_evict_first",
    "run_(load|add|store)": "bulk_copy, bulk_reduce_add",
    "sync_group": "named_barrier_sync",
    "(fewer|more|set)_registers": "setmaxnreg_dec, setmaxnreg_inc",
    "wait_for_kernels_before": "griddepcontrol_wait",
    "let_next_kernel_start": "griddepcontrol_launch_dependents",
    "(await|give)_turn|in its turn": "semaphore wait, release; in order",
    "tickets?": "work index",
    "count_up": "atomic_add_acq_rel",
    "posted": "enqueued",
    "GOES_ON": "resumes_partial",
    "plan_units?|units_of": "work item",
    "slabs?": "split-K partial, chunk",
    "soften": "online_softmax_step",
    "SLACK": "RESCALE_THRESHOLD",
    "shrinks?|shrunk": "rescale; becomes smaller",
    "hopeful": "candidates",
    "head_start": "prune_bound",
    "(?<!data[ _])race[sd]?(?! condition)": "Gumbel argmax, data race",
    "start_loads|kernel_factory": "compiler_barrier, specialize",
    "Heap": "HeapAllocator",
    "rooms": "chunks",
    "_let_go": "release_waiters",
    "common_lens": "shared_prefix_lens",
    "Sharing": "PrefixSharing",
    "rate_of|attention_of|prompts_of|before_and_after": "learning_rate_at, packed_attention, load_prompts",
    "held_out": "eval_data",
    "best_tile": "gemm_config, and so on",
    "ladders?|rungs?|stations?|(?<!little's )laws?": "test levels, stages, invariants",
    "who multiplies|way of a token|the house of": "GEMM backend, life of a token, layout",
    "brings?|brought": "load, copy, cause",
    "tells?|told": "say what the thread reads, or what the value is",
    "nobody|somebody|whoever": "name the thread, block or caller",
    "numpy device": "cpu device",
}
# A pattern with a capital letter is an identifier, and stands for this spelling alone; others are looked for in lower
# case. What stands before a word is looked at once the word is found: `re` searches quickly for what begins a pattern.
FORBIDDEN = {re.compile(rf"({word})(?![A-Za-z])"): (word.islower(), say) for word, say in WORDS.items()}

# Packages whose docstrings have their subject first, beside the modules directly in rlnumba/.
SUBJECT_FIRST = (
    "cli",
    "config",
    "data",
    "engine",
    "environments",
    "kernels",
    "model",
    "parallel",
    "reporting",
    "rewards",
    "runs",
    "runtime",
    "sampling",
    "serve",
    "trainers",
)
GENITIVE = re.compile(r'"""(Of|As|What|Where|Which|How|Whose|That)\b')


# Packages in whose docstrings what is said of an argument has its noun: "config: the model's", not "config: of the
# model". A line of the docstring begins with the argument, or a sentence or a clause does.
ARGUMENTS_WITH_NOUNS = ("cli", "runs")
ARGUMENT = re.compile(r'(?m)(?:^ +|[.;] |""")([a-z_]+(?:, [a-z_]+)*): (?:of|as)\b')


def whole_words(pattern, text):
    """The matches of a pattern that no letter stands before."""
    found = pattern.search(text)
    while found:
        first, end = found.span()
        inside = first > 0 and text[first - 1].isascii() and text[first - 1].isalpha()
        if not inside:
            yield found
        found = pattern.search(text, first + 1 if inside else end)


def findings(name, text):
    """A line for each forbidden word of a text."""
    lowered = text.lower()
    return [
        f"{name}:{text.count(chr(10), 0, found.start()) + 1}: {found[0]!r}; say {say}"
        for pattern, (in_lower_case, say) in FORBIDDEN.items()
        for found in whole_words(pattern, lowered if in_lower_case else text)
    ]


def test_no_file_has_a_forbidden_word():
    assert len(FILES) > 200
    found = [line for path in FILES for line in findings(path.relative_to(ROOT), path.read_text())]
    assert not found, "\n".join(sorted(found))


def genitives(name, text):
    """A line for each docstring that begins with a genitive or a relative clause."""
    return [
        f"{name}:{text.count(chr(10), 0, found.start()) + 1}: a docstring begins with {found[1]!r}; subject first"
        for found in GENITIVE.finditer(text)
    ]


def test_docstrings_have_their_subject_first():
    folders = [ROOT / "rlnumba" / package for package in SUBJECT_FIRST]
    paths = [path for path in FILES if any(folder in path.parents for folder in folders)]
    paths += (ROOT / "rlnumba").glob("*.py")
    found = [line for path in paths for line in genitives(path.relative_to(ROOT), path.read_text())]
    assert not found, "\n".join(sorted(found))


def arguments_without_nouns(name, text):
    """A line for each argument of a docstring of which a genitive is said."""
    return [
        f"{name}:{node.body[0].lineno}: {found[0].strip()!r}; say what it is"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for found in ARGUMENT.finditer(ast.get_docstring(node, clean=False) or "")
    ]


def test_arguments_are_said_with_nouns():
    folders = [ROOT / "rlnumba" / package for package in ARGUMENTS_WITH_NOUNS]
    paths = [path for path in FILES if path.suffix == ".py" and any(folder in path.parents for folder in folders)]
    found = [line for path in paths for line in arguments_without_nouns(path.relative_to(ROOT), path.read_text())]
    assert len(paths) > 20 and not found, "\n".join(found)


def test_arguments_without_nouns_are_found():
    text = '"""A model.\n\n    config: of the model; base, folder: as load_model. dtype: the weights\'."""'
    assert len(arguments_without_nouns("a.py", text)) == 2


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('"""Of C."""', 1),
        ('x\n    """Which thread loads it."""', 1),
        ('"""Bytes of a tile of C."""', 0),
        ('"""Offset of a row."""', 0),
    ],
)
def test_docstrings_that_begin_with_a_genitive_are_found(text, count):
    assert len(genitives("a.py", text)) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("The copy engine brings a slab.", 3),
        ("def bulk_load_heads(x): ...", 1),
        ("inner products of rows and columns; a data race; slabby; tellers", 0),
        ("matrix products; segments race", 2),
    ],
)
def test_forbidden_words_are_found(text, count):
    assert len(findings("a.md", text)) == count
