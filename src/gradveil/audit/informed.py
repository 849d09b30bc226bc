"""Did anybody who knows the defense attack, and did those searches go anywhere?

A defense's own attacker may refine nothing that decides a search; then what is called informed is the plain search under another
name, and finding nothing says nothing about the defense.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.attacks.adaptive import AUTHORLESS
from gradveil.audit.gap import Explained
from gradveil.audit.scene import Subject, Target
from gradveil.defenses import parts_of
from gradveil.records import AdversaryModel, Knowledge, Observation, Reconstruction
from gradveil.study.results import Check

__all__ = ["INFORMED_STANCES", "check_informed_moved", "check_informed_ran", "informed_by", "nowhere_to_go"]

INFORMED_STANCES = ("informed", *AUTHORLESS)
LOOKED_AT = 2
"""Targets that the defense changed at whose truths comparisons are compared."""
SAME = 1e-6
"""Share of the update; two comparisons that differ less differ by rounding."""
AS_TOLD = 2.0
"""Factor by which residuals at the truth may be larger or smaller than the noise that is told; few entries scatter."""
MOVED = 0.999
"""Of the first loss: what did not fall below this did not move."""

Candidates = Sequence[Sequence[Reconstruction]]


def informed_by(subject: Subject, candidates: Candidates) -> str:
    """Return who used knowledge of the defense: ``own`` its own attacker, ``generic`` only attackers without author, ``none``.

    Empty where there was nothing to know: no defense, or one that changes no more than the scale of what is sent.
    """
    if not _something_to_know(subject):
        return ""
    stances = {candidate.stance for many in candidates for candidate in many}
    if "informed" in stances and _searches_otherwise(subject):
        return "own"
    return "generic" if stances & set(AUTHORLESS) else "none"


def check_informed_ran(subject: Subject, candidates: Candidates) -> Check:
    """Say whether the defense's own attacker attacked in a way of its own."""
    name = "informed_ran"
    if Knowledge.DEFENSE not in subject.targets[0].observation.threat.knows:
        return Check(name=name, level="ok", sentence="The attackers were not told the defense.")
    who = informed_by(subject, candidates)
    if who == "":
        return Check(name=name, level="ok", sentence="There is nothing about the defense that a plain search would have to know.")
    if who == "own":
        return Check(name=name, level="ok", sentence="The defense's own attacker attacked in a way of its own.")
    stances = {candidate.stance for many in candidates for candidate in many} & set(AUTHORLESS)
    others = " and ".join(stance.replace("_", " ") for stance in AUTHORLESS if stance in stances)
    more = f"only generic attackers ({others}) took account of it" if others else "and no generic attacker could use it"
    why = "the defense's own attacker searches as if there were no defense, or cannot tell the truth from a grey picture"
    remedy = "Let its adversary() replay the defense or compare what survives it; `gradveil check` says whether it does."
    if _searches_otherwise(subject, ran=False):
        why, remedy = "no attack of this ensemble takes the stance of who knows it", "Name an ensemble that does, such as quick."
    return Check(name=name, level="warn", sentence=f"Informed: none ran, because {why}; {more}.", remedy=remedy)


def check_informed_moved(subject: Subject, candidates: Candidates, explained: Sequence[Explained] = ()) -> Check:
    """Say for how many searches of those who know the defense the objective fell.

    Under strong noise it is nearly all noise and cannot fall, not even at the truth. Where no truth explains its update better
    than what was chosen (`gradveil.audit.gap`), there was nowhere to go, and standing still says nothing against the search.
    """
    name = "informed_moved"
    own = [c for many in candidates for c in many if c.stance in INFORMED_STANCES and c.steps > 0]
    if not own:
        return Check(name=name, level="ok", sentence="No attacker who knows the defense had to search.")
    moved = sum(c.best_loss < MOVED * c.first_loss for c in own)
    if moved == 0 and nowhere_to_go(explained):
        return Check(
            name=name,
            level="ok",
            sentence=f"The objective never fell in any of the {len(own)} searches of attackers who know the defense, and the "
            "truth would not have made it fall either.",
        )
    if moved == 0:
        return Check(
            name=name,
            level="warn",
            sentence=f"The objective never fell in any of the {len(own)} searches of attackers who know the defense.",
            remedy="This run cannot tell what they would find; look at the attackers table.",
        )
    return Check(
        name=name,
        level="ok",
        sentence=f"The objective fell in {moved} of the {len(own)} searches of attackers who know the defense.",
    )


def nowhere_to_go(explained: Sequence[Explained]) -> bool:
    """Whether no truth explains its update better than what was chosen."""
    return bool(explained) and not any(row.search_failed for row in explained)


def _something_to_know(subject: Subject) -> bool:
    """Whether the defense changes more than the scale of what is sent, or the data, in any update and round that was seen."""
    if all(not part.stations() for part in parts_of(subject.defense)):
        return False
    return any(not _arrives(target) for target in subject.targets)


def _arrives(target: Target) -> bool:
    trained, raw = target.trained_inputs, target.batch.inputs.to(target.trained_inputs)
    if not torch.equal(trained, raw):
        return False
    for index in range(len(target.observation.updates)):
        evidence, simulated = _compared(OpenAdversary(), target.observation, raw, target, index)
        size = evidence.norm() * simulated.norm()
        # An update that is turned round is as far away as can be, and no scale leads back.
        if size > 0 and float(1 - evidence @ simulated / size) >= SAME / 2:
            return False
    return True


def _searches_otherwise(subject: Subject, *, ran: bool = True) -> bool:
    """Whether the defense's own attacker has unknowns, a law of noise, a finish, or a comparison that is not the plain one.

    Args:
        subject: The cell.
        ran: Whether there are candidates of that attacker; else nothing tells whether a finish of its own would change anything.
    """
    # An attacker who knows when nothing was done compares plainly there.
    for target in itertools.islice((each for each in subject.targets if not _arrives(each)), LOOKED_AT):
        seen = target.observation
        told = seen.adversary.arrives(seen)
        if told.noise_std is None and ran and told.plain_search:
            return True  # there are informed candidates, so that its finish has changed something
        if seen.adversary.variables(seen, torch.Generator().manual_seed(0)):
            return True
        if told.noise_std is not None and _leaves(target, told.noise_std):
            return True  # a likelihood
        for index in range(len(seen.updates)):
            guesses = (target.replayed_inputs, torch.full_like(target.replayed_inputs, 0.5))
            both = [_compared(seen.adversary, seen, inputs, target, index) for inputs in guesses]
            truth, grey = (float((a - b).norm()) for a, b in both)
            if truth == grey:
                continue  # it says of the truth what it says of a grey picture, so no search can go by it
            for inputs, own in zip(guesses, both, strict=True):
                plain = _compared(OpenAdversary(), seen, inputs, target, index)
                if own[0].shape != plain[0].shape:
                    return True
                apart = sum(float((a - b).norm()) for a, b in zip(own, plain, strict=True))
                if apart > SAME * sum(float(each.norm()) for each in plain):
                    return True
    return False


def _leaves(target: Target, noise: float) -> bool:
    """Whether the truth leaves residuals of about that deviation in a round: a likelihood under invented noise finds nobody."""
    seen = target.observation
    for index in range(len(seen.updates)):
        observed, simulated = _compared(seen.adversary, seen, target.replayed_inputs, target, index)
        left = float((observed - simulated).square().mean().sqrt())
        if noise / AS_TOLD <= left <= AS_TOLD * noise:
            return True
    return False


def _compared(adversary: AdversaryModel, seen: Observation, inputs: Tensor, target: Target, index: int) -> tuple[Tensor, Tensor]:
    """Return both sides of one round's comparison as vectors in double precision: what was seen, what inputs would give."""
    targets, learner = target.batch.targets.to(inputs.device), seen.learners[index]
    both = adversary.compare(adversary.evidence(seen, index), adversary.replay(learner, inputs.detach(), targets, {}), {})
    observed, simulated = (
        torch.cat([side[n].detach().double().reshape(-1) for n in both.simulated]) for side in (both.observed, both.simulated)
    )
    return observed, simulated
