"""Machine code on the disk, and the names of its files.

The folder is RLNUMBA_CACHE_DIR, default ~/.cache/rlnumba (runtime/folders.py). A file is named by a hash of the
kernel's source file and of every module of this package that it imports, directly or through others; of the kernel's
name, the values it closes over and its argument types; of the architecture and the versions of the compilers. A file
that ends in .list is empty: the kernels of a list have been compiled. Processes, also of several users, may fill the
folder at the same time; while one compiles a kernel, which has a file that ends in .lock, others wait for it.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import marshal
import os
import pathlib
import re
import sys
import time
import uuid
from importlib.metadata import version

from rlnumba.runtime import device, folders

# A file's time is that of its last use, to a day; one that was not used for so many days is removed.
DAY_S, UNUSED_DAYS = 24 * 3600, 60
# Seconds that a process waits while another one compiles; after that it compiles itself, since the other one may be
# stopped. It looks every LOOK_S.
LONGEST_WAIT_S, LOOK_S = 60.0, 0.02
# Whether this process has printed that the cache cannot be written.
_has_said = False
# The folder of this package, the sources of which are followed.
PACKAGE = pathlib.Path(__file__).resolve().parents[2]
# The imports of this package in a source, one line or in brackets. Parsing all sources would take half a second.
IMPORTS = re.compile(
    rb"^[ \t]*(?:from[ \t]+(rlnumba[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|.*)|import[ \t]+(rlnumba.*))", re.M
)


def cache_path(kernel, type_names, capability):
    """The file of the cache for a kernel, whether it is there or not."""
    return folder() / f"{cache_key(kernel, type_names, capability)}.cubin"


def folder():
    """The folder of the cache: Path."""
    given = os.environ.get("RLNUMBA_CACHE_DIR")
    return pathlib.Path(given) if given else folders.default_cache()


def can_be_filled():
    """Whether this process may write into the cache: bool. If not, a line on stderr says so, once."""
    if folders.can_be_written(folder()):
        return True
    _say_unwritable(os.strerror(errno.EACCES))
    return False


def _say_unwritable(reason):
    global _has_said
    if _has_said:
        return
    _has_said = True
    print(
        f"rlnumba: warning: {folder()} cannot be written ({reason}), so that kernels are compiled anew at every start; "
        "RLNUMBA_CACHE_DIR names another folder",
        file=sys.stderr,
        flush=True,
    )


def read(path):
    """(entry point's name, cubin) of a file of the cache, bytes both, or None where there is none."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    _note_use(path)
    return content.split(b"\0", 1)


def _note_use(path):
    # The file may be another user's, or be removed at this moment.
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > DAY_S:
            os.utime(path)


def prune():
    """Remove the files of the cache that no process has read for UNUSED_DAYS, as after a change of the sources."""
    for path in folder().glob("*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > UNUSED_DAYS * DAY_S:
                path.unlink()


def list_path(module, request, properties):
    """The file of the cache that exists if all kernels of a list have been compiled (ahead_of_time.py)."""
    parts = [module, repr(request), list(properties), package_digest(), versions()]
    return folder() / f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}.list"


def is_list_compiled(path):
    """Whether the kernels of a list, by its list_path, have been compiled: bool. Some may have left the cache since."""
    found = path.exists()
    if found:
        _note_use(path)
    return found


def note_list_compiled(path):
    """Write the file of list_path."""
    write(path, b"")


def write(path, content):
    """Write a cache file under a temporary name and rename it; where that fails, a line on stderr says so, once."""
    # Not by tempfile, whose files other users, who may share the cache, cannot read.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        # A full disk leaves a part of the file.
        with contextlib.suppress(OSError):
            temporary.unlink()
        _say_unwritable(error.strerror)


@contextlib.contextmanager
def compiled_by_one(path):
    """In the `with` block no other process or thread has this block of the same cache file (Path), unless it has waited
    LONGEST_WAIT_S for it, or the folder cannot be written or its file system has no locks."""
    lock = path.with_suffix(".lock")
    descriptor = _opened_and_locked(lock)
    try:
        yield
    finally:
        if descriptor is not None:
            # A process that waits for the lock gets it, and finds the compiled kernel in the cache; so does one that
            # makes a new lock file.
            with contextlib.suppress(OSError):
                lock.unlink()
            # Closing alone would leave the lock to a process that was forked in the block, which has the open file too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _opened_and_locked(lock):
    """The descriptor of a file (Path) that others then wait for, or None where that cannot be, or took too long."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None
    is_locked = False
    try:
        is_locked = _locks_in_time(descriptor)
    finally:  # after a signal, too
        if not is_locked:
            os.close(descriptor)
    return descriptor if is_locked else None


def _locks_in_time(descriptor):
    """Lock an open file: bool, False where others have it for too long or there are no locks."""
    end = time.monotonic() + LONGEST_WAIT_S
    while time.monotonic() < end:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(LOOK_S)
        except OSError:
            return False
    return False


def cache_key(kernel, type_names, capability):
    """Hash of all that a kernel's machine code follows from: str."""
    code = kernel.py_func.__code__
    has_file = os.path.isfile(code.co_filename)
    options = sorted((key, _identity(value)) for key, value in kernel.targetoptions.items())
    sources = sources_digest(code.co_filename if has_file else __file__)
    parts = [None if has_file else marshal.dumps(code).hex(), sources, _identity(kernel)]
    parts += [list(type_names), list(capability), options, versions()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@functools.cache
def sources_digest(file_name):
    """Digest of a kernel's file and of every module of this package that it reaches through imports: str."""
    sources, new = set(), {pathlib.Path(file_name).resolve()}
    while new:
        sources |= new
        new = {file for source in new for file in imported_files(source)} - sources
    return hashlib.sha256(b"".join(source.read_bytes() for source in sorted(sources))).hexdigest()


@functools.cache
def imported_files(source):
    """The files of the modules of this package that a Python file imports anywhere in it: set of Path."""
    names = set()
    for module, imported, modules in IMPORTS.findall(source.read_bytes()):
        listed = re.sub(rb"#.*", b"", imported or modules).strip(b"()").split(b",")
        parts = [part.split()[0].decode() for part in listed if part.split()]
        names |= {module.decode(), *(f"{module.decode()}.{part}" for part in parts)} if module else {*parts}
    modules = [PACKAGE.parent.joinpath(*name.split(".")) for name in names if name.split(".")[0] == PACKAGE.name]
    files = [file for module in modules for file in (module.with_suffix(".py"), module / "__init__.py")]
    return {file for file in files if file.exists()}


@functools.cache
def versions():
    """The versions of the packages that compile: list of str."""
    packages = ("numba-cuda-mlir",) if device.compiler() == "mlir" else ("numba", "numba-cuda", "llvmlite")
    return [version(package) for package in packages]


@functools.cache
def package_digest():
    """Digest of all sources of this package, from which the list of a run's kernels follows: str."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in sorted(PACKAGE.rglob("*.py")))).hexdigest()


def _identity(value):
    """The key that distinguishes kernels made by the same source lines: the values they close over."""
    # Numba keeps the function behind a kernel in py_func, the one behind an intrinsic in _defn.
    function = getattr(value, "py_func", getattr(value, "_defn", value))
    if callable(function) and hasattr(function, "__qualname__"):
        cells = getattr(function, "__closure__", None) or ()
        return [function.__module__, function.__qualname__, [_identity(_content(cell)) for cell in cells]]
    return repr(value)


def _content(cell):
    """The value in a closure's cell; None if its name was never assigned, in a branch that a factory did not take."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
