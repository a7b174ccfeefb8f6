"""The metrics of a run, step by step: metrics.jsonl, completions.jsonl, TensorBoard, a console line, curves.png.

metrics.jsonl has one JSON object per optimizer step, with TRL's metric names; values that are not finite numbers are
null, so that every line is JSON. A resumed run truncates it to the checkpoint's step. TensorBoard, Weights & Biases and
trackio get the same numbers (trackers.py).

All of this is written by a thread of its own (background.py), in the order of the calls. Lines of a checkpoint's steps
must be on the disk before the checkpoint is: flush, then save.
"""

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path

import numpy as np

from rlnumba.data.values import as_json
from rlnumba.errors import CommunicationError, UserError
from rlnumba.reporting.background import Background
from rlnumba.reporting.console import LineConsole, LiveConsole, completions_text
from rlnumba.reporting.files import append_lines, cut_back, make_folder, read_metrics
from rlnumba.reporting.plots import plot, plot_apart
from rlnumba.reporting.trackers import open_trackers

# Files of lines of completions, opened with the first of them.
ROW_FILES = ("completions.jsonl", "tokens.jsonl")
# Their tables, by step, and what a killed process leaves of one.
PARQUET = re.compile(r"\.?completions_(?P<step>\d+)\.parquet(?P<partial>\.partial)?")
SECONDS_BETWEEN_PLOTS = 300.0  # a plot takes about a second


class MetricsWriter:
    """Writes the metrics and completions of a run, step by step, in the background; a context manager.

    A write that fails, as on a full disk, raises its OSError from a later call, at the latest from flush or close.

    total_steps: optimizer steps of the whole run. start_step: steps already done, 0 or the checkpoint's: files are
    truncated to it. logging_steps: steps between two lines on a console that is not live. log_completions: whether to
    print completions (num_to_print of them, None: all) and write them as parquet. report_to, tracked: the names and
    further arguments of open_trackers. draws_apart: whether another process draws.
    """

    def __init__(
        self,
        output_dir,
        total_steps,
        start_step=0,
        logging_steps=10,
        log_completions=False,
        num_to_print=None,
        report_to=("auto",),
        draws_apart=False,
        **tracked,
    ):
        self.folder = Path(output_dir)
        self.total_steps, self.start_step, self.logging_steps = total_steps, start_step, logging_steps
        self.log_completions, self.num_to_print = log_completions, num_to_print
        make_folder(self.folder)
        # Before the lines are cut, which say whether trackers have later steps.
        self._trackers = open_trackers(report_to, self.folder, start_step, **tracked)
        for name in ("metrics.jsonl", *ROW_FILES):
            # What a run evaluates before its first step it evaluates again where it goes on from there.
            cut_back(self.folder / name, start_step or -1)
        for path in (self.folder / "completions").glob("*completions_*.parquet*"):
            # A file of one's own may have such a name, too.
            found = PARQUET.fullmatch(path.name)
            if found and (found["partial"] or int(found["step"]) > start_step):
                path.unlink()
        self._background = Background("metrics")
        self._metrics = open(self.folder / "metrics.jsonl", "a", encoding="utf-8")
        self._row_files = {}
        self._console = (LiveConsole if sys.stderr.isatty() else LineConsole)(total_steps, start_step, logging_steps)
        self._draw = plot_apart if draws_apart else plot
        self._plotted_at, self._is_drawn = time.monotonic(), False

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        # A failing plot, or on a full disk a failing close, must not hide the error that ends the run.
        with contextlib.suppress(*[UserError, OSError] if kind else []):
            # After a CommunicationError the process is killed while it would draw: another rank has ended.
            self.close(draw=kind not in (KeyboardInterrupt, CommunicationError), failed=kind is not None)

    def log(self, step, metrics):
        """Writes the metrics of optimizer step `step` (1-based): {name: number}, a dict that does not change later."""
        self._background.submit(self._log, step, metrics)

    def _log(self, step, metrics):
        self._is_drawn = False
        append_lines(self._metrics, [{"step": step} | metrics | {"step": step}])
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float | np.number)}
        for tracker in self._trackers:
            tracker.log(step, numbers)
        self._console.show(step, metrics)
        if time.monotonic() - self._plotted_at > SECONDS_BETWEEN_PLOTS:
            self._plot_on_the_way()

    @contextlib.contextmanager
    def logged_on_interruption(self, step, metrics):
        """If a signal or a UserError ends the block, write the metrics that `step` has without it."""
        try:
            yield
        except (KeyboardInterrupt, UserError):
            self.log(step, metrics)
            raise

    def status(self, text):
        """Shows the current phase of a step, on a live console only."""
        self._console.status(text)

    def completions(self, step, rows):
        """Writes the completions of a step to completions.jsonl.

        rows: an iterable, read in the background, of dicts with prompt (str or message list), completion,
        finish_reason, a value for each reward function under its name, reward, advantage, and the columns that rewards
        logged.
        """
        self._background.submit(self._write_completions, step, rows)

    def _write_completions(self, step, rows):
        rows = self._append("completions.jsonl", step, rows)
        if not self.log_completions:
            return
        rows = [as_json(row) for row in rows]
        _write_parquet(self.folder / "completions" / f"completions_{step:05d}.parquet", rows)
        if step % self.logging_steps == 0 or step == self.start_step + 1:
            self._console.print(completions_text(rows[: self.num_to_print]))

    def tokens(self, step, rows):
        """Writes the tokens of some completions that a step trained on to tokens.jsonl (runs/token_log.py).

        rows: an iterable of dicts, read in the background.
        """
        self._background.submit(self._append, "tokens.jsonl", step, rows)

    def _append(self, name, step, rows):
        """Append dicts to one of ROW_FILES: the lines, with their step, as a list of dicts."""
        rows = [{"step": step} | row | {"step": step} for row in rows]
        if name not in self._row_files:
            # Half of a surrogate pair has no UTF-8; with a backslash and digits it is valid JSON.
            self._row_files[name] = open(self.folder / name, "a", encoding="utf-8", errors="backslashreplace")
        append_lines(self._row_files[name], rows)
        return rows

    def flush(self):
        """Returns when everything is written. Raises OSError, naming the file, and UserError where it cannot be."""
        self._background.flush()

    def print(self, text):
        """Prints a line on stderr above the live line, after those of the steps so far."""
        self.flush()
        self._console.print(text)

    def draw(self):
        """Begins to draw curves.png: for a run that has more to do after its last step."""
        self._background.submit(self._plot_on_the_way)

    def _plot_on_the_way(self):
        """Draws curves.png; a picture that fails costs the run a line, not its end."""
        try:
            self._plot()
        except UserError as error:
            self._plotted_at = time.monotonic()
            self._console.print(f"curves.png was not drawn: {error}")

    def _plot(self):
        if read_metrics(self.folder):
            self._draw([self.folder], self.folder / "curves.png")
        self._plotted_at, self._is_drawn = time.monotonic(), True

    def close(self, draw=True, failed=False):
        """Ends the console line, closes the files and draws curves.png. failed: whether an error ends the run."""
        try:
            self._background.close()
        except (UserError, OSError):
            # On a full disk closing the files fails, too, without their names.
            with contextlib.suppress(UserError, OSError):
                self._end(draw, failed=True)
            raise
        self._end(draw, failed)

    def _end(self, draw, failed):
        self._console.close()
        self._metrics.close()
        for file in self._row_files.values():
            file.close()
        for tracker in self._trackers:
            tracker.close(failed)
        if draw and not self._is_drawn:
            self._plot()


def _write_parquet(path, rows):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return
    path.parent.mkdir(exist_ok=True)

    def column(name):
        values = [row.get(name) for row in rows]
        try:
            found = pyarrow.array(values)
            # Parquet has no object without a key, as the arguments of a call of a tool without any are.
            pyarrow.parquet.write_table(pyarrow.table({name: found[:0]}), pyarrow.BufferOutputStream())
            return found
        # Mixed types, text that has no UTF-8, or integers beyond 64 bits.
        except (pyarrow.ArrowException, UnicodeEncodeError, OverflowError):
            return pyarrow.array([json.dumps(value) for value in values])

    prompts = [row["prompt"] if isinstance(row["prompt"], str) else json.dumps(row["prompt"]) for row in rows]
    rows = [{**row, "prompt": prompt} for row, prompt in zip(rows, prompts, strict=True)]
    names = dict.fromkeys(name for row in rows for name in row)
    partial = path.with_name(f".{path.name}.partial")
    pyarrow.parquet.write_table(pyarrow.table({name: column(name) for name in names}), partial)
    os.replace(partial, path)
