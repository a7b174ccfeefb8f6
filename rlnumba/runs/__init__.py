"""Parts that trainers share: loops over rows and prompts, the policy, the run's folder and schedule."""
