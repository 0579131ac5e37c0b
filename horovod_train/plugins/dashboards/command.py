"""Command ``dashboards``, and the upload of dashboards to Grafana through its HTTP API.

Three requests are sufficient for an upload, and client libraries install HTTP stacks that replace
``urllib3``, which the Kubernetes client requires.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import click

from horovod_train.cli.options import print_line
from horovod_train.errors import OperationalError, UserError
from horovod_train.system.files import write_atomic

FOLDER_UID = "horovod-train"
TIMEOUT_S = 20.0
MAX_ANSWER_BYTES = 2**20


@click.group(name="dashboards")
def dashboards_command() -> None:
    """Export dashboards for Grafana and rules for Prometheus."""


@dashboards_command.command(name="export")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--runbook",
    metavar="URL",
    help="Address that alerts link to: your copy of docs/runbook.md.",
    default=None,
)
@click.option(
    "--checkpoint-age",
    metavar="SECONDS",
    type=click.FloatRange(min=1),
    default=3600.0,
    show_default=True,
    help="Age of the newest checkpoint above which an alert fires.",
)
def export_dashboards(folder: Path, runbook: str | None, checkpoint_age: float) -> None:
    """Write dashboards (JSON, for Grafana) and rules (YAML, for Prometheus) into FOLDER."""
    from horovod_train.plugins.dashboards import RULES, dashboards, rules_file
    from horovod_train.plugins.dashboards.rules import RUNBOOK

    if runbook is not None and not runbook.startswith(("http://", "https://")):
        raise UserError(f"--runbook {runbook} is not a URL", hint="begin it with https://")
    texts = {**dashboards(), RULES: rules_file(runbook or RUNBOOK, checkpoint_age)}
    for name, text in texts.items():
        write_atomic(folder / name, text, mode=0o644)
        print_line(folder / name)


@dashboards_command.command(name="push")
@click.argument("url")
@click.option("--folder", default="horovod_train", show_default=True, help="Title of the folder in Grafana.")
def push(url: str, folder: str) -> None:
    """Upload the dashboards to the Grafana at URL. GRAFANA_TOKEN must contain a service account token."""
    from horovod_train.plugins.dashboards import dashboards

    token = os.environ.get("GRAFANA_TOKEN")
    if not token:
        hint = "export GRAFANA_TOKEN=..., the token of a service account that may edit dashboards"
        raise UserError("GRAFANA_TOKEN is not set", hint=hint)
    push_dashboards(url, token, dashboards(), folder, print_line)


def push_dashboards(
    url: str, token: str, dashboards: Mapping[str, str], folder: str, report: Callable[[str], None]
) -> None:
    """Upload dashboards to a folder of Grafana. Existing dashboards are replaced.

    Args:
        url: URL of Grafana, http or https.
        token: Token of a service account that may write dashboards and folders.
        dashboards: JSON of the dashboards, by file name.
        folder: Title of the folder, if it is created.
        report: Called with the name and URL of each uploaded dashboard.

    Raises:
        UserError: The URL has another scheme.
        OperationalError: Grafana does not respond, or rejects a request.
    """
    base = url.rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise UserError(f"{url} is not an address of Grafana", hint="it begins with http:// or https://")
    try:
        try:
            _call(f"{base}/api/folders/{FOLDER_UID}", token)
        except HTTPError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            _call(f"{base}/api/folders", token, {"uid": FOLDER_UID, "title": folder})
        for name, text in dashboards.items():
            document = {"dashboard": json.loads(text), "folderUid": FOLDER_UID, "overwrite": True}
            answer = _call(f"{base}/api/dashboards/db", token, document)
            report(f"{name}: {base}{answer['url']}")
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        raise OperationalError(
            f"uploading dashboards to {url} failed: {_explained(error)}",
            hint="check the URL of Grafana, and that the service account of the token may write folders and "
            "dashboards",
        ) from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Rejects redirects: ``urllib`` would send the token to another host, and a POST without its body."""

    def redirect_request(self, *_: object) -> None:
        """Return None, so that ``urllib`` raises ``HTTPError``."""


def _call(url: str, token: str, document: Mapping[str, object] | None = None) -> Any:
    """Send a GET request, or POST a document, and return the parsed response."""
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
    data = None
    if document is not None:
        headers["Content-Type"] = "application/json"
        data = json.dumps(document).encode()
    request = urllib.request.Request(url, data, headers)  # noqa: S310  (http or https, see above)
    with urllib.request.build_opener(_NoRedirects).open(request, timeout=TIMEOUT_S) as answer:
        return json.loads(answer.read(MAX_ANSWER_BYTES))


def _explained(error: Exception) -> str:
    if isinstance(error, HTTPError):
        with error:
            return f"{error.code} {error.reason} {error.read(1000).decode(errors='replace')}".strip()
    return str(error) or type(error).__name__
