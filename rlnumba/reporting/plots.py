"""Curves of a run's metrics as a PNG; the only module that imports matplotlib, when it draws."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from rlnumba.config.keys import LARGEST_FLOAT32
from rlnumba.errors import UserError
from rlnumba.reporting.files import names_of, read_metrics

# (metric, title, whether its axis is logarithmic); the first MOST_PANELS that a run has are drawn.
PANELS = (
    ("reward", "reward", False),
    ("eval_reward", "held-out reward", False),
    ("loss", "loss", False),
    ("eval_loss", "held-out loss", False),
    ("rewards/margins", "chosen less rejected reward", False),
    ("rewards/accuracies", "share of pairs in the right order", False),
    ("mean_token_accuracy", "token accuracy", False),
    ("accuracy", "share of pairs in order", False),
    ("eval_accuracy", "held-out pairs in order", False),
    ("margin", "chosen above rejected reward", False),
    ("completions/mean_length", "completion length, tokens", False),
    ("entropy", "entropy, nats", False),
    ("kl", "KL to the reference, nats", False),
    ("frac_reward_zero_std", "share of groups with equal rewards", False),
    ("grad_norm", "gradient norm", True),
    ("learning_rate", "learning rate", False),
)
MOST_PANELS = 6
# Panels of an asynchronous run, all drawn beside the others.
ASYNC_PANELS = (
    ("token_staleness/mean", "age of a token's weights, steps", False),
    ("wait_for_batch_s", "wait for completions, s", False),
    ("infer_utilization", "share of the time that inference is busy", False),
)

# Drawn with an axis from 0 to 1 if all values are in it.
SHARES = (
    *("reward", "eval_reward", "rewards/accuracies", "mean_token_accuracy", "accuracy", "eval_accuracy"),
    *("frac_reward_zero_std", "infer_utilization"),
)

# Between panels, as shares of a panel: room for the numbers at its left, and for its label and the next one's title.
SPACES = {"wspace": 0.24, "hspace": 0.36}

# Okabe and Ito: distinguishable with colour blindness.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def smooth(values, window):
    """Centred moving average of a (n,) array over `window` (odd) neighbours, fewer at the ends, NaN left out."""
    finite, half = np.isfinite(values), window // 2
    total, count = (np.convolve(x, np.ones(window), mode="full") for x in (np.where(finite, values, 0.0), finite * 1.0))
    with np.errstate(invalid="ignore"):
        return (total / np.where(count > 0, count, np.nan))[half : half + len(values)]


def _series(rows, name):
    """(steps, values) of one metric, NaN for null and for what is no number, or none that float32 holds, as a picture
    needs: two float arrays."""
    pairs = [(row["step"], row[name]) for row in rows if name in row]
    steps = np.array([step for step, _ in pairs], float)
    values = [
        value if isinstance(value, int | float) and abs(value) < LARGEST_FLOAT32 else np.nan for _, value in pairs
    ]
    return steps, np.array(values, float)


def plot_apart(run_dirs, output):
    """plot in a process of its own: threads of this one that launch kernels need not wait for Python to draw."""
    command = [sys.executable, "-m", "rlnumba.reporting.plots", *map(str, run_dirs), str(output)]
    # In a session of its own, Ctrl-C in a terminal does not end it.
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    drawn = subprocess.run(command, **streams, text=True, start_new_session=True)
    if drawn.returncode:
        lines = drawn.stderr.splitlines() or [f"drawing ended with exit code {drawn.returncode}"]
        raise UserError(lines[-1])


def plot(run_dirs, output):
    """Draws the metrics of one or several run folders to a PNG: raw values light, and their moving average.

    Raises UserError naming a missing or damaged file, or an output that cannot be written.
    """
    names = names_of([Path(folder).resolve() for folder in run_dirs])
    runs = [(name, read_metrics(folder)) for name, folder in zip(names, run_dirs, strict=True)]

    def found(panels):
        return [p for p in panels if any(np.isfinite(_series(rows, p[0])[1]).any() for _, rows in runs)]

    panels = found(PANELS)[:MOST_PANELS] + found(ASYNC_PANELS)
    if not panels:
        raise UserError(f"{run_dirs[0]}: metrics.jsonl has nothing to draw yet")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = min(len(panels), 3)
    lines = -(-len(panels) // columns)
    width, height = 4.6 * columns, 3.1 * lines + 0.5
    # Fixed, in inches: a layout that matplotlib finds takes as long as the drawing.
    margins = {"left": 0.75 / width, "right": 1 - 0.15 / width, "bottom": 0.55 / height, "top": 1 - 0.75 / height}
    with rc_context({"font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold"}):
        figure = Figure(figsize=(width, height))
        grid = figure.subplots(lines, columns, squeeze=False, gridspec_kw=margins | SPACES).ravel()
        for axis in grid[len(panels) :]:
            axis.set_visible(False)
        for axis, (name, title, logarithmic) in zip(grid, panels, strict=False):
            _draw(axis, runs, name, logarithmic)
            axis.set_title(title, loc="left")
            axis.set_xlabel("step")
        if len(runs) > 1:
            handles, labels = grid[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="upper left", ncols=min(len(runs), 4), frameon=False)
        else:
            figure.suptitle(runs[0][0], x=0.01, ha="left", fontsize=13)
        output = Path(output)
        temporary = output.with_name(f".{output.name}.partial")
        try:
            figure.savefig(temporary, dpi=130, format="png")
            os.replace(temporary, output)
        except OSError as error:
            raise UserError(f"{output}: cannot be written: {error.strerror}") from error
        finally:
            # What is left of it on a full disk.
            with contextlib.suppress(OSError):
                temporary.unlink()


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
        # A twelfth of the run smooths the noise of single batches.
        window = 2 * min(len(values) // 25, 25) + 1
        noisy = window > 1
        style = {"alpha": 0.3, "linewidth": 1.0} if noisy else {"linewidth": 1.6, "label": label}
        axis.plot(steps, values, color=color, marker="o" if len(values) < 12 else None, markersize=3, **style)
        if noisy:
            trend = np.exp(smooth(np.log(values), window)) if logarithmic else smooth(values, window)
            axis.plot(steps, trend, color=color, linewidth=2.0, label=label)
    if name in SHARES and np.nanmin(every) >= 0 and np.nanmax(every) <= 1:
        axis.set_ylim(-0.03, 1.03)
    axis.grid(True, color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.01)


if __name__ == "__main__":
    *run_dirs, output = map(Path, sys.argv[1:])
    try:
        plot(run_dirs, output)
    except UserError as error:
        sys.exit(str(error))
