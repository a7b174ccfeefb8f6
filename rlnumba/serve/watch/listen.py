"""The sockets of servers, and the page's server until a signal ends it."""

import socket
import threading

import uvicorn

from rlnumba.errors import UserError


def bind(host, port):
    """A socket with the address, port 0 for a free one, which does not listen yet. Raises UserError naming them."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, UnicodeError, OverflowError) as error:
        raise UserError(f"{host}:{port}: cannot listen there: {getattr(error, 'strerror', None) or error}") from error
    return bound


def listening(host, port):
    """The socket of `bind`, which listens. Raises UserError."""
    bound = bind(host, port)
    try:
        bound.listen()
    except OSError as error:
        bound.close()
        raise UserError(f"{host}:{port}: cannot listen there: {error.strerror}") from error
    return bound


def url_of(listener, host):
    """The base URL of a socket: str."""
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app, listener, ready):
    """Serve an ASGI application on a socket until KeyboardInterrupt, which a signal raises. ready(): called when
    requests are accepted."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2))
    # In another thread: the main one is the one that signals interrupt.
    thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            thread.join(0.01)
        ready()
        thread.join()
    except KeyboardInterrupt:
        pass
    server.should_exit = True
    thread.join()
