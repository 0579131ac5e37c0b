"""What is said of an MPIJob, given what the operator has noted and which pods there are."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from horovod_train.errors import LaunchError
from horovod_train.plugins.kubernetes.cluster import (
    INSTALL,
    Cluster,
    Container,
    Pod,
    UnreachableError,
    _pod_of,
)
from horovod_train.plugins.kubernetes.launcher import (
    CANCELLED,
    DRAINED,
    ROLE_LABEL,
    ended_at,
    fatal_warning,
    launcher_pods,
    status_of,
)


def pod(name, phase, role="worker", *, code=None, ended_s=5.0, waiting=None, age_s=60.0):
    """A pod with one container."""
    now = datetime.now(UTC)
    ended = None if code is None else now - timedelta(seconds=ended_s)
    labels = {ROLE_LABEL: role}
    return Pod(name, phase, labels, now - timedelta(seconds=age_s), [Container(waiting, code, ended)])


class Pods:
    """A namespace with these pods and warnings."""

    def __init__(self, *pods, warnings=()):
        self._pods, self._warnings = pods, list(warnings)

    def pods(self, selector):
        wanted = dict(part.split("=") for part in selector.split(","))
        role = wanted.get(ROLE_LABEL)
        return [found for found in self._pods if role is None or found.labels[ROLE_LABEL] == role]

    def warnings(self, mpi_job):
        return self._warnings


@pytest.mark.parametrize(
    ("reason", "message", "expected"),
    [
        ("ImagePullBackOff", "Back-off", ("ImagePullBackOff", "Back-off")),
        (None, "Back-off", ("None", "Back-off")),
        ("ContainerCreating", None, None),
    ],
)
def test_a_pod_is_read_as_the_client_returns_it(reason, message, expected):
    now = datetime.now(UTC)
    waiting = SimpleNamespace(waiting=SimpleNamespace(reason=reason, message=message), terminated=None)
    ended = SimpleNamespace(waiting=None, terminated=SimpleNamespace(exit_code=3, finished_at=now))
    found = SimpleNamespace(
        metadata=SimpleNamespace(name="p", labels=None, creation_timestamp=now),
        status=SimpleNamespace(
            phase="Failed",
            container_statuses=[SimpleNamespace(state=state) for state in (waiting, None, ended)],
        ),
    )

    containers = [Container(expected), Container(exit_code=3, finished=now)]
    assert _pod_of(found) == Pod("p", "Failed", {}, now, containers)


def job(*conditions, annotations=(), suspend=False, **metadata):
    return {
        "metadata": {"name": "j", "annotations": dict.fromkeys(annotations, "true"), **metadata},
        "spec": {"runPolicy": {"suspend": suspend}},
        "status": {"conditions": [{"type": name, "status": "True", "message": "m"} for name in conditions]},
    }


RUNNING, DONE = pod("a", "Running"), pod("b", "Succeeded")


class TestStatus:
    @pytest.mark.parametrize(
        ("mpi_job", "pods", "state", "code"),
        [
            (job("Created"), [RUNNING], "starting", None),
            (job("Created", "Running"), [RUNNING], "running", None),
            (job("Created", "Running", "Succeeded"), [DONE], "succeeded", 0),
            (job("Created", "Failed"), [pod("l", "Failed", "launcher", code=75)], "preempted", 75),
            (job("Created", "Failed"), [pod("l", "Failed", "launcher", code=3)], "failed", 3),
            (job("Created", "Failed"), [pod("l", "Failed", "launcher", code=0)], "failed", 1),
            (job("Created", "Failed"), [], "failed", 1),
            (job("Created", annotations=[CANCELLED]), [RUNNING, DONE], "stopping", None),
            (job("Created", annotations=[CANCELLED]), [DONE], "cancelled", 143),
            (job("Created", deletionTimestamp="now"), [RUNNING], "stopping", None),
            (job("Created", suspend=True), [], "queued", None),
            (job("Created", suspend=True, annotations=[DRAINED]), [RUNNING], "stopping", None),
            (job("Created", suspend=True, annotations=[DRAINED]), [DONE], "preempted", 75),
            (job(), [], "queued", None),
        ],
    )
    def test_is_one_word_and_a_code(self, mpi_job, pods, state, code):
        status = status_of(mpi_job, Pods(*pods))

        assert (status.state, status.exit_code) == (state, code)

    def test_conditions_that_are_over_do_not_count(self):
        mpi_job = job("Created", "Running")
        mpi_job["status"]["conditions"].append({"type": "Failed", "status": "False", "message": "m"})

        assert status_of(mpi_job, Pods(RUNNING)).state == "running"

    def test_the_code_is_that_of_the_last_launcher(self):
        pods = [
            pod("l2", "Failed", "launcher", code=75, age_s=10.0),
            pod("l1", "Failed", "launcher", code=3, age_s=100.0),
            pod("w", "Failed", "worker", code=9, age_s=1.0),
        ]

        assert status_of(job("Failed"), Pods(*pods)).exit_code == 75
        assert [found.name for found in launcher_pods(Pods(*pods), "j")] == ["l1", "l2"]

    def test_a_warning_after_which_nothing_gets_better_is_the_end(self):
        status = status_of(
            job(), Pods(warnings=[("ValidationError", "no"), ("InvalidImageName", "bad name")])
        )

        assert (status.state, status.exit_code, status.message) == ("failed", 1, "InvalidImageName: bad name")


class TestWhatIsWaitedFor:
    @pytest.mark.parametrize(("count", "names"), [(1, "p0"), (3, "p0, p1, p2"), (4, "p0, p1, p2 ...")])
    def test_pods_that_are_pending_are_named(self, count, names):
        pods = [pod(f"p{number}", "Pending") for number in reversed(range(count))]

        status = status_of(job("Created"), Pods(*pods, warnings=[("FailedScheduling", "0/3 nodes")]))

        assert status.message == f"{names} pending; FailedScheduling: 0/3 nodes"

    def test_what_a_kubelet_says_of_a_container_comes_first(self):
        waiting = ("ImagePullBackOff", "Back-off pulling image x")
        pods = [pod("a", "Pending"), pod("b", "Pending", waiting=waiting)]

        status = status_of(job("Created"), Pods(*pods, warnings=[("Failed", "x")]))

        assert status.message == "a, b pending; ImagePullBackOff: Back-off pulling image x"

    def test_a_probe_that_failed_says_nothing(self):
        warnings = [("FailedMount", "no secret"), ("Unhealthy", "connection refused")]

        status = status_of(job("Created"), Pods(pod("a", "Pending"), warnings=warnings))

        assert status.message == "a pending; FailedMount: no secret"

    def test_the_latest_warning_is_told(self):
        warnings = [("FailedScheduling", "0/3 nodes"), ("FailedMount", "no secret")]

        assert status_of(job("Created"), Pods(warnings=warnings)).message == "FailedMount: no secret"

    def test_a_warning_of_before_is_no_news_when_pods_run(self):
        warnings = [("FailedScheduling", "0/3 nodes")]

        assert status_of(job("Created"), Pods(RUNNING, warnings=warnings)).message == ""
        assert "FailedScheduling" in status_of(job("Created"), Pods(warnings=warnings)).message

    def test_the_next_launcher_is_waited_for_when_the_last_one_has_failed(self):
        failed = [pod("l1", "Failed", "launcher", code=1), pod("l2", "Failed", "launcher", code=1)]

        assert "has failed 2 time(s)" in status_of(job("Running"), Pods(*failed, RUNNING)).message
        again = [*failed, pod("l3", "Running", "launcher")]
        assert status_of(job("Running"), Pods(*again)).message == ""

    def test_an_end_that_nobody_notes_is_told_after_a_while(self):
        old = pod("l", "Succeeded", "launcher", code=0, ended_s=3600.0)
        new = pod("l", "Succeeded", "launcher", code=0, ended_s=1.0)

        assert "succeeded 1:00:0" in status_of(job("Running"), Pods(old)).message
        assert status_of(job("Running"), Pods(new)).message == ""


class TestWarnings:
    @pytest.mark.parametrize(
        ("reason", "message", "is_fatal"),
        [
            ("ValidationError", "no", True),
            ("FailedScheduling", "no", False),
            ("MPIJobFailed", "worker pod created failed: pods x is forbidden: violates PodSecurity", True),
            ("MPIJobFailed", "worker pod created failed: pods x is forbidden: exceeded quota: team", False),
            ("FailedCreate", "the name is too long", True),
            ("FailedCreate", "Timeout: request did not complete", False),
            ("FailedCreate", "connection refused", False),
            ("FailedCreate", "error looking up service account", False),
        ],
    )
    def test_are_fatal_if_time_does_not_help(self, reason, message, is_fatal):
        assert bool(fatal_warning([(reason, message)])) == is_fatal

    def test_the_last_fatal_one_counts(self):
        warnings = [("ValidationError", "one"), ("InvalidImageName", "two"), ("FailedScheduling", "three")]

        assert fatal_warning(warnings) == "InvalidImageName: two"


class TestTheEnd:
    def test_is_when_the_operator_says(self):
        mpi_job = job("Created", "Failed")
        assert ended_at(mpi_job) is None

        mpi_job["status"]["conditions"][0]["lastTransitionTime"] = "2026-01-01T00:00:00Z"
        assert ended_at(mpi_job) is None, "that is when it was made"

        mpi_job["status"]["conditions"][1]["lastTransitionTime"] = "2026-01-02T03:04:05Z"
        assert ended_at(mpi_job) == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

        mpi_job["status"]["conditions"][1]["status"] = "False"
        assert ended_at(mpi_job) is None


class TestWhatTheServerRefuses:
    def translated(self, status, body, what="mpijobs j"):
        error = SimpleNamespace(status=status, body=body, reason="Forbidden")
        return Cluster._explained(object.__new__(Cluster), what, error)

    @pytest.mark.parametrize("body", [None, "<html>", "[]", "{}", "3"])
    def test_without_a_message_is_told_by_its_reason(self, body):
        error = self.translated(403, body)

        assert error.message == "mpijobs j: Forbidden"
        assert "ask for a Role" in error.hint

    @pytest.mark.parametrize("status", [*(429, 500, 502, 503, 504), *(400, 401, 403, 404, 409, 422, 501)])
    def test_for_a_while_may_be_asked_again(self, status):
        error = self.translated(status, json.dumps({"message": "later"}))

        assert isinstance(error, UnreachableError) == (status in (429, 500, 502, 503, 504))

    @pytest.mark.parametrize(
        ("status", "message", "hint"),
        [
            (403, "exceeded quota: team", "`kubectl describe quota`; ask for less, or wait"),
            (401, "Unauthorized", "log in again: the credentials of the current context are not accepted"),
            (404, "namespaces not found", ""),
            (404, "the server could not find the requested resource", INSTALL.get("mpijobs", "")),
            (422, "invalid", ""),
        ],
    )
    def test_for_good_is_told_with_what_to_do(self, status, message, hint):
        error = self.translated(status, json.dumps({"message": message}))

        assert type(error) is LaunchError
        assert (error.message, error.hint) == (f"mpijobs j: {message}", hint)
