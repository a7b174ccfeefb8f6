"""The optimizer's kernels: AdamW with float32 and 8-bit moments, and stochastic rounding."""
