"""Callbacks of a training run, with the method names of transformers' TrainerCallback; early stopping, the best model.

    [train]
    callbacks = ["mine.py:Report"]      # or SFTTrainer(..., callbacks=[Report()])

    class Report(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            control.should_training_stop = metrics["eval_reward"] > 0.9

Every method gets (args, state, control) and, by keyword, model; on_log gets logs, on_evaluate metrics.
"""

import difflib
import math
import re
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from rlnumba.errors import UserError
from rlnumba.reporting.stderr import log
from rlnumba.rewards.loading import load_object

_given = ContextVar("callbacks", default=())
# Metrics of evaluations alone (runs/evaluation.py).
PASSING = re.compile(r"(rewards/.+/)?(avg|pass)@\d+")


@dataclass
class TrainerControl:
    """Flags that a callback may set: should_training_stop ends the run after this step, with a checkpoint; should_save
    and should_evaluate do so at this step."""

    should_training_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False


@dataclass
class TrainerState:
    """The state that a callback may read. log_history: the metrics of each step so far, dicts with `step`."""

    max_steps: int
    global_step: int = 0
    epoch: float = 0.0
    log_history: list = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None


class TrainerCallback:
    """A callback that does nothing: subclasses override the methods that they need."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Before the first step."""

    def on_step_end(self, args, state, control, **kwargs):
        """After each optimizer step, before its evaluation."""

    def on_evaluate(self, args, state, control, **kwargs):
        """After an evaluation; metrics: its metrics."""

    def on_log(self, args, state, control, **kwargs):
        """When the metrics of a step are written; logs: these."""

    def on_save(self, args, state, control, **kwargs):
        """When a checkpoint has been copied, and is being written."""

    def on_train_end(self, args, state, control, **kwargs):
        """After the last step."""


EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


@contextmanager
def given(callbacks):
    """Objects that the runs of the block call besides those of train.callbacks."""
    token = _given.set(tuple(callbacks))
    try:
        yield
    finally:
        _given.reset(token)


class Callbacks:
    """The callbacks of one run, and what decides on the best model and on early stopping.

    default_metric: for train.metric_for_best_model None. saved: what state_dict returned in the checkpoint, or None.
    Raises UserError for a class that cannot be found or made.
    """

    def __init__(self, run, path, default_metric, saved=None):
        train = run.train
        self.args, self.path = train, path
        self.callbacks = [_make(spec) for spec in train.callbacks] + list(_given.get())
        self.control, self.state = TrainerControl(), TrainerState(0)
        self.tracks_best = train.load_best_model_at_end or train.early_stopping_patience is not None
        name = train.metric_for_best_model or default_metric
        self.metric = name if name.startswith("eval_") else f"eval_{name}"
        better = train.greater_is_better
        self.greater_is_better = not name.endswith("loss") if better is None else better
        self.not_better, self.epoch_before = 0, 0.0
        if saved:
            self.not_better = saved["not_better"]
            self._note_best(saved["best_metric"], saved["best_global_step"])

    def _note_best(self, value, step):
        """The evaluation of a step is the best; None: there is none yet."""
        state = self.state
        state.best_metric, state.best_global_step = value, step
        if step is not None:
            state.best_model_checkpoint = str(self.path / "checkpoints" / f"step-{step}")

    def state_dict(self):
        """The state for a checkpoint: dict, empty where nothing is tracked."""
        state = self.state
        best = {"best_metric": state.best_metric, "best_global_step": state.best_global_step}
        return best | {"not_better": self.not_better} if self.tracks_best else {}

    def call(self, event, model, **more):
        """Call a method of every callback. Raises UserError naming the one that raised."""
        for callback in self.callbacks:
            method = getattr(callback, event, None)  # as in transformers, a callback need not be a TrainerCallback
            if method is None:
                continue
            try:
                method(self.args, self.state, self.control, model=model, **more)
            except UserError:
                raise
            except Exception as error:  # a user's code may raise anything
                text = " ".join(str(error).split())
                name = type(callback).__name__
                raise UserError(f"callback {name}.{event} raised {type(error).__name__}: {text}") from error

    def begin(self, step, max_steps, epoch, model):
        """Before the first of the steps that are left; `step` are done, and `epoch` epochs."""
        self.state.global_step, self.state.max_steps, self.state.epoch = step, max_steps, epoch
        self.call("on_train_begin", model)

    def step_end(self, step, epoch, model):
        """After optimizer step `step` (1-based)."""
        self.control.should_save = self.control.should_evaluate = False
        self.epoch_before = self.state.epoch
        self.state.global_step, self.state.epoch = step, epoch
        self.call("on_step_end", model)

    def evaluation_due(self, step, last):
        """Whether the model of step `step` is evaluated: bool."""
        train, strategy = self.args, self.args.eval_strategy
        every = train.logging_steps if strategy == "steps" and train.eval_steps is None else train.eval_steps
        return self.control.should_evaluate or self._is_due(strategy, every, step, last)

    def save_due(self, step, last):
        """Whether a checkpoint of step `step` is saved: bool."""
        return self.control.should_save or self._is_due(self.args.save_strategy, self.args.save_steps, step, last)

    def _is_due(self, strategy, every, step, last):
        """Whether step `step` ends what "no", "steps" (every `every` of them, None: only the last) or "epoch" says."""
        if strategy == "epoch":
            # Sums of the same parts may differ in their last bits.
            ends = math.floor(self.state.epoch + 1e-9) > math.floor(self.epoch_before + 1e-9)
        else:
            ends = every is not None and step % every == 0
        return strategy != "no" and (last or ends)

    def evaluated(self, metrics, model):
        """After an evaluation: the best model is saved, and training stops when it has not become better for long."""
        if self.tracks_best:
            self._compare(metrics)
        self.call("on_evaluate", model, metrics=metrics)

    def _compare(self, metrics):
        train, state = self.args, self.state
        if self.metric not in metrics:
            names = ", ".join(sorted(metrics))
            raise UserError(f"train.metric_for_best_model: the evaluation has no {self.metric}; it has {names}")
        value, best = metrics[self.metric], state.best_metric
        sign = 1 if self.greater_is_better else -1
        gain = math.inf if best is None else sign * (value - best)
        # A comparison with NaN is false, so it is never the best.
        if gain > 0 and not math.isnan(value):
            self._note_best(value, state.global_step)
            self.control.should_save = True
        self.not_better = 0 if gain > train.early_stopping_threshold else self.not_better + 1
        if train.early_stopping_patience is not None and self.not_better >= train.early_stopping_patience:
            self.control.should_training_stop = True

    def logged(self, metrics, model, writer):
        """When the metrics of the step have been given to the run's MetricsWriter.

        Callbacks find them written, and what they print comes after the step's line on the console.
        """
        self.state.log_history.append({"step": self.state.global_step, **metrics})
        if self.tracks_best and len(self.state.log_history) == 1:
            self._warn_of_metric(metrics)
        if self.callbacks:
            writer.flush()
        self.call("on_log", model, logs=metrics)

    def _warn_of_metric(self, metrics):
        """Say at the first step if an evaluation, which may be hours away, will hardly have the metric: its metrics are
        those of training, and shares of completions that pass. Rewards may log others."""
        name, known = self.metric.removeprefix("eval_"), {each.removeprefix("eval_") for each in metrics}
        if name not in known and not PASSING.fullmatch(name):
            near = difflib.get_close_matches(name, sorted(known), n=1)
            advice = f" (did you mean {near[0]}?)" if near else ""
            log(
                f"warning: train.metric_for_best_model: step {self.state.global_step} has no {name}{advice}, and the "
                f"first evaluation ends the run if it has no {self.metric} either"
            )


def _make(spec):
    made = load_object(spec, "train.callbacks")
    if not isinstance(made, type):
        return made
    try:
        return made()
    except Exception as error:  # a user's code may raise anything
        raise UserError(f"train.callbacks: {spec} cannot be made: {type(error).__name__}: {error}") from error
