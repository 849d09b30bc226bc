"""How ranks on lists become a level: the largest of several attackers, beside the largest of as many guesses."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from scipy import stats

from gradveil.audit.sensitivity import fit_sensitivity
from gradveil.metrics import share_of
from gradveil.significance import effective_number
from gradveil.study.levels import Listed, Reach
from gradveil.study.measures import Bar, Share

__all__ = ["Try", "best_guess", "clustered", "counted", "of_the_strongest"]


@dataclass(frozen=True)
class Try:
    """What one attacker made of lists of a kind: ranks of the truth, sizes of lists, and what it named of its own releases."""

    attacker: str
    informed: bool
    ranks: Sequence[int]
    sizes: Sequence[int]
    rehearsed: float | None
    clusters: tuple[Sequence[Hashable], ...] = ()
    """How records belong together: by update, by owner."""

    @property
    def share(self) -> Share:
        """How many records it ranked first."""
        return clustered([rank == 1 for rank in self.ranks], *self.clusters)


def clustered(hits: Sequence[bool], *clusters: Sequence[Hashable]) -> Share:
    """Return the share of hits, its interval as wide as records that share an update or an owner are worth."""
    return share_of(sum(hits), len(hits), effective_number([float(hit) for hit in hits], *clusters))


def counted(tries: Sequence[Try]) -> Listed:
    """Count the records that attackers ranked first."""
    reached = tuple(
        Reach(
            attacker=each.attacker,
            share=each.share,
            informed=each.informed,
            rehearsed=each.rehearsed,
        )
        for each in tries
    )
    top, best = of_the_strongest([each.share for each in reached])
    ranks, sizes = tries[best].ranks, tries[best].sizes
    chance = sum(1 / size for size in sizes) / len(sizes)
    return Listed(
        share=top,
        attacker=reached[best].attacker,
        null=best_guess("guess", chance, top.n, len(reached)),
        reached=reached,
        size=round(sum(sizes) / len(sizes)),
        sensitivity=fit_sensitivity(ranks, sizes, worth=top.effective),
    )


def of_the_strongest(reached: Sequence[Share]) -> tuple[Share, int]:
    """Return the largest share of several attackers and whose it is.

    The lower end allows for having chosen among them (Bonferroni); the upper end is the largest of all. Some look at few updates,
    and 2 of 2 are no more than 63 of 64; so the largest is the one whose lower end is the highest.
    """
    sure = [Share.of(each.count, each.n, confidence=1 - 0.05 / len(reached), effective=each.effective) for each in reached]
    best = max(range(len(reached)), key=lambda place: (sure[place].low, sure[place].n, sure[place].value))
    return replace(sure[best], high=max(each.high for each in reached)), best


def best_guess(name: str, chance: float, n: int, attackers: int) -> Bar:
    """Return what the largest of as many guesses as there were attackers reaches: in the mean, and 19 times of 20 at most."""
    law = stats.binom(n, chance)
    none_above = [float(law.cdf(count)) ** attackers for count in range(n + 1)]
    mean = sum(1 - each for each in none_above) / n
    high = next(count for count, each in enumerate(none_above) if each >= 0.95)
    return Bar(null=name, value=mean, high=high / n)
