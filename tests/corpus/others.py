"""Train models of Keras, TensorFlow or JAX on ranks, and compare each with a plain loop of that framework.

usage: others.py FRAMEWORK [--out FILE] [--ranks N ...] [--case NAME ...]
FRAMEWORK is keras (with KERAS_BACKEND), tensorflow or jax.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent)]

import numpy as np  # noqa: E402

from corpus.worlds import run_world  # noqa: E402

EPOCHS, BATCH_SIZE, NUM_SAMPLES = 2, 4, 29  # no global batch divides it: the last step of an epoch is short
LR = {"easy": 0.05, "hard": 0.01}
ADAMW = {"weight_decay": 0.1}
CLIP, ACCUMULATION = 0.5, 3
CHANGES_IN_FORWARD = {"spectral"}
"""A forward pass changes their state: there is one for each step, so that there is one in one process."""
TOLERANCE = 5e-6
"""Weights are in 32 bits, and sums of ranks are made in another order."""


class Samples:
    """Pairs ((x, t), y)."""

    def __init__(self) -> None:
        numbers = np.random.RandomState(7)
        self.x = numbers.randn(NUM_SAMPLES, 6).astype(np.float32)
        self.t = numbers.randint(0, 20, (NUM_SAMPLES, 5))
        self.y = numbers.randint(0, 4, NUM_SAMPLES)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return (self.x[index], self.t[index]), self.y[index]


def joint_batches(settings: str, num_ranks: int) -> Iterator[slice]:
    """Yield the samples of each step of all ranks."""
    size = BATCH_SIZE * num_ranks * (ACCUMULATION if settings == "hard" else 1)
    for _ in range(EPOCHS):
        for start in range(0, NUM_SAMPLES, size):
            yield slice(start, start + size)


class Task:
    """What frameworks have in common."""

    def __init__(self, case: str) -> None:
        self.case = case

    def train_data(self) -> Samples:
        return Samples()


class KerasTask(Task):
    """Of ``model.fit``."""

    def model(self) -> Any:
        from corpus.keras_nets import made

        return made(self.case)

    def compile(self) -> dict[str, Any]:
        import keras

        return {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}


class TensorflowTask(KerasTask):
    """Of a loop of TensorFlow."""

    compile = None  # type: ignore[assignment]

    def loss(self, model: Any, batch: Any, training: bool) -> Any:
        import tensorflow as tf

        inputs, y = batch
        logits = model(list(inputs), training=training)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        return tf.reduce_mean(losses) + sum(model.losses)


class JaxTask(Task):
    """Of JAX."""

    def model(self, rng: Any) -> Any:
        from corpus.jax_nets import made

        return made(self.case)

    def loss(self, params: Any, batch: Any, rng: Any) -> Any:
        import optax

        from corpus.jax_nets import NETS

        (x, t), y = batch
        logits = NETS[self.case][1](params, x, t)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


TASKS = {"keras": KerasTask, "tensorflow": TensorflowTask, "jax": JaxTask}


def keras_optimizer(settings: str, **clip: Any) -> Any:
    import keras

    if settings == "easy":
        return keras.optimizers.SGD(LR[settings])
    return keras.optimizers.AdamW(LR[settings], epsilon=1e-4, **ADAMW, **clip)


def plain_keras(case: str, settings: str, num_ranks: int) -> dict[str, np.ndarray]:
    task = KerasTask(case)
    model, data = task.model(), Samples()
    model.compile(keras_optimizer(settings, global_clipnorm=CLIP), **task.compile())
    for step in joint_batches(settings, num_ranks):
        model.train_on_batch([data.x[step], data.t[step]], data.y[step])
    return named(model)


def plain_tensorflow(case: str, settings: str, num_ranks: int) -> dict[str, np.ndarray]:
    import tensorflow as tf

    task = TensorflowTask(case)
    model, data, optimizer = task.model(), Samples(), keras_optimizer(settings)
    for step in joint_batches(settings, num_ranks):
        with tf.GradientTape() as tape:
            loss = task.loss(model, ((data.x[step], data.t[step]), data.y[step]), training=True)
        gradients = [tf.convert_to_tensor(each) for each in tape.gradient(loss, model.trainable_variables)]
        if settings == "hard":
            gradients, _ = tf.clip_by_global_norm(gradients, CLIP)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return named(model)


def plain_jax(case: str, settings: str, num_ranks: int) -> dict[str, np.ndarray]:
    import jax
    import optax

    task, data = JaxTask(case), Samples()
    params = task.model(None)
    adamw = optax.adamw(LR["hard"], eps=1e-4, **ADAMW)
    optimizer = (
        optax.sgd(LR["easy"]) if settings == "easy" else optax.chain(optax.clip_by_global_norm(CLIP), adamw)
    )
    state = optimizer.init(params)
    for step in joint_batches(settings, num_ranks):
        batch = (data.x[step], data.t[step]), data.y[step]
        updates, state = optimizer.update(jax.grad(task.loss)(params, batch, None), state, params)
        params = optax.apply_updates(params, updates)
    return {name: np.asarray(value) for name, value in params.items()}


PLAIN = {"keras": plain_keras, "tensorflow": plain_tensorflow, "jax": plain_jax}


def named(model: Any) -> dict[str, np.ndarray]:
    return {f"{number} {v.path}": v.numpy() for number, v in enumerate(model.weights)}


def job_of(framework: str, case: str, settings: str, folder: Path) -> dict[str, Any]:
    """Return the description of a job."""
    hard = settings == "hard"
    epsilon = "eps" if framework == "jax" else "epsilon"
    return {
        "name": "corpus",
        "framework": framework,
        "task": f"corpus.others:{TASKS[framework].__name__}",
        "task_args": {"case": case},
        "run_dir": str(folder),
        "train": {
            "epochs": EPOCHS,
            "batch_size_per_rank": BATCH_SIZE,
            **({"accumulation_steps": ACCUMULATION, "clip_grad_norm": CLIP} if hard else {}),
        },
        "optimizer": {"name": "adamw", "args": {epsilon: 1e-4, **ADAMW}} if hard else {"name": "sgd"},
        "lr": {"base_lr": LR[settings], "scaling": "none"},
        "data": {"shuffle": False},
    }


def seen(framework: str, case: str, settings: str, num_ranks: int) -> dict[str, Any]:
    """Train a case; return what came of it."""
    with tempfile.TemporaryDirectory(prefix="corpus-") as name:
        folder = Path(name)
        job = job_of(framework, case, settings, folder)
        ended = run_world(num_ranks, lambda rank: train(job, folder / f"{rank}.npz"), folder)
        found: dict[str, Any] = {"seconds": round(ended.seconds, 2), "code": ended.code}
        if ended.code != 0:
            what = "refused" if ended.code == 2 else f"{ended.code}"
            return found | {"what": what, "output": ended.output[-3000:]}
        of_ranks = [dict(np.load(folder / f"{rank}.npz")) for rank in range(num_ranks)]
        read, write = np.load, np.savez
        expected = folder / "expected.npz"

        def plain(rank: int) -> int:
            write(expected, **PLAIN[framework](case, settings, num_ranks))
            return 0

        reference = run_world(1, plain, folder)  # in a process of its own: this one starts no threads
        if reference.code != 0:
            return found | {"what": "broken", "output": reference.output[-3000:]}
        return found | compared(of_ranks, dict(read(expected)))


def train(job: dict[str, Any], file: Path) -> int:
    """Train on this rank, and write the weights; return the exit code."""
    from horovod_train.collectives.base import Mesh
    from horovod_train.config.schema import Job
    from horovod_train.errors import HorovodTrainError
    from horovod_train.registry import FRAMEWORKS
    from horovod_train.worker import make_run, train_all

    described = Job.model_validate(job)
    framework = FRAMEWORKS.load(described.framework)()
    try:
        world = framework.connect(described)
        mesh = Mesh.data_parallel(world)
        replica, *readers = framework.prepare(described, mesh)
        replica.broadcast()
        train_all(framework, make_run(described, mesh, replica, *readers))
    except HorovodTrainError as error:
        print(f"error: {error}", flush=True)
        return error.exit_code
    replica.sync_buffers()
    weights = (
        {name: np.asarray(value) for name, value in replica.params.items()}
        if described.framework == "jax"
        else named(replica.model)
    )
    np.savez(file, **weights)
    return 0


def compared(of_ranks: list[dict[str, Any]], expected: dict[str, Any]) -> dict[str, Any]:
    """Return how far the weights of ranks are from those that are expected."""
    if any(rank.keys() != expected.keys() for rank in of_ranks):
        return {"what": "WRONG", "why": "names differ", "output": f"{of_ranks[0].keys()} {expected.keys()}"}
    differences = {
        name: max(float(np.abs(rank[name] - value).max()) for rank in of_ranks)
        for name, value in expected.items()
        if value.size
    }
    at = max(differences, key=lambda name: differences[name])
    is_equal = differences[at] <= TOLERANCE
    return {"what": "equal" if is_equal else "WRONG", "difference": differences[at], "at": at}


def names(framework: str) -> list[str]:
    """Return the names of a framework's cases."""
    module = importlib.import_module(f"corpus.{'jax' if framework == 'jax' else 'keras'}_nets")
    return list(module.NETS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=TASKS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", nargs="*", type=int, default=[2])
    parser.add_argument("--case", nargs="*")
    parser.add_argument("-v", action="store_true")
    options = parser.parse_args()
    importlib.import_module(f"horovod_train.plugins.{options.framework}.framework")
    importlib.import_module("horovod_train.worker")
    results = {}
    for case in options.case or names(options.framework):
        for num_ranks in options.ranks:
            for settings in ("easy",) if case in CHANGES_IN_FORWARD else ("easy", "hard"):
                key = f"{case} {num_ranks} {settings}"
                results[key] = found = seen(options.framework, case, settings, num_ranks)
                print(
                    f"{found['what']:8} {key:30} {found.get('difference', '')} {found.get('at', '')} "
                    f"{found['seconds']}s",
                    flush=True,
                )
                if options.v and "output" in found:
                    print(found["output"])
                if options.out:
                    options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
