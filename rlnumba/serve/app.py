"""The routes."""

import functools
import sys
import time
import traceback

import click
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlnumba.runtime.environment import version_of
from rlnumba.serve.protocol.bodies import Body, parse_json
from rlnumba.serve.protocol.errors import ApiError, error_body, internal_error
from rlnumba.serve.protocol.streams import ClientGone
from rlnumba.serve.routes import adapters, control, token_level
from rlnumba.serve.routes.chat import ChatAnswer
from rlnumba.serve.routes.completions import CompletionAnswer
from rlnumba.serve.security import Gate, read_body

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def make_app(service):
    """The ASGI application over a Service."""
    settings, started = service.settings, int(time.time())

    def answers(route):
        """A POST whose body is a JSON object: route(service, body, request) is awaited."""

        async def endpoint(request):
            body = Body(parse_json(await read_body(request, settings.max_body_bytes)))
            return await route(service, body, request)

        return endpoint

    def post(path, route):
        return Route(path, answers(route), methods=["POST"])

    def card(name):
        root, parent = settings.root, None
        if (adapter := service.adapters.by_name.get(name)) is not None:
            root, parent = adapter.folder, settings.name
        found = {"id": name, "object": "model", "created": started, "owned_by": "rlnumba", "root": root}
        return found | {"parent": parent, "max_model_len": service.max_model_len}

    async def health(request):
        return Response(status_code=503 if service.is_ending else 200)

    async def ping(request):
        return Response()

    async def version(request):
        return JSONResponse({"version": version_of("rlnumba") or "dev"})

    async def metrics(request):
        return Response(service.metrics.text(), media_type=METRICS_TYPE)

    async def models(request):
        names = *settings.names, *service.adapters.by_name
        return JSONResponse({"object": "list", "data": list(map(card, names))})

    async def model(request):
        service.check_name(request.path_params["name"])
        return JSONResponse(card(request.path_params["name"]))

    routes = [
        Route("/health", health),
        Route("/ping", ping),
        Route("/version", version),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        post("/v1/completions", functools.partial(draw, CompletionAnswer)),
        post("/v1/chat/completions", functools.partial(draw, ChatAnswer)),
        post("/inference/v1/generate", functools.partial(draw, token_level.GenerateAnswer)),
        post("/tokenize", functools.partial(off_loop, token_level.tokenize)),
        post("/detokenize", functools.partial(off_loop, token_level.detokenize)),
    ]
    if settings.lora_root is not None:
        routes += [post("/v1/load_lora_adapter", adapters.load), post("/v1/unload_lora_adapter", adapters.unload)]
    if settings.dev_endpoints:
        routes += control.routes(service)

    async def on_gone(request, error):
        """The client has hung up before its answer, or in the middle of its body."""
        service.metrics.cancelled += 1
        return Response(status_code=499)

    handlers = dict.fromkeys((ClientGone, ClientDisconnect), on_gone)
    handlers |= {ApiError: on_api_error, HTTPException: on_http_error, Exception: on_bug}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    app = Gate(app, service)
    if settings.allowed_origins:
        app = CORSMiddleware(app, settings.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    return Logged(app) if settings.log_requests else app


async def draw(kind, service, body, request):
    """A route that draws tokens. kind: the class of its ApiAnswer."""
    state = request.scope["state"]
    # The client's header comes first; the Gate has made an id of its own without one.
    if "x-request-id" not in request.headers and (given := body.string("request_id")):
        if not given.isprintable() or not given.isascii() or len(given) > 256:
            body.refuse("request_id", "at most 256 characters of ASCII")
        state["request_id"] = given
    answer = kind(service, body, state["request_id"])
    body.log_unread()
    found = await service.answer(request, answer)
    return found if callable(found) else JSONResponse(found)


async def off_loop(route, service, body, request):
    """A route whose work is done in another thread."""
    return JSONResponse(await service.off_loop(route, service, body))


async def on_api_error(request, error):
    return error.response


async def on_http_error(request, error):
    """404 and 405 of the router."""
    path = request.url.path
    message = f"no route {path}" if error.status_code == 404 else f"{path} does not take {request.method}"
    return JSONResponse(error_body(error.status_code, message), error.status_code, error.headers)


async def on_bug(request, error):
    """The log has the traceback, the client does not."""
    traceback.print_exception(error, file=sys.stderr)
    return internal_error().response


class Logged:
    """ASGI middleware: a line on stderr for each request, without its body."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        started, status = time.monotonic(), "closed"

        async def send_and_note(message):
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            seconds = time.monotonic() - started
            click.echo(f"serve: {scope.get('method')} {scope['path']} {status} {seconds:.3f} s", err=True)
