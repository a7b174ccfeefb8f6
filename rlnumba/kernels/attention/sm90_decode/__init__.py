"""Decode attention on sm_90, split over the keys: kernel.py says who does what."""
