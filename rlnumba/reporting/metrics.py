"""The metrics of a run, step by step: metrics.jsonl, completions.jsonl, TensorBoard, a console line, curves.png.

metrics.jsonl has one JSON object per optimizer step, with TRL's metric names; values that are not finite numbers are
null, so that every line is JSON. It is flushed at every step, and a resumed run truncates it to the checkpoint's step.
TensorBoard files are written beside it when tensorboardX or tensorboard is installed.
"""

import contextlib
import json
import sys
import time
from pathlib import Path

import numpy as np

from rlnumba.errors import UserError
from rlnumba.reporting.console import LineConsole, LiveConsole, completions_text
from rlnumba.reporting.files import as_json, cut_back, make_folder, read_metrics, to_line
from rlnumba.reporting.plots import plot

SECONDS_BETWEEN_PLOTS = 300.0  # a plot takes about a second


class MetricsWriter:
    """Writes the metrics and completions of a run, step by step; a context manager.

    total_steps: optimizer steps of the whole run. start_step: steps already done, 0 or the checkpoint's: files are
    truncated to it. logging_steps: steps between two lines on a console that is not live. log_completions: whether to
    print completions (num_to_print of them, None: all) and write them as parquet.
    """

    def __init__(
        self, output_dir, total_steps, start_step=0, logging_steps=10, log_completions=False, num_to_print=None
    ):
        self.folder = Path(output_dir)
        self.total_steps, self.start_step, self.logging_steps = total_steps, start_step, logging_steps
        self.log_completions, self.num_to_print = log_completions, num_to_print
        make_folder(self.folder)
        for name in ("metrics.jsonl", "completions.jsonl"):
            cut_back(self.folder / name, start_step)
        for path in (self.folder / "completions").glob("completions_*.parquet"):
            if int(path.stem.split("_")[1]) > start_step:
                path.unlink()
        self._metrics = open(self.folder / "metrics.jsonl", "a", encoding="utf-8")
        self._completions = None
        self._tensorboard = _tensorboard_writer(self.folder / "tensorboard", start_step)
        self._console = (LiveConsole if sys.stderr.isatty() else LineConsole)(total_steps, start_step, logging_steps)
        self._plotted_at = time.monotonic()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        # A failing plot must not hide the error that ends the run.
        with contextlib.suppress(*[UserError] if kind else []):
            self.close(draw=kind is not KeyboardInterrupt)

    def log(self, step, metrics):
        """Writes the metrics of optimizer step `step` (1-based): {name: number}."""
        self._metrics.write(to_line({"step": step} | metrics | {"step": step}))
        self._metrics.flush()
        if self._tensorboard:
            for name, value in metrics.items():
                if isinstance(value, int | float | np.number):
                    self._tensorboard.add_scalar(name, float(value), step)
        self._console.show(step, metrics)
        if time.monotonic() - self._plotted_at > SECONDS_BETWEEN_PLOTS:
            self._plot()

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

        rows: dicts with prompt (str or message list), completion, finish_reason, a value for each reward function
        under its name, reward, advantage, and the columns that rewards logged.
        """
        rows = [as_json({"step": step} | row | {"step": step}) for row in rows]
        if self._completions is None:
            # Half of a surrogate pair has no UTF-8; with a backslash and digits it is valid JSON.
            path = self.folder / "completions.jsonl"
            self._completions = open(path, "a", encoding="utf-8", errors="backslashreplace")
        self._completions.writelines(to_line(row) for row in rows)
        self._completions.flush()
        if not self.log_completions:
            return
        _write_parquet(self.folder / "completions" / f"completions_{step:05d}.parquet", rows)
        if step % self.logging_steps == 0 or step == self.start_step + 1:
            self._console.print(completions_text(rows[: self.num_to_print]))

    def print(self, text):
        """Prints a line on stderr above the live line."""
        self._console.print(text)

    def _plot(self):
        plot([self.folder], self.folder / "curves.png")
        self._plotted_at = time.monotonic()

    def close(self, draw=True):
        """Ends the console line, closes the files and draws curves.png."""
        self._console.close()
        self._metrics.close()
        for writer in (self._completions, self._tensorboard):
            if writer is not None:
                writer.close()
        if draw and read_metrics(self.folder):
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
            return pyarrow.array(values)
        except (pyarrow.ArrowException, UnicodeEncodeError):  # mixed types, or text that has no UTF-8
            return pyarrow.array([json.dumps(value) for value in values])

    prompts = [row["prompt"] if isinstance(row["prompt"], str) else json.dumps(row["prompt"]) for row in rows]
    rows = [{**row, "prompt": prompt} for row, prompt in zip(rows, prompts, strict=True)]
    names = dict.fromkeys(name for row in rows for name in row)
    pyarrow.parquet.write_table(pyarrow.table({name: column(name) for name in names}), path)


def _tensorboard_writer(folder, start_step):
    """A scalar writer of tensorboardX, or of tensorboard itself; None where neither is installed."""
    with contextlib.suppress(ImportError):
        from tensorboardX import SummaryWriter

        # TensorBoard hides the former values of steps that a resumed run repeats.
        return SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else None)
    with contextlib.suppress(ImportError):
        from tensorboard.summary import Writer

        return Writer(str(folder))
    return None
