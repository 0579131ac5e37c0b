"""Files that the tools of their formats have written are read back equal; damaged ones are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.files import SIZES, WRITERS, decode, megatron, numbers_of, webdataset, x_of

from horovod_train.config.data import Data
from horovod_train.data.dataset import file_dataset, training_files
from horovod_train.data.source import DataError
from horovod_train.errors import HorovodTrainError, UserError

MDS = Path(__file__).parents[1] / "data" / "mds"


@pytest.fixture(scope="module", autouse=True)
def _tools():
    """Some packages start a thread, or open files, when they are used first."""
    import tensorflow as tf  # noqa: F401
    import zarr

    zarr.create_array({}, shape=(1,), dtype="u1")[:]


@pytest.fixture
def files_of(tmp_path):
    """Return a function that opens the files of a ``data`` section."""

    def made(source, files, **fields):
        paths = [str(tmp_path / each) for each in ([files] if isinstance(files, str) else files)]
        section = {"source": source, "files": paths, "cache": {"dir": str(tmp_path / "cache")}, **fields}
        data = Data.model_validate(section)
        opened.append(file_dataset(data, data, str(tmp_path / "runs")))
        return opened[-1]

    opened = []
    yield made
    for each in opened:
        each.close()


@pytest.mark.parametrize("name", WRITERS)
def test_what_the_tool_of_a_format_has_written_is_read_back(tmp_path, files_of, name):
    found = files_of(*WRITERS[name](tmp_path))
    samples = found.__getitems__(range(len(found)))
    if name.startswith("webdataset"):
        assert [sample["txt"] for sample in samples] == [f"é {n}" for n in range(sum(SIZES))]
        assert samples[3]["__key__"] == "a/000003"
        samples = [{"id": sample["json"]["id"], "x": sample["x.npy"]} for sample in samples]

    assert [int(np.asarray(sample["id"]).item()) for sample in samples] == list(range(sum(SIZES)))
    for sample in samples:
        np.testing.assert_array_equal(sample["x"], x_of(int(np.asarray(sample["id"]).item())))
    if name != "saved_dataset":  # whose files are of its choice
        assert found.index.sizes.tolist() == list(SIZES)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("fault", ["cut", "empty", "other"])
def test_a_damaged_file_is_named(tmp_path, files_of, name, fault):
    source, pattern = WRITERS[name](tmp_path)
    root = tmp_path / "train" if source == "saved_dataset" else tmp_path
    victim = [path for path in sorted(root.glob("*")) if path.is_file() and path.suffix != ".json"][2]
    content = victim.read_bytes()
    victim.write_bytes({"cut": content[: len(content) * 2 // 3], "empty": b"", "other": b"x" * 999}[fault])
    if name in {"jsonl", "tfrecord"} and fault == "empty":
        assert len(files_of(source, pattern)) == sum(SIZES) - SIZES[2], "it is a file without samples"
        return

    def read():
        found = files_of(source, pattern)
        found.__getitems__(range(len(found)))

    with pytest.raises(DataError) as error:
        read()
    assert str(victim) in error.value.message


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_mds_is_read_as_its_own_package_has_written_it(files_of, kind):
    """The files are those of MDSWriter of mosaicml-streaming 0.13.0."""
    suffix = "mds" if kind == "plain" else "mds.zstd"
    found = files_of("mds", str(MDS / kind / f"*.{suffix}"))

    assert len(found) == 12
    for number, sample in enumerate(found.__getitems__(range(12))):
        assert (sample["id"], sample["small"], sample["text"]) == (number, number, f"sample {number} é")
        assert sample["meta"] == {"n": [number]}
        np.testing.assert_array_equal(sample["x"], np.full(4, number, np.float32))
        np.testing.assert_array_equal(sample["any"], np.arange(number + 1)[None])
        assert sample["half"].dtype == np.float16
        assert sample["half"].shape == (2, 3)


def test_mds_is_not_unpickled(files_of):
    found = files_of("mds", str(MDS / "pickled" / "*.mds"))

    with pytest.raises(DataError, match="'pkl'.*not supported, because unpickling runs code"):
        found[0]


@pytest.fixture
def images(tmp_path):
    for name, color in (("cats", 10), ("cats", 20), ("dogs", 30), ("birds", 40)):
        path = tmp_path / "train" / name / f"{color}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (3, 2), (color, 0, 0)).save(path)
    return tmp_path / "train"


def test_the_folder_of_an_image_is_its_class(images, files_of):
    found = files_of("images", "train/*/*.png")

    by_color = {int(pixels[0, 0, 0]): label for pixels, label in found.__getitems__(range(4))}
    assert by_color == {10: 1, 20: 1, 30: 2, 40: 0}
    assert found[0][0].shape == (2, 3, 3)


def test_classes_of_the_evaluation_data_are_those_of_the_training_data(images, tmp_path):
    """Folders without cats would otherwise give dogs another number."""
    from horovod_train.data.dataset import evaluation_files

    Image.new("RGB", (3, 2)).save(_made(tmp_path / "eval" / "dogs" / "1.png"))
    Image.new("RGB", (3, 2)).save(_made(tmp_path / "eval" / "fish" / "1.png"))
    section = {
        "source": "images",
        "files": str(images / "*/*.png"),
        "cache": {"dir": str(tmp_path / "cache")},
    }
    data = Data.model_validate({**section, "eval": {"files": str(tmp_path / "eval/*/*.png")}})
    found = evaluation_files(data, str(tmp_path / "runs"))

    assert found[0][1] == 2
    with pytest.raises(UserError, match="'fish' is none of those of the training data"):
        found[1]


def _made(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


class TestTokens:
    def test_a_file_is_cut_into_sequences(self, tmp_path, files_of):
        np.save(tmp_path / "a.npy", np.arange(10, dtype=np.int32))
        np.arange(100, 107, dtype=np.uint16).tofile(tmp_path / "b.bin")
        found = files_of("tokens", ["a.npy", "b.bin"], source_args={"length": 4, "dtype": "uint16"})

        assert [sample.tolist() for sample in found.__getitems__(range(len(found)))] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [100, 101, 102, 103],
        ]

    def test_the_type_is_that_of_the_index_of_megatron(self, tmp_path, files_of):
        megatron(tmp_path / "a", [[1, 2, 3], [4, 5]])
        found = files_of("tokens", "a.bin", source_args={"length": 2})

        assert found[1].tolist() == [3, 4]
        (tmp_path / "a.idx").unlink()
        with pytest.raises(DataError, match=r"a\.bin: has no a\.idx beside it.*\n.*source_args\.dtype"):
            files_of("tokens", ["a.bin", "a.bin"][:1], source_args={"length": 3})

    def test_documents_are_packed_whole(self, tmp_path, files_of):
        megatron(tmp_path / "a", [[1, 1], [2, 2], [3], [4, 4, 4, 4, 4, 4, 4], [5]])
        found = files_of("tokens", "a.bin", source_args={"length": 5, "pack": "documents", "pad": 9})

        assert [sample.tolist() for sample in found.__getitems__(range(len(found)))] == [
            [1, 1, 2, 2, 3],
            [4, 4, 4, 4, 4],
            [4, 4, 5, 9, 9],
        ]


class TestFunctions:
    def test_samples_that_are_not_kept_do_not_exist(self, tmp_path, files_of):
        (tmp_path / "own.py").write_text(KEEP)
        found = files_of(
            *webdataset(tmp_path), keep=f"{tmp_path}/own.py:keep", decode=f"{tmp_path}/own.py:number"
        )

        assert found.__getitems__(range(len(found))) == [n for n in range(sum(SIZES)) if n % 3]

    def test_a_function_that_fails_is_told_with_the_sample(self, tmp_path, files_of):
        (tmp_path / "fails.py").write_text("def keep(sample):\n    return sample['no']\n")
        with pytest.raises(
            DataError, match=r"train-000\.tar: a function of sample 0 has failed: KeyError: 'no'"
        ):
            files_of(*webdataset(tmp_path), keep=f"{tmp_path}/fails.py:keep")

    def test_all_samples_may_be_refused_by_mistake(self, tmp_path, files_of):
        (tmp_path / "none.py").write_text("def keep(sample):\n    return None\n")
        with pytest.raises(UserError, match="have no samples that are kept"):
            files_of(*webdataset(tmp_path), keep=f"{tmp_path}/none.py:keep")

    def test_another_function_makes_another_index(self, tmp_path, files_of):
        source, files = webdataset(tmp_path)
        digests = set()
        for at, text in enumerate((KEEP, KEEP.replace("% 3", "% 2"), KEEP)):
            (tmp_path / f"other{at}.py").write_text(text)
            digests.add(files_of(source, files, keep=f"{tmp_path}/other{at}.py:keep").digest())

        assert len(digests) == 2

    def test_lines_of_a_file_are_left_out(self, tmp_path, files_of):
        source, files = webdataset(tmp_path)
        listed = tmp_path / "broken.txt"
        listed.write_text(f"# found by verify\n{tmp_path}/train-002.tar\n{tmp_path}/train-000.tar\t1\n")
        found = files_of(source, files, exclude=str(listed))

        assert [sample["json"]["id"] for sample in found.__getitems__(range(len(found)))] == [
            0,
            2,
            3,
            4,
            *range(12, 19),
        ]
        listed.write_text(f"{tmp_path}/no.tar\n")
        with pytest.raises(UserError, match=r"no\.tar is none of the files"):
            files_of(source, files, exclude=str(listed))


KEEP = """
import json

def parsed(sample):
    return json.loads(sample["json"])["id"]

def number(sample):
    return parsed(sample)

def keep(sample):
    return parsed(sample) % 3
"""


class TestChanges:
    """Between the index and the training, somebody changes files."""

    @pytest.fixture
    def found(self, tmp_path, files_of):
        return files_of(*webdataset(tmp_path))

    def test_files_that_are_swapped_are_named(self, tmp_path, found):
        first, other = tmp_path / "train-000.tar", tmp_path / "train-004.tar"
        content = first.read_bytes(), other.read_bytes()
        first.write_bytes(content[1])
        other.write_bytes(content[0])
        with pytest.raises(DataError, match=r"train-000\.tar: has changed since the index"):
            found[0]

    def test_a_byte_that_is_changed_is_seen(self, tmp_path, found):
        path = tmp_path / "train-002.tar"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"train-002\.tar: has changed"):
            found[7]

    def test_a_file_that_is_gone_is_named(self, tmp_path, found):
        (tmp_path / "train-002.tar").unlink()
        with pytest.raises(DataError, match=r"train-002\.tar: does not exist any more"):
            found[7]

    def test_a_new_file_is_found_at_the_next_start(self, tmp_path, found, files_of, monkeypatch):
        from horovod_train.data import index

        (tmp_path / "train-005.tar").write_bytes((tmp_path / "train-000.tar").read_bytes())
        monkeypatch.setattr(index, "LISTED_AGAIN_S", 0.0)
        assert len(files_of("webdataset", "train-*.tar")) == len(found) + SIZES[0]


def test_a_pattern_without_files_is_an_error(files_of):
    with pytest.raises(UserError, match=r"no file fits .*nothing-\*\.tar"):
        files_of("webdataset", "nothing-*.tar")
    with pytest.raises(UserError, match=r"nothing-1\.tar: No such file"):
        files_of("webdataset", "nothing-{1..3}.tar")


def test_a_file_that_is_named_twice_is_an_error(tmp_path, files_of):
    webdataset(tmp_path)
    with pytest.raises(UserError, match=r"train-000\.tar is named twice"):
        files_of("webdataset", ["train-*.tar", "train-000.tar"])


def test_files_are_read_in_the_order_of_their_names_on_every_host(tmp_path, files_of):
    """``os.listdir`` has another order on each host."""
    for at in (3, 10, 1, 2):
        (tmp_path / f"p-{at:02d}.jsonl").write_text(f"{at}\n")
    found = files_of("jsonl", "p-*.jsonl")

    assert found.__getitems__(range(4)) == [1, 2, 3, 10]


def test_a_dataset_that_is_sent_to_a_loader_opens_files_there(tmp_path, files_of):
    import pickle

    found = files_of(*webdataset(tmp_path))
    found[0]
    sent = pickle.dumps(found)

    assert len(sent) < 2000, "it has paths alone"
    arrived = pickle.loads(sent)  # noqa: S301
    assert not arrived._open_files
    assert arrived[6]["json"] == {"id": 6}
    arrived.close()


def test_few_files_are_open_at_once(tmp_path, files_of, monkeypatch):
    from horovod_train.data import dataset

    monkeypatch.setattr(dataset, "MAX_OPEN_FILES", 2)
    found = files_of(*webdataset(tmp_path))
    assert [sample["json"]["id"] for sample in found.__getitems__([0, 6, 12, 13, 1])] == [0, 6, 12, 13, 1]
    assert len(found._open_files) == 2


def test_a_mixture_has_the_samples_of_its_parts(tmp_path):
    webdataset(tmp_path)
    (tmp_path / "lines.jsonl").write_text('{"id": 100}\n{"id": 101}\n')
    (tmp_path / "ids.py").write_text(IDS)
    parts = [
        {
            "source": "webdataset",
            "files": str(tmp_path / "train-*.tar"),
            "decode": f"{tmp_path}/ids.py:of_tar",
        },
        {"source": "jsonl", "files": str(tmp_path / "lines.jsonl"), "decode": f"{tmp_path}/ids.py:of_line"},
    ]
    data = Data.model_validate({"mixture": parts, "cache": {"dir": str(tmp_path / "cache")}})
    found = training_files(data, str(tmp_path / "runs"))

    assert found.__getitems__([20, 0, 19, 18]) == [101, 0, 100, 18]
    assert len(found) == sum(SIZES) + 2
    found.close()


IDS = """
import json

def of_tar(sample):
    return json.loads(sample["json"])["id"]

def of_line(sample):
    return sample["id"]
"""


def test_errors_have_a_hint(tmp_path, files_of):
    (tmp_path / "a.jsonl").write_text("{}\n{\n")
    found = files_of("jsonl", "a.jsonl")
    with pytest.raises(HorovodTrainError, match=r"a\.jsonl: has a line that is not JSON.*\n  hint: "):
        found[1]


def test_numbers_of_files_are_those_of_samples():
    assert [list(numbers) for numbers in numbers_of((2, 0, 1))] == [[0, 1], [], [2]]
    assert decode({"id": 3, "x": [1.0]})["id"] == 3
