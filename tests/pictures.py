"""The curves that hundreds of short runs end with, drawn once for each set of metrics.

A picture takes half a second, more than many of the runs. Drawing may fail for what a run has logged, and that depends
on the names of its metrics and on which have a value: each such combination is drawn, and copied to later runs.
"""

import functools
import hashlib
import os
import shutil

from rlnumba.reporting.files import read_metrics
from rlnumba.reporting.plots import plot


def drawn_once(folder):
    """A plot(run_dirs, output) that keeps its pictures in `folder`, which processes share."""
    return functools.partial(_plot, folder)


def _plot(folder, run_dirs, output):
    rows = [row for run_dir in run_dirs for row in read_metrics(run_dir)]
    drawn = [min(len(rows), 2), sorted({(name, value is None) for row in rows for name, value in row.items()})]
    kept = folder / f"{hashlib.sha256(repr(drawn).encode()).hexdigest()}.png"
    if kept.exists():
        shutil.copyfile(kept, output)
        return
    plot(run_dirs, output)
    partial = kept.with_suffix(f".{os.getpid()}")
    shutil.copyfile(output, partial)
    os.replace(partial, kept)
