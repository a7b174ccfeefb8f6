"""Weights of 4 and 8 bits: their formats, and the kernels that write and read them."""
