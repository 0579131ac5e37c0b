"""The ssh configuration of a run, and explanations of ssh errors."""

from __future__ import annotations

import re

from horovod_train import __version__
from horovod_train.config.launch import Ssh
from horovod_train.errors import LostError

CONNECT_TIMEOUT_S = 10
SSH_FAILED = 255


def ssh_config(ssh: Ssh) -> str:
    """Return an ssh configuration: the options of the job, then the files of the user and of the system.

    A broken connection is detected within 15 seconds. The user's settings apply to the check of host keys.
    """
    ssh_options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(CONNECT_TIMEOUT_S),
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        **({"Port": str(ssh.port)} if ssh.port is not None else {}),
        **({"User": ssh.user} if ssh.user is not None else {}),
        **({"IdentityFile": ssh.identity_file, "IdentitiesOnly": "yes"} if ssh.identity_file else {}),
    }
    lines = [f"{name} {value}" for name, value in {**ssh_options, **ssh.options}.items()]
    return "\n".join(["Host *", *lines, "Include ~/.ssh/config", "Include /etc/ssh/ssh_config", ""])


def is_of_another_version(stderr: str) -> bool:
    """Return whether an error of Python means that another version of this package is installed."""
    # On the host, the module does not exist, or its parent is a plain module instead of a package.
    return re.search(r"(No module named|not found on) '?horovod_train\.", stderr) is not None


def other_version(host: str, version: str) -> LostError:
    """Return the error for a host that has another version of this package."""
    remote = version or "of another version"
    return LostError(
        f"{host}: horovod_train is {remote} on this host and {__version__} on the launching machine; "
        "the two are "
        "incompatible",
        hint="install the same version on all hosts",
        hosts=[host],
    )


def explain(host: str, code: int, stderr: str, python: str) -> LostError:
    """Return the error for a Python program that could not be started on a host.

    ``code`` is the exit code of ssh: 255 is an error of ssh, other codes are those of the program.
    """
    last = stderr.strip().splitlines()[-1] if stderr.strip() else f"exit code {code}"
    for sign, what, fix in _SSH_MESSAGES if code == SSH_FAILED else _SHELL_MESSAGES:
        if sign in stderr:
            return LostError(
                f"{host}: {what.format(host=host, python=python)} ({last})",
                hint=fix.format(host=host, python=python),
                hosts=[host],
            )
    where = "ssh failed" if code == SSH_FAILED else f"{python} -m horovod_train does not start"
    return LostError(
        f"{host}: {where}: {last}",
        hint=f"try `ssh {host} {python} -m horovod_train --version`",
        hosts=[host],
    )


_KEYS = "ssh-keyscan {host} >> ~/.ssh/known_hosts, after comparing its fingerprint"
_NEW_KEYS = "if the host has a new key: ssh-keygen -R {host}; " + _KEYS
_LET_IN = "ssh-copy-id {host}, or set launch.ssh.identity_file or launch.ssh.user"
_ENVIRONMENT = (
    "install the same environment at the same path there, or say where it is: "
    "launch.host_settings.{host}.python"
)
# Text in the output of ssh, explanation, hint.
_SSH_MESSAGES = (
    ("IDENTIFICATION HAS CHANGED", "its host key is not the one known", _NEW_KEYS),
    ("Host key verification failed", "its host key is not known", _KEYS),
    ("UNPROTECTED PRIVATE KEY", "the key may be read by others, so ssh ignores it", "chmod 600 the key"),
    ("Permission denied", "authentication failed", _LET_IN),
    (
        "Could not resolve hostname",
        "unknown host name",
        "correct it, or add it to DNS or /etc/hosts",
    ),
    ("Connection refused", "nothing listens there", "start sshd, or set launch.ssh.port"),
    ("timed out", "it does not answer", "is it up? is a firewall in the way? `ping {host}`"),
    ("No route to host", "it cannot be reached", "is it up? `ip route get {host}`"),
    ("Network is unreachable", "no route to its network", "`ip route get {host}`"),
)
_SHELL_MESSAGES = (
    ("No module named", "{python} has no horovod_train", _ENVIRONMENT),
    ("not found", "there is no {python}", _ENVIRONMENT),
    ("No such file", "there is no {python}", _ENVIRONMENT),
    ("Permission denied", "{python} may not be executed", _ENVIRONMENT),
)
