"""The blocks of the cache, and who has them.

- block_manager.py: blocks of keys and values, references to them, and prefixes that are found by hash
- row_blocks.py: the blocks of the running sequences' rows: found, allocated, reserved, registered, retained
- cache_size.py: how many blocks the cache has
- prefix_groups.py: running sequences whose first blocks are the same, which attention reads once
- window_blocks.py: places of blocks in the cache of layers with a sliding window
- routed_experts.py: the experts that computed each token of a block
- state_pages.py: states of linear attention, and the sequences that resume at them
"""
