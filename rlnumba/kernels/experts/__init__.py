"""Mixtures of experts: which experts a token has, its rows among theirs, and their weighted sum."""
