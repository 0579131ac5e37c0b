"""Detection of CUDA and NCCL for the engine's build: from the system, or from NVIDIA's wheels on PyPI.

PyTorch from PyPI depends on wheels of CUDA's runtime and NCCL. CUDA's compiler is in another wheel:
``toolkit_requirement`` returns its requirement. The file layout of these wheels differs from that of a system
toolkit, which builds expect. ``as_toolkit`` creates that layout with links.
"""

from __future__ import annotations

import ast
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from horovod_train.errors import EngineError

NCCL_LIBRARIES = ("libnccl.so.2", "libnccl.so")
FIRST_ON_PYPI = 13
"""First major version of CUDA whose compiler is in NVIDIA's wheels."""

SYSTEM_TOOLKIT = Path("/usr/local/cuda")
NVCC_TIMEOUT_S = 120.0
TOOLKIT_PARTS = {
    "compiler (bin/nvcc)": ("bin/nvcc",),
    "header (include/cuda_runtime.h)": ("include/cuda_runtime.h", "targets/*/include/cuda_runtime.h"),
    "library (libcudart.so)": tuple(
        f"{folder}/libcudart.so*" for folder in ("lib64", "lib", "lib/*-linux-gnu", "targets/*/lib")
    ),
}
"""Parts of a toolkit that a build requires, each with path patterns of which one must match."""

NOT_EMULATED = 70
"""Kernels for older architectures than this one (Volta) are compiled only if this machine has such a GPU."""


@dataclass(frozen=True)
class TorchBuild:
    """Version of the installed PyTorch (``2.13.0+cu130``) and of its CUDA (``13.0``; empty: none)."""

    version: str
    cuda: str


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: its folder, which contains ``bin/nvcc``, and the compiler's version (``13.0``)."""

    home: Path
    version: str

    @property
    def nvcc(self) -> Path:
        """Path of the compiler."""
        return self.home / "bin" / "nvcc"


@dataclass(frozen=True)
class Nccl:
    """An NCCL: folder of its header, shared library to link, and version in the header."""

    include: Path
    library: Path
    version: str


def torch_build() -> TorchBuild | None:
    """Return the build of PyTorch, without importing it; None: it is not installed.

    The distribution's metadata does not contain the build: a wheel from PyPI has version 2.13.0 for any CUDA.
    """
    try:
        distribution = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None
    try:
        text = Path(str(distribution.locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except OSError:
        return TorchBuild(distribution.version, "")
    found = {"__version__": distribution.version, "cuda": ""}
    for name, value in re.findall(r"^(__version__|cuda)(?:\s*:[^=\n]+)?\s*=\s*(.+)$", text, re.MULTILINE):
        found[name] = str(ast.literal_eval(value) or "")
    return TorchBuild(found["__version__"], found["cuda"])


def find_toolkit(torch: TorchBuild) -> Toolkit | None:
    """Return the toolkit with the major version of PyTorch's CUDA; None: there is none with a compiler.

    A toolkit named by an environment variable has priority. Without one, the candidates are NVIDIA's wheels,
    ``nvcc`` on the PATH, and the system's toolkit, in this order, if they have all parts.

    Raises:
        EngineError: The named toolkit lacks a part, or has another major version.
    """
    if not torch.cuda:
        return None
    for variable in ("HOROVOD_CUDA_HOME", "CUDA_HOME"):
        if named := os.environ.get(variable):
            return _named_toolkit(variable, Path(named), torch)
    homes = [
        *(folder / f"cu{torch.cuda.partition('.')[0]}" for folder in _nvidia_wheels()),
        *_homes_of_nvcc(),
        SYSTEM_TOOLKIT,
    ]
    whole = (home for home in homes if not missing_part(home))
    found = (Toolkit(home, version) for home in whole if (version := _nvcc_version(home)))
    return next((toolkit for toolkit in found if _same_major(toolkit.version, torch.cuda)), None)


def _homes_of_nvcc() -> list[Path]:
    """Return the toolkit folder of the ``nvcc`` on the PATH, if there is one.

    That ``nvcc`` may be a script (environment modules, ccache, Debian). The compiler prints its folder as
    TOP, which CMake uses too.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return []
    _, words = _run_nvcc(nvcc, "-v", "none")
    printed = re.search(r"^#\$ TOP=(.+)$", words, re.MULTILINE)
    return [Path(printed[1].strip()).resolve() if printed else Path(nvcc).resolve().parent.parent]


def _run_nvcc(nvcc: Path | str, *arguments: str, folder: Path | None = None) -> tuple[int, str]:
    """Run nvcc; return exit status and output, or -1 and the error if it cannot be executed or times out."""
    command = [str(nvcc), *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=NVCC_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return -1, str(error)
    return done.returncode, done.stdout + done.stderr


def missing_part(home: Path) -> str:
    """Return the first part of a toolkit that is missing in a folder; empty: none."""
    for part, files in TOOLKIT_PARTS.items():
        if not any(next(home.glob(file), None) for file in files):
            return part
    return ""


def failed_trial(toolkit: Toolkit) -> str:
    """Compile and link an empty kernel; return the compiler's error output, empty if it succeeds."""
    with tempfile.TemporaryDirectory(prefix="horovod-nvcc-") as scratch:
        folder = Path(scratch)
        (folder / "trial.cu").write_text("__global__ void kernel() {}\nvoid run() { kernel<<<1, 1>>>(); }\n")
        nvcc = as_toolkit(toolkit, folder / "cuda") / "bin" / "nvcc"
        host = os.environ.get("CXX", "g++")
        code, words = _run_nvcc(
            nvcc, "-ccbin", host, "-shared", "-Xcompiler", "-fPIC", "trial.cu", folder=folder
        )
    return (words.strip()[-500:] or f"it ended with code {code}") if code else ""


def _named_toolkit(variable: str, home: Path, torch: TorchBuild) -> Toolkit:
    lacks = missing_part(home)
    version = "" if lacks else _nvcc_version(home)
    if not version:
        raise EngineError(
            f"{variable} is {home}, which lacks {lacks or f'a working {home}/bin/nvcc'}",
            hint=f"set {variable} to a CUDA toolkit with its compiler, or leave it out",
        )
    if not _same_major(version, torch.cuda):
        raise EngineError(
            f"{variable} is {home} with CUDA {version}, and PyTorch {torch.version} needs CUDA {torch.cuda}",
            hint=f"set {variable} to a toolkit of CUDA {torch.cuda}; or leave it out: {how_to_get_it(torch)}",
        )
    return Toolkit(home, version)


def _same_major(version: str, other: str) -> bool:
    """Return whether major versions are equal: CUDA guarantees compatibility of minor versions."""
    return version.partition(".")[0] == other.partition(".")[0]


def _nvcc_version(home: Path) -> str:
    code, words = _run_nvcc(home / "bin" / "nvcc", "--version")
    release = re.search(r"release ([\d.]+)", words)
    return release[1] if release and code == 0 else ""


def toolkit_requirement() -> str:
    """Return the pip requirement of the CUDA compiler for PyTorch: wheels of the same version."""
    try:
        version = metadata.version("cuda-toolkit")
    except metadata.PackageNotFoundError:
        torch = torch_build()
        version = f"{torch.cuda if torch and torch.cuda else '13.0'}.*"
    return f"cuda-toolkit[nvcc,cudart,cccl]=={version}"


def how_to_get_it(torch: TorchBuild) -> str:
    """Return human-readable instructions for installing the CUDA compiler for PyTorch."""
    if has_compiler_in_wheels(torch):
        return f"pip install '{toolkit_requirement()}'"
    return (
        f"install NVIDIA's CUDA toolkit {torch.cuda} and set HOROVOD_CUDA_HOME to its folder: PyPI has its "
        f"compiler from CUDA {FIRST_ON_PYPI} on"
    )


def has_compiler_in_wheels(torch: TorchBuild) -> bool:
    """Whether PyPI has the compiler of PyTorch's CUDA: wheels of CUDA 12 contain only ptxas."""
    return int(torch.cuda.partition(".")[0]) >= FIRST_ON_PYPI


def missing_requirement(*, for_other_machines: bool = False) -> str:
    """Return the pip requirement that a build for GPUs lacks; empty: none.

    If this machine has no GPU, nothing is required, unless ``for_other_machines`` is True (for an image).

    Raises:
        EngineError: The compiler is missing, and PyPI does not have it.
    """
    torch = torch_build()
    if torch is None or not torch.cuda or not (for_other_machines or gpu_architectures()):
        return ""
    if find_toolkit(torch) is not None:
        return ""
    if not has_compiler_in_wheels(torch):
        raise EngineError(
            f"there is no compiler for PyTorch {torch.version}'s CUDA {torch.cuda}", hint=how_to_get_it(torch)
        )
    return toolkit_requirement()


def find_nccl() -> Nccl | None:
    """Return the NCCL to build with; None: there is none with a header.

    HOROVOD_NCCL_HOME has priority. Second is the NCCL wheel next to PyTorch: PyTorch loads it, and a process
    must not load two NCCL libraries.
    """
    homes = [
        Path(os.environ.get("HOROVOD_NCCL_HOME", "/nonexistent")),
        *(folder / "nccl" for folder in _nvidia_wheels()),
        Path("/usr"),
        Path("/usr/local"),
        SYSTEM_TOOLKIT,
    ]
    return next((nccl for home in homes if (nccl := _nccl_in(home))), None)


def _nccl_in(home: Path) -> Nccl | None:
    header = home / "include" / "nccl.h"
    folders = [home / "lib", home / "lib64", *sorted(home.glob("lib/*-linux-gnu"))]
    libraries = [folder / name for folder in folders for name in NCCL_LIBRARIES if (folder / name).exists()]
    if not libraries or not header.exists():
        return None
    text = header.read_text(errors="replace")
    parts = [re.search(rf"#define NCCL_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return Nccl(header.parent, libraries[0], ".".join(part[1] for part in parts if part))


def _nvidia_wheels() -> list[Path]:
    """Return the folder of NVIDIA's wheels next to PyTorch, if it exists."""
    try:
        folder = Path(str(metadata.distribution("torch").locate_file("nvidia")))
    except metadata.PackageNotFoundError:
        return []
    return [folder] if folder.is_dir() else []


def architectures(toolkit: Toolkit) -> tuple[str, ...]:
    """Return the architectures that kernels are compiled for, such as ("80", "90").

    They are those in HOROVOD_BUILD_CUDA_CC_LIST, or those of this machine's GPUs, or, without a GPU, all from
    ``NOT_EMULATED`` on that the compiler supports. Horovod's build adds PTX of the newest one for later GPUs.
    """
    if named := os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST"):
        return tuple(sorted(named.split(","), key=int))
    known = _known_architectures(toolkit)
    present = tuple(arch for arch in known if arch in gpu_architectures())
    return present or tuple(arch for arch in known if int(arch) >= NOT_EMULATED)


def _known_architectures(toolkit: Toolkit) -> tuple[str, ...]:
    _, words = _run_nvcc(toolkit.nvcc, "--list-gpu-code")
    return tuple(sorted(set(re.findall(r"^sm_(\d+)$", words, re.MULTILINE)), key=int))


def gpu_architectures() -> set[str]:
    """Return the architectures of this machine's GPUs; empty: no GPU or no driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return set()
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return set()
    return {arch for number in range(count.value) if (arch := _architecture(cuda, number))}


def _architecture(cuda: ctypes.CDLL, number: int) -> str:
    major_attribute, minor_attribute = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if (
        cuda.cuDeviceGet(ctypes.byref(device), number)
        or cuda.cuDeviceGetAttribute(ctypes.byref(major), major_attribute, device)
        or cuda.cuDeviceGetAttribute(ctypes.byref(minor), minor_attribute, device)
    ):
        return ""
    return f"{major.value}{minor.value}"


def as_toolkit(toolkit: Toolkit, folder: Path) -> Path:
    """Create the layout of a system toolkit in a new folder, with links; return the folder to build with.

    A toolkit with ``lib64`` is returned unchanged. The wheels have no ``lib64``, and no ``libcudart.so``
    without a version. The compiler uses the parent of its own folder as the toolkit, so ``bin`` must be a
    folder and not a link.
    """
    if (toolkit.home / "lib64").exists():
        return toolkit.home
    for name in ("bin", "lib64"):
        (folder / name).mkdir(parents=True)
    for entry in toolkit.home.iterdir():
        if entry.name not in {"bin", "lib"}:
            (folder / entry.name).symlink_to(entry)
    for program in (toolkit.home / "bin").iterdir():
        (folder / "bin" / program.name).symlink_to(program)
    for library in (toolkit.home / "lib").iterdir():
        (folder / "lib64" / library.name).symlink_to(library)
        bare, dot_so, version = library.name.partition(".so.")
        if dot_so and "." not in version:
            (folder / "lib64" / f"{bare}.so").symlink_to(library)
    (folder / "lib").symlink_to("lib64")
    return folder


if __name__ == "__main__":
    # For the Makefile and the image: print the requirement to install in addition to PyTorch.
    try:
        needed = missing_requirement(for_other_machines="--without-gpu" in sys.argv)
    except EngineError as error:
        sys.exit(str(error))
    if "--always" in sys.argv:
        needed = toolkit_requirement()
    sys.stdout.write(needed + "\n" * bool(needed))
