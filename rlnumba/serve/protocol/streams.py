"""Server-sent events, and clients that go away."""

import asyncio
import json
import math
import time

from rlnumba.serve.protocol.errors import ApiError

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
# A comment, which clients skip and proxies take for life.
COMMENT = b": waiting\n\n"


class ClientGone(Exception):
    """The client has closed its connection, or does not read."""


async def until_gone(receive, work, *others):
    """The result of a coroutine, which is cancelled with ClientGone once the client has closed its connection.

    receive: of a request whose body has been read. others: coroutines that end where the client counts as gone, too.
    """
    task, *gone = map(asyncio.ensure_future, (work, _gone(receive), *others))
    try:
        await asyncio.wait((task, *gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, *gone):
            each.cancel()
        await asyncio.gather(task, *gone, return_exceptions=True)


async def _gone(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def event(value):
    """An event with a JSON value: bytes."""
    return f"data: {ENCODER.encode(value)}\n\n".encode()


class EventStream:
    """The response that streams an ApiJob. answer: an ApiAnswer, whose chunks these are. service: gets the job back.

    What is sent sets no timer of its own, of which there would be thousands a second: `_watch` looks now and then.
    """

    def __init__(self, service, job, answer):
        self.service, self.job, self.answer = service, job, answer
        self.settings = service.settings
        # Seconds of time.monotonic: since when a piece has been waiting for the client to read, None if none is; and
        # when the last one was sent.
        self.sending_since, self.sent = None, math.inf

    async def __call__(self, scope, receive, send):
        try:
            await until_gone(receive, self._send_all(send), self._watch(send))
        except ClientGone:
            self.service.metrics.cancelled += 1
        finally:
            self.service.close(self.job)

    async def _send_all(self, send):
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": HEADERS})

        async def write(*pieces):
            await self._send(send, body_of(b"".join(pieces)))

        answer, job = self.answer, self.job
        try:
            if opening := answer.opening():
                await write(*map(event, opening))
            while job.unfinished:
                if chunks := [chunk for delta in await job.deltas() for chunk in answer.chunks(delta)]:
                    await write(*map(event, chunks))
            if last := answer.last_chunk():
                await write(event(last))
        except ApiError as error:
            await write(event(error.body))
        await write(b"data: [DONE]\n\n")
        await self._send(send, body_of(b"", more=False))

    async def _send(self, send, message):
        self.sending_since = time.monotonic()
        await send(message)
        self.sending_since, self.sent = None, time.monotonic()

    async def _watch(self, send):
        """Send a comment where there has been no token for heartbeat_s; return once the client has read nothing for
        unread_s."""
        heartbeat_s, unread_s = self.settings.heartbeat_s, self.settings.unread_s
        period = min(heartbeat_s, unread_s) / 4
        while True:
            await asyncio.sleep(period)
            now = time.monotonic()
            if self.sending_since is not None:
                if now - self.sending_since > unread_s:
                    return
            elif now - self.sent > heartbeat_s - period:
                try:
                    async with asyncio.timeout(unread_s):
                        await self._send(send, body_of(COMMENT))
                except TimeoutError:
                    return


def body_of(data, more=True):
    """The ASGI message with a piece of a body. more: whether others follow."""
    return {"type": "http.response.body", "body": data, "more_body": more}
