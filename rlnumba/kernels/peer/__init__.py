"""Kernels over the memory of other GPUs of one host, and the checksum of weights that arrived."""
