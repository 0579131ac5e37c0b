"""Scrape the metrics of ranks, as Prometheus does, and compute their increase between two scrapes."""

from __future__ import annotations

import base64
import ssl
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path
from time import time
from urllib.parse import urlencode

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from horovod_train.errors import UserError
from horovod_train.events.targets import parse_targets
from horovod_train.events.types import MAX_RANKS, Target
from horovod_train.monitor.rank_series import COLUMNS, Window, unknown
from horovod_train.telemetry.catalog import SHOWN_NUMBERS

TIMEOUT_S = 2.0
MAX_BYTES = 1 << 20
NUM_THREADS = 16
_P = "horovod_train_"

COUNTERS = {
    "steps": f"{_P}steps_total",
    "samples": f"{_P}samples_total",
    "step_s": f"{_P}step_seconds_sum",
    "waiting_s": f"{_P}waiting_seconds_total",
    "waited_for_s": f"{_P}waited_for_seconds_total",
}
"""Column of a window -> the counter whose increase it contains."""

PHASE_SUM = f"{_P}step_phase_seconds_sum"
SHOWN = (
    "waiting_now_seconds",
    "step",
    "epoch",
    "loss",
    "learning_rate",
    "world_size_wanted",
    "world_size_present",
    "resident_memory_bytes",
    "device_memory_allocated_bytes",
    "device_memory_peak_bytes",
    "gpu_utilization_ratio",
    "gpu_memory_used_bytes",
    "gpu_power_watts",
    "gpu_temperature_celsius",
    "gpu_clock_hertz",
    *(metric.name.removeprefix(_P) for metric in SHOWN_NUMBERS.values()),
)
"""Metrics that are displayed as scraped."""

QUERY = urlencode(
    [("name[]", name) for name in (*COUNTERS.values(), PHASE_SUM, *(_P + each for each in SHOWN))]
)


@dataclass
class RankReading:
    """Labels and values of a rank, by column of a window, phase, or metric name without prefix."""

    values: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Access:
    """Credentials for scraping ranks.

    Attributes:
        scheme: http or https.
        authorization: Value of the Authorization header; empty: no header.
        context: TLS context with the trusted certificates; None: the default context.
    """

    scheme: str = "http"
    authorization: str = ""
    context: ssl.SSLContext | None = None


def access_of(job: Mapping[str, object], environ: Mapping[str, str]) -> Access:
    """Return the credentials for the ranks of a resolved job. The password is read from ``environ``."""
    metrics = job.get("metrics")
    if not isinstance(metrics, Mapping):
        return Access()
    tls, auth = metrics.get("tls"), metrics.get("basic_auth")
    authorization, context = "", None
    if isinstance(auth, Mapping):
        password = environ.get(str(auth.get("password_variable")), "")
        pair = base64.b64encode(f"{auth.get('user')}:{password}".encode()).decode()
        authorization = f"Basic {pair}"
    if isinstance(tls, Mapping):
        context = ssl.create_default_context()
        certificate = Path(str(tls.get("certificate"))).expanduser()
        if certificate.is_file():  # trust it even if it is self-signed
            context.load_verify_locations(certificate)
    return Access("https" if tls else "http", authorization, context)


def scrape(address: str, access: Access = Access()) -> RankReading | None:
    """Scrape a rank and return its values; None: it does not respond, or not with valid metrics."""
    headers = {"Authorization": access.authorization} if access.authorization else {}
    url = f"{access.scheme}://{address}/metrics?{QUERY}"
    request = urllib.request.Request(url, headers=headers)  # noqa: S310  (http or https)
    try:
        with _opener(access.context).open(request, timeout=TIMEOUT_S) as answer:
            return parse(answer.read(MAX_BYTES).decode())
    except (OSError, ValueError, HTTPException):
        return None


@lru_cache(maxsize=8)  # a thousand ranks are scraped every few seconds
def _opener(context: ssl.SSLContext | None = None) -> urllib.request.OpenerDirector:
    """Return an opener without a proxy, because a proxy may not reach ranks and could read their password."""
    direct = urllib.request.ProxyHandler({})
    return urllib.request.build_opener(direct, urllib.request.HTTPSHandler(context=context))


def parse(text: str) -> RankReading:
    """Parse the response of a rank.

    Raises:
        ValueError: The text is not in Prometheus' text format.
    """
    columns = {name: column for column, name in COUNTERS.items()}
    shown = {_P + name: name for name in SHOWN}
    reading = RankReading()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == PHASE_SUM:
                reading.values[sample.labels.get("phase", "")] = sample.value
            elif (key := columns.get(sample.name) or shown.get(sample.name)) is not None:
                reading.values[key] = sample.value
                reading.labels = sample.labels
    return reading


def numbers_in(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values of a rank that are in ``SHOWN_NUMBERS``, by name of the number."""
    names = {name: metric.name.removeprefix(_P) for name, metric in SHOWN_NUMBERS.items()}
    return {name: values[metric] for name, metric in names.items() if metric in values}


def scrape_all(
    addresses: Mapping[int, str], access: Access, pool: ThreadPoolExecutor
) -> dict[int, RankReading]:
    """Scrape ranks and return their values by rank. Ranks that do not respond are absent."""
    answers = pool.map(lambda address: scrape(address, access), addresses.values())
    return {rank: answer for rank, answer in zip(addresses, answers, strict=True) if answer is not None}


def window_between(
    before: Mapping[int, RankReading], now: Mapping[int, RankReading], seconds: float, num_ranks: int
) -> Window:
    """Return the increase of counters between two scrapes. A decrease is treated as a counter reset."""
    table = unknown(num_ranks)
    for rank, reading in now.items():
        if rank not in before or not 0 <= rank < num_ranks:
            continue
        old = before[rank].values
        for row, column in enumerate(COLUMNS):
            if column in reading.values and column in old:
                grown = reading.values[column] - old[column]
                table[row, rank] = grown if grown >= 0 else reading.values[column]
    return Window(time(), seconds, table)


def targets_of(source: str) -> list[Target] | None:
    """Return the targets of a source; None: it is of another kind.

    Args:
        source: File for ``file_sd_configs``, URL for ``http_sd_configs``, or comma-separated ``host:port``.

    Raises:
        UserError: The source cannot be read, or is not a list of targets.
    """
    path = Path(source).expanduser()
    is_url = source.startswith(("http://", "https://"))
    if not is_url and not path.is_file():
        return _named(source)
    try:
        if is_url:
            with _opener().open(source, timeout=10) as answer:
                return parse_targets(answer.read())
        return parse_targets(path.read_bytes())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, HTTPException) as error:
        raise UserError(
            f"{source} is not a list of Prometheus targets: {type(error).__name__}: {error}",
            hint='expected the format of http_sd_configs: [{"targets": ["host:port"], "labels": {}}]',
        ) from error


def _named(source: str) -> list[Target] | None:
    """Return the targets of ``host:port,host:port``; None: the text has another format.

    Raises:
        UserError: A port is not between 1 and 65535.
    """
    parts = source.split(",")
    ports = [part.rpartition(":")[2] for part in parts if ":" in part]
    if len(ports) < len(parts) or not all(port.isascii() and port.isdecimal() for port in ports):
        return None
    for port in ports:
        if not 0 < int(port) < 65536:
            raise UserError(f"{source}: {port} is not a port", hint="ports are 1 to 65535")
    return [Target(address=part.strip(), labels={}) for part in parts]


def by_rank(targets: Iterable[Target]) -> dict[int, Target]:
    """Return targets by rank. The rank of a target without a valid label ``rank`` is its position."""
    found: dict[int, Target] = {}
    for number, target in enumerate(targets):
        label = target.labels.get("rank", "")
        is_rank = label.isascii() and label.isdecimal() and int(label) < MAX_RANKS
        found[int(label) if is_rank else number] = target
    return found


def finite(numbers: Sequence[float] | np.ndarray, digits: int = 3) -> list[float | None]:
    """Return numbers for JSON, rounded to ``digits`` significant digits; None for NaN and infinity."""
    array = np.asarray(numbers, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = 10.0 ** (digits - 1 - np.floor(np.log10(np.abs(array))))
        scale = np.where(np.isfinite(scale), scale, 1.0)
        rounded = np.round(array * scale) / scale
    known = zip(rounded.tolist(), np.isfinite(rounded).tolist(), strict=True)
    return [number if is_known else None for number, is_known in known]
