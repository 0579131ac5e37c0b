"""A real S3 server, moto, behind a proxy that makes it fail."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from support.launching import free_port
from support.waiting import wait_until

FAULTS = ("503", "cut", "reset", "slow")


class Proxy(BaseHTTPRequestHandler):
    """Forwards requests; each GET of an object takes the next fault of the server, if there is one."""

    protocol_version = "HTTP/1.0"  # a connection for each request

    def forward(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        fault = None
        if self.command == "GET" and self.path.count("/") > 1 and "list-type" not in self.path:
            self.server.requests.append(self.path)
            fault = self.server.faults.popleft() if self.server.faults else None
        if fault == "503":
            return self.answer(503, [], b"SlowDown")
        if fault == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
            return None
        connection = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=30)
        connection.request(self.command, self.path, body, dict(self.headers.items()))
        response = connection.getresponse()
        content = response.read()
        connection.close()
        if fault == "slow":
            time.sleep(0.3)
        return self.answer(response.status, response.getheaders(), content, is_cut=fault == "cut")

    def answer(self, status, headers, content, *, is_cut=False):
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in {"transfer-encoding", "content-length", "connection", "date", "server"}:
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        else:
            self.send_header("Content-Length", dict(headers).get("Content-Length", "0"))
        self.end_headers()
        if self.command == "HEAD":
            return
        with suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(content[: len(content) // 2] if is_cut else content)
            if is_cut:
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward  # noqa: N815

    def log_message(self, *_):
        """Print nothing."""


class Store:
    """An S3 store with the bucket ``data``.

    Attributes:
        environment: Environment variables with which clients find it.
        faults: Faults of the next requests of objects.
        requests: Paths of the objects that were requested.
    """

    def __init__(self, proxy, upstream):
        self.faults, self.requests = proxy.faults, proxy.requests
        self.environment = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_port}",
            "AWS_MAX_ATTEMPTS": "1",
        }
        self._upstream = upstream

    def put(self, key, content):
        """Store an object, without faults."""
        connection = http.client.HTTPConnection("127.0.0.1", self._upstream, timeout=30)
        connection.request(
            "PUT", f"/data/{key}" if key else "/data", content, {"Authorization": "AWS test:test"}
        )
        assert connection.getresponse().status == 200
        connection.close()


@contextmanager
def s3_store():
    """Start a store on free ports of the loopback address."""
    upstream = free_port()
    command = [sys.executable, "-c", f"from moto.server import main; main(['-p', '{upstream}'])"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ)
    ) as moto:
        proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
        proxy.daemon_threads = True
        proxy.upstream, proxy.faults, proxy.requests = upstream, deque(), []
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            wait_until(lambda: _answers(upstream), 60)
            store = Store(proxy, upstream)
            store.put("", b"")
            yield store
        finally:
            proxy.shutdown()
            proxy.server_close()
            thread.join()
            moto.kill()


def _answers(port):
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
