"""A run's folder and its resumption, the clock of a step's phases, and lines on the console."""

import hashlib
import itertools
import shutil
import time
from collections import defaultdict
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlnumba import checkpoint
from rlnumba.config.keys import Section, sections_of
from rlnumba.config.rollout import PromptRun
from rlnumba.config.schema import RECOMPUTE_MODULES
from rlnumba.data.values import as_json
from rlnumba.errors import CommunicationError, SharedError, UserError
from rlnumba.kernels.gemm import ops as gemm
from rlnumba.model.transformer import save_model
from rlnumba.parallel.launch import stop_requested
from rlnumba.parallel.saving import SharedSaver, has_parts, save_parts
from rlnumba.reporting.files import (
    RUN_FILES,
    UNFINISHED,
    make_folder,
    note_unfinished,
    remove_temporaries,
    write_config,
)
from rlnumba.reporting.folder_lock import owned
from rlnumba.reporting.metrics import MetricsWriter
from rlnumba.reporting.stderr import log, silence
from rlnumba.reporting.trackers import check_installed
from rlnumba.rewards.loading import ModelFolder
from rlnumba.runs.callbacks import Callbacks
from rlnumba.runs.run_digest import check_keys, check_sources, digest_of, new_indices, source_hash
from rlnumba.runs.run_inputs import SetAside, paths_of, with_paths
from rlnumba.runtime import device, dispatch, memory, signals
from rlnumba.runtime.compile import ahead_of_time
from rlnumba.runtime.environment import environment

# Keys of [train] of a run that may choose any mode of its activations: its list has the kernels of all.
ANY_ACTIVATIONS = {
    "gradient_checkpointing": None, "activation_memory": "auto", "recompute_modules": list(RECOMPUTE_MODULES),
    "recompute_num_layers": 0,
}  # fmt: skip

# The ways to go on with a run that messages name, on the command line and in Python.
RESUMES = "--resume", "in Python train(resume_from_checkpoint=True)"

# The module that lists a run's kernels for runtime/compile/ahead_of_time.py.
KERNEL_LIST = "rlnumba.runs.planning.kernel_list"


def kernel_request(run):
    """A resolved run for KERNEL_LIST, without what its kernels do not depend on.

    So a run for whose like all kernels were compiled begins without a list of them (runtime/compile/ahead_of_time.py).
    """
    size = run.deploy.tensor_parallel_size
    gpus = "num_train_gpus" if run.deploy.cuts_rollout else "num_infer_gpus"
    cut = {"tensor_parallel_size": size, gpus: size} if size > 1 else {}
    train = replace(run.train, learning_rate=0.0, report_to=[], run_name=None, **ANY_ACTIVATIONS)
    if isinstance(run, PromptRun):
        # Rows of a file have a largest micro-batch by their order, and by how far it is followed; completions do not.
        train, run = replace(train, max_steps=1, num_train_epochs=1.0), replace(run, seed=0)
    return replace(run, output_dir="-", train=train, deploy=type(run.deploy)(**cut))


def start_compiling(run):
    """Set the run's GEMM backend, and have what the cache lacks of its kernels compiled on all cores."""
    gemm.set_backend(run.gemm)
    if device.name() == "cuda" and gemm.backend() == "native":
        ahead_of_time.start(KERNEL_LIST, kernel_request(run))


def owner_of(run, communicator=None):
    """A context manager that owns a run's folder. With several ranks, the process that started them does."""
    return owned(run.output_dir) if communicator is None or communicator.world_size == 1 else nullcontext()


@contextmanager
def begin_run(run, resume, communicator=None):
    """A block that has the RunFolder of a run, whose `run` is to be used: inputs may have other paths there.

    Kernels of the run that the cache lacks are compiled on all cores. communicator: that of the ranks that train
    together, or None. Raises UserError where another run has the folder.
    """
    with owner_of(run, communicator):
        inside = SetAside(run.output_dir)
        reads_own_folder = any(inside.within(path) for path in paths_of(run))
        if not reads_own_folder:
            start_compiling(run)
        kind = RunFolder if communicator is None or communicator.rank == 0 else ReadFolder
        folder = kind(run, resume, communicator)
        if reads_own_folder:
            # Another process reads the model's configuration for it, where it is by now.
            start_compiling(folder.run)
        try:
            yield folder
        except BaseException:
            folder.undo()
            raise
        finally:
            # What fit_to_device has said of this run.
            memory.expect("graphs", 0)


class RunFolder:
    """A run's output_dir: finds the checkpoint to resume from, writes metrics, checkpoints and the final model.

    resume: True for the newest readable checkpoint (without any, the run starts afresh and logs it), or the step of a
    checkpoint, an int. model_folder: that checkpoint's folder, or None. state: its trainer state, or None. step:
    optimizer steps done. run: with the paths that its inputs have by now (run_inputs.py). communicator: that of the
    ranks that train together, this one the first, or None. Raises UserError if the folder cannot be written to, holds
    checkpoints of which none is readable, not that of the step, or those of another trainer.
    """

    is_first_rank = True

    def __init__(self, run, resume, communicator=None):
        self.run, self.path, self.communicator = run, Path(run.output_dir), communicator
        self.is_alone = communicator is None or communicator.world_size == 1
        # The message of an error inside `sharing`, or None.
        self._problem = None
        check_installed(run.train.report_to)
        make_folder(self.path)
        self.step_chosen = resume is not True and bool(resume)
        # Rank 0 reads all files to check them.
        self.model_folder = self.decided(self._find_checkpoint(resume) if self.is_first_rank else None)
        self.saver = checkpoint.Saver(self.path) if self.is_alone else SharedSaver(self.path, communicator)
        # Paths moved aside before the run's first write, because the run reads them: {old path: new one}.
        self._moved_early = {}
        self.step, self.state = 0, None
        if self.model_folder is not None:
            self.step, self.state = checkpoint.load(self.model_folder)
            if self.state["trainer"] != run.trainer:
                raise UserError(f"{self.model_folder}: a checkpoint of {self.state['trainer']}, not of {run.trainer}")
        elif resume:
            log(f"{self.path} holds no checkpoint: starting afresh")
        self.set_aside = self.decided(self._find_inputs() if self.is_first_rank else None)
        self.run = run = with_paths(run, self.set_aside)
        # The run's digest for its checkpoints, on rank 0, and the digest in the one that it goes on from, or None.
        self.digest, self.saved = digest_of(run) if self.is_first_rank else {}, (self.state or {}).get("run")
        if self.is_first_rank and self.state is not None:
            self._compare()
        metric = "eval_reward" if "rewards" in sections_of(type(run)) else "eval_loss"
        self.callbacks = Callbacks(run, self.path, metric, (self.state or {}).get("callbacks"))

    def _find_checkpoint(self, resume):
        """The folder of the checkpoint to resume from, or None. Removes what a killed process has left of one, and of
        the files that it was replacing."""
        checkpoint.remove_leftovers(self.path)
        remove_temporaries(self.path)
        if self.step_chosen:
            return checkpoint.of_step(self.path, resume)
        return checkpoint.latest_readable(self.path) if resume else None

    def _find_inputs(self):
        """The SetAside of this run's inputs. Moves what an earlier run has left if some inputs are among it."""
        if self.state is not None:
            return SetAside(self.path, self.state.get("set_aside", ()))
        found = SetAside(self.path)
        inside = [path for each in paths_of(self.run) if (path := found.within(each)) is not None]
        names = {path.parts[0] for path in inside if (self.path / path).exists()}
        if names & {path.name for path in self._left_behind()}:
            self._moved_early = self._archive_earlier_run()
            found.moved = {old.name: str(new.relative_to(self.path)) for old, new in self._moved_early.items()}
        for path in dict.fromkeys(str(self.path / each) for each in inside):
            if (now := found(path)) != path:
                log(f"{path}, which this run reads, is now {now}")
        return found

    def _compare(self):
        """Log what has changed since the checkpoint. Raises ConfigError for what must not change."""
        if self.saved is None:
            log(f"{self.model_folder} does not hold what its run read: whether this one is the same is not checked")
            return
        for line in check_keys(self.saved, self.digest, self.model_folder, self.step):
            log(line)

    def compare_rows(self, hashes, eval_hashes=None):
        """Note the rows of the run, and find out whether they are those of the checkpoint that it goes on from.

        Returns {index of a row there: its index here} of training rows that are other ones, else None. hashes,
        eval_hashes: those of data.train and data.eval, by run_digest.row_hashes. All ranks call this.
        """
        eval_hash = None if eval_hashes is None else hashlib.sha256(eval_hashes.tobytes()).hexdigest()
        self.digest |= {"rows": hashes, "eval_rows": eval_hash}
        saved = self.saved or {}
        if eval_hash is not None and saved.get("eval_rows") not in (None, eval_hash):
            log(f"data.eval has other rows from step {self.step + 1}")
        before = saved.get("rows")
        if before is None or np.array_equal(before, hashes):
            return None
        found = new_indices(before, hashes)
        log(
            f"data.train has other rows, {len(hashes)} instead of {len(before)}, of which {len(found)} were there "
            f"before: a new epoch begins with step {self.step + 1}"
        )
        return found

    def compare_sources(self, rewards, agents):
        """Note the sources of a run's reward functions, tools and environments, and log which have changed since the
        checkpoint. On rank 0. agents: Agents, or None."""
        functions = zip(rewards.names, rewards.functions, strict=True)
        self._compare_sources("rewards", "rewards.funcs: ", {name: [each] for name, each in functions})
        if agents is not None:
            self._compare_sources("tools", "", agents.sources)

    def _compare_sources(self, section, key, sources):
        """sources: {name: the objects whose files are compared}. See check_sources for key."""
        hashes = {name: source_hash(*objects) for name, objects in sources.items()}
        self.digest[section] = {name: found for name, found in hashes.items() if found is not None}
        for line in check_sources((self.saved or {}).get(section, {}), self.digest[section], key, self.step):
            log(line)

    def moved_models(self, reward_funcs):
        """Reward functions that were given as objects, folders of models where they are by now: list."""
        return [
            replace(each, path=Path(self.set_aside(str(each.path)))) if isinstance(each, ModelFolder) else each
            for each in reward_funcs
        ]

    def undo(self):
        """The run has ended with an error: move back what was moved aside, if nothing has been written since."""
        for old, new in self._moved_early.items():
            new.rename(old)
            with suppress(OSError):  # not empty
                new.parent.rmdir()
        self._moved_early = {}

    def decided(self, value):
        """The decision of rank 0, on all ranks, which call this together. Raises SharedError for one of `sharing`."""
        if self.is_alone:
            return value
        found, problem = self.communicator.objects((value, self._problem))[0]
        if problem is not None:
            raise SharedError(problem)
        return found

    @contextmanager
    def sharing(self):
        """A block that rank 0 alone may fail in: the next `decided` then raises the UserError on all ranks."""
        try:
            yield
        except checkpoint.CheckpointError:
            raise
        except UserError as error:
            if self.is_alone:
                raise
            self._problem = str(error)

    def hold_signals(self):
        """Before the first step: ranks end after the same one, so that signals wait for release_signals."""
        if not self.is_alone:
            signals.hold()

    def release_signals(self):
        """After a step, on all ranks: raises KeyboardInterrupt if a signal has arrived, on one of them."""
        if self.is_alone:
            signals.release()
        elif stop_requested(self.communicator):
            raise KeyboardInterrupt

    def interruptible(self):
        """Within a step, a block in which a signal need not wait, as far as other ranks do not wait for this one."""
        return signals.released() if self.is_alone else nullcontext()

    def writer(self, total_steps):
        """The run's MetricsWriter. Called when all input has been read and checked: it changes the folder."""
        if self.model_folder is None:
            self._archive_earlier_run()
        elif self.step_chosen:
            self._archive_later_steps()
        # From here on the folder is this run's.
        self._moved_early = {}
        note_unfinished(self.path)
        write_config(self.run, environment() | {"trainer": self.run.trainer})
        train = self.run.train
        printed = train.log_completions, train.num_completions_to_print
        config = {name: value for name, value in vars(self.run).items() if not isinstance(value, Section)}
        config |= {"train": vars(train), "data": vars(self.run.data)}
        tracked = {"run_name": train.run_name, "project": train.project, "config": as_json(config)}
        # Beside a GPU the thread that trains has no time to lose.
        where = {"report_to": train.report_to, "draws_apart": device.name() == "cuda"}
        return MetricsWriter(self.path, total_steps, self.step, train.logging_steps, *printed, **where, **tracked)

    def _left_behind(self):
        """The paths of an earlier run that a new one would overwrite, none where it wrote nothing of weight."""
        left = [path for name in RUN_FILES if (path := self.path / name).exists()]
        return left if any(path.name in ("metrics.jsonl", "checkpoints", "final") for path in left) else []

    def _archive_earlier_run(self):
        """Move it aside: {old path: new path}."""
        left = self._left_behind()
        if not left:
            return {}
        target = self._archive(left)
        resumes = f"{RESUMES[0]} goes on with one ({RESUMES[1]})"
        log(f"{self.path} held an earlier run, which is now in {target}; {resumes}")
        return {path: target / path.name for path in left}

    def _archive_later_steps(self):
        """Otherwise the next --resume would start from one of these, and their lines of metrics would be lost."""
        found = checkpoint.existing(self.path)
        if later := found[: found.index(self.model_folder)]:
            copied = [
                self.path / name for name in ("metrics.jsonl", "completions.jsonl", "tokens.jsonl", "completions")
            ]
            # W&B takes no step twice: the run that goes on with other steps is another one there.
            gone = [path for name in ("final", "wandb_id") if (path := self.path / name).exists()]
            target = self._archive([*later, *gone], [path for path in copied if path.exists()])
            log(f"{self.path}: what came after step {self.step} is now in {target}")

    def _archive(self, moved, copied=()):
        """Move and copy paths of this folder to earlier-N, which is returned."""
        target = next(path for n in itertools.count(1) if not (path := self.path / f"earlier-{n}").exists())
        target.mkdir()
        for path in copied:
            (shutil.copytree if path.is_dir() else shutil.copy)(path, target / path.name)
        for path in moved:
            new = target / path.relative_to(self.path)
            new.parent.mkdir(exist_ok=True)
            path.rename(new)
        return target

    def save(self, step, policy, tokenizer, others):
        """Begin to write checkpoints/step-N, unless it exists: a step's state is always the same.

        policy: a Policy or ActorCritic, of which train.save_only_model copies the weights alone; others: what the
        state has besides, a dict. Training may go on when this returns. All ranks call this, each with its parts of
        arrays. Raises CheckpointError if the checkpoint before could not be written.
        """
        if step == self.step and self.model_folder is not None:
            return
        train = self.run.train
        if train.save_only_model:
            policy.gather_adapter()
            state = None
        else:
            state = self._state_of(policy, others)
        best = self.callbacks.state.best_global_step if train.load_best_model_at_end else None
        self.saver.save(step, policy.model, tokenizer, state, train.save_total_limit, best)
        self.step, self.model_folder = step, self.path / "checkpoints" / f"step-{step}"

    def _state_of(self, policy, others):
        """The state of a checkpoint, a dict."""
        state = {"trainer": self.run.trainer, "policy": policy.state_dict(), **others}
        if tracked := self.callbacks.state_dict():
            state["callbacks"] = tracked
        if self.is_first_rank:
            state["run"] = self.digest
        if self.set_aside.moved:
            state["set_aside"] = self.set_aside.moved
        return state

    @contextmanager
    def kept_after_error(self, policy, save, last_step):
        """If a signal or any error ends the block, call save(), which saves the last complete step, last_step().

        Not where the weights are between two steps (policy.is_updating). When the block has ended, all checkpoints of
        one process are on the disk; without an error the run has ended, and its folder says so. With several ranks, an
        error of one ends the blocks of all; the step is saved where it is the last complete one of all, and none ends
        before rank 0 has written.
        """
        with signals.handled():
            try:
                yield
                self.saver.wait()
                if self.is_first_rank:
                    (self.path / UNFINISHED).unlink(missing_ok=True)
            except checkpoint.CheckpointError:
                raise
            except BaseException as error:
                # The compiler may turn the exception of a signal into one of its own.
                interrupted = isinstance(error, KeyboardInterrupt) or signals.received() is not None
                with signals.held():
                    if self._is_whole(error, None if policy.is_updating else last_step()):
                        self._save_after(error, interrupted, save)
                    elif self.is_alone:
                        self._finish_saving()
                raise

    def _is_whole(self, error, step):
        """Whether an error leaves a step whole on all ranks. step: the last complete one here, None in an update."""
        if self.is_alone:
            return step is not None
        try:
            steps = self.communicator.meet_after_error(step)
        except CommunicationError:  # a rank has ended, and its part with it
            return False
        if steps is None:
            # Ranks that cannot meet have a whole step if they have stopped in the same place.
            return step is not None and isinstance(error, (SharedError, KeyboardInterrupt))
        return step is not None and len(set(steps)) == 1

    def _save_after(self, error, interrupted, save):
        """Save the last complete step after an error, which is not hidden by one of saving, unless a user causes it."""
        keeps = self.run.train.save_strategy != "no"
        # The rank that an error comes from reports it.
        is_known = isinstance(error, UserError) and not isinstance(error, CommunicationError)
        problems = () if interrupted or is_known else (UserError, OSError, MemoryError, RuntimeError)
        try:
            if keeps:
                save()
            self.saver.wait()
            if not self.is_alone:
                self.communicator.barrier()
        except problems as problem:
            log(f"step {self.step} is not saved after this error: {problem}")
            return
        if not keeps and interrupted:
            log('train.save_strategy is "no": no checkpoint is kept')
        elif keeps:
            log(f"step {self.step} is in {self.model_folder}; {RESUMES[0]} goes on from there ({RESUMES[1]})")

    def _finish_saving(self):
        """Wait until the checkpoint before an error is on the disk; the error is not hidden by one of saving."""
        try:
            self.saver.wait()
        except checkpoint.CheckpointError as problem:
            log(str(problem))

    def finish(self, model, tokenizer, heads=None):
        """Write final/, a Hugging Face folder of the model, or of that of the best step with load_best_model_at_end.

        The checkpoint of the last step has been begun, unless the run has none. heads: those that are written, by
        default all. All ranks call this.
        """
        best = self.callbacks.state.best_global_step if self.run.train.load_best_model_at_end else None
        if has_parts(model):
            # Rank 0 alone has it.
            best = self.communicator.objects(best)[0]
        if best is None and (heads not in (None, model.config.heads) or self.run.train.save_strategy == "no"):
            self.save_model(model, "final", tokenizer, heads)
        else:
            self._finish_as_checkpoint(best)

    def _finish_as_checkpoint(self, best):
        """Make final/ of the checkpoint of the best step, or for None of the last one."""
        self.saver.wait()
        with self._written("final"):
            # Faster than another copy of the device's memory.
            checkpoint.copy_model(self.path / "checkpoints" / f"step-{best or self.step}", self.path / "final")
        if best is not None:
            log(f"the best {self.callbacks.metric} is {self.callbacks.state.best_metric:.6g}, of step {best}")

    def save_model(self, model, name, tokenizer, heads=None):
        """Write a Hugging Face folder `name` in this one; all ranks call this. Raises UserError naming it."""
        # Values in the memory of the host may still be written.
        device.synchronize()
        with self._written(name):
            if has_parts(model):
                save_parts(model, self.path / name, tokenizer, heads, self.communicator)
            else:
                save_model(model, self.path / name, tokenizer, heads=heads)

    @contextmanager
    def _written(self, name):
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.path / name}: cannot be written: {error.strerror}") from error


class ReadFolder(RunFolder):
    """The RunFolder of another rank than the first, which reads what the first one does, and writes its part of
    checkpoints alone."""

    is_first_rank = False

    def __init__(self, run, resume, communicator):
        silence()
        # Callbacks are called once.
        super().__init__(replace(run, train=replace(run.train, callbacks=[])), resume, communicator)

    def writer(self, total_steps):
        """A writer that is used as the MetricsWriter and writes nothing."""
        return _NoWriter()

    def _finish_as_checkpoint(self, best):
        """Nothing: rank 0 copies."""

    def save_model(self, model, name, tokenizer, heads=None):
        """Write this rank's part of a model that is in parts; rank 0 saves any other."""
        if has_parts(model):
            super().save_model(model, name, tokenizer, heads)


class _NoWriter:
    """In place of a MetricsWriter where nothing is written."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        return None

    def log(self, step, metrics):
        """Nothing."""

    def status(self, text):
        """Nothing."""

    def completions(self, step, rows):
        """Nothing."""

    def tokens(self, step, rows):
        """Nothing."""

    def logged_on_interruption(self, step, metrics):
        """A block like any other."""
        return nullcontext()

    def flush(self):
        """Nothing."""

    def draw(self):
        """Nothing."""

    def print(self, text):
        """Nothing."""


def log_kernels(dtype):
    """On a GPU, log which kernels compute a model of this dtype."""
    if device.name() == "cuda":
        attention, logprob = dispatch.describe("attention"), dispatch.describe("logprob")
        log(f"GEMMs: {gemm.describe(dtype)}; attention: {attention}; log-probs: {logprob}")


class Clock:
    """Wall-clock seconds of a step's phases, each moment counted in one: a phase within another interrupts it.

    Nothing is synchronised: what a phase launches on the device and does not wait for counts where the host waits.
    """

    def __init__(self):
        self.started = self.last = time.perf_counter()
        self.seconds, self.phases = defaultdict(float), []

    @contextmanager
    def phase(self, name):
        """Add the time of the block, but for the phases within it, to time/<name>."""
        self._count()
        self.phases.append(name)
        try:
            yield
        finally:
            self._count()
            self.phases.pop()

    def _count(self):
        """Add the time since the last call to the innermost phase."""
        now = time.perf_counter()
        if self.phases:
            self.seconds[f"time/{self.phases[-1]}"] += now - self.last
        self.last = now

    def read(self):
        """{"step_time": s, "time/<phase>": s, ...} since the last read, which starts the next step."""
        self._count()
        read = {"step_time": self.last - self.started, **self.seconds}
        self.started, self.seconds = self.last, defaultdict(float)
        return read


def memory_metrics():
    """{"memory/<region>": peak bytes allocated at one time} of every region, and of all together as perf/peak_memory.

    The latter is of the device's memory: without "host", what offload_optimizer keeps there.
    """
    peaks = memory.report()
    return {f"memory/{region}": nbytes for region, nbytes in peaks.items()} | {"perf/peak_memory": memory.peak()}
