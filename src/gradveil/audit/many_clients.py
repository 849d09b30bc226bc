"""Many clients at once: the defended client mapped over candidates, for attackers who run its code on every one of theirs."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import Tensor
from torch.func import vmap

from gradveil.attacks.base import SimulateMany
from gradveil.attacks.engine.execution import CPU_BATCH_LIMIT, chunk_size
from gradveil.attacks.engine.matrix_convolution import quicker
from gradveil.client.send import arrives
from gradveil.defenses import Defense
from gradveil.errors import UsageError
from gradveil.learning import Learner
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.tensors import Named, check_finite, mean, unchecked

__all__ = ["together"]


def together(learners: tuple[Learner, ...], defense: Defense, seed: Seed, public: Tensor) -> SimulateMany:
    """Return ``(inputs, targets, draw) -> weights that the server would read, per round`` for many candidates at once.

    Hooks that look into their tensors, and large networks on a processor, where it does not pay, are refused by an exception.

    Args:
        learners: One per round seen.
        defense: What protects the clients.
        seed: Its children, by draw, seed the clients.
        public: Inputs that the clients have.
    """
    made: list[tuple[Learner, ...]] = []

    def simulate(inputs: Tensor, targets: Tensor, draw: int) -> tuple[Named, ...]:
        first = learners[0]
        if first.device.type == "cpu" and first.parameters > CPU_BATCH_LIMIT:
            raise UsageError("on a processor networks of this size run one by one, which costs less")
        if not made:
            made.append(tuple(quicker(learner, tuple(inputs.shape[2:])) for learner in learners))
        one = _one(made[0], defense, seed.child(draw), public)
        few = chunk_size(inputs.device, first.parameters, len(inputs), inputs.shape[1])
        # Hooks may use operations that torch maps one by one: slow, and not wrong.
        with unchecked(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found = vmap(one, randomness="same", chunk_size=few)(inputs, targets)
        check_finite({f"{index}|{n}": v for index, named in enumerate(found) for n, v in named.items()}, "the defended update")
        return tuple(found)

    return simulate


def _one(
    learners: tuple[Learner, ...], defense: Defense, seed: Seed, public: Tensor
) -> Callable[[Tensor, Tensor], tuple[Named, ...]]:
    """Return what all clients of one candidate do in all rounds; of each round the mean over clients."""
    clients = learners[0].settings.clients

    def one(inputs: Tensor, targets: Tensor) -> tuple[Named, ...]:
        size = inputs.shape[0] // clients
        states: list[Named | None] = [None] * clients
        rounds: list[Named] = []
        parts = [slice(client * size, (client + 1) * size) for client in range(clients)]
        for index, learner in enumerate(learners):
            own = learner.replace(settings=learner.settings.replace(clients=1))
            ran = [
                arrives(own, Batch(inputs[p], targets[p]), defense, seed.child(c), state=s, round_index=index, public=public)
                for c, (p, s) in enumerate(zip(parts, states, strict=True))
            ]
            states = [state for _, state in ran]
            rounds.append(mean([weights for weights, _ in ran]))
        return tuple({n: v.detach() for n, v in each.items()} for each in rounds)

    return one
