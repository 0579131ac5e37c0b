"""What small servers for people and programs have in common: who may ask, how much, and how long.

Login nodes are shared, so that loopback is not private: requests must contain a token. A page of another
origin in the same browser is refused, and so is a name for this address that is not its own.
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
"""Idle connections are closed after this time."""

TOKEN_VARIABLE = "HOROVOD_TRAIN_TOKEN"  # noqa: S105  (the name of a variable)
Result = TypeVar("Result")


class Guarded(RequestHandler):
    """Answers those who may ask.

    Settings of its application: ``names``, by which this server may be asked for (none: by any), ``token``
    (None: not required), ``reader``, the one thread that reads files and asks ranks.
    """

    def set_default_headers(self) -> None:
        """Let nothing be loaded from elsewhere, embedded elsewhere, or guessed to be what it is not."""
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
        """Refuse unauthorized requests.

        Raises:
            HTTPError: 400 for another name of this address, 401 without the token, 403 from another origin.
        """
        try:
            named = urlsplit(f"//{self.request.host}")
            host, self._port = named.hostname or "", named.port or 80
        except ValueError:
            raise HTTPError(400, reason="the name of the host cannot be read") from None
        names = self.settings["names"]
        if names and host.lower() not in names:
            raise HTTPError(400, reason="this server has another name")
        origin = self.request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != self.request.host:
            raise HTTPError(403, reason="asked from another origin")
        if self.settings["token"] is not None and not self.is_known():
            raise HTTPError(401, reason="the token is missing or wrong: use the address that was printed")

    @property
    def cookie_name(self) -> str:
        """Name of the cookie: browsers share cookies between the ports of a host."""
        return f"horovod_train_{self._port}"

    def is_known(self) -> bool:
        """Whether the request contains the token."""
        given = [
            self.get_query_argument("token", ""),
            self.get_cookie(self.cookie_name, "") or "",
            self.request.headers.get("Authorization", "").removeprefix("Bearer "),
        ]
        wanted: str = self.settings["token"]
        return any(hmac.compare_digest(each.encode(), wanted.encode()) for each in given)

    async def read(self, call: Callable[[], Result]) -> Result:
        """Return what a function returns that may take its time; one is called after the other."""
        reader: ThreadPoolExecutor = self.settings["reader"]
        return await asyncio.get_running_loop().run_in_executor(reader, call)

    def write_error(self, status_code: int, **_: object) -> None:
        """Say what is wrong, and nothing of the server."""
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(f"{status_code} {self._reason}\n")

    def log_exception(self, *args: object) -> None:
        """Log what is our fault; what clients do wrong is theirs."""
        if not isinstance(args[1], HTTPError):
            super().log_exception(*args)  # type: ignore[arg-type]

    def send_json(self, document: object) -> None:
        """Answer with JSON."""
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(document, separators=(",", ":"), allow_nan=False))


class NotFound(Guarded):
    """Answers for everything that is not there, after a look at who asks."""

    def prepare(self) -> None:
        """Refuse."""
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
        handlers: Each with the pattern of its path.
        host: Address that it will listen on.
        token: Token that requests must contain; None: no token.
        settings: What handlers find in their settings.
    """
    # Compressed where it is worth it: what a page asks again and again is mostly numbers.
    made = Application(list(handlers), default_handler_class=NotFound, compress_response=True)
    made.settings |= {"names": names_of(host), "token": token, "reader": ThreadPoolExecutor(1), **settings}
    return made


def token_of_environment() -> str | None:
    """Return the token that the environment gives; None: it gives none."""
    return os.environ.get(TOKEN_VARIABLE) or None


def make_token() -> str:
    """Return a random token."""
    return os.urandom(16).hex()


def names_of(host: str) -> tuple[str, ...]:
    """Return the names by which a server on an address may be asked for; none: any."""
    if host in ("", "0.0.0.0", "::"):  # noqa: S104  (recognized, not bound to)
        return ()
    name = host.strip("[]").lower()
    return tuple(dict.fromkeys([name, "127.0.0.1", "localhost", "::1"]))


class Server:
    """Serves an application in its own thread.

    Args:
        application: What is served.
        host: Address to listen on.
        port: Port; 0: any that is free.

    Attributes:
        port: Port that it listens on.
        at_close: Called when it has stopped.

    Raises:
        UserError: The port is taken, or the address is not this host's.
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
        """Return when the server has stopped, which it does not do by itself."""
        # Not by the thread: Python 3.11 takes a thread for ended whose join() was interrupted (bpo-45274).
        self._has_ended.wait()
