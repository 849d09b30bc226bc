"""Canaries: leaks that an audit must notice, planted in every run that claims power. A row whose canary died has no verdict.

**A planted leak is found.** With the whole raw update leaked (a = 1, `gradveil.audit.power`) the attackers must identify at least
`FOUND` of the records. Attackers who cannot do that in this very cell cannot tell that a defense holds.

**Who cheats is caught.** An attack that gets labels or pictures from anywhere but the update would make any defense look
broken, and a fault in the audit could hand them over. So all attackers run once more, for a few steps, on swapped updates: two
records of different labels change places, and everything else an attack is shown, its place in the list included, stays with
the seat. Who reads the update answers with the record whose update it is; who answers with that of the seat, in both seats of a
pair, and also did before the swap, has it from somewhere else. Someone who does not read the update at all does so for at most
one pair of 16: with q the chance of each answer, (q(1 - q))² ≤ 1/16 for two labels, and a constant answer never does. Pairs
beyond what that allows once in `ALARM` runs, over all attackers, take the verdict away.

**The alarm works.** A deliberate cheat, a real candidate whose labels (or nearly all of whose picture) come from the truth, goes
through the same test and must be caught, or the test says nothing.

Cost: a few steps of every attacker. Weakness: a cheat that looks up the truth by the content of the update, rather than by what
else it is shown, follows the swap and is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from scipy import stats
from torch import Tensor

from gradveil.attacks import Attack, AttackContext, launch
from gradveil.attacks.referee import recipe_key
from gradveil.audit.scene import Subject
from gradveil.metrics import assign, ranks
from gradveil.records import Observation, Reconstruction
from gradveil.study.measures import Share
from gradveil.study.results import Check

__all__ = ["CANARIES", "check_canaries", "pairs_of"]

CANARIES = ("canary_found", "canary_caught", "no_oracle")
FOUND = 0.95
ALARM = 1000
LUCK = 1 / 16
"""Most that the pairs of someone who does not read the update look like those of a cheat."""
PAIRS, FEWEST = 8, 4
"""Pairs that are swapped, and how many it takes: all four of four by luck is once in 65,000."""
FEW_STEPS = 5

Sign = Callable[[Subject, int, Reconstruction], bool]


def check_canaries(
    subject: Subject,
    attacks: Sequence[Attack],
    context: AttackContext,
    found: Sequence[Sequence[Reconstruction]],
    identified: Share,
) -> list[Check]:
    """Look whether the planted leak was found, whether anybody cheats, and whether a cheat would be caught.

    Args:
        subject: With the whole raw update leaked.
        attacks: The line-up.
        context: Of the attackers.
        found: Their candidates, by target.
        identified: What they identified.
    """
    pairs = pairs_of(subject)
    return [_planted_leak(identified), *_cheats(subject, attacks, context, found, pairs)]


def _planted_leak(identified: Share) -> Check:
    told = f"{identified.count} of {identified.n} records"
    if identified.value >= FOUND:
        return Check(name="canary_found", level="ok", sentence=f"A planted leak of the whole update was found: {told}.")
    return Check(
        name="canary_found",
        level="fail",
        sentence=f"A planted leak of the whole update was not found: the attackers identified {told}, not {FOUND:.0%}.",
        remedy="These attackers are too weak here to say that a defense holds; give them more steps, or a stronger ensemble.",
    )


def pairs_of(subject: Subject) -> list[tuple[int, int]]:
    """Return targets that can change places: of different labels, where labels tell anything."""
    told = subject.cell.tells_labels and not subject.dataset.dense
    labels = [_labels(target.batch.targets) if told else [index] for index, target in enumerate(subject.targets)]
    pairs: list[tuple[int, int]] = []
    free = list(range(len(labels)))
    while free and len(pairs) < PAIRS:
        first = free.pop(0)
        partner = next((other for other in free if labels[other] != labels[first]), None)
        if partner is not None:
            free.remove(partner)
            pairs.append((first, partner))
    return pairs


def _labels(targets: Tensor) -> list[int]:
    hard = targets.argmax(1) if targets.is_floating_point() and targets.ndim > 1 else targets
    return sorted(int(label) for label in hard.reshape(-1))


def _cheats(
    subject: Subject,
    attacks: Sequence[Attack],
    context: AttackContext,
    found: Sequence[Sequence[Reconstruction]],
    pairs: Sequence[tuple[int, int]],
) -> list[Check]:
    if len(pairs) < FEWEST:
        few = "pair of updates" if len(pairs) == 1 else "pairs of updates"
        sentence = (
            f"Whether an attack gets the truth from elsewhere cannot be told from {len(pairs)} {few} with different labels."
        )
        return [Check(name="no_oracle", level="warn", sentence=sentence, remedy=f"Audit at least {2 * FEWEST} updates.")]
    before = _by_attacker([candidate for many in found for candidate in many])
    swapped = _swapped(subject, pairs)
    after: dict[str, dict[int, Reconstruction]] = {}
    # A few steps show where an answer comes from; they are no part of the plan, so nobody is told of them.
    hasty = replace(context, budget=min(context.budget, FEW_STEPS), progress=None)
    for attack in attacks:
        after |= _by_attacker(launch(attack, swapped, hasty))
    tests = len(_signs(subject)) * max(1, len(after))
    guilty = [name for name, shown in after.items() if _cheat(subject, pairs, before.get(name, shown), shown, tests)]
    # Who answers for every target lends the cheat everything but the stolen goods.
    name = next(name for name, shown in after.items() if len(shown) == len(subject.targets))
    alarm = all(_cheat(subject, pairs, *stolen, tests) for stolen in _stolen(subject, before.get(name, after[name]), after[name]))
    return [_alarm(alarm), _oracle(guilty)]


def _alarm(works: bool) -> Check:
    if works:
        return Check(name="canary_caught", level="ok", sentence="A deliberate cheat was caught.")
    return Check(
        name="canary_caught",
        level="fail",
        sentence="A deliberate cheat was not caught, so nothing shows that these attackers do without the truth.",
        remedy="Report this: the audit's own test for cheats does not work here.",
    )


def _oracle(guilty: Sequence[str]) -> Check:
    if not guilty:
        return Check(name="no_oracle", level="ok", sentence="Shown another record's update, no attack answered with its own.")
    names = ", ".join(name.replace("_", " ") for name in guilty)
    return Check(
        name="no_oracle",
        level="fail",
        sentence=f"Shown another record's update, an attack still answered with the record of its place: {names}.",
        remedy="It has labels or pictures from somewhere else than the update; mend it, or leave it out.",
    )


def _swapped(subject: Subject, pairs: Sequence[tuple[int, int]]) -> list[Observation]:
    """Return all observations in their places, those of a pair with each other's updates."""
    swapped = [target.observation for target in subject.targets]
    for left, right in pairs:
        for seat, other in ((left, right), (right, left)):
            mine, theirs = subject.targets[seat].observation, subject.targets[other].observation
            # Labels that are granted belong to what is seen; others have no business in an observation, and stay to be noticed.
            labels = theirs.labels if subject.cell.known_labels else mine.labels
            swapped[seat] = mine.replace(updates=theirs.updates, payloads=theirs.payloads, labels=labels)
    return swapped


def _by_attacker(candidates: Sequence[Reconstruction]) -> dict[str, dict[int, Reconstruction]]:
    """Return the first candidate of every attacker for every target."""
    sorted_out: dict[str, dict[int, Reconstruction]] = {}
    for candidate in candidates:
        sorted_out.setdefault(recipe_key(candidate), {}).setdefault(candidate.target, candidate)
    return sorted_out


def _cheat(
    subject: Subject,
    pairs: Sequence[tuple[int, int]],
    before: dict[int, Reconstruction],
    after: dict[int, Reconstruction],
    tests: int,
) -> bool:
    """Whether an attacker answers with the record of the seat more often than anyone who does not read the update."""

    def knows(sign: Sign, seat: int) -> bool:
        return all(seat in shown and sign(subject, seat, shown[seat]) for shown in (before, after))

    for sign in _signs(subject):
        hits = sum(all(knows(sign, seat) for seat in pair) for pair in pairs)
        if float(stats.binom.sf(hits - 1, len(pairs), LUCK)) < 1 / (ALARM * tests):
            return True
    return False


def _signs(subject: Subject) -> list[Sign]:
    return [_own_labels, _own_pictures] if subject.cell.tells_labels and not subject.dataset.dense else [_own_pictures]


def _own_labels(subject: Subject, seat: int, candidate: Reconstruction) -> bool:
    return _labels(candidate.targets.detach().cpu()) == _labels(subject.targets[seat].batch.targets)


def _own_pictures(subject: Subject, seat: int, candidate: Reconstruction) -> bool:
    """Whether most pictures are nearest to the records of the seat."""
    inputs, truth = candidate.inputs.detach().cpu().float(), subject.targets[seat].batch.inputs
    size = len(inputs)
    positions = torch.tensor(subject.positions[seat * size : (seat + 1) * size])
    hits = ranks(inputs[assign(inputs, truth)], positions, subject.candidates, copies=subject.copies) == 1
    return int(hits.sum()) > size / 2


def _stolen(
    subject: Subject, before: dict[int, Reconstruction], after: dict[int, Reconstruction]
) -> list[tuple[dict[int, Reconstruction], dict[int, Reconstruction]]]:
    """Return one attacker's answers with labels from the truth, and with pictures that are the truth for the most part."""

    def labels(seat: int, candidate: Reconstruction) -> Reconstruction:
        return candidate.replace(targets=subject.targets[seat].batch.targets.to(candidate.inputs.device))

    def pictures(seat: int, candidate: Reconstruction) -> Reconstruction:
        return candidate.replace(inputs=0.1 * candidate.inputs + 0.9 * subject.targets[seat].batch.inputs.to(candidate.inputs))

    thefts = [labels, pictures] if len(_signs(subject)) > 1 else [pictures]
    return [tuple({s: steal(s, c) for s, c in shown.items()} for shown in (before, after)) for steal in thefts]  # type: ignore[misc]
