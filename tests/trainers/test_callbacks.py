"""Callbacks, early stopping, and the best model instead of the last one."""

import json
import pathlib
import sys

import pytest

from rlnumba import SFTConfig, SFTTrainer, TrainerCallback, checkpoint
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.transformer import load_model
from rlnumba.runs.callbacks import EVENTS, Callbacks, given
from rlnumba.trainers import sft
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.sft import run_sft
from tests.trainers.runs import MODEL, grpo_run, metrics_of, sft_run


class Recorder(TrainerCallback):
    def __init__(self, **sets):
        self.events, self.sets = [], sets  # sets: {(event, step): attribute of control}

    def __getattribute__(self, name):
        if name not in EVENTS:
            return super().__getattribute__(name)

        def method(args, state, control, **kwargs):
            self.events.append((name, state.global_step, sorted(set(kwargs) - {"model"})))
            assert kwargs["model"].config.vocab_size and args.max_steps == state.max_steps == 4
            for key, value in self.sets.items():
                if key == f"{name}_{state.global_step}":
                    setattr(control, value, True)

        return method


def evaluated(tmp_path, **train):
    rows = tmp_path / "eval.jsonl"
    rows.write_text('{"prompt": "what is 1?", "completion": " it is 1", "answer": "1"}\n')
    return {"eval": str(rows)}, {"max_steps": 4, "eval_steps": 2, "save_steps": 3} | train


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_events_of_a_run(tmp_path, kind):
    data, train = evaluated(tmp_path)
    make, train_run = {"sft": (sft_run, run_sft), "grpo": (grpo_run, run_grpo)}[kind]
    run = make(tmp_path / "run", data=data, **train)
    recorder = Recorder()
    with given([recorder]):
        train_run(run)
    logged = [("on_log", step, ["logs"]) for step in range(5)]
    ended = [("on_step_end", step, []) for step in range(5)]
    assert recorder.events == [
        *(("on_train_begin", 0, []), ended[1], logged[1]),
        *(ended[2], ("on_evaluate", 2, ["metrics"]), logged[2]),
        *(ended[3], logged[3], ("on_save", 3, [])),
        *(ended[4], ("on_evaluate", 4, ["metrics"]), logged[4], ("on_save", 4, []), ("on_train_end", 4, [])),
    ]


def test_what_a_callback_sets(tmp_path):
    data, train = evaluated(tmp_path)
    run = sft_run(tmp_path / "run", data, **train)
    sets = {"on_step_end_1": "should_evaluate", "on_log_1": "should_save", "on_step_end_3": "should_training_stop"}
    with given([Recorder(**sets)]):
        run_sft(run)
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert ["eval_loss" in row for row in rows] == [True, True, False]
    assert [path.name for path in checkpoint.existing(run.output_dir)] == ["step-3", "step-1"]
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


FILE = """
class Stops:
    def on_log(self, args, state, control, logs, model, **kwargs):
        control.should_training_stop = state.log_history[-1]["loss"] == logs["loss"]

class Fails:
    def on_step_end(self, args, state, control, **kwargs):
        raise ZeroDivisionError("nothing\\nleft")

class Needs:
    def __init__(self, what):
        pass
"""


def test_classes_of_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)

    def run(*names, **train):
        return sft_run(tmp_path / "run", max_steps=4, callbacks=[f"{file}:{name}" for name in names], **train)

    run_sft(run("Stops"))
    assert [row["step"] for row in metrics_of(run())] == [1]
    with pytest.raises(UserError, match="^callback Fails.on_step_end raised ZeroDivisionError: nothing left$"):
        run_sft(run("Fails"))
    # The step is complete, and saved.
    assert [path.name for path in checkpoint.existing(tmp_path / "run")] == ["step-1"]
    for name, said in (
        ("Stop", "train.callbacks: .*mine.py has no 'Stop'; did you mean Stops"),
        ("Needs", "train.callbacks: .*Needs cannot be made: TypeError"),
    ):
        with pytest.raises(UserError, match=said):
            run_sft(run(name))
    with pytest.raises(ConfigError, match="train.callbacks: 'Stops' must be file.py:name or package.module:name"):
        run_sft(sft_run(tmp_path / "run", callbacks=["Stops"]))


def test_objects_of_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = Recorder()
    rows = [{"prompt": "what is 1?", "completion": " it is 1"}] * 8
    SFTTrainer(str(MODEL), SFTConfig(max_steps=4), rows, callbacks=[recorder]).train()
    assert ("on_train_end", 4, []) in recorder.events


def losses(monkeypatch, values):
    """Let the evaluations of SFT find these losses, one after the other."""
    left = iter(values)
    trainer = sft.TRAINER._replace(evaluate_rows=lambda policy, rows: {"loss": next(left)})
    monkeypatch.setattr(sft, "TRAINER", trainer)


@pytest.mark.parametrize(
    ("values", "settings", "steps", "best"),
    [
        ([3, 2, 2.5, 2.5, 1], {"early_stopping_patience": 2}, 4, 2),
        ([3, 2, 2.5, 1.5, 1], {"early_stopping_patience": 2}, 5, 5),
        ([3, 2.9, 2.85, 1, 1], {"early_stopping_patience": 2, "early_stopping_threshold": 0.5}, 3, 3),
        ([3, 2, 4, 4, 3.5], {"early_stopping_patience": None}, 5, 2),
        ([1, 2, 3, 1, 1], {"early_stopping_patience": 3, "greater_is_better": True}, 5, 3),
        ([3, float("nan"), float("nan"), 1, 1], {"early_stopping_patience": 2}, 3, 1),
    ],
)
def test_early_stopping_and_the_best_model(tmp_path, monkeypatch, values, settings, steps, best):
    losses(monkeypatch, values)
    data, _ = evaluated(tmp_path)
    train = {"max_steps": 5, "eval_steps": 1, "save_total_limit": 1, "load_best_model_at_end": True} | settings
    run = sft_run(tmp_path / "run", data, **train)
    run_sft(run)
    assert [row["step"] for row in metrics_of(run)] == list(range(1, steps + 1))
    names = {path.name for path in checkpoint.existing(run.output_dir)}
    assert names == {f"step-{best}", f"step-{steps}"}
    final = tmp_path / "run" / "final"
    kept = load_model(tmp_path / "run" / "checkpoints" / f"step-{best}")
    assert load_model(final).weights.flat.tobytes() == kept.weights.flat.tobytes()
    assert not list(final.glob("trainer_state*")) and (final / "tokenizer.json").exists()


def test_an_equal_value_is_no_better(tmp_path):
    """The first step with it stays the best, and the patience runs."""
    data, train = evaluated(tmp_path, early_stopping_patience=2)
    callbacks = Callbacks(sft_run(tmp_path / "run", data=data, **train), tmp_path, "eval_loss")
    for step in (1, 2, 3):
        assert not callbacks.control.should_training_stop
        callbacks.step_end(step, 0.0, None)
        callbacks.evaluated({"eval_loss": 2.0}, None)
    assert callbacks.state.best_global_step == 1 and callbacks.control.should_training_stop
    again = Callbacks(sft_run(tmp_path / "run", data=data, **train), tmp_path, "eval_loss", callbacks.state_dict())
    best = [(each.state.best_metric, each.state.best_model_checkpoint) for each in (callbacks, again)]
    assert best == [(2.0, str(tmp_path / "checkpoints" / "step-1"))] * 2


def test_patience_and_the_best_step_outlive_a_resume(tmp_path, monkeypatch):
    data, _ = evaluated(tmp_path)
    train = {"eval_steps": 1, "save_steps": 1, "early_stopping_patience": 3, "load_best_model_at_end": True}
    losses(monkeypatch, [1, 2, 3, 4, 5, 6])
    run_sft(sft_run(tmp_path / "run", data, max_steps=3, **train))
    run_sft(run := sft_run(tmp_path / "run", data, max_steps=6, **train), resume=True)
    assert [row["step"] for row in metrics_of(run)] == [1, 2, 3, 4]
    state = checkpoint.load(tmp_path / "run" / "checkpoints" / "step-4")[1]["callbacks"]
    assert state == {"best_metric": 1, "best_global_step": 1, "not_better": 3}
    config = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert config["model_type"]


def test_wrong_keys(tmp_path, capsys):
    for key, value in (("load_best_model_at_end", True), ("early_stopping_patience", 2)):
        with pytest.raises(ConfigError, match=f"train.{key} needs data.eval: without it nothing is evaluated"):
            sft_run(tmp_path / "run", **{key: value})
    data, train = evaluated(tmp_path, metric_for_best_model="token_accuracy", load_best_model_at_end=True)
    with pytest.raises(UserError, match="metric_for_best_model: the evaluation has no eval_token_accuracy; it has eva"):
        run_sft(sft_run(tmp_path / "run", data, **train))
    # Before the first evaluation, which may be hours away.
    line = "metric_for_best_model: step 1 has no token_accuracy (did you mean mean_token_accuracy?), and the first "
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("name", [None, "eval_reward", "pass@1", "eval_rewards/digits/mean", "rewards/digits/avg@1"])
def test_metrics_that_an_evaluation_has_are_not_warned_of(tmp_path, capsys, name):
    data, train = evaluated(tmp_path, early_stopping_patience=2, metric_for_best_model=name)
    callbacks = Callbacks(grpo_run(tmp_path / "run", data=data, **train), tmp_path, "eval_reward")
    callbacks.step_end(1, 0.0, None)
    callbacks.logged({"loss": 0.0, "reward": 1.0, "rewards/digits/mean": 1.0}, None, None)
    assert capsys.readouterr().err == ""


class Prints(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        lines = (pathlib.Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()
        print(f"callback of step {state.global_step}, {len(lines)} lines", file=sys.stderr)


def test_what_a_callback_prints_comes_after_the_line_of_its_step(tmp_path, capfd):
    args = SFTConfig(output_dir=str(tmp_path), max_steps=3, logging_steps=1)
    SFTTrainer(MODEL, args, [{"prompt": "1", "completion": "2"}] * 8, callbacks=[Prints()]).train()
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith(("step ", "callback "))]
    assert [line.split("  ")[0] for line in lines] == [
        text for step in (1, 2, 3) for text in (f"step {step}/3", f"callback of step {step}, {step} lines")
    ]
