"""What is looked at, when files and ranks are somebody else's: broken, hostile, gone, or another's job."""

from __future__ import annotations

import http.server
import json
import math
import os
import socket
import stat
import threading
import time

import pytest
from support.launching import free_port

from horovod_train.events.file import EventsFile, opened
from horovod_train.events.types import Progress, RankTimes, Started, Target, Targets
from horovod_train.launch import jobs as jobs_module
from horovod_train.launch.jobs import StateFile
from horovod_train.monitor.history import HistoryReader, read_recent, summary_lines
from horovod_train.monitor.live import RankReading, by_rank, scrape
from horovod_train.monitor.runs import Run, Runs
from horovod_train.monitor.view import (
    Board,
    Readings,
    ScrapedRun,
    _access_of,
    job_row,
    log_tail,
    run_document,
)
from horovod_train.system.files import open_regular


@pytest.fixture
def folder(tmp_path):
    """The folder of a run that has begun."""
    made = tmp_path / "runs" / "j" / "r"
    made.mkdir(parents=True)
    events = EventsFile(made / "events.jsonl")
    events.write(opened("j", "r"))
    events.close()
    return made


def add(folder, *lines):
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def progress(step, **changes):
    fields = {
        "step": step, "num_steps": 10, "epoch": 0, "num_epochs": 1, "loss": 0.5, "lr": 0.1,
        "samples_per_s": 100.0, "eta_s": 1.0,
    }  # fmt: skip
    return Progress(**{**fields, **changes})


def times(*step_s, **phases_s):
    n = len(step_s)
    return RankTimes(
        first_rank=0, seconds=40.0, steps=(100,) * n, samples=(1,) * n, step_s=step_s, phases_s=phases_s,
        waiting_s=(), waited_for_s=(),
    )  # fmt: skip


def as_line(event, rank=0, time_unix_s=1.0):
    return json.dumps({"time_unix_s": time_unix_s, "rank": rank, "kind": event.kind, **event.model_dump()})


PROTECTED = {"metrics": {"basic_auth": {"user": "u", "password_variable": "SCRAPE_PASSWORD"}}}


class TestPasswords:
    @pytest.fixture(autouse=True)
    def _password(self, monkeypatch):
        monkeypatch.setenv("SCRAPE_PASSWORD", "s3cret")

    def access(self, folder):
        (folder / "job.json").write_text(json.dumps(PROTECTED))
        return _access_of(Run(folder))

    def test_are_sent_to_the_ranks_of_ones_own_jobs(self, folder):
        assert self.access(folder).authorization.startswith("Basic dTpzM2NyZXQ")

    @pytest.mark.parametrize("whose", ["folder", "job"])
    def test_are_not_sent_where_others_have_a_say(self, folder, whose, monkeypatch):
        self.access(folder)
        (folder if whose == "folder" else folder / "job.json").chmod(0o777)

        assert "s3cret" not in repr(_access_of(Run(folder)))
        assert _access_of(Run(folder)).authorization != "Basic dTpzM2NyZXQ="

    def test_are_not_sent_where_the_job_is_anothers(self, folder, monkeypatch):
        self.access(folder)
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)

        assert _access_of(Run(folder)).authorization == "Basic dTo="  # nobody's password


class TestForeignFiles:
    @pytest.mark.parametrize(
        "line",
        [
            as_line(progress(3), time_unix_s=math.nan),
            as_line(progress(3), time_unix_s=math.inf),
            as_line(progress(3), time_unix_s=10**400),
            as_line(progress(3), time_unix_s=-1),
            as_line(progress(3), rank=10**9),
            as_line(progress(3)).replace('"rank": 0', '"rank": "x"'),
            as_line(progress(3)).replace('"kind": "progress"', '"kind": ["progress"]'),
            as_line(times(1.0)).replace('"first_rank": 0', '"first_rank": 1000000000'),
        ],
    )  # fmt: skip
    def test_a_line_that_cannot_be_is_passed_over(self, folder, line):
        add(folder, line, as_line(progress(5)))
        run = Run(folder)

        assert run.history().last.step == 5
        assert json.dumps(job_row(run), allow_nan=False)
        assert json.dumps(run_document(run, Readings()), allow_nan=False)

    def test_targets_without_ranks_are_numbered(self, folder):
        add(folder, as_line(Targets(targets=(Target(address="h:1", labels={}),))), as_line(progress(5)))

        assert Run(folder).history().targets[0].address == "h:1"
        assert Run(folder).history().last.step == 5

    @pytest.mark.parametrize("label", ["²", "-1", "1e3", "99999999999"])
    def test_a_rank_that_is_none_is_numbered(self, label):
        assert list(by_rank([Target(address="h:1", labels={"rank": label})])) == [0]

    def test_a_folder_that_may_not_be_looked_into_hides_no_other(self, folder, monkeypatch):
        hidden = folder.parents[1] / "private" / "r"
        hidden.mkdir(parents=True)
        plain = type(hidden).is_file

        def is_file(self):
            if "private" in self.parts:
                raise PermissionError(13, "Permission denied")
            return plain(self)

        monkeypatch.setattr(type(hidden), "is_file", is_file)

        assert [run.key for run in Runs([folder.parents[1]]).all()] == ["j/r"]

    def test_a_name_of_other_bytes_is_text(self, folder):
        folder.parent.rename(os.fsdecode(os.fsencode(folder.parent.parent) + b"/caf\xe9"))
        (run,) = Runs([folder.parents[1]]).all()

        assert run.key.encode("utf-8") == b"caf?/r"

    @pytest.mark.parametrize("name", ["run.log", "events.jsonl"])
    @pytest.mark.parametrize("kind", ["pipe", "link"])
    def test_only_regular_files_are_read(self, folder, tmp_path, name, kind):
        (folder / "run.log").touch()
        (folder / name).unlink()
        secret = tmp_path / "secret"
        secret.write_text("nobody's business\n")
        os.mkfifo(folder / name) if kind == "pipe" else (folder / name).symlink_to(secret)

        assert log_tail(Run(folder)) == ""
        assert Run(folder).history().last is None
        with pytest.raises(OSError):  # noqa: PT011
            open_regular(folder / name)

    def test_checkpoints_are_no_runs(self, folder):
        step = folder.parent / "checkpoints" / "step-000000000001"
        step.mkdir(parents=True)
        (step / "state.json").write_text("{}")

        assert [run.key for run in Runs([folder.parent]).all()] == ["j/r"]
        assert [run.key for run in Runs([folder.parents[1]]).all()] == ["j/r"]

    def test_two_who_read_at_the_same_time_count_once(self, folder):
        add(folder, *(as_line(progress(step)) for step in range(2000)))
        reader = HistoryReader(folder)
        threads = [threading.Thread(target=reader.update) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert reader.history.counts["progress"] == 2000

    def test_without_ranks_a_history_has_no_tables(self, folder):
        add(folder, as_line(times(1.0)), as_line(progress(5)))

        assert Run(folder).history().ranks.windows
        assert not Run(folder, with_ranks=False).history().ranks.windows
        assert Run(folder, with_ranks=False).history().last.step == 5

    def test_one_run_that_cannot_be_shown_is_a_row_of_its_own(self, folder, monkeypatch):
        run = Run(folder)
        monkeypatch.setattr(run, "history", lambda: 1 / 0)

        assert job_row(run)["state"] == "unknown"
        assert "ZeroDivisionError" in job_row(run)["message"]


def reading(rank=0, **values):
    labels = {"training_job": "real", "run": "r7", "rank": str(rank)}
    return RankReading({name: float(value) for name, value in values.items()}, labels)


def readings(time_s, **of_ranks):
    found = {int(name[1:]): each for name, each in of_ranks.items()}
    return Readings(found, set(found), 1000 + time_s, time_s, found)


TARGETS = {rank: Target(address=f"h:{rank}", labels={}) for rank in range(2)}


class TestRanksThatAreAsked:
    def test_their_samples_add_up_to_a_speed(self):
        run = ScrapedRun("job", "h:0,h:1")
        first = readings(0.0, r0=reading(samples=100, steps=1), r1=reading(1, samples=300, steps=1))
        run.take(TARGETS, Readings(), first)
        run.take(
            TARGETS,
            first,
            readings(2.0, r0=reading(samples=120, steps=2), r1=reading(1, samples=340, steps=2)),
        )

        assert run.history().last.samples_per_s == pytest.approx((20 + 40) / 2)
        assert (run.job, run.run_id) == ("real", "r7")

    def test_one_that_was_started_again_counts_from_nothing(self):
        run = ScrapedRun("job", "x")
        first = readings(0.0, r0=reading(samples=1000, steps=9))
        run.take(TARGETS, Readings(), first)
        run.take(TARGETS, first, readings(2.0, r0=reading(samples=50, steps=1)))

        assert run.history().last.samples_per_s == pytest.approx(25)

    def test_the_step_is_that_of_the_whole_training(self):
        run = ScrapedRun("job", "x")
        run.take(TARGETS, Readings(), readings(0.0, r0=reading(step=26_000, steps=15, epoch=4.2)))

        assert (run.history().last.step, run.history().last.epochs_begun) == (26_000, 5)

    def test_when_they_are_no_targets_any_more_nothing_is_said_of_them(self):
        run = ScrapedRun("job", "x")
        before = readings(0.0, r0=reading(steps=1))
        run.take(TARGETS, Readings(), before)
        assert run.status().state == "running"
        run.take({}, before, Readings())

        assert run.status().state == "unknown"


class TestABoard:
    @pytest.fixture
    def board(self, monkeypatch):
        monkeypatch.setattr("horovod_train.monitor.view.SCRAPE_INTERVAL_S", 0.1)
        made = []

        def make(places=(), sources=()):
            made.append(Board(places, sources))
            return made[-1]

        yield make
        for each in made:
            each.close()

    def test_forgets_ranks_that_are_no_targets_any_more(self, board, tmp_path):
        source = tmp_path / "targets.json"
        source.write_text(json.dumps([{"targets": [f"127.0.0.1:{free_port()}"], "labels": {}}]))
        looked = board(sources=[str(source)])
        wait_until(lambda: looked.runs() and looked.runs()[0].history().targets)
        source.write_text("[]")
        wait_until(lambda: not looked.runs()[0].history().targets)

    def test_runs_that_have_ended_are_not_asked(self, board, folder):
        asked = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append(self.path)

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        labels = {"training_job": "j", "run": "r", "rank": "0"}
        add(folder, as_line(Targets(targets=(Target(address=address, labels=labels),))))
        state = StateFile(folder)
        state.write("running")
        looked = board([folder])
        wait_until(lambda: looked.request_run("j/r") and asked)
        state.write("succeeded", 0)
        time.sleep(0.5)  # a round that has begun
        asked.clear()
        wait_until(lambda: looked.request_run("j/r")[1].scraped == set())
        time.sleep(0.5)
        server.shutdown()
        server.server_close()

        assert not asked

    def test_goes_on_when_something_goes_wrong(self, board, monkeypatch):
        calls = []
        monkeypatch.setattr(Board, "_scrape_sources", lambda self: calls.append(1) or 1 / 0)
        board()
        wait_until(lambda: len(calls) > 2)

    def test_closes_at_once_while_ranks_do_not_answer(self, board, tmp_path):
        listener = socket.create_server(("127.0.0.1", 0), backlog=1)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        source = tmp_path / "targets.json"
        groups = [{"targets": [address], "labels": {"rank": str(rank)}} for rank in range(200)]
        source.write_text(json.dumps(groups))
        looked = board(sources=[str(source)])
        time.sleep(0.5)
        begun_s = time.monotonic()
        looked.close()

        assert time.monotonic() - begun_s < 6
        listener.close()


def wait_until(is_so, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class TestAsking:
    def test_goes_past_proxies(self, monkeypatch):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b'horovod_train_steps_total{rank="0"} 3\n')

            def log_message(self, *_):
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = scrape(f"127.0.0.1:{server.server_address[1]}")
        server.shutdown()
        server.server_close()

        assert found is not None

    def test_one_that_speaks_something_else_does_not_answer(self):
        listener = socket.create_server(("127.0.0.1", 0))

        def greet():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.recv(1000)

        thread = threading.Thread(target=greet)
        thread.start()

        assert scrape(f"127.0.0.1:{listener.getsockname()[1]}") is None
        thread.join()
        listener.close()


class TestAHang:
    def document(self, folder, *waiting_s):
        add(folder, as_line(Started(
            job="j", num_parameters=7, world_size=3, global_batch_size=8, precision="fp32", device="cpu",
        )))  # fmt: skip
        found = {
            rank: reading(rank, waiting_now_seconds=s) for rank, s in enumerate(waiting_s) if s is not None
        }
        return run_document(Run(folder), Readings(found, set(range(len(waiting_s))), 1.0, 1.0, found))

    def test_names_who_has_not_come(self, folder):
        assert self.document(folder, 83.0, 0.0, 80.0)["missing_ranks"] == {"ranks": [1], "seconds": 83.0}

    def test_of_ranks_that_wait_a_little_is_none(self, folder):
        assert self.document(folder, 3.0, 0.0, 2.0)["missing_ranks"] is None

    def test_names_a_frozen_rank_which_does_not_answer(self, folder):
        assert self.document(folder, 83.0, None, 80.0)["missing_ranks"]["ranks"] == [1]

    def test_in_which_all_wait_names_nobody(self, folder):
        assert self.document(folder, 83.0, 82.0)["missing_ranks"]["ranks"] == []


class TestInBrief:
    def test_says_how_far_it_is_and_how_long_ago_that_was(self, folder):
        add(folder, as_line(progress(7), time_unix_s=100.0))

        (line,) = summary_lines(read_recent(folder), now_unix_s=161.0)
        assert line == "step 7 of 10, epoch 1 of 1, loss 0.5000, 100 samples/s; 1:01 ago"

    def test_leaves_out_what_is_not_known(self, folder):
        fields = {"num_steps": 0, "num_epochs": 0, "lr": None, "samples_per_s": None, "eta_s": None}
        add(folder, as_line(progress(7, **fields, loss_is_local=True), time_unix_s=100.0))

        assert next(summary_lines(read_recent(folder), 101.0)) == "step 7, loss of rank 0 0.5000; 1 s ago"

    def test_names_the_slow_rank(self, folder):
        slow = times(4.0, 4.0, 4.0, data=(1.0, 3.0, 1.0), allreduce_wait=(2.5, 0.5, 2.5))
        add(folder, as_line(progress(7)), as_line(slow))

        *_, line = summary_lines(read_recent(folder))
        assert line.startswith("rank 1 is slow: 35.0 ms of own time per step, the others 15.0 ms")
        assert line.endswith("in data")

    def test_of_a_run_without_steps_is_nothing(self, folder):
        assert list(summary_lines(read_recent(folder))) == []


class TestAStateOfAnotherHost:
    @pytest.fixture
    def state(self, folder, monkeypatch):
        StateFile(folder).write("running", message="2 rank(s)")
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        return StateFile(folder)

    def test_that_is_touched_goes_on(self, state):
        assert state.read().state == "running"

    def test_that_waits_in_a_queue_is_touched_by_nobody_and_has_not_ended(self, state, folder, monkeypatch):
        monkeypatch.setattr(socket, "gethostname", lambda: "node1")
        StateFile(folder).write("queued", message="it is in the queue again")
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        os.utime(folder / "state.json", (time.time() - 4000,) * 2)

        assert state.read().state == "queued"

    def test_that_is_not_has_ended(self, state, folder):
        os.utime(folder / "state.json", (time.time() - 400,) * 2)

        status = state.read()
        assert (status.state, status.cause) == ("failed", "lost")
        assert "has not updated state.json for 400 s" in status.message

    def test_is_touched_while_somebody_carries_it_out(self, folder, monkeypatch):
        monkeypatch.setattr(jobs_module, "TOUCHED_EVERY_S", 0.02)
        state = StateFile(folder)
        state.write("running")
        os.utime(folder / "state.json", (1.0, 1.0))
        with state.touched():
            wait_until(lambda: (folder / "state.json").stat().st_mtime > 1.0)

    def test_that_others_may_not_read_is_no_damaged_one(self, folder, monkeypatch):
        StateFile(folder).write("running")

        def refuse(*_args, **_options):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("horovod_train.launch.jobs.read_regular", refuse)
        monkeypatch.setattr("horovod_train.launch.jobs.open_regular", refuse)

        assert "cannot be read: Permission denied" in StateFile(folder).read().message

    def test_can_be_written_where_no_file_can_be_made(self, folder, monkeypatch):
        state = StateFile(folder)
        state.write("running")

        def refuse(*_args, **_options):
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(jobs_module, "write_atomic", refuse)
        state.write("preempted", 75, "everything is saved")

        assert StateFile(folder).read().state == "preempted"


def test_the_mode_of_a_state_stays_private(folder):
    StateFile(folder).write("running")

    assert stat.S_IMODE((folder / "state.json").stat().st_mode) == 0o600
