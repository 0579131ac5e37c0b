"""Commands that serve a web page, the HTTP API and targets for Prometheus: ``serve`` and ``targets``."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from horovod_train.plugins.serve import PAGE_PORT, TARGETS_PORT

if TYPE_CHECKING:
    from horovod_train.plugins.serve.web import Server


FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command(name="serve")
@click.argument("what", metavar="[JOB|FOLDER|TARGETS]...", nargs=-1)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=PAGE_PORT, show_default=True, type=click.IntRange(0, 65535), metavar="PORT")
@click.option(
    "--allow-cancel", is_flag=True, help="Allow clients to drain and cancel jobs, also on the page."
)
@click.option(
    "--allow-submit",
    is_flag=True,
    help="Allow clients to submit jobs with a token of the token file; includes --allow-cancel.",
)
@click.option("--tokens", type=FILE, help="File with lines `ROLE TOKEN`; a role is read, cancel or submit.")
@click.option("--tls-cert", type=FILE, help="Certificate chain of the server, in PEM format, for HTTPS.")
@click.option("--tls-key", type=FILE, help="Private key of the certificate.")
def serve_command(
    what: tuple[str, ...],
    host: str,
    port: int,
    *,
    allow_cancel: bool,
    allow_submit: bool,
    tokens: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
) -> None:
    """Serve a web page of jobs, the HTTP API /api/v1, and /targets and /metrics for Prometheus.

    JOB is the ID of a job, FOLDER a folder of runs, TARGETS a file or URL of Prometheus targets, or
    host:port,host:port of ranks. Default: the runs in the folder `runs`, and all jobs that were started from
    this account. The API always serves all jobs of this account. Requests need the printed token, or one of
    --tokens, as ?token= or as Authorization: Bearer TOKEN. HOROVOD_TRAIN_TOKEN sets the printed token.
    """
    from horovod_train.errors import UserError
    from horovod_train.monitor.live import targets_of
    from horovod_train.monitor.runs import folders_of_runs, places_of
    from horovod_train.plugins.serve.page import serve_page
    from horovod_train.plugins.serve.web import Tls, make_token, token_of_environment

    if allow_submit and tokens is None:
        raise UserError(
            "--allow-submit requires --tokens: the printed token cannot submit jobs",
            hint="write a line `submit TOKEN` into a file with mode 600",
        )
    if (tls_cert is None) != (tls_key is None):
        raise UserError("--tls-cert and --tls-key must be given together", hint="give both, or none")
    tls = Tls(tls_cert, tls_key) if tls_cert is not None and tls_key is not None else None
    places, sources = [], []
    for name in what:
        if not Path(name).expanduser().is_dir() and targets_of(name) is not None:
            sources.append(name)
        else:
            places += places_of([name])
    if not what:
        places.append(Path("runs"))
    token = token_of_environment() or make_token()
    server = serve_page(
        places,
        sources,
        host=host,
        port=port,
        token=token,
        token_file=tokens,
        max_role="submit" if allow_submit else "cancel" if allow_cancel else "read",
        tls=tls,
        with_submitted=not what,
    )
    with until_interrupted(server):
        for line in page_addresses(host, server.port, token, is_tls=tls is not None):
            click.echo(line)
        if what and places and not any(any(folders_of_runs(place)) for place in places):
            nowhere = ", ".join(map(str, places))
            click.echo(f"no runs in {nowhere} yet; runs appear on the page when they start")


@contextmanager
def until_interrupted(server: Server) -> Iterator[None]:
    """Run the block, then serve until Ctrl-C or SIGTERM, which may also arrive during the block."""
    from horovod_train.launch.supervise.signals import interrupted_by_signals

    try:
        with interrupted_by_signals(lambda _: KeyboardInterrupt()):
            yield
            server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()


def page_addresses(host: str, port: int, token: str, *, is_tls: bool = False) -> list[str]:
    """Return the lines with the address of the page, and how to open it from another machine."""
    name = socket.gethostname()
    is_loopback = host in ("127.0.0.1", "localhost", "::1")
    shown = "127.0.0.1" if is_loopback else name if host in ("0.0.0.0", "::") else host  # noqa: S104
    scheme = "https" if is_tls else "http"
    lines = [f"page: {scheme}://{f'[{shown}]' if ':' in shown else shown}:{port}/?token={token}"]
    if is_loopback:
        lines.append(
            f"from another machine: run `ssh -L {port}:127.0.0.1:{port} {name}`, then open the same address"
        )
    elif not is_tls:
        lines.append("this is HTTP: anyone who can read the network traffic can read the page and the token")
    return lines


@contextmanager
def page_of(folder: Path) -> Iterator[None]:
    """Print the address of a web page of the runs in a folder, and serve it during the block."""
    from horovod_train.errors import UserError
    from horovod_train.plugins.serve.page import serve_page
    from horovod_train.plugins.serve.web import make_token, token_of_environment

    host, token = "127.0.0.1", token_of_environment() or make_token()
    try:
        server = serve_page([folder], [], host=host, port=PAGE_PORT, token=token)
    except UserError:  # the default port is in use, probably by another job
        server = serve_page([folder], [], host=host, port=0, token=token)
    for line in page_addresses(host, server.port, token):
        click.echo(line)
    try:
        yield
    finally:
        server.show_the_end()
        server.close()
        click.echo(f"to view the finished run: horovod-train serve {quote(str(folder))}")


ui_command = serve_command


@click.group(name="targets")
def targets_command() -> None:
    """Serve the addresses of ranks to Prometheus."""


@targets_command.command(name="serve")
@click.argument("folders", metavar="[FOLDER]...", nargs=-1)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=TARGETS_PORT, show_default=True, type=click.IntRange(0, 65535), metavar="PORT"
)
def serve(folders: tuple[str, ...], host: str, port: int) -> None:
    """Serve /targets and /metrics of the jobs in FOLDERs of runs (default: runs), without the page.

    /targets is for Prometheus' http_sd_configs, /metrics for its scrape_configs. If HOROVOD_TRAIN_TOKEN is
    set, requests must contain this token.
    """
    from horovod_train.plugins.serve.page import serve_targets

    places = [Path(folder).expanduser() for folder in folders or ("runs",)]
    for place in places:
        if not place.is_dir():
            click.echo(f"{place.absolute()} does not exist yet; its jobs are listed when it does", err=True)
    server = serve_targets(places, host, port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{server.port}"
    with until_interrupted(server):
        click.echo(f"{address}/targets for http_sd_configs, {address}/metrics for a scrape; Ctrl-C ends it")
