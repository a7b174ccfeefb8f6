"""A decode step of linear attention: kernel.py is the operator, products.py a warp's part of it."""
