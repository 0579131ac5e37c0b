"""The HTTP API: each verb, over real HTTP, with jobs whose launcher is a fake."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
from support.fake_launcher import FakeLauncher, progress, summary, write_events
from support.waiting import wait_until

import horovod_train as ht
from horovod_train import client as client_module
from horovod_train.errors import (
    ConfigError,
    KeyUsedError,
    LaunchError,
    LauncherTimeoutError,
    ServerError,
    UnknownNameError,
    UserError,
)
from horovod_train.events.file import EVENTS_FILE, EventsFile
from horovod_train.events.types import Evaluation
from horovod_train.launch import submit as submitting
from horovod_train.launch.base import JobStatus
from horovod_train.plugins.serve import api, remote, web, work
from horovod_train.plugins.serve import api as streams
from horovod_train.plugins.serve import web as tokens_module
from horovod_train.plugins.serve.page import serve_page
from horovod_train.plugins.serve.web import Tls, Tokens, read_tokens
from horovod_train.plugins.serve.work import Statuses

OWN, READ, END, SUBMIT = (f"{name}-token-0123456789" for name in ("own", "read", "cancel", "submit"))
JOB = {"name": "j", "task": "digits", "train": {"epochs": 2}}
TASK = "class Task:\n    pass\n"


@pytest.fixture
def launcher(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remote, "PAUSE_S", 0.05)
    monkeypatch.setattr(client_module.FileTail, "pause_s", 0.02)
    monkeypatch.setattr(streams, "STATUS_INTERVAL_S", 0.05)
    monkeypatch.setattr(api, "POLL_S", 0.02)
    monkeypatch.setattr("horovod_train.plugins.serve.work.LOCAL_AGE_S", 0.0)
    made = FakeLauncher()
    for module in (client_module, submitting):
        monkeypatch.setattr(module, "launcher_named", lambda name: made)
    return made


@pytest.fixture
def tokens(tmp_path):
    file = tmp_path / "tokens"
    file.write_text(f"# of the tests\nread {READ}\ncancel {END}\n\nsubmit {SUBMIT}\n")
    file.chmod(0o600)
    return file


@pytest.fixture
def serve(launcher, tokens, tmp_path):
    servers = []

    def start(most="submit", **options):
        servers.append(
            serve_page(
                [tmp_path / "runs"], [], host="127.0.0.1", port=options.pop("port", 0), token=OWN,
                token_file=tokens, max_role=most, **options,
            )
        )  # fmt: skip
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def port(serve):
    return serve().port


@pytest.fixture
def client(port):
    return ht.Client(f"http://127.0.0.1:{port}", SUBMIT, retry_timeout_s=5)


def ask(port, path, method="GET", body=None, token=SUBMIT, **headers):
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            given["Authorization"] = f"Bearer {token}"
        if body is not None:
            given.setdefault("Content-Type", "application/json")
        data = json.dumps(body) if isinstance(body, dict | list) else body
        is_chunked = "Transfer-Encoding" in given
        connection.request(method, f"/api/v1{path}", data, given, encode_chunked=is_chunked)
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if text.startswith("{") else text
    finally:
        connection.close()


def read_all(connection):
    """Return how many bytes come before the end of a connection."""
    size_bytes = 0
    with suppress(ConnectionResetError):
        while data := connection.recv(1 << 20):
            size_bytes += len(data)
    return size_bytes


def test_streams_are_json_also_with_numbers_that_are_not_finite(client, port):
    job = client.submit(JOB)
    write_events(job.folder, progress(2, float("nan")), Evaluation(epoch=0, metrics={"a.b": float("-inf")}))
    _, text = ask(port, f"/jobs/{job.id}/events?follow=false")

    def refuse(constant):
        raise AssertionError(constant)

    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    documents = [json.loads(line, parse_constant=refuse) for line in lines]
    assert documents[0]["loss"] is None
    assert documents[0]["not_finite"] == [["loss", "nan"]]
    assert documents[1]["not_finite"] == [["metrics", "a.b", "-inf"]]
    assert repr([record.event for record in job.events()][1]).endswith(
        "metrics={'a.b': -inf}, step=None, is_within_epoch=False)"
    )


class TestAHandleThroughAServer:
    def test_is_that_of_a_job_on_this_machine(self, client, launcher):
        job = client.submit(JOB, {"train.epochs": 7})
        write_events(
            job.folder,
            progress(1, 9.0, grad_norm=2.0),
            progress(2, float("nan")),
            Evaluation(epoch=0, metrics={"accuracy": 0.5}, step=2),
            summary(steps=2, metrics={"accuracy": 0.5, "auc": float("nan")}, checkpoint="/c/step-2"),
        )
        (job.folder / "run.log").write_text("[1,1]<stdout>:hello\nlast line")
        here = ht.job(job.id)

        (request,) = launcher.requests
        assert request.job.train.epochs == 7
        assert (job.id, job.launcher, job.folder) == (here.id, here.launcher, here.folder)
        assert job.status() == here.status() == JobStatus("running")
        assert repr(job.events()) == repr(here.events()) != repr([])
        assert repr(job.metrics()) == repr(here.metrics())
        assert list(job.logs()) == ["[rank 1] hello", "last line"]
        launcher.now = JobStatus("succeeded", 0)
        assert repr(job.result()) == repr(here.result())
        assert job.result().num_steps == 2
        assert "<svg" not in job._repr_html_()

    def test_drains_and_cancels(self, client, launcher):
        client.submit(JOB).drain()
        launcher.now = JobStatus("running")
        status = client.job("j").cancel()
        launcher.now = JobStatus("running")
        client.job("j").cancel(now=True)

        assert launcher.asked == ["drain", "stop", "kill"]
        assert status == JobStatus("cancelled", 143)

    def test_waits_as_long_as_it_may_and_no_longer(self, client, launcher):
        job = client.submit(JOB)
        with pytest.raises(TimeoutError, match=rf"{job.id} has not ended within 0.1 s"):
            job.wait(0.1)
        threading.Timer(0.3, setattr, (launcher, "now", JobStatus("preempted", 75, "saved"))).start()

        with pytest.raises(ht.JobFailedError, match="preempted. saved") as caught:
            job.result(10)

        assert caught.value.exit_code == 75

    def test_lists_jobs_by_state_name_and_launcher(self, client, launcher):
        ids = [client.submit({**JOB, "name": name}).id for name in ("a", "b", "a")]

        assert [job.id for job in client.jobs()] == ids[::-1]
        assert [job.id for job in client.jobs(name="a")] == [ids[2], ids[0]]
        assert [job.id for job in client.jobs(state=["running", "failed"])] == ids[::-1]
        assert client.jobs(state=["failed"]) == client.jobs(launcher="slurm") == []

    def test_pages_have_every_job_once(self, port, client, monkeypatch):
        ids = {client.submit(JOB).id for _ in range(7)}
        found, after = [], ""
        while True:
            _, page = ask(port, f"/jobs?limit=3{after}")
            found += [job["id"] for job in page["jobs"]]
            if page["next"] is None:
                break
            after = f"&after={page['next']}"

        assert len(found) == 7
        assert set(found) == ids
        assert ask(port, "/jobs?after=none")[0] == 404

    def test_tells_all_problems_of_a_job_as_the_command_line_does(self, client):
        wrong = {**JOB, "optimizer": {"nam": "sgd"}}
        with pytest.raises(ConfigError) as caught:
            client.submit(wrong, {"train.epochs": 0})
        with pytest.raises(ConfigError) as here:
            ht.submit(wrong, {"train.epochs": 0})

        assert set(caught.value.problems) == set(here.value.problems)
        assert len(caught.value.problems) == 2

    def test_tells_why_a_launcher_rejects_a_job(self, client, launcher):
        launcher.rejects = "sbatch: error: invalid partition"

        with pytest.raises(LaunchError, match="invalid partition"):
            client.submit(JOB)

        assert client.jobs() == []

    def test_of_a_job_that_does_not_exist(self, client):
        with pytest.raises(UserError, match="no job 'none'"):
            client.job("none")


class TestSubmittingWithAKey:
    def test_starts_one_job(self, port, client, launcher):
        first = client.submit(JOB, key="nightly").id
        body = {"job": JOB}

        assert client.submit(JOB, key="nightly").id == first
        assert ask(port, "/jobs", "POST", body, Idempotency_Key="nightly")[0] == 200
        assert ask(port, "/jobs", "POST", body, Idempotency_Key="other")[0] == 201
        assert ht.submit(JOB, key="nightly").id == first, "the keys are those of the account"
        with pytest.raises(KeyUsedError, match="was used for j-"):
            client.submit(JOB, {"train.epochs": 3}, key="nightly")
        assert len(launcher.requests) == 2

    def test_takes_any_text(self, client, launcher):
        key = "nightly \u2014 a%20b\n" + "x" * 200

        assert client.submit(JOB, key=key).id == ht.submit(JOB, key=key).id
        assert len(launcher.requests) == 1

    def test_in_many_threads_starts_one_job(self, client, launcher):
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: client.submit(JOB, key="a").id, range(16)))

        assert len(set(found)) == len(launcher.requests) == 1


class TestUploads:
    def test_a_task_and_its_modules_are_those_of_the_client(self, client, launcher, tmp_path):
        (tmp_path / "models").mkdir()
        (tmp_path / "train.py").write_text(TASK)
        (tmp_path / "models" / "net.py").write_text("# net\n")
        (tmp_path / "job.yaml").write_text("name: j\ntask: train.py:Task\n")

        client.submit(tmp_path / "job.yaml", files=["models/net.py"])
        client.submit(tmp_path / "job.yaml", files=["models/net.py"])

        tasks = {request.job.task for request in launcher.requests}
        (task,) = tasks
        file = (tmp_path / "runs" / "j").joinpath(task.rpartition(":")[0])
        assert file.parent.parent == tmp_path / "runs" / "j"
        assert file.read_text() == TASK
        assert (file.parent / "models" / "net.py").read_text() == "# net\n"

    def test_a_path_that_is_not_normal_and_a_task_of_the_overrides_are_found(
        self, client, launcher, tmp_path
    ):
        (tmp_path / "train.py").write_text(TASK)
        client.submit({**JOB, "task": "./train.py:Task"})
        client.submit(JOB, {"task": "train.py:Task"})

        assert all(request.job.task.endswith("/train.py:Task") for request in launcher.requests)

    def test_a_folder_of_uploads_that_was_changed_is_not_used(self, client, launcher, tmp_path):
        (tmp_path / "train.py").write_text(TASK)
        client.submit({**JOB, "task": "train.py:Task"})
        Path(launcher.requests[0].job.task.rpartition(":")[0]).write_text("# edited")

        with pytest.raises(UserError, match="contains other files than were uploaded"):
            client.submit({**JOB, "task": "train.py:Task"})

    def test_another_content_is_another_folder(self, client, launcher, tmp_path):
        for text in (TASK, TASK + "\n"):
            (tmp_path / "train.py").write_text(text)
            client.submit({**JOB, "task": "train.py:Task"})

        assert len({request.job.task for request in launcher.requests}) == 2

    @pytest.mark.parametrize(
        "name",
        [
            "../x.py", "/etc/x.py", "a/../../x.py", "", ".", "./x.py", "a//b.py", "x\0.py", "a\nb.py",
            "~/x.py", ".ssh/authorized_keys", "x/", "é.py", "a\\b.py", "C:x.py", "x" * 300,
        ],
    )  # fmt: skip
    def test_a_name_that_leaves_the_folder_is_refused(self, port, launcher, name, tmp_path):
        before = sorted(tmp_path.rglob("*"))
        status, told = ask(port, "/jobs", "POST", {"job": JOB, "files": {name: TASK}})

        assert status == 422
        assert "files" in json.dumps(told)
        assert sorted(tmp_path.rglob("*")) == before
        assert launcher.requests == []

    def test_too_much_is_refused(self, port, monkeypatch):
        monkeypatch.setattr(work, "MAX_FILES_BYTES", 100)
        status, told = ask(port, "/jobs", "POST", {"job": JOB, "files": {"x.py": "#" * 101}})
        many = {f"x{number}.py": "" for number in range(201)}

        assert status == 422
        assert "the limit is 100" in told["message"]
        assert ask(port, "/jobs", "POST", {"job": JOB, "files": many})[0] == 422

    def test_a_file_and_a_folder_of_one_name_are_refused(self, port):
        status, told = ask(port, "/jobs", "POST", {"job": JOB, "files": {"a": "", "a/b.py": ""}})

        assert status == 422
        assert "cannot be written" in told["message"]

    @pytest.mark.parametrize("name", ["../x.py", "/x.py"])
    def test_the_client_refuses_files_outside_the_folder_of_the_job(self, client, name):
        with pytest.raises(UserError, match="cannot be uploaded: it is not below"):
            client.submit(JOB, files=[name])
        with pytest.raises(UserError, match="cannot be uploaded"):
            client.submit(JOB, files=["none.py"])


class TestRoles:
    VERBS = (
        ("/jobs", "GET", None, "read"),
        ("/jobs/j", "GET", None, "read"),
        ("/jobs/j/metrics", "GET", None, "read"),
        ("/jobs/j/events?follow=false", "GET", None, "read"),
        ("/jobs/j/logs?follow=false", "GET", None, "read"),
        ("/jobs/j/wait?timeout_s=0", "GET", None, "read"),
        ("/openapi.json", "GET", None, "read"),
        ("/jobs/{id}/drain", "POST", None, "cancel"),
        ("/jobs/{id}/cancel", "POST", None, "cancel"),
        ("/jobs", "POST", {"job": JOB}, "submit"),
    )
    ORDER = ("", "read", "cancel", "submit")

    @pytest.mark.parametrize("most", ["read", "cancel", "submit"])
    @pytest.mark.parametrize(
        ("token", "role"),
        [
            (None, ""), ("wrong-token-0123456789", ""), (SUBMIT[:-1], ""), (SUBMIT + "x", ""),
            (OWN, "cancel"), (READ, "read"), (END, "cancel"), (SUBMIT, "submit"),
        ],
    )  # fmt: skip
    def test_a_verb_needs_a_role_of_the_token_and_of_the_server(self, serve, launcher, most, token, role):
        port = serve(most).port
        job_id = ht.submit(JOB).id
        launcher.requests.clear()
        granted = min(role, most, key=self.ORDER.index)

        for path, method, body, needed in self.VERBS:
            status, told = ask(port, path.replace("{id}", job_id), method, body, token)
            if not role:
                assert status == 401, path
                assert "the token is missing or wrong" in told["message"]
            elif self.ORDER.index(granted) >= self.ORDER.index(needed):
                assert status in (200, 201, 202), (path, told)
            else:
                assert status == 403, path
                assert f"requires the role '{needed}'" in told["message"]
        assert len(launcher.requests) == (granted == "submit")
        assert len(launcher.asked) == 2 * (granted in ("cancel", "submit"))

    def test_a_method_that_no_path_has_is_not_allowed_whatever_the_role(self, serve):
        port = serve("submit").port

        assert [ask(port, path, "QUERY", b"{}", READ)[0] for path in ("/jobs", "/openapi.json")] == [405, 405]

    def test_a_cookie_needs_the_origin_of_the_page_to_change_something(self, serve, launcher):
        port = serve("cancel").port
        job_id = ht.submit(JOB).id
        cookie = {"Cookie": f"horovod_train_{port}={OWN}", "token": None}

        assert ask(port, "/jobs", **cookie)[0] == 200
        assert ask(port, f"/jobs/{job_id}/drain", "POST", **cookie)[0] == 401
        assert ask(port, f"/jobs/{job_id}/drain", "POST", Origin="http://evil.example", **cookie)[0] == 403
        assert launcher.asked == []
        assert (
            ask(port, f"/jobs/{job_id}/drain", "POST", Origin=f"http://127.0.0.1:{port}", **cookie)[0] == 202
        )

    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({"Host": "evil.example"}, 400), ({"Host": "127.0.0.1.evil.example:80"}, 400),
            ({"Host": "["}, 400), ({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403),
        ],
    )  # fmt: skip
    def test_another_name_or_origin_is_refused(self, port, launcher, headers, status):
        assert ask(port, "/jobs", "POST", {"job": JOB}, **headers)[0] == status
        assert launcher.requests == []

    def test_a_refused_name_is_told_with_the_remedy(self, port, launcher):
        _, text = ask(port, "/jobs", Host="ml.example.com")

        assert "'ml.example.com'; accepted: 127.0.0.1, localhost" in str(text)

    def test_a_body_of_another_type_is_told_what_to_send(self, port, launcher):
        answers = [
            ask(port, "/jobs", "POST", json.dumps({"job": JOB}).encode(), Content_Type="text/plain"),
            ask(port, "/jobs", "POST", {"job": 3}),
        ]

        assert [status for status, _ in answers] == [422, 422]
        assert "`Content-Type: application/json`; it is text/plain" in answers[0][1]["hint"]
        assert not answers[1][1]["hint"]


class TestEnding:
    def test_needs_the_whole_id(self, port, launcher):
        job_id = ht.submit(JOB).id
        for wrong in ("j", job_id[:-1], job_id + "0"):
            assert ask(port, f"/jobs/{wrong}/cancel", "POST")[0] == 404

        assert launcher.asked == []
        assert ask(port, f"/jobs/{job_id}/cancel", "POST", {"now": True})[0] == 202
        assert launcher.asked == ["kill"]

    def test_is_of_the_run_that_is_shown(self, port, launcher, tmp_path):
        job = ht.submit(JOB)
        status, told = ask(port, f"/jobs/{job.id}/drain?folder={tmp_path}", "POST")

        assert status == 409
        assert "the run folder of" in told["message"]
        assert launcher.asked == []
        assert ask(port, f"/jobs/{job.id}/drain?folder={job.folder}", "POST")[0] == 202

    def test_tells_why_it_is_not_possible(self, port, launcher):
        job_id = ht.submit(JOB).id
        launcher.rejects = "the launcher does not run on this host"
        status, told = ask(port, f"/jobs/{job_id}/drain", "POST")

        assert status == 409
        assert "does not run on this host" in told["message"]

    def test_that_takes_long_goes_on_in_the_background(self, port, launcher, monkeypatch):
        monkeypatch.setattr(api, "END_TIMEOUT_S", 0.1)
        over = threading.Event()
        job_id = ht.submit(JOB).id
        monkeypatch.setattr(launcher, "cancel", lambda job, how: over.wait(10) and launcher.asked.append(how))
        begun_s = time.monotonic()

        assert ask(port, f"/jobs/{job_id}/cancel", "POST")[0] == 202
        assert time.monotonic() - begun_s < 5
        over.set()
        wait_until(lambda: launcher.asked == ["stop"], 10)


class TestStatuses:
    def test_of_a_launcher_that_does_not_respond_are_the_last_ones(self, launcher, monkeypatch):
        job, over = client_module.LocalJob(client_module.find_job(ht.submit(JOB).id)), threading.Event()
        statuses = Statuses()
        statuses.get(job)
        monkeypatch.setattr(launcher, "status", lambda _: over.wait(10) and JobStatus("failed", 1))
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(statuses.get, job)
            time.sleep(0.1)

            assert statuses.get(job) == JobStatus("running")
            over.set()
            assert slow.result().state == "failed"
        assert statuses.get(job).state == "failed"


class TestTokenFile:
    def test_is_read_again_when_it_changes(self, tokens):
        known = Tokens(OWN, tokens, "submit")
        assert known.find([SUBMIT]).role == "submit"
        os.utime(tokens, ns=(1, 1))
        tokens.write_text("read another-token-0123456789\n")

        assert known.find([SUBMIT]) is None
        assert known.find(["another-token-0123456789"]).role == "read"

    def test_that_becomes_invalid_accepts_nobody_and_says_so(self, tokens, caplog):
        known = Tokens(OWN, tokens, "submit")
        tokens.chmod(0o644)
        os.utime(tokens, ns=(1, 1))

        assert known.find([SUBMIT]) is None
        assert known.find([OWN]).role == "cancel"
        assert "accessible to other users" in caplog.text

    @pytest.mark.parametrize(
        "line",
        ["admin 0123456789abcdef", "read", "read short", "read 0123456789abcdef more", "0123456789abcdef"],
    )
    def test_with_an_invalid_line_is_refused_with_its_number(self, tokens, line):
        tokens.write_text(f"# comment\n{line}\n")

        with pytest.raises(UserError, match=r"tokens:2: expected a role \(read, cancel, submit\)"):
            read_tokens(tokens)

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
    def test_of_others_is_refused(self, tokens, mode):
        tokens.chmod(mode)

        with pytest.raises(UserError, match="accessible to other users"):
            read_tokens(tokens)

    def test_that_is_missing_is_refused(self, tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            read_tokens(tmp_path / "none")


class TestStreams:
    def test_have_each_event_once_however_often_they_break(self, port, client, launcher):
        job = client.submit(JOB)
        numbers, last = [], ""
        for step in range(1, 30):
            write_events(job.folder, progress(step, 1.0))
            if step % 3:
                continue
            connection = HTTPConnection("127.0.0.1", port, timeout=10)
            headers = {"Authorization": f"Bearer {READ}", **({"Last-Event-ID": last} if last else {})}
            connection.request("GET", f"/api/v1/jobs/{job.id}/events", headers=headers)
            parsed = remote._parsed(connection.getresponse())
            for each in (next(parsed), next(parsed)):  # one of three is left for the next connection
                numbers.append(json.loads(each.data)["step"])
                last = each.id
            connection.close()
        launcher.now = JobStatus("succeeded", 0)
        rest = list(client.stream(f"/jobs/{job.id}/events"))

        assert numbers == list(range(1, len(numbers) + 1))
        assert [json.loads(each.data)["step"] for each in rest[:-1]] == list(range(1, 30))
        assert rest[-1].event == "end"
        assert json.loads(rest[-1].data)["state"] == "succeeded"

    def test_follow_a_log_to_the_end_of_the_job(self, client, launcher):
        job = client.submit(JOB)
        log = job.folder / "run.log"

        def write():
            for number in range(20):
                with log.open("a") as file:
                    file.write("[1,0]<stdout>:li")
                    file.flush()
                    time.sleep(0.01)
                    file.write(f"ne {number}\r\n")
            launcher.now = JobStatus("succeeded", 0)

        threading.Thread(target=write).start()

        assert list(job.logs(follow=True)) == [f"[rank 0] line {number}" for number in range(20)]

    def test_show_the_output_of_a_job_that_wrote_no_log(self, client, launcher):
        job = client.submit(JOB)
        launcher.now, launcher.lines = JobStatus("failed", 1), ["sbatch: out of luck"]

        assert list(job.logs(follow=True)) == ["sbatch: out of luck"]

    def test_of_a_job_elsewhere_are_those_of_its_launcher(self, client, launcher):
        job = client.submit(JOB)
        launcher.has_local_files = False
        launcher.now = JobStatus("succeeded", 0)
        launcher.lines = ["[1,1]<stdout>:hello", "bye"]

        first, second, _ = client.stream(f"/jobs/{job.id}/logs")
        assert (first.id, first.data, second.data) == ("1", "[rank 1] hello", "bye")
        tail = client_module.LocalJob(client_module.find_job(job.id)).tail_of_log("1")
        assert [line for _, line in tail.read()] == ["bye"]

    def test_say_when_the_output_cannot_be_read(self, client, launcher, monkeypatch):
        job = client.submit(JOB)
        launcher.has_local_files = False

        def gone(job, *, follow):
            raise LaunchError("its pods are gone")

        monkeypatch.setattr(launcher, "logs", gone)

        with pytest.raises(LaunchError, match="pods are gone"):
            list(job.logs())

    def test_are_limited(self, port, client, launcher, monkeypatch):
        monkeypatch.setattr(api, "MAX_STREAMS", 4)
        client.submit(JOB)
        opened = []
        for _ in range(2):
            opened.append(HTTPConnection("127.0.0.1", port, timeout=10))
            opened[-1].request("GET", "/api/v1/jobs/j/events", headers={"Authorization": f"Bearer {READ}"})
            opened[-1].getresponse()

        assert ask(port, "/jobs/j/events", token=READ)[0] == 429
        assert ask(port, "/jobs/j/events?follow=false", token=SUBMIT)[0] == 200, "another token has its own"
        opened[0].sock.close() if opened[0].sock else None
        for each in opened:
            each.close()
        wait_until(lambda: ask(port, "/jobs/j/events?follow=false", token=READ)[0] == 200, 10)

    def test_to_a_client_that_does_not_read_block_nobody_and_are_closed(self, serve, launcher, monkeypatch):
        monkeypatch.setattr(web, "IDLE_S", 1.0)
        port = serve().port
        folder = ht.submit(JOB).folder
        (folder / "run.log").write_text(f"{'x' * 1000}\n" * 20_000)
        slow = []
        for _ in range(5):
            slow.append(socket.create_connection(("127.0.0.1", port)))
            slow[-1].sendall(
                f"GET /api/v1/jobs/j/logs HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                f"Authorization: Bearer {READ}\r\n\r\n".encode()
            )
        time.sleep(0.3)

        begun_s = time.monotonic()
        assert ask(port, "/jobs")[0] == 200
        assert time.monotonic() - begun_s < 1.0
        time.sleep(2.5)
        for each in slow:
            each.settimeout(5)
            assert read_all(each) < 20_000_000, "the connection was closed in the middle of the log"
            each.close()


class TestOddJobs:
    @pytest.mark.parametrize(
        "changes",
        [
            {"run_dir": "~nobody-of-it/x"}, {"run_dir": "x" * 5000}, {"run_dir": "/proc/x"},
            {"run_dir": "/etc/passwd/x"}, {"task": "~nobody-of-it/t.py:T"},
            {"task": "t" * 5000 + ".py:T"}, {"name": "\ud800"}, {"task_args": {"\udfff": 1}},
            {"task_args": {"a": "\ud800"}},
            {"checkpoint": {"dir": "~nobody-of-it"}}, {"metrics": {"targets_dir": "~nobody-of-it"}},
        ],
        ids=lambda changes: ascii(changes)[:40],
    )  # fmt: skip
    def test_are_refused_and_leave_no_record(self, port, launcher, changes):
        status, told = ask(port, "/jobs", "POST", {"job": {**JOB, **changes}})

        assert status in (409, 422), told
        assert told["message"]
        assert ask(port, "/jobs")[1]["jobs"] == []

    def test_that_are_nested_too_deeply_are_refused(self, port):
        deep: dict = {}
        for _ in range(300):
            deep = {"a": deep}

        assert ask(port, "/jobs", "POST", {"job": {**JOB, "task_args": deep}})[0] == 422
        assert ask(port, "/jobs", "POST", {"job": JOB, "overrides": {".".join("a" * 5000): 1}})[0] == 422

    def test_have_at_most_a_hundred_problems_listed(self, port):
        status, told = ask(port, "/jobs", "POST", {"job": JOB, **{f"x{n}": 1 for n in range(500)}})

        assert status == 422
        assert len(told["problems"]) == 100

    @pytest.mark.parametrize(
        "change", [{"submitted_unix_s": "x"}, {"native_id": 7}, {"log_dir": None}, {"unknown": 1}]
    )
    def test_a_record_that_is_damaged_hides_no_other(self, port, launcher, change, tmp_path):
        good, bad = (ht.submit(JOB).id for _ in range(2))
        (file,) = (tmp_path / "state").rglob(f"{bad}.json")
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))

        assert [job["id"] for job in ask(port, "/jobs")[1]["jobs"]] == [good]
        assert ask(port, f"/jobs/{bad}")[0] == 404

    def test_of_a_launcher_that_is_not_installed_are_listed(self, port, launcher, monkeypatch):
        job_id = ht.submit(JOB).id

        def missing(name):
            raise UnknownNameError("launcher", name, ["local"])

        monkeypatch.setattr(client_module, "launcher_named", missing)
        (job,) = ask(port, "/jobs")[1]["jobs"]

        assert (job["id"], job["state"]) == (job_id, "unknown")
        assert [handle.id for handle in ht.jobs()] == [job_id]

    @pytest.mark.parametrize("name", ["events.jsonl", "run.log"])
    def test_a_folder_in_the_place_of_a_file_is_said(self, port, client, launcher, name):
        job = client.submit(JOB)
        (job.folder / name).mkdir()

        assert ask(port, "/jobs/j/metrics")[0] == (409 if name == "events.jsonl" else 200)
        events = "events" if name == "events.jsonl" else "logs"
        with pytest.raises(LaunchError, match="not a regular file|Is a directory"):
            list(job.events() if events == "events" else job.logs())


class TestALauncherThatDoesNotAnswer:
    def test_blocks_no_other_request(self, port, launcher, monkeypatch):
        ids = [ht.submit(JOB).id for _ in range(45)]
        over = threading.Event()
        monkeypatch.setattr(launcher, "status", lambda _: over.wait(20) and JobStatus("running"))
        with ThreadPoolExecutor(45) as pool:
            slow = [pool.submit(ask, port, f"/jobs/{job_id}") for job_id in ids]
            time.sleep(0.5)
            begun_s = time.monotonic()
            assert ask(port, "/jobs/none")[0] == 404
            assert ask(port, f"/jobs/{ids[0]}/metrics")[0] == 200
            assert time.monotonic() - begun_s < 5
            over.set()
            assert {each.result()[0] for each in slow} == {200}

    def test_leaves_the_record_of_a_job_that_it_may_have_started(self, client, launcher, monkeypatch):
        begin = launcher.submit

        def times_out(request, plan):
            begin(request, plan)
            monkeypatch.setattr(launcher, "submit", begin)
            raise LauncherTimeoutError("sbatch did not answer within 30 s")

        monkeypatch.setattr(launcher, "submit", times_out)
        with pytest.raises(LauncherTimeoutError, match=r"may have been started"):
            ht.submit(JOB)
        monkeypatch.setattr(launcher, "submit", times_out)
        job = client.submit(JOB)  # the client repeats it, with the same key

        assert len(launcher.requests) == 2
        assert len(client.jobs()) == 2
        assert job.id in {each.id for each in ht.jobs()}

    def test_for_a_moment_ends_no_wait_and_no_stream(self, client, launcher, monkeypatch):
        job, answers = client.submit(JOB), iter([None] * 8)

        def status(_):
            if next(answers, 1) is None:
                raise LaunchError("slurmctld is down")
            return JobStatus("succeeded", 0)

        (job.folder / "run.log").write_text("one\n")
        monkeypatch.setattr(launcher, "status", status)

        assert list(job.logs(follow=True)) == ["one"]
        assert job.wait(20).state == "succeeded"


class TestTails:
    """Positions stay valid when the file of events is rewritten with fewer lines."""

    def test_lose_and_repeat_nothing_when_the_clock_steps_back(self, tmp_path):
        times = iter([*range(5000, 5100), *range(1000, 9000)])
        path = tmp_path / EVENTS_FILE
        writer = EventsFile(path, max_bytes=20_000, clock=lambda: float(next(times)))
        tail, seen = client_module.FileTail(path, has_times=True), []
        for step in range(1, 400):
            writer.write(progress(step, 1.0), 0)
            seen += [json.loads(line)["step"] for _, line in tail.read()]
        writer.close()

        assert seen == list(range(1, 400))

    def test_of_an_inode_that_is_used_again_do_not_start_in_the_middle(self, tmp_path):
        path = tmp_path / EVENTS_FILE
        write_events(tmp_path, *(progress(step, 1.0) for step in range(1, 6)))
        (_, position), *_ = [(line, at) for at, line in client_module.FileTail(path, has_times=True).read()][
            2:3
        ]
        content = path.read_text().splitlines(keepends=True)
        with path.open("w") as file:  # the same inode
            file.writelines([content[0], *content[2:], *content[:0]])

        rest = client_module.FileTail(path, position, has_times=True).read()

        assert [json.loads(line)["step"] for _, line in rest] == [4, 5]

    def test_continue_after_the_file_was_thinned(self, tmp_path):
        times = iter(float(number) for number in range(1, 10_000))
        writer = EventsFile(tmp_path / EVENTS_FILE, max_bytes=20_000, clock=lambda: next(times))
        tail, seen = client_module.FileTail(tmp_path / EVENTS_FILE, has_times=True), []
        for step in range(1, 400):
            writer.write(progress(step, 1.0), 0)
            if step % 7 == 0:
                seen += [json.loads(line)["step"] for _, line in tail.read()]
        writer.close()
        seen += [json.loads(line)["step"] for _, line in tail.read()]

        assert seen == sorted(set(seen))
        assert seen[-1] == 399
        assert len(seen) > 300, "few lines are lost: those that were removed before they were read"

    @pytest.mark.parametrize("position", ["", "x", "1-2", "0-5-nan", "-1--1--1", "9" * 400, "1-2-3-4"])
    def test_ignore_a_position_that_is_none(self, tmp_path, position):
        path = tmp_path / EVENTS_FILE
        write_events(tmp_path, progress(1, 1.0))

        assert len(client_module.FileTail(path, position, has_times=True).read()) == 1

    def test_return_an_unfinished_line_only_at_the_end(self, tmp_path):
        path = tmp_path / "run.log"
        path.write_bytes(b"one\ntw")
        tail = client_module.FileTail(path)

        assert [line for _, line in tail.read()] == ["one"]
        assert tail.read() == []
        assert [line for _, line in tail.read(is_complete=True)] == ["tw"]
        assert tail.read(is_complete=True) == []

    def test_read_lines_of_any_length_and_bytes(self, tmp_path, monkeypatch):
        monkeypatch.setattr(client_module, "CHUNK_BYTES", 64)
        path = tmp_path / "run.log"
        lines = ["x" * size for size in (0, 1, 63, 64, 65, 1000, 0)] + ["a\x0bb\x85c\u2028d", "\r10 %\r20 %"]
        path.write_bytes("".join(f"{line}\n" for line in lines).encode() + b"\xff\xfe\n")
        tail, found = client_module.FileTail(path), []
        while new := tail.read():
            found += [line for _, line in new]

        assert found == [*lines, "\ufffd\ufffd"]

    def test_of_a_log_that_was_replaced_start_again(self, tmp_path):
        path = tmp_path / "run.log"
        path.write_text("one\ntwo\n")
        tail = client_module.FileTail(path)
        tail.read()
        path.write_text("new\n")

        assert [line for _, line in tail.read()] == ["new"]


class TestLimits:
    def test_a_body_that_is_too_large_is_refused_before_it_is_read(self, port, launcher, monkeypatch):
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(
                f"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {SUBMIT}\r\n"
                f"Content-Length: {10**12}\r\n\r\n".encode()
            )
            assert connection.recv(100).startswith(b"HTTP/1.1 413")
        monkeypatch.setattr(web, "MAX_BODY_BYTES", 1000)
        assert ask(port, "/jobs", "POST", "x" * 1001)[0] == 413
        chunks = (b"x" * 600 for _ in range(2))
        assert ask(port, "/jobs", "POST", chunks, Transfer_Encoding="chunked")[0] == 413

    def test_a_body_that_does_not_come_is_not_waited_for(self, serve, monkeypatch):
        monkeypatch.setattr(web, "IDLE_S", 0.5)
        port = serve().port
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(
                f"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {SUBMIT}\r\n"
                "Content-Length: 100\r\n\r\n{".encode()
            )
            assert connection.recv(100).startswith(b"HTTP/1.1 408")
        assert ask(port, "/jobs")[0] == 200

    def test_a_header_that_comes_slowly_is_not_waited_for(self, serve, monkeypatch):
        monkeypatch.setattr(web, "IDLE_S", 0.5)
        port = serve().port
        begun_s = time.monotonic()
        with socket.create_connection(("127.0.0.1", port), 5) as connection, suppress(OSError):
            for letter in "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + "y" * 200:
                connection.sendall(letter.encode())
                time.sleep(0.05)
        assert time.monotonic() - begun_s < 5

    def test_requests_of_a_token_are_limited_and_others_are_not_affected(self, port, monkeypatch):
        monkeypatch.setattr(tokens_module, "RATE_PER_S", 0.001)
        monkeypatch.setattr(tokens_module, "BURST", 3)

        statuses = [ask(port, "/jobs", token=READ)[0] for _ in range(1010)][-10:]

        assert 429 in statuses
        assert ask(port, "/jobs", token=END)[0] == 200


class TestTls:
    @pytest.fixture
    def certificate(self, tmp_path):
        files = Tls(tmp_path / "cert.pem", tmp_path / "key.pem")
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
                *("-nodes", "-keyout", files.key, "-out", files.certificate, "-days", "2"),
                *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            ],
            check=True, capture_output=True,
        )  # fmt: skip
        return files

    def test_a_client_trusts_a_certificate_that_it_was_given_and_no_other(self, serve, certificate):
        port = serve(tls=certificate).port
        url = f"https://localhost:{port}"

        client = ht.Client(url, SUBMIT, ca_file=certificate.certificate)
        assert client.submit(JOB).state == "running"
        with pytest.raises(UserError, match="the certificate of the server is not trusted"):
            ht.Client(url, SUBMIT).jobs()
        with pytest.raises(ServerError, match="does not respond"):
            ht.Client(f"http://localhost:{port}", SUBMIT, retry_timeout_s=0.2).jobs()

    def test_files_that_do_not_belong_together_are_refused(self, serve, certificate, tokens):
        with pytest.raises(UserError, match="the certificate or its key cannot be used"):
            serve(tls=Tls(certificate.certificate, certificate.certificate))


class TestTheClient:
    def test_outlives_a_restart_of_the_server(self, serve, launcher):
        first = serve()
        client = ht.Client(f"http://127.0.0.1:{first.port}", SUBMIT, retry_timeout_s=20)
        job = client.submit(JOB)
        lines = iter(job.logs(follow=True))
        (job.folder / "run.log").write_text("one\n")
        seen = [next(lines)]
        first.close()
        with (job.folder / "run.log").open("a") as log:
            log.write("two\n")
        launcher.now = JobStatus("succeeded", 0)

        def again():
            time.sleep(0.5)
            serve(port=first.port)

        threading.Thread(target=again).start()

        assert job.wait(20) == JobStatus("succeeded", 0)
        assert [*seen, *lines] == ["one", "two"]

    def test_says_that_nobody_responds(self, launcher):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with pytest.raises(ServerError, match=f"http://127.0.0.1:{port}/api/v1 does not respond"):
            ht.Client(f"http://127.0.0.1:{port}", SUBMIT, retry_timeout_s=0.1).jobs()

    @pytest.mark.parametrize("url", ["127.0.0.1:9301", "ftp://x", "http://", ""])
    def test_refuses_what_is_no_url(self, url):
        with pytest.raises(UserError, match="is not the URL of a server"):
            ht.Client(url, SUBMIT)

    def test_needs_a_token(self, monkeypatch):
        monkeypatch.delenv("HOROVOD_TRAIN_TOKEN", raising=False)
        with pytest.raises(UserError, match="no token is given"):
            ht.Client("http://x")

    def test_does_not_wait_for_ever_for_a_stream_that_is_none(self, launcher):
        async def login_page(scope, receive, send):
            if scope["type"] == "http":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"<html>log in</html>"})

        server = web.Server(login_page, "127.0.0.1", 0)
        try:
            client = ht.Client(f"http://127.0.0.1:{server.port}", SUBMIT, retry_timeout_s=0.3)
            with pytest.raises(ServerError, match="ended without the event `end`"):
                list(client.stream("/jobs/j/logs"))
        finally:
            server.close()

    def test_does_not_send_its_token_to_another_server(self, port, launcher):
        asked = []

        class Redirects(web.Server):
            pass

        async def app(scope, receive, send):
            if scope["type"] == "http":
                asked.append(scope["path"])
                location = f"http://127.0.0.1:{port}/api/v1/jobs".encode()
                await send(
                    {"type": "http.response.start", "status": 302, "headers": [(b"location", location)]}
                )
                await send({"type": "http.response.body"})

        server = Redirects(app, "127.0.0.1", 0)
        try:
            with pytest.raises((UserError, ServerError)):
                ht.Client(f"http://127.0.0.1:{server.port}", SUBMIT, retry_timeout_s=0).jobs()
        finally:
            server.close()
        assert len(asked) == 1


def test_a_client_waits_as_long_as_it_may_for_a_server_that_stands_still(launcher):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and does not respond
        client = ht.Client(f"http://127.0.0.1:{silent.getsockname()[1]}", SUBMIT, retry_timeout_s=0.2)
        begun_s = time.monotonic()
        with pytest.raises(ServerError, match="does not respond"):
            client.request("GET", "/jobs")
        assert time.monotonic() - begun_s < 30


def test_a_token_may_come_from_a_file_with_a_line_end(port):
    assert ht.Client(f"http://127.0.0.1:{port}", f"{READ}\n").jobs() == []


def test_a_token_of_two_lines_is_refused_and_not_shown():
    with pytest.raises(UserError, match="the token contains") as refused:
        ht.Client("http://127.0.0.1:1", f"{READ}\n{SUBMIT}")

    assert READ not in str(refused.value)


def test_values_of_numpy_are_numbers(client, launcher):
    client.submit(
        {**JOB, "run_dir": Path("runs")}, {"lr.base_lr": np.float32(0.25), "train.epochs": np.int64(3)}
    )

    (request,) = launcher.requests
    assert (request.job.lr.base_lr, request.job.train.epochs) == (0.25, 3)


def test_a_value_that_json_does_not_have_is_named(client):
    with pytest.raises(UserError, match="cannot be sent: .*object"):
        client.submit(JOB, {"lr.base_lr": object()})
