"""What ``--dry-run`` shows."""

from __future__ import annotations

from horovod_train.config.strategies import axes_of
from horovod_train.events.text import learning_rate
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.lr.policy import LearningRatePolicy
from horovod_train.registry import SCRIPT


def in_words(request: LaunchRequest, plan: LaunchPlan) -> str:
    """Return what a launch would do: commands to type, and the learning rate that comes of it."""
    job = request.job
    if job.framework == SCRIPT:  # it decides that itself
        return plan.as_text()
    global_batch_size = job.global_batch_size(axes_of(job.strategy, request.num_ranks).data)
    peak_lr = LearningRatePolicy(job.lr, global_batch_size, job.train.epochs).peak_lr
    lr = learning_rate(job.lr.scaling, job.lr.base_lr, job.lr.reference_batch_size, peak_lr)
    batch = f"{request.num_ranks} rank(s), global batch {global_batch_size}"
    return f"# learning rate {lr} ({batch})\n{plan.as_text()}"
