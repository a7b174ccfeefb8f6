"""Kernels as their source files have them."""

import ast


def kernels_of(path):
    """The syntax trees of the functions of a source file that @cuda.jit makes kernels of, also inside of factories."""
    for node in ast.walk(ast.parse(path.read_text())):
        for decorator in getattr(node, "decorator_list", ()):
            options = decorator.keywords if isinstance(decorator, ast.Call) else []
            what = decorator.func if isinstance(decorator, ast.Call) else decorator
            if ast.unparse(what) == "cuda.jit" and "device" not in [option.arg for option in options]:
                yield node
