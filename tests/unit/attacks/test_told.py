"""What an attack tells of each of its candidates: whose it is, from which start, how the search began and how it ended."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from gradveil.adversary import OpenAdversary
from gradveil.attacks import ATTACKS, launch
from gradveil.attacks.base import Attack, Cost
from gradveil.attacks.engine.labels import recover_labels
from gradveil.attacks.engine.loop import Outcome, optimise
from gradveil.learning import EmbeddingLearner, loss_by_name
from gradveil.models import build_model, split_model
from gradveil.randomness import Seed
from gradveil.records import Knowledge, Observation, Reconstruction, ThreatModel, Update
from tests.unit.attacks.scenes import CLASSES, make_batch, make_context, make_learner, observe

SHAPE = (2, 16, 16)
STEPS, RESTARTS = 6, 2
POOLED = 'convnet(width=4, norm="none")'
SEARCHES = {
    "inverting_gradients": "engine.matching",
    "dlg": "engine.matching",
    "idlg": "engine.matching",
    "feature_inversion": "feature_inversion",
    "piste_like": "piste",
    "peeling": "peeling",
}


def party_sees(count: int) -> list[Observation]:
    """Return what parties of vertical learning send of one picture each."""
    model = build_model("lenet", input_shape=SHAPE, classes=CLASSES, seed=Seed(1))
    learner = EmbeddingLearner.of_bottom(split_model(model, "cut1")[0], loss_by_name("cross_entropy"))
    batches = [make_batch(seed=seed, shape=SHAPE, dtype=torch.float32) for seed in range(count)]
    return [
        Observation(
            learners=(learner,),
            updates=(Update({n: v.detach() for n, v in learner.update(b.inputs, b.targets).items()}, examples=1),),
            payloads=(),
            input_shape=SHAPE,
            classes=CLASSES,
            examples=1,
            threat=ThreatModel(sees="embedding"),
            adversary=OpenAdversary(),
        )
        for b in batches
    ]


def seen_by(name: str, count: int = 2) -> list[Observation]:
    if name == "piste_like":
        return party_sees(count)
    learner = make_learner(POOLED if name == "peeling" else "lenet", shape=SHAPE)
    return [observe(learner, make_batch(seed=seed, shape=SHAPE)) for seed in range(count)]


def built(name: str, **changes: Any) -> Attack:
    attack: Any = ATTACKS.build(name)
    found: Attack = dataclasses.replace(attack, **{"steps": STEPS, "restarts": RESTARTS, **changes})
    return found


def found_by(name: str, seed: int = 5, **changes: Any) -> list[Reconstruction]:
    return launch(built(name, **changes), seen_by(name), make_context(100, seed=Seed(seed)))


@pytest.mark.parametrize("name", SEARCHES)
def test_every_candidate_says_whose_it_is_and_how_it_went(name: str) -> None:
    found = found_by(name)
    assert [(each.target, each.restart) for each in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for each in found:
        assert (each.recipe, each.stance, each.hypothesis) == (name, "plain", 0)
        assert each.steps == STEPS and each.status == "finished" and not each.oracle_labels
        assert each.inputs.shape == (1, *SHAPE) and float(each.inputs.min()) >= 0 and float(each.inputs.max()) <= 1
        assert each.best_loss != each.first_loss and each.gradient_norm > 0
        if name not in ("dlg", "piste_like"):
            assert torch.equal(each.targets, recover_labels(seen_by(name)[each.target]))
    for one, other in ((0, 1), (0, 2), (1, 3)):
        assert not torch.equal(found[one].inputs, found[other].inputs)
    if name != "feature_inversion":  # which measures in units of its start
        assert len({each.first_loss for each in found}) == len(found)
    assert len({each.best_loss for each in found}) == len({each.gradient_norm for each in found}) == len(found)


@pytest.mark.parametrize("name", SEARCHES)
def test_seeds_decide_the_starts_and_steps_the_end(name: str) -> None:
    before, other, longer = found_by(name), found_by(name, seed=6), found_by(name, steps=STEPS + 2)
    again = found_by(name)
    for index, each in enumerate(before):
        assert torch.equal(each.inputs, again[index].inputs)
        assert not torch.equal(each.inputs, other[index].inputs) and not torch.equal(each.inputs, longer[index].inputs)
        assert longer[index].steps == STEPS + 2


@pytest.mark.parametrize("name", SEARCHES)
def test_starts_do_not_depend_on_how_many_there_are(name: str) -> None:
    alone, many = found_by(name, restarts=1), found_by(name, restarts=3)
    assert [(each.target, each.restart) for each in alone] == [(0, 0), (1, 0)]
    assert [each.restart for each in many] == [0, 1, 2] * 2
    for one, other in zip(alone, (many[0], many[3]), strict=True):
        assert torch.allclose(one.inputs, other.inputs, atol=1e-5)


@pytest.mark.parametrize("name", SEARCHES)
def test_the_end_of_each_search_is_told_row_by_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def marked(*given: Any, **more: Any) -> Outcome:
        outcome = optimise(*given, **more)
        rows = torch.arange(len(outcome.status))
        ends = ["finished", "not finite", "not finite", "finished"]
        return dataclasses.replace(outcome, status=[ends[row] for row in rows.tolist()], steps=100 + rows)

    monkeypatch.setattr(f"gradveil.attacks.{SEARCHES[name]}.optimise", marked)
    found = found_by(name)
    assert [each.status for each in found] == ["finished", "not finite", "not finite", "finished"]
    apart = {after.steps - before.steps for before, after in itertools.pairwise(found)}
    assert len(apart) == 1 and apart.pop() > 0


@pytest.mark.parametrize("name", SEARCHES)
def test_progress_counts_every_step_of_every_candidate(name: str) -> None:
    done: list[int] = []
    attack = built(name)
    launch(attack, seen_by(name), make_context(100, progress=done.append))
    assert sum(done) == STEPS * RESTARTS * 2 and attack.cost() == Cost(STEPS, RESTARTS)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_budget_below_the_steps_is_kept(name: str) -> None:
    found = launch(built(name), seen_by(name), make_context(4))
    assert {each.steps for each in found} == {4}


@pytest.mark.parametrize("name", ["inverting_gradients", "idlg", "peeling"])
def test_labels_that_are_given_are_used_and_it_is_said(name: str) -> None:
    wrong = torch.tensor([4])
    threat = ThreatModel(knows=ThreatModel().knows | {Knowledge.LABELS})
    seen = [each.replace(labels=wrong, threat=threat) for each in seen_by(name)]
    for each in launch(built(name), seen, make_context(100)):
        assert torch.equal(each.targets, wrong) and each.oracle_labels


def test_a_linear_layer_is_read_and_says_so() -> None:
    learner = make_learner("mlp(hidden=8)")
    seen = [observe(learner, make_batch(seed=seed)) for seed in range(2)]
    found = launch(ATTACKS.build("linear_layer"), seen, make_context())
    assert [(each.recipe, each.target, each.restart, each.stance) for each in found] == [
        ("linear_layer", 0, 0, "plain"),
        ("linear_layer", 1, 0, "plain"),
    ]
    for each in found:
        assert (each.first_loss, each.best_loss, each.gradient_norm, each.status) == (1.0, 0.0, 1.0, "finished")
        assert torch.allclose(each.inputs, make_batch(seed=each.target).inputs, atol=1e-6)
        assert torch.equal(each.targets, make_batch(seed=each.target).targets)
