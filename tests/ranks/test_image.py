"""The image: built, looked through, and started as the MPI operator and kubelets start it."""

from __future__ import annotations

import re
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from support.image import ROOT, builder
from support.launching import PROGRAMS, TIMEOUT_S
from support.mpijobs import described
from support.pods import MpiJob, Volume, containers, make_key
from support.running import is_alive, is_rank

from horovod_train.checkpoint.store import list_checkpoints
from horovod_train.config.schema import Job
from horovod_train.launch.submit import resolve
from horovod_train.plugins.kubernetes.render import render

pytestmark = [pytest.mark.ranks, pytest.mark.image, pytest.mark.timeout(3600)]
SECRET = "s3cret-of-the-cluster"  # noqa: S105
# What builds programs, and what only builds the image.
BUILDERS = re.compile(r"(.*-)?(gcc|g\+\+|cc1|cc1plus|c\+\+|clang|ld|as|make|cmake|nvcc|patchelf)(-[\d.]+)?")


@pytest.fixture(scope="module")
def images():
    made = builder()
    made.build()
    print(f"\nsize of the image: {made.size()}")
    return made


@pytest.fixture(scope="module")
def root(images):
    """What is in the image."""
    with images.container() as container:
        yield container.root


class TestWhatIsInIt:
    def test_no_compiler(self, root):
        found = [
            path.relative_to(root)
            for folder in ("usr", "opt", "bin", "sbin")
            for path in (root / folder).rglob("*")
            if path.parent.name in ("bin", "sbin", "libexec") and BUILDERS.fullmatch(path.name)
        ]

        assert found == []
        assert not list((root / "opt").rglob("*.a"))

    def test_no_secret(self, images, root):
        history = str(images.inspect())
        keys = [path for path in (root / "etc/ssh").glob("*key*") if "config" not in path.name]
        homes = [path for path in (root / "home").rglob("*") if path.is_file()]

        assert not any(
            (root / "etc" / name).exists() and (root / "etc" / name).read_text() for name in ("pip.conf",)
        )
        assert keys == []
        assert {path.name for path in homes} <= {"sshd_config", ".bashrc", ".profile", ".bash_logout"}
        assert list((root / "home/mpiuser/.ssh").iterdir()) == []
        assert "PIP_" not in history
        assert "index-url" not in history

    def test_an_ordinary_user_labels_and_a_health_check(self, images):
        config = images.inspect()["OCIv1"]["config"]

        assert config["User"] == "1000:1000"
        assert config["Labels"]["org.opencontainers.image.title"] == "horovod_train"
        assert config["Entrypoint"] == ["horovod-train-entrypoint"]

    def test_no_more_than_is_needed(self, root):
        packages = (root / "opt/horovod_train/lib").glob("python3*/site-packages/*.dist-info")
        names = {path.name.partition("-")[0].lower() for path in packages}

        assert {"horovod", "torch", "mpi4py", "click", "prometheus_client", "horovod_train"} <= names
        assert not names & {"pytest", "mypy", "ruff", "cmake", "tensorflow", "jax"}

    def test_an_engine_that_finds_itself_in_order(self, images):
        with images.container() as container:
            said = container.run("horovod-train", "engine", "check")

        assert "ok   torch          rank 0 of 1, all-reduce works" in said
        assert not re.search("^fail", said, re.MULTILINE)


def job(launch=None, **changes) -> Job:
    """A job for the pods, with a secret."""
    own = {
        "secrets": {"API_TOKEN": "kubernetes:tracking/token"},
        "kubernetes": {"image": "localhost/horovod_train:test"},
    }
    return resolve(Job.model_validate({**described("", launch={**own, **(launch or {})}), **changes})).job


def slow(**changes) -> Job:
    return job(
        task=f"{PROGRAMS / 'tasks.py'}:Noted",
        task_args={"notes": "/data", "pause_s": 0.1},
        train={"epochs": 500, "batch_size_per_rank": 4},
        checkpoint={"every": None},
        **changes,
    )


def rendered(description: Job) -> list[dict]:
    file = Path(description.task.rpartition(":")[0])
    return render(description, "first", file.read_text() if file.suffix == ".py" else "")


PODS = ("digits-launcher", "digits-worker-0", "digits-worker-1")


@pytest.fixture
def pods(images, tmp_path):
    with containers(images, tmp_path, PODS) as made:
        yield made


def operate(pods, description: Job):
    """Start the workers and then the launcher, as the operator does."""
    mpi_job = MpiJob(pods, rendered(description), {"tracking/token": SECRET})
    workers = [mpi_job.start_worker(number) for number in range(2)]
    for worker in workers:
        worker.wait_until_ready()
    return mpi_job, workers, mpi_job.start_launcher()


def wait_for_ranks(mpi_job, launcher, number=2):
    deadline = time.monotonic() + TIMEOUT_S
    while len(list(mpi_job.data.glob("rank-*.txt"))) < number:
        assert launcher.process.poll() is None, launcher.said()
        assert time.monotonic() < deadline, launcher.said()
        time.sleep(0.1)


def commands(containers):
    """The command lines of all processes in containers."""
    return [" ".join(process.cmdline()) for process in processes(containers)]


def processes(containers):
    """All processes in containers."""
    found = []
    for container in containers:
        with suppress(psutil.NoSuchProcess):
            found += psutil.Process(container.process.pid).children(recursive=True)
    return [process for process in found if is_alive(process)]


class TestAsTheOperatorStartsIt:
    @pytest.mark.parametrize("strategy", ["allreduce", "fsdp"])
    def test_the_digits_job_trains_on_two_workers(self, pods, strategy):
        mpi_job, workers, launcher = operate(pods, job(train={"epochs": 2}, strategy={"name": strategy}))

        assert launcher.end() == 0, launcher.said()
        assert "2 ranks" in launcher.said()
        assert list_checkpoints(mpi_job.data / "runs" / "digits" / "checkpoints")
        assert not [command for command in commands(workers) if "horovod_train worker" in command]

    def test_processes_are_those_of_an_ordinary_user_and_show_no_secret(self, pods):
        mpi_job, workers, launcher = operate(pods, slow())
        wait_for_ranks(mpi_job, launcher)
        inside = processes((*workers, launcher))
        users = {process.uids().real for process in inside}
        ranks = [process for process in inside if is_rank(process)]
        tokens = {rank.environ().get("API_TOKEN") for rank in ranks}
        shown = commands((*workers, launcher))
        launcher.terminate()
        code = launcher.end()
        written = [path.read_bytes() for path in mpi_job.data.rglob("*") if path.is_file()]

        assert code == 75, launcher.said()
        assert users == {1000}
        assert tokens == {SECRET}
        assert not any(SECRET in text for text in [*shown, launcher.said(), *(w.said() for w in workers)])
        assert not any(SECRET.encode() in content for content in written)
        assert SECRET not in str(rendered(slow()))

    @pytest.mark.parametrize("who", ["launcher", "worker"])
    def test_a_pod_that_is_taken_away_lets_all_ranks_save(self, pods, who):
        mpi_job, workers, launcher = operate(pods, slow())
        wait_for_ranks(mpi_job, launcher)
        pod = {"launcher": launcher, "worker": workers[1]}[who]

        pod.terminate()

        assert launcher.end() == 75, launcher.said()
        assert "everything is saved at step" in launcher.said()
        assert list_checkpoints(mpi_job.data / "runs" / "digits" / "checkpoints")
        assert who == "launcher" or workers[1].end(30) == 0
        assert not [command for command in commands(workers) if "horovod_train worker" in command]

    def test_an_elastic_job_goes_on_without_a_pod_that_is_taken_away(self, pods):
        elastic = {"min_ranks": 1, "max_ranks": 2, "poll_s": 0.5, "cooldown_s": 3.0}
        description = slow(launch={"elastic": elastic}).model_copy(
            update={"train": slow().train.model_copy(update={"epochs": 20})}
        )
        mpi_job, workers, launcher = operate(pods, description)
        wait_for_ranks(mpi_job, launcher)

        workers[1].terminate()
        workers[1].end(60)
        mpi_job.announce([0])
        wait_for_ranks(mpi_job, launcher, 3)
        mpi_job.announce([0, 1])
        workers.append(mpi_job.start_worker(1))
        wait_for_ranks(mpi_job, launcher, 5)

        assert launcher.end() == 0, launcher.said()
        assert launcher.said().count("elastic: 2 ranks on digits-worker-0") == 2

    def test_a_worker_whose_name_is_not_known_is_named(self, pods):
        mpi_job = MpiJob(pods, rendered(job()), {"tracking/token": SECRET})
        mpi_job.mpi.write({"hostfile": b"digits-worker-7.digits.default.svc slots=2\n"})
        launcher = mpi_job.start_launcher(DNS_TIMEOUT_S="1")

        assert launcher.end() == 1
        assert "digits-worker-7.digits.default.svc is not known to DNS after 1 s" in launcher.said()


def test_the_compose_file_trains_on_two_containers(images, tmp_path):
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    folders = {name: tmp_path / name for name in ("keys", "data")}
    with containers(images, tmp_path, ("keys", "worker-0", "worker-1", "train")) as made:
        for folder in folders.values():
            folder.mkdir()
            subprocess.run(["chown", "1000:1000", str(folder)], check=True)

        def start(name):
            mounts = {}
            for volume in services[name]["volumes"]:
                source, _, path = volume.partition(":")
                mounts[path] = folders[source]
            return made.start(name, ["horovod-train-entrypoint", *services[name]["command"]], mounts=mounts)

        keys = start("keys")
        assert keys.end() == 0, keys.said()
        workers = [start("worker-0"), start("worker-1")]
        for worker in workers:
            worker.wait_until_ready()
        train = start("train")

        assert train.end() == 0, train.said()
        assert "2 ranks" in train.said()


def test_the_health_check_answers_for_a_worker_and_for_a_launcher(images, tmp_path):
    with containers(images, tmp_path, ("worker",)) as made:
        worker = made.start(
            "worker",
            ["horovod-train-entrypoint", "worker"],
            mounts={"/home/mpiuser/.ssh:ro": Volume(tmp_path / "ssh", make_key(tmp_path / "key")).path},
        )
        worker.wait_until_ready()
        other = made.start("worker", ["horovod-train-entrypoint", "health"])

        assert other.end() == 0, other.said()
