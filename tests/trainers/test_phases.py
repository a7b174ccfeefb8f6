"""The phases of a step add up to the step, for every trainer, and the files of a run are written beside it."""

import json
import sys
import threading

import pytest

from rlnumba.reporting import metrics
from rlnumba.runs import run_folder
from rlnumba.runs.run_folder import RunFolder
from rlnumba.trainers.dpo import run_dpo
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.ppo import run_ppo
from rlnumba.trainers.rloo import run_rloo
from rlnumba.trainers.sft import run_sft
from tests.trainers.runs import grpo_run, metrics_of, ppo_run, preference_run, rloo_run, sft_run

TRAINERS = {
    "sft": (sft_run, run_sft, "train log save"),
    "dpo": (lambda folder, **train: preference_run("dpo", folder, **train), run_dpo, "train log save"),
    "grpo": (grpo_run, run_grpo, "generate reward advantage logprob train log save"),
    "rloo": (rloo_run, run_rloo, "generate reward advantage logprob train log save"),
    "ppo": (ppo_run, run_ppo, "generate reward advantage logprob train log save"),
}


# Functions that may wait: for another thread or process, for a disk.
WAITING = {"acquire", "sleep", "poll", "select", "fsync", "open", "read", "write", "rename", "replace", "waitpid"}
# Calls that one of them counts as.
WAIT = 1000


class Work:
    """A clock that shows the calls of functions in this thread, not seconds, which a busy machine makes longer.

    It takes the place of the module `time` for run_folder.py's Clock, and is a profile function of sys.setprofile.
    """

    def __init__(self):
        self.calls = 0

    def __call__(self, frame, event, function):
        if event == "c_call":
            self.calls += WAIT if function.__name__ in WAITING else 1
        elif event == "call":
            self.calls += 1

    def perf_counter(self):
        return self.calls


@pytest.mark.parametrize("kind", TRAINERS)
def test_phases_add_up_to_the_step(tmp_path, monkeypatch, kind):
    """But for some calls of functions, of which none waits for anything."""
    make, train, phases = TRAINERS[kind]
    run = make(tmp_path / "run", max_steps=4, save_steps=2)
    work, before = Work(), sys.getprofile()
    monkeypatch.setattr(run_folder, "time", work)
    sys.setprofile(work)
    try:
        train(run)
    finally:
        sys.setprofile(before)
    found = dict.fromkeys(phases.split(), 0)
    for row in metrics_of(run):
        own = {name.removeprefix("time/"): value for name, value in row.items() if name.startswith("time/")}
        for name, calls in own.items():
            found[name] += calls
        assert 0 <= row["step_time"] - sum(own.values()) < min(WAIT, 0.01 * row["step_time"])
    assert len(metrics_of(run)) == 4 and all(found.values())


def test_a_slow_disk_costs_the_steps_nothing(tmp_path, monkeypatch):
    """They go on while nothing is written; and a checkpoint waits until the lines of its steps are."""
    append, flush, begin_saving = metrics.append_lines, metrics.MetricsWriter.flush, RunFolder.save
    is_waited_for, flushed, saved = threading.Event(), [], []

    def written():
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def at_last(file, rows):
        assert is_waited_for.wait(120), "a step waits for the disk"
        append(file, rows)

    def flush_at_last(self):
        flushed.append(written())
        is_waited_for.set()
        flush(self)
        is_waited_for.clear()

    def save(self, step, *arguments):
        saved.append((step, written()))
        begin_saving(self, step, *arguments)

    monkeypatch.setattr(metrics, "append_lines", at_last)
    monkeypatch.setattr(metrics.MetricsWriter, "flush", flush_at_last)
    monkeypatch.setattr(RunFolder, "save", save)
    run_grpo(grpo_run(tmp_path / "run", max_steps=6, save_steps=3))
    assert flushed[:2] == [[], [1, 2, 3]]
    assert saved == [(3, [1, 2, 3]), (6, [1, 2, 3, 4, 5, 6])]
