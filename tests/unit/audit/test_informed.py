"""What is called informed was informed: a lazy author, honest ones, and searches that went nowhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.attacks import line_up, resolve
from gradveil.audit.cell import run_cell
from gradveil.audit.gap import Explained
from gradveil.audit.informed import check_informed_moved, check_informed_ran, informed_by
from gradveil.audit.scene import Subject, build_subject, load_cell_data
from gradveil.defenses.base import ClientView, Defense, DefenseCard, State
from gradveil.defenses.graddefense import GradDefense
from gradveil.records import Comparison, Knowledge, Observation, Reconstruction, Update, WhatArrives
from gradveil.study.cell import Cell
from gradveil.study.limits import parse_limit
from gradveil.tensors import Named
from gradveil.testing.contract import run_checks
from gradveil.testing.defenses import more_strength_distorts_more
from gradveil.testing.defenses_adversary import adversary_undoes_something
from gradveil.testing.defenses_scene import Scene
from gradveil.verdict.limits import compare
from tests.unit.audit.small import make_subject

SPELLING = "tests.unit.audit.test_informed:TurnsSigns"


class Lazy(OpenAdversary):
    """Says that nothing is exact, and searches as one who ignores the defense."""

    def arrives(self, observation: Observation) -> WhatArrives:
        return super().arrives(observation).replace(exact=frozenset)


class Copies(OpenAdversary):
    """Has a comparison of its own, which is the plain one."""

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        return super().compare(evidence, simulated, variables)


class Boasts(OpenAdversary):
    """Invents noise so loud that under its likelihood every picture is as good as the truth."""

    def arrives(self, observation: Observation) -> WhatArrives:
        return super().arrives(observation).replace(exact=frozenset, noise_std=1000.0)


class Sizes(OpenAdversary):
    """Four honest lines."""

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        plain = super().compare(evidence, simulated, variables)
        return Comparison({n: v.abs() for n, v in plain.simulated.items()}, {n: v.abs() for n, v in plain.observed.items()})


class Constant(OpenAdversary):
    """Has a comparison of its own, under which every picture explains the update as well as the truth."""

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        ones = {n: torch.ones_like(v) for n, v in simulated.items()}
        return Comparison(ones, ones)


KINDS: dict[str, type[OpenAdversary]] = {
    "lazy": Lazy,
    "copies": Copies,
    "boasts": Boasts,
    "constant": Constant,
    "sizes": Sizes,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnsSigns(Defense):
    """Turns the signs of a share of all entries, from a round on."""

    card = DefenseCard(
        name="turns_signs",
        summary="Turns signs.",
        cost="none",
        weakness="sizes",
        acts_on=("update",),
        ladder=({"rate": 0.01}, {"rate": 0.05}, {"rate": 0.1}),
        off={"rate": 0.0},
        random=True,
    )
    rate: float = 0.1
    author: str = "lazy"
    since: int = 0

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        if view.round < self.since:
            return update, state
        generator = view.generator("signs")

        def turned(value: Tensor) -> Tensor:
            return torch.where(torch.rand(value.shape, generator=generator) < self.rate, -value, value)

        return update.replace(weights={name: turned(value) for name, value in update.weights.items()}), state

    def adversary(self) -> OpenAdversary:
        return KINDS[self.author]()


def spelled(**settings: object) -> str:
    return f"{SPELLING}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def candidate(stance: str, **changes: object) -> Reconstruction:
    healthy = {"first_loss": 1.0, "best_loss": 0.1, "steps": 10, "stance": stance}
    return Reconstruction(torch.zeros(1, 1, 8, 8), torch.tensor([0]), "some", **(healthy | changes))  # type: ignore[arg-type]


def subject(defense: str, **changes: Any) -> Subject:
    return make_subject(defense=defense, **changes)


@pytest.fixture(scope="module", autouse=True)
def _data() -> None:
    make_subject()


@pytest.mark.parametrize(
    ("defense", "stances", "who"),
    [
        ("none", ["plain"], ""),
        ("clipping(bound=0.01)", ["plain", "informed"], ""),  # only scale, which no search looks at
        ("gaussian_noise(std=0.01)", ["plain", "informed"], "own"),  # the likelihood of the known noise
        ("precode + gaussian_noise(std=0.01)", ["plain", "informed"], "own"),  # unknowns beside the noise
        ("data_noise(std=0.1)", ["plain", "informed"], "own"),  # the plain search, and a finish
        ("data_noise(std=0.1)", ["plain"], "none"),
        ("pruning(rate=0.9)", ["plain", "informed"], "own"),
        (spelled(author="lazy"), ["plain"], "none"),
        (spelled(author="lazy"), ["plain", "averaged", "magnitudes"], "generic"),
        (spelled(author="copies"), ["plain", "informed"], "none"),
        (spelled(author="copies"), ["plain", "informed", "zero_mask"], "generic"),
        (spelled(author="sizes"), ["plain", "informed"], "own"),
        (spelled(author="lazy", rate=0.0), ["plain"], ""),
        (spelled(author="lazy", rate=1.0), ["plain"], "none"),  # turned round: no scale leads back
        (spelled(author="boasts"), ["plain", "informed"], "none"),
        (spelled(author="boasts"), ["plain", "informed", "robust"], "generic"),
        (spelled(author="constant"), ["plain", "informed"], "none"),
        (spelled(author="constant"), ["plain", "informed", "robust"], "generic"),
    ],
)
def test_who_used_what_is_known_of_the_defense(defense: str, stances: list[str], who: str) -> None:
    seen, candidates = subject(defense), [[candidate(stance) for stance in stances]]
    assert informed_by(seen, candidates) == who
    check = check_informed_ran(seen, candidates)
    assert check.level == ("ok" if who in ("", "own") else "warn")
    assert ("none ran" in check.sentence) == (who in ("generic", "none"))
    blamed = "searches as if there were no defense" in check.sentence
    assert blamed == (who in ("generic", "none"))
    assert ("magnitudes" in check.sentence) == (who == "generic" and "magnitudes" in stances)


def test_a_defense_that_begins_late_is_one_too() -> None:
    late = spelled(author="lazy", since=1)
    assert informed_by(subject(late), [[candidate("plain")]]) == ""
    assert informed_by(subject(late, rounds=2), [[candidate("plain")]]) == "none"


def test_one_update_that_is_defended_is_enough() -> None:
    seen, bare = subject(spelled(author="lazy")), subject("none")
    mixed = dataclasses.replace(seen, targets=(*bare.targets[:-1], seen.targets[-1]))
    assert informed_by(mixed, [[candidate("plain")]]) == "none"


def test_no_author_is_blamed_for_an_ensemble_that_asks_no_author() -> None:
    check = check_informed_ran(subject("pruning(rate=0.9)"), [[candidate("plain")]])
    assert check.level == "warn" and "none ran" in check.sentence
    assert "no attack of this ensemble takes the stance" in check.sentence and "quick" in check.remedy


def test_nobody_is_blamed_for_a_defense_that_attackers_were_not_told() -> None:
    lazy = subject(spelled(author="lazy"))
    threat = dataclasses.replace(lazy.targets[0].observation.threat, knows=frozenset({Knowledge.ARCHITECTURE}))
    targets = tuple(dataclasses.replace(t, observation=t.observation.replace(threat=threat)) for t in lazy.targets)
    assert check_informed_ran(dataclasses.replace(lazy, targets=targets), [[candidate("plain")]]).level == "ok"


def test_a_row_whose_informed_searches_never_moved_says_so() -> None:
    stuck, moved = candidate("magnitudes", best_loss=1.0), candidate("informed")
    plain = candidate("plain")
    assert check_informed_moved(subject("none"), [[plain, stuck], [stuck]]).level == "warn"
    assert check_informed_moved(subject("none"), [[plain, stuck], [moved]]).level == "ok"
    assert check_informed_moved(subject("none"), [[plain, candidate("informed", best_loss=float("nan"))]]).level == "warn"
    assert check_informed_moved(subject("none"), [[plain]]).level == "ok"
    assert "never fell in any of the 2" in check_informed_moved(subject("none"), [[stuck], [stuck]]).sentence


def test_who_stands_still_where_the_truth_is_no_better_has_nowhere_to_go() -> None:
    """Under noise a thousand times as loud as the update even the truth lowers the objective by nothing."""
    stuck = [[candidate("informed", best_loss=1.0)]] * 2
    gone, missed = Explained(found=0.5, truth=0.5001), Explained(found=0.6, truth=0.5)
    check = check_informed_moved(subject("none"), stuck, [gone, gone])
    assert check.level == "ok" and "the truth would not have made it fall" in check.sentence
    assert check_informed_moved(subject("none"), stuck, [gone, missed]).level == "warn"


def test_strong_noise_is_not_held_against_those_who_search_it() -> None:
    cell = Cell(data="digits", model="lenet", defense="gaussian_noise(std=10.0)", records=2, risk="off", lists="off")
    result = run_cell(cell.replace(ensemble="inverting_gradients(steps=5, objective='likelihood', stance='informed')")).result
    assert result.gap is not None and result.gap.search_failed.count == 0
    assert not result.failures, [check.sentence for check in result.failures]
    assert result.moved, "else the only defense that holds could never be told from a poor search"


@pytest.mark.parametrize(
    ("author", "rate", "status"),
    [
        ("lazy", 0.1, "failed"),
        ("copies", 0.1, "failed"),
        ("sizes", 0.1, "passed"),
        ("lazy", 1.0, "failed"),
        ("sizes", 1.0, "passed"),
    ],
)
def test_the_contract_of_a_defense_tells_a_lazy_author_from_one_who_wrote_four_lines(
    author: str, rate: float, status: str
) -> None:
    defense = TurnsSigns(author=author, rate=rate)
    (result,) = run_checks((adversary_undoes_something,), defense, Scene.of(defense))
    assert result.status == status
    assert status == "passed" or "informed: none ran" in result.message


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithoutLadder(TurnsSigns):
    """A first draft, with nothing on its card."""

    card = DefenseCard(name="without_ladder", summary="Turns signs.", random=True)


def test_the_contract_tells_a_first_draft_in_a_sentence_that_it_has_no_ladder() -> None:
    (result,) = run_checks((more_strength_distorts_more,), WithoutLadder(), Scene.of(WithoutLadder()))
    assert result.status == "failed" and result.message.startswith("the ladder has no rung")


class LazyGradDefense(GradDefense):
    """Its noise is far below the gradient of a steep loss, where nobody can tell which slices carry it."""

    def adversary(self) -> OpenAdversary:
        return Lazy()


@pytest.mark.parametrize(("defense", "status"), [(GradDefense(), "passed"), (LazyGradDefense(), "failed")])
def test_the_contract_looks_where_noise_is_loud_enough_to_be_told(defense: Defense, status: str) -> None:
    (result,) = run_checks((adversary_undoes_something,), defense, Scene.of(defense))
    assert result.status == status


@pytest.fixture(scope="module")
def photographs() -> Iterator[Cell]:
    yield Cell(data="photos", model="lenet", defense=spelled(), records=4, ensemble="quick", risk="off", known_labels=True)


def test_the_client_alone_gives_a_lazy_author_away(photographs: Cell) -> None:
    """The stance is chosen on public pictures, and the gate follows from what it finds."""
    seen = build_subject(photographs, load_cell_data(photographs), 0)
    attacks = line_up(resolve("quick"), seen.targets[0].observation, seen.context(1000))
    stances = {attack.stance for attack in attacks}
    assert {"magnitudes", "robust"} <= stances and "informed" not in stances


@pytest.mark.slow
def test_a_tenth_of_turned_signs_falls_to_magnitudes_whatever_the_author_says(photographs: Cell) -> None:
    result = run_cell(photographs.replace(records=16, known_labels=False)).result
    assert result.identified.count >= 12
    assert result.informed_by == "generic" and result.informed is not None
    check = next(each for each in result.checks if each.name == "informed_ran")
    assert check.level == "warn" and "none ran" in check.sentence
    outcome = compare([parse_limit("identified>0.25")], [result])
    assert outcome.violations and not outcome.doubts
    assert not result.capped and result.asked_steps == 400
