"""Weights that training begins from, of a file that somebody else has written."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

from horovod_train.checkpoint.arrays import Part
from horovod_train.checkpoint.inspect import open_weights
from horovod_train.collectives.base import Mesh, SingleRank
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.framework import TorchFramework
from horovod_train.frameworks.torch.state.local import load_initial, meta_parameters, whole_model
from horovod_train.frameworks.torch.state.shards import materialize


class Net(nn.Module):
    """With a tied weight, a saved buffer, and one that no file has."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("places", torch.arange(4.0), persistent=False)

    def forward(self, tokens):
        return self.head(self.norm(self.tokens(tokens) + self.places))


class Task:
    def model(self):
        return Net()

    def train_data(self):
        return TensorDataset(torch.arange(6), torch.arange(6))

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


def weights_of(seed):
    torch.manual_seed(seed)
    plain = Net().state_dict()
    made = {name: torch.rand_like(t) if t.is_floating_point() else t for name, t in plain.items()}
    return made | {"head.weight": made["tokens.weight"]}


def written(path, tensors):
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    return path


def job(path):
    fields = {"name": "j", "task": f"{__file__}:Task", "train": {"initial_weights": str(path)}}
    return Job.model_validate(fields)


def prepared(path):
    return TorchFramework().prepare(job(path), Mesh.data_parallel(SingleRank()))[0]


class TestAFile:
    def test_is_where_training_begins(self, tmp_path):
        wanted = weights_of(5)

        model = prepared(written(tmp_path / "w.safetensors", wanted)).model

        assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())

    def test_may_be_several_in_a_folder(self, tmp_path):
        wanted = weights_of(5)
        names = list(wanted)
        written(tmp_path / "model-1.safetensors", {name: wanted[name] for name in names[:3]})
        written(tmp_path / "model-2.safetensors", {name: wanted[name] for name in names[3:]})

        model = prepared(tmp_path).model

        assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())

    def test_may_be_of_another_type(self, tmp_path):
        wanted = {n: t.bfloat16() if t.is_floating_point() else t for n, t in weights_of(5).items()}

        model = prepared(written(tmp_path / "w.safetensors", wanted)).model

        assert model.tokens.weight.dtype == torch.float32
        assert torch.equal(model.tokens.weight, wanted["tokens.weight"].float())

    def test_may_have_one_of_the_names_of_a_tied_weight(self, tmp_path):
        wanted = weights_of(5)
        del wanted["head.weight"]

        model = prepared(written(tmp_path / "w.safetensors", wanted)).model

        assert torch.equal(model.head.weight, wanted["tokens.weight"])

    def test_is_read_in_parts(self, tmp_path):
        wanted = weights_of(5)
        arrays = open_weights(written(tmp_path / "w.safetensors", wanted))

        part = arrays.part("tokens.weight", (2, 4), Part((6, 4), (3, 0)))

        rows = torch.frombuffer(bytearray(part.data), dtype=torch.float32).view(2, 4)
        assert torch.equal(rows, wanted["tokens.weight"][3:5])


class TestIsRefused:
    def test_a_path_that_leads_nowhere(self, tmp_path):
        with pytest.raises(UserError, match=r"none\.safetensors is no file"):
            prepared(tmp_path / "none.safetensors")

    def test_a_folder_without_such_files(self, tmp_path):
        with pytest.raises(UserError, match=r"is a folder without files that end in \.safetensors"):
            prepared(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{}", b"PK" + b"\0" * 40, b"\xff" * 100])
    def test_what_is_no_such_file(self, tmp_path, content):
        (tmp_path / "w.safetensors").write_bytes(content)

        with pytest.raises(UserError, match="train.initial_weights"):
            prepared(tmp_path / "w.safetensors")

    def test_a_name_in_two_files(self, tmp_path):
        for name in ("a", "b"):
            written(tmp_path / f"{name}.safetensors", weights_of(5))

        with pytest.raises(UserError, match=r"is in a\.safetensors and in b\.safetensors"):
            prepared(tmp_path)

    def test_weights_without_a_name_that_the_model_has(self, tmp_path):
        wanted = weights_of(5)
        wanted["other"] = wanted.pop("norm.weight")

        with pytest.raises(UserError, match="the checkpoint does not contain 'norm.weight'") as refused:
            prepared(written(tmp_path / "w.safetensors", wanted))
        assert "the file also contains other" in refused.value.hint

    def test_weights_of_another_shape(self, tmp_path):
        wanted = weights_of(5) | {"norm.bias": torch.zeros(5)}

        with pytest.raises(UserError, match=r"norm.bias has shape \[5\]"):
            prepared(written(tmp_path / "w.safetensors", wanted))


class TestAModelWithoutMemory:
    def made(self):
        with meta_parameters():
            return Net()

    def test_has_buffers_and_ties_as_ever(self):
        model = self.made()

        assert all(parameter.is_meta for parameter in model.parameters())
        assert model.head.weight is model.tokens.weight
        assert model.places.tolist() == [0, 1, 2, 3]
        assert not any(p.is_meta for p in Net().parameters()), "only what is made in the block"

    def test_has_one_weight_where_one_was_given_to_two_modules(self):
        with meta_parameters():
            one = nn.Parameter(torch.ones(3, 3))
            model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
            for module in model:
                module.weight = one

        assert model[0].weight is model[1].weight
        assert model[0].weight.shape == (3, 3)

    def test_with_a_buffer_that_is_computed_from_weights_is_refused(self):
        with meta_parameters():
            model = nn.Linear(2, 2)
            model.register_buffer("first", model.weight.detach().clone())

        with pytest.raises(UserError, match="the buffer 'first' of a Linear is computed from weights"):
            materialize(model, torch.device("cpu"), torch.device("cpu"))

    def test_takes_over_a_file(self, tmp_path):
        wanted, model = weights_of(5), self.made()

        materialize(model, torch.device("cpu"), torch.device("cpu"))
        load_initial(model, whole_model(model), open_weights(written(tmp_path / "w.safetensors", wanted)))

        assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
        assert model.head.weight is model.tokens.weight
        assert model.places.tolist() == [0, 1, 2, 3]
