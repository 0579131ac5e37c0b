"""Transformers ``Trainer`` on Horovod's ranks, in users' scripts.

init               starts Horovod, and hides the ranks from Accelerate
ShardedBatches     micro-batches of an epoch, as lists of indices
divides_by_items   whether a loss is divided by the number of items (labels, tokens) of the whole step
HorovodTrainer     a ``Trainer`` that trains on all ranks; ``HorovodTrainerMixin`` for other trainers
"""

from __future__ import annotations

import copyreg
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Subset
from transformers import DataCollator, Trainer, TrainerState, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from horovod_train.checkpoint.arrays import dump_state, pack_tree, parse_state, unpack_tree
from horovod_train.collectives.base import Communicator, allgather_json, barrier
from horovod_train.config.schema import Allreduce, Job
from horovod_train.data.shard import (
    MicroBatch,
    StepsOfEpoch,
    epoch_order,
    num_steps,
    split_evenly,
)
from horovod_train.errors import UserError
from horovod_train.frameworks import plain_data
from horovod_train.frameworks.base import Dataset
from horovod_train.frameworks.devices import join
from horovod_train.frameworks.reader import batch_length, checked_length
from horovod_train.frameworks.torch.comm.collectives import (
    TorchCommunicator,
    broadcast_model,
    sum_over,
    tensor_communicator,
)
from horovod_train.frameworks.torch.comm.sync_batch_norm import set_counted, synchronize_batch_norm
from horovod_train.frameworks.torch.framework import choose_device
from horovod_train.frameworks.torch.state.rank_state import seed_generators
from horovod_train.frameworks.torch.step import deferred
from horovod_train.frameworks.torch.step.gradient_hooks import (
    GradientHooks,
    defer_hooks_after_accumulation,
)
from horovod_train.frameworks.torch.strategies.allreduce.strategy import make_allreduce
from horovod_train.frameworks.torch.strategies.base import Strategy
from horovod_train.frameworks.torch.verify.untouched import traceless


@dataclass
class ShardedBatches:
    """This rank's micro-batches of an epoch, as lists of indices; a missing one has a sample of weight 0."""

    num_samples: int
    world: Communicator
    batch_size: int
    accumulation_steps: int
    seed: int
    epoch: int = 0

    @property
    def _step_size(self) -> int:
        return self.batch_size * self.accumulation_steps * self.world.size

    def _steps(self) -> StepsOfEpoch:
        return StepsOfEpoch(
            num_samples=self.num_samples,
            cursor=0,
            batch_size_per_rank=self.batch_size,
            accumulation_steps=self.accumulation_steps,
            rank=self.world.rank,
            size=self.world.size,
        )

    def __len__(self) -> int:
        return num_steps(self.num_samples, 0, self._step_size) * self.accumulation_steps

    def __iter__(self) -> Iterator[list[int]]:
        order = epoch_order(self.num_samples, self.seed, self.epoch, shuffle=True)
        for step in self._steps():
            for place in range(self.accumulation_steps):
                if place < len(step.micro_batches):
                    piece = step.micro_batches[place]
                    yield order[piece.start : piece.stop].tolist()
                else:
                    yield order[:1].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of samples."""
        self.epoch = epoch

    def lengths(self, step: int) -> list[int]:
        """Return the number of counted samples in each micro-batch of a step, counted over epochs."""
        steps = self._steps()
        found = steps[step % len(steps)]
        return lengths_of(found.micro_batches, self.accumulation_steps)


def lengths_of(micro_batches: Sequence[MicroBatch], num_places: int) -> list[int]:
    """Return the number of counted samples in each of ``num_places`` micro-batches; missing ones have 0."""
    counted = [len(each) if each.share else 0 for each in micro_batches]
    return [*counted, *[0] * (num_places - len(counted))]


TOLERANCE = 0.02
"""Largest difference of a ratio of two losses that is attributed to rounding."""


def divides_by_items(trainer: Any, inputs: dict[str, Any]) -> bool | None:
    """Compute a loss with two numbers of items, in evaluation mode. Collective.

    Trainer passes the number of items (labels, tokens) of the whole step to each model whose ``forward``
    accepts further arguments. Many models ignore it, such as BertForSequenceClassification, and return a
    mean over the labels of their batch.

    Args:
        trainer: A ``HorovodTrainer``.
        inputs: A micro-batch of this rank.

    Returns:
        True: the loss is divided by the number; False: it ignores the number; None: it cannot be seen in this
        batch, whose loss is zero or not finite.

    Raises:
        UserError: Only a part of the loss is divided by the number, so that no weight of ranks is right.
    """
    found = set(allgather_json(trainer.world, _kind_of(_ratio(trainer, inputs)))) - {""}
    if len(found) > 1 or "mixed" in found:
        raise UserError(
            "the loss is a sum of terms, of which only some are divided by num_items_in_batch: on several "
            "ranks, each rank would add the others",
            hint="divide all terms by num_items_in_batch, or none (compute_loss_func); for a mixture of "
            "experts, set output_router_logits: false",
        )
    return {"divided": True, "ignored": False}[found.pop()] if found else None


def _ratio(trainer: Any, inputs: dict[str, Any]) -> float:
    """Return the loss with twice the number of items, relative to that with the number."""
    model, losses = trainer.model, []
    prepared = trainer._prepare_inputs(inputs)  # noqa: SLF001  (as training_step does)
    with traceless(model), torch.no_grad(), trainer.compute_loss_context_manager():
        model.eval()
        for num_items in (8.0, 16.0):
            seed_generators(0, 0, 0)
            count = torch.tensor(num_items, device=trainer.args.device)
            losses.append(float(trainer.compute_loss(model, dict(prepared), num_items_in_batch=count)))
    return losses[1] / losses[0] if losses[0] else float("nan")


def _kind_of(ratio: float) -> str:
    if math.isnan(ratio):
        return ""
    kinds = {"divided": 0.5, "ignored": 1.0}
    return next((kind for kind, ideal in kinds.items() if abs(ratio - ideal) <= TOLERANCE), "mixed")


Inputs = dict[str, torch.Tensor]
ComputeMetrics = Callable[[EvalPrediction], Mapping[str, float]]
Predictions = Any  # nested structure of arrays, or None

_world: Communicator | None = None

# With these variables, Accelerate assumes its own launcher, and fails without MASTER_ADDR.
FOREIGN = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_")


def init(job: Job | None = None, environ: MutableMapping[str, str] = os.environ) -> Communicator:
    """Initialize Horovod, and return the communicator; of one rank, if this process was started alone.

    Must be called before ``TrainingArguments`` are created, because it removes the variables of MPI's
    launchers from the environment (see ``hide_launcher``).

    Raises:
        EngineError: The process is one of several ranks, and Horovod is missing or cannot start.
    """
    global _world  # noqa: PLW0603  (one communicator per process; the first call removes variables)
    if _world is None:
        _world = join(TorchCommunicator, job)
        hide_launcher(environ)
    return _world


def hide_launcher(environ: MutableMapping[str, str]) -> None:
    """Remove the variables by which Accelerate detects ranks of MPI, which it would use as its own."""
    for name in [name for name in environ if name.startswith(FOREIGN)]:
        del environ[name]


class HorovodTrainerMixin:
    """Mixin that trains on all ranks; the first base class: ``class T(HorovodTrainerMixin, Trainer)``.

    Accelerate must detect a single process, because it initializes torch.distributed for several. This
    class implements what Accelerate does for several processes: parts of the data, the sum of gradients,
    the mean over tokens, the evaluation, and writing of files on rank 0.

    Further keyword arguments of the trainer are ``world``, ``bucket_size_mib``, ``wire_dtype`` and ``device``
    (default: the rank's GPU). Each rank reads its part of every global batch, and each sample counts once per
    epoch. A single process trains on the same global batches in the same order.
    """

    args: TrainingArguments
    accelerator: Accelerator
    optimizer: torch.optim.Optimizer
    model: nn.Module
    state: TrainerState
    train_dataset: Dataset
    data_collator: DataCollator
    compute_metrics: ComputeMetrics | None
    compute_loss_func: Callable[..., Any] | None

    def __init__(
        self,
        *args: Any,
        world: Communicator | None = None,
        bucket_size_mib: float = 8.0,
        wire_dtype: str = "fp32",
        device: torch.device | None = None,
        **kwargs: Any,
    ) -> None:
        self.world = init() if world is None else world
        self._ranks = tensor_communicator(self.world)  # once: slow compared with a step
        self._allreduce = Allreduce.model_validate(
            {"bucket_size_mib": bucket_size_mib, "wire_dtype": wire_dtype}
        )
        self.gradients: Strategy | None = None
        self._hooks: GradientHooks | None = None
        self._divides_by_items: bool | None = None  # None: not known yet
        self._are_counted: list[bool] = []  # of the remaining micro-batches of the current step
        self.local_loss = torch.zeros(())
        self._weights: (
            list[float] | list[torch.Tensor]
        ) = []  # of the remaining micro-batches of the current step
        given = kwargs.get("args") or next((a for a in args if isinstance(a, TrainingArguments)), None)
        if given is None:
            kwargs["args"] = given = TrainingArguments()
        patch_ranks(given, self.world)
        if torch.cuda.is_available() and not given.use_cpu:
            use_one_device(given, device or choose_device(Job(name="library", task="own:Loop"), self.world))
        super().__init__(*args, **kwargs)

    # -- training data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of this rank's part of every global batch."""
        batches = ShardedBatches(
            checked_length(self.train_dataset),
            self.world,
            batch_size=self.args.train_batch_size,
            accumulation_steps=self.args.gradient_accumulation_steps,
            seed=self.args.data_seed if self.args.data_seed is not None else self.args.seed,
        )
        self._batches = batches
        return _EpochLoader(
            self._remove_unused_columns_of(self.train_dataset),  # type: ignore[arg-type]
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
        )

    def _remove_unused_columns_of(self, dataset: Dataset) -> Dataset:
        is_table = type(dataset).__module__.startswith("datasets.")
        return self._remove_unused_columns(dataset, description="training") if is_table else dataset  # type: ignore[attr-defined]

    def get_batch_samples(
        self, epoch_iterator: Iterator[Inputs], num_batches: int, device: torch.device
    ) -> tuple[list[Inputs], torch.Tensor | None]:
        """Return the micro-batches of a step, and the number of its items (tokens) over all ranks."""
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        if not samples:
            return samples, num_items
        lengths = self._lengths()
        # Includes batches of weight 0, so that all ranks decide identically whether items are counted.
        has_items = self._get_num_items_in_batch(samples, device) is not None  # type: ignore[attr-defined]
        real = [batch for batch, length in zip(samples, lengths, strict=True) if length]
        mine = self._get_num_items_in_batch(real, device) if has_items and real else 0  # type: ignore[attr-defined]
        # Filled on the device and not read here, so that the host does not wait for the device.
        numbers = torch.full((2,), float(sum(lengths)), dtype=torch.float64, device=device)
        numbers[1] = mine
        self._are_counted = [length > 0 for length in lengths]
        total, items = self._sum_over_ranks(numbers)
        if has_items and self._divides_by_items is None and self.world.size * len(samples) > 1:
            self._divides_by_items = divides_by_items(self, samples[0])
        if has_items and self._divides_by_items is not False:
            # The model divides by the number of items in the whole step.
            self._weights = [float(length > 0) for length in lengths]
            return samples, items.float()
        # Means over micro-batches are weighted, by items if there are labels, otherwise by samples. Trainer
        # then divides by the number of micro-batches, unless there is a compute_loss_func.
        factor = len(samples) if self.compute_loss_func is None else 1
        parts = (
            [self._get_num_items_in_batch([batch], device) / items for batch in samples]  # type: ignore[attr-defined]
            if has_items
            else [length / total for length in lengths]
        )
        self._weights = [part * factor * (length > 0) for part, length in zip(parts, lengths, strict=True)]
        return samples, None

    def _sum_over_ranks(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the elementwise sum over ranks; on a GPU, the host does not wait for it."""
        return self._ranks.wait(self._ranks.start_allreduce(numbers, "horovod_train.items"))

    def _lengths(self) -> list[int]:
        """Return the number of counted samples in each micro-batch of the next step."""
        return self._batches.lengths(self.state.global_step)

    # -- gradients

    def compute_loss(
        self, model: nn.Module, inputs: Inputs, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Return the loss; in training, weighted for the mean over the global batch."""
        if model.training and not return_outputs:
            set_counted(is_micro_batch_counted=self._are_counted.pop(0))
        found = super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)  # type: ignore[misc]
        if not model.training or return_outputs:
            return found
        weight = self._weights.pop(0)
        # The product is converted to the dtype of the loss: rounding the float64 weight would change it.
        return (found * weight).to(found.dtype)

    def training_step(
        self, model: nn.Module, inputs: Inputs, num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run a forward and backward pass; after the last of a step, wait for the sum over ranks."""
        if self.gradients is None:
            self._prepare_ranks(model)
        assert self.gradients is not None
        if self._hooks is None:
            self._hooks = GradientHooks(list(model.parameters()).copy)
        self._hooks.defer()
        is_last = bool(self.accelerator.sync_gradients)
        if is_last:
            self.gradients.prepare_backward(is_last=True)
        # A model's loss may have shape [1], but Trainer adds it to a tensor of shape [].
        mine = super().training_step(model, inputs, num_items_in_batch).reshape(())  # type: ignore[misc]
        self.local_loss = self.local_loss.to(mine.device) + mine.detach()
        if not is_last:
            return torch.zeros_like(mine)
        loss = self._complete(self.gradients).clone()
        self.local_loss = torch.zeros_like(mine)
        # Trainer logs the sum over micro-batches: the last one returns the loss, the others zeros.
        return loss.to(mine.dtype)

    def _complete(self, gradients: Strategy) -> torch.Tensor:
        """Wait for the sum of gradients over ranks; return the loss of the global batch."""
        loss = gradients.reduce(self.local_loss)
        assert self._hooks is not None
        self._hooks.call()
        return loss

    def _prepare_ranks(self, model: nn.Module) -> None:
        """Broadcast rank 0's weights; create the gradient reducer."""
        broadcast_model(model, self.world)
        synchronize_batch_norm(
            model, partial(sum_over, self._ranks), every=False, prefix="horovod_train.batch_norm"
        )
        defer_hooks_after_accumulation(model)
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        self.gradients = make_allreduce(self.world, self._allreduce)
        self.gradients.bind(model, optimizer)
        if deferred.lag_steps_of(self.args.device):
            self.gradients.defer_results()

    # -- evaluation

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate this rank's part of the samples; return the result over the samples of all ranks."""
        if self.world.size == 1:
            return super().evaluation_loop(  # type: ignore[misc]
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        self._loss_sums = (0.0, 0)
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        try:
            wanted = prediction_loss_only
            if wanted is None and not self.args.prediction_loss_only:
                wanted = compute_metrics is None and description != "Prediction"
            part = part_of(dataloader, self.world)
            if len(part) > 0:
                mine = super().evaluation_loop(part, description, wanted, ignore_keys, metric_key_prefix)  # type: ignore[misc]
            else:
                mine = EvalLoopOutput(None, None, {}, 0)
        finally:
            self.compute_metrics = compute_metrics
        return self._joined(mine, compute_metrics, metric_key_prefix, checked_length(dataloader.dataset))  # type: ignore[arg-type]

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Inputs,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Predict a batch; record its loss and number of samples."""
        found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)  # type: ignore[misc]
        if self.world.size > 1 and found[0] is not None:
            count = batch_length(inputs)
            total, samples = self._loss_sums
            self._loss_sums = total + float(found[0].mean()) * count, samples + count
        return found

    def _joined(
        self, mine: EvalLoopOutput, compute_metrics: ComputeMetrics | None, prefix: str, num_samples: int
    ) -> EvalLoopOutput:
        predictions = self._join(mine.predictions)
        labels = self._join(mine.label_ids)
        metrics: dict[str, float] = {}
        if compute_metrics is not None and predictions is not None and labels is not None:
            found = compute_metrics(EvalPrediction(predictions=predictions, label_ids=labels))
            metrics = {
                name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value
                for name, value in denumpify_detensorize(found).items()
            }
        total, samples = self.world.allreduce_sum([float(value) for value in self._loss_sums])
        if samples:
            metrics[f"{prefix}_loss"] = total / samples
        return EvalLoopOutput(predictions, labels, metrics, num_samples)

    def _join(self, mine: object) -> Predictions:
        """Return the concatenated arrays of all ranks, in the order of samples."""
        tree, found = pack_tree({"value": mine}, lambda leaf: isinstance(leaf, np.ndarray))
        data = dump_state(tree, {name: plain_data.to_blob(array) for name, array in found.items()})
        pieces = []
        for piece in self.world.allgather(data):
            plain, blobs = parse_state(piece)
            value = unpack_tree(plain, {name: plain_data.from_blob(blob) for name, blob in blobs.items()})[
                "value"
            ]
            if value is not None:
                pieces.append(value)
        return concatenated(pieces) if pieces else None

    # -- files

    def _save_checkpoint(self, *args: object, **kwargs: object) -> None:
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        barrier(self.world)


class HorovodTrainer(HorovodTrainerMixin, Trainer):
    """A ``Trainer`` that trains on all ranks."""


class _EpochLoader(DataLoader[Any]):
    """Loader that passes the epoch to its batch sampler."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the batch sampler."""
        assert isinstance(self.batch_sampler, ShardedBatches)
        self.batch_sampler.set_epoch(epoch)


def patch_ranks(args: TrainingArguments, world: Communicator) -> None:
    """Make training arguments return Horovod's rank and size, which select the ranks that log and save."""
    base = type(args)
    if world.size == 1 or getattr(base, "_sees_all_ranks", False):
        return
    if args.deepspeed or args.fsdp:
        raise UserError(
            "TrainingArguments enable DeepSpeed or FSDP, which cannot run on Horovod's ranks",
            hint="remove them",
        )
    if args.include_for_metrics or args.batch_eval_metrics:
        raise UserError(
            "TrainingArguments set include_for_metrics or batch_eval_metrics, which are not supported "
            "on several "
            "ranks: compute_metrics receives the predictions and labels of all ranks",
            hint="remove them",
        )

    @contextmanager
    def main_process_first(_: object, local: bool = True, desc: str = "") -> Generator[None, None, None]:
        del desc  # unused
        is_first = (world.local_rank if local else world.rank) == 0
        if not is_first:
            barrier(world)
        try:
            yield
        finally:
            if is_first:
                barrier(world)

    def as_plain(self: object, _protocol: object) -> tuple[object, ...]:
        # Python's default form of a pickled object: its class and its attributes.
        return copyreg._reconstructor, (base, object, None), dict(self.__dict__)  # type: ignore[attr-defined]  # noqa: SLF001

    members = {
        "_sees_all_ranks": True,
        "__reduce_ex__": as_plain,  # saved with the model, and loaded without this package
        "world_size": property(lambda _: world.size),
        "process_index": property(lambda _: world.rank),
        "local_process_index": property(lambda _: world.local_rank),
        "main_process_first": main_process_first,
    }
    args.__class__ = type(base.__name__, (base,), members)


def use_one_device(args: TrainingArguments, device: torch.device) -> None:
    """Make training arguments use only this rank's device.

    Otherwise, each process that sees several GPUs would use the first one, and distribute its model over all
    GPUs with ``DataParallel``.
    """
    _ = args.device  # computed now, and replaced below
    for name in ("_setup_devices", "__cached__setup_devices"):  # names in different versions
        vars(args)[name] = device
    args._n_gpu = 1  # noqa: SLF001  (Trainer does the same to use one GPU)
    torch.cuda.set_device(device)


def part_of(dataloader: DataLoader[Any], world: Communicator) -> DataLoader[Any]:
    """Return a loader of this rank's part of the samples, in their order."""
    start, stop = split_evenly(checked_length(dataloader.dataset), world.rank, world.size)  # type: ignore[arg-type]
    return DataLoader(
        Subset(dataloader.dataset, range(start, stop)),
        batch_size=dataloader.batch_size or 1,
        collate_fn=dataloader.collate_fn,
        num_workers=dataloader.num_workers,
    )


def concatenated(pieces: list[Any]) -> Predictions:
    """Concatenate predictions of ranks; pad sequences of different lengths with -100, as Trainer does."""
    first = pieces[0]
    if isinstance(first, tuple | list):
        return type(first)(concatenated(list(column)) for column in zip(*pieces, strict=True))
    if isinstance(first, dict):
        return {key: concatenated([piece[key] for piece in pieces]) for key in first}
    if first.ndim < 2:
        return np.concatenate(pieces)
    width = max(piece.shape[1] for piece in pieces)
    padded = [
        np.pad(p, [(0, 0), (0, width - p.shape[1])] + [(0, 0)] * (p.ndim - 2), constant_values=-100)
        for p in pieces
    ]
    return np.concatenate(padded)
