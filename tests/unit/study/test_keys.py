"""A result is kept under everything that decides it: change one setting, and it is another result."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gradveil.study.cell import Cell
from gradveil.study.training import Training


def another(value: Any) -> Any:
    """Return a value of the same type that is not the same."""
    if value is None:
        return 1
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else (*value, "x") if isinstance(value, tuple) else f"{value}x"


def changed(settings: Cell | Training, name: str) -> Cell | Training:
    """Change one setting, whether or not it then still means something: the key must not care."""
    copy = dataclasses.replace(settings)
    object.__setattr__(copy, name, another(getattr(settings, name)))
    return copy


@pytest.mark.parametrize(
    ("settings", "name"),
    [(kind, field.name) for kind in (Cell(), Training(cut="1")) for field in dataclasses.fields(kind)],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_every_setting_is_part_of_the_key(settings: Cell | Training, name: str) -> None:
    assert changed(settings, name).key() != settings.key()
    assert dataclasses.replace(settings).key() == settings.key()


@pytest.mark.parametrize("settings", [Cell(), Training()], ids=["cell", "training"])
def test_content_is_part_of_the_key(settings: Cell | Training) -> None:
    keys = {settings.key(), settings.key(data="a"), settings.key(data="b"), settings.key(weights="a")}
    assert len(keys) == 4
