"""The framework Lightning: replica and readers of a job, and training by ``Trainer``."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import lightning
import numpy as np
import torch
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer import call

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.horovod import connect
from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Job
from horovod_train.data.planned_step import PlannedStep
from horovod_train.data.shard import eval_micro_batches
from horovod_train.errors import UserError
from horovod_train.frameworks.base import Bridge
from horovod_train.frameworks.callbacks import CallbackState
from horovod_train.frameworks.lightning.callbacks import (
    load_state,
    own_callbacks,
    report_not_called,
    state_of,
)
from horovod_train.frameworks.lightning.losses import ModuleLosses
from horovod_train.frameworks.lightning.strategy import HorovodStrategy
from horovod_train.frameworks.lightning.task import OPTIONAL, REQUIRED, LightningTask
from horovod_train.frameworks.loss_comparison import LossComparison
from horovod_train.frameworks.python_state import state_of_task
from horovod_train.frameworks.python_values import Root
from horovod_train.frameworks.reader import start_loader_server
from horovod_train.frameworks.task import load_task, report_unused_methods
from horovod_train.frameworks.torch.comm.collectives import TorchCommunicator
from horovod_train.frameworks.torch.comm.sync_batch_norm import set_counted
from horovod_train.frameworks.torch.device import TorchBased
from horovod_train.frameworks.torch.framework import (
    TorchFramework,
    choose_device,
    reader_factory,
    set_global_options,
)
from horovod_train.frameworks.torch.reader import TorchReader
from horovod_train.frameworks.torch.state.generators import seed_generators
from horovod_train.frameworks.torch.state.optimizer import GroupRates, optimizer_over
from horovod_train.frameworks.torch.step.norm import total_norm
from horovod_train.frameworks.torch.strategies.allreduce.strategy import SingleRankStrategy
from horovod_train.frameworks.torch.strategies.base import DevicePlacement
from horovod_train.frameworks.trainer_replica import TrainerReplica

NEVER = 2**60
"""An interval of validation by Lightning itself: the job validates."""


class LightningFramework(TorchBased):
    """Lightning, for one job in one process."""

    def connect(self, job: Job) -> Communicator:
        """Initialize Horovod, and return the communicator; of one rank, if this process was started alone."""
        if job.launch.threads_per_rank is not None:
            torch.set_num_threads(job.launch.threads_per_rank)
        if job.data.num_workers:
            start_loader_server("horovod_train.frameworks.torch.reader")
        return connect(TorchCommunicator, job)

    def prepare(self, job: Job, mesh: Mesh) -> tuple[TrainerReplica, TorchReader, TorchReader | None]:
        """Return this rank's replica and the readers of training and evaluation data."""
        world = mesh.data
        set_global_options(job)
        device = choose_device(job, mesh.world)
        seed_generators(job.train.seed, 0, 0)
        self._job, self._world, self._device = job, world, device
        self._task: LightningTask = load_task(job.task, job.task_args, REQUIRED)
        report_unused_methods(self._task, (*REQUIRED, *OPTIONAL), world)
        module = DevicePlacement(device, job.train)(self._task.model())
        TorchFramework.synchronize(module, job, mesh)
        self._callbacks = own_callbacks(self._task, module)
        report_not_called(module, world)
        log_exactly(module)
        parameters = [p for p in module.parameters() if p.requires_grad]
        # Lightning refuses to clip for a fused optimizer with mixed precision.
        may_fuse = job.train.precision == "fp32" or job.train.clip_grad_norm is None
        optimizer = optimizer_over(job, parameters, world.size, may_fuse=may_fuse)
        module.configure_optimizers = lambda: optimizer  # type: ignore[assignment]
        read = reader_factory(job, device)
        eval_data = getattr(self._task, "eval_data", None)
        self._train_reader = read(self._task.train_data())
        self._eval_reader = read(eval_data()) if eval_data else None
        if self._eval_reader is not None and len(self._eval_reader) < world.size:
            raise UserError(
                f"{len(self._eval_reader)} samples cannot be evaluated on {world.size} ranks: Lightning "
                "needs one for each",
                hint="use fewer ranks, or framework: torch",
            )
        complete = SingleRankStrategy()  # HorovodStrategy sums the gradients
        complete.bind(module, optimizer)
        self._replica = TrainerReplica(
            model=module,
            optimizer=optimizer,
            strategy=complete,
            data_ranks=world,
            train=job.train,
        )
        self._replica.evaluate_now = self._evaluate
        self._replica.callbacks = CallbackState(world)
        # Lightning makes the attributes of hyperparameters later.
        ignored = {*vars(lightning.LightningModule()), "_hparams", "_hparams_initial", "_hparams_name"}
        self._replica.python_state = state_of_task(
            mesh,
            self._task,
            [self._train_reader, self._eval_reader],
            Root("module", module, frozenset(ignored), is_trained=True),
        )
        losses = ModuleLosses(module, self._replica.python_state)
        self._replica.one_process = LossComparison(world, self._train_reader, losses, job)
        return self._replica, self._train_reader, self._eval_reader

    def fit(self, bridge: Bridge) -> None:
        """Train to the end of the job with ``Trainer``."""
        bridge.begin()
        if not bridge.is_done:
            strategy = self._strategy()
            source = _Source(bridge, self._train_reader, self._job.train.accumulation_steps)
            has_others = bool(self._callbacks)
            timer = _StepTimer(bridge, strategy, self._replica, source, has_others=has_others)
            ends = _EpochReporter(timer, self._callbacks, self._replica.callbacks)
            trainer = self._trainer(
                strategy=strategy,
                max_epochs=bridge.num_epochs,
                accumulate_grad_batches=self._job.train.accumulation_steps,
                gradient_clip_val=self._job.train.clip_grad_norm,
                reload_dataloaders_every_n_epochs=1,
                check_val_every_n_epoch=NEVER,
                callbacks=[timer, *self._callbacks, ends],
            )
            # Users' modules read current_epoch, also after a resume.
            trainer.fit_loop.epoch_progress.current.processed = bridge.epoch
            has_eval = self._eval_reader is not None
            self._replica.evaluate_now = lambda: self._validate_within(trainer)
            timer.report_steps(trainer)
            trainer.fit(self._replica.model, source, self._eval_batches() if has_eval else None)
            self._replica.evaluate_now = self._evaluate
        bridge.end()

    def _validate_within(self, trainer: lightning.Trainer) -> dict[str, float]:
        """Return the metrics that ``validation_step`` logs, during ``fit``, as Lightning itself validates."""
        loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector  # noqa: SLF001
        generators = self.rng_state()  # training must not depend on the interval of evaluations
        call._call_lightning_module_hook(trainer, "on_validation_model_zero_grad")  # noqa: SLF001
        first_iteration, trainer.validating = connector._first_loop_iter, True  # noqa: SLF001
        loop.val_loop.run()
        trainer.training, connector._first_loop_iter = True, first_iteration  # noqa: SLF001
        self.load_rng_state(*generators)
        assert self._replica.metrics is not None  # set when validation has ended
        found, self._replica.metrics = self._replica.metrics, None
        return found

    def _strategy(self) -> HorovodStrategy:
        allreduce = self._job.allreduce
        return HorovodStrategy(
            world=self._world, bucket_size_mib=allreduce.bucket_size_mib, wire_dtype=allreduce.wire_dtype
        )

    def _precision(self) -> Precision:
        """Return Lightning's precision plugin; it uses the replica's loss scale, which is saved."""
        match self._job.train.precision:
            case "fp16":
                return MixedPrecision("16-mixed", self._device.type, scaler=self._replica.scaler)
            case "bf16":
                return MixedPrecision("bf16-mixed", self._device.type)
            case _:
                return Precision()

    def _trainer(self, **settings: object) -> lightning.Trainer:
        """Return a trainer that does not log, save or report progress, because this package does."""
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", message=".*LeafSpec")  # a warning about Lightning's own code
        on_gpu = self._device.type == "cuda"
        return lightning.Trainer(
            accelerator="gpu" if on_gpu else "cpu",
            devices=[self._device.index] if on_gpu else 1,
            plugins=self._precision(),
            deterministic=self._job.train.deterministic,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            **settings,
        )

    def _evaluate(self) -> dict[str, float]:
        """Return the metrics that ``validation_step`` logs, over all ranks."""
        trainer = self._trainer(strategy=self._strategy())
        found = trainer.validate(self._replica.model, self._eval_batches(), verbose=False)
        return {name: float(value) for metrics in found for name, value in metrics.items()}

    def _eval_batches(self) -> _Batches:
        """Return this rank's evaluation batches; each sample is on exactly one rank."""
        reader, job = self._eval_reader, self._job
        assert reader is not None
        batch_size = job.evaluation.batch_size_per_rank or job.train.batch_size_per_rank
        mine = eval_micro_batches(len(reader), batch_size, self._world.rank, self._world.size)
        return _Batches(len(mine), lambda: reader.read(0, np.arange(len(reader)), mine))


@dataclass(frozen=True)
class _Batches:
    """Iterable over batches, with a length; it can be iterated repeatedly."""

    length: int
    read: Callable[[], Iterator[object]]

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[object]:
        return self.read()


class _Source:
    """Batches for ``Trainer``, the same number per step; spare batches of weight 0 replace missing ones."""

    def __init__(self, bridge: Bridge, reader: TorchReader, accumulation_steps: int) -> None:
        self._bridge = bridge
        self._reader = reader
        self.accumulation_steps = accumulation_steps
        self._epoch = -1
        self.steps: list[PlannedStep] = []

    def _plan(self) -> None:
        if self._epoch != self._bridge.epoch:
            self._epoch = self._bridge.epoch
            self.steps = self._bridge.rest_of_epoch()

    def __len__(self) -> int:
        self._plan()
        return len(self.steps) * self.accumulation_steps

    def __iter__(self) -> Iterator[object]:
        self._plan()
        for step in self.steps:
            for _, batch in step.padded(self.accumulation_steps, self._reader.first):
                yield batch

    def share_of(self, batch_idx: int) -> float:
        """Return the fraction of a step's samples that a micro-batch contains."""
        number, place = divmod(batch_idx, self.accumulation_steps)
        return self.steps[number].share_at(place)


class _StepTimer(lightning.Callback):
    """Callback that prepares and times the steps; it is called before all other callbacks."""

    def __init__(
        self,
        bridge: Bridge,
        strategy: HorovodStrategy,
        replica: TrainerReplica,
        source: _Source,
        *,
        has_others: bool,
    ) -> None:
        self._bridge = bridge
        self._strategy = strategy
        self._replica = replica
        self._source = source
        self._lr = 0.0
        self._has_others = has_others
        self._rates = GroupRates(replica.optimizer)
        self._known = {id(parameter) for parameter in replica.model.parameters()}
        self._begin_step()

    def _begin_step(self) -> None:
        self._clock = self._replica.new_clock()
        self._local_loss: torch.Tensor | float = 0.0
        self._norm: torch.Tensor | None = None

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Refuse parameters that were made after the optimizer, which would not be trained.

        Raises:
            UserError: There are such parameters.
        """
        if new := [name for name, each in module.named_parameters() if id(each) not in self._known]:
            raise UserError(
                f"{new[0]} was made after the optimizer, in configure_model() or setup(), and is not trained",
                hint="make layers in __init__() of the module, or in the task's model()",
            )

    def on_train_batch_start(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Set the weight of a micro-batch, and the learning rate before the first one of a step."""
        self._clock.lap("data")
        if batch_idx % self._source.accumulation_steps == 0:
            self._lr = self._bridge.lr
            self._rates.set_job_rate(self._lr)
        set_counted(is_micro_batch_counted=self._source.share_of(batch_idx) > 0)
        # Undo Lightning's division by the number of micro-batches: the shares already sum to 1.
        self._strategy.share = self._source.share_of(batch_idx) * self._source.accumulation_steps

    def on_before_backward(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, loss: torch.Tensor
    ) -> None:
        """Record the loss and the end of the forward pass."""
        self._local_loss = self._local_loss + loss.detach().double() * self._strategy.share
        self._clock.lap("forward")

    def on_after_backward(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Record the end of the backward pass; the wait for other ranks follows."""
        self._clock.lap("backward")

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Record the end of the all-reduce; compute the gradient norm, if requested, before clipping."""
        self._clock.lap("allreduce_wait")
        assert self._strategy.gradients is not None
        gradients = self._strategy.gradients.gradients()
        self._norm = total_norm(gradients) if self._bridge.wants_norm else None

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        module: lightning.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Record the end of the update; a step's time does not include later callbacks."""
        self._clock.lap("optimizer")

    def report_steps(self, trainer: lightning.Trainer) -> None:
        """Report steps after all hooks of module and callbacks, where Lightning itself validates."""
        loop = trainer.fit_loop.epoch_loop
        advanced = loop.on_advance_end

        def on_advance_end(fetcher: _DataFetcher) -> None:
            self.end_step(trainer, loop.batch_idx)
            advanced(fetcher)

        loop.on_advance_end = on_advance_end

    def end_step(self, trainer: lightning.Trainer, batch_idx: int) -> None:
        """Report a step after its last micro-batch; evaluate, if due."""
        number, place = divmod(batch_idx, self._source.accumulation_steps)
        if place < self._source.accumulation_steps - 1:
            return
        assert self._strategy.loss is not None
        assert self._strategy.gradients is not None
        loss = self._strategy.loss
        numbers = {
            "loss": loss,
            "local_loss": self._local_loss,
            "grad_norm": self._norm,
            "is_finite": loss.isfinite(),
        }
        outcome = self._replica.outcome_of(numbers, self._clock, self._strategy.gradients)
        self._bridge.after_step(self._source.steps[number], outcome, self._lr)
        if self._bridge.evaluates_now:
            self._replica.metrics = self._replica.evaluate_now()  # before callbacks see the end of the epoch
        elif self._bridge.is_done:
            trainer.should_stop = True
        self._begin_step()  # a step's time does not include the bridge

    def on_validation_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Average running statistics, so that all ranks evaluate the same model."""
        self._replica.sync_buffers()

    def on_validation_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Store the logged metrics."""
        found = trainer._logger_connector.metrics["callback"]  # noqa: SLF001  (there is no public name)
        self._replica.metrics = {name: float(value) for name, value in found.items()}

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Let the bridge record the weights before end-of-training callbacks."""
        if self._has_others:
            self._bridge.before_on_train_end()

    def end_epoch(self, trainer: lightning.Trainer) -> None:
        """Report the end of an epoch, if it is complete; otherwise, stop training."""
        if self._bridge.is_epoch_complete:
            self._bridge.finish_epoch()
            self._bridge.after_epoch()
            trainer.should_stop = trainer.should_stop or self._bridge.is_done
        else:
            self._bridge.report_incomplete_epoch()
            trainer.should_stop = True


class _EpochReporter(lightning.Callback):
    """Callback that reports ends of epochs; called last, to save effects of other callbacks."""

    def __init__(self, timer: _StepTimer, callbacks: list[lightning.Callback], saved: CallbackState) -> None:
        self._timer = timer
        self._callbacks = callbacks
        self._saved = saved

    def on_fit_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Load the state of callbacks."""
        load_state(trainer, self._callbacks, self._saved)
        self._saved.take = lambda: state_of(trainer, self._callbacks)

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Report the end of an epoch."""
        self._timer.end_epoch(trainer)


def log_exactly(module: lightning.LightningModule) -> None:
    """Make metrics that ``validation_step`` logs means over the samples of all ranks."""
    plain = module.log

    def log(name: str, value: object, *args: object, **kwargs: object) -> None:
        if module.trainer.validating:
            kwargs["sync_dist"] = True
        plain(name, value, *args, **kwargs)

    module.log = log
