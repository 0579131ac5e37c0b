"""Use every verb of the client, on this machine or through a server: every_verb.py JOB [URL TOKEN]"""

from __future__ import annotations

import sys
import time

import horovod_train as ht
from horovod_train.events.types import Progress

TIMEOUT_S = 300


def main(path, *server):
    api = ht.Client(*server) if server else ht
    long = {"train.epochs": 500, "checkpoint.every": None}

    job = api.submit(path, long, key="long")
    assert api.submit(path, long, key="long").id == job.id
    assert [each.id for each in api.jobs()] == [job.id]
    next(line for line in job.logs(follow=True) if "loss" in line)
    deadline_s = time.monotonic() + 10  # a server queries Slurm every two seconds
    while job.state == "starting" and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert job.state == "running", job.status()
    try:
        job.wait(0.1)
    except TimeoutError as error:
        assert job.id in str(error)  # noqa: PT017
    job.drain()
    try:
        job.result(TIMEOUT_S)
    except ht.JobFailedError as error:
        assert (error.status.state, error.exit_code) == ("preempted", 75), error  # noqa: PT017
    else:
        raise AssertionError("a drained job has no result")
    num_steps = job.metrics()["loss"][-1][0]

    # It goes on where it was drained, and comes to its end.
    again = api.submit(path, {"train.epochs": 500, "train.max_steps": num_steps + 20}, key="short")
    result = again.result(TIMEOUT_S)
    events = [record.event for record in again.events()]
    losses = [event.loss for event in events if isinstance(event, Progress)]
    assert again.metrics()["loss"][0][0] > num_steps
    assert again.metrics()["loss"][-1] == (result.num_steps, losses[-1])
    assert result.num_steps == num_steps + 20, (result, num_steps)

    other = api.submit(path, {**long, "name": "other"})
    next(line for line in other.logs(follow=True) if "loss" in line)
    status = other.cancel()
    assert (status.state, status.exit_code) == ("cancelled", 143), status
    assert {each.id for each in api.jobs()} == {job.id, again.id, other.id}
    assert api.job(again.id).state == "succeeded"
    print(f"every verb was used: launcher {job.launcher}")


if __name__ == "__main__":
    main(*sys.argv[1:])
