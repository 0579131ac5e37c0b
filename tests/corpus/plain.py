"""What every strategy trains."""

from __future__ import annotations

from corpus.base import MLP, Case


class Plain(Case):
    plan = {"up": "colwise", "down": "rowwise"}

    def net(self):
        return MLP()
