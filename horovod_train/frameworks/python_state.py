"""State in Python: what training changes besides weights, buffers and the optimizer.

Attributes of the task, of modules of the model and of data sets, class attributes and module variables of the
user's code may change while a job trains: a counter, a temperature, a queue of embeddings, a generator. A
resumed job must continue with them, and the loss must not depend on values that differ between ranks.
Values are found by walking over attributes; those that differ from their values at the start are saved in
each checkpoint, and compared between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.collectives.base import Communicator, allgather_json
from horovod_train.collectives.mesh import Mesh
from horovod_train.errors import describe_ranks
from horovod_train.frameworks.plain_data import encoded, fingerprint, is_generator, packed, unpacked
from horovod_train.frameworks.python_values import (
    MAX_BYTES_OF_DATA,
    MAX_VALUES,
    Root,
    Value,
    code_of,
    is_plain_by_sample,
    is_small,
    local_text,
    restore,
    text_of,
    walk,
    why_not_saved,
)

OWN_STATE = "@python/"
"""Prefix of the names of arrays in a checkpoint's state of ranks."""


class PythonState:
    """State in Python of the objects of a job.

    Created when task, model and data sets exist and no step has been made.

    Args:
        world: All ranks of the job.
        roots: The objects; an object that belongs to several of them is a part of the first.
    """

    def __init__(self, world: Communicator, roots: Sequence[Root]) -> None:
        self._world = world
        self._roots = [*roots, *code_of(roots)]
        self._initial = {value.name: local_text(value) for value in self._values()}
        self._saved_before: list[str] = []
        self.not_restored: list[str] = []
        """Names of values that the checkpoint from which the job has resumed does not contain."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore small values after the block, such as counters and random generators."""
        before = {
            each.name: (local_text(each), deepcopy(encoded(each.content)))
            for each in self._values()
            if is_plain_by_sample(each.content) and is_small(each.content)
        }
        yield
        targets = {root.name: root.target for root in self._roots}
        for each in self._values():
            known = before.get(each.name)
            if known is not None and known[0] != local_text(each):
                restore(targets[each.root], each.path, known[1])

    def changed(self) -> list[Value]:
        """Return the values that differ from those at the start."""
        return [
            each
            for each in self._values()
            if (now := local_text(each)) is None or self._initial.get(each.name) != now
        ]

    def digests(self) -> dict[str, str]:
        """Return a digest of each changed value that all ranks should share, by name."""
        return {
            each.name: fingerprint(each.content, by_identity=False)
            for each in self.changed()
            if each.is_shared and is_plain_by_sample(each.content) and not is_generator(each.content)
        }

    def differences(self) -> dict[str, str]:
        """Return a text with the values of two ranks for each value that differs. Collective."""
        everyone: list[dict[str, str]] = allgather_json(self._world, self.digests())
        names = sorted(set().union(*everyone))
        differing = {name for name in names if len({of_rank.get(name) for of_rank in everyone}) > 1}
        mine = {each.name: text_of(each.content) for each in self._values() if each.name in differing}
        texts: list[dict[str, str]] = allgather_json(self._world, mine)
        found = {}
        for name in sorted(differing):
            first = everyone[0].get(name)
            other = next(rank for rank, of_rank in enumerate(everyone) if of_rank.get(name) != first)
            values = (f"{texts[rank].get(name, 'absent')} on {describe_ranks([rank])}" for rank in (0, other))
            found[name] = ", ".join(values)
        return found

    def unsaved(self) -> dict[str, str]:
        """Return the changed values that checkpoints do not contain, with the reason."""
        return {each.name: reason for each in self.changed() if (reason := why_not_saved(each))}

    def take(self) -> dict[str, ArrayBlob]:
        """Return the changed values for a checkpoint. Collective.

        Rank 0 returns them, and each rank whose values differ from those of rank 0.
        """
        changed = self.changed()
        saved = [each for each in changed if not why_not_saved(each)]
        mine = {each.name: fingerprint(each.content, by_identity=False) for each in saved}
        everyone = allgather_json(self._world, mine)
        if not changed or (self._world.rank and everyone[0] == mine):
            return {}
        document = {
            "values": [[each.root, list(each.path), each.content] for each in saved],
            "unsaved": [f"{name} ({reason})" for name, reason in self.unsaved().items()],
        }
        return packed(document, OWN_STATE)

    def load(self, of_ranks: Sequence[Mapping[str, ArrayBlob]]) -> list[dict[str, ArrayBlob]]:
        """Set the values that ranks have saved; a rank that has saved none takes those of rank 0.

        Returns:
            The state of ranks without these values.

        Raises:
            CheckpointError: A value has another kind than the present one.
        """
        rank = self._world.rank if self._world.rank < len(of_ranks) else 0
        found = [unpacked(of_rank, OWN_STATE) for of_rank in (of_ranks[rank : rank + 1] or [{}])]
        document = found[0] or (unpacked(of_ranks[0], OWN_STATE) if of_ranks else None)
        if document is not None:
            self._restore(document)
        return [
            {name: blob for name, blob in of_rank.items() if not name.startswith(OWN_STATE)}
            for of_rank in of_ranks
        ]

    def _restore(self, document: Any) -> None:
        self.not_restored = list(document["unsaved"])
        roots = {root.name: root.target for root in self._roots}
        for root, path, data in document["values"]:
            steps = tuple((kind, key) for kind, key in path)
            if root not in roots or not restore(roots[root], steps, data):
                self.not_restored.append(f"{root}{steps} (the task does not have it)")

    def _values(self) -> Iterator[Value]:
        seen: set[int] = set()
        count = 0
        for root in self._roots:
            for value in walk(root, seen):
                count += 1
                if count > MAX_VALUES:
                    return
                yield value


def state_of_task(mesh: Mesh, task: object, readers: Sequence[Any], *models: Root) -> PythonState:
    """Return the state in Python of a task, of its data sets, and of models.

    In a model-parallel group, only some ranks call the task or a module: their state is not compared.

    Args:
        mesh: The ranks of the job.
        task: The task.
        readers: Readers of training and evaluation data; None: there is no such data.
        models: Models that PyTorch trains; models of other frameworks have no attributes that change.
    """
    is_shared = mesh.data.size == mesh.world.size
    data = [
        Root(name, reader.dataset, is_shared=False, max_bytes=MAX_BYTES_OF_DATA)
        for name, reader in zip(("train_data", "eval_data"), readers, strict=False)
        if reader is not None
    ]
    shared = [replace(each, is_shared=is_shared) for each in (*models, Root("task", task))]
    return PythonState(mesh.world, [*shared, *data])
