"""Shared fixtures. A test that leaves a process, an environment variable or a thread behind fails."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

sys.path[:0] = [str(Path(__file__).parent / name) for name in (".", "programs", "plugin")]


from support.budget import END, MAX_LAUNCHES, Launches  # noqa: E402
from support.core import has_core, is_core  # noqa: E402
from support.lanes import Lanes, pool_of  # noqa: E402
from support.matrix import Matrix, update  # noqa: E402  (found by the path above)
from support.pools import PROCESSES, Pools  # noqa: E402

# A suite that a shell has started in the background inherits signals that are ignored, and programs that it
# starts would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
for each in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(each, signal.SIG_DFL)
STAGES = Path("/tmp")  # noqa: S108  (where ranks' hosts have their files while a job runs)
SEEN = pytest.StashKey["Seen"]()
# How long an example takes is the machine's affair.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_addoption(parser):
    parser.addoption("--matrix", metavar="PAGE", help="write what each framework was seen to do")
    parser.addoption(
        "--only", choices=["core", "rest"], help="what `make test` runs, or the rest of `make check`"
    )
    parser.addoption("--shuffle", metavar="SEED", type=int, help="run the tests in a random order")


def pytest_configure(config):
    config.stash[SEEN] = Seen()
    config.pluginmanager.register(config.stash[SEEN])
    if (seed := config.getoption("--shuffle")) is not None:
        config.pluginmanager.register(Shuffled(seed))


class Shuffled:
    """Another order, for tests that lean on each other without knowing it."""

    def __init__(self, seed):
        self.chance = random.Random(seed)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        """Before pytest brings together what shares a fixture, and pools what shares ranks."""
        self.chance.shuffle(items)


def pytest_ignore_collect(collection_path, config):
    """Without the packages of others, some files cannot be imported."""
    file = collection_path.relative_to(Path(__file__).parents[1]).as_posix()
    is_other = file.endswith(".py") and not has_core(file)
    return True if is_other and config.getoption("--only") == "core" else None


def pytest_collection_modifyitems(config, items):
    """Choose tests. Let all of a pool follow each other, over all files: it starts once, and nobody waits."""
    if only := config.getoption("--only"):
        chosen = [item for item in items if is_chosen(item, only)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen
    items.sort(key=pool_of)


def is_chosen(item, only):
    """What fills the matrix of docs/frameworks.md is run with the rest, too, so that the page is whole."""
    is_of_core = is_core(item.nodeid)
    return is_of_core if only == "core" else not is_of_core or "matrix" in item.fixturenames


def pytest_runtest_setup():
    if time.time() > float(os.environ.get(END, "inf")):
        pytest.skip("the time of this slice is over (tests/campaign.py)")


def pytest_xdist_make_scheduler(config, log):
    return Lanes(config, log)


@pytest.fixture
def matrix(record_property):
    """Say which cell of the matrix a test fills: row, column and what stands there if it passes."""
    return lambda row, column, text="yes": record_property("matrix", (row, column, text))


class Seen:
    """What tests have seen and started; with several workers the reports bring it together."""

    def __init__(self):
        self.matrix = Matrix()
        self.launches = Launches()
        self.is_page_right = True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        report.user_properties = [*report.user_properties, ("launches", self.launches.heard())]
        return report

    def pytest_runtest_logreport(self, report):
        for name, value in report.user_properties:
            if name == "launches":
                self.launches.counts.update(value)
            elif name == "matrix" and report.when == "call":
                row, column, text = value
                self.matrix.add(row, column, text, passed=report.passed)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):
        return  # whoever has started the workers knows everything
    seen = session.config.stash[SEEN]
    page = session.config.getoption("--matrix")
    seen.is_page_right = not page or update(seen.matrix, Path(page))
    if not seen.is_page_right:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    is_suite = "not campaign" in session.config.option.markexpr
    if is_suite and seen.launches.counts.total() > MAX_LAUNCHES:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.write_line(str(config.stash[SEEN].launches))
    page = config.getoption("--matrix")
    if page:
        is_right = config.stash[SEEN].is_page_right
        text = (
            "agrees with these tests" if is_right else "was rewritten: inspect it with git diff and commit it"
        )
        terminalreporter.write_line(f"{page} {text}")


@pytest.fixture(scope="session", autouse=True)
def temporary_files_are_pytests(tmp_path_factory):
    """Let programs and jobs leave things where pytest cleans up: a rank that is killed cannot."""
    before = {name: os.environ.get(name) for name in ("TMPDIR", "XDG_STATE_HOME")}
    tempfile.tempdir = None
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("t"))
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    tempfile.tempdir = None
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def pools(tmp_path_factory):
    """Ranks that run one program after the other."""
    made = Pools(tmp_path_factory.mktemp("pools"))
    yield made
    made.close()


def stages_of(base: Path) -> set[Path]:
    """Folders of jobs on this host whose runs lie in the folder of this test session."""
    found = set()
    for stage in STAGES.glob("horovod_train-*"):
        with suppress(OSError):
            if str(base) in (stage / "job.json").read_text():
                found.add(stage)
    return found


def of_this_process():
    """What a test may change for itself only."""
    logger = logging.getLogger("horovod_train")
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    return list(logger.handlers), logger.propagate, [*map(signal.getsignal, numbers)], Path.cwd()


def open_files(base: Path) -> set[str]:
    """Sockets, pipes and files of the test session that this process has open."""
    found = set()
    for handle in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            target = str(handle.readlink())
            if target.startswith(("socket:", "pipe:", str(base))):
                found.add(f"{handle.name}: {target}")
    return found


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request, tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    files = open_files(base)
    environment = dict(os.environ)
    threads = set(threading.enumerate())
    # Shared by several tests; or of one before, and adopted by a run of this one.
    known = set(psutil.Process().children(recursive=True))
    stages = stages_of(base)
    settings = of_this_process()
    yield
    new = [
        process
        for process in psutil.Process().children()
        if process not in known and process.pid not in PROCESSES
    ]
    left = [*new, *(grandchild for process in new for grandchild in process.children(recursive=True))]
    for process in left:
        process.kill()
    # A launcher that is killed has somebody else clear up after it.
    deadline = time.monotonic() + 5
    while (folders := stages_of(base) - stages) and time.monotonic() < deadline:
        time.sleep(0.1)
    # PyTest notes the running test there, and torch where its compiler may cache.
    changed = {
        name
        for name in environment.keys() | os.environ.keys()
        if environment.get(name) != os.environ.get(name)
        and not name.startswith(("PYTEST_", "TORCHINDUCTOR_"))
    }
    os.environ.clear()
    os.environ.update(environment)
    extra = [t for t in set(threading.enumerate()) - threads if t.is_alive() and not t.daemon]
    opened = set()
    if "pools" not in request.fixturenames and open_files(base) - files:  # pools are there for later tests
        gc.collect()
        opened = open_files(base) - files
    assert not opened, f"files left open: {sorted(opened)}"
    assert not left, f"processes left behind: {left}"
    assert not folders, f"folders left behind: {folders}"
    assert not changed, f"environment changed: {sorted(changed)}"
    assert not extra, f"threads left behind: {extra}"
    assert settings == of_this_process(), "left behind: a signal's handler, or where a logger writes"


@pytest.fixture(params=["mpi", "gloo"])
def controller(request):
    return request.param


@pytest.fixture
def one_thread():
    """PyTorch computes on one thread: ranks that are threads are as many already."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
