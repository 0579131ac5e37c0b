"""Give dashboards to a Grafana, through its HTTP API.

Directly, for it is three calls: client libraries bring HTTP stacks along that replace the ``urllib3`` of the
Kubernetes client.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from horovod_train.errors import OperationalError, UserError

FOLDER_UID = "horovod-train"
TIMEOUT_S = 20.0
MAX_ANSWER_BYTES = 2**20


def push_dashboards(
    url: str, token: str, dashboards: Mapping[str, str], folder: str, report: Callable[[str], None]
) -> None:
    """Put dashboards into a folder of a Grafana; those that are there already are replaced.

    Args:
        url: Address of Grafana, http or https.
        token: Of a service account that may write dashboards and folders.
        dashboards: JSON by the names of files.
        folder: Title of the folder.
        report: Called with the address of each dashboard.

    Raises:
        UserError: The address is none of http or https.
        OperationalError: Grafana does not answer, or refuses.
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
            f"{url} did not take the dashboards: {_explained(error)}",
            hint="is that Grafana's own address, and may the service account of the token write folders and "
            "dashboards?",
        ) from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the token would go to another host, and what is posted would not."""

    def redirect_request(self, *_: object) -> None:
        """Let the redirect be the error that it is."""


def _call(url: str, token: str, document: Mapping[str, object] | None = None) -> Any:
    """Get a document, or post one, and return the answer."""
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
