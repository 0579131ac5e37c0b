"""``horovod-train worker``."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command(name="worker")
@click.argument("job", type=click.Path(path_type=Path))
@click.option("--run-id", metavar="NAME", help="Name of this run; default: derived from the current time.")
@click.option("--events", is_flag=True, help="Write events for `horovod-train run` instead of text.")
def command(job: Path, run_id: str | None, *, events: bool) -> None:
    """Run one rank of JOB.

    `horovodrun -np 4 horovod-train worker job.yaml` trains exactly as `horovod-train run -n 4 job.yaml` does.
    """
    from horovod_train.worker import WorkerOptions, main

    sys.exit(main(WorkerOptions(job, run_id, as_events=events)))
