"""The training loop: epochs, steps, evaluation.

    train        trains to the end of the job
    evaluate     the mean of each metric over all evaluation samples
    LoopBridge   interface of a run for a framework with its own loop

Each stage of the loop is a function. A framework with its own loop (Keras, Lightning, Transformers) calls
the same functions at the same points, through ``LoopBridge``.
"""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, takewhile

from horovod_train.checkpoint.manager import keyed
from horovod_train.collectives.base import any_rank, mean_over_ranks
from horovod_train.data.shard import (
    EvalMicroBatches,
    InOrder,
    MicroBatch,
    PlannedStep,
    PlannedSteps,
    spare_eval_micro_batches,
)
from horovod_train.errors import PreemptedError, UserError, did_you_mean, result_of
from horovod_train.frameworks.base import PendingOutcome
from horovod_train.health.comparisons import digest
from horovod_train.training.run import (
    Action,
    ExitPreempted,
    RestoreCheckpoint,
    Run,
    StepReport,
    Stop,
    plan_epoch,
)

log = logging.getLogger(__name__)


def train(run: Run) -> None:
    """Train from ``run.progress`` to the end of the job.

    Every rank performs the same steps in the same order, because all inputs of decisions (progress, losses,
    metrics, actions of hooks) are equal on all ranks.

    Raises:
        PreemptedError: The job was preempted; a checkpoint is saved.
    """
    begin(run)
    with ExitStack() as on_error:
        on_error.callback(report_pending_steps_after_failure, run)
        leave = train_until_done(run)
        on_error.pop_all()
    if leave is not None:
        raise preempted_error(leave)
    end(run)


def train_until_done(run: Run) -> ExitPreempted | None:
    """Train all epochs, and perform the actions of hooks; return ``ExitPreempted`` on preemption."""
    while not run.is_done:
        match train_epoch(run):
            case ExitPreempted() as leave:
                return leave
            case RestoreCheckpoint(step, why, resume_at):
                restore_checkpoint(run, step, why)
                if resume_at is not None:
                    run.progress.skip_to(resume_at, is_scaled=not run.policy.scaled.follows_gain)
            case Stop(step, why):
                log.warning("training ends after step %d: %s", step, why)
                run.is_stopped = True
    return None


def train_epoch(run: Run) -> Action | None:
    """Run the remaining steps of an epoch, until a hook requests an action."""
    # The length of a training under AdaScale is not known in advance.
    for step in takewhile(lambda _: not run.is_done, rest_of_epoch(run)):
        lr = run.lr_of(step.share.num_samples)
        pending = run.replica.step(step, lr, want_norm=run.wants_norm)
        if (action := after_step(run, step, pending, lr)) is not None:
            return action
    return after_epoch(run, evaluated=finish_epoch(run)) if run.is_epoch_complete else None


def begin(run: Run) -> None:
    """Let schedules end with the job, and call ``on_start`` of all hooks.

    Raises:
        UserError: The job uses an evaluation metric, and the task has no evaluation data.
    """
    if run.eval_reader is None and wanted_metrics(run):
        raise UserError(
            f"{', '.join(wanted_metrics(run))}: the task has no evaluation data",
            hint="give it eval_data(), or set data.eval",
        )
    prepare_evaluations(run)
    run.convert_durations()
    if not run.policy.scaled.follows_gain and not run.is_open_ended:
        run.policy = run.policy.ending_at(run.planned_end()[1])
        if run.world.rank == 0 and run.policy.warmup_epochs > run.policy.total_epochs:
            log.warning(
                "the learning rate does not reach its peak: the warm-up has %.3g epochs, and the job ends "
                "after %.3g",
                run.policy.warmup_epochs,
                run.policy.total_epochs,
            )
    for hook in run.hooks:
        hook.on_start(run)


def prepare_evaluations(run: Run) -> None:
    """Count the intervals of evaluations from the start of the training, if the interval has changed."""
    progress, every = run.progress, run.job.evaluation.every
    if progress.evaluation.interval == str(every):
        # With fewer samples in an epoch than before, intervals in samples start again.
        progress.evaluation.number = min(progress.evaluation.number, progress.num_passed(every))
        return
    run.note_passed_evaluation()
    if run.is_epoch_complete and not progress.current_metrics:  # the evaluation follows
        progress.evaluation.number = progress.num_passed(every, is_before=True)


def rest_of_epoch(run: Run) -> PlannedSteps:
    """Return the remaining steps of the current epoch, limited by the length of the job."""
    return plan_epoch(
        run.mesh.data,
        run.train_reader,
        run.progress,
        batch_size_per_rank=run.job.train.batch_size_per_rank,
        accumulation_steps=run.job.train.accumulation_steps,
        global_batch_size=run.global_batch_size,
        batch_size_at=run.batch_size_at,
        max_steps=run.num_steps_left,
        equal_micro_batches=run.replica.requires_equal_micro_batches,
    )


def after_step(run: Run, step: PlannedStep, pending: PendingOutcome, lr: float) -> Action | None:
    """Record an optimizer step, pass due results to hooks, and return the action to perform.

    Raises:
        NumericError: A loss or gradient was not finite, and the job does not skip such steps.
    """
    run.progress.advance(step.share.num_samples, run.scaled_epochs_of(step.share.num_samples))
    run.pending_steps.add(StepReport(run.progress.step, run.progress.epochs_passed, step.share, lr, pending))
    run.deliver(run.pending_steps.ready())
    run.pending_actions += filter(None, [hook.on_step(run) for hook in run.hooks])
    return next_action(run) if run.pending_actions else None


def next_action(run: Run) -> Action | None:
    """Return the first pending action and discard the others; None: replicas differ, training continues.

    Replicas must be identical on all ranks when they are evaluated, saved or resumed.
    """
    if not run.replica.replicas_identical:
        return None
    action = run.pending_actions[0]
    run.pending_actions.clear()
    return action


def report_pending_steps_after_failure(run: Run) -> None:
    """Pass pending results to hooks after a failure of training; further errors are ignored."""

    def deliver() -> None:
        for report in run.pending_steps.drain():
            if not report.outcome.was_executed:
                return
            for hook in run.hooks:
                hook.on_result(run, report)

    result_of(deliver)


def preempted_error(leave: ExitPreempted) -> PreemptedError:
    """Return the error that ends this process with exit code 75."""
    return PreemptedError(f"preempted after step {leave.step}")


def restore_checkpoint(run: Run, step: int, why: str) -> None:
    """Restore the checkpoint of a step, and continue from it.

    Raises:
        UserError: There are no checkpoints.
        CheckpointError: The step has no checkpoint, or it cannot be read.
    """
    if run.restore is None:
        raise UserError(f"cannot restore step {step} ({why}): the run has no checkpoints")
    log.warning("restoring a checkpoint: from step %d back to step %d: %s", run.progress.step, step, why)
    run.deliver_all()
    run.pending_actions.clear()
    run.restore(step)
    run.guard.reset()


def finish_epoch(run: Run) -> bool:
    """Complete an epoch: evaluate and apply early stopping, if due; return whether it was evaluated."""
    run.deliver_all()
    run.progress.finish_epoch()
    if run.is_evaluation_due:
        evaluate_and_follow(run)
        return True
    if run.is_done and run.eval_reader is not None:
        # Rules that count evaluations do not count this one: the job may end here only for now.
        evaluate_and_store(run)
        return True
    return False


def after_epoch(run: Run, *, evaluated: bool) -> Action | None:
    """Call ``on_epoch`` of all hooks, which may save a checkpoint; return the pending action."""
    run.pending_actions += filter(None, [hook.on_epoch(run, evaluated=evaluated) for hook in run.hooks])
    return next_action(run) if run.pending_actions else None


def end(run: Run) -> None:
    """End training: evaluate the final weights, if necessary, and call hooks."""
    run.deliver_all()
    if not run.progress.current_metrics and run.eval_reader is not None:
        evaluate_and_store(run)
    for hook in run.hooks:
        hook.on_end(run)


def evaluates_now(run: Run) -> bool:
    """Whether the last step of an epoch has been performed, and ``finish_epoch`` evaluates."""
    ends = run.is_done or run.progress.epoch + 1 >= run.num_epochs
    return run.is_epoch_complete and run.eval_reader is not None and (ends or run.is_evaluation_due)


def evaluate_and_follow(run: Run) -> None:
    """Evaluate, and apply the rules that depend on metrics."""
    evaluate_and_store(run)
    run.note_passed_evaluation()
    apply_early_stopping(run)
    reduce_on_plateau(run)


def evaluate(run: Run) -> dict[str, float]:
    """Return the mean of each metric over all evaluation samples; equal on every rank.

    Each sample is counted on exactly one rank, and ranks add sums and counts, so neither padding nor unequal
    batches affect the result.
    """
    assert run.eval_reader is not None
    run.replica.sync_buffers()
    num_samples = len(run.eval_reader)
    batch_size = run.job.evaluation.batch_size_per_rank or run.job.train.batch_size_per_rank
    ranks = run.mesh.data
    mine = EvalMicroBatches(num_samples, batch_size, ranks.rank, ranks.size)
    spare: tuple[MicroBatch, ...] = ()
    if run.replica.passes_are_collective:
        spare = spare_eval_micro_batches(num_samples, batch_size, ranks.rank, ranks.size)
    batches = run.eval_reader.read(0, InOrder(num_samples), chain(mine, spare))
    sums = run.replica.evaluate(zip(mine, batches, strict=False))
    if spare:
        run.replica.evaluate(zip(spare, batches, strict=False))  # not counted
    # In a pipeline, only one rank has the metrics of a batch.
    return mean_over_ranks(run.world if run.mesh.axes.pipeline > 1 else ranks, sums)


def evaluate_and_store(run: Run) -> None:
    """Evaluate the current weights, and store the metrics in ``run.progress``.

    Raises:
        UserError: The evaluation does not return a metric that the job names.
    """
    for hook in run.hooks:
        hook.on_evaluation(run, begins=True)
    run.progress.metrics, run.progress.metrics_step = evaluate(run), run.progress.step
    for hook in run.hooks:
        hook.on_evaluation(run, begins=False)
    for path, metric in wanted_metrics(run).items():
        if metric not in run.progress.metrics:
            raise UserError(
                f"{path}: the evaluation has no metric {metric!r}; it has "
                f"{', '.join(sorted(run.progress.metrics)) or 'nothing'}",
                hint=did_you_mean(metric, run.progress.metrics),
            )


def wanted_metrics(run: Run) -> dict[str, str]:
    """Return the metrics used by early stopping, best checkpoints and the learning rate, by job field."""
    rule, best = run.job.evaluation.early_stopping, run.job.checkpoint.best
    of_rate = run.policy.schedule.metric_name
    return {
        **({"evaluation.early_stopping.metric": rule.metric} if rule else {}),
        **({"checkpoint.best.metric": best.metric} if best else {}),
        **({"lr.decay_args.metric": of_rate} if of_rate else {}),
    }


def apply_early_stopping(run: Run) -> None:
    """Stop early on all ranks when the metric has not improved for long enough."""
    rule, progress = run.job.evaluation.early_stopping, run.progress
    if rule is None:
        return
    sign = 1 if rule.mode == "max" else -1
    value, best = sign * progress.metrics[rule.metric], progress.best_metric
    if math.isfinite(value) and (best is None or value > best + rule.min_delta):
        progress.best_metric, progress.num_without_improvement = value, 0
    else:
        progress.num_without_improvement += 1
    progress.stopped_early = any_rank(run.world, flag=progress.num_without_improvement >= rule.patience)


def reduce_on_plateau(run: Run) -> None:
    """Reduce the learning rate if its metric has not improved for long enough."""
    schedule, progress = run.policy.schedule, run.progress
    if (name := schedule.metric_name) is not None:
        progress.plateau = schedule.after_evaluation(progress.plateau, progress.metrics[name])


@dataclass
class LoopBridge:
    """A run, for a framework's own loop. The methods correspond to the stages of ``loop.train``."""

    run: Run
    _evaluated: bool = False
    _last_weights: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether training is complete or stopped."""
        return self.run.is_done

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self.run.progress.epoch

    @property
    def num_epochs(self) -> int:
        """Epochs of the whole job, the last of which may be incomplete."""
        return self.run.num_epochs

    @property
    def is_epoch_complete(self) -> bool:
        """Whether every sample of the current epoch was used."""
        return self.run.is_epoch_complete

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.run.lr_of(self.run.global_batch_size)

    @property
    def wants_norm(self) -> bool:
        """Whether the next step computes the gradient norm."""
        return self.run.wants_norm

    @property
    def evaluates_now(self) -> bool:
        """Whether the last step of an epoch has been performed, and ``finish_epoch`` evaluates."""
        return evaluates_now(self.run)

    def begin(self) -> None:
        """Start training."""
        begin(self.run)

    def rest_of_epoch(self) -> PlannedSteps:
        """Return the remaining steps of the current epoch, limited by the length of the job."""
        return rest_of_epoch(self.run)

    def after_step(self, step: PlannedStep, pending: PendingOutcome, lr: float) -> None:
        """Record an optimizer step, and perform the action of hooks.

        Raises:
            PreemptedError: The job was preempted; a checkpoint is saved.
            UserError: A hook requests an action that the framework's own loop does not support.
        """
        self._follow(after_step(self.run, step, pending, lr))

    def finish_epoch(self) -> dict[str, float]:
        """Complete an epoch after its last step; return the evaluation, empty if none was due."""
        self._evaluated = finish_epoch(self.run)
        return self.run.progress.current_metrics

    def after_epoch(self) -> None:
        """Save a checkpoint, if due. Call it after end-of-epoch callbacks; raises as ``after_step``."""
        self._follow(after_epoch(self.run, evaluated=self._evaluated))

    def report_incomplete_epoch(self) -> None:
        """Log that the job ends, because the framework has left an epoch early."""
        run = self.run
        if run.world.rank == 0 and not run.is_done:
            log.warning(
                "training ends in epoch %d after %d of %d samples: a hook or callback has ended the epoch, "
                "and a job reads each of its samples",
                run.progress.epoch + 1,
                run.progress.cursor,
                run.progress.order.num_samples,
            )

    def before_on_train_end(self) -> None:
        """Store a digest of the weights before end-of-training callbacks, which may change them."""
        self._last_weights = self._weights()

    def _follow(self, action: Action | None) -> None:
        match action:
            case ExitPreempted():
                raise preempted_error(action)
            case RestoreCheckpoint() | Stop():
                raise UserError(
                    f"a hook requests to "
                    f"{'stop' if isinstance(action, Stop) else 'restore a checkpoint'} at step "
                    f"{action.step} ({action.why}), which {self.run.job.framework}'s loop does not support",
                    hint="use framework: torch",
                )

    def end(self) -> None:
        """End training; evaluate again if end-of-training callbacks have changed the weights."""
        if self._last_weights is not None and self._weights() != self._last_weights:
            self.run.progress.metrics_step = -1
            if self.run.world.rank == 0:
                log.warning(
                    "callbacks have changed the weights at the end of training: the last checkpoint has the "
                    "changed weights and their metrics, with the optimizer state of the last step"
                )
        end(self.run)

    def _weights(self) -> str:
        return digest(keyed(replace(self.run.replica.state(copy=False), optimizer={})))
