"""Machine code of kernels: compiled, kept on disk, and made ahead of the first launch by other processes."""
