"""The page, in a real browser: what it shows is what ranks say, and it stays where it is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.browser import browser, needs_browser, tab
from support.exporters import ServedRanks
from support.fake_launcher import progress, summary
from support.launching import BIN, PROGRAMS, TIMEOUT_S, cli, environment, free_port, write_job

from horovod_train.events.file import EventsFile, opened, read_events
from horovod_train.events.types import CheckpointWritten, Evaluation, Progress
from horovod_train.monitor import view
from horovod_train.plugins.serve.page import serve_page

pytestmark = [pytest.mark.ranks, needs_browser]
TOKEN = "s3cret"  # noqa: S105
SHOWN_MS = 20_000


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of a real run on three ranks that has ended."""
    folder = tmp_path_factory.mktemp("ended")
    job = write_job(
        folder / "job.yaml",
        name="ended",
        framework="numpy",
        task=f"{PROGRAMS / 'quick_tasks.py'}:Noted",
        task_args={"notes": str(folder), "pause_s": 0.005, "num_samples": 60},
        run_dir=str(folder / "runs"),
        train={"epochs": 60, "batch_size_per_rank": 4},
        lr={"base_lr": 0.01, "reference_batch_size": 4},
        launch={"num_ranks": 3},
    )
    run = [str(BIN / "horovod-train"), "run", str(job)]
    subprocess.run(run, env=environment(), check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
    return folder / "runs"


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Four ranks that serve metrics, one of them slow, and the page on them."""
    monkeypatch.setattr(view, "SCRAPE_INTERVAL_S", 0.2)
    monkeypatch.setattr(view, "MIN_WINDOW_S", 1.0)
    ranks = ServedRanks([0.02, 0.02, 0.045, 0.02], free_port())
    server = serve_page(
        [], [str(ranks.write_targets(tmp_path / "targets.json"))],
        host="127.0.0.1", port=0, token=TOKEN,
    )  # fmt: skip
    yield ranks, f"http://127.0.0.1:{server.port}/?token={TOKEN}"
    server.close()
    ranks.close()


@pytest.fixture
def page_of_ended(ended):
    server = serve_page([ended], [], host="127.0.0.1", port=0, token=TOKEN)
    yield f"http://127.0.0.1:{server.port}/?token={TOKEN}"
    server.close()


def scraped(address, name):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    (value,) = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"horovod_train_{name}"
    ]
    return value


def until(is_so, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def test_the_slow_rank_is_named_and_numbers_are_those_of_the_ranks(served, chromium):
    ranks, address = served
    with tab(chromium) as shown:
        shown.page.goto(address)
        shown.page.wait_for_selector("#chart-heat[data-drawn='4']", timeout=SHOWN_MS)
        until(lambda: "Rank 2: own time" in shown.text("#findings"))
        said = shown.text("#findings")
        assert "own time 45 ms per step" in said
        assert "median of the others 20 ms; 12.5 ms of the excess in phase" in said
        assert "in phase data" in said or "in phase forward" in said
        assert "Rank 0" not in said
        ranks.stop()
        until(lambda: shown.rows()[0]["Steps"] == f"{ranks.num_steps:,}")
        for row, where in zip(shown.rows(), ranks.addresses, strict=True):
            assert row["Host"] == f"n{row['Rank']}"
            assert row["State"] == "trains"
            assert int(row["Steps"].replace(",", "")) == scraped(where, "steps_total")
            assert float(row["Loss"]) == pytest.approx(scraped(where, "loss"), abs=1e-4)
        assert shown.tiles()["Learning rate"] == "0.125"
        assert not shown.complaints


def test_a_rank_that_dies_appears_as_dead(served, chromium):
    ranks, address = served
    with tab(chromium) as shown:
        shown.page.goto(address)
        until(lambda: [row["State"] for row in shown.rows()] == ["trains"] * 4)
        ranks.exporters[1].close()

        until(lambda: shown.rows()[1]["State"] == "dead")
        assert "Rank 1 cannot be scraped, or is lost." in shown.text("#findings")
        assert [row["State"] for row in shown.rows()] == ["trains", "dead", "trains", "trains"]


def test_a_run_that_has_ended_is_shown_whole(page_of_ended, ended, chromium):
    with tab(chromium) as shown:
        shown.page.goto(page_of_ended)
        shown.page.wait_for_selector("#chart-heat[data-drawn='3']", timeout=SHOWN_MS)

        assert shown.text("#state") == "succeeded"
        assert shown.tiles()["Step"] == "300 of 300"
        assert re.search(r"\d", shown.tiles()["Evaluation: loss"])
        assert "trained: 300 steps" in shown.text("#events")
        until(lambda: "trained ended: 60 epochs, 300 steps" in shown.text("#log"))
        assert {row["State"] for row in shown.rows()} == {"ended"}
        (events,) = ended.glob("*/*/events.jsonl")
        evaluated = [
            each.event.metrics["loss"] for each in read_events(events) if isinstance(each.event, Evaluation)
        ]
        drawn = shown.page.evaluate("document.getElementById('chart-evaluation-0').data[0].y")
        assert drawn == evaluated
        assert shown.page.locator("#jobs a[aria-current=page]").count() == 1
        assert not shown.complaints


def test_nothing_comes_from_elsewhere_and_nothing_moves(page_of_ended, chromium):
    with tab(chromium) as shown:
        shown.page.goto(page_of_ended)
        shown.page.wait_for_selector("#chart-heat[data-drawn]", timeout=SHOWN_MS)
        shown.page.wait_for_timeout(3000)

        place = page_of_ended.partition("/?")[0]
        assert len(shown.asked) > 6
        assert all(each.startswith((place, "data:", "blob:")) for each in shown.asked)
        assert TOKEN not in shown.page.url, "it does not stay in the address"
        assert shown.page.evaluate("window.layoutShift") < 0.1


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_it_fits_a_phone_and_the_dark(page_of_ended, chromium, width, scheme):
    with tab(chromium, width=width, height=844, scheme=scheme) as shown:
        shown.page.goto(page_of_ended)
        shown.page.wait_for_selector("#chart-heat[data-drawn]", timeout=SHOWN_MS)

        assert shown.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        background = shown.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 28)")


def drawn(shown, chart, *fields):
    """Fields of the traces of a chart, as Plotly has them."""
    program = """([id, fields]) => document.getElementById(id).data.map(
        (trace) => fields.map((name) => trace[name]))"""
    return shown.page.evaluate(program, [chart, list(fields)])


def test_the_name_of_a_metric_is_text_in_a_report(chromium, tmp_path):
    name = "<a href='https://evil.example'>acc</a> & <b>x</b>"
    folder = tmp_path / "runs" / "j" / "a"
    folder.mkdir(parents=True)
    events = EventsFile(folder / "events.jsonl")
    events.write(opened("j", "a"))
    for step in (1, 2):
        events.write(Evaluation(epoch=step, metrics={name: 0.5}, step=step), 0)
    events.close()
    cli("report", str(folder), "-o", "report.html", cwd=tmp_path)

    with tab(chromium) as shown:
        shown.page.goto((tmp_path / "report.html").as_uri())
        shown.page.wait_for_selector("html[data-drawn]", timeout=SHOWN_MS)

        titles = shown.page.locator("#chart-0 .ytitle").all_text_contents()
        assert [name in title for title in titles] == [True]
        assert not shown.page.locator("a[href*='evil']").count()


LOSSES = {"a": [8.0, 4.0, 2.0, 1.0, 0.5, 0.25], "b": [9.0, 7.0, 5.0]}
RETURNED = {5: 0.75, 6: 0.125}  # the run a returns to a checkpoint of step 4
BY_STEP = [8.0, 4.0, 2.0, 1.0, 0.75, 0.125]


@pytest.fixture
def two_runs(tmp_path):
    """The page of two runs; its address."""
    times = iter(float(number) for number in range(1_700_000_000, 1_700_001_000))
    trackers = [{"name": "tensorboard"}, {"name": "mlflow", "args": {"uri": "https://mlflow.example"}}]
    for run_id, values in LOSSES.items():
        folder = tmp_path / "runs" / "j" / run_id
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(json.dumps({"metrics": {"trackers": trackers}}))
        events = EventsFile(folder / "events.jsonl", clock=lambda: next(times))
        events.write(opened("j", run_id))
        again = RETURNED.items() if run_id == "a" else ()
        for step, loss in [*enumerate(values, 1), *again]:
            events.write(progress(step, loss).model_copy(update={"num_steps": 12, "num_epochs": 3}), 0)
        events.write(Evaluation(epoch=1, metrics={"accuracy": 0.5}, step=4), 0)
        events.write(CheckpointWritten(path="/c/step-4", seconds=1.0, error=""), 0)
        events.write(summary(steps=6))
        events.close()
    server = serve_page([tmp_path / "runs"], [], host="127.0.0.1", port=0, token=TOKEN)
    yield f"http://127.0.0.1:{server.port}/?token={TOKEN}#j%2Fa"
    server.close()


def test_curves_are_shown_by_time_step_and_epoch_logarithmic_and_smoothed(two_runs, chromium):
    """Against the events, and moving averages computed here."""
    with tab(chromium) as shown:
        shown.page.goto(two_runs)
        until(lambda: "Run folder" in shown.text("#places"))
        until(lambda: len(drawn(shown, "chart-loss", "y")[0][0]) == 8)
        shown.page.select_option("#axis", "step")
        until(lambda: drawn(shown, "chart-loss", "x", "y") == [[list(range(1, 7)), BY_STEP]])
        assert drawn(shown, "chart-evaluation-0", "x", "y") == [[[4], [0.5]]]
        shown.page.select_option("#axis", "epoch")
        until(lambda: drawn(shown, "chart-loss", "x")[0][0] == [step / 4 for step in range(1, 7)])
        shown.page.check("#log-axis")
        kind = "document.getElementById('chart-loss').layout.yaxis.type"
        until(lambda: shown.page.evaluate(kind) == "log")
        shown.page.fill("#smoothing", "0.5")
        until(lambda: len(drawn(shown, "chart-loss", "y")) == 2)
        raw, smooth = (trace[0] for trace in drawn(shown, "chart-loss", "y"))
        weights = [[0.5 ** (at - place) for place in range(at + 1)] for at in range(6)]
        means = [sum(w * y for w, y in zip(each, BY_STEP, strict=False)) / sum(each) for each in weights]
        assert raw == BY_STEP
        assert smooth == pytest.approx(means)
        assert not shown.complaints


def test_runs_are_compared_and_their_files_are_named(two_runs, chromium, tmp_path):
    with tab(chromium) as shown:
        shown.page.goto(two_runs)
        shown.page.check("input[data-key='j/b']")
        until(lambda: [name for (name,) in drawn(shown, "chart-loss", "name")] == ["j/a", "j/b"])

        assert drawn(shown, "chart-loss", "y")[1][0] == LOSSES["b"]
        assert "/c/step-4" in shown.text("#places")
        assert str(tmp_path / "runs" / "j" / "tensorboard") in shown.text("#places")
        link = shown.page.get_attribute("#places a[href='https://mlflow.example']", "rel")
        assert link == "noopener noreferrer"
        with shown.page.expect_download() as download:
            shown.page.click("text=download a comparison")
        report = Path(download.value.path()).read_text()
        assert "j/a" in report
        assert "j/b" in report
        assert shown.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert not shown.complaints


def test_a_report_is_drawn_without_network(ended, chromium, tmp_path):
    (run,) = {path.parent for path in ended.glob("*/*/events.jsonl")}
    file = tmp_path / "report.html"
    cli("report", str(run), str(run.parent), "-o", str(file), cwd=tmp_path)

    with tab(chromium, width=390, height=844) as shown:
        shown.page.context.set_offline(True)
        shown.page.goto(file.as_uri())
        shown.page.wait_for_selector("html[data-drawn]", timeout=SHOWN_MS)

        drawn = shown.page.evaluate("document.getElementById('chart-0').data")
        losses = [
            (record.event.step, record.event.loss)
            for record in read_events(run / "events.jsonl")
            if isinstance(record.event, Progress)
        ]
        assert list(zip(drawn[0]["x"], drawn[0]["y"], strict=True)) == losses
        assert "succeeded" in shown.text("main")
        assert shown.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        shown.page.hover("#chart-0")
        with shown.page.expect_download() as download:
            shown.page.click("#chart-0 [data-title^='Download plot']")
        picture = ET.parse(download.value.path()).getroot()  # noqa: S314  (drawn by this page)
        assert picture.tag.endswith("svg")
        assert len(picture.findall(".//{*}path[@class='js-line']")) == len(drawn)
        assert [each for each in shown.asked if not each.startswith(("data:", "blob:"))] == [file.as_uri()]
        assert not shown.complaints


QUICK = {
    "one rank": {"launch": {"num_ranks": 1}},
    "four ranks": {"launch": {"num_ranks": 4}},
    "failed": {"task": "Failing", "task_args": {"how": "raise", "rank": 1}},
    "preempted": {"train": {"epochs": 5000, "batch_size_per_rank": 4}},
    "elastic": {"launch": {"num_ranks": 2, "elastic": {"min_ranks": 2, "max_failures": 1}}},
}
ENDS = {"failed": "failed", "preempted": "preempted"}


def run_of_kind(kind, folder):
    """Train a job of a kind; return its run folder."""
    if kind == "script":
        script = ("--script", str(PROGRAMS / "scripts" / "torch_optimizer.py"), "-n", "2")
        cli("run", *script, "--set", f"metrics.port={free_port()}", "--", "--steps", "60", cwd=folder)
    elif kind == "fsdp":
        sharded = ("-n", "2", "--set", "strategy=fsdp", "--set", "train.max_steps=30")
        cli("run", "digits", *sharded, "--set", f"metrics.port={free_port()}", cwd=folder)
    else:
        wanted = {"launch": {"num_ranks": 2}, "task": "Noted", "task_args": {}, **QUICK[kind]}
        arguments = {"notes": str(folder), "pause_s": 0.01, "num_samples": 60, **wanted["task_args"]}
        wanted |= {"task": f"{PROGRAMS / 'quick_tasks.py'}:{wanted['task']}", "task_args": arguments}
        rest = {"framework": "numpy", "run_dir": str(folder / "runs")}
        train = {"epochs": 20, "batch_size_per_rank": 4}
        job = write_job(folder / "job.yaml", **{"train": train, **rest, **wanted})
        command = [sys.executable, "-m", "horovod_train", "run", str(job)]
        with subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.DEVNULL) as launched:
            if kind == "preempted":
                until(lambda: has_progress(folder), 60)
                launched.terminate()
    (events,) = (folder / "runs").glob("*/*/events.jsonl")
    return events.parent


def has_progress(folder):
    files = folder.glob("runs/*/*/events.jsonl")
    return any(isinstance(r.event, Progress) for file in files for r in read_events(file))


SELDOM = [
    pytest.param(kind, marks=pytest.mark.campaign) for kind in ("one rank", "elastic", "script", "fsdp")
]


@pytest.mark.parametrize("kind", ["four ranks", "failed", "preempted", *SELDOM])
def test_a_report_of_each_kind_of_run_has_the_numbers_of_its_events(kind, chromium, tmp_path):
    run = run_of_kind(kind, tmp_path)
    records = list(read_events(run / "events.jsonl"))
    losses = {r.event.step: r.event.loss for r in records if isinstance(r.event, Progress)}
    evaluations = [r.event for r in records if isinstance(r.event, Evaluation)]
    for name in ("report.html", "again.html"):
        cli("report", str(run), "-o", name, cwd=tmp_path)
    assert (tmp_path / "report.html").read_bytes() == (tmp_path / "again.html").read_bytes()

    with tab(chromium, width=390, height=844) as shown:
        shown.page.context.set_offline(True)
        shown.page.goto((tmp_path / "report.html").as_uri())
        shown.page.wait_for_selector("html[data-drawn]", timeout=SHOWN_MS)

        assert ENDS.get(kind, "succeeded") in shown.text("main")
        if losses:
            curve = shown.page.evaluate("document.getElementById('chart-0').data[0]")
            assert dict(zip(curve["x"], curve["y"], strict=True)) == losses
        for name, value in (evaluations[-1].metrics if evaluations else {}).items():
            titles = shown.page.locator("figcaption").all_text_contents()
            place = next(at for at, title in enumerate(titles) if name in title and "valuation" in title)
            drawn_y = shown.page.evaluate(f"document.getElementById('chart-{place}').data[0].y")
            assert drawn_y[-1] == value
        assert shown.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert not shown.complaints


def test_it_can_be_used_without_a_mouse(page_of_ended, chromium):
    with tab(chromium) as shown:
        shown.page.goto(page_of_ended)
        shown.page.wait_for_selector("#chart-heat[data-drawn]", timeout=SHOWN_MS)
        shown.page.keyboard.press("Tab")
        assert shown.page.evaluate("document.activeElement.textContent") == "Skip to the run"
        shown.page.keyboard.press("Tab")
        shown.page.keyboard.press("Enter")
        assert shown.page.evaluate("document.documentElement.dataset.theme") == "dark"
        shown.page.keyboard.press("Tab")
        assert shown.page.evaluate("document.activeElement.closest('nav') !== null")
        # Whoever cannot see a chart is told what it shows.
        assert "Loss over time, now" in shown.page.get_attribute("#chart-loss", "aria-label")


def test_without_the_token_the_page_asks_for_it(page_of_ended, chromium):
    address, _, token = page_of_ended.partition("?token=")
    with tab(chromium) as shown:
        answer = shown.page.goto(address)

        assert answer.status == 401
        for given, is_shown in (("not-the-token-of-this-server", False), (token.partition("&")[0], True)):
            shown.page.get_by_label("Token").fill(given)
            with shown.page.expect_navigation():
                shown.page.get_by_role("button", name="Open").click()
            assert bool(shown.page.get_by_label("Token").count()) is not is_shown
        shown.page.wait_for_selector("#jobs li")


def test_run_with_ui_prints_where_it_is_and_serves_while_the_run_lasts(tmp_path, chromium):
    job = write_job(
        tmp_path / "job.yaml",
        name="shown",
        framework="numpy",
        task=f"{PROGRAMS / 'quick_tasks.py'}:Noted",
        task_args={"notes": str(tmp_path), "pause_s": 0.02, "num_samples": 60},
        run_dir=str(tmp_path / "runs"),
        train={"epochs": 1000, "batch_size_per_rank": 4},
    )
    with subprocess.Popen(
        [sys.executable, "-m", "horovod_train", "run", str(job), "--ui"],
        env=environment(), stdout=subprocess.PIPE, text=True,
    ) as run:  # fmt: skip
        lines = [run.stdout.readline() for _ in range(3)]
        said = "".join(lines)
        address = re.search(r"page: (http://127\.0\.0\.1:\d+/\?token=[0-9a-f]{32})$", said, re.MULTILINE)
        assert re.search(r"ssh -L (\d+):127\.0\.0\.1:\1 ", said)
        with tab(chromium) as shown:
            shown.page.goto(address[1])
            until(lambda: "running" in shown.text("#state"))
        run.terminate()
        run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 75
