"""Give dashboards to a Grafana, through its HTTP API."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus

from horovod_train.errors import OperationalError, UserError

FOLDER_UID = "horovod-train"
TIMEOUT_S = 20.0


def push_dashboards(
    url: str, token: str, dashboards: Mapping[str, str], folder: str, say: Callable[[str], None]
) -> None:
    """Put dashboards into a folder of a Grafana; those that are there already are replaced.

    Args:
        url: Address of Grafana.
        token: Of a service account that may write dashboards and folders.
        dashboards: JSON by the names of files.
        folder: Title of the folder.
        say: Told what was done.

    Raises:
        UserError: The package grafana-client is missing.
        OperationalError: Grafana does not answer, or refuses.
    """
    try:
        from grafana_client import GrafanaApi, TokenAuth
        from grafana_client.client import GrafanaClientError, GrafanaException
    except ImportError as error:
        raise UserError(
            f"dashboards are pushed with grafana-client: {error}",
            hint="pip install 'horovod_train[grafana]', or import the files of `dashboards export` by hand",
        ) from error
    api = GrafanaApi.from_url(url, credential=TokenAuth(token), timeout=TIMEOUT_S)
    try:
        try:
            api.folder.get_folder(FOLDER_UID)
        except GrafanaClientError as error:
            if error.status_code != HTTPStatus.NOT_FOUND:
                raise
            api.folder.create_folder(folder, uid=FOLDER_UID)
        for name, text in dashboards.items():
            document = {"dashboard": json.loads(text), "folderUid": FOLDER_UID, "overwrite": True}
            answer = api.dashboard.update_dashboard(document)
            say(f"{name}: {url.rstrip('/')}{answer['url']}")
    except (GrafanaException, OSError) as error:
        raise OperationalError(
            f"{url} did not take the dashboards: {error}",
            hint="is that Grafana's own address, and may the service account of the token write folders and "
            "dashboards?",
        ) from error
