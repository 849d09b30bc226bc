"""Which points of a power curve are needed, and what they say together.

A point is a unit of work and of resumption like a cell, kept under a key of its own in ``power/`` of the results folder, so a
killed run goes on behind the last point, and curves share points. Where the plan has a cell with that very setting and at least
as many records, the cell is the point. Nothing here depends on when a point was measured: which ones belong to a curve is
decided by what they found alone, so a run that was killed, or did one too many in parallel, ends with the same bytes.

**Planted leaks** are tried in the order of `WEIGHTS`, each only where it can still narrow down where half of the records are
found: the whole update first, which is the canary; then equal loudness; then ten times louder or quieter as needed. That is at
most four. Where even the whole update is not found, none is looked for that is quieter.

**Weaker settings** are tried from off (usually the plan's own undefended cell) over the nearest below: up to the first that is
broken, since what is weaker still would be, too; and not at all where off is not broken.

Of a defense that is broken as it is, no weaker setting needs to be shown, and where half is found without any leak, the canary
alone is measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradveil.attacks import resolve
from gradveil.audit.materials import Materials
from gradveil.audit.power import RECORDS
from gradveil.audit.threat import threat_of
from gradveil.run.weaker import weaker_settings
from gradveil.study.cell import Cell
from gradveil.study.evidence import Power, Rung
from gradveil.study.measures import Share
from gradveil.study.results import CellResult, Check
from gradveil.study.rung import RungTask

__all__ = ["MOST_LEAKS", "WEIGHTS", "Curve", "Point", "always_measured", "curve_of", "ensemble_name", "half_found", "of_cell"]

OFF = "none"
WEIGHTS = (1.0, 0.5, 0.9, 0.1, 0.99, 0.01)
MOST_LEAKS = 4
"""Of these weights, how many one curve can need."""
HALF = 0.5
BESIDE: dict[str, Any] = {"risk": "off", "lists": "off"}
"""What is measured beside the attacks of a cell plays no part in a point."""
BROKEN = "broken as it is, so no weaker setting was tried"
SINCE = {"standard": 4, "embedding-standard": 2, "strong": 1, "embedding-strong": 1}
"""From which version on an ensemble comes with power; those published before had none, and their cells stay as they were."""

Measured = tuple[Rung, tuple[Check, ...]]
Read = Callable[["Point"], Measured | None]
"""What is known of a point, with the canaries; None where it is not measured yet."""


def always_measured(cell: Cell) -> bool:
    """Whether power is measured whoever asks, because the ensemble claims to be a judgement."""
    name = resolve(cell.ensemble, threat_of(cell).sees).name
    found = re.fullmatch(r"(.+)-(\d+)", name)
    return bool(found) and found[1] in SINCE and int(found[2]) >= SINCE[found[1]]  # type: ignore[index]


@dataclass(frozen=True)
class Point:
    """One point of a curve, and where it is kept: under the key of a cell of the run, or of its own."""

    task: RungTask
    key: str
    is_cell: bool = False


@dataclass(frozen=True)
class Curve:
    """All points that one cell's curve may need.

    Attributes:
        cell: The cell itself.
        planted: Weights of the leak in the order they are tried.
        ladder: Settings in the order they are tried: off, then those below from the nearest.
    """

    cell: Point
    planted: tuple[Point, ...]
    ladder: tuple[Point, ...] = ()

    @property
    def points(self) -> tuple[Point, ...]:
        """All of them."""
        return (*self.planted, *self.ladder)

    def wants(self, point: Point, read: Read) -> bool:
        """Whether a point may still be needed, as far as is known; what is not wanted once never will be."""
        own = read(self.cell)
        if own is None:
            return True
        if point in self.ladder:
            return self._wants_setting(self.ladder.index(point), own[0], read)
        return _wants_leak(point.task.leak, self._weights(own[0], read))

    def power(self, read: Read) -> tuple[Power, tuple[Check, ...]] | None:
        """Return the curve with what the canaries say, or None where a point is missing."""
        own = read(self.cell)
        if own is None:
            return None
        weights = self._weights(own[0], read)
        planted = [point for point in self.planted if point.task.leak in weights]
        ladder = self._tried(own[0], read)
        missing = [p for p in self.points if self.wants(p, read) and p not in planted and p not in ladder]
        if missing:
            return None
        leaks = sorted((self._rung(point, read) for point in planted), key=lambda rung: rung.leak)
        # Off is the weakest; the rest was tried from the nearest down.
        weaker = [self._rung(point, read) for point in (*ladder[:1], *reversed(ladder[1:]))]
        between = [rung for rung in weaker if rung.spelling != OFF] + [rung for rung in leaks if rung.leak < 1]
        power = Power(
            ensemble=ensemble_name(self.cell.task.cell),
            ladder=tuple(weaker),
            planted=tuple(leaks),
            a50=half_found({0.0: own[0].identified, **{rung.leak: rung.identified for rung in leaks}}),
            shown=own[0].broken or any(rung.broken for rung in between),
            reason=BROKEN if own[0].broken and self.cell.task.cell.defense != OFF else "",
        )
        canaries = [check for point in planted for check in (read(point) or (None, ()))[1]]
        return power, tuple(_beside(check, own[0].broken) for check in canaries)

    def _weights(self, own: Rung, read: Read) -> dict[float, Share]:
        """Return what is known at the weights that belong to the curve, that of no leak included."""
        known = {0.0: own.identified}
        for point in self.planted:
            if not _wants_leak(point.task.leak, known):
                continue
            found = read(point)
            if found is None:
                break
            known[point.task.leak] = found[0].identified
        return known

    def _tried(self, own: Rung, read: Read) -> list[Point]:
        """Return the settings that belong to the curve, as far as they are measured."""
        tried: list[Point] = []
        for place, point in enumerate(self.ladder):
            if not self._wants_setting(place, own, read):
                break
            if read(point) is None:
                break
            tried.append(point)
        return tried

    def _wants_setting(self, place: int, own: Rung, read: Read) -> bool:
        if own.broken:
            return False
        for index, before in enumerate(self.ladder[:place]):
            found = read(before)
            # Off must be broken for the rest to be worth trying; the first of these that is broken ends it.
            if found is not None and found[0].broken != (index == 0):
                return False
        return True

    def _rung(self, point: Point, read: Read) -> Rung:
        found = read(point)
        assert found is not None  # the curve is whole
        spelling = "" if point.task.leak else point.task.cell.defense
        return replace(found[0], spelling=spelling, leak=point.task.leak)


def ensemble_name(cell: Cell) -> str:
    """Return who attacked; a cap on steps makes another ensemble of it."""
    name = resolve(cell.ensemble, threat_of(cell).sees).name
    return f"{name}, at most {cell.steps} steps" if cell.steps else name


def _wants_leak(weight: float, known: dict[float, Share]) -> bool:
    """Whether a weight can narrow down where half is found; a weight that is known is part of the curve."""
    if weight == 1:
        return True
    if 1.0 not in known:
        return known[0.0].value < HALF
    others = {leak: share.value for leak, share in known.items() if leak != weight}
    low = max((leak for leak, value in others.items() if value < HALF), default=math.inf)
    high = min((leak for leak, value in others.items() if value >= HALF), default=-math.inf)
    return low < weight < high


def half_found(shares: dict[float, Share]) -> float | None:
    """Return the weight at which half of the records are found, or None where no weight tried reached half.

    The shares are first made to grow with the weight (isotonic regression, weighted by records: pool adjacent violators). Between
    two weights the share is taken as linear in log(a/(1 - a)), the logarithm of how much louder the leak is than the release;
    beside 0 and 1, where that is infinite, the answer is the smallest weight that was shown to reach half.

    >>> share = lambda value: Share(value=value, low=0, high=1, count=0, n=16)
    >>> half_found({0.0: share(0.0), 0.1: share(0.25), 0.5: share(0.75), 1.0: share(1.0)})
    0.25
    """
    weights = sorted(shares)
    fitted = _isotonic([shares[a].value for a in weights], [shares[a].n for a in weights])
    place = next((index for index, value in enumerate(fitted) if value >= HALF), None)
    if place is None:
        return None
    high = weights[place]
    low = weights[place - 1] if place else high
    if low in (0.0, high) or high == 1:
        return high
    part = (HALF - fitted[place - 1]) / (fitted[place] - fitted[place - 1])
    odds = math.log(low / (1 - low)) * (1 - part) + math.log(high / (1 - high)) * part
    return round(1 / (1 + math.exp(-odds)), 6)


def _isotonic(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    pools: list[list[float]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        pools.append([value, float(weight), 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            right, left = pools.pop(), pools.pop()
            both = left[1] + right[1]
            pools.append([(left[0] * left[1] + right[0] * right[1]) / both, both, left[2] + right[2]])
    return [mean for mean, _, count in pools for _ in range(int(count))]


def _beside(check: Check, broken: bool) -> Check:
    """Return a check as it stands beside the cell: what was found is found, however weak who found it."""
    if check.name == "canary_found" and check.level == "fail" and broken:
        return replace(check, level="warn", remedy="The leak of this row is real; how much more others would find is open.")
    return check


def curve_of(cell: Cell, key_of: Callable[[Cell], str], cells: dict[str, Cell], materials: Materials) -> Curve:
    """Return the curve of a cell.

    Args:
        cell: Of the run.
        key_of: Tells the key of a cell's result.
        cells: All cells of the run, by key: one with the same setting and no fewer records is a point by itself.
        materials: What the run has read and built so far.
    """
    few = cell.replace(records=min(cell.records, RECORDS), **BESIDE)
    small = key_of(few)

    def setting(defense: str) -> Point:
        task = RungTask(cell=few.replace(defense=defense))
        same = [key for key, each in cells.items() if each.replace(records=few.records, **BESIDE) == task.cell]
        fitting = [key for key in same if cells[key].records >= few.records]
        return Point(task, fitting[0], is_cell=True) if fitting else Point(task, task.key(key_of(task.cell)))

    own = Point(RungTask(cell=cell), next(key for key, each in cells.items() if each == cell), is_cell=True)
    defended = cell.defense != OFF
    leaks = [RungTask(cell=few, leak=weight) for weight in (WEIGHTS if defended else WEIGHTS[:1])]
    names = [OFF, *reversed(weaker_settings(cell.defense, materials, cell.rounds))] if defended else []
    return Curve(own, tuple(Point(task, task.key(small)) for task in leaks), tuple(setting(name) for name in names))


def of_cell(result: CellResult) -> Rung:
    """Return a cell as a point of a curve."""
    psnr = result.selected.psnr
    return Rung(identified=result.identified, psnr=psnr.median if psnr else None, null=result.bar.identified)
