"""``horovod-train targets``."""

from __future__ import annotations

import click

from horovod_train.cli.cmd_serve import until_interrupted


@click.group(name="targets")
def command() -> None:
    """Serve the addresses of ranks to Prometheus."""


@command.command(name="serve")
@click.argument("folders", metavar="[FOLDER]...", nargs=-1)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=9300, show_default=True, type=click.IntRange(0, 65535), metavar="PORT")
def serve(folders: tuple[str, ...], host: str, port: int) -> None:
    """Serve /targets and /metrics of the jobs in FOLDERs of runs (default: runs), without the page.

    /targets is for Prometheus' http_sd_configs, /metrics for its scrape_configs. If HOROVOD_TRAIN_TOKEN is
    set, requests must contain this token.
    """
    from pathlib import Path

    from horovod_train.serve.targets import serve_targets

    places = [Path(folder).expanduser() for folder in folders or ("runs",)]
    for place in places:
        if not place.is_dir():
            click.echo(f"{place.absolute()} does not exist yet; its jobs are listed when it does", err=True)
    server = serve_targets(places, host, port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{server.port}"
    with until_interrupted(server):
        click.echo(f"{address}/targets for http_sd_configs, {address}/metrics for a scrape; Ctrl-C ends it")
