"""SIGINT, SIGTERM and SIGHUP end a command in two stages.

    first signal     KeyboardInterrupt in the main thread, at once; while signals are held, when they are released
    second signal    the process ends in the handler, with exit code 128 + n

A trainer holds signals from the first write of an optimizer step until the step is complete, so that the state that
KeyboardInterrupt unwinds to is always the one before a step or the one after it.
"""

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds in which a repeated signal counts as the same one: `timeout` sends its signal to the process and to its group.
REPEAT_S = 0.1

_received = _received_at = None
_held = _due = _lost = False


def received():
    """The first signal that arrived since `install`: signal.Signals, or None."""
    return _received


def install():
    """Handle the signals of ENDING until the process ends, but for those that are ignored, as under nohup."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_signal)
    sys.unraisablehook = _unraisable


@contextmanager
def handled():
    """Handle in the block what `install` handles, where nothing else does; at its end the signal has its usual effect.

    For training from Python. Does nothing in a thread other than the main one, which alone may set handlers.
    """
    global _received, _held, _due
    before, _held = {}, False
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in ENDING}
        usual = signal.SIG_DFL, signal.default_int_handler
        before = {number: handler for number, handler in before.items() if handler in usual}
    hook = sys.unraisablehook
    for number in before:
        signal.signal(number, _on_signal)
    if before:
        sys.unraisablehook = _unraisable
    try:
        yield
    finally:
        _held = False
        if before:
            number, _received, _due = _received, None, False
            sys.unraisablehook = hook
            for each, handler in before.items():
                signal.signal(each, handler)
            if number not in (None, signal.SIGINT):  # SIGINT is KeyboardInterrupt, which is on its way
                signal.raise_signal(number)


def _on_signal(number, frame):
    global _received, _received_at, _due, _lost
    if _lost:
        _lost = False
    elif _received is not None:
        if time.monotonic() - _received_at > REPEAT_S:
            os._exit(128 + number)
        return
    else:
        _received, _received_at = signal.Signals(number), time.monotonic()
    if _held:
        _due = True
    else:
        raise KeyboardInterrupt


def _unraisable(unraisable):
    """sys.unraisablehook: a signal that arrived in a callback of the compiler, where it is lost, is sent again."""
    global _lost
    if isinstance(unraisable.exc_value, KeyboardInterrupt) and _received is not None:
        # After a delay: an exception raised from here would be lost as well.
        _lost = True
        threading.Timer(0.05, os.kill, (os.getpid(), _received)).start()
    elif _received is None:
        sys.__unraisablehook__(unraisable)


def forget():
    """The signal that has arrived has had its effect: it has no further one."""
    global _received, _due
    _received, _due = None, False


def hold():
    """Hold signals from now on until `release`."""
    global _held
    _held = True


def release():
    """End `hold`; raises KeyboardInterrupt if a signal has arrived, also one whose exception was swallowed."""
    global _held, _due
    _held = False
    if _received is not None:
        _due = False
        raise KeyboardInterrupt


@contextmanager
def held():
    """Signals wait for the end of the block, or for `release` if they were held before."""
    global _held, _due
    before, _held = _held, True
    try:
        yield
    finally:
        _held = before
        if _due and not _held:
            _due = False
            raise KeyboardInterrupt


@contextmanager
def released():
    """End `hold` for the block, as `release` does; afterwards signals are held again."""
    release()
    try:
        yield
    finally:
        hold()
