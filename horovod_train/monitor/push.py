"""Grafana dashboards and the rule file for Prometheus of this package, and their upload to Grafana.

    push_dashboards   uploads dashboards through Grafana's HTTP API
    dashboards        the dashboards in this package
    rules_file        the rule file for Prometheus

Three requests are sufficient for an upload, and client libraries install HTTP stacks that replace
``urllib3``, which the Kubernetes client requires.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.client import HTTPException
from importlib.resources import files
from typing import Any
from urllib.error import HTTPError

from horovod_train.errors import OperationalError, UserError
from horovod_train.monitor import rules

FOLDER_UID = "horovod-train"
TIMEOUT_S = 20.0
MAX_ANSWER_BYTES = 2**20


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


RULES = "horovod-train-rules.yaml"


def dashboards() -> dict[str, str]:
    """Return the dashboards in Grafana's import format, by file name."""
    folder = files("horovod_train.monitor") / "shipped"
    found = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".json"))
    return {name: (folder / name).read_text(encoding="utf-8") for name in found}


def rules_file(runbook: str = rules.RUNBOOK, checkpoint_age_s: float = rules.CHECKPOINT_AGE_S) -> str:
    """Return the text of a Prometheus rule file whose alerts link to sections of a runbook."""
    return rules.as_yaml(rules.document(runbook, checkpoint_age_s))
