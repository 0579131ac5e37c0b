"""Output of ``--dry-run``."""

from __future__ import annotations

from horovod_train.config.strategies import axes_of, batch_size_of_lr
from horovod_train.events.text import learning_rate
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.lr.policy import LearningRatePolicy
from horovod_train.registry import SCRIPT


def plan_as_text(request: LaunchRequest, plan: LaunchPlan) -> str:
    """Return the launch plan of a job as text, preceded by the learning rate unless the job is a script."""
    job = request.job
    if job.framework == SCRIPT:  # a script sets its own learning rate
        return plan.as_text()
    num_data_ranks = axes_of(job.strategy, request.num_ranks).data
    global_batch_size = job.global_batch_size(num_data_ranks)
    peak_lr = LearningRatePolicy(job.lr, batch_size_of_lr(job, num_data_ranks), job.train.epochs).peak_lr
    lr = learning_rate(job.lr.scaling, job.lr.base_lr, job.lr.reference_batch_size, peak_lr)
    batch = f"{request.num_ranks} rank(s), global batch {global_batch_size}"
    return f"# learning rate {lr} ({batch})\n{plan.as_text()}"
