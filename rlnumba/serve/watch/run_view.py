"""The folder of a run as the page sees it."""

import contextlib
import os
import re
import socket
import threading
from pathlib import Path

from rlnumba.errors import ConfigError, missing
from rlnumba.reporting import folder_lock
from rlnumba.reporting.files import UNFINISHED, names_of
from rlnumba.serve.watch.metrics import MetricColumns
from rlnumba.serve.watch.step_lines import Span, StepLines

# Bytes of the beginning of config.toml in which its comments are looked for.
COMMENT_BYTES = 1 << 14


# Folders in which a run keeps an earlier one (runs/run_folder.py).
SET_ASIDE = re.compile(r"earlier-\d+")


def find_runs(folders):
    """The folders of runs among `folders` and, where one has no metrics.jsonl, among the folders in it: list of Path.

    What a run has set aside is none of these. Raises ConfigError naming a folder that is none and has none.
    """
    found = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ConfigError(f"RUN_DIR: {missing(str(folder), 'folder')}")
        if (folder / "metrics.jsonl").is_file():
            found.append(folder)
            continue
        found_inside = sorted(path.parent for path in folder.glob("*/metrics.jsonl") if path.is_file())
        inside = [path for path in found_inside if not SET_ASIDE.fullmatch(path.name)]
        if not inside:
            raise ConfigError(f"RUN_DIR: {folder} has no metrics.jsonl, nor has a folder in it")
        found += inside
    return list(dict.fromkeys(Path(os.path.abspath(path)) for path in found))


def named(paths):
    """{name: path} of the folders of runs."""
    return dict(zip(names_of(paths), paths, strict=True))


class Runs:
    """The runs in folders: {name: RunView} `by_name`, to which runs that begin later are added.

    Raises ConfigError for a folder without a run.
    """

    def __init__(self, folders):
        self.folders, self.by_name = list(folders), {}
        self._lock, self._views = threading.Lock(), {}
        self._name(find_runs(self.folders))

    def refresh(self):
        """Look for further runs. One whose files are being moved or written anew stays."""
        with self._lock:
            known = [path for path in self._views if path.is_dir()]
            for folder in self.folders:
                with contextlib.suppress(ConfigError):
                    known += find_runs([folder])
            self._name(list(dict.fromkeys(known)) or list(self._views))

    def _name(self, paths):
        views = {path: self._views.get(path) or RunView(path) for path in paths}
        by_name = {}
        for name, path in named(paths).items():
            by_name[name], views[path].name = views[path], name
        self._views, self.by_name = views, by_name


class RunView:
    """A run's folder, read only. path: absolute. name: by default the folder's."""

    def __init__(self, path):
        self.name, self.path = path.name, path
        self.metrics = MetricColumns(path / "metrics.jsonl")

    def described(self):
        """The entry of /api/runs: dict."""
        self.metrics.refresh()
        return {
            "name": self.name, "path": str(self.path), "trainer": self.trainer(), "steps": self.metrics.last_step,
            "finished": self.state() == "finished",
        }  # fmt: skip

    def trainer(self):
        """The trainer that config.toml names in its first comments: str, None if it does not."""
        with contextlib.suppress(OSError), open(self.path / "config.toml", encoding="utf-8", errors="replace") as file:
            for line in file.read(COMMENT_BYTES).splitlines():
                words = line.split()
                if words[:2] == ["#", "trainer"] and len(words) == 3:
                    return words[2]
                if line and not line.startswith("#"):
                    break
        return None

    def state(self):
        """ "running", "finished" with a final model, or "stopped", also where that is of an earlier end: str."""
        if self._is_owned():
            return "running"
        has_ended = (self.path / "final").is_dir() and not (self.path / UNFINISHED).exists()
        return "finished" if has_ended else "stopped"

    def _is_owned(self):
        """Whether run.lock names a process that may be there: any of another host may be. The lock is not tried, which
        could keep a run from taking it."""
        try:
            owner = (self.path / folder_lock.NAME).read_text(errors="replace").strip()
        except OSError:
            return False
        pid, _, host = owner.partition("@")
        if host != socket.gethostname() or not pid.isdigit():
            return bool(host)
        try:
            os.kill(int(pid), 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            return True
        return True

    def metric_rows(self, after):
        """The lines of metrics.jsonl of steps above `after`: list of dicts."""
        with StepLines(self.path / "metrics.jsonl") as lines:
            begin = 0 if after < 0 else lines.first_of(after + 1)
            return [row for row in lines.rows(Span(begin, lines.end)) if row["step"] > after]

    def completions(self, step, offset, limit):
        """(number of lines of completions.jsonl of a step, those from `offset` on, at most `limit`)."""
        with StepLines(self.path / "completions.jsonl") as lines:
            span = lines.of_steps(step, step)
            return lines.count(span), lines.rows(span, offset, limit)

    def steps(self, step=None):
        """The steps of completions.jsonl around one, by default the last: dict of first, last, at (the step, or the
        last one before it), before and after, each an int or None."""
        with StepLines(self.path / "completions.jsonl") as lines:
            first, last = lines.step_at(0), lines.step_before(lines.end)
            at = last
            if step is not None and last is not None:
                at = lines.step_before(lines.first_of(step + 1))
                at = first if at is None else at
            before = after = None
            if at is not None:
                span = lines.of_steps(at, at)
                before, after = lines.step_before(span.begin), lines.step_at(span.end)
        return {"first": first, "last": last, "at": at, "before": before, "after": after}

    def tokens(self, step, limit):
        """The lines of tokens.jsonl of the completions of a step, at most `limit`: list of dicts.

        Completions are trained on at their own step and, where a generation lasts several steps, at later ones, until
        the next generation.
        """
        after = self.steps(step)["after"]
        with StepLines(self.path / "tokens.jsonl") as lines:
            span = lines.of_steps(step, step if after is None else after - 1)
            if after is None:
                span = span._replace(end=lines.end)
            return lines.rows(span, 0, limit)
