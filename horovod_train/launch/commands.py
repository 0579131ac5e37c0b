"""Calls of programs of the system, such as those of a batch system."""

from __future__ import annotations

import shutil
import subprocess

from horovod_train.errors import LaunchError, UnansweredError
from horovod_train.horovod.toolchain import programs_path

TIMEOUT_S = 30.0


def find_program(name: str, *, hint: str) -> str:
    """Return the path of a program in this Python environment, or else on PATH.

    Raises:
        LaunchError: The program is not installed.
    """
    found = shutil.which(name, path=programs_path())
    if found is None:
        raise LaunchError(f"{name} is not installed here", hint=hint)
    return found


def call(*command: str, hint: str = "", with_errors: bool = False) -> str:
    """Run a command, and return its output.

    Args:
        command: Program and arguments.
        hint: Action for the user if the command does not respond.
        with_errors: Return its standard error, too.

    Raises:
        LaunchError: The program is not installed, does not respond, or fails; contains its message.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as error:
        raise LaunchError(
            f"{command[0]} is not installed here", hint="call this on a login node of the cluster"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UnansweredError(f"{command[0]} did not answer within {TIMEOUT_S:g} s", hint=hint) from error
    if done.returncode:
        # Grid Engine prints some errors to standard output.
        message = done.stderr.strip() or done.stdout.strip()
        raise LaunchError(f"{command[0]}: {message or f'exit code {done.returncode}'}")
    return done.stdout + done.stderr * with_errors
