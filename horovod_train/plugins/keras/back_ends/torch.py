"""Keras on PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import torch

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.horovod import HorovodCommunicator
from horovod_train.config.schema import Job
from horovod_train.frameworks.torch import framework
from horovod_train.frameworks.torch.comm.collectives import Exchange, TorchCommunicator
from horovod_train.plugins.keras.back_ends import BackEnd


class TorchBackEnd(BackEnd):
    """PyTorch: operations also use its own random generators."""

    def communicator_class(self) -> type[HorovodCommunicator]:
        return TorchCommunicator

    def exchange(self, world: Communicator, bucket_size_bytes: int, wire_dtype: str) -> Exchange:
        return Exchange(world, bucket_size_bytes, getattr(torch, wire_dtype))

    def limit_threads(self, num_threads: int) -> None:
        """Set the number of threads of one operation."""
        torch.set_num_threads(num_threads)

    def be_deterministic(self) -> None:
        torch.use_deterministic_algorithms(True)

    def choose_device(self, job: Job, world: Communicator) -> None:
        keras.src.backend.common.global_state.set_global_attribute(
            "torch_device", str(framework.choose_device(job, world))
        )

    def clear(self, totals: Sequence[keras.Variable]) -> None:
        """Write zeros: Keras multiplies by zero, which preserves NaN, and creates -0.0 on some ranks only."""
        for total in totals:
            total.value.zero_()

    def set_training(self, model: keras.Model) -> None:
        model.train()

    def generators(self) -> dict[str, Any]:
        states = {"cpu": torch.get_rng_state().numpy()}
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state().numpy()
        return states

    def load_generators(self, states: Mapping[str, Any]) -> None:
        if not states:
            return
        torch.set_rng_state(torch.from_numpy(states["cpu"].copy()))
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.from_numpy(states["cuda"].copy()))
