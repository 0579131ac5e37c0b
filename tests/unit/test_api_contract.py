"""The HTTP API does what its OpenAPI document says: schemathesis sends requests that follow from it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from support.fake_launcher import FakeLauncher, progress, write_events

import horovod_train as ht
from horovod_train import client
from horovod_train.launch import submit as submitting
from horovod_train.launch.base import JobStatus
from horovod_train.plugins.serve import web
from horovod_train.plugins.serve.page import serve_page

OWN, SUBMIT = "own-token-0123456789", "submit-token-0123456789"
PROGRAM = Path(sys.executable).with_name("schemathesis")


class EndedJobs(FakeLauncher):
    """Its jobs have ended, so that every stream ends."""

    def __init__(self):
        super().__init__()
        self.now = JobStatus("succeeded", 0)

    def cancel(self, job, how):
        self.asked.append(how)


@pytest.fixture
def served(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(web.RateLimit, "take", lambda self: 0.0)  # schemathesis sends more than a client may
    launcher = EndedJobs()
    for module in (client, submitting):
        monkeypatch.setattr(module, "launcher_named", lambda name: launcher)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"submit {SUBMIT}\n")
    tokens.chmod(0o600)
    write_events(ht.submit({"name": "j", "task": "digits"}).folder, progress(1, 2.0))
    server = serve_page(
        [tmp_path], [], host="127.0.0.1", port=0, token=OWN, token_file=tokens, max_role="submit"
    )
    yield f"http://127.0.0.1:{server.port}"
    server.close()


def openapi(served):
    request = Request(f"{served}/api/v1/openapi.json", headers={"Authorization": f"Bearer {OWN}"})  # noqa: S310
    with urlopen(request) as answer:  # noqa: S310
        return json.loads(answer.read())


def explore(served, folder, token, *options):
    """Return the number of requests; fail with schemathesis' report if a response is not as documented."""
    document = folder / "openapi.json"
    document.write_text(json.dumps(openapi(served)))
    header = ["-H", f"Authorization: Bearer {token}"] if token else []
    done = subprocess.run(
        [
            *(PROGRAM, "run", document, "--url", served, *header),
            *("--workers", "1", "--request-timeout", "20"),
            *("--generation-database", "none", "--no-color", "--max-failures", "5"),
            # A description of a job may follow the schema and yet be no job: rules between fields.
            # Without a token, no method is said to be unsupported.
            *("--exclude-checks", "positive_data_acceptance" + ("" if token else ",unsupported_method")),
            *options,
        ],
        capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return int(re.search(r"(\d+) generated", done.stdout)[1])


def test_each_response_is_documented_with_and_without_a_token(served, tmp_path):
    quick = ("--phases", "coverage,fuzzing", "--max-examples", "2")

    assert explore(served, tmp_path, SUBMIT, *quick) > 100
    assert explore(served, tmp_path, "", "--phases", "fuzzing", "--max-examples", "2") > 10


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("token", [SUBMIT, OWN, ""], ids=["submit", "read", "none"])
def test_two_thousand_requests_have_documented_responses(served, tmp_path, token):
    assert explore(served, tmp_path, token, "--max-examples", "150") >= 2000


def test_every_endpoint_and_parameter_is_described(served):
    document = openapi(served)

    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["description"], (path, method)
            assert {"401", "404", "422", "429"} <= operation["responses"].keys(), (path, method)
            for parameter in operation.get("parameters", []):
                known = parameter["name"] == "limit" or parameter.get("description")
                assert known or parameter["schema"].get("description"), (path, parameter["name"])


def test_the_documentation_lists_every_request(served):
    page = (Path(__file__).parents[2] / "docs" / "service.md").read_text()
    listed = set(re.findall(r"^\| `(GET|POST) (/api/v1/[^`]+)`", page, re.MULTILINE))
    paths = openapi(served)["paths"]

    assert listed == {(method.upper(), path) for path, methods in paths.items() for method in methods}


def test_the_commands_of_the_documentation_work(served, tmp_path):
    """Those of the section HTTP, with the address and the token of this server."""
    page = (Path(__file__).parents[2] / "docs" / "service.md").read_text()
    section = page[page.index("## HTTP") :]
    commands = section[section.index("```sh\n") + 6 :].partition("```")[0]
    (tmp_path / "tokens").write_text(f"submit {SUBMIT}\n")
    done = subprocess.run(
        ["bash", "-euc", commands.replace("http://127.0.0.1:9301", served).replace("curl ", "curl --fail ")],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert '"state":"succeeded"' in done.stdout
    assert "event: end" in done.stdout
    assert '"series":{}' in done.stdout
