"""Creation of a job's optimizer, with its arguments scaled to the global batch by the rules of ``lr``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.lr.policy import policy_of
from horovod_train.registry import optimizers_of

BETAS = ("betas", "beta_1", "beta_2", "b1", "b2", "beta1", "beta2")
EPSILONS = ("eps", "epsilon")
WEIGHT_DECAYS = ("weight_decay", "wd")
"""Names of arguments in PyTorch, Keras, Optax and MXNet."""


@dataclass(frozen=True)
class ArgumentScaling:
    """Factors of an optimizer's arguments at the global batch of a job.

    Attributes:
        rule: Name of the job's scaling rule.
        one_minus_beta: Factor of 1 - beta.
        epsilon: Factor of epsilon.
        weight_decay: Factor of the weight decay: k / (factor of the rate). An AdamW update averages weights
            over 1 / (rate x weight decay) steps; with this factor, that is the same number of epochs for each
            batch (Wang & Aitchison, arXiv:2405.13698).
    """

    rule: str = "linear"
    one_minus_beta: float = 1.0
    epsilon: float = 1.0
    weight_decay: float = 1.0

    @classmethod
    def of(cls, job: Job, num_data_ranks: int) -> ArgumentScaling:
        """Return the factors of a job on a number of data-parallel ranks."""
        policy = policy_of(job, num_data_ranks)
        scaled, k = policy.scaled, policy.global_batch_size / job.lr.reference_batch_size
        return cls(
            job.lr.scaling,
            scaled.one_minus_beta,
            scaled.epsilon,
            k / scaled.rate if job.lr.scale_weight_decay else 1.0,
        )

    def scaled(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments, or settings of a parameter group, multiplied by the factors.

        Raises:
            UserError: A beta would not be positive.
        """
        found = dict(args)
        for name, value in args.items():
            if value is None:
                continue
            if name in BETAS and self.one_minus_beta != 1.0:
                is_pair = isinstance(value, tuple | list)
                found[name] = tuple(map(self._beta, value)) if is_pair else self._beta(value)
            elif name in EPSILONS:
                found[name] = value * self.epsilon
            elif name in WEIGHT_DECAYS:
                found[name] = value * self.weight_decay
        return found

    def _beta(self, beta: float) -> float:
        scaled = 1 - self.one_minus_beta * (1 - beta)
        if scaled < 1e-9:  # 1 - beta is rounded
            raise UserError(
                f"lr.scaling: {self.rule} requires (global batch / reference batch) x (1 - beta) < 1; it is "
                f"{self.one_minus_beta:g} x {1 - beta:g}",
                hint="use a smaller global batch, a larger beta in optimizer.args, or lr.scaling: sqrt",
            )
        return scaled

    def arguments(self, factory: Any, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scaled arguments of an optimizer's class or function, including scaled defaults.

        Raises:
            UserError: The optimizer lacks an argument that the job scales.
        """
        names = [
            *(EPSILONS if self.epsilon != 1.0 else ()),
            *(BETAS if self.one_minus_beta != 1.0 else ()),
            *(WEIGHT_DECAYS if self.weight_decay != 1.0 else ()),
        ]
        if not names:
            return dict(args)
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(factory).parameters.items()
            if name in names and parameter.default is not inspect.Parameter.empty
        }
        for kind, field in ((BETAS, f"lr.scaling: {self.rule}"), (WEIGHT_DECAYS, "lr.scale_weight_decay")):
            if set(kind) & set(names) and not set(kind) & {*defaults, *args}:
                raise UserError(
                    f"{field}: the optimizer has none of the arguments {', '.join(kind)}",
                    hint="use an optimizer with such an argument, or leave the field out",
                )
        return {**args, **self.scaled({**defaults, **args})}


def make_optimizer(job: Job, num_data_ranks: int, make: Callable[[Any, Mapping[str, Any]], Any]) -> Any:
    """Create the job's optimizer.

    Args:
        job: The job description.
        num_data_ranks: Number of data-parallel ranks.
        make: Calls the class with the job's arguments and those that the framework adds.

    Raises:
        UserError: The optimizer is unknown, or its class refuses the arguments.
    """
    args, scaling = _with_tuples(job.optimizer.args), ArgumentScaling.of(job, num_data_ranks)
    return optimizers_of(job.framework).make(
        job.optimizer.name,
        lambda factory: make(factory, scaling.arguments(factory, args)),
        args_field="optimizer.args",
    )


def _with_tuples(args: Mapping[str, Any]) -> dict[str, Any]:
    """Replace lists by tuples, which optimizers require and YAML does not have (``betas: [0.9, 0.95]``)."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in args.items()}
