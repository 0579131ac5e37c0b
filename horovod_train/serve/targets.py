"""Endpoints for Prometheus: /targets for ``http_sd_configs``, and /metrics with the metrics of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from horovod_train.monitor.job_metrics import JobCollector
from horovod_train.monitor.runs import Runs
from horovod_train.serve.http_sd import http_sd
from horovod_train.serve.tokens import Tokens, token_of_environment
from horovod_train.serve.web import Server, application, json_response, read

PORT = 9300


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
