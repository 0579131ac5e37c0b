"""Files of samples with a number, ``id``, and an array, ``x``, written by the tools of their formats."""

from __future__ import annotations

import gzip
import json
import struct
import warnings
from itertools import pairwise

import numpy as np

from horovod_train.plugins.formats.tokens import MAGIC

SIZES = (5, 0, 7, 1, 6)
"""Samples of each file; one of them is empty."""


def x_of(number):
    return np.array([number, number**2 % 97, 1, -number], np.float32)


def numbers_of(sizes=SIZES):
    """Numbers of the samples of each file."""
    ends = np.cumsum(sizes)
    return [range(end - size, end) for size, end in zip(sizes, ends.tolist(), strict=True)]


def webdataset(folder, sizes=SIZES, **more):
    import webdataset

    for at, numbers in enumerate(numbers_of(sizes)):
        with webdataset.TarWriter(str(folder / f"train-{at:03d}.tar"), **more) as writer:
            for number in numbers:
                content = {"json": {"id": number}, "x.npy": x_of(number), "txt": f"é {number}"}
                writer.write({"__key__": f"a/{number:06d}", **content})
    return "webdataset", "train-*.tar"


def json_lines(folder, sizes=SIZES, suffix=""):
    for at, numbers in enumerate(numbers_of(sizes)):
        lines = "".join(json.dumps({"id": n, "x": x_of(n).tolist()}) + "\n" for n in numbers).encode()
        path = folder / f"train-{at:03d}.jsonl{suffix}"
        if suffix == ".gz":
            path.write_bytes(gzip.compress(lines))
        elif suffix == ".zst":
            import zstandard

            path.write_bytes(zstandard.compress(lines))
        else:
            path.write_bytes(lines)
    return "jsonl", f"train-*.jsonl{suffix}"


def in_files(folder, name, data, ends):
    """Write the samples of ``frameworks.net`` to files; each has those from one end to the next."""
    from safetensors.numpy import save_file

    for place, (start, stop) in enumerate(pairwise(ends)):
        content = {"x": data.x[start:stop], "y": data.y[start:stop]}
        save_file(content, folder / f"{name}-{place}.safetensors")


def _table(numbers):
    import pyarrow as pa

    ids = pa.array(list(numbers), pa.int64())
    return pa.table({"id": ids, "x": pa.array([x_of(n).tolist() for n in numbers], pa.list_(pa.float32()))})


def parquet(folder, sizes=SIZES):
    from pyarrow.parquet import write_table

    for at, numbers in enumerate(numbers_of(sizes)):
        write_table(_table(numbers), folder / f"train-{at:03d}.parquet", row_group_size=3)
    return "parquet", "train-*.parquet"


def arrow(folder, sizes=SIZES):
    from pyarrow import ipc

    for at, numbers in enumerate(numbers_of(sizes)):
        table = _table(numbers)
        new = ipc.new_file if at % 2 else ipc.new_stream
        with new(str(folder / f"train-{at:03d}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return "arrow", "train-*.arrow"


def saved_dataset(folder, sizes=SIZES):
    import datasets

    numbers = range(sum(sizes))
    rows = {"id": list(numbers), "x": [x_of(n) for n in numbers]}
    datasets.Dataset.from_dict(rows).save_to_disk(folder / "train", num_shards=3)
    return "saved_dataset", "train"


def tfrecord(folder, sizes=SIZES):
    import tensorflow as tf

    def feature(kind, values):
        return tf.train.Feature(**{f"{kind}_list": getattr(tf.train, f"{kind.title()}List")(value=values)})

    for at, numbers in enumerate(numbers_of(sizes)):
        with tf.io.TFRecordWriter(str(folder / f"train-{at:03d}.tfrecord")) as writer:
            for number in numbers:
                fields = {"id": feature("int64", [number]), "x": feature("float", x_of(number))}
                example = tf.train.Example(features=tf.train.Features(feature=fields))
                writer.write(example.SerializeToString())
    return "tfrecord", "train-*.tfrecord"


def safetensors(folder, sizes=SIZES):
    from safetensors.numpy import save_file

    for at, numbers in enumerate(numbers_of(sizes)):
        save_file(_arrays(numbers), folder / f"train-{at:03d}.safetensors")
    return "arrays", "train-*.safetensors"


def _arrays(numbers):
    x = np.array([x_of(n) for n in numbers], np.float32).reshape(-1, 4)
    return {"id": np.array(list(numbers), np.int64), "x": x}


def hdf5(folder, sizes=SIZES):
    import h5py

    for at, numbers in enumerate(numbers_of(sizes)):
        with h5py.File(folder / f"train-{at:03d}.h5", "w") as file:
            for name, array in _arrays(numbers).items():
                file[name] = array
    return "arrays", "train-*.h5"


def zarr(folder, sizes=SIZES):
    import zarr

    for at, numbers in enumerate(numbers_of(sizes)):
        store = zarr.storage.ZipStore(folder / f"train-{at:03d}.zip", mode="w")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a zip file has an entry for each write of a key
            group = zarr.create_group(store)
            for name, array in _arrays(numbers).items():
                group.create_array(name, data=array)
            store.close()
    return "arrays", "train-*.zip"


WRITERS = {
    "webdataset": webdataset,
    "webdataset, compressed": lambda folder, sizes=SIZES: _compressed_tars(folder, sizes),
    "jsonl": json_lines,
    "jsonl, gzip": lambda folder, sizes=SIZES: json_lines(folder, sizes, ".gz"),
    "jsonl, zstd": lambda folder, sizes=SIZES: json_lines(folder, sizes, ".zst"),
    "parquet": parquet,
    "arrow": arrow,
    "saved_dataset": saved_dataset,
    "tfrecord": tfrecord,
    "safetensors": safetensors,
    "hdf5": hdf5,
    "zarr": zarr,
}
"""Writers of samples with ``id`` and ``x``; each returns the name of the source, and the pattern of files."""


def _compressed_tars(folder, sizes):
    webdataset(folder, sizes)
    for path in sorted(folder.glob("train-*.tar")):
        path.with_suffix(".tar.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    return "webdataset", "train-*.tar.gz"


def decode(sample):
    """Id and array of a stored sample of any of these formats."""
    if "json" in sample:
        return {"id": json.loads(sample["json"])["id"], "x": _npy(sample["x.npy"])}
    return {"id": np.int64(np.asarray(sample["id"]).item()), "x": np.asarray(sample["x"], np.float32)}


def _npy(data):
    from io import BytesIO

    return np.load(BytesIO(data))


def megatron(path, documents):
    """Write ``.bin`` and ``.idx`` as Megatron-LM does (``IndexWriter`` of ``indexed_dataset.py``)."""
    tokens = [np.asarray(document, np.uint16) for document in documents]
    path.with_suffix(".bin").write_bytes(b"".join(each.tobytes() for each in tokens))
    lengths = np.array([len(each) for each in tokens], np.int32)
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64) * 2]).astype(np.int64)
    head = MAGIC + struct.pack("<QBQQ", 1, 8, len(tokens), len(tokens) + 1)
    index = np.arange(len(tokens) + 1, dtype=np.int64)
    path.with_suffix(".idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + index.tobytes())
