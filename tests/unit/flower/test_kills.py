"""A node that dies while it answers: before the answer is on its disk it has missed the round, after it nothing happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'gradveil[flower]'")

from flwr.app import ConfigRecord, Message
from flwr.clientapp import ClientApp

from gradveil.client import diary
from gradveil.flower import Veiled, train
from gradveil.storage.files import write_whole
from gradveil.tensors import Named
from tests.unit.flower.stage import NODES, SEED, SETTINGS, Grid, Play, batch_of, fed, in_a_task, net, worst

__all__ = ["in_a_task"]

STATEFUL = "dgp"
"""It adds what it held back to the next update, so a round that is counted twice or forgotten changes all that follow."""
VICTIM, ROUNDS, WRITES = 655, 4, 4
"""Writes of one answer: that it will be counted, its payload, the state after it, and that both are there."""
Ask = Callable[[Play, Message], Message | None]


class Killed(BaseException):
    """Ends a process as a signal does: nothing that catches exceptions sees it."""


def ordinary(play: Play, message: Message) -> Message | None:
    return play.app(message, play.contexts[message.metadata.dst_node_id])


def missed(play: Play, message: Message) -> Message | None:
    return None


def run(folder: Path, ask: Ask) -> Named:
    """Play some rounds, in the second of which the victim is asked in another way; return the weights."""
    app = ClientApp()
    place = lambda context: batch_of(int(context.node_config["partition-id"]))  # noqa: E731
    app.train()(train(net(), STATEFUL, place, settings=SETTINGS, folder=folder, seed=SEED))
    play = Play.of(Veiled(fed(), net(), STATEFUL), app)
    for index in range(ROUNDS):
        play.round += 1
        asked = play.strategy.configure_train(play.round, play.arrays, ConfigRecord(), Grid())
        ways = [(ask if index == 1 and m.metadata.dst_node_id == VICTIM else ordinary, m) for m in asked]
        play.end([reply for way, m in ways if (reply := way(play, m)) is not None])
    return play.weights


def killed_at(point: int, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return a way of asking in which the node dies before a write of its answer, or after the last, and is asked again."""

    def ask(play: Play, message: Message) -> Message | None:
        count = [0]

        def counted(*given: Any, **more: Any) -> None:
            if count[0] == point:
                raise Killed
            write_whole(*given, **more)
            count[0] += 1
            if count[0] == WRITES == point:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(diary, "write_whole", counted)
            with pytest.raises(Killed):
                ordinary(play, message)
        return ordinary(play, message) if point == WRITES else None

    return ask


@pytest.mark.parametrize("point", range(WRITES + 1))
def test_a_kill_at_any_write_is_a_missed_round_or_none(point: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, without = run(tmp_path / "whole", ordinary), run(tmp_path / "without", missed)
    assert worst(whole, without) > 0 and set(NODES) > {VICTIM}
    assert list((tmp_path / "whole").rglob("state-*")), "the defense remembers something"
    found = run(tmp_path / "killed", killed_at(point, monkeypatch))
    assert worst(found, whole if point == WRITES else without) == 0


def test_a_node_killed_before_it_wrote_may_be_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(play: Play, message: Message) -> Message | None:
        killed_at(1, monkeypatch)(play, message)
        return ordinary(play, message)

    assert worst(run(tmp_path / "again", again), run(tmp_path / "whole", ordinary)) == 0
