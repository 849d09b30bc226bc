"""What an attacker gets of a record, at three levels, as values: its label, the record from a list, its picture.

A defense may hold at one level and not at another, so each has its own attackers, null, interval and limit. The picture is what
`CellResult.identified` always meant; label and list stand here, with both upper levels counted by owner where data have owners.
`gradveil.audit.label_level` and `gradveil.audit.list_level` measure them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradveil.study.codec import OMITTED, named
from gradveil.study.measures import Bar, Share

__all__ = ["LISTS", "Level", "Levels", "ListLevel", "Listed", "Reach", "Sensitivity"]

LISTS = ("random", "same_label", "nearest", "others_known")
"""Kinds of lists: any records; records of the same label; those whose updates are nearest to the truth's; and, for batches, any
records where the attacker knows all others of the update."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What one attacker reached alone.

    Attributes:
        attacker: Its name.
        share: What it reached.
        informed: Whether it uses more of the defense than the decoded update.
        rehearsed: What it reached on releases it made itself, whose truth it knows; None where it made none.
        owners: What it reached by owner, on lists of data with owners.
    """

    attacker: str = ""
    share: Share
    informed: bool = False
    rehearsed: float | None = field(default=None, metadata=OMITTED)
    owners: Share | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level of leak.

    Attributes:
        share: Of the strongest attacker: the largest count. Its lower end allows for the choice among several, its upper end is
            the largest of all.
        attacker: Whose count that is.
        null: What the best answer without the update reaches, as the largest of as many draws.
        reached: Everybody who tried.
        owners: The same counted by owner: an owner is hit where any record of theirs is; None where data have no owners.
        owners_null: What the best answer without the update reaches by owner.
        reason: Why nothing was measured; empty where something was.
    """

    share: Share | None = None
    attacker: str = ""
    null: Bar | None = None
    reached: tuple[Reach, ...] = ()
    owners: Share | None = field(default=None, metadata=OMITTED)
    owners_null: Bar | None = field(default=None, metadata=OMITTED)
    reason: str = field(default="", metadata=OMITTED)


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """How far the truth stands above other candidates, in standard deviations of their scores, and what follows for other lists.

    Attributes:
        d: Fitted to the ranks of the truth; None where the truth was always first.
        low: Lower end of its 95 % interval.
        high: Upper end; None where it is open.
        at: Share found first among N, by N: p(N) = ∫ φ(z - d) Φ(z)^(N - 1) dz.
    """

    d: float | None = None
    low: float | None = None
    high: float | None = None
    at: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Listed(Level):
    """One kind of list: ``size`` candidates, the truth among them."""

    size: int = 0
    sensitivity: Sensitivity | None = None


@dataclass(frozen=True, kw_only=True)
class ListLevel:
    """The attacker who holds a list of candidates and ranks them by how well each explains the update.

    Attributes:
        lists: By kind, in the order of `LISTS`.
        presence: Told whether the truth is on the list at all, where it is absent half of the time; null is one half.
        draws: How often each candidate was sent through the client.
        reason: Why nothing was measured; empty where something was.
    """

    lists: Mapping[str, Listed] = field(default_factory=dict)
    presence: Level | None = field(default=None, metadata=OMITTED)
    draws: int = 0
    reason: str = field(default="", metadata=OMITTED)

    @property
    def headline(self) -> Listed | None:
        """The list of any records, which is what a limit on ``list`` is about."""
        return self.lists.get("random")


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Label and list of one cell; None where the cell was measured before there were levels.

    Attributes:
        label: Labels found in the update.
        listed: Records pointed out on a list.
        owners: Pictures counted by owner: the nearest of all candidates belongs to the owner of the truth.
    """

    label: Level | None = None
    listed: ListLevel | None = field(default=None, metadata=named("list"))
    owners: Level | None = field(default=None, metadata=OMITTED)
