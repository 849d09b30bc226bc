"""The server's side: a strategy that reads what protected clients send, and hands another strategy what that one understands.

What clients claim is not believed. A payload is read under the rules of the embedded server (`gradveil.federation.server`), which
also aggregates: strategies that average get one reply, with the global model after this round's mean update, so weights per
tensor and corrections of the mean pass through exactly, and plain FedAvg gives the embedded server's weights to the bit.
Strategies that compare clients get one reply per client, where the defense weighs clients by examples alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    Bulyan,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
    Strategy,
)
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from torch import nn

from gradveil.client.update import horizontal_fault
from gradveil.defenses.base import Defense
from gradveil.defenses.chain import adapt, build_defense, parts_of
from gradveil.errors import BadUpdate, GradveilError, UsageError
from gradveil.federation.server import Server, Step, receive
from gradveil.flower.layout import Layout
from gradveil.flower.replies import EXAMPLES, Reply, read_reply
from gradveil.records import Update
from gradveil.registry import spell
from gradveil.tensors import Named, sub

__all__ = ["Receipt", "Veiled"]

AVERAGING = (FedAvg, FedProx, FedAvgM, FedAdagrad, FedAdam, FedYogi)
COMPARING = (FedMedian, FedTrimmedAvg, Krum, MultiKrum, Bulyan)
SERVER_HOOKS = {"layer_weights": "weighs clients tensor by tensor", "correct_aggregate": "corrects the mean"}
MOST_SAID = 200
"""Characters of a client's error that are kept."""
REFUSED = 6
"""Flower's code for what cannot be worked with."""

log = logging.getLogger("gradveil.flower")


@dataclass(frozen=True)
class Receipt:
    """What came of one round.

    Attributes:
        round: From 1, as Flower counts.
        accepted: Nodes that are part of the new model, in the order of their places.
        refused: Node to sentence, of all others that answered.
        examples: How many examples the payloads of the accepted count.
        note: Why the model stayed as it was, or empty.
    """

    round: int
    accepted: tuple[int, ...] = ()
    refused: Mapping[int, str] = field(default_factory=dict)
    examples: int = 0
    note: str = ""


class Veiled(Strategy):
    """A strategy whose clients run a defense.

    Attributes:
        receipts: What came of every round so far.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        defense: str | Defense,
        *,
        sizes: Mapping[int, int] | None = None,
        evaluate: bool = False,
    ) -> None:
        """Wrap a strategy, or refuse one that would be wrong for the defense.

        Args:
            strategy: What aggregates otherwise: FedAvg or another one named in docs/flower.md, not a subclass that averages anew.
            model: The app's model, not adapted.
            defense: The very defense that clients run.
            sizes: Node to the number of records it registered with: who claims more is refused, and who is not named too. None
                believes every count that is a sensible number.
            evaluate: Whether clients are asked to evaluate; nothing protects what they answer.
        """
        self._defense = build_defense(defense) if isinstance(defense, str) else defense
        fault = horizontal_fault(self._defense)
        if fault:
            raise UsageError(fault)
        self._averages = _averages(strategy, self._defense)
        self._inner, self._sizes, self._evaluate = strategy, sizes, evaluate
        self._model = adapt(self._defense, model).model
        self._layout = Layout.of(self._model)
        self._global: tuple[Named, Named] | None = None
        self.receipts: list[Receipt] = []

    @property
    def initial_arrays(self) -> ArrayRecord:
        """The model to start from, adapted where the defense adapts models."""
        return ArrayRecord(self._model.state_dict())

    def summary(self) -> None:
        """Log what the wrapped strategy says of itself."""
        self._inner.summary()

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Remember the global model, which updates are relative to, and ask as the wrapped strategy does."""
        self._global = self._layout.split(self._layout.read(arrays, "the global arrays"))
        return self._inner.configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Read, refuse, aggregate; return no arrays where nothing is left, so that the model stays as it is."""
        if self._global is None:
            raise UsageError("aggregate_train comes after configure_train, which says what the updates are relative to")
        weights, buffers = self._global
        came = list(replies)
        read, refused = self._read(came)
        payloads = {node: reply.payload for node, reply in read.items()}
        # Who is not registered has no records to have counted.
        sizes = None if self._sizes is None else {node: self._sizes.get(node, 0) for node in payloads}
        spec = self._layout.spec
        reception = receive(payloads, self._defense, spec, round_index=server_round - 1, sizes=sizes, buffers=buffers)
        step = Server(weights, buffers).step(reception, self._defense, spec)
        refused |= step.refused
        examples = {node: reception.updates[node].examples for node in step.accepted}
        try:
            found = self._hand_over(server_round, came, step, refused, examples, reception.updates) if step.accepted else None
            note = step.note
        except (GradveilError, ArithmeticError, ValueError) as error:
            found, note = None, f"the weights stay as they were: {error}"
        for node, reason in refused.items():
            log.warning("round %d: node %d counts for nothing: %s", server_round, node, reason)
        accepted = tuple(step.accepted) if found else ()
        self.receipts.append(Receipt(server_round, accepted, refused, sum(examples.values()) if found else 0, note))
        if found is None:
            log.warning("round %d: %s", server_round, note or "nobody sent anything")
            return None, None
        return self._layout.write(found), MetricRecord({EXAMPLES: sum(examples.values()), "clients": len(accepted)})

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask nobody, unless it was asked for."""
        return self._inner.configure_evaluate(server_round, arrays, config, grid) if self._evaluate else []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the wrapped strategy aggregate what clients said, where they were asked."""
        return self._inner.aggregate_evaluate(server_round, replies) if self._evaluate else None

    def _read(self, came: Iterable[Message]) -> tuple[dict[int, Reply], dict[int, str]]:
        """Return the replies that hold payloads, in the order of their clients, and why the others do not."""
        read: dict[int, Reply] = {}
        refused: dict[int, str] = {}
        for message in came:
            node = message.metadata.src_node_id
            try:
                if message.has_error():
                    raise BadUpdate(f"it answered with an error: {_one_line(message.error.reason)}")
                if node in read or node in refused:
                    raise BadUpdate("it answered twice")
                read[node] = read_reply(message)
            except BadUpdate as error:
                refused[node] = str(error)
        # Sums depend on the order in the last bit. Nodes are numbered at random, so places count first, where they are named.
        order = sorted(read, key=lambda node: (read[node].place, node))
        return {node: read[node] for node in order if node not in refused}, refused

    def _hand_over(
        self,
        server_round: int,
        came: Iterable[Message],
        step: Step,
        refused: Mapping[int, str],
        examples: Mapping[int, int],
        updates: Mapping[int, Update],
    ) -> Named | None:
        """Return the model that the wrapped strategy makes of what was accepted."""
        assert self._global is not None  # `aggregate_train` has asked
        weights, buffers = self._global
        by_node = {message.metadata.src_node_id: message for message in came}
        if self._averages:
            models = {step.accepted[0]: (step.server.weights, sum(examples.values()))}
        else:
            models = {node: (sub(weights, updates[node].weights), examples[node]) for node in step.accepted}
        key = getattr(self._inner, "weighted_by_key", EXAMPLES)
        handed = [
            Message(
                RecordDict({"arrays": self._layout.write({**buffers, **model}), "metrics": MetricRecord({key: count})}),
                metadata=by_node[node].metadata,
            )
            for node, (model, count) in models.items()
        ]
        failed = [Message(Error(REFUSED, reason), metadata=by_node[node].metadata) for node, reason in refused.items()]
        arrays, _ = self._inner.aggregate_train(server_round, [*handed, *failed])
        if arrays is None:
            raise BadUpdate("the wrapped strategy returned no arrays")
        # Running statistics are averaged by us: no optimiser or median of the server's is made for them.
        return {**self._layout.as_returned(arrays), **step.server.buffers}


def _one_line(said: object) -> str:
    """Return the beginning of what somebody else wrote, which may be a whole trace."""
    return " ".join(str(said).split())[:MOST_SAID]


def _averages(strategy: Strategy, defense: Defense) -> bool:
    """Return whether a strategy needs nothing but the mean; refuse one that would be wrong, or that nobody has looked at."""
    name, way = type(strategy).__name__, type(strategy).aggregate_train
    averages, compares = (way in {known.aggregate_train for known in kinds} for kinds in (AVERAGING, COMPARING))
    if not averages and not compares:
        known = ", ".join(kind.__name__ for kind in (*AVERAGING, *COMPARING))
        raise UsageError(f"{name} aggregates in a way of its own, and nobody has looked whether it fits; wrap one of {known}")
    if getattr(strategy, "train_metrics_aggr_fn", aggregate_metricrecords) is not aggregate_metricrecords:
        raise UsageError(f"{name} aggregates metrics of training by a function of its own, and protected clients send none")
    own = [(spell(part), does) for part in parts_of(defense) for hook, does in SERVER_HOOKS.items() if part.overrides(hook)]
    if compares and own:
        raise UsageError(f"{name} compares whole models of clients, and {own[0][0]} {own[0][1]}; wrap FedAvg or one of its kin")
    return averages
