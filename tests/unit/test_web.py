"""The servers of the control side under rude, curious and hostile clients."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from support.waiting import wait_until

from horovod_train.cli.main import cli
from horovod_train.errors import UserError
from horovod_train.events.file import EventsFile, opened
from horovod_train.plugins.serve import page as page_module
from horovod_train.plugins.serve import web as web_module
from horovod_train.plugins.serve.command import page_addresses
from horovod_train.plugins.serve.page import serve_page, serve_targets
from horovod_train.plugins.serve.web import names_of

TOKEN = "s3cret"  # noqa: S105
KNOWN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def runs(tmp_path):
    folder = tmp_path / "runs" / "j" / "r"
    folder.mkdir(parents=True)
    events = EventsFile(folder / "events.jsonl")
    events.write(opened("j", "r"))
    events.close()
    (tmp_path / "secret.txt").write_text("nobody's business")
    return tmp_path / "runs"


@pytest.fixture
def page(runs):
    server = serve_page([runs], [], host="127.0.0.1", port=0, token=TOKEN)
    yield server.port
    server.close()
    server.close()


def ask(port, path, method="GET", body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, given)
        answer = connection.getresponse()
        found = {name.title(): value for name, value in answer.getheaders()}
        return answer.status, found, answer.read().decode()
    finally:
        connection.close()


def raw(port, data):
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(data)
        with suppress(OSError):  # it has gone already
            connection.shutdown(socket.SHUT_WR)
        connection.settimeout(10)
        try:
            return connection.recv(65536)
        except ConnectionResetError:
            return b""


PATHS = [
    "/",
    "/page.js",
    "/page.css",
    "/charts.js",
    "/plotly.js",
    "/page/jobs",
    "/page/run?key=j/r",
    "/page/log?key=j/r",
]


@pytest.mark.parametrize("path", [*PATHS, "/nothing"])
@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Cookie": "horovod_train_1=s3cret"}]
)
def test_nothing_is_read_without_the_token(page, path, headers):
    status, _, text = ask(page, path, **headers)

    assert status == 401
    assert "the token is missing or wrong" in text
    assert "horovod_train</title>" not in text


def test_a_browser_without_a_token_is_asked_for_it(page):
    status, headers, text = ask(page, "/", Accept="text/html,application/xhtml+xml")

    assert status == 401
    assert headers["Content-Type"].startswith("text/html")
    assert "form-action 'self'" in headers["Content-Security-Policy"]
    assert '<input name="token" type="password"' in text
    assert ask(page, "/page/jobs", Accept="text/html")[1]["Content-Type"].startswith("text/plain")
    assert ask(page, f"/?token={TOKEN}", Accept="text/html")[0] == 200  # what the form requests


@pytest.mark.parametrize("token", [TOKEN[:-1], TOKEN[:1], "", TOKEN + "x", TOKEN.upper(), "é"])
def test_a_part_of_the_token_is_none(page, token):
    assert ask(page, "/page/jobs", Authorization=f"Bearer {token}".encode())[0] == 401


@pytest.mark.parametrize("host", ["127.0.0.1:abc", "127.0.0.1:99999999", "[::1", "[", "a]"])
def test_a_host_that_cannot_be_read_is_refused(page, host):
    assert ask(page, "/", Host=host)[0] == 400


@pytest.mark.parametrize("path", PATHS)
def test_with_it_everything_is_and_nothing_is_kept_or_embedded(page, path):
    status, headers, _ = ask(page, path, **KNOWN)

    assert status == 200
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "Server" not in headers
    assert headers["Cache-Control"] == ("private, max-age=86400" if path == "/plotly.js" else "no-store")


def test_the_token_becomes_a_cookie_that_scripts_and_other_pages_do_not_get(page):
    status, headers, _ = ask(page, f"/?token={TOKEN}")

    assert status == 200, "a redirect from another page's link would come without the cookie"
    cookie = headers["Set-Cookie"]
    assert cookie.startswith(f"horovod_train_{page}=")
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert ask(page, "/page/jobs", Cookie=cookie.partition(";")[0])[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:1", "null"])
def test_another_origin_is_refused(page, origin):
    assert ask(page, "/page/jobs", Origin=origin, **KNOWN)[0] == 403


def test_its_own_origin_is_not(page):
    assert ask(page, "/page/jobs", Origin=f"http://127.0.0.1:{page}", **KNOWN)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "[::2]", "localhost.evil.example"])
def test_another_name_for_this_address_is_refused(page, host):
    """A page of evil.example could let its name point here, and would be of the same origin."""
    assert ask(page, "/page/jobs", Host=host, **KNOWN)[0] == 400


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt", "/..%2fsecret.txt", "/page.js/../../../secret.txt", "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd", "/page/run?key=../secret.txt", "/page/log?key=..%2f..%2fetc", "/page/run?key=",
        "/page/log", "/page/run?key=j/r/../../..", "/page.css%00.js",
    ],
)  # fmt: skip
def test_nothing_outside_is_ever_read(page, path):
    status, _, text = ask(page, path, **KNOWN)

    assert status in (400, 404)
    assert "nobody's business" not in text
    assert "root:" not in text


def test_malformed_requests_disturb_nobody(page):
    for data in (
        b"\0" * 5000, b"GET", b"GET /\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 200_000,
        b"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"\xff\xfe / HTTP/1.1\r\n\r\n",
    ):  # fmt: skip
        answer = raw(page, data)
        assert not answer or answer.startswith(b"HTTP/1.1 4"), answer[:80]

    assert ask(page, "/page/jobs", **KNOWN)[0] == 200


def test_five_hundred_at_the_same_time_are_all_answered(page):
    with ThreadPoolExecutor(50) as pool:
        statuses = list(pool.map(lambda _: ask(page, "/page/jobs", **KNOWN)[0], range(500)))

    assert statuses == [200] * 500


def test_who_does_not_ask_or_read_holds_up_nobody_and_is_closed(runs, monkeypatch):
    monkeypatch.setattr(web_module, "IDLE_S", 0.5)
    server = serve_page([runs], [], host="127.0.0.1", port=0, token=TOKEN)
    try:
        silent = [socket.create_connection(("127.0.0.1", server.port), 5) for _ in range(100)]
        for connection in silent[:50]:
            connection.sendall(b"GET /plotly.js HTTP/1.1\r\nHost: 127.0.0.1\r\n")  # and no end
        assert ask(server.port, "/page/jobs", **KNOWN)[0] == 200
        time.sleep(1.5)
        for connection in silent:
            connection.settimeout(5)
            assert connection.recv(1) == b""
            connection.close()
    finally:
        server.close()


def test_the_oldest_of_many_connections_without_a_request_is_closed(runs, monkeypatch):
    monkeypatch.setattr(web_module, "MAX_WAITING", 20)
    server = serve_page([runs], [], host="127.0.0.1", port=0, token=TOKEN)
    silent = []
    try:
        for number in range(100):
            silent.append(socket.create_connection(("127.0.0.1", server.port), 5))
            silent[-1].sendall(b"GET /page/jobs HTTP/1.1\r\n")  # and no end
            if number % 10 == 0:
                assert ask(server.port, "/page/jobs", **KNOWN)[0] == 200
        silent[0].settimeout(5)
        with suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""
        silent[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            silent[-1].recv(1)
    finally:
        for connection in silent:
            connection.close()
        server.close()


def test_many_connections_at_once_are_closed_down_to_the_limit(runs, monkeypatch):
    monkeypatch.setattr(web_module, "MAX_WAITING", 20)
    server = serve_page([runs], [], host="127.0.0.1", port=0, token=TOKEN)
    silent = [socket.socket() for _ in range(200)]
    try:
        for connection in silent:
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", server.port))
        wait_until(lambda: sum(is_open(connection) for connection in silent) <= 20, 10)
        assert ask(server.port, "/page/jobs", **KNOWN)[0] == 200
    finally:
        for connection in silent:
            connection.close()
        server.close()


def is_open(connection):
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.fixture
def hostile(runs):
    """Folders in which another user has put what blocks, or never ends."""
    for number, name in enumerate(["state.json", "events.jsonl", "job.json"]):
        for kind in ("pipe", "zero", "large"):
            folder = runs / f"{kind}-{number}" / "r"
            folder.mkdir(parents=True)
            (folder / "events.jsonl").write_bytes((runs / "j" / "r" / "events.jsonl").read_bytes())
            (folder / name).unlink(missing_ok=True)
            if kind == "pipe":
                os.mkfifo(folder / name)
            elif kind == "zero":
                (folder / name).symlink_to("/dev/zero")
            else:
                with (folder / name).open("wb") as file:
                    file.truncate(10 * 2**30)
    return runs


def test_foreign_files_stop_nobody(hostile):
    server = serve_page([hostile], [], host="127.0.0.1", port=0, token=TOKEN)
    targets = serve_targets([hostile], "127.0.0.1", 0)
    try:
        assert '"j/r"' in ask(server.port, "/page/jobs", **KNOWN)[2]
        for folder in hostile.iterdir():
            assert ask(server.port, f"/page/run?key={folder.name}/r", **KNOWN)[0] in (200, 404)
        assert ask(server.port, "/page/run?key=j/r", **KNOWN)[0] == 200
        for port in (server.port, targets.port):
            assert 'horovod_train_job_state{run="r"' in ask(port, "/metrics", **KNOWN)[2]
    finally:
        server.close()
        targets.close()


def test_a_report_of_foreign_files_ends(hostile):
    for folder in hostile.iterdir():
        done = CliRunner().invoke(cli, ["report", str(folder / "r"), "--format", "markdown"])
        assert done.exit_code == 0 or isinstance(done.exception, UserError)


class TestTargets:
    def test_are_open_on_loopback_and_need_a_token_where_one_is_set(self, runs, monkeypatch):
        server = serve_targets([runs], "127.0.0.1", 0)
        try:
            assert ask(server.port, "/targets")[2] == "[]"
            assert 'horovod_train_job_state{run="r"' in ask(server.port, "/metrics")[2]
            assert ask(server.port, "/../secret.txt")[0] == 404
        finally:
            server.close()
        monkeypatch.setenv("HOROVOD_TRAIN_TOKEN", TOKEN)
        server = serve_targets([runs], "127.0.0.1", 0)
        try:
            assert ask(server.port, "/targets")[0] == 401
            assert ask(server.port, "/targets", **KNOWN)[0] == 200
        finally:
            server.close()


def test_a_port_that_is_taken_is_said(runs, page):
    with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{page}.*\n.*--port"):
        serve_targets([runs], "127.0.0.1", page)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", {"127.0.0.1", "localhost", "::1"}),
        ("node7", {"node7", "127.0.0.1", "localhost", "::1"}),
        ("0.0.0.0", set()),  # noqa: S104
    ],
)
def test_the_names_of_a_server_follow_from_where_it_listens(host, expected):
    assert set(names_of(host)) == expected


def test_a_person_is_told_how_to_come_from_another_machine():
    here, tunnel = page_addresses("127.0.0.1", 9301, "x")

    assert here == "page: http://127.0.0.1:9301/?token=x"
    assert "ssh -L 9301:127.0.0.1:9301 " in tunnel
    assert "HTTP" in page_addresses("0.0.0.0", 9301, "x")[1]  # noqa: S104
    assert "[::2]:9301" in page_addresses("::2", 9301, "x")[0]


def test_what_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    done = CliRunner().invoke(cli, ["ui", "nothing"])

    assert isinstance(done.exception, UserError)
    assert "is not a folder, and no job 'nothing'" in str(done.exception)


@pytest.mark.parametrize("verb", [["ui"], ["targets", "serve"]], ids=" ".join)
def test_sigterm_ends_a_server_as_ctrl_c_does_where_sigint_is_ignored(tmp_path, verb):
    command = f"trap '' INT; exec {sys.executable} -m horovod_train {' '.join(verb)} {tmp_path} --port 0"
    with subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, text=True) as server:
        assert "http://127.0.0.1:" in server.stdout.readline()
        server.send_signal(signal.SIGTERM)

        assert server.wait(60) == 0


@pytest.mark.parametrize("verb", ["ui", "targets"])
def test_ctrl_c_ends_a_server_that_has_not_said_all_yet(monkeypatch, tmp_path, verb):
    """Else its threads would keep the process for ever."""
    closed = []
    server = SimpleNamespace(port=1, close=lambda: closed.append(verb), wait=lambda: None)
    module, name = {"ui": (page_module, "serve_page"), "targets": (page_module, "serve_targets")}[verb]
    monkeypatch.setattr(module, name, lambda *_, **__: server)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("click.echo", interrupt)
    words = [verb, *(["serve"] if verb == "targets" else []), str(tmp_path)]
    CliRunner().invoke(cli, words)

    assert closed == [verb]
