"""The metrics of a run as columns, read on as metrics.jsonl grows."""

import os
import threading
from array import array

import numpy as np

from rlnumba.serve.watch.step_lines import parse_row

CHUNK_BYTES = 1 << 22


class MetricColumns:
    """{name: (steps, values)} of a metrics.jsonl, which may be missing, grow, and be replaced when a run is resumed.

    version: changes with every change of what was read. latest: the newest value of every metric.
    """

    def __init__(self, path):
        self.path, self._lock = path, threading.Lock()
        self._reads = 0
        self._forget()

    def _forget(self):
        self._inode, self._offset, self._columns, self.latest = None, 0, {}, {}
        self.last_step, self.rows = 0, 0

    def refresh(self):
        """Read what was written since the last call."""
        with self._lock:
            try:
                with open(self.path, "rb") as file:
                    self._read(file)
            except (FileNotFoundError, NotADirectoryError):
                if self._inode is not None:
                    self._forget()
                    self._reads += 1

    @property
    def version(self):
        return f"{self._inode}-{self._reads}"

    def _read(self, file):
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._offset or not self._follows_line(file):
            self._forget()
            self._inode = status.st_ino
            self._reads += 1
        file.seek(self._offset)
        rest = b""
        while chunk := file.read(CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._offset += len(line) + 1
                self._add(line)
            self._reads += bool(lines)

    def _follows_line(self, file):
        """Whether the byte before the place that was read up to is still a newline: bool."""
        if self._offset == 0:
            return True
        file.seek(self._offset - 1)
        return file.read(1) == b"\n"

    def _add(self, line):
        row = parse_row(line)
        if row is None:
            return
        step = row["step"]
        self.last_step, self.rows = max(self.last_step, step), self.rows + 1
        for name, value in row.items():
            if name == "step" or isinstance(value, bool) or not isinstance(value, int | float | None):
                continue
            steps, values = self._columns.setdefault(name, (array("q"), array("d")))
            steps.append(step)
            try:
                values.append(float("nan") if value is None else float(value))
            except OverflowError:  # an integer of hundreds of digits
                values.append(float("inf"))
            self.latest[name] = values[-1]

    def names(self):
        """The names of all metrics, in the order in which they came: list."""
        with self._lock:
            return list(self._columns)

    def curve(self, name, points):
        """{"steps", "values", "per_point"} of a metric, as lists of at most `points` numbers, NaN as None.

        Of a longer curve each point is the mean of `per_point` steps, at the last of them.
        """
        with self._lock:
            found = self._columns.get(name)
            if found is None:
                return {"steps": [], "values": [], "per_point": 1}
            steps, values = np.array(found[0]), np.array(found[1])
        per_point = max(-(-len(steps) // points), 1)
        if per_point > 1:
            firsts = np.arange(0, len(steps), per_point)
            known = np.isfinite(values)
            counts = np.add.reduceat(known.astype(float), firsts)
            sums = np.add.reduceat(np.where(known, values, 0.0), firsts)
            values = np.divide(sums, counts, out=np.full(len(firsts), np.nan), where=counts > 0)
            steps = steps[np.minimum(firsts + per_point, len(steps)) - 1]
        of_json = [value if np.isfinite(value) else None for value in values.tolist()]
        return {"steps": steps.tolist(), "values": of_json, "per_point": per_point}
