"""A model that ranks share is saved by all of them, and read back by as many as there are then."""

from __future__ import annotations

import errno
import logging
from dataclasses import replace
from itertools import pairwise
from threading import Event

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from support.worlds import on_ranks

from horovod_train.checkpoint import store, writing
from horovod_train.checkpoint.arrays import ArrayBlob, Part, ReplicaState
from horovod_train.checkpoint.inspect import differences, export
from horovod_train.checkpoint.manager import CheckpointManager, find_holders, keyed
from horovod_train.checkpoint.store import newest_valid
from horovod_train.checkpoint.writing import Writing
from horovod_train.config.schema import Checkpoint
from horovod_train.data.order import DataOrder
from horovod_train.errors import CheckpointError, DesyncError
from horovod_train.health.comparisons import check_before_saving, check_replicas_identical
from horovod_train.training.run import Progress

DOCUMENTS = {"state": {}, "config": {}}
PROGRESS = Progress(DataOrder(9, 0, shuffle=True)).to_json()
WEIGHT = np.arange(7 * 4, dtype=np.float64).reshape(7, 4)
BIAS = np.arange(5, dtype=np.float32)


def piece_of(array, start, lengths):
    """A part of an array as a rank has it: a box, or with one number a piece of the flat array."""
    if len(start) == array.ndim:
        own = array[tuple(slice(at, at + length) for at, length in zip(start, lengths, strict=True))]
    else:
        own = array.reshape(-1)[start[0] : start[0] + lengths[0]]
    return ArrayBlob(
        str(array.dtype), tuple(lengths), np.ascontiguousarray(own).tobytes(), Part(array.shape, tuple(start))
    )


def whole(array):
    return ArrayBlob(str(array.dtype), array.shape, array.tobytes())


def rows(array, rank, size):
    """This rank's rows, the first ranks one more."""
    bounds = [len(array) * at // size for at in range(size + 1)]
    lengths = (bounds[rank + 1] - bounds[rank], *array.shape[1:])
    return piece_of(array, (bounds[rank], *[0] * (array.ndim - 1)), lengths)


def state_of(world, value=0.0):
    """What a rank has: rows of the weight, all of the bias, a piece of the flat momentum."""
    bounds = [WEIGHT.size * at // world.size for at in range(world.size + 1)]
    start, length = bounds[world.rank], bounds[world.rank + 1] - bounds[world.rank]
    return ReplicaState(
        model={"weight": rows(WEIGHT + value, world.rank, world.size), "bias": whole(BIAS)},
        optimizer={"momentum": piece_of(10 * WEIGHT + value, (start,), (length,))},
        optimizer_tree={"momentum": {"__array__": "momentum"}},
        scaler={},
        is_sharded=True,
    )


def save(checkpoints, world, step, value=0.0, *, wait=True):
    state = state_of(world, value)
    checkpoints.save(
        step,
        take_state=lambda copy: state,
        holders=check_before_saving(world, state, step),
        rng=b"generators",
        progress={**PROGRESS, "step": step},
        summary={"epochs": step / 10, "metrics": {}, "unix_time_s": 0.0},
        wait=wait,
    )


def saved(folder, size, steps=(3,)):
    """Save on so many ranks; return what became of each, and what rank 0 was told of each write."""
    reports = []

    def rank(world):
        checkpoints = CheckpointManager(folder, Checkpoint(), world, {"name": "job"}, reports.append)
        try:
            for step in steps:
                save(checkpoints, world, step, value=step, wait=step == steps[-1])
        finally:
            checkpoints.close()

    return on_ranks(size, rank), reports


def numbers(blob):
    return np.frombuffer(blob.data, blob.dtype).reshape(blob.shape)


class TestAModelThatRanksShare:
    def test_is_written_by_all_of_them_and_each_array_once(self, tmp_path):
        results, reports = saved(tmp_path, 3)

        assert results == [None] * 3
        assert [(report.step, report.error) for report in reports] == [(3, "")]
        (found,) = store.list_checkpoints(tmp_path)
        assert sorted(path.name for path in found.path.iterdir()) == [
            "config.json",
            "manifest.json",
            *(f"model-0000{rank}.safetensors" for rank in range(3)),
            *(f"optimizer-0000{rank}.safetensors" for rank in range(3)),
            "rng.safetensors",
            "state.json",
        ]
        assert store.verify(found.path) == []
        read = store.read_checkpoint(found.path).arrays
        assert read["model"].keys() == {"weight", "bias"}
        np.testing.assert_array_equal(numbers(read["model"]["weight"]), WEIGHT + 3)
        np.testing.assert_array_equal(numbers(read["model"]["bias"]), BIAS)
        np.testing.assert_array_equal(numbers(read["optimizer"]["momentum"]), 10 * WEIGHT + 3)
        assert reports[0].size_bytes == sum(
            path.stat().st_size for path in found.path.iterdir() if path.name != "manifest.json"
        )

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_comes_back_on_any_number_of_ranks_each_its_own_part(self, tmp_path, size):
        saved(tmp_path, 3)

        def rank(world):
            checkpoints = CheckpointManager(tmp_path, Checkpoint(), world, {"name": "job"})
            resumed = checkpoints.latest()
            wanted = rows(WEIGHT + 3, world.rank, world.size)
            checkpoints.close()
            return resumed.state.model.part("weight", wanted.shape, wanted.part), wanted

        for found, wanted in on_ranks(size, rank):
            assert bytes(found.data) == bytes(wanted.data)
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)

    def test_is_compared_where_several_have_the_same_and_nowhere_else(self):
        def rank(world, wrong):
            state = state_of(world)
            if world.rank == 1:
                changed = wrong(state.model)
                state = replace(state, model={**state.model, **changed})
            check_replicas_identical(world, state, "now")

        own = {"weight": rows(WEIGHT + 1, 1, 3)}
        bias = {"bias": whole(BIAS + 1)}
        # (A part that only rank 1 has may be anything.)
        assert (
            on_ranks(3, lambda world: rank(world, lambda model: own if world.rank == 1 else {})) == [None] * 3
        )
        for error in on_ranks(3, lambda world: rank(world, lambda model: bias)):
            assert isinstance(error, DesyncError)
            assert "rank 1 against the others, in 1 of 2 arrays, first model.bias" in str(error)

    def test_two_of_three_that_have_a_part_alike_are_compared(self):
        def rank(world):
            first, second = piece_of(WEIGHT, (0, 0), (3, 4)), piece_of(WEIGHT + world.rank, (3, 0), (4, 4))
            model = {"weight": first if world.rank == 1 else second}
            check_before_saving(world, ReplicaState(model, {}, None, {}, is_sharded=True), 5)

        for error in on_ranks(3, rank):
            assert "rank 0 against rank 2" in str(error)
            assert "first model.weight [3, 0] [4, 4]" in str(error)

    def test_a_rank_that_lacks_what_all_should_have_is_an_error(self):
        """Only where ranks share a model may one have less than others."""

        def rank(world):
            model = {"weight": whole(WEIGHT), **({"bias": whole(BIAS)} if world.rank else {})}
            check_replicas_identical(world, ReplicaState(model, {}, None, {}), "now")

        for error in on_ranks(3, rank):
            assert isinstance(error, DesyncError)
            assert "first model.bias" in str(error)


class TestWriters:
    def test_of_what_several_have_the_first_is_the_writer(self):
        def rank(world):
            holders = find_holders(world, state_of(world))
            return holders.writers, sorted(holders.arrays_to_write("model", state_of(world).model))

        assert on_ranks(3, rank) == [
            ((0, 1, 2), ["bias", "weight"]),
            ((0, 1, 2), ["weight"]),
            ((0, 1, 2), ["weight"]),
        ]

    def test_where_all_have_all_rank_0_writes(self):
        def rank(world):
            state = ReplicaState({"weight": whole(WEIGHT)}, {}, None, {})
            return find_holders(world, state).writers, len(dict(keyed(state)))

        assert on_ranks(2, rank) == [((0,), 1)] * 2

    @pytest.mark.parametrize("bad", [0, 1, 2])
    def test_one_that_cannot_write_costs_that_checkpoint_only(self, tmp_path, monkeypatch, bad, caplog):
        write = writing.write_files

        def refuse(folder, content, rank=None):
            if rank == bad and "step-000000000002" in folder.name:
                raise CheckpointError(f"cannot write {folder}: No space left on device")
            return write(folder, content, rank)

        monkeypatch.setattr(writing, "write_files", refuse)
        results, reports = saved(tmp_path, 3, steps=(1, 2, 3))

        assert results == [None] * 3
        assert [found.step for found in store.list_checkpoints(tmp_path)] == [3, 1]
        assert [bool(report.error) for report in reports] == [False, True, False]
        assert "No space left" in reports[1].error
        assert bad == 0 or f"rank {bad}" in reports[1].error
        assert not list(tmp_path.glob(f"{store.TEMPORARY}*"))

    def test_one_that_cannot_even_say_so_is_told_by_the_ranks_themselves(self, tmp_path, monkeypatch):
        leave = writing.write_note

        def refuse(folder, *what):
            if "step-000000000002" in folder.name:
                raise OSError(errno.ENOSPC, "No space left on device")
            leave(folder, *what)

        monkeypatch.setattr(writing, "write_note", refuse)
        results, reports = saved(tmp_path, 2, steps=(1, 2, 3))

        assert results == [None] * 2
        assert [found.step for found in store.list_checkpoints(tmp_path)] == [3, 1]
        assert "rank 1" in reports[1].error

    def test_the_last_one_that_fails_is_an_error_on_all_ranks(self, tmp_path, monkeypatch):
        write = writing.write_files

        def refuse(folder, content, rank=None):
            if rank == 1:
                raise CheckpointError("the disk is full")
            return write(folder, content, rank)

        monkeypatch.setattr(writing, "write_files", refuse)
        results, _ = saved(tmp_path, 3)

        assert all(isinstance(error, CheckpointError) for error in results)
        assert all("rank 1" in str(error) and "the disk is full" in str(error) for error in results)

    def test_a_write_in_the_background_is_complete_though_training_ends_in_an_error(self, tmp_path):
        """Ranks that fail close by themselves: none of them can ask the others."""

        def rank(world):
            checkpoints = CheckpointManager(tmp_path, Checkpoint(), world, {"name": "job"})
            try:
                save(checkpoints, world, 3, wait=False)
                raise ValueError("training went wrong")
            finally:
                checkpoints.close()

        assert all(isinstance(error, ValueError) for error in on_ranks(3, rank))
        (found,) = store.list_checkpoints(tmp_path)
        assert store.verify(found.path) == []

    def test_a_rank_that_was_lost_is_not_waited_for_for_ever(self, tmp_path, monkeypatch, caplog):
        monkeypatch.setattr("horovod_train.checkpoint.manager.MAX_WAIT_AT_THE_END_S", 0.2)
        is_lost, part = Event(), Writing.write_part

        def lost(self, rank, content):
            if rank == 2:
                is_lost.set()
                return
            part(self, rank, content)

        monkeypatch.setattr(Writing, "write_part", lost)

        def rank(world):
            checkpoints = CheckpointManager(tmp_path, Checkpoint(), world, {"name": "job"})
            save(checkpoints, world, 3, wait=False)
            assert is_lost.wait(20)
            checkpoints.close()

        with caplog.at_level(logging.WARNING, "horovod_train"):
            assert on_ranks(3, rank) == [None] * 3

        assert store.list_checkpoints(tmp_path) == []
        assert "rank 2 did not write: no result within the time after the end of training" in caplog.text

    def test_a_folder_that_cannot_be_made_is_told_and_nobody_waits(self, tmp_path, monkeypatch):
        def refuse(folder):
            raise CheckpointError(f"cannot write {folder}: Permission denied")

        monkeypatch.setattr("horovod_train.checkpoint.manager.begin", refuse)
        results, reports = saved(tmp_path, 2, steps=(1, 2))

        assert all("Permission denied" in str(error) for error in results)
        assert len(reports) == 2


class TestDamage:
    @pytest.mark.parametrize("name", ["model-00001.safetensors", "optimizer-00002.safetensors"])
    def test_of_any_ranks_file_is_noticed_and_the_one_before_is_used(self, tmp_path, name):
        saved(tmp_path, 3, steps=(1, 2))
        file = tmp_path / "step-000000000002" / name
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

        def rank(world):
            checkpoints = CheckpointManager(tmp_path, Checkpoint(), world, {"name": "job"})
            resumed = checkpoints.latest()
            checkpoints.close()
            return resumed.name

        assert on_ranks(3, rank) == ["step-000000000001"] * 3
        assert (tmp_path / "damaged-1-step-000000000002").is_dir()

    def test_that_only_one_host_sees_is_no_damage(self, tmp_path):
        """Its folder is not that of the others: that is told, and nothing is set aside."""
        saved(tmp_path / "shared", 3)

        def rank(world):
            return newest_valid(tmp_path / ("shared" if world.rank != 1 else "elsewhere"), world)

        assert on_ranks(3, rank) == [("step-000000000003", "")] * 3

    def test_while_it_is_read_names_file_and_array(self, tmp_path):
        saved(tmp_path, 2)
        (found,) = store.list_checkpoints(tmp_path)
        read = store.read_checkpoint(found.path).arrays["model"]
        file = found.path / "model-00001.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

        assert len(read["bias"].data)
        with pytest.raises(CheckpointError, match=r"model-00001\.safetensors: is damaged.*weight"):
            read["weight"]

    def test_an_array_of_which_a_part_is_missing_is_not_made_up(self, tmp_path):
        def rank(world):
            checkpoints = CheckpointManager(tmp_path, Checkpoint(), world, {"name": "job"})
            state = state_of(world)
            if world.rank == 1:
                state = replace(state, model={})
            save_state(checkpoints, world, state)
            checkpoints.close()

        assert on_ranks(2, rank) == [None] * 2
        read = store.read_checkpoint(tmp_path / "step-000000000001").arrays["model"]
        with pytest.raises(CheckpointError, match="weight: 12 of its 28 elements"):
            read["weight"]

    def test_of_pieces_that_do_not_belong_together_is_refused(self, tmp_path):
        def rank(world):
            checkpoints = CheckpointManager(tmp_path, Checkpoint(), world, {"name": "job"})
            model = {"weight": rows(WEIGHT if world.rank else WEIGHT[:, :3], world.rank, world.size)}
            save_state(checkpoints, world, ReplicaState(model, {}, None, {}, is_sharded=True))
            checkpoints.close()

        assert on_ranks(2, rank) == [None] * 2
        with pytest.raises(CheckpointError, match=r"weight is of float64 \[7, 4\], and in .* \[7, 3\]"):
            store.read_checkpoint(tmp_path / "step-000000000001")


def save_state(checkpoints, world, state):
    checkpoints.save(
        1,
        take_state=lambda copy: state,
        holders=find_holders(world, state),
        rng=b"generators",
        progress={**PROGRESS, "step": 1},
        summary={"epochs": 0.1, "metrics": {}, "unix_time_s": 0.0},
        wait=True,
    )


class TestExport:
    def test_joins_what_ranks_have_written(self, tmp_path):
        saved(tmp_path / "run" / "checkpoints", 3, steps=(1, 2))

        found, size_bytes, _ = export(tmp_path / "run", tmp_path / "model.safetensors")

        assert found.name == "step-000000000002"
        assert size_bytes == (tmp_path / "model.safetensors").stat().st_size
        tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
        assert tensors.keys() == {"weight", "bias"}
        np.testing.assert_array_equal(tensors["weight"], WEIGHT + 2)
        np.testing.assert_array_equal(tensors["bias"], BIAS)

    def test_takes_the_newest_that_is_not_damaged_and_leaves_nothing_else_behind(self, tmp_path):
        saved(tmp_path / "run", 2, steps=(1, 2))
        file = tmp_path / "run" / "step-000000000002" / "model-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-1])

        found, *_ = export(tmp_path / "run", tmp_path / "out.safetensors")

        assert found.name == "step-000000000001"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "run"]

    def test_never_writes_over_a_file(self, tmp_path):
        saved(tmp_path / "run", 2)
        (tmp_path / "mine").write_text("precious")

        with pytest.raises(CheckpointError, match="mine already exists"):
            export(tmp_path / "run", tmp_path / "mine")

        assert (tmp_path / "mine").read_text() == "precious"

    def test_of_a_folder_without_a_checkpoint_says_so(self, tmp_path):
        with pytest.raises(CheckpointError, match="has no valid checkpoint"):
            export(tmp_path, tmp_path / "out")

    def test_into_a_folder_that_is_not_there_says_so(self, tmp_path):
        saved(tmp_path / "run", 2)

        with pytest.raises(CheckpointError, match="cannot write .*nowhere/out: No such file"):
            export(tmp_path / "run", tmp_path / "nowhere" / "out")


def test_another_number_of_ranks_makes_no_difference_to_a_comparison(tmp_path):
    saved(tmp_path / "two", 2)
    saved(tmp_path / "three", 3)

    lines = differences(tmp_path / "two" / "step-000000000003", tmp_path / "three" / "step-000000000003")

    assert lines == []


@st.composite
def cut_arrays(draw):
    """An array, pieces that together are all of it, and what somebody wants of it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(["float64", "float32", "int16", "uint8"]))
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    is_flat = draw(st.booleans())
    frame = (array.size,) if is_flat else shape
    bounds = [sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=2))}) for length in frame]
    boxes = [[]]
    for edges in bounds:
        boxes = [[*box, pair] for box in boxes for pair in pairwise(edges)]
    pieces = [
        piece_of(array, [first for first, _ in box], [last - first for first, last in box]) for box in boxes
    ]
    wants_flat = draw(st.booleans())
    wanted_frame = (array.size,) if wants_flat else shape
    start = [draw(st.integers(0, length)) for length in wanted_frame]
    lengths = [draw(st.integers(0, length - at)) for length, at in zip(wanted_frame, start, strict=True)]
    return array, pieces, piece_of(array, start, lengths)


@given(cut=cut_arrays())
@settings(max_examples=300, deadline=None)
def test_any_part_comes_back_from_any_pieces(cut, tmp_path_factory):
    array, pieces, wanted = cut
    folder = tmp_path_factory.mktemp("pieces") / f"{store.TEMPORARY}step-000000000001-1"
    writing.begin(folder)
    files = {}
    for rank, piece in enumerate(pieces):
        files |= writing.write_files(
            folder, writing.Content({"model": {"a": piece}}, {} if rank else DOCUMENTS, {}), rank
        )
    summary = {"epochs": 0.0, "metrics": {}, "unix_time_s": 0.0, "world_size": 1}
    writing.commit(folder, 1, files, writing.Content({}, DOCUMENTS, summary))

    read = store.read_checkpoint(folder.with_name("step-000000000001"), ["model"]).arrays["model"]

    assert read["a"] == whole(array)
    found = read.part("a", wanted.shape, wanted.part)
    assert (bytes(found.data), found.shape, found.part) == (wanted.data, wanted.shape, wanted.part)
