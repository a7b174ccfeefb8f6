"""The socket of the page and its server, until a signal ends it."""

import socket
import threading

import uvicorn

from rlnumba.errors import UserError


def listening(host, port):
    """A socket that listens on a host and a port, 0 for a free one. Raises UserError naming them."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen()
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError, OverflowError) as error:
        raise UserError(f"{host}:{port}: cannot listen there: {getattr(error, 'strerror', None) or error}") from error
    return listener


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
