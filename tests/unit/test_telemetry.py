"""Metrics of a rank: the right numbers under the right names, and never a reason to stop."""

from __future__ import annotations

import errno
import logging
import socket
import urllib.request

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from horovod_train.checkpoint.writing import WriteReport
from horovod_train.collectives.base import SingleRank
from horovod_train.events.types import PHASES
from horovod_train.frameworks.base import StepClock
from horovod_train.telemetry.catalog import CATALOG, RANK_LABELS, Metric, StepRecord, WorldRecord
from horovod_train.telemetry.exporter import PORT_STEP, Exporter
from horovod_train.telemetry.recorder import MAX_DEFERRED, Recorder


def samples(recorder):
    """{(name, distinguishing label values): value} of everything that is exported."""
    text = generate_latest(recorder.registry).decode()
    return {
        (s.name, *(v for k, v in sorted(s.labels.items()) if k not in RANK_LABELS)): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def record(recorder, **changes):
    phases = changes.get("phase_seconds", dict.fromkeys(PHASES, 0.25))
    fields = {
        "seconds": sum(phases.values()),
        "phase_seconds": phases,
        "num_samples": 32,
        "epochs": 1.5,
        "loss": 0.5,
        "local_loss": 0.25,
        "lr": 0.1,
        "is_finite": True,
        "numbers": {"sent_bytes": 1000, **changes.pop("numbers", {})},
    }
    recorder.record(StepRecord(**{**fields, **changes}))


@pytest.fixture
def recorder():
    return Recorder("job", "run", SingleRank(), 4)


def test_whoever_asks_hears_of_the_last_step_and_in_between_no_more_than_some_are_put_aside(recorder):
    counted = []
    plain = recorder._count
    recorder._count = lambda source: (counted.append(source), plain(source))
    for number in range(MAX_DEFERRED + 5):
        record(recorder, local_loss=float(number))
    assert len(counted) == MAX_DEFERRED

    found = samples(recorder)

    assert found["horovod_train_steps_total",] == MAX_DEFERRED + 5
    assert found["horovod_train_local_loss",] == MAX_DEFERRED + 4


def test_what_is_no_step_is_counted_at_once_and_after_the_steps_before_it(recorder):
    """How old a checkpoint is, for one, counts from when it was told of."""
    order = []
    recorder._count = lambda source: order.append(type(source))

    record(recorder)
    recorder.record(WorldRecord(num_wanted=4, num_present=4))

    assert order == [StepRecord, WorldRecord]


def test_a_step_moves_every_metric_it_speaks_of(recorder):
    record(recorder)
    record(recorder, numbers={"grad_norm": 2.0}, is_finite=False, phase_seconds=dict.fromkeys(PHASES, 0.05))

    found = samples(recorder)
    prefix = "horovod_train_"
    assert found[prefix + "steps_total",] == 2
    assert found[prefix + "samples_total",] == 64
    assert found[prefix + "allreduce_bytes_total",] == 2000
    assert found[prefix + "non_finite_steps_total",] == 1
    assert found[prefix + "gradient_norm",] == 2.0
    assert found[prefix + "step_seconds_sum",] == pytest.approx(len(PHASES) * 0.25 + len(PHASES) * 0.05)
    assert found[prefix + "step_phase_seconds_count", "backward"] == 2
    assert found[prefix + "step_phase_seconds_bucket", "0.1", "backward"] == 1
    assert found[prefix + "world_size_desired",] == 4
    assert found[prefix + "world_size_present",] == 1


def test_before_the_first_step_only_what_is_known_is_shown(recorder):
    """Counters are zero, since a rate needs a value before the first event; the rest is absent."""
    counters = {metric.name for metric in CATALOG if metric.kind == "counter" and metric.from_zero}
    known = {name.removesuffix("_total") for (name, *_) in samples(recorder) if not name.endswith("_created")}

    others = {"world_size_desired", "world_size_present", "rank_ended_timestamp_seconds"}
    assert known == {name.removesuffix("_total") for name in counters} | {
        f"horovod_train_{n}" for n in others
    }
    record(recorder)
    assert ("horovod_train_gradient_norm",) not in samples(recorder), "nobody has taken it"


def test_every_metric_carries_the_labels_of_its_rank(recorder):
    record(recorder, numbers={"grad_norm": 1.0})
    text = generate_latest(recorder.registry).decode()

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert set(RANK_LABELS) <= set(sample.labels)


def test_names_follow_the_conventions_of_prometheus():
    for metric in CATALOG:
        assert metric.name.startswith("horovod_train_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert (metric.kind == "histogram") == bool(metric.buckets_s)
        assert metric.help.endswith(".")
    assert len({metric.name for metric in CATALOG}) == len(CATALOG)


def test_a_metric_more_is_one_row():
    """Its name, kind and meaning, and what feeds it."""
    per_second = Metric(
        "horovod_train_samples_per_second",
        "gauge",
        "Samples of this rank in a second of the last step.",
        "How fast is a rank?",
        StepRecord,
        lambda step: step.num_samples / step.seconds,
    )
    recorder = Recorder("job", "run", SingleRank(), 1, metrics=(*CATALOG, per_second))

    record(recorder, num_samples=10, phase_seconds={"compute": 0.5})

    assert samples(recorder)["horovod_train_samples_per_second",] == 20.0


def test_a_checkpoint_has_an_age_and_a_failed_one_is_counted(recorder):
    recorder.record(WriteReport(1, "path", 0.5, 1234))
    recorder.record(WriteReport(2, "path", 0.5, 0, "disk full"))

    found = samples(recorder)
    assert found["horovod_train_checkpoint_size_bytes",] == 1234
    assert found["horovod_train_checkpoint_write_seconds_count",] == 1
    assert found["horovod_train_checkpoint_write_seconds_sum",] == 0.5
    assert found["horovod_train_checkpoint_failures_total",] == 1
    assert 0 <= found["horovod_train_checkpoint_age_seconds",] < 10


def test_the_clock_accounts_for_all_time():
    clock = StepClock(_last=0.0)
    clock.end_phase("data")
    clock.end_phase("forward")

    assert set(clock.seconds) == {"data", "forward"}, "a phase that was not seen is absent"
    assert sum(clock.seconds.values()) == pytest.approx(clock._last)


class TestExporter:
    def taken(self):
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        return server, server.getsockname()[1]

    def test_serves_what_is_recorded(self, recorder):
        record(recorder)
        server, port = self.taken()
        server.close()
        exporter = Exporter(recorder.registry, "127.0.0.1", port)

        text = urllib.request.urlopen(f"http://{exporter.address}/metrics", timeout=5).read().decode()
        exporter.close()
        exporter.close()

        assert exporter.address == f"127.0.0.1:{port}"
        assert "horovod_train_steps_total" in text

    def test_moves_on_from_a_port_in_use_and_says_so(self, recorder, caplog):
        server, port = self.taken()
        with server, caplog.at_level(logging.WARNING, "horovod_train"):
            exporter = Exporter(recorder.registry, "127.0.0.1", port)
            exporter.close()

        if port + PORT_STEP <= 65535:
            assert exporter.address not in (None, f"127.0.0.1:{port}")
        assert f"{port}" in caplog.text

    @pytest.mark.parametrize(
        ("port", "num_taken", "tried"),
        [
            (9400, 2, [9400, 9500, 9600]),
            (9400, 99, [9400 + 100 * number for number in range(20)]),
            (65335, 99, [65335, 65435, 65535]),
        ],
    )
    def test_tries_a_port_in_each_hundred(self, recorder, monkeypatch, port, num_taken, tried):
        """The ports between are those of other ranks."""
        asked = []

        class Listening:
            def set_app(self, app):
                pass

            def serve_forever(self):
                pass

        def listen(host, candidate, protection):
            asked.append(candidate)
            if len(asked) <= num_taken:
                raise OSError(errno.EADDRINUSE, "Address already in use")
            return Listening()

        monkeypatch.setattr("horovod_train.telemetry.exporter.listen", listen)

        exporter = Exporter(recorder.registry, "127.0.0.1", port)

        assert asked == tried
        assert exporter.address == (f"127.0.0.1:{tried[-1]}" if num_taken < len(tried) else None)

    def test_an_address_that_is_not_ours_is_a_warning(self, recorder, caplog):
        with caplog.at_level(logging.WARNING, "horovod_train"):
            exporter = Exporter(recorder.registry, "192.0.2.1", 9400)

        assert exporter.address is None
        assert "not served" in caplog.text

    def test_when_all_ports_are_taken_it_says_so_and_has_no_address(self, recorder, caplog, monkeypatch):
        monkeypatch.setattr("horovod_train.telemetry.exporter.MAX_TRIES", 1)
        server, port = self.taken()
        with server, caplog.at_level(logging.WARNING, "horovod_train"):
            exporter = Exporter(recorder.registry, "127.0.0.1", port)

        assert f"metrics are not served: port {port} and 0 others are in use" in caplog.text
        assert exporter.address is None
        assert exporter.address_from("n7") is None
        exporter.close()

    @pytest.mark.parametrize(
        ("address", "expected"),
        [
            ("0.0.0.0:9400", "n7:9400"),
            ("127.0.0.1:9400", "127.0.0.1:9400"),
            ("[::]:9400", "n7:9400"),
            ("[::1]:9400", "[::1]:9400"),
        ],
    )
    def test_others_are_given_this_hosts_name_for_all_of_its_addresses(self, recorder, address, expected):
        exporter = object.__new__(Exporter)
        exporter.address = address

        assert exporter.address_from("n7") == expected
