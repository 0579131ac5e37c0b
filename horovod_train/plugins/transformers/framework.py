"""Transformers on Horovod: replica and readers of a job, and training by ``Trainer``.

TransformersTask        the interface of a task
TransformersFramework   training of a job
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.data.data_collator import default_data_collator

from horovod_train.collectives.base import Communicator, Mesh
from horovod_train.collectives.horovod import connect
from horovod_train.config.schema import Job
from horovod_train.data.shard import PlannedSteps, num_steps
from horovod_train.errors import UserError
from horovod_train.frameworks.base import (
    Bridge,
    eval_data_of,
    load_task,
    report_unused_methods,
    train_data_of,
)
from horovod_train.frameworks.callbacks import (
    Attributes,
    CallbackState,
    check_callbacks,
    report_unsaved,
)
from horovod_train.frameworks.python_state import Root, state_of_task
from horovod_train.frameworks.reader import start_loader_server
from horovod_train.frameworks.torch.comm.collectives import TorchCommunicator
from horovod_train.frameworks.torch.device import TorchBased
from horovod_train.frameworks.torch.framework import (
    TorchFramework,
    choose_device,
    reader_factory,
    set_global_options,
)
from horovod_train.frameworks.torch.state.optimizer import GroupRates, optimizer_over
from horovod_train.frameworks.torch.state.rank_state import seed_generators
from horovod_train.frameworks.torch.step.gradient_hooks import defer_hooks_after_accumulation
from horovod_train.frameworks.torch.strategies.allreduce.strategy import make_allreduce
from horovod_train.frameworks.torch.strategies.base import DevicePlacement, Strategy, total_norm
from horovod_train.frameworks.torch.task import TorchReader
from horovod_train.plugins.frameworks.variables import TrainerReplica
from horovod_train.plugins.transformers.trainer import HorovodTrainerMixin, hide_launcher, lengths_of

REQUIRED = ("model",)
OPTIONAL = ("train_data", "eval_data", "collate", "metrics", "callbacks")


class TransformersTask(Protocol):
    """The required methods of a task.

    A task is a class with these methods. The optional ones are not in the protocol.

        class MyTask:
            def model(self): ...            a model that returns its loss if a batch contains labels
            def train_data(self): ...       a dataset of dictionaries with __len__ and __getitem__
            def eval_data(self): ...        optional: data for evaluation
            def collate(self, samples): ... optional: joins samples into a batch, such as a data collator
            def metrics(self, found): ...   optional: {name: value} of an EvalPrediction over all samples
            def callbacks(self): ...        optional: a list of TrainerCallbacks

    The job sets the optimizer and its learning rate.
    """

    def model(self) -> torch.nn.Module:
        """Return a new model."""
        ...

    def train_data(self) -> Any:
        """Return the training samples."""
        ...


UNTIMED = ("_runtime", "_samples_per_second", "_steps_per_second")


class TransformersFramework(TorchBased):
    """Transformers, for one job in one process."""

    def connect(self, job: Job) -> Communicator:
        """Initialize Horovod, and return the communicator; of one rank, if this process was started alone."""
        if job.launch.threads_per_rank is not None:
            torch.set_num_threads(job.launch.threads_per_rank)
        if job.data.num_workers:
            start_loader_server("horovod_train.frameworks.torch.task")
        world = connect(TorchCommunicator, job)
        hide_launcher(os.environ)
        return world

    def prepare(self, job: Job, mesh: Mesh) -> tuple[TrainerReplica, TorchReader, TorchReader | None]:
        """Return this rank's replica and the readers of training and evaluation data."""
        world = mesh.data
        set_global_options(job)
        device = choose_device(job, mesh.world)
        if job.train.precision == "fp16" and device.type == "cpu":
            raise UserError(
                "Transformers does not support fp16 on a CPU",
                hint="set train.precision: bf16, or framework: torch",
            )
        seed_generators(job.train.seed, 0, 0)
        self._job, self._world = job, world
        self._task: TransformersTask = load_task(job.task, job.task_args, REQUIRED)
        report_unused_methods(self._task, (*REQUIRED, *OPTIONAL), world)
        model = DevicePlacement(device, job.train)(self._task.model())
        TorchFramework.synchronize(model, job, mesh)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = optimizer_over(job, parameters, world.size)
        collate = getattr(self._task, "collate", default_data_collator)
        read = reader_factory(job, device, collate=collate)
        eval_set = eval_data_of(job, self._task)
        self._train_reader = read(train_data_of(job, self._task))
        defer_hooks_after_accumulation(model)
        self._gradients = make_allreduce(world, job.allreduce)
        self._gradients.bind(model, optimizer)
        self._replica = TrainerReplica(
            model=model, optimizer=optimizer, strategy=self._gradients, data_ranks=world, train=job.train
        )
        self._trainer = _JobTrainer(
            world=world,
            gradients=self._gradients,
            model=model,
            replica=self._replica,
            device=device,
            args=self._arguments(on_cpu=device.type == "cpu"),
            train_dataset=self._train_reader,
            eval_dataset=eval_set,
            data_collator=collate,
            compute_metrics=getattr(self._task, "metrics", None),
            optimizers=(optimizer, _NoSchedule(optimizer)),
        )
        if (scaler := self._trainer.accelerator.scaler) is not None:
            self._replica.scaler = scaler
        self._trainer.remove_callback(PrinterCallback)
        self._replica.evaluate_now = self._evaluate
        self._callbacks: list[TrainerCallback] = list(getattr(self._task, "callbacks", list)())
        check_callbacks(self._callbacks, "transformers")
        report_unsaved(self._callbacks, world)
        self._replica.callbacks = CallbackState(world)
        eval_reader = read(eval_set) if eval_set is not None else None
        self._replica.python_state = state_of_task(
            mesh,
            self._task,
            [self._train_reader, eval_reader],
            Root("model", model, frozenset(vars(nn.Module())), is_trained=True),
        )
        return self._replica, self._train_reader, eval_reader

    def fit(self, bridge: Bridge) -> None:
        """Train to the end of the job with ``Trainer``."""
        bridge.begin()
        if not bridge.is_done:
            trainer = self._trainer
            trainer.bridge = bridge
            trainer.source = _Source(bridge, self._train_reader, self._job, self._world)
            timer = _StepTimer(trainer, bridge, has_others=bool(self._callbacks))
            ends = _StepReporter(timer, Attributes(self._callbacks), self._replica.callbacks)
            for callback in [timer, *self._callbacks, ends]:
                trainer.add_callback(callback)
            trainer.train()
        bridge.end()

    def _evaluate(self) -> dict[str, float]:
        """Return the metrics over the evaluation data of all ranks."""
        found = self._trainer.evaluate()
        return {
            name.removeprefix("eval_"): float(value)
            for name, value in found.items()
            if not name.endswith(UNTIMED) and name != "epoch"
        }

    def _arguments(self, *, on_cpu: bool) -> TrainingArguments:
        """Return arguments of a trainer that does not log, save or evaluate, because this package does."""
        job = self._job
        logging.getLogger("transformers.trainer").setLevel(logging.WARNING)
        return TrainingArguments(
            output_dir=str(Path(job.run_dir) / job.name),
            per_device_train_batch_size=job.train.batch_size_per_rank,
            per_device_eval_batch_size=job.evaluation.batch_size_per_rank or job.train.batch_size_per_rank,
            gradient_accumulation_steps=job.train.accumulation_steps,
            num_train_epochs=job.train.most_epochs,
            max_grad_norm=job.train.clip_grad_norm or 0.0,
            bf16=job.train.precision == "bf16",
            fp16=job.train.precision == "fp16",
            use_cpu=on_cpu,
            seed=job.train.seed % 2**32,
            save_strategy="no",
            eval_strategy="no",
            logging_strategy="no",
            logging_nan_inf_filter=False,  # it would read the loss in each step, as the replica does
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            average_tokens_across_devices=False,
        )


class _NoSchedule(LRScheduler):
    """Scheduler that does not change the learning rates, which the job sets."""

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the current learning rates."""
        return [group["lr"] for group in self.optimizer.param_groups]


class _JobTrainer(HorovodTrainerMixin, Trainer):
    """Trainer whose batches, learning rate and end are determined by the job."""

    bridge: Bridge
    source: _Source

    def __init__(
        self, *, world: Communicator, gradients: Strategy, replica: TrainerReplica, **settings: Any
    ) -> None:
        super().__init__(world=world, **settings)
        self.gradients = gradients
        self.replica = replica
        self.begin_step()

    def begin_step(self) -> None:
        """Reset clock, losses and gradient norm before a step."""
        self.clock = self.replica.new_clock()
        self.loss_of_step = torch.zeros(())
        self.local_loss_of_step = torch.zeros(())
        self.norm: torch.Tensor | None = None

    def get_train_dataloader(self) -> Any:
        return self.source

    def _lengths(self) -> list[int]:
        return self.source.lengths()

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        super()._init_training_state(*args, **kwargs)
        return self.bridge.epoch, 0

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the micro-batches of a step; record the time for reading."""
        found = super().get_batch_samples(*args, **kwargs)
        self.clock.end_phase("data")
        return found

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's weighted loss; record the end of the forward pass."""
        found = super().compute_loss(*args, **kwargs)
        self.clock.end_phase("forward")
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run a forward and backward pass; record its end."""
        found = super().training_step(*args, **kwargs)
        self.clock.end_phase("allreduce_wait" if self.accelerator.sync_gradients else "backward")
        return found

    def _complete(self, gradients: Strategy) -> torch.Tensor:
        self.clock.end_phase("backward")
        loss = super()._complete(gradients)
        self.loss_of_step, self.local_loss_of_step = loss, self.local_loss
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        # The result is the norm before clipping; the loss scale has been removed from gradients.
        norm = self.norm = super()._clip_grad_norm(model)
        return norm


class _Source:
    """Batches for ``Trainer``, the same number per step; spare batches of weight 0 replace missing ones."""

    def __init__(self, bridge: Bridge, reader: TorchReader, job: Job, world: Communicator) -> None:
        self._bridge = bridge
        self._reader = reader
        self._accumulation_steps = job.train.accumulation_steps
        self._num_steps = num_steps(
            job.data.samples_per_epoch or len(reader), 0, job.global_batch_size(world.size)
        )
        self.steps = PlannedSteps()
        self.number = 0

    def __len__(self) -> int:
        """Return the number of micro-batches in a whole epoch; a resumed epoch has fewer."""
        return self._num_steps * self._accumulation_steps

    def __iter__(self) -> Iterator[object]:
        self.steps, self.number = self._bridge.rest_of_epoch(), 0
        for step in self.steps:
            for _, batch in step.padded(self._accumulation_steps, self._reader.first):
                yield batch

    def lengths(self) -> list[int]:
        """Return the number of counted samples in each micro-batch of the next step."""
        return lengths_of(self.steps[self.number].share.micro_batches, self._accumulation_steps)


class _StepTimer(TrainerCallback):
    """Callback that prepares and times the steps; it is called before all other callbacks."""

    def __init__(self, trainer: _JobTrainer, bridge: Bridge, *, has_others: bool) -> None:
        self._trainer = trainer
        self._bridge = bridge
        self._lr = 0.0
        self._has_others = has_others
        self._rates = GroupRates(trainer.replica.optimizer)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the learning rate of the step."""
        self._lr = self._bridge.lr
        self._rates.set_job_rate(self._lr)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Compute the gradient norm, if requested and not computed by clipping."""
        trainer = self._trainer
        if trainer.norm is None and self._bridge.wants_norm:
            assert trainer.gradients is not None
            trainer.norm = total_norm(trainer.gradients.gradients())

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Record the end of the update; a step's time does not include later callbacks."""
        self._trainer.clock.end_phase("optimizer")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Let the bridge record the weights before end-of-training callbacks."""
        if self._has_others:
            self._bridge.before_on_train_end()

    def end_step(self, control: TrainerControl) -> None:
        """Report a completed step; stop, if an evaluation has ended training."""
        trainer, source = self._trainer, self._trainer.source
        assert trainer.gradients is not None
        numbers = {
            "loss": trainer.loss_of_step,
            "local_loss": trainer.local_loss_of_step,
            "grad_norm": trainer.norm,
            "is_finite": trainer.loss_of_step.isfinite(),
        }
        outcome = trainer.replica.outcome_of(numbers, trainer.clock, trainer.gradients)
        step = source.steps[source.number]
        source.number += 1
        self._bridge.after_step(step, outcome, self._lr)
        trainer.begin_step()  # a step's time does not include the bridge
        if self._bridge.is_done and not self._bridge.is_epoch_complete:
            control.should_training_stop = control.should_epoch_stop = True

    def end_epoch(self, control: TrainerControl) -> None:
        """Report the end of an epoch, if it is complete; otherwise, stop training."""
        if self._bridge.is_epoch_complete:
            self._bridge.finish_epoch()
            self._bridge.after_epoch()
            control.should_training_stop = control.should_training_stop or self._bridge.is_done
        else:
            self._bridge.report_incomplete_epoch()
            control.should_training_stop = True


class _StepReporter(TrainerCallback):
    """Callback that reports the ends of steps and epochs; the last, so that effects of others are saved."""

    def __init__(self, timer: _StepTimer, state: Attributes, saved: CallbackState) -> None:
        self._timer = timer
        self._state = state
        self._saved = saved

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Load the state of callbacks."""
        self._state.load(self._saved)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Report a completed step."""
        self._timer.end_step(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Report the end of an epoch."""
        self._timer.end_epoch(control)
