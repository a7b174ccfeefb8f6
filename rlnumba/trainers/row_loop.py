"""The loop of the trainers whose data is a file of rows: optimizer steps in epochs, evaluation, checkpoints.

epoch            the rows in the file's order, or shuffled from the seed and the epoch
optimizer step   micro-batches of per_device_train_batch_size rows, as many as make global_batch_size rows; the last
                 step of an epoch has what is left
position         the epoch, and how many of its rows were trained on: a run that goes on takes the next one, also with
                 batches of another size

On several ranks each has its micro-batches of every step and of an evaluation. Rank 0 writes the folder, and decides
when to evaluate, save and stop.
"""

from rlnumba.optim import learning_rate_at
from rlnumba.runtime import device
from rlnumba.trainers import kept_data
from rlnumba.trainers.core import Schedule, epoch_order
from rlnumba.trainers.run_digest import row_hashes
from rlnumba.trainers.run_folder import Clock, log, memory_metrics


def micro_batches_of(rows, train):
    """The rows of each forward pass, per_device_train_batch_size of them or what is left: lists."""
    size = train.per_device_train_batch_size
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def training_rows(kind, load_rows, run, model, tokenizer):
    """The rows that a run trains on: those that its plan has read, else load_rows(...) of the trainer `kind`."""
    rows = kept_data.taken(kept_data.rows_key(kind, run))
    return load_rows(run.data.train, run, model, tokenizer) if rows is None else rows


class RowSchedule:
    """The optimizer steps of a run on `count` rows, from where it begins or goes on.

    epoch, position: of the next step's first row. total_steps: of the whole run, `step` of which are done.
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


def train_on_rows(folder, policy, tokenizer, rows, eval_rows, train_step, evaluate, count_tokens):
    """Train from where the RunFolder's checkpoint ends to the run's last step, and return its TrainerState.

    Writes the run's folder.

    rows, eval_rows: lists, the latter empty or None without data.eval. train_step(policy, rows, learning_rate):
    LateMetrics of one optimizer step on these rows. evaluate(policy, eval_rows): metrics by name.
    count_tokens(row): int.
    """
    run, train = folder.run, folder.run.train
    schedule, num_tokens = schedule_of(folder, rows, eval_rows), 0
    if folder.state is not None:
        policy.load_state_dict(folder.state["policy"])
        num_tokens = folder.state["num_tokens"]
    complete = folder.step, num_tokens, (schedule.epoch, schedule.position)

    def save():
        writer.flush()
        step, tokens, position = complete
        state = {"policy": policy.state_dict(), "num_tokens": tokens, "position": position}
        folder.save(step, policy.model, tokenizer, state)

    callbacks, control = folder.callbacks, folder.callbacks.control
    with (
        policy.context.use(),
        folder.writer(schedule.total_steps) as writer,
        folder.kept_after_error(policy, save, lambda: complete[0]),
    ):
        folder.hold_signals()
        if eval_rows and train.eval_on_start and folder.step == 0:
            writer.log(0, {f"eval_{name}": value for name, value in evaluate(policy, eval_rows).items()})
        callbacks.begin(folder.step, schedule.total_steps, schedule.epochs_done, policy.model)
        clock = Clock()
        for step in range(folder.step, schedule.total_steps):
            with clock.phase("train"):
                epoch, positions = schedule.take()
                chosen = [rows[i] for i in epoch_order(len(rows), train.shuffle_dataset, run.seed, epoch)[positions]]
                # Signals are held from the update of the weights on.
                metrics = train_step(policy, chosen, learning_rate_at(train, step, schedule.total_steps))
                policy.move_reference_if_due(step + 1)
                step_tokens = sum(map(count_tokens, chosen))
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
                    found = {f"eval_{name}": value for name, value in evaluate(policy, eval_rows).items()}
                metrics |= found
                if folder.is_first_rank:
                    with folder.sharing():
                        callbacks.evaluated(found, policy.model)
            with clock.phase("log"):
                # What follows counts in the next step.
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
