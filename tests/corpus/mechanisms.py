"""Take one mechanism out, and see a model trained to other weights: nothing else stands in its place.

Then with the comparison of the first steps (``health.verify_strategy``), which finds most of them again.

usage: mechanisms.py [--out FILE] [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent)]

from corpus.reference import EASY, HARD, Settings  # noqa: E402
from corpus.run import cases, import_what_ranks_need, seen  # noqa: E402

TORCH = "horovod_train.frameworks.torch"


@dataclass(frozen=True)
class Mechanism:
    """A mechanism, and a model that needs it.

    Attributes:
        case: The model.
        strategy: Trains it.
        place: The function or method that is replaced: ``module:attribute``; None: nothing is taken out but
            the comparison of the first steps.
        by: What takes its place.
        wraps: ``by`` returns that, given the function or method.
        settings: How it is trained.
        is_found: The comparison of the first steps finds it again.
    """

    case: str
    strategy: str
    place: str | None = None
    by: Callable[..., Any] = lambda *_: None
    settings: Settings = EASY
    is_found: bool = True
    wraps: bool = False


def scalars_only(model: Any, units: Any) -> dict[Any, str]:
    return {parameter: "" for parameter in model.parameters() if parameter.dim() == 0}


def mean_of(weigh: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, loss: Any, share: float) -> Any:
        return weigh(self, loss[0] / loss[1] if isinstance(loss, tuple) else loss, share)

    return call


@contextmanager
def nothing(*_: Any) -> Iterator[None]:
    yield


MECHANISMS = {
    "ranks agree on the path": Mechanism("TwoExperts", "fsdp", f"{TORCH}.comm.groups:PathAgreement.event"),
    "hooks of parameters: they stay whole": Mechanism(
        "Hooks", "fsdp", f"{TORCH}.strategies.fsdp.strategy:unsharded_parameters", scalars_only
    ),
    "memory that two parameters share: they stay whole": Mechanism(
        "ViewShare", "fsdp", f"{TORCH}.strategies.fsdp.strategy:unsharded_parameters", scalars_only
    ),
    "gathered weights that change in forward": Mechanism(
        "MaxNorm", "fsdp", f"{TORCH}.strategies.fsdp.strategy:_unchanged", lambda method, *_: method, HARD
    ),
    "rates of groups": Mechanism(
        "GroupRates",
        "allreduce",
        f"{TORCH}.state.optimizer:_with_list",
        lambda group, _: {**{k: v for k, v in group.items() if k != "lr"}, "params": list(group["params"])},
        is_found=False,
    ),
    "optimizers that look at whole tensors": Mechanism(
        "StableAdamW", "zero", f"{TORCH}.strategies.zero.strategy:check_elementwise", settings=HARD
    ),
    "memory that the task has replaced": Mechanism(
        "DataSwap", "zero", f"{TORCH}.strategies.zero.strategy:Zero._restore_replaced_memory"
    ),
    "statistics of the joint batch": Mechanism(
        "ConvBn", "allreduce", f"{TORCH}.framework:synchronize_batch_norm", lambda *_, **__: 0, is_found=False
    ),
    "sums and counts": Mechanism(
        "TokenMean",
        "allreduce",
        f"{TORCH}.step.update:StepLoss.weight_loss",
        mean_of,
        is_found=False,
        wraps=True,
    ),
    "sums and counts, where DeepSpeed updates": Mechanism(
        "TokenMean",
        "deepspeed2",
        "horovod_train.plugins.deepspeed.strategy:DeepSpeed.divide_gradients",
        settings=HARD,
    ),
    "recomputation moves no statistics": Mechanism(
        "BnRecomputed", "allreduce", f"{TORCH}.sizes:_from", nothing, is_found=False
    ),
    "a trace sees the modes of autograd": Mechanism(
        "NoGradSome", "pipeline", "horovod_train.plugins.pipeline.trace:modes", lambda: ()
    ),
    "weights that are clamped in the loss": Mechanism("ClampW", "deepspeed2"),
    "weights that are changed by functional_call, sharded": Mechanism("Functional", "fsdp"),
    "weights that are changed by functional_call, in stages": Mechanism("Functional", "pipeline"),
    "parts of a model that DeepSpeed has not called": Mechanism("Meth", "deepspeed", settings=HARD),
    "rows that an embedding renormalizes": Mechanism("MaxNorm", "zero"),
}


def taken_out(mechanism: Mechanism) -> None:
    """Replace a mechanism in this process."""
    import importlib

    if mechanism.place is None:
        return
    module, _, path = mechanism.place.partition(":")
    target: Any = importlib.import_module(module)
    *owners, name = path.split(".")
    for owner in owners:
        target = getattr(target, owner)
    setattr(target, name, mechanism.by(getattr(target, name)) if mechanism.wraps else mechanism.by)


def outcome(mechanism: Mechanism, *, verify: bool) -> dict[str, Any]:
    """Train the model without the mechanism; return what came of it."""
    case = cases()[mechanism.case]
    health = {"verify_strategy": verify, "one_process": "refuse" if verify else "off"}
    settings = {"job": {**case.job, "health": health}, "__module__": case.__module__}
    without = type(case.__name__, (case,), settings)
    return seen(without, mechanism.strategy, mechanism.settings, 2, before=lambda: taken_out(mechanism))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    chosen = {name: each for name, each in MECHANISMS.items() if name in (options.names or MECHANISMS)}
    import_what_ranks_need({each.strategy for each in chosen.values()})
    results = {}
    for name, mechanism in chosen.items():
        found = {verify: outcome(mechanism, verify=verify == "verified") for verify in ("alone", "verified")}
        results[name] = found
        print(
            f"{name:55} {found['alone']['what']:8} {found['alone'].get('difference', ''):<22} "
            f"{found['verified']['what']}",
            flush=True,
        )
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
