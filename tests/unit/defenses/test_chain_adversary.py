"""The attacker who knows a chain: what the parts' attackers say and do, put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.defenses import Chain, Defense, DefenseCard, build_defense
from gradveil.defenses.chain import ChainAdversary
from gradveil.defenses.clipping import Clipping
from gradveil.defenses.data_noise import DataNoise
from gradveil.defenses.gaussian_noise import GaussianNoise
from gradveil.defenses.laplace_noise import LaplaceNoise
from gradveil.defenses.none import NoDefense
from gradveil.defenses.pruning import Pruning
from gradveil.learning import Learner
from gradveil.records import Comparison, Observation, WhatArrives
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named
from gradveil.testing.defenses_scene import Scene, distance


def observe(defense: Defense) -> tuple[Observation, Scene]:
    scene = Scene.of(defense, settings=TrainingSettings(shares="weights", local_steps=2, learning_rate=0.1))
    return scene.observe(defense, 1, scene.batch), scene


def residual_at_truth(defense: Defense) -> float:
    seen, scene = observe(defense)
    simulated = seen.adversary.replay(scene.learner, scene.batch.inputs, scene.batch.targets, {})
    comparison = seen.adversary.compare(seen.adversary.evidence(seen, 0), simulated, {})
    return distance(comparison.simulated, comparison.observed)


@pytest.mark.parametrize(
    "spelling",
    [
        "example_clipping(bound=0.5) + example_clipping(bound=0.3, scope='layer') + clipping(bound=0.01)",
        "clipping(bound=0.01) + pruning(rate=0.9)",
        "example_clipping(bound=0.5) + clipping(bound=0.05, scope='layer') + top_k(keep=0.1)",
        "pruning(rate=0.5) + none",
        "entry_dropout(rate=0.5, rescale=True) + none",
    ],
)
def test_the_composed_attacker_replays_every_part(spelling: str) -> None:
    defense = build_defense(spelling)
    assert residual_at_truth(defense) < 1e-5
    seen, _ = observe(defense)
    assert not seen.adversary.arrives(seen).incomplete


@pytest.mark.parametrize(
    ("spelling", "incomplete"),
    [
        ("pruning + gaussian_noise", True),
        ("pruning + clipping", True),
        ("pruning + top_k", True),
        ("gaussian_noise + pruning", False),
        ("pruning + data_noise", False),
        ("clipping + gaussian_noise", False),
    ],
)
def test_what_a_later_part_hides_is_flagged(spelling: str, incomplete: bool) -> None:
    seen, _ = observe(build_defense(spelling))
    assert seen.adversary.arrives(seen).incomplete is incomplete


@pytest.mark.parametrize(
    ("spelling", "plainly"),
    [
        ("none", True),
        ("gaussian_noise + data_noise", True),
        ("example_clipping", False),
        ("clipping + gaussian_noise", False),
        ("gaussian_noise + pruning", False),
    ],
)
def test_attackers_who_only_know_the_noise_search_as_plain_ones_do(spelling: str, plainly: bool) -> None:
    seen, _ = observe(build_defense(spelling))
    assert seen.adversary.arrives(seen).plain_search is plainly


@pytest.mark.parametrize(
    ("parts", "std"),
    [
        ((GaussianNoise(std=0.3), GaussianNoise(std=0.4)), 0.5),
        ((GaussianNoise(std=0.3), NoDefense()), 0.3),
        ((Clipping(), LaplaceNoise(scale=0.5)), 0.5 * 2**0.5),
        ((GaussianNoise(std=0.3), DataNoise(std=0.1)), 0.3),
        ((GaussianNoise(std=0.3), Clipping()), None),
        ((GaussianNoise(std=0.3), Clipping(), GaussianNoise(std=0.3)), None),
        ((Clipping(), Pruning()), None),
    ],
)
def test_noise_adds_up_and_is_unknown_once_something_else_follows(parts: tuple[Defense, ...], std: float | None) -> None:
    seen, _ = observe(NoDefense())
    found = Chain(parts=parts).adversary().arrives(seen).noise_std
    assert found == (None if std is None else pytest.approx(std))


@dataclass(frozen=True)
class Telling(OpenAdversary):
    """An attacker who says of what arrives what it is told to say."""

    told: WhatArrives

    def arrives(self, observation: Observation) -> WhatArrives:
        return self.told


@dataclass(frozen=True)
class TellingAndComparing(Telling):
    """The same, and it compares in its own way."""

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        return super().compare(evidence, simulated, variables)


def test_what_arrives_of_a_chain_is_put_together_from_all_parts() -> None:
    seen, _ = observe(NoDefense())
    names = frozenset(seen.update.weights)
    first, second = sorted(names)[:2]
    quiet = TellingAndComparing(
        WhatArrives(
            exact=lambda: names - {first}, least_protected_round=2, label_evidence=lambda bias, _: bias + 1, equal_weights=True
        )
    )
    mute = Telling(WhatArrives(exact=lambda: names, label_evidence=lambda bias, _: None, plain_search=True, raw_inputs=True))
    told = ChainAdversary((quiet, mute)).arrives(seen)
    assert told.exact() == names - {first} and told.least_protected_round == 2
    assert told.equal_weights and told.raw_inputs and not told.plain_search and not told.incomplete
    assert told.label_evidence is not None
    answer = told.label_evidence(torch.zeros(3), lambda: torch.zeros(3))
    assert answer is not None and answer.tolist() == [1, 1, 1]
    later = Telling(WhatArrives(exact=lambda: names - {second}, incomplete=True, equal_weights=True))
    both = ChainAdversary((mute, later)).arrives(seen)
    assert both.exact() == names - {second} and both.incomplete
    assert not both.equal_weights  # nobody compares in a way of its own
    hidden = ChainAdversary((quiet, Telling(WhatArrives(exact=lambda: names - {second})))).arrives(seen)
    assert hidden.incomplete  # what the first compares, the second has changed


def test_what_costs_is_asked_of_no_part_before_somebody_asks() -> None:
    def refuse() -> frozenset[str]:
        raise AssertionError("nobody asked")

    seen, _ = observe(NoDefense())
    costly = TellingAndComparing(WhatArrives(exact=refuse))
    told = ChainAdversary((OpenAdversary(), costly)).arrives(seen)
    with pytest.raises(AssertionError, match="nobody asked"):
        told.exact()


@dataclass(frozen=True)
class Unknowns(OpenAdversary):
    """An attacker with one unknown, a penalty on it, and a comparison that uses it."""

    start: float = 0.0

    def variables(self, observation: Observation, generator: torch.Generator) -> Named:
        return {"u": torch.tensor(self.start)}

    def prepare_learner(self, learner: Learner, variables: Named) -> Learner:
        return learner.replace(weights={name: value + variables["u"] for name, value in learner.weights.items()})

    def on_update(self, update: Named, learner: Learner, variables: Named) -> Named:
        return {name: value + variables["u"] for name, value in update.items()}

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        return Comparison({"u": variables["u"]}, {"u": torch.zeros(())})

    def penalty(self, variables: Named) -> Tensor:
        return variables["u"] ** 2


@dataclass(frozen=True, kw_only=True)
class Mystery(Defense):
    """A defense with an unknown."""

    card: ClassVar[DefenseCard] = DefenseCard(name="mystery", summary="For tests.")
    start: float = 0.0

    def adversary(self) -> OpenAdversary:
        return Unknowns(self.start)


def test_every_part_of_the_attacker_gets_its_own_unknowns() -> None:
    adversary = Chain(parts=(Mystery(start=3.0), NoDefense(), Mystery(start=4.0))).adversary()
    seen, scene = observe(NoDefense())
    variables = adversary.variables(seen, torch.Generator())
    assert {name: float(value) for name, value in variables.items()} == {"0/u": 3.0, "2/u": 4.0}
    assert float(adversary.penalty(variables)) == 25.0
    assert float(adversary.compare({}, {}, variables).simulated["u"]) == 4.0
    assert adversary.on_update({"w": torch.zeros(1)}, scene.learner, variables)["w"].tolist() == [7.0]
    moved = adversary.prepare_learner(scene.learner, variables).weights["gain"] - scene.learner.weights["gain"]
    assert float(moved) == pytest.approx(7.0)
    assert adversary.arrives(seen).exact() == frozenset(seen.update.weights)
