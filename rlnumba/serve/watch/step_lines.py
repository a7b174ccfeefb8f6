"""The lines of a step in a JSONL file of any size, whose lines have a step that does not decrease.

    with StepLines("runs/a/completions.jsonl") as lines:
        found = lines.of_steps(7, 7)         # bytes [begin, end), after some 20 reads of one line each
        lines.count(found), lines.rows(found, offset=0, limit=32)

The file may grow, and may be replaced or moved meanwhile: it is opened once for each question, so that an answer comes
from one file, and a last line without its newline is no line yet.
"""

import json
import os
import re
from typing import NamedTuple

# A step is the first key of a line that a run writes; of other lines all is parsed.
STEP = re.compile(rb'\s*\{\s*"step"\s*:\s*(\d+)\s*[,}]')
PREFIX_BYTES = 64
BLOCK_BYTES = 1 << 16


class Span(NamedTuple):
    """Whole lines of a file, its bytes [begin, end)."""

    begin: int
    end: int


def parse_row(line):
    """A line as a dict with an int `step`, or None. NaN and infinities, which JSON does not have, become null."""
    try:
        row = json.loads(line.decode("utf-8", "replace"), parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("step"), int) and not isinstance(row["step"], bool)
    return row if is_row else None


class StepLines:
    """An open file; a missing one is empty. A context manager."""

    def __init__(self, path):
        try:
            self.file = open(path, "rb")  # noqa: SIM115, closed by __exit__
        except (FileNotFoundError, NotADirectoryError):
            self.file = open(os.devnull, "rb")
        self.end = self._end_of_lines()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.file.close()

    def _end_of_lines(self):
        """The number of bytes up to the last newline: int."""
        end = self.file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(end - BLOCK_BYTES, 0)
            self.file.seek(begin)
            found = self.file.read(end - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
        return 0

    def _line_at(self, offset):
        """(begin, step) of the first line with a step that begins at or after a byte, None where there is none."""
        begin = offset
        if offset > 0:
            self.file.seek(offset - 1)
            begin = offset - 1 + len(self.file.readline())
        while begin < self.end:
            self.file.seek(begin)
            found = STEP.match(self.file.read(PREFIX_BYTES))
            if found:
                return begin, int(found[1])
            self.file.seek(begin)
            line = self.file.readline()
            row = parse_row(line)
            if row is not None:
                return begin, row["step"]
            begin += len(line)
        return None

    def first_of(self, step):
        """The byte where the first line of this step or a later one begins: int, the end where there is none."""
        low, high = 0, self.end
        # Lines that begin before `low` are of earlier steps; one that begins at `high` or later is not.
        while high - low > 1:
            middle = (low + high) // 2
            found = self._line_at(middle)
            if found is None or found[0] >= high or found[1] >= step:
                high = middle
            else:
                low = found[0] + 1
        found = self._line_at(low)
        if found is not None and found[1] < step:
            found = self._line_at(found[0] + 1)
        return self.end if found is None else found[0]

    def of_steps(self, first, last):
        """The Span of the lines of steps [first, last]."""
        return Span(self.first_of(first), self.first_of(last + 1))

    def step_at(self, offset):
        """The step of the first line that begins at or after a byte: int or None."""
        found = self._line_at(offset)
        return None if found is None else found[1]

    def step_before(self, offset):
        """The step of the last line that ends at or before the beginning of a line: int or None."""
        end = offset
        while end > 0:
            begin, newline = end - 1, -1
            while newline < 0 and begin > 0:
                block = max(begin - BLOCK_BYTES, 0)
                self.file.seek(block)
                newline = self.file.read(begin - block).rfind(b"\n")
                begin = block + newline + 1 if newline >= 0 else block
            self.file.seek(begin)
            row = parse_row(self.file.read(end - begin))
            if row is not None:
                return row["step"]
            end = begin
        return None

    def lines(self, span):
        """Iterate over the lines of a Span, bytes without blank ones."""
        self.file.seek(span.begin)
        left = span.end - span.begin
        while left > 0:
            line = self.file.readline()
            left -= len(line)
            if line.strip():
                yield line

    def count(self, span):
        """The number of lines of a Span: int."""
        self.file.seek(span.begin)
        left, found = span.end - span.begin, 0
        while left > 0:
            block = self.file.read(min(left, 1 << 20))
            left -= len(block)
            found += block.count(b"\n")
        return found

    def rows(self, span, offset=0, limit=None):
        """Lines [offset, offset + limit) of a Span as dicts: list. Lines that are none are left out."""
        rows = []
        for number, line in enumerate(self.lines(span)):
            if limit is not None and number >= offset + limit:
                break
            if number >= offset and (row := parse_row(line)) is not None:
                rows.append(row)
        return rows
