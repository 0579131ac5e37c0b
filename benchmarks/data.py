"""Samples per second of a source against the loaders of its format, and what a rank needs for many samples.

    FORMAT    one process reads the same files, already indexed and in the page cache, in a new epoch: ours in
              the order of a job (shuffled over all files), the others as their documentation says: in turns
    memory    memory of a rank with 10^8 samples in 10^4 files, and time to its first batch
    order     time to the first batch, time of a batch and memory, for 10^8 to 10^10 samples

usage: python -m benchmarks.data [--only NAME ...] [--rounds N] [--samples N] [--size BYTES]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from horovod_train import open_files
from horovod_train.config.data import Data
from horovod_train.data.order import Passes, order_of, settings_of
from horovod_train.data.shard import StepsOfEpoch
from horovod_train.frameworks.reader import NumpyReader

BATCH_SIZE = 64
NUM_FILES = 16
Loader = Callable[[], Iterable[Any]]
"""Starts to read an epoch: yields batches."""


def payload(number: int, size_bytes: int) -> bytes:
    """Return the bytes of a sample."""
    return number.to_bytes(8, "little") * (size_bytes // 8)


def numbers_of(file: int, num_samples: int) -> range:
    """Return the numbers of the samples of a file."""
    return range(file * num_samples // NUM_FILES, (file + 1) * num_samples // NUM_FILES)


def our_batches(source: str, pattern: str, folder: Path, decode: Any = None, **args: Any) -> Loader:
    """Return our reader of some files."""
    dataset = open_files(
        source,
        pattern,
        decode=decode,
        index_dir=str(folder / "index"),
        cache_dir=str(folder / "cache"),
        **args,
    )
    reader = NumpyReader(dataset, Data(), 0)
    length = len(reader)
    settings = settings_of(dataset, length, seed=0, shuffle=True, samples_per_epoch=None, row_size=BATCH_SIZE)

    def epoch() -> Iterator[object]:
        epoch.number += 1  # type: ignore[attr-defined]
        steps = StepsOfEpoch(
            num_samples=length, cursor=0, batch_size_per_rank=BATCH_SIZE, accumulation_steps=1, rank=0, size=1
        )
        pieces = [piece for share in steps for piece in share.micro_batches]
        number: int = epoch.number  # type: ignore[attr-defined]
        return reader.read(number, order_of(settings, dataset, number), pieces)

    epoch.number = 0  # type: ignore[attr-defined]
    return epoch


def webdataset(folder: Path, num_samples: int, size_bytes: int) -> Mapping[str, Loader]:
    """Return readers of tar archives."""
    import webdataset as wds

    for file in range(NUM_FILES):
        with wds.TarWriter(str(folder / f"{file:03d}.tar")) as writer:
            for number in numbers_of(file, num_samples):
                writer.write({"__key__": f"{number:09d}", "bin": payload(number, size_bytes)})

    def array(sample: Any) -> Any:
        return np.frombuffer(sample["bin"], np.uint8)

    def theirs() -> Iterable[Any]:
        urls = str(folder / f"{{000..{NUM_FILES - 1:03d}}}.tar")
        samples = wds.WebDataset(urls, shardshuffle=NUM_FILES).shuffle(1000).map(array)
        return samples.batched(BATCH_SIZE, collation_fn=np.stack)  # the default adds arrays up by element

    return {"ours": our_batches("webdataset", f"{folder}/*.tar", folder, array), "webdataset": theirs}


def tables(num_samples: int, size_bytes: int) -> Iterator[Any]:
    """Yield a table for each file."""
    import pyarrow as pa

    for file in range(NUM_FILES):
        numbers = numbers_of(file, num_samples)
        rows = [np.frombuffer(payload(number, size_bytes), np.uint8) for number in numbers]
        flat = pa.array(np.concatenate(rows))
        yield pa.table({"x": pa.FixedSizeListArray.from_arrays(flat, size_bytes // 8 * 8)})


def parquet(folder: Path, num_samples: int, size_bytes: int) -> Mapping[str, Loader]:
    """Return readers of Parquet files."""
    import datasets
    import torch
    from pyarrow.parquet import write_table

    for file, table in enumerate(tables(num_samples, size_bytes)):
        write_table(table, folder / f"{file:03d}.parquet")
    loaded = datasets.load_dataset(
        "parquet", data_files=f"{folder}/*.parquet", split="train", cache_dir=str(folder / "hf")
    ).with_format("numpy")

    def theirs() -> Iterable[Any]:
        return torch.utils.data.DataLoader(
            loaded,
            batch_size=BATCH_SIZE,
            shuffle=True,
            collate_fn=lambda rows: np.stack([row["x"] for row in rows]),
        )

    return {"ours": our_batches("parquet", f"{folder}/*.parquet", folder), "datasets": theirs}


def json_lines(folder: Path, num_samples: int, size_bytes: int) -> Mapping[str, Loader]:
    """Return readers of lines of text."""
    import datasets
    import torch

    text = "a word " * (size_bytes // 7)
    for file in range(NUM_FILES):
        lines = [json.dumps({"id": number, "text": text}) for number in numbers_of(file, num_samples)]
        (folder / f"{file:03d}.jsonl").write_text("\n".join(lines) + "\n")
    loaded = datasets.load_dataset(
        "json", data_files=f"{folder}/*.jsonl", split="train", cache_dir=str(folder / "hf")
    )

    def theirs() -> Iterable[Any]:
        return torch.utils.data.DataLoader(loaded, batch_size=BATCH_SIZE, shuffle=True)

    return {"ours": our_batches("jsonl", f"{folder}/*.jsonl", folder), "datasets": theirs}


def tfrecord(folder: Path, num_samples: int, size_bytes: int) -> Mapping[str, Loader]:
    """Return readers of records."""
    import tensorflow as tf

    for file in range(NUM_FILES):
        with tf.io.TFRecordWriter(str(folder / f"{file:03d}.tfrecord")) as writer:
            for number in numbers_of(file, num_samples):
                value = tf.train.Feature(bytes_list=tf.train.BytesList(value=[payload(number, size_bytes)]))
                example = tf.train.Example(features=tf.train.Features(feature={"x": value}))
                writer.write(example.SerializeToString())

    def theirs() -> Iterable[Any]:
        files = tf.data.Dataset.list_files(f"{folder}/*.tfrecord")
        records = (
            files.interleave(tf.data.TFRecordDataset, cycle_length=NUM_FILES).shuffle(1000).batch(BATCH_SIZE)
        )
        kind = {"x": tf.io.FixedLenFeature([], tf.string)}
        parsed = records.map(lambda batch: tf.io.parse_example(batch, kind))
        return parsed.map(lambda batch: tf.io.decode_raw(batch["x"], tf.uint8)).as_numpy_iterator()

    def array(sample: Any) -> Any:
        return np.frombuffer(sample["x"][0], np.uint8)

    return {"ours": our_batches("tfrecord", f"{folder}/*.tfrecord", folder, array), "tf.data": theirs}


def tokens(folder: Path, num_samples: int, size_bytes: int) -> Mapping[str, Loader]:
    """Return readers of token files; the other one is a memory map with random offsets, as in nanoGPT."""
    length = size_bytes // 2
    for file in range(NUM_FILES):
        count = len(numbers_of(file, num_samples)) * length
        np.save(folder / f"{file:03d}.npy", np.arange(count, dtype=np.uint32).astype(np.uint16))
    maps = [np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))]

    def theirs() -> Iterable[Any]:
        chosen = np.random.default_rng(0)
        for _ in range(num_samples // BATCH_SIZE):
            files = chosen.integers(0, NUM_FILES, BATCH_SIZE)
            yield np.stack(
                [
                    np.array(maps[f][at : at + length])
                    for f in files
                    for at in chosen.integers(0, len(maps[f]) - length, 1)
                ]
            )

    return {"ours": our_batches("tokens", f"{folder}/*.npy", folder, length=length), "memory map": theirs}


FORMATS = {each.__name__: each for each in (webdataset, parquet, json_lines, tfrecord, tokens)}


def rate(loader: Loader, num_samples: int) -> float:
    """Return the samples per second of an epoch, without the first batch."""
    batches = iter(loader())
    next(batches)
    start_s = time.perf_counter()
    num_batches = sum(1 for _ in islice(batches, num_samples // BATCH_SIZE - 2))
    return num_batches * BATCH_SIZE / (time.perf_counter() - start_s)


def measure(name: str, rounds: int, num_samples: int, size_bytes: int) -> None:
    """Print the median rates, and the ratio to the fastest of the others."""
    with tempfile.TemporaryDirectory() as folder:
        loaders = FORMATS[name](Path(folder), num_samples, size_bytes)
        found: dict[str, list[float]] = {each: [] for each in loaders}
        for loader in loaders.values():
            rate(loader, num_samples)
        for _ in range(rounds):
            for each, loader in loaders.items():
                found[each].append(rate(loader, num_samples))
    medians = {each: statistics.median(rates) for each, rates in found.items()}
    best = max(value for each, value in medians.items() if each != "ours")
    shown = ", ".join(f"{each} {value:,.0f}" for each, value in medians.items())
    print(
        f"{name}, {size_bytes:,} bytes: {shown} samples/s; ours / fastest {medians['ours'] / best:.2f}",
        flush=True,
    )


class Sizes:
    """A dataset of files that are not there."""

    def __init__(self, num_samples: int, num_files: int) -> None:
        self.sizes = np.full(num_files, num_samples // num_files)

    def endless(self, order: Any) -> Passes:
        """Return all passes."""
        return Passes.over(order, self.sizes)

    def digest(self) -> str:
        """Return nothing."""
        return ""


def order_costs(num_samples: int, num_files: int) -> None:
    """Print what the order of samples costs, in the middle of an epoch."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start_s = time.perf_counter()
    dataset = Sizes(num_samples, num_files)
    settings = settings_of(dataset, num_samples, seed=0, shuffle=True, samples_per_epoch=None, row_size=256)
    order = order_of(settings, dataset, 0)
    steps = StepsOfEpoch(
        num_samples=num_samples,
        cursor=num_samples // 2,
        batch_size_per_rank=32,
        accumulation_steps=1,
        rank=3,
        size=8,
    )
    pieces = [steps[number].micro_batches[0] for number in range(500)]
    order[pieces[0].start : pieces[0].stop]
    first_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    for piece in pieces:
        order[piece.start : piece.stop]
    batch_us = (time.perf_counter() - start_s) / len(pieces) * 1e6
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"order of {num_samples:,} samples in {num_files:,} files: first batch after {first_s:.3f} s, "
        f"then {batch_us:.0f} us, {grown_mib:.0f} MiB",
        flush=True,
    )


def make_index(pattern: str, folder: str) -> None:
    """Make an index, and print the memory of this process."""
    open_files("arrays", pattern, index_dir=folder).close()
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"making the index: at most {peak_mib:.0f} MiB, with the pages of its files", flush=True)


def memory_of_a_rank(num_samples: int, num_files: int) -> None:
    """Print the memory of a rank that reads from files of one byte for each sample."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = np.arange(num_samples // num_files).astype(np.uint8)
        for file in range(num_files):
            np.save(folder / f"{file:05d}.npy", rows)
        start_s = time.perf_counter()
        pattern = f"{folder}/*.npy"
        maker = get_context("spawn").Process(target=make_index, args=(pattern, str(folder / "index")))
        maker.start()
        maker.join()
        index_s = time.perf_counter() - start_s
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start_s = time.perf_counter()
        dataset = open_files("arrays", pattern, index_dir=str(folder / "index"))
        length = len(dataset)
        settings = settings_of(
            dataset, length, seed=0, shuffle=True, samples_per_epoch=None, row_size=8 * BATCH_SIZE
        )
        steps = StepsOfEpoch(
            num_samples=length,
            cursor=length // 2,
            batch_size_per_rank=BATCH_SIZE,
            accumulation_steps=1,
            rank=3,
            size=8,
        )
        pieces = (piece for share in steps for piece in share.micro_batches)
        batches = iter(NumpyReader(dataset, Data(), 0).read(0, order_of(settings, dataset, 0), pieces))
        next(batches)
        first_s = time.perf_counter() - start_s
        for _ in islice(batches, 5000):
            pass
        grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(
            f"{num_samples:,} samples in {num_files:,} files: index in {index_s:.0f} s; first batch after "
            f"{first_s:.2f} s, {grown_mib:.0f} MiB more after 5,000 batches",
            flush=True,
        )


def main() -> None:
    """Measure what was asked for; each format in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=[*FORMATS, "memory", "order"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--here", choices=FORMATS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        measure(args.here, args.rounds, args.samples, args.size)
        return
    for name in args.only or [*FORMATS, "memory", "order"]:
        if name == "memory":
            memory_of_a_rank(10**8, 10**4)
            continue
        if name == "order":
            for num_samples, num_files in ((10**8, 10**4), (10**9, 10**4), (10**10, 10**6)):
                order_costs(num_samples, num_files)
            continue
        sizes = ["--rounds", str(args.rounds), "--samples", str(args.samples), "--size", str(args.size)]
        subprocess.run([sys.executable, "-m", "benchmarks.data", "--here", name, *sizes], check=True)


if __name__ == "__main__":
    main()
