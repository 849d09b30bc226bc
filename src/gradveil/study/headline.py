"""The headline of a cell: the largest count that any of its attackers reached by what its own referee chose.

Everybody who could attack counts: the choice among all candidates, that of who ignores the defense, that of who knows it, and
every recipe in one stance alone, because whoever commits to one recipe needs no truth. Nobody picks per record by truth. The
largest of K counts is large by chance alone, so the lower end of its interval is that of a K-th of the error (Bonferroni), while
its upper end is the largest upper end of all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gradveil.significance import CONFIDENCE, effective_number
from gradveil.study.measures import Share

if TYPE_CHECKING:
    from gradveil.study.results import CellResult, Record

__all__ = [
    "ALL",
    "IGNORES",
    "INFORMED",
    "PLAIN",
    "Contender",
    "choices",
    "clusters_of",
    "contenders",
    "headline_share",
    "largest",
    "told",
    "with_clusters",
]

ALL, PLAIN, INFORMED = "the choice among all", "the choice of plain attackers", "the choice of informed attackers"
IGNORES = "plain"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One attacker with what it identified; ``alone`` where it is one recipe that nobody had to choose."""

    name: str
    share: Share
    alone: bool = False


def contenders(cell: CellResult) -> tuple[Contender, ...]:
    """Return everybody whose count may be the headline, each once: a choice among one recipe is that recipe."""
    alone = [(each, each.summary.identified) for each in cell.attackers if each.summary is not None]
    summaries = {ALL: cell.selected, PLAIN: cell.plain, INFORMED: cell.informed}
    asked = choices([each.stance for each, _ in alone])
    found = [
        Contender(name=name, share=each.identified) for name, each in summaries.items() if each is not None and name in asked
    ]
    found += [Contender(name=told(each.recipe, each.stance), share=share, alone=True) for each, share in alone]
    return tuple(replace(each, share=cell.told(each.share)) for each in found)


def choices(stances: Sequence[str]) -> tuple[str, ...]:
    """Return which choices are attackers of their own, given the stances of all recipes; among one recipe there is none."""
    plain = sum(stance == IGNORES for stance in stances)
    own = {
        ALL: len(stances) != 1,
        PLAIN: not stances or 1 < plain < len(stances),
        INFORMED: not stances or 1 < len(stances) - plain < len(stances),
    }
    return tuple(name for name, counts in own.items() if counts)


def told(recipe: str, stance: str) -> str:
    """Return an attacker's name in words."""
    return f"{recipe.replace('_', ' ')} ({stance.replace('_', ' ')})"


def largest(found: Sequence[Contender]) -> Contender:
    """Return the attacker with the largest count; of equal ones the first, which is a choice."""
    return max(found, key=lambda each: (each.share.value, each.share.low))


def headline_share(shares: Sequence[Share]) -> Share:
    """Return the largest of several shares, its lower end corrected for the choice, its upper end the largest of all."""
    top = max(shares, key=lambda share: (share.value, share.low))
    sure = Share.of(top.count, top.n, confidence=1 - (1 - CONFIDENCE) / len(shares), effective=top.effective) if top.n else top
    return Share(
        value=top.value,
        low=min(top.low, sure.low),
        high=max(share.high for share in shares),
        count=top.count,
        n=top.n,
        effective=top.effective,
    )


def clusters_of(records: Sequence[Record], size: int) -> list[list[Hashable]]:
    """Return how records belong together: by update, where one holds several, and by owner, where one has several."""
    updates: list[Hashable] = [place // max(1, size) for place in range(len(records))]
    owners: list[Hashable] = [record.owner or f"record {place}" for place, record in enumerate(records)]
    return [names for names in (updates, owners) if len(set(names)) < len(names)]


def with_clusters(share: Share, records: Sequence[Record], clusters: Sequence[Sequence[Hashable]]) -> Share:
    """Return a share of an older cell, whose interval took records for independent, with an interval by clusters.

    Which records were hit is kept for the choice alone; other shares are taken to be as far from independent.
    """
    if share.effective is not None or not clusters or share.n != len(records):
        return share
    hits = [float(record.identified) for record in records]
    fewest = float(min(len(set(names)) for names in clusters))
    worth = effective_number(hits, *clusters)
    if share.count in (0, share.n) or (share.count != sum(hits) and sum(hits) in (0, share.n)):
        worth = fewest
    return Share.of(share.count, share.n, effective=worth)
