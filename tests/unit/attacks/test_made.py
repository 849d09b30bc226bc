"""How ensembles are put together from recipes: what a recipe's name means, who gets which stance, what patience adds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradveil.attacks import ensembles
from gradveil.attacks.adaptive import FIRST_STANCES, STANCES
from gradveil.attacks.ensembles import ENSEMBLES, Ensemble, Member
from gradveil.attacks.feature_inversion import FeatureInversion
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.attacks.linear_layer import LinearLayer
from gradveil.attacks.piste import PisteLike

SHARP: dict[str, Any] = {
    "objective": "cosine",
    "signed": False,
    "schedule": "cosine",
    "start": "grey",
    "smooth_relu": True,
    "relative": True,
}


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: ensembles._smooth_to_sharp(7, 3), {**SHARP, "steps": 7, "restarts": 3, "tv": 0.25, "tv_end": 2.5e-5}),
        (lambda: ensembles._smooth_to_sharp(7, tv=2.0, title="x"), {**SHARP, "restarts": 1, "tv": 2.0, "title": "x"}),
        (
            lambda: ensembles._stay_smooth(9),
            {**SHARP, "steps": 9, "learning_rate": 0.05, "tv": 0.5, "tv_end": 0.02, "title": "stay_smooth"},
        ),
        (
            lambda: ensembles._stay_smooth(9, restarts=2, tv=3.0),
            {"restarts": 2, "tv": 3.0, "tv_end": 0.02, "learning_rate": 0.05},
        ),
        (
            lambda: ensembles._likelihood(5, 10.0),
            {"objective": "likelihood", "tv": 10.0, "tv_end": None, "relative": False, "stance": "informed", "steps": 5},
        ),
        (lambda: ensembles._likelihood(5, 0.5), {"title": "noise_likelihood_0.5", "tv": 0.5}),
        (
            lambda: ensembles._smooth_layers(4),
            {"objective": "relative_l2", "tv_end": 2.5e-3, "steps": 4, "title": "smooth_layers"},
        ),
        (lambda: ensembles._embedding_sharp(6), {"objective": "l2", "steps": 6, "title": "embedding_sharp", "smooth_relu": True}),
        (lambda: ensembles._embedding_sharp(6, restarts=2, title="y"), {"objective": "l2", "restarts": 2, "title": "y"}),
        (
            lambda: ensembles._embedding_smooth(8),
            {"objective": "l2", "steps": 8, "tv": 3.0, "tv_end": 0.1, "smooth_relu": False, "title": "embedding_smooth"},
        ),
        (lambda: ensembles._embedding_smooth(8, tv=1.0), {"tv": 1.0, "tv_end": 0.1, "learning_rate": 0.05}),
    ],
)
def test_a_recipe_is_what_its_name_says(made: Any, told: dict[str, Any]) -> None:
    attack = made()
    assert isinstance(attack, InvertingGradients)
    assert {name: getattr(attack, name) for name in told} == told


@pytest.mark.parametrize("stances", [("plain", "informed"), FIRST_STANCES, ("plain", "informed", "zero_mask")])
def test_patience_is_four_times_the_steps_twice_the_starts_and_every_stance(stances: tuple[str, ...]) -> None:
    before = Member(InvertingGradients(steps=10, restarts=3), stances, where_equal=True)
    after = ensembles._patient(before)
    assert after == Member(InvertingGradients(steps=40, restarts=6), STANCES, where_equal=True)


@pytest.mark.parametrize("stances", [("informed",), ("plain",), ("plain", "zero_mask")])
def test_who_was_made_for_one_stance_keeps_it(stances: tuple[str, ...]) -> None:
    assert ensembles._patient(Member(InvertingGradients(steps=10), stances)).stances == stances


@pytest.mark.parametrize(
    ("attack", "after"),
    [
        (FeatureInversion(steps=5), FeatureInversion(steps=20, restarts=2)),
        (PisteLike(steps=5), PisteLike(steps=20, restarts=2)),
        (LinearLayer(), LinearLayer()),
    ],
)
def test_who_does_no_matching_keeps_its_stances_and_who_takes_no_steps_is_as_before(attack: Any, after: Any) -> None:
    for stances in (("plain",), ("plain", "informed")):
        assert ensembles._patient(Member(attack, stances)) == Member(after, stances)


def test_later_versions_add_stances_and_rounds_to_whoever_took_all_there_were() -> None:
    attack = InvertingGradients(steps=3)
    members = (
        Member(attack, FIRST_STANCES),
        Member(attack, ("plain", "informed")),
        Member(attack, FIRST_STANCES, where_equal=True),
    )
    before = Ensemble("a-1", "Before.", members, rehearsals=3)
    after = ensembles._in_every_stance(before, "a-2", "After.")
    assert (after.name, after.summary, after.rehearsals, after.by_round) == ("a-2", "After.", 3, True)
    assert after.members == (
        Member(attack, STANCES),
        Member(attack, ("plain", "informed")),
        Member(attack, STANCES, where_equal=True),
    )
    assert not before.by_round


def test_the_names_are_those_of_all_ensembles_in_order() -> None:
    assert ensembles.names() == sorted(ENSEMBLES) and len(ensembles.names()) > 10
    assert all(ENSEMBLES[name].name == name for name in ensembles.names())


def test_a_patient_ensemble_is_made_of_the_one_before() -> None:
    for patient, before in (("strong-1", "standard-4"), ("embedding-strong-1", "embedding-standard-2")):
        old, new = ENSEMBLES[before], ENSEMBLES[patient]
        assert new.rehearsals == 2 * old.rehearsals and new.by_round
        assert [replace(m, attack=n.attack, stances=n.stances) for m, n in zip(old.members, new.members, strict=True)] == [
            *new.members
        ]
        for slow, quick in zip(new.members, old.members, strict=True):
            steps, restarts = (4, 2) if hasattr(quick.attack, "steps") else (1, 1)
            spent, once = slow.attack.cost(), quick.attack.cost()
            assert (spent.steps, spent.restarts) == (steps * once.steps, restarts * once.restarts)
