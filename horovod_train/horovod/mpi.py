"""The MPI library of the engine, the installed engine, and the launcher that started this process.

    installed_plan, horovod_folder         build plan and location of the installed Horovod, without
                                           importing it
    find_mpi, record_mpi, installed_mpi    the MPI library of the engine: found by its compiler wrapper,
                                           identified, and recorded
    started_by, number_of                  the launcher that started this process, from its environment
                                           variables
    refuse_other_launchers, require_world  refuse starts in which each process would train the whole job

Ranks use the MPI library with which the engine was installed. Its name is that of the library, and not of
``mpirun``, because some MPI libraries are started by the launcher of a batch system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from horovod_train.errors import EngineError, UserError

HOROVOD_VERSION = "0.28.1"
PLAN_FILE = "horovod_train_plan.json"
LOOPBACK_LIBRARY = "loopback.so"


def installed_plan() -> dict[str, Any] | None:
    """Return the build plan of the installed engine; None: Horovod is missing or was built otherwise."""
    package = horovod_folder()
    if package is None or not (package / PLAN_FILE).exists():
        return None
    document: dict[str, Any] = json.loads((package / PLAN_FILE).read_text())
    return document


def installed_key() -> str | None:
    """Return the key of the installed engine's build plan; None: there is no plan."""
    plan = installed_plan()
    return None if plan is None else str(plan["key"])


def loopback_library() -> Path | None:
    """Return the library with which mpirun listens on the loopback only; None: the engine has none."""
    folder = horovod_folder()
    library = folder and folder / LOOPBACK_LIBRARY
    return library if library and library.exists() else None


def horovod_folder() -> Path | None:
    """Return the folder of the installed Horovod; None: it is not installed."""
    try:
        return Path(str(metadata.distribution("horovod").locate_file("horovod")))
    except metadata.PackageNotFoundError:
        return None


WRAPPER = "mpicxx"
RECORD = "horovod_train_mpi.json"
TIMEOUT_S = 60
PLACEHOLDER = "I_MPI_SUBSTITUTE_INSTALLDIR"
"""Text in the compiler wrappers of Intel MPI's wheels in place of the value of I_MPI_ROOT."""

SYSTEM_FOLDERS = re.compile(r"/(usr/)?(bin|lib(64|/[\w-]+-linux-gnu)?)")
"""Folders that programs and libraries are found in without variables."""

C_INTERFACE = "-DMPICH_SKIP_MPICXX -DOMPI_SKIP_MPICXX"
"""Compiler options that omit MPI's C++ interface, which is not part of the ABI, and is not used."""

# Begin of MPI_Get_library_version: name of the library, and its version.
_LIBRARIES = (
    ("Open MPI", re.compile(r"Open MPI v([\w.]+)")),
    ("Spectrum MPI", re.compile(r"IBM Spectrum MPI[^\d]*([\w.]+)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library ([\w.]+)")),
    ("Cray MPICH", re.compile(r"CRAY MPICH version ([\w.]+)")),
    ("MVAPICH", re.compile(r"MVAPICH\d?\D*([\w.]+)")),
    ("MPICH", re.compile(r"MPICH Version:\s*([\w.]+)")),
)
_PROGRAM = "#include <mpi.h>\nint main() { int flag; return MPI_Initialized(&flag); }\n"
_VERSION = """
import ctypes, sys
text = ctypes.create_string_buffer(8192)
ctypes.CDLL(sys.argv[1]).MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
print(text.value.decode(errors="replace"))
"""


@dataclass(frozen=True)
class Mpi:
    """An installed MPI library.

    Attributes:
        name: Open MPI, MPICH, Intel MPI, Cray MPICH, MVAPICH or Spectrum MPI.
        version: Version of the library.
        programs: Folder with its compiler wrapper and, usually, ``mpirun``.
        library: Path of the shared library.
        abi: Name by which programs request the library, such as libmpi.so.40.
        interfaces: Interfaces of process managers that the library supports: pmix, pmi2, pmi1, cray_shasta.
    """

    name: str
    version: str
    programs: Path
    library: Path
    abi: str
    interfaces: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def manager(self) -> str:
        """Name of its process manager: orte, prrte, hydra or pals (see ``launch/mpi.py``)."""
        if self.name == "Open MPI":
            return "orte" if int(self.version.partition(".")[0]) < 5 else "prrte"
        return {"Spectrum MPI": "orte", "Cray MPICH": "pals"}.get(self.name, "hydra")

    @property
    def is_for_horovodrun(self) -> bool:
        """Whether horovodrun can start ranks with this MPI library."""
        return self.manager == "orte"

    @property
    def is_in_this_environment(self) -> bool:
        """Whether the library was installed in this Python environment, from a wheel."""
        return self.library.is_relative_to(sys.prefix)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables with which programs and ranks use this MPI library, given an environment."""
        found = {"MPI4PY_LIBMPI": str(self.library)}  # otherwise, mpi4py loads the first one that it finds
        if not SYSTEM_FOLDERS.fullmatch(str(self.programs)):
            found["PATH"] = _prepended(self.programs, environ.get("PATH", os.defpath))
        folders = [] if self.is_in_this_environment else [self.library.parent]
        if self.is_in_this_environment and self.name == "Open MPI":
            # The wheel contains the paths of the machine that built it.
            found["OPAL_PREFIX"] = str(self.programs.parent)
        if self.name == "Intel MPI":
            found["I_MPI_ROOT"] = environ.get("I_MPI_ROOT") or str(self.programs.parent)
            folders = [self.library.parent, *self._libfabric()]  # loaded by name, and not linked
        paths = environ.get("LD_LIBRARY_PATH", "")
        for folder in reversed(folders):
            if not SYSTEM_FOLDERS.fullmatch(str(folder)):
                found["LD_LIBRARY_PATH"] = paths = _prepended(folder, paths)
        return found

    def _libfabric(self) -> list[Path]:
        """Return the folder of the libfabric that Intel MPI comes with, of oneAPI or of its wheel."""
        root = self.programs.parent
        places = [root / "opt" / "mpi" / "libfabric" / "lib", root / "libfabric" / "lib", root / "lib"]
        return [place for place in places if (place / "libfabric.so.1").exists()][:1]


def _prepended(folder: Path, paths: str) -> str:
    others = [path for path in paths.split(os.pathsep) if path and path != str(folder)]
    return os.pathsep.join([str(folder), *others])


def find_mpi(wanted: Path | None = None) -> Mpi | None:
    """Return the MPI library whose compiler wrapper is found first; None: there is none.

    mpicxx (--mpi, or PATH, or this environment) -> trial link -> library, ABI -> name and version -> record

    Args:
        wanted: Compiler wrapper, or the folder of an installation; None: the first wrapper on the PATH
            outside of this Python environment, or else the one in this environment, from a wheel.

    Raises:
        EngineError: ``wanted`` has no wrapper, or the MPI library cannot be used.
    """
    wrapper = find_wrapper(wanted)
    if wrapper is None:
        return None
    library, abi = _linked_library(wrapper)
    name, version = _identify(library, wrapper)
    return Mpi(name, version, wrapper.parent, library, abi, _interfaces(name, library, wrapper))


def find_wrapper(wanted: Path | None = None) -> Path | None:
    """Return the path of the compiler wrapper; arguments and errors are those of ``find_mpi``."""
    own = Path(sys.prefix) / "bin"
    if wanted is not None:
        candidates = [wanted, wanted / WRAPPER, wanted / "bin" / WRAPPER]
        found = next((str(path) for path in candidates if path.is_file() and os.access(path, os.X_OK)), None)
        if found is None:
            raise EngineError(
                f"--mpi {wanted}: there is no {WRAPPER}",
                hint=f"name the folder of an MPI installation, such as /opt/openmpi, or its {WRAPPER}; the "
                "development package of MPI contains it",
            )
        return Path(found).absolute()
    others = [path for path in os.environ.get("PATH", os.defpath).split(os.pathsep) if Path(path) != own]
    on_path = shutil.which(WRAPPER, path=os.pathsep.join(others)) or shutil.which(WRAPPER, path=str(own))
    return None if on_path is None else Path(on_path).absolute()


def wrapper_environment(wrapper: Path) -> dict[str, str]:
    """Return the environment in which a compiler wrapper works, and precedes others on the PATH."""
    environment = {**os.environ, "PATH": _prepended(wrapper.parent, os.environ.get("PATH", os.defpath))}
    if PLACEHOLDER in _text_of(wrapper) + _text_of(wrapper.with_name("mpigxx")):
        environment.setdefault("I_MPI_ROOT", str(wrapper.parent.parent))
    if wrapper.parent == Path(sys.prefix) / "bin":
        environment["OPAL_PREFIX"] = sys.prefix
    return environment


def _text_of(script: Path) -> str:
    try:
        return script.read_bytes()[:65536].decode(errors="replace")
    except OSError:
        return ""


def _linked_library(wrapper: Path) -> tuple[Path, str]:
    """Return the MPI library that a compiler wrapper links, as the dynamic loader finds it, and its ABI."""
    environment = wrapper_environment(wrapper)
    with tempfile.TemporaryDirectory(prefix="horovod-mpi-") as folder:
        program, source = Path(folder) / "trial", Path(folder) / "trial.cc"
        source.write_text(_PROGRAM)
        options = [*C_INTERFACE.split(), "-Wl,--as-needed", "-o", str(program), str(source)]
        done = _run([str(wrapper), *options], environment)
        if done.returncode:
            raise EngineError(
                f"{wrapper} cannot compile a program:\n{done.stderr.strip()}",
                hint="load the compiler of this MPI (`module load`), or name another MPI with --mpi",
            )
        loaded = _run(["ldd", str(program)], environment).stdout
    found = re.search(r"(libmpi\S*\.so\.\d+) => (\S+)", loaded)
    if found is None or found[2] == "not":
        missing = found[1] if found else "libmpi"
        raise EngineError(
            f"{wrapper}: the dynamic loader does not find {missing}",
            hint="load the module of this MPI, or add the folder of its libraries to LD_LIBRARY_PATH",
        )
    return Path(found[2]), found[1]


def _identify(library: Path, wrapper: Path) -> tuple[str, str]:
    done = _run([sys.executable, "-c", _VERSION, str(library)], wrapper_environment(wrapper))
    for name, pattern in _LIBRARIES:
        if found := pattern.search(done.stdout):
            return name, found[1]
    first = (done.stdout or done.stderr).strip().splitlines()
    raise EngineError(
        f"{library} is an unknown MPI library: {first[-1] if first else 'it does not tell its version'}",
        hint=f"supported: {', '.join(name for name, _ in _LIBRARIES)}",
    )


def _interfaces(name: str, library: Path, wrapper: Path) -> tuple[str, ...]:
    """Return the process manager interfaces of an MPI library.

    Open MPI contains PMIx. MPICH contains a client of both versions of PMI, unless it was built with the PMI
    library of a batch system.
    """
    if name in ("Open MPI", "Spectrum MPI"):
        return ("pmix",)
    loaded = _run(["ldd", str(library)], wrapper_environment(wrapper)).stdout
    if "libpmix." in loaded:
        return ("pmix",)
    return ("cray_shasta", "pmi2") if name == "Cray MPICH" else ("pmi2", "pmi1")


def _run(command: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"{command[0]}: {error}") from error


# -- the MPI library of the installed engine


def record_mpi(mpi: Mpi) -> None:
    """Record the MPI library of the installed engine; paths in this environment are stored relative to it."""
    folder = horovod_folder()
    assert folder is not None
    document = {
        "name": mpi.name,
        "version": mpi.version,
        "programs": _relative(mpi.programs),
        "library": _relative(mpi.library),
        "abi": mpi.abi,
        "interfaces": mpi.interfaces,
    }
    (folder / RECORD).write_text(json.dumps(document, indent=2) + "\n")


def installed_mpi() -> Mpi | None:
    """Return the MPI library of the installed engine; None: there is no record, or it cannot be read."""
    folder = horovod_folder()
    if folder is None:
        return None
    try:
        document = json.loads((folder / RECORD).read_text())
        return Mpi(
            document["name"],
            document["version"],
            Path(sys.prefix) / document["programs"],
            Path(sys.prefix) / document["library"],
            document["abi"],
            tuple(document["interfaces"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _relative(path: Path) -> str:
    return str(path.relative_to(sys.prefix) if path.is_relative_to(sys.prefix) else path)


@dataclass(frozen=True)
class Variables:
    """Environment variables of a launcher.

    Attributes:
        program: Name of the launcher.
        size: Number of processes.
        rank: Number of this process.
        local_rank: Number of this process on its host.
        starts_ranks: Whether Horovod can use its processes as ranks.
    """

    program: str
    size: str
    rank: str
    local_rank: str
    starts_ranks: bool = True


# In order of priority, because a launcher may run inside another one, such as mpirun in Slurm.
LAUNCHERS = (
    Variables("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK"),
    Variables("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    Variables("mpiexec", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    Variables("PALS mpiexec", "PALS_SIZE", "PALS_RANKID", "PALS_LOCAL_RANKID"),
    Variables("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    Variables("torchrun or accelerate", "WORLD_SIZE", "RANK", "LOCAL_RANK", starts_ranks=False),
)
# Variables of the interfaces through which MPI libraries receive their rank.
_PMI = ("PMI_FD", "PMI_PORT", "PMI_RANK", "PMI_CONTROL_FD", "PMIX_RANK", "PALS_RANKID")


@dataclass(frozen=True)
class Started:
    """Start of this process by a launcher, with rank ``number`` of ``count`` (the value of ``variable``)."""

    program: str
    number: str
    count: int
    variable: str

    def __str__(self) -> str:
        which = f"number {self.number} of {self.count} ({self.variable})"
        return f"{self.program} has started this process as {which}"


def started_by(environ: Mapping[str, str]) -> Started | None:
    """Return the launcher that has started this process as one of several; None: it is the only one."""
    for each in LAUNCHERS:
        is_one = each.rank in environ and environ.get(each.size, "").isdecimal()
        if is_one and int(environ[each.size]) > 1:
            return Started(each.program, environ[each.rank], int(environ[each.size]), each.size)
        if is_one and each.program in ("horovodrun", "mpirun"):
            return None
    return None


def variables_of(started: Started, environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables by which a launcher was recognized."""
    (row,) = (each for each in LAUNCHERS if each.program == started.program)
    return [name for name in (row.size, row.rank, row.local_rank) if name in environ]


def started_as_one_of_many(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as a rank of a world, possibly of size 1.

    A single Slurm task does not count, because ``srun`` sets its variables for every program.
    """
    return any(
        each.size in environ and not (each.program == "srun" and environ[each.size] == "1")
        for each in LAUNCHERS
        if each.starts_ranks
    )


def number_of(environ: Mapping[str, str], what: str, alone: int) -> int:
    """Return ``rank``, ``size`` or ``local_rank`` of this process from its launcher's variables.

    Args:
        environ: Environment variables.
        what: Name of an attribute of ``Variables``.
        alone: Value without a launcher.

    >>> number_of({"PMI_RANK": "3", "PMI_SIZE": "4"}, "rank", alone=0)
    3
    """
    for each in LAUNCHERS:
        value = environ.get(getattr(each, what), "")
        if each.starts_ranks and value.isdecimal():
            return int(value)
    return alone


def refuse_other_launchers(environ: Mapping[str, str]) -> None:
    """Refuse a start in which each process would be a world of one rank, before Horovod is initialized.

    Ranks that were started by a launcher of another MPI library would each initialize as a world of one
    rank, and train the whole job. That is refused before a framework is imported.

    Raises:
        UserError: The launcher does not belong to the engine's MPI library.
    """
    started, mpi = started_by(environ), installed_mpi()
    if started is None or mpi is None or started.program == "horovodrun":
        return
    is_open_mpi = mpi.name in ("Open MPI", "Spectrum MPI")
    if started.program == "mpirun":
        fits = is_open_mpi
    elif started.program == "srun":
        fits = any(name in environ for name in _PMI)
    elif started.program.startswith("torchrun"):
        fits = False
    else:  # Slurm's interfaces set PMI_RANK as Hydra does
        fits = not is_open_mpi or "PMIX_RANK" in environ or "SLURM_PROCID" in environ
    if not fits:
        raise UserError(
            f"{started}, and the engine uses {mpi}: each process would train alone",
            hint=how_to_start(started, environ),
        )


def require_world(environ: Mapping[str, str], size: int) -> None:
    """Prevent several processes from training the same job independently.

    Args:
        environ: Environment variables, among them those of launchers.
        size: Number of ranks of Horovod.

    Raises:
        UserError: A launcher has started another number of processes.
    """
    started = started_by(environ)
    if started is None or started.count == size:
        return
    ranks = "one rank: each process would train alone" if size == 1 else f"{size} ranks"
    raise UserError(
        f"{started}, but Horovod was initialized with {ranks}", hint=how_to_start(started, environ)
    )


def how_to_start(started: Started, environ: Mapping[str, str]) -> str:
    """Return the commands that start the ranks correctly, instead of a launcher that does not fit."""
    count, mpi = started.count, installed_mpi()
    if "SLURM_JOB_ID" in environ:
        return (
            f"in a Slurm allocation, call `horovod-train run JOB -n {count} --launcher slurm-allocation`, "
            "without srun"
        )
    own = "horovodrun" if mpi is None or mpi.is_for_horovodrun else f"{mpi.programs}/mpirun"
    return (
        f"start the ranks with `horovod-train run JOB -n {count}`, or "
        f"`{own} -np {count} horovod-train worker JOB`"
    )
