"""Errors that a user can cause, each with its exit code of the command line.

Every message is one line that names the file, key or value at fault. The command line prints it as
`rlnumba: <message>` without a traceback. Programming errors (a wrong shape handed to an operator) are
ValueError or TypeError instead: they are bugs, not input.
"""

import os


class UserError(Exception):
    """A missing or damaged file, bad data, a reward that fails: exit code 1."""

    exit_code = 1


class MissingModel(UserError):
    """A model's folder that is not there, nor on the hub: exit code 1. `serve` makes a ConfigError of it."""


class ConfigError(UserError):
    """A wrong option, key or value typed by the user: exit code 2."""

    exit_code = 2


class MissingKey(ConfigError):
    """A key of a run that must be set and is not. key: its name, "section.name"; why: the end of a sentence, or ""."""

    def __init__(self, key, why=""):
        super().__init__(f"missing key {key}{why}")
        self.key = key


class DeviceError(UserError):
    """A device that is not available, or that fails: exit code 1. The message names the remedy."""


class CommunicationError(UserError):
    """Ranks that do not meet in an operation: one has ended, does not answer, or is in another one: exit code 1.

    rank: of the one that has ended, if that is the reason.
    """

    def __init__(self, message, rank=None):
        super().__init__(message)
        self.rank = rank


class SharedError(UserError):
    """An error that all ranks of a run raise in the same place, so that they can save a checkpoint together."""


class RankError(UserError):
    """An error that ended one rank of a run, with that rank's exit code. rank: its number.

    because_of: another rank that ended before, if that is the reason. is_lost: whether its process has ended without
    a word, and what it had of the run with it.
    """

    def __init__(self, rank, message, exit_code=1):
        super().__init__(f"rank {rank}: {message}")
        self.rank, self.exit_code, self.because_of, self.is_lost = rank, exit_code, None, False


def missing(name, kind="file", reason=None):
    """The message of a file or folder that is not there, with the folder that a relative path was looked for in: str.

    reason: why it could not be fetched from the Hugging Face hub instead, in the words of huggingface_hub.
    """
    where = "" if os.path.isabs(os.path.expanduser(name)) else f" in {os.getcwd()}"
    if reason is None:
        return f"{name}: no such {kind}{where}"
    # The message of a failed connection begins in this way.
    reason = " ".join(reason.split()).removeprefix("Got: ")[:200]
    return f"{name}: no such {kind}{where}, nor could it be fetched from the Hugging Face hub ({reason})"


def shown(value, longest=60):
    """A value in one line of a message: its repr, cut after `longest` characters.

    It may be an integer of more digits than Python prints, or an object of a user whose repr raises.
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"{type(value).__name__} that cannot be printed"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
