"""SIGTERM and Ctrl-C, sent to real processes at chosen moments, leave a checkpoint that leads to the same end."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from rlnumba import checkpoint
from rlnumba.config import to_toml
from rlnumba.runtime import device, signals
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.sft import run_sft
from tests import processes
from tests.trainers.runs import MODEL, grpo_run, metrics_of, sft_run
from tests.trainers.test_resume import elsewhere, hash_of, rows_without_times

# Seconds that a process may take on a machine that is busy; less than the slow disk below.
PATIENCE_S = 300
# The command line, which also says on stderr when a phase of a step begins.
ANNOUNCING = """
import sys
from contextlib import contextmanager
from rlnumba.runs import run_folder
phase = run_folder.Clock.phase

@contextmanager
def announced(self, name):
    print(f"phase {name}", file=sys.stderr, flush=True)
    with phase(self, name):
        yield

run_folder.Clock.phase = announced
"""
# The command line, which sends itself a signal {delay} s after a phase has begun for the {times}th time: another
# process may see that too late, on a machine that is busy.
SIGNALLING = """
import os, threading
from contextlib import contextmanager
from rlnumba.runs import run_folder
phase = run_folder.Clock.phase
begun, timers = [], []

@contextmanager
def signalled(self, name):
    begun.append(name)
    # On a machine that is busy a thread may be late: the next phase waits for the signal.
    for timer in timers:
        timer.join()
    with phase(self, name):
        if name == {name!r} and begun.count(name) == {times}:
            timers.append(threading.Timer({delay}, os.kill, (os.getpid(), {number})))
            timers[-1].start()
        yield

run_folder.Clock.phase = signalled
"""
# A disk on which a checkpoint takes ten minutes, which are said on stderr to have begun.
SLOW_DISK = """
import sys, time
from rlnumba import checkpoint
write = checkpoint._write

def slowly(*arguments):
    write(*arguments)
    print("a slow disk", file=sys.stderr, flush=True)
    time.sleep(600)

checkpoint._write = slowly
"""


def start(kind, run, *options, code=ANNOUNCING, **environment):
    config = pathlib.Path(f"{run.output_dir}.toml")
    config.write_text(to_toml(run))
    return processes.start([kind, "--config", config, *options], code, **environment)


def wait_for(process, line, times=1):
    for _ in range(times):
        while (read := process.stderr.readline().strip()) != line:
            assert read or process.poll() is None, "the process has ended"


def make(kind, folder, **settings):
    """A run that evaluates and whose steps 1 to 3 of 4 begin within a generation."""
    rows = folder.parent / "eval.jsonl"
    folder.parent.mkdir(parents=True, exist_ok=True)
    settings = {"max_steps": 8, "save_steps": 100, "eval_steps": 3} | settings
    if kind == "sft":
        rows.write_text(json.dumps({"prompt": "what is 1?", "completion": "it is 1"}) + "\n")
        return sft_run(folder, {"eval": str(rows)}, **settings)
    rows.write_text(json.dumps({"prompt": "what is 1?", "answer": "1"}) + "\n")
    generation = {"steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 1}
    return grpo_run(folder, data={"eval": str(rows)}, beta=0.05, **generation | settings)


@pytest.fixture(scope="module", params=["sft", "grpo"])
def whole(request, tmp_path_factory):
    """(kind, a run that was not disturbed)."""
    run = make(request.param, tmp_path_factory.mktemp(request.param) / "whole")
    {"sft": run_sft, "grpo": run_grpo}[request.param](run)
    return request.param, run


# (phase, how often it has begun, optimizer steps that are then complete, delay in seconds)
MOMENTS = {
    "sft": [("train", 1, 0, 0), ("train", 4, 3, 0.002), ("eval", 1, 3, 0), ("train", 7, 6, 0.01)],
    "grpo": [("generate", 1, 0, 0), ("train", 3, 2, 0), ("generate", 2, 4, 0.005), ("eval", 1, 3, 0)],
}


@pytest.mark.parametrize("moment", range(4))
def test_a_signal_leaves_a_checkpoint_of_the_last_complete_step(whole, tmp_path, moment):
    kind, undisturbed = whole
    run = elsewhere(undisturbed, tmp_path / "stopped")
    phase, times, complete, delay = MOMENTS[kind][moment]
    number, code, message = [(signal.SIGTERM, 143, "ended by SIGTERM"), (signal.SIGINT, 130, "interrupted")][moment % 2]
    process = start(kind, run, code=SIGNALLING.format(name=phase, times=times, delay=delay, number=int(number)))
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, errors
    (folder,) = checkpoint.existing(run.output_dir)
    step, _ = checkpoint.load(folder)
    assert errors.splitlines()[-2:] == [
        f"rlnumba: step {step} is in {folder}; --resume goes on from there "
        "(in Python train(resume_from_checkpoint=True))",
        f"rlnumba: {message}",
    ]
    # A signal while weights are written takes effect when the step is complete; on a slow machine it may come late.
    assert step in (complete, complete + 1)
    lines = metrics_of(run) if step else []
    assert [row["step"] for row in lines] == list(range(1, step + 1))
    checkpoint.verify(folder)
    resumed = start(kind, run, "--resume", code="")
    _, errors = resumed.communicate(timeout=PATIENCE_S)
    assert resumed.returncode == 0, errors
    assert hash_of(run) == hash_of(undisturbed)
    found, expected = rows_without_times(run), rows_without_times(undisturbed)
    if phase == "eval" and not any(name.startswith("eval_") for name in found[2]):
        # An evaluation that is interrupted has no metrics.
        expected[2] = {name: value for name, value in expected[2].items() if not name.startswith("eval_")}
    assert found == expected


def test_a_signal_in_the_compiler(whole, tmp_path, tmp_path_factory):
    """Which calls Python and loses what is raised there: with an empty cache, in the first second of work."""
    kind, undisturbed = whole
    run = elsewhere(undisturbed, tmp_path / "stopped")
    process = start(kind, run, NUMBA_CACHE_DIR=str(tmp_path_factory.mktemp("cache")))
    wait_for(process, "phase generate" if kind == "grpo" else "phase train")
    time.sleep(0.7)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143, errors
    # step-0, or on a fast machine that of a later step.
    assert len(checkpoint.existing(run.output_dir)) == 1, errors
    resumed = start(kind, run, "--resume", code="")
    _, errors = resumed.communicate(timeout=PATIENCE_S)
    assert resumed.returncode == 0 and hash_of(run) == hash_of(undisturbed), errors


def test_a_second_signal_ends_at_once(tmp_path):
    """Also while a checkpoint is written, of which nothing but a hidden folder remains; earlier ones stay."""
    run = make("sft", tmp_path / "run", max_steps=1000)
    before = start("sft", run)
    wait_for(before, "phase train", 3)
    before.send_signal(signal.SIGTERM)
    before.communicate(timeout=PATIENCE_S)
    (folder,) = checkpoint.existing(run.output_dir)
    process = start("sft", run, "--resume", code=SLOW_DISK + ANNOUNCING)
    wait_for(process, "phase train", 3)
    process.send_signal(signal.SIGTERM)
    # The first signal has been handled by then.
    wait_for(process, "a slow disk")
    # For so long a second one counts as the same.
    time.sleep(2 * signals.REPEAT_S)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert checkpoint.existing(run.output_dir) == [folder] and checkpoint.latest_readable(run.output_dir) == folder
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob(".*")]


def test_a_signal_before_the_first_step_leaves_no_checkpoint(tmp_path):
    run = make("sft", tmp_path / "run")
    process = start("sft", run)
    assert process.stderr.readline().startswith("device ")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143 and errors.splitlines()[-1] == "rlnumba: ended by SIGTERM"
    assert not (tmp_path / "run" / "final").exists()


FROM_PYTHON = f"""
import json, signal
from rlnumba import SFTConfig, SFTTrainer
rows = [{{"prompt": "what is 1?", "completion": "it is 1"}}] * 8
SFTTrainer({str(MODEL)!r}, SFTConfig(output_dir="run", max_steps=10000, logging_steps=1), rows).train()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_training_from_python(tmp_path, number):
    """Python's own handlers are replaced while a trainer runs: a checkpoint, and then the signal's usual effect."""
    process = subprocess.Popen(
        [sys.executable, "-c", ANNOUNCING + FROM_PYTHON],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"RLNUMBA_DEVICE": device.name()},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_for(process, "phase train", 3)
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -number, errors
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    (folder,) = checkpoint.existing(tmp_path / "run")
    checkpoint.verify(folder)
