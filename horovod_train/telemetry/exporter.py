"""Serve a rank's metrics over HTTP. A port in use moves on; nothing here ever stops training."""

from __future__ import annotations

import errno
import logging

from prometheus_client import CollectorRegistry, start_http_server

log = logging.getLogger(__name__)

PORT_STEP = 100
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
        self._stop = lambda: None
        for candidate in [p for n in range(MAX_TRIES) if (p := port + n * PORT_STEP) <= 65535]:
            try:
                server, thread = start_http_server(candidate, addr=host, registry=registry)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                log.warning("metrics are not served on %s:%d: %s", host, candidate, error)
                return

            def stop() -> None:
                server.shutdown()
                server.server_close()
                thread.join()

            self._stop = stop
            self.address = f"[{host}]:{candidate}" if ":" in host else f"{host}:{candidate}"
            if candidate != port:
                log.warning("metrics port %d is in use; serving on %d", port, candidate)
            return
        log.warning("metrics are not served: port %d and %d others are in use", port, MAX_TRIES - 1)

    def close(self) -> None:
        """Stop serving. Safe to call twice."""
        self._stop()
        self._stop = lambda: None
