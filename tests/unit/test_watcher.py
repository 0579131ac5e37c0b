"""What is seen in a job's output while it runs: stalls, frozen ranks, killed ranks, measurements, chatter."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from unit.test_attempt import PROGRESS

from horovod_train.config.schema import Job
from horovod_train.errors import LaunchError, LostError, PreemptedError
from horovod_train.events import Event
from horovod_train.launch.console import JobConsole
from horovod_train.launch.logs import LogFile
from horovod_train.launch.submit import resolve
from horovod_train.launch.supervise.follow import Ended, Watcher, stopped_early


@pytest.fixture
def watch(tmp_path):
    """Return a watcher of a job of so many ranks; what it shows stands in ``shown``, what it notes in
    ``noted``."""

    def make(num_ranks=3, launcher="auto"):
        launch = {"num_ranks": num_ranks, "launcher": launcher}
        job = Job.model_validate({"name": "j", "task": "digits", "run_dir": str(tmp_path), "launch": launch})
        request = resolve(job, "run-1")
        request.log_dir.mkdir(parents=True, exist_ok=True)
        shown, noted = io.StringIO(), []
        console = JobConsole(Console(file=shown, force_terminal=False, width=200))
        watcher = Watcher(request, console, LogFile(request.log_dir / "run.log"), note=noted.append)
        watcher.shown, watcher.noted = shown, noted
        made.append(watcher)
        return watcher

    made = []
    yield make
    for watcher in made:
        watcher.close()
        watcher.log.close()


def say(watcher, rank, *lines):
    for line in lines:
        watcher.see(f"[1,{rank}]<stderr>:{line}")


def event(kind, rank=0, **fields):
    return Event(kind, rank, fields).as_line()


class TestAStall:
    def test_is_noted_with_the_ranks_that_are_missed_and_what_from(self, watch):
        watcher = watch()

        say(watcher, 0, "Missing ranks:", "1: [allreduce.gradients, allreduce.loss ...]", "2!: [broadcast.x]")

        names = "allreduce.gradients, allreduce.loss"
        assert watcher.noted == [
            f"rank 1 stayed away from a collective that the others wait in: {names}",
            f"ranks 1-2 stayed away from a collective that the others wait in: {names}",
        ]

    def test_that_is_the_end_is_explained_with_where_to_look(self, watch):
        watcher = watch()
        say(watcher, 0, "Missing ranks:", "2: [allreduce.gradients]")

        with pytest.raises(LostError, match="rank 2 stayed away(.|\n)*health.stall_shutdown_s") as caught:
            watcher.verdict(Ended(1))

        assert "see rank-2.log beside run.log" in caught.value.hint
        assert not caught.value.has_saved

    def test_is_over_when_the_ranks_go_on(self, watch):
        watcher = watch()
        say(watcher, 0, "Missing ranks:", "2: [allreduce.gradients]")

        watcher._see_event(Event("progress", 0, PROGRESS))

        assert watcher.noted[-1] == ""
        with pytest.raises(LaunchError, match="no rank said why"):
            watcher.verdict(Ended(1))

    def test_that_is_told_anew_replaces_what_was_told_before(self, watch):
        watcher = watch()
        say(watcher, 0, "Missing ranks:", "2: [a]")
        say(watcher, 0, "Missing ranks:", "1: [b]")

        assert watcher.stalled == {1: "b"}

    def test_is_read_from_the_rank_that_tells_it_and_to_the_end_of_its_list(self, watch):
        watcher = watch()
        say(watcher, 0, "Missing ranks:")
        say(watcher, 1, "7: [not of the list: another rank wrote it]")
        say(watcher, 0, "2: [a]", "that was all", "3: [too late]")

        assert watcher.stalled == {2: "a"}

    def test_of_ranks_of_which_one_was_killed_is_the_killed_ones_fault(self, watch):
        watcher = watch()
        say(watcher, 0, "Missing ranks:", "2: [a]")
        watcher.see("mpirun noticed that process rank 2 with PID 7 on node n4 exited on signal 9 (Killed).")

        with pytest.raises(LostError, match="rank 2 on n4 was killed by signal 9"):
            watcher.verdict(Ended(137))


class TestFrozenRanks:
    def test_are_told_and_logged_and_forgotten(self, watch):
        watcher = watch()

        watcher.see_frozen("rank 1 shows no sign of life")
        watcher.see_frozen("")

        assert watcher.shown.getvalue() == "warning: rank 1 shows no sign of life\n"
        assert watcher.log.path.read_text() == "warning: rank 1 shows no sign of life\n"
        assert watcher.noted == ["rank 1 shows no sign of life", ""]


class TestAKilledRank:
    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            (
                "mpirun noticed that process rank 1 with PID 7 on node n4 exited on signal 11 (Bad).",
                "rank 1 on n4 was killed by signal 11",
            ),
            ("Process name: 2\nExit code: 137", "rank 2 was killed by signal 9"),
            ("Process name: 2\nExit code: -15", "rank 2 was killed by signal 15"),
        ],
    )
    def test_is_named_in_the_launchers_own_words(self, watch, line, expected):
        watcher = watch()
        for part in line.splitlines():
            watcher.see(part)

        with pytest.raises(LostError, match=f"{expected}, before it could say why") as caught:
            watcher.verdict(Ended(1))

        assert "out of memory (see dmesg)" in caught.value.hint

    def test_is_told_with_what_others_noticed(self, watch):
        watcher = watch()
        fields = {"host": "h", "message": "the connection was lost", "traceback": "", "exit_code": 1}
        for rank in (0, 2):
            watcher.see(event("failure", rank, is_cause=False, **fields))
        watcher.see("mpirun noticed that process rank 1 with PID 7 on node n4 exited on signal 9 (Killed).")

        with pytest.raises(LostError, match="say why; ranks 0, 2 only noticed: the connection was lost"):
            watcher.verdict(Ended(1))

    @pytest.mark.parametrize("line", ["Process name: 2\nExit code: 1", "process rank 2 exited"])
    def test_is_not_assumed(self, watch, line):
        watcher = watch()
        for part in line.splitlines():
            watcher.see(part)

        with pytest.raises(LaunchError, match="no rank said why"):
            watcher.verdict(Ended(1))


class TestLastWords:
    def test_are_told_in_their_order_without_empty_lines(self, watch):
        watcher = watch()
        for line in ("one", " ", "two"):
            watcher.see(line)

        with pytest.raises(LaunchError, match="no rank said why; its last words:\n    one\n    two"):
            watcher.verdict(Ended(7))

    def test_are_left_out_where_there_are_none(self, watch):
        with pytest.raises(LaunchError) as caught:
            watch().verdict(Ended(7))

        assert "last words" not in str(caught.value)


class TestWhatIsShown:
    def test_is_what_the_only_rank_prints_as_it_is(self, watch):
        watcher = watch(1)

        watcher.see("loading data")

        assert watcher.shown.getvalue() == "loading data\n"

    def test_is_what_the_only_rank_passes_on_of_a_launcher_of_its_own(self, watch):
        watcher = watch(1)

        for line in ("[1,1]<stdout>:of another program", "and more"):
            watcher.see(line)

        assert watcher.shown.getvalue() == "[rank 1] of another program\nand more\n"

    def test_is_not_what_mpirun_says_of_the_only_rank(self, watch):
        """As of an elastic job on a host that has one rank."""
        watcher = watch(1, "mpirun")

        say(watcher, 0, "loading data")
        watcher.see("mpirun has exited due to process rank 0 with PID 0 on node n4 exiting improperly")

        assert watcher.shown.getvalue() == "[rank 0] loading data\n"
        with pytest.raises(LaunchError, match="its last words:\n    mpirun has exited"):
            watcher.verdict(Ended(1))

    def test_is_not_what_every_tensorflow_says(self, watch):
        watcher = watch()

        say(watcher, 0, "WARNING: All log messages before absl::InitializeLog() is called are written there")

        assert watcher.shown.getvalue() == ""
        assert "absl" in watcher.log.path.read_text()

    def test_is_no_launchers_chatter(self, watch):
        watcher = watch()

        watcher.see("mpirun has exited due to process rank 0")

        assert watcher.shown.getvalue() == ""

    def test_of_ranks_that_have_left_is_told_once(self, watch):
        watcher = watch()
        for rank in range(3):
            watcher.see(event("left", rank, step=7, epoch=0.5))

        assert watcher.shown.getvalue().count("step 7") == 1
        with pytest.raises(PreemptedError, match="saved at step 7"):
            watcher.verdict(Ended(0))


class TestMeasurements:
    def test_are_kept_and_their_end_is_a_good_one(self, watch):
        watcher = watch()
        watcher.see(event("sweep", via="cpu", size_bytes=8, seconds=0.1, bytes_per_s=80.0))
        watcher.see(event("pair", hosts=["a", "b"], seconds=0.1))
        with pytest.raises(LaunchError):
            watcher.verdict(Ended(0))

        watcher.see(event("swept", world_size=2))
        watcher.verdict(Ended(0))

        assert [found.kind for found in watcher.measured] == ["sweep", "pair", "swept"]
        assert watcher.shown.getvalue() == ""


class TestWhatWasSaved:
    @pytest.mark.parametrize(("error", "has_saved"), [("", True), ("the disk is full", False)])
    def test_counts_when_it_is_whole(self, watch, error, has_saved):
        watcher = watch()
        watcher.see(event("checkpoint", 0, step=3, path="p", seconds=0.1, size_bytes=5, error=error))

        with pytest.raises(LostError) as caught:
            watcher.verdict(Ended(7))

        assert caught.value.has_saved == has_saved


class TestTargets:
    def test_that_cannot_be_written_are_told(self, watch, tmp_path):
        watcher = watch()
        (watcher.request.run_dir / "prometheus-targets.json").mkdir()

        watcher.see(event("targets", 0, targets=[["127.0.0.1:9400", {"rank": "0"}]]))

        assert "prometheus-targets.json was not written for Prometheus: Is a dir" in watcher.shown.getvalue()

    def test_of_later_ranks_are_added(self, watch):
        watcher = watch()
        for rank in range(2):
            watcher.see(event("targets", rank, targets=[[f"127.0.0.1:940{rank}", {"rank": str(rank)}]]))

        found = json.loads((watcher.request.run_dir / "prometheus-targets.json").read_text())

        assert [entry["targets"] for entry in found] == [["127.0.0.1:9400"], ["127.0.0.1:9401"]]

    def test_are_not_touched_by_a_job_that_had_none(self, watch):
        watcher = watch()

        watcher.close()

        assert not (watcher.request.run_dir / "prometheus-targets.json").exists()


class TestAStop:
    def test_before_the_first_ranks_trained_is_no_good_end(self):
        error = stopped_early(15, 0)

        assert (type(error), error.exit_code) == (LaunchError, 143)

    def test_between_two_starts_of_an_elastic_job_loses_nothing(self):
        error = stopped_early(15, 1)

        assert isinstance(error, PreemptedError)
        assert (error.exit_code, error.stopped_by) == (75, 15)
        assert "goes on from its newest checkpoint" in error.hint
