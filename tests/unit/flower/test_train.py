"""The train function of our own: every horizontal defense in a Flower app, and the same bits as the embedded client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'gradveil[flower]'")

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import Tensor

from gradveil.client import adapt
from gradveil.client.update import horizontal_fault
from gradveil.defenses import DEFENSES, Defense
from gradveil.errors import UsageError
from gradveil.flower import Veiled, train
from gradveil.flower.replies import read_reply
from gradveil.records import Batch
from gradveil.testing.defenses_scene import at
from gradveil.wire import payload_to_bytes
from tests.unit.flower.stage import NODES, SEED, SETTINGS, Play, batch_of, built, embedded, fed, in_a_task, net, worst

__all__ = ["in_a_task"]

SAME = (
    "none",
    "svdefense",
    "censor",
    "dp_sgd",
    "soteria",
    "data_noise",
    "dgp",
    "refiner(steps=2)",
    "clipping + gaussian_noise(std=0.1)",
)


def records(context: Context) -> Batch:
    return batch_of(int(context.node_config["partition-id"]))


def play_of(defense: Defense, folder: Path, **options: Any) -> Play:
    app = ClientApp()
    app.train()(train(net(), defense, records, **{"settings": SETTINGS, "folder": folder, "seed": SEED, **options}))
    return Play.of(Veiled(fed(), net(), defense), app)


@pytest.mark.parametrize("spelling", SAME)
def test_five_rounds_give_the_weights_of_the_embedded_federation_to_the_bit(spelling: str, tmp_path: Path) -> None:
    play = play_of(built(spelling), tmp_path)
    for _ in range(5):
        play.ask()
        assert play.end().refused == {}
    assert worst(play.weights, embedded(built(spelling), rounds=5)[0]) == 0


@pytest.mark.parametrize("name", DEFENSES.names())
def test_every_defense_of_updates_runs_two_rounds_and_the_others_are_refused(name: str, tmp_path: Path) -> None:
    defense = built(name).quick()
    defense = at(defense, DEFENSES.card(name).ladder[0]).quick() if DEFENSES.card(name).ladder else defense
    fault = horizontal_fault(defense)
    if fault:
        for make in (lambda: play_of(defense, tmp_path), lambda: Veiled(fed(), net(), defense)):
            with pytest.raises(UsageError, match="vertical learning"):
                make()
        return
    play = play_of(defense, tmp_path, public=torch.rand((4, 1, 8, 8), generator=torch.Generator().manual_seed(1)))
    before = play.weights
    for _ in range(2):
        play.ask()
        assert play.end().refused == {}
    assert worst(play.weights, before) > 0


@pytest.mark.parametrize("name", [name for name in DEFENSES.names() if not horizontal_fault(built(name))])
def test_two_requests_under_one_round_differ_for_every_random_defense_and_for_no_other(name: str, tmp_path: Path) -> None:
    """What they ask for is the same but for a setting nobody reads, so what differs is what was drawn."""
    rungs = [at(built(name), setting).quick() for setting in DEFENSES.card(name).ladder] or [built(name).quick()]
    defense = next((rung for rung in rungs if rung.random), rungs[0])
    play = play_of(defense, tmp_path, seed=None, public=torch.rand((4, 1, 8, 8), generator=torch.Generator().manual_seed(1)))
    asked = []
    for extra in (1, 2):
        play.round = 0
        sent = {reply.metadata.src_node_id: payload_to_bytes(read_reply(reply).payload) for reply in play.ask(extra=extra)}
        asked.append(sent)
    assert {asked[0][node] != asked[1][node] for node in NODES} == {defense.random}


def test_the_first_model_is_adapted_where_the_defense_adapts_models() -> None:
    with torch.random.fork_rng(devices=[]):
        expected = adapt(built("precode"), net()).model.state_dict()
    assert set(Veiled(fed(), net(), "precode").initial_arrays) == set(expected) != set(net().state_dict())


def test_pairs_of_a_data_loader_are_as_good_as_a_batch(tmp_path: Path) -> None:
    def pairs(context: Context) -> list[tuple[Tensor, Tensor]]:
        batch = records(context)
        return [(batch.inputs[:3], batch.targets[:3]), (batch.inputs[3:], batch.targets[3:])]

    options: dict[str, Any] = {"settings": SETTINGS, "folder": tmp_path, "seed": SEED}
    app = ClientApp()
    app.train()(train(net(), "none", pairs, **options))
    play = Play.of(Veiled(fed(), net(), "none"), app)
    play.ask()
    play.end()
    assert worst(play.weights, embedded(built("none"), rounds=1)[0]) == 0


def test_what_cannot_be_carried_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"needs public inputs.*give them as `public`"):
        train(net(), "invl_gnp(centres='public')", records)
    play = play_of(built("none"), tmp_path)
    assert all("no proximal term" in reply.error.reason for reply in play.ask(**{"proximal-mu": 0.1}))
    app = ClientApp()
    app.train()(train(net(), "none", lambda context: [], folder=tmp_path / "empty"))
    assert all("no records" in reply.error.reason for reply in Play.of(Veiled(fed(), net(), "none"), app).ask())
