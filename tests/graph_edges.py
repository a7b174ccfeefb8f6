"""Reads the edges of a captured CUDA graph: which kernel follows which, and whether by PDL."""

from typing import NamedTuple


class Edge(NamedTuple):
    """source, target: kernel names as the driver has them, None for other nodes; is_programmatic: a PDL edge."""

    source: str | None
    target: str | None
    is_programmatic: bool


def edges_of(graph):
    """The edges of a cupy.cuda.Graph that was captured from a stream."""
    from cuda.bindings import driver

    def call(function, *arguments):
        error, *results = function(*arguments)
        assert error == driver.CUresult.CUDA_SUCCESS, (function.__name__, error)
        return results

    def kernel_name(node):
        (kind,) = call(driver.cuGraphNodeGetType, node)
        if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            return None
        (parameters,) = call(driver.cuGraphKernelNodeGetParams, node)
        (name,) = call(driver.cuFuncGetName, parameters.func)
        return name.decode()

    handle = driver.CUgraph(graph.graph)
    *_, count = call(driver.cuGraphGetEdges, handle)
    sources, targets, data, _ = call(driver.cuGraphGetEdges, handle, count)
    programmatic = int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
    return [
        Edge(kernel_name(source), kernel_name(target), edge.type == programmatic)
        for source, target, edge in zip(sources, targets, data, strict=True)
    ]
