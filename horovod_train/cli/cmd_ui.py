"""``horovod-train ui``."""

from __future__ import annotations

import socket

import click


@click.command(name="ui")
@click.argument("what", metavar="[JOB|FOLDER|TARGETS]...", nargs=-1)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=9301, show_default=True, type=click.IntRange(0, 65535), metavar="PORT")
@click.option("--allow-ending", is_flag=True, help="Let the page drain and cancel jobs.")
def command(what: tuple[str, ...], host: str, port: int, *, allow_ending: bool) -> None:
    """Show jobs in the browser: loss, throughput, which rank is slow, who waits for whom.

    JOB is the id of a job, FOLDER one of runs (default: runs), TARGETS a file or the address of Prometheus'
    targets, or host:port,host:port of ranks. The page requires the token that is printed;
    HOROVOD_TRAIN_TOKEN sets it.
    """
    from pathlib import Path

    from horovod_train.launch.supervise.signals import interrupted_by_signals
    from horovod_train.monitor.live import targets_of
    from horovod_train.monitor.runs import folders_of_runs, places_of
    from horovod_train.monitor.ui_server import serve_page
    from horovod_train.monitor.web import make_token, token_of_environment

    places, sources = [], []
    for name in what or ("runs",):
        if not Path(name).expanduser().is_dir() and targets_of(name) is not None:
            sources.append(name)
        else:
            places += places_of([name])
    token = token_of_environment() or make_token()
    server = serve_page(places, sources, host=host, port=port, token=token, may_end=allow_ending)
    try:
        with interrupted_by_signals(lambda _: KeyboardInterrupt()):
            for line in page_addresses(host, server.port, token):
                click.echo(line)
            if places and not any(any(folders_of_runs(place)) for place in places):
                nowhere = ", ".join(map(str, places))
                click.echo(f"no runs in {nowhere} yet; they appear on the page as they begin")
            server.wait()
    except KeyboardInterrupt:
        pass  # whenever it comes, from the first line on
    finally:
        server.close()


def page_addresses(host: str, port: int, token: str) -> list[str]:
    """Return what a person has to know to open the page."""
    name = socket.gethostname()
    is_loopback = host in ("127.0.0.1", "localhost", "::1")
    shown = "127.0.0.1" if is_loopback else name if host in ("0.0.0.0", "::") else host  # noqa: S104
    lines = [f"page: http://{f'[{shown}]' if ':' in shown else shown}:{port}/?token={token}"]
    if is_loopback:
        lines.append(f"from another machine: ssh -L {port}:127.0.0.1:{port} {name}, then the same address")
    else:
        lines.append("this is HTTP: who can read the network between can read the page, and the token")
    return lines
