"""What followers make of a run's output: stalls, frozen ranks, killed ranks, measurements, chatter."""

from __future__ import annotations

import json

import pytest
from support.following import Followed, event

from horovod_train.config.schema import Job
from horovod_train.errors import LaunchError, LostError, PreemptedError
from horovod_train.events.types import AllreduceTime
from horovod_train.launch.submit import resolve
from horovod_train.launch.supervise.follow import Frozen, RecordEvents
from horovod_train.launch.supervise.outcome import stopped_early


@pytest.fixture
def follow(tmp_path):
    """Return a run of so many ranks whose output is made up."""

    def make(num_ranks=3, launcher="auto", others=()):
        launch = {"num_ranks": num_ranks, "launcher": launcher}
        job = Job.model_validate({"name": "j", "task": "digits", "run_dir": str(tmp_path), "launch": launch})
        made.append(Followed(resolve(job, "run-1"), others=others))
        return made[-1]

    made = []
    yield make
    for run in made:
        run.close()


class TestAStall:
    def test_is_noted_with_the_ranks_that_are_missed_and_what_from(self, follow):
        run = follow()

        run.say(0, "Missing ranks:", "1: [allreduce.gradients, allreduce.loss ...]", "2!: [broadcast.x]")

        names = "allreduce.gradients, allreduce.loss"
        assert run.noted == [
            f"rank 1 did not join a collective that the others wait in: {names}",
            f"rank 1 did not join {names}; rank 2 did not join broadcast.x",
        ]

    def test_that_is_the_end_is_explained_with_where_to_look(self, follow):
        run = follow()
        run.say(0, "Missing ranks:", "2: [allreduce.gradients]")

        with pytest.raises(LostError, match="rank 2 did not join(.|\n)*health.stall_shutdown_s") as caught:
            run.end(1)

        assert "see rank-2.log next to run.log" in caught.value.hint
        assert not caught.value.has_saved

    def test_is_over_when_the_ranks_go_on(self, follow):
        run = follow()
        run.say(0, "Missing ranks:", "2: [allreduce.gradients]")

        run.handle(event("progress"))

        assert run.noted[-1] == ""
        with pytest.raises(LaunchError, match="no rank said why"):
            run.end(1)

    def test_that_is_told_anew_replaces_what_was_told_before(self, follow):
        run = follow()
        run.say(0, "Missing ranks:", "2: [a]")
        run.say(0, "Missing ranks:", "1: [b]")

        assert run.following.stalls.missing == {1: "b"}

    def test_is_read_from_the_rank_that_tells_it_and_to_the_end_of_its_list(self, follow):
        run = follow()
        run.say(0, "Missing ranks:")
        run.say(1, "7: [not of the list: another rank wrote it]")
        run.say(0, "2: [a]", "that was all", "3: [too late]")

        assert run.following.stalls.missing == {2: "a"}

    def test_of_ranks_of_which_one_was_killed_is_the_killed_ones_fault(self, follow):
        run = follow()
        run.say(0, "Missing ranks:", "2: [a]")
        run.handle("mpirun noticed that process rank 2 with PID 7 on node n4 exited on signal 9 (Killed).")

        with pytest.raises(LostError, match="rank 2 on n4 was killed by signal 9"):
            run.end(137)


class TestFrozenRanks:
    def test_are_told_and_logged_and_forgotten(self, follow):
        run = follow()

        frozen = Frozen(1, "here", 7, 60.0, "stopped")
        run.following.report_frozen([frozen])
        run.following.report_frozen([])

        assert run.shown == f"warning: {frozen}\n"
        assert run.log.read_text() == f"warning: {frozen}\n"
        assert run.noted == [str(frozen), ""]


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
    def test_is_named_in_the_launchers_own_words(self, follow, line, expected):
        run = follow()
        for part in line.splitlines():
            run.handle(part)

        with pytest.raises(LostError, match=f"{expected}, before it could say why") as caught:
            run.end(1)

        assert "out of memory (see dmesg)" in caught.value.hint

    def test_is_told_with_what_others_noticed(self, follow):
        run = follow()
        fields = {"host": "h", "message": "the connection was lost", "traceback": "", "exit_code": 1}
        for rank in (0, 2):
            run.handle(event("failure", rank, is_cause=False, **fields))
        run.handle("mpirun noticed that process rank 1 with PID 7 on node n4 exited on signal 9 (Killed).")

        with pytest.raises(
            LostError, match="say why; ranks 0, 2 failed as a consequence: the connection was lost"
        ):
            run.end(1)

    def test_where_nobody_is_lost_and_nccl_gave_up_it_is_the_network(self, follow):
        run = follow()
        text = "GPUs cannot exchange data any more: remote process exited or there was a network error"
        fields = {"host": "h", "message": text, "traceback": "", "exit_code": 1, "cause": "nccl"}
        for rank in (0, 1):
            run.handle(event("failure", rank, is_cause=False, **fields))

        with pytest.raises(LostError, match="^ranks 0-1: GPUs cannot exchange data") as caught:
            run.end(1)

        assert caught.value.cause == "nccl"
        assert "a link or an interface between hosts" in caught.value.hint

    @pytest.mark.parametrize("line", ["Process name: 2\nExit code: 1", "process rank 2 exited"])
    def test_is_not_assumed(self, follow, line):
        run = follow()
        for part in line.splitlines():
            run.handle(part)

        with pytest.raises(LaunchError, match="no rank said why"):
            run.end(1)


class TestLastWords:
    def test_are_told_in_their_order_without_empty_lines(self, follow):
        run = follow()
        for line in ("one", " ", "two"):
            run.handle(line)

        with pytest.raises(LaunchError, match="no rank said why; its last words:\n    one\n    two"):
            run.end(7)

    def test_are_left_out_where_there_are_none(self, follow):
        with pytest.raises(LaunchError) as caught:
            follow().end(7)

        assert "last words" not in str(caught.value)


class TestWhatIsShown:
    def test_is_what_the_only_rank_prints_as_it_is(self, follow):
        run = follow(1)

        run.handle("loading data")

        assert run.shown == "loading data\n"

    def test_is_what_the_only_rank_passes_on_of_a_launcher_of_its_own(self, follow):
        run = follow(1)

        for line in ("[1,1]<stdout>:of another program", "and more"):
            run.handle(line)

        assert run.shown == "[rank 1] of another program\nand more\n"

    def test_is_not_what_mpirun_says_of_the_only_rank(self, follow):
        """As of an elastic job on a host that has one rank."""
        run = follow(1, "mpirun")

        run.say(0, "loading data")
        run.handle("mpirun has exited due to process rank 0 with PID 0 on node n4 exiting improperly")

        assert run.shown == "[rank 0] loading data\n"
        with pytest.raises(LaunchError, match="its last words:\n    mpirun has exited"):
            run.end(1)

    def test_is_not_what_every_tensorflow_says(self, follow):
        run = follow()

        run.say(0, "WARNING: All log messages before absl::InitializeLog() is called are written there")

        assert run.shown == ""
        assert "absl" in run.log.read_text()

    def test_is_no_launchers_chatter(self, follow):
        run = follow()

        run.handle("mpirun has exited due to process rank 0")

        assert run.shown == ""

    def test_of_ranks_that_have_left_is_told_once(self, follow):
        run = follow()
        for rank in range(3):
            run.handle(event("preempted", rank, step=7, epoch=0.5))

        assert run.shown.count("step 7") == 1
        with pytest.raises(PreemptedError, match="saved at step 7"):
            run.end(0)


class TestMeasurements:
    def test_are_kept_and_their_end_is_a_good_one(self, follow):
        measured = RecordEvents()
        run = follow(others=[measured])
        run.handle(event("allreduce_time", via="cpu", size_bytes=8, seconds=0.1, bytes_per_s=80.0))
        run.handle(event("pair_time", hosts=("a", "b"), seconds=0.1))
        with pytest.raises(LaunchError):
            run.end(0)

        run.handle(event("benchmark_done", world_size=2))
        run.end(0)

        assert [found.kind for found in measured.events] == ["allreduce_time", "pair_time", "benchmark_done"]
        assert [found.size_bytes for found in measured.of_kind(AllreduceTime)] == [8]
        assert run.shown == ""


class TestWhatWasSaved:
    @pytest.mark.parametrize(("error", "has_saved"), [("", True), ("the disk is full", False)])
    def test_counts_when_it_is_whole(self, follow, error, has_saved):
        run = follow()
        run.handle(event("checkpoint", path="p", seconds=0.1, error=error))

        with pytest.raises(LostError) as caught:
            run.end(7)

        assert caught.value.has_saved == has_saved


class TestTargets:
    def test_that_cannot_be_written_are_told(self, follow, tmp_path):
        run = follow()
        (run.request.run_dir / "prometheus-targets.json").mkdir()

        run.handle(event("targets", 0, targets=[{"address": "127.0.0.1:9400", "labels": {"rank": "0"}}]))

        assert "prometheus-targets.json was not written for Prometheus: Is a dir" in run.shown

    def test_of_later_ranks_are_added(self, follow):
        run = follow()
        for rank in range(2):
            target = {"address": f"127.0.0.1:940{rank}", "labels": {"rank": str(rank)}}
            run.handle(event("targets", rank, targets=[target]))

        found = json.loads((run.request.run_dir / "prometheus-targets.json").read_text())

        assert [entry["targets"] for entry in found] == [["127.0.0.1:9400"], ["127.0.0.1:9401"]]

    def test_are_not_touched_by_a_job_that_had_none(self, follow):
        run = follow()

        run.close()

        assert not (run.request.run_dir / "prometheus-targets.json").exists()


class TestAStop:
    def test_before_the_first_ranks_trained_is_no_good_end(self):
        error = stopped_early(15, 0)

        assert (type(error), error.exit_code) == (LaunchError, 143)

    def test_between_two_starts_of_an_elastic_job_loses_nothing(self):
        error = stopped_early(15, 1)

        assert isinstance(error, PreemptedError)
        assert (error.exit_code, error.stopped_by) == (75, 15)
        assert "resumes from its newest checkpoint" in error.hint
