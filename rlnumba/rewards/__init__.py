"""Reward functions: built in, or a user's own, and how they are called."""

from rlnumba.rewards.functions import RewardError, Rewards, load_rewards, resolve

__all__ = ["RewardError", "Rewards", "load_rewards", "resolve"]
