"""Bases in 4 and 8 bits: their weights on the device, and their checkpoints."""
