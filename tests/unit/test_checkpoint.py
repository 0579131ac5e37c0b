"""Checkpoints are whole or absent, and never believed without a checksum."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from threading import Event

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import write_checkpoint
from support.worlds import on_ranks

from horovod_train.checkpoint import store, writing
from horovod_train.checkpoint.arrays import (
    ArrayBlob,
    ReplicaState,
    _header,
    dump_state,
    pack_tree,
    parse_arrays,
    parse_state,
    unpack_tree,
)
from horovod_train.checkpoint.inspect import (
    as_numbers,
    describe,
    describe_row,
    differences,
    discard_damaged,
)
from horovod_train.checkpoint.manager import CheckpointManager, document_changes
from horovod_train.checkpoint.store import (
    DigestDocument,
    ProgressDocument,
    SummaryDocument,
    checked,
)
from horovod_train.checkpoint.writing import Content, Writing
from horovod_train.collectives.base import SingleRank
from horovod_train.config.optimization import Checkpoint
from horovod_train.config.schema import Job
from horovod_train.data.order import DataOrder
from horovod_train.errors import CheckpointError, OperationalError
from horovod_train.training.hooks.base import changes_since, resume_from
from horovod_train.training.run import Progress

FILES = [
    "manifest.json",
    "model.safetensors",
    "optimizer.safetensors",
    "rng.safetensors",
    "state.json",
    "config.json",
]
PROGRESS = Progress(DataOrder(9, 0, shuffle=True)).to_json()


def blob(*values, dtype="float32"):
    array = np.array(values, dtype=dtype)
    return ArrayBlob(dtype, array.shape, array.tobytes())


def state(value=1.0):
    return ReplicaState(
        model={"weight": blob(value, 2.0), "steps": blob(3, dtype="int64")},
        optimizer={"state.0.momentum": blob(value * 10)},
        optimizer_tree={"state": {"momentum": {"__array__": "state.0.momentum"}}},
        scaler={},
    )


def manager(folder, world=None, **section):
    return CheckpointManager(folder, Checkpoint(**section), world or SingleRank(), {"name": "job"})


def save(checkpoints, step, value=1.0, metrics=None):
    checkpoints.save(
        step,
        take_state=lambda copy: state(value),
        rng=b"generators",
        progress={**PROGRESS, "step": step},
        summary={"epochs": step / 10, "metrics": metrics or {}, "unix_time_s": 0.0},
        wait=True,
    )


def names(folder):
    return [checkpoint.step for checkpoint in store.list_checkpoints(folder)]


class TestOneCheckpoint:
    def test_comes_back_as_it_was(self, tmp_path):
        with_manager = manager(tmp_path)
        save(with_manager, 7)
        with_manager.close()

        again = manager(tmp_path)
        resumed = again.latest()
        again.close()

        assert resumed.state == state()
        assert resumed.progress["step"] == 7
        assert resumed.rng == b"generators"

    def test_has_its_arrays_in_the_order_in_which_they_were_written(self):
        names = [f"layer.{number}" for number in (3, 1, 2, 0, 9, 8, 7)]
        content = dump_state({}, {name: blob(1.0) for name in names})

        assert list(parse_state(content)[1]) == names

    def test_is_read_by_the_safetensors_library(self, tmp_path):
        checkpoints = manager(tmp_path)
        save(checkpoints, 7)
        checkpoints.close()

        found = safetensors.numpy.load_file(tmp_path / "step-000000000007" / "model.safetensors")

        assert found["weight"].tolist() == [1.0, 2.0]
        assert found["steps"].tolist() == [3]

    def test_gives_no_random_generators_to_another_world(self, tmp_path):
        checkpoints = manager(tmp_path)
        save(checkpoints, 7)
        checkpoints.close()

        def rank(world):
            mine = manager(tmp_path, world)
            resumed = mine.latest()
            mine.close()
            return resumed.rng, resumed.state.model

        assert on_ranks(2, rank) == [(None, state().model)] * 2


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "empty", "grow"])
class TestDamage:
    def test_is_noticed_and_the_previous_checkpoint_is_used(self, tmp_path, file, damage, caplog):
        checkpoints = manager(tmp_path)
        save(checkpoints, 10, value=1.0)
        save(checkpoints, 20, value=2.0)
        checkpoints.close()
        self.harm(tmp_path / "step-000000000020" / file, damage)

        again = manager(tmp_path)
        with caplog.at_level(logging.WARNING, "horovod_train"):
            resumed = again.latest()
        again.close()

        assert resumed.name == "step-000000000010"
        assert resumed.state == state(1.0)
        assert "skipping step-000000000020" in caplog.text
        assert (tmp_path / "damaged-1-step-000000000020").is_dir(), "nothing is thrown away"

    def harm(self, path, damage):
        content = bytearray(path.read_bytes())
        if damage == "delete":
            path.unlink()
            return
        if damage == "flip":
            content[len(content) // 2] ^= 1
        changed = {"truncate": content[:-1], "flip": content, "empty": b"", "grow": content + b"x"}[damage]
        path.write_bytes(changed)


def test_every_single_flipped_byte_of_a_manifest_is_noticed(tmp_path):
    checkpoints = manager(tmp_path)
    save(checkpoints, 1)
    checkpoints.close()
    folder = tmp_path / "step-000000000001"
    original = (folder / "manifest.json").read_bytes()
    blank = {ord(" "), ord("\n")}

    for at in range(len(original)):
        if original[at] in blank:
            continue  # white space between tokens carries no meaning
        flipped = bytearray(original)
        flipped[at] ^= 4
        (folder / "manifest.json").write_bytes(flipped)

        assert store.verify(folder), f"byte {at} ({chr(original[at])!r}) flipped unnoticed"


class TestManager:
    def test_keeps_the_last_ones(self, tmp_path):
        checkpoints = manager(tmp_path, keep_last=2)
        for step in (1, 2, 3, 4):
            save(checkpoints, step)
        checkpoints.close()

        assert names(tmp_path) == [4, 3]

    @pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 1)])
    def test_keeps_the_best_one_too(self, tmp_path, mode, best):
        checkpoints = manager(tmp_path, keep_last=1, best={"metric": "accuracy", "mode": mode})
        for step, accuracy in ((1, 0.1), (2, 0.9), (3, 0.5), (4, 0.6)):
            save(checkpoints, step, metrics={"accuracy": accuracy})
        checkpoints.close()

        assert names(tmp_path) == [4, best]

    def test_an_unknown_or_impossible_metric_never_makes_the_best(self, tmp_path):
        checkpoints = manager(tmp_path, keep_last=1, best={"metric": "accuracy", "mode": "max"})
        for step, metrics in ((1, {"accuracy": 0.9}), (2, {"accuracy": float("nan")}), (3, {}), (4, {})):
            save(checkpoints, step, metrics=metrics)
        checkpoints.close()

        assert names(tmp_path) == [4, 1]

    def test_a_job_never_starts_from_zero_because_all_checkpoints_are_damaged(self, tmp_path):
        checkpoints = manager(tmp_path)
        save(checkpoints, 1)
        checkpoints.close()
        (tmp_path / "step-000000000001" / "state.json").write_text("")

        for _ in range(3):
            again = manager(tmp_path)
            with pytest.raises(CheckpointError, match="all 1 checkpoints(.|\n)*resume: never"):
                again.latest()
            again.close()

        assert names(tmp_path) == [1]

    def test_nor_because_they_were_set_aside_before(self, tmp_path):
        checkpoints = manager(tmp_path)
        save(checkpoints, 1)
        save(checkpoints, 2)
        checkpoints.close()
        (tmp_path / "step-000000000002" / "state.json").write_text("")
        again = manager(tmp_path)
        again.latest()
        again.close()
        shutil.rmtree(tmp_path / "step-000000000001")

        for _ in range(2):
            again = manager(tmp_path)
            with pytest.raises(CheckpointError, match="quarantined(.|\n)*`horovod-train checkpoint discard"):
                again.latest()
            again.close()

    @pytest.mark.parametrize("way", ["never", "discard"])
    def test_until_a_person_decides_to(self, tmp_path, way):
        checkpoints = manager(tmp_path)
        save(checkpoints, 1)
        checkpoints.close()
        (tmp_path / "step-000000000001" / "state.json").write_text("")

        if way == "never":
            anew = manager(tmp_path, resume="never")
            assert anew.latest() is None
            anew.close()
        else:
            assert discard_damaged(tmp_path) == [tmp_path / "step-000000000001"]
        again = manager(tmp_path)
        found = again.latest()
        again.close()

        assert found is None

    def test_the_newest_is_the_one_whose_manifest_says_so(self, tmp_path, caplog):
        checkpoints = manager(tmp_path)
        save(checkpoints, 10, value=1.0)
        save(checkpoints, 20, value=2.0)
        checkpoints.close()
        (tmp_path / "step-000000000010").rename(tmp_path / "step-000000000099")

        again = manager(tmp_path, keep_last=1)
        assert again.latest().state == state(2.0)
        save(again, 99, value=3.0)
        again.close()

        assert names(tmp_path) == [99]
        aside = tmp_path / "renamed-1-step-000000000099"
        assert store.read_manifest(aside).step == 10, "somebody's copy is not written over"

    def test_a_renamed_one_is_told_when_it_is_used(self, tmp_path, caplog):
        checkpoints = manager(tmp_path)
        save(checkpoints, 10)
        checkpoints.close()
        (tmp_path / "step-000000000010").rename(tmp_path / "step-000000000099")

        again = manager(tmp_path)
        with caplog.at_level(logging.WARNING, "horovod_train"):
            resumed = again.latest()
        again.close()

        assert resumed.progress["step"] == 10
        assert "step-000000000099 is step-000000000010, by its manifest" in caplog.text

    def test_what_cannot_be_read_is_not_called_damaged(self, tmp_path, monkeypatch):
        checkpoints = manager(tmp_path)
        save(checkpoints, 1)
        checkpoints.close()

        def refuse(*_):
            raise PermissionError(13, "Permission denied")

        again = manager(tmp_path)
        monkeypatch.setattr(store, "_read_checked", refuse)
        with pytest.raises(CheckpointError, match="Permission denied"):
            again.latest()
        again.close()

        assert names(tmp_path) == [1]

    def test_never_prunes_new_ones_in_favour_of_damaged_newer_ones(self, tmp_path):
        checkpoints = manager(tmp_path, keep_last=1)
        save(checkpoints, 10)
        checkpoints.close()
        shutil.copytree(tmp_path / "step-000000000010", tmp_path / "step-000000000030")
        (tmp_path / "step-000000000030" / "model.safetensors").write_bytes(b"")

        again = manager(tmp_path, keep_last=1)
        again.latest()
        save(again, 20)
        again.close()

        assert names(tmp_path) == [20]

    def test_starting_anew_keeps_what_is_there(self, tmp_path):
        checkpoints = manager(tmp_path)
        save(checkpoints, 100)
        checkpoints.close()

        anew = manager(tmp_path, resume="never")
        assert anew.latest() is None
        save(anew, 1)
        anew.close()

        assert names(tmp_path) == [1]
        assert (tmp_path / "earlier-1-step-000000000100").is_dir()

    def test_a_required_checkpoint_that_is_missing_is_an_error(self, tmp_path):
        checkpoints = manager(tmp_path, resume="required")
        with pytest.raises(CheckpointError, match="no valid checkpoint"):
            checkpoints.latest()
        checkpoints.close()

    def test_what_a_crash_left_behind_is_swept_away_and_never_listed(self, tmp_path):
        leftover = tmp_path / ".writing-step-000000000005-123"
        leftover.mkdir()
        (leftover / "model.safetensors").write_bytes(b"half")
        assert names(tmp_path) == []

        manager(tmp_path).close()

        assert not leftover.exists()

    def test_a_crash_between_two_renames_loses_nothing(self, tmp_path):
        checkpoints = manager(tmp_path)
        save(checkpoints, 5)
        checkpoints.close()
        (tmp_path / "step-000000000005").rename(tmp_path / ".replaced-step-000000000005")

        manager(tmp_path).close()

        assert names(tmp_path) == [5]

    def test_two_runs_cannot_write_to_one_folder(self, tmp_path):
        first = manager(tmp_path)
        with pytest.raises(OperationalError, match="another run"):
            manager(tmp_path)
        first.close()
        manager(tmp_path).close()

    @pytest.mark.parametrize(
        ("background", "wait", "is_background"),
        [(True, False, True), (True, True, False), (False, False, False), (False, True, False)],
    )
    def test_only_what_is_written_in_the_background_is_copied(
        self, tmp_path, monkeypatch, background, wait, is_background
    ):
        may_write, write, copies = Event(), Writing.complete, []

        def write_when_told(*what):
            assert may_write.wait(20)
            return write(*what)

        monkeypatch.setattr(Writing, "complete", write_when_told)
        if not is_background:
            may_write.set()
        checkpoints = CheckpointManager(tmp_path, Checkpoint(background=background), SingleRank(), {})

        def take_state(copy):
            copies.append(copy)
            return state()

        summary = {"epochs": 1.0, "metrics": {}, "unix_time_s": 0.0}
        checkpoints.save(
            1,
            take_state=take_state,
            rng=b"",
            progress={**PROGRESS, "step": 1},
            summary=summary,
            wait=wait,
        )

        assert copies == [is_background]
        assert bool(names(tmp_path)) != is_background
        may_write.set()
        checkpoints.close()
        assert names(tmp_path) == [1]

    def test_a_full_disk_is_reported_and_training_goes_on_but_not_at_the_end(self, tmp_path, monkeypatch):
        reports = []
        checkpoints = CheckpointManager(
            tmp_path, Checkpoint(background=True), SingleRank(), {}, reports.append
        )

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        arguments = {
            "take_state": lambda copy: state(),
            "rng": b"",
            "summary": {"epochs": 1.0, "metrics": {}, "unix_time_s": 0.0},
        }
        checkpoints.save(1, progress={**PROGRESS, "step": 1}, **arguments)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoints.save(2, progress={**PROGRESS, "step": 2}, wait=True, **arguments)
        checkpoints.close()

        assert ["No space left" in report.error for report in reports] == [True, True]
        assert list(tmp_path.glob("step-*")) == []
        assert list(tmp_path.glob(".writing-*")) == []

    def test_a_last_checkpoint_whose_write_in_the_background_failed_is_written_again(
        self, tmp_path, monkeypatch
    ):
        checkpoints = CheckpointManager(
            tmp_path, Checkpoint(background=True), SingleRank(), {}, lambda _: None
        )
        arguments = {
            "take_state": lambda copy: state(),
            "rng": b"",
            "progress": {**PROGRESS, "step": 1},
            "summary": {"epochs": 1.0, "metrics": {}, "unix_time_s": 0.0},
        }

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            checkpoints.save(1, **arguments)
            checkpoints._join_pending_write()
        checkpoints.save(1, wait=True, **arguments)
        checkpoints.close()

        assert names(tmp_path) == [1]


def signed(folder, change):
    """Change the manifest as a forger would: with a checksum that fits."""
    file = folder / "manifest.json"
    document = json.loads(file.read_text())
    del document["sha256"]
    change(document)
    file.write_text(json.dumps({**document, "sha256": store.checksum(document)}))


def rewritten(folder, name, content):
    """Replace a file, and what the manifest says of it."""
    (folder / name).write_bytes(content)
    digest = {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
    signed(folder, lambda manifest: manifest["files"].update({name: digest}))


def changed_state(folder, change):
    document = json.loads((folder / "state.json").read_text())
    change(document)
    rewritten(folder, "state.json", json.dumps(document).encode())


MANIFESTS = {
    "a name outside of the folder": lambda m: m["files"].update({"../../x": m["files"]["state.json"]}),
    "an absolute name": lambda m: m["files"].update({"/etc/hostname": m["files"]["state.json"]}),
    "a size that is no number": lambda m: m["files"]["state.json"].update(size_bytes="9"),
    "a negative size": lambda m: m["files"]["state.json"].update(size_bytes=-1),
    "a hash that is none": lambda m: m["files"]["state.json"].update(sha256="x"),
    "no files": lambda m: m.update(files={}),
    "files without a model": lambda m: m["files"].pop("model.safetensors"),
    "files without a description of the job": lambda m: m["files"].pop("config.json"),
    "files that are no mapping": lambda m: m.update(files=[]),
    "a step that is no number": lambda m: m.update(step="7"),
    "a step that is negative": lambda m: m.update(step=-7),
    "no summary": lambda m: m.pop("summary"),
    "a summary without metrics": lambda m: m["summary"].pop("metrics"),
    "metrics that are texts": lambda m: m["summary"].update(metrics={"loss": "low"}),
    "no world": lambda m: m["summary"].update(world_size=0),
    "a world that is a text": lambda m: m["summary"].update(world_size="1"),
    "no format": lambda m: m.pop("format"),
    "another format": lambda m: m.update(format=4),
}
STATES = {
    "progress that is a list": lambda s: s.update(progress=[]),
    "an unknown field of progress": lambda s: s["progress"].update(advance=1),
    "a step that is a text": lambda s: s["progress"].update(step="7"),
    "no order": lambda s: s["progress"].pop("order"),
    "no samples": lambda s: s["progress"]["order"].update(num_samples=0),
    "no optimizer": lambda s: s.pop("optimizer_tree"),
    "a scaler of texts": lambda s: s.update(scaler={"scale": "x"}),
    "a history that is none": lambda s: s.update(history="long"),
}


class TestForgery:
    """A checksum that fits is no reason to believe what stands in a file."""

    @pytest.fixture
    def folder(self, tmp_path):
        checkpoints = manager(tmp_path)
        save(checkpoints, 7)
        checkpoints.close()
        return tmp_path / "step-000000000007"

    @pytest.mark.parametrize("how", MANIFESTS)
    def test_a_manifest_is_refused_with(self, folder, how):
        signed(folder, MANIFESTS[how])

        assert store.verify(folder)
        with pytest.raises(CheckpointError):
            store.read_checkpoint(folder)

    @pytest.mark.parametrize("how", STATES)
    def test_a_state_is_refused_with(self, folder, how):
        changed_state(folder, STATES[how])

        again = manager(folder.parent)
        with pytest.raises(CheckpointError, match=r"state\.json: has an invalid field"):
            again.latest()
        again.close()

    @pytest.mark.parametrize(
        ("model", "name", "low", "high"),
        [
            (ProgressDocument, "step", 0, 999_999_999_999),  # twelve digits: names of folders sort by them
            (ProgressDocument, "epoch", 0, 999_999_999_999),
            (ProgressDocument, "cursor", 0, None),
            (ProgressDocument, "metrics_step", -1, None),
            (ProgressDocument, "num_without_improvement", 0, None),
            (ProgressDocument, "order.num_samples", 1, None),
            (ProgressDocument, "order.seed", 0, None),
            (DigestDocument, "size_bytes", 0, 2**60),
            (SummaryDocument, "epochs", 0, None),
            (SummaryDocument, "world_size", 1, 10**7),
        ],
    )
    def test_a_number_is_within_its_limits(self, model, name, low, high):
        whole = {
            ProgressDocument: Progress(DataOrder(9, 0, shuffle=True)).to_json(),
            DigestDocument: {"sha256": "0" * 64, "size_bytes": 1},
            SummaryDocument: SUMMARY,
        }[model]

        def document(value):
            section, _, field = name.rpartition(".")
            return (
                {**whole, section: {**whole[section], field: value}} if section else {**whole, field: value}
            )

        for value in (low, low if high is None else high):
            checked(model, document(value), "it")
        for value in (low - 1, low - 1 if high is None else high + 1):
            with pytest.raises(CheckpointError, match=f"it: has an invalid field: {name}: "):
                checked(model, document(value), "it")

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("kind", ["link", "pipe", "folder", "endless"])
    def test_only_regular_files_are_opened(self, folder, name, kind):
        file = folder / name
        content = file.read_bytes()
        file.unlink()
        if kind == "link":
            (folder.parent / "elsewhere").write_bytes(content)
            file.symlink_to(folder.parent / "elsewhere")
        elif kind == "pipe":
            os.mkfifo(file)
        elif kind == "folder":
            file.mkdir()
        else:
            file.symlink_to("/dev/zero")

        assert store.verify(folder)

    def test_a_file_that_is_larger_than_the_manifest_says_is_not_read(self, folder):
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(2**43)

        (problem,) = store.verify(folder)
        assert "has 8796093022208 bytes instead of" in problem

    @pytest.mark.parametrize(
        "tree",
        [
            {"__tuple__": 7},
            {"__map__": [[1]]},
            {"__map__": [[{"a": []}, 1]]},
            {"__array__": "nothing"},
            {"__array__": []},
        ],
        ids=json.dumps,
    )
    def test_a_tree_that_was_never_packed_is_refused(self, tree):
        with pytest.raises(CheckpointError):
            unpack_tree(tree, {})

    @pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 80, dump_state({}, {})[:-1]])
    def test_generators_that_were_never_packed_are_refused(self, content):
        with pytest.raises(CheckpointError):
            parse_state(content)

    def test_a_state_that_no_replica_takes_is_an_error_of_the_checkpoint(self, folder):
        class Replica:
            def load_state(self, state):
                return state.optimizer_tree["no such key"]

        again = manager(folder.parent)
        resumed = again.latest()
        again.close()

        with pytest.raises(
            CheckpointError,
            match="step-000000000007 does not match the model or the optimizer of this job: KeyError",
        ):
            resume_from(SingleRank(), resumed, Replica(), Progress(DataOrder(9, 0, shuffle=True)), None, None)


class TestWhatHasChangedSince:
    JOB = Job(name="job", task="digits").model_dump(mode="json")

    def resumed(self, folder, job, environment, order=None, before=None):
        first = CheckpointManager(
            folder, Checkpoint(), SingleRank(), before or self.JOB, environment={"torch version": "2.13.0"}
        )
        save(first, 7)
        first.close()
        again = CheckpointManager(folder, Checkpoint(), SingleRank(), job, environment=environment)
        resumed = again.latest()
        changes = changes_since(resumed, order or DataOrder(9, 0, shuffle=True))
        again.mark_resumed(resumed.name, changes)
        save(again, 8)
        again.close()
        return changes, describe(folder / "step-000000000008")

    def test_nothing_is_said_when_nothing_has(self, tmp_path):
        changes, described = self.resumed(tmp_path, self.JOB, {"torch version": "2.13.0"})

        assert changes == []
        assert "resumed from step-000000000007 on 1 rank(s): nothing was changed" in described

    def test_rate_data_code_and_versions_are_named_and_kept(self, tmp_path):
        job = {**self.JOB, "lr": {**self.JOB["lr"], "base_lr": 0.5}, "task_args": {"size": 3}}
        environment = {"torch version": "2.14.0", "task code": "abc"}

        changes, described = self.resumed(tmp_path, job, environment, DataOrder(12, 0, shuffle=True))

        assert changes == [
            "data.num_samples: 9 -> 12",
            "task_args.size: None -> 3",
            "lr.base_lr: 0.01 -> 0.5",
            "task code: None -> abc",
            "torch version: 2.13.0 -> 2.14.0",
        ]
        assert "resumed from step-000000000007 on 1 rank(s): data.num_samples: 9 -> 12; " in described

    def test_where_ranks_run_is_no_change(self, tmp_path):
        job = {**self.JOB, "launch": {**self.JOB["launch"], "num_ranks": 8}, "run_dir": "/elsewhere"}

        changes, _ = self.resumed(tmp_path, job, {"torch version": "2.13.0"})

        assert changes == []

    def test_a_field_that_is_newer_than_the_checkpoint_is_no_change(self, tmp_path):
        before = {**self.JOB, "train": {k: v for k, v in self.JOB["train"].items() if k != "max_steps"}}

        changes, _ = self.resumed(tmp_path, self.JOB, {"torch version": "2.13.0"}, before=before)

        assert changes == []

    def test_a_checkpoint_of_the_version_before_is_resumed(self, tmp_path):
        checkpoints = manager(tmp_path)
        save(checkpoints, 7)
        checkpoints.close()
        changed_state(tmp_path / "step-000000000007", lambda s: (s.pop("environment"), s.pop("history")))

        again = CheckpointManager(
            tmp_path, Checkpoint(), SingleRank(), {"name": "job"}, environment={"python": "3.11"}
        )
        resumed = again.latest()
        again.close()

        assert resumed.state == state()
        assert resumed.changes == ()


class TestInspection:
    def test_differences_are_named_with_their_size(self, tmp_path):
        checkpoints = manager(tmp_path)
        save(checkpoints, 1, value=1.0)
        save(checkpoints, 2, value=1.5)
        checkpoints.close()
        first, second = tmp_path / "step-000000000001", tmp_path / "step-000000000002"

        lines = differences(first, second)

        assert differences(first, first) == []
        assert "model.weight: largest difference 0.5" in lines
        assert "optimizer.state.0.momentum: largest difference 5" in lines
        assert "state.progress.step: 1 -> 2" in lines

    def test_a_damaged_one_is_listed_as_such(self, tmp_path):
        checkpoints = manager(tmp_path)
        save(checkpoints, 1)
        checkpoints.close()
        (found,) = store.list_checkpoints(tmp_path)
        assert "samples of this epoch: 0 of 9 used" in describe(found.path)
        (found.path / "manifest.json").write_text("{}")

        assert "DAMAGED" in describe_row(found)

    def test_bfloat16_is_understood(self):
        halves = (np.array([1.5, -2.0], dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)

        assert as_numbers(ArrayBlob("bfloat16", (2,), halves.tobytes())).tolist() == [1.5, -2.0]


leaves = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.sampled_from(["__map__", "__tuple__", "__array__"])
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.lists(inner).map(tuple),
    max_leaves=20,
)


@given(trees)
def test_any_nested_state_survives_json(tree):
    plain, arrays = pack_tree(tree, lambda leaf: False)

    found, _ = parse_state(dump_state(plain, arrays))

    assert unpack_tree(found, {}) == tree


def test_arrays_in_nested_state_get_names_of_their_own():
    one, two = blob(1.0), blob(2.0)

    plain, arrays = pack_tree(
        {"state": {0: {"m": one}, 1: {"m": two}}}, lambda leaf: isinstance(leaf, ArrayBlob)
    )

    assert arrays == {"state.0.m": one, "state.1.m": two}
    assert unpack_tree(plain, arrays) == {"state": {0: {"m": one}, 1: {"m": two}}}


def test_code_is_not_data():
    with pytest.raises(CheckpointError, match="neither data nor an array"):
        pack_tree({"hook": print}, lambda leaf: False)


SUMMARY = {"epochs": 1.0, "metrics": {}, "unix_time_s": 1.0, "world_size": 1}


class TestThingsOfLater:
    """What is only seen when a folder has been used for long."""

    def test_a_checkpoint_that_is_written_again_replaces_its_old_self(self, tmp_path):
        for value in (1.0, 2.0):
            weight = ArrayBlob("float32", (1,), np.float32([value]).tobytes())
            arrays = {"model": {"w": weight}, "optimizer": {}, "rng": {}}
            content = Content(arrays, {"state": {}, "config": {}}, SUMMARY)
            write_checkpoint(tmp_path, 7, content)

        (found,) = store.list_checkpoints(tmp_path)
        assert store.read_checkpoint(found.path).arrays["model"]["w"].data == np.float32([2.0]).tobytes()
        assert [path.name for path in tmp_path.iterdir()] == ["step-000000000007"]

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (OSError(errno.ENOSPC, "No space left"), "No space left"),
            (OSError("of a library"), "of a library"),
        ],
    )
    def test_one_that_cannot_be_written_says_why_and_leaves_nothing(self, tmp_path, monkeypatch, error, said):
        def refuse(*_):
            raise error

        monkeypatch.setattr(writing, "write_arrays", refuse)
        content = Content({"model": {}}, {"state": {}, "config": {}}, SUMMARY)

        with pytest.raises(CheckpointError, match=f"cannot write {tmp_path}/step-000000000007: {said}"):
            write_checkpoint(tmp_path, 7, content)

        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("other", [3, 9])
    def test_a_copy_of_another_step_in_its_place_is_kept_aside(self, tmp_path, other):
        content = Content({"model": {}, "optimizer": {}, "rng": {}}, {"state": {}, "config": {}}, SUMMARY)
        first = write_checkpoint(tmp_path, other, content)
        assert first is not None
        (tmp_path / f"step-00000000000{other}").rename(tmp_path / "step-000000000007")

        write_checkpoint(tmp_path, 7, content)

        assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {"step", "renamed"}

    @pytest.mark.parametrize("damage", [b"", b"{", b"[" * 100_000])
    def test_generators_whose_tree_cannot_be_read_are_damaged(self, damage):
        whole = ArrayBlob("uint8", (len(damage),), damage)
        content = dump_state({}, {})
        assert parse_state(content) == ({}, {})
        name = next(iter(parse_arrays(content)))
        broken = _header({name: whole}) + damage

        with pytest.raises(CheckpointError, match="per-rank state.* is damaged"):
            parse_state(broken)
        with pytest.raises(CheckpointError, match="per-rank state.* is damaged"):
            parse_state(_header({"other": whole}) + damage)


class TestAFolder:
    """What stands in a folder of checkpoints, and what becomes of it."""

    @pytest.fixture
    def folder(self, tmp_path):
        checkpoints = manager(tmp_path, keep_last=100)
        for step in (1, 2, 3):
            save(checkpoints, step, metrics={"loss": 1 / step})
        checkpoints.close()
        return tmp_path

    def test_that_is_not_there_has_none(self, tmp_path):
        assert store.list_checkpoints(tmp_path / "nowhere") == []

    def test_an_element_type_that_no_file_has_is_refused(self):
        with pytest.raises(CheckpointError, match=r"cannot save weight: element type float80 is not"):
            dump_state({}, {"weight": ArrayBlob("float80", (1,), b"0" * 10)})

    @pytest.mark.parametrize("name", [".writing-step-000000000005-1", ".replaced-step-000000000003"])
    def test_with_a_file_where_a_writer_leaves_folders_is_used_all_the_same(self, folder, name):
        (folder / name).write_text("what is this?")

        checkpoints = manager(folder)

        assert checkpoints.latest().progress["step"] == 3
        checkpoints.close()

    def test_what_is_set_aside_twice_has_two_names(self, folder):
        newest = store.list_checkpoints(folder)[0]
        first = store.quarantine(newest.path, "earlier")
        shutil.copytree(first, newest.path)

        second = store.quarantine(newest.path, "earlier")

        assert [first.name, second.name] == [f"earlier-{number}-step-000000000003" for number in (1, 2)]

    def test_that_was_set_aside_as_damaged_is_kept_when_a_run_starts_anew(self, folder):
        (folder / "step-000000000003" / "model.safetensors").write_bytes(b"")
        store.quarantine(store.list_checkpoints(folder)[0].path, store.DAMAGED)

        checkpoints = manager(folder, resume="never")
        assert checkpoints.latest() is None
        checkpoints.close()

        assert names(folder) == []
        assert store.list_damaged(folder) == []
        assert len(list(folder.glob("earlier-*-step-*"))) == 3

    def test_a_writer_that_was_killed_after_its_renames_leaves_nothing(self, folder):
        replaced = folder / (store.REPLACED + "step-000000000003")
        shutil.copytree(folder / "step-000000000003", replaced)

        store.remove_leftovers(folder)

        assert not replaced.exists()
        assert names(folder) == [3, 2, 1]

    def test_the_best_is_chosen_among_those_that_can_be_read(self, folder):
        (folder / "step-000000000002" / "manifest.json").write_text("{}")

        checkpoints = manager(folder, best={"metric": "loss", "mode": "max"}, keep_last=1)
        save(checkpoints, 4, metrics={"loss": 0.01})
        checkpoints.close()

        assert names(folder) == [4, 1]

    def test_old_ones_that_cannot_be_removed_keep_no_new_one_from_being_written(
        self, folder, monkeypatch, caplog
    ):
        def refuse(checkpoint):
            raise PermissionError("no")

        monkeypatch.setattr(store, "remove", refuse)

        checkpoints = manager(folder, keep_last=1)
        save(checkpoints, 4)
        checkpoints.close()

        assert names(folder) == [4, 3, 2, 1]
        assert "old checkpoints were not removed: no" in caplog.text

    def test_one_that_cannot_be_written_is_told_in_the_log(self, folder, monkeypatch, caplog):
        def refuse(*_):
            raise CheckpointError("the disk is full")

        monkeypatch.setattr(Writing, "complete", refuse)

        checkpoints = manager(folder)
        with pytest.raises(CheckpointError, match="the last checkpoint was not written: the disk is full"):
            save(checkpoints, 4)
        checkpoints.close()

        assert "checkpoint of step 4 was not written: the disk is full" in caplog.text

    def test_one_that_was_refused_half_written_leaves_nothing(self, folder):
        content = store.read_checkpoint(folder / "step-000000000003")
        content.arrays["model"] = {"weight": ArrayBlob("float80", (1,), b"0" * 10)}

        with pytest.raises(CheckpointError, match="float80"):
            write_checkpoint(folder, 4, content)

        assert names(folder) == [3, 2, 1]
        assert not list(folder.glob(f"{store.TEMPORARY}*"))

    def test_that_does_not_exist_yet_is_made_for_the_first_one(self, folder, tmp_path):
        content = store.read_checkpoint(folder / "step-000000000003")

        write_checkpoint(tmp_path / "new" / "deep", 4, content)

        assert names(tmp_path / "new" / "deep") == [4]

    def test_what_the_manifest_does_not_name_is_not_read(self, folder):
        path = folder / "step-000000000003"
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["sha256"], manifest["files"]["optimizer.safetensors"]
        manifest["sha256"] = store.checksum(manifest)
        (path / "manifest.json").write_text(json.dumps(manifest))

        with pytest.raises(CheckpointError, match=r"optimizer\.safetensors: is not in the manifest"):
            store.read_checkpoint(path)

    def test_a_document_that_is_no_json_is_damaged(self, tmp_path):
        with pytest.raises(CheckpointError, match="state.json: is not JSON"):
            store._parse_json(tmp_path / "state.json", b"{")

    def test_that_is_a_file_is_told(self, tmp_path):
        (tmp_path / "checkpoints").write_text("")

        with pytest.raises(OperationalError, match="cannot use .*checkpoints for checkpoints: File exists"):
            manager(tmp_path / "checkpoints")

    def test_on_a_disk_without_locks_is_used_with_a_warning(self, tmp_path, monkeypatch, caplog):
        def refuse(handle, operation):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr("fcntl.flock", refuse)

        manager(tmp_path).close()

        assert f"{tmp_path} does not support locks: start one run of this name at a time" in caplog.text

    def test_on_a_disk_that_fails_is_not(self, tmp_path, monkeypatch):
        def refuse(handle, operation):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr("fcntl.flock", refuse)

        with pytest.raises(OperationalError, match="Input/output error"):
            manager(tmp_path)

    def test_generators_of_a_rank_that_are_missing_are_damage(self, tmp_path):
        content = Content({"rng": {}}, {}, {"world_size": 1})
        checkpoints = manager(tmp_path)

        with pytest.raises(CheckpointError, match=r"the random generators of rank\.0 are missing"):
            checkpoints._rank_generators(content)
        checkpoints.close()

    def test_a_row_says_what_a_person_chooses_by(self, folder):
        rows = [describe_row(checkpoint) for checkpoint in store.list_checkpoints(folder)]

        assert rows[0].startswith("step-000000000003  epoch 0.300 ")
        assert " MB  1 rank(s)  19" in rows[0]
        assert rows[0].endswith("  loss 0.3333")

    def test_what_only_one_of_two_has_is_named(self, tmp_path):
        paths = []
        for step, arrays in enumerate(
            (
                {"a": blob(1.0), "b": blob(1.0), "c": blob(1.0)},
                {"b": blob(1.0, 2.0), "c": blob(1, dtype="int32"), "d": blob(1.0)},
            )
        ):
            documents = {"state": {}, "config": {}}
            summary = {"epochs": 1.0, "metrics": {}, "unix_time_s": 0.0, "world_size": 1}
            content = Content({"model": arrays, "optimizer": {}, "rng": {}}, documents, summary)
            write_checkpoint(tmp_path, step, content)
            paths.append(tmp_path / f"step-{step:012d}")

        assert differences(*paths) == [
            "model.a: only in the first",
            "model.b: float32 [1] -> float32 [2]",
            "model.c: float32 [1] -> int32 [1]",
            "model.d: only in the second",
        ]

    def test_types_that_numpy_does_not_know_have_no_numbers(self):
        assert as_numbers(ArrayBlob("float8_e5m2", (2,), b"\x01\x02")) is None
        assert as_numbers(ArrayBlob("complex32", (1,), b"\x01\x02\x03\x04")) is None
        pair = np.array([3 + 4j], np.complex64)
        assert np.abs(as_numbers(ArrayBlob("complex64", (1,), pair.tobytes()))).tolist() == [5.0]


def test_what_one_rank_cannot_read_is_an_error_on_all(tmp_path):
    def rank(world):
        checkpoints = manager(tmp_path, world)
        save(checkpoints, 1)
        checkpoints.close()
        again = manager(tmp_path, world)
        if world.rank == 1:
            again._read = lambda name: (None, [], f"{name}: is missing")
        try:
            return again.latest()
        finally:
            again.close()

    for error in on_ranks(3, rank):
        assert isinstance(error, CheckpointError)
        assert "rank 1 cannot read step-000000000001: step-000000000001: is missing" in str(error)


def test_a_long_value_is_shown_shortened():
    (line,) = document_changes({"a": "x" * 500}, {"a": "y"}, "data")

    assert "xxx..." in line
    assert len(line) < 400
