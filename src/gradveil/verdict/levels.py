"""What an attacker gets at each level, in one form: label, record from a list, picture, and the last two by owner."""

from __future__ import annotations

from dataclasses import dataclass

from gradveil.study.headline import contenders
from gradveil.study.levels import Level, Reach
from gradveil.study.measures import Bar, Share
from gradveil.study.results import CellResult

__all__ = ["LEVELS", "View", "bar_of", "level_of", "levels_of"]

LEVELS = ("label", "list", "picture")
"""In the order of what each gives away: a label narrows records down, a list names one of them, a picture needs no list."""

UNITS = {"label": "label", "list": "record", "picture": "record", "owner": "owner", "list_owner": "owner", "presence": "answer"}
DONE = {
    "label": "found",
    "list": "pointed out on a list",
    "picture": "identified",
    "owner": "identified",
    "list_owner": "pointed out on a list",
    "presence": "right",
}
OLD = "the cell was measured by a version that did not look; audit again"
SWITCHED_OFF = 'lists were switched off; leave out lists = "off" and audit again'
NO_OWNERS = "the data name no owners; bring them with the data (docs/data.md)"


@dataclass(frozen=True, kw_only=True)
class View:
    """One level of one cell.

    Attributes:
        name: Of the level, as limits spell it.
        share: What the strongest attacker got; None where nothing was measured.
        attacker: Who that was.
        null: What the best answer without the update gets.
        upper: The largest exact upper end of everybody who tried, which limits are compared with.
        size: Candidates on the list, or among whom a picture is identified.
        hurried: Whose the largest upper end is, where they had time for fewer than the strongest, and for how many; empty else.
        reason: Why nothing was measured, and what to do.
    """

    name: str
    share: Share | None = None
    attacker: str = ""
    null: Bar | None = None
    upper: float = 1.0
    size: int | None = None
    hurried: str = ""
    reason: str = ""

    @property
    def unit(self) -> str:
        """What is counted."""
        return UNITS[self.name]

    @property
    def done(self) -> str:
        """What was done to those counted."""
        return DONE[self.name]

    @property
    def open(self) -> bool:
        """Whether even the lower end lies above what anyone gets without the update."""
        return self.share is not None and self.null is not None and self.share.low > self.null.top


def bar_of(cell: CellResult) -> Bar:
    """Return what the best null identifies; the chance level where no null was measured."""
    chance = cell.chance or (1 / cell.distinct if cell.distinct else 0.0)
    return cell.bar.identified or Bar(null="chance", value=chance, high=chance)


def levels_of(cell: CellResult) -> tuple[View, View, View]:
    """Return label, list and picture."""
    return level_of(cell, "label"), level_of(cell, "list"), level_of(cell, "picture")


def level_of(cell: CellResult, name: str) -> View:
    """Return one level: label, list, picture, or owner, list_owner and presence."""
    if name == "picture":
        upper = max(each.share.upper for each in contenders(cell))
        who, size = cell.strongest.name, cell.distinct
        return View(name=name, share=cell.identified, attacker=who, null=bar_of(cell), upper=upper, size=size)
    if cell.levels is None:
        return View(name=name, reason=OLD)
    if name == "label":
        return _view(name, cell.levels.label)
    if name == "owner":
        return _view(name, cell.levels.owners, NO_OWNERS, size=cell.distinct)
    listed = cell.levels.listed
    if listed is None:
        return View(name=name, reason=SWITCHED_OFF if cell.settings.lists == "off" else OLD)
    if name == "presence":
        return _view(name, listed.presence, listed.reason or OLD)
    headline = listed.headline
    size = headline.size if headline is not None else None
    if name == "list":
        return _view(name, headline, listed.reason or OLD, size=size)
    if headline is None or headline.owners is None:
        return View(name=name, reason=listed.reason or NO_OWNERS)
    return View(
        name=name,
        share=headline.owners,
        attacker=headline.attacker,
        null=headline.owners_null,
        upper=max(each.upper for each in (headline.owners, *(reach.owners for reach in headline.reached)) if each is not None),
        size=size,
    )


def _view(name: str, level: Level | None, reason: str = OLD, size: int | None = None) -> View:
    if level is None or level.share is None:
        return View(name=name, reason=(level.reason if level is not None else "") or reason)
    widest = max((Reach(share=level.share), *level.reached), key=lambda each: each.share.upper)
    hurried = f"the attacker {widest.attacker!r} had time for {widest.share.n}" if widest.share.n < level.share.n else ""
    upper = widest.share.upper
    return View(name=name, share=level.share, attacker=level.attacker, null=level.null, upper=upper, size=size, hurried=hurried)
