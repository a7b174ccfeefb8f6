"""The lock of a run's folder: one run at a time writes there.

    with owned("runs/a"):     # UserError, one line, where another run has it
        ...

The lock is flock's, on runs/a/run.lock, which says whose it is: `1234@host`. The system drops it when the process ends,
however that happens; on NFS flock locks the file for all hosts. flock belongs to the open file, not to the process: no
other code that reads and closes run.lock gives it up, as with a lock of fcntl. A process that this one starts has the
file closed: by exec, because Python opens files so, and after a fork by the function below. So the ranks and engines
of a run, which end with it, are no owners, and none of them keeps the folder locked after the run's end.
"""

import contextlib
import errno
import fcntl
import os
import socket
import sys
from contextvars import ContextVar
from pathlib import Path

from rlnumba.errors import UserError
from rlnumba.reporting.files import make_folder

NAME = "run.lock"
# File systems without locks raise one of these.
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

# The folders that the code that is running owns, and the locks of this process.
_owned = ContextVar("owned folders", default=frozenset())
_descriptors = set()


def _close_in_child():
    """A fork has copies of the locked files, which would keep the locks."""
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def owned(folder):
    """A block that owns a folder, which is made if it is not there. Blocks within it may ask for the same folder.

    A folder that was made for it and is still empty at the end goes: what ended had not begun to write.
    Raises UserError if the folder cannot be written to, or naming the process that owns it. On a file system without
    locks nothing is locked, and a line on stderr says so.
    """
    folder = Path(folder)
    was_there = folder.exists()
    make_folder(folder)
    key = os.path.realpath(folder)
    if key in _owned.get():
        yield
        return
    descriptor = _locked(folder)
    token = _owned.set(_owned.get() | {key})
    try:
        yield
    finally:
        _owned.reset(token)
        if descriptor is not None and descriptor in _descriptors:
            # While it is locked: another process that has opened it finds that it is gone, and makes another.
            with contextlib.suppress(OSError):
                os.unlink(folder / NAME)
            _descriptors.discard(descriptor)
            os.close(descriptor)
        if not was_there:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def _locked(folder):
    """The descriptor of the folder's lock file, locked; None where there are no locks. Raises UserError."""
    path = folder / NAME
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _owner(descriptor)
            os.close(descriptor)
            if error.errno in WITHOUT_LOCKS:
                reason = error.strerror
                print(f"rlnumba: {folder} cannot be locked ({reason}): start no other run there", file=sys.stderr)
                return None
            raise UserError(
                f"{folder}: another run has this folder, {owner}; wait for its end, or choose another output_dir"
            ) from None
        if _is_at(descriptor, path):
            break
        # The owner before has removed it between open and flock.
        os.close(descriptor)
    _descriptors.add(descriptor)
    with contextlib.suppress(OSError):  # a full disk: the lock holds without the name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}@{socket.gethostname()}\n".encode(), 0)
        os.fsync(descriptor)
    return descriptor


def _is_at(descriptor, path):
    """Whether an open file is the one that has this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _owner(descriptor):
    """The owner that a lock file names, as a part of a sentence: str."""
    pid, at, host = os.pread(descriptor, 1000, 0).decode(errors="replace").strip().partition("@")
    return f"process {pid} on {host}" if at else "a process that has not written its number yet"
