"""Extras of setup.py can be installed together: this environment has all of them, in every pair."""

from __future__ import annotations

import ast
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

SETUP = Path(__file__).parents[2] / "setup.py"
# Installed in place of what the extra names; for `make mutants` alone.
INSTEAD = {"tensorflow": "tensorflow-cpu"}
LEFT_OUT = {"mutants"}
# Packages of one release, which bring the same files with the same contents.
OF_ONE_RELEASE = {"mlflow", "mlflow-skinny", "mlflow-tracing"}


def extras() -> dict[str, list[str]]:
    for node in ast.walk(ast.parse(SETUP.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "extras_require":
            found: dict[str, list[str]] = ast.literal_eval(node.value)
            return found
    raise AssertionError("setup.py has no extras_require")


@pytest.mark.parametrize("extra", sorted(extras().keys() - LEFT_OUT))
def test_this_environment_has_what_an_extra_wants(extra):
    for each in map(Requirement, extras()[extra]):
        version = metadata.version(INSTEAD.get(each.name, each.name))
        assert each.specifier.contains(version), f"{each} is wanted, and {version} is here"


def test_no_two_packages_bring_the_same_file():
    """As urllib3-future brings a urllib3 of its own, with which no object of Kubernetes can be created."""
    owners = defaultdict(set)
    for each in metadata.distributions():
        name = each.metadata["Name"]
        for line in (each.read_text("RECORD") or "").splitlines():
            file = line.partition(",")[0]
            if file.endswith((".py", ".so")):
                owners[file].add(name.partition("-")[0] if name in OF_ONE_RELEASE else name)

    assert not {file: names for file, names in owners.items() if len(names) > 1}
