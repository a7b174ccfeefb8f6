"""Python's garbage collector beside a GPU: a loop of steps without its longest pauses.

A collection of all objects, of which modules and compilers leave hundreds of thousands, takes 0.1 s and more, in which
nothing is launched. It may come in any step. Objects that are there after the first step stay until the end of a run,
so they are left out of collections until then.
"""

import contextlib
import gc


@contextlib.contextmanager
def unfrozen_at_end():
    """Collections have all objects again when the block ends, if `freeze` was called in it."""
    before = gc.get_freeze_count()
    try:
        yield
    finally:
        # Objects that the process had left out before stay so if nothing was added.
        if gc.get_freeze_count() > before:
            gc.unfreeze()


def freeze():
    """Leave the objects that are there, and no garbage, out of collections from now on."""
    gc.collect()
    gc.freeze()
