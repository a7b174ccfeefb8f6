"""Gated delta rule: linear attention whose state is corrected by each key (Yang et al. 2024, Gated Delta Networks)."""
