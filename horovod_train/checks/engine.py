"""Checks of the installed engine.

    check_engine            findings about all components that a job on several ranks requires
    probe_mpi, MpiDetails   properties of the engine's MPI library that are known after it has initialized

The engine is loaded in separate processes, because loading may crash a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from horovod_train.checks.hosts import Finding
from horovod_train.horovod.bindings import BINDINGS, framework_version
from horovod_train.horovod.build import own_patches, patch_files, patch_title
from horovod_train.horovod.cuda import find_toolkit, gpu_architectures, how_to_get_it, torch_build
from horovod_train.horovod.environment import open_mpi_without_ssh
from horovod_train.horovod.mpi import HOROVOD_VERSION, Mpi, installed_mpi, installed_plan

TIMEOUT_S = 60
LEVELS = ("single", "funneled", "serialized", "multiple")

# Libraries of fabrics are loaded when MPI initializes; /proc/self/maps has those of this process.
_MPI_PROBE = """
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
    command = [sys.executable, "-c", _MPI_PROBE, str(mpi.library)]
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


REBUILD = "run `horovod-train engine build`"

_PROBE = """
import json, horovod.{binding} as hvd
hvd.init()
found = {{
    "controllers": [name for name in ("mpi", "gloo") if getattr(hvd, name + "_built")()],
    "nccl": bool(hvd.nccl_built()),
    "mpi_threads": bool(hvd.mpi_enabled() and hvd.mpi_threads_supported()),
    "world": [hvd.rank(), hvd.size()],
}}
{sum_of_ones}
found["sum"] = total.tolist()
hvd.shutdown()
print(json.dumps(found))
"""

# In a separate process, so that a failure on the GPU does not affect the other checks.
_GPU_PROBE = """
import json, torch, horovod.torch as hvd
hvd.init()
found = {}
if torch.cuda.is_available():
    total = hvd.allreduce(torch.ones(3, device="cuda"), op=hvd.Sum, name="check.gpu")
    found["gpu"] = [torch.cuda.get_device_name(), total.tolist()]
hvd.shutdown()
print(json.dumps(found))
"""


def finding(what: str, found: str, is_good: bool = True, fix: str = "") -> Finding:  # noqa: FBT001, FBT002
    """Return a finding for this machine."""
    return Finding("", what, found, "ok" if is_good else "fail", fix)


def check_engine() -> list[Finding]:
    """Check all components that a job on several ranks requires."""
    return [_horovod(), _built_for(), *_probe_horovod(), *_mpi(), _horovodrun(), *_patches()]


def _horovod() -> Finding:
    try:
        version = metadata.version("horovod")
    except metadata.PackageNotFoundError:
        return finding("horovod", "not installed", is_good=False, fix=REBUILD)
    return finding("horovod", version, is_good=version == HOROVOD_VERSION, fix=REBUILD)


def _built_for() -> Finding:
    """Compare the framework versions of the engine's build with the installed versions."""
    plan = installed_plan()
    if plan is None:
        return finding("built for", "unknown: not built by horovod-train", is_good=False, fix=REBUILD)
    built = ", ".join(f"{name} {version}" for name, version in plan["frameworks"].items())
    now = {name: framework_version(name) for name in plan["frameworks"]}
    changed = [
        f"{name} is {version or 'gone'} now"
        for name, version in now.items()
        if version != plan["frameworks"][name]
    ]
    if plan["cuda"]:
        built += f", CUDA {plan['cuda']} for {' '.join(plan['cuda_architectures'])}, NCCL {plan['nccl']}"
    found = f"{built}; {plan['compiler']}"
    return finding("built for", "; ".join([found, *changed]), is_good=not changed, fix=REBUILD)


def _probe_horovod() -> list[Finding]:
    plan = installed_plan()
    frameworks = list(plan["frameworks"]) if plan is not None else ["torch"]
    return [each for framework in frameworks for each in _probe_framework(framework)]


def _probe_framework(framework: str) -> list[Finding]:
    code = _PROBE.format(
        binding=framework,
        sum_of_ones=BINDINGS[framework].sum_of_ones,
    )
    found, error = _run_probe(code)
    if found is None:
        return [finding(framework, f"Horovod does not start: {error}", is_good=False, fix=REBUILD)]
    facts: dict[str, Any] = json.loads(found)
    controllers = facts["controllers"]
    operations = [*controllers, *(["nccl"] if facts["nccl"] else [])]
    plan = installed_plan()
    wants_nccl = plan is not None and bool(plan["cuda"])
    world = f"rank {facts['world'][0]} of {facts['world'][1]}, all-reduce works"
    threads = "supported" if facts["mpi_threads"] else "not supported"
    both = set(controllers) == {"mpi", "gloo"}
    has_nccl = facts["nccl"] or not wants_nccl
    return [
        finding(framework, world, facts["sum"] == [1.0] * 3, REBUILD),
        finding("controllers", ", ".join(controllers), both, REBUILD),
        finding("operations", ", ".join(operations), has_nccl, f"it was built with NCCL: {REBUILD} --force"),
        finding("mpi threads", threads, facts["mpi_threads"], "use an MPI built with thread support"),
        *(_gpus() if framework == "torch" else []),
    ]


def _gpus() -> list[Finding]:
    """Compare the GPUs of this machine with the engine's build, and run an all-reduce on one GPU."""
    plan, torch = installed_plan(), torch_build()
    present = sorted(gpu_architectures())
    if plan is None or torch is None or not (present or plan["cuda"]):
        return []
    if not plan["cuda"]:
        fix = REBUILD
        if not torch.cuda:
            fix = f"PyTorch {torch.version} is built without CUDA: install a build with CUDA, then {REBUILD}"
        elif find_toolkit(torch) is None:
            fix = f"{how_to_get_it(torch)}, then {REBUILD}"
        return [
            finding("gpu", "there is a GPU, but the engine is built without CUDA", is_good=False, fix=fix)
        ]
    if not present:
        return [finding("gpu", "no GPU: NCCL was not tested")]
    built = [int(architecture) for architecture in plan["cuda_architectures"]]
    lacking = [arch for arch in present if int(arch) not in built and int(arch) < max(built)]
    if lacking:
        found = f"architecture {', '.join(lacking)}, and the engine has no kernels for it"
        all_of_them = ",".join(sorted({*plan["cuda_architectures"], *lacking}, key=int))
        fix = f"set HOROVOD_BUILD_CUDA_CC_LIST={all_of_them} and {REBUILD}"
        return [finding("gpu", found, is_good=False, fix=fix)]
    return [_sum_on_gpu()]


def _sum_on_gpu() -> Finding:
    output, error = _run_probe(_GPU_PROBE)
    if output is None:
        fix = "see `nvidia-smi`; NCCL_DEBUG=INFO shows more"
        return finding("gpu", f"all-reduce through NCCL fails: {error}", is_good=False, fix=fix)
    facts: dict[str, Any] = json.loads(output)
    if "gpu" not in facts:
        return finding("gpu", "PyTorch does not see it", is_good=False, fix="see `nvidia-smi`")
    name, total = facts["gpu"]
    return finding("gpu", f"{name}, all-reduce through NCCL works", total == [1.0] * 3, REBUILD)


def _mpi() -> list[Finding]:
    """Examine the MPI library, and compare it with that of mpi4py."""
    mpi = installed_mpi()
    if mpi is None:
        return [finding("mpi", "unknown: the engine has no record of it", is_good=False, fix=REBUILD)]
    module = f"load its module, or {REBUILD} with another one"
    if not mpi.library.exists():
        return [finding("mpi", f"{mpi}: {mpi.library} does not exist", is_good=False, fix=module)]
    ranks = f"process manager {mpi.manager}, interfaces {', '.join(mpi.interfaces)}"
    findings = [finding("mpi", f"{mpi} ({mpi.library}); {ranks}")]
    details = probe_mpi(mpi)
    if isinstance(details, str):
        fix = "pip install mpi4py; on a login node, MPI may work only inside a job"
        return [*findings, finding("mpi4py", f"does not start: {details}", is_good=False, fix=fix)]
    fabrics = ", ".join(details.fabrics) or "none"
    gpu = "GPU-aware" if details.is_gpu_aware else "not GPU-aware"
    is_same = os.path.realpath(details.library) == os.path.realpath(mpi.library)
    found = f"{details.mpi4py} on {details.version}"
    fix = "pip install --force-reinstall --no-binary=mpi4py mpi4py, with the module of this MPI loaded"
    return [
        *findings,
        finding("mpi fabrics", f"{fabrics}; {gpu}; threads: {details.threads}"),
        finding("mpi4py", found if is_same else f"{found} ({details.library})", is_same, fix),
    ]


def _horovodrun() -> Finding:
    probe = "from horovod.runner.launch import parse_args; parse_args(); print('starts')"
    found, error = _run_probe(f"import sys; sys.argv = ['horovodrun', '-np', '1', 'true']; {probe}")
    return finding("horovodrun", found or f"does not start: {error}", found is not None, REBUILD)


def _patches() -> list[Finding]:
    plan = installed_plan()
    if plan is None:
        return []
    same = own_patches() == plan["patches"]
    applied = [path for path in patch_files() if path.name in plan["patches"]]
    return [
        finding("patches", f"{len(applied)} applied", same, f"patches have changed since: {REBUILD}"),
        *(finding("", f"{path.stem}: {patch_title(path)}") for path in applied),
    ]


def _run_probe(code: str) -> tuple[str | None, str]:
    """Run code in a new interpreter; return its last line of output, or None and its last line of stderr."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**open_mpi_without_ssh(), **os.environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, "no answer within 60 s"
    if done.returncode != 0 or not done.stdout.strip():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return None, lines[-1] if lines else f"exit code {done.returncode}"
    return done.stdout.strip().splitlines()[-1], ""
