"""The server's side: no claim is believed, one bad client costs itself only, and strategies that do not fit are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'gradveil[flower]'")

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedXgbBagging,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
)

from gradveil.defenses import DEFENSES
from gradveil.errors import BadUpdate, UsageError
from gradveil.flower import Veiled, protect
from gradveil.flower.replies import read_reply
from gradveil.tensors import Named, sub
from tests.unit.flower.stage import NODES, Play, app_with, built, embedded, fed, in_a_task, net, protected, worst

__all__ = ["in_a_task"]

BAD = 655
"""The node that misbehaves; it has the most records."""


def play_of(spelling: str, folder: Path, strategy: Any = None, **options: Any) -> Play:
    return Play.of(Veiled(strategy or fed(), net(), spelling, **options), protected(spelling, folder))


def replaced(reply: Message, **records: Any) -> Message:
    content = RecordDict({key: records.get(key, reply.content[key]) for key in reply.content})
    return Message(content, metadata=reply.metadata)


def with_head(reply: Message, change: Callable[[str], Any]) -> Message:
    head = ConfigRecord({**reply.content["gradveil"], "head": change(reply.content["gradveil"]["head"])})
    return replaced(reply, gradveil=head)


def with_array(reply: Message, value: Any) -> Message:
    arrays = ArrayRecord({**reply.content["arrays"], "weights::head.bias": value})
    return replaced(reply, arrays=arrays)


def other_scheme(reply: Message) -> Message:
    return with_head(reply, lambda head: head.replace("dense-1", "factors-1"))


def emptied(reply: Message) -> Message:
    """A reply with neither content nor error, as no constructor makes one."""
    bare = Message(RecordDict({}), metadata=reply.metadata)
    bare.__dict__["_content"] = None
    return bare


HUGE = b"\x93NUMPY\x01\x00" + (76).to_bytes(2, "little")
HUGE += b"{'descr': '<f4', 'fortran_order': False, 'shape': (9895604649984,), }".ljust(75) + b"\n"
BAD_REPLIES: dict[str, tuple[Callable[[Message], Message], str]] = {
    "an error": (
        lambda reply: Message(Error(2, "it\nbroke" + " on" * 999), metadata=reply.metadata),
        "it answered with an error: it broke",
    ),
    "nothing": (emptied, "holds nothing"),
    "another scheme": (other_scheme, "both sides must run the same defense"),
    "an old round": (lambda reply: with_head(reply, lambda head: head.replace('"round": 0', '"round": 4')), "of round 4"),
    "no head": (lambda reply: with_head(reply, lambda head: b""), "head is no text"),
    "broken head": (lambda reply: with_head(reply, lambda head: head[:-3]), "no JSON object"),
    "no examples": (
        lambda reply: with_head(reply, lambda head: head.replace('"examples": 10', '"examples": 0')),
        "claims 0 examples",
    ),
    "half of a record": (
        lambda reply: with_head(reply, lambda head: head.replace('"examples": 10', '"examples": 0.5')),
        "head is malformed",
    ),
    "36 TiB": (lambda reply: with_array(reply, Array("float32", (4,), "numpy.ndarray", HUGE)), "claims 9895604649984"),
    "objects": (lambda reply: with_array(reply, Array("object", (4,), "numpy.ndarray", b"\x80\x04")), "no header"),
    "nan": (lambda reply: with_array(reply, Array(np.full(4, np.nan, np.float32))), "not finite"),
    "huge": (lambda reply: with_array(reply, Array(np.full(4, 3e38, np.float32))), "is the most a server can work with"),
    "double": (lambda reply: with_array(reply, Array(np.ones(4))), "is torch.float64, expected torch.float32"),
    "another shape": (lambda reply: with_array(reply, Array(np.ones(5, np.float32))), "has shape (5,)"),
    "plain weights": (
        lambda reply: Message(
            RecordDict({"arrays": ArrayRecord(net().state_dict()), "metrics": MetricRecord({"num-examples": 10})}),
            metadata=reply.metadata,
        ),
        "does the client's app have `protect`?",
    ),
    "one thing more": (
        lambda reply: Message(RecordDict({**reply.content, "more": MetricRecord({"x": 1})}), metadata=reply.metadata),
        "no payload",
    ),
}


@pytest.mark.parametrize("what", BAD_REPLIES)
def test_one_bad_client_costs_its_own_contribution_only(what: str, tmp_path: Path) -> None:
    change, words = BAD_REPLIES[what]
    play = play_of("none", tmp_path)
    replies = [change(reply) if reply.metadata.src_node_id == BAD else reply for reply in play.ask()]
    receipt = play.end(replies)
    assert receipt.accepted == (901, 407) and list(receipt.refused) == [BAD] and words in receipt.refused[BAD]
    assert "\n" not in receipt.refused[BAD] and receipt.examples == 10 and receipt.note == ""
    assert worst(play.weights, embedded(built("none"), 1, places=(0, 1))[0]) == 0


def test_claims_beside_the_payload_are_not_believed(tmp_path: Path) -> None:
    play = play_of("none", tmp_path)
    lie = MetricRecord({"num-examples": 10**9})
    replies = [replaced(reply, metrics=lie) if reply.metadata.src_node_id == BAD else reply for reply in play.ask()]
    assert play.end(replies).refused == {} and worst(play.weights, embedded(built("none"), 1)[0]) == 0


def test_a_payload_that_counts_more_than_its_node_registered_is_refused(tmp_path: Path) -> None:
    play = play_of("none", tmp_path, sizes={901: 4, 407: 6, BAD: 9})
    play.ask()
    assert "claims 10 examples, but the client registered with 9" in play.end().refused[BAD]
    play = play_of("none", tmp_path / "b", sizes={901: 4, 407: 6})
    play.ask()
    assert "registered with 0" in play.end().refused[BAD], "who never registered has no records"


def test_who_answers_twice_counts_once_and_the_order_of_arrival_changes_nothing(tmp_path: Path) -> None:
    play = play_of("svdefense", tmp_path)
    replies = play.ask()
    receipt = play.end([*reversed(replies), replies[0]])
    twice = replies[0].metadata.src_node_id
    assert receipt.refused == {twice: "it answered twice"}
    others = tuple(place for node, place in NODES.items() if node != twice)
    assert worst(play.weights, embedded(built("svdefense"), 1, places=others)[0]) == 0


def test_a_round_without_any_good_reply_leaves_the_model_and_says_so(tmp_path: Path) -> None:
    play = play_of("none", tmp_path)
    before = play.weights
    play.ask()
    receipt = play.end([other_scheme(reply) for reply in play.replies])
    assert receipt.accepted == () and set(receipt.refused) == set(NODES) and "stay as they were" in receipt.note
    assert worst(play.weights, before) == 0
    assert play.end([]).note
    play.ask()
    play.end()
    assert play.strategy.receipts[-1].accepted == tuple(NODES), "the next round goes on"


def test_every_error_is_a_bad_update_whatever_the_reply_holds() -> None:
    for content in (
        {},
        {"arrays": MetricRecord({"x": 1})},
        {"gradveil": ArrayRecord({}), "arrays": ArrayRecord({}), "metrics": MetricRecord({})},
    ):
        with pytest.raises(BadUpdate):
            read_reply(Message(RecordDict(content), dst_node_id=1, message_type="train"))


def moves(strategy: Any, spelling: str, folder: Path, rounds: int = 2) -> tuple[Named, list[Named]]:
    """Return the weights after some rounds, and what the strategy itself makes of the same clients' decoded updates."""
    play = play_of(spelling, folder, strategy)
    seen = []
    for _ in range(rounds):
        before = play.weights
        play.ask()
        assert play.end().refused == {}
        seen.append(sub(before, play.weights))
    return play.weights, seen


@pytest.mark.parametrize("kind", [FedAvg, FedProx, FedAvgM, FedAdagrad, FedAdam, FedYogi])
def test_strategies_that_average_do_with_a_defense_what_they_do_without(kind: Any, tmp_path: Path) -> None:
    """Beside the same strategy on the app's own plain replies: `none` changes nothing but the last bits."""
    more = {"proximal_mu": 0.1} if kind is FedProx else {"server_momentum": 0.9} if kind is FedAvgM else {}
    play, plain = play_of("none", tmp_path, fed(kind, **more)), fed(kind, **more)
    app, arrays = app_with(), play.arrays
    for index in (1, 2, 3):
        play.ask()
        assert play.end().refused == {}
        asked = plain.configure_train(index, arrays, ConfigRecord(), _Grid())
        arrays, _ = plain.aggregate_train(index, [app(m, play.contexts[m.metadata.dst_node_id]) for m in asked])
    gap = worst(play.weights, {name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()})
    moved = worst(play.weights, dict(net().named_parameters()))
    assert moved > 0.01 and gap < 1e-6 * max(moved, 1) * (20 if kind in (FedAdam, FedYogi, FedAdagrad) else 1)


class _Grid:
    def get_node_ids(self) -> list[int]:
        return list(NODES)


@pytest.mark.parametrize("kind", [FedMedian, FedTrimmedAvg, Krum, MultiKrum, Bulyan])
def test_strategies_that_compare_clients_take_defenses_that_weigh_by_examples(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{kind.__name__} compares whole models of clients, and svdefense.* tensor by tensor"):
        Veiled(fed(kind), net(), "svdefense")
    if kind is FedMedian:
        play = play_of("none", tmp_path, fed(kind))
        local = [dict(net().named_parameters())] * 3
        play.ask()
        sent = [read_reply(reply).payload.streams["weights"] for reply in play.replies]
        play.end()
        middle = {
            name: torch.stack([(one[name] - each[name]) for one, each in zip(local, sent, strict=True)]).median(0)[0]
            for name in sent[0]
        }
        assert worst(play.weights, middle) < 1e-6


@pytest.mark.parametrize("name", [name for name in DEFENSES.names() if "correct_aggregate" in built(name).stations()])
def test_defenses_that_correct_the_mean_need_a_mean(name: str) -> None:
    with pytest.raises(UsageError, match="corrects the mean; wrap FedAvg"):
        Veiled(fed(FedMedian), net(), name)
    Veiled(fed(), net(), name)


class Own(FedAvg):
    """A strategy of somebody's own, that does anything."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        return None, None


class Chatty(FedAvg):
    """One that changes nothing about aggregation."""

    def summary(self) -> None:
        """Say nothing."""


def test_strategies_nobody_has_looked_at_are_refused() -> None:
    for strategy in (fed(Own), fed(QFedAvg, client_learning_rate=0.1), FedXgbBagging()):
        with pytest.raises(UsageError, match=r"in a way of its own, and nobody has looked whether it fits; wrap one of FedAvg"):
            Veiled(strategy, net(), "none")
    with pytest.raises(UsageError, match="wrap one of FedAvg"):
        Veiled(DifferentialPrivacyServerSideFixedClipping(fed(), 0.1, 1.0, 2), net(), "none")
    with pytest.raises(UsageError, match="by a function of its own, and protected clients send none"):
        Veiled(fed(train_metrics_aggr_fn=lambda records, key: MetricRecord()), net(), "none")
    Veiled(fed(Chatty), net(), "none")


def test_the_first_arrays_must_be_the_models(tmp_path: Path) -> None:
    strategy = Veiled(fed(), net(), "none")
    with pytest.raises(BadUpdate, match="global arrays lack"):
        strategy.configure_train(1, ArrayRecord({}), ConfigRecord(), _Grid())
    with pytest.raises(UsageError, match="comes after configure_train"):
        strategy.aggregate_train(1, [])


def test_nobody_is_asked_to_evaluate_unless_it_was_asked_for() -> None:
    quiet, loud = (Veiled(fed(fraction_evaluate=1.0), net(), "none", evaluate=told) for told in (False, True))
    arrays = quiet.initial_arrays
    assert list(quiet.configure_evaluate(1, arrays, ConfigRecord(), _Grid())) == [] and quiet.aggregate_evaluate(1, []) is None
    assert len(list(loud.configure_evaluate(1, arrays, ConfigRecord(), _Grid()))) == 3


def test_wrong_order_of_mods_fails_closed(tmp_path: Path) -> None:
    """A mod of Flower's that stands before ours finds no weights to work with; nothing unprotected leaves."""
    from flwr.clientapp.mod import LocalDpMod

    for mods, good in ((("ours", "theirs"), True), (("theirs", "ours"), False)):
        known = {
            "ours": protect(net(), "none", folder=tmp_path / str(good)),
            "theirs": LocalDpMod(1e9, 1e-9, 1e9, 0.1),
        }
        play = Play.of(Veiled(fed(), net(), "none"), app_with(*(known[name] for name in mods)))
        play.ask()
        assert bool(play.end().accepted) == good
