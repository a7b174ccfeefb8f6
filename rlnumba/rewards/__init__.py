"""Reward functions: built in, or a user's own, and how they are called."""

from rlnumba.rewards.calling import RewardError, Rewards, TrainingProgress
from rlnumba.rewards.functions import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    gsm8k_reward,
    think_format_reward,
)
from rlnumba.rewards.loading import load_rewards, resolve
