"""Whether what a run's keys name can be imported, found out in a process that then ends.

A user's module may take a GPU's memory, open a port or begin threads as it is imported, so the process that starts the
ranks of a run does not import it. What it prints is printed by the ranks, and here by none.

    this process       names -> the other one
    the other one      the number of each name that it is about to find; then None, or what was wrong with the last
"""

import subprocess
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from rlnumba.errors import ConfigError, UserError
from rlnumba.rewards.loading import load_object, resolve
from rlnumba.rewards.workers import how_ended, start_process


def check_imports(named):
    """Raise what finding one of [(key, name)] raises, by `resolve` of rewards.funcs, else by load_object: a UserError,
    also for a module that ends its process. key: begins the message."""
    if not named:
        return
    connection, other = Pipe()
    try:
        process = start_process(__name__, other, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    finally:
        other.close()
    begun = 0
    try:
        connection.send(named)
        while isinstance(found := connection.recv(), int):
            begun = found
    except (EOFError, OSError):
        key, name = named[begun]
        raise UserError(f"{key}: the process that imports {name} {how_ended(process)}") from None
    finally:
        connection.close()
        process.kill()
        process.wait()
    if found is not None:
        is_of_config, message = found
        raise (ConfigError if is_of_config else UserError)(message)


def main(descriptor):
    """Find the names that come by the connection of a file descriptor."""
    connection = Connection(descriptor)
    problem = None
    for number, (key, name) in enumerate(connection.recv()):
        connection.send(number)
        if (problem := _problem_of(key, name)) is not None:
            break
    connection.send(problem)


def _problem_of(key, name):
    """None, or (whether it is a ConfigError, message) of the error that finding a name raises."""
    try:
        if key == "rewards.funcs":
            resolve(name)
        else:
            load_object(name, key)
    except UserError as error:
        return isinstance(error, ConfigError), str(error)
    except (Exception, SystemExit) as error:  # a user's code, as a factory of rewards
        text = " ".join(str(error).split())
        return False, f"{key}: {name} raised {type(error).__name__}: {text}"
    return None
