"""Properties of the engine's MPI library that are known after it has initialized, in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from horovod_train.horovod.environment import open_mpi_without_ssh
from horovod_train.horovod.mpi import Mpi

TIMEOUT_S = 60
LEVELS = ("single", "funneled", "serialized", "multiple")

# Libraries of fabrics are loaded when MPI initializes; /proc/self/maps has those of this process.
_PROBE = """
import ctypes, json, re, sys
import mpi4py
mpi4py.rc.thread_level = "multiple"
from mpi4py import MPI
maps = open("/proc/self/maps").read()
library = re.search(r"\\S+/libmpi\\S*\\.so[.\\d]*$", maps, re.MULTILINE)
fabrics = {"libucp": "UCX", "libfabric": "libfabric", "libpsm2": "PSM2", "libpsm3": "PSM3"}
query = getattr(ctypes.CDLL(sys.argv[1]), "MPIX_Query_cuda_support", None)
print(json.dumps({
    "mpi4py": mpi4py.__version__,
    "library": library[0] if library else "",
    "version": MPI.Get_library_version().splitlines()[0].split(",")[0],
    "threads": MPI.Query_thread(),
    "fabrics": sorted({text for name, text in fabrics.items() if "/" + name in maps}),
    "is_gpu_aware": bool(query is not None and query()),
}))
"""


@dataclass(frozen=True)
class MpiDetails:
    """Properties of an initialized MPI library.

    Attributes:
        mpi4py: Version of mpi4py.
        library: Path of the library that mpi4py has loaded.
        version: First words of the library about itself.
        threads: Thread support: single, funneled, serialized or multiple.
        fabrics: Fabric libraries that it has loaded, such as UCX and libfabric.
        is_gpu_aware: Whether messages may be in the memory of a GPU.
    """

    mpi4py: str
    library: str
    version: str
    threads: str
    fabrics: tuple[str, ...]
    is_gpu_aware: bool


def probe_mpi(mpi: Mpi) -> MpiDetails | str:
    """Return the properties of an MPI library, or the reason for which it does not initialize."""
    environment = {**open_mpi_without_ssh(), **os.environ, **mpi.environment(os.environ)}
    command = [sys.executable, "-c", _PROBE, str(mpi.library)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return f"no answer within {TIMEOUT_S} s"
    except (IndexError, ValueError):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {done.returncode}"
    return MpiDetails(**{**found, "threads": LEVELS[found["threads"]], "fabrics": tuple(found["fabrics"])})
