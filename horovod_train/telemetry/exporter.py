"""HTTP server of a rank's metrics. Its errors do not stop training.

The server runs in the training process. To limit its use of time and threads, responses are cached for a
second, the number of connections is limited, and slow connections are closed.
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
"""Time for which a response is cached, because creating one takes milliseconds from training."""

MAX_CONNECTIONS = 16
"""Maximum number of connections (each needs a thread), and maximum number of cached responses."""

REPLACEABLE_AFTER_S = 1.0
"""At the maximum number of connections, a new one replaces the oldest one if that is older than this."""

TIMEOUT_S = 5.0
"""A connection without activity for this time is closed."""

DEADLINE_S = 15.0
"""A connection is closed at this age: single bytes at long intervals would otherwise occupy its thread."""

Request = socket.socket | tuple[bytes, socket.socket]  # the type in socketserver
Address = tuple[str, int] | str
App = Callable[[dict[str, str], Callable[..., object]], Iterable[bytes]]


@dataclass(frozen=True)
class Protection:
    """TLS and basic authentication of the server.

    Attributes:
        certificate: File with the certificate chain of the server; None: plain HTTP.
        key: File with the private key.
        client_ca: File with the CA of the required client certificates; None: none are required.
        user: User name for basic authentication; None: no authentication.
        password: Password of this user.
    """

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    user: str | None = None
    password: str = ""

    def wrap(self, connection: socket.socket) -> socket.socket:
        """Return the listening socket, with TLS if there is a certificate.

        Raises:
            OSError: A file cannot be read, or its content is invalid.
        """
        if self.certificate is None:
            return connection
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        # The TLS handshake runs in the thread of the connection: an incomplete one blocks no others.
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def guard(self, app: App) -> App:
        """Return an application that requires user name and password, if a user is set."""
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


def cached(app: App, clock: Callable[[], float] = monotonic) -> App:
    """Return an application that caches the responses of ``app`` for ``FRESH_S``, by request."""
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
    """Handler of one request. It logs nothing."""

    def setup(self) -> None:
        """Set the timeout, and perform the TLS handshake if there is one."""
        self.request.settimeout(TIMEOUT_S)
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
        super().setup()

    def handle(self) -> None:
        """Send the response. A closed connection is not an error."""
        with suppress(OSError):
            super().handle()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    """Server with one thread per connection, for at most ``MAX_CONNECTIONS``."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, place: tuple[str, int], family: socket.AddressFamily) -> None:
        self.address_family = family
        self._free = BoundedSemaphore(MAX_CONNECTIONS)
        self._begun_s: dict[socket.socket, float] = {}
        super().__init__(place, _Handler)

    def server_bind(self) -> None:
        """Bind without the DNS lookup of this host's name that the base class performs."""
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Request, client_address: Address) -> None:
        """Handle a connection in a thread; close it if the maximum is reached."""
        assert isinstance(request, socket.socket)  # not a datagram server
        if not (self._free.acquire(blocking=False) or self._replaces_oldest()):
            self.shutdown_request(request)
            return
        self._begun_s[request] = monotonic()
        with ExitStack() as on_error:
            on_error.callback(self._forget, request)  # if no thread could be started
            super().process_request(request, client_address)
            on_error.pop_all()

    def _replaces_oldest(self) -> bool:
        """Close the oldest connection, if it is old enough; return whether its thread has ended."""
        oldest, begun_s = min(self._begun_s.copy().items(), key=lambda item: item[1], default=(None, 0.0))
        if oldest is None or monotonic() - begun_s < REPLACEABLE_AFTER_S:
            return False
        with suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)
        return self._free.acquire(timeout=0.2)

    def process_request_thread(self, request: Request, client_address: Address) -> None:
        """Handle a connection, and release its slot."""
        assert isinstance(request, socket.socket)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        self._begun_s.pop(request, None)
        self._free.release()

    def service_actions(self) -> None:
        """Close connections older than ``DEADLINE_S``; called twice a second."""
        for request, begun_s in list(self._begun_s.items()):
            if monotonic() - begun_s > DEADLINE_S:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: object) -> None:
        """Ignore errors of clients."""


class Exporter:
    """HTTP server of one rank's metrics. It logs a warning if it cannot listen.

    Args:
        registry: Metrics to serve.
        host: Address to listen on.
        port: First port to try. If it is in use, the next try is ``PORT_STEP`` higher, because the ports
            between are those of other ranks of the host.
        protection: TLS and authentication.
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

            server.set_app(protection.guard(cached(make_wsgi_app(registry))))
            self._server = server
            self._thread = Thread(target=server.serve_forever, daemon=True)
            self._thread.start()
            self.address = f"[{host}]:{candidate}" if ":" in host else f"{host}:{candidate}"
            if candidate != port:
                log.warning("metrics port %d is in use; serving on %d", port, candidate)
            return
        log.warning("metrics are not served: port %d and %d others are in use", port, MAX_TRIES - 1)

    def address_from(self, name: str) -> str | None:
        """Return the address for clients, with ``name`` instead of a wildcard; None: it does not listen."""
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
    """Return a server that listens, but does not respond yet.

    Raises:
        OSError: The address is invalid or in use, or a file of ``protection`` is invalid.
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
