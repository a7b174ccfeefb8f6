"""Lines on stderr about a command or a run, such as what it reads and where its results are."""

import sys

_is_silent = False


def silence():
    """Let `log` print nothing from now on: on other ranks than the first."""
    global _is_silent
    _is_silent = True


def log(text):
    """Print a line on stderr, of several ranks on the first alone."""
    if not _is_silent:
        print(f"rlnumba: {text}", file=sys.stderr, flush=True)


def os_problem(error):
    """An OSError in the words of a line: its file, where it names one, and the reason."""
    file = "" if error.filename is None else f"{error.filename}: "
    return f"{file}{error.strerror or error}"
