"""Serve a rank's metrics over HTTP. A port in use moves on; nothing here ever stops training.

The process that answers is one that trains, so clients cannot take much of its time: an answer is
good for a second, few are given at the same time, and who reads slowly is left alone with it.
"""

from __future__ import annotations

import base64
import errno
import hmac
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Lock, Thread
from time import monotonic
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import make_wsgi_app

log = logging.getLogger(__name__)

PORT_STEP = 100
MAX_PORT = 65535
WILDCARDS = {"0.0.0.0", "[::]"}  # noqa: S104  (recognized, not bound to)
MAX_TRIES = 20

FRESH_S = 1.0
"""Who asks again within so long gets the same answer: making one takes milliseconds from training."""

MAX_CONNECTIONS = 16
"""Of more at the same time, the oldest is closed, if it has had its time: each costs the process a thread."""

LONG_S = 1.0
"""An answer takes milliseconds: a connection that is older gives its place to another one."""

TIMEOUT_S = 5.0
"""A connection on which nothing happens for so long is closed."""

DEADLINE_S = 15.0
"""And so is one that takes longer in all: a byte now and then would keep a thread for ever."""

Request = socket.socket | tuple[bytes, socket.socket]  # as socketserver has it
Address = tuple[str, int] | str
App = Callable[[dict[str, str], Callable[..., object]], Iterable[bytes]]


@dataclass(frozen=True)
class Protection:
    """Who may read.

    Attributes:
        certificate: File with the server's certificate and those above it; None: plain HTTP.
        key: File with its private key.
        client_ca: File with the authority whose clients alone may read; None: others may, too.
        user: Name that has to be given; None: none.
        password: And the password with it.
    """

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    user: str | None = None
    password: str = ""

    def wrap(self, connection: socket.socket) -> socket.socket:
        """Return the socket that listens, with TLS where there is a certificate.

        Raises:
            OSError: A file cannot be read, or is none.
        """
        if self.certificate is None:
            return connection
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        # The TLS handshake runs in the thread of the connection: an unfinished one does not block others.
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def guard(self, app: App) -> App:
        """Return an application that asks for name and password first."""
        if self.user is None:
            return app
        wanted = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()

        def guarded(environ: dict[str, str], start_response: Callable[..., object]) -> Iterable[bytes]:
            given = environ.get("HTTP_AUTHORIZATION", "")
            if hmac.compare_digest(given.encode(), f"Basic {wanted}".encode()):
                return app(environ, start_response)
            start_response("401 Unauthorized", [("WWW-Authenticate", 'Basic realm="metrics"')])
            return [b"user and password are needed\n"]

        return guarded


OPEN = Protection()


def kept_fresh(app: App, clock: Callable[[], float] = monotonic) -> App:
    """Return an application that gives an answer again for a second to who asks in the same way."""
    lock = Lock()
    answers: dict[tuple[str, ...], tuple[float, list[object], list[bytes]]] = {}

    def fresh(environ: dict[str, str], start_response: Callable[..., object]) -> Iterable[bytes]:
        names = ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING", "HTTP_ACCEPT", "HTTP_ACCEPT_ENCODING")
        way = tuple(environ.get(name, "") for name in names)
        with lock:  # concurrent requests get the same answer
            now_s = clock()
            if way not in answers or now_s - answers[way][0] >= FRESH_S:
                if len(answers) >= MAX_CONNECTIONS:
                    answers.clear()
                head: list[object] = []
                body = list(app(environ, lambda *given: head.extend(given)))
                answers[way] = now_s, head, body
            _, given, body = answers[way]
        start_response(*given)
        return body

    return fresh


class _Handler(WSGIRequestHandler):
    """Answers one request, and says nothing about it."""

    def setup(self) -> None:
        """Finish the handshake, where there is one."""
        self.request.settimeout(TIMEOUT_S)
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
        super().setup()

    def handle(self) -> None:
        """Answer; a closed connection is not an error."""
        with suppress(OSError):
            super().handle()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    """Answers a few at the same time, each in a thread."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, place: tuple[str, int], family: socket.AddressFamily) -> None:
        self.address_family = family
        self._free = BoundedSemaphore(MAX_CONNECTIONS)
        self._begun_s: dict[socket.socket, float] = {}
        super().__init__(place, _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server for this host's name, as the base class would."""
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Request, client_address: Address) -> None:
        """Answer in a thread, if one is free."""
        assert isinstance(request, socket.socket)  # it is not a server of datagrams
        if not (self._free.acquire(blocking=False) or self._replaces_oldest()):
            self.shutdown_request(request)
            return
        self._begun_s[request] = monotonic()
        with ExitStack() as on_error:
            on_error.callback(self._forget, request)  # if no thread could be started
            super().process_request(request, client_address)
            on_error.pop_all()

    def _replaces_oldest(self) -> bool:
        """Close the oldest connection, if it is old; return whether its place is free by now."""
        oldest, begun_s = min(self._begun_s.copy().items(), key=lambda item: item[1], default=(None, 0.0))
        if oldest is None or monotonic() - begun_s < LONG_S:
            return False
        with suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)
        return self._free.acquire(timeout=0.2)

    def process_request_thread(self, request: Request, client_address: Address) -> None:
        """Answer."""
        assert isinstance(request, socket.socket)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        self._begun_s.pop(request, None)
        self._free.release()

    def service_actions(self) -> None:
        """End what has taken too long; called twice a second."""
        for request, begun_s in list(self._begun_s.items()):
            if monotonic() - begun_s > DEADLINE_S:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: object) -> None:
        """Ignore errors of clients."""


class Exporter:
    """An HTTP server for one rank's metrics.

    Args:
        registry: What to serve.
        host: Address to listen on.
        port: First port to try. While it is taken, the next try is 100 ports on, so that ranks of
            a host do not run into each other.
        protection: Who may read.
    """

    def __init__(
        self, registry: CollectorRegistry, host: str, port: int, protection: Protection = OPEN
    ) -> None:
        self.address: str | None = None
        self._server: _Server | None = None
        self._thread: Thread | None = None
        for candidate in [p for n in range(MAX_TRIES) if (p := port + n * PORT_STEP) <= MAX_PORT]:
            try:
                server = listen(host, candidate, protection)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                log.warning("metrics are not served on %s:%d: %s", host, candidate, error)
                return

            server.set_app(protection.guard(kept_fresh(make_wsgi_app(registry))))
            self._server = server
            self._thread = Thread(target=server.serve_forever, daemon=True)
            self._thread.start()
            self.address = f"[{host}]:{candidate}" if ":" in host else f"{host}:{candidate}"
            if candidate != port:
                log.warning("metrics port %d is in use; serving on %d", port, candidate)
            return
        log.warning("metrics are not served: port %d and %d others are in use", port, MAX_TRIES - 1)

    def address_from(self, name: str) -> str | None:
        """Return the address for others to use: a wildcard is replaced by this host's name."""
        if self.address is None:
            return None
        host, _, port = self.address.rpartition(":")
        return f"{name}:{port}" if host in WILDCARDS else self.address

    def close(self) -> None:
        """Stop serving. Safe to call twice."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = self._thread = None


def listen(host: str, port: int, protection: Protection) -> _Server:
    """Return a server that listens, and does not answer yet.

    Raises:
        OSError: The address is not this host's, or in use; or a file of the protection is wrong.
    """
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    server = _Server((str(place[0]), port), family)
    try:
        server.socket = protection.wrap(server.socket)
    except OSError:
        server.server_close()
        raise
    return server
