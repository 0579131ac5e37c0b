"""``horovod-train targets serve``: which ranks to scrape, and the metrics of whole jobs.

/targets    for Prometheus' http_sd_configs
/metrics    for Prometheus: states, restarts, failures
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from horovod_train.monitor.job_metrics import JobCollector
from horovod_train.monitor.runs import Runs
from horovod_train.monitor.targets import http_sd
from horovod_train.monitor.web import Guarded, Server, application, token_of_environment

PORT = 9300


class _Targets(Guarded):
    """The ranks to scrape."""

    async def get(self) -> None:
        """Answer."""
        runs: Runs = self.settings["runs"]
        self.send_json(await self.read(lambda: http_sd(runs.all())))


class _Metrics(Guarded):
    """The metrics of jobs."""

    async def get(self) -> None:
        """Answer in the format that is requested."""
        encode, content_type = choose_encoder(self.request.headers.get("Accept", ""))
        registry: CollectorRegistry = self.settings["registry"]
        text = await self.read(lambda: encode(registry))
        self.set_header("Content-Type", content_type)
        self.finish(text)


def serve_targets(places: list[Path], host: str, port: int) -> Server:
    """Serve the targets and the metrics of all jobs below some folders.

    Args:
        places: Folders of runs.
        host: Address to listen on.
        port: Port; 0: any that is free.

    Raises:
        UserError: It cannot listen there.
    """
    runs, registry = Runs(places, with_ranks=False), CollectorRegistry()
    registry.register(JobCollector(runs))
    handlers = [("/targets", _Targets), ("/metrics", _Metrics)]
    served = application(handlers, host, token_of_environment(), {"runs": runs, "registry": registry})
    return Server(served, host, port)
