"""The progress line at several widths, and lines that stay whole where several threads print."""

import io
import re
import sys
import threading

import pytest
from rich.console import Console

from rlnumba.reporting.console import FIRST_STEP, LineConsole, LiveConsole, fitting

METRICS = {
    "loss": -1.03e-08,
    "reward": 0.3364,
    "entropy": 0.2,
    "completions/mean_length": 5.94,
    "grad_norm": 0.1234,
    "learning_rate": 1.25e-6,
}
FIELDS = ["loss -1.03e-08", "reward 0.336", "entropy 0.2", "length 5.94", "grad norm 0.123", "lr 1.25e-06"]
STEPS_AND_TIME = re.compile(r".{20} +(\d+)/(\d+) (?:\d+:\d\d:\d\d|-:--:--) ")
STATUS = "128 of 128 completions"


def lines_of(width, total, events):
    """What the line is after each of the events, functions of a LiveConsole."""
    console = Console(width=width, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    live = LiveConsole(total, 0, 10, console)
    lines = []
    for event in (lambda live: None, *events):
        event(live)
        plain = Console(width=width, file=io.StringIO())
        plain.print(live.progress.get_renderable())
        lines.append(plain.file.getvalue().rstrip("\n"))
    live.close()
    return lines


@pytest.mark.parametrize("total", [12, 15000])
@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_step_and_time_keep_their_width_and_metrics_give_way(width, total):
    events = [lambda live: live.status(STATUS)]
    for step in range(1, 13):
        events += [lambda live, step=step: live.show(step, METRICS), lambda live: live.status(STATUS)]
    lines = lines_of(width, total, events)
    for index, line in enumerate(lines):
        assert "\n" not in line and "…" not in line and len(line) <= width
        found = STEPS_AND_TIME.match(line)
        assert found and (int(found[1]), int(found[2])) == (index // 2, total), line
        room = width - found.end()
        rest = line[found.end() :].rstrip()
        fields = [FIRST_STEP] if index < 2 else FIELDS
        if index % 2 and room >= len(fields[0]) + 2 + len(STATUS):
            assert rest.endswith(f"  {STATUS}")
            rest, room = rest.removesuffix(f"  {STATUS}"), room - 2 - len(STATUS)
        # Whole fields from the first one on, as many as there is room for.
        shown = rest.split("  ")
        assert shown == fields[: len(shown)], line
        assert len(shown) == len(fields) or len("  ".join(fields[: len(shown) + 1])) > room, line
    # Something is left of the metrics at any width, and everything at 160.
    assert "loss -1.03e-08" in lines[-1] and (width < 160 or "lr 1.25e-06" in lines[-1])
    assert width < 80 or STATUS in lines[-1]


def test_fields_are_left_out_whole():
    assert fitting(["ab", "cd", "ef"], "", 9) == ("ab  cd", "")
    assert fitting(["ab", "cd", "ef"], "", 10) == ("ab  cd  ef", "")
    assert fitting(["ab", "cd", "ef"], "xyz", 11) == ("ab  cd", "  xyz")
    assert fitting(["ab", "cd", "ef"], "xyz", 7) == ("ab", "  xyz")
    # Where the phase has no room beside the first field, it goes first.
    assert fitting(["ab", "cd", "ef"], "xyz", 6) == ("ab  cd", "")
    assert fitting(["ab", "cd", "ef"], "", 1) == ("", "")
    assert fitting([], "xyz", 3) == ("", "xyz") and fitting([], "xyz", 2) == ("", "")


class Writes(io.StringIO):
    """A stream that keeps what each write was."""

    def __init__(self):
        super().__init__()
        self.parts = []

    def write(self, text):
        self.parts.append((threading.get_ident(), text))
        return super().write(text)


def test_a_line_is_one_write(monkeypatch):
    stream = Writes()
    monkeypatch.setattr(sys, "stderr", stream)
    LineConsole(2, 0, 1).show(1, METRICS)
    ((_, text),) = stream.parts
    assert text.startswith("step 1/2  loss -1.03e-08  reward 0.336  ") and text.endswith("\n")
