"""A container runtime for tests, which behaves as Apptainer 1.3 does with a site's usual configuration.

    apptainer exec [--bind FOLDER[:INSIDE[:ro]]] [--nv] [--rocm] [--env NAME=VALUE] IMAGE COMMAND...

The image is a folder. Its file ``mounts`` lists folders of this machine that are its content. Only these,
/tmp and folders that are bound exist inside. Processes, network and /dev/shm are those of the host; PATH and
LD_LIBRARY_PATH are the container's; other variables pass. The runtime stays the parent of the command, passes
signals on to it, and ends as it does. Needs root.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

NEW_MOUNTS = 0x00020000
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHARED = ("/proc", "/dev", "/sys", "/tmp")  # noqa: S108


def fatal(text: str) -> None:
    sys.exit(f"FATAL:   {text}")


def parsed(argv: list[str]) -> tuple[list[str], dict[str, str], str, list[str]]:
    binds, variables, words = [], {}, list(argv)
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option == "--bind":
            binds.append(words.pop(0))
        elif option == "--env":
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        elif option not in ("--nv", "--rocm"):
            sys.exit(f'Error for command "exec": unknown flag: {option}')
    return binds, variables, words[0], words[1:]


def enter(image: Path, binds: list[str]) -> None:
    """Make the image the root folder of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS):
        fatal("container creation failed: not permitted")

    def mount(*arguments: str) -> None:
        subprocess.run(["mount", *arguments], check=True)

    cwd = Path.cwd()
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "tmpfs", "/mnt")
    for folder in [*SHARED, *(image / "mounts").read_text().split()]:
        place = Path("/mnt" + folder)
        if Path(folder).is_symlink():  # /bin is usr/bin
            place.symlink_to(Path(folder).readlink())
            continue
        place.mkdir(parents=True, exist_ok=True)  # it may be in /tmp
        mount("--rbind", folder, str(place))
    for bind in binds:
        source, inside, *options = [*bind.split(":"), bind.split(":")[0]][: max(2, bind.count(":") + 1)]
        if not Path(source).exists():
            fatal(
                f"container creation failed: mount {source}->{inside} error: while mounting {source}: "
                f"mount source {source} doesn't exist"
            )
        Path("/mnt" + inside).mkdir(parents=True, exist_ok=True)
        mount("--bind", source, "/mnt" + inside)
        if "ro" in options:
            mount("-o", "remount,ro,bind", "/mnt" + inside)
    os.chroot("/mnt")
    os.chdir(cwd if cwd.is_dir() else "/")


def main() -> None:
    assert sys.argv[1] == "exec"
    binds, variables, name, command = parsed(sys.argv[2:])
    image = Path(name)
    if not image.exists():
        fatal(f"could not open image {image}: failed to retrieve path for {image}: no such file or directory")
    kept = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    inside = {"PATH": PATH, "LD_LIBRARY_PATH": "/.singularity.d/libs", "APPTAINER_CONTAINER": str(image)}
    child = os.fork()
    if child == 0:
        enter(image, binds)
        os.execvpe(command[0], command, {**kept, **inside, **variables})  # noqa: S606
    for number in set(signal.Signals) - {signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, lambda received, _: os.kill(child, received))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
