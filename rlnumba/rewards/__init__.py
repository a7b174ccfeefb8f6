"""Reward functions: built in, or a user's own, and how they are called."""

from rlnumba.rewards.calling import RewardError, Rewards, TrainerState
from rlnumba.rewards.loading import load_rewards, resolve
