"""A Flux that is none: ``flux`` with the verbs that launchers call, as that of flux-core answers.

Source: manual pages and src/broker of flux-core. Jobs stay in the queue until ``start`` is called. Then the
script runs on this machine, alone in its session, with this program as its instance.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PREFIX = "\u0192"  # of job IDs in base 58
PARENT = "STUB_OF_FLUX"


class Flux:
    """The state of all jobs, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, bin_folder: Path) -> None:
        """Write the program ``flux``."""
        bin_folder.mkdir(exist_ok=True)
        program = bin_folder / "flux"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
        program.chmod(0o755)

    def job(self, job_id: int) -> dict:
        return json.loads((self.folder / f"job-{job_id}.json").read_text())

    def change(self, job_id: int, **fields) -> None:
        path = self.folder / f"job-{job_id}.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        path.with_suffix(".new").write_text(json.dumps({**before, **fields}))
        path.with_suffix(".new").replace(path)

    def ids(self) -> list[int]:
        return sorted(int(path.stem.partition("-")[2]) for path in self.folder.glob("job-*.json"))

    def start(self, job_id: int, hosts: str, **env: str) -> subprocess.Popen:
        """Run the script of a job; its end is noted by ``ended``."""
        job = self.job(job_id)
        with (self.folder / f"job-{job_id}.out").open("ab") as output:
            process = subprocess.Popen(
                ["/bin/bash", job["script"], *job["arguments"]],
                env={
                    **os.environ, PARENT: str(self.folder), "FLUX_URI": f"local:///{job_id}",
                    "STUB_HOSTS": hosts, **env,
                },
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self.change(job_id, state="RUN")
        return process

    def ended(self, job_id: int, code: int) -> None:
        result = "COMPLETED" if code == 0 else "FAILED"
        self.change(job_id, state="INACTIVE", result=result, returncode=code)


def fail(text: str) -> None:
    sys.stderr.write(f"flux: ERROR: {text}\n")
    sys.exit(1)


def split(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return options and the rest, which begins with the first word that is no option."""
    options: dict[str, str] = {}
    rest = list(argv)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if name in ("-o", "--rank") and not equals:
            value = rest.pop(0)
        options[name] = value
    return options, rest


def as_number(text: str) -> int:
    return int(text.removeprefix(PREFIX).removeprefix("f"))


def batch(flux: Flux, argv: list[str]) -> None:
    options, (script, *arguments) = split(argv)
    job_id = 1000 + len(flux.ids())
    copy = flux.folder / f"script-{job_id}"
    copy.write_text(Path(script).read_text())
    dependency = options.get("--dependency", "")
    flux.change(
        job_id, name=options.get("--job-name", Path(script).name), state="DEPEND" if dependency else "SCHED",
        result="", returncode="", note="", duration=0.0, script=str(copy), arguments=arguments,
        options=options,
    )  # fmt: skip
    print(f"{PREFIX}{job_id}")


def jobs(flux: Flux, argv: list[str]) -> None:
    options, given = split(argv)
    found = [as_number(each) for each in given] or flux.ids()
    for job_id in found:
        if job_id not in flux.ids():
            fail(f"JobID {job_id} unknown")
        job = flux.job(job_id)
        if "--name" in options and job["name"] != options["--name"]:
            continue
        values = {
            "{id.dec}": job_id, "{state}": job["state"], "{result}": job["result"],
            "{returncode}": job["returncode"], "{exception.note}": job["note"], "{duration}": job["duration"],
        }  # fmt: skip
        line = options["--format"]
        for name, value in values.items():
            line = line.replace(name, str(value))
        print(line)


def cancel(flux: Flux, argv: list[str]) -> None:
    (given,) = argv
    flux.change(as_number(given), state="INACTIVE", result="CANCELED", returncode=-128)


def run_inside(flux: Flux, argv: list[str]) -> None:
    """flux proxy ID COMMAND: with the job's instance."""
    job_id, *command = argv
    if flux.job(as_number(job_id))["state"] != "RUN":
        fail(f"job {job_id} is not running")
    os.environ["FLUX_URI"] = f"local:///{as_number(job_id)}"
    os.execvp(command[0], command)  # noqa: S606


def execute(_: Flux, argv: list[str]) -> None:
    """flux exec: on the broker of this machine, with its standard input."""
    options, command = split(argv)
    assert options["--rank"].isdecimal(), options
    os.execvp(command[0], command)  # noqa: S606


def hostlist(_: Flux, argv: list[str]) -> None:
    options, sources = split(argv)
    assert sources == ["instance"], sources
    hosts = os.environ["STUB_HOSTS"].split()
    print(hosts.index(options["--find"]) if "--find" in options else " ".join(hosts))


def kvs(flux: Flux, argv: list[str]) -> None:
    verb, given = argv
    instance = os.environ["FLUX_URI"].rpartition("/")[2]
    key, _, value = given.partition("=")
    place = flux.folder / f"kvs-{instance}-{key}"
    if verb == "put":
        place.write_text(value)
    else:
        print(place.read_text())


def getattr_(_: Flux, argv: list[str]) -> None:
    assert argv == ["jobid"]
    print(PREFIX + os.environ["FLUX_URI"].rpartition("/")[2])


def job_id(_: Flux, argv: list[str]) -> None:
    assert argv[:2] == ["id", "--to=dec"], argv
    print(as_number(argv[2]))


VERBS = {
    "batch": batch, "jobs": jobs, "cancel": cancel, "proxy": run_inside, "exec": execute, "kvs": kvs,
    "hostlist": hostlist, "getattr": getattr_, "job": job_id,
}  # fmt: skip

if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--parent"]
    VERBS[words[0]](Flux(Path(os.environ[PARENT])), words[1:])
