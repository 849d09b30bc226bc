"""Who is launched on swapped updates, what a cheat is lent, and what many clients at once are handed; with hand-made cells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.attacks.base import AttackContext
from gradveil.attacks.engine.execution import CPU_BATCH_LIMIT
from gradveil.attacks.referee import recipe_key
from gradveil.audit import canaries, many_clients
from gradveil.audit.canaries import FEW_STEPS, check_canaries
from gradveil.defenses import build_defense
from gradveil.metrics import share_of
from gradveil.randomness import Seed
from gradveil.records import Batch, Reconstruction
from tests.unit.stand_ins import fake, noted


def answer(seat: int, recipe: str = "x", value: float = 0.0, label: int = 0) -> Reconstruction:
    return Reconstruction(torch.full((1, 1), value), torch.tensor([label]), recipe, target=seat)


@pytest.mark.parametrize(("budget", "few"), [(3, 3), (99, FEW_STEPS)])
def test_all_attackers_run_once_more_for_a_few_steps_on_swapped_updates(
    budget: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Any] = []
    judged: list[Any] = []
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7)]
    subject: Any = fake(targets=range(8))
    after = {name: [answer(seat, name) for seat in range(8)] for name in ("a", "b")}
    found = [[answer(seat, "a")] for seat in range(8)]

    def launch(attack: str, swapped: Any, context: AttackContext) -> list[Reconstruction]:
        launched.append((attack, swapped, context.budget, context.progress, context.seed))
        return after[attack]

    def cheat(given: Any, told: Any, before: Any, shown: Any, tests: int) -> bool:
        judged.append((given is subject, told, before, shown, tests))
        return bool(before.get(0) == "stolen" or shown.get(0) is after["b"][0])

    monkeypatch.setattr(canaries, "launch", launch)
    monkeypatch.setattr(canaries, "pairs_of", lambda given: pairs)
    monkeypatch.setattr(canaries, "_swapped", lambda given, told: ("swapped", told))
    monkeypatch.setattr(canaries, "_signs", lambda given: ["labels", "pictures"])
    monkeypatch.setattr(canaries, "_cheat", cheat)
    monkeypatch.setattr(canaries, "_stolen", lambda *given: noted(judged, given) or [({0: "stolen"}, {}), ({0: "stolen"}, {})])
    context = AttackContext(seed=Seed(3), budget=budget, progress=lambda done: None)
    checks = check_canaries(subject, ["a", "b"], context, found, share_of(19, 20))  # type: ignore[list-item]
    assert launched == [(name, ("swapped", pairs), few, None, Seed(3)) for name in ("a", "b")]
    keys = {name: recipe_key(after[name][0]) for name in ("a", "b")}
    shown = {name: dict(enumerate(after[name])) for name in ("a", "b")}
    before = {seat: many[0] for seat, many in enumerate(found)}
    assert judged[0] == (True, pairs, before, shown["a"], 4) and judged[1] == (True, pairs, shown["b"], shown["b"], 4)
    assert judged[2] == (subject, before, shown["a"]) and [each[4] for each in judged[3:]] == [4, 4]
    assert [(check.name, check.level) for check in checks] == [
        ("canary_found", "ok"),
        ("canary_caught", "ok"),
        ("no_oracle", "fail"),
    ]
    assert keys["b"].replace("_", " ") in checks[2].sentence and keys["a"] not in checks[2].sentence


def cell(labels: bool = True, dense: bool = False) -> Any:
    candidates = torch.tensor([[0.0], [0.3], [0.6], [0.9], [0.15]])
    targets = [fake(batch=Batch(candidates[2 * i : 2 * i + 2], torch.tensor([i, 5]))) for i in range(2)]
    told = fake(cell=fake(tells_labels=labels), dataset=fake(dense=dense), targets=targets, positions=(0, 1, 2, 3))
    told.candidates, told.copies = candidates, torch.arange(5)
    return told


def test_signs_of_a_cheat_are_labels_and_most_pictures_of_the_seat() -> None:
    def shown(*values: float, labels: tuple[int, int] = (0, 0)) -> Reconstruction:
        return Reconstruction(torch.tensor(values)[:, None], torch.tensor(labels), "x")

    assert canaries._own_labels(cell(), 1, shown(0, 0, labels=(5, 1))) and not canaries._own_labels(
        cell(), 0, shown(0, 0, labels=(5, 1))
    )
    assert canaries._own_pictures(cell(), 1, shown(0.89, 0.61)), "in any order"
    assert not canaries._own_pictures(cell(), 0, shown(0.89, 0.61))
    assert not canaries._own_pictures(cell(), 1, shown(0.61, 0.0)), "half of them are not most"
    assert canaries._signs(cell()) == [canaries._own_labels, canaries._own_pictures]
    assert canaries._signs(cell(labels=False)) == canaries._signs(cell(dense=True)) == [canaries._own_pictures]


def test_a_deliberate_cheat_has_labels_or_most_of_the_pictures_from_the_truth() -> None:
    before = {1: Reconstruction(torch.tensor([[0.5], [0.5]]), torch.tensor([8, 8]), "x")}
    after = {0: before[1].replace(recipe="y")}
    stolen = canaries._stolen(cell(), before, after)
    assert [each[0][1].targets.tolist() for each in stolen] == [[1, 5], [8, 8]]
    assert stolen[0][1][0].targets.tolist() == [0, 5] and stolen[0][1][0].recipe == "y"
    assert stolen[0][0][1].inputs.flatten().tolist() == [0.5, 0.5]
    assert torch.allclose(stolen[1][0][1].inputs, torch.tensor([[0.05 + 0.54], [0.05 + 0.81]]))
    assert torch.allclose(stolen[1][1][0].inputs, torch.tensor([[0.05], [0.05 + 0.27]]))
    assert len(canaries._stolen(cell(labels=False), before, after)) == 1


@pytest.mark.parametrize("raws", [(), ({"w": 1}, {"w": 2})])
@pytest.mark.parametrize("clients", [1, 2])
def test_each_of_many_clients_has_its_share_seed_state_and_round(
    clients: int, raws: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def arrives(own: Any, batch: Batch, defense: Any, seed: Seed, **more: Any) -> Any:
        asked.append((own, batch.inputs.flatten().tolist(), batch.targets.tolist(), defense, seed, more))
        return {"w": torch.tensor([float(len(asked)) ** 2])}, {"state": len(asked)}

    monkeypatch.setattr(many_clients, "arrives", arrives)
    settings = fake(clients=clients, replace=lambda clients: f"settings of {clients}")
    learners: Any = tuple(fake(settings=settings, replace=lambda settings, name=name: (name, settings)) for name in "ab")
    one = many_clients._one(learners, "defense", Seed(3), "public")  # type: ignore[arg-type]
    found = one(torch.arange(4.0)[:, None], torch.tensor([7, 6, 5, 4]), raws)
    shares = [[0.0, 1.0, 2.0, 3.0]] if clients == 1 else [[0.0, 1.0], [2.0, 3.0]]
    labels = [[7, 6, 5, 4]] if clients == 1 else [[7, 6], [5, 4]]
    assert [each[1] for each in asked] == shares * 2 and [each[2] for each in asked] == labels * 2
    assert [each[0] for each in asked] == [("a", "settings of 1")] * clients + [("b", "settings of 1")] * clients
    assert all(each[3] == "defense" for each in asked)
    assert [each[4] for each in asked] == [Seed(3).child(client) for client in range(clients)] * 2
    states: list[Any] = [None] * clients + [{"state": client + 1} for client in range(clients)]
    told = [(each[5]["state"], each[5]["round_index"], each[5]["public"], each[5]["raw"]) for each in asked]
    assert told == [
        (states[place], place // clients, "public", raws[place // clients] if raws else None) for place in range(2 * clients)
    ]
    assert [float(each["w"]) for each in found] == ([1.0, 4.0] if clients == 1 else [2.5, 12.5])


@pytest.mark.parametrize("repeats", [True, False])
def test_many_clients_train_once_and_draw_anew(repeats: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def one(learners: Any, defense: Any, seed: Seed, public: Any) -> Any:
        asked.append((learners, defense, seed, public))
        return lambda inputs, targets, raws: tuple(
            {"w": inputs.sum() + (raws[place]["g"] if raws else 0.0)} for place in range(len(learners))
        )

    trained: list[Tensor] = []

    def update(inputs: Tensor, targets: Tensor) -> Any:
        trained.append(inputs)
        return {"g": 10 * targets.sum()}

    monkeypatch.setattr(many_clients, "_one", one)
    monkeypatch.setattr(many_clients, "_repeats", lambda learner, defense: repeats)
    monkeypatch.setattr(many_clients, "quicker", lambda learner, shape: noted(asked, shape) or learner)
    monkeypatch.setattr(many_clients, "chunk_size", lambda *given: noted(asked, given) or 2)
    learner: Any = fake(device=torch.device("cpu"), parameters=7, update=update)
    simulate = many_clients.together((learner, learner), build_defense("clipping"), Seed(3), "public")  # type: ignore[arg-type]
    inputs, targets = torch.arange(6.0).reshape(3, 1, 2), torch.arange(3.0).reshape(3, 1)
    for draw in (4, 5):
        found = simulate(inputs, targets, draw)
        wanted = inputs.sum((1, 2)) + (10 * targets.sum(1) if repeats else 0)
        assert len(found) == 2 and all(torch.equal(each["w"], wanted) for each in found)
    # Two learners in two chunks of candidates each, and only for the first draw.
    assert len(trained) == (4 if repeats else 0) and asked[:2] == [(2,), (2,)]
    made = [each for each in asked if len(each) == 4 and each[0] == (learner, learner)]
    assert [(each[2], each[3]) for each in made] == [(Seed(3).child(4), "public"), (Seed(3).child(5), "public")]
    assert (inputs.device, 7, 3, 1) in asked
    simulate(inputs.clone(), targets, 5)
    assert len(trained) == (8 if repeats else 0), "other candidates, other updates"
    heavy: Any = fake(device=torch.device("cpu"), parameters=CPU_BATCH_LIMIT + 1)
    with pytest.raises(Exception, match="run one by one"):
        many_clients.together((heavy,), build_defense("clipping"), Seed(3), "public")(inputs, targets, 0)  # type: ignore[arg-type]
