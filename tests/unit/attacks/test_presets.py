"""Every setting of a preset reaches the recipe under its own name and with its own value, and decides what is found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gradveil.attacks import launch
from gradveil.attacks.deep_leakage import DLG, IDLG
from gradveil.attacks.gradient_matching import GradientMatching
from gradveil.attacks.inverting_gradients import InvertingGradients
from tests.unit.attacks.scenes import make_batch, make_context, make_learner, observe

OTHERS: dict[str, Any] = {
    "steps": 7,
    "restarts": 3,
    "learning_rate": 0.25,
    "signed": None,
    "schedule": "constant",
    "tv": 0.125,
    "tv_end": 0.0625,
    "relative": None,
    "objective": "layer_cosine",
    "start": "uniform",
    "labels": "joint",
    "smooth_relu": None,
    "stance": "informed",
    "title": "another name",
}
CASES = [
    (preset, field.name)
    for preset in (InvertingGradients(), DLG(), IDLG())
    for field in dataclasses.fields(preset)
    if field.name in OTHERS
]


def settings_of(attack: GradientMatching) -> dict[str, Any]:
    """Return everything the recipe and its optimiser hold."""
    recipe = attack.recipe()
    return {**vars(recipe), **vars(recipe.optimiser)}


@pytest.mark.parametrize(("preset", "name"), CASES, ids=lambda value: value if isinstance(value, str) else value.card.name)
def test_each_setting_reaches_the_recipe_and_nothing_else_moves(preset: GradientMatching, name: str) -> None:
    value = OTHERS[name] if OTHERS[name] is not None else not getattr(preset, name)
    before, after = settings_of(preset), settings_of(dataclasses.replace(preset, **{name: value}))
    changed = {key: after[key] for key in after if after[key] != before[key] and key != "optimiser"}
    assert changed == {"name" if name == "title" else name: value}


@pytest.mark.parametrize("name", ["signed", "learning_rate", "tv", "schedule", "restarts", "start"])
def test_what_is_found_depends_on_the_setting(name: str) -> None:
    seen = observe(make_learner(), make_batch())
    attack = InvertingGradients(steps=6, tv=0.0)
    value = OTHERS[name] if OTHERS[name] is not None else not getattr(attack, name)
    changes: Any = {name: value}
    before, after = (launch(each, [seen], make_context()) for each in (attack, dataclasses.replace(attack, **changes)))
    if name == "restarts":
        assert (len(before), len(after)) == (1, 3)
    else:
        assert float((before[0].inputs - after[0].inputs).abs().max()) > 1e-3
