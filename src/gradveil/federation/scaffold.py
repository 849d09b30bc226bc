"""SCAFFOLD: control variates that correct the drift of clients with different data, made from the decoded update only.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, https://arxiv.org/abs/1910.06378.

With x the global and y the local weights, K local steps of size η, N clients, S of them in the round:

    y ← y - η (g - c_i + c)                       every local step, after the defense has had its hand on g
    c_i⁺ = c_i - c + (x - y) / (K η)              "option II" of the paper
    c ← c + (|S| / N) · mean over S of (c_i⁺ - c_i)

Both start at zero, so c = (1/N) Σ c_i at all times.

The difference to the paper: x - y is the update *as the server decoded it*. A client that made c_i⁺ from its own exact x - y
and sent it along, as the paper does, would hand over a mean of raw gradients beside an update that was noised, pruned or
truncated for a reason. Made from the decoded update, c_i⁺ tells nothing that the update did not, so it need not be sent at
all: both sides compute it. What is sent down beside x is c. The price is that the defense's error enters the correction.

K and η are those of the settings; a defense that changes them in secret (a hidden learning rate) makes control variates of
another length, which the server cannot know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from gradveil.errors import UsageError
from gradveil.records import Update
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named, add, scale, sub

__all__ = ["Scaffold", "zeros_like"]


def zeros_like(weights: Named) -> Named:
    """Return zeros in the shape of the weights."""
    return {name: torch.zeros_like(value) for name, value in weights.items()}


@dataclass(frozen=True, eq=False)
class Scaffold:
    """The control variates of a federation; pure, a round returns the next one.

    Attributes:
        clients: How many clients there are, in the round or not.
        server: c.
        own: Client to c_i; a client without one has zeros.
    """

    clients: int
    server: Named
    own: Mapping[int, Named] = field(default_factory=dict)

    @classmethod
    def start(cls, weights: Named, clients: int) -> Scaffold:
        """Return zeros for the server and, by leaving them out, for every client."""
        return cls(clients, zeros_like(weights))

    def control(self, client: int) -> Named:
        """Return c_i."""
        return self.own.get(client) or zeros_like(self.server)

    def correction(self, client: int) -> Named:
        """Return c - c_i, which is added to the gradient of every local step."""
        return sub(self.server, self.control(client))

    def after(self, decoded: Mapping[int, Update], settings: TrainingSettings) -> Scaffold:
        """Return the control variates after a round.

        Args:
            decoded: Client to its update as the server read it; clients that were refused are not in it and keep their c_i.
            settings: Of local training; K follows from the examples of each update.
        """
        if settings.optimizer != "sgd" or settings.momentum:
            raise UsageError("scaffold needs plain local sgd: with momentum or adam, x - y is no sum of gradients")
        own, server = dict(self.own), self.server
        for client, update in decoded.items():
            length = settings.steps(update.examples) * settings.learning_rate
            before = self.control(client)
            own[client] = add(sub(before, self.server), scale(update.weights, 1 / length))
            # (|S|/N) times a mean over S is a sum over S divided by N.
            server = add(server, scale(sub(own[client], before), 1 / self.clients))
        return Scaffold(self.clients, server, own)
