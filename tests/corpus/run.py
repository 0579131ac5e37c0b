"""Train the corpus under strategies, compare each with one process, and write what was seen.

usage: run.py [--out FILE] [--strategy NAME ...] [--ranks N ...] [--case NAME ...] [--part I/N] [--share I/N]

A part is one of models and strategies: all numbers of ranks and settings of a pair belong to it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent)]

import safetensors.torch  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)

from corpus import known, late  # noqa: E402
from corpus.adapters import fits  # noqa: E402
from corpus.base import Case  # noqa: E402
from corpus.reference import BATCH_SIZE, EASY, EPOCHS, HARD, Settings, trained  # noqa: E402
from corpus.worlds import Ended, run_world  # noqa: E402

STRATEGIES: dict[str, dict[str, Any]] = {
    "allreduce": {"name": "allreduce"},
    "zero": {"name": "zero"},
    "zero1": {"name": "zero", "args": {"stage": 1}},
    "ddp": {"name": "ddp"},
    "fsdp": {"name": "fsdp"},
    "deepspeed2": {"name": "deepspeed", "args": {"stage": 2}},
    "deepspeed": {"name": "deepspeed"},
    "pipeline": {"name": "pipeline"},
    "tensor_parallel": {"name": "tensor_parallel"},
}
MESHES: dict[str, dict[str, Any]] = {
    "stages": {"name": "mesh", "args": {"pipeline_parallel_degree": 2}},
    "tensors": {"name": "mesh", "args": {"tensor_parallel_degree": 2}},
    "shards": {"name": "mesh", "args": {"tensor_parallel_degree": 2, "shard_data_parallel": True}},
}
"""Two ranks for each sample; they are not on the page."""
LOOPS = {"lightning": "Lightning", "transformers": "Transformers"}
"""Frameworks with a loop of their own, which train models of PyTorch; their tasks are in adapters.py."""

COLUMNS = [*STRATEGIES, *LOOPS]
SHARED = {"pipeline", "tensor_parallel"}
"""All ranks read the same samples."""
SHARES_LAYERS = {"tensor_parallel", "tensors", "shards"}


def job_of(case: type, strategy: str, settings: Settings, num_ranks: int, folder: Path) -> dict[str, Any]:
    """Return the description of a job."""
    settings = case.optimized(settings)
    is_deepspeed = strategy.startswith("deepspeed")
    description = dict((STRATEGIES | MESHES).get(strategy, {"name": "allreduce"}))
    plan = getattr(case, "plan", None)
    if strategy in SHARES_LAYERS and isinstance(plan, dict):
        description["args"] = {**description.get("args", {}), "plan": plan}
    args = {k.removeprefix("task_"): v for k, v in getattr(case, "job_task_args", {}).items()}
    job: dict[str, Any] = {
        "name": "corpus",
        "task": f"{case.__module__}:{case.__name__}",
        "task_args": {**({"double": False} if is_deepspeed else {}), **args},
        "run_dir": str(folder),
        "train": {
            "epochs": EPOCHS,
            "batch_size_per_rank": BATCH_SIZE,
            "accumulation_steps": settings.accumulation_steps,
            **({"clip_grad_norm": settings.clip_grad_norm} if settings.clip_grad_norm else {}),
        },
        "optimizer": {
            "name": settings.optimizer if ":" in settings.optimizer else settings.optimizer.lower(),
            "args": settings.args,
        },
        "lr": {"base_lr": settings.lr, "scaling": "none"},
        "data": {"shuffle": False},
        "strategy": description,
        "metrics": {"enabled": False},
        "checkpoint": {"every": None},
        "health": {"stall_warning_s": 10.0, "stall_shutdown_s": 20.0},
    }
    if strategy in LOOPS:
        job |= {"framework": strategy, "task": f"corpus.adapters:{LOOPS[strategy]}"}
        job["task_args"] = {**job["task_args"], "case": case.__name__}
    for section, values in getattr(case, "job", {}).items():
        job[section] = {**job.get(section, {}), **values} if isinstance(values, dict) else values
    return job


def seen(
    case: type,
    strategy: str,
    settings: Settings,
    num_ranks: int,
    before: Callable[[], None] = lambda: None,
    *,
    is_killed: bool = False,
) -> dict[str, Any]:
    """Train a case under a strategy; return what came of it.

    Args:
        case: The case.
        strategy: Or framework, a column of the page.
        settings: How it is trained.
        num_ranks: On how many ranks.
        before: Called by each rank first.
        is_killed: Kill the last rank after a checkpoint, and resume.
    """
    from horovod_train.worker import WorkerOptions, main

    with tempfile.TemporaryDirectory(prefix="corpus-") as name:
        folder = Path(name)
        job = job_of(case, strategy, settings, num_ranks, folder)
        if is_killed:
            job["checkpoint"] = {"every": [1, "2 steps"]}
        (folder / "job.json").write_text(json.dumps(job))

        def act(rank: int) -> int:
            before()
            return main(WorkerOptions(folder / "job.json", run_id="run"))

        if is_killed:
            killed = run_world(
                num_ranks, lambda rank: act_until_killed(rank, num_ranks, case, folder, act), folder
            )
            if killed.codes[-1] != -signal.SIGKILL:
                return {"what": "not killed", "codes": killed.codes, "output": killed.output[-6000:]}
        ended = run_world(num_ranks, act, folder)
        found: dict[str, Any] = {"seconds": round(ended.seconds, 2), "code": ended.code, "codes": ended.codes}
        if ended.code != 0:
            found |= {
                "what": "refused" if ended.code == 2 else f"{ended.code}",
                "output": ended.output[-6000:],
            }
            return found
        found["output_of_rank_0"] = ended.output.partition("--- rank 1")[0][-3000:]
        return found | compared(case, strategy, settings, num_ranks, folder, job["task_args"], ended)


def act_until_killed(rank: int, num_ranks: int, case: type, folder: Path, act: Callable[[int], int]) -> int:
    """Act on a rank; the last one kills itself in a loss after a checkpoint was written."""
    loss, calls = case.loss, itertools.count(1)

    def killing(self: Any, model: Any, batch: Any) -> Any:
        if next(calls) >= 12 and list(folder.glob("corpus/checkpoints/step-*/manifest.json")):
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(self, model, batch)

    if rank == num_ranks - 1:
        case.loss = killing  # in this process, which has been forked
    return act(rank)


def compared(
    case: type,
    strategy: str,
    settings: Settings,
    num_ranks: int,
    folder: Path,
    args: dict[str, Any],
    ended: Ended,
) -> dict[str, Any]:
    from horovod_train.checkpoint.inspect import export

    export(folder / "corpus", folder / "weights.safetensors", averaged="ema" in case.job or None)
    weights = safetensors.torch.load_file(folder / "weights.safetensors")
    if strategy in LOOPS:
        weights = {name.removeprefix("net."): tensor for name, tensor in weights.items()}
        args = {name: value for name, value in args.items() if name != "case"}
    num_data = 1 if strategy in SHARED else num_ranks // (2 if strategy in MESHES else 1)
    zeros = strategy.startswith("deepspeed")
    expected = trained(case(**args), settings, num_data, zeros=zeros)
    missing = sorted(set(expected) ^ set(weights))
    if missing:
        return {"what": "WRONG", "why": f"names differ: {missing[:4]}", "output": ended.output[-2000:]}
    start = case(**args).model().state_dict()
    moved = max(
        (
            float((expected[n].double() - start[n].double()).abs().max())
            for n in expected
            if expected[n].numel() and not expected[n].is_complex()
        ),
        default=0.0,
    )
    worst, where = 0.0, ""
    for each, tensor in expected.items():
        difference = (
            (tensor - weights[each]).abs()
            if tensor.is_complex() or tensor.is_floating_point()
            else (tensor.double() - weights[each].double()).abs()
        )
        size = float(difference.max()) if tensor.numel() else 0.0
        if tensor.shape != weights[each].shape or tensor.dtype != weights[each].dtype:
            return {"what": "WRONG", "why": f"{each}: {weights[each].dtype} {tuple(weights[each].shape)}"}
        if not size <= worst:
            worst, where = size, each
    # PyTorch's clipping, which other loops use, adds 1e-6 to the norm.
    is_rough = args.get("double") is False or strategy in LOOPS
    tolerance = getattr(case, "tolerance", None) or (2e-6 if is_rough else 1e-9)
    is_equal = worst <= tolerance or case.is_random  # was compared with the plain model by the job itself
    return {
        "what": "equal" if is_equal else "WRONG",
        "difference": worst,
        "at": where,
        "moved": moved,
        **({} if is_equal else {"output": ended.output[-2000:]}),
    }


NO_CASES = {"jax_nets", "keras_nets", "known", "late", "mechanisms", "others", "shipped"}


def late_cases() -> dict[str, type[Case]]:
    """Return the cases of behaviour that begins late, by name; they are not on the page."""
    found = {name: each for name, each in vars(late).items() if name.startswith("Late")}
    return {name: each for name, each in found.items() if each is not late.Late}


def known_cases() -> dict[str, type[Case]]:
    """Return models that many people train, by name; they are not on the page."""
    found = {name: each for name, each in vars(known).items() if isinstance(each, type)}
    return {
        name: each
        for name, each in found.items()
        if issubclass(each, known.Known) and each is not known.Known
    }


def cases() -> dict[str, type[Case]]:
    """Return all cases by name."""
    found: dict[str, type[Case]] = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        if file.stem in {"__init__", "adapters", "base", "page", "reference", "run", "worlds", *NO_CASES}:
            continue
        module = importlib.import_module(f"corpus.{file.stem}")
        found |= {
            name: each
            for name, each in vars(module).items()
            if isinstance(each, type) and issubclass(each, Case) and each.__module__ == module.__name__
        }
    return found


GROUPS = {"page": cases, "late": late_cases, "known": known_cases}


def import_what_ranks_need(strategies: Iterable[str]) -> None:
    """Import it once, before ranks are forked, which then share its pages: no collection writes to them."""
    import horovod.torch  # noqa: F401
    import torch._dynamo
    import torch._inductor.compile_fx  # PyTorch's optimizers import both
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    import horovod_train.frameworks.torch.framework
    import horovod_train.worker  # noqa: F401
    from horovod_train.registry import HOOKS, load_attribute
    from horovod_train.registry import STRATEGIES as CLASSES

    for name in LOOPS.keys() & set(strategies):
        importlib.import_module(f"horovod_train.plugins.{name}.framework")
    names = {(STRATEGIES | MESHES)[name]["name"] for name in strategies if name not in LOOPS}
    classes = [CLASSES.location(name) for name in names]
    for location in (*HOOKS, *classes):
        load_attribute(location, what="a part of a run")
    needed_by_steps = (
        "plugins.pipeline.cut",
        "frameworks.torch.verify.one_process",
        "frameworks.torch.verify.verification",
        "frameworks.torch.state.model",
        "frameworks.torch.state.optimizer",
    )
    for module in needed_by_steps:
        importlib.import_module(f"horovod_train.{module}")
    if any(name.startswith("deepspeed") for name in strategies):
        from horovod_train.plugins.deepspeed.strategy import imported

        imported(torch.device("cpu"))
    gc.collect()
    gc.freeze()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--strategy", nargs="*", default=COLUMNS)
    parser.add_argument("--ranks", nargs="*", type=int, default=[2])
    parser.add_argument("--case", nargs="*")
    parser.add_argument("--settings", nargs="*", default=["easy", "hard"])
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--share", default="0/1", help="of that part, where several processes train it")
    parser.add_argument("--group", choices=GROUPS, default="page", help="the others are not on the page")
    parser.add_argument("--kill", action="store_true", help="kill a rank after a checkpoint, and resume")
    parser.add_argument("-v", action="store_true")
    options = parser.parse_args()
    import_what_ranks_need(options.strategy)
    part, num_parts = map(int, options.part.split("/"))
    share, num_shares = map(int, options.share.split("/"))
    pairs = [
        (name, case, strategy)
        for name, case in GROUPS[options.group]().items()
        for strategy in options.strategy
        if not (strategy in SHARES_LAYERS and case.plan is None)
        if strategy not in LOOPS or fits(case)
        if case.only is None or strategy in case.only
        if options.case is None or name in options.case
    ]
    of_part = [
        (name, case, strategy, settings, num_ranks)
        for name, case, strategy in pairs[part::num_parts][share::num_shares]
        for num_ranks in options.ranks
        for settings in (EASY, HARD)
        if settings.name in options.settings
        if settings.name in case.settings and not (settings is HARD and case.stateful)
    ]
    results = {}
    for name, case, strategy, settings, num_ranks in of_part:
        key = f"{name} {strategy} {num_ranks} {settings.name}"
        try:
            found = seen(case, strategy, settings, num_ranks, is_killed=options.kill)
        except Exception:  # noqa: BLE001
            found = {"what": "broken", "output": traceback.format_exc()}
        results[key] = found
        print(
            f"{found['what']:8} {key:40} {found.get('difference', '')} {found.get('at', '')} "
            f"{found.get('seconds')}s",
            flush=True,
        )
        if options.v and "output" in found:
            print(found["output"])
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
