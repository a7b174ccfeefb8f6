"""The trainers: each shows its own loop whole; `core`, `rollout` and `run_folder` are what they share."""
