"""What imports what: layers, the one door to the device, imports that load nothing heavy; and the maps of these."""

import ast
import functools
import importlib
import inspect
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import types

import pytest

from rlnumba.runtime.shapes import HOST_FUNCTIONS

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "rlnumba"

# A module imports from lower layers, and within layer 0 from what stands before it; of its own package anything.
LAYERS = {
    "errors": 0,
    "config": 0,
    "data": 0,
    "rewards": 0,
    "reporting": 0,
    "runtime": 1,
    "kernels": 2,
    "model": 3,
    "optim": 3,
    "checkpoint": 3,
    "engine": 4,
    "parallel": 4,
    "environments": 5,
    "sampling": 5,
    "serve": 5,
    "runs": 6,
    "trainers": 6,
    "cli": 7,
    "__main__": 8,
    "__init__": 8,
}
ORDER_WITHIN_0 = ["errors", "config", "data", "rewards", "reporting"]

# What kernels of several operators share. Other modules of an operator's package are its own.
SHARED_KERNELS = {"ptx", "tile", "nn", "philox", "checks", "cpu"}
# (importing operator, imported module of another one): what is imported.
BETWEEN_OPERATORS = {
    ("logprob", "gemm.ops"): "the GEMM with the LM head",
    ("logprob", "sampling.token_rules"): "the masks of a grammar, over logits that are scored",
    ("logprob", "gemm.scheduler"): "tile coordinates of the fused GEMM with the LM head",
    ("logprob", "gemm.sm90"): "the GEMM of the weight gradient",
    # The persistent kernel is built from the device functions of the operators that it computes.
    ("decoder", "gemm.sm90"): "the main loop",
    ("decoder", "gemm.sm90_config"): "the config that the epilogue follows from",
    ("decoder", "gemm.epilogue"): "SwiGLU",
    ("quantized", "gemm.ops"): "the GEMM backend",
    ("quantized", "gemm.sm90"): "the operands of a low rank",
    ("quantized", "gemm.reduction"): "the first product of a low rank",
    ("quantized", "gemm.sm90_config"): "the config that the epilogue follows from",
    ("quantized", "gemm.epilogue"): "bias, residual, SwiGLU and the stores",
    ("quantized", "gemm.grouped_tiles"): "the tiles of experts' rows",
    ("quantized", "gemm.grouped_config"): "the expected number of experts with rows",
    ("decoder", "attention.ops"): "the family of attention's kernels, whose bits it has",
    ("decoder", "attention.scheduler"): "the look-up of pages",
    ("decoder", "attention.sm90_decode.consumer"): "the softmax of a tile, across four warps",
    ("decoder", "attention.softmax"): "constants of the arithmetic",
    ("decoder", "attention.split_kv"): "the layout of the output in shared memory",
}


@functools.cache
def tree_of(path):
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


def imports_of(path):
    """(line, module) of every rlnumba import of a file, including those inside functions."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "rlnumba":
                    yield node.lineno, alias.name.split(".")[1:]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "rlnumba":
            parts = node.module.split(".")[1:]
            for alias in node.names:
                is_module = (PACKAGE / "/".join([*parts, alias.name])).with_suffix(".py").exists()
                yield node.lineno, [*parts, alias.name] if is_module or not parts else parts


def modules():
    """(dotted name below rlnumba, path) of every module."""
    return [(".".join(path.relative_to(PACKAGE).with_suffix("").parts), path) for path in sorted(PACKAGE.rglob("*.py"))]


def test_imports_point_down():
    wrong = []
    for module, path in modules():
        package = module.split(".")[0]
        for line, target in imports_of(path):
            if not target or target[0] == package:
                continue
            if target[0] not in LAYERS:
                wrong.append(f"{module}:{line}: {target[0]} has no layer")
            elif not _is_below(target[0], package):
                wrong.append(f"{module}:{line}: imports {'.'.join(target)} of layer {LAYERS[target[0]]}")
    assert not wrong, "\n".join(wrong)


def _is_below(package, importer):
    if LAYERS[package] == LAYERS[importer] == 0:
        return ORDER_WITHIN_0.index(package) < ORDER_WITHIN_0.index(importer)
    return LAYERS[package] <= LAYERS[importer]


def test_the_maps_of_the_package_name_each_layer():
    """README's layout names every package and module, and CONTRIBUTING's table has each in its layer."""
    names = {name for name in LAYERS if not name.startswith("__")}
    on_map = set(re.findall(r"`rlnumba/(\w+)(?:/|\.py)`", (ROOT / "README.md").read_text()))
    assert on_map == names
    rows = re.findall(r"(?m)^\| (\d) \| (.*?) \|", (ROOT / "CONTRIBUTING.md").read_text())
    table = {name: int(layer) for layer, cell in rows for name in re.findall(r"`(\w+)/?`", cell)}
    assert table == {name: LAYERS[name] for name in names}


def test_an_operator_imports_no_other_operators_kernels():
    wrong = []
    for module, path in modules():
        layer, _, inside = module.partition(".")
        for line, target in imports_of(path):
            if layer != "kernels" or len(target) < 2 or target[0] != "kernels":
                continue
            operator, imported = inside.split(".")[0], ".".join(target[1:])
            if operator == "cpu":  # a module for each operator, of which it is the cpu device's part
                operator = inside.split(".")[1]
            if target[1] not in SHARED_KERNELS | {operator} and (operator, imported) not in BETWEEN_OPERATORS:
                wrong.append(f"{module}:{line}: imports {imported} of another operator")
    assert not wrong, "\n".join(wrong)


def files_on_map(text):
    """The files that a map of the kernels names in backticks, relative to rlnumba/kernels.

    Below a heading `## folder/` a name without a slash is of that folder. Patterns and files elsewhere are left out.
    """
    found, folder = set(), ""
    for line in text.splitlines():
        if line.startswith("## "):
            heading = re.fullmatch(r"## (\w+/)", line)
            folder = heading[1] if heading else ""
        names = re.findall(r"`((?:\w+/)*\w+\.py)`", line)
        found |= {name if "/" in name else folder + name for name in names if name.split("/")[0] not in ELSEWHERE}
    return found


# Folders of the repository whose files the map names by their whole path.
ELSEWHERE = {"rlnumba", "tests"}


def test_names_on_a_map_are_those_of_their_folder():
    text = "`b.py` `a/*.py` `rlnumba/c.py`\n## gemm/\n| `ops.py` | `nn/x.py:f` | [`y.py`](y.py)\n## Others\n`z.py`"
    assert files_on_map(text) == {"b.py", "gemm/ops.py", "gemm/y.py", "z.py"}


# Functions of kernels that return something, which is None where a plan takes its steps: nothing there reads it.
NONE_IN_PLANS = {
    "address",
    "checksum_of",
    "checksum_ref",
    "decoder_config",
    "decoder_weights",
    "delta_rule_family",
    "dequantize_ref",
    "forward_rows",
    "fuses_qkv",
    "inbox_bytes",
    "is_packed_gemm",
    "is_packed_grouped_gemm",
    "keep_tensor_maps",
    "kto_metrics",
    "list_tokens",
    "noise_key",
    "plan_paged_attention",
    "policy_metrics",
    "ppo_metrics",
    "preference_metrics",
    "quantize_ref",
    "reserve_workspace",
    "sharing",
    "slices",
    "supports_peer_rmsnorm",
    "tokens_of_choice",
}


def returns_a_value(function):
    """Whether a `return` of the function itself, or a `yield`, has a value."""
    stack = list(ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
            return True
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            stack.extend(ast.iter_child_nodes(node))
    return False


def test_plans_know_the_functions_of_kernels_that_return_something():
    """runtime/shapes.py replaces operators, which return nothing, and must leave in place what computes on the host."""
    found = set()
    for module, _ in modules():
        if module.split(".")[0] not in ("kernels", "__main__", "__init__"):
            for name, value in vars(importlib.import_module(f"rlnumba.{module.removesuffix('.__init__')}")).items():
                if isinstance(value, types.FunctionType) and value.__module__.startswith("rlnumba.kernels."):
                    found |= {name} if returns_a_value(value) else set()
    assert found - HOST_FUNCTIONS == NONE_IN_PLANS, "name it in HOST_FUNCTIONS of rlnumba/runtime/shapes.py, or here"


def test_the_map_of_the_kernels_names_each_module():
    kernels = PACKAGE / "kernels"
    there = {str(path.relative_to(kernels)) for path in kernels.rglob("*.py") if path.name != "__init__.py"}
    named = files_on_map((kernels / "README.md").read_text())
    assert sorted(there - named) == [], "modules that kernels/README.md does not name"
    assert sorted(named - there) == [], "files in kernels/README.md that do not exist"


def test_no_cycles_within_a_package():
    graph = {module: {".".join(target) for _, target in imports_of(path)} for module, path in modules()}
    without_cycles = set()

    def visit(module, trail):
        assert module not in trail, " -> ".join([*trail, module])
        if module not in without_cycles:
            for target in graph.get(module, ()):
                if target in graph:
                    visit(target, [*trail, module])
            without_cycles.add(module)

    for module in graph:
        visit(module, [])


def test_one_door_to_the_device():
    allowed = {"device.py", "simulator.py"}
    for _, path in modules():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module == "numba" and path.name not in allowed:
                names = {alias.name for alias in node.names}
                assert "cuda" not in names, f"{path.name}:{node.lineno}: take cuda from rlnumba.runtime.device"
            if isinstance(node, ast.Import | ast.ImportFrom):
                imported = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert not any(m.split(".")[0] in ("torch", "transformers", "trl") for m in imported), path.name


def loaded_by(code, **environment):
    """The top-level modules that a new Python process has loaded after `code`, and the device it chose or "None"."""
    code += "\nimport sys; from rlnumba.runtime import device"
    code += "\nprint(*{name.split('.')[0] for name in sys.modules}, device._chosen, file=sys.stderr)"
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("RLNUMBA_DEVICE", "NUMBA_ENABLE_CUDASIM")
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=inherited | environment, capture_output=True, text=True, check=True
    )
    *loaded, chosen = done.stderr.splitlines()[-1].split()
    return set(loaded), chosen


LIGHT = {
    "import": "import rlnumba",
    "help": "from rlnumba.cli import run; assert run(['--help']) == 0",
    "help of a command": "from rlnumba.cli import run; assert run(['grpo', '--help']) == 0",
    "config": "from rlnumba.config import load_run; load_run('grpo', 'examples/quickstart.toml')",
    "dry run": "from rlnumba.cli import run;"
    " assert run(['grpo', '--config', 'examples/quickstart.toml', '--dry-run']) == 0",
    "parallel": "import rlnumba.parallel",
    "data, rewards, reporting": "import rlnumba.data, rlnumba.rewards, rlnumba.reporting.metrics",
}


@pytest.mark.parametrize("code", LIGHT.values(), ids=LIGHT)
def test_the_front_end_loads_nothing_heavy(code):
    heavy = {"numba", "llvmlite", "cupy", "matplotlib", "jinja2", "tokenizers", "safetensors", "rich", "pyarrow"}
    loaded, chosen = loaded_by(code)
    assert not loaded & heavy
    assert chosen == "None"


EVERYTHING = """
import importlib, pkgutil, rlnumba
for module in pkgutil.walk_packages(rlnumba.__path__, "rlnumba."):
    if module.name not in ("rlnumba.__main__", "rlnumba.runtime.simulator"):
        importlib.import_module(module.name)
"""


def test_no_import_chooses_the_device():
    loaded, chosen = loaded_by(EVERYTHING)
    assert chosen == "None"
    assert "cupy" not in loaded


@pytest.mark.parametrize(
    "environment", [{"NUMBA_ENABLE_CUDASIM": "1"}, {"RLNUMBA_DEVICE": "sim"}], ids=lambda e: [*e][0]
)
@pytest.mark.parametrize("first", ["optim.adamw", "ptx.warp"])
def test_the_environment_enables_the_simulator(first, environment):
    """adamw imports Numba before it imports numba.cuda."""
    code = f"import rlnumba.kernels.{first}; from rlnumba.runtime import device; assert device.name() == 'sim'"
    code += "; import numba.cuda.simulator, numba.cuda as c; assert c.simulator is numba.cuda.simulator"
    assert loaded_by(code, **environment)[1] == "sim"


@functools.cache
def source_of(module):
    """The source file of a module of the package, the tests or the benches, as its dotted name: Path, or None."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


@functools.cache
def names_of(path):
    """The names that a source file defines at its top level, in whatever branch: set of str."""
    found, left = set(), list(tree_of(path).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Name) and node.id == "globals":
            found.add("__getattr__")  # it defines what only its execution shows
        else:
            left += ast.iter_child_nodes(node)
    return found


@functools.cache
def has_name(module, name):
    """Whether a module, as its dotted name, has an attribute of this name."""
    names = names_of(source_of(module))
    return name in names or "__getattr__" in names or source_of(f"{module}.{name}") is not None


def missing_names(path):
    """A line for each name that a file takes from a module, and that the module does not have.

    It imports the name, anywhere, reads module.name, or replaces it by monkeypatch.setattr(module, "name", ...).
    """
    nodes, found, modules_here = [*ast.walk(tree_of(path))], [], {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("rlnumba", "tests", "bench"):
            for alias in node.names:
                if source_of(node.module) is None or not has_name(node.module, alias.name):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}")
                elif source_of(f"{node.module}.{alias.name}"):
                    modules_here[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    other = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    other |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes if modules_here else ():
        module = name = None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module, name = node.value.id, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr" and len(node.args) == 3:
            module, name = getattr(node.args[0], "id", None), getattr(node.args[1], "value", None)
        if name and module in modules_here.keys() - other and not has_name(modules_here[module], name):
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {modules_here[module]}.{name}")
    return found


def test_names_that_are_taken_from_modules_exist():
    """In what only a GPU runs, too."""
    files = [path for folder in ("rlnumba", "tests", "bench", "docs") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 500
    missing = [line for path in files for line in missing_names(path)]
    assert not missing, "\n".join(missing)


def test_names_that_do_not_exist_are_found(tmp_path, monkeypatch):
    (tmp_path / "rlnumba").mkdir()
    (tmp_path / "rlnumba" / "__init__.py").write_text("")
    (tmp_path / "rlnumba" / "one.py").write_text("if a:\n    def f(): x = 1\nelse:\n    f, (g, h) = b\n")
    (tmp_path / "test_one.py").write_text(
        "def test(monkeypatch):\n    from rlnumba import one, two\n    from rlnumba.one import g, x\n"
        "    one.f(one.h, one.y)\n    monkeypatch.setattr(one, 'z', g)\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    for function in (source_of, has_name):
        monkeypatch.setattr(sys.modules[__name__], function.__name__, function.__wrapped__)
    missing = {line.rsplit(" ", 1)[1] for line in missing_names(tmp_path / "test_one.py")}
    assert missing == {"rlnumba.two", "rlnumba.one.x", "rlnumba.one.y", "rlnumba.one.z"}
