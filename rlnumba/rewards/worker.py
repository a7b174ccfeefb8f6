"""The worker process of workers.py: calls reward functions, one after another, or all at once if they are `async def`.

It imports what its functions need and nothing of the trainer. It ends when the trainer's end of the connection closes.
"""

import asyncio
import faulthandler
import json
import os
import queue
import threading
from multiprocessing.connection import Connection

from rlnumba.rewards.calling import USERS_ERRORS, Call, call_with_timeout, run_until_stopped
from rlnumba.rewards.loading import resolve
from rlnumba.rewards.workers import pack_answers

# Seconds after which a call that can no longer be interrupted ends the process, if the trainer has ended before it.
LAST_RESORT_S = 30.0


def find_functions(specs):
    """({number: function}, {number: why it cannot be found}) of functions by number."""
    functions, problems = {}, {}
    for k, spec in specs.items():
        try:
            functions[k] = resolve(spec)
        except (Exception, SystemExit) as error:  # a user's code
            problems[k] = f"{type(error).__name__}: {error}"
    return functions, problems


def main(descriptor):
    """Serve the connection of a file descriptor until it closes."""
    connection = Connection(descriptor)
    try:
        specs, names = connection.recv()
        functions, problems = find_functions(specs)
        connection.send_bytes(json.dumps(problems).encode())
    except (EOFError, OSError):
        return  # the trainer has ended meanwhile
    calls, loop, lock = queue.SimpleQueue(), asyncio.new_event_loop(), threading.Lock()
    threading.Thread(target=run_until_stopped, args=(loop,), daemon=True).start()

    def reply(number, calls, answers):
        try:
            message = pack_answers(number, answers)
        except Exception:  # of an object that a user's function logged
            for call, answer in zip(calls, answers, strict=True):
                try:
                    pack_answers(number, [answer])
                except Exception as error:
                    said = f"reward {call.name}: what it logs cannot be written: {type(error).__name__}: {error}"
                    answer.extra, answer.values, answer.error = {}, None, " ".join(said.split())
            message = pack_answers(number, answers)
        with lock:
            connection.send_bytes(message)

    async def wait(number, call, timeout_s):
        try:
            result = await asyncio.wait_for(call.awaited(), timeout_s * call.size)
        except USERS_ERRORS as error:
            result = error
        reply(number, [call], [call.answer(result, timeout_s)])

    def read():
        try:
            while True:
                number, sent = connection.recv()
                found = [
                    (Call(functions[k], names[k], keywords, size), timeout_s)
                    for k, _, keywords, size, timeout_s in sent
                ]
                if sent[0][1]:
                    asyncio.run_coroutine_threadsafe(wait(number, *found[0]), loop)
                else:
                    calls.put((number, found))
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    with open(os.devnull, "w") as nothing:
        while True:
            number, found = calls.get()
            # Once for all, because it starts a thread.
            limit_s = sum(timeout_s * call.size for call, timeout_s in found)
            faulthandler.dump_traceback_later(limit_s + LAST_RESORT_S, exit=True, file=nothing)
            answers = []
            for call, timeout_s in found:
                result = call_with_timeout(call, timeout_s * call.size)
                answers.append(call.answer(result, timeout_s))
            faulthandler.cancel_dump_traceback_later()
            reply(number, [call for call, _ in found], answers)
