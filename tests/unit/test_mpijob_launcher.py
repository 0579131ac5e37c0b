"""The launcher mpijob against an API server in this process: real HTTP, the official client."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime, timedelta
from itertools import count

import pytest
import yaml
from support.api import served
from support.launching import write_job
from support.mpijobs import described
from support.waiting import wait_until

from horovod_train.config.schema import Job
from horovod_train.errors import LaunchError, LauncherTimeoutError, UserError
from horovod_train.launch import jobs
from horovod_train.launch.submit import make_plan, resolve
from horovod_train.plugins.kubernetes import launcher as module
from horovod_train.plugins.kubernetes.cluster import UnreachableError
from horovod_train.plugins.kubernetes.launcher import MpiJobLauncher
from horovod_train.plugins.kubernetes.settings import MAX_CONFIG_BYTES

NUMBERS = count(1)  # of runs, in all tests
# How the operator begins what it says of workers that it cannot create.
OF_WORKERS = 'worker pod created failed: pods "digits-worker-0"'


def accepts(api, job):
    api.add_condition(job, "Created")


def trains(api, job):
    api.add_condition(job, "Created")
    api.add_condition(job, "Running")
    api.add_launcher(job, "on 2 ranks\ntrained digits\n")


def succeeds(api, job):
    trains(api, job)
    api.add_condition(job, "Succeeded")


@pytest.fixture
def api(tmp_path, monkeypatch):
    with served(tmp_path, monkeypatch) as api:
        yield api


def request_for(run_id="run-1", **changes):
    return resolve(Job.model_validate(described("cpu", **changes)), run_id)


def submit(api, **changes):
    request = request_for(f"run-{next(NUMBERS)}", **changes)
    return jobs.save_record(request, MpiJobLauncher().submit(request, make_plan(request)))


def test_a_job_is_tried_first_and_then_created_with_all_it_needs(api):
    api.operator = accepts
    job = submit(api)

    posts = [line for line in api.requests if line.startswith("POST")]
    assert job.native_id == "default/digits/uid-of-digits-1"
    assert ["dryRun=All" in line for line in posts] == [True] * 3 + [False] * 3
    assert sorted(api.names("ConfigMap") + api.names("NetworkPolicy")) == ["digits", "digits-job"]
    (owner,) = api.objects["configmaps", "digits-job"]["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("MPIJob", "uid-of-digits-1")


def test_what_the_server_refuses_is_told_and_nothing_is_left(api):
    api.refuses = {"NetworkPolicy": (403, 'networkpolicies is forbidden: User "me" cannot create')}

    with pytest.raises(LaunchError, match="NetworkPolicy digits: networkpolicies is forbidden") as caught:
        submit(api)

    assert "ask for a Role" in caught.value.hint
    assert api.objects == {}


@pytest.mark.parametrize("missing", [(), ("ConfigMap",), ("ConfigMap", "NetworkPolicy")])
def test_a_submission_that_was_interrupted_is_completed_and_creates_no_second_job(api, missing):
    api.operator = accepts
    request = request_for()
    plan = make_plan(request)
    launcher = MpiJobLauncher()
    early = jobs.save_record(request, launcher.early_id(request))
    assert launcher.status(early).message == "no MPIJob: its submission was interrupted"
    first = launcher.submit(request, plan)
    for collection, name in list(api.objects):
        if api.objects[collection, name]["kind"] in missing:
            del api.objects[collection, name]

    assert launcher.status(early).state == "starting"
    assert launcher.submit(request, plan) == first
    assert api.num_created == 3 + len(missing)
    assert sorted(api.names("ConfigMap") + api.names("NetworkPolicy")) == ["digits", "digits-job"]
    owners = [
        each["metadata"]["ownerReferences"][0]["uid"]
        for each in api.objects.values()
        if each["kind"] != "MPIJob"
    ]
    assert owners == ["uid-of-digits-1"] * 2


def test_a_job_that_runs_is_not_deleted_when_the_server_is_away(api, monkeypatch):
    api.operator = accepts
    request = request_for()
    plan, launcher = make_plan(request), MpiJobLauncher()
    first = launcher.submit(request, plan)

    def away(*_):
        raise UnreachableError("the API server does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(module, "_wait_for_acceptance", away)
        with pytest.raises(LauncherTimeoutError):
            launcher.submit(request, plan)

    assert api.names("MPIJob") == ["digits"]
    assert launcher.submit(request, plan) == first


def test_a_second_job_of_the_same_name_does_not_touch_the_first(api):
    api.operator = trains
    submit(api)

    with pytest.raises(LaunchError, match="there is one already: running"):
        submit(api)

    assert api.names("MPIJob") == ["digits"]


@pytest.mark.parametrize("how", ["drained", "succeeded"])
def test_a_job_that_has_ended_makes_room_for_its_continuation(api, how):
    api.operator = trains if how == "drained" else succeeds
    first = submit(api)
    if how == "drained":
        MpiJobLauncher().cancel(first, "drain")
    before = MpiJobLauncher().status(first)
    second = submit(api, launch={"grace_s": 31.0})

    assert second.native_id != first.native_id
    assert api.names("MPIJob") == ["digits"]
    assert MpiJobLauncher().status(first) == before  # remembered


@pytest.mark.parametrize(("ended_s_ago", "is_told"), [(300, True), (5, False)])
def test_an_operator_that_stops_in_the_middle_of_a_job_is_noticed_at_its_end(api, ended_s_ago, is_told):
    def operator(api, job):
        api.add_condition(job, "Created")
        api.add_condition(job, "Running")
        api.add_launcher(job, "trained digits\n", exit_code=0, ended_s_ago=ended_s_ago)

    api.operator = operator

    status = MpiJobLauncher().status(submit(api))

    assert status.state == "running"
    told = re.search(r"succeeded 5:\d\d ago, and the MPI operator has not taken note", status.message)
    assert bool(told) == is_told


@pytest.mark.parametrize(
    ("ended_s_ago", "keep_s", "is_ours", "is_kept"),
    [
        (7200, 3600, True, False),
        (1800, 3600, True, True),
        (7200, None, True, True),
        (7200, 3600, False, True),
        (None, 3600, True, True),
    ],
    ids=["its time is over", "its time is not over", "kept for ever", "of somebody else", "still running"],
)
def test_a_submit_removes_what_has_ended_and_is_not_to_be_kept(api, ended_s_ago, keep_s, is_ours, is_kept):
    api.operator = trains if ended_s_ago is None else succeeds
    request = resolve(Job.model_validate({**described("cpu"), "name": "before"}), "run-1")
    MpiJobLauncher().submit(request, make_plan(request))
    before = api.objects["mpijobs", "before"]
    before["spec"]["runPolicy"]["ttlSecondsAfterFinished"] = keep_s
    if not is_ours:
        before["metadata"]["labels"].clear()
    for condition in before["status"]["conditions"]:
        when = datetime.now(UTC) - timedelta(seconds=ended_s_ago or 7200)
        condition["lastTransitionTime"] = when.strftime("%Y-%m-%dT%H:%M:%SZ")

    submit(api)

    if not is_kept:
        wait_until(lambda: ("mpijobs", "before") not in api.objects)
    all_it_has = {("mpijobs", "before"), ("configmaps", "before-job"), ("networkpolicies", "before")}
    assert all_it_has & api.objects.keys() == (all_it_has if is_kept else set())


def test_who_may_not_list_mpijobs_can_submit_all_the_same(api):
    api.operator = accepts
    api.forbidden = {"list mpijobs"}

    assert submit(api).native_id == "default/digits/uid-of-digits-1"


def test_an_earlier_job_that_does_not_go_is_not_waited_for_for_ever(api, monkeypatch):
    api.operator = succeeds
    submit(api)
    monkeypatch.setattr("support.api._later", lambda *_: None)  # what owns it is not removed
    monkeypatch.setattr("horovod_train.plugins.kubernetes.launcher.API_TIMEOUT_S", 0.3)

    with pytest.raises(
        LaunchError,
        match=r"digits has ended and was deleted 0\.3 s ago, but still has objects \(pods: "
        "digits-launcher-x0",
    ):
        submit(api)


def test_a_job_of_somebody_else_is_left_alone(api):
    api.operator = succeeds
    submit(api)
    api.objects["mpijobs", "digits"]["metadata"]["labels"].clear()

    with pytest.raises(LaunchError, match="there is one already: succeeded"):
        submit(api)


def test_what_was_warned_of_an_earlier_job_is_not_held_against_this_one(api):
    api.operator = accepts
    api.warn("digits", "ValidationError", "spec.x: Invalid value", uid="uid-of-an-earlier-one")
    api.warn("digits-2-worker-0", "FailedCreate", "another job")
    api.warn("another", "ValidationError", "spec.x: Invalid value")
    api.warn("other-than-digits", "ValidationError", "spec.x: Invalid value")

    assert MpiJobLauncher().status(submit(api)).state == "starting"


@pytest.mark.parametrize(
    ("reason", "operator"), [("FailedCreate", accepts), ("MPIJobFailed", lambda api, job: None)]
)
def test_a_full_quota_is_waited_for(api, reason, operator):
    api.operator = operator
    job = submit(api)
    api.warn("digits", reason, f"{OF_WORKERS} is forbidden: exceeded quota: team")

    status = MpiJobLauncher().status(job)

    assert (status.state, status.exit_code) == ("starting", None)
    assert "exceeded quota" in status.message


def test_a_job_in_a_queue_waits(api):
    api.operator = lambda api, job: job["spec"]["runPolicy"].update(suspend=True)

    status = MpiJobLauncher().status(submit(api))

    assert (status.state, status.exit_code) == ("queued", None)
    assert "by its queue" in status.message


def test_an_operator_that_does_nothing_is_named(api):
    status = MpiJobLauncher().status(submit(api))

    assert "the MPI operator has not processed it" in status.message


def test_a_job_that_was_deleted_by_others_is_unknown_and_waited_for_no_longer(api):
    api.operator = trains
    job = submit(api)
    del api.objects["mpijobs", "digits"]

    status = MpiJobLauncher().wait(job)

    assert (status.state, status.exit_code) == ("unknown", 1)
    assert "run_dir" in status.message


@pytest.mark.parametrize("has_ended", [True, False])
@pytest.mark.parametrize("follow", [True, False])
def test_a_log_whose_connection_breaks_is_shown_whole_and_once(api, follow, has_ended):
    def trains_on(api, job):
        (succeeds if has_ended else trains)(api, job)
        api.breaks_after = 12  # bytes

    api.operator = trains_on
    job = submit(api)
    lines = MpiJobLauncher().logs(job, follow=follow)
    first = next(lines)
    api.breaks_after = None
    if not has_ended:
        api.add_condition(api.objects["mpijobs", "digits"], "Succeeded")

    assert [first, *lines] == ["on 2 ranks", "trained digits"]


def test_the_log_of_a_retry_follows_that_of_the_first_which_is_read_once(api):
    def is_retried(api, job):
        api.add_condition(job, "Running")
        api.add_launcher(job, "a host was lost", 1)
        api.add_launcher(job, "resumed")

    api.operator = is_retried
    lines = MpiJobLauncher().logs(submit(api), follow=True)
    found = [next(lines), next(lines)]
    time.sleep(0.3)
    api.add_condition(api.objects["mpijobs", "digits"], "Succeeded")
    found += lines

    assert found == ["a host was lost", "resumed"]
    assert sum("launcher-x0/log" in request for request in api.requests) == 1


def test_a_cluster_without_the_operator_is_named(api):
    api.refuses = {"MPIJob": (404, "the server could not find the requested resource")}

    with pytest.raises(LaunchError) as caught:
        submit(api)

    assert "is the MPI operator installed" in caught.value.hint


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("ValidationError", "spec.x: Invalid value"),
        ("MPIJobFailed", f'{OF_WORKERS} is forbidden: violates PodSecurity "restricted:latest"'),
        ("MPIJobFailed", f"{OF_WORKERS} is forbidden: no PriorityClass with name high was found"),
        ("ErrResourceExists", 'Resource "digits" of Kind "Service" already exists'),
    ],
)
def test_what_only_an_event_says_ends_the_launch_with_its_text_and_the_job_is_removed(api, reason, message):
    api.operator = lambda api, job: api.warn("digits", reason, message)

    with pytest.raises(LaunchError) as caught:
        submit(api)

    assert f"{reason}: {message}" in str(caught.value)

    wait_until(lambda: not api.names("MPIJob") + api.names("ConfigMap"))


@pytest.mark.parametrize(
    ("operator", "state", "exit_code"),
    [
        (accepts, "starting", None),
        (trains, "running", None),
        (succeeds, "succeeded", 0),
    ],
)
def test_the_state_is_the_operators(api, operator, state, exit_code):
    api.operator = operator
    status = MpiJobLauncher().status(submit(api))

    assert (status.state, status.exit_code) == (state, exit_code)


@pytest.mark.parametrize(("code", "state"), [(75, "preempted"), (3, "failed")])
def test_a_failed_job_has_the_exit_code_of_its_launcher(api, code, state):
    def fails(api, job):
        api.add_condition(job, "Created")
        api.add_launcher(job, "", exit_code=code)
        api.add_condition(job, "Failed", "back-off limit reached")

    api.operator = fails
    status = MpiJobLauncher().wait(submit(api))

    assert (status.state, status.exit_code, status.message) == (state, code, "back-off limit reached")


def test_why_a_job_waits_is_told(api):
    api.operator = accepts
    job = submit(api)
    api.warn("digits-worker-0", "FailedScheduling", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu")

    status = MpiJobLauncher().status(job)

    assert (status.state, status.exit_code) == ("starting", None)
    assert "Insufficient nvidia.com/gpu" in status.message


def test_logs_are_those_of_the_launcher_and_of_its_retries(api):
    def retried(api, job):
        trains(api, job)
        api.add_launcher(job, "resumed\n", exit_code=0)
        api.add_condition(job, "Succeeded")

    api.operator = retried

    assert list(MpiJobLauncher().logs(submit(api), follow=True)) == [
        "on 2 ranks",
        "trained digits",
        "resumed",
    ]


def test_an_image_that_cannot_be_pulled_is_named(api):
    api.operator = accepts
    job = submit(api)
    api.add_worker("digits-worker-0", "ImagePullBackOff", 'Back-off pulling image "nowhere/train:1.0"')
    api.warn("digits-worker-0", "Failed", "Error: ImagePullBackOff")

    assert (
        'ImagePullBackOff: Back-off pulling image "nowhere/train:1.0"' in MpiJobLauncher().status(job).message
    )


def test_a_probe_that_failed_at_the_start_is_no_reason(api):
    api.operator = accepts
    job = submit(api)
    api.warn("digits-worker-0", "Unhealthy", "Readiness probe failed: dial tcp 10.0.0.7:2222")

    assert "Readiness" not in MpiJobLauncher().status(job).message


def test_a_pause_between_launchers_is_told(api):
    def is_between(api, job):
        api.add_condition(job, "Running")
        api.add_launcher(job, "a host was lost", 1)

    api.operator = is_between

    status = MpiJobLauncher().status(submit(api))

    assert status.state == "running"
    assert "its launcher has failed 1 time(s); Kubernetes starts the next one after a pause" in status.message


def test_a_server_that_does_not_answer_is_told_after_one_time_out(api, monkeypatch):
    api.operator = trains
    job = submit(api)
    monkeypatch.setattr("horovod_train.plugins.kubernetes.launcher.API_TIMEOUT_S", 0.5)
    api.silent_s = 2.0
    before = len(api.requests)

    with pytest.raises(LaunchError, match="the API server does not answer"):
        MpiJobLauncher().status(job)

    assert len(api.requests) == before + 1, "it is not asked again and again, each time for as long"


def test_a_job_that_ended_long_ago_is_not_asked_for(api):
    api.operator = succeeds
    job = submit(api)
    MpiJobLauncher().status(job)
    before = len(api.requests)

    assert MpiJobLauncher().status(job).state == "succeeded"
    assert len(api.requests) == before


def test_a_drained_job_is_suspended_and_stays(api):
    api.operator = trains
    job = submit(api)

    MpiJobLauncher().cancel(job, "drain")

    assert api.objects["mpijobs", "digits"]["spec"]["runPolicy"]["suspend"] is True
    assert api.names("Pod") == []
    assert MpiJobLauncher().status(job).state == "preempted"


def test_a_job_goes_on_though_a_pod_was_evicted(api):
    """The operator marks the MPIJob as failed, without a time of completion, and leaves it so."""
    api.operator = trains
    job = submit(api)
    evicted = {
        "type": "Failed",
        "status": "True",
        "reason": "MPIJobEvicted",
        "message": "1/2 workers are evicted",
    }
    api.objects["mpijobs", "digits"]["status"]["conditions"].append(evicted)

    assert MpiJobLauncher().status(job).state == "running"
    with pytest.raises(LaunchError, match="there is one already: running"):
        submit(api)

    api.objects["mpijobs", "digits"]["status"]["completionTime"] = "2026-11-30T00:00:00Z"
    assert MpiJobLauncher().status(job).state == "failed"


def test_a_job_in_a_queue_of_kueue_is_not_drained(api):
    """Kueue starts a suspended job again while its Workload is admitted."""
    api.operator = trains
    job = submit(api, launch={"kubernetes": {"queue": "team"}})

    with pytest.raises(LaunchError, match="is in a queue of Kueue") as error:
        MpiJobLauncher().cancel(job, "drain")
    assert "get workloads" in error.value.hint
    assert api.objects["mpijobs", "digits"]["spec"]["runPolicy"]["suspend"] is False


def test_a_drain_ends_though_a_launcher_has_failed_before(api):
    """Its pod has ended, and stays for its log."""

    def is_retried(api, job):
        api.add_launcher(job, "a host was lost", 1)
        trains(api, job)

    api.operator = is_retried
    job = submit(api)
    failed = api.objects["pods", "digits-launcher-x0"]

    MpiJobLauncher().cancel(job, "drain")
    api.objects["pods", "digits-launcher-x0"] = failed
    status = MpiJobLauncher().wait(job)

    assert (status.state, status.exit_code) == ("preempted", 75)


@pytest.mark.parametrize("operator", [succeeds, trains], ids=["succeeded", "running"])
def test_what_is_left_of_a_job_is_removed_when_it_is_cancelled(api, operator):
    api.operator = operator
    job = submit(api)
    before = MpiJobLauncher().status(job)

    MpiJobLauncher().cancel(job, "stop")
    wait_until(lambda: not api.names("MPIJob"))
    after = MpiJobLauncher().status(job)

    assert api.names("ConfigMap") == api.names("NetworkPolicy") == []
    assert after == before if operator is succeeds else after.state == "cancelled"


@pytest.mark.parametrize("collection", ["mpijobs", "pods"])
def test_whoever_follows_a_job_survives_an_api_server_that_starts_again(api, collection):
    api.operator = succeeds
    job = submit(api)
    api.away[collection] = 3

    assert list(MpiJobLauncher().logs(job, follow=True)) == ["on 2 ranks", "trained digits"]


@pytest.mark.parametrize("collection", ["mpijobs", "pods", "pods/digits-launcher-x0/log"])
def test_whoever_follows_a_job_survives_an_api_server_that_does_not_know_its_roles_yet(api, collection):
    api.operator = trains
    job = submit(api)
    lines = MpiJobLauncher().logs(job, follow=True)
    assert next(lines) == "on 2 ranks"
    api.away_status, api.away[collection] = 403, 3
    succeeds(api, next(each for (kind, _), each in api.objects.items() if kind == "mpijobs"))

    assert list(lines)[-1:] == ["trained digits"]


def test_whoever_may_not_read_is_told_at_once(api):
    api.operator = trains
    job = submit(api)
    api.away_status, api.away["mpijobs"] = 403, 3

    with pytest.raises(LaunchError, match="unable to handle") as caught:
        next(MpiJobLauncher().logs(job, follow=True))
    assert "ask for a Role" in caught.value.hint


def test_whoever_may_no_longer_read_a_log_is_told_in_the_end(api, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    api.operator = trains
    job = submit(api)
    lines = MpiJobLauncher().logs(job, follow=True)
    assert next(lines) == "on 2 ranks"
    api.away_status, api.away["pods/digits-launcher-x0/log"] = 403, 10**6
    api.breaks_after = 5

    with pytest.raises(LaunchError, match="unable to handle"):
        list(lines)


def test_whoever_follows_a_job_that_is_drained_elsewhere_sees_its_end(api):
    api.operator = trains
    job = submit(api)
    lines = MpiJobLauncher().logs(job, follow=True)
    assert next(lines) == "on 2 ranks"
    MpiJobLauncher().cancel(job, "drain")

    list(lines)
    assert MpiJobLauncher().wait(job).exit_code == 75


def test_a_log_whose_kubelet_cannot_be_reached_is_asked_for_again(api):
    api.operator = succeeds
    job = submit(api)
    api.away["pods/digits-launcher-x0/log"] = 2

    assert list(MpiJobLauncher().logs(job, follow=True)) == ["on 2 ranks", "trained digits"]


def test_logs_that_are_gone_with_their_pods_are_no_success(api):
    api.operator = succeeds
    job = submit(api)
    del api.objects["pods", "digits-launcher-x0"]

    with pytest.raises(LaunchError, match="its pods are gone, and their logs with them; it is succeeded"):
        list(MpiJobLauncher().logs(job, follow=False))


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_cancelled_job_is_cancelled_and_gone_with_all_it_had(api, how):
    api.operator = trains
    job = submit(api)

    MpiJobLauncher().cancel(job, how)
    at_once = MpiJobLauncher().wait(job)
    MpiJobLauncher().cancel(job, how)  # twice is no error
    wait_until(lambda: not api.names("MPIJob"))

    assert (at_once.state, at_once.exit_code) == ("cancelled", 143)
    assert (at_once.message == "killed, then deleted") == (how == "kill")
    assert [name for kind in ("MPIJob", "ConfigMap", "NetworkPolicy") for name in api.names(kind)] == []
    assert MpiJobLauncher().status(job).state == "cancelled"
    patched = [line for line in api.requests if line.startswith("PATCH")]
    assert bool(patched) == (how == "stop")


def test_without_a_configuration_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))

    with pytest.raises(UserError, match="no Kubernetes cluster is configured"):
        submit(None)


def test_a_task_of_the_users_own_travels_in_the_config_map(tmp_path):
    (tmp_path / "mine.py").write_text("class Mine: ...\n")
    path = write_job(tmp_path / "job.yaml", **{**described("cpu"), "task": f"{tmp_path}/mine.py:Mine"})
    from horovod_train.config.load import load_job

    plan = MpiJobLauncher().plan(resolve(load_job(path, environ={}), "run-1"))
    config_map = next(yaml.safe_load_all(*plan.files.values()))

    assert config_map["data"]["mine.py"] == "class Mine: ...\n"
    assert json.loads(config_map["data"]["job.json"])["task"] == "/etc/horovod_train/mine.py:Mine"


def test_a_task_too_large_for_a_config_map_is_refused(tmp_path):
    task = tmp_path / "task.py"
    task.write_text(f"class Task:\n    '''{'x' * MAX_CONFIG_BYTES}'''\n")
    request = resolve(Job.model_validate({**described("cpu"), "task": f"{task}:Task"}), "run-1")

    with pytest.raises(UserError, match=r"task\.py is too large for a ConfigMap") as caught:
        MpiJobLauncher().plan(request)

    assert "put it into the image" in caught.value.hint


def test_whoever_follows_a_job_is_told_what_it_waits_for_each_thing_once(api):
    api.operator = accepts
    job = submit(api)
    api.add_worker("digits-worker-0", "ImagePullBackOff", "no image")
    lines = MpiJobLauncher().logs(job, follow=True)

    assert next(lines) == "starting. digits-worker-0 pending; ImagePullBackOff: no image"
    del api.objects["pods", "digits-worker-0"]
    api.add_worker("digits-worker-1", "ImagePullBackOff", "no image")
    assert next(lines) == "starting. digits-worker-1 pending; ImagePullBackOff: no image"
    del api.objects["pods", "digits-worker-1"]
    succeeds(api, api.objects["mpijobs", "digits"])
    assert list(lines) == ["on 2 ranks", "trained digits"]


def test_whoever_only_looks_is_not_told_what_it_waits_for(api):
    api.operator = trains
    job = submit(api)
    api.add_worker("digits-worker-0", "ImagePullBackOff", "no image")

    assert list(MpiJobLauncher().logs(job, follow=False)) == ["on 2 ranks", "trained digits"]


def test_an_api_server_that_stays_away_is_not_waited_for_for_ever(api, monkeypatch):
    api.operator = trains
    job = submit(api)
    now_s = [0.0]

    def sleep(seconds):
        now_s[0] += 100

    monkeypatch.setattr("horovod_train.plugins.kubernetes.launcher.monotonic", lambda: now_s[0])
    monkeypatch.setattr("horovod_train.plugins.kubernetes.launcher.sleep", sleep)
    api.away = {"mpijobs": 1000}

    with pytest.raises(LaunchError, match="currently unable"):
        list(MpiJobLauncher().logs(job, follow=True))
    assert now_s[0] == 700.0, "ten minutes are not yet too long"

    now_s[0] = 0.0
    with pytest.raises(LaunchError, match="currently unable"):
        list(MpiJobLauncher().logs(job, follow=False))
    assert now_s[0] == 0.0


@pytest.mark.parametrize("how", ["drain", "stop", "kill"])
def test_a_job_that_is_gone_needs_no_cancelling(api, how):
    api.operator = trains
    job = submit(api)
    del api.objects["mpijobs", "digits"]
    before = len(api.requests)

    MpiJobLauncher().cancel(job, how)

    assert all(line.startswith("GET") for line in api.requests[before:])


def test_a_job_is_removed_with_all_it_has(api):
    api.operator = trains
    job = submit(api)

    MpiJobLauncher().remove(job)

    wait_until(lambda: not api.names("MPIJob") + api.names("ConfigMap") + api.names("NetworkPolicy"))
