"""A run ahead of time: the memory and the kernels of its largest step, and sizes that fit a GPU."""
