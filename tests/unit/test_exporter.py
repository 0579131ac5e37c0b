"""Whoever asks a rank for its metrics, however rudely, is answered or left alone."""

from __future__ import annotations

import base64
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families
from support.launching import free_port

from horovod_train.config.schema import Metrics
from horovod_train.errors import UserError
from horovod_train.telemetry import exporter as exporter_module
from horovod_train.telemetry.exporter import MAX_CONNECTIONS, OPEN, Exporter, Protection, cached
from horovod_train.telemetry.recorder import protection_of, push_last_metrics, write_last_metrics


@pytest.fixture
def registry():
    made = CollectorRegistry()
    Gauge("answer", "What it says.", registry=made).set(42)
    return made


@pytest.fixture
def serve(registry):
    started = []

    def start(protection=OPEN):
        exporter = Exporter(registry, "127.0.0.1", free_port(), protection)
        started.append(exporter)
        host, _, port = exporter.address.rpartition(":")
        return host, int(port)

    yield start
    for exporter in started:
        exporter.close()


def ask(place, path="/metrics", *, scheme="http", context=None, **headers):
    request = urllib.request.Request(f"{scheme}://{place[0]}:{place[1]}{path}", headers=headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=10, context=context) as response:  # noqa: S310
        return response.read().decode()


def test_an_answer_is_good_for_a_second():
    made, now = [], [0.0]

    def app(environ, start_response):
        made.append(environ["PATH_INFO"])
        start_response("200 OK", [("A", "b")])
        return [str(len(made)).encode()]

    heads = []
    fresh = cached(app, clock=lambda: now[0])

    def get(path="/metrics"):
        return b"".join(fresh({"PATH_INFO": path}, lambda *head: heads.append(head)))

    assert [get(), get(), get("/other")] == [b"1", b"1", b"2"]
    now[0] = 0.99
    assert get() == b"1"
    now[0] = 1.0
    assert get() == b"3"
    assert heads == [("200 OK", [("A", "b")])] * 5


def test_answers_to_many_ways_of_asking_are_not_kept_for_ever():
    sizes = []

    def app(environ, start_response):
        sizes.append(1)
        start_response("200 OK", [])
        return [b""]

    fresh = cached(app, clock=lambda: 0.0)
    for number in range(10 * MAX_CONNECTIONS):
        fresh({"QUERY_STRING": str(number)}, lambda *_: None)

    (answers,) = (cell.cell_contents for cell in fresh.__closure__ if isinstance(cell.cell_contents, dict))
    assert len(answers) <= MAX_CONNECTIONS


def test_whatever_comes_over_the_wire_the_next_one_is_answered(serve):
    place = serve()
    for data in (
        b"\0" * 1000, b"GET", b"GET /metrics\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 100_000,
        b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", b"POST /metrics HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: \xff\xfe\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
    ):  # fmt: skip
        # The server may close the connection before it has read everything: any of these calls may then fail.
        with socket.create_connection(place, 5) as connection, suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(10)
            while connection.recv(65536):
                pass

    assert "answer 42.0" in ask(place)


def test_who_sends_a_byte_now_and_then_does_not_keep_others_out(serve, monkeypatch):
    monkeypatch.setattr(exporter_module, "DEADLINE_S", 1.0)
    place = serve()
    slow = [socket.create_connection(place, 5) for _ in range(MAX_CONNECTIONS)]
    deadline_s = time.monotonic() + 20
    while True:
        for connection in slow:
            with suppress(OSError):
                connection.sendall(b"G")
        with suppress(OSError, AssertionError):
            assert "answer 42.0" in ask(place)
            break
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    for connection in slow:
        connection.close()


def test_connections_that_are_renewed_for_ever_do_not_keep_prometheus_out(serve):
    place = serve()
    stop = threading.Event()

    def drip():
        while not stop.is_set():
            with suppress(OSError), socket.create_connection(place, 5) as connection:
                while not stop.wait(0.2):
                    connection.sendall(b"G")

    threads = [threading.Thread(target=drip) for _ in range(MAX_CONNECTIONS)]
    for thread in threads:
        thread.start()
    time.sleep(2 * exporter_module.REPLACEABLE_AFTER_S)
    try:
        assert "answer 42.0" in ask(place)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_thread_that_cannot_be_started_leaves_its_place_to_others(serve, monkeypatch):
    place = serve()
    with monkeypatch.context() as broken:
        broken.setattr(exporter_module.ThreadingMixIn, "process_request", lambda *_: 1 / 0)
        for _ in range(2 * MAX_CONNECTIONS):
            with suppress(OSError):
                ask(place)

    assert "answer 42.0" in ask(place)


def test_who_does_not_read_and_who_does_not_ask_is_left_alone(serve, monkeypatch):
    monkeypatch.setattr(exporter_module, "TIMEOUT_S", 0.3)
    place = serve()
    silent = [socket.create_connection(place, 5) for _ in range(3 * MAX_CONNECTIONS)]

    time.sleep(1.0)
    assert "answer 42.0" in ask(place)
    for connection in silent:
        connection.settimeout(5)
        assert connection.recv(1) == b"", "it was closed"
        connection.close()


def test_five_hundred_at_the_same_time_cost_few_threads(serve):
    place = serve()
    most = [0]
    over = threading.Event()

    def count():
        while not over.wait(0.002):
            names = [each.name for each in threading.enumerate() if "process_request" in each.name]
            most[0] = max(most[0], len(names))

    counting = threading.Thread(target=count)
    counting.start()
    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda _: attempt(place), range(500)))
    over.set()
    counting.join()

    assert answers.count("answered") > 0
    assert set(answers) <= {"answered", "closed"}
    assert most[0] <= 2 * MAX_CONNECTIONS, "those that have just answered among them"
    assert "answer 42.0" in ask(place)


def attempt(place):
    try:
        return "answered" if "answer 42.0" in ask(place) else "wrong"
    except OSError:
        return "closed"


class TestPasswords:
    def test_are_asked_for(self, serve):
        place = serve(Protection(user="prometheus", password="söme:thing"))  # noqa: S106
        right = base64.b64encode("prometheus:söme:thing".encode()).decode()
        for headers in ({}, {"Authorization": "Basic xyz"}, {"Authorization": f"Basic {right}x"}):
            with pytest.raises(urllib.error.HTTPError) as refused:
                ask(place, **headers)
            assert refused.value.code == 401
            assert refused.value.headers["WWW-Authenticate"].startswith("Basic")
            refused.value.close()

        assert "answer 42.0" in ask(place, Authorization=f"Basic {right}")

    def test_come_from_a_variable(self):
        metrics = Metrics(basic_auth={"user": "p", "password_variable": "SCRAPE"})

        assert protection_of(metrics, {"SCRAPE": "x"}) == Protection(user="p", password="x")  # noqa: S106
        with pytest.raises(UserError, match=r"SCRAPE is not set.*\n.*launch\.secrets"):
            protection_of(metrics, {})


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, a server for 127.0.0.1 and a client, as openssl makes them."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
            "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")  # fmt: skip
    for name in ("server", "client"):
        (folder / "extensions").write_text("subjectAltName=IP:127.0.0.1\n")
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj",
                f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "2", "-extfile", "extensions", "-out", f"{name}.pem")  # fmt: skip
    return folder


class TestTls:
    def test_serves_who_trusts_the_certificate(self, serve, certificates):
        place = serve(Protection(certificates / "server.pem", certificates / "server.key"))
        trusting = ssl.create_default_context(cafile=certificates / "ca.pem")

        assert "answer 42.0" in ask(place, scheme="https", context=trusting)
        with pytest.raises(urllib.error.URLError):
            ask(place, scheme="https", context=ssl.create_default_context())
        with pytest.raises(OSError):  # noqa: PT011  (which one depends on when the server hangs up)
            ask(place)

    def test_may_ask_for_a_certificate_of_the_client(self, serve, certificates):
        place = serve(
            Protection(certificates / "server.pem", certificates / "server.key", certificates / "ca.pem")
        )
        anybody = ssl.create_default_context(cafile=certificates / "ca.pem")
        known = ssl.create_default_context(cafile=certificates / "ca.pem")
        known.load_cert_chain(certificates / "client.pem", certificates / "client.key")

        assert "answer 42.0" in ask(place, scheme="https", context=known)
        with pytest.raises(OSError):  # noqa: PT011
            ask(place, scheme="https", context=anybody)

    def test_who_does_not_finish_the_handshake_holds_up_nobody(self, serve, certificates):
        place = serve(Protection(certificates / "server.pem", certificates / "server.key"))
        trusting = ssl.create_default_context(cafile=certificates / "ca.pem")
        with socket.create_connection(place, 5):
            assert "answer 42.0" in ask(place, scheme="https", context=trusting)

    def test_a_certificate_that_is_not_there_is_a_warning_and_no_plain_http(self, registry, tmp_path, caplog):
        exporter = Exporter(
            registry, "127.0.0.1", free_port(), Protection(tmp_path / "none", tmp_path / "none")
        )

        assert exporter.address is None
        assert "metrics are not served" in caplog.text


class TestTheLastMetrics:
    def test_are_a_file_that_everybody_may_read(self, registry, tmp_path):
        write_last_metrics(registry, tmp_path / "rank-0.prom")

        (family,) = text_string_to_metric_families((tmp_path / "rank-0.prom").read_text())
        assert family.samples[0].value == 42
        assert (tmp_path / "rank-0.prom").stat().st_mode & 0o777 == 0o644
        assert [file.name for file in tmp_path.iterdir()] == ["rank-0.prom"]

    def test_a_folder_that_is_not_there_is_a_warning(self, registry, tmp_path, caplog):
        write_last_metrics(registry, tmp_path / "none" / "rank-0.prom")

        assert "were not written" in caplog.text

    def test_are_pushed_to_where_jobs_and_ranks_do_not_overwrite_each_other(self, registry):
        pushed = []

        class Gateway(BaseHTTPRequestHandler):
            def do_PUT(self):
                pushed.append((self.path, self.rfile.read(int(self.headers["Content-Length"])).decode()))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        with HTTPServer(("127.0.0.1", 0), Gateway) as server:
            thread = threading.Thread(target=server.handle_request)
            thread.start()
            push_last_metrics(registry, f"http://127.0.0.1:{server.server_port}", "digits", 3)
            thread.join()

        ((path, text),) = pushed
        assert path in (
            "/metrics/job/horovod_train/training_job/digits/rank/3",
            "/metrics/job/horovod_train/rank/3/training_job/digits",
        )
        assert "answer 42.0" in text

    def test_a_gateway_that_speaks_something_else_is_a_warning(self, registry, caplog):
        listener = socket.create_server(("127.0.0.1", 0))

        def greet():
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        push_last_metrics(registry, f"http://127.0.0.1:{listener.getsockname()[1]}", "digits", 3)
        thread.join()
        listener.close()

        assert "were not pushed" in caplog.text

    def test_a_metric_that_cannot_be_read_is_a_warning(self, registry, tmp_path, caplog):
        class Broken:
            def collect(self):
                raise ValueError("counters can only grow")

        registry.register(Broken())
        registry.collect()
        write_last_metrics(registry, tmp_path / "rank-0.prom")

        assert "counters can only grow" in caplog.text

    def test_a_gateway_that_is_gone_is_a_warning(self, registry, caplog):
        push_last_metrics(registry, f"http://127.0.0.1:{free_port()}", "digits", 3)

        assert "were not pushed" in caplog.text
