"""Many clients at once: the defended client mapped over candidates, for attackers who run its code on every one of theirs."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.func import vmap

from gradveil.attacks.base import SimulateMany
from gradveil.attacks.engine.execution import CPU_BATCH_LIMIT, chunk_size
from gradveil.attacks.engine.matrix_convolution import quicker
from gradveil.client.send import arrives
from gradveil.client.update import trains_alone
from gradveil.defenses import Defense, parts_of
from gradveil.errors import UsageError
from gradveil.learning import Learner
from gradveil.learning.embedding import EmbeddingLearner
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.tensors import Named, check_finite, mean, unchecked

__all__ = ["together"]

KEPT_ENTRIES = 2**28
"""Entries of undefended updates that are kept from one draw to the next, a gigabyte."""


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
    kept: list[_Raw] = []

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
            raws: tuple[Named, ...] = ()
            if _repeats(first, defense) and len(inputs) * first.parameters <= KEPT_ENTRIES:
                if not (kept and kept[0].is_of(inputs, targets)):
                    trained = tuple(vmap(learner.update, chunk_size=few)(inputs, targets) for learner in made[0])
                    kept[:] = [_Raw(weakref.ref(inputs), weakref.ref(targets), inputs._version, tuple(map(_detached, trained)))]
                raws = kept[0].updates
            found = vmap(one, in_dims=(0, 0, 0 if raws else None), randomness="same", chunk_size=few)(inputs, targets, raws)
        check_finite({f"{index}|{n}": v for index, named in enumerate(found) for n, v in named.items()}, "the defended update")
        return tuple(found)

    return simulate


@dataclass(frozen=True)
class _Raw:
    """Undefended updates of the candidates that were asked about last: one draw differs from the next only behind them."""

    inputs: weakref.ref[Tensor]
    targets: weakref.ref[Tensor]
    version: int
    updates: tuple[Named, ...]

    def is_of(self, inputs: Tensor, targets: Tensor) -> bool:
        return self.inputs() is inputs and self.targets() is targets and self.version == inputs._version


def _repeats(learner: Learner, defense: Defense) -> bool:
    """Whether another draw trains to the same update."""
    alone = not isinstance(learner, EmbeddingLearner) and learner.settings.clients == 1 and trains_alone(learner, defense)
    return alone and any(part.random for part in parts_of(defense))


def _detached(named: Named) -> Named:
    return {name: value.detach() for name, value in named.items()}


def _one(
    learners: tuple[Learner, ...], defense: Defense, seed: Seed, public: Tensor
) -> Callable[[Tensor, Tensor, tuple[Named, ...]], tuple[Named, ...]]:
    """Return what all clients of one candidate do in all rounds; of each round the mean over clients.

    With updates handed in, one client trains no more.
    """
    clients = learners[0].settings.clients

    def one(inputs: Tensor, targets: Tensor, raws: tuple[Named, ...]) -> tuple[Named, ...]:
        size = inputs.shape[0] // clients
        states: list[Named | None] = [None] * clients
        rounds: list[Named] = []
        for index, learner in enumerate(learners):
            own = learner.replace(settings=learner.settings.replace(clients=1))
            ran = [
                arrives(
                    own,
                    Batch(inputs[client * size : (client + 1) * size], targets[client * size : (client + 1) * size]),
                    defense,
                    seed.child(client),
                    state=state,
                    round_index=index,
                    public=public,
                    raw=raws[index] if raws else None,
                )
                for client, state in enumerate(states)
            ]
            states = [state for _, state in ran]
            rounds.append(ran[0][0] if clients == 1 else mean([weights for weights, _ in ran]))
        return tuple(map(_detached, rounds))

    return one
