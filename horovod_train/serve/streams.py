"""Streams of a job's events and output as server-sent events (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from time import monotonic
from typing import Literal

from horovod_train.client.local import LocalJob
from horovod_train.errors import HorovodTrainError, LaunchError
from horovod_train.events.file import as_json
from horovod_train.events.wire import parse_line
from horovod_train.launch.base import PATIENCE_S
from horovod_train.serve.documents import JobDocument
from horovod_train.serve.statuses import Statuses
from horovod_train.serve.threads import Threads

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
