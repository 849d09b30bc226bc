"""Every setting that a defense refuses is refused under the defense's name and its own."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from gradveil.defenses import DEFENSES
from gradveil.errors import UsageError

FREE = {("precode", "seed"), ("refiner", "network"), ("shadow", "generator"), ("shadow", "layer")}
CASES = [
    (name, field.name)
    for name in DEFENSES.names()
    for field in dataclasses.fields(DEFENSES.build(name))
    if (name, field.name) not in FREE and not isinstance(getattr(DEFENSES.build(name), field.name), bool)
]


@pytest.mark.parametrize(("name", "setting"), CASES, ids=str)
def test_nonsense_is_refused_by_name(name: str, setting: str) -> None:
    value = getattr(DEFENSES.build(name), setting)
    wrong: Any = (
        "nonsense" if isinstance(value, str) else -5 if isinstance(value, int) else (-5,) * 2 if value == (8, 4) else math.nan
    )
    with pytest.raises(UsageError) as caught:
        dataclasses.replace(DEFENSES.build(name), **{setting: wrong})
    assert str(caught.value).startswith(f"{name}: {setting} "), str(caught.value)


@pytest.mark.parametrize(
    "name", [name for name in DEFENSES.names() if DEFENSES.build(name).quick() != DEFENSES.build(name) and name != "shadow"]
)
def test_a_quick_twin_is_quick_once_and_differs_in_effort_alone(name: str) -> None:
    defense = DEFENSES.build(name)
    twin = defense.quick()
    assert twin.quick() == twin
    efforts = {"trials", "mode", "most", "steps", "spared", "refresh", "latent_steps", "fit_steps"}
    changed = {f.name for f in dataclasses.fields(defense) if getattr(defense, f.name) != getattr(twin, f.name)}
    assert changed and changed <= efforts
    if "mode" in {f.name for f in dataclasses.fields(defense)}:
        assert getattr(twin, "mode") == "leading"  # noqa: B009


FLAGS = [
    (name, field.name)
    for name in DEFENSES.names()
    for field in dataclasses.fields(DEFENSES.build(name))
    if isinstance(getattr(DEFENSES.build(name), field.name), bool)
]


@pytest.mark.parametrize(("name", "setting"), FLAGS, ids=str)
def test_a_flag_that_is_none_is_refused_by_name(name: str, setting: str) -> None:
    with pytest.raises(UsageError) as caught:
        dataclasses.replace(DEFENSES.build(name), **{setting: "maybe"})
    assert str(caught.value).startswith(f"{name}: {setting} "), str(caught.value)
