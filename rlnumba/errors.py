"""Errors that a user can cause, each with its exit code of the command line.

Every message is one line that names the file, key or value at fault. The command line prints it as
`rlnumba: <message>` without a traceback. Programming errors (a wrong shape handed to an operator) are
ValueError or TypeError instead: they are bugs, not input.
"""


class UserError(Exception):
    """A missing or damaged file, bad data, a reward that fails: exit code 1."""

    exit_code = 1


class ConfigError(UserError):
    """A wrong option, key or value typed by the user: exit code 2."""

    exit_code = 2


class DeviceError(UserError):
    """A device that is not available, or that fails: exit code 1. The message names the remedy."""
