"""What a run writes about itself: metrics.jsonl, completions.jsonl, config.toml, a live console line, curves.png.

metrics.jsonl has a JSON object a line and an optimizer step, with TRL's metric names; values that are not finite
numbers are null, so that every line is JSON. It is flushed at every step, and a resumed run cuts it back to the
checkpoint. TensorBoard files are written beside it when tensorboardX or tensorboard is installed.
"""

import contextlib
import errno
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from rlnumba.config import to_toml
from rlnumba.errors import UserError
from rlnumba.runtime import device

SECONDS_BETWEEN_PLOTS = 300.0  # a plot takes about a second
PACKAGES = ("numpy", "numba", "numba-cuda", "cupy-cuda12x", "cupy-cuda13x", "ml_dtypes", "safetensors", "tokenizers")


def make_folder(path):
    """Creates a folder that can be written to. Raises UserError naming it if that cannot be."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f"{path}: cannot be written to: {error.strerror}") from error


@contextlib.contextmanager
def replacing(path):
    """A text file that takes the place of `path` when the block ends well, and leaves nothing when it does not.

    Of a symbolic link, what it points to is replaced. Raises UserError naming the path if it cannot be written.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        # A device or a pipe, such as /dev/null, is written to, not replaced.
        try:
            with open(path, "w", encoding="utf-8") as file:
                yield file
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from error
        return
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        target = Path(os.path.realpath(path))
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
    done = False
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
        done = True
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        if not done:
            os.unlink(temporary)


def environment():
    """{"rlnumba": version, "git": commit, "device": ..., package: version, ...} of this process: dict of str."""
    facts = {"rlnumba": _version("rlnumba"), "git": _git_commit(), "device": device.describe()}
    facts["python"] = platform.python_version()
    return facts | {package: version for package in PACKAGES if (version := _version(package))}


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit():
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def write_config(run):
    """Writes the resolved run to output_dir/config.toml, under comments that name versions, commit and device."""
    make_folder(run.output_dir)
    header = [f"# {name} {' '.join(value.split())}\n" for name, value in environment().items() if value]
    with replacing(Path(run.output_dir) / "config.toml") as file:
        file.writelines([*header, "\n", to_toml(run)])


LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


def as_json(value):
    """A value as JSON has it: NumPy scalars and arrays become numbers and lists, what is not finite becomes None, and
    what JSON has no word for its str."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value if isinstance(value, str | int | None) else str(value)


def to_line(row):
    """A dict as one line of JSON, with its newline: str. Other characters that end a line for some readers
    (str.splitlines, JavaScript) are escaped."""
    return json.dumps(as_json(row), ensure_ascii=False, allow_nan=False).translate(LINE_ENDS) + "\n"


def cut_back(path, step):
    """Removes from a JSONL file the lines of later steps and a torn last one; a file that is not there is no error."""
    path = Path(path)
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as old, replacing(path) as new:
        for line in old:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict) and row.get("step", 0) <= step:
                new.write(line if line.endswith("\n") else line + "\n")


class MetricsWriter:
    """Takes the metrics and completions of a run, step by step; a context manager.

    output_dir: the run's folder. total_steps: optimizer steps of the whole run. start_step: steps already done, 0 or
    the checkpoint's: files are cut back to it. logging_steps: steps between two lines on a console that is not live.
    log_completions: whether to print completions (num_to_print of them, None: all) and write them as parquet.
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
        self._tensorboard = _Tensorboard(self.folder / "tensorboard", start_step)
        self._console = (_Live if sys.stderr.isatty() else _Lines)(total_steps, start_step, logging_steps)
        self._plotted_at = time.monotonic()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        # A picture that cannot be drawn is not to hide the error that ends the run.
        with contextlib.suppress(*[UserError] if kind else []):
            self.close(draw=kind is not KeyboardInterrupt)

    def log(self, step, metrics):
        """Writes the metrics of optimizer step `step` (1-based): {name: number}."""
        self._metrics.write(to_line({"step": step} | metrics | {"step": step}))
        self._metrics.flush()
        self._tensorboard.log(step, metrics)
        self._console.show(step, metrics)
        if time.monotonic() - self._plotted_at > SECONDS_BETWEEN_PLOTS:
            self._plot()

    def status(self, text):
        """Shows what is going on inside a step, on a live console only."""
        self._console.status(text)

    def completions(self, step, rows):
        """Writes the completions of a step to completions.jsonl.

        rows: dicts with prompt (str or message list), completion, finish_reason, a value for each reward function
        under its name, reward, advantage, and whatever rewards logged.
        """
        rows = [as_json({"step": step} | row | {"step": step}) for row in rows]
        if self._completions is None:
            # Half of a surrogate pair has no UTF-8; as a backslash and digits it is JSON again.
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
        """Prints a line on stderr without tearing the live line."""
        self._console.print(text)

    def _plot(self):
        plot([self.folder], self.folder / "curves.png")
        self._plotted_at = time.monotonic()

    def close(self, draw=True):
        """Ends the console line, closes the files and draws curves.png."""
        self._console.close()
        self._metrics.close()
        if self._completions is not None:
            self._completions.close()
        self._tensorboard.close()
        if draw and read_metrics(self.folder):
            self._plot()


def completions_text(rows):
    """Completions as people read them: str."""
    parts = []
    for row in rows:
        prompt = row["prompt"]
        if isinstance(prompt, list):
            prompt = "\n".join(f"{message['role']}: {message.get('content')}" for message in prompt)
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
        shown = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
        parts.append(f"--- step {row['step']}, {shown}\n{prompt}\n>>> {row['completion']}")
    return "\n".join(parts)


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
        except (pyarrow.ArrowException, UnicodeEncodeError):  # several types, or what has no UTF-8
            return pyarrow.array([json.dumps(value) for value in values])

    rows = [
        {**row, "prompt": row["prompt"] if isinstance(row["prompt"], str) else json.dumps(row["prompt"])}
        for row in rows
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    pyarrow.parquet.write_table(pyarrow.table({name: column(name) for name in names}), path)


class _Tensorboard:
    """A scalar writer of tensorboardX or of tensorboard itself, whichever is installed; neither is no error."""

    def __init__(self, folder, start_step):
        self.writer = None
        with contextlib.suppress(ImportError):
            from tensorboardX import SummaryWriter

            # Lines of steps that a resumed run does again disappear from the picture.
            self.writer = SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else None)
            return
        with contextlib.suppress(ImportError):
            from tensorboard.summary import Writer

            self.writer = Writer(str(folder))

    def log(self, step, metrics):
        if self.writer is None:
            return
        for name, value in metrics.items():
            if isinstance(value, int | float | np.number):
                self.writer.add_scalar(name, float(value), step)

    def close(self):
        if self.writer is not None:
            self.writer.close()


# What the console shows of the metrics, in this order.
SHOWN = {
    "loss": "loss",
    "reward": "reward",
    "mean_token_accuracy": "accuracy",
    "eval_loss": "eval loss",
    "eval_reward": "eval reward",
    "kl": "kl",
    "entropy": "entropy",
    "completions/mean_length": "length",
    "grad_norm": "grad norm",
    "learning_rate": "lr",
}


def _summary(metrics):
    pairs = ((name, metrics.get(key)) for key, name in SHOWN.items())
    return "  ".join(f"{name} {value:.3g}" for name, value in pairs if value is not None)


def _clock(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class _Lines:
    """A line every logging_steps steps, for logs and pipes."""

    def __init__(self, total_steps, start_step, logging_steps):
        self.total_steps, self.start_step, self.logging_steps = total_steps, start_step, logging_steps
        self.started = time.monotonic()

    def show(self, step, metrics):
        if step % self.logging_steps and step not in (self.start_step + 1, self.total_steps):
            return
        spent = time.monotonic() - self.started
        left = spent / max(step - self.start_step, 1) * (self.total_steps - step)
        self.print(f"step {step}/{self.total_steps}  {_summary(metrics)}  {_clock(spent)} < {_clock(left)}")

    def status(self, text):
        pass

    def print(self, text):
        print(text, file=sys.stderr, flush=True)

    def close(self):
        pass


class _Live:
    """One line that changes: bar, steps, time left, metrics, and what is going on."""

    def __init__(self, total_steps, start_step, logging_steps):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = [BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True)]
        columns += [TextColumn("{task.description}"), TextColumn("[dim]{task.fields[status]}")]
        self.progress = Progress(*columns, console=Console(stderr=True), speed_estimate_period=120)
        self.progress.start()
        self.task = self.progress.add_task("", total=total_steps, completed=start_step, status="")

    def show(self, step, metrics):
        self.progress.update(self.task, completed=step, description=_summary(metrics), status="")

    def status(self, text):
        self.progress.update(self.task, status=text)

    def print(self, text):
        self.progress.console.print(text, markup=False, highlight=False)

    def close(self):
        self.progress.stop()


# --- pictures ---------------------------------------------------------------------------------------------------------


def read_metrics(run_dir):
    """The lines of run_dir/metrics.jsonl: list of dicts. A torn last line is left out.

    Raises UserError if there is no such file, or a line of it is not a JSON object with a step.
    """
    path = Path(run_dir) / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    rows = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}:{number}: not JSON: {error.msg}") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UserError(f"{path}:{number}: must be an object with a step")
        rows.append(row)
    return rows


# (metric, title, whether a logarithmic axis suits it); the first six that a run has are drawn.
PANELS = (
    ("reward", "reward", False),
    ("eval_reward", "held-out reward", False),
    ("loss", "loss", False),
    ("eval_loss", "held-out loss", False),
    ("mean_token_accuracy", "token accuracy", False),
    ("completions/mean_length", "completion length, tokens", False),
    ("entropy", "entropy, nats", False),
    ("kl", "KL to the reference, nats", False),
    ("frac_reward_zero_std", "share of groups with equal rewards", False),
    ("grad_norm", "gradient norm", True),
    ("learning_rate", "learning rate", False),
)
# Drawn from 0 to 1 where they stay within.
SHARES = ("reward", "eval_reward", "mean_token_accuracy", "frac_reward_zero_std")
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito, for all eyes


def smooth(values, window):
    """Centred moving average of a (n,) array over `window` (odd) neighbours, fewer at the ends, NaN left out."""
    known = np.isfinite(values)
    kernel = np.ones(window)
    total = np.convolve(np.where(known, values, 0.0), kernel, mode="full")
    count = np.convolve(known.astype(float), kernel, mode="full")
    half = window // 2
    with np.errstate(invalid="ignore"):
        return (total / np.where(count > 0, count, np.nan))[half : half + len(values)]


def _series(rows, name):
    """(steps, values) of one metric, NaN for null: two float arrays."""
    pairs = [(row["step"], row[name]) for row in rows if name in row]
    steps = np.array([step for step, _ in pairs], float)
    return steps, np.array([np.nan if value is None else value for _, value in pairs], float)


def plot(run_dirs, output):
    """Draws the metrics of one or several runs to a PNG: raw values light, a moving average over them.

    run_dirs: folders with a metrics.jsonl. output: the picture's path. Raises UserError naming a missing or damaged
    file, or an output that cannot be written.
    """
    runs = [(Path(folder).resolve().name, read_metrics(folder)) for folder in run_dirs]
    panels = [p for p in PANELS if any(np.isfinite(_series(rows, p[0])[1]).any() for _, rows in runs)][:6]
    if not panels:
        raise UserError(f"{run_dirs[0]}: metrics.jsonl has nothing to draw yet")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = min(len(panels), 3)
    lines = -(-len(panels) // columns)
    with rc_context({"font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold"}):
        figure = Figure(figsize=(4.6 * columns, 3.1 * lines + 0.5), layout="constrained")
        grid = figure.subplots(lines, columns, squeeze=False).ravel()
        for axis in grid[len(panels) :]:
            axis.set_visible(False)
        for axis, (name, title, logarithmic) in zip(grid, panels, strict=False):
            _draw(axis, runs, name, logarithmic)
            axis.set_title(title, loc="left")
            axis.set_xlabel("step")
        if len(runs) > 1:
            handles, labels = grid[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside upper left", ncols=min(len(runs), 4), frameon=False)
        else:
            figure.suptitle(runs[0][0], x=0.01, ha="left", fontsize=13)
        output = Path(output)
        temporary = output.with_name(f".{output.name}.partial")
        try:
            figure.savefig(temporary, dpi=130, format="png")
            os.replace(temporary, output)
        except OSError as error:
            raise UserError(f"{output}: cannot be written: {error.strerror}") from error


def _draw(axis, runs, name, logarithmic):
    every = np.concatenate([_series(rows, name)[1] for _, rows in runs])
    logarithmic = logarithmic and np.nanmax(every) > 0
    if logarithmic:
        axis.set_yscale("log")
    for i, (label, rows) in enumerate(runs):
        color = COLORS[i % len(COLORS)]
        steps, values = _series(rows, name)
        if logarithmic:
            values = np.where(values > 0, values, np.nan)
        if name == "reward" and len(runs) == 1:
            spread_steps, spread = _series(rows, "reward_std")
            if np.array_equal(steps, spread_steps):
                axis.fill_between(steps, values - spread, values + spread, color=color, alpha=0.12, linewidth=0)
        # A twelfth of the run: enough to see a trend through the noise of a batch.
        window = 2 * min(len(values) // 25, 25) + 1
        noisy = window > 1
        axis.plot(
            steps, values, color=color, alpha=0.3 if noisy else 1.0, linewidth=1.0 if noisy else 1.6,
            marker="o" if len(values) < 12 else None, markersize=3, label=None if noisy else label,
        )  # fmt: skip
        if noisy:
            trend = np.exp(smooth(np.log(values), window)) if logarithmic else smooth(values, window)
            axis.plot(steps, trend, color=color, linewidth=2.0, label=label)
    if name in SHARES and np.nanmin(every) >= 0 and np.nanmax(every) <= 1:
        axis.set_ylim(-0.03, 1.03)
    axis.grid(True, color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.01)
