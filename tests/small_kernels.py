"""Lists two small kernels, and one of argument types that it cannot have: for test_ahead_of_time.py."""

F1 = "float32[::1]"


def list_signatures(request, properties):
    """One list of signatures; ValueError for a request that begins with "no"."""
    if str(request).startswith("no"):
        raise ValueError(repr(request))
    reduce, elementwise = "rlnumba.kernels.nn.reduce", "rlnumba.kernels.nn.elementwise"
    return [
        [
            (reduce, "sum_kernel", None, (F1, "int64", F1)),
            (elementwise, "elementwise_kernel", ("fill", 8, 8, False), (F1, F1, "float32", F1)),
            (elementwise, "elementwise_kernel", ("fill", 8, 8, False), ("float32", F1, F1, F1)),
        ]
    ]
