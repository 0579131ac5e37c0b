"""Dashboards and rules that ship are those that the code makes, and reach a Grafana."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import yaml
from click.testing import CliRunner
from support.launching import free_port

from horovod_train.cli.main import cli
from horovod_train.errors import OperationalError
from horovod_train.monitor.runs import JOB_CATALOG
from horovod_train.plugins.dashboards import dashboards
from horovod_train.plugins.dashboards.generate import FOLDER, PAGES, generated
from horovod_train.plugins.dashboards.rules import RECORDINGS
from horovod_train.telemetry.catalog import CATALOG

TOKEN = "glsa_1"  # noqa: S105


def test_the_files_that_ship_are_those_that_are_generated():
    assert {path.name: path.read_text() for path in FOLDER.iterdir()} == generated()


def test_panels_have_numbers_of_their_own_and_a_description_each():
    for text in dashboards().values():
        panels = json.loads(text)["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        shown = [panel for panel in panels if panel["type"] != "row"]
        assert all(panel["description"] for panel in shown)
        assert all(panel["targets"] for panel in shown)
        assert len({panel["title"] for panel in shown}) == len(shown)


def test_queries_ask_for_series_that_exist():
    known = {metric.name for metric in (*CATALOG, *JOB_CATALOG)} | {each.name for each in RECORDINGS}
    known |= {f"{metric.name}{end}" for metric in CATALOG for end in ("_sum", "_count", "_bucket")}
    asked = {
        name
        for page in PAGES
        for panel in page.panels
        for query in panel.queries
        for name in re.findall(r"horovod_train[_:][a-z_:]*[a-z]", query.expr)
    }

    assert asked - known == set()


def test_every_metric_is_on_a_dashboard_or_in_a_rule():
    text = "".join(generated().values())

    assert {metric.name for metric in (*CATALOG, *JOB_CATALOG) if metric.name not in text} == set()


def test_export_writes_them_with_the_sites_runbook(tmp_path):
    done = CliRunner().invoke(
        cli, ["dashboards", "export", str(tmp_path / "out"), "--runbook", "https://w/r"]
    )

    assert done.exit_code == 0, done.output
    assert len(list((tmp_path / "out").iterdir())) == 5
    rules = yaml.safe_load((tmp_path / "out" / "horovod-train-rules.yaml").read_text())
    links = {rule["annotations"]["runbook_url"] for rule in rules["groups"][1]["rules"]}
    assert "https://w/r#horovodtrainstraggler" in links


class Grafana(BaseHTTPRequestHandler):
    """As much of Grafana's API as is asked for; our own making, and not Grafana."""

    def answer(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def is_known(self):
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self.answer(401, {"message": "Invalid API key"})
        return False

    def do_GET(self):
        if self.is_known():
            folder = self.server.folders.get(self.path.rpartition("/")[2])
            self.answer(200 if folder else 404, folder or {"message": "folder not found"})

    def do_POST(self):
        document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.is_known():
            return
        if self.path == "/api/folders":
            self.server.folders[document["uid"]] = document
            self.answer(200, document)
        elif self.path == "/api/dashboards/db" and document["folderUid"] in self.server.folders:
            uid = document["dashboard"]["uid"]
            if uid in self.server.dashboards and not document["overwrite"]:
                self.answer(412, {"message": "exists"})
            else:
                self.server.dashboards[uid] = document["dashboard"]
                self.answer(200, {"url": f"/d/{uid}", "uid": uid})
        else:
            self.answer(404, {"message": "not found"})

    def log_message(self, *_):
        pass


@pytest.fixture
def grafana():
    with HTTPServer(("127.0.0.1", 0), Grafana) as server:
        server.folders, server.dashboards = {}, {}
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def push(address, token=TOKEN):
    return CliRunner().invoke(cli, ["dashboards", "push", address], env={"GRAFANA_TOKEN": token})


class TestPush:
    def test_puts_them_into_a_folder_again_and_again(self, grafana):
        address = f"http://127.0.0.1:{grafana.server_port}"
        first, second = push(address), push(address)

        assert first.exit_code == second.exit_code == 0, (first.exception, second.exception)
        assert grafana.folders["horovod-train"]["title"] == "horovod_train"
        assert grafana.dashboards == {each["uid"]: each for each in map(json.loads, dashboards().values())}
        assert f"{address}/d/horovod-train-job" in first.output

    def test_says_that_a_token_is_wrong(self, grafana):
        done = push(f"http://127.0.0.1:{grafana.server_port}", "wrong")

        assert isinstance(done.exception, OperationalError)
        assert "uploading dashboards to" in str(done.exception)
        assert "wrong" not in str(done.exception).replace("wrong address", "")

    def test_says_that_nobody_answers(self):
        done = push(f"http://127.0.0.1:{free_port()}")

        assert isinstance(done.exception, OperationalError)

    def test_wants_a_token_and_not_on_the_command_line(self):
        done = CliRunner().invoke(cli, ["dashboards", "push", "http://x"], env={"GRAFANA_TOKEN": None})

        assert "GRAFANA_TOKEN is not set" in str(done.exception)
        assert "GRAFANA_TOKEN" in CliRunner().invoke(cli, ["dashboards", "push", "--help"]).output
