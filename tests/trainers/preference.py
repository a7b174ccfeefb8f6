"""Comparison of a run with the golden curves of TRL's DPOTrainer and KTOTrainer."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.trainers.runs import GOLDEN, MODEL, golden, metrics_of

CASES = golden("preference_curves.json")["cases"]
# Means over tokens, and KTO's over the rows of a side: TRL averages those of its micro-batches, which is another number
# where there are several.
OF_TOKENS = ("entropy", "mean_token_accuracy", "logits/")
OF_SIDES = ("rewards/", "logps/")


def cases_of(kind):
    return [name for name, case in CASES.items() if case["kind"] == kind]


def check_curve(run, name):
    """All 50 steps' metrics of a run, and its final weights where the golden files have them."""
    case, rows = CASES[name], metrics_of(run)
    assert [row["step"] for row in rows] == list(range(1, 51))
    several = case["options"]["gradient_accumulation_steps"] > 1
    for metric, values in case["curve"].items():
        if several and metric.startswith(OF_TOKENS + (OF_SIDES if case["kind"] == "kto" else ())):
            continue
        # A loss that is nearly 0 has no relative precision, nor have means of log-probs that cancel.
        limits = {"rel": 1e-4, "abs": 1e-7 if metric in ("loss", "grad_norm") else 1e-5}
        for row, value in zip(rows, values, strict=True):
            if value is None:
                assert metric not in row, (row["step"], metric)
            else:
                assert row[metric] == pytest.approx(value, **limits), (row["step"], metric)
    updates = np.load(GOLDEN / "preference_updates.npz")
    expected = {key.partition(":")[2]: updates[key] for key in updates.files if key.startswith(f"{name}:")}
    if expected:
        before, after = (load_file(path / "model.safetensors") for path in (MODEL, Path(run.output_dir, "final")))
        errors = sizes = 0.0
        for tensor, update in expected.items():
            if tensor in after:
                update = update.astype(np.float64)
                errors += float(((after[tensor].astype(np.float64) - before[tensor] - update) ** 2).sum())
                sizes += float((update**2).sum())
        assert sizes > 0 and np.sqrt(errors / sizes) < 2e-3
