"""The kinds of blocks that a decoder layer consists of, a module each; blocks/block.py says what a kind has.

blocks/every.py lists the blocks of each layer. The transformer, weights, shards, adapters, the engine's cache, the plan
and the kernel lists read that list and know no kind.
"""
