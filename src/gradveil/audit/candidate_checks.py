"""Among whom was a record told apart, do lists say at least what pictures do, and did everybody attack who is named?"""

from __future__ import annotations

from gradveil.attacks import Ensemble
from gradveil.attacks.base import AttackContext
from gradveil.audit.scene import Subject
from gradveil.records import Observation
from gradveil.study.measures import Share
from gradveil.study.results import CellResult, Check

__all__ = ["check_duplicates", "check_enough_candidates", "check_lists", "check_present"]

FEW_CANDIDATES = 100


def check_enough_candidates(subject: Subject) -> Check:
    """Say among how many candidates records were identified, copies counted as one."""
    name, count = "enough_candidates", subject.distinct
    if count == 1:
        said = "All candidates are copies of one record, so nobody can be told apart."
        return Check(name=name, level="fail", sentence=said, remedy="Bring other records of the same kind.")
    if count < FEW_CANDIDATES:
        said = f"Records were identified among {count} candidates only, so identifying one is easier than it sounds."
        return Check(name=name, level="warn", sentence=said, remedy=f"Bring at least {FEW_CANDIDATES} records of the same kind.")
    return Check(name=name, level="ok", sentence=f"Records were identified among {count} candidates.")


def check_duplicates(subject: Subject) -> Check:
    """Say how many candidates are copies."""
    total, distinct = len(subject.candidates), subject.distinct
    if distinct == total:
        return Check(name="duplicates", level="ok", sentence="No candidate is a copy of another.")
    return Check(
        name="duplicates",
        level="warn",
        sentence=f"Of {total} candidates {total - distinct} are copies of others, exactly or nearly; copies count as one record.",
        remedy="Take copies out of the data; a training that sees a record twice reveals more of it.",
    )


def check_lists(cell: CellResult) -> Check:
    """Say whether lists name clearly fewer than pictures identify: who rebuilt a picture can look it up."""
    name = "lists_reach_pictures"
    headline = cell.levels.listed.headline if cell.levels is not None and cell.levels.listed is not None else None
    if headline is None or cell.levels is None:
        return Check(name=name, level="ok", sentence="No list was tested.")
    owners = cell.levels.owners.share if cell.levels.owners is not None else None
    pairs: tuple[tuple[str, Share, Share | None], ...] = (("records", cell.identified, headline.share),)
    if owners is not None:
        pairs = (*pairs, ("owners", owners, headline.owners))
    below = [
        f"{picture.count} of {picture.n} {unit} were identified by pictures, {listed.count} of {listed.n} pointed out on lists"
        for unit, picture, listed in pairs
        if listed is not None and listed.high < picture.low
    ]
    if not below:
        return Check(name=name, level="ok", sentence="Lists point out no fewer than pictures identify, within noise.")
    return Check(
        name=name,
        level="warn",
        sentence=f"Lists say too little: {'; '.join(below)}.",
        remedy="Who has a picture can look it up, so read the share on lists as a lower bound.",
    )


def check_present(ensemble: Ensemble, observation: Observation, context: AttackContext) -> Check:
    """Say who of the ensemble could attack such updates and did not: its name promises all of them."""
    name, there = "attackers_present", [member.attack for member in ensemble.members]
    there = [attack for attack in there if attack.applies(observation) is None]
    missing = {attack.card.name: why for attack in there if (why := attack.lacks(observation, context)) is not None}
    if not missing:
        return Check(name=name, level="ok", sentence="Everybody of the ensemble who can attack such updates did.")
    told = "; ".join(f"{who}: {why}" for who, why in missing.items())
    return Check(
        name=name,
        level="warn",
        sentence=f"Of {ensemble.name} did not run {told}.",
        remedy="Read the row as that of the others alone.",
    )
