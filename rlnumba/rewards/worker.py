"""The worker process of workers.py: calls reward functions, one after another, or all at once if they are `async def`.

It imports what its functions need and nothing of the trainer. It ends when the trainer's end of the connection closes.
"""

import asyncio
import faulthandler
import os
import pickle
import queue
import threading
from multiprocessing.connection import Connection

from rlnumba.rewards.calling import Call, call_with_timeout
from rlnumba.rewards.loading import resolve

# Seconds after which a call that can no longer be interrupted ends the process, if the trainer has ended before it.
LAST_RESORT_S = 30.0


def main(descriptor):
    """Serve the connection of a file descriptor until it closes."""
    connection = Connection(descriptor)
    specs, names = connection.recv()
    functions, problems = {}, {}
    for k, spec in specs.items():
        try:
            functions[k] = resolve(spec)
        except (Exception, SystemExit) as error:  # a user's code
            problems[k] = f"{type(error).__name__}: {error}"
    try:
        connection.send(problems)
    except OSError:  # the trainer has ended meanwhile, as after a signal
        os._exit(0)
    calls, loop, lock = queue.SimpleQueue(), asyncio.new_event_loop(), threading.Lock()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def reply(number, answer):
        with lock:
            try:
                connection.send((number, answer))
            except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
                answer.extra, answer.values, answer.error = {}, None, f"what it logs cannot be pickled: {error}"
                connection.send((number, answer))

    async def wait(number, call, timeout_s):
        try:
            result = await asyncio.wait_for(call.awaited(), timeout_s * call.size)
        except (Exception, SystemExit) as error:  # a user's code
            result = error
        reply(number, call.answer(result, timeout_s))

    def read():
        try:
            while True:
                number, k, is_async, keywords, size, timeout_s = connection.recv()
                call = Call(functions[k], names[k], keywords, size)
                if is_async:
                    asyncio.run_coroutine_threadsafe(wait(number, call, timeout_s), loop)
                else:
                    calls.put((number, call, timeout_s))
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    with open(os.devnull, "w") as nothing:
        while True:
            number, call, timeout_s = calls.get()
            faulthandler.dump_traceback_later(timeout_s * call.size + LAST_RESORT_S, exit=True, file=nothing)
            result = call_with_timeout(call, timeout_s * call.size)
            faulthandler.cancel_dump_traceback_later()
            reply(number, call.answer(result, timeout_s))
