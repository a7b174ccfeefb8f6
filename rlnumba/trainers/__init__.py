"""The trainers: each module shows its own loop whole; `rollout` and `common` hold what they share."""
