"""The regression piece by piece: what it sends and in which draw, what it hands to the fit, and each number of the fit."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from gradveil.attacks import kernel_regression as module
from gradveil.attacks.base import AttackContext, Cost, PublicRecords
from gradveil.attacks.engine import public_batches
from gradveil.attacks.kernel_regression import FIRST_DRAW, LEAST, KernelRegression
from gradveil.errors import UsageError
from gradveil.learning import EmbeddingLearner
from gradveil.learning.losses import cross_entropy
from gradveil.models import build_model, split_model
from gradveil.randomness import Seed
from gradveil.records import Knowledge, Observation, ThreatModel
from gradveil.tensors import Named
from tests.unit.attacks.scenes import CLASSES, SHAPE, drawn, make_batch, make_context, make_learner, observe, public

MLP = "mlp(hidden=2, activation='sigmoid')"


def context(**changes: Any) -> AttackContext:
    return make_context(**({"public": public()} | changes))


def seen(size: int = 1, **changes: Any) -> Observation:
    return observe(make_learner(MLP, **changes), make_batch(size))


def embedded(size: int) -> Observation:
    model = build_model("lenet", input_shape=SHAPE, classes=CLASSES, seed=Seed(0))
    bottom = EmbeddingLearner.of_bottom(split_model(model, "cut1")[0], cross_entropy).to(torch.float64)
    base = seen(size)
    update = base.update.replace(weights=bottom.update(make_batch(size).inputs, torch.zeros(size, dtype=torch.int64)))
    return base.replace(learners=(bottom,), updates=(update,))


def sending(draws: list[int], *learners: Any) -> Any:
    """Return a client's code that adds its draw to every entry, and notes it."""

    def simulate(inputs: Tensor, targets: Tensor, draw: int) -> tuple[Named, ...]:
        draws.append(draw)
        return tuple({n: v + draw - FIRST_DRAW for n, v in one.update(inputs, targets).items()} for one in learners)

    return simulate


@pytest.mark.parametrize("random", [False, True])
def test_releases_are_rows_of_their_record_and_drawn_from_where_their_piece_begins(
    random: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    observation = seen()
    learner, draws = observation.learner, list[int]()
    second = learner.replace(weights={n: 2 * v for n, v in learner.weights.items()})
    observation = observation.replace(learners=(learner, second), updates=(observation.update,) * 2)
    # Two rounds: three records of both are as much as is held at once.
    monkeypatch.setattr(module, "MOST_ENTRIES", 7 * learner.parameters)
    where = context(simulate=sending(draws, learner, second), random_defense=random)
    inputs, targets = drawn(7, 1, *SHAPE), torch.arange(7)[:, None] % CLASSES
    begins = list(range(7)) if random else [0, 0, 0, 3, 3, 3, 6]
    for stance, moved in (("simulated", begins), ("plain", [0] * 7)):
        client = module._Client(KernelRegression(stance=stance), observation, where, 20.0)
        found = client._send(inputs, targets)
        for row, more in enumerate(moved):
            sent = [v for one in (learner, second) for v in one.update(inputs[row], targets[row]).values()]
            assert torch.allclose(found[row], torch.cat([v.flatten() for v in sent]) + more)
    assert draws == [FIRST_DRAW + begin for begin in begins]


def test_one_release_is_timed_once_for_a_stance(monkeypatch: pytest.MonkeyPatch) -> None:
    observation, draws = seen(), list[int]()
    timed: list[int] = []

    def seconds_of(run: Any) -> float:
        assert run(4).shape == (1, sum(v.numel() for v in observation.update.weights.values()))
        timed.append(1)
        return 0.25

    monkeypatch.setattr(module, "seconds_of", seconds_of)
    where = context(simulate=sending(draws, observation.learner))
    for stance in ("plain", "simulated", "simulated"):
        client = module._Client(KernelRegression(stance=stance), observation, where, 20.0)
        assert client._cost(torch.tensor([1])) == 0.25
    assert len(timed) == 2 and draws == [FIRST_DRAW + 4]


@pytest.mark.parametrize(
    ("stance", "random", "seconds", "batches"),
    [("plain", True, 0.0, 40), ("plain", False, 1.0, 20), ("simulated", False, 0.0, 40), ("simulated", True, 0.0, 16)],
)
def test_the_fit_gets_every_release_with_its_picture_and_its_fold(
    stance: str, random: bool, seconds: float, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a random client every record is sent three times, and so there are a third as many, but never too few."""
    observation, given = seen(), list[Any]()
    monkeypatch.setattr(module, "fit_regression", lambda *all_of_it: given.append(all_of_it))
    monkeypatch.setattr(module, "seconds_of", lambda run: seconds)
    where = context(simulate=sending([], observation.learner), random_defense=random)
    attack = KernelRegression(records=40, draws=3, seconds=25.0, stance=stance)
    client = module._Client(attack, observation, where, attack.seconds)
    client._fit(torch.tensor([2]))
    ((features, pictures, folds, parts),) = given
    expected = public_batches.public_batches(public(), torch.tensor([2]), 1, batches, where.seed.child("kernel regression"))
    draws = 3 if stance == "simulated" and random else 1
    assert len(expected) == batches and parts == client.sketcher.parts
    assert torch.equal(pictures, expected.inputs.repeat_interleave(draws, 0).flatten(1))
    assert torch.equal(folds, expected.folds.repeat_interleave(draws))
    sent = [observation.learner.update(x, torch.tensor([2])) for x in expected.inputs for _ in range(draws)]
    extra = torch.arange(len(sent))[:, None] if draws == 3 else torch.zeros(len(sent), 1)
    assert torch.allclose(features, torch.stack([torch.cat([v.flatten() for v in one.values()]) for one in sent]) + extra)


def test_equal_labels_are_ordered_by_brightness_and_places_of_an_embedding_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []
    monkeypatch.setattr(module, "fit_regression", lambda features, pictures, *rest: given.append(pictures))
    labels, where = torch.tensor([1, 1]), context()
    client = module._Client(KernelRegression(records=20), seen(2), where, 20.0)
    client._fit(labels)
    client._fit(None)
    module._Client(KernelRegression(records=20), embedded(2), where, 20.0)._fit(labels)
    seed = where.seed.child("kernel regression")
    told, free = (public_batches.public_batches(public(), each, 2, 20, seed).inputs for each in (labels, None))
    bright = told.flatten(2).mean(2).argsort(1)
    assert torch.equal(given[0], torch.stack([each[rank] for each, rank in zip(told, bright, strict=True)]).flatten(1))
    assert not torch.equal(given[0], told.flatten(1))
    assert torch.equal(given[1], free.flatten(1)) and torch.equal(given[2], told.flatten(1))


def test_no_more_batches_are_sent_than_may_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []
    monkeypatch.setattr(module, "fit_regression", lambda features, pictures, *rest: given.append(pictures))
    values = 2 * 2 * 8 * 8
    for most, batches in ((20, 20), (17, 17), (3, LEAST)):
        monkeypatch.setattr(module, "MOST_VALUES", most * values)
        module._Client(KernelRegression(records=30), seen(2), context(), 20.0)._fit(torch.tensor([0, 3]))
        assert given[-1].shape == (batches, values)


def test_who_differs_in_anything_that_teaches_has_a_fit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[Any] = []

    def fitted(self: Any, labels: Any) -> Any:
        fits.append(labels)
        return SimpleNamespace(entries=len(fits))

    monkeypatch.setattr(module._Client, "_fit", fitted)
    base, where = seen(2), context()
    one, other = torch.tensor([0, 1]), torch.tensor([1, 0])
    moved = base.learner.replace(weights={n: v + 1 for n, v in base.learner.weights.items()})
    faster = base.learner.replace(settings=base.learner.settings.replace(learning_rate=0.7))
    plain = KernelRegression()
    cases: list[tuple[KernelRegression, Observation, Tensor | None]] = [
        (plain, base, one),
        (plain, base, other),
        (plain, base, None),
        (plain, base.replace(learners=(moved,)), one),
        (plain, base.replace(learners=(faster,)), one),
        (plain, base.replace(examples=3), one),
        (KernelRegression(draws=2), base, one),
    ]
    for again in range(2):
        for place, (attack, observation, labels) in enumerate(cases):
            found: Any = module._Client(attack, observation, where, 20.0).fit(labels)
            assert found.entries == place + 1, again
    assert len(fits) == len(cases)
    module._Client(plain, base, dataclasses.replace(where, public=public(71)), 20.0).fit(one)
    assert len(fits) == len(cases) + 1


def test_memory_keeps_as_much_as_it_may_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 20)
    monkeypatch.setattr(module._Client, "_fit", lambda self, labels: SimpleNamespace(entries=10))
    where = context()
    client = module._Client(KernelRegression(), seen(), where, 20.0)
    for label in (0, 1):
        client.fit(torch.tensor([label]))
    assert [key[2] for key in where.memory["regressions"]] == [(0,), (1,)], "as much as may be kept"
    client.fit(torch.tensor([2]))
    assert [key[2] for key in where.memory["regressions"]] == [(1,), (2,)]


def test_an_answer_says_whose_it_is_and_how_sure() -> None:
    labels, answer, mean = torch.tensor([3, 1]), drawn(2 * 128), drawn(2 * 128, seed=1)
    fit = cast("Any", SimpleNamespace(spread=0.5, error=0.125, mean=mean))
    knowing = ThreatModel(knows=ThreatModel().knows | {Knowledge.LABELS})
    attack = KernelRegression(stance="simulated")
    for shown, told in ((seen(2), False), (seen(2).replace(labels=labels), False), (seen(2).replace(threat=knowing), False)):
        assert attack._answer(shown, 0, 0, labels, fit, answer).oracle_labels is told
    found = attack._answer(seen(2).replace(threat=knowing, labels=labels), 3, 2, labels, fit, answer)
    assert (found.recipe, found.stance, found.target, found.hypothesis) == ("kernel_regression", "simulated", 3, 2)
    assert torch.equal(found.inputs, answer.reshape(2, *SHAPE)) and torch.equal(found.targets, labels)
    assert (found.first_loss, found.best_loss, found.oracle_labels) == (1.0, 0.25, True)
    assert found.gradient_norm == pytest.approx(float((answer - mean).square().sum().sqrt()))
    silent = attack._answer(seen(2), 0, 0, labels, cast("Any", SimpleNamespace(spread=0.0, error=1e-12, mean=mean)), answer)
    assert (silent.first_loss, silent.best_loss) == (0.0, 1.0)


@pytest.mark.parametrize(("setting", "least", "less"), [("records", LEAST, LEAST - 1), ("draws", 1, 0), ("seconds", 1e-9, 0)])
def test_the_least_that_has_sense_is_taken(setting: str, least: Any, less: Any) -> None:
    assert getattr(KernelRegression(**{setting: least}), setting) == least
    with pytest.raises(UsageError, match=f"kernel_regression: {setting} is {less}"):
        KernelRegression(**{setting: less})
    assert KernelRegression().cost() == Cost(per_label=True)


def test_updates_are_answered_each_with_its_own_labels_whoever_else_is_attacked(monkeypatch: pytest.MonkeyPatch) -> None:
    plausible = {0: [[1], [4]], 1: [[4]], 2: [[0], [1], [2]]}
    batches = [make_batch(seed=seed) for seed in range(3)]
    many = [observe(make_learner(MLP), batch) for batch in batches]
    monkeypatch.setattr(
        module,
        "label_hypotheses",
        lambda shown, stance, _: (
            torch.tensor(plausible[next(i for i, each in enumerate(many) if each is shown)])
            if stance == "plain"
            else torch.tensor([[3]])
        ),
    )
    attack, done = KernelRegression(records=20), list[int]()
    together = attack.run(many, context(progress=done.append))
    assert [(each.target, each.hypothesis, int(each.targets)) for each in together] == [
        (target, place, label) for target, own in plausible.items() for place, (label,) in enumerate(own)
    ]
    assert done == [1] * 6
    for target, own in plausible.items():
        apart = attack.run([many[target]], context())
        assert len(apart) == len(own) == attack.hypotheses(many[target], context())
        for one, other in zip(apart, (each for each in together if each.target == target), strict=True):
            assert torch.allclose(one.inputs, other.inputs) and one.best_loss == other.best_loss
    assert not torch.allclose(together[1].inputs, together[2].inputs), "of one fit, and of two updates"
    simulated = dataclasses.replace(attack, stance="simulated")
    assert simulated.hypotheses(many[0], context()) == 1


def test_labels_of_an_embedding_and_of_no_classes_decide_nothing() -> None:
    assert module._told_by_labels(seen(2)) and not module._told_by_labels(seen(2).replace(classes=0))
    bottom = embedded(2)
    assert not module._told_by_labels(bottom)
    top = cast("Any", bottom.learner).replace(top=seen().learner)
    assert module._told_by_labels(bottom.replace(learners=(top,)))


def test_a_simulated_stance_asks_for_the_client_and_either_for_records() -> None:
    plain, simulated = (KernelRegression(stance=stance) for stance in ("plain", "simulated"))
    able = context(simulate=sending([]))
    assert plain.lacks(seen(), context()) is None and simulated.lacks(seen(), able) is None
    assert "no defended client" in (simulated.lacks(seen(), context()) or "")
    assert "no public records" in (simulated.lacks(seen(), dataclasses.replace(able, public=None)) or "")


def test_records_that_just_suffice_are_of_use() -> None:
    few = PublicRecords(drawn(LEAST, *SHAPE).round(), torch.zeros(LEAST), "same")  # zeros and ones: both ends are inside
    assert module._unfit(few, seen(4)) is None
    assert "at least 20" in (module._unfit(few, seen(5)) or "")
    for spoiled in (few.inputs - 0.01, few.inputs + 0.01):
        assert "scale them" in (module._unfit(dataclasses.replace(few, inputs=spoiled), seen()) or "")
