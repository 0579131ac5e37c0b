"""CUDA and NCCL are found where they are: wheels, a system's toolkit, neither, or several at once."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from horovod_train.checks import engine as checks
from horovod_train.errors import EngineError
from horovod_train.horovod import build, cuda
from horovod_train.horovod.build import own_patches

TORCH = cuda.TorchBuild("2.13.0+cu130", "13.0")


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch, tmp_path):
    """A machine without any CUDA, as far as the code that is tested can see."""
    for variable in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "HOROVOD_NCCL_HOME", "HOROVOD_BUILD_CUDA_CC_LIST"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(cuda, "SYSTEM_TOOLKIT", tmp_path / "usr" / "local" / "cuda")
    monkeypatch.setattr(cuda, "_nvidia_wheels", list)
    monkeypatch.setattr(cuda, "gpu_architectures", set)
    monkeypatch.setattr(build, "gpu_architectures", set)


def toolkit(home: Path, version: str = "13.0", codes: str = "sm_75 sm_80 sm_90") -> Path:
    """A toolkit whose compiler answers as NVIDIA's does."""
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    (home / "lib64").mkdir()
    (home / "lib64" / "libcudart.so").touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = --version ] && echo "Cuda compilation tools, release {version}, V{version}.88"\n'
        f'[ "$1" = --list-gpu-code ] && printf "%s\\n" {codes}\n'
        f'[ "$1" = -v ] && echo "#$ TOP={home}/bin/.." >&2\n'
        "true\n"
    )
    nvcc.chmod(0o755)
    return home


def nccl(home: Path, version: str, library: str = "lib/libnccl.so.2") -> Path:
    (home / "include").mkdir(parents=True, exist_ok=True)
    major, minor, patch = version.split(".")
    (home / "include" / "nccl.h").write_text(
        f"#define NCCL_MAJOR {major}\n#define NCCL_MINOR {minor}\n#define NCCL_PATCH {patch}\n"
    )
    (home / library).parent.mkdir(parents=True, exist_ok=True)
    (home / library).touch()
    return home


def test_the_flavour_of_pytorch_is_part_of_the_engines_name(monkeypatch, tmp_path):
    """D12: both are 2.13.0 in their metadata."""

    class Distribution:
        version = "2.13.0"

        def locate_file(self, name):
            return tmp_path / name

    monkeypatch.setattr(cuda.metadata, "distribution", lambda _: Distribution())
    version_py = tmp_path / "torch" / "version.py"
    version_py.parent.mkdir()
    version_py.write_text("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n")
    with_cuda = cuda.torch_build()
    version_py.write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")

    assert with_cuda == cuda.TorchBuild("2.13.0+cu130", "13.0")
    assert cuda.torch_build() == cuda.TorchBuild("2.13.0+cpu", "")


def test_a_folder_without_a_compiler_is_no_toolkit(tmp_path):
    """D11: images for running have /usr/local/cuda, and nothing to compile with."""
    (tmp_path / "usr" / "local" / "cuda" / "lib64").mkdir(parents=True)

    assert cuda.find_toolkit(TORCH) is None


def test_the_toolkit_of_the_system_is_found(tmp_path):
    home = toolkit(tmp_path / "usr" / "local" / "cuda")

    assert cuda.find_toolkit(TORCH) == cuda.Toolkit(home, "13.0")


def test_wheels_beside_pytorch_come_before_the_system(monkeypatch, tmp_path):
    toolkit(tmp_path / "usr" / "local" / "cuda", "13.2")
    wheel = toolkit(tmp_path / "nvidia" / "cu13")
    monkeypatch.setattr(cuda, "_nvidia_wheels", lambda: [tmp_path / "nvidia"])

    assert cuda.find_toolkit(TORCH) == cuda.Toolkit(wheel, "13.0")


def test_a_compiler_of_another_major_version_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(toolkit(tmp_path / "cuda-12", "12.8") / "bin"))
    home = toolkit(tmp_path / "usr" / "local" / "cuda", "13.1")

    assert cuda.find_toolkit(TORCH) == cuda.Toolkit(home, "13.1")


def script(folder: Path, program: Path) -> str:
    """A folder for the PATH with an ``nvcc`` that is a script, as environment modules and Debian have it."""
    folder.mkdir()
    (folder / "nvcc").write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    (folder / "nvcc").chmod(0o755)
    return str(folder)


def test_the_toolkit_of_a_script_is_the_one_that_it_calls(monkeypatch, tmp_path):
    home = toolkit(tmp_path / "opt" / "cuda-13.0")
    monkeypatch.setenv("PATH", script(tmp_path / "bin", home / "bin" / "nvcc"))

    assert cuda.find_toolkit(TORCH) == cuda.Toolkit(home, "13.0")


@pytest.mark.parametrize("part", ["include/cuda_runtime.h", "lib64/libcudart.so"])
def test_a_toolkit_without_headers_or_libraries_is_passed_over(monkeypatch, tmp_path, part):
    bare = toolkit(tmp_path / "opt" / "cuda-13.0")
    (bare / part).unlink()
    monkeypatch.setenv("PATH", script(tmp_path / "bin", bare / "bin" / "nvcc"))

    assert cuda.find_toolkit(TORCH) is None
    home = toolkit(tmp_path / "usr" / "local" / "cuda")
    assert cuda.find_toolkit(TORCH) == cuda.Toolkit(home, "13.0")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_compiler_that_fails_is_used_nowhere_and_refused_where_a_gpu_is(monkeypatch, tmp_path, has_gpu):
    home = toolkit(tmp_path / "usr" / "local" / "cuda")
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(
        nvcc.read_text().replace("true\n", '[ "$1" != -ccbin ] || { echo unsupported; exit 1; }\n')
    )
    nccl(home, "2.29.7")
    monkeypatch.setattr(build, "torch_build", lambda: TORCH)
    monkeypatch.setattr(build, "gpu_architectures", lambda: {"90"} if has_gpu else set())
    said = []

    if has_gpu:
        with pytest.raises(EngineError, match=r"nvcc cannot compile:\nunsupported"):
            build.make_plan(None, report=said.append)
    else:
        assert not build.make_plan(None, report=said.append).cuda
        assert "built without GPU support, because this machine has no GPU and" in said[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda home: home.mkdir(), r"lacks compiler \(bin/nvcc\)"),
        (lambda home: (toolkit(home) / "include" / "cuda_runtime.h").unlink(), "lacks header"),
        (lambda home: (toolkit(home) / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1"), "lacks a working"),
        (
            lambda home: toolkit(home, "12.8"),
            r"with CUDA 12\.8, and PyTorch 2\.13\.0\+cu130 needs CUDA 13\.0",
        ),
    ],
)
def test_a_toolkit_that_was_named_and_does_not_fit_is_refused(monkeypatch, tmp_path, make, message):
    make(tmp_path / "named")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "named"))
    toolkit(tmp_path / "usr" / "local" / "cuda")

    with pytest.raises(EngineError, match=message):
        cuda.find_toolkit(TORCH)


def test_a_pytorch_without_cuda_wants_no_toolkit(tmp_path):
    toolkit(tmp_path / "usr" / "local" / "cuda")

    assert cuda.find_toolkit(cuda.TorchBuild("2.13.0+cpu", "")) is None


def test_nccl_is_found_though_the_wheel_has_no_unversioned_library(monkeypatch, tmp_path):
    """D1: the wheel has libnccl.so.2 alone."""
    home = nccl(tmp_path / "nvidia" / "nccl", "2.29.7")
    monkeypatch.setattr(cuda, "_nvidia_wheels", lambda: [tmp_path / "nvidia"])

    found = cuda.find_nccl()

    assert found == cuda.Nccl(home / "include", home / "lib" / "libnccl.so.2", "2.29.7")


def test_of_two_nccls_the_one_that_pytorch_loads_is_linked(monkeypatch, tmp_path):
    """D2: the header of one and the library of the other used to be mixed."""
    nccl(tmp_path / "usr" / "local" / "cuda", "2.18.5", "lib64/libnccl.so")
    nccl(tmp_path / "nvidia" / "nccl", "2.29.7")
    monkeypatch.setattr(cuda, "_nvidia_wheels", lambda: [tmp_path / "nvidia"])

    found = cuda.find_nccl()

    assert found is not None
    assert found.version == "2.29.7"
    assert found.library.is_relative_to(found.include.parent)


def test_a_header_without_a_library_is_no_nccl(monkeypatch, tmp_path):
    home = nccl(tmp_path / "nvidia" / "nccl", "2.29.7")
    (home / "lib" / "libnccl.so.2").unlink()
    monkeypatch.setattr(cuda, "_nvidia_wheels", lambda: [tmp_path / "nvidia"])
    monkeypatch.setattr(cuda, "SYSTEM_TOOLKIT", nccl(tmp_path / "system", "2.18.5"))

    found = cuda.find_nccl()

    assert found is not None
    assert found.version == "2.18.5"


def test_kernels_are_for_the_gpus_that_are_here_or_for_all(monkeypatch, tmp_path):
    found = cuda.Toolkit(toolkit(tmp_path / "cuda", codes="sm_60 sm_75 sm_80 sm_90 sm_100 sm_90a"), "13.0")
    for_all = cuda.architectures(found)
    monkeypatch.setattr(cuda, "gpu_architectures", lambda: {"90"})
    for_this = cuda.architectures(found)
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "90,80")

    assert for_all == ("75", "80", "90", "100")
    assert for_this == ("90",)
    assert cuda.architectures(found) == ("80", "90")


def test_wheels_are_laid_out_as_a_build_expects_a_toolkit(tmp_path):
    home = toolkit(tmp_path / "nvidia" / "cu13")
    shutil.rmtree(home / "lib64")
    (home / "lib").mkdir()
    (home / "lib" / "libcudart.so.13").touch()

    laid_out = cuda.as_toolkit(cuda.Toolkit(home, "13.0"), tmp_path / "cuda")

    assert (laid_out / "lib64" / "libcudart.so").resolve() == home / "lib" / "libcudart.so.13"
    assert (laid_out / "lib" / "libcudart.so.13").exists()
    assert not (laid_out / "bin").is_symlink()  # nvcc looks beside the folder that it is called in
    assert (laid_out / "bin" / "nvcc").resolve() == home / "bin" / "nvcc"
    assert (laid_out / "include").is_dir()


def test_a_gpu_without_a_compiler_ends_the_build_with_what_to_install(monkeypatch):
    monkeypatch.setattr(build, "torch_build", lambda: TORCH)
    monkeypatch.setattr(cuda, "toolkit_requirement", lambda: "cuda-toolkit[nvcc,cudart,cccl]==13.0.3.0")
    monkeypatch.setattr(build, "gpu_architectures", lambda: {"90"})

    with pytest.raises(EngineError, match=r"a CUDA 13\.0 toolkit with its compiler was not found") as raised:
        build.make_plan(None)

    assert "pip install 'cuda-toolkit[nvcc,cudart,cccl]==13.0.3.0'" in raised.value.hint
    assert not build.make_plan(None, without_cuda=True).cuda


def test_without_a_gpu_and_a_compiler_the_engine_is_for_cpus(monkeypatch):
    monkeypatch.setattr(build, "torch_build", lambda: TORCH)

    assert not build.make_plan(None).cuda


def test_patches_are_those_of_the_engine_also_where_there_is_no_compiler(monkeypatch, tmp_path):
    """As in an image: what only building needs is gone."""
    plan = {"patches": own_patches()}
    monkeypatch.setattr(checks, "installed_plan", lambda: plan)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert checks._patches()[0].level == "ok"
    del plan["patches"][next(iter(plan["patches"]))]
    assert checks._patches()[0].level == "fail"


def test_of_cuda_12_there_is_no_compiler_on_pypi(monkeypatch):
    """Its wheel holds ptxas alone."""
    old = cuda.TorchBuild("2.13.0+cu126", "12.6")
    for module in (build, cuda):
        monkeypatch.setattr(module, "torch_build", lambda: old)
        monkeypatch.setattr(module, "gpu_architectures", lambda: {"90"})

    for call in (partial(build.make_plan, None), cuda.missing_requirement):
        with pytest.raises(EngineError) as raised:
            call()
        assert "install NVIDIA's CUDA toolkit 12.6 and set HOROVOD_CUDA_HOME" in raised.value.hint
        assert "pip install" not in raised.value.hint


class TestWhatTheCheckSaysOfGpus:
    @pytest.fixture(autouse=True)
    def with_cuda(self, monkeypatch):
        self.plan = {"cuda": "13.0", "cuda_architectures": ["80", "90"]}
        monkeypatch.setattr(checks, "installed_plan", lambda: self.plan)
        monkeypatch.setattr(checks, "torch_build", lambda: TORCH)
        monkeypatch.setattr(cuda, "toolkit_requirement", lambda: "cuda-toolkit[nvcc]==13.0.3.0")
        monkeypatch.setattr(checks, "find_toolkit", lambda _: None)
        self.monkeypatch = monkeypatch

    def findings(self, here: set[str], error: str = "", **facts: object) -> list[str]:
        self.monkeypatch.setattr(checks, "gpu_architectures", lambda: here)
        said = (None, error) if error else (json.dumps(facts), "")
        self.monkeypatch.setattr(checks, "_run_probe", lambda _: said)
        return [finding.line(with_host=False) for finding in checks._gpus()]

    def test_nothing_where_there_are_none(self):
        self.plan = {"cuda": "", "cuda_architectures": []}

        assert self.findings(set()) == []

    def test_what_cannot_be_tried(self):
        assert self.findings(set()) == ["ok   gpu            no GPU: NCCL was not tested"]

    def test_an_engine_for_cpus_beside_a_gpu(self):
        """D13: it used to say ok."""
        self.plan = {"cuda": "", "cuda_architectures": []}

        (finding,) = self.findings({"90"})

        assert "fail gpu            there is a GPU, but the engine is built without CUDA" in finding
        assert "pip install 'cuda-toolkit[nvcc]==13.0.3.0', then run `horovod-train engine build`" in finding

    def test_a_gpu_without_kernels(self):
        (finding,) = self.findings({"75"}, gpu=["Tesla T4", [1.0] * 3])

        assert "architecture 75, and the engine has no kernels for it" in finding
        assert "HOROVOD_BUILD_CUDA_CC_LIST=75,80,90" in finding

    def test_a_sum_through_nccl_that_fails_is_no_fault_of_the_engine(self):
        (finding,) = self.findings({"90"}, error="RuntimeError: NCCL: unhandled cuda error")

        assert "fail gpu            all-reduce through NCCL fails: RuntimeError: NCCL: unhandled" in finding
        assert "engine build" not in finding

    def test_a_sum_through_nccl(self):
        assert self.findings({"90"}, gpu=["H100", [1.0] * 3]) == [
            "ok   gpu            H100, all-reduce through NCCL works"
        ]
        assert "fail" in self.findings({"90"}, gpu=["H100", [0.0] * 3])[0]
        # Newer than all: its code is compiled when it is loaded.
        assert self.findings({"120"}, gpu=["B200", [1.0] * 3])[0].startswith("ok")
