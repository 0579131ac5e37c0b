"""Base of the HTTP servers: authorization, limits of requests, and the server thread.

Requests must contain a token, because login nodes are shared and the loopback address is not private.
Requests from pages of another origin and requests with an unknown host name are rejected.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from typing import TypeVar
from urllib.parse import urlsplit

from tornado.httpserver import HTTPServer
from tornado.web import Application, HTTPError, RequestHandler

from horovod_train.errors import UserError

MAX_BODY_BYTES = 16 * 1024
MAX_HEADER_BYTES = 16 * 1024
IDLE_S = 30.0
"""Time after which idle connections, and requests with an incomplete body, are closed."""

TOKEN_VARIABLE = "HOROVOD_TRAIN_TOKEN"  # noqa: S105  (name of a variable)
Result = TypeVar("Result")


class Guarded(RequestHandler):
    """Request handler that requires authorization.

    Settings of its application: ``names`` (accepted host names; empty: any), ``token`` (None: not required),
    ``reader`` (executor with one thread, which runs blocking functions).
    """

    def set_default_headers(self) -> None:
        """Set headers against external content, embedding in other sites, and content sniffing."""
        self.clear_header("Server")
        self.set_header("Cache-Control", "no-store")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("X-Frame-Options", "DENY")
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header(
            "Content-Security-Policy",
            "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        )

    def prepare(self) -> None:
        """Reject unauthorized requests.

        Raises:
            HTTPError: 400: unknown host name; 401: missing or wrong token; 403: another origin.
        """
        try:
            named = urlsplit(f"//{self.request.host}")
            host, self._port = named.hostname or "", named.port or 80
        except ValueError:
            raise HTTPError(400, reason="invalid Host header") from None
        names = self.settings["names"]
        if names and host.lower() not in names:
            raise HTTPError(400, reason="the host name is not accepted by this server")
        origin = self.request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != self.request.host:
            raise HTTPError(403, reason="request from another origin")
        if self.settings["token"] is not None and not self.is_known():
            raise HTTPError(401, reason="the token is missing or wrong: use the address that was printed")

    @property
    def cookie_name(self) -> str:
        """Name of the cookie, with the port, because browsers share cookies between ports of a host."""
        return f"horovod_train_{self._port}"

    def is_known(self) -> bool:
        """Return whether the request contains the token, as query argument, cookie or header."""
        given = [
            self.get_query_argument("token", ""),
            self.get_cookie(self.cookie_name, "") or "",
            self.request.headers.get("Authorization", "").removeprefix("Bearer "),
        ]
        wanted: str = self.settings["token"]
        return any(hmac.compare_digest(each.encode(), wanted.encode()) for each in given)

    async def read(self, call: Callable[[], Result]) -> Result:
        """Run a blocking function in the reader thread and return its result. Functions run one at a time."""
        reader: ThreadPoolExecutor = self.settings["reader"]
        return await asyncio.get_running_loop().run_in_executor(reader, call)

    def write_error(self, status_code: int, **_: object) -> None:
        """Send status and reason, without details of the server."""
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(f"{status_code} {self._reason}\n")

    def log_exception(self, *args: object) -> None:
        """Log exceptions of the server, but not errors of requests."""
        if not isinstance(args[1], HTTPError):
            super().log_exception(*args)  # type: ignore[arg-type]

    def send_json(self, document: object) -> None:
        """Send a JSON document."""
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(document, separators=(",", ":"), allow_nan=False))


class NotFound(Guarded):
    """Handler of unknown paths."""

    def prepare(self) -> None:
        """Reject the request: with 404 only if it is authorized."""
        super().prepare()
        raise HTTPError(404)


def application(
    handlers: Sequence[tuple[str, type[RequestHandler]]],
    host: str,
    token: str | None,
    settings: Mapping[str, object],
) -> Application:
    """Return an application of guarded handlers.

    Args:
        handlers: Path pattern and class of each handler.
        host: Address that the server will listen on.
        token: Token that requests must contain; None: no token.
        settings: Further settings for the handlers.
    """
    # Responses are compressed, because the page repeatedly requests JSON that is mostly numbers.
    made = Application(list(handlers), default_handler_class=NotFound, compress_response=True)
    made.settings |= {"names": names_of(host), "token": token, "reader": ThreadPoolExecutor(1), **settings}
    return made


def token_of_environment() -> str | None:
    """Return the token in the environment variable; None: it is not set, or empty."""
    return os.environ.get(TOKEN_VARIABLE) or None


def make_token() -> str:
    """Return a random token."""
    return os.urandom(16).hex()


def names_of(host: str) -> tuple[str, ...]:
    """Return the accepted host names for a server on an address; empty: any name."""
    if host in ("", "0.0.0.0", "::"):  # noqa: S104  (recognized, not bound to)
        return ()
    name = host.strip("[]").lower()
    return tuple(dict.fromkeys([name, "127.0.0.1", "localhost", "::1"]))


class Server:
    """HTTP server of an application, in its own thread.

    Args:
        application: Application to serve.
        host: Address to listen on.
        port: Port; 0: any free port.

    Attributes:
        port: Port that the server listens on.
        at_close: Called after the server has stopped.

    Raises:
        UserError: The port is in use, or the address is not an address of this host.
    """

    def __init__(self, application: Application, host: str, port: int) -> None:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            hint = "choose another --port" if error.errno == errno.EADDRINUSE else "is it this host's --host?"
            raise UserError(
                f"cannot listen on {host}:{port}: {error.strerror or error}", hint=hint
            ) from error
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._application = application
        self.at_close: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_up, self._has_ended = Event(), Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()
        self._is_up.wait()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._has_ended.set()

    async def _serve(self) -> None:
        logging.getLogger("tornado.access").setLevel(logging.CRITICAL)
        logging.getLogger("tornado.general").setLevel(logging.CRITICAL)  # malformed requests
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = HTTPServer(
            self._application,
            idle_connection_timeout=IDLE_S,
            body_timeout=IDLE_S,
            max_body_size=MAX_BODY_BYTES,
            max_header_size=MAX_HEADER_BYTES,
        )
        server.add_socket(self._socket)
        self._is_up.set()
        await self._over.wait()
        server.stop()
        await server.close_all_connections()

    def close(self) -> None:
        """Stop serving. Safe to call twice."""
        if not self._has_ended.is_set() and self._loop is not None:
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(5)
            self.at_close()

    def wait(self) -> None:
        """Block until the server is closed."""
        # Not join(): Python 3.11 regards a thread as ended if its join() was interrupted (bpo-45274).
        self._has_ended.wait()
