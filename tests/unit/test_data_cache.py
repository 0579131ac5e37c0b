"""The cache of a host: complete files only, one copy for all processes, and nothing that remains."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.waiting import wait_until

from horovod_train.data.cache import Cache, checksum, default_folder
from horovod_train.errors import UserError

PROGRAM = Path(__file__).parents[1] / "programs" / "use_cache.py"
CONTENT = bytes(range(256)) * 16


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path, max_bytes=10 * len(CONTENT))


def locked(cache, name, made=None, content=CONTENT):
    """Hold a file, and note that it was made."""

    def make(to):
        to.write_bytes(content)
        if made is not None:
            made.append(name)

    return cache.get(name, "a.tar", len(content), make)


def files_in(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def test_a_file_is_made_once_and_is_read_only(cache):
    made = []
    for _ in range(3):
        file = locked(cache, "one", made)
        assert file.path.read_bytes() == CONTENT
        assert file.path.name.endswith("-a.tar")
        file.close()

    assert made == ["one"]
    assert file.path.stat().st_mode & 0o777 == 0o400


def test_a_file_that_is_not_complete_is_never_seen(cache, tmp_path):
    def fails(to):
        to.write_bytes(CONTENT[:10])
        raise OSError(errno.EIO, "the cable")

    with pytest.raises(OSError, match="the cable"):
        cache.get("one", "a.tar", len(CONTENT), fails)
    assert files_in(tmp_path) == []
    file = locked(cache, "one")
    assert file.path.read_bytes() == CONTENT
    file.close()


def test_a_damaged_file_is_made_again(cache, tmp_path, caplog):
    file = locked(cache, "one")
    file.close()
    file.path.chmod(0o600)
    file.path.write_bytes(CONTENT[:-1] + b"!")

    again = locked(Cache(tmp_path, 1e9), "one")
    assert again.path.read_bytes() == CONTENT
    assert "is damaged, and is made again" in caplog.text
    again.close()


def test_a_damaged_file_that_another_job_reads_is_an_error(cache, tmp_path):
    file = locked(cache, "one")
    file.path.chmod(0o600)
    file.path.write_bytes(b"?")

    with pytest.raises(UserError, match="is damaged, and in use"):
        locked(Cache(tmp_path, 1e9), "one")
    file.close()


def test_files_that_were_not_used_for_the_longest_time_are_removed(cache, tmp_path):
    for at in range(12):
        locked(cache, f"n{at}").close()
        os.utime(tmp_path / "files" / f"n{at}", (at, at))
        if at == 8:
            locked(cache, "n0").close()  # it is used again

    there = {path.name for path in (tmp_path / "files").iterdir() if path.is_dir()}
    assert "n0" in there
    assert "n1" not in there
    assert len(there) <= 10


def test_a_file_in_use_is_not_removed_and_the_limit_is_told(cache, tmp_path, caplog):
    files = [locked(cache, f"n{at}") for at in range(12)]

    assert all(file.path.read_bytes() == CONTENT for file in files)
    assert caplog.text.count("has files in use that are larger than data.cache.size_gib") == 1
    for file in files:
        file.close()
    locked(cache, "other").close()
    assert len([path for path in (tmp_path / "files").iterdir() if path.is_dir()]) <= 10


def test_a_file_that_is_larger_than_the_cache_can_be_used(tmp_path):
    """In other caches, a limit below the size of a file is a dead lock."""
    file = locked(Cache(tmp_path, max_bytes=1), "one")
    assert file.path.read_bytes() == CONTENT
    file.close()


def test_a_full_disk_makes_room_and_is_then_an_error(tmp_path):
    cache = Cache(tmp_path, max_bytes=1e9)
    locked(cache, "old").close()
    tries = []

    def make(to):
        tries.append(to)
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, "full")
        to.write_bytes(CONTENT)

    cache.get("one", "a.tar", len(CONTENT), make).close()
    assert not (tmp_path / "files" / "old").exists()

    def full(_):
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(UserError, match="no space is left for 0 MiB"):
        cache.get("two", "a.tar", len(CONTENT), full)


def test_threads_that_want_one_file_make_it_once(cache):
    made = []

    def want(_):
        file = locked(cache, "one", made)
        content = file.path.read_bytes()
        file.close()
        return content

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(want, range(40))) == {CONTENT}
    assert made == ["one"]


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    cache = Cache(tmp_path, 1e9)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UserError, match="belongs to another user"):
        locked(cache, "one")


def test_the_folder_is_that_of_the_node(monkeypatch):
    monkeypatch.setenv("SLURM_TMPDIR", "/node/local")
    assert str(default_folder()) == f"/node/local/horovod_train-{os.getuid()}"


def start(folder, seed):
    return subprocess.Popen([sys.executable, str(PROGRAM), str(folder), str(seed)])


def test_processes_that_are_killed_at_any_moment_leave_nothing_wrong(tmp_path):
    chosen = random.Random(1)
    processes = [start(tmp_path, seed) for seed in range(4)]
    wait_until(lambda: any((tmp_path / "files").glob("*/*-x")))
    for at in range(12):
        time.sleep(chosen.uniform(0.01, 0.2))
        processes[at % 4].kill()
        processes[at % 4].wait()
        processes[at % 4] = start(tmp_path, 10 + at)
    for process in processes:
        process.kill()
        process.wait()

    assert not (tmp_path / "wrong").exists()
    Cache(tmp_path, 3000).remove_leftovers()
    places = [place for place in (tmp_path / "files").iterdir() if place.is_dir()]
    for place in places:
        (content,) = place.glob("*-x")
        assert f"{checksum(content):08x}" == content.name[:8]
    assert not [place.name for place in places if place.name.startswith(".")], "what was being removed"
