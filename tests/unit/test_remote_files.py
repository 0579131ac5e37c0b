"""Files on an object store that fails are read completely, once, or are named."""

from __future__ import annotations

import io
import random
import re

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.files import SIZES, json_lines, webdataset
from support.s3 import FAULTS, s3_store
from support.waiting import wait_until

from horovod_train.data import dataset, remote
from horovod_train.data.index import cached_name
from horovod_train.data.order import order_of, settings_of
from horovod_train.data.remote import expand_braces
from horovod_train.data.shard import StepsOfEpoch
from horovod_train.data.source import DataError
from horovod_train.errors import UserError


@pytest.fixture(scope="module", autouse=True)
def _event_loop():
    """fsspec starts one thread for all file systems."""
    import fsspec.asyn

    fsspec.asyn.get_loop()


@pytest.fixture(scope="module")
def store():
    with s3_store() as made:
        yield made


@pytest.fixture
def s3(store, tmp_path, monkeypatch):
    """The store, with files in WebDataset's format, for clients of this test."""
    import s3fs

    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "MAX_DELAY_S", 0.05)
    folder = tmp_path / "written"
    folder.mkdir()
    webdataset(folder)
    for path in folder.iterdir():
        store.put(f"{tmp_path.name}/{path.name}", path.read_bytes())
    store.requests.clear()
    yield store
    store.faults.clear()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def files_of(tmp_path):
    def made(pattern="train-*.tar", source="webdataset", cache="cache", **more):
        opened.append(
            dataset.open_files(
                source,
                f"s3://data/{tmp_path.name}/{pattern}",
                index_dir=str(tmp_path / "index"),
                cache_dir=str(tmp_path / cache),
                **more,
            )
        )
        return opened[-1]

    opened = []
    yield made
    for each in opened:
        each.close()


def ids(found):
    return [sample["json"]["id"] for sample in found.__getitems__(range(len(found)))]


def test_files_are_copied_once(s3, files_of):
    assert ids(files_of()) == list(range(sum(SIZES)))
    assert ids(files_of("train-{000..004}.tar")) == list(range(sum(SIZES)))
    copied = [path for path in s3.requests if "train-" in path]
    assert len(copied) == len(set(copied)) == len(SIZES), "the second dataset found them in the cache"


@pytest.mark.parametrize("seed", range(4))
def test_a_store_that_fails_in_every_way_loses_nothing(s3, files_of, seed):
    chosen = random.Random(seed)
    s3.faults.extend(chosen.choices(FAULTS, k=14))

    assert ids(files_of()) == list(range(sum(SIZES)))
    assert len(s3.requests) > len(SIZES), "some were repeated"


def test_a_store_that_always_fails_is_told_with_the_file(s3, files_of):
    found = files_of(cache="first")
    s3.faults.extend(["503"] * 1000)
    again = dataset.FileDataset(found.index, found.source, dataset.cache_of(f"{found.cache.folder}-2", 1))
    with pytest.raises(DataError, match=r"s3://data/.*/train-000\.tar: 6 attempts have failed"):
        again[0]
    again.close()


def test_an_object_that_has_changed_is_named(s3, files_of, tmp_path):
    found = files_of(cache="first")
    content = (tmp_path / "written" / "train-000.tar").read_bytes()
    s3.put(f"{tmp_path.name}/train-000.tar", content.replace(b"\xc3\xa9 0", b"\xc3\xa9 9"))
    s3.put(f"{tmp_path.name}/train-002.tar", b"short")
    again = dataset.FileDataset(found.index, found.source, dataset.cache_of(f"{found.cache.folder}-2", 1))

    for number, name in ((0, "train-000"), (6, "train-002")):
        with pytest.raises(DataError, match=rf"{name}\.tar: has changed since the index"):
            again[number]
    again.close()


def test_files_that_do_not_exist_are_an_error_at_once(s3, files_of):
    with pytest.raises(UserError, match=r"train-005\.tar: does not exist"):
        files_of("train-{000..009}.tar")
    with pytest.raises(UserError, match="no file fits s3://"):
        files_of("nothing-*.tar")


def test_compressed_files_are_unpacked_once_in_the_cache(s3, files_of, tmp_path):
    folder = tmp_path / "lines"
    folder.mkdir()
    json_lines(folder, suffix=".gz")
    for path in folder.iterdir():
        s3.put(f"{tmp_path.name}/{path.name}", path.read_bytes())
    found = files_of("train-*.jsonl.gz", source="jsonl")

    assert [sample["id"] for sample in found.__getitems__(range(len(found)))] == list(range(sum(SIZES)))
    kept = sorted(path.name[9:] for path in (tmp_path / "cache" / "files").glob("*/*-*"))
    assert kept == [f"train-{at:03d}.jsonl.gz" for at in range(len(SIZES))]


def test_the_next_files_are_copied_before_they_are_read(s3, files_of):
    found = files_of(cache="first")
    s3.requests.clear()
    again = dataset.FileDataset(found.index, found.source, dataset.cache_of(f"{found.cache.folder}-2", 1))
    prefetcher = again.prefetcher(np.arange(start, start + 3) for start in range(0, 18, 3))
    try:
        prefetcher.advance()
        wait_until(lambda: len({path for path in s3.requests if "train-" in path}) >= 3)
    finally:
        prefetcher.close()
    assert ids(again)[:3] == [0, 1, 2]
    again.close()


def test_a_file_that_is_being_copied_is_named_with_its_rate(s3, files_of):
    found = files_of(cache="first")
    again = dataset.FileDataset(found.index, found.source, dataset.cache_of(f"{found.cache.folder}-2", 1))
    assert again.waiting_for(np.array([6, 7])) == ""
    making = again.cache.folder / cached_name(again.index.listed(2), again.source) / ".making-train-002.tar"
    making.parent.mkdir(parents=True)
    making.write_bytes(b"x" * 2**20)

    said = again.waiting_for(np.array([6, 7]))
    assert re.fullmatch(r"s3://data/.*/train-002\.tar \(1\.0 of 0\.0 MiB, [0-9.e+]+ MiB/s\)", said)
    again.close()


def test_files_of_this_host_are_not_copied(tmp_path):
    webdataset(tmp_path)
    found = dataset.open_files("webdataset", str(tmp_path / "train-*.tar"), index_dir=str(tmp_path / "index"))

    assert not found.has_cached_files
    assert found.prefetcher(iter([])) is None
    found.close()


def test_files_far_ahead_are_not_looked_for(s3, files_of, monkeypatch):
    """An epoch may have millions of batches."""
    monkeypatch.setattr(dataset, "MAX_LOOKAHEAD", 5)
    found, examined = files_of(), []

    def upcoming():
        for number in range(1000):
            examined.append(number)
            yield np.array([0])

    prefetcher = found.prefetcher(upcoming())
    try:
        wait_until(lambda: len(examined) == 7)
        prefetcher.advance()
        wait_until(lambda: len(examined) == 8)
    finally:
        prefetcher.close()
    assert len(examined) == 8


NUM_FILES = 128


@pytest.fixture
def counted(monkeypatch):
    """A file system that counts the bytes that are read, with files of 300 to 306 samples."""
    files, num_read = MemoryFileSystem(), []
    for number in range(NUM_FILES):
        written = io.BytesIO()
        np.save(written, 400 * number + np.arange(300 + number % 7)[:, None])
        files.pipe(f"/data/{number:03d}.npy", written.getvalue())
    opener = MemoryFileSystem._open

    def opened(self, path, mode="rb", **more):
        if mode == "rb":
            num_read.append(self.info(path)["size"])
        return opener(self, path, mode, **more)

    monkeypatch.setattr(MemoryFileSystem, "_open", opened)
    yield num_read
    files.rm("/data", recursive=True)


@pytest.mark.parametrize("num_hosts", [1, 8])
def test_hosts_together_read_the_data_once(tmp_path, counted, num_hosts):
    """With consecutive slices of one order of all samples, 8 hosts would read it 8 times."""

    def files_of(cache):
        return dataset.open_files(
            "arrays",
            f"memory:///data/{{000..{NUM_FILES - 1}}}.npy",
            index_dir=str(tmp_path / "index"),
            cache_dir=str(tmp_path / cache),
        )

    def read_by(host):
        found = files_of(f"host-{host}")
        length = len(found)
        settings = settings_of(found, length, seed=0, shuffle=True, samples_per_epoch=None, row_size=256)
        order = order_of(settings, found, 0)
        steps = StepsOfEpoch(
            num_samples=length,
            cursor=0,
            batch_size_per_rank=256 // num_hosts,
            accumulation_steps=1,
            rank=host,
            size=num_hosts,
        )
        pieces = [order[each.start : each.stop] for step in steps for each in step.micro_batches]
        samples = [sample for piece in pieces for sample in found.__getitems__(piece.tolist())]
        found.close()
        return [int(sample["array"][0]) for sample in samples]

    files_of("first").close()  # the index is made
    size_bytes = sum(counted)
    counted.clear()

    read = [sample for host in range(num_hosts) for sample in read_by(host)]
    assert sorted(read) == [400 * file + at for file in range(NUM_FILES) for at in range(300 + file % 7)]
    assert size_bytes <= sum(counted) <= 1.1 * size_bytes


def test_braces_are_expanded_like_in_a_shell():
    assert expand_braces("a{1..3}b{x,y}") == ["a1bx", "a1by", "a2bx", "a2by", "a3bx", "a3by"]
    assert expand_braces("plain") == ["plain"]
    with pytest.raises(UserError, match="more than"):
        expand_braces("{0..99999999999}")
