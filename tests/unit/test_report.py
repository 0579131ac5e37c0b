"""Reports of runs: numbers of the events, the same bytes each time, and text that cannot become markup."""

from __future__ import annotations

import json
import re

import pytest
from support.launching import cli

from horovod_train.errors import UserError
from horovod_train.events.file import EVENTS_FILE, EventsFile, opened
from horovod_train.events.types import (
    Attempt,
    CheckpointWritten,
    ComparedWithOneProcess,
    Evaluation,
    Failure,
    Progress,
    RankTimes,
    Started,
)
from horovod_train.launch.jobs import StateFile
from horovod_train.plugins.report.document import (
    MAX_POINTS,
    MAX_RANKS,
    MAX_RUNS,
    Chart,
    Table,
    as_html,
    as_markdown,
    records_of,
    report_of,
)

EVIL = "</script><script>alert(1)</script> | <b>"


def progress(step, loss=0.5, samples_per_s=100.0):
    return Progress(
        step=step, num_steps=10, epoch=0, num_epochs=1, loss=loss, lr=0.1, samples_per_s=samples_per_s,
        eta_s=1.0, numbers={"grad_norm": 2.0 * step},
    )  # fmt: skip


def write_run(root, name, events, *, ranks=2, job=None, state="succeeded"):
    """Write a run folder in which each event is a second after the one before."""
    folder = root / "runs" / "j" / name
    folder.mkdir(parents=True)
    times = iter(range(1_700_000_000, 1_800_000_000))
    writer = EventsFile(folder / EVENTS_FILE, clock=lambda: float(next(times)))
    started = Started(
        job="j", num_parameters=5, world_size=ranks, global_batch_size=8, precision="fp32", device="cpu",
        versions={"horovod": "0.28.1"},
    )  # fmt: skip
    for event in (opened("j", name), Attempt(number=0, num_ranks=ranks, num_wanted=ranks, hosts=()), started):
        writer.write(event)
    for event in events:
        writer.write(event, 0)
    writer.close()
    StateFile(folder).write(state, exit_code=0 if state == "succeeded" else 1)
    (folder / "job.json").write_text(json.dumps(job or {"name": "j", "train": {"epochs": 1}}))
    return folder


def report_on(*folders, loss=None):
    return report_of(records_of([str(folder) for folder in folders]), loss)


def tables(section):
    return {block.title: block for block in section.blocks if isinstance(block, Table)}


def charts(section):
    return {block.title: block for block in section.blocks if isinstance(block, Chart)}


class TestOneRun:
    def test_has_the_values_of_the_events(self, tmp_path):
        events = [
            progress(1, 2.0),
            progress(4, float("nan")),
            Evaluation(epoch=1, metrics={"accuracy": 0.25}, step=5),
            progress(6, 0.5),
            Evaluation(epoch=2, metrics={"accuracy": 0.75}, step=10),
            CheckpointWritten(path="/c/step-10", seconds=0.5, error=""),
            CheckpointWritten(path="/c/step-11", seconds=0.1, error="disk full"),
        ]
        (section,) = report_on(write_run(tmp_path, "r", events)).sections

        (loss,) = charts(section)["Loss"].curves
        assert (loss.x, loss.y) == ((1, 4, 6), (2.0, None, 0.5))
        (accuracy,) = charts(section)["Evaluation: accuracy"].curves
        assert (accuracy.x, accuracy.y) == ((5, 10), (0.25, 0.75))
        assert charts(section)["grad_norm"].curves[0].y == (2.0, 8.0, 12.0)
        rows = {row[0]: row[1:] for row in tables(section)["Metrics"].rows}
        assert rows["loss"] == ("0.5", "0.5 (step 6)", "2 (step 1)")
        assert rows["eval/accuracy"] == ("0.75", "0.25 (step 5)", "0.75 (step 10)")
        facts = dict(tables(section)["Run"].rows)
        assert (facts["State"], facts["Ranks"], facts["Duration"]) == ("succeeded", "2", "9 s")
        assert facts["Versions"].endswith("horovod 0.28.1")
        assert [row[1:] for row in tables(section)["Checkpoints"].rows] == [
            ("/c/step-10", "0.5 s", ""),
            ("/c/step-11", "0.1 s", "disk full"),
        ]

    @pytest.mark.parametrize(
        ("texts", "shown"),
        [
            ((), None),
            (("", ""), "equal, compared 2 times, last after step 2"),
            (("", "the gradient of w differs"), "step 2: the gradient of w differs"),
        ],
    )
    def test_has_the_last_comparison_with_one_process(self, tmp_path, texts, shown):
        events = [ComparedWithOneProcess(step=number, text=text) for number, text in enumerate(texts, 1)]
        (section,) = report_on(write_run(tmp_path, "r", events)).sections

        assert dict(tables(section)["Run"].rows).get("Gradient of one process") == shown

    def test_has_own_times_and_waits_of_ranks(self, tmp_path):
        times = {"first_rank": 0, "seconds": 4.0, "steps": (10, 10), "samples": (80, 80)}
        phases = {"forward": (1.0, 2.5), "allreduce_wait": (2.0, 0.5)}
        event = RankTimes(
            **times, step_s=(3.0, 3.0), phases_s=phases, waiting_s=(1.5, 0.0), waited_for_s=(0.0, 1.5)
        )
        (section,) = report_on(write_run(tmp_path, "r", [event, event])).sections

        # Sums of two windows: 20 steps, 6 s of steps, of which 4 s and 1 s in the all-reduce, in 8 s.
        table = tables(section)["Ranks"]
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        assert [row["Own time"] for row in rows] == ["100 ms", "250 ms"]
        assert [row["Step time"] for row in rows] == ["300 ms", "300 ms"]
        assert [row["Waiting"] for row in rows] == ["37.5 %", "0 %"]
        assert [row["Others wait for it"] for row in rows] == ["0 %", "37.5 %"]
        forward, wait = charts(section)["Phases of a step by rank"].curves
        assert (forward.y, wait.y) == (pytest.approx((100, 250)), pytest.approx((200, 50)))

    def test_shows_the_slowest_of_many_ranks(self, tmp_path):
        num = MAX_RANKS + 20
        step_s = tuple(10.0 + (rank >= 20) for rank in range(num))
        event = RankTimes(
            first_rank=0, seconds=40.0, steps=(10,) * num, samples=(1,) * num, step_s=step_s,
            phases_s={"allreduce_wait": (0.0,) * num}, waiting_s=(), waited_for_s=(),
        )  # fmt: skip
        (section,) = report_on(write_run(tmp_path, "r", [event], ranks=num)).sections

        assert [row[0] for row in tables(section)["Ranks"].rows] == [str(rank) for rank in range(20, num)]

    def test_a_long_series_keeps_its_first_and_last_value(self, tmp_path):
        steps = range(1, 3 * MAX_POINTS)
        (section,) = report_on(
            write_run(tmp_path, "r", [progress(step, 1 / step) for step in steps])
        ).sections

        (loss,) = charts(section)["Loss"].curves
        assert len(loss.x) <= MAX_POINTS + 1
        assert (loss.x[0], loss.x[-1]) == (1, steps[-1])
        assert loss.y == tuple(1 / step for step in loss.x)

    def test_has_fields_that_differ_from_the_defaults(self, tmp_path):
        job = {"name": "j", "train": {"epochs": 7, "seed": 0}, "optimizer": {"args": {"momentum": 0.9}}}
        (section,) = report_on(write_run(tmp_path, "r", [], job=job)).sections

        rows = dict(tables(section)["Job: fields that differ from the defaults"].rows)
        assert rows == {"name": "j", "train.epochs": "7", "optimizer.args.momentum": "0.9"}

    def test_has_the_error_of_a_failed_run(self, tmp_path):
        failure = Failure(
            host="n1", message=f"no file {EVIL}", traceback="Traceback\n  line 1", is_cause=True, exit_code=1
        )
        report = report_on(write_run(tmp_path, "r", [failure], state="failed"))

        markdown, html = as_markdown(report), as_html(report)
        assert "    Rank 0 failed: no file" in markdown
        assert "line 1</pre>" in html
        for text in (html.partition("<main>")[2].partition("</main>")[0], *markdown.splitlines()):
            assert text.startswith("    ") or "<b>" not in text
        assert html.count("</script>") == 3

    def test_a_run_without_events_and_job_is_a_short_report(self, tmp_path):
        folder = tmp_path / "runs" / "j" / "r"
        folder.mkdir(parents=True)
        StateFile(folder).write("failed", 1, "no host")
        (folder / EVENTS_FILE).write_text('{"kind": "progress"}\nnot JSON\n')
        (folder / "job.json").write_text("[1]")

        assert "no host" in as_markdown(report_on(folder))


class TestSeveralRuns:
    def test_are_compared(self, tmp_path):
        slow = [progress(1, 2.0, 100.0), progress(2, 1.0, 100.0), Evaluation(epoch=1, metrics={"a": 0.5})]
        fast = [progress(1, 2.0, 300.0), progress(2, 0.25, 300.0), Evaluation(epoch=1, metrics={"a": 0.75})]
        first = write_run(tmp_path, "a", slow, ranks=1, job={"name": "j", "train": {"epochs": 1}})
        second = write_run(tmp_path, "b", fast, ranks=4, job={"name": "j", "train": {"epochs": 2}})

        comparison, *sections = report_on(second, first, loss=0.5).sections

        assert [section.title for section in sections] == ["j/b", "j/a"]
        table = tables(comparison)["Runs"]
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        # 300 / 4 samples/s per rank against 100 / 1.
        assert [row["Efficiency"] for row in rows] == ["75 %", "100 %"]
        # opened at 0 s, then attempt, started, step 1 at 3 s, step 2 at 4 s.
        assert [row["Time to loss 0.5"] for row in rows] == ["4.0 s", "not reached"]
        assert tables(comparison)["Differences of the jobs"].rows == (("train.epochs", "2", "1"),)
        assert [curve.name for curve in charts(comparison)["Evaluation: a"].curves] == ["j/b", "j/a"]

    def test_of_one_name_in_two_folders_have_their_own_efficiency(self, tmp_path):
        folders = [
            write_run(tmp_path / where, "r", [progress(1, 2.0, speed)], ranks=ranks)
            for where, ranks, speed in (("a", 1, 100.0), ("b", 2, 150.0))
        ]

        table = tables(report_on(*folders).sections[0])["Runs"]

        assert [dict(zip(table.columns, row, strict=True))["Efficiency"] for row in table.rows] == [
            "100 %",
            "75 %",
        ]

    def test_of_a_folder_are_those_below_it_once(self, tmp_path):
        folder = write_run(tmp_path, "b", [])
        write_run(tmp_path, "a", [])

        records = records_of([str(tmp_path / "runs"), str(folder)])

        assert [record.name for record in records] == ["j/a", "j/b"]

    def test_are_limited(self, tmp_path):
        for number in range(MAX_RUNS + 1):
            write_run(tmp_path, f"r{number}", [])

        with pytest.raises(UserError, match=f"at most {MAX_RUNS}"):
            records_of([str(tmp_path / "runs")])


def test_the_same_run_gives_the_same_bytes_without_addresses(tmp_path):
    folder = write_run(tmp_path, "r", [progress(1), progress(2)])

    first, second = (as_html(report_on(folder)) for _ in range(2))

    assert first == second
    own = re.sub(r"<script>.*?</script>", "", first, flags=re.DOTALL)
    assert not re.search(r"(src|href)=\"(?!data:)", own)


def test_the_command_writes_a_file_or_markdown(tmp_path):
    folder = write_run(tmp_path, "r", [progress(1)])

    done = cli("report", str(folder), "-o", "out/report.html", cwd=tmp_path)
    assert done.stdout == "written: out/report.html\n"
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")
    assert cli("report", str(folder), "--format", "markdown", cwd=tmp_path).stdout.startswith("# Run j/r\n")
    assert "add -o report.html" in cli("report", str(folder), cwd=tmp_path, check=False).stderr
    assert (
        "contains no run" in cli("report", str(tmp_path / "out"), "-o", "x", cwd=tmp_path, check=False).stderr
    )
