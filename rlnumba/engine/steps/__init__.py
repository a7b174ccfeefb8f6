"""One step of the engine, as runner.py computes it.

arrays.py     the arrays of one step
shapes.py     the shapes of the steps that are CUDA graphs, and padding to them
upload.py     these arrays in one copy to the device
attention.py  attention over the paged KV cache
"""
