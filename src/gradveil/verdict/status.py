"""What the numbers say: the status of a cell, the setting that leads the page, the best defense, and how far to trust it.

The status of a cell is about pictures, and compares the strongest attacker with the bar, the best of the nulls:

    no verdict                            a trust check failed
    broken                                even the lower bound of the share identified, corrected for the choice among attackers,
                                          lies above the upper bound of the best null
    information there, not found          no more was rebuilt than luck may, and who holds a list points most records out: the
                                          update has the information, and our search did not get it
    untested                              nothing shows that these attackers break even the undefended update
    cannot tell                           nothing was found, and searches are why: they failed, never moved, were cut off, or won
                                          nowhere else either; or nobody looked whether a list gives records away all the same
    not broken                            no more than by the best null, no closer pictures, at least 16 records, and the same
                                          attackers were shown to win where the defense is weaker
    not identified; power not measured    the same, and nobody looked how strong these attackers are
    unclear                               anything between: something seems to leak, or there are too few records to tell
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from gradveil.study.results import CellResult
from gradveil.study.run_result import Run
from gradveil.verdict.levels import bar_of, level_of

__all__ = [
    "Headline",
    "Setting",
    "Status",
    "at_the_null",
    "cannot_tell",
    "choose_headline",
    "closer_than_null",
    "listed",
    "settings_of",
    "status_of",
    "unlisted",
]

# Fewer records than this show a leak, but not that there is none; the check `enough_records` warns below it too.
ENOUGH = 16
MOST = 0.5
"""Of a share: who points out more than this on a list has the information; where more searches failed, they say nothing."""
# Where and how a cell was computed does not change the question it answers.
NOT_A_SETTING = {"defense", "execution", "threads", "device", "risk", "lists"}
IDLE = ("informed_ran", "informed_moved")
"""Checks that say that nobody who knows the defense really attacked."""


class Status(Enum):
    """What a cell lets us say about its defense."""

    NO_VERDICT = "no verdict"
    BROKEN = "broken"
    LISTED = "information there, not found"
    UNCLEAR = "unclear"
    CANNOT_TELL = "cannot tell"
    UNPROVEN = "not identified; power not measured"
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
        """The defense with the lowest upper bound for pictures; ties by that for lists, then bytes, client time and regret."""
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


def _rank(cell: CellResult) -> tuple[float, float, float, float, float]:
    def known(value: float | None) -> float:
        return math.inf if value is None else value

    high, listed = round(cell.identified.high, 9), level_of(cell, "list").share
    return (
        high,
        round(listed.high, 9) if listed is not None else math.inf,
        known(cell.bytes.up),
        known(cell.timing.defense_ms),
        known(cell.regret.worst),
    )


def closer_than_null(cell: CellResult) -> bool:
    """Whether the pictures are closer to the originals than the best null, beyond the interval."""
    psnr, bar = cell.selected.psnr, cell.bar.psnr
    return psnr is not None and psnr.low is not None and bar is not None and psnr.low > bar.value


def cannot_tell(cell: CellResult) -> str:
    """Return why finding nothing says nothing about the defense; empty where it does."""
    idle = next((check for check in cell.checks if check.name in IDLE and check.level != "ok"), None)
    if idle is not None:
        said = idle.sentence.strip().rstrip(".") or "no attacker who knows the defense searched"
        return said[:1].lower() + said[1:]
    if cell.gap is not None and cell.gap.search_failed.value > MOST:
        failed = cell.gap.search_failed
        return (
            f"the search failed for {failed.count} of {failed.n} records, whose truth explains the update better than its finds"
        )
    power = cell.power
    if power is not None and not power.shown and (power.ladder or power.planted):
        return "these attackers won only where nothing was defended, if anywhere"
    if cell.capped and (power is None or not power.shown):
        return f"the attackers were cut off after {cell.settings.steps} steps"
    return ""


def listed(cell: CellResult) -> bool:
    """Whether who holds a list points most records out, beyond doubt."""
    view = level_of(cell, "list")
    return view.share is not None and view.share.low > MOST


def unlisted(cell: CellResult) -> str:
    """Return why nobody knows whether who holds a list points records out, which would unmake "not broken"; else nothing."""
    view = level_of(cell, "list")
    return "" if view.share is not None else f"nobody looked whether a list gives the records away ({view.reason})"


def status_of(cell: CellResult, undefended: CellResult | None) -> Status:
    """Return what the cell lets us say, given the undefended cell of its setting."""
    share, bar = cell.identified, bar_of(cell)
    if cell.failures:
        return Status.NO_VERDICT
    if share.low > bar.top:
        return Status.BROKEN
    # A hit or two more than the null had, and not beyond luck, is no break; with a list it is no doubt either.
    if listed(cell) and not closer_than_null(cell):
        return Status.LISTED
    quiet = at_the_null(cell)
    shown = cell.power is not None and cell.power.shown
    if not cell.defense.is_none and not shown and not _attackers_win(undefended):
        return Status.UNTESTED
    if not quiet:
        return Status.UNCLEAR
    if cannot_tell(cell):
        return Status.CANNOT_TELL
    if (share.effective or share.n) < ENOUGH:
        return Status.UNCLEAR
    if not shown:
        return Status.UNPROVEN
    return Status.CANNOT_TELL if unlisted(cell) else Status.UNBROKEN


def at_the_null(cell: CellResult) -> bool:
    """Whether no more was identified than by the best null, no closer pictures were found, and no owners given away by them."""
    few = cell.identified.value <= bar_of(cell).value + 1e-9
    return few and not closer_than_null(cell) and not level_of(cell, "owner").open


def _attackers_win(undefended: CellResult | None) -> bool:
    return undefended is not None and not undefended.failures and not at_the_null(undefended)


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
