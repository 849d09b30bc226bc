"""The regression runs wherever a client does, shares what it learned, and never looks at an update under attack to learn."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.attacks import ATTACKS, AttackContext, launch, line_up, resolve
from gradveil.attacks import kernel_regression as module
from gradveil.attacks.adaptive import AUTHORLESS, STANCES
from gradveil.attacks.base import PublicRecords
from gradveil.attacks.engine.affordable import halved, seconds_of
from gradveil.attacks.engine.public_batches import FOLDS, by_brightness, public_batches
from gradveil.attacks.kernel_regression import FIRST_DRAW, LEAST, KernelRegression
from gradveil.errors import MissingKnowledge, UsageError
from gradveil.learning import EmbeddingLearner
from gradveil.learning.losses import cross_entropy
from gradveil.models import build_model, split_model
from gradveil.randomness import Seed
from gradveil.records import ORDINARY, Knowledge, Observation, Reconstruction, ThreatModel
from gradveil.tensors import Named
from tests.unit.attacks.scenes import CLASSES, SHAPE, make_batch, make_context, make_learner, observe, simulator

SMALL = KernelRegression(records=48)


def smooth(count: int, seed: int = 0) -> Tensor:
    """Return pictures with few directions, which a few dozen others teach."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn((6, *SHAPE), generator=torch.Generator().manual_seed(77), dtype=torch.float64)
    weights = torch.randn((count, 6), generator=generator, dtype=torch.float64)
    return (0.5 + 0.06 * (weights @ basis.flatten(1))).clamp(0, 1).reshape(count, *SHAPE)


def public(count: int = 100, seed: int = 5) -> PublicRecords:
    return PublicRecords(smooth(count, seed), torch.arange(count) % CLASSES, "same")


def context(**changes: Any) -> AttackContext:
    return make_context(**({"public": public()} | changes))


def seen(size: int = 1, defense: str = "none", *, seed: int = 9, label: int | None = None, **changes: Any) -> Observation:
    settings = changes.pop("settings", {})
    batch = make_batch(size, seed=seed).replace(inputs=smooth(size, seed))
    if label is not None:
        batch = batch.replace(targets=torch.full((size,), label))
    return observe(make_learner("mlp(hidden=24, activation='sigmoid')", **settings), batch, defense, **changes)


def error(found: Reconstruction, size: int = 1, seed: int = 9) -> float:
    """Return the squared error over that of a grey picture, examples in whatever order."""
    truth = smooth(size, seed)
    apart = (found.inputs[:, None] - truth[None]).square().flatten(2).mean(2)
    return float(apart.min(0).values.mean() / (truth - 0.5).square().mean())


def test_without_a_defense_the_picture_comes_back() -> None:
    (found,) = launch(SMALL, [seen()], context())
    assert error(found) < 0.02
    assert found.stance == "plain" and found.steps == 0 and not found.oracle_labels
    assert found.first_loss == 1 and 0 < found.best_loss < 0.05 and found.gradient_norm > 0


@pytest.mark.parametrize(
    "defense", ["pruning(rate=0.7)", "quantisation(mode='sign')", "gaussian_noise(std=0.0001)", "clipping(bound=0.01)"]
)
def test_it_reads_defended_updates_without_their_authors(defense: str) -> None:
    learner = make_learner("mlp(hidden=24, activation='sigmoid')")
    where = context(simulate=simulator((learner,), defense), random_defense="noise" in defense)
    attack = dataclasses.replace(SMALL, stance="simulated")
    (found,) = launch(attack, [seen(defense=defense)], where)
    (plain,) = launch(SMALL, [seen(defense=defense)], where)
    assert error(found) < (0.6 if "sign" in defense else 0.2)
    assert found.stance == "simulated" and ("noise" in defense or error(found) < error(plain))


@pytest.mark.parametrize(
    "settings",
    [{"shares": "weights", "local_steps": 3, "learning_rate": 0.1}, {"clients": 2}, {}],
    ids=["steps", "clients", "batch"],
)
def test_it_reads_batches_steps_and_sums(settings: dict[str, Any]) -> None:
    attack = KernelRegression(records=100)
    (found,) = launch(attack, [seen(2, settings=settings)], context(public=public(200)))[:1]
    assert found.inputs.shape == (2, *SHAPE) and error(found, 2) < 0.4
    assert found.targets.tolist() == sorted(found.targets.tolist())


def test_rounds_are_joined() -> None:
    """Two rounds under fresh noise tell more than one of them."""
    learner = make_learner("mlp(hidden=24, activation='sigmoid')")
    defense = "gaussian_noise(std=0.003)"
    attack = KernelRegression(records=100, stance="simulated")
    errors = []
    for rounds in ((), (learner,) * 3):
        learners = (learner, *rounds)
        where = context(simulate=simulator(learners, defense), random_defense=True)
        per_seed = [launch(attack, [seen(defense=defense, rounds=rounds, seed=seed, label=1)], where)[0] for seed in range(9, 13)]
        errors.append(sum(error(each, seed=seed) for seed, each in enumerate(per_seed, 9)))
    assert errors[1] < 0.9 * errors[0]


def test_embeddings_are_read_without_labels() -> None:
    model = build_model("lenet", input_shape=SHAPE, classes=CLASSES, seed=Seed(0))
    bottom = EmbeddingLearner.of_bottom(split_model(model, "cut1")[0], cross_entropy).to(torch.float64)
    truth = smooth(2, 9)
    base = seen(2)
    update = base.update.replace(weights=bottom.update(truth, torch.tensor([0, 1])))
    (found,) = launch(SMALL, [base.replace(learners=(bottom,), updates=(update,))], context())
    assert float((found.inputs - truth).square().mean() / (truth - 0.5).square().mean()) < 0.3, "in the order of the embedding"


def test_targets_of_one_label_share_one_fit() -> None:
    learner, calls = make_learner("mlp(hidden=24, activation='sigmoid')"), []
    run = simulator((learner,), "clipping(bound=0.01)")

    def counting(inputs: Tensor, targets: Tensor, draw: int) -> tuple[Named, ...]:
        if draw >= FIRST_DRAW:  # those before tell which label it is
            calls.append((draw, float(inputs.sum())))
        return run(inputs, targets, draw)

    where = context(simulate=counting)
    attack = dataclasses.replace(SMALL, stance="simulated")
    observations = [seen(defense="clipping(bound=0.01)", seed=seed, label=2) for seed in range(8)]
    launch(attack, observations, where)
    assert len(calls) == SMALL.records + 2, "two more to measure how long one takes"
    launch(attack, observations[:1], where)
    assert len(calls) == SMALL.records + 2, "the context remembers"


def test_every_release_of_a_random_defense_has_a_draw_of_its_own() -> None:
    learner, calls = make_learner("mlp(hidden=24, activation='sigmoid')"), []
    run = simulator((learner,), "gaussian_noise(std=0.01)")

    def counting(inputs: Tensor, targets: Tensor, draw: int) -> tuple[Named, ...]:
        if draw >= FIRST_DRAW:  # those before tell which label it is
            calls.append((draw, float(inputs.sum())))
        return run(inputs, targets, draw)

    attack = dataclasses.replace(SMALL, stance="simulated", draws=3)
    launch(attack, [seen(label=0)], context(simulate=counting, random_defense=True))
    sent = calls[2:]
    assert len({draw for draw, _ in sent}) == len(sent) == 48, "additive noise of one draw would cancel between releases"
    assert len({picture for _, picture in sent}) == 16


def test_nothing_is_learned_from_updates_under_attack() -> None:
    """Not even the strength: another update gets the same fit."""
    fits = []
    for seed in (1, 2):
        where = context()
        launch(SMALL, [seen(seed=seed, label=3)], where)
        ((fit, _),) = where.memory["regressions"].values()
        fits.append(fit)
    assert fits[0].strength == fits[1].strength and torch.equal(fits[0].dual, fits[1].dual)
    assert torch.equal(fits[0].examples, fits[1].examples)


def test_memory_forgets_what_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 1)
    where = context()
    launch(SMALL, [seen(label=0), seen(label=1)], where)
    assert len(where.memory["regressions"]) == 1


def test_a_dear_client_is_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    assert halved(400, 16, 1.0, 60.0) == 50 and halved(400, 16, 100.0, 60.0) == 16
    assert seconds_of(lambda place: None) < 0.1
    monkeypatch.setattr(module, "seconds_of", lambda run: 1.0)
    where = context()
    launch(KernelRegression(records=96, seconds=30.0), [seen(label=0)], where)
    ((fit, _),) = where.memory["regressions"].values()
    assert len(fit.dual) == 24


def test_all_labels_together_take_three_times_as_long_as_one_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "seconds_of", lambda run: 1.0)
    where = context()
    launch(KernelRegression(records=96, seconds=50.0), [seen(label=label) for label in range(CLASSES)], where)
    # Forty-eight for one label, two or three.
    assert [len(fit.dual) for fit, _ in where.memory["regressions"].values()] == [24] * CLASSES


def test_large_inputs_make_fewer_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_VALUES", 20 * smooth(1).numel())
    where = context()
    launch(SMALL, [seen(label=0)], where)
    ((fit, _),) = where.memory["regressions"].values()
    assert len(fit.dual) == 20


def test_large_updates_are_sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = launch(SMALL, [seen()], context())
    monkeypatch.setattr(module, "ENTRIES", 500)
    where = context()
    (sketched,) = launch(SMALL, [seen()], where)
    ((fit, _),) = where.memory["regressions"].values()
    assert fit.examples.shape[1] == 500 < sum(v.numel() for v in seen().update.weights.values())
    assert error(sketched) < 0.1 and not torch.equal(whole.inputs, sketched.inputs)


def test_every_plausible_label_is_a_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "label_hypotheses", lambda *_: torch.tensor([[1], [4], [2]]))
    done: list[int] = []
    observation, where = seen(), context(progress=done.append)
    found = launch(SMALL, [observation, observation], where)
    assert [(each.target, each.hypothesis, int(each.targets[0])) for each in found] == [
        (target, place, label) for target in (0, 1) for place, label in enumerate((1, 4, 2))
    ]
    assert sum(done) == 6 and SMALL.hypotheses(observation, where) == 3
    assert not torch.equal(found[0].inputs, found[1].inputs)
    monkeypatch.setattr(module, "label_hypotheses", lambda *_: torch.tensor([[0, 1], [0, 2], [1, 2]]))
    assert SMALL.hypotheses(seen(2), where) == 2, "every multiset of a batch needs releases of its own"


def test_given_labels_are_said_to_be_given() -> None:
    told = ThreatModel(knows=ORDINARY | {Knowledge.LABELS})
    (found,) = launch(SMALL, [seen(label=3, threat=told, labels=torch.tensor([3]))], context())
    assert found.oracle_labels and found.targets.tolist() == [3]


@pytest.mark.parametrize(
    ("records", "says"),
    [
        (None, "no public records"),
        (PublicRecords(torch.zeros(40, 3, 4, 4), torch.zeros(40), "same"), "have the shape (3, 4, 4)"),
        (PublicRecords(smooth(LEAST - 1), torch.zeros(LEAST - 1), "same"), "too few to learn from"),
        (PublicRecords(smooth(40) * 255, torch.zeros(40), "same"), "scale them"),
        (PublicRecords(smooth(1).expand(40, *SHAPE), torch.zeros(40), "same"), "all the same"),
    ],
)
def test_public_records_of_no_use_get_one_sentence(records: PublicRecords | None, says: str) -> None:
    where = context(public=records)
    with pytest.raises(UsageError, match=says.replace("(", r"\(").replace(")", r"\)")):
        launch(SMALL, [seen()], where)
    assert not any(isinstance(each, KernelRegression) for each in line_up(resolve("quick"), seen(), where))


def test_batches_need_records_for_every_fold() -> None:
    assert "at least 32" in (SMALL.lacks(seen(8), context(public=public(31))) or "")
    assert SMALL.lacks(seen(8), context(public=public(32))) is None
    launch(SMALL, [seen(8)], context(public=public(32)))


def test_who_may_not_run_the_client_regresses_plainly() -> None:
    simulated = dataclasses.replace(SMALL, stance="simulated")
    with pytest.raises(UsageError, match="no defended client to run"):
        launch(simulated, [seen()], context())
    ignorant = ThreatModel(knows=ORDINARY - {Knowledge.DEFENSE})
    where = context(simulate=simulator((make_learner(),), "pruning"))
    with pytest.raises(MissingKnowledge, match="defense"):
        launch(simulated, [seen(threat=ignorant)], where)
    with pytest.raises(MissingKnowledge, match="public data"):
        launch(SMALL, [seen(threat=ThreatModel(knows=ORDINARY - {Knowledge.PUBLIC_DATA}))], where)
    for threat, stances in ((ignorant, ["plain"]), (ThreatModel(), ["plain", "simulated"])):
        own = [a.stance for a in line_up(resolve("kernel_regression"), seen(threat=threat), where)]
        assert own == stances
    assert "simulated" in AUTHORLESS and "simulated" not in STANCES, "no search takes it"


@pytest.mark.parametrize(("setting", "value"), [("records", LEAST - 1), ("draws", 0), ("seconds", 0), ("stance", "informed")])
def test_settings_without_sense_are_refused(setting: str, value: object) -> None:
    with pytest.raises(UsageError, match=setting):
        ATTACKS.build({"name": "kernel_regression", setting: value})


def test_records_of_the_label_come_first_and_others_are_sent_with_it() -> None:
    records = public(40)
    batches = public_batches(records, torch.tensor([2]), 1, 20, Seed(0))
    assert batches.inputs.shape == (20, 1, *SHAPE) and bool((batches.targets == 2).all())
    rows = [int((records.inputs == each[0]).flatten(1).all(1).nonzero()) for each in batches.inputs]
    assert len(set(rows)) == 20 and all(row % CLASSES == 2 for row in rows[:8]) and all(row % CLASSES != 2 for row in rows[8:])
    assert torch.bincount(batches.folds).tolist() == [5] * FOLDS
    assert len(public_batches(records, torch.tensor([2]), 1, 99, Seed(0))) == 40


def test_batches_have_the_labels_in_order_and_folds_share_no_record() -> None:
    records, labels = public(120), torch.tensor([1, 1, 3])
    batches = public_batches(records, labels, 3, 40, Seed(0))
    assert len(batches) == 40 and bool((batches.targets == labels).all())
    folds: dict[int, set[int]] = {}
    for each, fold in zip(batches.inputs, batches.folds.tolist(), strict=True):
        rows = [int((records.inputs == picture).flatten(1).all(1).nonzero()) for picture in each]
        assert len(set(rows)) == 3
        folds.setdefault(fold, set()).update(rows)
    assert sum(map(len, folds.values())) == len(set().union(*folds.values()))
    other = public_batches(records, labels, 3, 40, Seed(1))
    assert not torch.equal(batches.inputs, other.inputs)
    free = public_batches(records, None, 3, 4, Seed(0))
    assert free.targets.shape == (4, 3) and len(free.targets.unique()) > 1, "where labels do not matter each keeps its own"


def test_equal_labels_stand_in_the_order_of_their_brightness() -> None:
    pictures = torch.tensor([[0.9, 0.1, 0.5, 0.3]])[..., None].expand(1, 4, 6)
    assert by_brightness(pictures, torch.tensor([0, 0, 1, 0]))[0, :, 0].tolist() == pytest.approx([0.1, 0.3, 0.5, 0.9])
    assert by_brightness(pictures, torch.tensor([0, 1, 2, 3])).equal(pictures)
