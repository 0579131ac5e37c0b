"""What begins after the steps that are compared with the plain model: only later checks see it."""

from __future__ import annotations

from typing import Any

from corpus.base import MLP, Case, nn, torch


class Late(Case):
    """A case that counts its losses; from the ninth on, ``changed`` is called before each."""

    stateful = True
    num_samples = 61

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.num_losses = 0

    def net(self) -> nn.Module:
        return MLP()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.num_losses += 1
        if self.num_losses >= 9:
            self.changed(getattr(model, "module", model))
        return super().loss(model, batch)

    def changed(self, model: nn.Module) -> None:
        raise NotImplementedError


class LateMaxNorm(Case):
    """rows of an embedding are small at first, and reach max_norm later"""

    num_samples = 61

    def net(self) -> nn.Module:
        class M(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.emb, self.out = nn.Embedding(20, 8, max_norm=0.3), nn.Linear(8, 4)
                with torch.no_grad():
                    self.emb.weight.mul_(0.1)

            def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
                return self.out(self.emb(t).mean(1) * 8)

        return M()


class LateConstraint(Late):
    """a layer that writes its weight through ``.data``, as EEGNet's constraints do"""

    def net(self) -> nn.Module:
        class Constrained(nn.Linear):
            is_on = False

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.is_on and self.training:
                    self.weight.data.clamp_(-0.2, 0.2)
                return super().forward(x)

        model = MLP()
        model.up = Constrained(8, 16)
        return model

    def changed(self, model: nn.Module) -> None:
        model.up.is_on = True


class LateClamp(Late):
    """weights are clamped in the loss"""

    def changed(self, model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3)


class LateDecay(Late):
    """the task changes the weight decay in its parameter groups"""

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        self.groups = [{"params": list(model.parameters()), "weight_decay": 0.0}]
        return self.groups

    def changed(self, model: nn.Module) -> None:
        self.groups[0]["weight_decay"] = 0.5


class LateTemperature(Late):
    """the code between modules reads a dict that the task changes"""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.schedule = {"tau": 1.0}

    def net(self) -> nn.Module:
        schedule = self.schedule

        class M(MLP):
            def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
                return super().forward(x, t) / schedule["tau"]

        return M()

    def changed(self, model: nn.Module) -> None:
        self.schedule["tau"] = 2.0


class LateHook(Late):
    """a forward hook of the model is registered"""

    def changed(self, model: nn.Module) -> None:
        if self.num_losses == 9:
            model.register_forward_hook(lambda module, inputs, output: output * 2.0)


class LateRow(Late):
    """a row of a weight is written from outside of its module: a copy, where ranks share the weight"""

    only = ("fsdp",)

    def changed(self, model: nn.Module) -> None:
        with torch.no_grad():
            model.up.weight[3].zero_()
