"""HTTP handlers of the web page: the page, its assets, and its data as JSON. No external assets.

/                  the page; a request with the token sets a cookie for later requests
/page.js, ...      assets of the page; Plotly is read from its Python package
/api/jobs          all runs
/api/run?key=      one run, with the current metrics of its ranks
/api/log?key=      the end of a run's log
/api/end           ends a run; requires --allow-ending
/targets, /metrics  for Prometheus (``targets.py``)
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Literal

from tornado.web import Application, HTTPError

from horovod_train.errors import HorovodTrainError, UserError
from horovod_train.launch.submit import submitted
from horovod_train.monitor.board import Board, DisplayedRun, Readings
from horovod_train.monitor.live import Access
from horovod_train.monitor.view import job_row, log_tail, run_document
from horovod_train.serve import targets
from horovod_train.serve.web import Guarded, Server, application

PORT = 9301
MAX_JOBS_SHOWN = 200
OPEN_PAGE_S = 3.0
"""A page is open if its last request is at most this old, because it sends requests every two seconds."""

PAGE_FILES = {
    "page.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
}
HOW = {"drain", "stop"}


class _Page(Guarded):
    """Handler of the page."""

    def get(self) -> None:
        """Send the page, and store the token of the URL in a cookie."""
        if self.get_query_argument("token", ""):
            # Strict: requests from other sites do not contain the cookie. A script on the page removes the
            # token from the URL, because the cookie is not sent in a redirect after a link on another site.
            self.set_cookie(
                self.cookie_name, self.settings["token"], httponly=True, samesite="Strict", expires_days=1
            )
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.finish(_page_file("index.html"))


class _PageFile(Guarded):
    """Handler of the page's assets."""

    def get(self, name: str) -> None:
        """Send an asset."""
        self.set_header("Content-Type", PAGE_FILES[name])
        self.finish(_page_file(name))


class _Plotly(Guarded):
    """Handler of the Plotly library. Browsers may cache it, because it does not change."""

    def get(self) -> None:
        """Send Plotly, compressed if the browser accepts gzip."""
        self.set_header("Content-Type", "text/javascript; charset=utf-8")
        self.set_header("Cache-Control", "private, max-age=86400")
        self.set_header("Vary", "Accept-Encoding")
        if "gzip" in self.request.headers.get("Accept-Encoding", ""):
            self.set_header("Content-Encoding", "gzip")
            self.finish(_plotly_compressed())
        else:
            self.finish(_plotly())


class _Jobs(Guarded):
    """Handler of the list of runs."""

    async def get(self) -> None:
        """Send the runs, newest start first."""
        board: Board = self.settings["board"]

        def begun(row: dict[str, object]) -> float:
            """Return the start time as sort key: unlike the time of the last write, it does not change."""
            found = row["begun_unix_s"]
            return found if isinstance(found, float) else float("-inf")

        def newest() -> list[dict[str, object]]:
            rows = [job_row(run) for run in board.runs()[:MAX_JOBS_SHOWN]]
            return sorted(rows, key=begun, reverse=True)

        rows = await self.read(newest)
        self.send_json({"jobs": rows, "may_end": self.settings["may_end"]})


class _Run(Guarded):
    """Handler of one run."""

    async def get(self) -> None:
        """Send the data of a run."""

        def document() -> str:
            run, readings = _looked_at(self)
            return json.dumps(run_document(run, readings), separators=(",", ":"), allow_nan=False)

        self.set_header("Content-Type", "application/json")
        self.finish(await self.read(document))


class _Log(Guarded):
    """Handler of logs."""

    async def get(self) -> None:
        """Send the end of a run's log."""
        text = await self.read(lambda: log_tail(_looked_at(self)[0]))
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(text)


class _End(Guarded):
    """Handler that ends runs."""

    async def post(self) -> None:
        """End a run. The status is 409, with a message, if that is not possible.

        Raises:
            HTTPError: 403: ending is not allowed; 400: invalid request; 404: no such run.
        """
        # Other sites cannot send this header without a CORS preflight request.
        if not self.settings["may_end"] or self.request.headers.get("X-Requested-With") != "horovod_train":
            raise HTTPError(403, reason="the page may not end jobs: start it with --allow-ending")
        try:
            request_body = json.loads(self.request.body)
            how: Literal["drain", "stop"] = request_body["how"]
            key = str(request_body["key"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise HTTPError(400) from error
        if not isinstance(how, str) or how not in HOW:
            raise HTTPError(400)
        board: Board = self.settings["board"]
        found = board.request_run(key)
        if found is None:
            raise HTTPError(404)
        try:
            await self.read(lambda: end(found[0], how))
        except (HorovodTrainError, OSError) as error:
            self.set_status(409)
            self.send_json({"message": str(error)})
            return
        self.send_json({"message": ""})


def end(run: DisplayedRun, how: Literal["drain", "stop"]) -> None:
    """End a run as ``horovod-train drain`` and ``cancel`` do.

    Raises:
        HorovodTrainError: The run was not submitted on this machine, or cannot be ended from it.
    """
    job_id = f"{run.job}-{run.run_id}"
    launcher, job = submitted(job_id)  # also matches names and ID prefixes, so the job is compared below
    is_this_one = run.log_dir is not None and job.log_dir.resolve() == run.log_dir.resolve()
    if job.job_id != job_id or not is_this_one:
        raise UserError(f"{run.key} was not started with `run` or `submit` on this machine by this account")
    launcher.cancel(job, how)


def _looked_at(handler: Guarded) -> tuple[DisplayedRun, Readings]:
    board: Board = handler.settings["board"]
    found = board.request_run(handler.get_query_argument("key", ""))
    if found is None:
        raise HTTPError(404, reason="no such run")
    return found


@cache
def _page_file(name: str) -> bytes:
    return (files("horovod_train.serve") / "page_files" / name).read_bytes()


@cache
def _plotly() -> bytes:
    return (files("plotly") / "package_data" / "plotly.min.js").read_bytes()


@cache
def _plotly_compressed() -> bytes:
    return gzip.compress(_plotly(), compresslevel=6)


class PageServer(Server):
    """Server of the page. It detects whether a browser displays the page, and closes ``board``."""

    def __init__(self, application: Application, host: str, port: int, board: Board) -> None:
        super().__init__(application, host, port)
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
    may_end: bool,
    access: Access = Access(),  # noqa: B008  (it is frozen)
) -> PageServer:
    """Serve the page, and targets and metrics of jobs for Prometheus.

    Args:
        places: Folders that contain runs.
        sources: Files, URLs or lists of targets.
        host: Address to listen on.
        port: Port; 0: any free port.
        token: Token that requests must contain.
        may_end: Whether jobs can be ended from the page.
        access: Credentials for the ranks of the sources.

    Raises:
        UserError: The server cannot listen on this address and port.
    """
    handlers = [
        ("/", _Page),
        (f"/({'|'.join(map(_escaped, PAGE_FILES))})", _PageFile),
        (r"/plotly\.js", _Plotly),
        ("/api/jobs", _Jobs),
        ("/api/run", _Run),
        ("/api/log", _Log),
        ("/api/end", _End),
        *targets.HANDLERS,
    ]
    board = Board(places, sources, access)
    Thread(target=_plotly_compressed, daemon=True).start()  # so that no request waits for it
    settings = {"board": board, "may_end": may_end, **targets.settings_of(places)}
    made = application(handlers, host, token, settings)
    return PageServer(made, host, port, board)


def _escaped(name: str) -> str:
    return name.replace(".", r"\.")
