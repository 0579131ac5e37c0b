"""The web page and the endpoints for Prometheus.

    Page, PageServer, serve_page   the web page: its assets, and its data as JSON; no external assets
    http_sd                        targets for Prometheus' HTTP service discovery
    add_targets, serve_targets     endpoints for Prometheus: /targets for ``http_sd_configs``, and /metrics
                                   with the metrics of jobs

/                   the page; a request with the token sets a cookie for later requests
/page.js, ...       assets of the page; Plotly is read from its Python package
/page/jobs          all runs
/page/run?key=      one run, with the current metrics of its ranks
/page/log?key=      the end of a run's log
/page/curves?key=   curves of a run, for comparison
/page/report?key=   a report of one or several runs, as a file
/api/v1/            the HTTP API (``api.py``), which also ends jobs for the page
/targets, /metrics  for Prometheus
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

from anyio import to_thread
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from horovod_train.errors import UserError
from horovod_train.events.wire import as_document
from horovod_train.monitor.live import Access
from horovod_train.monitor.runs import JobCollector, Run, Runs
from horovod_train.monitor.view import (
    Board,
    DisplayedRun,
    Readings,
    curves_document,
    job_row,
    log_tail,
    run_document,
)
from horovod_train.plugins.report.document import as_html, records_of, report_of
from horovod_train.plugins.serve.api import JobsApi
from horovod_train.plugins.serve.web import (
    Role,
    Server,
    Tls,
    Tokens,
    application,
    json_response,
    read,
    token_of_environment,
)


def http_sd(runs: Iterable[Run]) -> list[dict[str, object]]:
    """Return the targets of unfinished runs, in the format of ``http_sd_configs``."""
    return as_document(
        target
        for run in runs
        if not run.status().has_ended
        for _, target in sorted(run.history().targets.items())
    )


def add_targets(app: FastAPI, places: Sequence[Path], *, with_submitted: bool = False) -> None:
    """Add the endpoints, for the runs in some folders (and submitted jobs), to an application."""
    runs = Runs(places, with_ranks=False, with_submitted=with_submitted)
    registry = CollectorRegistry()
    registry.register(JobCollector(runs))

    async def targets(request: Request) -> Response:
        """Return the metrics endpoints of ranks."""
        return json_response(await read(request, lambda: http_sd(runs.all())))

    async def metrics(request: Request) -> Response:
        """Return the metrics of jobs in the requested exposition format."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        text = await read(request, lambda: encode(registry))
        return Response(text, headers={"Content-Type": content_type})

    app.add_route("/targets", targets, methods=["GET"], include_in_schema=False)
    app.add_route("/metrics", metrics, methods=["GET"], include_in_schema=False)


def serve_targets(places: list[Path], host: str, port: int) -> Server:
    """Serve the targets and metrics of all jobs in some folders, without the page.

    Raises:
        UserError: The server cannot listen on this address and port.
    """
    token = token_of_environment()
    app = application(host, None if token is None else Tokens(token))
    add_targets(app, places)
    return Server(app, host, port)


MAX_JOBS_SHOWN = 200
MAX_COMPARED = 20
OPEN_PAGE_S = 3.0
"""A page is open if its last request is at most this old, because it sends requests every two seconds."""

PAGE_FILES = {
    "page.js": "text/javascript",
    "charts.js": "text/javascript",
    "page.css": "text/css",
}
COOKIE_S = 24 * 3600


class Page:
    """Endpoints of the page.

    Args:
        board: Runs to display.
    """

    def __init__(self, board: Board) -> None:
        self._board = board

    def add_to(self, app: FastAPI) -> None:
        """Add the endpoints to an application."""
        endpoints: dict[str, Callable[..., Awaitable[Response]]] = {
            "/": self.page,
            "/plotly.js": self.plotly,
            "/page/jobs": self.jobs,
            "/page/run": self.run,
            "/page/log": self.log,
            "/page/curves": self.curves,
            "/page/report": self.report,
            **{f"/{name}": partial(_asset, name) for name in PAGE_FILES},
        }
        for path, endpoint in endpoints.items():
            app.add_route(path, endpoint, methods=["GET"], include_in_schema=False)

    async def page(self, request: Request) -> Response:
        """Return the page, and store the token of the URL in a cookie."""
        response = Response(_page_file("index.html"), media_type="text/html")
        if token := request.query_params.get("token", ""):
            # Strict: requests from other sites do not contain the cookie. A script on the page removes the
            # token from the URL, because the cookie is not sent in a redirect after a link on another site.
            response.set_cookie(
                request.state.cookie,
                token,
                httponly=True,
                samesite="strict",
                max_age=COOKIE_S,
                secure=request.url.scheme == "https",
            )
        return response

    async def plotly(self, request: Request) -> Response:
        """Return the Plotly library, compressed if the browser accepts gzip. Browsers may cache it."""
        headers = {"Cache-Control": "private, max-age=86400", "Vary": "Accept-Encoding"}
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(_plotly(), media_type="text/javascript", headers=headers)
        headers["Content-Encoding"] = "gzip"
        return Response(_plotly_compressed(), media_type="text/javascript", headers=headers)

    async def jobs(self, request: Request) -> Response:
        """Return the runs, newest start first."""

        def begun(row: dict[str, object]) -> float:
            """Return the start time as sort key: unlike the time of the last write, it does not change."""
            found = row["begun_unix_s"]
            return found if isinstance(found, float) else float("-inf")

        def newest() -> list[dict[str, object]]:
            rows = [job_row(run) for run in self._board.runs()[:MAX_JOBS_SHOWN]]
            return sorted(rows, key=begun, reverse=True)

        rows = await read(request, newest)
        return json_response({"jobs": rows, "may_end": request.state.role != "read"})

    async def run(self, request: Request) -> Response:
        """Return the data of a run."""

        def document() -> str:
            run, readings = self._requested(request)
            return json.dumps(run_document(run, readings), separators=(",", ":"), allow_nan=False)

        return Response(await read(request, document), media_type="application/json")

    async def log(self, request: Request) -> Response:
        """Return the end of a run's log."""
        text = await read(request, lambda: log_tail(self._requested(request)[0]))
        return Response(text, media_type="text/plain")

    async def curves(self, request: Request) -> Response:
        """Return the curves of a run, for comparison."""
        return json_response(await read(request, lambda: curves_document(self._requested(request)[0])))

    async def report(self, request: Request) -> Response:
        """Return a report of one or several runs as a file.

        It is not displayed by the server: its scripts are part of it, and must not have access to the page.
        """
        keys = request.query_params.getlist("key")[:MAX_COMPARED]

        def document() -> tuple[str, str]:
            runs = [self._board.request_run(key) for key in dict.fromkeys(keys)]
            folders = [run[0].log_dir for run in runs if run is not None]
            known = [str(folder) for folder in folders if folder is not None]
            if not known or len(known) < len(folders):
                raise HTTPException(404, "no such run on this host")
            records = records_of(known)
            names = "-and-".join(record.name.replace("/", "-") for record in records[:2])
            return as_html(report_of(records)), f"report-{re.sub(r'[^A-Za-z0-9._-]', '_', names)}.html"

        text, name = await to_thread.run_sync(document)
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(text, media_type="text/html", headers=headers)

    def _requested(self, request: Request) -> tuple[DisplayedRun, Readings]:
        found = self._board.request_run(request.query_params.get("key", ""))
        if found is None:
            raise HTTPException(404, "no such run")
        return found


async def _asset(name: str, _: Request) -> Response:
    return Response(_page_file(name), media_type=PAGE_FILES[name])


@cache
def _page_file(name: str) -> bytes:
    return (files("horovod_train.plugins.serve") / "page_files" / name).read_bytes()


@cache
def _plotly() -> bytes:
    return (files("plotly") / "package_data" / "plotly.min.js").read_bytes()


@cache
def _plotly_compressed() -> bytes:
    return gzip.compress(_plotly(), compresslevel=6)


class PageServer(Server):
    """Server of the page. It detects whether a browser displays the page, and closes ``board``."""

    def __init__(self, app: FastAPI, host: str, port: int, board: Board, tls: Tls | None = None) -> None:
        super().__init__(app, host, port, tls)
        self._board = board
        self.at_close = board.close

    def show_the_end(self) -> None:
        """If a browser displays the page, wait until it has requested the current state."""
        begun_s = monotonic()
        if begun_s - self._board.last_request_s > OPEN_PAGE_S:
            return
        while self._board.last_request_s < begun_s and monotonic() - begun_s < OPEN_PAGE_S:
            sleep(0.1)
        sleep(0.5)  # for the transfer of the response


def serve_page(
    places: Sequence[Path],
    sources: Sequence[str],
    *,
    host: str,
    port: int,
    token: str,
    token_file: Path | None = None,
    max_role: Role = "read",
    tls: Tls | None = None,
    access: Access = Access(),  # noqa: B008  (it is frozen)
    with_submitted: bool = False,
) -> PageServer:
    """Serve the page, the HTTP API, and targets and metrics of jobs for Prometheus.

    Args:
        places: Folders that contain runs.
        sources: Files, URLs or lists of targets.
        host: Address to listen on.
        port: Port; 0: any free port.
        token: Token in the address of the page; it may end jobs if ``max_role`` allows it, but not submit.
        token_file: File with further tokens and their roles; None: no further tokens.
        max_role: Highest role of any token.
        tls: Certificate and key; None: HTTP.
        access: Credentials for the ranks of the sources.
        with_submitted: Whether to display all jobs that were submitted from this account.

    Raises:
        UserError: The server cannot listen on this address and port, or a file cannot be used.
    """
    app = application(host, Tokens(token, token_file, max_role), has_api=True)
    board = Board(places, sources, access, with_submitted=with_submitted)
    Page(board).add_to(app)
    JobsApi().add_to(app)
    add_targets(app, places, with_submitted=with_submitted)
    Thread(target=_plotly_compressed, daemon=True).start()  # so that no request waits for it
    try:
        return PageServer(app, host, port, board, tls)
    except UserError:
        board.close()
        raise
