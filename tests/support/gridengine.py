"""A real Grid Engine on the hosts of a cluster: sge_qmaster on the login host, an sge_execd on each node."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.cluster import Cluster
from support.launching import environment
from support.namespaces import why_not

NEEDS = ("sge_qmaster", "sge_execd", "qsub", "qconf", "csh")
PROGRAMS = Path("/usr/lib/gridengine")
SHARED = Path("/usr/share/gridengine")
BOOTSTRAP = """admin_user none
default_domain none
ignore_fqdn true
spooling_method classic
spooling_lib libspoolc
spooling_params {cell}/common;{root}/spool
binary_path /usr/sbin
qmaster_spool_dir {root}/spool
security_mode none
listener_threads 1
worker_threads 1
scheduler_threads 1
"""
GLOBAL = {
    "execd_spool_dir": "{root}/execd",
    "min_uid": "0",
    "min_gid": "0",
    "shell_start_mode": "unix_behavior",
    "load_report_time": "00:00:01",
    "reschedule_unknown": "00:00:00",
}
SCHEDULER = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}
SLOTS = 2
QUEUE = {"notify": "00:00:20", "pe_list": "mpi one_host", "load_thresholds": "NONE", "rerun": "TRUE"}
PARALLEL_ENVIRONMENT = """pe_name {name}
slots 99
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule {rule}
control_slaves TRUE
job_is_first_task FALSE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
"""


@dataclass
class GridEngine:
    """The cluster's Grid Engine, with the parallel environment ``mpi``, of one rank on each node."""

    cluster: Cluster
    root: Path

    @property
    def variables(self) -> dict[str, str]:
        """What its commands need."""
        ports = {"SGE_QMASTER_PORT": "6444", "SGE_EXECD_PORT": "6445"}
        return {"SGE_ROOT": str(self.root), "SGE_CELL": "cell", **ports}

    def ask(self, *command: str, check: bool = True) -> str:
        """Run one of its commands on the login host."""
        # Its commands tell errors on either output.
        done = self.cluster.on_login(*command, cwd=self.root, env=self.variables, timeout_s=30)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@contextmanager
def gridengine_on(cluster: Cluster) -> Iterator[GridEngine]:
    """Start Grid Engine, and end it."""
    if reason := why_not(*NEEDS):
        pytest.skip(reason)
    made = GridEngine(cluster, cluster.folder / "gridengine")
    nodes = [name for name in cluster.nodes if name != "login"]
    _spool(made, nodes)
    daemons = [_start(made, "login", "sge_qmaster")]
    try:
        _until(lambda: "execd_spool_dir" in made.ask("qconf", "-sconf", check=False))
        _configure(made, nodes)
        daemons += [_start(made, name, "sge_execd") for name in nodes]
        _until(lambda: made.ask("qstat", "-f").count("lx-") == len(nodes))
        yield made
    finally:
        for daemon in reversed(daemons):
            daemon.kill()
            daemon.wait(10)


def _spool(made: GridEngine, nodes: list[str]) -> None:
    root = made.root
    (common := root / "cell" / "common").mkdir(parents=True)
    for folder in ("spool", "execd", "bin", "utilbin"):
        (root / folder).mkdir()
    for folder in ("bin", "utilbin"):  # Debian has the same programs for each architecture
        architecture = subprocess.run([SHARED / "util" / "arch"], capture_output=True, text=True, check=True)
        (root / folder / architecture.stdout.strip()).symlink_to(PROGRAMS)
    (root / "util").symlink_to(SHARED / "util")
    (common / "bootstrap").write_text(BOOTSTRAP.format(cell=root / "cell", root=root))
    (common / "act_qmaster").write_text("login\n")
    lines = (SHARED / "default-configuration").read_text().splitlines()
    named = {name: value.format(root=root) for name, value in GLOBAL.items()}
    kept = [line for line in lines if line.split() and line.split()[0] not in named]
    (root / "global").write_text("\n".join([*kept, *(" ".join(item) for item in named.items()), ""]))
    spool = f"{root / 'cell' / 'common'};{root / 'spool'}"
    resources = SHARED / "util" / "resources"
    for command in (
        ("spoolinit", "classic", "libspoolc", spool, "init"),
        ("spooldefaults", "configuration", str(root / "global")),
        ("spooldefaults", "complexes", str(resources / "centry")),
        ("spooldefaults", "usersets", str(resources / "usersets")),
        ("spooldefaults", "managers", "root"),
    ):
        made.ask(str(PROGRAMS / command[0]), *command[1:])


def _configure(made: GridEngine, nodes: list[str]) -> None:
    root = made.root

    def changed(shown: str, changes: dict[str, str]) -> str:
        lines = [line for line in shown.splitlines() if line.split() and line.split()[0] not in changes]
        return "\n".join([*lines, *(" ".join(item) for item in changes.items()), ""])

    def given(option: str, content: str) -> None:
        (file := root / f"input{option}").write_text(content)
        made.ask("qconf", option, str(file))

    made.ask("qconf", "-as", "login")
    for name in nodes:
        made.ask("qconf", "-ah", name)
        made.ask("qconf", "-as", name)
    given("-Msconf", changed(made.ask("qconf", "-ssconf"), SCHEDULER))
    for name, rule in (("mpi", "1"), ("one_host", "$pe_slots")):
        given("-Ap", PARALLEL_ENVIRONMENT.format(name=name, rule=rule))
    queue = {"qname": "all.q", "hostlist": " ".join(nodes), "slots": str(SLOTS), **QUEUE}
    given("-Aq", changed(made.ask("qconf", "-sq"), queue))


def _until(is_so) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _start(made: GridEngine, name: str, program: str) -> subprocess.Popen[bytes]:
    """Start a daemon on a host, in the foreground."""
    cluster = made.cluster
    namespace = cluster.nodes[name].namespace
    script = f"hostname {name}; mount --bind /etc/netns/{namespace}/hosts /etc/hosts; "
    return subprocess.Popen(
        [
            *("nsenter", f"--net=/run/netns/{namespace}", "unshare", "-u", "-m"),
            *("sh", "-c", script + cluster.own_tmp() + f"exec {PROGRAMS / program}"),
        ],
        env=environment(**made.variables, SGE_ND="1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
