"""Files that the tools of their formats have written are read back equal; damaged ones are named."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.files import SIZES, WRITERS, decode, json_lines, megatron, numbers_of, webdataset, x_of

from horovod_train.config.data import Data
from horovod_train.data import index
from horovod_train.data.dataset import file_dataset, open_files, training_files
from horovod_train.data.index import text_of
from horovod_train.data.source import DataError
from horovod_train.errors import HorovodTrainError, UserError
from horovod_train.plugins.formats.json_lines import JsonLines
from horovod_train.plugins.formats.tokens import Tokens

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


class TestArchives:
    """What tarfile takes for the end of an archive, and members that are no samples."""

    def test_a_damaged_header_is_not_the_end(self, tmp_path, files_of):
        webdataset(tmp_path, (40,))
        path = tmp_path / "train-000.tar"
        content = bytearray(path.read_bytes())
        at = content.index(b"a/000020")
        content[at + 100] ^= 1
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"train-000\.tar: is (damaged at byte|not a tar archive)"):
            files_of("webdataset", "train-000.tar")
        content[at : at + 4096] = bytes(4096)
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"train-000\.tar: is (damaged at byte|not a tar archive)"):
            files_of("webdataset", "train-000.tar")

    def test_two_archives_in_a_file_are_not_one(self, tmp_path, files_of):
        webdataset(tmp_path, (4, 4))
        both = b"".join((tmp_path / f"train-00{at}.tar").read_bytes() for at in (0, 1))
        (tmp_path / "both.tar").write_bytes(both)
        with pytest.raises(DataError, match="or is several archives in one file"):
            files_of("webdataset", "both.tar")

    def made(self, path, names, links=()):
        with tarfile.open(path, "w") as archive:
            for name in names:
                member = tarfile.TarInfo(name)
                member.size = 3
                archive.addfile(member, BytesIO(b"abc"))
            for name, target in links:
                member = tarfile.TarInfo(name)
                member.type, member.linkname = tarfile.LNKTYPE, target
                archive.addfile(member)

    def test_files_of_macos_do_not_split_a_sample(self, tmp_path, files_of):
        self.made(tmp_path / "a.tar", ["._0.jpg", "0.jpg", "._0.cls", "0.cls", "README", "1.jpg", "1.cls"])
        found = files_of("webdataset", "a.tar", decode="builtins:sorted")

        assert found.__getitems__([0, 1]) == [["__key__", "cls", "jpg"]] * 2

    def test_two_samples_of_one_name_are_not_merged(self, tmp_path, files_of):
        self.made(tmp_path / "a.tar", ["0.jpg", "0.cls", "0.jpg", "0.cls"])
        with pytest.raises(DataError, match=r"a\.tar: has 0\.jpg twice in a sample"):
            files_of("webdataset", "a.tar")

    def test_links_are_refused(self, tmp_path, files_of):
        self.made(tmp_path / "a.tar", ["0.jpg"], [("1.jpg", "0.jpg")])
        with pytest.raises(DataError, match=r"has a link, 1\.jpg"):
            files_of("webdataset", "a.tar")


def test_a_stream_that_is_cut_between_batches_is_not_complete(tmp_path, files_of):
    import pyarrow as pa

    table = pa.table({"x": list(range(60))})
    path = tmp_path / "a.arrow"
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"a\.arrow: is not an Arrow file, or is a stream that is cut off"):
        files_of("arrow", "a.arrow")


def test_columns_of_a_table_are_those_of_the_job(tmp_path, files_of):
    import pyarrow as pa
    from pyarrow.parquet import write_table

    write_table(pa.table({"a": [1], "b": pa.array(["x"]).dictionary_encode()}), tmp_path / "t.parquet")
    found = [files_of("parquet", "t.parquet", source_args={"columns": c})[0] for c in (["a"], [], ["b"])]

    assert found == [{"a": 1}, {"a": 1, "b": "x"}, {"b": "x"}]


def test_columns_of_mds_have_their_names(files_of):
    found = files_of("mds", str(MDS / "plain" / "*.mds"), decode="builtins:dict")

    assert found[3]["text"] == "sample 3 é".encode()


def test_a_checksum_of_a_record_is_compared(tmp_path, files_of):
    source, pattern = WRITERS["tfrecord"](tmp_path)
    path = tmp_path / "train-000.tfrecord"
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train-000\.tfrecord: has a record whose checksum is wrong"):
        files_of(source, pattern)[0]


def test_an_image_can_be_left_out(images, tmp_path, files_of):
    (tmp_path / "broken.txt").write_text(f"{images}/cats/10.png\t0\n")

    assert len(files_of("images", "train/*/*.png", exclude=str(tmp_path / "broken.txt"))) == 3


def test_a_source_of_a_file_is_known_to_another_process(tmp_path):
    """It has another module there, or none."""
    (tmp_path / "own_format.py").write_text(FRAMES)
    for name in ("a", "b"):
        (tmp_path / f"{name}.frames").write_bytes(bytes(range(8)))
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read())[3])"
    found = open_files(
        f"{tmp_path}/own_format.py:Frames",
        f"{tmp_path}/*.frames",
        index_dir=str(tmp_path / "index"),
        size_bytes=4,
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(found), capture_output=True, check=True
    )

    assert done.stdout.decode().strip() == "[4 5 6 7]"
    found.close()


FRAMES = """
import numpy as np
from horovod_train.data.source import ByteRanges

class Frames(ByteRanges):
    size_bytes: int

    def rows(self, file):
        starts = np.arange(0, file.stat().st_size, self.size_bytes)
        return np.stack([starts, np.full_like(starts, self.size_bytes)], axis=1)

    def parse(self, data):
        return np.frombuffer(data, np.uint8)
"""


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

    def test_a_file_that_does_not_fit_its_index_is_refused(self, tmp_path, files_of):
        megatron(tmp_path / "a", [[1, 2, 3], [4, 5]])
        (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:4])
        with pytest.raises(DataError, match=r"a\.bin: has 4 bytes, and by a\.idx 10 are expected"):
            files_of("tokens", "a.bin", source_args={"length": 2})

    @pytest.mark.parametrize("dtype", ["uint16", "int32"])
    def test_files_of_megatron_are_read_with_their_documents(self, dtype):
        """``IndexedDatasetBuilder`` of megatron-core 0.16.1 wrote them; the third document has two parts."""
        source = Tokens(length=5, pack="documents")
        file = Path(__file__).parents[1] / "data" / "megatron" / f"{dtype}.bin"
        rows = source.rows(file)
        found = source.open(file, rows, file.name).read(range(len(rows)))

        assert [source.decode(sample).tolist() for sample in found] == [
            [1, 2, 3, 4, 0],
            [10, 11, 12, 13, 14],
            [15, 16, 17, 18, 19],
            [20, 21, 22, 23, 24],
            [7, 8, 0, 0, 0],
        ]

    def test_documents_are_packed_whole(self, tmp_path, files_of):
        megatron(tmp_path / "a", [[1, 1], [2, 2], [3], [4, 4, 4, 4, 4, 4, 4], [5]])
        found = files_of("tokens", "a.bin", source_args={"length": 5, "pack": "documents", "pad": 9})

        assert [sample.tolist() for sample in found.__getitems__(range(len(found)))] == [
            [1, 1, 2, 2, 3],
            [4, 4, 4, 4, 4],
            [4, 4, 5, 9, 9],
        ]


CONSTANT = """
import json
MIN = LIMIT

def keep(sample):
    return json.loads(sample["json"])["id"] >= MIN
"""
HELPER = """
import json

def is_large(sample):
    return any(json.loads(each)["id"] >= LIMIT for each in [sample["json"]])

def keep(sample):
    return [is_large(each) for each in [sample]][0]
"""
PARTIAL = """
import functools
import json

def above(limit, sample):
    return json.loads(sample["json"])["id"] >= limit

keep = functools.partial(above, LIMIT)
"""


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

    @pytest.mark.parametrize("text", [CONSTANT, HELPER, PARTIAL])
    def test_what_a_function_refers_to_is_a_part_of_it(self, tmp_path, files_of, text):
        source, files = webdataset(tmp_path)
        digests = set()
        for at, limit in enumerate((5, 15, 5)):
            (tmp_path / f"limit{at}.py").write_text(text.replace("LIMIT", str(limit)))
            digests.add(files_of(source, files, keep=f"{tmp_path}/limit{at}.py:keep").digest())

        assert len(digests) == 2

    def test_constants_are_the_same_in_each_process(self):
        """The order of texts in a set is another one in each."""
        assert text_of({"b", "a", frozenset({1})}) == text_of({"a", frozenset({1}), "b"})
        assert text_of({"k": [{"y", "x"}]}) == str([("'k'", str([str(["'x'", "'y'"])]))])

    def test_other_samples_that_are_left_out_make_another_digest(self, tmp_path, files_of):
        source, files = webdataset(tmp_path)
        digests = set()
        for number in (1, 3):
            (tmp_path / f"{number}.txt").write_text(f"{tmp_path}/train-000.tar\t{number}\n")
            digests.add(files_of(source, files, exclude=str(tmp_path / f"{number}.txt")).digest())

        assert len(digests) == 2

    def test_an_error_of_decode_names_the_sample_and_the_line(self, tmp_path, files_of):
        (tmp_path / "decodes.py").write_text("def decode(sample):\n    return sample['nothing']\n")
        found = files_of(*webdataset(tmp_path), decode=f"{tmp_path}/decodes.py:decode")
        with pytest.raises(
            DataError, match=r"train-002\.tar: sample 1: KeyError: 'nothing' \(line 2 of .*decodes"
        ):
            found[6]

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
        listed.write_text("train-002.tar\ntrain-000.tar\t1\n")  # names begin at the folder of the file
        assert len(files_of(source, files, exclude=str(listed))) == len(found)
        listed.write_text(f"{tmp_path}/no.tar\n")
        with pytest.raises(UserError, match=r"no\.tar does not exist"):
            files_of(source, files, exclude=str(listed))


class TestChangedFiles:
    @pytest.mark.parametrize("sampled", [{}, {"sampling": {"length": "LENGTH"}}], ids=["plain", "lengths"])
    def test_only_new_and_changed_files_are_read_again(
        self, tmp_path, files_of, monkeypatch, caplog, sampled
    ):
        source, files = json_lines(tmp_path)
        if sampled:
            (tmp_path / "functions.py").write_text("def length(sample):\n    return sample['id'] + 1\n")
            sampled = {"sampling": {"length": f"{tmp_path}/functions.py:length"}}
        monkeypatch.setattr(index, "LISTED_AGAIN_S", 0.0)
        read = []
        rows = JsonLines.rows
        monkeypatch.setattr(JsonLines, "rows", lambda self, file: read.append(file.name) or rows(self, file))
        first = files_of(source, files, **sampled)
        assert len(read) == 5
        read.clear()
        before = [first.index.rows(file).tolist() for file in range(5)]
        lengths = first.index.lengths().tolist() if sampled else None
        (tmp_path / "train-002.jsonl").write_text('{"id": 3}\n')
        (tmp_path / "train-009.jsonl").write_text('{"id": 9}\n')
        (tmp_path / "train-001.jsonl").unlink()

        second = files_of(source, files, **sampled)
        assert sorted(read) == ["train-002.jsonl", "train-009.jsonl"]
        assert "2 of 5 files are new, or have changed: " in caplog.text
        assert second.index.sizes.tolist() == [5, 1, 1, 6, 1]
        kept = [second.index.rows(file).tolist() for file in (0, 2, 3)]
        assert kept == [before[0], before[3], before[4]]
        assert [sample["id"] for sample in second.__getitems__(range(14))] == [
            *range(5),
            3,
            *range(12, 19),
            9,
        ]
        if sampled:
            assert second.index.lengths().tolist() == [*lengths[:5], 4, *lengths[12:], 10]


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


def test_a_pattern_without_files_is_an_error(tmp_path, files_of):
    with pytest.raises(UserError, match=r"no file fits .*nothing-\*\.tar"):
        files_of("webdataset", "nothing-*.tar")
    (tmp_path / "one-1.jsonl").write_text("1\n")
    with pytest.raises(UserError, match=r"no file fits .*/two-\*\.jsonl"):
        files_of("jsonl", "{one,two}-*.jsonl")
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
    assert len(found) == len(list(found)) == sum(SIZES) + 2
    with pytest.raises(IndexError):
        found[sum(SIZES) + 2]
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
