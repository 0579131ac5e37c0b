"""Scrape the metrics of ranks, as Prometheus does, and compute their increase between two scrapes.

    Window, RankSeries          times of ranks as a series of time windows
    Access, access_of           credentials for scraping ranks
    scrape, scrape_all          values of one rank, and of all ranks
    window_between              increase of counters between two scrapes
    Straggler, stragglers       slow ranks and slow phases

Slow ranks are detected by the rule of the alert HorovodTrainStraggler (``rules.py``).
"""

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
import numpy.typing as npt
from prometheus_client.parser import text_string_to_metric_families

from horovod_train.errors import UserError
from horovod_train.events.types import MAX_RANKS, PHASES, WAIT_PHASE, RankTimes, Target
from horovod_train.events.wire import parse_targets
from horovod_train.telemetry.catalog import SHOWN_NUMBERS
from horovod_train.telemetry.recorder import attribute_waiting

Floats = npt.NDArray[np.float32]

COLUMNS = ("steps", "samples", "step_s", "waiting_s", "waited_for_s", *PHASES)
MAX_WINDOWS = 360
"""Above this number, neighboring windows are joined in pairs: memory and the heatmap's width are bounded."""

MAX_NUMBERS = 2**24
"""Limit for all windows of a run together; it reduces the number of windows of runs with many ranks."""


@dataclass
class Window:
    """Measurements of all ranks in one time window.

    Attributes:
        end_unix_s: End of the window, in Unix seconds.
        seconds: Length of the window.
        table: Sums over the steps of the window, shape [len(COLUMNS), ranks]; NaN: unknown.
    """

    end_unix_s: float
    seconds: float
    table: Floats

    def __getitem__(self, column: str) -> Floats:
        """Return a column, shape [ranks]."""
        found: Floats = self.table[COLUMNS.index(column)]
        return found

    @property
    def wait_times(self) -> tuple[Floats, Floats]:
        """Time that each rank waited for others, and time that others waited for it; shape [ranks] each.

        Ranks of jobs report these times, computed per step. Ranks of scripts do not exchange wait times, so
        their times are computed from sums over the window, in which waits of different steps may cancel out.
        """
        wait_s = self[WAIT_PHASE]
        if np.isfinite(self["waiting_s"]).any() or not np.isfinite(wait_s).all():
            return self["waiting_s"], self["waited_for_s"]
        waiting, waited_for, _ = attribute_waiting(wait_s[None, :].astype(np.float64))
        return waiting.astype(np.float32), waited_for.astype(np.float32)

    @property
    def own_s(self) -> Floats:
        """Own time of each rank: step time minus all-reduce wait, shape [ranks]."""
        found: Floats = self["step_s"] - self[WAIT_PHASE]
        return found

    def per_step(self, total_s: Floats) -> Floats:
        """Return the mean per step of times that were summed over the window, shape [ranks]; NaN: unknown."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = total_s / self["steps"]
        return found


@dataclass
class RankSeries:
    """Windows of a run, oldest first. In an elastic job, the number of ranks may differ between windows."""

    windows: list[Window] = field(default_factory=list)
    num_ranks: int = 0

    def begin(self, num_ranks: int) -> None:
        """Set the number of ranks when training starts."""
        self.num_ranks = num_ranks

    def add_event(self, time_unix_s: float, event: RankTimes) -> None:
        """Add reported times: rank 0 reports all ranks in several events, or each rank reports its own."""
        end = event.first_rank + len(event.steps)
        if end > self.num_ranks > 0:
            return  # no such rank: a task may print a line in the format of an event
        if not self.windows or self._is_reported(event.first_rank):
            self._append(Window(time_unix_s, event.seconds, unknown(max(end, self.num_ranks))))
        window = self.windows[-1]
        if window.table.shape[1] < end:
            more = unknown(end - window.table.shape[1])
            window.table = np.concatenate([window.table, more], axis=1)
        columns: Mapping[str, Sequence[float]] = {
            "steps": event.steps,
            "samples": event.samples,
            "step_s": event.step_s,
            "waiting_s": event.waiting_s,
            "waited_for_s": event.waited_for_s,
            **event.phases_s,
        }
        for row, column in enumerate(COLUMNS):
            numbers = columns.get(column, ())
            if len(numbers) == len(event.steps):
                window.table[row, event.first_rank : end] = numbers

    def _is_reported(self, rank: int) -> bool:
        """Return whether the last window contains a rank. If so, its next report begins a new window."""
        steps = self.windows[-1]["steps"]
        return rank < len(steps) and bool(np.isfinite(steps[rank]))

    def add(self, window: Window) -> None:
        """Add a window that contains all ranks."""
        self.num_ranks = window.table.shape[1]
        self._append(window)

    def _append(self, window: Window) -> None:
        self.windows.append(window)
        if len(self.windows) > max(2, min(MAX_WINDOWS, MAX_NUMBERS // max(1, window.table.size))):
            self.windows = [
                joined(self.windows[place : place + 2]) for place in range(0, len(self.windows), 2)
            ]

    def recent(self, seconds: float) -> Window | None:
        """Return the last ``seconds`` as one window, less if the number of ranks changed; None: no window."""
        chosen: list[Window] = []
        for window in reversed(self.windows):
            if chosen and window.table.shape != chosen[0].table.shape:
                break
            chosen.insert(0, window)
            if sum(each.seconds for each in chosen) >= seconds:
                break
        return joined(chosen) if chosen else None


def unknown(num_ranks: int) -> Floats:
    """Return the table of a window, filled with NaN."""
    return np.full((len(COLUMNS), num_ranks), np.nan, np.float32)


def joined(windows: Sequence[Window]) -> Window:
    """Return consecutive windows as one. Windows with another number of ranks than the last are omitted."""
    last = windows[-1]
    alike = [window for window in windows if window.table.shape == last.table.shape]
    seconds = sum(window.seconds for window in alike)
    if len(alike) == 1:
        return last
    tables = np.stack([window.table for window in alike])
    table: Floats = np.asarray(np.nansum(tables, axis=0), np.float32)
    table[np.isnan(tables).all(axis=0)] = np.nan
    return Window(last.end_unix_s, seconds, table)


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
    "world_size_desired",
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


SLOWER_BY = 0.2
"""A rank is slow if its own time exceeds the median of all ranks by more than this fraction."""

MIN_WINDOW_S = 30.0
"""Minimum length of a window in which slow ranks are reported."""


@dataclass(frozen=True)
class Straggler:
    """Slow rank.

    Attributes:
        own_s: Own time of the rank per step.
        others_s: Median own time per step of the ranks that are not slow.
        phase: Phase with the largest difference; empty: unknown.
        excess_s: Difference in this phase, per step.
    """

    rank: int
    own_s: float
    others_s: float
    phase: str
    excess_s: float


def stragglers(window: Window) -> list[Straggler]:
    """Return the slow ranks in a window, the slowest first."""
    own = window.per_step(window.own_s)
    known = np.isfinite(own)
    if known.sum() < 2:
        return []
    median = float(np.median(own[known]))
    slow = np.flatnonzero(known & (own > (1 + SLOWER_BY) * median))
    others = known.copy()
    others[slow] = False
    usual_s = float(np.median(own[others]))
    found = [_explained(window, int(rank), float(own[rank]), usual_s, others) for rank in slow]
    return sorted(found, key=lambda each: -each.own_s)


def _explained(
    window: Window, rank: int, own_s: float, others_s: float, others: npt.NDArray[np.bool_]
) -> Straggler:
    """Compare each phase of a slow rank with the median of the ranks that are not slow."""
    excess: dict[str, float] = {}
    for phase in PHASES:
        if phase == WAIT_PHASE:
            continue
        per_step = window.per_step(window[phase])
        usual = per_step[others & np.isfinite(per_step)]
        if len(usual) and np.isfinite(per_step[rank]):
            excess[phase] = float(per_step[rank] - np.median(usual))
    phase = max(excess, key=excess.__getitem__, default="")
    return Straggler(rank, own_s, others_s, phase, excess.get(phase, 0.0))
