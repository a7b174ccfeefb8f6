"""The loop of the trainers whose data is a file of rows: optimizer steps in epochs, evaluation, checkpoints.

epoch            the rows in the file's order, or shuffled from the seed and the epoch
optimizer step   micro-batches of per_device_train_batch_size rows, as many as make global_batch_size rows; the last
                 step of an epoch has what is left
position         the epoch, and how many of its rows were trained on: a run that goes on takes the next one, also with
                 batches of another size

On several ranks each has its micro-batches of every step and of an evaluation. Rank 0 writes the folder, and decides
when to evaluate, save and stop.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlnumba.config import LoraConfig
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.config import LM_HEAD
from rlnumba.model.hub import find_model, read_config
from rlnumba.model.lora import is_adapter
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.optim import learning_rate_at
from rlnumba.reporting.stderr import log
from rlnumba.runs import kept_data
from rlnumba.runs.loading import load_policy
from rlnumba.runs.planning.planned import Models, Step
from rlnumba.runs.policy import Schedule, epoch_order
from rlnumba.runs.resolve import resolve_here
from rlnumba.runs.run_digest import row_hashes
from rlnumba.runs.run_folder import Clock, begin_run, memory_metrics
from rlnumba.runtime import device


class RowError(UserError):
    """Rows that a trainer cannot read."""


@dataclass
class Source:
    """The parts of a model and of a RunFolder that evaluation needs: load_rows reads `config`, load_policy the rest."""

    config: object
    model_folder: Path | None
    communicator: object


class TrainerOnRows(NamedTuple):
    """A trainer whose data is a file of rows.

    run_class: its Run. load_rows(path, run, model, tokenizer, for_eval=False): the rows, a list; of the model the
    config is read. num_tokens(row): int. train_step(policy, rows, learning_rate): LateMetrics of one optimizer step on
    these rows. evaluate_rows(policy, rows): metrics of held-out rows by name. load(run, folder): (Policy, Tokenizer),
    folder being the RunFolder or a Source. prepare(folder, policy, schedule, rows, eval_rows): called before the first
    step with the RowSchedule, or None. models: Models of the run. has_graphs: whether its micro-batches become CUDA
    graphs. num_sequences(row): int. micro_batch(rows, config): the MicroBatch of rows that may share prefixes.
    """

    run_class: type
    load_rows: Callable
    num_tokens: Callable
    train_step: Callable
    evaluate_rows: Callable
    load: Callable = load_policy
    prepare: Callable | None = None
    models: Models = Models()
    has_graphs: bool = False
    # Counts the sequences of a row; len where a row is a list of them.
    num_sequences: Callable = len
    micro_batch: Callable | None = None

    @property
    def trains_lm_head(self):
        """Whether the policy is a language model: bool."""
        return self.models.heads == LM_HEAD

    def train(self, run, resume=False, reward_funcs=(), communicator=None):
        """Train a Run, and return its TrainerState; writes its output_dir.

        resume: True to continue from the newest readable checkpoint there, an int from that of this step. reward_funcs:
        there are none. communicator: that of the ranks that train together and call this with the same arguments, or
        None.
        """
        with begin_run(resolve_here(run, communicator), resume, communicator) as folder:
            run = folder.run
            policy, tokenizer = self.load(run, folder)
            rows = training_rows(self.load_rows, run, policy.model, tokenizer)
            eval_rows = None
            if run.data.eval:
                eval_rows = self.load_rows(run.data.eval, run, policy.model, tokenizer, for_eval=True)
            schedule = schedule_of(folder, rows, eval_rows)
            if self.prepare is not None:
                self.prepare(folder, policy, schedule, rows, eval_rows)
            return train_on_rows(self, folder, policy, tokenizer, schedule, rows, eval_rows)

    def check_eval_data(self, run):
        """Raise RowError for a run's data.eval that it cannot read."""
        self._eval_rows(run, find_model(run.model))

    def evaluate(self, run, model, status, communicator, reward_funcs=()):
        """(metrics of a run's data.eval by name, []) for a folder of a model or an adapter, None: the run's, on each
        rank. A reference is the run's `model`. Raises RowError, before any weights are loaded, for rows that it cannot
        read."""
        weights = None if model is None else find_model(model)
        if weights is not None:
            run = replace(run, lora=LoraConfig(init=str(weights)) if is_adapter(weights) else None)
        base = find_model(run.model)
        source = Source(read_config(base), None if run.lora else weights, communicator)
        rows = self._eval_rows(run, base)
        policy, _ = self.load(run, source)
        with policy.context.use():
            return {f"eval_{name}": value for name, value in self.evaluate_rows(policy, rows).items()}, []

    def _eval_rows(self, run, base):
        """The rows of a run's data.eval, for the model in the folder `base`."""
        try:
            source = Source(read_config(base), None, None)
            return self.load_rows(run.data.eval, run, source, Tokenizer.from_folder(base), for_eval=True)
        except ConfigError:
            raise
        except UserError as error:
            raise RowError(str(error)) from error

    def planned_step(self, planner, run):
        """The Step of a Planner's run, or of a variant of it: the largest micro-batch that it will see."""
        train, rows = run.train, planner.rows(run)
        lengths, size = np.array([self.num_tokens(row) for row in rows]), train.per_device_train_batch_size
        counts, sequences = np.array([self.num_sequences(row) for row in rows]), 0
        schedule = Schedule(train, -(-len(rows) // size))
        batches, steps_left = [], schedule.total_steps
        for epoch in range(-(-schedule.total_steps // schedule.steps_per_epoch)):
            order = epoch_order(len(rows), train.shuffle_dataset, run.seed, epoch)
            order = order[: steps_left * schedule.accumulation * size]
            steps_left -= schedule.steps_per_epoch
            firsts = np.arange(0, len(order), size)
            sums, of_batches = (np.add.reduceat(each[order], firsts) for each in (lengths, counts))
            sequences = max(sequences, int(of_batches.max()))
            batches += [(int(total), order[first : first + size]) for total, first in zip(sums, firsts, strict=True)]
        batches.sort(key=lambda batch: -batch[0])

        def calls(policy, critic):
            sharing = policy.prefix_sharing(policy.model, policy.reference)
            chosen = self.largest(batches, rows, policy.model.config, sharing)

            def one_row():
                # Micro-batches that share nothing have other kernels.
                with policy.computing_apart():
                    self.train_step(policy, chosen[:1], 0.0)

            step = partial(self.train_step, policy, chosen, 0.0)
            return [step] if sharing is None else [step, one_row]

        # A micro-batch becomes a graph when one like it comes again.
        return Step(calls, batches[0][0], sequences, self.models, fewest=batches[-2:][0][0])

    def largest(self, batches, rows, config, sharing):
        """The rows of the micro-batch with most tokens, a list.

        batches: (tokens, numbers of rows) of each, those of most tokens first; sharing: the PrefixRule by which tokens
        are counted once, or None.
        """
        if sharing is None:
            return [rows[index] for index in batches[0][1]]
        most, largest = 0, []
        for tokens, numbers in batches:
            # Those that follow have fewer, even if they share nothing.
            if tokens <= most:
                break
            chosen = [rows[index] for index in numbers]
            own = self.micro_batch(chosen, config).sharing_prefixes(sharing).num_tokens
            most, largest = (own, chosen) if own > most else (most, largest)
        return largest


def micro_batches_of(rows, train):
    """The rows of each forward pass, per_device_train_batch_size of them or what is left: lists."""
    size = train.per_device_train_batch_size
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def training_rows(load_rows, run, model, tokenizer):
    """The rows that a run trains on: those that its plan has read, else load_rows(...)."""
    rows = kept_data.taken(kept_data.rows_key(run))
    return load_rows(run.data.train, run, model, tokenizer) if rows is None else rows


class RowSchedule:
    """The optimizer steps of a run on `count` rows, from where it begins or goes on.

    epoch, position: those of the next step's first row. total_steps: the whole run's, `step` of which are done.
    """

    def __init__(self, train, count, step=0, epoch=0, position=0):
        self.count, self.epoch, self.position = count, epoch, position
        self.micro_size, self.size = train.per_device_train_batch_size, train.per_device_train_batch_size
        self.size *= train.micro_batches_per_step
        schedule = Schedule(train, -(-count // self.micro_size))
        self.total_steps = schedule.total_steps
        if train.max_steps <= 0:
            # Those of all epochs that are not the position's, and of what is left of that one.
            left = schedule.total_steps - (epoch + 1) * schedule.steps_per_epoch - (position - count) // self.size
            self.total_steps = step + max(left, 0)

    def take(self):
        """(the epoch, the range of its positions) of the next step's rows."""
        epoch, first = self.epoch, self.position
        self.position = min(first + self.size, self.count)
        if self.position == self.count:
            self.epoch, self.position = epoch + 1, 0
        return epoch, slice(first, first + self.size)

    @property
    def epochs_done(self):
        """Passes over the rows so far, as transformers counts them, in micro-batches: float."""
        return self.epoch + -(-self.position // self.micro_size) / -(-self.count // self.micro_size)


def schedule_of(folder, rows, eval_rows):
    """The RowSchedule of the run of a RunFolder, whose checkpoint may be of other rows and batches."""
    train, state = folder.run.train, folder.state
    changed = folder.compare_rows(row_hashes(rows), row_hashes(eval_rows) if eval_rows else None)
    if state is None:
        return RowSchedule(train, len(rows))
    # Checkpoints of before this was kept are of the batches and rows that the run has.
    size = train.per_device_train_batch_size * train.micro_batches_per_step
    epoch, step_of_epoch = divmod(folder.step, -(-len(rows) // size))
    epoch, position = state.get("position", (epoch, step_of_epoch * size))
    if changed is not None and position:
        epoch, position = epoch + 1, 0
    return RowSchedule(train, len(rows), folder.step, epoch, position)


def train_on_rows(trainer, folder, policy, tokenizer, schedule, rows, eval_rows):
    """Train by a TrainerOnRows from where the RunFolder's checkpoint ends to the run's last step: its TrainerState.

    Writes the run's folder. schedule: RowSchedule. rows, eval_rows: lists, the latter empty or None without data.eval.
    """
    run, train = folder.run, folder.run.train
    num_tokens = 0
    if folder.state is not None:
        policy.load_state_dict(folder.state["policy"])
        num_tokens = folder.state["num_tokens"]
    complete = folder.step, num_tokens, (schedule.epoch, schedule.position)

    def save():
        writer.flush()
        step, tokens, position = complete
        folder.save(step, policy, tokenizer, {"num_tokens": tokens, "position": position})

    callbacks, control = folder.callbacks, folder.callbacks.control
    with (
        policy.context.use(),
        folder.writer(schedule.total_steps) as writer,
        folder.kept_after_error(policy, save, lambda: complete[0]),
    ):
        folder.hold_signals()
        if eval_rows and train.eval_on_start and folder.step == 0:
            writer.log(0, {f"eval_{name}": value for name, value in trainer.evaluate_rows(policy, eval_rows).items()})
        callbacks.begin(folder.step, schedule.total_steps, schedule.epochs_done, policy.model)
        clock = Clock()
        for step in range(folder.step, schedule.total_steps):
            with clock.phase("train"):
                epoch, positions = schedule.take()
                chosen = [rows[i] for i in epoch_order(len(rows), train.shuffle_dataset, run.seed, epoch)[positions]]
                # Signals are held from the update of the weights on.
                metrics = trainer.train_step(policy, chosen, learning_rate_at(train, step, schedule.total_steps))
                policy.say_who_waits()
                policy.move_reference_if_due(step + 1)
                step_tokens = sum(map(trainer.num_tokens, chosen))
                device.synchronize()
            num_tokens += step_tokens
            complete, policy.is_updating = (step + 1, num_tokens, (schedule.epoch, schedule.position)), False
            last = step + 1 == schedule.total_steps
            with clock.phase("log"):
                metrics = metrics | {"epoch": schedule.epochs_done, "num_tokens": num_tokens}
                with folder.sharing():
                    callbacks.step_end(step + 1, metrics["epoch"], policy.model)
            if eval_rows and folder.decided(callbacks.evaluation_due(step + 1, last)):
                with writer.logged_on_interruption(step + 1, metrics), folder.interruptible(), clock.phase("eval"):
                    found = {f"eval_{name}": value for name, value in trainer.evaluate_rows(policy, eval_rows).items()}
                metrics |= found
                if folder.is_first_rank:
                    with folder.sharing():
                        callbacks.evaluated(found, policy.model)
            with clock.phase("log"):
                # Time from here on counts in the next step.
                metrics |= clock.read()
                metrics["perf/throughput"] = step_tokens / metrics["time/train"]
                with folder.sharing():
                    writer.log(step + 1, metrics | memory_metrics())
                    callbacks.logged(metrics, policy.model, writer)
                    folder.saver.check()
            last = last or control.should_training_stop
            last, saves = folder.decided((last, callbacks.save_due(step + 1, last)))
            if saves:
                with clock.phase("save"):
                    save()
                    callbacks.call("on_save", policy.model)
            folder.release_signals()
            if last:
                break
        callbacks.call("on_train_end", policy.model)
        writer.draw()
        policy.gather_adapter()
        folder.finish(policy.model, tokenizer)
    log(f"{folder.path} has the curves (curves.png) and the model (final)")
    return callbacks.state
