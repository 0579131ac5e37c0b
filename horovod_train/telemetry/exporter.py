"""Serve a rank's metrics over HTTP. A port in use moves on; nothing here ever stops training."""

from __future__ import annotations

import errno
import logging
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

log = logging.getLogger(__name__)

PORT_STEP = 100
MAX_PORT = 65535
WILDCARDS = {"0.0.0.0", "[::]"}  # noqa: S104  (recognized, not bound to)
MAX_TRIES = 20


class Exporter:
    """An HTTP server for one rank's metrics.

    Args:
        registry: What to serve.
        host: Address to listen on.
        port: First port to try. While it is taken, the next try is 100 ports on, so that ranks of
            a host do not run into each other.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self.address: str | None = None
        self._server: WSGIServer | None = None
        self._thread: Thread | None = None
        for candidate in [p for n in range(MAX_TRIES) if (p := port + n * PORT_STEP) <= MAX_PORT]:
            try:
                server, thread = start_http_server(candidate, addr=host, registry=registry)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                log.warning("metrics are not served on %s:%d: %s", host, candidate, error)
                return

            self._server, self._thread = server, thread
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
