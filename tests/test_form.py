"""The form of the package: sizes that packages, modules and functions keep to.

A table below each limit has what is beyond it, with its present size; a size may become smaller and not larger, and
what has come below the limit leaves its table.
"""

import ast
import functools
import pathlib
import re
import textwrap
from collections import Counter

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "rlnumba"

# Modules directly in a package.
MOST_MODULES = 20
FULL_PACKAGES = {}

MOST_LINES = 600
LONG_MODULES = {}

# Lines of a function that is no kernel, no device function and makes none.
MOST_LINES_OF_FUNCTION = 100
LONG_FUNCTIONS = {}

# Arguments of a function of the host, without self.
MOST_ARGUMENTS = 8
LONG_SIGNATURES = {}

# Decorators of what runs on the device, or is an instruction.
DEVICE = re.compile(r"\b(jit|njit|device_function|instruction\w*|intrinsic|warp_wide|warpgroup_wide|_warp_function)\b")


@functools.cache
def functions_of(tree):
    """(qualified name, node, whether it is device code or makes such) of every function of a syntax tree."""
    found = []

    def visit(node, names, on_device):
        makes = False
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                makes |= visit(child, [*names, child.name], on_device)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                is_device = on_device or any(DEVICE.search(ast.unparse(each)) for each in child.decorator_list)
                index = len(found)
                found.append(None)
                makes_device = visit(child, [*names, child.name], is_device)
                found[index] = ".".join([*names, child.name]), child, is_device or makes_device
                makes |= is_device or makes_device
            else:
                makes |= visit(child, names, on_device)
        return makes

    visit(tree, [], False)
    return found


def arguments_of(function):
    """The number of a function's arguments, without self and cls."""
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def branches_by_trainer(tree, names):
    """Lines that compare a `kind` or `trainer`, a variable or an attribute, with the name of a trainer.

    Differences between trainers are in their records (TRAINER). A loss_type may have the same name.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            elements = [e for side in sides for e in (side.elts if isinstance(side, ast.Tuple | ast.List) else [side])]
            variables = {ast.unparse(each).rpartition(".")[2] for each in elements}
            is_name = any(isinstance(each, ast.Constant) and each.value in names for each in elements)
            if is_name and variables & {"kind", "trainer"}:
                found.append(node.lineno)
    return found


def check(sizes, limit, beyond):
    """Fail for a size that is beyond the limit, or beyond its entry in the table, or has an entry without need."""
    large = {name: size for name, size in sizes.items() if size > limit}
    wrong = [f"{name}: {size}, at most {max(limit, beyond.get(name, 0))}" for name, size in large.items()
             if size > beyond.get(name, limit)]  # fmt: skip
    wrong += [f"{name}: no longer beyond {limit}; take it out of the table" for name in beyond if name not in large]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def trees():
    """{path below the repository: (its text, its syntax tree)} of every module."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        found[str(path.relative_to(PACKAGE.parent))] = text, ast.parse(text)
    return found


def test_packages_are_small(trees):
    modules = [pathlib.Path(path) for path in trees if not path.endswith("__init__.py")]
    check(Counter(str(path.parent) for path in modules), MOST_MODULES, FULL_PACKAGES)


def test_modules_are_short(trees):
    check({path: len(text.splitlines()) for path, (text, _) in trees.items()}, MOST_LINES, LONG_MODULES)


def test_functions_are_short(trees):
    lengths = {
        f"{path}:{name}": node.end_lineno - node.lineno + 1
        for path, (_, tree) in trees.items()
        for name, node, is_device in functions_of(tree)
        if not is_device
    }
    check(lengths, MOST_LINES_OF_FUNCTION, LONG_FUNCTIONS)


def test_functions_take_few_arguments(trees):
    counts = {
        f"{path}:{name}": arguments_of(node)
        for path, (_, tree) in trees.items()
        for name, node, is_device in functions_of(tree)
        if not is_device
    }
    check(counts, MOST_ARGUMENTS, LONG_SIGNATURES)


def class_names(tree):
    """The names of all classes of a syntax tree, those that namedtuple makes among them: list."""
    found = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in ast.walk(tree):
        is_made = isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if is_made and ast.unparse(node.value.func).rpartition(".")[2] in ("namedtuple", "NamedTuple"):
            found += [ast.unparse(each) for each in node.targets]
    return found


def test_a_class_has_a_name_of_its_own(trees):
    names = Counter(name for _, tree in trees.values() for name in class_names(tree))
    assert [name for name, count in names.items() if count > 1] == []


def test_classes_are_found():
    text = "class A: ...\nB = namedtuple('B', 'x')\nC = collections.namedtuple('C', 'x')\nD = f(namedtuple)"
    assert class_names(ast.parse(text)) == ["A", "B", "C"]


def test_no_branch_by_the_name_of_a_trainer(trees):
    from rlnumba.config.runs import RUNS

    found = [f"{path}:{line}" for path, (_, tree) in trees.items() for line in branches_by_trainer(tree, set(RUNS))]
    assert not found, "\n".join(found)


EXAMPLE = """
    @cuda.jit
    def kernel(a, b): ...

    @functools.cache
    def kernel_of(config):
        @specialize(config)
        @cuda.jit
        def kernel(a):
            def inside(): ...

    class Launch:
        def __init__(self, a, *, b): ...

    def choose(kind):
        if loss_type == "grpo" or kind == "f":
            return 0
        return 1 if kind == "grpo" else 2 if run.trainer in ("rloo", "other") else 3
"""


def test_functions_and_branches_are_found():
    tree = ast.parse(textwrap.dedent(EXAMPLE))
    found = {name: (arguments_of(node), is_device) for name, node, is_device in functions_of(tree)}
    assert found == {
        "kernel": (2, True),
        "kernel_of": (1, True),
        "kernel_of.kernel": (1, True),
        "kernel_of.kernel.inside": (0, True),
        "Launch.__init__": (2, False),
        "choose": (1, False),
    }
    assert len(branches_by_trainer(tree, {"grpo", "rloo"})) == 2


@pytest.mark.parametrize(
    ("beyond", "word"), [({}, "at most 3"), ({"a": 4}, "at most 4"), ({"a": 5, "b": 4}, "no longer")]
)
def test_a_table_is_exact(beyond, word):
    with pytest.raises(AssertionError, match=word):
        check({"a": 5, "b": 3}, 3, beyond)
    check({"a": 5, "b": 3}, 3, {"a": 6})
