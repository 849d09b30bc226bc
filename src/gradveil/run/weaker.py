"""The same defense at weaker settings, for power curves: what its card's ladder has below, or its numbers moved towards off."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gradveil.audit.materials import Materials
from gradveil.defenses import Defense, chain, parts_of
from gradveil.registry import split_chain
from gradveil.run.ladders import spell_part
from gradveil.study.checks import is_number

__all__ = ["MOST", "weaker_settings"]

LASTS = "active_rounds"
"""Setting that says after how many rounds a defense is switched off; 0 is never."""
MOST = 4
"""Weaker settings at most: the three next below, and the weakest; a card has four or five, and a gap between would flatter."""
TOWARDS_OFF = 3.0
"""Factor by which a number comes nearer to off, where the ladder has nothing below."""


def weaker_settings(spelling: str, materials: Materials | None = None, rounds: int | None = None) -> list[str]:
    """Return spellings of the same defense at weaker settings, the weakest first; none where it has no knob.

    Parts of a chain are weakened together, each by as many steps of its own; one with fewer steps stays at its weakest.

    Args:
        spelling: Of the defense.
        materials: Takes in what is built on the way.
        rounds: How many are seen. A setting that only ends earlier, and not before these, is no weaker.
    """
    materials = materials or Materials()
    names, parts = split_chain(spelling), parts_of(materials.defense(spelling))
    if len(names) != len(parts):
        return []  # a defense of the user's own that is a chain inside
    below = [[each for each in _below(part) if _lasting(each, rounds) != _lasting(part, rounds)] for part in parts]
    found: dict[str, Defense] = {}
    for step in range(1, 1 + max(len(each) for each in below)):
        weaker = [each[max(0, len(each) - step)] if each else part for part, each in zip(parts, below, strict=True)]
        spelt = " + ".join(spell_part(name, part) for name, part in zip(names, weaker, strict=True))
        found.setdefault(spelt, chain(*weaker))
    found.pop(spelling, None)
    spellings = list(reversed(found))
    kept = spellings if len(spellings) <= MOST else [spellings[0], *spellings[1 - MOST :]]
    for each in kept:
        materials.keep(each, found[each])
    return kept


def _lasting(part: Any, rounds: int | None) -> Any:
    """Return a part as it is in the first rounds: one that is switched off later, or never, is the same there."""
    active = getattr(part, LASTS, None)
    return dataclasses.replace(part, **{LASTS: 0}) if active is not None and rounds is not None and active >= rounds else part


def _below(part: Any) -> list[Any]:
    """Return the settings below that of one part, the weakest first."""
    card = type(part).card
    fields = {field.name: field for field in dataclasses.fields(part)}
    knobs = {name for rung in card.ladder for name in rung}
    usual = {name: fields[name].default for name in knobs}
    # What a rung does not say it leaves at the default; all other settings are the user's.
    rungs = [dataclasses.replace(part, **(usual | dict(rung))) for rung in card.ladder]
    if part in rungs:
        return rungs[: rungs.index(part)]
    if len(knobs) == 1:
        below = _below_on_ladder(part, next(iter(knobs)), rungs)
        if below:
            return below
    return _towards_off(part, card.off or {})


def _below_on_ladder(part: Any, knob: str, rungs: list[Any]) -> list[Any]:
    values, own = [getattr(rung, knob) for rung in rungs], getattr(part, knob)
    if not all(is_number(value) for value in (*values, own)):
        return []
    up = values[-1] > values[0]
    return [rung for rung, value in zip(rungs, values, strict=True) if (value < own if up else value > own)]


def _towards_off(part: Any, off: Mapping[str, Any]) -> list[Any]:
    """Return two steps towards off, the nearer to off first; numbers without a finite off grow."""
    own = {name: getattr(part, name) for name in off}
    moves = {name: value for name, value in off.items() if isinstance(own[name], float) and own[name] != value}
    steps = []
    for power in (2, 1) if moves else ():
        factor = TOWARDS_OFF**power
        steps.append(dataclasses.replace(part, **{name: _moved(own[name], to, factor) for name, to in moves.items()}))
    return steps


def _moved(value: float, off: Any, factor: float) -> float:
    if not is_number(off):
        return _round(value * factor)
    return _round(off + (value - off) / factor)


def _round(value: float) -> float:
    """Three digits are enough, and a spelling that people can read is worth more."""
    return float(f"{value:.3g}")
