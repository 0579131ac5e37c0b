"""What the version before has written is read: jobs, checkpoints, states (``tests/data/version_before``)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from support.launching import PROGRAMS, cli
from torch import allclose

pytestmark = pytest.mark.ranks
BEFORE = Path(__file__).parent.parent / "data" / "version_before"
FOLDER = "/srv/train"  # where it was written
RUN_ID = "20261122-191914-ebc4"


@pytest.fixture
def before(tmp_path):
    """All of it, moved here."""
    shutil.copytree(BEFORE, tmp_path, dirs_exist_ok=True)
    shutil.copy(PROGRAMS / "tasks.py", tmp_path)
    jobs = tmp_path / "state" / "horovod_train" / "jobs"
    shutil.copytree(tmp_path / "jobs", jobs)
    for file in (*jobs.iterdir(), tmp_path / "runs" / "before" / RUN_ID / "job.json"):
        file.write_text(file.read_text().replace(FOLDER, str(tmp_path)))
    return tmp_path


def longer_job(folder):
    path = folder / "job.yaml"
    description = yaml.safe_load((BEFORE / "job.yaml").read_text())
    shutil.copy(PROGRAMS / "tasks.py", folder)
    del description["train"]["max_steps"]
    description["lr"] = {"scaling": "linear"}  # its default
    (folder / "notes").mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(description))
    return path


def test_its_jobs_are_listed_with_their_ends(before):
    environ = {"XDG_STATE_HOME": str(before / "state")}
    name = f"before-{RUN_ID}"

    assert "succeeded" in cli("status", name, cwd=before, **environ).stdout
    assert name in cli("list", "--all", cwd=before, **environ).stdout
    assert "trained before: 1.3 epochs, 13 steps" in cli("logs", name, cwd=before, **environ).stdout


def test_its_job_descriptions_are_valid(before):
    cli("config", "validate", str(before / "job.yaml"), cwd=before)
    cli("run", "--dry-run", str(before / "runs" / "before" / RUN_ID / "job.json"), cwd=before)


def test_its_checkpoints_are_resumed_as_if_nothing_had_been(before, tmp_path_factory):
    undisturbed = tmp_path_factory.mktemp("undisturbed")
    cli("run", str(longer_job(undisturbed)), cwd=undisturbed)

    done = cli("run", str(longer_job(before)), cwd=before)

    assert "resumed" in done.stdout
    ends = [
        load_file(folder / "runs" / "before" / "checkpoints" / "step-000000000030" / "model.safetensors")
        for folder in (before, undisturbed)
    ]
    # The gradient of a bias before a normalization is rounding of this CPU, of which AdamW makes whole steps.
    names = ends[0].keys() - {"0.bias", "1.running_mean"}
    assert all(allclose(ends[0][name], ends[1][name], atol=1e-5) for name in names)
    # It has really gone on from there: the first steps were not trained again.
    notes = [
        sum(len(file.read_text().splitlines()) for file in (folder / "notes").iterdir())
        for folder in (before, undisturbed)
    ]
    assert notes == [30 - 13, 30]
