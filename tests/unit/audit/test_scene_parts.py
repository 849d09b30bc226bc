"""Who is handed what on the stage of an audit: clients their share of a batch, attackers the client on data of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gradveil.audit import scene
from gradveil.audit.materials import Materials
from gradveil.audit.scene import PROBED, PUBLIC, Subject, build_learner, build_subject
from gradveil.audit.state import order_of_records
from gradveil.data import public_images
from gradveil.defenses import build_defense
from gradveil.defenses.base import MEASURED
from gradveil.errors import UsageError
from gradveil.randomness import Seed
from gradveil.records import Batch, Knowledge, Update
from tests.unit.audit.small import CELL, people
from tests.unit.stand_ins import fake

HERE = CELL.replace(records=8, batch_size=2, clients=2, seed=5, model="mlp(hidden=4)", learning_rate=0.5)


def test_every_client_sends_its_share_every_round_with_its_own_seed_and_state(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def send(learner: Any, share: Batch, defense: Any, seed: Seed, **more: Any) -> Any:
        asked.append((learner, share, defense, seed, more))
        number = len(asked)
        update = Update(
            {"w": torch.tensor([float(number**2)])}, 2, 0, buffers={"seen": torch.tensor(number**2, dtype=torch.int32)}
        )
        state = {"measured/x": torch.tensor(float(number)), "kept": torch.tensor(9.0)}
        return fake(
            payload=f"payload {number}", update=update, state=state, trained_batch=share.replace(inputs=share.inputs + number)
        )

    monkeypatch.setattr(scene, "send", send)
    settings = fake(clients=2, replace=lambda clients: f"settings of {clients}")
    learners: Any = tuple(
        fake(settings=settings, replace=lambda settings, name=name: (name, settings)) for name in ("one", "two")
    )
    batch = Batch(torch.arange(4.0)[:, None], torch.tensor([7, 6, 5, 4]), ("a", "b", "c", "d"))
    defense, public, seed = fake(), torch.ones(1), Seed(3)
    payloads: Any
    updates, payloads, trained, told = scene._send(learners, batch, defense, seed, public)
    assert [each[0] for each in asked] == [("one", "settings of 1")] * 2 + [("two", "settings of 1")] * 2
    assert [each[1].inputs.flatten().tolist() for each in asked] == [[0.0, 1.0], [2.0, 3.0]] * 2
    assert [each[1].targets.tolist() for each in asked] == [[7, 6], [5, 4]] * 2
    assert [each[1].records for each in asked] == [("a", "b"), ("c", "d")] * 2
    assert all(each[2] is defense and each[4]["public"] is public for each in asked)
    assert [each[3] for each in asked] == [seed.child(0), seed.child(1)] * 2
    assert [each[4]["round_index"] for each in asked] == [0, 0, 1, 1]
    states = [each[4]["state"] and float(each[4]["state"]["measured/x"]) for each in asked]
    assert states == [None, None, 1.0, 2.0]
    assert payloads == ("payload 1", "payload 2", "payload 3", "payload 4")
    assert trained.flatten().tolist() == [1.0, 2.0, 4.0, 5.0], "those of the first round"
    assert [(float(each.weights["w"]), each.examples, each.round) for each in updates] == [(2.5, 4, 0), (12.5, 4, 1)]
    assert [(each.buffers["seen"].dtype, int(each.buffers["seen"])) for each in updates] == [(torch.int32, 2), (torch.int32, 12)]
    assert told == {}


@pytest.mark.parametrize("name", ["x", "measured/x", "part/x"])
def test_what_a_defense_measured_is_averaged_over_clients_and_the_rest_is_not_told(name: str) -> None:
    own = f"{name.rpartition('/')[0]}/{MEASURED}y".lstrip("/")
    states: Any = [{own: torch.tensor(1.0), "kept": torch.tensor(5.0)}, {own: torch.tensor(4.0)}, {}]
    assert scene._measured(states) == {own: 2.5}


def subject(**changes: Any) -> Subject:
    return build_subject(HERE.replace(**changes), people(), changes.pop("rehearsals", 0))


@pytest.fixture(scope="module")
def noisy() -> Subject:
    return subject(defense="clipping + gaussian_noise(std=0.01)", known_labels=True, steps=7, execution="looped")


def test_an_attacker_works_with_the_cell_s_seed_budget_and_execution(noisy: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(done: int) -> None: ...

    context = noisy.context(99, told)
    assert (context.seed, context.budget, context.execution) == (Seed(5).child("attacker"), 7, "looped")
    assert context.progress is told and context.random_defense and context.public is noisy.prior
    assert context.observe == noisy.observe and context.simulate == noisy._simulate
    assert context.simulate_many is noisy._simulate_many and context.own is not None
    free = subject(defense="clipping").context(99)
    assert (free.budget, free.execution, free.progress, free.random_defense) == (99, "auto", None, False)
    assert free.simulate is not None and free.simulate_many is not None and free.own is not None
    idle = subject().context(99)
    assert (idle.simulate, idle.simulate_many, idle.own, idle.random_defense) == (None, None, None, False)
    seen = noisy.targets[0].observation
    blind = seen.replace(threat=dataclasses.replace(seen.threat, knows=seen.threat.knows - {Knowledge.PUBLIC_DATA}))
    assert (
        dataclasses.replace(noisy, targets=(dataclasses.replace(noisy.targets[0], observation=blind),)).context(1).public is None
    )


def test_inputs_of_the_attacker_s_own_have_the_shape_of_an_update_and_a_seed_of_their_own(noisy: Subject) -> None:
    inputs, labels = noisy._own()
    images = public_images((1, 6, 6), PROBED * 4, Seed(5).child("probe"))
    assert torch.equal(inputs.flatten(0, 1), images) and inputs.shape == (PROBED, 4, 1, 6, 6)
    assert labels.flatten().tolist() == [place % 5 for place in range(PROBED * 4)]


def test_the_client_is_run_on_the_attacker_s_data_as_on_its_own(noisy: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def noting(learners: Any, batch: Batch, defense: Any, seed: Seed, public: Any) -> Any:
        asked.append((learners, batch.inputs, batch.targets, defense, seed, public))
        return (Update({"w": torch.ones(1)}, 4), Update({"w": torch.zeros(1)}, 4)), ("sent",), None, {}

    monkeypatch.setattr(scene, "_send", noting)
    inputs, targets, seen = torch.rand(4, 1, 6, 6), torch.arange(4), noisy.targets[0].observation
    found = noisy.observe(inputs, targets, 3)
    assert [float(each.weights["w"]) for each in found.updates] == [1.0, 0.0] and found.payloads == (), "of an aggregate"
    assert found.labels is targets and found.learners is seen.learners
    assert [float(each["w"]) for each in noisy._simulate(inputs, targets, 3)] == [1.0, 0.0]
    assert [each[4] for each in asked] == [Seed(5).child("observed", 3), Seed(5).child("simulated", 3)]
    assert asked[0][3] is noisy.defense and asked[1][3] == noisy.defense.quick()
    for learners, own, labels, _, _, public in asked:
        assert learners is seen.learners and own is inputs and labels is targets and public is noisy.public
    alone = subject(clients=1)
    sent: Any = alone.observe(inputs, targets, 0)
    assert sent.payloads == ("sent",) and sent.labels is None


def test_many_simulations_share_the_client_of_one(noisy: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene, "together", lambda *given: given)
    fresh: Any = dataclasses.replace(noisy)._simulate_many
    assert fresh == (noisy.targets[0].observation.learners, noisy.defense.quick(), Seed(5).child("simulated"), noisy.public)


def test_a_subject_holds_the_records_of_its_order() -> None:
    made, order = subject(known_labels=True, state="trained(steps=1)"), order_of_records(HERE, people())
    assert made.cell.seed == 5 and made.dataset is people() and made.indices == tuple(order[:8]) and made.pool == tuple(order)
    assert made.positions == tuple(range(8)) and made.seen.attacked and made.seen.rows == tuple(order)
    assert torch.equal(made.candidates, people().inputs[order]) and torch.equal(made.candidate_labels, people().targets[order])
    assert torch.equal(made.public, public_images((1, 6, 6), PUBLIC, Seed(5).child("public")))
    assert [each.batch.records for each in made.targets] == [
        tuple(f"record {row}" for row in order[start : start + 4]) for start in (0, 4)
    ]
    for target in made.targets:
        seen = target.observation
        assert (seen.examples, seen.classes, seen.input_shape, seen.payloads) == (4, 5, (1, 6, 6), ())
        assert seen.labels is not None and torch.equal(seen.labels, target.batch.targets) and seen.public is made.public
        assert len(target.sent) == 2 and seen.threat.told[0] == made.seen.sentence and "learns from" in seen.threat.told[-1]
    with pytest.raises(UsageError, match="needs 44 records and 'people' has 40; lower records"):
        subject(records=41)
    assert len(subject(records=40).targets) == 10


def test_candidates_are_filled_up_to_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene, "CANDIDATES", 11)
    order = order_of_records(HERE, people())
    assert subject().pool == tuple(order[:11]) and subject(records=16).pool == tuple(order[:16])


def test_an_attacker_rehearses_as_often_as_asked_on_public_images_with_drawn_labels() -> None:
    made = build_subject(HERE.replace(defense="gaussian_noise(std=0.01)"), people(), 3)
    seed = Seed(5).child("rehearsal")
    images = public_images((1, 6, 6), 12, seed)
    labels = torch.randint(5, (12,), generator=seed.generator("labels"))
    assert len(made.rehearsals) == 3 and subject().rehearsals == ()
    for place, own in enumerate(made.rehearsals):
        assert torch.equal(own.batch.inputs, images[4 * place : 4 * place + 4])
        assert torch.equal(own.batch.targets, labels[4 * place : 4 * place + 4])
    sent = [("client", place, each) for place, each in enumerate(made.targets)]
    sent += [("rehearsal", place, each) for place, each in enumerate(made.rehearsals)]
    for kind, place, each in sent:
        seed = Seed(5).child(kind, place)
        (again,), *_ = scene._send(each.observation.learners, each.batch, made.defense, seed, made.public)
        assert all(torch.equal(value, each.observation.update.weights[name]) for name, value in again.weights.items())


@pytest.mark.parametrize("changes", [{}, {"local_steps": 2}], ids=["gradient", "weights"])
def test_between_rounds_the_server_steps_along_the_mean_of_all_updates(changes: dict[str, Any]) -> None:
    made = subject(rounds=3, defense="gaussian_noise(std=0.1)", **changes)
    learners = made.targets[0].observation.learners
    assert len(learners) == 3 and all(each.settings.clients == 2 for each in learners)
    rate = 1.0 if changes else 0.5
    for number in (0, 1):
        for name, value in learners[number].weights.items():
            mean = torch.stack([each.observation.updates[number].weights[name] for each in made.targets]).mean(0)
            assert torch.allclose(learners[number + 1].weights[name], value - rate * mean, atol=1e-6), name


class Noted(Materials):
    """Notes which model is asked for."""

    def model(self, spelling: str, **settings: Any) -> torch.nn.Module:
        self.asked = (spelling, settings)
        return super().model(spelling, **settings)


def test_a_learner_is_built_of_the_cell_s_model_loss_and_training() -> None:
    noted = Noted()
    learner = build_learner(HERE, people(), build_defense("none"), noted)
    assert noted.asked == (
        "mlp(hidden=4)",
        {"input_shape": (1, 6, 6), "classes": 5, "seed": Seed(5).child("model"), "weights": None, "dense": False},
    )
    assert learner.settings == HERE.training().replace(clients=1) and learner.settings.learning_rate == 0.5
    again = build_learner(HERE, people(), build_defense("none"))
    assert all(torch.equal(value, learner.weights[name]) for name, value in again.weights.items())


@pytest.mark.parametrize(
    ("changes", "size"), [({}, (1, 2)), ({"local_steps": 3}, (3, 2)), ({"local_epochs": 2, "minibatch": 1}, (4, 2))]
)
def test_an_adapted_model_s_noise_is_as_large_as_its_steps_and_records(changes: dict[str, Any], size: tuple[int, int]) -> None:
    learner = build_learner(HERE.replace(**changes), people(), build_defense("precode"))
    assert learner.noise and all(tuple(value.shape[:2]) == size for value in learner.noise.values())
    assert all(value.stride()[0] == 0 for value in learner.noise.values()), "only the shape is read"


NORMED = {"model": "convnet(width=1, norm='batch')", "clients": 1}


@pytest.mark.parametrize(
    ("changes", "told", "known"),
    [
        ({}, "The model has no BatchNorm", False),
        ({**NORMED, "bn_statistics": True, "batch_norm": "train"}, "Uploads carry the running statistics", True),
        ({**NORMED, "bn_statistics": False, "batch_norm": "train"}, "Uploads are taken to carry no BatchNorm", False),
        ({**NORMED, "bn_statistics": False, "batch_norm": "eval"}, "Clients train with fixed BatchNorm", False),
    ],
)
def test_what_batch_norm_gives_away_is_told(changes: dict[str, Any], told: str, known: bool) -> None:
    cell = HERE.replace(**changes)
    learner = build_learner(cell, people(), build_defense("none"))
    found = scene._threat(cell, learner)
    assert found.batch_norm.startswith(told) and (Knowledge.BN_STATISTICS in found.knows) == known
    assert bool(learner.running) == known and (found.clients, found.rounds) == (cell.clients, 1)


def test_masks_are_attacked_only_where_they_are_known() -> None:
    masks: Any = fake(dense=True, name="segments")
    with pytest.raises(UsageError, match="'segments' has masks"):
        scene.check_masks(masks, False)
    scene.check_masks(masks, True)
    scene.check_masks(people(), False)
