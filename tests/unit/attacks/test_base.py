"""The sealed call around every attack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from gradveil.attacks import ATTACKS, AttackCard, Desk, launch
from gradveil.attacks.base import knowledge_needed
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.errors import BadUpdate, MissingKnowledge, UsageError
from gradveil.randomness import Seed
from gradveil.records import ORDINARY, Knowledge, Observation, Reconstruction, ThreatModel, Update
from tests.unit.attacks.scenes import make_batch, make_desk, make_learner, observe


@dataclass(frozen=True, kw_only=True)
class Scripted:
    """An attack that answers what it is told to."""

    card: ClassVar[AttackCard] = AttackCard(name="scripted", summary="Says what it is told.")
    answer: Callable[[Observation], Tensor]
    stance: str = "plain"

    def applies(self, observation: Observation) -> str | None:
        return None

    def run(self, observations: Sequence[Observation], desk: Desk) -> list[Reconstruction]:
        found = [self.answer(each) for each in observations]
        return [Reconstruction(x, torch.zeros(1), "scripted", target=i, stance=self.stance) for i, x in enumerate(found)]


def one(level: float = 0.5) -> Tensor:
    return torch.full((1, 2, 8, 8), level, dtype=torch.float64)


def test_answers_are_made_presentable() -> None:
    ugly = one()
    ugly[0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 7.0])
    (candidate,) = launch(Scripted(answer=lambda _: ugly), [observe(make_learner(), make_batch())], make_desk())
    assert candidate.inputs[0, 0, 0, :4].tolist() == [0.5, 1.0, 0.0, 1.0]


def test_the_informed_attacker_has_the_last_word() -> None:
    rough = make_batch().inputs
    seen = observe(make_learner(), make_batch(), "data_noise(std=0.2)")
    (plain,) = launch(Scripted(answer=lambda _: rough), [seen], make_desk())
    (informed,) = launch(Scripted(answer=lambda _: rough, stance="informed"), [seen], make_desk())
    assert torch.equal(plain.inputs, rough) and plain.unfinished is None
    assert not torch.equal(informed.inputs, rough) and informed.unfinished is not None
    assert torch.equal(informed.unfinished, rough)


def test_a_wrong_shape_is_named() -> None:
    with pytest.raises(UsageError, match=r"returned shape \(2, 8, 8\), expected \(1, 2, 8, 8\)"):
        launch(Scripted(answer=lambda _: one()[0]), [observe(make_learner(), make_batch())], make_desk())


@pytest.mark.parametrize("what", ["update", "weights", "buffers"])
def test_writing_to_what_is_shown_is_noticed(what: str) -> None:
    def scribble(seen: Observation) -> Tensor:
        shown = {"update": seen.update.weights, "weights": seen.learner.weights, "buffers": seen.learner.buffers}[what]
        next(value for value in shown.values() if value.is_floating_point()).add_(1)
        return one()

    learner = make_learner("lenet(normalize='half')")
    with pytest.raises(UsageError, match="must work on copies"):
        launch(Scripted(answer=scribble), [observe(learner, make_batch())], make_desk())


def test_an_update_that_is_not_finite_is_refused_before_anyone_is_blamed() -> None:
    seen = observe(make_learner(), make_batch())
    bad = {n: v.clone() for n, v in seen.update.weights.items()}
    bad["conv1.weight"][0] = float("nan")
    with pytest.raises(BadUpdate, match=r"conv1\.weight"):
        launch(Scripted(answer=lambda _: one()), [seen.replace(updates=(Update(bad, examples=1),))], make_desk())


@pytest.mark.parametrize(
    ("attack", "training", "missing"),
    [
        (InvertingGradients(), {}, Knowledge.ARCHITECTURE),
        (InvertingGradients(stance="informed"), {}, Knowledge.DEFENSE),
        (InvertingGradients(stance="averaged"), {}, Knowledge.DEFENSE),
        (InvertingGradients(), {"shares": "weights"}, Knowledge.LEARNING_RATE),
    ],
)
def test_what_is_missing_is_named(attack: InvertingGradients, training: dict[str, object], missing: Knowledge) -> None:
    seen = observe(make_learner(**training), make_batch(), threat=ThreatModel(knows=ORDINARY - {missing}))  # type: ignore[arg-type]
    with pytest.raises(MissingKnowledge, match=str(missing)):
        launch(attack, [seen], make_desk(2))
    assert launch(attack, [seen.replace(threat=ThreatModel())], make_desk(2))


def test_a_zero_mask_needs_no_knowledge_of_the_defense() -> None:
    seen = observe(make_learner(), make_batch(), threat=ThreatModel(knows=ORDINARY - {Knowledge.DEFENSE}))
    attack = InvertingGradients(stance="zero_mask")
    assert Knowledge.DEFENSE not in knowledge_needed(attack, seen)
    assert launch(attack, [seen], make_desk(2))


def test_nothing_to_attack_is_no_error() -> None:
    assert launch(InvertingGradients(), [], make_desk()) == []


def test_a_budget_caps_steps_but_leaves_one() -> None:
    assert [Desk(Seed(0), budget=10).steps(wanted) for wanted in (5, 50)] == [5, 10]
    assert Desk(Seed(0), budget=0).steps(5) == 1


def test_every_attack_is_listed_with_its_home() -> None:
    assert ATTACKS.names() == ["dlg", "feature_inversion", "idlg", "inverting_gradients", "linear_layer", "peeling", "piste_like"]
    assert all(card.home and card.floor_psnr > 10 for card in ATTACKS.cards())
