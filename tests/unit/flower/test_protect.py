"""A protected Flower app, called directly with Flower's own messages: what leaves, and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'gradveil[flower]'")

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from gradveil.client.diary import Diary
from gradveil.defenses import DEFENSES
from gradveil.errors import UsageError
from gradveil.flower import Veiled, protect, train
from gradveil.flower.replies import read_reply
from gradveil.wire import payload_to_bytes
from tests.unit.flower.stage import (
    NODES,
    RUN,
    Net,
    Play,
    batch_of,
    built,
    embedded,
    fed,
    in_a_task,
    net,
    protected,
    worst,
)

__all__ = ["in_a_task"]

SPELLINGS = (
    *("none", "svdefense", "top_k(keep=0.2)", "quantisation", "pfgd"),
    *("clipping(bound=0.1) + gaussian_noise(std=0.01)", "percentile_noise"),
)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_payloads_and_weights_are_those_of_the_embedded_federation_to_the_bit(spelling: str, tmp_path: Path) -> None:
    weights, sent = embedded(built(spelling), rounds=5)
    play = Play.of(Veiled(fed(), net(), spelling), protected(spelling, tmp_path))
    for results in sent:
        for reply in play.ask():
            place = NODES[reply.metadata.src_node_id]
            assert payload_to_bytes(read_reply(reply).payload) == payload_to_bytes(results[place].payload)
        assert play.end().accepted == tuple(NODES)
    assert worst(play.weights, weights) == 0
    assert worst(play.weights, dict(net().named_parameters())) > 1e-3


def texts(message: Message) -> str:
    return str(message.error.reason)


def test_nothing_leaves_but_payload_count_and_head(tmp_path: Path) -> None:
    for reply in Play.of(Veiled(fed(), net(), "svdefense"), protected("svdefense", tmp_path)).ask():
        assert set(reply.content) == {"arrays", "metrics", "gradveil"}
        assert dict(reply.content["metrics"]) == {"num-examples": len(batch_of(NODES[reply.metadata.src_node_id]))}
        assert set(reply.content["gradveil"]) == {"head", "place"}
        names = {name.partition("::")[0] for name in reply.content["arrays"]}
        assert names <= {"weights", "left", "sigma", "right", "scale", "entropy"}


@pytest.mark.parametrize("spelling", ["gaussian_noise(std=0.1)", "laplace_noise", "entry_dropout", "quantisation(mode='qsgd')"])
def test_two_requests_under_one_round_get_fresh_noise_and_the_same_request_the_same_bytes(spelling: str, tmp_path: Path) -> None:
    app = protected(spelling, tmp_path, seed=None)
    play = Play.of(Veiled(fed(), net(), spelling), app)
    first = [payload_to_bytes(read_reply(reply).payload) for reply in play.ask(extra=1)]
    again = [payload_to_bytes(read_reply(app(m, play.contexts[m.metadata.dst_node_id])).payload) for m in play.asked]
    assert again == first
    play.round -= 1
    other = [payload_to_bytes(read_reply(reply).payload) for reply in play.ask(extra=2)]
    assert not set(other) & set(first)
    for node in NODES:
        assert Diary(tmp_path, run=str(RUN), node=str(node)).released == 2


def test_a_spent_budget_ends_in_an_error_without_arrays(tmp_path: Path) -> None:
    play = Play.of(Veiled(fed(), net(), "none"), protected("none", tmp_path, most=1))
    play.ask()
    assert len(play.end().accepted) == 3
    assert all(
        reply.has_error() and not reply.has_content() and "all that its budget allows" in texts(reply) for reply in play.ask()
    )
    before = play.weights
    receipt = play.end()
    assert receipt.accepted == () and set(receipt.refused) == set(NODES) and worst(play.weights, before) == 0


def run_by(mod_or_train: Any, message: Message, context: Context) -> Message:
    app = ClientApp()
    app.train(mods=[protect(net(), "none", folder=mod_or_train[0])])(mod_or_train[1])
    return app(message, context)


def with_content(content: Any) -> Any:
    return lambda message, context: Message(RecordDict(content(message)), reply_to=message)


def raising(message: Message, context: Context) -> Message:
    raise RuntimeError("patient 17 has a rash")


BAD_APPS = {
    "raises": (raising, "the client's app raised RuntimeError"),
    "no metrics": (with_content(lambda m: {"arrays": m.content["arrays"]}), "num-examples"),
    "zero examples": (with_content(lambda m: {"a": m.content["arrays"], "m": MetricRecord({"num-examples": 0})}), "num-examples"),
    "two records": (
        with_content(lambda m: {"a": m.content["arrays"], "b": m.content["arrays"], "m": MetricRecord({"num-examples": 2})}),
        "one record of arrays",
    ),
    "other names": (
        with_content(lambda m: {"a": ArrayRecord({"w": Array(torch.ones(2).numpy())}), "m": MetricRecord({"num-examples": 2})}),
        "trained arrays lack",
    ),
    "nan": (
        with_content(
            lambda m: {
                "a": ArrayRecord(
                    {n: torch.full_like(v, float("nan")) for n, v in m.content["arrays"].to_torch_state_dict().items()}
                ),
                "m": MetricRecord({"num-examples": 2}),
            }
        ),
        "not finite",
    ),
    "error": (lambda message, context: Message(raising_error(), reply_to=message), "answered with an error"),
    "nothing": (lambda message, context: None, "AttributeError"),
}


def raising_error() -> Any:
    from flwr.app import Error

    return Error(0, "patient 17 has a rash")


@pytest.mark.parametrize("what", BAD_APPS)
def test_whatever_an_app_does_nothing_unprotected_leaves(what: str, tmp_path: Path) -> None:
    bad, words = BAD_APPS[what]
    play = Play.of(Veiled(fed(), net(), "none"), protected("none", tmp_path))
    message = next(iter(play.strategy.configure_train(1, play.arrays, ConfigRecord(), _Grid())))
    reply = run_by((tmp_path / "x", bad), message, play.contexts[message.metadata.dst_node_id])
    assert reply.has_error() and not reply.has_content()
    assert words in texts(reply) and "rash" not in texts(reply) and str(tmp_path) not in texts(reply)
    assert "\n" not in texts(reply)


class _Grid:
    def get_node_ids(self) -> list[int]:
        return list(NODES)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["config"].pop("server-round"), "names no round"),
        (lambda c: c["config"].update({"server-round": 0}), "names no round"),
        (lambda c: c["config"].update({"server-round": 1.0}), "names no round"),
        (lambda c: c.pop("config"), "one record of arrays and one of settings"),
        (lambda c: c.update({"more": c["arrays"]}), "one record of arrays and one of settings"),
        (lambda c: c["arrays"].pop("head.bias"), "global arrays lack"),
        (lambda c: c["arrays"].update({"head.bias": Array(torch.ones(5).numpy())}), "in the model"),
        (lambda c: c["arrays"].update({"head.bias": Array(torch.ones(4).double().numpy())}), "float64"),
        (lambda c: c["arrays"].update({"head.bias": Array("float32", (4,), "numpy.ndarray", b"pickle")}), "no header"),
        (lambda c: c["arrays"].update({"head.bias": Array("float32", (4,), "torch.pickle", b"x")}), "send 'numpy.ndarray'"),
        (lambda c: c["arrays"].update({"head.bias": Array(torch.full((4,), float("nan")).numpy())}), "not finite"),
    ],
)
def test_a_request_that_makes_no_sense_is_answered_with_one_sentence(change: Any, words: str, tmp_path: Path) -> None:
    play = Play.of(Veiled(fed(), net(), "none"), protected("none", tmp_path))
    arrays = ArrayRecord(net().state_dict())
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
    change(content)
    message = Message(content, dst_node_id=901, message_type="train")
    reply = play.app(message, play.contexts[901])
    assert reply.has_error() and words in texts(reply)
    assert not list(tmp_path.iterdir())


FROM_A_MOD = (
    *("clipping", "entry_dropout", "gaussian_noise", "laplace_noise", "mq", "none", "percentile_noise", "pfgd"),
    *("pruning", "quantisation", "svdefense", "top_k"),
)


@pytest.mark.parametrize("name", DEFENSES.names())
def test_every_defense_runs_as_a_mod_or_is_refused_naming_train(name: str, tmp_path: Path) -> None:
    defense = built(name)
    if name in FROM_A_MOD:
        play = Play.of(Veiled(fed(), net(), defense), protected(name, tmp_path))
        play.ask()
        assert play.end().refused == {} and worst(play.weights, dict(net().named_parameters())) > 0
        return
    with pytest.raises(UsageError) as refusal:
        protect(net(), defense, folder=tmp_path)
    words = str(refusal.value)
    assert "gradveil.flower.train" in words or "vertical learning" in words


def test_seeds_are_for_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GRADVEIL_UNSAFE_SEEDS")
    for make in (lambda: protect(net(), "none", seed=1), lambda: train(net(), "none", lambda context: [], seed=1)):
        with pytest.raises(UsageError, match="a real client refuses one; for tests set GRADVEIL_UNSAFE_SEEDS=1"):
            make()
    with pytest.raises(UsageError, match="most is -1"):
        protect(net(), "none", most=-1)


def test_buffers_stay_unless_they_are_asked_for_and_counters_keep_their_kind(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'norm.running_mean' is the first.*; say which"):
        protect(net(norm=True), "none")
    kept = Play.of(Veiled(fed(), net(norm=True), "none"), protected("none", tmp_path / "a", buffers=False))
    sent = Play.of(Veiled(fed(), net(norm=True), "none"), protected("none", tmp_path / "b", buffers=True))
    for index in range(3):
        for play in (kept, sent):
            play.ask()
            assert play.end().refused == {}
        assert sent.weights["norm.num_batches_tracked"].dtype == torch.int64
        assert int(sent.weights["norm.num_batches_tracked"]) == index + 1, "counted side by side, not added up"
    assert not any("buffers" in name for name in kept.replies[0].content["arrays"])
    assert int(kept.weights["norm.num_batches_tracked"]) == 0 and not kept.weights["norm.running_mean"].any()
    assert sent.weights["norm.running_mean"].any()


def test_tied_weights_are_sent_once(tmp_path: Path) -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.twin = self.head

    with torch.random.fork_rng(devices=[]):
        model = Tied()
    app = ClientApp()

    @app.train(mods=[protect(model, "svdefense", folder=tmp_path)])
    def own(message: Message, context: Context) -> Message:
        state = {name: value + 1 for name, value in message.content["arrays"].to_torch_state_dict().items()}
        return Message(RecordDict({"a": ArrayRecord(state), "m": MetricRecord({"num-examples": 2})}), reply_to=message)

    play = Play.of(Veiled(fed(), model, "svdefense"), app)
    play.ask()
    assert play.end().refused == {}
    assert worst({"a": play.weights["twin.bias"]}, {"a": play.weights["head.bias"]}) == 0
    assert worst({"a": play.weights["twin.bias"]}, {"a": model.head.bias.detach() + 1}) < 1e-6
