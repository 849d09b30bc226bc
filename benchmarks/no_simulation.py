"""Ensembles for defenses that are dear to run: the quick ones less the attackers that run the defense on every candidate.

Importing this module adds them. Refiner and guided noise would otherwise cost minutes to hours a record on a processor, so tables
made with them are plain against informed, and say so.
"""

from __future__ import annotations

from gradveil.attacks.ensembles import EMBEDDING_QUICK, ENSEMBLES, QUICK, Ensemble, Member

__all__ = ["SHORT", "SHORT_EMBEDDING"]

SHORT, SHORT_EMBEDDING = "quick-no-simulation-1", "embedding-quick-no-simulation-1"
SIMULATING = ("straight_through", "averaged")

for _name, _whole in ((SHORT, QUICK), (SHORT_EMBEDDING, EMBEDDING_QUICK)):
    ENSEMBLES[_name] = Ensemble(
        _name,
        f"{_whole.name} without the attackers that run the defense's own code on their candidates.",
        tuple(Member(each.attack, tuple(s for s in each.stances if s not in SIMULATING)) for each in _whole.members),
        rehearsals=_whole.rehearsals,
    )
