"""HTTP API of jobs, version 1: submit, list, observe and end the jobs of the server's account.

    Submission, JobDocument, ...   JSON documents of the API
    stream                         streams of a job's events and output as server-sent events (WHATWG HTML,
                                   section 9.2)
    JobsApi                        the endpoints

It has no database: each request reads run folders, launchers and the records of submitted jobs. Its OpenAPI
document is ``/api/v1/openapi.json``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path as FilePath
from time import monotonic
from typing import Annotated, Literal
from urllib.parse import unquote

from fastapi import APIRouter, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from horovod_train.client import LocalJob, start
from horovod_train.errors import (
    HorovodTrainError,
    LaunchError,
    LauncherTimeoutError,
    Problem,
    UserError,
    result_of,
)
from horovod_train.events.file import as_json
from horovod_train.events.wire import parse_line
from horovod_train.launch.base import PATIENCE_S, JobStatus, State
from horovod_train.launch.jobs import find_job, known_jobs
from horovod_train.monitor.view import finite_or_none
from horovod_train.plugins.serve.remote import API
from horovod_train.plugins.serve.work import Statuses, Threads, job_with_files

MAX_FILES = 200
JobId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
FileName = Annotated[str, Field(min_length=1, max_length=255)]


class Submission(BaseModel):
    """A job to start."""

    model_config = ConfigDict(extra="forbid", strict=True)

    job: dict[str, object] = Field(description="Job description, as in a job file; see docs/job.md.")
    overrides: dict[str, object] = Field(
        default={}, description="Values by dotted path, such as `train.epochs`; they override the job."
    )
    files: dict[FileName, str] = Field(
        default={},
        max_length=MAX_FILES,
        description="Contents of Python files by relative path; `task: train.py:Task` may refer to them.",
    )


class Cancellation(BaseModel):
    """How a job is ended."""

    model_config = ConfigDict(extra="forbid", strict=True)

    now: bool = Field(
        default=False,
        description="Kill the ranks without saving, as soon as the system of the launcher allows.",
    )


class JobDocument(BaseModel):
    """A job and its status."""

    id: str
    launcher: str
    folder: str = Field(description="Run folder on the server's machine.")
    submitted_unix_s: float
    state: State
    exit_code: int | None = Field(
        description="75: preempted, with a checkpoint (an MPIJob: perhaps without); null: not ended."
    )
    has_ended: bool
    message: str
    cause: str
    lost_ranks: list[int]

    @classmethod
    def of(cls, job: LocalJob, status: JobStatus) -> JobDocument:
        """Return the document of a job with a status."""
        return cls(
            id=job.id,
            launcher=job.launcher,
            folder=str(job.folder),
            submitted_unix_s=job.submitted_unix_s,
            state=status.state,
            exit_code=status.exit_code,
            has_ended=status.has_ended,
            message=status.message,
            cause=status.cause,
            lost_ranks=list(status.lost_ranks),
        )


class JobPage(BaseModel):
    """A page of the list of jobs, newest first."""

    jobs: list[JobDocument]
    next: str | None = Field(description="Value of `after` for the next page; null: this is the last one.")


class Points(BaseModel):
    """Values of a metric, by completed steps. NaN and infinity are null."""

    step: list[int]
    value: list[float | None]


class MetricsDocument(BaseModel):
    """Values of steps and evaluations."""

    series: dict[str, Points]


class ResultDocument(BaseModel):
    """Result of a job that has succeeded; of a script, without metrics and checkpoint."""

    metrics: dict[str, float | None] = Field(description="Metrics of the last evaluation.")
    checkpoint: str | None = Field(description="Newest checkpoint, on the server's machine.")
    num_steps: int


class ProblemDocument(BaseModel):
    """One problem of a job description, or of a request."""

    path: str
    found: str
    message: str
    hint: str


class ErrorDocument(BaseModel):
    """Response to a request that failed."""

    kind: str = Field(description="config, key_used, launch, user, request, ...")
    message: str
    hint: str
    problems: list[ProblemDocument] = Field(description="All problems of a job description or a request.")

    @classmethod
    def of(cls, error: HorovodTrainError) -> ErrorDocument:
        """Return the document of an error."""
        problems: tuple[Problem, ...] = getattr(error, "problems", ())
        known = next(each for each in type(error).__mro__ if each.__module__ == HorovodTrainError.__module__)
        name = known.__name__.removesuffix("Error")
        return cls(
            kind=re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower(),
            message=error.message,
            hint=error.hint,
            problems=[
                ProblemDocument(path=each.path, found=each.found, message=each.message, hint=each.hint)
                for each in problems
            ],
        )


KEEP_ALIVE_S = 15.0
STATUS_INTERVAL_S = 2.0
"""Interval of status queries of a stream without new lines."""


async def stream(
    job: LocalJob,
    what: Literal["events", "logs"],
    position: str,
    statuses: Statuses,
    threads: Threads,
    *,
    follow: bool,
) -> AsyncIterator[bytes]:
    """Yield the lines of a job after a position, then its status as event ``end``.

    Args:
        job: The job.
        what: events: lines of ``events.jsonl``; logs: readable lines of the output.
        position: ID of the last event that the client has received; empty: none.
        statuses: Status of jobs.
        threads: Threads for blocking calls.
        follow: Continue until the job has ended.
    """
    tail = job.tail_of_events(position) if what == "events" else job.tail_of_log(position)
    sent_s, queried_s = monotonic(), float("-inf")
    has_sent, status, known_s = bool(position), None, monotonic()
    yield b"retry: 2000\n\n"
    try:
        while True:
            # Queried before reading, so that lines written just before the end are read, too.
            if monotonic() - queried_s > STATUS_INTERVAL_S:
                queried_s = monotonic()
                try:
                    status, known_s = await threads.query(partial(statuses.get, job)), monotonic()
                except LaunchError:  # as `horovod-train wait`, tolerate it for a while
                    if not follow or monotonic() - known_s > PATIENCE_S:
                        raise
            has_ended = status is not None and status.has_ended
            read = threads.read if job.has_local_files else threads.query
            is_whole = has_ended or (not follow and what == "logs")
            lines = await read(partial(tail.read, is_complete=is_whole))
            if lines:
                sent_s, has_sent = monotonic(), True
                yield b"".join(_encoded(what, *line) for line in lines)
                continue
            if status is not None and (has_ended or not follow):
                break
            await asyncio.sleep(tail.pause_s)
            if monotonic() - sent_s > KEEP_ALIVE_S:
                sent_s = monotonic()
                yield b": still open\n\n"
        if what == "logs" and not has_sent:  # such as the log of a Slurm job that failed before it started
            found = await threads.query(lambda: list(job.logs(follow=False)))
            yield b"".join(_event("", "", line) for line in found)
    except (HorovodTrainError, OSError) as error:
        yield _event("", "error", json.dumps({"message": str(error)}))
        return
    yield _event("", "end", JobDocument.of(job, status).model_dump_json())


def _encoded(what: Literal["events", "logs"], position: str, line: str) -> bytes:
    if what == "events":
        return _event(position, "", as_json(line))
    text = parse_line(line).readable()
    return b"" if text is None else _event(position, "", text)


def _event(position: str, name: str, data: str) -> bytes:
    fields = [*([f"id: {position}"] if position else []), *([f"event: {name}"] if name else [])]
    # A line break in the data starts a new field; a carriage return counts as one.
    fields += [f"data: {part}" for part in data.replace("\r", "\n").split("\n")]
    return ("\n".join(fields) + "\n\n").encode(errors="replace")


log = logging.getLogger(__name__)

MAX_STREAMS = 400
"""Of all tokens; one token alone may open half of them."""
MAX_WAIT_S = 60.0
POLL_S = 0.5
END_TIMEOUT_S = 5.0
"""Maximum time until the response to drain and cancel; the launcher continues in the background."""

MAX_PAGE = 500
LIST_S = 10.0
"""Maximum time for the statuses of a page; it ends earlier if a launcher responds slowly."""
MAX_PROBLEMS = 100
ERRORS = {
    400: "The Host header is not accepted, or the request is malformed.",
    401: "The token is missing or wrong.",
    403: "The token does not allow this, or the request is from another origin.",
    404: "No job, or more than one, matches.",
    408: "The request was not complete in time.",
    409: "The launcher rejects the request, the job has not succeeded, or its run folder is not `folder`.",
    413: "The body is too large.",
    422: "The request or the job description is invalid; `problems` lists all problems.",
    429: "Too many requests, or too many open streams.",
    503: "The system of the launcher did not answer in time; the request may have been carried out.",
}
JobIdParam = Annotated[JobId, Path(description="ID of the job, a unique prefix of it, or its name.")]
LastEventId = Annotated[
    str, Header(description="ID of the last event that was received; the stream continues after it.")
]
Folder = Annotated[
    str | None,
    Query(max_length=4096, pattern=r"^[^\x00]*$", description="End the job only if this is its run folder."),
]
Follow = Annotated[bool, Query(description="Continue until the job ends.")]


class StatusError(HorovodTrainError):
    """Error with a given HTTP status."""

    def __init__(self, status: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class JobsApi:
    """Endpoints of the API."""

    def __init__(self) -> None:
        self._statuses = Statuses()
        self._threads = Threads()
        self._streams = Counter[int]()  # open streams by number of the token

    def add_to(self, app: FastAPI) -> None:
        """Add the endpoints and their error responses to an application."""
        router = APIRouter(
            prefix=API,
            responses={code: {"model": ErrorDocument, "description": text} for code, text in ERRORS.items()},
        )
        created = {200: {"model": JobDocument, "description": "A job was started with this key before."}}
        lines = {200: {"content": {"text/event-stream": {}}, "description": "Server-sent events."}}
        for path, endpoint, method, options in (
            ("/jobs", self.submit, "POST", {"status_code": 201, "responses": created}),
            ("/jobs", self.list_jobs, "GET", {}),
            ("/jobs/{job_id}", self.get, "GET", {}),
            ("/jobs/{job_id}/result", self.result, "GET", {}),
            ("/jobs/{job_id}/metrics", self.metrics, "GET", {}),
            ("/jobs/{job_id}/events", self.events, "GET", {"responses": lines}),
            ("/jobs/{job_id}/logs", self.logs, "GET", {"responses": lines}),
            ("/jobs/{job_id}/wait", self.wait, "GET", {}),
            ("/jobs/{job_id}/drain", self.drain, "POST", {"status_code": 202}),
            ("/jobs/{job_id}/cancel", self.cancel, "POST", {"status_code": 202}),
        ):
            router.add_api_route(path, endpoint, methods=[method], **options)
        app.include_router(router)
        app.add_exception_handler(HorovodTrainError, _error_response)
        app.add_exception_handler(RequestValidationError, _validation_response)

    async def submit(
        self,
        response: Response,
        submission: Submission,
        idempotency_key: Annotated[
            str | None,
            Header(
                max_length=1000,
                description="Any text, percent-encoded. If a job was started with it, that job is returned.",
            ),
        ] = None,
    ) -> JobDocument:
        """Start a job. It requires a token with the role `submit`."""

        def begin() -> tuple[LocalJob, bool]:
            described = job_with_files(submission.job, submission.overrides, submission.files)
            record, is_new = start(described, unquote(idempotency_key or ""))
            return LocalJob(record), is_new

        job, is_new = await self._threads.submit(begin)
        if not is_new:
            response.status_code = 200
        response.headers["Location"] = f"{API}/jobs/{job.id}"
        return await self._document(job)

    def list_jobs(
        self,
        state: Annotated[list[State], Query(description="Only jobs in one of these states.")] = [],  # noqa: B006
        name: Annotated[str, Query(description="Only jobs of this name.")] = "",
        launcher: Annotated[str, Query(description="Only jobs of this launcher.")] = "",
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
        after: Annotated[JobId | None, Query(description="ID of the last job of the previous page.")] = None,
    ) -> JobPage:
        """List the jobs that were started from the server's account, newest first."""
        page: list[JobDocument] = []
        last, deadline_s = None, monotonic() + LIST_S
        for job in _jobs_after(after):
            if (launcher and job.launcher != launcher) or (name and job.folder.parent.name != name):
                continue
            if len(page) == limit or (last is not None and monotonic() > deadline_s):
                return JobPage(jobs=page, next=last)
            last = job.id
            status, error = result_of(lambda job=job: self._statuses.get(job))  # type: ignore[misc]
            shown = status or JobStatus("unknown", message=str(error))
            if not state or shown.state in state:
                page.append(JobDocument.of(job, shown))
        return JobPage(jobs=page, next=None)

    async def get(self, job_id: JobIdParam) -> JobDocument:
        """Return a job and its status."""
        return await self._document(await self._find(job_id))

    async def wait(
        self,
        job_id: JobIdParam,
        timeout_s: Annotated[
            float, Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False, description="Time to wait, in seconds.")
        ] = 30.0,
    ) -> JobDocument:
        """Return a job when it has ended, or after a time; `has_ended` tells which."""
        deadline_s = monotonic() + timeout_s
        job = await self._find(job_id)
        while True:
            try:
                document = await self._document(job)
            except LaunchError:  # the launcher does not respond at present
                if monotonic() >= deadline_s:
                    raise
            else:
                if document.has_ended or monotonic() >= deadline_s:
                    return document
            await asyncio.sleep(min(POLL_S, max(0.0, deadline_s - monotonic())))

    async def result(self, job_id: JobIdParam) -> ResultDocument:
        """Return the result of a job that has succeeded."""
        job = await self._find(job_id)
        status = await self._threads.query(lambda: self._statuses.get(job))
        if status.state != "succeeded":
            raise StatusError(409, f"{job.id} has no result: {status}")
        found = await self._threads.read_run(job.result)
        return ResultDocument(
            metrics={name: finite_or_none(value) for name, value in found.metrics.items()},
            checkpoint=str(found.checkpoint) if found.checkpoint else None,
            num_steps=found.num_steps,
        )

    async def metrics(
        self,
        job_id: JobIdParam,
        name: Annotated[list[str], Query(description="Only these metrics; none: all.")] = [],  # noqa: B006
    ) -> MetricsDocument:
        """Return the values of steps and evaluations: `loss`, `lr`, `samples_per_s`, `eval/<metric>` ..."""
        job = await self._find(job_id)
        series = await self._threads.read_run(job.metrics)
        return MetricsDocument(
            series={
                each: Points(
                    step=[step for step, _ in points], value=[finite_or_none(value) for _, value in points]
                )
                for each, points in series.items()
                if not name or each in name
            }
        )

    async def events(
        self,
        request: Request,
        job_id: JobIdParam,
        follow: Follow = True,
        last_event_id: LastEventId = "",
    ) -> StreamingResponse:
        """Stream the events of a job (docs/events.md) as JSON, then `end` with the current status."""
        job = await self._find(job_id)
        return self._stream(request, job, "events", last_event_id, follow=follow)

    async def logs(
        self,
        request: Request,
        job_id: JobIdParam,
        follow: Follow = True,
        last_event_id: LastEventId = "",
    ) -> StreamingResponse:
        """Stream the lines of a job's output, with the rank of each, then `end` with the current status."""
        job = await self._find(job_id)
        return self._stream(request, job, "logs", last_event_id, follow=follow)

    async def drain(self, job_id: JobIdParam, folder: Folder = None) -> JobDocument:
        """Request the ranks to save a checkpoint and exit with code 75, without a time limit.

        On Kubernetes, they have `launch.grace_s`. The response is sent after five seconds at the latest.

        The whole ID of the job is required.
        """
        job = await self._find(job_id, is_whole=True, folder=folder)
        return await self._end_job(job, job.drain)

    async def cancel(
        self,
        job_id: JobIdParam,
        cancellation: Cancellation = Cancellation(),  # noqa: B008
        folder: Folder = None,
    ) -> JobDocument:
        """End a job. Its ranks may save a checkpoint within `launch.grace_s`.

        The whole ID of the job is required.
        """
        job = await self._find(job_id, is_whole=True, folder=folder)
        return await self._end_job(job, lambda: job.cancel(now=cancellation.now))

    async def _end_job(self, job: LocalJob, end: Callable[[], None]) -> JobDocument:
        """Call a function that ends a job, for ``END_TIMEOUT_S`` at most; it continues in the background."""
        work = asyncio.ensure_future(self._threads.query(end))
        work.add_done_callback(_log_error)
        with suppress(TimeoutError):  # such as pods that are being deleted
            await asyncio.wait_for(asyncio.shield(work), END_TIMEOUT_S)
        self._statuses.forget(job)
        return await self._document(job)

    async def _find(self, job_id: str, *, is_whole: bool = False, folder: str | None = None) -> LocalJob:
        """Return a job; raise ``StatusError`` if there is none, or more than one.

        Args:
            job_id: ID of the job; a prefix of it, or the name, unless ``is_whole``.
            is_whole: Only the whole ID is accepted.
            folder: Run folder that the job must have; None: any.
        """

        def find_it() -> LocalJob:
            try:
                found = find_job(job_id)
            except UserError as error:
                raise StatusError(404, error.message, error.hint) from error
            if is_whole and found.job_id != job_id:
                hint = f"to end {found.job_id}, use its whole ID"
                raise StatusError(404, f"no job has the ID {job_id!r}", hint)
            if folder is not None and found.log_dir.resolve() != FilePath(folder).resolve():
                raise StatusError(409, f"the run folder of {job_id} is {found.log_dir}, not {folder}")
            return LocalJob(found)

        return await self._threads.read(find_it)

    async def _document(self, job: LocalJob) -> JobDocument:
        return JobDocument.of(job, await self._threads.query(lambda: self._statuses.get(job)))

    def _stream(
        self,
        request: Request,
        job: LocalJob,
        what: Literal["events", "logs"],
        position: str,
        *,
        follow: bool,
    ) -> StreamingResponse:
        """Return a stream, if its token has fewer of them than are free (Choudhury and Hahne, 1998)."""
        token: int = request.state.token
        if self._streams[token] >= MAX_STREAMS - self._streams.total():
            raise StatusError(
                429,
                f"{self._streams[token]} streams of this token are open, of {self._streams.total()} in all",
                "close one, or use `wait`",
            )
        lines = stream(job, what, position, self._statuses, self._threads, follow=follow)
        return _CountedStream(self._streams, token, lines)


class _CountedStream(StreamingResponse):
    """Stream that is counted from now until the response has ended, also if the client has left before."""

    def __init__(self, streams: Counter[int], token: int, lines: AsyncIterator[bytes]) -> None:
        super().__init__(lines, media_type="text/event-stream")
        self._streams, self._token = streams, token
        streams[token] += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams[self._token] -= 1


def _jobs_after(job_id: str | None) -> Iterator[LocalJob]:
    """Yield the jobs that were submitted before a job, newest first; None: all jobs."""
    jobs = known_jobs()
    if job_id is not None and not any(each.job_id == job_id for each in jobs):
        raise StatusError(404, f"after: no job {job_id!r}")
    yield from map(LocalJob, jobs)


def _log_error(work: asyncio.Future[None]) -> None:
    """Log an error that occurred after the response was sent."""
    if not work.cancelled() and (error := work.exception()) is not None:
        log.warning("a job could not be ended: %s", error)


def _error_response(_: Request, error: Exception) -> Response:
    if not isinstance(error, HorovodTrainError):
        raise error
    status = 422 if isinstance(error, UserError) else 503 if isinstance(error, LauncherTimeoutError) else 409
    if isinstance(error, StatusError):
        status = error.status
    return JSONResponse(ErrorDocument.of(error).model_dump(), status)


def _validation_response(request: Request, error: Exception) -> Response:
    """Return the response for a request whose parameters or body are not valid."""
    if not isinstance(error, RequestValidationError):
        raise error
    problems = [
        ProblemDocument(path=".".join(map(str, each["loc"])), found="", message=each["msg"], hint="")
        for each in error.errors()[:MAX_PROBLEMS]
    ]
    kind = request.headers.get("content-type", "")
    is_json = kind.partition(";")[0].strip().endswith("json") or request.method == "GET"
    hint = "" if is_json else f"send the header `Content-Type: application/json`; it is {kind or 'missing'}"
    document = ErrorDocument(kind="request", message="the request is not valid", hint=hint, problems=problems)
    return JSONResponse(document.model_dump(), 422)
