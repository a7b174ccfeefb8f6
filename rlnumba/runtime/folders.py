"""The folder in which this process keeps what it compiles: the first of some that it can write.

Two caches: machine code of GPU kernels (runtime/compile/cache.py), and that of the functions of the cpu device, which
Numba keeps itself, in the folder that the environment names when Numba makes a function. An installation and a home
that cannot be written, as in a container run by another user, leave the folder for temporary files.
"""

import os
import stat
import sys
from pathlib import Path

# The folder of this package, in whose __pycache__ folders Numba keeps its files if it can.
PACKAGE = Path(__file__).resolve().parent.parent
# The folder of temporary files where tempfile finds none: memory, which containers have that can write nothing else.
MEMORY = Path("/dev/shm")


def set_numba_cache():
    """Set NUMBA_CACHE_DIR, which processes started from this one inherit, unless Numba's own choice will do.

    The choice, in this order: NUMBA_CACHE_DIR; `numba` in RLNUMBA_CACHE_DIR, if that can be written; beside the sources
    of this package; `numba` in the default of RLNUMBA_CACHE_DIR.
    """
    if os.environ.get("NUMBA_CACHE_DIR"):
        return
    given = os.environ.get("RLNUMBA_CACHE_DIR")
    if given and can_be_written(Path(given)):
        folder = Path(given)
    elif can_be_written(PACKAGE):
        return
    else:
        folder = default_cache()
    os.environ["NUMBA_CACHE_DIR"] = str(folder.absolute() / "numba")
    if "numba" in sys.modules:
        # It read the environment when it was imported.
        sys.modules["numba"].config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]


def default_cache():
    """The folder of the caches where RLNUMBA_CACHE_DIR names none that can be used: Path.

    ~/.cache/rlnumba if it can be written, else a folder of the temporary files that is this user's alone.
    """
    try:
        home = Path.home() / ".cache" / "rlnumba"
    except RuntimeError:  # a user without an entry in the system's list, and no HOME
        return _temporary() or MEMORY / "rlnumba"
    return home if can_be_written(home) else _temporary() or home


def can_be_written(folder):
    """Whether this process may write into a folder, or make it where it does not exist: bool."""
    nearest = folder.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def _temporary():
    """A folder below that of temporary files which no other user can write to, made if need be; None without one.

    Others can write beside it: its name may be taken, by a link too. A path that is not this user's folder is never
    used, because files of Numba's cache are executed.
    """
    import tempfile

    try:
        parents = [Path(tempfile.gettempdir()), MEMORY]
    except FileNotFoundError:
        parents = [MEMORY]
    for parent in parents:
        folder = parent / f"rlnumba-{os.getuid()}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
        except OSError:
            continue
        is_private = stat.S_ISDIR(found.st_mode) and found.st_mode & 0o077 == 0
        if is_private and found.st_uid == os.getuid() and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return None
