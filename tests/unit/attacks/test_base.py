"""The sealed call around every attack."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from gradveil.attacks import ATTACKS, Attack, AttackCard, AttackContext, Cost, launch, resolve
from gradveil.attacks.adaptive import STANCES
from gradveil.attacks.deep_leakage import DLG, IDLG
from gradveil.attacks.engine.matching import Recipe
from gradveil.attacks.engine.optimisers import LBFGS, Adam
from gradveil.attacks.feature_inversion import FeatureInversion
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.attacks.linear_layer import LinearLayer
from gradveil.attacks.peeling import Peeling
from gradveil.attacks.piste import PisteLike
from gradveil.errors import BadUpdate, MissingKnowledge, UsageError
from gradveil.randomness import Seed
from gradveil.records import ORDINARY, Knowledge, Observation, Reconstruction, ThreatModel, Update
from tests.unit.attacks.scenes import make_batch, make_context, make_learner, observe


@dataclass(frozen=True, kw_only=True)
class Scripted(Attack):
    """An attack that answers what it is told to."""

    card: ClassVar[AttackCard] = AttackCard(name="scripted", summary="Says what it is told.")
    answer: Callable[[Observation], Tensor]
    stance: str = "plain"

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        found = [self.answer(each) for each in observations]
        return [Reconstruction(x, torch.zeros(1), "scripted", target=i, stance=self.stance) for i, x in enumerate(found)]


def one(level: float = 0.5) -> Tensor:
    return torch.full((1, 2, 8, 8), level, dtype=torch.float64)


def test_answers_are_made_presentable() -> None:
    ugly = one()
    ugly[0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 7.0])
    (candidate,) = launch(Scripted(answer=lambda _: ugly), [observe(make_learner(), make_batch())], make_context())
    assert candidate.inputs[0, 0, 0, :4].tolist() == [0.5, 1.0, 0.0, 1.0]
    assert candidate.status == "not finite", "so that a check can say it"


def test_the_informed_attacker_has_the_last_word() -> None:
    rough = make_batch().inputs
    seen = observe(make_learner(), make_batch(), "data_noise(std=0.2)")
    (plain,) = launch(Scripted(answer=lambda _: rough), [seen], make_context())
    (informed,) = launch(Scripted(answer=lambda _: rough, stance="informed"), [seen], make_context())
    assert torch.equal(plain.inputs, rough) and plain.unfinished is None
    assert not torch.equal(informed.inputs, rough) and informed.unfinished is not None
    assert torch.equal(informed.unfinished, rough)


def test_a_wrong_shape_is_named() -> None:
    with pytest.raises(UsageError, match=r"returned shape \(2, 8, 8\), expected \(1, 2, 8, 8\)"):
        launch(Scripted(answer=lambda _: one()[0]), [observe(make_learner(), make_batch())], make_context())


@dataclass(frozen=True, kw_only=True)
class Answers(Attack):
    """An attack that returns what it is told to, sense or not."""

    card: ClassVar[AttackCard] = AttackCard(name="answers", summary="Returns what it is told.")
    answer: object

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        return self.answer  # type: ignore[return-value]


def mine(target: int, recipe: str = "mine", labels: int = 1) -> Reconstruction:
    return Reconstruction(one(), torch.zeros(labels, dtype=torch.int64), recipe, target=target)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "returned NoneType; `run` returns a list of Reconstruction"),
        ([one()], "returned list; `run` returns a list of Reconstruction"),
        ([], "answered for 0 of 2 observations"),
        ([mine(1)], "answered for 1 of 2 observations"),
        ([mine(0), mine(1), mine(0, "other")], "answered for 1 of 2 observations"),
        ([mine(0), mine(2)], "answered for observation 2 of 2"),
        ([mine(0), mine(-1)], "answered for observation -1 of 2"),
        ([mine(0), mine(1, labels=3)], "returned 3 labels, expected 1"),
    ],
)
def test_answers_that_make_no_sense_get_one_sentence(answer: object, says: str) -> None:
    seen = [observe(make_learner(), make_batch(seed=seed)) for seed in range(2)]
    with pytest.raises(UsageError, match=re.escape(says)):
        launch(Answers(answer=answer), seen, make_context())


@pytest.mark.parametrize("what", ["update", "weights", "buffers"])
def test_writing_to_what_is_shown_is_noticed(what: str) -> None:
    def scribble(seen: Observation) -> Tensor:
        shown = {"update": seen.update.weights, "weights": seen.learner.weights, "buffers": seen.learner.buffers}[what]
        next(value for value in shown.values() if value.is_floating_point()).add_(1)
        return one()

    learner = make_learner("lenet(normalize='half')")
    with pytest.raises(UsageError, match="must work on copies"):
        launch(Scripted(answer=scribble), [observe(learner, make_batch())], make_context())


def test_an_update_that_is_not_finite_is_refused_before_anyone_is_blamed() -> None:
    seen = observe(make_learner(), make_batch())
    bad = {n: v.clone() for n, v in seen.update.weights.items()}
    bad["conv1.weight"][0] = float("nan")
    with pytest.raises(BadUpdate, match=r"conv1\.weight"):
        launch(Scripted(answer=lambda _: one()), [seen.replace(updates=(Update(bad, examples=1),))], make_context())


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
        launch(attack, [seen], make_context(2))
    assert launch(attack, [seen.replace(threat=ThreatModel())], make_context(2))


def test_a_zero_mask_needs_no_knowledge_of_the_defense() -> None:
    seen = observe(make_learner(), make_batch(), threat=ThreatModel(knows=ORDINARY - {Knowledge.DEFENSE}))
    attack = InvertingGradients(stance="zero_mask")
    assert Knowledge.DEFENSE not in attack.needs(seen)
    assert launch(attack, [seen], make_context(2))


def test_nothing_to_attack_is_no_error() -> None:
    assert launch(InvertingGradients(), [], make_context()) == []


def test_a_budget_caps_steps_but_leaves_one() -> None:
    assert [AttackContext(Seed(0), budget=10).steps(wanted) for wanted in (5, 50)] == [5, 10]
    assert AttackContext(Seed(0), budget=0).steps(5) == 1


def test_every_attack_is_listed_with_its_home() -> None:
    assert ATTACKS.names() == [
        "dlg",
        "feature_inversion",
        "idlg",
        "inverting_gradients",
        "kernel_regression",
        "linear_layer",
        "linear_map",
        "peeling",
        "piste_like",
        "wiener",
    ]
    assert all(card.home and card.floor_psnr > 10 for card in ATTACKS.cards())


@dataclass(frozen=True, kw_only=True)
class OnlyRuns(Attack):
    """A third party's attack that writes nothing but `run`."""

    card: ClassVar[AttackCard] = AttackCard(name="only_runs", summary="Answers grey.")

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        return [Reconstruction(one(), torch.zeros(1), "only_runs", target=i) for i in range(len(observations))]


@dataclass(frozen=True)
class Stranger:
    """What has a method `run` and is no attack all the same."""

    card: ClassVar[AttackCard] = AttackCard(name="stranger", summary="Does not derive from the base.")

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        return []


def test_an_attack_that_only_runs_has_sensible_defaults() -> None:
    seen = observe(make_learner(), make_batch())
    attack = OnlyRuns()
    assert attack.stances == ("plain",) and attack.stance == "plain" and attack.with_stance("plain") is attack
    assert attack.cost() == Cost(steps=1, restarts=1) and attack.applies(seen) is None and attack.needs(seen) == frozenset()
    assert launch(attack, [seen], make_context())[0].recipe == "only_runs"
    with pytest.raises(UsageError, match="has no stance 'informed'; it takes plain"):
        attack.with_stance("informed")


def test_what_is_no_attack_gets_one_sentence() -> None:
    seen = observe(make_learner(), make_batch())
    sentence = "Stranger is no attack: derive it from gradveil.attacks.Attack, which fills in all but `run`"
    with pytest.raises(UsageError, match=sentence):
        launch(Stranger(), [seen], make_context())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=sentence):
        resolve(f"{__name__}:Stranger")
    with pytest.raises(UsageError, match="does not say how to attack; write its method run"):
        Attack().run([seen], make_context())


def test_every_setting_of_a_preset_reaches_the_recipe() -> None:
    settings = {
        "steps": 7,
        "restarts": 3,
        "tv": 0.3,
        "tv_end": 0.1,
        "relative": True,
        "objective": "l2",
        "start": "grey",
        "labels": "given",
        "smooth_relu": True,
        "stance": "informed",
    }
    recipe = InvertingGradients(learning_rate=0.7, signed=False, schedule="cosine", title="mine", **settings).recipe()  # type: ignore[arg-type]
    assert recipe == Recipe(name="mine", optimiser=Adam(learning_rate=0.7, signed=False, schedule="cosine"), **settings)  # type: ignore[arg-type]
    assert InvertingGradients().recipe().optimiser == Adam(learning_rate=0.1, signed=True, schedule="steps")
    dlg = Recipe(name="dlg", objective="l2", optimiser=LBFGS(history=20), steps=300, box=False, labels="joint")
    assert DLG().recipe() == dlg
    assert IDLG(history=5).recipe() == dataclasses.replace(dlg, name="idlg", labels="recovered", optimiser=LBFGS(history=5))


def test_who_can_take_which_stance() -> None:
    assert InvertingGradients().stances == STANCES and PisteLike().stances == ("plain", "informed")
    assert InvertingGradients(objective="likelihood", stance="informed").stances == ("informed",)
    assert FeatureInversion().stances == LinearLayer().stances == ("plain",) and Peeling().stances == ("plain", "informed")
    assert InvertingGradients(stance="averaged").cost().client_updates > InvertingGradients().cost().client_updates == 0
    assert Peeling(steps=9, restarts=2).cost() == Cost(steps=9, restarts=2)
