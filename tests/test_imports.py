"""The law of the layers: a module imports from lower layers, or from its own package what stands above it."""

import ast
import pathlib

PACKAGE = pathlib.Path(__file__).parent.parent / "rlnumba"

LAYERS = {
    "errors": 0,
    "config": 0,
    "data": 0,
    "rewards": 0,
    "runtime": 1,
    "reporting": 1,
    "kernels": 2,
    "model": 3,
    "optim": 3,
    "checkpoint": 3,
    "engine": 4,
    "trainers": 5,
    "cli": 6,
    "__main__": 7,
    "__init__": 7,
}
# Within layer 0, what may import what: each only those before it.
ORDER_WITHIN_0 = ["errors", "config", "data", "rewards"]


def imports_of(path):
    """(line, module) of every rlnumba import of a file, including those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "rlnumba":
                    yield node.lineno, alias.name.split(".")[1:]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "rlnumba":
            parts = node.module.split(".")[1:]
            for alias in node.names:
                is_module = (PACKAGE / "/".join([*parts, alias.name])).with_suffix(".py").exists()
                yield node.lineno, [*parts, alias.name] if is_module or not parts else parts


def files():
    return sorted(PACKAGE.rglob("*.py"))


def test_imports_point_down():
    wrong = []
    for path in files():
        relative = path.relative_to(PACKAGE).with_suffix("").parts
        mine = LAYERS[relative[0]]
        for line, target in imports_of(path):
            if not target:
                continue
            name = target[0]
            if name not in LAYERS:
                wrong.append(f"{path.name}:{line}: {name} has no layer")
            elif name == relative[0]:
                continue
            elif LAYERS[name] > mine or (LAYERS[name] == mine == 0 and not _before(name, relative[0])):
                wrong.append(f"{'/'.join(relative)}.py:{line}: imports {'.'.join(target)} of layer {LAYERS[name]}")
    assert not wrong, "\n".join(wrong)


def _before(name, importer):
    return ORDER_WITHIN_0.index(name) < ORDER_WITHIN_0.index(importer)


def test_no_cycles_within_a_package():
    graph = {}
    for path in files():
        relative = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        graph[relative] = {".".join(target) for _, target in imports_of(path)}

    def visit(module, trail):
        assert module not in trail, " -> ".join([*trail, module])
        for target in graph.get(module, ()):
            if target in graph:
                visit(target, [*trail, module])

    for module in graph:
        visit(module, [])


def test_one_door_to_the_device():
    allowed = {"device.py", "simulator.py"}
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "numba" and path.name not in allowed:
                names = {alias.name for alias in node.names}
                assert "cuda" not in names, f"{path.name}:{node.lineno}: take cuda from rlnumba.runtime.device"
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert not any(m.split(".")[0] in ("torch", "transformers", "trl") for m in modules), path.name
