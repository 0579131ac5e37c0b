"""Arguments of a job's optimizer, scaled to the global batch by the rules of ``lr``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.lr.policy import policy_of
from horovod_train.registry import DEFAULT_SCALING

BETAS = ("betas", "beta_1", "beta_2", "b1", "b2", "beta1", "beta2")
ADAM_BETAS = (0.9, 0.999)
"""Default of PyTorch, Keras and Optax."""
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

    rule: str = DEFAULT_SCALING
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

    def check(self, job: Job) -> None:
        """Check the arguments that are known before training: those of the job, or Adam's default betas.

        Raises:
            UserError: A beta would not be positive.
        """
        default = {"betas": ADAM_BETAS} if job.optimizer.name in {"adam", "adamw"} else {}
        args = job.optimizer.args
        self.scaled(args if set(BETAS) & args.keys() else {**default, **args})

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
