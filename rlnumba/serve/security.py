"""Who may send what: checked before a route sees a request, and before its body is read."""

import hmac
import random
import re

from starlette.datastructures import Headers, MutableHeaders

from rlnumba.serve.protocol.errors import ApiError
from rlnumba.serve.settings import is_loopback

# Routes that need no key: probes of an orchestrator have none.
OPEN = ("/health", "/ping")
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
RETRY_AFTER = {"retry-after": "5"}


class Gate:
    """ASGI middleware: API key, Host, content type, declared size, request ids, the end of the server.

    A path may have a slash at its end. service: counts the POSTs in work in num_active; is_ending refuses more.
    """

    def __init__(self, app, service):
        self.app, self.service, self.settings = app, service, service.settings
        self.key = (self.settings.api_key or "").encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":  # a websocket: closed before it is opened
            await send({"type": "websocket.close", "code": 1000})
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        scope.setdefault("state", {})["request_id"] = given if REQUEST_ID.fullmatch(given) else new_id()
        if scope["path"] != "/":
            scope["path"] = scope["path"].rstrip("/") or "/"

        async def send_with_id(message):
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = scope["state"]["request_id"]
            await send(message)

        try:
            self.check(scope, headers)
        except ApiError as error:
            # The body is not read: the connection is of no more use.
            response = error.response
            response.headers["connection"] = "close"
            await response(scope, receive, send_with_id)
            return
        is_work = scope["method"] == "POST"
        self.service.num_active += is_work
        if is_work:
            self.service.begin_arrival(scope["state"])
        try:
            await self.app(scope, receive, send_with_id)
        finally:
            self.service.num_active -= is_work
            self.service.end_arrival(scope["state"])

    def check(self, scope, headers):
        """Raise ApiError for a request that no route is to see."""
        if self.key and scope["path"] not in OPEN:
            kind, _, key = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self.key):
                message = "a wrong API key" if key else "this server needs an API key: Authorization: Bearer KEY"
                raise ApiError(message, None, "invalid_api_key", 401, {"www-authenticate": "Bearer"})
        if scope["method"] != "POST":
            return
        if self.service.is_ending:
            raise stopping()
        # Without a key the browser of this machine is kept out: no form can send JSON, and a page of another host whose
        # name leads here sends that name.
        if not self.key and not self._is_own(headers.get("host", "")):
            raise ApiError("Host must be that of this machine; give the server an --api-key to be reached by others")
        # A POST without a body has no type either, in most clients; a page can send it too, but not without an origin.
        is_empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        is_of_page = "origin" in headers or "sec-fetch-site" in headers
        kind = headers.get("content-type")
        if not (kind is None and is_empty and not is_of_page) and not _is_json(kind or ""):
            raise ApiError("content-type must be application/json")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.settings.max_body_bytes:
            raise too_large(self.settings.max_body_bytes)

    def _is_own(self, host):
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        name = name.strip("[]").lower()
        return is_loopback(name) or name == self.settings.host.lower()


def _is_json(content_type):
    return content_type.partition(";")[0].strip().lower() == "application/json"


def new_id():
    """An id of a request. The system's generator would have the thread wait for Python's lock, and none needs it."""
    return f"{random.getrandbits(128):032x}"


def stopping():
    return ApiError("the server is stopping", status=503, headers=RETRY_AFTER)


def too_large(limit):
    return ApiError(f"the body has more than {limit} bytes", status=413)


async def read_body(request, limit):
    """The bytes of a body, at most `limit`; raises ApiError."""
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise too_large(limit)
        pieces.append(piece)
    return b"".join(pieces)
