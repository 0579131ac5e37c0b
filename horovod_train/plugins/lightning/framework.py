"""Lightning on Horovod: replica and readers of a job, and training by ``Trainer``.

LightningTask        the interface of a task
own_callbacks        callbacks of a task and its module; refuses unsupported ones
state_of             state of callbacks and hooks in a checkpoint
ModuleLosses         losses of a module that are compared with those of one process
LightningFramework   training of a job
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import lightning
import torch
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer import call

from horovod_train.collectives.base import Communicator, Mesh
from horovod_train.collectives.horovod import connect
from horovod_train.config.schema import Job
from horovod_train.data.shard import EvalMicroBatches, InOrder, PlannedSteps
from horovod_train.errors import UserError
from horovod_train.frameworks.base import (
    Bridge,
    eval_data_of,
    load_task,
    report_unused_methods,
    train_data_of,
)
from horovod_train.frameworks.callbacks import CallbackState, check_callbacks, named
from horovod_train.frameworks.python_state import PythonState, Root, state_of_task
from horovod_train.frameworks.reader import start_loader_server
from horovod_train.frameworks.torch.comm.collectives import TorchCommunicator
from horovod_train.frameworks.torch.comm.sync_batch_norm import SyncBatchNormMixin, set_counted
from horovod_train.frameworks.torch.device import TorchBased
from horovod_train.frameworks.torch.framework import (
    TorchFramework,
    choose_device,
    reader_factory,
    set_global_options,
)
from horovod_train.frameworks.torch.state.optimizer import GroupRates, optimizer_over
from horovod_train.frameworks.torch.state.rank_state import seed_generators
from horovod_train.frameworks.torch.strategies.allreduce.strategy import SingleRankStrategy
from horovod_train.frameworks.torch.strategies.base import DevicePlacement, total_norm
from horovod_train.frameworks.torch.task import TorchReader
from horovod_train.frameworks.torch.verify.untouched import names_read, traceless
from horovod_train.plugins.frameworks.variables import LossComparison, TrainerReplica
from horovod_train.plugins.lightning.strategy import HorovodStrategy

log = logging.getLogger(__name__)
MODULE = "module"
NOT_CALLED = {
    "configure_optimizers": "the job's optimizer: and lr: are used",
    "train_dataloader": "the task's train_data() is read",
    "val_dataloader": "the task's eval_data() is read",
}
"""Methods of a module that a job does not call, and what the job uses instead."""


def own_callbacks(task: object, module: lightning.LightningModule) -> list[lightning.Callback]:
    """Return the callbacks of the task and of the module, if the job supports all of them.

    Raises:
        UserError: A callback is not supported, or the module uses manual optimization.
    """
    if not module.automatic_optimization:
        raise UserError(
            f"{type(module).__name__} has automatic_optimization = False, which jobs do not support",
            hint="use Lightning's Trainer with HorovodStrategy in a script (docs/own-loop.md)",
        )
    of_module = module.configure_callbacks()
    found = [
        *getattr(task, "callbacks", list)(),
        *(of_module if isinstance(of_module, Sequence) else [of_module]),
    ]
    module.configure_callbacks = list  # Trainer must not add them again
    check_callbacks(found, "lightning")
    return found


def report_not_called(module: lightning.LightningModule, world: Communicator) -> None:
    """Log the methods of a module that a job does not call, or calls without gradients, on rank 0."""
    found = [
        f"{name}() ({instead})"
        for name, instead in NOT_CALLED.items()
        if getattr(type(module), name) is not getattr(lightning.LightningModule, name)
    ]
    if found and world.rank == 0:
        log.warning("methods of %s that a job does not call: %s", type(module).__name__, "; ".join(found))
    name = "on_after_backward"
    if getattr(type(module), name) is not getattr(lightning.LightningModule, name) and world.rank == 0:
        log.warning(
            "%s.on_after_backward() sees no gradients, because ranks add them up later: use "
            "on_before_optimizer_step()",
            type(module).__name__,
        )


def state_of(trainer: lightning.Trainer, callbacks: Iterable[lightning.Callback]) -> dict[str, Any]:
    """Return the results of ``state_dict`` and ``on_save_checkpoint`` of callbacks and module, by name."""
    module = trainer.lightning_module
    state = {}
    for name, callback in named(callbacks):
        added = _added(trainer, partial(callback.on_save_checkpoint, trainer, module))
        state[name] = {"state": callback.state_dict(), "checkpoint": added}
    state[MODULE] = {"state": {}, "checkpoint": _added(trainer, module.on_save_checkpoint)}
    return {name: each for name, each in state.items() if any(each.values())}


def load_state(
    trainer: lightning.Trainer, callbacks: Iterable[lightning.Callback], saved: CallbackState
) -> None:
    """Load the result of ``state_of`` into callbacks and module."""
    module = trainer.lightning_module
    for name, callback in named(callbacks):
        if (found := saved.loaded(name)) is not None:
            callback.on_load_checkpoint(trainer, module, _checkpoint(trainer) | found["checkpoint"])
            callback.load_state_dict(found["state"])
    if (found := saved.loaded(MODULE)) is not None:
        module.on_load_checkpoint(_checkpoint(trainer) | found["checkpoint"])
    saved.report_unused()


def _checkpoint(trainer: lightning.Trainer) -> dict[str, Any]:
    """Return a checkpoint with the entries that hooks expect in a checkpoint of Lightning."""
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": trainer.lightning_module.state_dict(),
        "optimizer_states": [],  # the job saves them
        "lr_schedulers": [],
        "callbacks": {},
    }


def _added(
    trainer: lightning.Trainer, on_save_checkpoint: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Return the entries that a hook adds to a checkpoint."""
    checkpoint = _checkpoint(trainer)
    given = set(checkpoint)
    on_save_checkpoint(checkpoint)
    return {name: value for name, value in checkpoint.items() if name not in given}


REQUIRED = ("model",)
OPTIONAL = ("train_data", "eval_data", "callbacks")


class LightningTask(Protocol):
    """The required methods of a task.

    A task is a class with these methods. The optional ones are not in the protocol.

        class MyTask:
            def model(self): ...        a LightningModule with training_step; validation_step to evaluate
            def train_data(self): ...   a dataset with __len__ and __getitem__
            def eval_data(self): ...    optional: data for evaluation
            def callbacks(self): ...    optional: a list of Lightning callbacks

    The job sets the optimizer and its learning rate: ``configure_optimizers`` is not called.
    """

    def model(self) -> lightning.LightningModule:
        """Return a new module."""
        ...

    def train_data(self) -> Any:
        """Return the training samples."""
        ...


class ModuleLosses:
    """Computes the losses of ``training_step`` without a trace.

    Args:
        module: The module, which has a trainer.
        python_state: State in Python of the job.
    """

    def __init__(self, module: lightning.LightningModule, python_state: PythonState) -> None:
        self._module, self.python_state = module, python_state
        self.read: list[str] = []
        self._has_gathered = False

    @property
    def batch_norm(self) -> str:
        """Name of a layer that normalizes over the samples of a rank; empty: there is none."""
        kind = torch.nn.modules.batchnorm._BatchNorm  # noqa: SLF001
        layers = ((name, each) for name, each in self._module.named_modules() if isinstance(each, kind))
        return next((name for name, each in layers if each.training), "")

    def losses_of(self, batches: Sequence[object]) -> tuple[list[float], str]:
        """Return the losses of some batches, and why they cannot be compared; empty: they can."""
        module = self._module
        if any(isinstance(each, SyncBatchNormMixin) for each in module.modules()):
            return [], "layers use the samples of all ranks"
        tensors, _ = self.python_state.not_restored_values()
        with self._without_logging(), traceless(module, tensors.values()) as mode:
            losses = [self._loss_of(batch) for batch in (*batches, batches[-1])]
        self.read = names_read(tensors, mode.read)
        if self._has_gathered:
            return [], "the module gathers the samples of all ranks"
        if mode.unknown or losses[-1] != losses[-2]:
            return [], "they are random, or depend on state"
        return losses[:-1], ""

    def _loss_of(self, batch: object) -> float:
        seed_generators(0, 0, 0)
        with self._module.trainer.precision_plugin.train_step_context():
            found: Any = self._module.training_step(copy.deepcopy(batch), 0)
        return float(found["loss"] if isinstance(found, dict) else found)

    @contextmanager
    def _without_logging(self) -> Iterator[None]:
        """Let the module log nothing, and note whether it gathers, in the block."""
        gather = self._module.all_gather

        def noted(*args: Any, **more: Any) -> Any:
            self._has_gathered = True
            return gather(*args, **more)

        own: dict[str, Any] = {"log": _nothing, "log_dict": _nothing, "all_gather": noted}
        before = {name: vars(self._module)[name] for name in own if name in vars(self._module)}
        vars(self._module).update(own)
        try:
            yield
        finally:
            for name in own:
                del vars(self._module)[name]
            vars(self._module).update(before)


def _nothing(*_: object, **__: object) -> None:
    """Log nothing."""


NEVER = 2**60
"""An interval of validation by Lightning itself: the job validates."""


class LightningFramework(TorchBased):
    """Lightning, for one job in one process."""

    def connect(self, job: Job) -> Communicator:
        """Initialize Horovod, and return the communicator; of one rank, if this process was started alone."""
        if job.launch.threads_per_rank is not None:
            torch.set_num_threads(job.launch.threads_per_rank)
        if job.data.num_workers:
            start_loader_server("horovod_train.frameworks.torch.task")
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
        self._train_reader = read(train_data_of(job, self._task))
        eval_data = eval_data_of(job, self._task)
        self._eval_reader = None if eval_data is None else read(eval_data)
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
        mine = EvalMicroBatches(len(reader), batch_size, self._world.rank, self._world.size)
        return _Batches(len(mine), lambda: reader.read(0, InOrder(len(reader)), mine))


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
        self.steps = PlannedSteps()

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
        self._clock.end_phase("data")
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
        self._clock.end_phase("forward")

    def on_after_backward(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Record the end of the backward pass; the wait for other ranks follows."""
        self._clock.end_phase("backward")

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Record the end of the all-reduce; compute the gradient norm, if requested, before clipping."""
        self._clock.end_phase("allreduce_wait")
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
        self._clock.end_phase("optimizer")

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
