"""Streams of a job's events and output as server-sent events (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from time import monotonic
from typing import Literal

from anyio import to_thread

from horovod_train.client.local import LocalJob
from horovod_train.errors import HorovodTrainError
from horovod_train.events.wire import parse_line
from horovod_train.serve.documents import JobDocument
from horovod_train.serve.statuses import Statuses

KEEP_ALIVE_S = 15.0
STATUS_INTERVAL_S = 2.0
"""Interval of status queries of a stream without new lines."""


async def stream(
    job: LocalJob, what: Literal["events", "logs"], position: str, statuses: Statuses, *, follow: bool
) -> AsyncIterator[bytes]:
    """Yield the lines of a job after a position, then its status as event ``end``.

    Args:
        job: The job.
        what: events: lines of ``events.jsonl``; logs: readable lines of the output.
        position: ID of the last event that the client has received; empty: none.
        statuses: Status of jobs.
        follow: Continue until the job has ended.
    """
    tail = job.tail_of_events(position) if what == "events" else job.tail_of_log(position)
    sent_s = queried_s = monotonic()
    is_last, has_sent = not follow, bool(position)
    yield b"retry: 2000\n\n"
    try:
        while True:
            lines = await to_thread.run_sync(partial(tail.read, is_complete=is_last))
            if lines:
                sent_s, has_sent = monotonic(), True
                yield b"".join(_encoded(what, *line) for line in lines)
                continue
            if is_last:
                break
            await asyncio.sleep(tail.pause_s)
            if monotonic() - queried_s > STATUS_INTERVAL_S:
                queried_s = monotonic()
                status = await to_thread.run_sync(lambda: statuses.get(job))
                is_last = status.has_ended
            if monotonic() - sent_s > KEEP_ALIVE_S:
                sent_s = monotonic()
                yield b": still open\n\n"
        if what == "logs" and not has_sent:  # such as the log of a Slurm job that failed before it started
            for line in await to_thread.run_sync(lambda: list(job.logs(follow=False))):
                yield _event("", "", line)
        status = await to_thread.run_sync(lambda: statuses.get(job))
    except HorovodTrainError as error:
        yield _event("", "error", json.dumps({"message": error.message}))
        return
    yield _event("", "end", JobDocument.of(job, status).model_dump_json())


def _encoded(what: Literal["events", "logs"], position: str, line: str) -> bytes:
    if what == "events":
        return _event(position, "", line)
    text = parse_line(line).readable()
    return b"" if text is None else _event(position, "", text)


def _event(position: str, name: str, data: str) -> bytes:
    fields = [*([f"id: {position}"] if position else []), *([f"event: {name}"] if name else [])]
    # A line break in the data starts a new field; a carriage return counts as one.
    fields += [f"data: {part}" for part in data.replace("\r", "\n").split("\n")]
    return ("\n".join(fields) + "\n\n").encode(errors="replace")
