"""Command line and output of the benches, without a GPU: which parts to run, and a line of Markdown for each result.

bench/all.py collects these lines.
"""

import argparse
import shlex
import sys

MARK = "| "


def row(what, value, bar="", command=None):
    """Print | what | command | value | bar |. bar: the target; command: by default this script and its arguments."""
    command = (command or shlex.join(["python", *sys.argv])).replace("|", "/")
    print(f"{MARK}{what} | `{command}` | {value} | {bar} |", flush=True)


def add_parts(parser, parts, default=None):
    """Add to the parser the argument `parts`, names of what to run; without any, `default` or all."""

    def known(name):
        if name not in parts:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(parts)}, got {name!r}")
        return name

    usual = list(default or parts)
    text = f"what to run, of {', '.join(parts)}; {', '.join(usual) if default else 'everything'} without it"
    parser.add_argument("parts", nargs="*", type=known, default=usual, metavar="part", help=text)


def rows_of(text):
    """The lines of a bench's output that `row` printed."""
    return [line for line in text.splitlines() if line.startswith(MARK) and line.endswith(" |")]
