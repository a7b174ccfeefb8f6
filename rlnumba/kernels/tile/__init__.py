"""Parts that several tensor-core kernels share: rings of stages, layouts of shared memory, tensor maps."""
