"""A PBS of two nodes that is none: qsub, qstat, qsig and qdel as OpenPBS 23.06 answers them.

What it does was measured on OpenPBS itself: a program after ``--`` is the leader of a session on the first
node, with few variables and in the home folder; qsig reaches the processes of that session only; a walltime
ends with SIGTERM and, ten seconds later, SIGKILL; qrerun is for operators. What OpenPBS refuses is refused
in its words and with its exit codes; options that this one does not know are refused, too.
"""

from __future__ import annotations

import getopt
import json
import os
import pwd
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import psutil

from support.cluster import Cluster

KILL_DELAY_S = 10.0
QSUB_OPTIONS = "a:A:c:C:e:fhIj:J:k:l:m:M:N:o:p:q:r:R:S:u:v:VW:XzP:"
QUEUES = {"workq"}
_CLIENT = """#!{python}
import json, os, pathlib, sys, time
folder = pathlib.Path("{folder}")
name = f"{{os.getpid()}}-{{time.time_ns()}}"
request = {{"argv": [os.path.basename(sys.argv[0]), *sys.argv[1:]], "host": os.uname().nodename}}
(folder / "requests" / f"{{name}}.new").write_text(json.dumps(request))
(folder / "requests" / f"{{name}}.new").rename(folder / "requests" / f"{{name}}.json")
answer = folder / "answers" / f"{{name}}.json"
while not answer.exists():
    time.sleep(0.01)
code, out, err = json.loads(answer.read_text())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


@dataclass
class BatchJob:
    """One job, with the attributes that qstat prints."""

    number: int
    argv: list[str]
    attributes: dict[str, str]
    variables: dict[str, str]
    hosts: list[str]
    after: str = ""
    walltime_s: float = float("inf")
    process: subprocess.Popen[bytes] | None = None
    begun_s: float = 0.0
    ended_by_s: float = float("inf")

    @property
    def id(self) -> str:
        return f"{self.number}.login"

    def signal(self, number: int) -> int:
        """Send a signal to the session of the job on its first node; return the number of processes."""
        reached = 0
        for pid in psutil.pids():
            with suppress(ProcessLookupError, PermissionError):
                if self.process is not None and os.getsid(pid) == self.process.pid:
                    os.kill(pid, number)
                    reached += 1
        return reached


class RefusedError(Exception):
    """What a command of PBS says before it exits."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass
class Pbs:
    """The cluster's PBS."""

    cluster: Cluster
    folder: Path
    jobs: dict[str, BatchJob] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """What its commands need."""
        return {
            "PBS_CONF_FILE": str(self.folder / "pbs.conf"),
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
        }

    def ask(self, *command: str, check: bool = True) -> str:
        """Run one of its commands on the login host."""
        done = self.cluster.on_login(*command, cwd=self.folder, env=self.variables, timeout_s=30)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def serve(self, is_over: Event) -> None:
        """Answer requests, start jobs, and end them."""
        while not is_over.wait(0.02):
            for path in sorted((self.folder / "requests").glob("*.json")):
                request = json.loads(path.read_text())
                path.unlink()
                (new := self.folder / "answers" / f"{path.stem}.new").write_text(
                    json.dumps(self.answer(**request))
                )
                new.rename(new.with_suffix(".json"))
            for job in list(self.jobs.values()):
                self._advance(job)

    def answer(self, argv: list[str], host: str) -> tuple[int, str, str]:
        try:
            printed = getattr(self, f"_{argv[0]}")(argv[1:], host)
        except RefusedError as refused:
            return refused.code, "", f"{argv[0]}: {refused}\n"
        except getopt.GetoptError as error:
            return 2, "", f"{argv[0]}: {error}\nusage: {argv[0]} ...\n"
        return 0, printed, ""

    def _find(self, job_id: str) -> BatchJob:
        if job_id not in self.jobs:
            raise RefusedError(153, f"Unknown Job Id {job_id}")
        return self.jobs[job_id]

    def _qsub(self, argv: list[str], host: str) -> str:
        options, rest = getopt.getopt(argv[: argv.index("--")] if "--" in argv else argv, QSUB_OPTIONS)
        assert "--" in argv, "this PBS runs programs only, which no login shell starts"
        assert not rest
        last = dict(options)
        if not re.fullmatch(r"[A-Za-z0-9_+.-]{1,230}", last.get("-N", "STDIN")):
            raise RefusedError(2, "illegal -N value")
        if last.get("-q", "workq") not in QUEUES:
            raise RefusedError(170, "Unknown queue")
        resources = dict(value.split("=", 1) for name, value in options if name == "-l")
        assert resources.keys() <= {"select", "place", "walltime"}
        job = BatchJob(
            number=len(self.jobs),
            argv=argv[argv.index("--") + 1 :],
            attributes={"Job_Name": last.get("-N", "STDIN"), "job_state": "Q", "substate": "10"},
            variables=dict(item.split("=", 1) for item in last.get("-v", "").split(",") if item),
            hosts=self._placed(resources),
        )
        job.attributes |= {f"Resource_List.{name}": value for name, value in resources.items()}
        job.attributes |= {"Output_Path": f"{host}:{last['-o']}", "Submit_arguments": " ".join(argv)}
        assert (last["-j"], last["-k"], last["-r"]) in {("oe", "oed", "y"), ("oe", "oed", "n")}
        if "walltime" in resources:
            hours, minutes, seconds = map(int, resources["walltime"].split(":"))
            job.walltime_s = 3600 * hours + 60 * minutes + seconds
        if "-h" in last:
            job.attributes |= {"job_state": "H", "substate": "20", "Hold_Types": "u"}
        if "-W" in last:
            kind, job.after = last["-W"].removeprefix("depend=").split(":", 1)
            assert kind == "afterany"
            job.attributes |= {"job_state": "H", "substate": "22", "Hold_Types": "s"}
        self.jobs[job.id] = job
        return f"{job.id}\n"

    def _placed(self, resources: dict[str, str]) -> list[str]:
        """Hosts of ranks: a chunk on each node with ``scatter``, and else on nodes that are filled."""
        nodes = [name for name in self.cluster.nodes if name != "login"]
        hosts, place = [], 0
        for part in resources["select"].split("+"):
            count, *needs = part.split(":")
            needed = dict(need.split("=") for need in needs)
            for _ in range(int(count)):
                hosts += [nodes[place]] * int(needed["mpiprocs"])
                place += resources.get("place") == "scatter"
        return hosts

    def _qstat(self, argv: list[str], host: str) -> str:
        options, ids = getopt.getopt(argv, "xf")
        has_history = ("-x", "") in options
        assert ("-f", "") in options
        jobs = [self._find(job_id) for job_id in ids] or list(self.jobs.values())
        for job in jobs:
            if ids and job.attributes["job_state"] == "F" and not has_history:
                raise RefusedError(
                    35, f"{job.id} Job has finished, use -x or -H to obtain historical job information"
                )
        return "".join(_printed(job) for job in jobs if has_history or job.attributes["job_state"] != "F")

    def _qsig(self, argv: list[str], host: str) -> str:
        options, ids = getopt.getopt(argv, "s:")
        job = self._find(ids[0])
        if job.attributes["job_state"] == "F":
            raise RefusedError(35, "Job has finished")
        if job.attributes["job_state"] != "R":
            raise RefusedError(168, f"Request invalid for state of job {job.id}")
        job.signal(signal.Signals[dict(options)["-s"]])
        return ""

    def _qdel(self, argv: list[str], host: str) -> str:
        job = self._find(argv[0])
        if job.attributes["job_state"] == "F":
            raise RefusedError(35, "Job has finished")
        comment = job.attributes.get("comment", "Job")
        job.attributes["comment"] = f"{comment} and terminated by root@{host}"
        if job.process is None:
            job.attributes |= {"job_state": "F", "substate": "91"}
        else:
            job.signal(signal.SIGTERM)
            job.ended_by_s = time.monotonic() + KILL_DELAY_S
        return ""

    def _advance(self, job: BatchJob) -> None:
        state, now_s = job.attributes["job_state"], time.monotonic()
        if state == "H" and job.after and self.jobs[job.after].attributes["job_state"] == "F":
            state = job.attributes["job_state"] = "Q"
        if state == "Q":
            self._start(job)
        if state != "R" or job.process is None:
            return
        if now_s > job.begun_s + job.walltime_s and job.ended_by_s == float("inf"):
            job.signal(signal.SIGTERM)
            job.ended_by_s = now_s + KILL_DELAY_S
        if now_s > job.ended_by_s:
            job.signal(signal.SIGKILL)
        if (code := job.process.poll()) is not None:
            job.signal(signal.SIGKILL)  # what is left of the session, on the first node
            is_late = now_s > job.begun_s + job.walltime_s
            status = -29 if is_late else code if code >= 0 else 256 - code
            job.attributes |= {"job_state": "F", "substate": "92" if status == 0 else "93"}
            job.attributes["Exit_status"] = str(status)

    def _start(self, job: BatchJob) -> None:
        user = pwd.getpwuid(os.getuid())
        (nodefile := self.folder / f"nodefile-{job.number}").write_text(
            "".join(f"{host}\n" for host in job.hosts)
        )
        sshd = self.cluster.nodes[job.hosts[0]].sshd
        assert sshd is not None
        of_job = {"PBS_JOBID": job.id, "PBS_NODEFILE": str(nodefile), "PBS_ENVIRONMENT": "PBS_BATCH"}
        of_user = {
            "HOME": user.pw_dir,
            "USER": user.pw_name,
            "LOGNAME": user.pw_name,
            "PATH": "/bin:/usr/bin",
        }
        output = Path(job.attributes["Output_Path"].split(":", 1)[1])
        with output.open("ab") as log:  # it is an error if the folder does not exist
            job.process = subprocess.Popen(
                ["nsenter", "-t", str(sshd.pid), "-n", "-m", "-u", f"--wd={user.pw_dir}", *job.argv],
                env={**of_user, **of_job, "PBS_CONF_FILE": self.variables["PBS_CONF_FILE"], **job.variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        job.begun_s = time.monotonic()
        job.attributes |= {"job_state": "R", "substate": "42", "stime": time.ctime()}
        job.attributes["comment"] = (
            f"Job run at {time.ctime()} on {'+'.join(f'({host}:ncpus=1)' for host in job.hosts)}"
        )


def _printed(job: BatchJob) -> str:
    """The job as ``qstat -f`` prints it: long lines are broken, and continued after a tab."""
    lines = []
    for name, value in job.attributes.items():
        line = f"    {name} = {value}"
        pieces = [line[:78], *(line[at : at + 70] for at in range(78, len(line), 70))]
        lines.append("\n\t".join(pieces))
    return f"Job Id: {job.id}\n" + "\n".join(lines) + "\n\n"


@contextmanager
def pbs_on(cluster: Cluster) -> Iterator[Pbs]:
    """Start PBS, and end it."""
    folder = cluster.folder / "pbs"
    for name in ("bin", "requests", "answers"):
        (folder / name).mkdir(parents=True)
    for name in ("qsub", "qstat", "qsig", "qdel"):
        (program := folder / "bin" / name).write_text(_CLIENT.format(python=sys.executable, folder=folder))
        program.chmod(0o755)
    (folder / "pbs.conf").write_text(f"PBS_EXEC={folder}\nPBS_SERVER=login\n")
    made, is_over = Pbs(cluster, folder), Event()
    server = Thread(target=made.serve, args=(is_over,))
    server.start()
    try:
        yield made
    finally:
        is_over.set()
        server.join()
        for job in made.jobs.values():
            job.signal(signal.SIGKILL)
