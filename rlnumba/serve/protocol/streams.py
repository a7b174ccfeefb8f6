"""Server-sent events, and clients that go away."""

import asyncio
import json

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


async def until_gone(receive, work):
    """The result of a coroutine, which is cancelled with ClientGone once the client has closed its connection.

    receive: of a request whose body has been read.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


def event(value):
    """An event with a JSON value: bytes."""
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n\n".encode()


class EventStream:
    """The response that streams an ApiJob. answer: an ApiAnswer, whose chunks these are. service: gets the job back."""

    def __init__(self, service, job, answer):
        self.service, self.job, self.answer = service, job, answer
        self.settings = service.settings

    async def __call__(self, scope, receive, send):
        try:
            await until_gone(receive, self._send_all(send))
        except ClientGone:
            self.service.metrics.cancelled += 1
        finally:
            self.service.close(self.job)

    async def _send_all(self, send):
        await self._within(send({"type": "http.response.start", "status": 200, "headers": HEADERS}))

        async def write(*pieces):
            await self._within(send({"type": "http.response.body", "body": b"".join(pieces), "more_body": True}))

        answer, job = self.answer, self.job
        try:
            if opening := answer.opening():
                await write(*map(event, opening))
            while job.unfinished:
                try:
                    async with asyncio.timeout(self.settings.heartbeat_s):
                        deltas = await job.deltas()
                except TimeoutError:
                    await write(COMMENT)
                    continue
                if chunks := [chunk for delta in deltas for chunk in answer.chunks(delta)]:
                    await write(*map(event, chunks))
            if last := answer.last_chunk():
                await write(event(last))
        except ApiError as error:
            await write(event(error.body))
        await write(b"data: [DONE]\n\n")
        await self._within(send({"type": "http.response.body", "body": b"", "more_body": False}))

    async def _within(self, sending):
        """Send, or drop a client that has read nothing for a while."""
        try:
            async with asyncio.timeout(self.settings.unread_s):
                await sending
        except TimeoutError:
            raise ClientGone from None
