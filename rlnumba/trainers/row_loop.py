"""The loop of the trainers whose data is a file of rows: optimizer steps in epochs, evaluation, checkpoints.

epoch            the rows in the file's order, or shuffled from the seed and the epoch
optimizer step   micro-batches of per_device_train_batch_size rows, as many as make global_batch_size rows; the last
                 step of an epoch has what is left

On several ranks each has its micro-batches of every step and of an evaluation. Rank 0 writes the folder, and decides
when to evaluate, save and stop.
"""

from rlnumba.optim import learning_rate_at
from rlnumba.runtime import device
from rlnumba.trainers import kept_data
from rlnumba.trainers.core import Schedule, epoch_order
from rlnumba.trainers.run_folder import Clock, log, memory_metrics


def micro_batches_of(rows, train):
    """The rows of each forward pass, per_device_train_batch_size of them or what is left: lists."""
    size = train.per_device_train_batch_size
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def training_rows(kind, load_rows, run, model, tokenizer):
    """The rows that a run trains on: those that its plan has read, else load_rows(...) of the trainer `kind`."""
    rows = kept_data.taken(kept_data.rows_key(kind, run))
    return load_rows(run.data.train, run, model, tokenizer) if rows is None else rows


def train_on_rows(folder, policy, tokenizer, rows, eval_rows, train_step, evaluate, count_tokens):
    """Train from where the RunFolder's checkpoint ends to the run's last step, and return its TrainerState.

    Writes the run's folder.

    rows, eval_rows: lists, the latter empty or None without data.eval. train_step(policy, rows, learning_rate):
    LateMetrics of one optimizer step on these rows. evaluate(policy, eval_rows): metrics by name.
    count_tokens(row): int.
    """
    run, train = folder.run, folder.run.train
    schedule = Schedule(train, -(-len(rows) // train.per_device_train_batch_size))
    rows_per_step, num_tokens = train.per_device_train_batch_size * train.micro_batches_per_step, 0
    if folder.state is not None:
        policy.load_state_dict(folder.state["policy"])
        num_tokens = folder.state["num_tokens"]
    complete = folder.step, num_tokens

    def save():
        writer.flush()
        step, tokens = complete
        folder.save(step, policy.model, tokenizer, {"policy": policy.state_dict(), "num_tokens": tokens})

    callbacks, control = folder.callbacks, folder.callbacks.control
    with policy.context.use(), folder.writer(schedule.total_steps) as writer, folder.kept_on_interruption(save):
        folder.hold_signals()
        if eval_rows and train.eval_on_start and folder.step == 0:
            writer.log(0, {f"eval_{name}": value for name, value in evaluate(policy, eval_rows).items()})
        callbacks.begin(folder.step, schedule.total_steps, schedule.epochs_done(folder.step), policy.model)
        clock = Clock()
        for step in range(folder.step, schedule.total_steps):
            with clock.phase("train"):
                epoch, step_of_epoch = divmod(step, schedule.steps_per_epoch)
                order = epoch_order(len(rows), train.shuffle_dataset, run.seed, epoch)
                chosen = [rows[i] for i in order[step_of_epoch * rows_per_step : (step_of_epoch + 1) * rows_per_step]]
                # Signals are held from the update of the weights on.
                metrics = train_step(policy, chosen, learning_rate_at(train, step, schedule.total_steps))
                policy.move_reference_if_due(step + 1)
                step_tokens = sum(map(count_tokens, chosen))
                device.synchronize()
            num_tokens += step_tokens
            complete = step + 1, num_tokens
            last = step + 1 == schedule.total_steps
            with clock.phase("log"):
                metrics = metrics | {"epoch": schedule.epochs_done(step + 1), "num_tokens": num_tokens}
                callbacks.step_end(step + 1, metrics["epoch"], policy.model)
            if eval_rows and folder.decided(callbacks.evaluation_due(step + 1, last)):
                with writer.logged_on_interruption(step + 1, metrics), folder.interruptible(), clock.phase("eval"):
                    found = {f"eval_{name}": value for name, value in evaluate(policy, eval_rows).items()}
                metrics |= found
                if folder.is_first_rank:
                    callbacks.evaluated(found, policy.model)
            with clock.phase("log"):
                # What follows counts in the next step.
                metrics |= clock.read()
                metrics["perf/throughput"] = step_tokens / metrics["time/train"]
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
