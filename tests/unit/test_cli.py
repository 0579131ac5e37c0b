"""The command line: what a user types, and what a user mistypes."""

from __future__ import annotations

import json

import pytest
import yaml
from support.launching import cli

from horovod_train.cli.main import COMMANDS


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_has_help(tmp_path, verb):
    done = cli(verb, "--help", cwd=tmp_path)

    assert done.stdout.startswith("Usage: horovod-train")


def test_the_verbs_are_listed(tmp_path):
    done = cli("--help", cwd=tmp_path)

    assert all(f"  {verb} " in done.stdout for verb in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command"),
        (["run"], "name one JOB"),
        (["run", "digitz"], "did you mean 'digits'?"),
        (["run", "digits", "-n", "0"], "0 is not in the range"),
        (["run", "digits", "-n", "two"], "is not a valid integer"),
        (["run", "digits", "-H", "a:x"], "launch.hosts"),
        (["run", "digits", "-n", "9", "-H", "a:2"], "must be at most the 2 slots"),
        (["run", "digits", "--set", "train.epohcs=3"], "did you mean 'epochs'?"),
        (["run", "digits", "--set", "nonsense"], "is not of the form field=value"),
        (["run", "digits", "--controller", "smoke"], "is not one of"),
        (["config", "validate", "none.yaml"], "neither a file nor a shipped task"),
        (["checkpoint", "ls", "nowhere"], "does not exist"),
        (["worker", "none.yaml"], "No such file"),
        (["tasks", "show", "digit"], "did you mean 'digits'?"),
    ],
)
def test_a_mistake_is_answered_with_code_2_and_what_to_do(tmp_path, arguments, message):
    done = cli(*arguments, cwd=tmp_path, check=False)

    assert done.returncode == 2
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("program", "environ"),
    [
        ("horovodrun", {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}),
        ("mpirun", {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}),
        ("torchrun or accelerate", {"WORLD_SIZE": "2", "RANK": "0"}),
        ("srun", {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}),
    ],
)
def test_run_is_refused_where_a_launcher_has_started_it_as_a_rank(tmp_path, program, environ):
    done = cli("run", "digits", cwd=tmp_path, check=False, **environ)

    assert done.returncode == 2
    assert (
        f"`run` starts the ranks itself, but {program} has started this process as number 0 of 2"
        in done.stderr
    )
    assert "horovodrun -np 2 horovod-train worker JOB" in done.stderr


def test_config_show_prints_what_a_worker_would_see(tmp_path):
    done = cli("config", "show", "digits", "--set", "train.epochs=3", cwd=tmp_path)

    shown = yaml.safe_load(done.stdout)
    assert shown["train"]["epochs"] == 3
    assert shown["health"]["stall_warning_s"] == 60.0


def test_config_schema_is_json(tmp_path):
    assert json.loads(cli("config", "schema", cwd=tmp_path).stdout)["title"] == "Job"


def test_a_shipped_task_can_be_copied_and_is_valid(tmp_path):
    (tmp_path / "mine.yaml").write_text(cli("tasks", "show", "digits", cwd=tmp_path).stdout)

    assert "valid" in cli("config", "validate", "mine.yaml", cwd=tmp_path).stdout
    assert "digits" in cli("tasks", "ls", cwd=tmp_path).stdout


def test_checkpoints_of_a_run_can_be_looked_at(tmp_path):
    cli("run", "digits", "-n", "1", "--set", "train.epochs=2", "--set", "metrics.enabled=false", cwd=tmp_path)
    folder = tmp_path / "runs" / "digits"
    one, two = sorted((folder / "checkpoints").glob("step-*"))

    listed = cli("checkpoint", "ls", str(folder), cwd=tmp_path).stdout
    shown = cli("checkpoint", "show", str(two), cwd=tmp_path).stdout
    compared = cli("checkpoint", "diff", str(one), str(two), cwd=tmp_path, check=False)
    same = cli("checkpoint", "diff", str(one), str(one), cwd=tmp_path)
    valid = cli("checkpoint", "verify", str(folder), cwd=tmp_path)
    (one / "state.json").write_text("{}")
    damaged = cli("checkpoint", "verify", str(folder), cwd=tmp_path, check=False)

    assert listed.splitlines()[0].startswith(two.name)
    assert "accuracy" in listed
    assert "0.weight" in shown
    assert "state.progress.epoch: 1 -> 2" in compared.stdout
    assert (compared.returncode, same.returncode) == (1, 0)
    assert valid.stdout.count(": valid") == 2
    assert (damaged.returncode, "state.json: has 2 bytes" in damaged.stdout) == (1, True)


def test_a_dry_run_prints_the_command_and_touches_nothing(tmp_path):
    done = cli("run", "digits", "-n", "4", "--dry-run", cwd=tmp_path)

    assert "horovodrun --mpi -np 4 -H localhost:4" in done.stdout
    assert (
        "learning rate linear: base 0.015 at batch 32 -> peak 0.06 (4 rank(s), global batch 128)"
        in done.stdout
    )
    assert list(tmp_path.iterdir()) == []
