"""Our worker, and in the same process a bare prometheus_client that serves as many series, 50 ports on.

usage: as ``python -m horovod_train worker JOB``, with JOB alone
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from benchmarks.run import PORT
from horovod_train import worker
from horovod_train.telemetry.recorder import Recorder

SETTLED_S = 4.0


def copy_of(recorder: Recorder) -> CollectorRegistry:
    """Return a registry with the same metrics, labels and numbers of series."""
    registry = CollectorRegistry()
    for family in recorder.registry.collect():
        children = {tuple(sorted(s.labels.items())): s for s in family.samples if "le" not in s.labels}
        if not children:  # nothing of it has been seen
            continue
        names = sorted(next(iter(children.values())).labels)
        bounds = sorted({float(s.labels["le"]) for s in family.samples if "le" in s.labels})
        if family.type == "histogram":
            made = Histogram(family.name, family.documentation, names, registry=registry, buckets=bounds)
        elif family.type == "counter":
            made = Counter(family.name, family.documentation, names, registry=registry)  # type: ignore[assignment]
        else:
            made = Gauge(family.name, family.documentation, names, registry=registry)  # type: ignore[assignment]
        for labels in children:
            made.labels(**dict(labels))
    return registry


def serve_bare(recorder: Recorder) -> None:
    """Serve the copy, when all series are there."""
    time.sleep(SETTLED_S)
    start_http_server(PORT + 50, "127.0.0.1", copy_of(recorder))


if __name__ == "__main__":
    plain = Recorder.__init__

    def made(self: Recorder, *args: object, **kwargs: object) -> None:
        """Make a recorder, and what it is compared with."""
        plain(self, *args, **kwargs)  # type: ignore[arg-type]
        threading.Thread(target=serve_bare, args=(self,), daemon=True).start()

    Recorder.__init__ = made  # type: ignore[method-assign]
    sys.exit(worker.main(worker.WorkerOptions(Path(sys.argv[1]))))
