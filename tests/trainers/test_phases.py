"""The phases of a step add up to the step, for every trainer, and the files of a run are written beside it."""

import json
import statistics
import time

import pytest

from rlnumba.reporting import metrics
from rlnumba.trainers.dpo import run_dpo
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.ppo import run_ppo
from rlnumba.trainers.rloo import run_rloo
from rlnumba.trainers.run_folder import RunFolder
from rlnumba.trainers.sft import run_sft
from tests.trainers.runs import grpo_run, metrics_of, ppo_run, preference_run, rloo_run, sft_run

TRAINERS = {
    "sft": (sft_run, run_sft, "train log save"),
    "dpo": (lambda folder, **train: preference_run("dpo", folder, **train), run_dpo, "train log save"),
    "grpo": (grpo_run, run_grpo, "generate reward advantage logprob train log save"),
    "rloo": (rloo_run, run_rloo, "generate reward advantage logprob train log save"),
    "ppo": (ppo_run, run_ppo, "generate reward advantage logprob train log save"),
}


@pytest.mark.parametrize("kind", TRAINERS)
def test_phases_add_up_to_the_step(tmp_path, kind):
    make, train, phases = TRAINERS[kind]
    run = make(tmp_path / "run", max_steps=24, save_steps=8)
    train(run)
    steps, found = 0.0, dict.fromkeys(phases.split(), 0.0)
    for row in metrics_of(run):
        own = {name.removeprefix("time/"): value for name, value in row.items() if name.startswith("time/")}
        steps += row["step_time"]
        for name, seconds in own.items():
            found[name] += seconds
        assert sum(own.values()) <= row["step_time"] * (1 + 1e-9)
    assert len(metrics_of(run)) == 24 and all(found.values())
    assert sum(found.values()) == pytest.approx(steps, rel=0.02)


def test_a_slow_disk_costs_the_steps_nothing(tmp_path, monkeypatch):
    """And a checkpoint waits until the lines of its steps are written."""
    append, begin_saving, saved = metrics.append_lines, RunFolder.save, []

    def slowly(file, rows):
        time.sleep(0.3)
        append(file, rows)

    def save(self, step, *arguments):
        path = tmp_path / "run" / "metrics.jsonl"
        saved.append((step, [json.loads(line)["step"] for line in path.read_text().splitlines()]))
        begin_saving(self, step, *arguments)

    monkeypatch.setattr(metrics, "append_lines", slowly)
    monkeypatch.setattr(RunFolder, "save", save)
    run = grpo_run(tmp_path / "run", max_steps=6, save_steps=3)
    run_grpo(run)
    assert saved == [(3, [1, 2, 3]), (6, [1, 2, 3, 4, 5, 6])]
    # 0.6 s a step: a line of metrics, and the completions. A step that waits for one of them takes 0.3 s.
    assert statistics.median(row["time/log"] for row in metrics_of(run)) < 0.25
    assert metrics_of(run)[3]["time/save"] > 0.1
