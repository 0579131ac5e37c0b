"""What a step costs on a GPU: the product against a plain loop and DistributedDataParallel, in turns.

Blocks of steps alternate in one process, so that clocks and temperature are the same for both; a line is the
median ratio of neighbours with its 95 % interval, and the time of the host per step: what a step costs where
the GPU has nothing to do.

    python -m benchmarks.gpu [--models vit,...] [--pairs N]     says so where there is no GPU
    python -m benchmarks.gpu --smoke                            the same on a CPU, tiny, for tests
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import socket
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from horovod_train.collectives.base import SingleRank
from horovod_train.config.schema import Allreduce, Job
from horovod_train.data.shard import PlannedStep, share_of_step
from horovod_train.frameworks.torch.codecs import make_codec
from horovod_train.frameworks.torch.comm.collectives import TorchCommunicator
from horovod_train.frameworks.torch.framework import optimizer_of
from horovod_train.frameworks.torch.step.graphs import CudaRecorder
from horovod_train.frameworks.torch.step.replica import TorchReplica
from horovod_train.frameworks.torch.strategies.allreduce.strategy import AllreduceStrategy, SingleRankStrategy
from horovod_train.horovod.environment import horovod_settings

STEPS_PER_BLOCK_S = 1.0
LAG_STEPS = 2
Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """A model and its batch.

    Attributes:
        is_gpu_bound: Whether the GPU is what a step waits for.
    """

    name: str
    make: Callable[..., nn.Module]
    batch: Callable[[int], torch.Tensor]
    batch_size: int
    precision: str = "fp32"
    is_gpu_bound: bool = True


class Vit(nn.Module):
    """ViT-B/16 on images of 224 x 224; tiny: two layers on images of 32 x 32."""

    def __init__(self, *, is_tiny: bool) -> None:
        super().__init__()
        width, depth, heads, size = (32, 2, 2, 32) if is_tiny else (768, 12, 12, 224)
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(torch.zeros(1, (size // 16) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, shape [batch, 1000]."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.layers(tokens).mean(1))


def mlp(*, is_tiny: bool) -> nn.Module:
    """33.6 million parameters: two layers of 4096 x 4096, and a head."""
    width = 16 if is_tiny else 4096
    return nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def cnn(*, is_tiny: bool) -> nn.Module:
    """A few convolutions with batch normalization: hundreds of kernels that take microseconds."""
    layers: list[nn.Module] = []
    channels = 3
    for wide in (8,) if is_tiny else (32, 32, 64, 64, 128, 128):
        layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU()]
        channels = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def cases(*, is_tiny: bool) -> list[Case]:
    """Return what is measured."""
    size, width, many = (32, 16, 4) if is_tiny else (224, 4096, 2560)
    images = lambda n: torch.randn(n, 3, size, size)  # noqa: E731
    rows = lambda n: torch.randn(n, width)  # noqa: E731
    small = lambda n: torch.randn(n, 3, 32, 32)  # noqa: E731
    return [
        Case("vit", Vit, images, 4 if is_tiny else 128, "bf16"),
        Case("mlp, large batch", mlp, rows, many),
        Case("mlp, small batch", mlp, rows, 4 if is_tiny else 64, is_gpu_bound=False),
        Case("cnn", cnn, small, 4 if is_tiny else 64, is_gpu_bound=False),
    ]


class Task:
    """Cross-entropy of images or rows."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean loss."""
        inputs, labels = batch
        return functional.cross_entropy(model(inputs).float(), labels)


@dataclass
class Bench:
    """One case on one device."""

    case: Case
    device: torch.device
    is_tiny: bool

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = self.case.make(is_tiny=self.is_tiny).to(self.device)
        size = self.case.batch_size
        inputs = self.case.batch(size).to(self.device)
        outputs = 1000 if isinstance(self.model, Vit) else 10
        self.batch = inputs, torch.randint(outputs, (size,), device=self.device)

    def plain(self, wrap: Callable[[nn.Module], nn.Module] = lambda m: m, **optimizer: Any) -> Step:
        """Return a step of a loop that somebody writes by hand, and that never waits."""
        model = wrap(copy.deepcopy(self.model))
        made = torch.optim.AdamW(model.parameters(), lr=1e-4, **optimizer)
        dtype = torch.bfloat16 if self.case.precision == "bf16" else None

        def step() -> None:
            made.zero_grad(set_to_none=True)
            with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
                loss = Task().loss(model, self.batch)
            loss.backward()
            made.step()

        return step

    def product(self, world: Any = None, *, graph: bool = False, **optimizer: Any) -> Step:
        """Return a step of the product, with all it does for it: the outcome is read two steps later."""
        job = Job.model_validate(
            {
                "name": "bench",
                "task": "own:Task",
                "train": {"precision": self.case.precision},
                "optimizer": {"name": "adamw", "args": optimizer},
            }
        )
        recorder = CudaRecorder() if graph else None
        model = copy.deepcopy(self.model)
        made = optimizer_of(job, Task(), model, 1)  # type: ignore[arg-type]
        strategy = (
            SingleRankStrategy()
            if world is None
            else AllreduceStrategy(world, codec=make_codec(Allreduce()), bucket_size_bytes=8 * 2**20)
        )
        strategy.bind(model, made)
        replica = TorchReplica(
            model=model, optimizer=made, strategy=strategy, data_ranks=world or SingleRank(), train=job.train,
            task=Task(), health=job.health, lag_steps=LAG_STEPS,
        )  # fmt: skip
        if recorder is not None:
            replica.record_steps(recorder, only_if_faster=False)
        size = self.case.batch_size
        share = share_of_step(0, size, batch_size=size, accumulation_steps=1, rank=0, size=1)
        readings: deque[Any] = deque()

        def step() -> None:
            readings.append(replica.step(PlannedStep(share, iter([self.batch])), 1e-4, want_norm=False))
            if len(readings) > LAG_STEPS:
                readings.popleft().outcome()

        return step


def synchronize(device: torch.device) -> None:
    """Return when all work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def block(step: Step, count: int, device: torch.device) -> float:
    """Return the time of a step, in seconds, over so many."""
    synchronize(device)
    started = perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (perf_counter() - started) / count


def host_time_s(step: Step, device: torch.device) -> float:
    """Return how long the host is busy with a step: before the GPU's queue makes it wait."""
    times = []
    for _ in range(20):
        synchronize(device)
        started = perf_counter()
        step()
        times.append(perf_counter() - started)
    return statistics.median(times)


def ratios(ours: Step, other: Step, device: torch.device, *, pairs: int, count: int) -> list[float]:
    """Return the ratio of each pair of blocks, in turns, first one and then the other in front."""
    for step in (ours, other):
        block(step, 10 if count > 2 else 2, device)
    found = []
    for number in range(pairs):
        both = [ours, other][:: -1 if number % 2 else 1]
        times = [block(step, count, device) for step in both][:: -1 if number % 2 else 1]
        found.append(times[0] / times[1])
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of a median, from order statistics."""
    ranked = sorted(values)
    reach = math.floor(0.98 * math.sqrt(len(ranked)))
    middle = len(ranked) // 2
    return ranked[max(0, middle - reach)], ranked[min(len(ranked) - 1, middle + reach)]


def comparisons(bench: Bench, world: Any, ddp: Callable[[nn.Module], nn.Module] | None) -> Iterator[Any]:
    """Yield name, ours, the other and the target of each comparison."""
    bound = bench.case.is_gpu_bound
    same, own = (1.01, 0.98) if bound else (1.20, None)
    yield "the same optimizer", bench.product(fused=True), bench.plain(fused=True), same
    yield "defaults of each", bench.product(), bench.plain(), own
    if bench.device.type == "cuda" and not bound:
        yield "with a graph", bench.product(graph=True), bench.plain(), 0.65
    if ddp is not None:
        target = 1.02 if bound else 1.10
        yield "reducer / DDP", bench.product(world, fused=True), bench.plain(ddp, fused=True), target


def in_a_world(device: torch.device, stack: ExitStack) -> tuple[Any, Callable[[nn.Module], nn.Module] | None]:
    """Return Horovod's world of one rank, and what wraps a model for DistributedDataParallel."""
    job = Job(name="bench", task="own:Task")
    for name in ("RANK", "LOCAL_RANK", "CROSS_RANK"):
        os.environ.setdefault(f"HOROVOD_{name}", "0")
    try:
        world = TorchCommunicator(horovod_settings(job))
    except Exception as error:  # noqa: BLE001  (whatever keeps Horovod from starting, the rest is measured)
        print(f"no reducer: Horovod does not start here ({error})")
        return None, None
    stack.callback(world.close)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1,
    )  # fmt: skip
    stack.callback(torch.distributed.destroy_process_group)
    return world, nn.parallel.DistributedDataParallel


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", help="some of the models, by their first words")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--smoke", action="store_true", help="on a CPU, tiny, a few steps")
    options = parser.parse_args()
    say: Callable[..., None] = print
    if not options.smoke and not torch.cuda.is_available():
        say("no GPU here: nothing was measured (--smoke runs the same code on a CPU)")
        return
    device = torch.device("cpu" if options.smoke else "cuda")
    pairs = 3 if options.smoke else options.pairs
    where = "a CPU, tiny models: of no meaning" if options.smoke else torch.cuda.get_device_name()
    say(f"{where}; torch {torch.__version__}")
    say(f"{'model':<18} {'comparison':<20} {'ratio':>7}  {'95 % interval':<17} {'target':>7}  host us")
    with ExitStack() as stack:
        world, ddp = in_a_world(device, stack)
        for case in cases(is_tiny=options.smoke):
            if options.models and not case.name.startswith(tuple(options.models.split(","))):
                continue
            bench = Bench(case, device, options.smoke)
            for name, ours, other, target in comparisons(bench, world, ddp):
                count = 2
                if not options.smoke:
                    block(ours, 10, device)
                    count = max(5, int(STEPS_PER_BLOCK_S / block(ours, 10, device)))
                found = ratios(ours, other, device, pairs=pairs, count=count)
                low, high = interval(found)
                hosts = ", ".join(f"{1e6 * host_time_s(step, device):.0f}" for step in (ours, other))
                aimed = f"{target:.2f}" if target else "-"
                say(
                    f"{case.name:<18} {name:<20} {statistics.median(found):>7.3f}  "
                    f"[{low:.3f} .. {high:.3f}] {aimed:>7}  {hosts}"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    main()
