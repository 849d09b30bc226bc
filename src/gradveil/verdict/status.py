"""What the numbers say: the status of a cell, the setting that leads the page, the best defense, and how far to trust it.

The status of a cell compares the verdict (candidates selected without seeing the truth) with the bar, the best of the nulls:

    no verdict    a trust check failed
    broken        even the lower bound of the share identified lies above the upper bound of the best null
    not broken    no more records identified than by the best null, and no closer pictures either, of at least 16 records
    unclear       anything between: something seems to leak, or there are too few records to tell
    untested      it would be "not broken" or "unclear", but nothing shows that these attackers break even the undefended update
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from gradveil.study.measures import Bar
from gradveil.study.results import CellResult
from gradveil.study.run_result import Run

__all__ = ["Headline", "Setting", "Status", "bar_of", "choose_headline", "closer_than_null", "settings_of", "status_of"]

# Fewer records than this show a leak, but not that there is none; the check `enough_records` warns below it too.
ENOUGH = 16
# Where and how a cell was computed does not change the question it answers.
NOT_A_SETTING = {"defense", "execution", "threads", "device", "risk", "lists"}


class Status(Enum):
    """What a cell lets us say about its defense."""

    NO_VERDICT = "no verdict"
    BROKEN = "broken"
    UNCLEAR = "unclear"
    UNBROKEN = "not broken"
    UNTESTED = "untested"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All cells that differ in nothing but the defense."""

    cells: tuple[CellResult, ...]

    @property
    def undefended(self) -> CellResult | None:
        """The cell without a defense, if it is done."""
        return next((cell for cell in self.cells if cell.defense.is_none), None)

    @property
    def defended(self) -> tuple[CellResult, ...]:
        """The cells with a defense."""
        return tuple(cell for cell in self.cells if not cell.defense.is_none)

    @property
    def best(self) -> CellResult | None:
        """The defense with the lowest upper bound; ties by bytes, then client time, then regret."""
        judged = [cell for cell in self.defended if not cell.failures]
        return min(judged, key=_rank, default=None)


@dataclass(frozen=True, kw_only=True)
class Headline:
    """What the first screen speaks about."""

    setting: Setting
    settings: tuple[Setting, ...]
    undefended: CellResult | None
    best: CellResult | None

    @property
    def helps(self) -> bool:
        """Whether the best defense lowers the upper bound at all."""
        if self.best is None or self.undefended is None:
            return False
        return self.best.identified.high < self.undefended.identified.high - 1e-9


def _rank(cell: CellResult) -> tuple[float, float, float, float]:
    def known(value: float | None) -> float:
        return math.inf if value is None else value

    high = round(cell.identified.high, 9)
    return high, known(cell.bytes.up), known(cell.timing.defense_ms), known(cell.regret.worst)


def bar_of(cell: CellResult) -> Bar:
    """Return what the best null identifies; the chance level where no null was measured."""
    chance = 1 / cell.candidates if cell.candidates else 0.0
    return cell.bar.identified or Bar(null="chance", value=chance, high=chance)


def closer_than_null(cell: CellResult) -> bool:
    """Whether the pictures are closer to the originals than the best null, beyond the interval."""
    psnr, bar = cell.selected.psnr, cell.bar.psnr
    return psnr is not None and psnr.low is not None and bar is not None and psnr.low > bar.value


def status_of(cell: CellResult, undefended: CellResult | None) -> Status:
    """Return what the cell lets us say, given the undefended cell of its setting."""
    share, bar = cell.identified, bar_of(cell)
    if cell.failures:
        return Status.NO_VERDICT
    if share.low > bar.top:
        return Status.BROKEN
    if not cell.defense.is_none and not _attackers_win(undefended):
        return Status.UNTESTED
    return Status.UNBROKEN if _at_the_null(cell) and share.n >= ENOUGH else Status.UNCLEAR


def _at_the_null(cell: CellResult) -> bool:
    return cell.identified.value <= bar_of(cell).value + 1e-9 and not closer_than_null(cell)


def _attackers_win(undefended: CellResult | None) -> bool:
    return undefended is not None and not undefended.failures and not _at_the_null(undefended)


def settings_of(cells: Sequence[CellResult]) -> tuple[Setting, ...]:
    """Group cells by everything but the defense, in plan order."""
    groups: dict[tuple[tuple[str, str], ...], list[CellResult]] = {}
    for cell in cells:
        told = cell.settings.as_dict()
        key = tuple(sorted((name, str(value)) for name, value in told.items() if name not in NOT_A_SETTING))
        groups.setdefault(key, []).append(cell)
    return tuple(Setting(cells=tuple(group)) for group in groups.values())


def choose_headline(run: Run) -> Headline:
    """Choose the setting that leads the page: the one whose undefended update gave away most.

    Settings whose undefended cell has a verdict come first, then those where it failed a check, then those without one.
    """
    settings = settings_of(run.cells)

    def exposure(setting: Setting) -> tuple[int, float, float, int]:
        cell = setting.undefended
        if cell is None:
            return 0, 0.0, 0.0, len(setting.cells)
        share = cell.identified
        return (1 if cell.failures else 2), share.value, share.low, len(setting.cells)

    leading = max(settings, key=exposure)
    return Headline(setting=leading, settings=settings, undefended=leading.undefended, best=leading.best)
