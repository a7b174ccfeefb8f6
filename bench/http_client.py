"""A small HTTP client for benches: thousands of connections in one event loop, bodies piece by piece, any hang-up."""

import asyncio
import json
import socket
import struct
import time
from typing import NamedTuple

JSON = {"content-type": "application/json"}


class Answer(NamedTuple):
    """A whole answer. headers: names in lower case; times: of each piece of the body, of time.perf_counter."""

    status: int
    headers: dict
    body: bytes
    times: list[float]

    @property
    def json(self):
        return json.loads(self.body)


class Connection:
    """A connection to a port of this machine, for one request after another; `open` it first."""

    def __init__(self, port):
        self.port, self.reader, self.writer = port, None, None

    async def open(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    def send(self, method, path, headers=None, body=b""):
        """Send a request. body: bytes, or what becomes JSON."""
        self.writer.write(request_bytes(method, path, headers, body))

    async def head(self):
        """(status, headers) of the answer."""
        status = 100
        while status == 100:  # that the body may be sent
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(lines[0].split()[1])
        pairs = (line.partition(":")[::2] for line in lines[1:] if line)
        return status, {name.strip().lower(): value.strip() for name, value in pairs}

    async def pieces(self, headers):
        """The pieces of the answer's body as they come."""
        if headers.get("transfer-encoding", "").lower() != "chunked":
            left = int(headers.get("content-length", 0))
            if left:
                yield await self.reader.readexactly(left)
            return
        while size := int(await self.reader.readline(), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readline()

    async def ask(self, method, path, headers=None, body=b""):
        """The Answer to a request."""
        self.send(method, path, headers, body)
        status, found = await self.head()
        pieces, times = [], []
        if method != "HEAD":
            async for piece in self.pieces(found):
                pieces.append(piece)
                times.append(time.perf_counter())
        return Answer(status, found, b"".join(pieces), times)

    def reset(self):
        """Close at once, without the end that TCP has."""
        found = self.writer.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self):
        if self.writer is not None:
            self.writer.close()


def request_bytes(method, path, headers=None, body=b""):
    """The bytes of a request."""
    if not isinstance(body, bytes):
        headers, body = JSON | (headers or {}), json.dumps(body).encode()
    found = {"host": "127.0.0.1"} | ({"content-length": str(len(body))} if body else {}) | (headers or {})
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in found.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1", "replace") + body


async def ask(port, method, path, headers=None, body=b""):
    """The Answer to a request on a connection of its own."""
    connection = Connection(port)
    try:
        await connection.open()
        return await connection.ask(method, path, headers, body)
    finally:
        connection.close()


def events(body):
    """The JSON of the events of a stream, without [DONE]: list. Raises ValueError if that is not its end."""
    lines = [line for line in body.decode().split("\n\n") if line and not line.startswith(":")]
    if not lines or lines.pop() != "data: [DONE]":
        raise ValueError("a stream without [DONE] at its end")
    return [json.loads(line.removeprefix("data: ")) for line in lines]
