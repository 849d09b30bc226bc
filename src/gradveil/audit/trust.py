"""Reasons not to trust a number, looked for in every cell. A failed check takes the verdict away; a warning stands beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from scipy import stats
from torch import nn

from gradveil.attacks.referee import Referee, Verdict
from gradveil.audit.candidate_checks import check_duplicates, check_enough_candidates
from gradveil.audit.gap import Explained
from gradveil.audit.informed import check_informed_moved, check_informed_ran, nowhere_to_go
from gradveil.audit.judge import Scored
from gradveil.audit.scene import Subject
from gradveil.learning.dropout import HandedDropout, dropout_layers
from gradveil.metrics import bootstrap_median, median, wilson
from gradveil.models.batch_norm import batch_norm_mode
from gradveil.randomness import Seed
from gradveil.records import Reconstruction
from gradveil.significance import mcnemar
from gradveil.study.headline import told
from gradveil.study.measures import Summary
from gradveil.study.proved import Certificate
from gradveil.study.results import Attacker, CellResult, Check

__all__ = ["LARGE_REGRET_DB", "run_checks"]

Level = Literal["ok", "warn", "fail"]
FEW_RECORDS = 16
LARGE_REGRET_DB = 3.0
FAR_ABOVE_DB = 6.0
"""A quarter of the squared error: beyond what a null could reach, whatever the pictures."""
RARE = 0.05
"""Hits that luck alone has more often than this are no evidence: of 32 records among 100 it hits one or more in 28 %."""
SURE = 0.999
"""Of the interval that must lie beyond a certificate: every cell looks at several bounds, and chance must not break one."""


@dataclass(frozen=True)
class Evidence:
    """What the checks look at."""

    subject: Subject
    candidates: Sequence[Sequence[Reconstruction]]
    chosen: Sequence[Reconstruction]
    verdicts: Sequence[Verdict]
    referee: Referee
    selected: Scored
    best: Scored
    nulls: dict[str, Scored]
    certificate: Certificate = field(default_factory=Certificate)
    attackers: Sequence[Attacker] = ()
    explained: Sequence[Explained] = ()
    plain: Scored | None = None
    alone: Mapping[str, Scored] = field(default_factory=dict)

    @property
    def cell(self) -> CellResult:
        """What all attackers reached, as the results hold it."""
        plain = None if self.plain is None else Summary(identified=self.plain.share)
        return CellResult(selected=Summary(identified=self.selected.share), plain=plain, attackers=tuple(self.attackers))


def run_checks(evidence: Evidence) -> list[Check]:
    """Run every check."""
    looks = (
        _loss_fell,
        _gradient_alive,
        _finite,
        _truth_is_minimum,
        _same_mode,
        _oracle_labels,
        _better_than_null,
        _enough_records,
        lambda each: check_enough_candidates(each.subject),
        lambda each: check_duplicates(each.subject),
        _picture_without_identity,
        _regret,
        _nobody_ahead,
        _informed,
        lambda each: check_informed_ran(each.subject, each.candidates),
        _informed_moved,
        _dropout,
        _within_certificate,
    )
    return [look(evidence) for look in looks]


def _check(name: str, level: Level, sentence: str, remedy: str = "") -> Check:
    return Check(name=name, level=level, sentence=sentence, remedy=remedy)


def _loss_fell(evidence: Evidence) -> Check:
    optimised = [c for many in evidence.candidates for c in many if c.steps > 0]
    stuck = [c for c in optimised if not c.best_loss < 0.999 * c.first_loss]
    recipes = sorted({f"{c.recipe}/{c.stance}" for c in stuck})
    if optimised and len(stuck) == len(optimised):
        if nowhere_to_go(evidence.explained):
            return _check(
                "matching_loss_fell", "ok", "No attack's objective fell, and the truth would not have made it fall either."
            )
        return _check(
            "matching_loss_fell",
            "fail",
            "No attack's objective ever fell, so the attacks did not work as attacks.",
            "Look for detached gradients in the model.",
        )
    if len(stuck) > len(optimised) / 4:
        return _check(
            "matching_loss_fell",
            "warn",
            f"The objective never fell for {len(stuck)} of {len(optimised)} candidates ({', '.join(recipes)}).",
            "Those attackers count as tried, not as failed; the others carry the verdict.",
        )
    return _check("matching_loss_fell", "ok", "The attacks' objectives fell.")


def _gradient_alive(evidence: Evidence) -> Check:
    optimised = [c for many in evidence.candidates for c in many if c.steps > 0]
    dead = [c for c in optimised if not (math.isfinite(c.gradient_norm) and c.gradient_norm > 0)]
    if optimised and len(dead) == len(optimised):
        return _check(
            "gradient_alive",
            "fail",
            "The matching loss has no gradient with respect to the inputs: the update is constant or detached.",
            "Check that the model is differentiable twice and that its weights are not saturated.",
        )
    if dead:
        return _check(
            "gradient_alive",
            "warn",
            f"{len(dead)} of {len(optimised)} candidates started without a gradient.",
            "See the attackers table.",
        )
    return _check("gradient_alive", "ok", "The matching loss has a gradient.")


def _finite(evidence: Evidence) -> Check:
    broken = [c for many in evidence.candidates for c in many if c.status == "not finite"]
    total = sum(len(many) for many in evidence.candidates)
    if broken:
        level: Level = "fail" if len(broken) == total else "warn"
        return _check(
            "finite",
            level,
            f"{len(broken)} of {total} candidates met values that are not finite.",
            "Their last good iterate was kept.",
        )
    return _check("finite", "ok", "All candidates stayed finite.")


def _truth_is_minimum(evidence: Evidence) -> Check:
    """At the truth (the batch that is replayed), the referee's score should not be above that of what was found."""
    highest = evidence.referee.truth_score
    worse = sum(row.truth > max(row.found, highest) * 1.05 + 1e-9 for row in evidence.explained)
    n = len(evidence.explained)
    if worse > n / 2:
        return _check(
            "truth_is_minimum",
            "warn",
            f"For {worse} of {n} targets the truth scores worse than what was found: matching better could not have won.",
            "Read this row as a lower bound on the leak: the defense's attacker or its noise leaves the truth undetermined.",
        )
    return _check("truth_is_minimum", "ok", "The truth is among the best explanations of what was seen.")


def _same_mode(evidence: Evidence) -> Check:
    """Compare what the client trained with against what the attackers replayed."""
    victim, replayed = evidence.subject.learner, evidence.subject.targets[0].observation.learner
    modes = batch_norm_mode(victim.model), batch_norm_mode(replayed.model)
    if victim.loss is not replayed.loss or modes[0] != modes[1]:
        return _check(
            "same_mode",
            "fail",
            "Victim and attacker differ in their loss or BatchNorm mode, so the attacker matched another function.",
            "Give both the same learner.",
        )
    if modes[0] == "none":
        return _check("same_mode", "ok", "Victim and attacker use the same loss; the model has no BatchNorm.")
    return _check("same_mode", "ok", f"Victim and attacker use the same loss and BatchNorm in {modes[0]} mode.")


def _oracle_labels(evidence: Evidence) -> Check:
    if not evidence.subject.cell.tells_labels:
        return _check("oracle_labels", "ok", "Labels play no part: an embedding does not depend on them.")
    if any(c.oracle_labels for many in evidence.candidates for c in many):
        if evidence.subject.dataset.dense:
            masks = "No attack here recovers masks, so an attacker without them may get less than this."
            return _check("oracle_labels", "warn", "The attacker was given the true masks.", masks)
        return _check(
            "oracle_labels",
            "warn",
            "The attacker was given the true labels.",
            "Set known_labels = false to see what an attacker without them gets.",
        )
    return _check("oracle_labels", "ok", "Labels were recovered from the update, not given.")


def _better_than_null(evidence: Evidence) -> Check:
    found = evidence.selected.values["psnr"]
    bars = [null.values["psnr"] for null in evidence.nulls.values()]
    assert isinstance(found, torch.Tensor)
    clearer = median(found) > max(median(b) for b in bars if isinstance(b, torch.Tensor))
    found_most = evidence.cell.identified
    hits, n = found_most.count, found_most.n
    luck = max(float((null.rank == 1).double().mean()) for null in evidence.nulls.values())
    luck = max(luck, 1 / evidence.subject.distinct)  # somebody is nearest to any picture
    nearer = _at_least(hits, n, luck) <= RARE
    if clearer and nearer:
        return _check("better_than_null", "ok", "The selected reconstructions beat every null baseline.")
    if clearer or nearer:
        by, not_by = ("PSNR", "the share identified") if clearer else ("the share identified", "PSNR")
        return _check(
            "better_than_null", "ok", f"The selected reconstructions beat every null baseline by {by}, and not by {not_by}."
        )
    return _check(
        "better_than_null",
        "warn",
        f"The selected reconstructions are no better than guessing without the update ({hits} of {n} identified).",
        "This says these attackers failed, not that none can succeed.",
    )


def _at_least(count: int, n: int, share: float) -> float:
    """Return how likely ``count`` or more of ``n`` are hit where each is hit with the probability ``share``."""
    return float(stats.binom.sf(count - 1, n, share))


def _enough_records(evidence: Evidence) -> Check:
    n = len(evidence.subject.positions)
    if n < FEW_RECORDS:
        return _check(
            "enough_records",
            "warn",
            f"Only {n} record{'s were' if n > 1 else ' was'} attacked; the interval is wide.",
            f"Attack at least {FEW_RECORDS} records.",
        )
    return _check("enough_records", "ok", f"{n} records were attacked.")


def _picture_without_identity(evidence: Evidence) -> Check:
    """Pictures far nearer to their records than any null, of which nobody can tell whose they are, contradict themselves."""
    found = evidence.selected.values["psnr"]
    bars = [null.values["psnr"] for null in evidence.nulls.values()]
    assert isinstance(found, torch.Tensor)
    bar = max(median(each) for each in bars if isinstance(each, torch.Tensor))
    low, _ = bootstrap_median(found, Seed(evidence.subject.cell.seed).child("contradiction"))
    luck = max(sum(null.hits) for null in evidence.nulls.values())
    hits = evidence.cell.identified.count
    if low >= bar + FAR_ABOVE_DB and hits <= luck:
        return _check(
            "picture_without_identity",
            "fail",
            f"Pictures come {low - bar:.0f} dB nearer than the best null, and yet only {hits} records were identified: both "
            "cannot be true.",
            "Look for candidates that hardly differ from one another; among such, being the nearest tells nothing.",
        )
    return _check("picture_without_identity", "ok", "Pictures and identities tell the same story.")


def _regret(evidence: Evidence) -> Check:
    chosen, best = evidence.selected.values["psnr"], evidence.best.values["psnr"]
    assert isinstance(chosen, torch.Tensor) and isinstance(best, torch.Tensor)
    regret = median((best - chosen).clamp_min(0))
    if regret > LARGE_REGRET_DB:
        return _check(
            "regret",
            "warn",
            f"A better candidate existed: choosing by truth would gain {regret:.1f} dB in the median.",
            "The attacker could not tell; treat the best-by-truth row as what luck or a better prior may reach.",
        )
    return _check("regret", "ok", "The attacker's choice is close to the best candidate.")


def _nobody_ahead(evidence: Evidence) -> Check:
    """Compare the choice among all candidates with the attacker whose count is the headline."""
    top, count = evidence.cell.strongest, sum(evidence.selected.hits)
    ahead = evidence.alone.get(top.name)
    tried = max(1, len(evidence.attackers))
    fewest = min(evidence.selected.clusters, key=lambda names: len(set(names)), default=None)
    if ahead is not None and mcnemar(ahead.hits, evidence.selected.hits, fewest) < RARE / tried and top.share.count > count:
        return _check(
            "nobody_ahead",
            "warn",
            f"One attacker alone, {top.name}, identified {top.share.count} of {top.share.n} records; the choice "
            f"among all candidates identified {count}.",
            "The headline and limits count that attacker; decibels, pictures, single records and the column of informed "
            "attackers are those of the choice.",
        )
    return _check("nobody_ahead", "ok", "No single attacker identified clearly more than the choice among all candidates.")


def _informed(evidence: Evidence) -> Check:
    observation = evidence.subject.targets[0].observation
    if observation.adversary.arrives(observation).incomplete:
        return _check(
            "informed_complete",
            "warn",
            "Informed incomplete: the defense's own adversary model knows only part of what was done.",
            "The generic attackers (straight-through, averaging, zero mask) cover the rest as well as they can.",
        )
    return _check("informed_complete", "ok", "The informed attacker knows the whole defense.")


def _informed_moved(evidence: Evidence) -> Check:
    return check_informed_moved(evidence.subject, evidence.candidates, evidence.explained)


def _dropout(evidence: Evidence) -> Check:
    model = evidence.subject.learner.model
    on = sum(isinstance(layer, HandedDropout) for layer in model.modules())
    off = len(dropout_layers(model)) + sum(isinstance(m, nn.MultiheadAttention) and m.dropout > 0 for m in model.modules())
    if on:
        inside = " Dropout inside attention layers is off." if off else ""
        return _check(
            "dropout",
            "warn",
            f"Updates were computed with {on} dropout layers on; attackers replay the network with dropout off.{inside}",
            "Read this row as a lower bound: an attacker who fits the masks together with the records was not tried.",
        )
    if off:
        return _check(
            "dropout",
            "warn",
            f"The model has {off} dropout layers; updates were computed with dropout off.",
            "Clients who train with dropout on leak less: set dropout = true to see how much.",
        )
    return _check("dropout", "ok", "The model has no dropout.")


def _within_certificate(evidence: Evidence) -> Check:
    """Compare what attackers reached with what is proved that none can: a proof that is beaten rests on something untrue."""
    found = evidence.certificate
    if found.identified is None:
        return _check("within_certificate", "ok", "There is no certificate that an attack could contradict.")
    psnr = evidence.selected.values["psnr"]
    assert isinstance(psnr, torch.Tensor)
    total = len(psnr)
    alone = [
        (f"{told(row.recipe, row.stance)} alone identified", row.summary.identified)
        for row in evidence.attackers
        if row.summary is not None
    ]
    if found.matching is not None:
        alone.insert(0, ("an attacker with the list of candidates identified", found.matching))
    reached = [
        ("the attackers identified", int((evidence.selected.rank == 1).sum()), total, found.identified),
        *((who, share.count, share.n, found.identified) for who, share in alone),
        *(
            (f"the attackers rebuilt at {level} dB or better", int((psnr >= float(level)).sum()), total, bound)
            for level, bound in found.psnr.items()
        ),
    ]
    # Each attacker is one more chance to be beyond by chance.
    sure = 1 - (1 - SURE) / (1 + len(evidence.attackers))
    beyond = [
        f"{who} {count} of {n} records, at least {wilson(count, n, sure)[0]:.1%}, and no more than {bound:.1%} were possible"
        for who, count, n, bound in reached
        if wilson(count, n, sure)[0] > bound
    ]
    if beyond:
        return _check(
            "within_certificate",
            "fail",
            f"Certificate violated, do not trust it: {'; '.join(beyond)} ({SURE:.1%} interval, over all attackers).",
            "Either an assumption of the certificate does not hold here, or the defense does not do what it says; report it.",
        )
    return _check("within_certificate", "ok", "No attack got beyond what the certificate allows.")
