"""Runs that are killed and resumed end with the same weights, bit for bit, and the run's folder says what happened."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from rlnumba import checkpoint
from rlnumba.config import to_toml
from rlnumba.engine.core import Engine
from rlnumba.errors import UserError
from rlnumba.model.transformer import load_model
from rlnumba.optim import Optimizer
from rlnumba.reporting.files import UNFINISHED
from rlnumba.runs.callbacks import TrainerCallback, given
from rlnumba.runs.run_folder import RunFolder
from rlnumba.runtime import device
from rlnumba.serve.watch.run_view import RunView
from rlnumba.trainers import sft
from rlnumba.trainers.dpo import run_dpo
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.kto import run_kto
from rlnumba.trainers.ppo import run_ppo
from rlnumba.trainers.sft import run_sft
from tests import processes
from tests.trainers.runs import MODEL, grpo_run, metrics_of, ppo_run, preference_run, sft_run

# So that most checkpoints lie inside of a generation.
FOUR_STEPS_A_GENERATION = {"steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 1}

PREFERENCE = {"dpo": run_dpo, "kto": run_kto}


def hash_of(run):
    """Of the trained weights: those of the model, or with [lora] of the adapter."""
    name = "model" if run.lora is None else "adapter_model"
    with open(f"{run.output_dir}/final/{name}.safetensors", "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rows_without_times(run):
    timed = ("time/", "perf/", "memory/", "step_time")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in metrics_of(run)]


def elsewhere(run, folder):
    return type(run)(**vars(run) | {"output_dir": str(folder)})


def start(kind, run, *options):
    config = f"{run.output_dir}.toml"
    with open(config, "w") as file:
        file.write(to_toml(run))
    return processes.start([kind, "--config", config, *options])


def lines_written(run):
    try:
        with open(f"{run.output_dir}/metrics.jsonl") as file:
            return sum(1 for _ in file)
    except FileNotFoundError:
        return 0


def kill_after(process, run, steps):
    """SIGKILL at a random moment after `steps` lines of metrics."""
    deadline = time.monotonic() + 120
    while lines_written(run) < steps and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(random.random() * 0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def check_killed_run(kind, train, run, targets):
    """Assert that a run killed after each of `targets` steps, and resumed, ends as one that is not, and return this."""
    whole = elsewhere(run, f"{run.output_dir}-whole")
    train(whole)
    kills = 0
    for target in targets:
        process = start(kind, run, "--resume")
        kill_after(process, run, target)
        kills += process.returncode == -signal.SIGKILL
    assert kills, "the run was over before it could be killed"
    process = start(kind, run, "--resume")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert hash_of(run) == hash_of(whole)
    assert rows_without_times(run) == rows_without_times(whole)
    return whole


@pytest.mark.slow
@pytest.mark.skipif(device.name() != "cpu", reason="times its kills for the cpu device")
@pytest.mark.parametrize("kind", ["sft", "grpo", "dpo", "kto"])
def test_killed_runs_end_with_the_same_weights(tmp_path, kind):
    if kind == "sft":
        run = sft_run(tmp_path / "killed", max_steps=60, save_steps=5, shuffle_dataset=True, packing=True)
    elif kind in PREFERENCE:
        settings = {"max_steps": 30, "save_steps": 4, "shuffle_dataset": True, "gradient_accumulation_steps": 2}
        run = preference_run(kind, tmp_path / "killed", **settings, sync_ref_model=True, ref_model_sync_steps=5)
    else:
        run = grpo_run(
            tmp_path / "killed",
            **FOUR_STEPS_A_GENERATION,
            max_steps=30,
            save_steps=3,
            beta=0.05,
            sync_ref_model=True,
            ref_model_sync_steps=7,
        )
    steps = run.train.max_steps
    train = {"sft": run_sft, "grpo": run_grpo, **PREFERENCE}[kind]
    # Once again for each of the two loops, killed after it was resumed.
    whole = check_killed_run(kind, train, run, (steps // 3,) if kind in PREFERENCE else (steps // 5, steps // 2))
    if kind == "grpo":
        with (
            open(f"{run.output_dir}/completions.jsonl") as killed,
            open(f"{whole.output_dir}/completions.jsonl") as all,
        ):
            assert killed.read() == all.read()


@pytest.mark.parametrize("kind", ["sft", "grpo", "dpo", "kto"])
def test_every_checkpoint_leads_to_the_same_end(tmp_path, kind):
    if kind == "sft":
        run = sft_run(tmp_path / "run", max_steps=6, save_steps=1)
    elif kind in PREFERENCE:
        run = preference_run(kind, tmp_path / "run", max_steps=6, save_steps=1, precompute_ref_log_probs=True)
    else:
        run = grpo_run(
            tmp_path / "run",
            **FOUR_STEPS_A_GENERATION,
            max_steps=6,
            save_steps=1,
            dynamic_sampling=True,
        )
    train = {"sft": run_sft, "grpo": run_grpo, **PREFERENCE}[kind]
    train(run)
    expected, rows = hash_of(run), rows_without_times(run)
    if kind == "grpo":
        # Completions are kept where the next step goes on with them: all but every fourth step.
        states = {step: checkpoint.load(tmp_path / "run" / "checkpoints" / f"step-{step}") for step in range(1, 7)}
        kept = [step for step, (_, state) in states.items() if state["data"]["rollouts"] is not None]
        assert kept == [1, 2, 3, 5, 6] and [step for step, _ in states.values()] == [1, 2, 3, 4, 5, 6]
    for step in range(5, 0, -2):
        folder = tmp_path / "run" / "checkpoints"
        for later in range(step + 1, 7):
            for path in sorted((folder / f"step-{later}").glob("*")):
                path.unlink()
            (folder / f"step-{later}").rmdir()
        (tmp_path / "run" / "final" / "model.safetensors").unlink()
        train(run, resume=True)
        assert hash_of(run) == expected, step
        assert rows_without_times(run) == rows, step


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_run_goes_on_from_a_chosen_step(tmp_path, capsys, kind):
    """To the same end; what came after that step is set aside, whole, also where it is chosen again."""
    make, train = {"sft": (sft_run, run_sft), "grpo": (grpo_run, run_grpo)}[kind]
    run, path = make(tmp_path / "run", max_steps=4, save_steps=1), tmp_path / "run"
    train(run)
    expected, rows = hash_of(run), rows_without_times(run)
    # As --train.log_completions leaves them; a run that goes on removes those of the steps that it does again.
    (path / "completions").mkdir()
    (path / "completions" / "completions_00004.parquet").write_bytes(b"of the fourth step")
    for number, step in ((1, 2), (2, 3)):
        train(run, resume=step)
        assert hash_of(run) == expected and rows_without_times(run) == rows
        aside = path / f"earlier-{number}"
        assert f"what came after step {step} is now in {aside}" in capsys.readouterr().err
        moved = {folder.name for folder in (aside / "checkpoints").iterdir()}
        assert moved == {f"step-{later}" for later in range(step + 1, 5)}
        assert (aside / "final" / "model.safetensors").exists()
        assert len((aside / "metrics.jsonl").read_text().splitlines()) == 4
    kept = path / "earlier-1" / "completions" / "completions_00004.parquet"
    assert kept.read_bytes() == b"of the fourth step"
    train(run, resume=4)
    assert hash_of(run) == expected and not (path / "earlier-3").exists()
    with pytest.raises(UserError, match="step-7: no such checkpoint; .*checkpoints has step-1, step-2, step-3, step-4"):
        train(run, resume=7)
    (path / "checkpoints" / "step-1" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="step-1/model.safetensors: its content is not what was saved"):
        train(run, resume=1)
    with pytest.raises(UserError, match="checkpoints has no checkpoint"):
        train(make(tmp_path / "other", max_steps=4), resume=1)
    for step, code, said in (("3", 0, "what came after step 3 is now in"), ("9", 1, "step-9: no such checkpoint")):
        process = start(kind, run, "--resume.step", step)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == code and said in errors
    assert hash_of(run) == expected


def test_policy_versions_continue_after_a_resume(tmp_path, monkeypatch):
    """A completion's policy version is the number of optimizer steps before it, also in a resumed run."""
    versions, step = {}, Engine.step

    def recording(engine):
        output = step(engine)
        versions.update({v: None for _, _, c in output.finished for v in c.policy_versions})
        return output

    monkeypatch.setattr(Engine, "step", recording)
    found = []
    for steps, resume in ((2, False), (4, True)):
        run_grpo(grpo_run(tmp_path / "run", max_steps=steps), resume)
        found.append(list(versions))
        versions.clear()
    # The last one of each run is the report on samples.
    assert found == [[0, 1, 2], [2, 3, 4]]


def test_a_damaged_checkpoint_is_passed_over(tmp_path, capsys):
    run = sft_run(tmp_path / "run", max_steps=4, save_steps=2)
    run_sft(run)
    expected = hash_of(run)
    weights = tmp_path / "run" / "checkpoints" / "step-4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    run_sft(run, resume=True)
    assert hash_of(run) == expected
    assert "step-4 is damaged and passed over" in capsys.readouterr().err
    assert len(metrics_of(run)) == 4
    for path in (tmp_path / "run" / "checkpoints").glob("step-*/model.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="none of the 2 checkpoints is readable"):
        run_sft(run, resume=True)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"steps_per_generation": 4}, True),
        ({"per_device_train_batch_size": 16}, True),
        ({"beta": 0.1}, True),
        ({"num_iterations": 3}, False),
        ({"gradient_accumulation_steps": 2}, False),
    ],
    ids=str,
)
def test_resume_with_a_changed_configuration(tmp_path, capsys, changed, said):
    settings = FOUR_STEPS_A_GENERATION | {"save_steps": 1}
    run_grpo(grpo_run(tmp_path / "run", **settings, max_steps=3))
    run = grpo_run(tmp_path / "run", **settings | changed, max_steps=6)
    run_grpo(run, resume=True)
    assert [row["step"] for row in metrics_of(run)] == [1, 2, 3, 4, 5, 6]
    assert ("do not fit the changed configuration" in capsys.readouterr().err) == said


def test_resume_without_checkpoints_starts_afresh_and_says_so(tmp_path, capsys):
    run = sft_run(tmp_path / "run", max_steps=2)
    run_sft(run, resume=True)
    assert f"{tmp_path / 'run'} holds no checkpoint: starting afresh" in capsys.readouterr().err
    assert len(metrics_of(run)) == 2


def test_an_earlier_run_is_set_aside(tmp_path, capsys):
    run = sft_run(tmp_path / "run", max_steps=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    run_sft(run)
    rows = metrics_of(run)
    assert "held an earlier run" not in capsys.readouterr().err
    run_sft(elsewhere(run, tmp_path / "run"))
    assert f"{tmp_path / 'run'} held an earlier run, which is now in {tmp_path / 'run' / 'earlier-1'}" in (
        capsys.readouterr().err
    )
    kept = (tmp_path / "run" / "earlier-1" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == rows
    assert (tmp_path / "run" / "earlier-1" / "checkpoints" / "step-2").is_dir()
    assert (tmp_path / "run" / "notes.txt").is_file()
    run_sft(run)
    assert (tmp_path / "run" / "earlier-2" / "final").is_dir()


def test_bad_input_leaves_an_earlier_run_where_it_is(tmp_path):
    run = sft_run(tmp_path / "run", max_steps=2)
    run_sft(run)
    bad = sft_run(tmp_path / "run", {"train": str(tmp_path / "missing.jsonl")})
    with pytest.raises(UserError, match="missing.jsonl: no such file"):
        run_sft(bad)
    assert len(metrics_of(run)) == 2 and (tmp_path / "run" / "final").is_dir()


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    run_sft(sft_run(tmp_path / "run", max_steps=6, save_steps=2, save_total_limit=2))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-4", "step-6"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/run: cannot be written to"):
        RunFolder(sft_run(tmp_path / "file" / "run"), False)


def saved_of(path):
    """The trainer's state in a checkpoint, without what it says of its run."""
    return {name: value for name, value in checkpoint.load(path)[1].items() if name != "run"}


def test_a_step_is_saved_once(tmp_path):
    """Its state is always the same, so that a run that ends where it went on keeps the checkpoint that is there."""
    run, policy = sft_run(tmp_path / "run", max_steps=2), SimpleNamespace(model=load_model(MODEL), state_dict=lambda: 5)
    folder = RunFolder(run, False)
    folder.save(0, policy, None, {"a": 1})
    folder.save(0, policy, None, {"a": 2})
    folder.saver.wait()
    path = tmp_path / "run" / "checkpoints" / "step-0"
    assert folder.model_folder == path and saved_of(path) == {"trainer": "sft", "policy": 5, "a": 1}
    folder.save(1, policy, None, {"a": 3})
    assert (folder.step, folder.model_folder.name) == (1, "step-1")
    folder.saver.wait()
    again = RunFolder(run, True)
    assert (again.step, again.step_chosen, saved_of(again.model_folder)) == (
        1,
        False,
        {"trainer": "sft", "policy": 5, "a": 3},
    )
    again.save(1, policy, None, {"a": 4})
    assert checkpoint.load(again.model_folder)[1]["a"] == 3
    chosen = RunFolder(run, 1)
    assert chosen.step_chosen and chosen.model_folder == again.model_folder


def test_a_final_model_that_cannot_be_written_is_named(tmp_path):
    folder = RunFolder(sft_run(tmp_path / "run"), False)
    (tmp_path / "run" / "final").write_text("")
    with pytest.raises(UserError) as caught:
        folder.finish(load_model(MODEL), None)
    assert str(caught.value) == f"{tmp_path / 'run' / 'final'}: cannot be written: File exists"


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path):
    run_sft(sft_run(tmp_path / "run", max_steps=1))
    with pytest.raises(UserError, match="step-1: a checkpoint of sft, not of grpo"):
        run_grpo(grpo_run(tmp_path / "run"), resume=True)


def test_a_disk_that_becomes_full_ends_the_run_in_one_line(tmp_path):
    """The kernel's limit on the size of a file stands for the disk: weights fit, the optimizer's state does not."""
    run = sft_run(tmp_path / "run", max_steps=3, save_steps=1, save_only_model=True)
    run_sft(run)
    weights = (tmp_path / "run" / "checkpoints" / "step-3" / "model.safetensors").stat().st_size
    whole = sft_run(tmp_path / "run", max_steps=6, save_steps=1)
    config = tmp_path / "run.toml"
    config.write_text(to_toml(whole))
    limit = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({weights + 1000}, {weights + 1000}));"
        "from rlnumba.cli import main; main()"
    )
    command = [sys.executable, "-c", limit, "sft", "--config", str(config)]
    # Compiled code, which may be larger, is in the cache.
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"RLNUMBA_DEVICE": device.name()})
    assert ended.returncode == 1
    message = f"rlnumba: {tmp_path / 'run' / 'checkpoints' / 'step-1'}: the checkpoint cannot be written: "
    assert ended.stderr.splitlines()[-1].startswith(message) and "large" in ended.stderr.splitlines()[-1]
    assert not (tmp_path / "run" / "final").exists() and not list((tmp_path / "run" / "checkpoints").iterdir())
    # The run before was set aside, whole.
    assert len(checkpoint.existing(tmp_path / "run" / "earlier-1")) == 3


def test_checkpoints_of_the_model_alone_cannot_be_resumed(tmp_path, monkeypatch):
    """Nor is the state that they lack copied."""
    monkeypatch.setattr(Optimizer, "state_dict", None)
    run = sft_run(tmp_path / "run", max_steps=2, save_steps=1, save_only_model=True)
    run_sft(run)
    folder = tmp_path / "run" / "checkpoints" / "step-2"
    assert load_model(folder).weights.flat.tobytes() == load_model(tmp_path / "run" / "final").weights.flat.tobytes()
    with pytest.raises(UserError, match="step-2: holds the model alone"):
        run_sft(run, resume=True)


@pytest.mark.parametrize("kind", ["sft", "ppo"])
def test_a_resumed_run_is_finished_once_it_has_ended_again(tmp_path, kind):
    make, train = {"sft": (sft_run, run_sft), "ppo": (ppo_run, run_ppo)}[kind]
    path = tmp_path / "run"
    unfinished, final = path / UNFINISHED, path / "final"
    train(make(path, max_steps=1))
    assert final.is_dir() and not unfinished.exists() and RunView(path).state() == "finished"
    states = []

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            states.append((state.global_step, final.is_dir(), unfinished.exists()))
            raise KeyboardInterrupt

    with given([Stops()]), pytest.raises(KeyboardInterrupt):
        train(make(path, max_steps=3), resume=True)
    assert states == [(2, True, True)] and RunView(path).state() == "stopped"
    train(make(path, max_steps=3), resume=True)
    assert not unfinished.exists() and RunView(path).state() == "finished"


def test_files_that_a_killed_process_was_replacing_go(tmp_path):
    run = sft_run(tmp_path / "run", max_steps=1)
    run_sft(run)
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    for name in (".metrics.jsonl.x2l_9a", ".config.toml.abcdefgh", ".curves.png.partial", ".notes.txt"):
        (tmp_path / "run" / name).write_text("killed")
    run_sft(run, resume=True)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".notes.txt", *before]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("optim", ["adamw_bf16", "adamw_8bit"])
def test_small_optimizer_states_resume_exactly(tmp_path, optim, offload):
    run = sft_run(tmp_path / "run", max_steps=4, save_steps=2, optim=optim, offload_optimizer=offload)
    run_sft(run)
    expected, rows = hash_of(run), rows_without_times(run)
    run_sft(run, resume=2)
    assert hash_of(run) == expected
    assert rows_without_times(run) == rows
    other = sft_run(tmp_path / "run", max_steps=6, save_steps=2)
    with pytest.raises(UserError, match=f"saved with train.optim = '{optim}', and this run has 'adamw_torch'"):
        run_sft(other, resume=True)


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError("bug"), MemoryError("an operator's own arrays"), OSError("lost"), UserError("a callback's")],
)
def test_any_error_keeps_the_last_complete_step(tmp_path, monkeypatch, capsys, error):
    """And the run goes on from there to the same end."""
    run = sft_run(tmp_path / "run", max_steps=4)
    run_sft(elsewhere(run, tmp_path / "whole"))
    train_step, calls = sft.train_step, []

    def fails_in_the_third(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise error
        return train_step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(sft, "TRAINER", sft.TRAINER._replace(train_step=fails_in_the_third))
        with pytest.raises(type(error), match=str(error)):
            run_sft(run)
    assert f"step 2 is in {tmp_path / 'run' / 'checkpoints' / 'step-2'}; --resume goes on" in capsys.readouterr().err
    run_sft(run, resume=True)
    assert hash_of(run) == hash_of(elsewhere(run, tmp_path / "whole"))


def test_an_error_between_two_steps_keeps_none(tmp_path, monkeypatch):
    """The weights may then be those of neither. The one before is on the disk, however long that takes."""
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *arguments: (time.sleep(1), save(*arguments)))
    run, step = sft_run(tmp_path / "run", max_steps=4, save_steps=1), Optimizer.step

    def fails_in_the_third(optimizer, learning_rate):
        norm = step(optimizer, learning_rate)
        if optimizer.steps == 3:
            raise MemoryError
        return norm

    monkeypatch.setattr(Optimizer, "step", fails_in_the_third)
    with pytest.raises(MemoryError):
        run_sft(run)
    assert [path.name for path in checkpoint.existing(tmp_path / "run")] == ["step-2", "step-1"]


def test_an_error_of_saving_does_not_hide_the_one_before(tmp_path, monkeypatch, capsys):
    def fails(*arguments):
        raise ZeroDivisionError("bug")

    def cannot_be_saved(*arguments):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(sft, "TRAINER", sft.TRAINER._replace(train_step=fails))
    monkeypatch.setattr(RunFolder, "save", cannot_be_saved)
    with pytest.raises(ZeroDivisionError):
        run_sft(sft_run(tmp_path / "run"))
    assert "step 0 is not saved after this error: the device is lost" in capsys.readouterr().err
