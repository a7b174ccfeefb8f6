"""Operators of the cpu device, compiled by Numba: the implementation beside each operator's kernels."""
