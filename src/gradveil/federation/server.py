"""The server: refuses what it cannot trust, aggregates the rest, and takes one step.

One bad client never stops a round. Its payload is refused with a named error, the reason is kept beside its number, and the
round goes on without it. Where nothing is left, or what is left cannot be aggregated, the weights stay as they are and the round
says why.

What is refused is what no honest client could have sent. A client that lies within the form, with a wrong but ordinary update, is
not found out: it moves the model by its share of the average. Robust aggregation is not part of this server.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gradveil.defenses.base import Defense
from gradveil.errors import BadUpdate
from gradveil.federation.aggregation import LayerWeights, aggregate, subtract
from gradveil.federation.scaffold import zeros_like
from gradveil.learning.adam import AdamRule, adam_step
from gradveil.records import ModelSpec, Payload, Role, Update
from gradveil.study.federation import FederationSettings
from gradveil.tensors import Named, check_finite

__all__ = ["Reception", "Server", "Step", "receive"]

FURTHEST = 2**31
"""A counter that moves further than this in one round is a lie, or would soon overflow."""

FED_ADAM = AdamRule(keep=(0.9, 0.99), take=(1 - 0.9, 1 - 0.99), corrected=False, outside=1e-3)
"""FedAdam, as in Reddi et al., Adaptive Federated Optimization, 2021, https://arxiv.org/abs/2003.00295: no bias correction."""


@dataclass(frozen=True, eq=False)
class Reception:
    """What arrived in one round.

    Attributes:
        payloads: Client to payload, of those accepted.
        updates: Client to decoded update, of those accepted.
        refused: Client to sentence, of those refused.
    """

    payloads: Mapping[int, Payload] = field(default_factory=dict)
    updates: Mapping[int, Update] = field(default_factory=dict)
    refused: Mapping[int, str] = field(default_factory=dict)


def receive(
    payloads: Mapping[int, Payload],
    defense: Defense,
    spec: ModelSpec,
    *,
    round_index: int,
    sizes: Mapping[int, int] | None = None,
    buffers: Named | None = None,
) -> Reception:
    """Validate and decode what clients sent, and refuse what is malformed or lies.

    Args:
        payloads: Client to payload.
        defense: Knows how to decode.
        spec: The model's names, shapes, precisions and roles.
        round_index: The round that is being aggregated; payloads of another are refused.
        sizes: Client to the number of records it registered with; who claims more is refused. None believes every count.
        buffers: The global buffers, against which those of clients are checked.
    """
    good: dict[int, Payload] = {}
    updates: dict[int, Update] = {}
    refused: dict[int, str] = {}
    for client, payload in payloads.items():
        try:
            updates[client] = _read(payload, defense, spec, round_index, None if sizes is None else sizes[client], buffers or {})
            good[client] = payload
        except BadUpdate as error:
            refused[client] = str(error)
    return Reception(good, updates, refused)


def _read(
    payload: Payload, defense: Defense, spec: ModelSpec, round_index: int, most_examples: int | None, buffers: Named
) -> Update:
    update = defense.decode(payload, spec)
    if update.round != round_index:
        raise BadUpdate(f"the payload is of round {update.round}, but this is round {round_index}")
    if most_examples is not None and update.examples > most_examples:
        raise BadUpdate(f"the payload claims {update.examples} examples, but the client registered with {most_examples}")
    if update.weights.keys() != spec.named(Role.WEIGHT).keys():
        raise BadUpdate("the decoded update does not have the model's weights")
    # Finite factors may multiply to an infinity, so what was decoded is looked at again.
    check_finite(update.weights, "the decoded update")
    _check_buffers(update.buffers, spec, buffers)
    _check_sizes({**update.weights, **update.buffers})
    return update


def _check_sizes(sent: Named) -> None:
    """Refuse numbers whose squares overflow: one such client would make the optimiser's memory or a control variate infinite."""
    limits = {n: math.sqrt(torch.finfo(v.dtype).max) for n, v in sent.items() if v.is_floating_point() and v.numel()}
    found = _answers({name: sent[name].abs().max() for name in limits})
    for name, most in limits.items():
        if found[name] > most:
            raise BadUpdate(f"{name!r} has an entry of size {found[name]:.3g}, and {most:.3g} is the most a server can work with")


def _check_buffers(sent: Named, spec: ModelSpec, buffers: Named) -> None:
    """Refuse variances below zero, and counters that run backwards or away."""
    check_finite({n: v for n, v in sent.items() if spec.tensors[n].role is Role.BUFFER}, "the decoded buffers")
    counters, variances = {}, {}
    for name, value in sent.items():
        if spec.tensors[name].role is Role.COUNTER:
            if value.dtype == torch.bool or value.is_complex():
                raise BadUpdate(f"{name!r} is {value.dtype}, which counts nothing; no client may change it")
            wide = value.to(torch.int64)  # narrow integers can neither be compared with the limit nor subtracted safely
            before = buffers[name].to(torch.int64) if name in buffers else torch.zeros_like(wide)
            room = torch.iinfo(value.dtype).max - before
            counters[name] = ((wide > 0) | (wide < -FURTHEST) | (-wide > room)).any()
        elif name.endswith("running_var") and name in buffers:
            variances[name] = (buffers[name] - value < 0).any()
    for name, wrong in _answers({**counters, **variances}).items():
        if wrong and name in counters:
            raise BadUpdate(f"the counter {name!r} runs backwards or too far; a round counts up by its local steps")
        if wrong:
            raise BadUpdate(f"the variances in {name!r} would be negative")


def _answers(asked: Named) -> dict[str, float]:
    """Return single numbers from the device in one go: asking a GPU tensor by tensor waits for it every time."""
    if not asked:
        return {}
    # Double precision for what single precision cannot hold; the hardware of "mps" has none, and no such values.
    wide = torch.float32 if next(iter(asked.values())).device.type == "mps" else torch.float64
    return dict(zip(asked, torch.stack([value.to(wide) for value in asked.values()]).tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class Step:
    """The outcome of aggregating one round.

    Attributes:
        server: The server after the round; the same one where nothing changed.
        accepted: Clients that are part of the aggregate.
        refused: Client to sentence, of all others that sent something.
        note: Why nothing changed, or empty.
    """

    server: Server
    accepted: tuple[int, ...]
    refused: Mapping[int, str]
    note: str = ""


@dataclass(frozen=True, eq=False)
class Server:
    """The global model and the memory of the server's optimiser; pure, a step returns the next server.

    Attributes:
        weights: Trainable tensors.
        buffers: Other tensors.
        optimizer: ``sgd`` or ``adam``.
        learning_rate: Step size along the aggregate.
        momentum: For sgd.
        memory: ``momentum``, or ``mean`` and ``square``; zeros where missing.
    """

    weights: Named
    buffers: Named = field(default_factory=dict)
    optimizer: str = "sgd"
    learning_rate: float = 1.0
    momentum: float = 0.0
    memory: Mapping[str, Named] = field(default_factory=dict)

    @classmethod
    def start(cls, settings: FederationSettings, weights: Named, buffers: Named) -> Server:
        """Return the server before the first round."""
        return cls(weights, buffers, settings.server_optimizer, settings.server_learning_rate, settings.server_momentum)

    def remembering(self, memory: Mapping[str, Named]) -> Server:
        """Return the same server with another memory; empty parts are left out."""
        return dataclasses.replace(self, memory={name: values for name, values in memory.items() if values})

    def step(self, reception: Reception, defense: Defense, spec: ModelSpec) -> Step:
        """Aggregate what was accepted and move along it."""
        refused = dict(reception.refused)
        try:
            chosen, liars = _layer_weights(defense, reception.payloads)
            refused |= liars
            accepted = tuple(client for client in reception.updates if client not in liars)
            updates = [reception.updates[client] for client in accepted]
            total = defense.correct_aggregate(aggregate(updates, spec, chosen), [update.examples for update in updates])
            return Step(self._moved(total), accepted, refused)
        except BadUpdate as error:
            return Step(self, (), refused, f"the weights stay as they were: {error}")

    def _moved(self, total: Update) -> Server:
        weights, memory = self._optimize(total.weights)
        moved = dataclasses.replace(self, weights=weights, buffers=subtract(self.buffers, total.buffers), memory=memory)
        check_finite(moved.weights, "the new global model")
        for name, values in memory.items():
            check_finite(values, f"the server's {name}")
        return moved

    def _optimize(self, direction: Named) -> tuple[Named, dict[str, Named]]:
        rate = self.learning_rate
        if self.optimizer == "adam":
            mean, square = (self.memory.get(name) or zeros_like(direction) for name in ("mean", "square"))
            taken = {n: adam_step(d, mean[n], square[n], 0, rate=rate, rule=FED_ADAM) for n, d in direction.items()}
            kept = {"mean": {n: each.mean for n, each in taken.items()}, "square": {n: each.square for n, each in taken.items()}}
            return {n: w - taken[n].move for n, w in self.weights.items()}, kept
        if self.momentum:
            before = self.memory.get("momentum") or zeros_like(direction)
            direction = {n: self.momentum * before[n] + d for n, d in direction.items()}
            return {n: w - rate * direction[n] for n, w in self.weights.items()}, {"momentum": direction}
        return {n: torch.sub(w, direction[n], alpha=rate) for n, w in self.weights.items()}, {}


def _layer_weights(defense: Defense, payloads: Mapping[int, Payload]) -> tuple[Sequence[LayerWeights] | None, dict[int, str]]:
    """Return the defense's aggregation weights, without the clients whose payload alone makes them impossible."""
    if not payloads:
        return None, {}
    liars: dict[int, str] = {}
    try:
        chosen = defense.layer_weights(list(payloads.values()))
        liars = dict(_impossible(zip(payloads, chosen or (), strict=chosen is not None)))
        if not liars:
            return chosen, liars
    except BadUpdate:
        for client, payload in payloads.items():
            try:
                defense.layer_weights([payload])
            except BadUpdate as error:
                liars[client] = str(error)
    honest = [payload for client, payload in payloads.items() if client not in liars]
    return defense.layer_weights(honest) if honest else None, liars


def _impossible(chosen: Iterable[tuple[int, LayerWeights]]) -> Iterator[tuple[int, str]]:
    for client, weights in chosen:
        for name, value in weights.items():
            if not (math.isfinite(value) and value >= 0):
                yield client, f"its aggregation weight of {name!r} would be {value}"
                break
