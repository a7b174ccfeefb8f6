"""Engines that are not this process's own: those of other ranks, and inference processes, local or on Ray."""
