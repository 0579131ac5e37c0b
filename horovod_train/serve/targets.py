"""HTTP handlers for Prometheus: /targets for ``http_sd_configs``, and /metrics with the metrics of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from horovod_train.monitor.job_metrics import JobCollector
from horovod_train.monitor.runs import Runs
from horovod_train.serve.http_sd import http_sd
from horovod_train.serve.web import Guarded, Server, application, token_of_environment

PORT = 9300


class _Targets(Guarded):
    """Handler of the targets."""

    async def get(self) -> None:
        """Send the metrics endpoints of ranks."""
        runs: Runs = self.settings["runs"]
        self.send_json(await self.read(lambda: http_sd(runs.all())))


class _Metrics(Guarded):
    """Handler of the metrics of jobs."""

    async def get(self) -> None:
        """Send the metrics in the requested exposition format."""
        encode, content_type = choose_encoder(self.request.headers.get("Accept", ""))
        registry: CollectorRegistry = self.settings["registry"]
        text = await self.read(lambda: encode(registry))
        self.set_header("Content-Type", content_type)
        self.finish(text)


HANDLERS = (("/targets", _Targets), ("/metrics", _Metrics))


def settings_of(places: Sequence[Path]) -> dict[str, object]:
    """Return the application settings that ``HANDLERS`` require, for the runs in some folders."""
    runs, registry = Runs(places, with_ranks=False), CollectorRegistry()
    registry.register(JobCollector(runs))
    return {"runs": runs, "registry": registry}


def serve_targets(places: list[Path], host: str, port: int) -> Server:
    """Serve the targets and metrics of all jobs in some folders, without the page.

    Raises:
        UserError: The server cannot listen on this address and port.
    """
    return Server(application(HANDLERS, host, token_of_environment(), settings_of(places)), host, port)
