"""Sections of runs on prompts beside [train]: tools and environments, asynchronous generation, teachers."""
