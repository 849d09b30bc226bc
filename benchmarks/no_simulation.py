"""An ensemble for defenses that are dear to run: `quick-1` less the attackers that run the defense on every candidate.

Importing this module adds it. Refiner and guided noise would otherwise cost minutes to hours a record on a processor, so tables
made with it are plain against informed, and say so.
"""

from __future__ import annotations

from gradveil.attacks.ensembles import ENSEMBLES, QUICK, Ensemble, Member

__all__ = ["SHORT"]

SHORT = "quick-no-simulation-1"
SIMULATING = ("straight_through", "averaged")

ENSEMBLES[SHORT] = Ensemble(
    SHORT,
    "quick-1 without the attackers that run the defense's own code on their candidates.",
    tuple(Member(each.attack, tuple(s for s in each.stances if s not in SIMULATING)) for each in QUICK.members),
    rehearsals=QUICK.rehearsals,
)
